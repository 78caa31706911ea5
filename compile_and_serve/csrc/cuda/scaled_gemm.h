// The C entry of scaled_gemm.cu: plain pointers and integers, so that neither torch's headers nor its ABI enter the build.
#pragma once

#include <cstdint>

extern "C" {

// out[m, n] = a_scale · b_scale · Σ_k a[m, k] b[n, k] + residual[m, n]; a and b in float8 e4m3, k contiguous; out and residual (or null)
// in bfloat16, n contiguous.
// Scales are float32: one number, or one a row of a (a_per_row) and one a row of b (b_per_row); in a configuration by blocks of 128,
// a_scale is [m, ceil(k / 128)] and b_scale [ceil(n / 128), ceil(k / 128)], contiguous.
struct CasScaledGemm {
    void* out;
    const void* a;
    const void* b;
    const float* a_scale;
    const float* b_scale;
    const void* residual;
    int64_t m, n, k;
    int64_t out_stride, a_stride, b_stride, residual_stride;  // elements from one row to the next
    int32_t a_per_row, b_per_row;
    void* workspace;  // cas_scaled_gemm_workspace's number of bytes, or null where that is 0
    void* stream;
};

}  // extern "C"

// The C interface of scaled_gemm.cu and block_gemm.cu: plain pointers and integers, so that the build needs neither torch's headers nor its
// ABI.
#pragma once

#include <cstdint>

extern "C" {

// out[m, n] = a_scale · b_scale · Σ_k a[m, k] b[n, k] + residual[m, n]; a and b are float8 e4m3, k contiguous; out and residual (may
// be null) are bfloat16, n contiguous.
// Scales are float32: one number, or one per row of a (a_per_row) and one per row of b (b_per_row). In a configuration with blocks of
// 128, a_scale is [m, ceil(k / 128)] and b_scale is [ceil(n / 128), ceil(k / 128)], both contiguous. block_gemm.cu has another layout of
// a_scale, and adds no residual.
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
    void* workspace;  // of cas_scaled_gemm_workspace's number of bytes; null if that is 0
    void* stream;
};

}  // extern "C"

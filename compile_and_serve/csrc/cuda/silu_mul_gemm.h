// The C interface of silu_mul_gemm.cu: plain pointers and integers, so that the build needs neither torch's headers nor its ABI.
#pragma once

#include <cstdint>

extern "C" {

// out[t, h] = silu(Σ_i x[t, i] weight[h, i]) · Σ_i x[t, i] weight[hidden + h, i], the last dimension contiguous. out is bfloat16; x and
// weight are bfloat16 or, in a configuration with scales, float8 e4m3: then each sum is multiplied by x_scale and weight_scale, which are
// float32: one number, or one per token (x_per_row) and one per row of the weight (weight_per_row).
// Every pointer (but of scales) and every row is aligned to 16 bytes. weight is [2 · hidden, inputs], contiguous.
struct CasSiluMulGemm {
    void* out;
    const void* x;
    const void* weight;
    const float* x_scale;
    const float* weight_scale;
    int64_t tokens, hidden, inputs;
    int64_t out_stride, x_stride;  // elements from one row to the next
    int32_t x_per_row, weight_per_row;
    void* stream;
};

}  // extern "C"

// The C entry of silu_mul_gemm.cu: plain pointers and integers, so that neither torch's headers nor its ABI enter the build.
#pragma once

#include <cstdint>

extern "C" {

// out[t, h] = silu(Σ_i x[t, i] weight[h, i]) · Σ_i x[t, i] weight[hidden + h, i]; all in bfloat16, the last dimension contiguous.
// Every pointer and every row begins at a multiple of 16 bytes; weight is [2 · hidden, inputs], contiguous.
struct CasSiluMulGemm {
    void* out;
    const void* x;
    const void* weight;
    int64_t tokens, hidden, inputs;
    int64_t out_stride, x_stride;  // elements from one row to the next
    void* stream;
};

}  // extern "C"

// The C interface of silu_mul_gemm.cu: plain pointers and integers, so that the build needs neither torch's headers nor its ABI.
#pragma once

#include <cstdint>

extern "C" {

// out[t, h] = silu(Σ_i x[t, i] weight[h, i]) · Σ_i x[t, i] weight[hidden + h, i]; all bfloat16, the last dimension contiguous.
// Every pointer and every row is aligned to 16 bytes. weight is [2 · hidden, inputs], contiguous.
struct CasSiluMulGemm {
    void* out;
    const void* x;
    const void* weight;
    int64_t tokens, hidden, inputs;
    int64_t out_stride, x_stride;  // elements from one row to the next
    void* stream;
};

}  // extern "C"

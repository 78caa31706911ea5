// The CPU kernels' C interface: raw pointers, sizes and strides (in elements), nothing of torch. Each call opens its own parallel region
// of `num_threads` threads and returns when the result is there; none may be made from inside a parallel region.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

enum CasDtype : int32_t { CAS_FLOAT32 = 0, CAS_BFLOAT16 = 1 };

// out [T, O] = f(rms_norm(x [T, I]) Wᵀ + bias) + residual; every pointer but x, packed and out may be null.
// packed: [ceil(O / 16), ceil(I / lanes), 16, lanes], lanes = 1 (float32) or 2 (bfloat16), zero-padded.
// silu_mul: f(y) = silu(y[:, :O/2]) * y[:, O/2:], out and residual have O / 2 columns.
// All tensors have the dtype; rows of x, residual and out lie their stride apart, columns are contiguous.
struct CasLinear {
    int32_t dtype;
    int32_t silu_mul;
    int64_t num_tokens, in_features, out_features;
    const void* x;
    int64_t x_stride;
    const void* packed;
    const void* norm_weight;
    const void* bias;
    const void* residual;
    int64_t residual_stride;
    void* out;
    int64_t out_stride;
    float eps;
    int32_t num_threads;
};
void cas_linear(const CasLinear* args);

#pragma GCC visibility pop
}  // extern "C"

// The C interface of group_linear.cu: plain pointers and integers, so that the build needs neither torch's headers nor its ABI.
#pragma once

#include <cstdint>

extern "C" {

// out = f(x Wᵀ + bias) + residual, where f is SiLU-mul if silu_mul. W = (code − zero point) · scale, with codes of 4 bits.
//
// out [tokens, rows]; x [tokens, inputs]; bias [rows] (with silu_mul [2 · rows]) and residual [tokens, rows] may be null: all float16 or all
// bfloat16. weight, scale, zeros: the Triton layout of custom_ops/quantized/group_layout.py, with num_blocks blocks of 128 inputs. scale:
// float16 (has_half_scales) or bfloat16. zeros: uint8; null: all are 8.
// x, weight, scale, zeros and every row of x are aligned to 16 bytes.
struct CasGroupLinear {
    void* out;
    const void* x;
    const void* weight;
    const void* scale;
    const void* zeros;
    const void* bias;
    const void* residual;
    int64_t x_stride, residual_stride;  // elements from one row to the next
    int32_t tokens, rows, inputs, num_blocks, num_groups, group_size, has_half_scales, silu_mul;
    void* stream;
};

}  // extern "C"

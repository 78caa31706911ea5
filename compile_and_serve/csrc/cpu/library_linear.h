// A linear over the plain weight [O, I] by torch's product, which is oneDNN's where it has kernels for the dtype. It knows matrix units
// that the kernels here do not (AMX). Norm, SiLU-mul and residual are passes of their own, so that it is for many tokens.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "kernels.h"

namespace cas {

// linear: the arguments of cas_linear, checked; `packed` is not read. out: [T, O], or [T, O / 2] with silu_mul.
inline void library_linear(
    const CasLinear& linear, const at::Tensor& x_TI, const at::Tensor& plain_OI, const std::optional<at::Tensor>& bias_O,
    const std::optional<at::Tensor>& residual_TO, at::Tensor& out
) {
    TORCH_CHECK_VALUE(
        plain_OI.dim() == 2 && plain_OI.size(0) == linear.out_features && plain_OI.size(1) == linear.in_features &&
            plain_OI.scalar_type() == x_TI.scalar_type(),
        "plain must be the weight [", linear.out_features, ", ", linear.in_features, "] in ", x_TI.scalar_type(), ", not ", plain_OI.sizes(),
        " in ", plain_OI.scalar_type());
    at::Tensor rows = x_TI;
    if (linear.norm_weight) {
        rows = at::empty({linear.num_tokens, linear.in_features}, x_TI.options());
        CasAddRmsNorm norm{};
        norm.dtype = linear.dtype;
        norm.num_threads = linear.num_threads;
        norm.num_tokens = linear.num_tokens;
        norm.num_features = linear.in_features;
        norm.x = linear.x;
        norm.x_stride = linear.x_stride;
        norm.norm_weight = linear.norm_weight;
        norm.out = rows.mutable_data_ptr();
        norm.eps = linear.eps;
        cas_add_rms_norm(&norm);
    }
    if (residual_TO.has_value() && !linear.silu_mul && !bias_O.has_value()) {
        at::addmm_out(out, *residual_TO, rows, plain_OI.t());
        return;
    }
    at::Tensor y = at::linear(rows, plain_OI, bias_O);
    if (linear.silu_mul) {
        CasSiluMul product{};
        product.dtype = linear.dtype;
        product.num_threads = linear.num_threads;
        product.num_tokens = linear.num_tokens;
        product.num_features = linear.out_features / 2;
        product.x = y.const_data_ptr();
        product.x_stride = linear.out_features;
        product.out = out.mutable_data_ptr();
        cas_silu_mul(&product);
        y = out;
    }
    if (residual_TO.has_value()) y.add_(*residual_TO);
    out = y;
}

}  // namespace cas

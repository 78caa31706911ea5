// Puts the CPU kernels behind the `cas` ops that Python has defined: checks, allocates, fills in the kernels' argument structs.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels.h"

namespace {

using OptionalTensor = std::optional<at::Tensor>;

int32_t dtype_code(const at::Tensor& tensor) {
    const auto type = tensor.scalar_type();
    TORCH_CHECK_VALUE(
        type == at::kFloat || type == at::kBFloat16, "the CPU kernels take float32 and bfloat16 tensors, not ", type);
    return type == at::kFloat ? CAS_FLOAT32 : CAS_BFLOAT16;
}

// A contiguous vector of `size` elements in x's dtype, or null.
const void* vector_pointer(const OptionalTensor& tensor, const at::Tensor& x, int64_t size, const char* name) {
    if (!tensor.has_value()) return nullptr;
    TORCH_CHECK_VALUE(
        tensor->dim() == 1 && tensor->size(0) == size && tensor->scalar_type() == x.scalar_type() && tensor->is_contiguous(),
        name, " must be a contiguous vector of ", size, " elements in ", x.scalar_type(), ", not ", tensor->sizes(), " in ",
        tensor->scalar_type());
    return tensor->const_data_ptr();
}

at::Tensor fused_linear(
    const at::Tensor& x_TI, const at::Tensor& packed, int64_t out_features, const OptionalTensor& norm_weight_I, double eps,
    const OptionalTensor& bias_O, bool silu_mul, const OptionalTensor& residual_TO
) {
    CasLinear args{};
    args.dtype = dtype_code(x_TI);
    TORCH_CHECK_VALUE(x_TI.dim() == 2 && (x_TI.stride(1) == 1 || x_TI.size(1) == 1), "x must be [T, I] with contiguous rows");
    const int64_t tokens = x_TI.size(0), in_features = x_TI.size(1);
    const int64_t inputs = args.dtype == CAS_BFLOAT16 ? 2 : 1;
    TORCH_CHECK_VALUE(
        packed.dim() == 3 && packed.size(0) == (out_features + 15) / 16 && packed.size(1) == (in_features + inputs - 1) / inputs &&
            packed.size(2) == 16 * inputs && packed.is_contiguous() && packed.scalar_type() == x_TI.scalar_type(),
        "packed must be pack_linear_weight of a [", out_features, ", ", in_features, "] weight in ", x_TI.scalar_type(),
        ", not a tensor ", packed.sizes(), " in ", packed.scalar_type());
    TORCH_CHECK_VALUE(!silu_mul || out_features % 2 == 0, "silu_mul needs an even number of outputs, not ", out_features);
    const int64_t columns = silu_mul ? out_features / 2 : out_features;
    args.silu_mul = silu_mul;
    args.num_tokens = tokens;
    args.in_features = in_features;
    args.out_features = out_features;
    args.x = x_TI.const_data_ptr();
    args.x_stride = x_TI.stride(0);
    args.packed = packed.const_data_ptr();
    args.norm_weight = vector_pointer(norm_weight_I, x_TI, in_features, "norm_weight");
    args.bias = vector_pointer(bias_O, x_TI, out_features, "bias");
    if (residual_TO.has_value()) {
        TORCH_CHECK_VALUE(
            residual_TO->dim() == 2 && residual_TO->size(0) == tokens && residual_TO->size(1) == columns &&
                residual_TO->stride(1) == 1 && residual_TO->scalar_type() == x_TI.scalar_type(),
            "residual must be [", tokens, ", ", columns, "] in ", x_TI.scalar_type(), " with contiguous rows");
        args.residual = residual_TO->const_data_ptr();
        args.residual_stride = residual_TO->stride(0);
    }
    at::Tensor out = at::empty({tokens, columns}, x_TI.options());
    args.out = out.mutable_data_ptr();
    args.out_stride = columns;
    args.eps = float(eps);
    args.num_threads = at::get_num_threads();
    cas_linear(&args);
    return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(cas, CPU, m) { m.impl("fused_linear", &fused_linear); }

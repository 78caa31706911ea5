// Checks of the tensors that ops get, which torch_ops.cpp and torch_attention.h share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels.h"

using OptionalTensor = std::optional<at::Tensor>;

inline int32_t dtype_code(const at::Tensor& tensor) {
    const auto type = tensor.scalar_type();
    TORCH_CHECK_VALUE(
        type == at::kFloat || type == at::kBFloat16, "the CPU kernels take float32 and bfloat16 tensors, not ", type);
    return type == at::kFloat ? CAS_FLOAT32 : CAS_BFLOAT16;
}

inline bool has_kernels(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16;
}

// A contiguous vector of `size` elements in x's dtype, or null.
inline const void* vector_pointer(const OptionalTensor& tensor, const at::Tensor& x, int64_t size, const char* name) {
    if (!tensor.has_value()) return nullptr;
    TORCH_CHECK_VALUE(
        tensor->dim() == 1 && tensor->size(0) == size && tensor->scalar_type() == x.scalar_type() && tensor->is_contiguous(),
        name, " must be a contiguous vector of ", size, " elements in ", x.scalar_type(), ", not ", tensor->sizes(), " in ",
        tensor->scalar_type());
    return tensor->const_data_ptr();
}

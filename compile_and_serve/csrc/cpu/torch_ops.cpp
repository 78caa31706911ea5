// Registers the CPU kernels for the `cas` ops that Python defines: checks tensors, allocates outputs, and calls the kernels.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels.h"
#include "torch_attention.h"
#include "torch_recurrent.h"
#include "torch_tensors.h"

namespace {

CasQuantizedKernel int8_kernel = nullptr, float8_kernel = nullptr;  // set by cas_use_quantized_linears
CasGroupKernel group_kernel = nullptr;

// The arguments that all linears share, without the weight. Allocates `out`.
CasLinear linear_arguments(
    const at::Tensor& x_TI, int64_t out_features, const OptionalTensor& norm_weight_I, double eps, const OptionalTensor& bias_O,
    bool silu_mul, const OptionalTensor& residual_TO, at::Tensor& out
) {
    CasLinear args{};
    args.dtype = dtype_code(x_TI);
    TORCH_CHECK_VALUE(x_TI.dim() == 2 && (x_TI.stride(1) == 1 || x_TI.size(1) == 1), "x must be [T, I] with contiguous rows");
    const int64_t tokens = x_TI.size(0), in_features = x_TI.size(1);
    TORCH_CHECK_VALUE(!silu_mul || out_features % 2 == 0, "silu_mul needs an even number of outputs, not ", out_features);
    const int64_t columns = silu_mul ? out_features / 2 : out_features;
    args.silu_mul = silu_mul;
    args.num_tokens = tokens;
    args.in_features = in_features;
    args.out_features = out_features;
    args.x = x_TI.const_data_ptr();
    args.x_stride = x_TI.stride(0);
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
    out = at::empty({tokens, columns}, x_TI.options());
    args.out = out.mutable_data_ptr();
    args.out_stride = columns;
    args.eps = float(eps);
    args.num_threads = at::get_num_threads();
    return args;
}

// A weight for x in the layout of `pack_linear_weight`.
const void* packed_pointer(const at::Tensor& packed, const at::Tensor& x_TI, int64_t out_features) {
    const int64_t inputs = x_TI.scalar_type() == at::kBFloat16 ? 2 : 1, in_features = x_TI.size(1);
    TORCH_CHECK_VALUE(
        packed.dim() == 3 && packed.size(0) == (out_features + 15) / 16 && packed.size(1) == (in_features + inputs - 1) / inputs &&
            packed.size(2) == 16 * inputs && packed.is_contiguous() && packed.scalar_type() == x_TI.scalar_type(),
        "packed must be pack_linear_weight of a [", out_features, ", ", in_features, "] weight in ", x_TI.scalar_type(),
        ", not a tensor ", packed.sizes(), " in ", packed.scalar_type());
    return packed.const_data_ptr();
}

at::Tensor fused_linear(
    const at::Tensor& x_TI, const at::Tensor& packed, int64_t out_features, const OptionalTensor& norm_weight_I, double eps,
    const OptionalTensor& bias_O, bool silu_mul, const OptionalTensor& residual_TO, bool gelu
) {
    if (packed.dim() == 2 || gelu) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::fused_linear_reference", "").typed<decltype(fused_linear)>();
        return reference.call(x_TI, packed, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu);
    }
    at::Tensor out;
    CasLinear args = linear_arguments(x_TI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, out);
    args.packed = packed_pointer(packed, x_TI, out_features);
    cas_linear(&args);
    return out;
}

// Checks the slots of a linear's adapters.
CasLora lora_arguments(
    const at::Tensor& x_TI, int64_t out_features, const at::Tensor& a_SQI, const at::Tensor& b_SCRN, const at::Tensor& index_T,
    at::IntArrayRef ends
) {
    CasLora lora{};
    const int64_t parts = int64_t(ends.size());
    TORCH_CHECK_VALUE(parts > 0 && parts <= kCasLoraParts && ends.back() == out_features, "ends must be 1 to 4 that end in ", out_features);
    TORCH_CHECK_VALUE(
        a_SQI.dim() == 3 && b_SCRN.dim() == 4 && a_SQI.size(0) == b_SCRN.size(0) && a_SQI.size(1) == parts * b_SCRN.size(2) &&
            a_SQI.size(2) == x_TI.size(1) && b_SCRN.size(1) == (out_features + 15) / 16 && b_SCRN.size(3) == 16 &&
            a_SQI.is_contiguous() && b_SCRN.is_contiguous() && a_SQI.scalar_type() == x_TI.scalar_type() && b_SCRN.scalar_type() == x_TI.scalar_type(),
        "adapters ", a_SQI.sizes(), " and ", b_SCRN.sizes(), " of ", parts, " parts do not fit ", x_TI.sizes(), " and ", out_features,
        " outputs in ", x_TI.scalar_type());
    TORCH_CHECK_VALUE(
        index_T.dim() == 1 && index_T.size(0) == x_TI.size(0) && index_T.scalar_type() == at::kInt && index_T.is_contiguous(),
        "adapter_index must be a contiguous vector of ", x_TI.size(0), " int32");
    lora.a = a_SQI.const_data_ptr();
    lora.b = b_SCRN.const_data_ptr();
    lora.index = index_T.const_data_ptr<int32_t>();
    lora.rank = b_SCRN.size(2);
    lora.num_parts = parts;
    for (int64_t p = 0; p < parts; ++p) lora.ends[p] = ends[p];
    return lora;
}

at::Tensor lora_linear(
    const at::Tensor& x_TI, const at::Tensor& packed, int64_t out_features, const OptionalTensor& norm_weight_I, double eps,
    const OptionalTensor& bias_O, bool silu_mul, const OptionalTensor& residual_TO, bool gelu, const at::Tensor& a_SQI,
    const at::Tensor& b_SCRN, const at::Tensor& index_T, at::IntArrayRef ends, const OptionalTensor& groups_T3
) {
    if (packed.dim() == 2 || gelu) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::lora_linear_reference", "").typed<decltype(lora_linear)>();
        return reference.call(
            x_TI, packed, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu, a_SQI, b_SCRN, index_T, ends, groups_T3);
    }
    at::Tensor out;
    CasLinear args = linear_arguments(x_TI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, out);
    args.packed = packed_pointer(packed, x_TI, out_features);
    const CasLora lora = lora_arguments(x_TI, out_features, a_SQI, b_SCRN, index_T, ends);
    args.lora = &lora;
    cas_linear(&args);
    return out;
}

at::Tensor lora_add(
    const at::Tensor& y_TO, const at::Tensor& x_TI, const at::Tensor& a_SQI, const at::Tensor& b_SCRN, const at::Tensor& index_T,
    at::IntArrayRef ends, const OptionalTensor& groups_T3
) {
    if (!has_kernels(x_TI) || y_TO.scalar_type() != x_TI.scalar_type()) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::lora_add_reference", "").typed<decltype(lora_add)>();
        return reference.call(y_TO, x_TI, a_SQI, b_SCRN, index_T, ends, groups_T3);
    }
    const auto with_rows = [](const at::Tensor& tensor) {
        TORCH_CHECK_VALUE(tensor.dim() == 2, "lora_add takes [T, features]");
        return tensor.stride(1) == 1 || tensor.size(1) == 1 ? tensor : tensor.contiguous();
    };
    const at::Tensor x = with_rows(x_TI), y = with_rows(y_TO);
    CasLoraAdd args{};
    args.lora = lora_arguments(x, y.size(1), a_SQI, b_SCRN, index_T, ends);
    args.dtype = dtype_code(x);
    args.num_threads = at::get_num_threads();
    args.num_tokens = x.size(0);
    args.in_features = x.size(1);
    args.out_features = y.size(1);
    args.x = x.const_data_ptr();
    args.x_stride = x.stride(0);
    args.y = y.const_data_ptr();
    args.y_stride = y.stride(0);
    at::Tensor out = at::empty(y.sizes(), y.options());
    args.out = out.mutable_data_ptr();
    cas_lora_add(&args);
    return out;
}

// A contiguous vector of `size` float32.
const float* float_vector(const at::Tensor& tensor, int64_t size, const char* name) {
    TORCH_CHECK_VALUE(
        tensor.numel() == size && tensor.dim() <= 1 && tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), name,
        " must be a contiguous vector of ", size, " float32, not ", tensor.sizes(), " in ", tensor.scalar_type());
    return tensor.const_data_ptr<float>();
}

CasActivations activations_code(std::string_view name) {
    if (name == "none") return CAS_WEIGHT_ONLY;
    if (name == "dynamic") return CAS_DYNAMIC;
    TORCH_CHECK_VALUE(name == "static", "activations must be none, dynamic or static, not ", name);
    return CAS_STATIC;
}

at::Tensor quantized_linear(
    const at::Tensor& x_TI, const at::Tensor& packed, const at::Tensor& scale, int64_t out_features, const OptionalTensor& norm_weight_I,
    double eps, const OptionalTensor& bias_O, bool silu_mul, const OptionalTensor& residual_TO, std::string_view activations,
    const OptionalTensor& input_scale, const OptionalTensor& quantized_TI, const OptionalTensor& quantized_scale
) {
    // The kernels quantize activations themselves, so already quantized ones go to the reference.
    if (packed.dim() == 2 || !has_kernels(x_TI) || quantized_TI.has_value() || quantized_scale.has_value()) {
        static const auto reference = c10::Dispatcher::singleton()
                                          .findSchemaOrThrow("cas::quantized_linear_reference", "")
                                          .typed<decltype(quantized_linear)>();
        return reference.call(
            x_TI, packed, scale, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, activations, input_scale,
            quantized_TI, quantized_scale);
    }
    at::Tensor out;
    CasQuantizedLinear args{};
    args.linear = linear_arguments(x_TI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, out);
    const bool is_int8 = packed.scalar_type() == at::kChar;
    TORCH_CHECK_VALUE(
        packed.dim() == 3 && packed.size(0) == (out_features + 15) / 16 && packed.size(1) == (args.linear.in_features + 3) / 4 &&
            packed.size(2) == 64 && packed.is_contiguous() && (is_int8 || packed.scalar_type() == at::kFloat8_e4m3fn),
        "packed must be pack_quantized_weight of an int8 or float8_e4m3fn weight [", out_features, ", ", args.linear.in_features,
        "], not a tensor ", packed.sizes(), " in ", packed.scalar_type());
    args.linear.packed = packed.const_data_ptr();
    args.weight_scale = float_vector(scale, out_features, "scale");
    args.activations = activations_code(activations);
    TORCH_CHECK_VALUE(
        input_scale.has_value() == (args.activations == CAS_STATIC),
        "quantized_linear takes an input_scale if and only if the activations are static");
    if (input_scale.has_value()) args.input_scale = float_vector(*input_scale, 1, "input_scale");
    const CasQuantizedKernel kernel = is_int8 ? int8_kernel : float8_kernel;
    TORCH_CHECK(kernel != nullptr, "the library with the kernels of quantized linears is not loaded");
    kernel(&args);
    return out;
}

int32_t scale_code(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return CAS_SCALE_FLOAT;
        case at::kHalf: return CAS_SCALE_HALF;
        case at::kBFloat16: return CAS_SCALE_BFLOAT16;
        case at::kByte: return CAS_SCALE_UINT8;
        case at::kChar: return CAS_SCALE_INT8;
        case at::kFloat8_e4m3fn: return CAS_SCALE_FLOAT8;
        case at::kFloat8_e8m0fnu: return CAS_SCALE_POWER;
        default: TORCH_CHECK_VALUE(false, "no kernel takes scales in ", type);
    }
}

// Checks scales, offsets or factors of a group-quantized weight. → their address
const void* group_values(const at::Tensor& tensor, int64_t out_blocks, int64_t groups, const char* name) {
    TORCH_CHECK_VALUE(
        tensor.size(0) == out_blocks && tensor.size(1) == groups && tensor.size(-1) == 16 && tensor.is_contiguous(), name,
        " must be pack_group_scales' [", out_blocks, ", ", groups, ", 16], not ", tensor.sizes());
    return tensor.const_data_ptr();
}

// Checks the weight of a group-quantized linear or embedding and fills in its fields, without x's and the result's.
void fill_group_weight(
    CasGroupLinear& args, const at::Tensor& packed, const at::Tensor& scale, const OptionalTensor& offset, int64_t out_features,
    int64_t in_features, int64_t bits, int64_t group_size, c10::string_view table = "", const OptionalTensor& factor = {}
) {
    const int64_t out_blocks = (out_features + 15) / 16, blocks = (in_features + 31) / 32;
    TORCH_CHECK_VALUE(
        bits == 6 ? group_size == 16 : group_size % 32 == 0 || (group_size == 16 && (bits == 8 || table == "e2m1")), bits,
        " bits in groups of ", group_size, " have no kernel");
    constexpr const char* kTables[]{"", "e2m1", "nf4", "fp4", "iq4_nl"};  // as CasTable
    const auto found = std::find(std::begin(kTables), std::end(kTables), table);
    TORCH_CHECK_VALUE(
        found != std::end(kTables) && (table.empty() || (bits == 4 && !offset.has_value())), "no kernel has the table '", table, "' of ",
        bits, "-bit codes");
    args.table = int32_t(found - std::begin(kTables));
    TORCH_CHECK_VALUE(
        packed.dim() == 3 && packed.size(0) == out_blocks && packed.size(1) == blocks && packed.size(2) == bits * 64 &&
            packed.is_contiguous() && packed.scalar_type() == at::kByte,
        "packed must be pack_group_codes of a [", out_features, ", ", in_features, "] weight of ", bits, " bits, not a tensor ",
        packed.sizes(), " in ", packed.scalar_type());
    args.bits = int32_t(bits);
    args.split = group_size == 16 ? 2 : 1;
    args.group_blocks = std::max<int64_t>(1, group_size / 32);
    args.groups = args.split == 2 ? 2 * blocks : (in_features + group_size - 1) / group_size;
    args.linear.packed = packed.const_data_ptr();
    args.scale = group_values(scale, out_blocks, args.groups, "scale");
    args.scale_type = scale_code(scale.scalar_type());
    if (factor.has_value()) {
        const auto type = factor->scalar_type();
        TORCH_CHECK_VALUE(
            factor->dim() == 4 && factor->size(1) > 0 && (factor->size(2) == 1 || (factor->size(2) == 2 && offset.has_value())) &&
                (type == at::kHalf || type == at::kFloat),
            "factor must be [out blocks, parts, 1 or (with offsets) 2, 16] in float16 or float32, not ", factor->sizes(), " in ", type);
        args.factor = group_values(*factor, out_blocks, factor->size(1), "factor");
        args.factor_groups = (args.groups + factor->size(1) - 1) / factor->size(1);
        args.num_factors = int32_t(factor->size(2));
        args.factor_is_half = type == at::kHalf;
    }
    if (offset.has_value()) {
        args.offset = group_values(*offset, out_blocks, args.groups, "offset");
        args.offset_is_zeros = offset->scalar_type() == at::kByte && args.num_factors < 2;
        TORCH_CHECK_VALUE(
            args.offset_is_zeros || offset->scalar_type() == scale.scalar_type(), "minima must have the scales' dtype");
    }
}

at::Tensor group_linear(
    const at::Tensor& x_TI, const at::Tensor& packed, const at::Tensor& scale, const OptionalTensor& offset, int64_t out_features,
    int64_t bits, int64_t group_size, const OptionalTensor& norm_weight_I, double eps, const OptionalTensor& bias_O, bool silu_mul,
    const OptionalTensor& residual_TO, c10::string_view table, const OptionalTensor& factor
) {
    if (packed.dim() == 2 || !has_kernels(x_TI) || group_kernel == nullptr) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::group_linear_reference", "").typed<decltype(group_linear)>();
        return reference.call(
            x_TI, packed, scale, offset, out_features, bits, group_size, norm_weight_I, eps, bias_O, silu_mul, residual_TO, table, factor);
    }
    at::Tensor out;
    CasGroupLinear args{};
    args.linear = linear_arguments(x_TI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, out);
    fill_group_weight(args, packed, scale, offset, out_features, args.linear.in_features, bits, group_size, table, factor);
    group_kernel(&args);
    return out;
}

template <class T>
void embed_groups(const CasGroupLinear& args, const int64_t* ids, int64_t count, T* out) {
    const int64_t in_features = args.linear.in_features, blocks = (in_features + 31) / 32, block_bytes = args.bits * 64;
    const int64_t group_inputs = args.split == 2 ? 16 : 32 * args.group_blocks;
    const auto value = [&](const void* values, int64_t at) {
        return args.scale_type == CAS_SCALE_HALF ? float(static_cast<const at::Half*>(values)[at]) : static_cast<const float*>(values)[at];
    };
    for (int64_t t = 0; t < count; ++t) {
        const int64_t row = ids[t] / 16, lane = ids[t] % 16;
        const uint8_t* codes = static_cast<const uint8_t*>(args.linear.packed) + row * blocks * block_bytes;
        for (int64_t i = 0; i < in_features; ++i) {
            const int64_t inside = i % 32, quad = inside / 4, group = row * args.groups + i / group_inputs;
            const uint8_t* block = codes + i / 32 * block_bytes;
            const int64_t byte = (args.bits == 4 ? quad / 2 : quad) * 64 + lane * 4 + inside % 4;
            const int code = args.bits == 8 ? block[byte] : quad % 2 ? block[byte] >> 4 : block[byte] & 15;
            const float scale = value(args.scale, group * 16 + lane);
            float result;
            if (!args.offset) result = float(code - (1 << (args.bits - 1))) * scale;
            else if (args.offset_is_zeros) result = float(code - static_cast<const uint8_t*>(args.offset)[group * 16 + lane]) * scale;
            else result = float(code) * scale + value(args.offset, group * 16 + lane);
            out[t * in_features + i] = T(result);
        }
    }
}

at::Tensor group_embedding(
    const at::Tensor& ids_T, const at::Tensor& packed, const at::Tensor& scale, const OptionalTensor& offset, int64_t num_rows,
    int64_t in_features, int64_t bits, int64_t group_size, at::ScalarType dtype
) {
    if (packed.dim() == 2 || (dtype != at::kFloat && dtype != at::kBFloat16)) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::group_embedding_reference", "").typed<decltype(group_embedding)>();
        return reference.call(ids_T, packed, scale, offset, num_rows, in_features, bits, group_size, dtype);
    }
    CasGroupLinear args{};
    args.linear.in_features = in_features;
    fill_group_weight(args, packed, scale, offset, num_rows, in_features, bits, group_size);
    TORCH_CHECK_VALUE(args.scale_type <= CAS_SCALE_HALF && bits % 4 == 0, "embeddings take codes of 4 and 8 bits and float scales");
    const at::Tensor ids = ids_T.to(at::kLong).contiguous();
    const int64_t* tokens = ids.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < ids.numel(); ++t)
        TORCH_CHECK_VALUE(tokens[t] >= 0 && tokens[t] < num_rows, "token ", tokens[t], " is outside of a vocabulary of ", num_rows);
    at::Tensor out = at::empty({ids.numel(), in_features}, scale.options().dtype(dtype));
    at::parallel_for(0, ids.numel(), 64, [&](int64_t begin, int64_t end) {
        if (dtype == at::kFloat) embed_groups(args, tokens + begin, end - begin, out.mutable_data_ptr<float>() + begin * in_features);
        else embed_groups(args, tokens + begin, end - begin, out.mutable_data_ptr<at::BFloat16>() + begin * in_features);
    });
    return out;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x_TI, const at::Tensor& residual_TI, const at::Tensor& weight_I, double eps
) {
    if (!has_kernels(x_TI)) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::add_rms_norm_reference", "").typed<decltype(add_rms_norm)>();
        return reference.call(x_TI, residual_TI, weight_I, eps);
    }
    CasAddRmsNorm args{};
    args.dtype = dtype_code(x_TI);
    TORCH_CHECK_VALUE(
        x_TI.dim() == 2 && residual_TI.sizes() == x_TI.sizes() && residual_TI.scalar_type() == x_TI.scalar_type() &&
            x_TI.stride(1) == 1 && residual_TI.stride(1) == 1,
        "x and residual must be [T, I] of one dtype with contiguous rows, not ", x_TI.sizes(), " in ", x_TI.scalar_type(), " and ",
        residual_TI.sizes(), " in ", residual_TI.scalar_type());
    args.num_tokens = x_TI.size(0);
    args.num_features = x_TI.size(1);
    args.x = x_TI.const_data_ptr();
    args.x_stride = x_TI.stride(0);
    args.residual = residual_TI.const_data_ptr();
    args.residual_stride = residual_TI.stride(0);
    args.norm_weight = vector_pointer(weight_I, x_TI, args.num_features, "weight");
    at::Tensor sum = at::empty(x_TI.sizes(), x_TI.options()), out = at::empty(x_TI.sizes(), x_TI.options());
    args.sum = sum.mutable_data_ptr();
    args.out = out.mutable_data_ptr();
    args.eps = float(eps);
    args.num_threads = at::get_num_threads();
    cas_add_rms_norm(&args);
    return {sum, out};
}

at::Tensor silu_mul(const at::Tensor& x_TI) {
    if (!has_kernels(x_TI)) {
        static const auto reference =
            c10::Dispatcher::singleton().findSchemaOrThrow("cas::silu_mul_reference", "").typed<decltype(silu_mul)>();
        return reference.call(x_TI);
    }
    CasSiluMul args{};
    args.dtype = dtype_code(x_TI);
    TORCH_CHECK_VALUE(
        x_TI.dim() == 2 && x_TI.size(1) % 2 == 0 && x_TI.stride(1) == 1, "x must be [T, 2 * I] with contiguous rows, not ",
        x_TI.sizes());
    args.num_tokens = x_TI.size(0);
    args.num_features = x_TI.size(1) / 2;
    args.x = x_TI.const_data_ptr();
    args.x_stride = x_TI.stride(0);
    at::Tensor out = at::empty({args.num_tokens, args.num_features}, x_TI.options());
    args.out = out.mutable_data_ptr();
    args.num_threads = at::get_num_threads();
    cas_silu_mul(&args);
    return out;
}

}  // namespace

void cas_plan_threads(int32_t count) { plan_threads.store(count, std::memory_order_relaxed); }

void cas_use_quantized_linears(CasQuantizedKernel int8_linear, CasQuantizedKernel float8_linear, CasGroupKernel group_linear) {
    int8_kernel = int8_linear;
    float8_kernel = float8_linear;
    group_kernel = group_linear;
}

TORCH_LIBRARY_IMPL(cas, CPU, m) {
    m.impl("fused_linear", &fused_linear);
    m.impl("quantized_linear", &quantized_linear);
    m.impl("group_linear", &group_linear);
    m.impl("group_embedding", &group_embedding);
    m.impl("lora_linear", &lora_linear);
    m.impl("lora_add", &lora_add);
    m.impl("add_rms_norm", &add_rms_norm);
    m.impl("silu_mul", &silu_mul);
}

// Ops for `custom_ops/attention/cpu_backend.py` and `custom_ops/recurrent`. They never occur in a graph.
TORCH_LIBRARY_FRAGMENT(cas, m) {
    m.def(
        "cpu_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, float scale, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor block_table, Tensor slot_mapping, int num_seqs, int window, bool chunked, float soft_cap, Tensor? sinks, "
        "Tensor? alibi_slopes) -> Tensor");
    m.def(
        "cpu_encoder_attention(Tensor q, Tensor k, Tensor v, Tensor starts, float scale, int window, Tensor? columns, "
        "Tensor? distance_bias, Tensor? query_bias, Tensor? key_bias) -> Tensor");
    m.def(
        "cpu_rope_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) kv_cache, int num_heads, int num_kv_heads, float scale, "
        "Tensor? q_norm_weight, Tensor? k_norm_weight, float eps, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
        "Tensor slot_mapping, int num_seqs, int window, bool chunked, float soft_cap, Tensor? sinks, Tensor? alibi_slopes) -> Tensor");
    m.def(
        "cpu_linear_attention(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? beta, Tensor(a!) checkpoint, "
        "Tensor checkpoint_columns, Tensor(b!) keys, Tensor keys_columns, Tensor(c!) values, Tensor values_columns, Tensor(d!) decays, "
        "Tensor decays_columns, Tensor query_start_loc, Tensor seq_lens, Tensor read_pages, Tensor write_pages, int num_seqs) -> Tensor");
    m.def(
        "cpu_short_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) inputs, Tensor columns, Tensor query_start_loc, "
        "Tensor seq_lens, Tensor read_pages, Tensor write_pages, int num_seqs) -> Tensor");
    m.def(
        "cpu_selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) states, Tensor states_columns, "
        "Tensor(b!) inputs, Tensor inputs_columns, Tensor(c!) keys, Tensor keys_columns, Tensor(d!) positions, Tensor positions_columns, "
        "Tensor query_start_loc, Tensor seq_lens, Tensor read_pages, Tensor write_pages, int num_seqs) -> Tensor");
    m.impl("cpu_selective_scan", c10::DispatchKey::CPU, TORCH_FN(cpu_selective_scan));
    m.impl("cpu_linear_attention", c10::DispatchKey::CPU, TORCH_FN(cpu_linear_attention));
    m.impl("cpu_short_convolution", c10::DispatchKey::CPU, TORCH_FN(cpu_short_convolution));
    m.impl("cpu_attention", c10::DispatchKey::CPU, TORCH_FN(cpu_attention));
    m.impl("cpu_encoder_attention", c10::DispatchKey::CPU, TORCH_FN(cpu_encoder_attention));
    m.impl("cpu_rope_attention", c10::DispatchKey::CPU, TORCH_FN(cpu_rope_attention));
}

// The CPU attention ops: check tensors, allocate outputs, and call the kernel. Part of torch_ops.cpp, because one source with
// torch's headers compiles faster than two.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>

#include "kernels.h"
#include "torch_tensors.h"

namespace {

std::atomic<int32_t> plan_threads{0};  // cas_plan_threads

// One float for each query head; an undefined tensor where there is none.
at::Tensor head_vector(const OptionalTensor& vector_H, int64_t num_heads, const char* name) {
    if (!vector_H.has_value()) return at::Tensor();
    TORCH_CHECK_VALUE(
        vector_H->dim() == 1 && vector_H->size(0) == num_heads, name, " must be [", num_heads, "], not ", vector_H->sizes());
    return vector_H->to(at::kFloat).contiguous();
}

// The arguments that both attention ops share.
void fill_step(
    CasAttention& args, const at::Tensor& kv_cache, double scale, const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
    const at::Tensor& block_table, const at::Tensor& slot_mapping, int64_t num_seqs, int64_t window, bool chunked, double soft_cap,
    const at::Tensor& sinks_H, const at::Tensor& alibi_slopes_H, at::Tensor& out
) {
    const auto type = kv_cache.scalar_type();
    args.cache_dtype = type == at::kFloat8_e4m3fn ? CAS_FLOAT8 : type == at::kChar ? CAS_INT8 : dtype_code(kv_cache);
    const int64_t width = args.head_dim + (type == at::kChar ? sizeof(float) : 0);
    const int64_t page = kv_cache.size(3) * width;
    TORCH_CHECK_VALUE(
        kv_cache.dim() == 5 && kv_cache.size(1) == 2 && kv_cache.size(2) == args.num_kv_heads && kv_cache.size(4) == width &&
            kv_cache.stride(4) == 1 && kv_cache.stride(3) == width && kv_cache.stride(2) == page &&
            kv_cache.stride(1) == page * args.num_kv_heads && (args.cache_dtype >= CAS_FLOAT8 || args.cache_dtype == args.dtype),
        "kv_cache must be [N, 2, ", args.num_kv_heads, ", P, ", width,
        "] with contiguous blocks in the dtype of q, float8_e4m3fn or int8, not ",
        kv_cache.sizes(), " in ", kv_cache.scalar_type());
    TORCH_CHECK_VALUE(
        args.head_dim % 16 == 0 && args.head_dim <= 512 && args.num_heads % args.num_kv_heads == 0 &&
            args.num_heads / args.num_kv_heads <= 96,
        "the CPU attention kernel does not support ", args.num_heads, " query heads and ", args.num_kv_heads,
        " key/value heads of size ", args.head_dim);
    TORCH_CHECK_VALUE(scale > 0, "attention needs a positive scale, not ", scale);
    TORCH_INTERNAL_ASSERT(
        query_start_loc.scalar_type() == at::kInt && seq_lens.scalar_type() == at::kInt && block_table.scalar_type() == at::kInt &&
        slot_mapping.scalar_type() == at::kLong && query_start_loc.numel() > num_seqs && seq_lens.numel() >= num_seqs &&
        block_table.size(0) >= num_seqs && block_table.stride(1) == 1 && slot_mapping.numel() >= args.num_tokens);
    args.num_seqs = num_seqs;
    args.block_size = kv_cache.size(3);
    args.kv_cache = kv_cache.mutable_data_ptr();
    args.block_stride = kv_cache.stride(0);
    args.window = window;
    args.chunked = chunked;
    args.soft_cap = float(soft_cap);
    args.sinks = sinks_H.defined() ? sinks_H.const_data_ptr<float>() : nullptr;
    args.alibi_slopes = alibi_slopes_H.defined() ? alibi_slopes_H.const_data_ptr<float>() : nullptr;
    args.query_start_loc = query_start_loc.const_data_ptr<int32_t>();
    args.seq_lens = seq_lens.const_data_ptr<int32_t>();
    args.block_table = block_table.const_data_ptr<int32_t>();
    args.block_table_stride = block_table.stride(0);
    args.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
    args.out = out.mutable_data_ptr();
    args.out_stride = args.num_heads * args.head_dim;
    args.scale = float(scale);
    args.num_threads = at::get_num_threads();
    const int32_t planned = plan_threads.load(std::memory_order_relaxed);
    args.plan_threads = planned > 0 ? planned : args.num_threads;
}

at::Tensor cpu_attention(
    const at::Tensor& q_THE, const at::Tensor& k_TKE, const at::Tensor& v_TKE, const at::Tensor& kv_cache, double scale,
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& block_table, const at::Tensor& slot_mapping,
    int64_t num_seqs, int64_t window, bool chunked, double soft_cap, const OptionalTensor& sinks_H, const OptionalTensor& alibi_slopes_H
) {
    CasAttention args{};
    args.dtype = dtype_code(q_THE);
    TORCH_CHECK_VALUE(
        q_THE.dim() == 3 && k_TKE.dim() == 3 && k_TKE.sizes() == v_TKE.sizes() && k_TKE.size(0) == q_THE.size(0) &&
            k_TKE.size(2) == q_THE.size(2) && q_THE.stride(2) == 1 && k_TKE.stride(2) == 1 && v_TKE.stride(2) == 1 &&
            dtype_code(k_TKE) == args.dtype && dtype_code(v_TKE) == args.dtype,
        "attention needs q [T, H, E] and k, v [T, K, E] of one dtype with contiguous heads, not ", q_THE.sizes(), ", ", k_TKE.sizes(),
        ", ", v_TKE.sizes());
    args.num_tokens = q_THE.size(0);
    args.num_heads = q_THE.size(1);
    args.num_kv_heads = k_TKE.size(1);
    args.head_dim = q_THE.size(2);
    args.q = q_THE.const_data_ptr();
    args.k = k_TKE.const_data_ptr();
    args.v = v_TKE.const_data_ptr();
    args.q_stride = q_THE.stride(0), args.q_head_stride = q_THE.stride(1);
    args.k_stride = k_TKE.stride(0), args.k_head_stride = k_TKE.stride(1);
    args.v_stride = v_TKE.stride(0), args.v_head_stride = v_TKE.stride(1);
    at::Tensor out = at::empty({args.num_tokens, args.num_heads, args.head_dim}, q_THE.options());
    const at::Tensor sinks = head_vector(sinks_H, args.num_heads, "sinks");
    const at::Tensor slopes = head_vector(alibi_slopes_H, args.num_heads, "alibi_slopes");
    fill_step(
        args, kv_cache, scale, query_start_loc, seq_lens, block_table, slot_mapping, num_seqs, window, chunked, soft_cap, sinks, slopes, out);
    cas_attention(&args);
    return out;
}

at::Tensor cpu_rope_attention(
    const at::Tensor& qkv, const at::Tensor& cos_TE, const at::Tensor& sin_TE, const at::Tensor& kv_cache, int64_t num_heads,
    int64_t num_kv_heads, double scale, const OptionalTensor& q_norm_weight_E, const OptionalTensor& k_norm_weight_E, double eps,
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& block_table, const at::Tensor& slot_mapping,
    int64_t num_seqs, int64_t window, bool chunked, double soft_cap, const OptionalTensor& sinks_H, const OptionalTensor& alibi_slopes_H
) {
    CasAttention args{};
    args.dtype = dtype_code(qkv);
    const int64_t all_heads = num_heads + 2 * num_kv_heads;
    TORCH_CHECK_VALUE(
        qkv.dim() == 2 && qkv.stride(1) == 1 && qkv.size(1) % all_heads == 0, "qkv must be [T, ", all_heads,
        " * E] with contiguous rows, not ", qkv.sizes());
    const int64_t head_dim = qkv.size(1) / all_heads;
    for (const at::Tensor* table : {&cos_TE, &sin_TE})
        TORCH_CHECK_VALUE(
            table->dim() == 2 && table->size(0) == qkv.size(0) && table->size(1) == head_dim && table->stride(1) == 1 &&
                table->scalar_type() == cos_TE.scalar_type(),
            "cos and sin must be [", qkv.size(0), ", ", head_dim, "] with contiguous rows, not ", table->sizes());
    args.rope_dtype = dtype_code(cos_TE);
    args.num_tokens = qkv.size(0);
    args.num_heads = num_heads;
    args.num_kv_heads = num_kv_heads;
    args.head_dim = head_dim;
    const char* base = static_cast<const char*>(qkv.const_data_ptr());
    args.q = base;
    args.k = base + num_heads * head_dim * qkv.element_size();
    args.v = base + (num_heads + num_kv_heads) * head_dim * qkv.element_size();
    args.q_stride = args.k_stride = args.v_stride = qkv.stride(0);
    args.q_head_stride = args.k_head_stride = args.v_head_stride = head_dim;
    args.cos = cos_TE.const_data_ptr();
    args.sin = sin_TE.const_data_ptr();
    args.cos_stride = cos_TE.stride(0);
    args.sin_stride = sin_TE.stride(0);
    args.q_norm_weight = vector_pointer(q_norm_weight_E, qkv, head_dim, "q_norm_weight");
    args.k_norm_weight = vector_pointer(k_norm_weight_E, qkv, head_dim, "k_norm_weight");
    args.eps = float(eps);
    at::Tensor out = at::empty({args.num_tokens, num_heads * head_dim}, qkv.options());
    const at::Tensor sinks = head_vector(sinks_H, args.num_heads, "sinks");
    const at::Tensor slopes = head_vector(alibi_slopes_H, args.num_heads, "alibi_slopes");
    fill_step(
        args, kv_cache, scale, query_start_loc, seq_lens, block_table, slot_mapping, num_seqs, window, chunked, soft_cap, sinks, slopes, out);
    cas_attention(&args);
    return out;
}

at::Tensor cpu_encoder_attention(
    const at::Tensor& q_THE, const at::Tensor& k_TKE, const at::Tensor& v_TKE, const at::Tensor& starts, double scale, int64_t window,
    const OptionalTensor& columns_F, const OptionalTensor& distance_bias_HR, const OptionalTensor& query_bias_THR,
    const OptionalTensor& key_bias_THR
) {
    CasEncoderAttention args{};
    args.dtype = dtype_code(q_THE);
    args.num_tokens = q_THE.size(0);
    args.num_heads = q_THE.size(1);
    args.num_kv_heads = k_TKE.size(1);
    args.head_dim = q_THE.size(2);
    TORCH_CHECK_VALUE(
        q_THE.dim() == 3 && k_TKE.dim() == 3 && k_TKE.sizes() == v_TKE.sizes() && k_TKE.size(0) == args.num_tokens &&
            k_TKE.size(2) == args.head_dim && args.num_heads % args.num_kv_heads == 0 && args.head_dim % 16 == 0 &&
            args.head_dim <= 512 && dtype_code(k_TKE) == args.dtype && dtype_code(v_TKE) == args.dtype,
        "encoder attention needs q [T, H, E] and k, v [T, K, E] of one dtype, not ", q_THE.sizes(), ", ", k_TKE.sizes(), ", ", v_TKE.sizes());
    TORCH_CHECK_VALUE(scale > 0, "attention needs a positive scale, not ", scale);
    TORCH_INTERNAL_ASSERT(starts.scalar_type() == at::kInt && starts.is_contiguous() && starts.numel() > 0);
    const at::Tensor q = q_THE.stride(2) == 1 ? q_THE : q_THE.contiguous();
    const bool as_they_are = k_TKE.stride(2) == 1 && k_TKE.strides() == v_TKE.strides();
    const at::Tensor k = as_they_are ? k_TKE : k_TKE.contiguous(), v = as_they_are ? v_TKE : v_TKE.contiguous();
    args.q = q.const_data_ptr(), args.k = k.const_data_ptr(), args.v = v.const_data_ptr();
    args.q_stride = q.stride(0), args.q_head_stride = q.stride(1);
    args.k_stride = k.stride(0), args.k_head_stride = k.stride(1);
    args.starts = starts.const_data_ptr<int32_t>();
    args.num_seqs = starts.numel() - 1;
    args.window = window;
    at::Tensor columns, distance_bias, query_bias, key_bias;
    if (columns_F.has_value()) {
        columns = columns_F->to(at::kInt).contiguous();
        args.columns = columns.const_data_ptr<int32_t>();
        args.num_distances = columns.numel();
    }
    const auto take = [&](const OptionalTensor& bias, int64_t dims, at::ScalarType type, at::Tensor& kept) -> const void* {
        if (!bias.has_value()) return nullptr;
        TORCH_CHECK_VALUE(
            columns_F.has_value() && bias->dim() == dims && bias->size(dims - 2) == args.num_heads &&
                (dims == 2 || bias->size(0) == args.num_tokens),
            "a bias of ", bias->sizes(), " does not fit queries of ", q_THE.sizes());
        args.num_columns = bias->size(-1);
        kept = bias->to(type).contiguous();
        return kept.const_data_ptr();
    };
    args.distance_bias = static_cast<const float*>(take(distance_bias_HR, 2, at::kFloat, distance_bias));
    args.query_bias = take(query_bias_THR, 3, q.scalar_type(), query_bias);
    args.key_bias = take(key_bias_THR, 3, q.scalar_type(), key_bias);
    at::Tensor out = at::empty({args.num_tokens, args.num_heads, args.head_dim}, q.options());
    args.out = out.mutable_data_ptr();
    args.scale = float(scale);
    args.num_threads = at::get_num_threads();
    cas_encoder_attention(&args);
    return out;
}

}  // namespace

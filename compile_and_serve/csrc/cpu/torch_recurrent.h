// The CPU ops with recurrent state: check tensors, allocate outputs, and call the kernel. Part of torch_ops.cpp, as torch_attention.h.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "kernels.h"
#include "torch_tensors.h"

namespace {

CasPagedUnits paged_units(const at::Tensor& state, const at::Tensor& columns, at::ScalarType type, const char* name) {
    const int64_t unit = state.numel() / std::max<int64_t>(1, state.size(0) * state.size(1));
    TORCH_CHECK_VALUE(
        state.scalar_type() == type && state.dim() >= 3 && (state.size(0) == 0 || state[0].is_contiguous()) &&
            columns.scalar_type() == at::kInt,
        name, " must be in ", type, " with contiguous pages, and its columns int32, not ", state.sizes(), " in ", state.scalar_type());
    return {state.mutable_data_ptr(), state.stride(0), state.size(1), unit, columns.const_data_ptr<int32_t>()};
}

CasSlots slots_of(
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& read_pages, const at::Tensor& write_pages,
    int64_t num_seqs
) {
    TORCH_INTERNAL_ASSERT(
        query_start_loc.scalar_type() == at::kInt && seq_lens.scalar_type() == at::kInt && read_pages.scalar_type() == at::kInt &&
        write_pages.scalar_type() == at::kInt && query_start_loc.numel() > num_seqs && seq_lens.numel() >= num_seqs &&
        read_pages.size(0) >= num_seqs && write_pages.size(0) >= num_seqs && read_pages.stride(1) == 1 && write_pages.stride(1) == 1);
    return {
        num_seqs,
        query_start_loc.const_data_ptr<int32_t>(),
        seq_lens.const_data_ptr<int32_t>(),
        read_pages.const_data_ptr<int32_t>(),
        write_pages.const_data_ptr<int32_t>(),
        read_pages.stride(0),
        write_pages.stride(0)};
}

at::Tensor cpu_linear_attention(
    const at::Tensor& q_TGK, const at::Tensor& k_TGK, const at::Tensor& v_THV, const at::Tensor& log_decay, const OptionalTensor& beta_TH,
    const at::Tensor& checkpoint, const at::Tensor& checkpoint_columns, const at::Tensor& keys, const at::Tensor& keys_columns,
    const at::Tensor& values, const at::Tensor& values_columns, const at::Tensor& decays, const at::Tensor& decays_columns,
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& read_pages, const at::Tensor& write_pages,
    int64_t num_seqs
) {
    CasLinearAttention args{};
    args.dtype = dtype_code(q_TGK);
    TORCH_CHECK_VALUE(
        q_TGK.dim() == 3 && v_THV.dim() == 3 && k_TGK.sizes() == q_TGK.sizes() && v_THV.size(0) == q_TGK.size(0) && q_TGK.size(1) > 0 &&
            v_THV.size(1) % q_TGK.size(1) == 0 && q_TGK.stride(2) == 1 && k_TGK.stride(2) == 1 && v_THV.stride(2) == 1 &&
            dtype_code(k_TGK) == args.dtype && dtype_code(v_THV) == args.dtype && q_TGK.size(2) % 16 == 0 && v_THV.size(2) % 16 == 0 &&
            q_TGK.size(2) <= 512 && v_THV.size(2) <= 512,
        "linear attention needs q, k [T, G, K] and v [T, H, V] of one dtype with contiguous heads, K and V multiples of 16 up to 512, not ",
        q_TGK.sizes(), ", ", k_TGK.sizes(), ", ", v_THV.sizes());
    args.num_tokens = q_TGK.size(0);
    args.num_key_heads = q_TGK.size(1);
    args.key_dim = q_TGK.size(2);
    args.num_heads = v_THV.size(1);
    args.value_dim = v_THV.size(2);
    args.decays = decays.size(3);
    args.ring = keys.size(2);
    TORCH_CHECK_VALUE(
        checkpoint.dim() == 4 && keys.dim() == 4 && values.dim() == 4 && decays.dim() == 4 && values.size(2) == args.ring + 1 &&
            values.size(3) == args.value_dim && keys.size(3) == args.key_dim && checkpoint.size(2) == args.key_dim &&
            checkpoint.size(3) == args.value_dim && decays.size(2) == args.ring && args.ring <= 64 &&
            (args.decays == 1 || args.decays == args.key_dim) && log_decay.scalar_type() == at::kFloat && log_decay.is_contiguous() &&
            log_decay.numel() == args.num_tokens * args.num_heads * args.decays,
        "linear attention's state or decay does not fit its keys and values");
    TORCH_CHECK_VALUE(
        !beta_TH.has_value() || (beta_TH->scalar_type() == at::kFloat && beta_TH->is_contiguous() &&
                                 beta_TH->numel() == args.num_tokens * args.num_heads),
        "beta must be a contiguous float32 tensor [T, H]");
    args.q = q_TGK.const_data_ptr();
    args.q_stride = q_TGK.stride(0);
    args.q_head_stride = q_TGK.stride(1);
    args.k = k_TGK.const_data_ptr();
    args.k_stride = k_TGK.stride(0);
    args.k_head_stride = k_TGK.stride(1);
    args.v = v_THV.const_data_ptr();
    args.v_stride = v_THV.stride(0);
    args.v_head_stride = v_THV.stride(1);
    args.log_decay = log_decay.const_data_ptr<float>();
    args.beta = beta_TH.has_value() ? beta_TH->const_data_ptr<float>() : nullptr;
    args.checkpoint_units = paged_units(checkpoint, checkpoint_columns, at::kFloat, "checkpoint");
    args.key_units = paged_units(keys, keys_columns, k_TGK.scalar_type(), "keys");
    args.value_units = paged_units(values, values_columns, at::kFloat, "values");
    args.decay_units = paged_units(decays, decays_columns, at::kFloat, "decays");
    args.slots = slots_of(query_start_loc, seq_lens, read_pages, write_pages, num_seqs);
    at::Tensor out = at::empty({args.num_tokens, args.num_heads, args.value_dim}, v_THV.options());
    args.out = out.mutable_data_ptr();
    args.num_threads = at::get_num_threads();
    cas_linear_attention(&args);
    return out;
}

at::Tensor cpu_short_convolution(
    const at::Tensor& x_TD, const at::Tensor& weight_DW, const OptionalTensor& bias_D, const at::Tensor& inputs, const at::Tensor& columns,
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& read_pages, const at::Tensor& write_pages,
    int64_t num_seqs
) {
    CasShortConvolution args{};
    args.dtype = dtype_code(x_TD);
    args.num_tokens = x_TD.size(0);
    args.num_channels = x_TD.size(1);
    args.width = weight_DW.size(1);
    args.ring = inputs.size(2);
    args.block = inputs.size(3);
    TORCH_CHECK_VALUE(
        x_TD.dim() == 2 && x_TD.stride(1) == 1 && weight_DW.is_contiguous() && weight_DW.size(0) == args.num_channels &&
            weight_DW.scalar_type() == x_TD.scalar_type() && args.width <= 16 && args.width <= args.ring && args.block % 16 == 0 &&
            args.num_channels % args.block == 0,
        "a short convolution needs x [T, D] and a contiguous weight [D, W <= 16] of one dtype, not ", x_TD.sizes(), " and ",
        weight_DW.sizes());
    args.x = x_TD.const_data_ptr();
    args.x_stride = x_TD.stride(0);
    args.weight = weight_DW.const_data_ptr();
    args.bias = vector_pointer(bias_D, x_TD, args.num_channels, "bias");
    args.inputs = paged_units(inputs, columns, x_TD.scalar_type(), "inputs");
    args.slots = slots_of(query_start_loc, seq_lens, read_pages, write_pages, num_seqs);
    at::Tensor out = at::empty({args.num_tokens, args.num_channels}, x_TD.options());
    args.out = out.mutable_data_ptr();
    args.num_threads = at::get_num_threads();
    cas_short_convolution(&args);
    return out;
}

at::Tensor cpu_selective_scan(
    const at::Tensor& x_TI, const at::Tensor& dt_TI, const at::Tensor& a_IN, const at::Tensor& b_TN, const at::Tensor& c_TN,
    const at::Tensor& states, const at::Tensor& states_columns, const at::Tensor& inputs, const at::Tensor& inputs_columns,
    const at::Tensor& keys, const at::Tensor& keys_columns, const at::Tensor& positions, const at::Tensor& positions_columns,
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& read_pages, const at::Tensor& write_pages,
    int64_t num_seqs
) {
    CasSelectiveScan args{};
    args.dtype = dtype_code(x_TI);
    args.num_tokens = x_TI.size(0);
    args.num_channels = x_TI.size(1);
    args.state_size = a_IN.size(1);
    args.ring = inputs.size(2);
    args.block = inputs.size(4);
    for (const at::Tensor* rows : {&dt_TI, &b_TN, &c_TN})
        TORCH_CHECK_VALUE(
            rows->dim() == 2 && rows->stride(1) == 1 && dtype_code(*rows) == args.dtype && rows->size(0) == args.num_tokens &&
                rows->size(1) == (rows == &dt_TI ? args.num_channels : args.state_size),
            "a selective scan needs x, dt [T, I] and b, c [T, N] of one dtype with contiguous rows, not ", rows->sizes());
    TORCH_CHECK_VALUE(
        x_TI.stride(1) == 1 && a_IN.is_contiguous() && a_IN.scalar_type() == at::kFloat && a_IN.size(0) == args.num_channels &&
            args.state_size <= 256 && states.dim() == 5 && states.size(3) == args.state_size && states.size(4) == args.block &&
            inputs.dim() == 5 && keys.size(2) == args.ring && keys.size(3) == args.state_size && args.block % 16 == 0 &&
            args.num_channels % args.block == 0,
        "a selective scan's state does not fit its x [T, I] and a [I, N], ", x_TI.sizes(), " and ", a_IN.sizes());
    args.x = x_TI.const_data_ptr();
    args.x_stride = x_TI.stride(0);
    args.dt = dt_TI.const_data_ptr();
    args.dt_stride = dt_TI.stride(0);
    args.b = b_TN.const_data_ptr();
    args.b_stride = b_TN.stride(0);
    args.c = c_TN.const_data_ptr();
    args.c_stride = c_TN.stride(0);
    args.a = a_IN.const_data_ptr<float>();
    args.states = paged_units(states, states_columns, at::kFloat, "states");
    args.inputs = paged_units(inputs, inputs_columns, x_TI.scalar_type(), "inputs");
    args.keys = paged_units(keys, keys_columns, x_TI.scalar_type(), "keys");
    args.positions = paged_units(positions, positions_columns, at::kFloat, "positions");
    args.slots = slots_of(query_start_loc, seq_lens, read_pages, write_pages, num_seqs);
    at::Tensor out = at::empty({args.num_tokens, args.num_channels}, x_TI.options());
    args.out = out.mutable_data_ptr();
    args.num_threads = at::get_num_threads();
    cas_selective_scan(&args);
    return out;
}

}  // namespace

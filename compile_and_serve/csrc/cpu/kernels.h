// The CPU kernels' C interface: raw pointers, sizes, and strides in elements; it does not use torch. Each call runs its own
// parallel region of `num_threads` threads and returns when the result is complete. Do not call from a parallel region.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

enum CasDtype : int32_t { CAS_FLOAT32 = 0, CAS_BFLOAT16 = 1, CAS_FLOAT8 = 2, CAS_INT8 = 3 };  // 2, 3: of a KV cache

// Slots with LoRA adapters of a linear that was merged of `num_parts` linears: y[t] += B (A x[t]) with the adapter index[t] - 1; none
// where index[t] is 0. a: [slots, num_parts * rank, I]; b: [slots, ceil(O / 16), rank, 16], zero-padded; part p has the outputs up to
// ends[p]. Contiguous.
constexpr int kCasLoraParts = 4;
struct CasLora {
    const void* a;
    const void* b;
    const int32_t* index;
    int64_t rank, num_parts;
    int64_t ends[kCasLoraParts];
};

// out [T, O] = f(rms_norm(x [T, I]) Wᵀ + bias + adapters) + residual. All pointers except x, packed and out may be null.
// packed: W as [ceil(O / 16), ceil(I / lanes), 16, lanes], zero-padded; lanes = 1 (float32) or 2 (bfloat16).
// silu_mul: f(y) = silu(y[:, :O/2]) * y[:, O/2:]; out and residual have O / 2 columns.
// All tensors have the given dtype. Rows of x, residual and out have strides; columns are contiguous.
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
    const CasLora* lora;  // for cas_linear alone
};
void cas_linear(const CasLinear* args);

// out [T, O] = y [T, O] + adapters of x [T, I]; for linears of other weights. Rows of y and x have strides.
struct CasLoraAdd {
    CasLora lora;
    int32_t dtype;
    int32_t num_threads;
    int64_t num_tokens, in_features, out_features;
    const void* x;
    int64_t x_stride;
    const void* y;
    int64_t y_stride;
    void* out;
};
void cas_lora_add(const CasLoraAdd* args);

// cas_linear with 8-bit weights: the product is x (weight_scale * weight)ᵀ. weight_scale: float32 [O], one scale per output.
// linear.packed: bytes [ceil(O / 16), ceil(I / 4), 16, 4]. linear.dtype: the activations' dtype. Activations are used
// unquantized (CAS_WEIGHT_ONLY), or quantized to the weights' dtype with one scale per row (CAS_DYNAMIC) or with input_scale
// [1] (CAS_STATIC).
enum CasActivations : int32_t { CAS_WEIGHT_ONLY = 0, CAS_DYNAMIC = 1, CAS_STATIC = 2 };

struct CasQuantizedLinear {
    CasLinear linear;
    const float* weight_scale;
    const float* input_scale;
    int32_t activations;
};

// int8: the bytes are weight + 128. I is at most 65536, so that no sum overflows 32 bits. With CAS_WEIGHT_ONLY, activations are
// fixed-point numbers relative to their row's largest magnitude, of 16 bits in bfloat16 and 24 bits in float32.
void cas_int8_linear(const CasQuantizedLinear* args);

// float8_e4m3fn: the bytes are the weights.
void cas_float8_linear(const CasQuantizedLinear* args);

// cas_linear with a weight of unsigned codes with a scale per output and group of inputs: (code - zero point) * scale, or
// code * scale + minimum. linear.packed: [ceil(O / 16), ceil(I / 32), bits / 4 * 256] bytes, in quads of 4 inputs of 16
// outputs; with 4 bits, a byte's high bits are the code of the next quad. With 5 and 6 bits, 64 or 128 bytes follow, which have the
// highest bits of the codes of 8 or 4 quads in a byte, lowest quad first.
// scale, offset: [ceil(O / 16), groups, 16]; a group is group_blocks * 32 inputs, or with split 2 a half of 32.
// offset: zero points (uint8), minima (in the scale's dtype), or null: the zero point is 2^(bits - 1).
// factor: [ceil(O / 16), ceil(groups / factor_groups), num_factors, 16], or null. A scale is scale * factor[0]; with two factors, offsets
// are minima: -offset * factor[1].
// table: with 4 bits, the weight may be table[code] * scale instead, without offsets.
// Activations are quantized to 16 bits with one scale per 32 inputs.
enum CasTable : int32_t { CAS_INTEGERS = 0, CAS_E2M1 = 1, CAS_NF4 = 2, CAS_FP4 = 3, CAS_IQ4_NL = 4 };
enum CasScale : int32_t {
    CAS_SCALE_FLOAT, CAS_SCALE_HALF, CAS_SCALE_BFLOAT16, CAS_SCALE_UINT8, CAS_SCALE_INT8, CAS_SCALE_FLOAT8, CAS_SCALE_POWER
};  // the last: 2^(byte - 127)
struct CasGroupLinear {
    CasLinear linear;
    const void *scale, *offset, *factor;
    int64_t groups, group_blocks, factor_groups;
    int32_t bits, split, scale_type, offset_is_zeros, table, num_factors, factor_is_half;
};
void cas_group_linear(const CasGroupLinear* args);

// These are in a separate library (csrc/cpu/quantized), built only for models with such weights. This call tells the main
// library which functions `cas::quantized_linear` and `cas::group_linear` run.
typedef void (*CasQuantizedKernel)(const CasQuantizedLinear* args);
typedef void (*CasGroupKernel)(const CasGroupLinear* args);
void cas_use_quantized_linears(CasQuantizedKernel int8_linear, CasQuantizedKernel float8_linear, CasGroupKernel group_linear);

// sum [T, I] = x + residual, rounded to the dtype; out [T, I] = sum / sqrt(mean(sum^2) + eps) * norm_weight. All tensors have
// the given dtype. Rows of x and residual have strides; sum and out are contiguous.
struct CasAddRmsNorm {
    int32_t dtype, num_threads;
    int64_t num_tokens, num_features;
    const void* x;
    int64_t x_stride;
    const void* residual;
    int64_t residual_stride;
    const void* norm_weight;
    void *sum, *out;
    float eps;
};
void cas_add_rms_norm(const CasAddRmsNorm* args);

// out [T, I] = silu(x[:, :I]) * x[:, I:] for x [T, 2 * I] with row stride x_stride. out is contiguous.
struct CasSiluMul {
    int32_t dtype, num_threads;
    int64_t num_tokens, num_features;
    const void* x;
    int64_t x_stride;
    void* out;
};
void cas_silu_mul(const CasSiluMul* args);

// Writes k and v to the paged cache, then computes out = softmax(scale * q kᵀ + causal mask) v for each sequence; see
// custom_ops/attention/attention.py. q [T, H, E], k and v [T, K, E], out [T, H * E]; heads and tokens have strides.
// kv_cache [N, 2, K, P, E]: contiguous, in q's dtype, float8_e4m3fn or int8: then [N, 2, K, P, E + 4], the P * E values of a head and
// their P float scales one after the other.
// query_start_loc [S + 1], seq_lens [S], block_table [S, M] with a row stride, slot_mapping [T].
// If q_norm_weight and k_norm_weight [E] are not null, q and k are first normalized (RMSNorm). Then, if cos and sin [T, E]
// (in rope_dtype) are not null, they are rotated. Rows of out from query_start_loc[S] on become zero.
struct CasAttention {
    int32_t dtype, rope_dtype, cache_dtype;
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, block_size;
    const void *q, *k, *v;
    int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
    const void *cos, *sin;
    int64_t cos_stride, sin_stride;
    const void *q_norm_weight, *k_norm_weight;
    void* kv_cache;
    int64_t block_stride;             // elements
    int64_t window;                   // 0: all earlier tokens; -1: all of the sequence's
    int32_t chunked;                  // `window` is the length of chunks
    float soft_cap;                   // 0: none
    const float *sinks, *alibi_slopes;  // one a query head; null: none
    const int32_t *query_start_loc, *seq_lens, *block_table;
    int64_t block_table_stride;
    const int64_t* slot_mapping;
    void* out;
    int64_t out_stride;
    float scale, eps;
    int32_t num_threads, plan_threads;  // a result's bits depend on the latter alone
};
void cas_attention(const CasAttention* args);
void cas_plan_threads(int32_t count);  // plan_threads of later calls of the torch ops; 0: as num_threads

// out = softmax(scale * q kᵀ + biases) v both ways within each sequence, without a cache; see custom_ops/attention/encoder_attention.py.
// q [T, H, E], k and v [T, K, E]: heads and tokens have strides, those of v are k's. out [T, H, E]: contiguous; rows outside of the
// sequences become zero. E is a multiple of 16, at most 512. starts [S + 1]: sequences lie one after another.
// columns [num_distances] or null: of the biases, for each distance key - query from -(num_distances / 2) on; farther ones have the last's.
// distance_bias: float32 [H, num_columns]; query_bias, key_bias: [T, H, num_columns] in the given dtype. Contiguous, or null.
struct CasEncoderAttention {
    int32_t dtype, num_threads;
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim;
    const void *q, *k, *v;
    int64_t q_stride, q_head_stride, k_stride, k_head_stride;
    const int32_t* starts;
    int64_t window;  // tokens before and behind a query that it reads; 0: all
    const int32_t* columns;
    int64_t num_distances, num_columns;
    const float* distance_bias;
    const void *query_bias, *key_bias;
    void* out;
    float scale;
};
void cas_encoder_attention(const CasEncoderAttention* args);

// A tensor of recurrent state: unit u of a sequence is at place u % units_per_page of page pages[columns[u / units_per_page]].
struct CasPagedUnits {
    void* data;
    int64_t page_stride, units_per_page, unit_size;  // elements
    const int32_t* columns;
};

// The sequences of a step, and the pages of their slots: read_pages and write_pages [S, M] with a row stride.
struct CasSlots {
    int64_t num_seqs;
    const int32_t *query_start_loc, *seq_lens, *read_pages, *write_pages;
    int64_t read_stride, write_stride;
};

// Linear attention; see custom_ops/recurrent/linear_attention.py, and layer_state.py for the state. q, k [T, G, K] and v [T, H, V]:
// tokens and heads have strides. log_decay [T, H, decays], beta [T, H] or null: contiguous. out [T, H, V]: contiguous. K and V are
// multiples of 16, at most 512. checkpoint, values, decays: float32. keys: in k's dtype. Rows of out behind the last sequence become zero.
struct CasLinearAttention {
    int32_t dtype, num_threads;
    int64_t num_tokens, num_heads, num_key_heads, key_dim, value_dim, ring, decays;
    const void *q, *k, *v;
    int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
    const float *log_decay, *beta;
    CasPagedUnits checkpoint_units, key_units, value_units, decay_units;
    CasSlots slots;
    void* out;
};
void cas_linear_attention(const CasLinearAttention* args);

// The scan of Mamba-1; see custom_ops/recurrent/selective_scan.py, and layer_state.py for the state. x, dt [T, I] and b, c [T, N] with row
// strides, out [T, I]: in the given dtype, as inputs and keys. a [I, N], states and positions: float32. N is at most 256.
// Rows of out behind the last sequence become zero.
struct CasSelectiveScan {
    int32_t dtype, num_threads;
    int64_t num_tokens, num_channels, state_size, ring, block;  // block: channels of a unit, a multiple of 16
    const void *x, *dt, *b, *c;
    int64_t x_stride, dt_stride, b_stride, c_stride;
    const float* a;
    CasPagedUnits states, inputs, keys, positions;
    CasSlots slots;
    void* out;
};
void cas_selective_scan(const CasSelectiveScan* args);

// A causal convolution of each channel; see custom_ops/recurrent/short_convolution.py. x [T, D] with a row stride, weight [D, W], bias [D]
// or null, and out [T, D] are in the given dtype, as the ring of inputs. Rows of out behind the last sequence become zero.
struct CasShortConvolution {
    int32_t dtype, num_threads;
    int64_t num_tokens, num_channels, width, ring, block;  // block: channels of a unit, a multiple of 16
    const void* x;
    int64_t x_stride;
    const void *weight, *bias;
    CasPagedUnits inputs;
    CasSlots slots;
    void* out;
};
void cas_short_convolution(const CasShortConvolution* args);

#pragma GCC visibility pop
}  // extern "C"

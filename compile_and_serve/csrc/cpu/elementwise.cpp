// Row-wise ops: residual add + RMSNorm, and SiLU-mul. See kernels.h.
#include <omp.h>

#include "kernels.h"
#include "linear_tiles.h"
#include "simd.h"

namespace cas {
namespace {

constexpr int64_t kParallelElements = 16 << 10;  // below this, waking threads takes longer than the work

template <class T>
void add_rms_norm_row(const CasAddRmsNorm& a, int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
    const T* weight = static_cast<const T*>(a.norm_weight);
    T* sum = static_cast<T*>(a.sum) + row * a.num_features;
    T* out = static_cast<T*>(a.out) + row * a.num_features;
    int64_t i = 0;
    for (; i + kLanes <= a.num_features; i += kLanes) store16(sum + i, load16(x + i) + load16(residual + i));
    for (; i < a.num_features; ++i) store_scalar(sum + i, to_float(x[i]) + to_float(residual[i]));
    const float scale = inverse_rms(sum, a.num_features, a.eps);  // of the rounded sum
    for (i = 0; i + kLanes <= a.num_features; i += kLanes) store16(out + i, load16(sum + i) * scale * load16(weight + i));
    for (; i < a.num_features; ++i) store_scalar(out + i, to_float(sum[i]) * scale * to_float(weight[i]));
}

template <class T>
void silu_mul_row(const CasSiluMul& a, int64_t row) {
    const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* up = gate + a.num_features;
    T* out = static_cast<T*>(a.out) + row * a.num_features;
    int64_t i = 0;
    for (; i + kLanes <= a.num_features; i += kLanes) {
        const f32x16 g = load16(gate + i);
        store16(out + i, g / (1.0f + exp16(-g)) * load16(up + i));
    }
    if (const int rest = int(a.num_features - i)) {
        const f32x16 g = load_part(gate + i, rest);
        store_part(out + i, g / (1.0f + exp16(-g)) * load_part(up + i, rest), rest);
    }
}

template <class Args, class Row>
void for_rows(const Args& a, Row row_function) {
    const bool parallel = a.num_threads > 1 && a.num_tokens > 1 && a.num_tokens * a.num_features >= kParallelElements;
#pragma omp parallel for num_threads(a.num_threads) if (parallel) schedule(static)
    for (int64_t row = 0; row < a.num_tokens; ++row) row_function(a, row);
}

}  // namespace
}  // namespace cas

extern "C" void cas_add_rms_norm(const CasAddRmsNorm* args) {
    if (args->dtype == CAS_BFLOAT16) cas::for_rows(*args, cas::add_rms_norm_row<cas::bf16>);
    else cas::for_rows(*args, cas::add_rms_norm_row<float>);
}

extern "C" void cas_silu_mul(const CasSiluMul* args) {
    if (args->dtype == CAS_BFLOAT16) cas::for_rows(*args, cas::silu_mul_row<cas::bf16>);
    else cas::for_rows(*args, cas::silu_mul_row<float>);
}

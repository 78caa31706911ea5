// Linears with float32 and bfloat16 weights. See kernels.h for the weight layout and linear_tiles.h for the loop.
#include "linear_tiles.h"
#include "lora.h"

namespace cas {
namespace {

template <class T, bool kHasLora>
struct PlainLinear {
    using Dots = T;
    const CasLinear& a;
    int64_t padded_width = (a.in_features + Dot<T>::kInputs - 1) / Dot<T>::kInputs * Dot<T>::kInputs;
    bool copies_rows = a.norm_weight || padded_width != a.in_features;
    size_t row_bytes = copies_rows ? (sizeof(T) * padded_width * a.num_tokens + 63) / 64 * 64 : 0;
    int64_t lora_rows = kHasLora ? a.lora->num_parts * a.lora->rank : 0;

    static int rows_per_token() { return 1; }

    // The copied rows, then A x of the adapters.
    size_t scratch_bytes() const { return row_bytes + sizeof(float) * lora_rows * a.num_tokens; }

    float* shrunk(void* memory, int64_t token) const {
        return reinterpret_cast<float*>(static_cast<char*>(memory) + row_bytes) + token * lora_rows;
    }

    void prepare(void* memory, int64_t token) const {
        const T* x = static_cast<const T*>(a.x) + token * a.x_stride;
        if (copies_rows) x = copy_row(x, static_cast<T*>(memory) + token * padded_width);
        if constexpr (kHasLora) shrink(*a.lora, token, x, a.in_features, shrunk(memory, token));
    }

    // y = x / sqrt(mean(x^2) + eps) * norm_weight, zero-padded. Without norm_weight, y is a copy of x.
    T* copy_row(const T* x, T* y) const {
        const T* norm_weight = static_cast<const T*>(a.norm_weight);
        const int64_t width = a.in_features;
        const float scale = norm_weight ? inverse_rms(x, width, a.eps) : 1.0f;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) {
            f32x16 v = load16(x + i);
            if (norm_weight) v = v * scale * load16(norm_weight + i);
            store16(y + i, v);
        }
        for (; i < width; ++i)
            store_scalar(y + i, norm_weight ? to_float(x[i]) * scale * to_float(norm_weight[i]) : to_float(x[i]));
        for (; i < padded_width; ++i) store_scalar(y + i, 0.0f);
        return y;
    }

    Rows<T> rows(const void* memory) const {
        if (copies_rows) return {static_cast<const T*>(memory), padded_width};
        return {static_cast<const T*>(a.x), a.x_stride};
    }

    void finish(void* memory, const float* tile, int64_t token, int count, const Panel<T>& panel) const {
        finish_tile<T>(a, token, count, panel, [&](int r, int offset, int64_t output, int n) CAS_INLINE {
            const f32x16 sum = load16(tile + r * kTileWidth + offset);
            if constexpr (!kHasLora) return sum;
            else return sum + expand<T>(*a.lora, a.out_features, token + r, shrunk(memory, token + r), output, n);
        });
    }
};

template <class T>
void linear(const CasLinear& a) {
    if (a.lora) run_linear(a, PlainLinear<T, true>{a});
    else run_linear(a, PlainLinear<T, false>{a});
}

}  // namespace
}  // namespace cas

extern "C" void cas_linear(const CasLinear* args) {
    if (args->num_tokens == 0) return;
    if (args->dtype == CAS_BFLOAT16) cas::linear<cas::bf16>(*args);
    else cas::linear<float>(*args);
}

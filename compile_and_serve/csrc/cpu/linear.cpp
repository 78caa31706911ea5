// Linears with float32 and bfloat16 weights. See kernels.h for the weight layout and linear_tiles.h for the loop.
#include "linear_tiles.h"

namespace cas {
namespace {

template <class T>
struct PlainLinear {
    using Dots = T;
    const CasLinear& a;
    int64_t padded_width = (a.in_features + Dot<T>::kInputs - 1) / Dot<T>::kInputs * Dot<T>::kInputs;

    static int rows_per_token() { return 1; }

    size_t scratch_bytes() const {
        return a.norm_weight || padded_width != a.in_features ? sizeof(T) * padded_width * a.num_tokens : 0;
    }

    // y = x / sqrt(mean(x^2) + eps) * norm_weight, zero-padded. Without norm_weight, y is a copy of x.
    void prepare(void* memory, int64_t token) const {
        const T* x = static_cast<const T*>(a.x) + token * a.x_stride;
        const T* norm_weight = static_cast<const T*>(a.norm_weight);
        T* y = static_cast<T*>(memory) + token * padded_width;
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
    }

    Rows<T> rows(const void* memory) const {
        if (memory) return {static_cast<const T*>(memory), padded_width};
        return {static_cast<const T*>(a.x), a.x_stride};
    }

    void finish(const void*, const float* tile, int64_t token, int count, const Panel<T>& panel) const {
        finish_tile<T>(a, token, count, panel, [&](int r, int offset, int64_t, int) CAS_INLINE {
            return load16(tile + r * kTileWidth + offset);
        });
    }
};

}  // namespace
}  // namespace cas

extern "C" void cas_linear(const CasLinear* args) {
    if (args->num_tokens == 0) return;
    if (args->dtype == CAS_BFLOAT16) cas::run_linear(*args, cas::PlainLinear<cas::bf16>{*args});
    else cas::run_linear(*args, cas::PlainLinear<float>{*args});
}

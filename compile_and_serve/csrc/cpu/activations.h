// Loads rows of activations for quantization to 8 bits.
#pragma once

#include <algorithm>

#include "linear_tiles.h"

namespace cas {

constexpr float kSmallestScale = 1e-12f;  // the scale of a row of zeros, as in the reference

template <class T>
f32x16 round_to(f32x16 value) {
    alignas(64) T rounded[kLanes];
    store16(rounded, value);
    return load16(rounded);
}

inline f32x16 clamped(f32x16 x, float limit) { return -max_of(-max_of(x, splat(-limit)), splat(-limit)); }

// One row of x, normalized if there is a norm weight and rounded to T.
template <class T>
struct Row {
    const T *x, *norm_weight;
    int64_t width;
    float norm_scale;

    Row(const CasLinear& a, int64_t token)
        : x(static_cast<const T*>(a.x) + token * a.x_stride), norm_weight(static_cast<const T*>(a.norm_weight)), width(a.in_features) {
        norm_scale = norm_weight ? inverse_rms(x, width, a.eps) : 1.0f;
    }

    // Elements i .. i + 15; zeros past the end.
    CAS_INLINE f32x16 load(int64_t i) const {
        const int n = int(std::min<int64_t>(kLanes, width - i));
        const f32x16 v = n == kLanes ? load16(x + i) : load_part(x + i, n);
        if (!norm_weight) return v;
        return round_to<T>(v * norm_scale * (n == kLanes ? load16(norm_weight + i) : load_part(norm_weight + i, n)));
    }

    // The scale that maps the row's largest magnitude to `largest`. NaN if an element is not finite.
    float scale(float largest) const {
        i32x16 magnitudes{};  // compared as integers, where NaN is larger than every number
        for (int64_t i = 0; i < width; i += kLanes) {
            const i32x16 magnitude = (i32x16)load(i) & 0x7fffffff;
            magnitudes = select(magnitude > magnitudes, magnitude, magnitudes);
        }
        int32_t bits = 0;
        for (int i = 0; i < kLanes; ++i) bits = std::max(bits, magnitudes[i]);
        float result;
        std::memcpy(&result, &bits, sizeof(result));
        result = result / largest;
        return result < kSmallestScale ? kSmallestScale : result - result == 0 ? result : __builtin_nanf("");
    }
};

}  // namespace cas

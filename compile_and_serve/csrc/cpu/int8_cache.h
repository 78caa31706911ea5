// An int8 KV cache: P * E values of a head, then a float scale for each of the P tokens.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace cas {

struct int8 {
    int8_t value;
};

// Elements of the keys (or values) of one head in a cache block; in int8, with their scales.
template <class C>
inline int64_t page_size(const CasAttention& a) {
    return a.block_size * (a.head_dim + (std::is_same_v<C, int8> ? sizeof(float) : 0));
}

inline const float* scales_of(const CasAttention& a, const int8* page) {
    return reinterpret_cast<const float*>(page + a.block_size * a.head_dim);
}
inline float* scales_of(const CasAttention& a, int8* page) {
    return reinterpret_cast<float*>(page + a.block_size * a.head_dim);
}

// Writes round(x / scale), ties to even. Returns the scale: the largest |x| / 127; NaN if a value is NaN. count: a multiple of 16.
template <class T>
inline float quantize(const T* x, int64_t count, int8* to) {
    f32x16 largest{}, not_finite{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 v = load16(x + i);
        largest = max_of(largest, max_of(v, -v));
        not_finite += v * 0.0f;  // a maximum drops NaN
    }
    const float scale = std::max(max16(largest) / 127.0f, 1e-12f) + sum16(not_finite);
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < count; i += kLanes)
        store_raw(to + i, convert<i8x16>(convert<i32x16>(round16(load16(x + i) * inverse))));
    return scale;
}

// Converts `count` values to another type. count: a multiple of 16.
template <class T>
inline void widen(const int8* from, float scale, int64_t count, T* to) {
    for (int64_t i = 0; i < count; i += kLanes) {
#if defined(__AVX512F__)  // GCC converts these vectors in halves
        const i32x16 value = (i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
        const i32x16 value = convert<i32x16>(load_raw<i8x16>(from + i));
#endif
        store16(to + i, convert<f32x16>(value) * scale);
    }
}

}  // namespace cas

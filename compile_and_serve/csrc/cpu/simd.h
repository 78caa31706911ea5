// Operations on vectors of 16 elements. Intrinsics are used only where GCC's vector extension lacks an operation, such as the
// bfloat16 dot product; each has a generic version.
#pragma once

#include <cstring>

#include "vectors.h"

namespace cas {

// A bfloat16 in memory: the upper 16 bits of a float.
struct bf16 {
    uint16_t bits;
};

// Prefetch to the L2 cache. L1 supports few outstanding misses, and each would wait for the memory.
constexpr int kToL2 = 2;

// Prefetches to the L2 cache. GCC removes loops whose only effect is __builtin_prefetch, but it must keep an asm statement.
inline void prefetch(const void* address) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address, 0, kToL2);
#endif
}

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(float));
    return result;
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
inline uint16_t round_to_bf16_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (value != value) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store_scalar(float* address, float value) { *address = value; }
inline void store_scalar(bf16* address, float value) { address->bits = round_to_bf16_bits(value); }

inline f32x16 load16(const float* address) { return load_raw<f32x16>(address); }
inline f32x16 load16(const bf16* address) {
    const u32x16 bits = convert<u32x16>(load_raw<u16x16>(address)) << 16;
    return (f32x16)bits;
}

inline void store16(float* address, f32x16 value) { store_raw(address, value); }
inline void store16(int32_t* address, i32x16 value) { store_raw(address, value); }
inline void store16(bf16* address, f32x16 value) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(address, &rounded, sizeof(rounded));
#else
    const u32x16 bits = (u32x16)value;
    const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32x16 is_nan = (u32x16)(value != value);
    const u16x16 result = convert<u16x16>((rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan));
    store_raw(address, result);
#endif
}

// Loads the first `count` (< 16) elements and zeros for the rest.
template <class T>
inline f32x16 load_part(const T* address, int count) {
    alignas(64) float values[kLanes] = {};
    for (int i = 0; i < count; ++i) values[i] = to_float(address[i]);
    return load16(values);
}

template <class T>
inline void store_part(T* address, f32x16 value, int count) {
    for (int i = 0; i < count; ++i) store_scalar(address + i, value[i]);
}

inline float sum16(f32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    PartF32 totals = part(value, 0);
    for (int i = 1; i < kParts; ++i) totals += part(value, i);
    float total = 0;
    for (int i = 0; i < kPartLanes; ++i) total += totals[i];
    return total;
#endif
}

inline float max16(f32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    PartF32 maxima = part(value, 0);
    for (int i = 1; i < kParts; ++i) maxima = part(value, i) > maxima ? part(value, i) : maxima;
    float largest = maxima[0];
    for (int i = 1; i < kPartLanes; ++i) largest = maxima[i] > largest ? maxima[i] : largest;
    return largest;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Folds a register's lanes with a commutative operation of half a register.
template <class Op>
CAS_INLINE inline int32_t fold(__m256i value, const Op& op) {
    __m128i half = op(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
    half = op(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(op(half, _mm_shuffle_epi32(half, 0xb1)));
}
#endif

inline int32_t sum16(i32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)value);
#elif defined(__AVX2__)
    return fold((__m256i)(part(value, 0) + part(value, 1)), [](__m128i a, __m128i b) CAS_INLINE { return _mm_add_epi32(a, b); });
#else
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += value[i];
    return total;
#endif
}

inline int32_t max16(i32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)value);
#elif defined(__AVX2__)
    const __m256i larger = _mm256_max_epi32((__m256i)part(value, 0), (__m256i)part(value, 1));
    return fold(larger, [](__m128i a, __m128i b) CAS_INLINE { return _mm_max_epi32(a, b); });
#else
    int32_t largest = value[0];
    for (int i = 1; i < kLanes; ++i) largest = value[i] > largest ? value[i] : largest;
    return largest;
#endif
}

inline f32x16 max_of(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

// Rounds to the nearest integer; for |x| < 2^22.
inline f32x16 round16(f32x16 x) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX__)  // a sum with a large number would be fused with a product that x is, and round only once
    __m256 halves[2];
    std::memcpy(halves, &x, sizeof(x));
    for (__m256& half : halves) half = _mm256_round_ps(half, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(&x, halves, sizeof(x));
    return x;
#else
    return (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 leaves no bits for a fraction
#endif
}

// The nearest integers, ties to even.
inline i32x16 nearest_integer(f32x16 x) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    i32x16 result;
    for (int i = 0; i < kParts; ++i) part(result, i) = (PartI32)_mm256_cvtps_epi32((__m256)part(x, i));
    return result;
#else
    return convert<i32x16>(round16(x));
#endif
}

// x * 2^n for integer n; 0 if 2^n is below the normal floats.
inline f32x16 scale_by_power(f32x16 x, f32x16 n) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
    const i32x16 vanishes = n < splat(-126.0f);
    const i32x16 exponent = (convert<i32x16>(-max_of(-n, splat(-127.0f))) + 127) << 23;
    return (f32x16)((i32x16)(x * (f32x16)exponent) & ~vanishes);
#endif
}

// e^x with an error of about 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor polynomial of
// degree 6 for e^r.
inline f32x16 exp16(f32x16 x) {
    x = max_of(x, splat(-104.0f));
    x = -max_of(-x, splat(-88.7f));
    const f32x16 n = round16(x * 1.44269504088896341f);
    const f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    f32x16 p = splat(1.0f / 720.0f);
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return scale_by_power(p, n);
}

// 2^x for x <= 0, with the same method as exp16.
inline f32x16 exp2_nonpositive(f32x16 x) {
    x = max_of(x, splat(-150.0f));
    const f32x16 n = round16(x);
    const f32x16 r = x - n;
    f32x16 p = splat(1.5403530e-4f);  // (ln 2)^6 / 6!
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return scale_by_power(p, n);
}

// How one kind of weights is multiplied. A weight vector holds `kInputs` consecutive inputs for each of 16 outputs, as elements
// of type W. A lane of the activation holds the same inputs of one row, as elements of type X. `Sums` holds the sums of 16
// outputs, `Sum` one of them.
template <class T>
struct Dot;

template <>
struct Dot<float> {
    static constexpr int kInputs = 1;
    using X = float;
    using W = float;
    using Weights = f32x16;
    using Lane = float;
    using Sum = float;
    using Sums = f32x16;
    CAS_INLINE static inline f32x16 add(f32x16 sum, Weights w, Lane x) { return sum + w * x; }
};

template <>
struct Dot<bf16> {
    static constexpr int kInputs = 2;
    using X = bf16;
    using W = bf16;
    using Lane = uint32_t;
    using Sum = float;
    using Sums = f32x16;
#if defined(__AVX512BF16__)
    using Weights = __m512i;
    CAS_INLINE static inline f32x16 add(f32x16 sum, Weights w, Lane x) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
    }
#else
    using Weights = u32x16;
    CAS_INLINE static inline f32x16 add(f32x16 sum, Weights w, Lane x) {
        PartU32 pair = PartU32{} + x;
#if defined(__AVX2__)
        asm("" : "+x"(pair));  // without this, GCC splits the pair before the broadcast and needs three instructions for one
#endif
        for (int i = 0; i < kParts; ++i) {
            part(sum, i) += (PartF32)(part(w, i) << 16) * (PartF32)(pair << 16);
            part(sum, i) += (PartF32)(part(w, i) & 0xffff0000u) * (PartF32)(pair & 0xffff0000u);
        }
        return sum;
    }
#endif
};

// Unsigned weight bytes times signed activation bytes, exact.
struct Bytes {};

template <>
struct Dot<Bytes> {
    static constexpr int kInputs = 4;
    using X = int8_t;
    using W = uint8_t;
    using Lane = int32_t;
    using Sum = int32_t;
    using Sums = i32x16;
#if defined(__AVX512VNNI__)
    using Weights = __m512i;
    CAS_INLINE static inline i32x16 add(i32x16 sum, Weights w, Lane x) {
        return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, w, _mm512_set1_epi32(x));
    }
#elif defined(__AVX2__)
    // Multiplies bytes 0 and 2 of each lane, then 1 and 3, as pairs of 16 bits: AVX2's product of bytes would saturate.
    struct Weights {
        __m256i parts[2];
    };
    CAS_INLINE static inline i32x16 add(i32x16 sum, Weights w, Lane x) {
        const __m256i low = _mm256_set1_epi32(0x00ff00ff), lane = _mm256_set1_epi32(x);
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(lane, 8), 8), odd = _mm256_srai_epi16(lane, 8);
        Weights products;
        for (int h = 0; h < 2; ++h) {
            const __m256i evens = _mm256_madd_epi16(_mm256_and_si256(w.parts[h], low), even);
            products.parts[h] = _mm256_add_epi32(evens, _mm256_madd_epi16(_mm256_srli_epi16(w.parts[h], 8), odd));
        }
        return sum + load_raw<i32x16>(&products);
    }
#else
    using Weights = u32x16;
    CAS_INLINE static inline i32x16 add(i32x16 sum, Weights w, Lane x) {
        for (int i = 0; i < kInputs; ++i) sum += (i32x16)((w >> (8 * i)) & 0xff) * int32_t(int8_t(uint32_t(x) >> (8 * i)));
        return sum;
    }
#endif
};

}  // namespace cas

// float8_e4m3fn: sign, 4 exponent bits with bias 7, 3 mantissa bits. No infinity; 0x7f is NaN; the largest value is 448.
#pragma once

#include <array>

#include "simd.h"

namespace cas {

struct float8 {
    uint8_t bits;
};

constexpr float kFloat8Largest = 448.0f;

// One byte per lane as floats. The multiplication corrects the exponent's bias by 127 - 7, exactly for subnormals too.
inline f32x16 float8_to_float(u32x16 bytes) {
    const u32x16 magnitude = bytes & 0x7f, sign = (bytes & 0x80) << 24;
    const u32x16 is_nan = (u32x16)(magnitude == 0x7f);
    const f32x16 value = (f32x16)(magnitude << 20) * 0x1p120f;
    return (f32x16)((u32x16)value | sign | (is_nan & 0x7fc00000u));
}

// Rounds to the nearest float8 value, ties to even; for |x| <= 448.
inline f32x16 round_to_float8(f32x16 x) {
    const u32x16 bits = (u32x16)x;
    const f32x16 normal = (f32x16)((bits + 0x7ffff + ((bits >> 20) & 1)) & 0xfff00000u);
    const f32x16 subnormal = (x + 24576.0f) - 24576.0f;  // adding 1.5 * 2^14 rounds to multiples of 2^-9
    return select((i32x16)(bits & 0x7fffffff) < 0x3c800000, subnormal, normal);  // 2^-6
}

inline f32x16 load16(const float8* address) {
    return float8_to_float(convert<u32x16>(load_raw<u8x16>(address)));
}

// Rounds to nearest, ties to even. Saturates at the largest value; NaN stays NaN.
inline void store16(float8* address, f32x16 x) {
    const u32x16 is_nan = (u32x16)(x != x), sign = ((u32x16)x >> 24) & 0x80;
    const f32x16 size = (f32x16)((u32x16)x & 0x7fffffff);
    const f32x16 rounded = round_to_float8(select(size > splat(kFloat8Largest), splat(kFloat8Largest), size));
    const u32x16 normal = ((u32x16)rounded >> 20) - (120 << 3);
    const u32x16 subnormal = (u32x16)convert<i32x16>(rounded * 512.0f);
    const u32x16 magnitude = select(rounded < splat(0x1p-6f), subnormal, normal);
    const u8x16 result = convert<u8x16>((magnitude & ~is_nan) | (is_nan & 0x7f) | sign);
    store_raw(address, result);
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// All positive float8 values as bfloat16, split into low and high bytes.
struct Float8Table {
    alignas(64) uint8_t low[128], high[128];
};
constexpr Float8Table kFloat8Table = [] {
    Float8Table table{};
    for (int i = 0; i < 128; ++i) {
        int exponent = i >> 3, mantissa = i & 7;
        uint32_t bits = 0;
        if (i == 0x7f) bits = 0x7fc0;
        else if (exponent) bits = uint32_t(exponent + 120) << 7 | uint32_t(mantissa) << 4;
        else if (mantissa) {
            for (exponent = 1; !(mantissa & 8); --exponent) mantissa <<= 1;
            bits = uint32_t(exponent + 120) << 7 | uint32_t(mantissa & 7) << 4;
        }
        table.low[i] = uint8_t(bits), table.high[i] = uint8_t(bits >> 8);
    }
    return table;
}();

// 64 bfloat16 values: all low bytes and all high bytes.
struct SplitBf16 {
    __m512i low, high;
};
inline SplitBf16 split_bf16(__m512i bytes) {  // permutex2var ignores bit 7 of an index
    const auto at = [](const uint8_t* p) { return _mm512_loadu_si512(p); };
    const __m512i low = _mm512_permutex2var_epi8(at(kFloat8Table.low), bytes, at(kFloat8Table.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(at(kFloat8Table.high), bytes, at(kFloat8Table.high + 64));
    return {low, _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xf8)};  // high | (bytes & sign)
}

// The byte order that joins one half of a `SplitBf16` to 32 values; indices from 64 on are high bytes.
template <int kHalf>
constexpr std::array<uint8_t, 64> kHalfBytes = [] {
    std::array<uint8_t, 64> order{};
    for (int i = 0; i < 64; ++i) order[i] = uint8_t(32 * kHalf + i / 2 + 64 * (i % 2));
    return order;
}();

#endif

// Converts `count` float8 values to another type exactly. count: a multiple of 16.
template <class T>
inline void widen(const float8* from, int64_t count, T* to) {
    int64_t i = 0;
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    if constexpr (sizeof(T) == 2) {
        const __m512i first = _mm512_loadu_si512(kHalfBytes<0>.data()), second = _mm512_loadu_si512(kHalfBytes<1>.data());
        for (; i + 64 <= count; i += 64) {
            const SplitBf16 split = split_bf16(_mm512_loadu_si512(from + i));
            _mm512_storeu_si512(to + i, _mm512_permutex2var_epi8(split.low, first, split.high));
            _mm512_storeu_si512(to + i + 32, _mm512_permutex2var_epi8(split.low, second, split.high));
        }
    }
#endif
    for (; i < count; i += kLanes) store16(to + i, load16(from + i));
}

}  // namespace cas

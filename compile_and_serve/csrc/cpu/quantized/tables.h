// What codes of 4 to 8 bits mean: integers, or indices of a table of 16 numbers.
//
// A number of a table is (256 * byte of plane 0 + byte of plane 1 - kZero) * kScale with two planes, and (byte - kZero) * kScale with
// one. Bytes are unsigned, because the byte product needs one unsigned factor.
#pragma once

#include <array>

#include "../simd.h"

namespace cas {

// kZero 0: the zero point is an argument.
struct Integers {
    static constexpr int kPlanes = 1;
    static constexpr float kScale = 1, kZero = 0;
    template <int kPlane>
    CAS_INLINE static u32x16 bytes(u32x16 codes) {
        return codes;
    }
};

using TableBytes = std::array<uint8_t, 16>;

// table[n] of each of 64 nibbles n.
CAS_INLINE inline u32x16 look_up(const TableBytes& table, u32x16 nibbles) {
#if defined(__AVX512BW__)
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data())));
    return (u32x16)_mm512_shuffle_epi8(values, (__m512i)nibbles);
#else
    alignas(64) uint8_t bytes[64];
    std::memcpy(bytes, &nibbles, sizeof(bytes));
#if defined(__AVX2__)
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data())));
    for (int half = 0; half < 64; half += 32) {
        auto* at = reinterpret_cast<__m256i*>(bytes + half);
        _mm256_store_si256(at, _mm256_shuffle_epi8(values, _mm256_load_si256(at)));
    }
#else
    for (uint8_t& byte : bytes) byte = table[byte];
#endif
    u32x16 result;
    std::memcpy(&result, bytes, sizeof(bytes));
    return result;
#endif
}

// Four-bit floating-point numbers of the OCP formats, times 2.
struct E2m1 {
    static constexpr int kPlanes = 1;
    static constexpr float kScale = 0.5f, kZero = 128;
    static constexpr TableBytes kBytes{128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
    template <int kPlane>
    CAS_INLINE static u32x16 bytes(u32x16 codes) {
        return look_up(kBytes, codes);
    }
};

// GGUF's IQ4_NL: 8-bit integers, with the zero point 128.
struct Iq4Nl {
    static constexpr int kPlanes = 1;
    static constexpr float kScale = 1, kZero = 128;
    static constexpr TableBytes kBytes{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
    template <int kPlane>
    CAS_INLINE static u32x16 bytes(u32x16 codes) {
        return look_up(kBytes, codes);
    }
};

// Numbers in [-1, 1] as multiples of 1 / kSteps, rounded to nearest.
template <class Values>
struct TwoBytes {
    static constexpr int kPlanes = 2;
    static constexpr float kScale = 1.0f / Values::kSteps, kZero = 128 * 256 + 128;
    static constexpr TableBytes table(int plane) {
        TableBytes bytes{};
        for (int i = 0; i < 16; ++i) {
            const double scaled = Values::kValues[i] * Values::kSteps;
            const int number = int(scaled + (scaled < 0 ? -0.5 : 0.5)) + 128 * 256 + 128;
            bytes[i] = uint8_t(plane == 0 ? number >> 8 : number & 255);
        }
        return bytes;
    }
    static constexpr TableBytes kBytes[2]{table(0), table(1)};
    template <int kPlane>
    CAS_INLINE static u32x16 bytes(u32x16 codes) {
        return look_up(kBytes[kPlane], codes);
    }
};

// bitsandbytes' NF4: quantiles of the normal distribution (QLoRA, appendix E), rounded to 16 bits.
struct Nf4Values {
    static constexpr int kSteps = 32512;
    static constexpr double kValues[16]{
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0};
};
using Nf4 = TwoBytes<Nf4Values>;

// bitsandbytes' FP4: multiples of 1 / 192, exact.
struct Fp4Values {
    static constexpr int kSteps = 192 * 169;
    static constexpr double kValues[16]{
        0, 1.0 / 192, 2.0 / 3, 1, 1.0 / 3, 0.5, 1.0 / 6, 0.25, 0, -1.0 / 192, -2.0 / 3, -1, -1.0 / 3, -0.5, -1.0 / 6, -0.25};
};
using Fp4 = TwoBytes<Fp4Values>;

}  // namespace cas

// How a group linear multiplies codes by a row's 16-bit integers. All sums are exact, so every way gives the same bits.
//
// A way has
//   X                    a row's integers of a block
//   write(x, h, whole)   fills in its inputs h * 16 .. h * 16 + 15
//   Factors, factors()   of a vector of codes: four inputs of 16 outputs, ready to be multiplied
//   kRows, kRowsTwo      of a register tile with one block of outputs (1, 2 or 4), and with two (or 0)
//   Sums                 of 16 outputs: add(factors, x, quad) adds the products with inputs 4 * quad .. 4 * quad + 3; total()
#pragma once

#include <bit>
#include <type_traits>

#include "../multiply.h"
#include "tables.h"

namespace cas {

constexpr int kBlockInputs = 32;

// Two signed digits in base 256, each multiplied by the codes' bytes.
struct DigitProducts {
    static constexpr int kDigits = 2;  // the most significant first
#if defined(__AVX512F__)
    static constexpr int kRows = 4, kRowsTwo = 4;
#elif defined(__AVX2__)
    static constexpr int kRows = 2, kRowsTwo = 1;
#else
    static constexpr int kRows = 1, kRowsTwo = 0;
#endif
    struct X {
        int8_t digits[kDigits][kBlockInputs];
    };
    using D = Dot<Bytes>;
    using Factors = D::Weights;

    CAS_INLINE static void write(X& x, int h, i32x16 whole) {
        for (int d = kDigits - 1; d >= 0; --d) {
            const i32x16 digit = (i32x16)((u32x16)whole << 24) >> 24;
            whole = (whole - digit) >> 8;
            const auto bytes = convert<i8x16>(digit);
            std::memcpy(x.digits[d] + h * kLanes, &bytes, kLanes);
        }
    }

    CAS_INLINE static Factors factors(u32x16 bytes) { return std::bit_cast<Factors>(bytes); }

    struct Sums {
        i32x16 of[kDigits]{};

        CAS_INLINE void add(const Factors& factors, const X& x, int quad) {
            unrolled<kDigits>([&](auto d) CAS_INLINE { of[d] = D::add(of[d], factors, load_raw<int32_t>(x.digits[d] + 4 * quad)); });
        }

        CAS_INLINE i32x16 total() const { return together(of[0], of[1]); }
    };

    CAS_INLINE static i32x16 together(i32x16 high, i32x16 low) { return (high << 8) + low; }
};

#if defined(__AVX2__) && !defined(__AVX512F__)

// The 16-bit integers themselves: two of AVX2's products of 16 bits take four bytes of codes. Its products of bytes would saturate.
struct PairProducts {
    static constexpr int kRows = 4, kRowsTwo = 1;
    struct X {
        int16_t quads[kBlockInputs / 4][4];  // of a quad: inputs 0, 2, 1, 3
    };
    struct Factors {
        __m256i even[2], odd[2];
    };

    CAS_INLINE static void write(X& x, int h, i32x16 whole) {
        auto* to = reinterpret_cast<__m256i*>(x.quads + h * 4);
        const __m256i packed = _mm256_packs_epi32((__m256i)part(whole, 0), (__m256i)part(whole, 1));
        const __m256i inputs = _mm256_permute4x64_epi64(packed, 0xd8);
        _mm256_storeu_si256(to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(inputs, 0xd8), 0xd8));
    }

    CAS_INLINE static Factors factors(u32x16 bytes) {
        Factors result;
        for (int i = 0; i < 2; ++i) {
            result.even[i] = _mm256_and_si256((__m256i)part(bytes, i), _mm256_set1_epi32(0x00ff00ff));
            result.odd[i] = _mm256_srli_epi16((__m256i)part(bytes, i), 8);
        }
        return result;
    }

    struct Sums {
        __m256i of[2]{};

        CAS_INLINE void add(const Factors& factors, const X& x, int quad) {
            const __m256i even = _mm256_set1_epi32(load_raw<int32_t>(x.quads[quad])), odd = _mm256_set1_epi32(load_raw<int32_t>(x.quads[quad] + 2));
            for (int i = 0; i < 2; ++i) {
                const __m256i products = _mm256_madd_epi16(factors.even[i], even);
                of[i] = _mm256_add_epi32(of[i], _mm256_add_epi32(products, _mm256_madd_epi16(factors.odd[i], odd)));
            }
        }

        CAS_INLINE i32x16 total() const { return load_raw<i32x16>(of); }
    };
};

// Two signed digits, for codes below 16: AVX2's products of bytes and the sums of a block's fit 16 bits (15 · 128 · 2 · 8 < 2^15).
struct NibbleProducts : DigitProducts {
    struct Factors {
        __m256i of[2];
    };

    CAS_INLINE static Factors factors(u32x16 bytes) { return {{(__m256i)part(bytes, 0), (__m256i)part(bytes, 1)}}; }

    struct Sums {
        __m256i of[kDigits][2]{};

        CAS_INLINE void add(const Factors& factors, const X& x, int quad) {
            unrolled<kDigits>([&](auto d) CAS_INLINE {
                const __m256i digits = _mm256_set1_epi32(load_raw<int32_t>(x.digits[d] + 4 * quad));
                for (int i = 0; i < 2; ++i) of[d][i] = _mm256_add_epi16(of[d][i], _mm256_maddubs_epi16(factors.of[i], digits));
            });
        }

        CAS_INLINE i32x16 total() const {
            i32x16 result;
            for (int i = 0; i < 2; ++i) {
                const __m256i high = _mm256_madd_epi16(of[0][i], _mm256_set1_epi16(256));
                part(result, i) = (PartI32)_mm256_add_epi32(high, _mm256_madd_epi16(of[1][i], _mm256_set1_epi16(1)));
            }
            return result;
        }
    };
};

template <int kBits, class Decode>
using Products = std::conditional_t<kBits == 4 && std::is_same_v<Decode, Integers>, NibbleProducts, PairProducts>;

#else

template <int kBits, class Decode>
using Products = DigitProducts;

#endif

}  // namespace cas

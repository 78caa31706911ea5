// Products of LoRA adapters, token by token: few enough that the weights of a token's adapter stay in the cache.
//
// Q: rows of A, num_parts * rank.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace cas {

// The dot products of `kRows` rows of a matrix with x.
template <int kRows, class T>
inline void dot_rows(const T* rows, int64_t width, const T* x, float* out) {
    f32x16 sums[kRows] = {};
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
        for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
            const __m512bh v = (__m512bh)_mm512_loadu_si512(x + i);
            for (int r = 0; r < kRows; ++r) {
                const __m512bh row = (__m512bh)_mm512_loadu_si512(rows + r * width + i);
                sums[r] = (f32x16)_mm512_dpbf16_ps((__m512)sums[r], row, v);
            }
        }
    }
#endif
    for (; i + kLanes <= width; i += kLanes) {
        const f32x16 v = load16(x + i);
        for (int r = 0; r < kRows; ++r) sums[r] += load16(rows + r * width + i) * v;
    }
    for (int r = 0; r < kRows; ++r) {
        float total = sum16(sums[r]);
        for (int64_t j = i; j < width; ++j) total += to_float(rows[r * width + j]) * to_float(x[j]);
        out[r] = total;
    }
}

// h [Q] = A x, with the token's adapter.
template <class T>
void shrink(const CasLora& lora, int64_t token, const T* x, int64_t in_features, float* h) {
    const int64_t rows = lora.num_parts * lora.rank, slot = lora.index[token] - 1;
    if (slot < 0) return;
    const T* a = static_cast<const T*>(lora.a) + slot * rows * in_features;
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) dot_rows<8>(a + r * in_features, in_features, x, h + r);
    for (; r < rows; ++r) dot_rows<1>(a + r * in_features, in_features, x, h + r);
}

// B h for the n <= 16 outputs from `output` on.
template <class T>
inline f32x16 expand(const CasLora& lora, int64_t out_features, int64_t token, const float* h, int64_t output, int n) {
    f32x16 even{}, odd{};
    const int64_t slot = lora.index[token] - 1;
    if (slot < 0) return even;
    const int64_t block_size = lora.rank * kLanes, blocks = (out_features + kLanes - 1) / kLanes;
    const T* b = static_cast<const T*>(lora.b) + slot * blocks * block_size;
    int64_t part = 0;
    while (output >= lora.ends[part]) ++part;
    if (output % kLanes == 0 && n == kLanes && output + n <= lora.ends[part]) {
        const float* own = h + part * lora.rank;
        b += output / kLanes * block_size;
        int64_t k = 0;
        for (; k + 2 <= lora.rank; k += 2) {
            even += own[k] * load16(b + k * kLanes);
            odd += own[k + 1] * load16(b + (k + 1) * kLanes);
        }
        if (k < lora.rank) even += own[k] * load16(b + k * kLanes);
        return even + odd;
    }
    alignas(64) float values[kLanes] = {};  // the end of a part or of the outputs, or the second half of an odd number of blocks
    for (int i = 0; i < n; ++i) {
        const int64_t o = output + i;
        while (o >= lora.ends[part]) ++part;
        const T* column = b + o / kLanes * block_size + o % kLanes;
        for (int64_t k = 0; k < lora.rank; ++k) values[i] += h[part * lora.rank + k] * to_float(column[k * kLanes]);
    }
    return load16(values);
}

}  // namespace cas

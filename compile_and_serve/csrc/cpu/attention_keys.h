// The keys and values of one attention step: locates them in the cache and repacks them for multiply.h in a thread's scratch.
//
// Names: E head size, P tokens per cache block, K key/value heads; T the model's element type, C the cache's.
#pragma once

#include <algorithm>
#include <array>

#include "float8.h"
#include "int8_cache.h"
#include "kernels.h"
#include "matrix_unit.h"
#include "multiply.h"
#include "simd.h"

namespace cas {
namespace {

constexpr int kKeys = 64;          // keys per step of the online softmax
constexpr int kTileRows = 96;      // rows that share one repacked block of keys
constexpr int kSubtile = std::max(kMaxRows, kMaxUnitRows);  // rows of one product
constexpr int kMaxHeadDim = 512;

// to[lane][key] = rows[key][lane] for 16 keys, in units of 32 bits.
inline void transpose16(const uint32_t* const* rows, int64_t offset, uint32_t* to) {
    // In squares with as many rows and columns as a register has elements.
    for (int lane = 0; lane < kLanes; lane += kPartLanes) {
        for (int key = 0; key < kLanes; key += kPartLanes) {
            PartU32 v[kPartLanes], t[kPartLanes];
            for (int i = 0; i < kPartLanes; ++i) v[i] = load_raw<PartU32>(rows[key + i] + offset + lane);
#pragma GCC unroll 4
            for (int d = kPartLanes / 2; d >= 1; d /= 2) {
                const Butterfly butterfly(d);
#pragma GCC unroll 16
                for (int i = 0; i < kPartLanes; ++i) {
                    if (i & d) continue;
                    t[i] = __builtin_shuffle(v[i], v[i + d], butterfly.first);
                    t[i + d] = __builtin_shuffle(v[i], v[i + d], butterfly.second);
                }
                for (int i = 0; i < kPartLanes; ++i) v[i] = t[i];
            }
            for (int i = 0; i < kPartLanes; ++i) std::memcpy(to + (lane + i) * kLanes + key, &v[i], sizeof(v[i]));
        }
    }
}

// The scratch of one thread.
template <class T>
struct Scratch {
    T *queries, *keys, *values, *probabilities, *widened;
    float *scores, *sums, *maxima, *denominators;

    static size_t bytes(int64_t head_dim, int64_t tile_rows) {
        const size_t elements = tile_rows * head_dim + 4 * kKeys * head_dim + kSubtile * kKeys;
        const size_t floats = kSubtile * kKeys + tile_rows * head_dim + tile_rows + kLanes + tile_rows * kLanes;
        return (elements * sizeof(T) + floats * sizeof(float) + 4095) / 4096 * 4096;
    }

    Scratch(void* memory, int64_t head_dim, int64_t tile_rows) {
        queries = static_cast<T*>(memory);
        keys = queries + tile_rows * head_dim;
        values = keys + kKeys * head_dim;
        probabilities = values + kKeys * head_dim;
        widened = probabilities + kSubtile * kKeys;
        scores = reinterpret_cast<float*>(widened + 2 * kKeys * head_dim);
        sums = scores + kSubtile * kKeys;
        maxima = sums + tile_rows * head_dim;
        denominators = maxima + tile_rows + kLanes;
    }
};

// Addresses of the keys of one step. Values lie `to_values` elements after their keys. The last key fills the padding.
template <class C>
struct KeyRows {
    const C* rows[kKeys];
    const float* scales[std::is_same_v<C, int8> ? kKeys : 1];  // of the keys
    int64_t to_values = 0;
    int count = 0, padded = 0;

    // padding: what the number of keys is rounded up to a multiple of
    void locate(const CasAttention& a, const int32_t* blocks, int64_t head, int64_t begin, int64_t end, int padding) {
        const int64_t E = a.head_dim, P = a.block_size;
        const C* cache = static_cast<const C*>(a.kv_cache) + head * page_size<C>(a);
        to_values = a.num_kv_heads * page_size<C>(a);
        count = int(std::clamp<int64_t>(end - begin, 0, kKeys));
        padded = (count + padding - 1) / padding * padding;
        const int32_t* block = blocks + begin / P;
        int64_t offset = begin % P;
        for (int c = 0; c < count; ++block, offset = 0) {
            const C* page = cache + *block * a.block_stride;
            const C* row = page + offset * E;
            for (; offset < P && c < count; ++offset, row += E) {
                if constexpr (std::is_same_v<C, int8>) scales[c] = scales_of(a, page) + offset;
                rows[c++] = row;
            }
        }
        for (int c = count; c < padded; ++c) rows[c] = rows[count - 1];
    }

    // Keys and values converted to T. Writes key and value alternately to `to` [kKeys, 2, width].
    template <class T>
    KeyRows<T> widened(int64_t width, T* to) const {
        KeyRows<T> result;
        result.to_values = width, result.count = count, result.padded = padded;
        for (int c = 0; c < count; ++c, to += 2 * width) {
            if constexpr (std::is_same_v<C, int8>) {
                widen(rows[c], *scales[c], width, to);
                widen(rows[c] + to_values, scales[c][to_values / sizeof(float)], width, to + width);
            } else {
                widen(rows[c], width, to);
                widen(rows[c] + to_values, width, to + width);
            }
            result.rows[c] = to;
        }
        for (int c = count; c < padded; ++c) result.rows[c] = result.rows[count - 1];
        return result;
    }
};

// Pairs of elements (key c, key c + 1) for each e: one pair is one lane of the product over keys.
inline void interleave(const bf16* first, const bf16* second, int64_t width, bf16* to, int64_t to_stride) {
    int64_t e = 0;
#if defined(__AVX512BW__)
    alignas(64) static constexpr auto kOrder = [] {
        std::array<uint16_t, 64> order{};
        for (int i = 0; i < 64; ++i) order[i] = uint16_t((i % 2) * 32 + i / 2);
        return order;
    }();
    const __m512i low = _mm512_load_si512(kOrder.data()), high = _mm512_load_si512(kOrder.data() + 32);
    for (; e + 2 * kLanes <= width; e += 2 * kLanes) {
        const __m512i x = _mm512_loadu_si512(first + e), y = _mm512_loadu_si512(second + e);
        _mm512_storeu_si512(to + (e / kLanes) * to_stride, _mm512_permutex2var_epi16(x, low, y));
        _mm512_storeu_si512(to + (e / kLanes + 1) * to_stride, _mm512_permutex2var_epi16(x, high, y));
    }
#endif
    for (; e < width; e += kLanes) {
        const u32x16 x = convert<u32x16>(load_raw<u16x16>(first + e));
        const u32x16 y = convert<u32x16>(load_raw<u16x16>(second + e));
        const u32x16 pair = x | (y << 16);
        store_raw(to + (e / kLanes) * to_stride, pair);
    }
}

inline void spread(const float* row, int64_t width, float* to, int64_t to_stride) {
    for (int64_t e = 0; e < width; e += kLanes) store16(to + (e / kLanes) * to_stride, load16(row + e));
}

// Copies the keys and values of one step to scratch in multiply.h's layout: [keys / 16][E / lanes][16][lanes] and
// [E / 16][keys / lanes][16][lanes]. Values past `count` are zero. `next`: rows to prefetch; cache blocks are scattered in
// memory, so the hardware prefetcher cannot predict them.
template <class T, class C>
void pack_keys_values(int64_t E, const KeyRows<T>& now, const KeyRows<C>& next, Scratch<T>& s) {
    constexpr int kInputs = Dot<T>::kInputs;
    constexpr int kVector = kInputs * kLanes;
    const int64_t value_stride = int64_t(now.padded) * kLanes;
    const T zeros[kMaxHeadDim] = {};
    const auto prefetch_rows = [&](int first, int64_t offset) {
        for (int c = first; c < std::min(next.count, first + kLanes); ++c)
            for (int64_t e = 0; e < E; e += 64 / sizeof(C)) prefetch(next.rows[c] + offset + e);
    };
    for (int c = 0; c < now.padded; c += kLanes) {
        prefetch_rows(c, 0);
        for (int64_t e = 0; e < E; e += kVector) {
            uint32_t* to = reinterpret_cast<uint32_t*>(s.keys + c * E + e * kLanes);
            if (e + kVector <= E) {
                transpose16(reinterpret_cast<const uint32_t* const*>(now.rows + c), e / kInputs, to);
            } else {
                for (int lane = 0; lane < int(E - e) / kInputs; ++lane)
                    for (int key = 0; key < kLanes; ++key)
                        std::memcpy(to + lane * 16 + key, now.rows[c + key] + e + lane * kInputs, 4);
            }
        }
        prefetch_rows(c, next.to_values);
        for (int key = c; key < c + kLanes; key += kInputs) {
            const T* first = key < now.count ? now.rows[key] + now.to_values : zeros;
            T* to = s.values + key * kLanes;
            if constexpr (kInputs == 2)
                interleave(first, key + 1 < now.count ? now.rows[key + 1] + now.to_values : zeros, E, to, value_stride);
            else
                spread(first, E, to, value_stride);
        }
    }
}

}  // namespace
}  // namespace cas

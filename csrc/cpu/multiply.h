// The register tile that linears and attention share: a few rows times one or two blocks of 16 outputs.
//
// A weight block is [groups][16 outputs][Dot<T>::kInputs]; a group is the inputs that one lane takes.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>

#include "simd.h"

namespace cas {

constexpr int kMaxRows = 16;         // rows that one pass over one weight block serves
constexpr int kMaxRowsPaired = 12;   // rows when two blocks are in flight: 24 sums, 2 weights and a broadcast fit 32 registers
constexpr int kMaxRowsFour = 6;      // rows when four are
constexpr int kPrefetchGroups = 64;  // weight vectors (64 bytes) ahead of the one in use

// tile[r][b] = sum over groups of x[r] * weights[b], for kRows rows and kBlocks blocks. kPrefetch: the weights come from memory.
template <class T, int kRows, int kBlocks, bool kPrefetch>
__attribute__((noinline)) void multiply(
    const T* x, int64_t x_stride, const T* const* weights, int64_t groups, float* tile, int64_t tile_stride
) {
    using D = Dot<T>;
    constexpr int kVector = D::kInputs * kLanes;
    f32x16 sums[kRows][kBlocks];
    for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) sums[r][b] = f32x16{};
    const T* w[kBlocks];
    for (int b = 0; b < kBlocks; ++b) w[b] = weights[b];
    for (int64_t g = 0; g < groups; ++g) {
        typename D::Weights vectors[kBlocks];
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
            vectors[b] = load_raw<typename D::Weights>(w[b] + g * kVector);
            if (kPrefetch) __builtin_prefetch(w[b] + (g + kPrefetchGroups) * kVector);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const auto lane = load_raw<typename D::Lane>(x + r * x_stride + g * D::kInputs);
#pragma GCC unroll 4
            for (int b = 0; b < kBlocks; ++b) sums[r][b] = D::add(sums[r][b], vectors[b], lane);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) store16(tile + r * tile_stride + b * kLanes, sums[r][b]);
}

template <class T>
using Multiply = void (*)(const T*, int64_t, const T* const*, int64_t, float*, int64_t);

template <class T, int kBlocks, bool kPrefetch, int... kRows>
constexpr Multiply<T> pick(int rows, std::integer_sequence<int, kRows...>) {
    constexpr Multiply<T> table[] = {multiply<T, kRows + 1, kBlocks, kPrefetch>...};
    return table[rows - 1];
}

// Any number of blocks, up to kMaxRows rows.
template <class T, bool kPrefetch>
void multiply_tile(
    const T* x, int64_t x_stride, int rows, const T* const* weights, int blocks, int64_t groups, float* tile, int64_t tile_stride
) {
    int b = 0;
    if (!kPrefetch && rows <= kMaxRowsFour) {
        const auto four = pick<T, 4, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRowsFour>{});
        for (; b + 4 <= blocks; b += 4) four(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride);
    }
    if (rows <= kMaxRowsPaired) {
        const auto paired = pick<T, 2, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRowsPaired>{});
        for (; b + 2 <= blocks; b += 2) paired(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride);
    }
    const auto single = pick<T, 1, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRows>{});
    for (; b < blocks; ++b) single(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride);
}

// Scratch of the calling thread, kept between calls.
inline void* scratch(size_t bytes) {
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local size_t capacity = 0;
    if (capacity < bytes) {
        capacity = (bytes + 4095) / 4096 * 4096;
        memory.reset(std::aligned_alloc(64, capacity));
    }
    return memory.get();
}

}  // namespace cas

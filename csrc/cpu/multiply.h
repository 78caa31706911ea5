// The register tile that linears and attention share: a few rows times one or two blocks of 16 outputs.
//
// A weight block is [groups][16 outputs][Dot<T>::kInputs]; a group is the inputs that one lane takes.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>

#include "simd.h"

namespace cas {

constexpr int kMaxRows = 12;      // with two blocks: 24 sums, 2 weights and a broadcast fit 32 registers
constexpr int kMaxRowsFour = 6;  // with four blocks

// What to ask the memory for while blocks are multiplied: in group g, block b asks for first[b] + g * step, from group turn on for
// second[b] + (g - turn) * step.
template <class T>
struct Ahead {
    const T *first[4], *second[4];
    int64_t turn, step;
};

// tile[r][b] = sum over groups of x[r] * weights[b], for kRows rows and kBlocks blocks. Each sum adds its products in the order of the
// inputs whatever the tile, so a row's result does not depend on the rows beside it. `ahead` is read if kPrefetch.
template <class T, int kRows, int kBlocks, bool kPrefetch>
__attribute__((noinline)) void multiply(
    const T* x, int64_t x_stride, const T* const* weights, int64_t groups, float* tile, int64_t tile_stride, const Ahead<T>* ahead
) {
    using D = Dot<T>;
    constexpr int kVector = D::kInputs * kLanes;
    f32x16 sums[kRows][kBlocks];
    for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) sums[r][b] = f32x16{};
    const T *w[kBlocks], *asked[kBlocks];
    for (int b = 0; b < kBlocks; ++b) w[b] = weights[b];
    int64_t g = 0;
    for (int part = 0; part < (kPrefetch ? 2 : 1); ++part) {
        int64_t end = groups;
        if (kPrefetch) {
            for (int b = 0; b < kBlocks; ++b) asked[b] = part ? ahead->second[b] - g * ahead->step : ahead->first[b];
            if (!part) end = ahead->turn;
        }
        for (; g < end; ++g) {
            typename D::Weights vectors[kBlocks];
#pragma GCC unroll 4
            for (int b = 0; b < kBlocks; ++b) {
                vectors[b] = load_raw<typename D::Weights>(w[b] + g * kVector);
                if (kPrefetch) __builtin_prefetch(asked[b] + g * ahead->step);
            }
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const auto lane = load_raw<typename D::Lane>(x + r * x_stride + g * D::kInputs);
#pragma GCC unroll 4
                for (int b = 0; b < kBlocks; ++b) sums[r][b] = D::add(sums[r][b], vectors[b], lane);
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) store16(tile + r * tile_stride + b * kLanes, sums[r][b]);
}

template <class T>
using Multiply = void (*)(const T*, int64_t, const T* const*, int64_t, float*, int64_t, const Ahead<T>*);

template <class T, int kBlocks, bool kPrefetch, int... kRows>
constexpr Multiply<T> pick(int rows, std::integer_sequence<int, kRows...>) {
    constexpr Multiply<T> table[] = {multiply<T, kRows + 1, kBlocks, kPrefetch>...};
    return table[rows - 1];
}

// Any number of blocks, up to kMaxRows rows.
template <class T>
void multiply_tile(
    const T* x, int64_t x_stride, int rows, const T* const* weights, int blocks, int64_t groups, float* tile, int64_t tile_stride
) {
    int b = 0;
    if (rows <= kMaxRowsFour) {
        const auto four = pick<T, 4, false>(rows, std::make_integer_sequence<int, kMaxRowsFour>{});
        for (; b + 4 <= blocks; b += 4) four(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride, nullptr);
    }
    const auto two = pick<T, 2, false>(rows, std::make_integer_sequence<int, kMaxRows>{});
    for (; b + 2 <= blocks; b += 2) two(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride, nullptr);
    if (b < blocks) {
        const auto one = pick<T, 1, false>(rows, std::make_integer_sequence<int, kMaxRows>{});
        one(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride, nullptr);
    }
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

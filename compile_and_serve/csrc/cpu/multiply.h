// The register tile that linears and attention share: a few rows times one or two blocks of 16 outputs.
//
// A weight block is [groups][16 outputs][Dot<T>::kInputs]; a group is the inputs that one lane takes.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>

#include "simd.h"

namespace cas {

// Rows of a tile with one block, with two and with four: their sums, weights and a broadcast fit the registers.
#if defined(__AVX512F__)  // 32 registers, each a vector
constexpr int kMaxRows = 12, kMaxRowsTwo = 12, kMaxRowsFour = 6;
#elif defined(__AVX2__)  // 16 registers, a vector in two of them
constexpr int kMaxRows = 6, kMaxRowsTwo = 2, kMaxRowsFour = 0;
#elif defined(__aarch64__)  // 32 registers, a vector in four of them
constexpr int kMaxRows = 6, kMaxRowsTwo = 2, kMaxRowsFour = 0;
#else  // 16 registers, a vector in four of them
constexpr int kMaxRows = 3, kMaxRowsTwo = 1, kMaxRowsFour = 0;
#endif

// Where a prefetch brings its line to. Not to the L1 cache: the few misses that it can have open would each wait for the memory.
constexpr int kToL2 = 2;

// What to ask the memory for while blocks are multiplied: in group g, block b asks for first[b] + g * step, from group turn on for
// second[b] + (g - turn) * step.
template <class T>
struct Ahead {
    const typename Dot<T>::W *first[4], *second[4];
    int64_t turn, step;
};

// body(0) … body(kCount - 1) with the index a constant. A loop does not do: where it is unrolled late, GCC keeps the sums in memory.
template <int kCount, class Body>
CAS_INLINE inline void unrolled(const Body& body) {
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) CAS_INLINE {
        (body(std::integral_constant<int, kIndex>{}), ...);
    }(std::make_integer_sequence<int, kCount>{});
}

// A weight vector as the product takes it: as it lies in memory, unless D::load makes it of that.
template <class D>
CAS_INLINE inline typename D::Weights load_weights(const typename D::W* address) {
    if constexpr (requires { D::load(address); }) return D::load(address);
    else return load_raw<typename D::Weights>(address);
}

enum Mode { kPlain, kPrefetch, kAccumulate };

// tile[r][b] = sum over groups of x[r] * weights[b], for kRows rows and kBlocks blocks. Each sum adds its products in the order of the
// inputs whatever the tile, so a row's result does not depend on the rows beside it. kPrefetch: `ahead` is
// read. kAccumulate: row r of the tile is not overwritten but multiplied by factors[r] and added to.
template <class T, int kRows, int kBlocks, Mode kMode>
__attribute__((noinline)) void multiply(
    const typename Dot<T>::X* x, int64_t x_stride, const typename Dot<T>::W* const* weights, int64_t groups,
    typename Dot<T>::Sum* tile, int64_t tile_stride, const float* factors, const Ahead<T>* ahead
) {
    using D = Dot<T>;
    constexpr int kVector = D::kInputs * kLanes;
    typename D::Sums sums[kRows][kBlocks];
    unrolled<kRows>([&](auto r) CAS_INLINE {
        unrolled<kBlocks>([&](auto b) CAS_INLINE {
            if constexpr (kMode == kAccumulate) sums[r][b] = load16(tile + r * tile_stride + b * kLanes) * factors[r];
            else sums[r][b] = typename D::Sums{};
        });
    });
    const typename D::W *w[kBlocks], *asked[kBlocks];
    unrolled<kBlocks>([&](auto b) CAS_INLINE { w[b] = weights[b]; });
    int64_t g = 0;
    for (int part = 0; part < (kMode == kPrefetch ? 2 : 1); ++part) {
        int64_t end = groups, step = 0;
        if constexpr (kMode == kPrefetch) {
            if (!part) end = ahead->turn;
            step = ahead->step;
            unrolled<kBlocks>([&](auto b) CAS_INLINE { asked[b] = part ? ahead->second[b] - g * step : ahead->first[b]; });
        }
        for (; g < end; ++g) {
            typename D::Weights vectors[kBlocks];
            unrolled<kBlocks>([&](auto b) CAS_INLINE {
                vectors[b] = load_weights<D>(w[b] + g * kVector);
                if constexpr (kMode == kPrefetch) __builtin_prefetch(asked[b] + g * step, 0, kToL2);
            });
            unrolled<kRows>([&](auto r) CAS_INLINE {
                const auto lane = load_raw<typename D::Lane>(x + r * x_stride + g * D::kInputs);
                unrolled<kBlocks>([&](auto b) CAS_INLINE { sums[r][b] = D::add(sums[r][b], vectors[b], lane); });
            });
        }
    }
    unrolled<kRows>([&](auto r) CAS_INLINE {
        unrolled<kBlocks>([&](auto b) CAS_INLINE { store16(tile + r * tile_stride + b * kLanes, sums[r][b]); });
    });
}

template <class T>
using Multiply = decltype(&multiply<T, 1, 1, kPlain>);

template <class T, int kBlocks, Mode kMode, int... kRows>
constexpr Multiply<T> pick(int rows, std::integer_sequence<int, kRows...>) {
    constexpr Multiply<T> table[] = {multiply<T, kRows + 1, kBlocks, kMode>...};
    return table[rows - 1];
}

// Any number of blocks, up to kMaxRows rows. kFour: few rows take four blocks at a time (more code to compile).
template <class T, Mode kMode, bool kFour = true>
void multiply_tile(
    const typename Dot<T>::X* x, int64_t x_stride, int rows, const typename Dot<T>::W* const* weights, int blocks, int64_t groups,
    typename Dot<T>::Sum* tile, int64_t tile_stride, const float* factors = nullptr
) {
    int b = 0;
    if constexpr (kFour && kMaxRowsFour > 0) {
        if (rows <= kMaxRowsFour) {
            const auto four = pick<T, 4, kMode>(rows, std::make_integer_sequence<int, kMaxRowsFour>{});
            for (; b + 4 <= blocks; b += 4) four(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride, factors, nullptr);
        }
    }
    if (rows <= kMaxRowsTwo) {
        const auto two = pick<T, 2, kMode>(rows, std::make_integer_sequence<int, kMaxRowsTwo>{});
        for (; b + 2 <= blocks; b += 2) two(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride, factors, nullptr);
    }
    if (b == blocks) return;
    const auto one = pick<T, 1, kMode>(rows, std::make_integer_sequence<int, kMaxRows>{});
    for (; b < blocks; ++b) one(x, x_stride, weights + b, groups, tile + b * kLanes, tile_stride, factors, nullptr);
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

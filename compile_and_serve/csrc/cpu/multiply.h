// The register tile of linears and attention: a few rows times up to four blocks of 16 outputs.
//
// A weight block is [groups][16 outputs][Dot<T>::kInputs]. A group is the inputs of one lane.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>

#include "simd.h"

namespace cas {

// Maximum rows of a tile with one block, two blocks and four blocks: the sums, the weights and a broadcast fit the registers.
#if defined(__AVX512F__)  // 32 registers, one per vector
constexpr int kMaxRows = 12, kMaxRowsTwo = 12, kMaxRowsFour = 6;
#elif defined(__AVX2__)  // 16 registers, two per vector
constexpr int kMaxRows = 6, kMaxRowsTwo = 2, kMaxRowsFour = 0;
#elif defined(__aarch64__)  // 32 registers, four per vector
constexpr int kMaxRows = 6, kMaxRowsTwo = 2, kMaxRowsFour = 0;
#else  // 16 registers, four per vector
constexpr int kMaxRows = 3, kMaxRowsTwo = 1, kMaxRowsFour = 0;
#endif

// Addresses to prefetch during a product: in group g, block b prefetches first[b] + g * step before group `turn`, and
// second[b] + (g - turn) * step from there on.
template <class T>
struct Ahead {
    const typename Dot<T>::W *first[4], *second[4];
    int64_t turn, step;
};

// Calls body(0) … body(kCount - 1) with constant indices. GCC unrolls a loop too late and then keeps the sums in memory.
template <int kCount, class Body>
CAS_INLINE inline void unrolled(const Body& body) {
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) CAS_INLINE {
        (body(std::integral_constant<int, kIndex>{}), ...);
    }(std::make_integer_sequence<int, kCount>{});
}

// Loads a weight vector with D::load if there is one, otherwise unchanged.
template <class D>
CAS_INLINE inline typename D::Weights load_weights(const typename D::W* address) {
    if constexpr (requires { D::load(address); }) return D::load(address);
    else return load_raw<typename D::Weights>(address);
}

enum Mode { kPlain, kPrefetch, kAccumulate };

// tile[r][b] = sum over groups of x[r] * weights[b], for kRows rows and kBlocks blocks. Products are added in the order of the
// inputs for every tile size, so a row's result does not depend on other rows. kPrefetch: prefetches the addresses in `ahead`.
// kAccumulate: tile[r] = tile[r] * factors[r] + the sum.
template <class T, int kRows, int kBlocks, Mode kMode>
__attribute__((noinline)) void multiply(
    const typename Dot<T>::X* x, int64_t x_stride, const typename Dot<T>::W* const* weights, int64_t groups,
    typename Dot<T>::Sum* tile, int64_t tile_stride, const float* factors, const Ahead<T>* ahead
) {
    using D = Dot<T>;
    constexpr int kVector = D::kInputs * kLanes;
    static_assert(sizeof(typename D::Lane) == D::kInputs * sizeof(typename D::X));
    typename D::Sums sums[kRows][kBlocks];
    unrolled<kRows>([&](auto r) CAS_INLINE {
        unrolled<kBlocks>([&](auto b) CAS_INLINE {
            if constexpr (kMode == kAccumulate) sums[r][b] = load16(tile + r * tile_stride + b * kLanes) * factors[r];
            else sums[r][b] = typename D::Sums{};
        });
    });
    const typename D::W *w[kBlocks], *prefetched[kBlocks];
    unrolled<kBlocks>([&](auto b) CAS_INLINE { w[b] = weights[b]; });
    // One address for every four rows. An x86 load adds 0, 1 or 2 times row_bytes to it, or 3 times row_bytes from one more register.
    // With an address per row, GCC runs out of general registers and moves some through vector registers in every pass.
    constexpr int kAddresses = (kRows + 3) / 4;
    const char* addresses[kAddresses];
    const int64_t row_bytes = x_stride * sizeof(typename D::X);
    unrolled<kAddresses>([&](auto i) CAS_INLINE { addresses[i] = reinterpret_cast<const char*>(x) + 4 * i * row_bytes; });
    int64_t g = 0;
    for (int part = 0; part < (kMode == kPrefetch ? 2 : 1); ++part) {
        int64_t end = groups, step = 0;
        if constexpr (kMode == kPrefetch) {
            if (!part) end = ahead->turn;
            step = ahead->step;
            unrolled<kBlocks>([&](auto b) CAS_INLINE { prefetched[b] = part ? ahead->second[b] - g * step : ahead->first[b]; });
        }
        for (; g < end; ++g) {
            typename D::Weights vectors[kBlocks];
            unrolled<kBlocks>([&](auto b) CAS_INLINE {
                vectors[b] = load_weights<D>(w[b] + g * kVector);
                if constexpr (kMode == kPrefetch) __builtin_prefetch(prefetched[b] + g * step, 0, kToL2);
            });
            unrolled<kRows>([&](auto r) CAS_INLINE {
                const auto lane = load_raw<typename D::Lane>(addresses[r / 4] + r % 4 * row_bytes);
                unrolled<kBlocks>([&](auto b) CAS_INLINE { sums[r][b] = D::add(sums[r][b], vectors[b], lane); });
            });
            unrolled<kAddresses>([&](auto i) CAS_INLINE {
                addresses[i] += sizeof(typename D::Lane);
                asm("" : "+r"(addresses[i]));  // or GCC makes them an address per row again
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

// Multiplies up to kMaxRows rows with any number of blocks. kFour: few rows use tiles of four blocks, which is more code.
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

// Scratch memory of the calling thread, reused between calls.
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

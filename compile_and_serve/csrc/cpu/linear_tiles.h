// The loop of every linear, for any kind of weights: rows are prepared, threads take panels of outputs, and tiles of rows are
// multiplied and finished. The weights are streamed from memory once per chunk of rows.
//
// T: type of the activations. A token has one or more rows. A group is the Dot<T>::kInputs inputs of one lane. A tile is at most
// kMaxRows rows (kMaxUnitRows with a matrix unit) by kMaxTileBlocks blocks of 16 outputs.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "kernels.h"
#include "matrix_unit.h"
#include "multiply.h"
#include "simd.h"

namespace cas {

constexpr int kMaxTileBlocks = 3;
static_assert(kMaxTileBlocks <= kMaxSliceBlocks);
constexpr int kTileWidth = kMaxTileBlocks * kLanes;
constexpr int kMaxSums = std::max(kMaxRows, kMaxUnitRows) * kTileWidth;
constexpr int kStreamRows = 4;              // up to this many, memory bandwidth limits, and hardware prefetching alone is faster
constexpr int kPrefetchGroups = 64;         // prefetch distance in weight vectors of 64 bytes
constexpr int kAheadTiles = 2;              // how many of a panel's last tiles prefetch the next panel
constexpr int64_t kGrabBytes = 128 << 10;   // weights that a thread takes at a time
constexpr int64_t kChunkBytes = 512 << 10;  // activations per pass over the weights; they stay in the L2 cache
constexpr int64_t kSliceGroups = 144;       // of a panel's weights, which the matrix unit multiplies by
constexpr int64_t kSliceTiles = 8;          // this many tiles of rows while they are in the L1 cache
constexpr int64_t kOwnTokens = 2;           // up to this many, each thread prepares all tokens: faster than a barrier

inline f32x16 silu(f32x16 x) { return x / (1.0f + exp16(-x)); }

// 1 / sqrt(mean(x^2) + eps)
template <class T>
float inverse_rms(const T* x, int64_t width, float eps) {
    f32x16 squares{};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const f32x16 v = load16(x + i);
        squares += v * v;
    }
    float total = sum16(squares);
    for (; i < width; ++i) total += to_float(x[i]) * to_float(x[i]);
    return 1.0f / __builtin_sqrtf(total / float(width) + eps);
}

inline int64_t output_columns(const CasLinear& a) { return a.silu_mul ? a.out_features / 2 : a.out_features; }

// The outputs of one tile. With silu_mul: 16 columns, from a gate block and one or two up blocks. Otherwise: two blocks of 16
// columns. In both cases the blocks lie half a weight apart, so that consecutive panels read two long streams of memory.
template <class T>
struct Panel {
    using W = typename Dot<T>::W;
    struct Part {
        int64_t column;
        int count;
    };
    int num_parts = 0, blocks = 0;
    int up_offset;                // offset in the tile of the first column's up sum
    Part parts[2];                // the sums of part p begin at p * kLanes
    const W* weights[kMaxTileBlocks];

    Panel(const CasLinear& a, int64_t index, int64_t groups) {
        const int64_t block_size = groups * Dot<T>::kInputs * kLanes;
        const int64_t columns = output_columns(a);
        const int64_t all_blocks = (a.out_features + kLanes - 1) / kLanes;
        const auto add_block = [&](int64_t block) { weights[blocks++] = static_cast<const W*>(a.packed) + block * block_size; };
        const auto add_part = [&](int64_t block) {
            parts[num_parts++] = {block * kLanes, int(std::min<int64_t>(kLanes, columns - block * kLanes))};
            add_block(block);
        };
        add_part(index);
        up_offset = kLanes + int(columns % kLanes);
        const int64_t second = index + (a.silu_mul ? columns / kLanes : count(a));
        if (!a.silu_mul) {
            if (second < all_blocks) add_part(second);
            return;
        }
        add_block(second);
        if (columns % kLanes && second + 1 < all_blocks) add_block(second + 1);
    }

    // The number of panels.
    static int64_t count(const CasLinear& a) {
        const int64_t width = a.silu_mul ? kLanes : 2 * kLanes;
        return (output_columns(a) + width - 1) / width;
    }
};

// Computes the sums of one tile and prefetches weights, unless the hardware prefetcher suffices. With one tile per panel, it
// prefetches a fixed distance ahead: first in the same blocks, then the start of the next panel. With several tiles, each of
// the last kAheadTiles tiles prefetches its share of the next panel; with a matrix unit, none does. unit: null without one.
template <class T>
void compute_tile(
    const typename Dot<T>::X* x, int64_t x_stride, int rows, const Panel<T>& panel, const Panel<T>& next, int64_t tile_index,
    int64_t tiles, int64_t groups, MatrixUnit* unit, typename Dot<T>::Sum* tile
) {
    constexpr int kVector = Dot<T>::kInputs * kLanes;
    const int64_t shares = std::min<int64_t>(tiles, kAheadTiles), share = tile_index - (tiles - shares);
    if (share < 0 || (tiles == 1 && rows <= kStreamRows && !unit))
        return multiply_tile<T, kPlain, false>(x, x_stride, rows, panel.weights, panel.blocks, groups, tile, kTileWidth);
    Ahead<T> ahead;
    const int at_once = unit || rows <= kMaxRowsTwo ? 2 : 1;
    for (int b = 0; b < panel.blocks; b += at_once) {
        const int n = std::min(at_once, panel.blocks - b);
        for (int i = 0; i < n; ++i) {
            const auto* following = next.weights[std::min(b + i, next.blocks - 1)];
            ahead.first[i] = tiles == 1 ? panel.weights[b + i] + kPrefetchGroups * kVector
                                        : following + groups * share / shares * kVector;
            ahead.second[i] = following;
        }
        ahead.turn = tiles == 1 ? std::max<int64_t>(0, groups - kPrefetchGroups) : groups;
        ahead.step = kVector / shares;
        if (unit) {
            unit->multiply<T>(x, x_stride, rows, panel.weights + b, n, groups, tile + b * kLanes, kTileWidth, &ahead);
            continue;
        }
        const auto product = n == 2 ? pick<T, 2, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRowsTwo>{})
                                    : pick<T, 1, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRows>{});
        product(x, x_stride, panel.weights + b, groups, tile + b * kLanes, kTileWidth, nullptr, &ahead);
    }
}

// Writes the output columns of `panel` for tokens token .. token + count - 1. sums(r, offset, output, n): the product of row
// token + r for the n <= 16 outputs from `output` on. Its sums begin at `offset` in a row of the tile.
template <class Y, class T, class Sums>
CAS_INLINE inline void finish_tile(const CasLinear& a, int64_t token, int count, const Panel<T>& panel, const Sums& sums) {
    const Y* bias = static_cast<const Y*>(a.bias);
    const Y* residual = static_cast<const Y*>(a.residual);
    Y* out = static_cast<Y*>(a.out);
    const int64_t half = a.out_features / 2;
    const auto load = [](const Y* address, int n) { return n == kLanes ? load16(address) : load_part(address, n); };
    for (int part = 0; part < panel.num_parts; ++part) {
        const auto [c, n] = panel.parts[part];
        const f32x16 bias_first = bias ? load(bias + c, n) : f32x16{};
        const f32x16 bias_up = bias && a.silu_mul ? load(bias + half + c, n) : f32x16{};
        for (int r = 0; r < count; ++r) {
            f32x16 y = sums(r, part * kLanes, c, n) + bias_first;
            if (a.silu_mul) y = silu(y) * (sums(r, panel.up_offset, half + c, n) + bias_up);
            if (residual) y += load(residual + (token + r) * a.residual_stride + c, n);
            Y* address = out + (token + r) * a.out_stride + c;
            if (n == kLanes) store16(address, y);
            else store_part(address, y, n);
        }
    }
}

// Input rows of the product. data: the first row of the first token. stride: elements between rows.
template <class T>
struct Rows {
    const typename Dot<T>::X* data;
    int64_t stride;
};

// Runs a whole linear. Kernel:
//   Dots                                      the parameter of Dot
//   rows_per_token()                          rows of the product per token
//   scratch_bytes()                           memory for all prepared tokens; 0: x is read in place
//   prepare(memory, token)                    writes one token's rows to memory
//   rows(memory)                              → Rows
//   finish(memory, tile, token, count, panel) writes the outputs of `count` tokens from their sums
template <class Kernel>
void run_linear(const CasLinear& a, const Kernel& kernel) {
    using T = typename Kernel::Dots;
    const int64_t groups = (a.in_features + Dot<T>::kInputs - 1) / Dot<T>::kInputs;
    const int64_t panels = Panel<T>::count(a);
    const bool has_unit = uses_matrix_unit<T>(groups);
    const int rows_per_token = kernel.rows_per_token(), tile_tokens = (has_unit ? kMaxUnitRows : kMaxRows) / rows_per_token;
    const size_t scratch_bytes = kernel.scratch_bytes();
    const bool prepares_together = scratch_bytes && a.num_tokens > kOwnTokens;
    void* shared_memory = prepares_together ? scratch(scratch_bytes) : nullptr;

    const int64_t token_bytes = int64_t(sizeof(typename Dot<T>::X)) * groups * Dot<T>::kInputs * rows_per_token;
    const int64_t chunk_limit = std::max<int64_t>(4 * tile_tokens, kChunkBytes / token_bytes);
    const int64_t chunks = (a.num_tokens + chunk_limit - 1) / chunk_limit;
    const int64_t items = chunks * panels;
    // Threads take items dynamically, so that a preempted thread delays one grab only.
    const int64_t panel_bytes = int64_t(sizeof(typename Dot<T>::W)) * groups * Dot<T>::kInputs * 2 * kLanes;
    const int64_t grab = std::max<int64_t>(1, std::min(kGrabBytes / panel_bytes, items / (4 * a.num_threads)));
    std::atomic<int64_t> next_item{0};

#pragma omp parallel num_threads(a.num_threads)
    {
        void* memory = shared_memory;
        if (prepares_together) {
            const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
            const int64_t begin = a.num_tokens * thread / threads, end = a.num_tokens * (thread + 1) / threads;
            for (int64_t t = begin; t < end; ++t) kernel.prepare(memory, t);
#pragma omp barrier
        } else if (scratch_bytes) {
            memory = scratch(scratch_bytes);
            for (int64_t t = 0; t < a.num_tokens; ++t) kernel.prepare(memory, t);
        }
        const Rows<T> x = kernel.rows(memory);
        MatrixUnit unit;
        alignas(64) typename Dot<T>::Sum sums[CAS_MATRIX_UNIT ? kSliceTiles * kMaxSums : kMaxSums];
        int64_t grabbed = 0;
        const auto take = [&](int64_t item) {
            if (++item < grabbed) return item;
            item = next_item.fetch_add(grab, std::memory_order_relaxed);
            grabbed = std::min(item + grab, items);
            return item;
        };
        for (int64_t item = take(-1), following; item < items; item = following) {
            following = take(item);
            const Panel<T> panel(a, item % panels, groups), next(a, std::min(following, items - 1) % panels, groups);
            const int64_t chunk = item / panels;
            const int64_t chunk_begin = a.num_tokens * chunk / chunks, chunk_end = a.num_tokens * (chunk + 1) / chunks;
            const int64_t chunk_tokens = chunk_end - chunk_begin;
            const int64_t tiles = (chunk_tokens + tile_tokens - 1) / tile_tokens;
            const auto first_token = [&](int64_t t) { return chunk_begin + chunk_tokens * t / tiles; };
            const auto rows_of = [&](int64_t t) { return x.data + first_token(t) * rows_per_token * x.stride; };
            const auto count_of = [&](int64_t t) { return int(first_token(t + 1) - first_token(t)); };
            const bool slices = has_unit && tiles > 1;
            for (int64_t begin = 0; begin < tiles; begin += slices ? kSliceTiles : 1) {
                const int64_t end = slices ? std::min(begin + kSliceTiles, tiles) : begin + 1;
                const auto sums_of = [&](int64_t t) { return sums + (t - begin) * kMaxSums; };
                if (!slices)
                    compute_tile<T>(
                        rows_of(begin), x.stride, count_of(begin) * rows_per_token, panel, next, begin, tiles, groups,
                        has_unit ? &unit : nullptr, sums);
                else
                    for (int64_t g = 0; g < groups; g += kSliceGroups)
                        for (int64_t t = begin; t < end; ++t)
                            unit.add_slice<T>(
                                rows_of(t), x.stride, count_of(t) * rows_per_token, panel.weights, panel.blocks, g,
                                std::min(kSliceGroups, groups - g), sums_of(t), kTileWidth);
                for (int64_t t = begin; t < end; ++t) kernel.finish(memory, sums_of(t), first_token(t), count_of(t), panel);
            }
        }
    }
}

}  // namespace cas

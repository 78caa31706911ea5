// Linear layers over blocked weights: outputs in blocks of 16, one vector of weights a step of the inputs, so that one row streams the
// weights once from memory and many rows are register tiles of rows x blocks. See kernels.h for the layout.
//
// Names: T rows (tokens), I inputs, O outputs; a group is the Dot<T>::kInputs inputs of one lane; a tile is at most kMaxRows rows by
// kTileBlocks blocks of 16 outputs.
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "kernels.h"
#include "multiply.h"
#include "simd.h"

namespace cas {
namespace {

constexpr int kMaxTileBlocks = 3;
constexpr int kTileWidth = kMaxTileBlocks * kLanes;
constexpr int kPrefetchGroups = 64;         // weight vectors (64 bytes) ahead of the one in use
constexpr int kAheadTiles = 2;              // of a panel's tiles, how many ask for the next panel
constexpr int64_t kGrabBytes = 128 << 10;   // weights that a thread takes at a time
constexpr int64_t kChunkBytes = 512 << 10;  // activations that one pass over the weights keeps in the L2 cache

f32x16 silu(f32x16 x) { return x / (1.0f + exp16(-x)); }

// Columns column .. column + count - 1 of `rows` rows of the output, from the sums in `tile`.
template <class T>
void finish_tile(const CasLinear& a, const float* tile, int64_t row, int rows, int64_t column, int count, int up_offset) {
    const T* bias = static_cast<const T*>(a.bias);
    const T* residual = static_cast<const T*>(a.residual);
    T* out = static_cast<T*>(a.out);
    const int64_t half = a.out_features / 2;
    const auto load = [](const T* address, int n) { return n == kLanes ? load16(address) : load_part(address, n); };
    for (int done = 0; done < count; done += kLanes) {
        const int64_t c = column + done;
        const int n = std::min(kLanes, count - done);
        const f32x16 bias_first = bias ? load(bias + c, n) : f32x16{};
        const f32x16 bias_up = bias && a.silu_mul ? load(bias + half + c, n) : f32x16{};
        for (int r = 0; r < rows; ++r) {
            f32x16 y = load16(tile + r * kTileWidth + done) + bias_first;
            if (a.silu_mul) y = silu(y) * (load16(tile + r * kTileWidth + up_offset + done) + bias_up);
            if (residual) y += load(residual + (row + r) * a.residual_stride + c, n);
            T* address = out + (row + r) * a.out_stride + c;
            if (n == kLanes) store16(address, y);
            else store_part(address, y, n);
        }
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight, zero-padded to padded_width; a plain copy without a weight.
template <class T>
void prepare_row(const T* x, const T* norm_weight, float eps, int64_t width, int64_t padded_width, T* y) {
    float scale = 1.0f;
    int64_t i = 0;
    if (norm_weight) {
        f32x16 squares{};
        for (; i + kLanes <= width; i += kLanes) {
            const f32x16 v = load16(x + i);
            squares += v * v;
        }
        float total = sum16(squares);
        for (; i < width; ++i) total += to_float(x[i]) * to_float(x[i]);
        scale = 1.0f / __builtin_sqrtf(total / float(width) + eps);
    }
    for (i = 0; i + kLanes <= width; i += kLanes) {
        f32x16 v = load16(x + i);
        if (norm_weight) v = v * scale * load16(norm_weight + i);
        store16(y + i, v);
    }
    for (; i < width; ++i) store_scalar(y + i, norm_weight ? to_float(x[i]) * scale * to_float(norm_weight[i]) : to_float(x[i]));
    for (; i < padded_width; ++i) store_scalar(y + i, 0.0f);
}

// The outputs that one tile covers: 32 columns from two blocks, or with silu_mul 16 columns from a gate and one or two up blocks.
template <class T>
struct Panel {
    int64_t column;
    int count, blocks, up_offset;  // up_offset: where in the tile the up sums of its first column lie
    const T* weights[kMaxTileBlocks];

    Panel(const CasLinear& a, int64_t index, int64_t groups) {
        const int64_t block_size = groups * Dot<T>::kInputs * kLanes;
        const int64_t columns = a.silu_mul ? a.out_features / 2 : a.out_features;
        const int64_t all_blocks = (a.out_features + kLanes - 1) / kLanes;
        const T* packed = static_cast<const T*>(a.packed);
        column = index * width(a);
        count = int(std::min<int64_t>(width(a), columns - column));
        blocks = 0;
        const int64_t first_block = column / kLanes;
        for (int64_t b = first_block; b * kLanes < column + count; ++b) weights[blocks++] = packed + b * block_size;
        up_offset = kLanes + int(columns % kLanes);
        if (!a.silu_mul) return;
        const int64_t up_block = first_block + columns / kLanes;
        weights[blocks++] = packed + up_block * block_size;
        if (columns % kLanes && up_block + 1 < all_blocks) weights[blocks++] = packed + (up_block + 1) * block_size;
    }

    static int64_t width(const CasLinear& a) { return a.silu_mul ? kLanes : 2 * kLanes; }
};

// The sums of one tile, while the memory is asked for what comes next: with one tile a panel a fixed distance ahead in the same blocks
// and then the start of the next panel; with several, each of the last ones asks for its part of the whole next panel.
template <class T>
void compute_tile(
    const T* x, int64_t x_stride, int rows, const Panel<T>& panel, const Panel<T>& next, int64_t tile_index, int64_t tiles,
    int64_t groups, float* tile
) {
    constexpr int kVector = Dot<T>::kInputs * kLanes;
    const int64_t parts = std::min<int64_t>(tiles, kAheadTiles), part = tile_index - (tiles - parts);
    if (part < 0) return multiply_tile<T, kPlain>(x, x_stride, rows, panel.weights, panel.blocks, groups, tile, kTileWidth);
    Ahead<T> ahead;
    for (int b = 0; b < panel.blocks; b += 2) {
        const int n = std::min(2, panel.blocks - b);
        for (int i = 0; i < n; ++i) {
            const T* following = next.weights[std::min(b + i, next.blocks - 1)];
            ahead.first[i] = tiles == 1 ? panel.weights[b + i] + kPrefetchGroups * kVector
                                        : following + groups * part / parts * kVector;
            ahead.second[i] = following;
        }
        ahead.turn = tiles == 1 ? std::max<int64_t>(0, groups - kPrefetchGroups) : groups;
        ahead.step = kVector / parts;
        const auto product = n == 2 ? pick<T, 2, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRows>{})
                                    : pick<T, 1, kPrefetch>(rows, std::make_integer_sequence<int, kMaxRows>{});
        product(x, x_stride, panel.weights + b, groups, tile + b * kLanes, kTileWidth, nullptr, &ahead);
    }
}

template <class T>
void linear(const CasLinear& a) {
    constexpr int kInputs = Dot<T>::kInputs;
    const int64_t groups = (a.in_features + kInputs - 1) / kInputs;
    const int64_t padded_width = groups * kInputs;
    const int64_t columns = a.silu_mul ? a.out_features / 2 : a.out_features;
    const int64_t panels = (columns + Panel<T>::width(a) - 1) / Panel<T>::width(a);
    const T* norm_weight = static_cast<const T*>(a.norm_weight);
    const bool prepares = norm_weight || padded_width != a.in_features;
    T* prepared = prepares ? static_cast<T*>(scratch(sizeof(T) * padded_width * a.num_tokens)) : nullptr;

    const int64_t chunk_limit = std::max<int64_t>(4 * kMaxRows, kChunkBytes / int64_t(sizeof(T) * padded_width));
    const int64_t chunks = (a.num_tokens + chunk_limit - 1) / chunk_limit;
    const int64_t items = chunks * panels;
    // Items are handed out as threads ask for them: a thread that another process pushes off its core holds up one grab only.
    const int64_t panel_bytes = int64_t(sizeof(T)) * padded_width * 2 * kLanes;
    const int64_t grab = std::max<int64_t>(1, std::min(kGrabBytes / panel_bytes, items / (4 * a.num_threads)));
    std::atomic<int64_t> next_item{0};

#pragma omp parallel num_threads(a.num_threads)
    {
        const T* x = static_cast<const T*>(a.x);
        int64_t x_stride = a.x_stride;
        if (prepares) {
            const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
            const int64_t begin = a.num_tokens * thread / threads, end = a.num_tokens * (thread + 1) / threads;
            for (int64_t t = begin; t < end; ++t)
                prepare_row(x + t * x_stride, norm_weight, a.eps, a.in_features, padded_width, prepared + t * padded_width);
            x = prepared;
            x_stride = padded_width;
#pragma omp barrier
        }
        alignas(64) float tile[kMaxRows * kTileWidth];
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
            const int64_t chunk_rows = chunk_end - chunk_begin;
            const int64_t tiles = (chunk_rows + kMaxRows - 1) / kMaxRows;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t row = chunk_begin + chunk_rows * t / tiles;
                const int rows = int(chunk_begin + chunk_rows * (t + 1) / tiles - row);
                compute_tile(x + row * x_stride, x_stride, rows, panel, next, t, tiles, groups, tile);
                finish_tile<T>(a, tile, row, rows, panel.column, panel.count, panel.up_offset);
            }
        }
    }
}

}  // namespace
}  // namespace cas

extern "C" void cas_linear(const CasLinear* args) {
    if (args->num_tokens == 0) return;
    if (args->dtype == CAS_BFLOAT16) cas::linear<cas::bf16>(*args);
    else cas::linear<float>(*args);
}

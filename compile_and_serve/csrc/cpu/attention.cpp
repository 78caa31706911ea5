// Paged attention with rotary embedding and KV write, in one parallel region per call.
//
// Work item: (sequence, tile of its query tokens, range of its keys) x key/value head. All query heads of a key/value head share
// an item as rows (token, head) of the tile, so that their keys and values are read once. An item processes its keys in blocks
// of kKeys. Each block is repacked into the layout of multiply.h (keys transposed, values in pairs). Then scores and weighted
// sums are register-tiled products, with an online softmax in between (https://arxiv.org/abs/2205.14135).
//
// Names: G query heads per key/value head, E head size, P tokens per cache block.
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_keys.h"
#include "attention_softmax.h"
#include "kernels.h"
#include "multiply.h"
#include "simd.h"

namespace cas {
namespace {

constexpr int kMinSplitKeys = 256;  // shorter ranges of keys are not split

struct Item {
    int32_t seq;
    int32_t token_begin, token_end;  // within the batch
    int32_t key_begin, key_end;      // within the sequence
    int32_t split, num_splits;
    int32_t partial;  // index of the first split's partial result, for all heads; -1 without splits
};

// Results of items that cover only part of a sequence's keys: unnormalized sums, and each row's maximum and denominator.
struct Partials {
    float *sums, *maxima, *denominators;
};

struct Plan {
    std::vector<Item> items;
    int64_t num_partials = 0;
};

// The first token that the token at `position` attends to.
inline int64_t first_visible(const CasAttention& a, int64_t position) {
    if (a.window <= 0) return 0;
    return a.chunked ? position / a.window * a.window : std::max<int64_t>(0, position - a.window + 1);
}

// Whether a token reads all of its sequence, not only the tokens before it.
inline bool reads_all(const CasAttention& a) { return a.window < 0; }

int64_t tokens_per_tile(const CasAttention& a) { return std::max<int64_t>(1, kTileRows / (a.num_heads / a.num_kv_heads)); }

Plan make_plan(const CasAttention& a) {
    Plan plan;
    const int64_t tile_tokens = tokens_per_tile(a);
    int64_t all_keys = 0;
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int32_t begin = a.query_start_loc[s], end = a.query_start_loc[s + 1];
        for (int32_t token = begin; token < end; token += int32_t(tile_tokens)) {
            const int32_t tile_end = std::min<int32_t>(end, token + int32_t(tile_tokens));
            const int32_t keys = reads_all(a) ? a.seq_lens[s] : a.seq_lens[s] - (end - tile_end);
            if (keys <= 0) continue;  // `attention` writes zeros
            const int32_t first = int32_t(first_visible(a, a.seq_lens[s] - (end - token)));
            plan.items.push_back({int32_t(s), token, tile_end, first, keys, 0, 1, -1});
            all_keys += keys - first;
        }
    }
    const int64_t target_pairs = 4 * a.plan_threads;
    const int64_t pairs = int64_t(plan.items.size()) * a.num_kv_heads;
    if (a.plan_threads > 1 && pairs < target_pairs) {
        const int64_t target_keys = std::max<int64_t>(kMinSplitKeys, all_keys * a.num_kv_heads / target_pairs);
        std::vector<Item> split_items;
        for (const Item& item : plan.items) {
            const int64_t keys = item.key_end - item.key_begin;
            const int64_t splits = std::max<int64_t>(1, (keys + target_keys / 2) / target_keys);
            const int64_t length = ((keys + splits - 1) / splits + kKeys - 1) / kKeys * kKeys;
            const int64_t used = (keys + length - 1) / length;
            for (int64_t i = 0; i < used; ++i) {
                Item part = item;
                part.key_begin = int32_t(item.key_begin + i * length);
                part.key_end = int32_t(std::min<int64_t>(item.key_end, part.key_begin + length));
                part.split = int32_t(i);
                part.num_splits = int32_t(used);
                part.partial = used > 1 ? int32_t(plan.num_partials) : -1;
                split_items.push_back(part);
            }
            if (used > 1) plan.num_partials += used;
        }
        plan.items.swap(split_items);
    }
    // Longest first, so that the tail is short.
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& x, const Item& y) {
        return int64_t(x.token_end - x.token_begin) * (x.key_end - x.key_begin) >
               int64_t(y.token_end - y.token_begin) * (y.key_end - y.key_begin);
    });
    return plan;
}

// cos and sin of one token as floats.
struct Rotation {
    alignas(64) float cos[kMaxHeadDim], sin[kMaxHeadDim];

    void load(const CasAttention& a, int64_t token) {
        if (a.rope_dtype == CAS_BFLOAT16) fill<bf16>(a, token);
        else fill<float>(a, token);
    }

   private:
    template <class R>
    void fill(const CasAttention& a, int64_t token) {
        const R* c = static_cast<const R*>(a.cos) + token * a.cos_stride;
        const R* s = static_cast<const R*>(a.sin) + token * a.sin_stride;
        for (int64_t e = 0; e < a.head_dim; e += kLanes) {
            store16(cos + e, load16(c + e));
            store16(sin + e, load16(s + e));
        }
    }
};

// y = rope(rms_norm(x)) of one head, computed in float32 and rounded once. Without cos and norm_weight, y is a copy of x.
template <class T>
void prepare_head(const CasAttention& a, const T* x, const T* norm_weight, const Rotation& rotation, T* y) {
    const int64_t width = a.head_dim, half = width / 2;
    if (!norm_weight && !a.cos) {
        std::memcpy(y, x, width * sizeof(T));
        return;
    }
    alignas(64) float values[kMaxHeadDim];
    f32x16 squares{};
    for (int64_t e = 0; e < width; e += kLanes) {
        const f32x16 v = load16(x + e);
        squares += v * v;
        store16(values + e, v);
    }
    if (norm_weight) {
        const float scale = 1.0f / __builtin_sqrtf(sum16(squares) / float(width) + a.eps);
        for (int64_t e = 0; e < width; e += kLanes) store16(values + e, load16(values + e) * scale * load16(norm_weight + e));
    }
    if (!a.cos) {
        for (int64_t e = 0; e < width; e += kLanes) store16(y + e, load16(values + e));
        return;
    }
    if (half % kLanes == 0) {
        for (int64_t e = 0; e < half; e += kLanes) {
            const f32x16 low = load16(values + e), high = load16(values + half + e);
            store16(y + e, low * load16(rotation.cos + e) - high * load16(rotation.sin + e));
            store16(y + half + e, high * load16(rotation.cos + half + e) + low * load16(rotation.sin + half + e));
        }
        return;
    }
    for (int64_t e = 0; e < half; ++e) {
        const float low = values[e], high = values[half + e];
        store_scalar(y + e, low * rotation.cos[e] - high * rotation.sin[e]);
        store_scalar(y + half + e, high * rotation.cos[half + e] + low * rotation.sin[half + e]);
    }
}

// T: the model's element type, C: the cache's.
template <class T, class C>
void write_cache(const CasAttention& a, int64_t token, const Rotation& rotation) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    const int64_t E = a.head_dim, P = a.block_size, K = a.num_kv_heads;
    C* block = static_cast<C*>(a.kv_cache) + (slot / P) * a.block_stride;
    const T* k = static_cast<const T*>(a.k) + token * a.k_stride;
    const T* v = static_cast<const T*>(a.v) + token * a.v_stride;
    for (int64_t head = 0; head < K; ++head) {
        const T* key = k + head * a.k_head_stride;
        const T* value = v + head * a.v_head_stride;
        const T* norm_weight = static_cast<const T*>(a.k_norm_weight);
        C *keys = block + head * page_size<C>(a), *values = keys + K * page_size<C>(a);
        C *key_to = keys + (slot % P) * E, *value_to = values + (slot % P) * E;
        if constexpr (std::is_same_v<T, C>) {
            prepare_head(a, key, norm_weight, rotation, key_to);
            std::memcpy(value_to, value, E * sizeof(T));
        } else {
            alignas(64) T prepared[kMaxHeadDim];
            prepare_head(a, key, norm_weight, rotation, prepared);
            if constexpr (std::is_same_v<C, int8>) {
                scales_of(a, keys)[slot % P] = quantize(prepared, E, key_to);
                scales_of(a, values)[slot % P] = quantize(value, E, value_to);
            } else {
                for (int64_t e = 0; e < E; e += kLanes) {
                    store16(key_to + e, load16(prepared + e));
                    store16(value_to + e, load16(value + e));
                }
            }
        }
    }
}

// Replaces products by scores cap(scale * product) + slope * (key - query). head: of row 0's group; distance: of the first key from
// row 0's query.
template <class T>
void change_scores(const CasAttention& a, Scratch<T>& s, int first_row, int rows, int padded, int64_t head, int64_t G, int64_t distance) {
    const f32x16 lanes = convert<f32x16>(load_raw<i32x16>(kLaneNumbers));
    for (int r = 0; r < rows; ++r) {
        const int64_t row = first_row + r;
        const float slope = a.alibi_slopes ? a.alibi_slopes[head + row % G] : 0.0f;
        const float offset = float(distance - row / G);
        for (int c = 0; c < padded; c += kLanes) {
            f32x16 v = load16(s.scores + r * kKeys + c) * a.scale;
            if (a.soft_cap > 0) {
                const f32x16 x = v * (1.0f / a.soft_cap);
                const f32x16 size = max_of(x, -x);
                const f32x16 power = exp2_nonpositive(size * (-2.0f * kLog2E));  // tanh|x| = (1 - power) / (1 + power)
                const f32x16 capped = (1.0f - power) / (1.0f + power) * a.soft_cap;
                v = select(x < 0.0f, -capped, capped);
            }
            store16(s.scores + r * kKeys + c, v + (lanes + (offset + float(c))) * slope);
        }
    }
}

// Attention of all rows of a tile over the keys in scratch. unit: computes the products; null without one. head: the tile's first query
// head. position: of the tile's first token. key: position of the first of `count` keys.
template <class T>
void attend(
    const CasAttention& a, Scratch<T>& s, MatrixUnit* unit, int rows, int64_t E, int64_t G, int64_t head, int64_t position, int64_t key,
    int count, int padded
) {
    const bool changes_scores = a.soft_cap > 0 || a.alibi_slopes;
    constexpr int kInputs = Dot<T>::kInputs;
    const T* key_blocks[kKeys / kLanes];
    for (int b = 0; b < padded / kLanes; ++b) key_blocks[b] = s.keys + b * kLanes * E;
    const T* value_blocks[kMaxHeadDim / kLanes];
    for (int b = 0; b < E / kLanes; ++b) value_blocks[b] = s.values + b * padded * kLanes;
    const int rows_at_once = unit ? kMaxUnitRows : kMaxRows;
    for (int row = 0; row < rows; row += rows_at_once) {
        const int n = std::min(rows_at_once, rows - row);
        Visible visible[kSubtile];
        for (int r = 0; r < n; ++r) {
            const int64_t at = position + (row + r) / G;
            visible[r].begin = int32_t(std::clamp<int64_t>(first_visible(a, at) - key, 0, count));
            visible[r].end = int32_t(std::clamp<int64_t>(at + 1 - key, 0, count));
        }
        if (visible[0].begin >= visible[n - 1].end) continue;
        const T* queries = s.queries + row * E;
        if (unit) unit->multiply<T>(queries, E, n, key_blocks, padded / kLanes, E / kInputs, s.scores, kKeys);
        else multiply_tile<T, kPlain>(queries, E, n, key_blocks, padded / kLanes, E / kInputs, s.scores, kKeys);
        alignas(64) float factors[kSubtile];
        if (changes_scores) change_scores(a, s, row, n, padded, head, G, key - position);
        for (int r = 0; r < n; r += kLanes)
            softmax_step(
                s, r, row + r, std::min(kLanes, n - r), padded, visible + r, (changes_scores ? 1.0f : a.scale) * kLog2E, factors + r);
        float* sums = s.sums + row * E;
        if (!unit) {
            multiply_tile<T, kAccumulate>(
                s.probabilities, kKeys, n, value_blocks, int(E / kLanes), padded / kInputs, sums, E, factors);
            continue;
        }
        for (int r = 0; r < n; ++r)
            for (int64_t e = 0; e < E; e += kLanes) store16(sums + r * E + e, load16(sums + r * E + e) * factors[r]);
        unit->multiply<T, true>(s.probabilities, kKeys, n, value_blocks, int(E / kLanes), padded / kInputs, sums, E);
    }
}

template <class C>
KeyRows<C> key_rows(const CasAttention& a, const Item& item, int64_t kv_head, int64_t key, int padding) {
    KeyRows<C> rows;
    rows.locate(a, a.block_table + item.seq * a.block_table_stride, kv_head, key, item.key_end, padding);
    return rows;
}

// `after`: the first keys of the thread's probable next item, for prefetching.
template <class T, class C>
void run_item(
    const CasAttention& a, const Item& item, int64_t kv_head, const KeyRows<C>& after, Scratch<T>& s, MatrixUnit* unit,
    const Partials& partials
) {
    const int64_t E = a.head_dim, G = a.num_heads / a.num_kv_heads;
    const int padding = key_padding<T>(unit);
    const int rows = int((item.token_end - item.token_begin) * G);
    const T* q = static_cast<const T*>(a.q);
    Rotation rotation;
    for (int64_t token = item.token_begin; token < item.token_end; ++token) {
        if (a.cos) rotation.load(a, token);
        for (int64_t g = 0; g < G; ++g)
            prepare_head(
                a, q + token * a.q_stride + (kv_head * G + g) * a.q_head_stride, static_cast<const T*>(a.q_norm_weight), rotation,
                s.queries + ((token - item.token_begin) * G + g) * E
            );
    }
    std::fill(s.sums, s.sums + rows * E, 0.0f);
    std::fill(s.maxima, s.maxima + kTileRows + kLanes, kLowest);
    std::fill(s.denominators, s.denominators + rows * kLanes, 0.0f);
    if (a.sinks && item.split == 0) {
        for (int r = 0; r < rows; ++r) {
            s.maxima[r] = a.sinks[kv_head * G + r % G] * kLog2E;
            s.denominators[r * kLanes] = 1.0f;
        }
    }

    // Position of the tile's first token within its sequence.
    const int64_t first_position =
        a.seq_lens[item.seq] - (reads_all(a) ? 0 : a.query_start_loc[item.seq + 1] - item.token_begin);
    KeyRows<C> now, next = key_rows<C>(a, item, kv_head, item.key_begin, padding);
    for (int64_t key = item.key_begin; key < item.key_end; key += kKeys) {
        now = next;
        next = key + kKeys < item.key_end ? key_rows<C>(a, item, kv_head, key + kKeys, padding) : after;
        const int count = now.count, padded = now.padded;
        if constexpr (std::is_same_v<T, C>) pack_keys_values(E, now, next, s);
        else pack_keys_values(E, now.template widened<T>(E, s.widened), next, s);
        attend(a, s, unit, rows, E, G, kv_head * G, first_position, key, count, padded);
    }

    if (item.partial >= 0) {
        const int64_t slot = (item.partial + item.split) * a.num_kv_heads + kv_head;
        std::copy(s.sums, s.sums + rows * E, partials.sums + slot * kTileRows * E);
        std::copy(s.maxima, s.maxima + rows, partials.maxima + slot * kTileRows);
        for (int r = 0; r < rows; ++r) partials.denominators[slot * kTileRows + r] = sum16(load16(s.denominators + r * kLanes));
        return;
    }
    for (int r = 0; r < rows; ++r) {
        T* out = static_cast<T*>(a.out) + (item.token_begin + r / G) * a.out_stride + (kv_head * G + r % G) * E;
        const float inverse = 1.0f / sum16(load16(s.denominators + r * kLanes));
        for (int64_t e = 0; e < E; e += kLanes) store16(out + e, load16(s.sums + r * E + e) * inverse);
    }
}

// Merges the partial results of one item's splits.
template <class T>
void merge_splits(const CasAttention& a, const Item& item, int64_t kv_head, const Partials& partials) {
    const int64_t E = a.head_dim, G = a.num_heads / a.num_kv_heads;
    const int rows = int((item.token_end - item.token_begin) * G);
    for (int r = 0; r < rows; ++r) {
        const auto slot = [&](int split) { return ((item.partial + split) * a.num_kv_heads + kv_head) * kTileRows + r; };
        float maximum = kLowest, denominator = 0.0f;
        for (int i = 0; i < item.num_splits; ++i) maximum = std::max(maximum, partials.maxima[slot(i)]);
        alignas(64) float sums[kMaxHeadDim] = {};
        for (int i = 0; i < item.num_splits; ++i) {
            const float factor = exp2_nonpositive(splat(partials.maxima[slot(i)] - maximum))[0];
            denominator += factor * partials.denominators[slot(i)];
            const float* part = partials.sums + slot(i) * E;
            for (int64_t e = 0; e < E; e += kLanes) store16(sums + e, load16(sums + e) + load16(part + e) * factor);
        }
        T* out = static_cast<T*>(a.out) + (item.token_begin + r / G) * a.out_stride + (kv_head * G + r % G) * E;
        for (int64_t e = 0; e < E; e += kLanes) store16(out + e, load16(sums + e) * (1.0f / denominator));
    }
}

template <class T, class C>
void attention(const CasAttention& a) {
    const Plan plan = make_plan(a);
    const int64_t pairs = int64_t(plan.items.size()) * a.num_kv_heads;  // of items and heads
    const int64_t slots = plan.num_partials * a.num_kv_heads * kTileRows;
    const size_t thread_bytes = Scratch<T>::bytes(a.head_dim, kTileRows);
    char* memory = static_cast<char*>(
        scratch(thread_bytes * a.num_threads + size_t(slots) * (a.head_dim + 2) * sizeof(float)));
    Partials partials;
    partials.sums = reinterpret_cast<float*>(memory + thread_bytes * a.num_threads);
    partials.maxima = partials.sums + slots * a.head_dim;
    partials.denominators = partials.maxima + slots;
    const int64_t real_tokens = a.num_seqs > 0 ? a.query_start_loc[a.num_seqs] : 0;
    for (int64_t s = 0; s < a.num_seqs; ++s) {
        const int64_t begin = a.query_start_loc[s], end = a.query_start_loc[s + 1];
        if (a.seq_lens[s] > 0) continue;
        for (int64_t token = begin; token < end; ++token)
            std::memset(static_cast<T*>(a.out) + token * a.out_stride, 0, a.num_heads * a.head_dim * sizeof(T));
    }

#pragma omp parallel num_threads(a.num_threads)
    {
        Scratch<T> s(memory + thread_bytes * omp_get_thread_num(), a.head_dim, kTileRows);
        MatrixUnit matrix_unit;
        MatrixUnit* unit = uses_matrix_unit<T>(a.head_dim / Dot<T>::kInputs) ? &matrix_unit : nullptr;
        Rotation rotation;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < a.num_tokens; ++token) {
            if (token >= real_tokens) {
                T* out = static_cast<T*>(a.out) + token * a.out_stride;
                std::memset(out, 0, a.num_heads * a.head_dim * sizeof(T));
            }
            if (a.cos) rotation.load(a, token);
            write_cache<T, C>(a, token, rotation);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < pairs; ++pair) {
            KeyRows<C> after;
            if (const int64_t following = pair + a.num_threads; following < pairs) {
                const Item& item = plan.items[following / a.num_kv_heads];
                after = key_rows<C>(a, item, following % a.num_kv_heads, item.key_begin, key_padding<T>(unit));
            }
            run_item<T, C>(a, plan.items[pair / a.num_kv_heads], pair % a.num_kv_heads, after, s, unit, partials);
        }
        if (plan.num_partials > 0) {
#pragma omp for schedule(static)
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const Item& item = plan.items[pair / a.num_kv_heads];
                if (item.num_splits > 1 && item.split == 0) merge_splits<T>(a, item, pair % a.num_kv_heads, partials);
            }
        }
    }
}

}  // namespace
}  // namespace cas

extern "C" void cas_attention(const CasAttention* args) {
    if (args->num_tokens == 0) return;
    if (args->cache_dtype == CAS_FLOAT8) {
        if (args->dtype == CAS_BFLOAT16) cas::attention<cas::bf16, cas::float8>(*args);
        else cas::attention<float, cas::float8>(*args);
    } else if (args->cache_dtype == CAS_INT8) {
        if (args->dtype == CAS_BFLOAT16) cas::attention<cas::bf16, cas::int8>(*args);
        else cas::attention<float, cas::int8>(*args);
    } else {
        if (args->dtype == CAS_BFLOAT16) cas::attention<cas::bf16, cas::bf16>(*args);
        else cas::attention<float, float>(*args);
    }
}

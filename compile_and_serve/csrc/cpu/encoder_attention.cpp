// Attention both ways within packed sequences, without a cache, in one parallel region per call.
//
// Work item: (sequence, tile of its tokens) x key/value head. All query heads of a key/value head share an item as rows (token, head) of
// the tile. As in attention.cpp, an item takes its keys in blocks of kKeys, which are repacked into the layout of multiply.h.
//
// Names: G query heads per key/value head, E head size, R columns of a bias, L tokens of the longest sequence.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention_keys.h"
#include "attention_softmax.h"
#include "kernels.h"

namespace cas {
namespace {

constexpr int64_t kItemRows = 256;  // rows that share one repacked block of keys
constexpr int64_t kMinItemRows = 32;
constexpr int64_t kItemsPerThread = 4;  // where there are enough rows

struct EncoderItem {
    int32_t seq, token_begin, token_end;
};

// The column of a distance key - query is columns[distance + shift], and its bias of a head is distance_bias[head * width + distance + shift].
// Distances that no sequence has pad both to whole blocks of keys.
struct DistanceTables {
    int64_t shift = 0, width = 0;
    std::vector<int32_t> columns;
    std::vector<float> distance_bias;
};

DistanceTables make_tables(const CasEncoderAttention& a) {
    DistanceTables tables;
    if (!a.columns) return tables;
    int64_t longest = 1;
    for (int64_t s = 0; s < a.num_seqs; ++s) longest = std::max<int64_t>(longest, a.starts[s + 1] - a.starts[s]);
    tables.shift = longest - 1;
    tables.width = 2 * longest - 1 + kKeys;
    tables.columns.resize(tables.width);
    const int64_t middle = a.num_distances / 2;
    for (int64_t i = 0; i < tables.width; ++i)
        tables.columns[i] = a.columns[std::clamp<int64_t>(i - tables.shift + middle, 0, a.num_distances - 1)];
    if (!a.distance_bias) return tables;
    tables.distance_bias.resize(a.num_heads * tables.width);
    for (int64_t head = 0; head < a.num_heads; ++head)
        for (int64_t i = 0; i < tables.width; ++i)
            tables.distance_bias[head * tables.width + i] = a.distance_bias[head * a.num_columns + tables.columns[i]];
    return tables;
}

std::vector<EncoderItem> make_items(const CasEncoderAttention& a) {
    const int64_t G = a.num_heads / a.num_kv_heads;
    const int64_t rows = int64_t(a.starts[a.num_seqs] - a.starts[0]) * a.num_heads;
    const int64_t share = rows / (kItemsPerThread * a.num_threads);
    const int64_t item_rows = a.num_threads == 1 ? kItemRows : std::clamp(share, kMinItemRows, kItemRows);
    const int64_t item_tokens = std::max<int64_t>(1, item_rows / G);
    std::vector<EncoderItem> items;
    for (int64_t s = 0; s < a.num_seqs; ++s)
        for (int64_t token = a.starts[s]; token < a.starts[s + 1]; token += item_tokens)
            items.push_back({int32_t(s), int32_t(token), int32_t(std::min<int64_t>(a.starts[s + 1], token + item_tokens))});
    const auto work = [&](const EncoderItem& x) {
        return int64_t(x.token_end - x.token_begin) * (a.starts[x.seq + 1] - a.starts[x.seq]);
    };
    // Longest first, so that the tail is short.
    std::stable_sort(items.begin(), items.end(), [&](const EncoderItem& x, const EncoderItem& y) { return work(x) > work(y); });
    return items;
}

// The keys from `begin` on of a sequence that ends at `end`.
template <class T>
KeyRows<T> packed_keys(const CasEncoderAttention& a, int64_t kv_head, int64_t begin, int64_t end, int padding) {
    KeyRows<T> found;
    const T* keys = static_cast<const T*>(a.k) + kv_head * a.k_head_stride;
    const T* values = static_cast<const T*>(a.v) + kv_head * a.k_head_stride;
    found.to_values = values - keys;
    found.count = int(std::clamp<int64_t>(end - begin, 0, kKeys));
    found.padded = (found.count + padding - 1) / padding * padding;
    for (int c = 0; c < found.padded; ++c) found.rows[c] = keys + (begin + std::min(c, found.count - 1)) * a.k_stride;
    return found;
}

// Replaces the products of a row by scores scale * product + biases. token: of the row; key: the first of `count` keys.
template <class T>
void add_biases(
    const CasEncoderAttention& a, const DistanceTables& tables, float* scores, int padded, int64_t head, int64_t token, int64_t key,
    int count
) {
    const int64_t first = key - token + tables.shift, H = a.num_heads, R = a.num_columns;
    const T* query_bias = a.query_bias ? static_cast<const T*>(a.query_bias) + (token * H + head) * R : nullptr;
    const T* key_bias = a.key_bias ? static_cast<const T*>(a.key_bias) + (key * H + head) * R : nullptr;
    for (int c = 0; c < padded; c += kLanes) {
        f32x16 v = load16(scores + c) * a.scale;
        if (a.distance_bias) v += load16(tables.distance_bias.data() + head * tables.width + first + c);
        if (query_bias || key_bias) {
            alignas(64) float found[kLanes];
            const int32_t* columns = tables.columns.data() + first + c;
            for (int i = 0; i < kLanes; ++i) {
                const int64_t other = std::min(c + i, count - 1);
                found[i] = query_bias ? to_float(query_bias[columns[i]]) : 0.0f;
                if (key_bias) found[i] += to_float(key_bias[other * H * R + columns[i]]);
            }
            v += load16(found);
        }
        store16(scores + c, v);
    }
}

template <class T>
void run_encoder_item(
    const CasEncoderAttention& a, const DistanceTables& tables, const EncoderItem& item, int64_t kv_head, Scratch<T>& s, MatrixUnit* unit
) {
    constexpr int kInputs = Dot<T>::kInputs;
    const int64_t E = a.head_dim, G = a.num_heads / a.num_kv_heads;
    const int64_t seq_begin = a.starts[item.seq], seq_end = a.starts[item.seq + 1];
    const int rows = int((item.token_end - item.token_begin) * G);
    const T* q = static_cast<const T*>(a.q) + item.token_begin * a.q_stride + kv_head * G * a.q_head_stride;
    int64_t query_stride = a.q_stride;
    if (G > 1) {
        for (int r = 0; r < rows; ++r)
            std::memcpy(s.queries + r * E, q + (r / G) * a.q_stride + (r % G) * a.q_head_stride, E * sizeof(T));
        q = s.queries;
        query_stride = E;
    }
    std::fill(s.sums, s.sums + rows * E, 0.0f);
    std::fill(s.maxima, s.maxima + rows + kLanes, kLowest);
    std::fill(s.denominators, s.denominators + rows * kLanes, 0.0f);
    const int64_t key_begin = a.window ? std::max(seq_begin, item.token_begin - a.window) : seq_begin;
    const int64_t key_end = a.window ? std::min(seq_end, item.token_end + a.window) : seq_end;
    const int rows_at_once = unit ? kMaxUnitRows : kMaxRows;
    const KeyRows<T> none{};
    for (int64_t key = key_begin; key < key_end; key += kKeys) {
        const KeyRows<T> keys = packed_keys<T>(a, kv_head, key, key_end, key_padding<T>(unit));
        const int count = keys.count, padded = keys.padded;
        pack_keys_values(E, keys, none, s);
        const T* key_blocks[kKeys / kLanes];
        for (int b = 0; b < padded / kLanes; ++b) key_blocks[b] = s.keys + b * kLanes * E;
        const T* value_blocks[kMaxHeadDim / kLanes];
        for (int b = 0; b < E / kLanes; ++b) value_blocks[b] = s.values + b * padded * kLanes;
        for (int row = 0; row < rows; row += rows_at_once) {
            const int n = std::min(rows_at_once, rows - row);
            Visible visible[kSubtile];
            for (int r = 0; r < n; ++r) {
                const int64_t token = item.token_begin + (row + r) / G;
                visible[r].begin = a.window ? int32_t(std::clamp<int64_t>(token - a.window - key, 0, count)) : 0;
                visible[r].end = a.window ? int32_t(std::clamp<int64_t>(token + a.window + 1 - key, 0, count)) : count;
            }
            if (visible[0].begin >= visible[n - 1].end) continue;
            if (unit) unit->multiply<T>(q + row * query_stride, query_stride, n, key_blocks, padded / kLanes, E / kInputs, s.scores, kKeys);
            else multiply_tile<T, kPlain>(q + row * query_stride, query_stride, n, key_blocks, padded / kLanes, E / kInputs, s.scores, kKeys);
            if (a.columns)
                for (int r = 0; r < n; ++r)
                    add_biases<T>(
                        a, tables, s.scores + r * kKeys, padded, kv_head * G + (row + r) % G, item.token_begin + (row + r) / G, key, count);
            alignas(64) float factors[kSubtile];
            for (int r = 0; r < n; r += kLanes)
                softmax_step(
                    s, r, row + r, std::min(kLanes, n - r), padded, visible + r, (a.columns ? 1.0f : a.scale) * kLog2E, factors + r);
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
    for (int r = 0; r < rows; ++r) {
        T* out = static_cast<T*>(a.out) + ((item.token_begin + r / G) * a.num_heads + kv_head * G + r % G) * E;
        const float inverse = 1.0f / sum16(load16(s.denominators + r * kLanes));
        for (int64_t e = 0; e < E; e += kLanes) store16(out + e, load16(s.sums + r * E + e) * inverse);
    }
}

template <class T>
void encoder_attention(const CasEncoderAttention& a) {
    const std::vector<EncoderItem> items = make_items(a);
    const DistanceTables tables = make_tables(a);
    const int64_t pairs = int64_t(items.size()) * a.num_kv_heads;
    const int64_t tile_rows = std::max<int64_t>(kItemRows, a.num_heads / a.num_kv_heads);
    const size_t thread_bytes = Scratch<T>::bytes(a.head_dim, tile_rows);
    char* memory = static_cast<char*>(scratch(thread_bytes * a.num_threads));
    const int64_t row = a.num_heads * a.head_dim, end = a.starts[a.num_seqs];
    std::memset(a.out, 0, a.starts[0] * row * sizeof(T));
    std::memset(static_cast<T*>(a.out) + end * row, 0, (a.num_tokens - end) * row * sizeof(T));

#pragma omp parallel num_threads(a.num_threads)
    {
        Scratch<T> s(memory + thread_bytes * omp_get_thread_num(), a.head_dim, tile_rows);
        MatrixUnit matrix_unit;
        MatrixUnit* unit = uses_matrix_unit<T>(a.head_dim / Dot<T>::kInputs) ? &matrix_unit : nullptr;
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < pairs; ++pair)
            run_encoder_item<T>(a, tables, items[pair / a.num_kv_heads], pair % a.num_kv_heads, s, unit);
    }
}

}  // namespace
}  // namespace cas

extern "C" void cas_encoder_attention(const CasEncoderAttention* args) {
    if (args->num_tokens == 0) return;
    if (args->dtype == CAS_BFLOAT16) cas::encoder_attention<cas::bf16>(*args);
    else cas::encoder_attention<float>(*args);
}

// Linear attention with a checkpoint and a ring of entries. See kernels.h.
//
// New tokens are processed in blocks that end at multiples of 16. The products of a block's keys and queries with the state are one matrix
// product. What entries since the checkpoint add, those of the block included, are products of pairs of tokens.
//
// K: key size, V: value size.
#include <omp.h>

#include <cmath>
#include <utility>

#include "recurrent.h"

namespace cas {
namespace {

constexpr int64_t kBlock = kCheckpointTokens;  // tokens at most in a block
constexpr int64_t kEntries = 5 * 16;           // at most at a time: a ring's, and a block's

int64_t rollback(int64_t ring) { return (ring - kBlock - 1) / 2; }

// exp of the difference of two rows of cumulative decays, for each channel or for all.
inline f32x16 decay_between(const float* later, const float* earlier, int64_t decays, int64_t channel) {
    return decays == 1 ? splat(std::exp(later[0] - earlier[0])) : exp16(load16(later + channel) - load16(earlier + channel));
}

inline float dot(const float* a, const float* b, int64_t size) {
    f32x16 sum{};
    for (int64_t i = 0; i < size; i += kLanes) sum += load16(a + i) * load16(b + i);
    return sum16(sum);
}

// The entries of one head since the checkpoint, and what a block needs beside them. Row 0 of `total` is zero; row j + 1 has the sum of the
// log decays of entries 0 ... j.
struct Entries {
    float *keys, *values, *decay, *total, *queries, *scaled, *products;
    int64_t count = 0;

    static int64_t size(int64_t key_dim, int64_t value_dim, int64_t decays) {
        const int64_t d = (decays + 15) / 16 * 16;
        return kEntries * (key_dim + value_dim + 2 * d) + d + kBlock * key_dim + kEntries * key_dim + 2 * kBlock * value_dim;
    }

    Entries(float* memory, int64_t key_dim, int64_t value_dim, int64_t decays) {
        const int64_t d = (decays + 15) / 16 * 16;
        const auto take = [&memory](int64_t floats) { return std::exchange(memory, memory + floats); };
        keys = take(kEntries * key_dim);
        values = take(kEntries * value_dim);
        decay = take(kEntries * d);
        total = take((kEntries + 1) * d);
        queries = take(kBlock * key_dim);
        scaled = take(kEntries * key_dim);
        products = take(2 * kBlock * value_dim);
    }
};

template <class T>
struct Head {
    const CasLinearAttention& a;
    const SlotSequence& s;
    const int64_t head, key_head, K, V, D;
    Entries e;
    int64_t checkpoint;  // the position of the state at `state`
    const float* state;  // null: zeros

    Head(const CasLinearAttention& args, const SlotSequence& seq, int64_t number, float* memory)
        : a(args),
          s(seq),
          head(number),
          key_head(number / (args.num_heads / args.num_key_heads)),
          K(args.key_dim),
          V(args.value_dim),
          D(args.decays),
          e(memory, K, V, D) {}

    float* values(const int32_t* pages) const { return unit_of<float>(a.value_units, pages, head); }
    float* decays(const int32_t* pages) const { return unit_of<float>(a.decay_units, pages, head); }
    float* state_at(const int32_t* pages) const { return unit_of<float>(a.checkpoint_units, pages, head); }

    void run() {
        begin();
        const int64_t end = checkpoint_after(s, rollback(a.ring));
        fold(std::min(down(s.computed), end));
        for (int64_t position = s.computed; position < s.length;) {
            const int64_t next = std::min(s.length, down(position) + kBlock);
            process(position, next - position);
            position = next;
            fold(std::min(down(position), end));
        }
        finish();
    }

    // Takes up the checkpoint and the entries of tokens since then.
    void begin() {
        std::fill(e.total, e.total + D, 0.0f);
        checkpoint = 0;
        state = nullptr;
        if (s.computed == 0) return;
        const float *ring_values = values(s.read_pages), *ring_decays = decays(s.read_pages);
        const T* ring_keys = unit_of<T>(a.key_units, s.read_pages, key_head);
        checkpoint = checkpoint_before(ring_values[a.ring * V], s.computed, a.ring);
        if (checkpoint > 0) state = state_at(s.read_pages);
        for (int64_t position = checkpoint; position < s.computed; ++position) {
            const int64_t place = position % a.ring;
            std::copy(ring_values + place * V, ring_values + (place + 1) * V, e.values + e.count * V);
            append(ring_keys + place * K, ring_decays + place * D);
        }
    }

    void append(const T* key, const float* log_decay) {
        for (int64_t i = 0; i < K; i += kLanes) store16(e.keys + e.count * K + i, load16(key + i));
        for (int64_t i = 0; i < D; ++i) {
            e.decay[e.count * D + i] = log_decay[i];
            e.total[(e.count + 1) * D + i] = e.total[e.count * D + i] + log_decay[i];
        }
        ++e.count;
    }

    // row * exp(sum of decays from entry `from` to entry `to`, the last included)
    void decayed(const float* row, int64_t from, int64_t to, float* out) const {
        const float *later = e.total + (to + 1) * D, *earlier = e.total + from * D;
        const f32x16 shared = D == 1 ? decay_between(later, earlier, D, 0) : f32x16{};
        for (int64_t i = 0; i < K; i += kLanes) store16(out + i, load16(row + i) * (D == 1 ? shared : decay_between(later, earlier, D, i)));
    }

    void process(int64_t position, int64_t count) {
        const int64_t first = e.count, token = s.begin + position - s.computed;
        const T *q = static_cast<const T*>(a.q) + key_head * a.q_head_stride, *k = static_cast<const T*>(a.k) + key_head * a.k_head_stride;
        const T* v = static_cast<const T*>(a.v) + head * a.v_head_stride;
        for (int64_t i = 0; i < count; ++i) {
            append(k + (token + i) * a.k_stride, a.log_decay + ((token + i) * a.num_heads + head) * D);
            for (int64_t c = 0; c < K; c += kLanes) store16(e.queries + i * K + c, load16(q + (token + i) * a.q_stride + c));
        }
        const int64_t with_keys = a.beta ? count : 0;
        if (state != nullptr) {
            for (int64_t i = 0; i < with_keys; ++i) decayed(e.keys + (first + i) * K, 0, first + i, e.scaled + i * K);
            for (int64_t i = 0; i < count; ++i) decayed(e.queries + i * K, 0, first + i, e.scaled + (with_keys + i) * K);
            product(e.scaled, K, 1, with_keys + count, state, K, V, nullptr, nullptr, 0, e.products);
        } else {
            std::fill(e.products, e.products + (with_keys + count) * V, 0.0f);
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t entry = first + i;
            float *value = e.values + entry * V, *out = e.products + (with_keys + i) * V;
            for (int64_t c = 0; c < V; c += kLanes) store16(value + c, load16(v + (token + i) * a.v_stride + c));
            alignas(64) float by_query[kEntries], by_key[kEntries];
            for (int64_t j = 0; j < entry; ++j) pair(entry, i, j, by_query + j, by_key + j);
            by_query[entry] = dot(e.keys + entry * K, e.queries + i * K, K);
            if (a.beta) {
                const float beta = a.beta[(token + i) * a.num_heads + head];
                const float* read = e.products + i * V;
                for (int64_t c = 0; c < V; c += kLanes) {
                    f32x16 known = load16(read + c);
                    for (int64_t j = 0; j < entry; ++j) known += by_key[j] * load16(e.values + j * V + c);
                    store16(value + c, beta * (load16(value + c) - known));
                }
            }
            T* result = static_cast<T*>(a.out) + ((token + i) * a.num_heads + head) * V;
            for (int64_t c = 0; c < V; c += kLanes) {
                f32x16 sum = load16(out + c);
                for (int64_t j = 0; j <= entry; ++j) sum += by_query[j] * load16(e.values + j * V + c);
                store16(result + c, sum);
            }
        }
    }

    // The decayed products of entry j's key with the query and the key of a later entry.
    void pair(int64_t entry, int64_t i, int64_t j, float* by_query, float* by_key) const {
        const float *key = e.keys + j * K, *query = e.queries + i * K, *own = e.keys + entry * K;
        const float *later = e.total + (entry + 1) * D, *earlier = e.total + (j + 1) * D;
        if (D == 1) {
            const float decay = std::exp(later[0] - earlier[0]);
            *by_query = decay * dot(key, query, K);
            if (a.beta) *by_key = decay * dot(key, own, K);
            return;
        }
        f32x16 with_query{}, with_key{};
        for (int64_t c = 0; c < K; c += kLanes) {
            const f32x16 decayed_key = load16(key + c) * decay_between(later, earlier, D, c);
            with_query += decayed_key * load16(query + c);
            with_key += decayed_key * load16(own + c);
        }
        *by_query = sum16(with_query);
        *by_key = sum16(with_key);
    }

    // Makes the state at position `target` the checkpoint.
    void fold(int64_t target) {
        const int64_t count = target - checkpoint;
        if (count <= 0) return;
        for (int64_t j = 0; j < count; ++j) decayed(e.keys + j * K, j + 1, count - 1, e.scaled + j * K);
        float *target_state = state_at(s.write_pages), *scale = e.queries;
        for (int64_t i = 0; i < K; ++i) scale[i] = std::exp(e.total[count * D + (D == 1 ? 0 : i)]);
        product(e.scaled, 1, K, K, e.values, count, V, state, scale, 1, target_state);
        state = target_state;
        checkpoint = target;
        std::copy(e.keys + count * K, e.keys + e.count * K, e.keys);
        std::copy(e.values + count * V, e.values + e.count * V, e.values);
        std::copy(e.decay + count * D, e.decay + e.count * D, e.decay);
        e.count -= count;
        for (int64_t j = 0; j < e.count * D; ++j) e.total[j + D] = e.total[j] + e.decay[j];
    }

    void finish() {
        float *ring_values = values(s.write_pages), *ring_decays = decays(s.write_pages);
        if (s.moves && state != nullptr && state != state_at(s.write_pages)) std::copy(state, state + K * V, state_at(s.write_pages));
        for (int64_t position = s.moves ? checkpoint : std::max(checkpoint, s.computed); position < s.length; ++position) {
            const int64_t entry = position - checkpoint, place = position % a.ring;
            std::copy(e.values + entry * V, e.values + (entry + 1) * V, ring_values + place * V);
            std::copy(e.decay + entry * D, e.decay + (entry + 1) * D, ring_decays + place * D);
        }
        std::fill(ring_values + a.ring * V, ring_values + (a.ring + 1) * V, float(checkpoint));
    }
};

// Writes the keys of a head that several value heads read, after all of them have.
template <class T>
void write_keys(const CasLinearAttention& a, const SlotSequence& s, int64_t key_head) {
    const T *from = unit_of<T>(a.key_units, s.read_pages, key_head), *k = static_cast<const T*>(a.k) + key_head * a.k_head_stride;
    T* to = unit_of<T>(a.key_units, s.write_pages, key_head);
    const int64_t checkpoint = checkpoint_after(s, rollback(a.ring));
    for (int64_t position = s.moves ? checkpoint : std::max(checkpoint, s.computed); position < s.length; ++position) {
        const T* key = position < s.computed ? from + position % a.ring * a.key_dim : k + (s.begin + position - s.computed) * a.k_stride;
        std::copy(key, key + a.key_dim, to + position % a.ring * a.key_dim);
    }
}

template <class T>
void linear_attention(const CasLinearAttention& a) {
    const int64_t heads = a.num_heads, key_heads = a.num_key_heads, size = Entries::size(a.key_dim, a.value_dim, a.decays);
#pragma omp parallel num_threads(a.num_threads)
    {
        float* memory = static_cast<float*>(scratch(sizeof(float) * size));
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.slots.num_seqs * heads; ++task) {
            SlotSequence sequence(a.slots, task / heads);
            if (sequence.is_padding()) continue;
            const int64_t head = task % heads;
            sequence.moves = unit_of<T>(a.value_units, sequence.read_pages, head) != unit_of<T>(a.value_units, sequence.write_pages, head);
            Head<T>(a, sequence, head, memory).run();
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.slots.num_seqs * key_heads; ++task) {
            SlotSequence sequence(a.slots, task / key_heads);
            if (sequence.is_padding()) continue;
            const int64_t head = task % key_heads;
            sequence.moves = unit_of<T>(a.key_units, sequence.read_pages, head) != unit_of<T>(a.key_units, sequence.write_pages, head);
            write_keys<T>(a, sequence, head);
        }
    }
    T* out = static_cast<T*>(a.out);
    const int64_t row = heads * a.value_dim;
    std::memset(static_cast<void*>(out + a.slots.query_start_loc[a.slots.num_seqs] * row), 0,
                sizeof(T) * row * (a.num_tokens - a.slots.query_start_loc[a.slots.num_seqs]));
}

}  // namespace
}  // namespace cas

extern "C" void cas_linear_attention(const CasLinearAttention* args) {
    if (args->dtype == CAS_BFLOAT16) cas::linear_attention<cas::bf16>(*args);
    else cas::linear_attention<float>(*args);
}

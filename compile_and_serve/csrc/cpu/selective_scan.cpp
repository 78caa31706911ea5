// The scan of Mamba-1. See kernels.h.
//
// A task is a block of channels of one sequence, 16 channels at a time: first the entries since the state that is taken up, then the new
// tokens. A decode takes up the state behind the last token, so that nothing is replayed.
#include <omp.h>

#include "recurrent.h"

namespace cas {
namespace {

constexpr int64_t kMaxState = 256;
constexpr float kLog2E = 1.44269504088896341f;

// log(1 + e^x) = max(x, 0) + log(1 + z) with z = e^-|x|, and log(1 + z) = 2 atanh(z / (2 + z)).
inline f32x16 softplus16(f32x16 x) {
    const f32x16 z = exp16(-max_of(x, -x)), s = z / (z + 2.0f), square = s * s;
    f32x16 p = splat(1.0f / 13.0f);
    p = p * square + 1.0f / 11.0f;
    p = p * square + 1.0f / 9.0f;
    p = p * square + 1.0f / 7.0f;
    p = p * square + 1.0f / 5.0f;
    p = p * square + 1.0f / 3.0f;
    p = p * square + 1.0f;
    return max_of(x, splat(0.0f)) + 2.0f * s * p;
}

// kState: N; 0: any.
template <class T, int kState>
struct Scan {
    const CasSelectiveScan& a;
    const SlotSequence& s;
    const int64_t unit, N, end, new_later;
    const T *old_inputs, *old_keys;
    T *new_inputs, *new_keys;
    const float* old_states;
    float *new_states, *positions;
    int64_t begin = 0;
    const float* taken = nullptr;  // the state that is taken up; null: zeros

    Scan(const CasSelectiveScan& args, const SlotSequence& seq, int64_t number)
        : a(args),
          s(seq),
          unit(number),
          N(kState ? kState : args.state_size),
          end(checkpoint_after(seq, args.ring - kCheckpointTokens - 1)),
          new_later(seq.length - seq.computed > kCheckpointTokens ? seq.length : seq.computed + 1),
          old_inputs(unit_of<T>(args.inputs, seq.read_pages, number)),
          old_keys(unit_of<T>(args.keys, seq.read_pages, number)),
          new_inputs(unit_of<T>(args.inputs, seq.write_pages, number)),
          new_keys(unit_of<T>(args.keys, seq.write_pages, number)),
          old_states(unit_of<float>(args.states, seq.read_pages, number)),
          new_states(unit_of<float>(args.states, seq.write_pages, number)),
          positions(unit_of<float>(args.positions, seq.write_pages, number)) {}

    void run() {
        const float* stored = unit_of<float>(a.positions, s.read_pages, unit);
        const int64_t checkpoint = checkpoint_before(stored[0], s.computed, a.ring);
        const int64_t later = stored[1] >= 0 && stored[1] <= float(s.computed) ? int64_t(stored[1]) : -1;
        const bool passes = checkpoint < end && end < later;  // the state at the next checkpoint lies before the later one
        if (s.computed > 0) {
            const bool from_later = later >= std::max<int64_t>(checkpoint, 1) && s.computed - later < a.ring && !passes;
            begin = from_later ? later : checkpoint;
            if (from_later) taken = old_states + N * a.block;
            else if (checkpoint > 0) taken = old_states;
        }
        if (new_states != old_states && begin > end) std::copy(old_states, old_states + N * a.block, new_states);
        for (int64_t c = 0; c < a.block; c += kLanes) channels(c);
        keep_keys();
        positions[0] = float(end);
        positions[1] = float(new_later);
    }

    const T* row(const void* rows, int64_t stride, int64_t position) const {
        return static_cast<const T*>(rows) + (s.begin + position - s.computed) * stride;
    }

    // Channels c ... c + 15 of the block.
    void channels(int64_t c) {
        f32x16 h[kState ? kState : kMaxState], rates[kState ? kState : kMaxState];
        const int64_t channel = unit * a.block + c;
        for (int64_t n = 0; n < N; ++n) {
            h[n] = taken ? load16(taken + n * a.block + c) : f32x16{};
            float column[kLanes];
            for (int64_t i = 0; i < kLanes; ++i) column[i] = a.a[(channel + i) * N + n] * kLog2E;
            rates[n] = load16(column);
        }
        for (int64_t position = begin; position < s.length; ++position) {
            if (position == end) store(h, new_states + c);
            const bool is_new = position >= s.computed;
            const int64_t entry = position % a.ring;
            const T* entry_inputs = old_inputs + entry * 2 * a.block + c;
            const f32x16 dt = load16(is_new ? row(a.dt, a.dt_stride, position) + channel : entry_inputs);
            const f32x16 x = load16(is_new ? row(a.x, a.x_stride, position) + channel : entry_inputs + a.block);
            if (position >= end && (is_new || new_inputs != old_inputs)) {
                T* kept = new_inputs + entry * 2 * a.block + c;
                store16(kept, dt);
                store16(kept + a.block, x);
            }
            const f32x16 step = softplus16(dt), scaled = step * x;
            const T* b = is_new ? row(a.b, a.b_stride, position) : old_keys + entry * N;
            for (int64_t n = 0; n < N; ++n) h[n] = exp2_nonpositive(step * rates[n]) * h[n] + to_float(b[n]) * scaled;
            if (is_new) {
                const T* weights = row(a.c, a.c_stride, position);
                f32x16 sum{};
                for (int64_t n = 0; n < N; ++n) sum += to_float(weights[n]) * h[n];
                store16(static_cast<T*>(a.out) + (s.begin + position - s.computed) * a.num_channels + channel, sum);
            }
            if (position + 1 == new_later) store(h, new_states + N * a.block + c);
        }
        if (new_inputs != old_inputs) {  // entries between the checkpoint and the state that was taken up
            for (int64_t position = end; position < begin; ++position) {
                const int64_t at = position % a.ring * 2 * a.block + c;
                for (int64_t half = at; half <= at + a.block; half += a.block)
                    std::copy(old_inputs + half, old_inputs + half + kLanes, new_inputs + half);
            }
        }
    }

    void store(const f32x16* h, float* to) const {
        for (int64_t n = 0; n < N; ++n) store16(to + n * a.block, h[n]);
    }

    // After all channels, which read the earlier entries.
    void keep_keys() const {
        for (int64_t position = new_keys != old_keys ? end : std::max(end, s.computed); position < s.length; ++position) {
            const T* from = position < s.computed ? old_keys + position % a.ring * N : row(a.b, a.b_stride, position);
            std::copy(from, from + N, new_keys + position % a.ring * N);
        }
    }
};

template <class T, int kState>
void scan_all(const CasSelectiveScan& a) {
    const int64_t units = a.num_channels / a.block;
#pragma omp parallel for schedule(dynamic) num_threads(a.num_threads)
    for (int64_t task = 0; task < a.slots.num_seqs * units; ++task) {
        const SlotSequence sequence(a.slots, task / units);
        if (!sequence.is_padding()) Scan<T, kState>(a, sequence, task % units).run();
    }
    const int64_t end = a.slots.query_start_loc[a.slots.num_seqs];
    T* out = static_cast<T*>(a.out);
    std::memset(static_cast<void*>(out + end * a.num_channels), 0, sizeof(T) * a.num_channels * (a.num_tokens - end));
}

template <class T>
void selective_scan(const CasSelectiveScan& a) {
    if (a.state_size == 16) scan_all<T, 16>(a);
    else scan_all<T, 0>(a);
}

}  // namespace
}  // namespace cas

extern "C" void cas_selective_scan(const CasSelectiveScan* args) {
    if (args->dtype == CAS_BFLOAT16) cas::selective_scan<cas::bf16>(*args);
    else cas::selective_scan<float>(*args);
}

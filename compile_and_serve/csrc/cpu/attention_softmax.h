// The online softmax (https://arxiv.org/abs/2205.14135) of one step's scores in a thread's scratch.
#pragma once

#include "attention_keys.h"

namespace cas {
namespace {

alignas(64) constexpr int32_t kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float kLowest = -1e30f;  // maximum over no keys; finite, so that differences are not NaN

// Lane r of the result: the largest element of rows[r].
inline f32x16 max_of_rows(f32x16* rows) {
    f32x16 result;
    for (int p = 0; p < kParts; ++p) {
        PartF32 maxima[kPartLanes];
        for (int i = 0; i < kPartLanes; ++i) {
            f32x16& row = rows[p * kPartLanes + i];
            maxima[i] = part(row, 0);
            for (int j = 1; j < kParts; ++j) maxima[i] = part(row, j) > maxima[i] ? part(row, j) : maxima[i];
        }
#pragma GCC unroll 4
        for (int d = kPartLanes / 2; d >= 1; d /= 2) {
            const Butterfly butterfly(d);
#pragma GCC unroll 8
            for (int i = 0; i < d; ++i) {
                const PartF32 a = __builtin_shuffle(maxima[i], maxima[i + d], butterfly.first);
                const PartF32 b = __builtin_shuffle(maxima[i], maxima[i + d], butterfly.second);
                maxima[i] = a > b ? a : b;
            }
        }
        part(result, p) = maxima[0];
    }
    return result;
}

constexpr float kLog2E = 1.44269504088896341f;

// The keys [begin, end) of a block that a row attends to.
struct Visible {
    int32_t begin, end;

    bool has_all(int c) const { return begin <= c && c + kLanes <= end; }
    auto lanes(int c) const {
        const i32x16 keys = load_raw<i32x16>(kLaneNumbers) + c;
        return (keys > begin - 1) & (keys < end);
    }
};

// One step of the online softmax for `rows` rows, at most 16, from `first` of the product on: computes probabilities from scores, and
// updates maxima (of base-2 logarithms) and denominators (one per lane). row: the first one's in the tile. Row r attends to visible[r].
// scale: of the scores. factors: rescale the rows' previous sums.
template <class T>
void softmax_step(Scratch<T>& s, int first, int row, int rows, int padded, const Visible* visible, float scale, float* factors) {
    const float* scores = s.scores + first * kKeys;
    T* probabilities = s.probabilities + first * kKeys;
    f32x16 largest[kLanes];
    for (int r = 0; r < kLanes; ++r) {
        largest[r] = splat(kLowest);
        if (r >= rows) continue;
        for (int c = 0; c < padded; c += kLanes) {
            const f32x16 v = load16(scores + r * kKeys + c);
            largest[r] = max_of(largest[r], visible[r].has_all(c) ? v : select(visible[r].lanes(c), v, splat(kLowest)));
        }
    }
    const f32x16 old_maxima = load16(s.maxima + row);
    const f32x16 maxima = max_of(old_maxima, max_of_rows(largest) * scale);
    alignas(64) float new_maxima[kLanes];
    store16(new_maxima, maxima);
    store16(factors, exp2_nonpositive(old_maxima - maxima));
    for (int r = 0; r < rows; ++r) {
        f32x16 total = load16(s.denominators + (row + r) * kLanes) * factors[r];
        for (int c = 0; c < padded; c += kLanes) {
            f32x16 p = exp2_nonpositive(load16(scores + r * kKeys + c) * scale - new_maxima[r]);
            if (!visible[r].has_all(c)) p = select(visible[r].lanes(c), p, f32x16{});
            store16(probabilities + r * kKeys + c, p);
            total += p;
        }
        store16(s.denominators + (row + r) * kLanes, total);
        s.maxima[row + r] = new_maxima[r];
    }
}

// What a step's keys are padded to a multiple of: the matrix unit adds up kUnitSize groups at a time.
template <class T>
int key_padding(const MatrixUnit* unit) {
    return unit ? kUnitSize * Dot<T>::kInputs : kLanes;
}

}  // namespace
}  // namespace cas

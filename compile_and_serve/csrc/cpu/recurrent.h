// What the kernels of recurrent state share: where a unit lies, and small products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "multiply.h"
#include "simd.h"

namespace cas {

template <class T>
inline T* unit_of(const CasPagedUnits& units, const int32_t* pages, int64_t unit) {
    const int64_t page = pages[units.columns[unit / units.units_per_page]];
    return static_cast<T*>(units.data) + page * units.page_stride + unit % units.units_per_page * units.unit_size;
}

// One sequence of a step: tokens computed ... length - 1 are new, the first of them is row `begin` of the step's tensors.
struct SlotSequence {
    const int32_t *read_pages, *write_pages;
    int64_t begin, computed, length;
    bool moves;  // it writes other pages than it reads

    SlotSequence(const CasSlots& slots, int64_t seq)
        : read_pages(slots.read_pages + seq * slots.read_stride),
          write_pages(slots.write_pages + seq * slots.write_stride),
          begin(slots.query_start_loc[seq]),
          computed(slots.seq_lens[seq] - (slots.query_start_loc[seq + 1] - begin)),
          length(slots.seq_lens[seq]) {}

    bool is_padding() const { return length <= 0 || length <= computed; }
};

constexpr int64_t kCheckpointTokens = 16;  // a checkpoint lies at a multiple of these

inline int64_t down(int64_t position) { return position / kCheckpointTokens * kCheckpointTokens; }

// Where the checkpoint lies after a step whose last `rollback` tokens may be taken back.
inline int64_t checkpoint_after(const SlotSequence& s, int64_t rollback) { return down(std::max(s.computed, s.length - rollback)); }

// Where the checkpoint lies that a step reads. stored: the state's own word, which is random in examples.
inline int64_t checkpoint_before(float stored, int64_t computed, int64_t ring) {
    const int64_t earliest = std::max<int64_t>(0, down(computed - ring + kCheckpointTokens)), latest = down(computed);
    const int64_t position = std::isfinite(stored) ? int64_t(std::clamp(stored, 0.0f, 1e9f)) : 0;
    return std::clamp(down(position), earliest, latest);
}

// c[i] = sum over j of a(i, j) b[j] for kRows rows and kVectors * 16 columns, added to scale_i c_before[i] where that is not null.
// a(i, j) is at a + i * row_step + j * column_step. b has rows of `width`.
template <int kRows, int kVectors>
inline void product_tile(
    const float* a, int64_t row_step, int64_t column_step, const float* b, int64_t count, int64_t width, const float* before,
    const float* scale, int64_t scale_step, float* c
) {
    f32x16 sums[kRows][kVectors] = {};
    if (before != nullptr)
        for (int i = 0; i < kRows; ++i)
            for (int v = 0; v < kVectors; ++v) sums[i][v] = scale[i * scale_step] * load16(before + i * width + v * kLanes);
    for (int64_t j = 0; j < count; ++j) {
        for (int v = 0; v < kVectors; ++v) {
            const f32x16 row = load16(b + j * width + v * kLanes);
            for (int i = 0; i < kRows; ++i) sums[i][v] += a[i * row_step + j * column_step] * row;
        }
    }
    for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kVectors; ++v) store16(c + i * width + v * kLanes, sums[i][v]);
}

template <int kRows, int kVectors>
inline void product_rows(
    const float* a, int64_t row_step, int64_t column_step, const float* b, int64_t count, int64_t width, const float* before,
    const float* scale, int64_t scale_step, float* c
) {
    int64_t column = 0;
    for (; column + kVectors * kLanes <= width; column += kVectors * kLanes)
        product_tile<kRows, kVectors>(
            a, row_step, column_step, b + column, count, width, before ? before + column : nullptr, scale, scale_step, c + column);
    for (; column < width; column += kLanes)
        product_tile<kRows, 1>(
            a, row_step, column_step, b + column, count, width, before ? before + column : nullptr, scale, scale_step, c + column);
}

// As product_tile, for `rows` rows and `width` columns, a multiple of 16. c may be `before`.
inline void product(
    const float* a, int64_t row_step, int64_t column_step, int64_t rows, const float* b, int64_t count, int64_t width,
    const float* before, const float* scale, int64_t scale_step, float* c
) {
    int64_t i = 0;
    const auto at = [&](const float* base, int64_t step) { return base ? base + i * step : nullptr; };
    for (; i + 4 <= rows; i += 4)
        product_rows<4, 4>(
            a + i * row_step, row_step, column_step, b, count, width, at(before, width), at(scale, scale_step), scale_step, c + i * width);
    for (; i + 2 <= rows; i += 2)
        product_rows<2, 8>(
            a + i * row_step, row_step, column_step, b, count, width, at(before, width), at(scale, scale_step), scale_step, c + i * width);
    for (; i < rows; ++i)
        product_rows<1, 8>(
            a + i * row_step, row_step, column_step, b, count, width, at(before, width), at(scale, scale_step), scale_step, c + i * width);
}

}  // namespace cas

// The layout of a tile's sums in a warp group's registers, and of their products in shared memory. The functions also compile for the
// host: tests/csrc/silu_mul_layout.cpp compares them with CuTe's layouts.
//
// No data moves between threads: a wgmma leaves column 8j + 2(lane % 4) + i of a row in element (i, j) of a lane, so a column and the
// column half a tile further belong to the same lane.
#pragma once

#include "cute/config.hpp"

namespace cas {

struct SiluMulLayout {
    static constexpr int kRows = 64, kColumns = 64;  // of one bulk copy: 128 bytes per row, the widest swizzle
    static constexpr int kBlock = kRows * kColumns;  // elements of one bulk copy

    // Index, among a lane's sums of one 64-row wgmma, of row 8 · half + lane / 4 + 16 · warp and column 8 · group + 2 · (lane % 4) + i.
    CUTE_HOST_DEVICE static constexpr int sum(int i, int half, int group) { return i + 2 * half + 4 * group; }

    // The address that a lane passes to stmatrix, which stores four 8 × 8 matrices (two halves of rows times two groups of columns from
    // `group` on): row lane % 8 of matrix lane / 8. In elements from the start of a warp group's 64 rows of all columns.
    CUTE_HOST_DEVICE static constexpr int address(int warp, int lane, int group) {
        const int row = 16 * warp + 8 * (lane / 8 % 2) + lane % 8;
        const int column_group = group + lane / 16;
        const int swizzled = (column_group % 8) ^ (row % 8);  // matches CU_TENSOR_MAP_SWIZZLE_128B
        return column_group / 8 * kBlock + row * kColumns + swizzled * 8;
    }
};

}  // namespace cas

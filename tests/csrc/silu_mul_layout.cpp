// Compares silu_mul_layout.h (wgmma's sums, stmatrix, the bulk copies' swizzle) with CuTe's layouts, on the host.
// Prints one line for each of the first wrong elements, then the number of outputs checked. Returns 1 if any was wrong.
#include <array>
#include <cstdio>
#include <vector>

#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "silu_mul_layout.h"

using namespace cute;
using cas::SiluMulLayout;
using Bf16 = cute::bfloat16_t;

static int wrong = 0;

static void expect(bool holds, const char* problem, int thread, int row, int column) {
    if (!holds && ++wrong <= 8) std::printf("%s: thread %d, sum of row %d, column %d\n", problem, thread, row, column);
}

// Follows every output of a tile from its sum to the element that the bulk copy reads.
template <class Atom, int rows, int columns, int warp_groups>
static void check() {
    constexpr int outputs = columns / 2, groups = outputs / 8, row_blocks = rows / 64 / warp_groups;
    const auto mma = make_tiled_mma(Atom{}, Layout<Shape<Int<warp_groups>, _1, _1>>{});
    const auto tile = Shape<Int<rows>, Shape<Int<outputs>, _2>>{};
    const auto sums = partition_fragment_C(mma, tile).layout();
    const auto block = as_position_independent_swizzle_layout(  // as the bulk copy reads it
        tile_to_shape(GMMA::Layout_K_SW128_Atom<Bf16>{}, Shape<_64, _64>{}));
    std::vector<int> stored(rows * outputs, 0);
    for (int thread = 0; thread < 128 * warp_groups; ++thread) {
        const auto at = mma.get_slice(thread).partition_C(make_identity_tensor(tile));
        const auto coordinate = [&](int sum) {  // (row, output, 0 for gate or 1 for up) of a lane's sum
            for (int i = 0; i < size(sums); ++i) {
                if (sums(i) == sum) return std::array<int, 3>{int(get<0>(at(i))), int(get<1, 0>(at(i))), int(get<1, 1>(at(i)))};
            }
            return std::array<int, 3>{-1, -1, -1};
        };
        const int warp_group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
        for (int m = 0; m < row_blocks; ++m) {
            for (int group = 0; group < groups; group += 2) {
                for (int matrix = 0; matrix < 4; ++matrix) {
                    for (int i = 0; i < 2; ++i) {
                        const int half = matrix % 2, g = group + matrix / 2, base = m * 8 * groups;
                        const auto gate = coordinate(base + SiluMulLayout::sum(i, half, g));
                        const auto up = coordinate(base + SiluMulLayout::sum(i, half, g + groups));
                        expect(gate[2] == 0 && up[2] == 1 && gate[0] == up[0] && gate[1] == up[1], "gate and up differ", thread, gate[0], gate[1]);
                        // stmatrix: element 2 (lane % 4) + i of row lane / 4 of a matrix goes to the address given by lane
                        // 8 matrix + row.
                        const int address = SiluMulLayout::address(warp, 8 * matrix + lane / 4, group) + 2 * (lane % 4) + i;
                        const int first_row = (m * warp_groups + warp_group) * 64, first_column = address / SiluMulLayout::kBlock * 64;
                        const int row = gate[0] - first_row, column = gate[1] - first_column;
                        const bool is_inside = row >= 0 && row < 64 && column >= 0 && column < 64;
                        expect(is_inside && block(row, column) == address % SiluMulLayout::kBlock, "wrong address", thread, gate[0], gate[1]);
                        if (is_inside) ++stored[gate[0] * outputs + gate[1]];
                    }
                }
            }
        }
    }
    for (int i = 0; i < rows * outputs; ++i) expect(stored[i] == 1, "not stored exactly once", -1, i / outputs, i % outputs);
    std::printf("%d ", rows * outputs);
}

int main() {
    constexpr auto K = GMMA::Major::K;
    check<SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<K, K>, 128, 256, 2>();
    check<SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<K, K>, 256, 128, 2>();
    check<SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<K, K>, 128, 128, 1>();
    std::printf("outputs, %d wrong\n", wrong);
    return wrong != 0;
}

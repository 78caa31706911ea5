// An epilogue for CUTLASS' sm90 kernels. The left half of a tile's columns holds gates, the right half the up-projections of the same
// outputs; the epilogue stores silu(gate) · up, half as wide as the tile.
// Products go through shared memory. Bulk copies store them from there while the next tile is multiplied, and clip rows and columns
// beyond the matrix.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/bfloat16.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "silu_mul_layout.h"

namespace cas {

using namespace cute;

// kWarpGroups: warp groups that share a tile, 64 rows each at a time. has_scales: scales multiply the sums first.
template <class TileShape_, int kWarpGroups_, bool has_scales>
class SiluMulEpilogue {
    using Bf16 = cutlass::bfloat16_t;
    static constexpr int kWarpGroups = kWarpGroups_;
    static constexpr int kTileRows = size<0>(TileShape_{});
    static constexpr int kTileColumns = size<1>(TileShape_{}) / 2;
    static constexpr int kRowBlocks = kTileRows / SiluMulLayout::kRows / kWarpGroups;  // per warp group
    static constexpr int kColumnBlocks = kTileColumns / SiluMulLayout::kColumns;
    static constexpr int kGroups = kTileColumns / 8;
    static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup;
    static_assert(kTileColumns % SiluMulLayout::kColumns == 0, "outputs of a tile are stored 64 columns at a time");
    static_assert(kTileRows % (SiluMulLayout::kRows * kWarpGroups) == 0, "rows of a tile are stored 64 at a time");

    using BlockLayout = decltype(tile_to_shape(
        GMMA::Layout_K_SW128_Atom<Bf16>{}, Shape<Int<SiluMulLayout::kRows>, Int<SiluMulLayout::kColumns>>{}));

   public:
    // Types and constants that the kernel and its adapter require.
    using EpilogueSchedule = cutlass::gemm::EpilogueDefault;
    using DispatchPolicy = EpilogueSchedule;
    using ThreadEpilogueOp = SiluMulEpilogue;
    using ElementAccumulator = float;
    using ElementOutput = Bf16;
    using ElementC = Bf16;  // never read
    using ElementD = Bf16;
    using StrideC = Stride<int64_t, _1, _0>;
    using StrideD = StrideC;
    using GmemTiledCopyC = void;
    using GmemTiledCopyD = void;
    static constexpr int kCount = 1;

    using LoadPipeline = cutlass::PipelineTransactionAsync<0>;
    using LoadPipelineState = cutlass::PipelineState<0>;
    using StorePipeline = cutlass::PipelineTmaStore<0>;
    using StorePipelineState = cutlass::PipelineState<0>;
    using PipelineStorage = typename LoadPipeline::SharedStorage;
    static constexpr uint32_t TmaTransactionBytes = 0;
    static constexpr bool RequiresTransactionBytes = false;

    struct SharedStorage {
        alignas(1024) Bf16 blocks[kWarpGroups][kRowBlocks][kColumnBlocks][SiluMulLayout::kBlock];
    };
    using TensorStorage = SharedStorage;
    using TensorMapStorage = SharedStorage;

    // Scales: one number, or one per token of x_scale (x_per_row) and one per row of weight_scale (weight_per_row).
    struct Arguments {
        Bf16* out = nullptr;
        int64_t stride = 0;
        int32_t tokens = 0, hidden = 0;
        const float* x_scale = nullptr;
        const float* weight_scale = nullptr;
        bool x_per_row = false, weight_per_row = false;
    };

   private:
    static auto make_store(Arguments const& args) {
        const auto out = make_tensor(make_gmem_ptr(args.out), make_shape(args.tokens, args.hidden), make_stride(args.stride, _1{}));
        return make_tma_copy(SM90_TMA_STORE{}, out, BlockLayout{});
    }

   public:
    struct Params {
        decltype(make_store(Arguments{})) store;
        Arguments args;
    };

    template <class ProblemShape>
    static Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
        return {make_store(args), args};
    }
    template <class ProblemShape>
    static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
        return 0;
    }
    template <class ProblemShape>
    static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                                cutlass::CudaHostAdapter* = nullptr) {
        return cutlass::Status::kSuccess;
    }
    template <class ProblemShape>
    static bool can_implement(ProblemShape const&, Arguments const&) {
        return true;
    }
    template <class Tile>
    CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(Tile) {
        return 1;
    }
    template <class Tile>
    CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(Tile) {
        return 1;
    }
    CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
        prefetch_tma_descriptor(params.store.get_tma_descriptor());
    }

    CUTLASS_HOST_DEVICE SiluMulEpilogue(Params const& params, TensorStorage&) : params_(params) {}

    CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }

    template <class... Rest>
    CUTLASS_DEVICE auto load(LoadPipeline, LoadPipelineState state, Rest&&...) {
        return state;
    }
    CUTLASS_DEVICE auto load_tail(LoadPipeline, LoadPipelineState state) { return state; }

    template <class Problem, class Tile, class TileCoord, class Engine, class Layout_, class TiledMma>
    CUTLASS_DEVICE auto store(LoadPipeline, LoadPipelineState load_state, StorePipeline, StorePipelineState store_state, Problem const&,
                              Tile const&, TileCoord const& tile_coord, Tensor<Engine, Layout_> const& sums, TiledMma const&,
                              int thread, TensorStorage& shared, int = -1) {
        static_assert(size(Layout_{}) == kRowBlocks * 4 * 2 * kGroups, "a lane holds 2 × 2 × groups sums of gates and of ups per row block");
        const int warp_group = thread / kThreads, warp = thread / 32 % 4, lane = thread % 32;
        const bool stores = thread % kThreads == 0;
        const int first_row = static_cast<int>(get<0>(tile_coord)) * kTileRows;
        const int first_column = static_cast<int>(get<1, 0>(tile_coord)) * kTileColumns;
        auto& blocks = shared.blocks[warp_group];
        // The last tile's bulk copies must have read the shared memory before it is overwritten.
        if (stores) tma_store_wait<0>();
        cutlass::arch::NamedBarrier::sync(kThreads, warp_group);
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
            Bf16* const base = &blocks[m][0][0];
            float x_scales[2];
            CUTLASS_PRAGMA_UNROLL
            for (int half = 0; half < 2; ++half) {
                x_scales[half] = x_scale(first_row + (m * kWarpGroups + warp_group) * SiluMulLayout::kRows + 16 * warp + 8 * half + lane / 4);
            }
            CUTLASS_PRAGMA_UNROLL
            for (int group = 0; group < kGroups; group += 2) {
                uint32_t pairs[4];  // of four matrices, in the order of Layout::address
                CUTLASS_PRAGMA_UNROLL
                for (int matrix = 0; matrix < 4; ++matrix) {
                    const int half = matrix % 2, g = group + matrix / 2;
                    const int at = m * 8 * kGroups;
                    float product[2];
                    CUTLASS_PRAGMA_UNROLL
                    for (int i = 0; i < 2; ++i) {
                        const int column = first_column + 8 * g + 2 * (lane % 4) + i;
                        const float gate = sums(at + SiluMulLayout::sum(i, half, g)), up = sums(at + SiluMulLayout::sum(i, half, g + kGroups));
                        product[i] = silu_mul(gate * x_scales[half] * weight_scale(column, 0), up * x_scales[half] * weight_scale(column, 1));
                    }
                    pairs[matrix] = pack(product[0], product[1]);
                }
                auto& to = *reinterpret_cast<uint128_t*>(base + SiluMulLayout::address(warp, lane, group));
                SM90_U32x4_STSM_N::copy(pairs[0], pairs[1], pairs[2], pairs[3], to);
            }
        }
        tma_store_fence();
        cutlass::arch::NamedBarrier::sync(kThreads, warp_group);
        if (stores) {
            CUTLASS_PRAGMA_UNROLL
            for (int m = 0; m < kRowBlocks; ++m) {
                CUTLASS_PRAGMA_UNROLL
                for (int n = 0; n < kColumnBlocks; ++n) {
                    SM90_TMA_STORE_2D::copy(params_.store.get_tma_descriptor(), &blocks[m][n][0], first_column + n * SiluMulLayout::kColumns,
                                            first_row + (m * kWarpGroups + warp_group) * SiluMulLayout::kRows);
                }
            }
            tma_store_arrive();
        }
        return make_tuple(load_state, store_state);
    }

    // The bulk copies must finish before another warp group overwrites the shared memory and before the block ends.
    CUTLASS_DEVICE auto store_tail(LoadPipeline, LoadPipelineState load_state, StorePipeline, StorePipelineState store_state) {
        tma_store_wait<0>();
        return make_tuple(load_state, store_state);
    }

   private:
    CUTLASS_DEVICE float x_scale(int row) const {
        if constexpr (has_scales) {
            return __ldg(params_.args.x_scale + (params_.args.x_per_row ? min(row, params_.args.tokens - 1) : 0));
        }
        return 1.0f;
    }

    CUTLASS_DEVICE float weight_scale(int column, int is_up) const {
        if constexpr (has_scales) {
            const int hidden = params_.args.hidden, at = min(column, hidden - 1) + is_up * hidden;
            return __ldg(params_.args.weight_scale + (params_.args.weight_per_row ? at : 0));
        }
        return 1.0f;
    }

    CUTLASS_DEVICE static float silu_mul(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

    CUTLASS_DEVICE static uint32_t pack(float low, float high) {
        uint32_t pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }

    Params const& params_;
};

}  // namespace cas

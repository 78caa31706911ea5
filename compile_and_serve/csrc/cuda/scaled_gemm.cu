// Scaled matrix products of float8 inputs on Hopper's tensor cores (CUTLASS, sm_90a).
//
// The file is compiled once per configuration (CAS_CONFIG, see below), in parallel; each takes half a minute.
// Scales per row and column are multiplied into the finished sums: out = bf16(a_scale[m] · (b_scale[n] · Σ) + residual). Scales per
// block of 128 inputs are multiplied into the sum of each block.
#include "scaled_gemm.h"

#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace {

using namespace cute;
namespace schedule = cutlass::gemm;
namespace fusion = cutlass::epilogue::fusion;

using Fp8 = cutlass::float_e4m3_t;
using Bf16 = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

constexpr int kAlignFp8 = 16, kAlignBf16 = 8;  // 16 bytes, the alignment of a bulk copy

template <class Tile_, class Cluster_, class Mainloop_, class Epilogue_, bool by_block_, class Scheduler_ = void>
struct Config {
    using Tile = Tile_;
    using Cluster = Cluster_;
    using Mainloop = Mainloop_;
    using Epilogue = Epilogue_;
    using Scheduler = Scheduler_;
    static constexpr bool by_block = by_block_;
};

using Pingpong = cutlass::epilogue::TmaWarpSpecialized;
using Cooperative = cutlass::epilogue::TmaWarpSpecializedCooperative;
using FastPingpong = schedule::KernelTmaWarpSpecializedPingpongFP8FastAccum;
using FastCooperative = schedule::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
using BlockPingpong = schedule::KernelTmaWarpSpecializedPingpongFP8Blockwise;
using BlockCooperative = schedule::KernelTmaWarpSpecializedCooperativeFP8Blockwise;

// The configurations, under the same names as in custom_ops/quantized/cutlass_gemm.py. The tuner chooses among them.
#if CAS_CONFIG == 0  // few tokens: narrow tiles; a cluster shares the tokens
#define CAS_NAME rows_64x64
using Chosen = Config<Shape<_64, _64, _128>, Shape<_1, _4, _1>, FastPingpong, Pingpong, false>;
#elif CAS_CONFIG == 1
#define CAS_NAME rows_64x128
using Chosen = Config<Shape<_64, _128, _128>, Shape<_2, _1, _1>, FastPingpong, Pingpong, false>;
#elif CAS_CONFIG == 2
#define CAS_NAME rows_128x128
using Chosen = Config<Shape<_128, _128, _128>, Shape<_2, _1, _1>, FastPingpong, Pingpong, false>;
#elif CAS_CONFIG == 3  // many tokens: the largest tile whose sums fit the registers of two warp groups
#define CAS_NAME rows_128x256
using Chosen = Config<Shape<_128, _256, _128>, Shape<_2, _1, _1>, FastCooperative, Cooperative, false>;
#elif CAS_CONFIG == 4  // few tiles: the inputs are split among multiprocessors that would be idle
#define CAS_NAME rows_128x64_split
using Chosen = Config<Shape<_128, _64, _128>, Shape<_1, _1, _1>, FastCooperative, Cooperative, false, schedule::StreamKScheduler>;
#elif CAS_CONFIG == 5
#define CAS_NAME blocks_64x128
using Chosen = Config<Shape<_64, _128, _128>, Shape<_1, _2, _1>, BlockPingpong, Pingpong, true>;
#elif CAS_CONFIG == 6
#define CAS_NAME blocks_128x128
using Chosen = Config<Shape<_128, _128, _128>, Shape<_1, _2, _1>, BlockCooperative, Cooperative, true>;
#else
#error "CAS_CONFIG must be the number of a configuration"
#endif

// bf16(beta · residual + a_scale[m] · (b_scale[n] · sum)). Each scale is a vector or (stride 0) one number. The residual is read only if
// beta is not 0.
using AScale = fusion::Sm90ColBroadcast<0, Chosen::Tile, float, float, Stride<bool, _0, int64_t>>;
using BScale = fusion::Sm90RowBroadcast<0, Chosen::Tile, float, float, Stride<_0, bool, int64_t>>;
template <class Out>
using Multiply = fusion::Sm90Compute<cutlass::multiplies, Out, float, cutlass::FloatRoundStyle::round_to_nearest>;
using ScaleByRows = fusion::Sm90EVT<Multiply<float>, AScale, fusion::Sm90EVT<Multiply<float>, BScale, fusion::Sm90AccFetch>>;
using Beta = fusion::Sm90ScalarBroadcast<float, Stride<_0, _0, int64_t>>;
using AddResidual =
    fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Bf16, float, cutlass::FloatRoundStyle::round_to_nearest>;
using ScaleByRowsAndAdd = fusion::Sm90EVT<AddResidual, Beta, fusion::Sm90SrcFetch<Bf16>, ScaleByRows>;
using Add = fusion::LinearCombination<Bf16, float, Bf16, float>;

using BlockScales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128, GMMA::Major::K, GMMA::Major::K>;

template <class Layout, class ScaleLayout>
using Operand = std::conditional_t<Chosen::by_block, cute::tuple<Layout, ScaleLayout>, Layout>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Chosen::Tile, Chosen::Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Bf16, RowMajor, kAlignBf16, Bf16, RowMajor, kAlignBf16,
    Chosen::Epilogue, std::conditional_t<Chosen::by_block, Add, ScaleByRowsAndAdd>>::CollectiveOp;

using Mainloop = typename schedule::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Fp8,
    Operand<RowMajor, decltype(BlockScales::deduce_layoutSFA())>, kAlignFp8, Fp8,
    Operand<ColumnMajor, decltype(BlockScales::deduce_layoutSFB())>, kAlignFp8, float, Chosen::Tile, Chosen::Cluster,
    schedule::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    Chosen::Mainloop>::CollectiveOp;

using Kernel = schedule::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, Chosen::Scheduler>;
using Gemm = schedule::device::GemmUniversalAdapter<Kernel>;

template <class Stride_>
Stride_ row_stride(int64_t elements) {
    Stride_ stride{};
    get<0>(stride) = elements;
    return stride;
}

template <class Arguments>  // a template, so that only the configuration's kind of scales is compiled
Arguments make_arguments(const CasScaledGemm& args) {
    const auto problem = make_shape(static_cast<int>(args.m), static_cast<int>(args.n), static_cast<int>(args.k), 1);
    const auto* a = static_cast<const Fp8*>(args.a);
    const auto* b = static_cast<const Fp8*>(args.b);
    const auto a_stride = row_stride<typename Kernel::StrideA>(args.a_stride);
    const auto b_stride = row_stride<typename Kernel::StrideB>(args.b_stride);
    const float beta = args.residual ? 1.0f : 0.0f;
    Arguments all{};
    all.mode = schedule::GemmUniversalMode::kGemm;
    all.problem_shape = problem;
    if constexpr (Chosen::by_block) {
        all.mainloop = {a, a_stride, b, b_stride, args.a_scale, BlockScales::tile_atom_to_shape_SFA(problem),
                        args.b_scale, BlockScales::tile_atom_to_shape_SFB(problem)};
        all.epilogue.thread.alpha = 1.0f;
        all.epilogue.thread.beta = beta;
    } else {
        all.mainloop = {a, a_stride, b, b_stride};
        all.epilogue.thread = {
            {{beta}},
            {},
            {
                {args.a_scale, 0.0f, {args.a_per_row != 0, _0{}, 0}},
                {{args.b_scale, 0.0f, {_0{}, args.b_per_row != 0, 0}}, {}, {}},
                {},
            },
            {},
        };
    }
    all.epilogue.ptr_C = static_cast<const Bf16*>(args.residual ? args.residual : args.out);  // the TMA descriptor needs a valid pointer
    all.epilogue.dC = row_stride<typename Kernel::StrideC>(args.residual ? args.residual_stride : args.out_stride);
    all.epilogue.ptr_D = static_cast<Bf16*>(args.out);
    all.epilogue.dD = row_stride<typename Kernel::StrideD>(args.out_stride);
    return all;
}

typename Gemm::Arguments arguments(const CasScaledGemm& args) { return make_arguments<typename Gemm::Arguments>(args); }

}  // namespace

#define CAS_JOIN_(a, b) a##b
#define CAS_JOIN(a, b) CAS_JOIN_(a, b)

extern "C" {

// Bytes of device memory that the product uses as workspace.
int64_t CAS_JOIN(cas_scaled_gemm_workspace_, CAS_NAME)(const CasScaledGemm* args) {
    return static_cast<int64_t>(Gemm::get_workspace_size(arguments(*args)));
}

// Launches the product on args->stream. Returns null, or an error message if nothing was launched.
const char* CAS_JOIN(cas_scaled_gemm_, CAS_NAME)(const CasScaledGemm* args) {
    Gemm gemm;
    const auto all = arguments(*args);
    auto status = Gemm::can_implement(all);
    if (status == cutlass::Status::kSuccess) {
        status = gemm.run(all, args->workspace, static_cast<cudaStream_t>(args->stream));
    }
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}

}  // extern "C"

// The first half of a gated MLP in one kernel on Hopper's tensor cores (CUTLASS, sm_90a): silu(x Wgᵀ) · (x Wuᵀ), where W = [Wg; Wu] is
// not reordered.
//
// CUTLASS sees W's rows as one mode (hidden, 2) of strides (inputs, hidden · inputs). A tile takes (columns / 2, 2) of it: gates on the
// left, the up-projections of the same outputs on the right; silu_mul_epilogue.h multiplies them in registers. The number of tile columns
// is rounded up to whole clusters. Indices beyond the last column wrap to the first ones, whose tiles are stored twice, with the same
// bits.
// The file is compiled once per configuration (CAS_CONFIG, see below), in parallel.
#include "silu_mul_gemm.h"

#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "silu_mul_epilogue.h"

namespace {

using namespace cute;
namespace schedule = cutlass::gemm;

using Bf16 = cutlass::bfloat16_t;
using Fp8 = cutlass::float_e4m3_t;
using Cooperative = schedule::KernelTmaWarpSpecializedCooperative;
using Pingpong = schedule::KernelTmaWarpSpecializedPingpong;
using FastPingpong = schedule::KernelTmaWarpSpecializedPingpongFP8FastAccum;

template <class Element_, int rows, int columns, class Schedule_>  // columns: gates and up-projections together
struct Config {
    using Element = Element_;
    using Tile = Shape<Int<rows>, Shape<Int<columns / 2>, _2>, Int<128 / sizeof(Element)>>;
    using Cluster = Shape<_2, _1, _1>;
    using Schedule = Schedule_;
};

// The configurations, under the same names as in custom_ops/linear/silu_mul_gemm.py. The tuner chooses among them. Measured and never
// more than a percent faster: 256x128, 128x192, a cluster along the tokens, and blocks instead of strips of neighbouring tiles (up to
// three times slower if there are few tiles).
#if CAS_CONFIG == 0  // very many tokens: the largest tile whose sums fit the registers of two warp groups
#define CAS_NAME 128x256
using Chosen = Config<Bf16, 128, 256, Cooperative>;
#elif CAS_CONFIG == 1  // one warp group multiplies while the other stores
#define CAS_NAME 128x128_pingpong
using Chosen = Config<Bf16, 128, 128, Pingpong>;
#elif CAS_CONFIG == 2  // float8 with scales
#define CAS_NAME scaled
using Chosen = Config<Fp8, 128, 128, FastPingpong>;
#else
#error "CAS_CONFIG must be the number of a configuration"
#endif

constexpr int kWarpGroupsOfTile = std::is_same_v<Chosen::Schedule, Cooperative> ? 2 : 1;
using Element = Chosen::Element;
using Epilogue = cas::SiluMulEpilogue<Chosen::Tile, kWarpGroupsOfTile, std::is_same_v<Element, Fp8>>;
constexpr int kAlignment = 16 / sizeof(Element);

using StrideX = Stride<int64_t, _1, _0>;
using StrideW = Stride<Stride<int64_t, int64_t>, _1, _0>;

using Mainloop = typename schedule::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, StrideX, kAlignment, Element, StrideW, kAlignment, float, Chosen::Tile,
    Chosen::Cluster,
    schedule::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    Chosen::Schedule>::CollectiveOp;

using Problem = Shape<int, Shape<int, _2>, int, _1>;
using Kernel = schedule::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
using Gemm = schedule::device::GemmUniversalAdapter<Kernel>;

}  // namespace

#define CAS_JOIN_(a, b) a##b
#define CAS_JOIN(a, b) CAS_JOIN_(a, b)

extern "C" {

// Launches the kernel on args->stream. Returns null, or an error message if nothing was launched.
const char* CAS_JOIN(cas_silu_mul_gemm_, CAS_NAME)(const CasSiluMulGemm* args) {
    const int tokens = static_cast<int>(args->tokens), hidden = static_cast<int>(args->hidden), inputs = static_cast<int>(args->inputs);
    typename Gemm::Arguments all{};
    all.mode = schedule::GemmUniversalMode::kGemm;
    all.problem_shape = Problem{tokens, {hidden, _2{}}, inputs, _1{}};
    all.mainloop = {static_cast<const Element*>(args->x), {args->x_stride, _1{}, _0{}},
                    static_cast<const Element*>(args->weight), {{args->inputs, args->hidden * args->inputs}, _1{}, _0{}}};
    all.epilogue = {static_cast<Bf16*>(args->out), args->out_stride, tokens, hidden,
                    args->x_scale, args->weight_scale, args->x_per_row != 0, args->weight_per_row != 0};
    Gemm gemm;
    auto status = Gemm::can_implement(all);
    if (status == cutlass::Status::kSuccess) {
        status = gemm.run(all, nullptr, static_cast<cudaStream_t>(args->stream));
    }
    return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}

}  // extern "C"

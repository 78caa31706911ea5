// Matrix products of float8 inputs with scales per block of 128, on Hopper's tensor cores: DeepGEMM's kernel (sm_90a).
//
// DeepGEMM compiles a kernel at the first call that needs it, and another number of rows may need another kernel. Here its template is
// compiled ahead, once per configuration (CAS_CONFIG, see below), in parallel. CAS_SMS: multiprocessors of the device.
#include "scaled_gemm.h"  // its interface, with another layout of a_scale

#include <cuda.h>
#include <cuda_runtime.h>

#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

namespace {

// The configurations, under the same names as in custom_ops/quantized/deep_gemm.py. The tuner chooses among them. A tile of the output has
// kRows × kColumns elements. In a cluster of two, neighbours in a column of tiles share what they read of b.
constexpr uint32_t kRows = 128;
#if CAS_CONFIG == 0
#define CAS_NAME deep_128x128
constexpr uint32_t kColumns = 128, kCluster = 1;
#elif CAS_CONFIG == 1
#define CAS_NAME deep_128x192
constexpr uint32_t kColumns = 192, kCluster = 2;
#else
#error "CAS_CONFIG must be the number of a configuration"
#endif

constexpr uint32_t kBlock = 128;           // inputs per scale, and outputs per scale of b
constexpr uint32_t kSwizzle = 128;         // bytes
constexpr uint32_t kSharedBytes = 232448;  // that a thread block of Hopper can have
constexpr uint32_t kScaleBytes = 8192;     // of them for scales of b, at least: kRowsOfScales rows of k / 128 numbers
constexpr uint32_t kProducerThreads = 128;
constexpr uint32_t kMathThreads = 256;  // 128 for each 64 rows

constexpr uint32_t kOutBytes = kRows * kColumns * 2;
constexpr uint32_t kStageBytes = (kRows + kColumns) * kBlock + kRows * 4;
constexpr uint32_t kStages = (kSharedBytes - kOutBytes - kScaleBytes) / kStageBytes;
constexpr uint32_t kRowsOfScales = kBlock % kColumns == 0 ? 1 : 2;
static_assert(kStages >= 3, "loads of the next blocks must hide behind the products");

constexpr auto kKernel =
    &deep_gemm::sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 0, 0, 1, kRows, kColumns, kBlock, kSwizzle, kSwizzle, kSwizzle, kStages,
                                        kProducerThreads, kMathThreads, kCluster, false, CAS_SMS, deep_gemm::GemmType::Normal,
                                        cutlass::bfloat16_t>;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, found at run time: the build needs no driver.
EncodeTiled encode_tiled() {
    static const EncodeTiled found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        const auto error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
    }();
    return found;
}

// Describes a matrix of rows × columns elements for bulk copies of box_rows × box_columns.
struct Matrix {
    const void* data;
    CUtensorMapDataType type;
    uint32_t element_bytes;
    int64_t rows, columns, stride;  // stride: elements from one row to the next
    uint32_t box_rows, box_columns;
    CUtensorMapSwizzle swizzle;
};

bool describe(const Matrix& matrix, CUtensorMap* map) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(matrix.stride) * matrix.element_bytes};
    const cuuint32_t box[] = {matrix.box_columns, matrix.box_rows}, steps[] = {1, 1};
    return encode_tiled()(map, matrix.type, 2, const_cast<void*>(matrix.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          matrix.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

#define CAS_JOIN_(a, b) a##b
#define CAS_JOIN(a, b) CAS_JOIN_(a, b)

extern "C" {

// Launches the product on args->stream, without a residual. a_scale: [ceil(k / 128), m rounded up to a multiple of 4], contiguous; what
// follows m is not used. Returns null, or an error message if nothing was launched.
const char* CAS_JOIN(cas_scaled_gemm_, CAS_NAME)(const CasScaledGemm* args) {
    if (encode_tiled() == nullptr) {
        return "the driver has no cuTensorMapEncodeTiled";
    }
    const int64_t num_groups = (args->k + kBlock - 1) / kBlock, scale_stride = (args->m + 3) / 4 * 4;
    const auto fp8 = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const auto swizzled = CU_TENSOR_MAP_SWIZZLE_128B;
    CUtensorMap a, b, out, a_scale;
    if (!describe({args->a, fp8, 1, args->m, args->k, args->a_stride, kRows, kBlock, swizzled}, &a) ||
        !describe({args->b, fp8, 1, args->n, args->k, args->b_stride, kColumns, kBlock, swizzled}, &b) ||
        !describe({args->out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args->m, args->n, args->out_stride, kRows, kSwizzle / 2,
                   swizzled},
                  &out) ||
        !describe({args->a_scale, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, num_groups, scale_stride, scale_stride, 1, kRows,
                   CU_TENSOR_MAP_SWIZZLE_NONE},
                  &a_scale)) {
        return "the driver refused a tensor map";
    }
    const uint32_t scale_bytes = (num_groups * kRowsOfScales * 4 + 7) / 8 * 8;
    const uint32_t shared_bytes = kOutBytes + kStages * (kStageBytes + 16) + scale_bytes;  // 16: two barriers
    if (shared_bytes > kSharedBytes) {
        return "shared memory does not hold the scales of so many inputs";
    }
    auto error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) {
        return cudaGetErrorString(error);
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(CAS_SMS);
    config.blockDim = dim3(kProducerThreads + kMathThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(args->stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, kKernel, const_cast<float*>(args->b_scale), static_cast<int*>(nullptr),
                               static_cast<uint32_t>(args->m), static_cast<uint32_t>(args->n), static_cast<uint32_t>(args->k), a, b, out,
                               a_scale);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // extern "C"

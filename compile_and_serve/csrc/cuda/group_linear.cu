// A linear over a weight of 4-bit codes for up to some hundred tokens, on Hopper's tensor cores.
//
// For up to 16 tokens (here) a block of threads computes 128 stored rows of the weight by mma.sync (with SiLU-mul: 64 gates and the 64
// up-projections of the same outputs), and each of its 8 warps takes 16 of them. For more, see group_linear_wide.h. A cluster of blocks
// shares the inputs; each adds up a part of the outputs from the shared memory of all, in order, so that every run has the same bits.
//
// A stage in shared memory holds 128 inputs: x, codes, scales and zero points, copied asynchronously some stages ahead. The first codes are
// asked for before the kernel waits for the one before it.
//
// A word has the codes of columns c, c + 32, c + 64 and c + 96. For mma.sync, a lane reads 8 words of a row: the sums may take the inputs in
// any order, so words 4m … 4m + 3 are the inputs of its fragment of product m, and 16 bytes of x are its fragments of two products. wgmma
// reads x itself, so a lane reads the words of its columns.
//
// OR puts a code into the low bits of 1024 (float16) or 128 (bfloat16); the zero point is subtracted together with that power. Both are
// exact. Scales multiply the sums of a group in float32.
#include "group_linear.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kTile = 64;                 // rows per tile of the layout
constexpr int kInputs = 128, kParts = 4;  // inputs of a stage, codes per word
constexpr int kTiles = 2, kRows = kTiles * kTile, kWarps = 8, kThreads = 32 * kWarps;  // of a block
constexpr int kTileBytes = kTile * kInputs / 2, kCodeBytes = kTiles * kTileBytes;
constexpr int kScaleBytes = kParts * kRows * 2, kZeroBytes = kParts * kRows;
constexpr int kSumsStride = kRows + 4;  // floats from one token's sums to the next one's
constexpr int kMaxSplits = 8;           // the largest cluster that every device takes
constexpr int kStartCost = 8;           // time in which a block starts and ends, in stages
constexpr int kMaxDevices = 64;

template <int token_tiles>
struct Shape {
    static constexpr int tokens = 8 * token_tiles;
    static constexpr int token_bytes = kInputs * 2 + 64;  // 64 bytes spread rows over the banks
    static constexpr int x_bytes = tokens * token_bytes;
    static constexpr int stage_bytes = (x_bytes + kCodeBytes + kScaleBytes + kZeroBytes + 1023) / 1024 * 1024;
    static constexpr int stages = 6, blocks_per_sm = token_tiles == 1 ? 3 : 2;
    static constexpr int bytes = stages * stage_bytes;
    static_assert(bytes >= tokens * kSumsStride * 4, "the sums take the place of the stages");
};

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy_16(uint32_t to, const void* from, int bytes = 16) {  // the rest becomes zero
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ uint4 load_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ uint32_t load_byte(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ float load_scale(uint32_t at, bool is_half) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return is_half ? __half2float(__ushort_as_half(v)) : __bfloat162float(__ushort_as_bfloat16(v));
}

__device__ __forceinline__ void cluster_barrier() {
    if (gridDim.x == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    }
}

template <class S>
__device__ __forceinline__ uint32_t next_stage(uint32_t at, uint32_t first) {
    at += S::stage_bytes;
    return at == first + S::stages * S::stage_bytes ? first : at;
}

// What `numbers` subtracts of a zero point.
template <bool is_half>
struct Zeros {
    uint32_t low, high;  // high: float16's, of codes times 16

    __device__ __forceinline__ void set(uint32_t zero) {
        low = (zero + (is_half ? 0x6400 : 0x4300)) * 0x10001;
        high = (zero * 16 + 0xD400) * 0x10001;  // -(64 + zero) in float16
    }
};

// Two numbers of codes `part` of two words. float16 takes codes 1 and 3 where they lie, times 16.
template <bool is_half>
__device__ __forceinline__ uint32_t numbers(uint32_t words, int part, const Zeros<is_half>& zeros) {
    uint32_t codes, result;
    if constexpr (is_half) {
        words >>= part / 2 * 8;
        if (part % 2 == 0) {
            asm("lop3.b32 %0, %1, 0x000F000F, 0x64006400, 0xEA;" : "=r"(codes) : "r"(words));
            asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(codes), "r"(zeros.low));
        } else {
            asm("lop3.b32 %0, %1, 0x00F000F0, 0x64006400, 0xEA;" : "=r"(codes) : "r"(words));
            asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(codes), "r"(0x2C002C00), "r"(zeros.high));
        }
    } else {
        asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(codes) : "r"(words >> (4 * part)));
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(codes), "r"(zeros.low));
    }
    return result;
}

template <bool is_half>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (is_half) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <bool is_half>
__device__ __forceinline__ float to_float(const void* p, int64_t at) {
    if constexpr (is_half) {
        return __half2float(static_cast<const __half*>(p)[at]);
    } else {
        return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[at]);
    }
}

// The tile of the layout that is tile i of a block. Past the last tile: it is computed and not stored.
__device__ __forceinline__ int tile_at(const CasGroupLinear& args, int i) {
    const int num_tiles = (args.rows + kTile - 1) / kTile;  // with SiLU-mul, as many again
    if (!args.silu_mul) {
        return min(static_cast<int>(blockIdx.y) * kTiles + i, num_tiles - 1);
    }
    constexpr int half = kTiles / 2;
    return min(static_cast<int>(blockIdx.y) * half + i % half, num_tiles - 1) + i / half * num_tiles;
}

// Adds up the sums of the blocks of a cluster and writes the outputs. sums: of a lane, as wgmma and mma.sync give them: of tokens 2 · lane
// and 2 · lane + 1 of every 8, row first_row and the one 8 below. Sums take the place of stages: a thread calls it once it has read all of
// them.
template <bool is_half, int token_tiles>
__device__ __forceinline__ void finish(const CasGroupLinear& args, uint8_t* shared, const float (&sums)[4 * token_tiles], int first_row,
                                       int lane) {
    const int first_token = blockIdx.z * 8 * token_tiles, tokens = min(8 * token_tiles, args.tokens - first_token);
    __syncthreads();
    float* mine = reinterpret_cast<float*>(shared);  // [tokens, kSumsStride]
    const uint32_t own_sums = shared_address(shared);
#pragma unroll
    for (int k = 0; k < token_tiles * 4; ++k) {
        const int token = k / 4 * 8 + lane * 2 + k % 2;
        mine[token * kSumsStride + first_row + k % 4 / 2 * 8] = sums[k];
    }
    cluster_barrier();
    auto add_up = [&](int token, int at, float(&totals)[4]) {  // of 4 rows
        const uint32_t own = own_sums + (token * kSumsStride + at) * 4;
        for (unsigned other = 0; other < gridDim.x; ++other) {
            uint32_t theirs;
            float v[4];
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(other));
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                         : "r"(theirs)
                         : "memory");
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                totals[k] += v[k];
            }
        }
    };
    const int out_rows = args.silu_mul ? kRows / 2 : kRows;
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4; i < tokens * out_rows; i += gridDim.x * blockDim.x * 4) {
        const int token = args.silu_mul ? i / (kRows / 2) : i / kRows, at = i % out_rows, out_row = blockIdx.y * out_rows + at;
        const int64_t out_token = first_token + token;
        float y[4] = {}, up[4] = {};
        uint16_t out[4];
        add_up(token, at, y);
        if (args.silu_mul) {
            add_up(token, out_rows + at, up);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int row = min(out_row + k, args.rows - 1);
            y[k] += args.bias ? to_float<is_half>(args.bias, row) : 0.0f;
            if (args.silu_mul) {
                up[k] += args.bias ? to_float<is_half>(args.bias, args.rows + row) : 0.0f;
                y[k] = y[k] / (1.0f + __expf(-y[k])) * up[k];
            }
            if (args.residual) {
                y[k] += to_float<is_half>(args.residual, out_token * args.residual_stride + row);
            }
            out[k] = is_half ? __half_as_ushort(__float2half_rn(y[k])) : __bfloat16_as_ushort(__float2bfloat16_rn(y[k]));
        }
        uint16_t* to = static_cast<uint16_t*>(args.out) + out_token * args.rows + out_row;
        if (args.rows % 4 == 0 && out_row < args.rows) {
            *reinterpret_cast<uint2*>(to) = {out[0] | static_cast<uint32_t>(out[1]) << 16, out[2] | static_cast<uint32_t>(out[3]) << 16};
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (out_row + k < args.rows) {
                    to[k] = out[k];
                }
            }
        }
    }
    cluster_barrier();  // the others may still read this block's sums
}

// group_shift: log2 of the parts of a stage that a group has.
template <bool is_half, int token_tiles, int group_shift>
__global__ void __launch_bounds__(kThreads, Shape<token_tiles>::blocks_per_sm) group_linear_kernel(const CasGroupLinear args) {
    using S = Shape<token_tiles>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const int thread = threadIdx.x, warp = thread / 32, row = thread % 32 / 4, lane = thread % 4;  // row: also a token of 8
    const int split = blockIdx.x, first_token = blockIdx.z * S::tokens;
    const int tokens = min(S::tokens, args.tokens - first_token);
    const int begin = static_cast<int64_t>(args.num_blocks) * split / gridDim.x;
    const int count = static_cast<int64_t>(args.num_blocks) * (split + 1) / gridDim.x - begin;
    const uint32_t base = shared_address(shared);

    // Codes: 16 bytes of each tile.
    const uint8_t* codes[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const int64_t block = static_cast<int64_t>(tile_at(args, i)) * args.num_blocks + begin;
        codes[i] = static_cast<const uint8_t*>(args.weight) + block * kTileBytes + thread * 16;
    }
    const uint32_t codes_begin = base + S::x_bytes + thread * 16;
    uint32_t codes_to = codes_begin;
    auto copy_codes = [&]() {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            copy_16(codes_to + i * kTileBytes, codes[i]);
            codes[i] += kTileBytes;
        }
        codes_to = next_stage<S>(codes_to, codes_begin);
    };
    // Scales and zero points: 16 bytes, by the first threads.
    constexpr int groups_per_block = kParts >> group_shift, scale_chunks = kTile * 2 / 16;
    const int chunks = scale_chunks + (args.zeros ? kTile / 16 : 0);
    const int blocks_per_group = max(1, args.group_size / kInputs);
    const bool copies_scales = thread < kTiles * groups_per_block * chunks;
    const uint8_t* scales_from = nullptr;
    int group_bytes = 0;
    uint32_t scales_begin = base + S::x_bytes + kCodeBytes;
    int group = begin / blocks_per_group * groups_per_block, blocks_left = blocks_per_group - begin % blocks_per_group;
    if (copies_scales) {
        const int chunk = thread % chunks, which = thread / chunks, tile = which % kTiles, place = which * kTile;
        const int64_t at = static_cast<int64_t>(tile_at(args, tile)) * args.num_groups * kTile;
        group += which / kTiles;
        if (chunk < scale_chunks) {
            scales_from = static_cast<const uint8_t*>(args.scale) + at * 2 + chunk * 16;
            group_bytes = kTile * 2;
            scales_begin += place * 2 + chunk * 16;
        } else {
            scales_from = static_cast<const uint8_t*>(args.zeros) + at + (chunk - scale_chunks) * 16;
            group_bytes = kTile;
            scales_begin += kScaleBytes + place + (chunk - scale_chunks) * 16;
        }
    }
    uint32_t scales_to = scales_begin;
    auto copy_scales = [&]() {
        if (copies_scales) {
            copy_16(scales_to, scales_from + static_cast<int64_t>(min(group, args.num_groups - 1)) * group_bytes);
            scales_to = next_stage<S>(scales_to, scales_begin);
            if (--blocks_left == 0) {
                blocks_left = blocks_per_group;
                group += groups_per_block;
            }
        }
    };
    // x: 16 bytes of every 16th token.
    const int x_token = thread / 16;
    int x_column = begin * kInputs + thread % 16 * 8;
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + ((first_token + x_token) * args.x_stride + x_column) * 2;
    const uint32_t x_begin = base + x_token * S::token_bytes + thread % 16 * 16;
    uint32_t x_to = x_begin;
    auto copy_x = [&]() {
#pragma unroll
        for (int token = 0; token < S::tokens; token += 16) {
            if (S::tokens >= 16 || x_token < S::tokens) {
                const bool is_there = x_token + token < tokens && x_column < args.inputs;
                copy_16(x_to + token * S::token_bytes, is_there ? x + token * args.x_stride * 2 : args.x, is_there ? 16 : 0);
            }
        }
        x += kInputs * 2;
        x_column += kInputs;
        x_to = next_stage<S>(x_to, x_begin);
    };

    asm volatile("griddepcontrol.launch_dependents;");
    constexpr int ahead = S::stages - 2;
    for (int i = 0; i < ahead && i < count; ++i) {
        copy_codes();
        copy_scales();
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < ahead; ++i) {
        if (i < count) {
            copy_x();
        }
        asm volatile("cp.async.commit_group;");
    }

    float sums[4 * token_tiles] = {};
    const int first_row = warp * 16 + row;  // of the lane; the other is 8 below
    auto wait_for_stage = [&](int i) {
        asm volatile("cp.async.wait_group %0;" ::"n"(ahead - 1));
        __syncthreads();
        if (i + ahead < count) {
            copy_codes();
            copy_scales();
            copy_x();
        }
        asm volatile("cp.async.commit_group;");
    };
    auto load_scales = [&](uint32_t stage_at, int group, float(&scales)[2], Zeros<is_half>(&zeros)[2]) {
        const uint32_t scales_at = stage_at + S::x_bytes + kCodeBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = group * kRows + first_row + half * 8;
            scales[half] = load_scale(scales_at + place * 2, args.has_half_scales);
            zeros[half].set(args.zeros ? load_byte(scales_at + kScaleBytes + place) : 8);
        }
    };
    uint32_t stage_at = base;
    for (int i = 0; i < count; ++i) {
        wait_for_stage(i);
        const uint32_t words_at = stage_at + S::x_bytes + first_row * 64 + lane * 16;
        const uint4 low = load_16(words_at), high = load_16(words_at + 8 * 64);
        float products[token_tiles][2][4], scales[2];  // two chains, which do not wait for each other
        Zeros<is_half> zeros[2];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            if (part % (1 << group_shift) == 0) {
                load_scales(stage_at, part >> group_shift, scales, zeros);
#pragma unroll
                for (int k = 0; k < token_tiles * 8; ++k) {
                    products[k / 8][k / 4 % 2][k % 4] = 0.0f;
                }
            }
            const uint32_t a[2][4] = {
                {numbers<is_half>(low.x, part, zeros[0]), numbers<is_half>(high.x, part, zeros[1]),
                 numbers<is_half>(low.y, part, zeros[0]), numbers<is_half>(high.y, part, zeros[1])},
                {numbers<is_half>(low.z, part, zeros[0]), numbers<is_half>(high.z, part, zeros[1]),
                 numbers<is_half>(low.w, part, zeros[0]), numbers<is_half>(high.w, part, zeros[1])},
            };
#pragma unroll
            for (int tile = 0; tile < token_tiles; ++tile) {
                const uint4 b = load_16(stage_at + (tile * 8 + row) * S::token_bytes + lane * 16 + part * 64);
                multiply<is_half>(products[tile][0], a[0], b.x, b.y);
                multiply<is_half>(products[tile][1], a[1], b.z, b.w);
            }
            if ((part + 1) % (1 << group_shift) == 0) {
#pragma unroll
                for (int k = 0; k < token_tiles * 4; ++k) {
                    sums[k] += scales[k % 4 / 2] * (products[k / 4][0][k % 4] + products[k / 4][1][k % 4]);
                }
            }
        }
        stage_at = next_stage<S>(stage_at, base);
    }
    asm volatile("cp.async.wait_all;");
    finish<is_half, token_tiles>(args, shared, sums, first_row, lane);
}

#include "group_linear_wide.h"

using AtOnce = int[kMaxDevices][kMaxSplits + 1];

// at_once_of: how many clusters of each size run at once: a cluster lies within one part of the device, and some sizes leave gaps.
template <class S, class Kernel, class... Maps>
cudaError_t launch(const CasGroupLinear& args, Kernel kernel, AtOnce& at_once_of, const Maps&... maps) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const int rows = args.silu_mul ? kRows / 2 : kRows;
    const int tiles = (args.rows + rows - 1) / rows, token_blocks = (args.tokens + S::tokens - 1) / S::tokens;
    cudaLaunchConfig_t config{};
    config.blockDim = {kThreads, 1, 1};
    config.dynamicSmemBytes = S::bytes;
    config.stream = static_cast<cudaStream_t>(args.stream);
    config.attrs = attributes;
    auto split = [&](int splits) {
        attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
        config.gridDim = {static_cast<unsigned>(splits), static_cast<unsigned>(tiles), static_cast<unsigned>(token_blocks)};
    };

    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || device >= kMaxDevices) {
        return error != cudaSuccess ? error : cudaErrorInvalidDevice;
    }
    int* at_once = at_once_of[device];
    if (at_once[1] == 0) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::bytes);
        for (int splits = kMaxSplits; splits >= 1 && error == cudaSuccess; --splits) {
            split(splits);
            config.numAttrs = 1;
            error = cudaOccupancyMaxActiveClusters(&at_once[splits], kernel, &config);
        }
        if (error != cudaSuccess) {
            at_once[1] = 0;
            return error;
        }
    }
    const int clusters = tiles * token_blocks;
    int best = 1, best_cost = 0;
    for (int splits = 1; splits <= kMaxSplits && splits <= args.num_blocks; ++splits) {
        if (at_once[splits] > 0) {
            const int rounds = (clusters + at_once[splits] - 1) / at_once[splits];
            const int cost = rounds * ((args.num_blocks + splits - 1) / splits + kStartCost);
            if (best_cost == 0 || cost < best_cost) {
                best = splits, best_cost = cost;
            }
        }
    }
    split(best);
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, args, maps...);
}

template <bool is_half, int token_tiles, int group_shift>
cudaError_t launch_few(const CasGroupLinear& args) {
    static AtOnce at_once = {};
    return launch<Shape<token_tiles>>(args, group_linear_kernel<is_half, token_tiles, group_shift>, at_once);
}

template <bool is_half, int token_tiles, int group_shift>
cudaError_t launch_wide(const CasGroupLinear& args) {
    using S = WideShape<token_tiles, group_shift>;
    static AtOnce at_once = {};
    const int64_t tiles = (args.rows + kTile - 1) / kTile * (args.silu_mul ? 2 : 1);
    CUtensorMap x, codes;
    const auto type = is_half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cudaError_t error = make_tensor_map(x, type, args.x, args.inputs, args.tokens, args.x_stride * 2, kInputs, S::tokens);
    if (error == cudaSuccess) {
        error = make_tensor_map(codes, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.weight, kInputs / 4, tiles * args.num_blocks * kTile,
                                kInputs / 2, kInputs / 2, kTile);
    }
    const auto kernel = group_linear_wide_kernel<is_half, token_tiles, group_shift>;
    return error != cudaSuccess ? error : launch<S>(args, kernel, at_once, x, codes);
}

template <bool is_half, int group_shift>
cudaError_t launch_for(const CasGroupLinear& args) {
    return args.tokens <= 8    ? launch_few<is_half, 1, group_shift>(args)
           : args.tokens <= 16 ? launch_few<is_half, 2, group_shift>(args)
           : args.tokens <= 32 ? launch_wide<is_half, 4, group_shift>(args)
           : args.tokens <= 48 ? launch_wide<is_half, 6, group_shift>(args)
           : args.tokens <= 64 ? launch_wide<is_half, 8, group_shift>(args)
                               : launch_wide<is_half, 16, group_shift>(args);
}

}  // namespace

extern "C" {

#if CAS_CONFIG == 0
#define CAS_NAME cas_group_linear_float16
constexpr bool kIsHalf = true;
#elif CAS_CONFIG == 1
#define CAS_NAME cas_group_linear_bfloat16
constexpr bool kIsHalf = false;
#else
#error "CAS_CONFIG must be the number of a configuration"
#endif

// Launches the kernel on args->stream. Returns null, or an error message if nothing was launched.
const char* CAS_NAME(const CasGroupLinear* args) {
    const cudaError_t error = args->group_size >= kInputs     ? launch_for<kIsHalf, 2>(*args)
                              : args->group_size == kInputs / 2 ? launch_for<kIsHalf, 1>(*args)
                                                                : launch_for<kIsHalf, 0>(*args);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // extern "C"

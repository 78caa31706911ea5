// The kernel of group_linear.cu for more than 16 tokens, by wgmma, and its tensor maps. Only group_linear.cu includes it, within its
// namespace.
//
// A warpgroup takes a tile of 64 rows. The warps take turns in asking for stages by TMA, which swizzles codes and x in shared memory and
// fills x with zeros past its end. A stage has two barriers: `full`, when its bytes are there, and `empty`, when every warp has read them.
// So a warp waits for no other one, except in wgmma, which the four of its warpgroup issue together.
#pragma once

constexpr int kLag = 2;  // a stage is filled anew only so many stages after it was read, so that warpgroups may drift apart

template <int token_tiles, int group_shift>
struct WideShape {
    static constexpr int tokens = 8 * token_tiles;
    static constexpr int groups = kParts >> group_shift;  // of a stage
    static constexpr int x_bytes = tokens * kInputs * 2;
    static constexpr int scales_at = x_bytes + kCodeBytes, zeros_at = scales_at + groups * kRows * 2, full_at = zeros_at + groups * kRows;
    static constexpr int empty_at = full_at + 8, stage_bytes = (empty_at + 8 + 1023) / 1024 * 1024;
    static constexpr int blocks_per_sm = token_tiles > 8 ? 1 : 2, stages = 227 * 1024 / blocks_per_sm / stage_bytes;
    static constexpr int bytes = stages * stage_bytes;
    static_assert(stages > kLag);
    static_assert(kTiles * groups * 2 <= 32, "a lane copies the scales or zero points of a tile and group");
    static_assert(bytes >= tokens * kSumsStride * 4, "the sums take the place of the stages");
};

__device__ __forceinline__ void start_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Only then may its place be used for something else: arrivals that all threads have made may still be on their way.
__device__ __forceinline__ void end_barrier(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& from, int column, int row, uint32_t full) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&from), "r"(column), "r"(row), "r"(full)
                 : "memory");
}

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(full)
                 : "memory");
}

// d = a xᵀ (adds: d +=) by a warpgroup, asynchronously. x: descriptor of [tokens, 16] in shared memory.
#define CAS_FLOATS_8(i)                                                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define CAS_WGMMA(tokens, type, registers, a0, a1, a2, a3, at, adds_at, ...)                                                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32." type "." type   \
                 " {" registers "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " at ", p, 1, 1, 0;}"                                          \
                 : __VA_ARGS__                                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(adds))
#define CAS_16_REGISTERS "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CAS_24_REGISTERS CAS_16_REGISTERS ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CAS_32_REGISTERS CAS_24_REGISTERS ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CAS_64_REGISTERS                                                                                                            \
    CAS_32_REGISTERS ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
                     "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CAS_WGMMA_32(type) \
    CAS_WGMMA("32", type, CAS_16_REGISTERS, "%16", "%17", "%18", "%19", "%20", "%21", CAS_FLOATS_8(0), CAS_FLOATS_8(8))
#define CAS_WGMMA_48(type)                                                                                                          \
    CAS_WGMMA("48", type, CAS_24_REGISTERS, "%24", "%25", "%26", "%27", "%28", "%29", CAS_FLOATS_8(0), CAS_FLOATS_8(8), CAS_FLOATS_8(16))
#define CAS_WGMMA_64(type)                                                                                                          \
    CAS_WGMMA("64", type, CAS_32_REGISTERS, "%32", "%33", "%34", "%35", "%36", "%37", CAS_FLOATS_8(0), CAS_FLOATS_8(8), CAS_FLOATS_8(16), \
              CAS_FLOATS_8(24))
#define CAS_WGMMA_128(type)                                                                                                         \
    CAS_WGMMA("128", type, CAS_64_REGISTERS, "%64", "%65", "%66", "%67", "%68", "%69", CAS_FLOATS_8(0), CAS_FLOATS_8(8), CAS_FLOATS_8(16), \
              CAS_FLOATS_8(24), CAS_FLOATS_8(32), CAS_FLOATS_8(40), CAS_FLOATS_8(48), CAS_FLOATS_8(56))

template <bool is_half, int size>
__device__ __forceinline__ void multiply_wide(float (&d)[size], const uint32_t (&a)[4], uint64_t x, int adds) {
    static_assert(size == 16 || size == 24 || size == 32 || size == 64);
    if constexpr (size == 16 && is_half) {
        CAS_WGMMA_32("f16");
    } else if constexpr (size == 16) {
        CAS_WGMMA_32("bf16");
    } else if constexpr (size == 24 && is_half) {
        CAS_WGMMA_48("f16");
    } else if constexpr (size == 24) {
        CAS_WGMMA_48("bf16");
    } else if constexpr (size == 32 && is_half) {
        CAS_WGMMA_64("f16");
    } else if constexpr (size == 32) {
        CAS_WGMMA_64("bf16");
    } else if constexpr (is_half) {
        CAS_WGMMA_128("f16");
    } else {
        CAS_WGMMA_128("bf16");
    }
}

// The low half of a descriptor. For a place that is n bytes further, add n / 16.
__device__ __forceinline__ uint32_t place_of(uint32_t at) { return (1 << 16) | ((at & 0x3FFFF) >> 4); }

// Rows of 128 bytes, whose 16 bytes are swizzled within 8 rows.
__device__ __forceinline__ uint64_t descriptor(uint32_t place) {
    return (static_cast<uint64_t>((1 << 30) | (1024 >> 4)) << 32) | place;
}

__device__ __forceinline__ uint32_t load_4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// x_map: boxes of [tokens, 64] of x; codes_map: boxes of 64 rows of a tile. group_shift: as of `group_linear_kernel`.
template <bool is_half, int token_tiles, int group_shift>
__global__ void __launch_bounds__(kThreads, WideShape<token_tiles, group_shift>::blocks_per_sm)
    group_linear_wide_kernel(const CasGroupLinear args, const __grid_constant__ CUtensorMap x_map,
                             const __grid_constant__ CUtensorMap codes_map) {
    using S = WideShape<token_tiles, group_shift>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);
    const int begin = static_cast<int64_t>(args.num_blocks) * blockIdx.x / gridDim.x;
    const int count = static_cast<int64_t>(args.num_blocks) * (blockIdx.x + 1) / gridDim.x - begin;
    const uint32_t base = shared_address(shared);

    auto ask_for_weight = [&](uint32_t at, int block) {  // a warp: what does not depend on the kernel before
        const int lane = thread % 32, i = lane % kTiles, group_of_stage = lane / kTiles % S::groups, tile = tile_at(args, i);
        const int64_t group = min(block / max(1, args.group_size / kInputs) * S::groups + group_of_stage, args.num_groups - 1);
        const int64_t from = (static_cast<int64_t>(tile) * args.num_groups + group) * kTile;
        const int to = (group_of_stage * kTiles + i) * kTile;
        if (lane == 0) {
            arrive_and_expect(at + S::full_at, S::x_bytes + kCodeBytes + S::groups * kRows * (args.zeros ? 3 : 2));
        }
        __syncwarp();
        if (lane < kTiles) {
            copy_box(at + S::x_bytes + i * kTileBytes, codes_map, 0, (tile * args.num_blocks + block) * kTile, at + S::full_at);
        }
        if (lane < kTiles * S::groups) {
            copy_bytes(at + S::scales_at + to * 2, static_cast<const uint8_t*>(args.scale) + from * 2, kTile * 2, at + S::full_at);
        } else if (lane < kTiles * S::groups * 2 && args.zeros) {
            copy_bytes(at + S::zeros_at + to, static_cast<const uint8_t*>(args.zeros) + from, kTile, at + S::full_at);
        }
        __syncwarp();
    };
    auto ask_for_x = [&](uint32_t at, int block) {
        const int half = thread % 32;
        if (half < 2) {
            copy_box(at + half * (S::x_bytes / 2), x_map, block * kInputs + half * (kInputs / 2), blockIdx.z * S::tokens, at + S::full_at);
        }
        __syncwarp();
    };

    asm volatile("griddepcontrol.launch_dependents;");
    if (warp == 0) {
        if (thread < S::stages) {
            start_barrier(base + thread * S::stage_bytes + S::full_at, 1);
            start_barrier(base + thread * S::stage_bytes + S::empty_at, kWarps);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < S::stages && i < count; ++i) {
            ask_for_weight(base + i * S::stage_bytes, begin + i);
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp == 0) {
#pragma unroll 1
        for (int i = 0; i < S::stages && i < count; ++i) {
            ask_for_x(base + i * S::stage_bytes, begin + i);
        }
    }
    __syncthreads();  // the barriers are there

    // The shuffle keeps the compiler from computing it anew in every stage.
    const int row = thread % 32 / 4, lane = thread % 4, first_row = warp * 16 + row;  // of the lane; the other is 8 below
    const uint32_t words_at = __shfl_sync(~0u, S::x_bytes + first_row * 64 + row / 2 % 4 * 16 + lane * 4, thread % 32);
    const uint32_t scales_at = __shfl_sync(~0u, S::scales_at + first_row * 2, thread % 32);
    const uint32_t zeros_at = __shfl_sync(~0u, S::zeros_at + first_row, thread % 32);
    // A unit: some products of one group. A stage has an even number of them.
    constexpr int units = S::groups > 2 ? S::groups : 2, slices = 8 / units, units_per_group = units / S::groups;
    uint32_t words[2][4], a[2][slices][4];
    Zeros<is_half> zeros[2];
    float sums[4 * token_tiles] = {}, products[4 * token_tiles];
    auto load_words = [&](uint32_t from) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            words[0][j] = load_4((words_at ^ (j * 16)) + from);
            words[1][j] = load_4((words_at ^ (j * 16)) + from + 8 * 64);
        }
    };
    auto prepare = [&](uint32_t from, int unit) {
        if (unit % units_per_group == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                zeros[half].set(args.zeros ? load_byte(zeros_at + from + unit / units_per_group * kRows + half * 8) : 8);
            }
        }
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            const int part = (unit * slices + slice) / 2, j = slice % 2 * 2;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                a[unit % 2][slice][k] = numbers<is_half>(words[k % 2][j + k / 2], part, zeros[k % 2]);
            }
        }
    };
    uint32_t at = base, parity = 0;
    wait_for(at + S::full_at, 0);
    load_words(at);
    prepare(at, 0);
    for (int i = 0; i < count; ++i) {
        const uint32_t next = at + S::stage_bytes == base + S::bytes ? base : at + S::stage_bytes;
        const uint32_t x = place_of(at);
#pragma unroll
        for (int unit = 0; unit < units; ++unit) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int slice = 0; slice < slices; ++slice) {
                const int k = unit * slices + slice;
                multiply_wide<is_half>(products, a[unit % 2][slice], descriptor(x + (k / 4 * (S::x_bytes / 2) + k % 4 * 32) / 16),
                                       slice > 0 || unit % units_per_group > 0);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the unit before has been read
            if (unit + 1 < units) {
                prepare(at, unit + 1);
            } else {
                if (i >= kLag && i - kLag + S::stages < count && warp == i % kWarps) {
                    const bool wraps = at < base + kLag * S::stage_bytes;
                    const uint32_t old = at - kLag * S::stage_bytes + (wraps ? S::bytes : 0);
                    wait_for(old + S::empty_at, parity ^ wraps);
                    ask_for_weight(old, begin + i - kLag + S::stages);
                    ask_for_x(old, begin + i - kLag + S::stages);
                }
                if (i + 1 < count) {
                    wait_for(next + S::full_at, next == base ? parity ^ 1 : parity);
                    load_words(next);
                    prepare(next, 0);
                }
            }
            if ((unit + 1) % units_per_group == 0) {
                const uint32_t from = scales_at + at + unit / units_per_group * kRows * 2;
                const float scales[2] = {load_scale(from, args.has_half_scales), load_scale(from + 16, args.has_half_scales)};
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (int k = 0; k < 4 * token_tiles; ++k) {
                    asm volatile("" : "+f"(products[k]));  // nothing reads it before the wait
                    sums[k] += scales[k % 4 / 2] * products[k];
                }
            }
        }
        __syncwarp();
        if (thread % 32 == 0) {
            arrive(at + S::empty_at);
        }
        parity = next == base ? parity ^ 1 : parity;
        at = next;
    }
    __syncthreads();
    if (thread < S::stages) {  // the sums take the place of the barriers, too
        end_barrier(base + thread * S::stage_bytes + S::full_at);
        end_barrier(base + thread * S::stage_bytes + S::empty_at);
    }
    finish<is_half, token_tiles>(args, shared, sums, first_row, lane);
}

// Describes a matrix of 16-bit elements to TMA: boxes of box_rows rows of box_bytes, swizzled in shared memory in that width.
cudaError_t make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const void* data, int64_t columns, int64_t rows,
                            int64_t row_bytes, uint32_t box_bytes, uint32_t box_rows) {
    static const auto encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
    const cuuint32_t box[2] = {box_bytes / 2, box_rows}, steps[2] = {1, 1};
    const auto swizzle = box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    if (encode == nullptr) {
        return cudaErrorSymbolNotFound;  // the driver is too old
    }
    const CUresult result = encode(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

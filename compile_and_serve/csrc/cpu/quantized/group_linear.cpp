// Linears whose weights are codes of 4, 5, 6 or 8 bits with a scale per output and group of inputs. All products are of integers.
//
// A row of activations is quantized in groups of 32 inputs: each has a scale, 16-bit integers, and their sums. (SmolLM2's perplexity
// grows by 0.2 %, with 8 bits by 0.5 %.) products.h multiplies codes by them. For each group,
//     y += weight scale · activation scale · Σ code · integer + minimum · activation scale · Σ integer
// where the minimum is stored, or −scale · zero point. Integer sums are exact and groups are added in order, so that a row's
// result has the same bits in any batch.
//
// Codes may also be indices of a table of 16 numbers (tables.h). Each is written as one or two bytes, and each byte is a plane with
// its own products. A matrix unit multiplies 16 rows by them at a time.
//
// Names: T tokens, I inputs, O outputs. A block is 16 outputs by 32 inputs; a part is the 16 or 32 inputs of one scale.
#include <bit>
#include <vector>

#include "../activations.h"
#include "../matrix_unit.h"
#include "products.h"

namespace cas {

// For Panel: a block has kInputs · 16 bytes of codes.
template <int kBits>
struct Codes {};

template <int kBits>
struct Dot<Codes<kBits>> {
    static constexpr int kInputs = 4 * kBits;
    using W = uint8_t;
    using Sum = float;
};

namespace {

// How far ahead codes are prefetched for one token. 0: not at all, as hardware prefetching suffices CPUs with AVX-512 (kStreamRows).
#if defined(__AVX512F__)
constexpr int64_t kAheadBytes = 0;
#else
constexpr int64_t kAheadBytes = 4096;
#endif

constexpr int kMinUnitTokens = 8;  // a matrix unit multiplies so many and more: estimated, not measured

inline f32x16 load_half(const uint16_t* address) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
#elif defined(__F16C__) && defined(__AVX2__)
    f32x16 result;
    for (int i = 0; i < kParts; ++i)
        part(result, i) = (PartF32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address + i * kPartLanes)));
    return result;
#else
    const u32x16 bits = convert<u32x16>(load_raw<u16x16>(address));
    const f32x16 magnitude = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f;  // the exponent's bias is 15, not 127
    return (f32x16)((u32x16)magnitude | ((bits & 0x8000) << 16));
#endif
}

struct alignas(64) Line {  // of the cache
    uint8_t bytes[64];
};

// One token's activations, one entry per block of inputs.
template <class Whole, int kSplit>
struct Quantized {
    Whole integers;
    float scale;
    float sums[kSplit];  // scale · Σ of the part's integers
};

enum Offset { kZeros, kMinima };  // kZeros without offsets: the zero point is 2^(bits - 1)

constexpr int scale_bytes(int32_t type) { return type == CAS_SCALE_FLOAT ? 4 : type == CAS_SCALE_HALF || type == CAS_SCALE_BFLOAT16 ? 2 : 1; }

// The 16 numbers of a CasScale type at an index.
CAS_INLINE inline f32x16 load_scales(int32_t type, const char* address, int64_t at) {
    switch (type) {
        case CAS_SCALE_FLOAT: return load16(reinterpret_cast<const float*>(address) + at);
        case CAS_SCALE_HALF: return load_half(reinterpret_cast<const uint16_t*>(address) + at);
        case CAS_SCALE_BFLOAT16: return (f32x16)(convert<u32x16>(load_raw<u16x16>(reinterpret_cast<const uint16_t*>(address) + at)) << 16);
        case CAS_SCALE_INT8: return convert<f32x16>(load_raw<i8x16>(reinterpret_cast<const int8_t*>(address) + at));
        default: break;
    }
    const u32x16 bytes = convert<u32x16>(load_raw<u8x16>(reinterpret_cast<const uint8_t*>(address) + at));
    if (type == CAS_SCALE_UINT8) return convert<f32x16>(bytes);
    if (type == CAS_SCALE_POWER) return (f32x16)(bytes << 23);
    return (f32x16)((bytes & 127) << 20) * 0x1p120f;  // float8_e4m3fn, of which scales are not negative; the exponent's bias is 7
}

// Scales and offsets of an output block, as they are stored.
struct StoredScales {
    const char *scale, *offset, *factor;
};

struct Weight {
    const uint8_t* codes;          // of the output block
    const float *scale, *minimum;  // 16 of each group
};

// The highest bits of the codes of four adjacent inputs, of a block's quad, at their place in the codes. codes: of the block.
template <int kBits>
CAS_INLINE u32x16 high_bits(const uint8_t* codes, int quad) {
    constexpr int kHigh = kBits - 4, kQuads = 8 / kHigh;  // of a byte
    const u32x16 bytes = load_raw<u32x16>(codes + 256 + quad / kQuads * 64);
    return ((bytes >> (quad % kQuads * kHigh)) & (kHigh == 1 ? 0x01010101u : 0x03030303u)) << 4;
}

// The codes of two quads of a block that a vector has, or of one if they take a byte each.
template <int kBits>
struct Quads {
    static constexpr int kCount = kBits < 8 ? 2 : 1;
    u32x16 of[kCount];

    CAS_INLINE Quads(const uint8_t* codes, int vector) {
        const u32x16 bytes = load_raw<u32x16>(codes + vector * 64);
        if constexpr (kCount == 1) {
            of[0] = bytes;
        } else {
            of[0] = bytes & 0x0f0f0f0fu, of[1] = (bytes >> 4) & 0x0f0f0f0fu;
            if constexpr (kBits > 4)
                unrolled<2>([&](auto i) CAS_INLINE { of[i] = of[i] | high_bits<kBits>(codes, 2 * vector + i); });
        }
    }
};

// kSplit: parts of a block. Decode: `Integers`, or a table of tables.h.
template <class T, int kBits, int kSplit, class Decode = Integers>
struct GroupLinear {
    static constexpr int kPlanes = Decode::kPlanes;
    using P = Products<kBits, Decode>;
    using X = Quantized<typename P::X, kSplit>;
    static constexpr int kGroupRows = P::kRows;
    using Dots = Codes<kBits>;
    static constexpr int kBlockBytes = kBits * 64;
    static constexpr int kPartInputs = kBlockInputs / kSplit, kPartBytes = kPartInputs * kLanes;
    static constexpr bool kUsesUnit = CAS_MATRIX_UNIT && requires { &P::together; };
    using Unit = ByteUnit<kPartInputs>;
    const CasGroupLinear& args;
    const CasLinear& a = args.linear;
    int64_t blocks = (a.in_features + kBlockInputs - 1) / kBlockInputs;  // blocks of inputs

    void prepare(X* to, int64_t token) const {
        const Row<T> x(a, token);
        constexpr float kLargest = float(127 << 8);
        for (int64_t block = 0; block < blocks; ++block, ++to) {
            f32x16 v[2];
            i32x16 largest{};  // magnitudes, compared as integers, where NaN is larger than every number
            for (int h = 0; h < 2; ++h) {
                const int64_t at = block * kBlockInputs + h * kLanes;
                v[h] = at < a.in_features ? x.load(at) : f32x16{};
                const i32x16 magnitude = (i32x16)v[h] & 0x7fffffff;
                largest = select(magnitude > largest, magnitude, largest);
            }
            const float top = std::bit_cast<float>(max16(largest)), inverse = top > 0 ? kLargest / top : 0.0f;
            to->scale = top - top == 0 ? top / kLargest : __builtin_nanf("");  // what is not finite reaches the result
            int32_t sums[2];
            for (int h = 0; h < 2; ++h) {
                const i32x16 whole = nearest_integer(v[h] * inverse);
                P::write(to->integers, h, whole);
                sums[h] = sum16(whole);
            }
            if constexpr (kSplit == 2) {
                for (int h = 0; h < 2; ++h) to->sums[h] = to->scale * float(sums[h]);
            } else {
                to->sums[0] = to->scale * float(sums[0] + sums[1]);
            }
        }
    }

    CAS_INLINE f32x16 scales(const StoredScales& w, int32_t type, int64_t group) const {
        const f32x16 scale = load_scales(type, w.scale, group * kLanes);
        return w.factor ? scale * factors(w, group, 0) : scale;
    }

    CAS_INLINE f32x16 factors(const StoredScales& w, int64_t group, int which) const {
        const int64_t at = (group / args.factor_groups * args.num_factors + which) * kLanes;
        return load_scales(args.factor_is_half ? CAS_SCALE_HALF : CAS_SCALE_FLOAT, w.factor, at);
    }

    template <Offset kOffset>
    CAS_INLINE f32x16 minima(const StoredScales& w, int32_t type, f32x16 scale, int64_t group) const {
        if constexpr (kOffset == kMinima) {
            const f32x16 minimum = load_scales(type, w.offset, group * kLanes);
            return w.factor ? minimum * -factors(w, group, 1) : minimum;
        }
        if constexpr (Decode::kZero != 0) return scale * -Decode::kZero;
        if (!w.offset) return scale * -float(1 << (kBits - 1));
        return -scale * load_scales(CAS_SCALE_UINT8, w.offset, group * kLanes);
    }

    // tile[r][b] = the product of row r and output block b.
    template <int kRows, int kBlocks>
    __attribute__((noinline)) static void multiply(const GroupLinear& self, const X* x, const Weight* weights, float* tile) {
        constexpr int kQuads = Quads<kBits>::kCount, kSteps = kPartInputs / 4 / kQuads;  // weight vectors of a part
        f32x16 sums[kRows][kBlocks];
        unrolled<kRows>([&](auto r) CAS_INLINE {
            unrolled<kBlocks>([&](auto b) CAS_INLINE { sums[r][b] = f32x16{}; });
        });
        int64_t group = 0, left = self.args.group_blocks;
        for (int64_t block = 0; block < self.blocks; ++block) {
            const X* here[kRows];
            unrolled<kRows>([&](auto r) CAS_INLINE { here[r] = x + r * self.blocks + block; });
            for (int part = 0; part < kSplit; ++part) {
                typename P::Sums products[kPlanes][kRows][kBlocks];
#pragma GCC unroll 1
                for (int step = 0; step < kSteps; ++step) {
                    const int vector = part * kSteps + step;
                    typename P::Factors factors[kQuads][kPlanes][kBlocks];
                    unrolled<kBlocks>([&](auto b) CAS_INLINE {
                        const uint8_t* codes = weights[b].codes + block * kBlockBytes;
                        if constexpr (kRows == 1 && kAheadBytes > 0) __builtin_prefetch(codes + vector * 64 + kAheadBytes, 0, kToL2);
                        const Quads<kBits> quads(codes, vector);
                        unrolled<kQuads>([&](auto q) CAS_INLINE {
                            unrolled<kPlanes>([&](auto p) CAS_INLINE {
                                factors[q][p][b] = P::factors(Decode::template bytes<decltype(p)::value>(quads.of[q]));
                            });
                        });
                    });
                    unrolled<kRows>([&](auto r) CAS_INLINE {
                        unrolled<kQuads>([&](auto q) CAS_INLINE {
                            unrolled<kBlocks>([&](auto b) CAS_INLINE {
                                unrolled<kPlanes>([&](auto p) CAS_INLINE {
                                    products[p][r][b].add(factors[q][p][b], here[r]->integers, kQuads * vector + q);
                                });
                            });
                        });
                    });
                }
                unrolled<kBlocks>([&](auto b) CAS_INLINE {
                    const int64_t at = kSplit == 2 ? block * 2 + part : group;
                    const f32x16 scale = load16(weights[b].scale + at * kLanes), minimum = load16(weights[b].minimum + at * kLanes);
                    unrolled<kRows>([&](auto r) CAS_INLINE {
                        const auto sum_of = [&](auto p) CAS_INLINE { return convert<f32x16>(products[p][r][b].total()); };
                        f32x16 product = sum_of(std::integral_constant<int, 0>{});
                        if constexpr (kPlanes == 2) product = product * 256.0f + sum_of(std::integral_constant<int, 1>{});
                        sums[r][b] += product * (scale * here[r]->scale);
                        sums[r][b] += minimum * here[r]->sums[part];
                    });
                });
            }
            if (--left == 0) ++group, left = self.args.group_blocks;
        }
        unrolled<kRows>([&](auto r) CAS_INLINE {
            unrolled<kBlocks>([&](auto b) CAS_INLINE { store16(tile + r * kTileWidth + b * kLanes, sums[r][b]); });
        });
    }

    // As multiply, for any number of rows: tiles of 4, 2 and 1 rows, because each size takes seconds to compile.
    template <int kBlocks>
    static void multiply_rows(const GroupLinear& self, const X* x, int rows, const Weight* weights, float* tile) {
        const auto tiles_of = [&](auto size) {
            constexpr int kRows = size;
            if constexpr (kRows <= (kBlocks == 2 ? P::kRowsTwo : kGroupRows)) {
                for (; rows >= kRows; rows -= kRows, x += kRows * self.blocks, tile += kRows * kTileWidth)
                    multiply<kRows, kBlocks>(self, x, weights, tile);
            }
        };
        tiles_of(std::integral_constant<int, 4>{});
        tiles_of(std::integral_constant<int, 2>{});
        tiles_of(std::integral_constant<int, 1>{});
    }

    // A block of outputs as bytes: [blocks][kSplit][kPlanes][kPartBytes].
    void decode(const uint8_t* codes, uint8_t* to) const {
        constexpr int kQuads = Quads<kBits>::kCount, kPartQuads = kPartInputs / 4;
        for (int64_t block = 0; block < blocks; ++block, codes += kBlockBytes) {
            for (int quad = 0; quad < kBlockInputs / 4; quad += kQuads) {
                const Quads<kBits> quads(codes, quad / kQuads);
                unrolled<kQuads>([&](auto q) CAS_INLINE {
                    unrolled<kPlanes>([&](auto p) CAS_INLINE {
                        const int64_t part = block * kSplit + (quad + q) / kPartQuads;
                        const int64_t at = (part * kPlanes + p) * kPartBytes + (quad + q) % kPartQuads * 64;
                        store_raw(to + at, Decode::template bytes<decltype(p)::value>(quads.of[q]));
                    });
                });
            }
        }
    }

    // As multiply, for up to kUnitSize rows and one block, whose codes are decoded.
    void multiply_by_unit(Unit& unit, const X* x, int rows, const uint8_t* decoded, const Weight& weight, float* tile) const {
        alignas(64) int32_t products[kPlanes][P::kDigits][kUnitSize][kLanes];
        for (int r = 0; r < rows; ++r) store16(tile + r * kTileWidth, f32x16{});
        int64_t group = 0, left = args.group_blocks;
        for (int64_t block = 0; block < blocks; ++block) {
            for (int part = 0; part < kSplit; ++part) {
                const int8_t* digits = x[block].integers.digits[0] + part * kPartInputs;
                for (int p = 0; p < kPlanes; ++p, decoded += kPartBytes)
                    unit.multiply(digits, blocks * sizeof(X), kBlockInputs, rows, decoded, products[p]);
                const int64_t at = kSplit == 2 ? block * 2 + part : group;
                const f32x16 scale = load16(weight.scale + at * kLanes), minimum = load16(weight.minimum + at * kLanes);
                for (int r = 0; r < rows; ++r) {
                    const X& here = x[r * blocks + block];
                    const auto sum_of = [&](int p) CAS_INLINE {
                        return convert<f32x16>(P::together(load_raw<i32x16>(products[p][0][r]), load_raw<i32x16>(products[p][1][r])));
                    };
                    f32x16 product = sum_of(0), sum = load16(tile + r * kTileWidth);
                    if constexpr (kPlanes == 2) product = product * 256.0f + sum_of(1);
                    sum += product * (scale * here.scale);
                    sum += minimum * here.sums[part];
                    store16(tile + r * kTileWidth, sum);
                }
            }
            if (--left == 0) ++group, left = args.group_blocks;
        }
    }

    template <Offset kOffset>
    void run() const {
        const int64_t panels = Panel<Dots>::count(a);
        const size_t scratch_bytes = sizeof(X) * blocks * a.num_tokens;
        const bool prepares_together = a.num_tokens > kOwnTokens;
        X* shared = prepares_together ? static_cast<X*>(scratch(scratch_bytes)) : nullptr;
        const int64_t chunk_limit = std::max<int64_t>(4 * kGroupRows, kChunkBytes / int64_t(sizeof(X) * blocks));
        const int64_t chunks = (a.num_tokens + chunk_limit - 1) / chunk_limit, items = chunks * panels;
        const int64_t panel_bytes = 2 * kBlockBytes * blocks;
        const int64_t grab = std::max<int64_t>(1, std::min(kGrabBytes / panel_bytes, items / (4 * a.num_threads)));
        std::atomic<int64_t> next_item{0};

#pragma omp parallel num_threads(a.num_threads)
        {
            X* x = shared;
            if (prepares_together) {
                const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
                const int64_t begin = a.num_tokens * thread / threads, end = a.num_tokens * (thread + 1) / threads;
                for (int64_t t = begin; t < end; ++t) prepare(x + t * blocks, t);
#pragma omp barrier
            } else {
                x = static_cast<X*>(scratch(scratch_bytes));
                for (int64_t t = 0; t < a.num_tokens; ++t) prepare(x + t * blocks, t);
            }
            alignas(64) float tile[std::max(kGroupRows, kUnitSize) * kTileWidth];
            Unit unit;
            for (int64_t item = next_item.fetch_add(grab, std::memory_order_relaxed), end = item + grab; item < items;) {
                this->template compute<kOffset>(item % panels, item / panels, chunks, x, unit, tile);
                if (++item == end) item = next_item.fetch_add(grab, std::memory_order_relaxed), end = item + grab;
            }
        }
    }

    template <Offset kOffset>
    void compute(int64_t index, int64_t chunk, int64_t chunks, const X* x, Unit& unit, float* tile) const {
        const Panel<Dots> panel(a, index, blocks);
        const int bytes = scale_bytes(args.scale_type), offset_bytes = kOffset == kZeros ? 1 : bytes;
        const int64_t factors = args.factor ? (args.groups + args.factor_groups - 1) / args.factor_groups * args.num_factors * kLanes : 0;
        const int64_t numbers = args.groups * kLanes;  // of a block's scales
        thread_local std::vector<float> widened;
        if (int64_t(widened.size()) < 2 * kMaxTileBlocks * numbers) widened.resize(2 * kMaxTileBlocks * numbers);
        Weight weights[kMaxTileBlocks];
        for (int b = 0; b < panel.blocks; ++b) {
            const int64_t block = (panel.weights[b] - static_cast<const uint8_t*>(a.packed)) / (kBlockBytes * blocks);
            const int64_t first = block * args.groups * kLanes;
            const StoredScales stored = {
                static_cast<const char*>(args.scale) + first * bytes,
                args.offset ? static_cast<const char*>(args.offset) + first * offset_bytes : nullptr,
                args.factor ? static_cast<const char*>(args.factor) + block * factors * (args.factor_is_half ? 2 : 4) : nullptr};
            float* const scale = widened.data() + 2 * b * numbers;
            const auto widen = [&](auto type) CAS_INLINE {
                for (int64_t group = 0; group < args.groups; ++group) {
                    if constexpr (kAheadBytes > 0) {  // of the block after the next
                        const int64_t ahead = (group + 2 * args.groups) * kLanes;
                        __builtin_prefetch(stored.scale + ahead * bytes, 0, kToL2);
                        if (stored.offset) __builtin_prefetch(stored.offset + ahead * offset_bytes, 0, kToL2);
                    }
                    const f32x16 of_group = scales(stored, type, group) * Decode::kScale;
                    store16(scale + group * kLanes, of_group);
                    store16(scale + numbers + group * kLanes, this->template minima<kOffset>(stored, type, of_group, group));
                }
            };
            if (args.scale_type == CAS_SCALE_HALF) widen(std::integral_constant<int32_t, CAS_SCALE_HALF>{});
            else widen(args.scale_type);
            weights[b] = {panel.weights[b], scale, scale + numbers};
        }
        bool by_unit = false;
        const uint8_t* decoded[kMaxTileBlocks];
        if constexpr (kUsesUnit) {
            by_unit = a.num_tokens >= kMinUnitTokens && uses_matrix_unit<Bytes>(kUnitSize);
            thread_local std::vector<Line> lines;
            const int64_t of_block = by_unit ? blocks * kSplit * kPlanes * kPartBytes / int64_t(sizeof(Line)) : 0;
            if (int64_t(lines.size()) < panel.blocks * of_block) lines.resize(panel.blocks * of_block);
            for (int b = 0; by_unit && b < panel.blocks; ++b) {
                decode(weights[b].codes, lines[b * of_block].bytes);
                decoded[b] = lines[b * of_block].bytes;
            }
        }
        const int64_t begin = a.num_tokens * chunk / chunks, end = a.num_tokens * (chunk + 1) / chunks;
        for (int64_t token = begin, rows = by_unit ? kUnitSize : kGroupRows; token < end; token += rows) {
            const int count = int(std::min(rows, end - token));
            const X* first = x + token * blocks;
            int b = 0;
            if constexpr (kUsesUnit)
                for (; by_unit && b < panel.blocks; ++b)
                    multiply_by_unit(unit, first, count, decoded[b], weights[b], tile + b * kLanes);
            if constexpr (kPlanes == 1 && P::kRowsTwo > 0)
                for (; count <= P::kRowsTwo && b + 2 <= panel.blocks; b += 2)
                    multiply_rows<2>(*this, first, count, weights + b, tile + b * kLanes);
            for (; b < panel.blocks; ++b) multiply_rows<1>(*this, first, count, weights + b, tile + b * kLanes);
            finish_tile<T>(a, token, count, panel, [&](int r, int offset, int64_t, int) CAS_INLINE {
                return load16(tile + r * kTileWidth + offset);
            });
        }
    }
};

template <class T, int kBits, int kSplit, class Decode = Integers>
void run_kernel(const CasGroupLinear& args) {
    const GroupLinear<T, kBits, kSplit, Decode> kernel{args};
    if constexpr (std::is_same_v<Decode, Integers> && kBits != 6)
        if (args.offset && !args.offset_is_zeros) return kernel.template run<kMinima>();
    kernel.template run<kZeros>();
}

template <class T>
void run_bits(const CasGroupLinear& args) {
    if (args.table == CAS_E2M1 && args.split == 2) run_kernel<T, 4, 2, E2m1>(args);
    else if (args.table == CAS_E2M1) run_kernel<T, 4, 1, E2m1>(args);
    else if (args.table == CAS_NF4) run_kernel<T, 4, 1, Nf4>(args);
    else if (args.table == CAS_FP4) run_kernel<T, 4, 1, Fp4>(args);
    else if (args.table == CAS_IQ4_NL) run_kernel<T, 4, 1, Iq4Nl>(args);
    else if (args.bits == 4) run_kernel<T, 4, 1>(args);
    else if (args.bits == 5) run_kernel<T, 5, 1>(args);
    else if (args.bits == 6) run_kernel<T, 6, 2>(args);
    else if (args.split == 2) run_kernel<T, 8, 2>(args);
    else run_kernel<T, 8, 1>(args);
}

}  // namespace
}  // namespace cas

extern "C" void cas_group_linear(const CasGroupLinear* args) {
    if (args->linear.num_tokens == 0) return;
    if (args->linear.dtype == CAS_BFLOAT16) cas::run_bits<cas::bf16>(*args);
    else cas::run_bits<float>(*args);
}

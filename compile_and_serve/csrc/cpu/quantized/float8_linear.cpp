// Linears with float8_e4m3fn weights. A weight is converted exactly to bfloat16 (float in a float32 model) in registers, once
// for all rows of a tile. Activations quantized to float8 are stored in the model's dtype, which represents them exactly.
#include <array>

#include "../activations.h"
#include "../float8.h"

namespace cas {

// Float8 weights times activations of type T.
template <class T>
struct Float8 {};

template <class T>
struct Float8Dot {
    static constexpr int kInputs = 4;
    using X = T;
    using W = uint8_t;
    using Sum = float;
    using Sums = f32x16;
    struct Lane {
        T values[kInputs];
    };
    struct Weights {
        f32x16 inputs[kInputs];
    };
    CAS_INLINE static Weights load(const uint8_t* address) {
        const u32x16 bytes = load_raw<u32x16>(address);
        Weights weights;
        for (int i = 0; i < kInputs; ++i) weights.inputs[i] = float8_to_float((bytes >> (8 * i)) & 0xff);
        return weights;
    }
    CAS_INLINE static f32x16 add(f32x16 sum, const Weights& w, const Lane& x) {
        for (int i = 0; i < kInputs; ++i) sum += w.inputs[i] * to_float(x.values[i]);
        return sum;
    }
};

template <>
struct Dot<Float8<float>> : Float8Dot<float> {};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// For each lane, the indices of the low and high bytes of inputs 0 and 1, or of 2 and 3. Indices from 64 on are high bytes.
template <int kPair>
constexpr std::array<uint8_t, 64> kPairBytes = [] {
    std::array<uint8_t, 64> order{};
    for (int lane = 0; lane < 16; ++lane)
        for (int byte = 0; byte < 4; ++byte) order[lane * 4 + byte] = uint8_t(lane * 4 + 2 * kPair + byte / 2 + 64 * (byte % 2));
    return order;
}();

template <>
struct Dot<Float8<bf16>> {
    static constexpr int kInputs = 4;
    using X = bf16;
    using W = uint8_t;
    using Sum = float;
    using Sums = f32x16;
    struct Lane {
        int32_t pairs[2];
    };
    struct Weights {
        __m512i pairs[2];
    };
    CAS_INLINE static Weights load(const uint8_t* address) {
        const SplitBf16 split = split_bf16(_mm512_loadu_si512(address));
        const auto order = [](const uint8_t* p) { return _mm512_loadu_si512(p); };
        return {
            {_mm512_permutex2var_epi8(split.low, order(kPairBytes<0>.data()), split.high),
             _mm512_permutex2var_epi8(split.low, order(kPairBytes<1>.data()), split.high)}};
    }
    CAS_INLINE static f32x16 add(f32x16 sum, const Weights& w, const Lane& x) {
        sum = (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w.pairs[0], (__m512bh)_mm512_set1_epi32(x.pairs[0]));
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w.pairs[1], (__m512bh)_mm512_set1_epi32(x.pairs[1]));
    }
};

#else

template <>
struct Dot<Float8<bf16>> : Float8Dot<bf16> {};

#endif

namespace {

template <class T>
struct Float8Linear {
    using Dots = Float8<T>;
    const CasLinear& a;
    const float* weight_scale;
    bool quantizes_activations;
    const float* input_scale;  // null: one scale per row
    int64_t padded_width = (a.in_features + 3) / 4 * 4;

    static int rows_per_token() { return 1; }

    size_t scratch_bytes() const {
        if (!quantizes_activations && !a.norm_weight && padded_width == a.in_features) return 0;
        return a.num_tokens * (sizeof(float) + sizeof(T) * padded_width);
    }

    float* row_scales(void* memory) const { return static_cast<float*>(memory); }

    T* prepared(void* memory) const { return reinterpret_cast<T*>(row_scales(memory) + a.num_tokens); }

    void prepare(void* memory, int64_t token) const {
        const Row<T> x(a, token);
        T* to = prepared(memory) + token * padded_width;
        const float scale = !quantizes_activations ? 1.0f : input_scale ? *input_scale : x.scale(kFloat8Largest);
        row_scales(memory)[token] = scale;
        const float inverse = 1.0f / scale;
        for (int64_t i = 0; i < padded_width; i += kLanes) {
            f32x16 v = x.load(i);
            if (quantizes_activations) v = round_to_float8(clamped(v * inverse, kFloat8Largest));
            if (i + kLanes <= padded_width) store16(to + i, v);
            else store_part(to + i, v, int(padded_width - i));
        }
    }

    Rows<Dots> rows(void* memory) const {
        if (memory) return {prepared(memory), padded_width};
        return {static_cast<const T*>(a.x), a.x_stride};
    }

    void finish(void* memory, const float* tile, int64_t token, int count, const Panel<Dots>& panel) const {
        finish_tile<T>(a, token, count, panel, [&](int r, int offset, int64_t output, int n) CAS_INLINE {
            const f32x16 scale = n == kLanes ? load16(weight_scale + output) : load_part(weight_scale + output, n);
            const f32x16 y = load16(tile + r * kTileWidth + offset) * scale;
            return quantizes_activations ? y * row_scales(memory)[token + r] : y;
        });
    }
};

template <class T>
void float8_linear(const CasQuantizedLinear& args) {
    const bool quantizes_activations = args.activations != CAS_WEIGHT_ONLY;
    const float* input_scale = args.activations == CAS_STATIC ? args.input_scale : nullptr;
    run_linear(args.linear, Float8Linear<T>{args.linear, args.weight_scale, quantizes_activations, input_scale});
}

}  // namespace
}  // namespace cas

extern "C" void cas_float8_linear(const CasQuantizedLinear* args) {
    if (args->linear.num_tokens == 0) return;
    if (args->linear.dtype == CAS_BFLOAT16) cas::float8_linear<cas::bf16>(*args);
    else cas::float8_linear<float>(*args);
}

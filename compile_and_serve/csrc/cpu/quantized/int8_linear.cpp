// Linears with int8 weights. All products are of bytes, and all sums are exact.
//
// A row of activations is scaled by its largest magnitude and converted to integers, which are written as signed digits in base
// 256. 8-bit activations have one digit. Weight-only quantization keeps more precision: two digits (16 bits) for bfloat16, three
// (24 bits) for float32. Each digit is a separate row of the product, so that one kernel serves all three cases and the weights
// are never converted. Integer sums do not depend on the order, so a row's result is the same bits in any batch.
//
// The byte product needs one unsigned factor. Weights are therefore stored as weight + 128, and 128 times the sum of a digit's
// row is subtracted from the product.
#include "../activations.h"

namespace cas {
namespace {

constexpr int kMaxDigits = 3;
// For each number of digits: the largest integer whose leading digit is at most 127.
constexpr float kLargest[kMaxDigits + 1] = {0, 127, 127 << 8, 127 << 16};

// One row of activations as `digits` rows of bytes.
struct DigitRow {
    int8_t* bytes;      // [digits][padded width]
    int32_t* offsets;   // [digits]: 128 times the sum of each digit's bytes
    float* scale;       // scale of the row's integers
};

template <class T>
struct ByteLinear {
    using Dots = Bytes;
    const CasLinear& a;
    const float* weight_scale;
    const float* input_scale;  // null: one scale per row
    int digits;
    int64_t padded_width = (a.in_features + 3) / 4 * 4;

    int rows_per_token() const { return digits; }

    size_t scratch_bytes() const { return a.num_tokens * (digits * (padded_width + sizeof(int32_t)) + sizeof(float)); }

    DigitRow row(void* memory, int64_t token) const {
        float* scales = static_cast<float*>(memory);
        int32_t* offsets = reinterpret_cast<int32_t*>(scales + a.num_tokens);
        int8_t* bytes = reinterpret_cast<int8_t*>(offsets + a.num_tokens * digits);
        return {bytes + token * digits * padded_width, offsets + token * digits, scales + token};
    }

    void prepare(void* memory, int64_t token) const {
        const Row<T> x(a, token);
        const DigitRow to = row(memory, token);
        *to.scale = input_scale ? *input_scale : x.scale(kLargest[digits]);
        if (digits == 1) write_digits<1>(x, to);
        else if (digits == 2) write_digits<2>(x, to);
        else write_digits<3>(x, to);
    }

    template <int kDigits>
    void write_digits(const Row<T>& x, const DigitRow& to) const {
        const float inverse = 1.0f / *to.scale;
        i32x16 sums[kDigits]{};
        for (int64_t i = 0; i < a.in_features; i += kLanes) {
            i32x16 rest = nearest_integer(clamped(x.load(i) * inverse, kLargest[kDigits]));
            const int64_t n = std::min<int64_t>(kLanes, padded_width - i);
            for (int d = kDigits - 1; d >= 0; --d) {
                const i32x16 digit = (i32x16)((u32x16)rest << 24) >> 24;
                rest = (rest - digit) >> 8;
                sums[d] += digit;
                const auto bytes = convert<i8x16>(digit);
                std::memcpy(to.bytes + d * padded_width + i, &bytes, n);
            }
        }
        for (int d = 0; d < kDigits; ++d) {
            int32_t total = 0;
            for (int i = 0; i < kLanes; ++i) total += sums[d][i];
            to.offsets[d] = 128 * total;
        }
    }

    Rows<Bytes> rows(void* memory) const { return {row(memory, 0).bytes, padded_width}; }

    void finish(void* memory, const int32_t* tile, int64_t token, int count, const Panel<Bytes>& panel) const {
        finish_tile<T>(a, token, count, panel, [&](int r, int offset, int64_t output, int n) CAS_INLINE {
            const DigitRow x = row(memory, token + r);
            f32x16 y{};
            for (int d = 0; d < digits; ++d) {
                const i32x16 sums = load_raw<i32x16>(tile + (r * digits + d) * kTileWidth + offset) - x.offsets[d];
                y = y * 256.0f + convert<f32x16>(sums);
            }
            return y * *x.scale * (n == kLanes ? load16(weight_scale + output) : load_part(weight_scale + output, n));
        });
    }
};

}  // namespace
}  // namespace cas

extern "C" void cas_int8_linear(const CasQuantizedLinear* args) {
    const CasLinear& linear = args->linear;
    if (linear.num_tokens == 0) return;
    const bool bfloat16 = linear.dtype == CAS_BFLOAT16;
    const int digits = args->activations != CAS_WEIGHT_ONLY ? 1 : bfloat16 ? 2 : 3;
    const float* input_scale = args->activations == CAS_STATIC ? args->input_scale : nullptr;
    if (bfloat16) cas::run_linear(linear, cas::ByteLinear<cas::bf16>{linear, args->weight_scale, input_scale, digits});
    else cas::run_linear(linear, cas::ByteLinear<float>{linear, args->weight_scale, input_scale, digits});
}

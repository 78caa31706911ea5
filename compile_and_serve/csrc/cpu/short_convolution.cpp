// Short causal convolutions. See kernels.h.
#include <omp.h>

#include "recurrent.h"

namespace cas {
namespace {

constexpr int64_t kMaxWidth = 16;

// kWidth: 0: any.
template <class T, int kWidth>
void convolve(const CasShortConvolution& a, const SlotSequence& s, int64_t unit) {
    const int64_t channel = unit * a.block, width = kWidth ? kWidth : a.width;
    const T *before = unit_of<T>(a.inputs, s.read_pages, unit), *x = static_cast<const T*>(a.x) + s.begin * a.x_stride + channel;
    T *ring = unit_of<T>(a.inputs, s.write_pages, unit), *out = static_cast<T*>(a.out) + s.begin * a.num_channels + channel;
    const int64_t count = s.length - s.computed;
    alignas(64) float weights[kMaxWidth][kLanes];
    for (int64_t c = 0; c < a.block; c += kLanes) {
        const T* weight = static_cast<const T*>(a.weight) + (channel + c) * width;
        for (int64_t w = 0; w < width; ++w)
            for (int64_t i = 0; i < kLanes; ++i) weights[w][i] = to_float(weight[i * width + w]);
        const f32x16 bias = a.bias ? load16(static_cast<const T*>(a.bias) + channel + c) : f32x16{};
        f32x16 window[kMaxWidth];  // the inputs before the next token
        for (int64_t w = 0; w + 1 < width; ++w) {
            const int64_t position = s.computed - (width - 1) + w;
            window[w] = position < 0 ? f32x16{} : load16(before + position % a.ring * a.block + c);
        }
        for (int64_t t = 0; t < count; ++t) {
            window[width - 1] = load16(x + t * a.x_stride + c);
            f32x16 sum{};
            for (int64_t w = 0; w < width; ++w) sum += load16(weights[w]) * window[w];
            store16(out + t * a.num_channels + c, sum + bias);
            for (int64_t w = 0; w + 1 < width; ++w) window[w] = window[w + 1];
        }
    }
    if (ring != before) std::copy(before, before + a.ring * a.block, ring);
    for (int64_t t = std::max<int64_t>(0, count - a.ring); t < count; ++t) {
        const T* row = x + t * a.x_stride;
        std::copy(row, row + a.block, ring + (s.computed + t) % a.ring * a.block);
    }
}

template <class T, int kWidth>
void short_convolution_of(const CasShortConvolution& a) {
    const int64_t units = a.num_channels / a.block;
#pragma omp parallel for schedule(dynamic) num_threads(a.num_threads)
    for (int64_t task = 0; task < a.slots.num_seqs * units; ++task) {
        const SlotSequence sequence(a.slots, task / units);
        if (!sequence.is_padding()) convolve<T, kWidth>(a, sequence, task % units);
    }
    const int64_t end = a.slots.query_start_loc[a.slots.num_seqs];
    T* out = static_cast<T*>(a.out);
    std::memset(static_cast<void*>(out + end * a.num_channels), 0, sizeof(T) * a.num_channels * (a.num_tokens - end));
}

template <class T>
void short_convolution(const CasShortConvolution& a) {
    if (a.width == 4) short_convolution_of<T, 4>(a);
    else if (a.width == 3) short_convolution_of<T, 3>(a);
    else short_convolution_of<T, 0>(a);
}

}  // namespace
}  // namespace cas

extern "C" void cas_short_convolution(const CasShortConvolution* args) {
    if (args->dtype == CAS_BFLOAT16) cas::short_convolution<cas::bf16>(*args);
    else cas::short_convolution<float>(*args);
}

// Bicubic resizing of RGB images and their order as blocks of patches, in bytes. It includes nothing of torch: processes that prepare media
// load it without torch.
//
// Resizing gives Pillow's bytes: each pass sums products with fixed-point weights of 22 fractional bits and rounds to a byte, first along
// rows, then along columns.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE4_1__
#include <immintrin.h>
#endif

namespace {

constexpr int kFraction = 22;
constexpr int32_t kHalf = 1 << (kFraction - 1);
constexpr int kChannels = 3;

using Bytes4 = uint8_t __attribute__((vector_size(4)));
using Ints4 = int32_t __attribute__((vector_size(16)));

inline uint8_t rounded(int32_t sum) {
    return static_cast<uint8_t>(std::clamp(sum >> kFraction, 0, 255));
}

inline Ints4 widened(const uint8_t* pixel) {
    int32_t bytes;
    std::memcpy(&bytes, pixel, sizeof bytes);
#ifdef __SSE4_1__  // compilers convert the elements one by one
    return reinterpret_cast<Ints4>(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes)));
#else
    return __builtin_convertvector(reinterpret_cast<Bytes4>(bytes), Ints4);
#endif
}

inline void store(uint8_t* out, Ints4 values) {
#ifdef __SSE4_1__
    const __m128i words = _mm_packus_epi32(reinterpret_cast<__m128i>(values), reinterpret_cast<__m128i>(values));
    const int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));  // which also limit them to 0 … 255
#else
    const Ints4 least = {0, 0, 0, 0}, most = {255, 255, 255, 255};
    values = values < least ? least : values;
    const Bytes4 bytes = __builtin_convertvector(values > most ? most : values, Bytes4);
#endif
    std::memcpy(out, &bytes, sizeof bytes);
}

// One row of `out_width` pixels. The row's input has a readable byte behind it, the output a writable one.
void resize_row(const uint8_t* in, uint8_t* out, int out_width, const int32_t* begins, const int32_t* weights, int taps) {
    for (int x = 0; x < out_width; ++x) {
        Ints4 sum = {kHalf, kHalf, kHalf, kHalf};
        const uint8_t* pixels = in + kChannels * begins[x];
        for (int k = 0; k < taps; ++k) {
            sum += widened(pixels + kChannels * k) * weights[k];
        }
        weights += taps;
        store(out + kChannels * x, sum >> kFraction);  // the next pixel overwrites the last byte
    }
}

// One row of `size` bytes: the weighted sum of `taps` rows.
void sum_rows(const uint8_t* const* rows, size_t size, uint8_t* out, const int32_t* weights, int taps) {
    size_t begin = 0;
#ifdef __AVX2__
    for (; begin + 32 <= size; begin += 32) {  // whose sums stay in registers
        __m256i sums[4];
        std::fill_n(sums, 4, _mm256_set1_epi32(kHalf));
        for (int k = 0; k < taps; ++k) {
            const uint8_t* row = rows[k] + begin;
            const __m256i weight = _mm256_set1_epi32(weights[k]);
            for (int i = 0; i < 4; ++i) {
                const __m256i values = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + 8 * i)));
                sums[i] = _mm256_add_epi32(sums[i], _mm256_mullo_epi32(values, weight));
            }
        }
        for (__m256i& sum : sums) {
            sum = _mm256_srai_epi32(sum, kFraction);
        }
        // Packing limits to 0 … 255. It packs both halves of registers apart.
        const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(sums[0], sums[1]), _mm256_packus_epi32(sums[2], sums[3]));
        const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + begin), bytes);
    }
#endif
    for (; begin < size; ++begin) {
        int32_t sum = kHalf;
        for (int k = 0; k < taps; ++k) {
            sum += rows[k][begin] * weights[k];
        }
        out[begin] = rounded(sum);
    }
}

// Bytes of each channel of a line of `count` pixels.
inline void split_line(const uint8_t* line, int count, uint8_t* const* planes) {
    for (int x = 0; x < count; ++x) {
        for (int c = 0; c < kChannels; ++c) {
            planes[c][x] = line[kChannels * x + c];
        }
    }
}

#ifdef __SSSE3__
struct Masks {
    alignas(16) uint8_t bytes[kChannels][kChannels][16];  // of a channel and a part of the line: which byte goes where
};

constexpr Masks masks = [] {
    Masks made{};
    for (int c = 0; c < kChannels; ++c) {
        for (int i = 0; i < 16; ++i) {
            for (int part = 0; part < kChannels; ++part) {
                const int at = kChannels * i + c;
                made.bytes[c][part][i] = at / 16 == part ? at % 16 : 0x80;
            }
        }
    }
    return made;
}();

// The same of 16 pixels.
inline void split_16(const uint8_t* line, uint8_t* const* planes) {
    __m128i parts[kChannels];
    for (int part = 0; part < kChannels; ++part) {
        parts[part] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 16 * part));
    }
    for (int c = 0; c < kChannels; ++c) {
        __m128i bytes = _mm_setzero_si128();
        for (int part = 0; part < kChannels; ++part) {
            const __m128i mask = _mm_load_si128(reinterpret_cast<const __m128i*>(masks.bytes[c][part]));
            bytes = _mm_or_si128(bytes, _mm_shuffle_epi8(parts[part], mask));
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(planes[c]), bytes);
    }
}
#endif

}  // namespace

extern "C" {

// in: [height, width, 3]; out: [out_height, out_width, 3]. Output x of a row is the sum of `taps` pixels from begins_x[x] on, times
// weights_x[x]; likewise of columns. taps of 0: that side keeps its size. Windows of taps lie inside of the image; weights may be 0.
__attribute__((visibility("default"))) void cas_resize(
    const uint8_t* in, int width, int height, uint8_t* out, int out_width, int out_height, const int32_t* begins_x, const int32_t* weights_x,
    int taps_x, const int32_t* begins_y, const int32_t* weights_y, int taps_y
) {
    const size_t in_row = size_t{kChannels} * width, out_row = size_t{kChannels} * out_width;
    // The last row is copied, so that a byte behind it is readable. Rows that columns are summed of lie in a ring.
    std::vector<uint8_t> last(in_row + 1), ring((out_row + 1) * std::max(1, taps_y));
    std::copy_n(in + (height - 1) * in_row, in_row, last.data());
    const auto made = [&](int y) -> const uint8_t* {
        if (!taps_x) {
            return in + y * in_row;
        }
        uint8_t* target = ring.data() + (taps_y ? y % taps_y : 0) * (out_row + 1);
        resize_row(y + 1 < height ? in + y * in_row : last.data(), target, out_width, begins_x, weights_x, taps_x);
        return target;
    };
    if (!taps_y) {
        for (int y = 0; y < height; ++y) {
            std::copy_n(made(y), out_row, out + y * out_row);
        }
        return;
    }
    std::vector<const uint8_t*> rows(taps_y), window(taps_y);
    for (int y = 0, next = 0; y < out_height; ++y) {
        for (next = std::max(next, begins_y[y]); next < begins_y[y] + taps_y; ++next) {
            rows[next % taps_y] = made(next);
        }
        for (int k = 0; k < taps_y; ++k) {
            window[k] = rows[(begins_y[y] + k) % taps_y];
        }
        sum_rows(window.data(), out_row, out + y * out_row, weights_y + y * taps_y, taps_y);
    }
}

// in: [height, width, 3], sides multiples of patch · merge. out: [blocks, merge², 3 · frames · patch²]: block b is block order[b] of the
// image, row by row. All frames are the same.
__attribute__((visibility("default"))) void cas_patch_blocks(
    const uint8_t* in, int width, int height, uint8_t* out, int patch, int merge, int frames, const int64_t* order, int64_t blocks
) {
    const size_t row = size_t{kChannels} * width, plane = size_t(patch) * patch, frames_size = frames * plane;
    const int64_t columns = width / (patch * merge);
    [[maybe_unused]] const uint8_t* const end = in + height * row;
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = in + order[b] / columns * patch * merge * row + order[b] % columns * patch * merge * kChannels;
        for (int place = 0; place < merge * merge; ++place) {
            const uint8_t* corner = block + place / merge * patch * row + size_t{kChannels} * (place % merge) * patch;
            for (int y = 0; y < patch; ++y) {
                const uint8_t* line = corner + y * row;
                uint8_t* const planes[] = {out + y * patch, out + y * patch + frames_size, out + y * patch + 2 * frames_size};
#ifdef __SSSE3__
                // It may read and write behind the line, where other pixels lie, and bytes of the plane that are written later.
                if (patch <= 16 && y * patch + 16 <= int(plane) && line + 48 <= end) {
                    split_16(line, planes);
                    continue;
                }
#endif
                split_line(line, patch, planes);
            }
            for (int c = 0; c < kChannels; ++c) {
                for (int frame = 1; frame < frames; ++frame) {
                    std::memcpy(out + c * frames_size + frame * plane, out + c * frames_size, plane);
                }
            }
            out += kChannels * frames_size;
        }
    }
}

}  // extern "C"

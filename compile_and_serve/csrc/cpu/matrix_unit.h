// Products of tiles by Intel's matrix unit (AMX): up to 32 rows times two blocks of 16 outputs, 16 groups at a time.
//
// A weight block (multiply.h) is what the unit reads: 16 groups are one of its tiles, 16 rows of 64 bytes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "multiply.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define CAS_MATRIX_UNIT 1
#else
#define CAS_MATRIX_UNIT 0
#endif

namespace cas {

constexpr int kUnitSize = 16;  // rows, groups and outputs of the unit's tiles
constexpr int kMaxUnitRows = 2 * kUnitSize;
constexpr int kMaxSliceBlocks = 4;

#if CAS_MATRIX_UNIT

// Whether the kernel lets this process use the unit.
inline bool matrix_unit_allowed() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
}

// Whether the unit multiplies T's activations and weights, of a linear with this many groups.
template <class T>
bool uses_matrix_unit(int64_t groups) {
    constexpr bool kHasProduct = std::is_same_v<T, bf16> || std::is_same_v<T, Bytes>;
    return kHasProduct && groups % kUnitSize == 0 && matrix_unit_allowed();
}

// The numbers of tiles are literals, because GCC's intrinsics are macros that print them into assembler code.
#define CAS_ADD_TILES(sum, x, w)                                            \
    do {                                                                    \
        if constexpr (std::is_same_v<T, bf16>) _tile_dpbf16ps(sum, x, w);   \
        else _tile_dpbsud(sum, x, w);                                       \
    } while (false)

struct TileShape {
    int rows = 0, row_bytes = 0;  // 0: not used
};

inline void configure_tiles(const TileShape (&shapes)[8]) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } tiles;
    for (int i = 0; i < 8; ++i) {
        tiles.rows[i] = uint8_t(shapes[i].rows);
        tiles.row_bytes[i] = uint16_t(shapes[i].row_bytes);
    }
    _tile_loadconfig(&tiles);
}

// The unit's state of one thread. Threads release it, since the kernel saves it at each switch.
class MatrixUnit {
public:
    ~MatrixUnit() {
        if (rows_) _tile_release();
    }

    // As `multiply`, for any number of blocks. ahead: addresses to prefetch, or null. kAccumulate: tile += the sums.
    // rows: at most kMaxUnitRows. groups: a multiple of kUnitSize.
    template <class T, bool kAccumulate = false>
    void multiply(
        const typename Dot<T>::X* x, int64_t x_stride, int rows, const typename Dot<T>::W* const* weights, int blocks, int64_t groups,
        typename Dot<T>::Sum* tile, int64_t tile_stride, const Ahead<T>* ahead = nullptr
    ) {
        configure(rows);
        const bool two = rows > kUnitSize;
        const auto pair = two ? run<T, 2, 2, kAccumulate> : run<T, 1, 2, kAccumulate>;
        const auto one = two ? run<T, 2, 1, kAccumulate> : run<T, 1, 1, kAccumulate>;
        for (; blocks > 0; blocks -= 2, weights += 2, tile += 2 * kLanes)
            (blocks > 1 ? pair : one)(x, x_stride, weights, groups, tile, tile_stride, ahead);
    }

    // The part of a product over `count` groups from `begin` on: tile = it at begin 0, else tile += it. blocks: at most kMaxSliceBlocks.
    template <class T>
    void add_slice(
        const typename Dot<T>::X* x, int64_t x_stride, int rows, const typename Dot<T>::W* const* weights, int blocks, int64_t begin,
        int64_t count, typename Dot<T>::Sum* tile, int64_t tile_stride
    ) {
        const typename Dot<T>::W* parts[kMaxSliceBlocks];
        for (int b = 0; b < blocks; ++b) parts[b] = weights[b] + begin * Dot<T>::kInputs * kLanes;
        x += begin * Dot<T>::kInputs;
        if (begin == 0) multiply<T>(x, x_stride, rows, parts, blocks, count, tile, tile_stride);
        else multiply<T, true>(x, x_stride, rows, parts, blocks, count, tile, tile_stride);
    }

private:
    int rows_ = 0;

    // Tiles 0 to 3: sums, two blocks for each 16 rows. 4 and 5: activations. 6 and 7: weights.
    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const int first = std::min(rows, kUnitSize), second = rows - first;
        const TileShape sums{first, 64}, more_sums{second, second ? 64 : 0}, weights{kUnitSize, 64};
        configure_tiles({sums, sums, more_sums, more_sums, sums, more_sums, weights, weights});
    }

    template <class T, int kRowTiles, int kBlocks, bool kAccumulate>
    static void run(
        const typename Dot<T>::X* x, int64_t x_stride, const typename Dot<T>::W* const* weights, int64_t groups,
        typename Dot<T>::Sum* tile, int64_t tile_stride, const Ahead<T>* ahead
    ) {
        constexpr int64_t kVector = Dot<T>::kInputs * kLanes;
        const int64_t x_bytes = x_stride * sizeof(*x), tile_bytes = tile_stride * sizeof(*tile);
        const auto* second_rows = x + kUnitSize * x_stride;
        auto* second_sums = tile + kUnitSize * tile_stride;
        if constexpr (kAccumulate) {
            _tile_loadd(0, tile, tile_bytes);
            if constexpr (kBlocks == 2) _tile_loadd(1, tile + kLanes, tile_bytes);
            if constexpr (kRowTiles == 2) _tile_loadd(2, second_sums, tile_bytes);
            if constexpr (kRowTiles == 2 && kBlocks == 2) _tile_loadd(3, second_sums + kLanes, tile_bytes);
        } else {
            _tile_zero(0);
            if constexpr (kBlocks == 2) _tile_zero(1);
            if constexpr (kRowTiles == 2) _tile_zero(2);
            if constexpr (kRowTiles == 2 && kBlocks == 2) _tile_zero(3);
        }
        for (int64_t g = 0; g < groups; g += kUnitSize) {
            _tile_loadd(4, x + g * Dot<T>::kInputs, x_bytes);
            _tile_loadd(6, weights[0] + g * kVector, 64);
            CAS_ADD_TILES(0, 4, 6);
            if constexpr (kBlocks == 2) {
                _tile_loadd(7, weights[1] + g * kVector, 64);
                CAS_ADD_TILES(1, 4, 7);
            }
            if constexpr (kRowTiles == 2) {
                _tile_loadd(5, second_rows + g * Dot<T>::kInputs, x_bytes);
                CAS_ADD_TILES(2, 5, 6);
                if constexpr (kBlocks == 2) CAS_ADD_TILES(3, 5, 7);
            }
            if (!ahead) continue;
            for (int b = 0; b < kBlocks; ++b) {
                const int64_t behind = g - ahead->turn;
                const auto* address = behind < 0 ? ahead->first[b] + g * ahead->step : ahead->second[b] + behind * ahead->step;
                for (int i = 0; i < kUnitSize; ++i) __builtin_prefetch(address + i * ahead->step, 0, kToL2);
            }
        }
        _tile_stored(0, tile, tile_bytes);
        if constexpr (kBlocks == 2) _tile_stored(1, tile + kLanes, tile_bytes);
        if constexpr (kRowTiles == 2) _tile_stored(2, second_sums, tile_bytes);
        if constexpr (kRowTiles == 2 && kBlocks == 2) _tile_stored(3, second_sums + kLanes, tile_bytes);
    }
};

// Products of two planes of signed bytes with unsigned weights, of kInputs inputs at a time. The state of one thread, as above.
template <int kInputs>
class ByteUnit {
public:
    ~ByteUnit() {
        if (rows_) _tile_release();
    }

    // sums[plane][r][o] = Σ over inputs i of x[r * row_bytes + plane * plane_bytes + i] * weights[i / 4][o][i % 4], for 16 outputs.
    // rows: at most kUnitSize.
    void multiply(
        const int8_t* x, int64_t row_bytes, int64_t plane_bytes, int rows, const uint8_t* weights, int32_t (*sums)[kUnitSize][kLanes]
    ) {
        if (rows != rows_) {
            rows_ = rows;
            const TileShape sum{rows, 64}, row{rows, kInputs};
            configure_tiles({sum, sum, row, row, {kInputs / 4, 64}, {}, {}, {}});
        }
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, weights, 64);
        _tile_loadd(2, x, row_bytes);
        _tile_dpbsud(0, 2, 4);
        _tile_loadd(3, x + plane_bytes, row_bytes);
        _tile_dpbsud(1, 3, 4);
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
    }

private:
    int rows_ = 0;
};

#else

template <class T>
bool uses_matrix_unit(int64_t) {
    return false;
}

template <int kInputs>
struct ByteUnit {};  // never used

struct MatrixUnit {  // never called
    template <class T, bool kAccumulate = false, class... Arguments>
    void multiply(const Arguments&...) {}
    template <class T, class... Arguments>
    void add_slice(const Arguments&...) {}
};

#endif

}  // namespace cas

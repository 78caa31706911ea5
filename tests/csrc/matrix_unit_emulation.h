// The instructions of Intel's matrix unit that products of bytes use (csrc/cpu/matrix_unit.h), for CPUs without one. Include it first.
// What would fault on such a CPU ends the process.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

namespace emulated {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
inline thread_local Config config;
inline thread_local uint8_t tiles[8][16][64];

inline void require(bool holds) {
    if (!holds) std::abort();
}

inline void configure(const void* from) {
    std::memcpy(&config, from, sizeof(config));
    require(config.palette == 1 && config.start_row == 0);
    for (int i = 0; i < 8; ++i) {
        require(config.rows[i] <= 16 && config.row_bytes[i] <= 64 && config.row_bytes[i] % 4 == 0);
        require((config.rows[i] == 0) == (config.row_bytes[i] == 0));
    }
    std::memset(tiles, 0, sizeof(tiles));
}

inline void zero(int tile) { std::memset(tiles[tile], 0, sizeof(tiles[tile])); }

inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int r = 0; r < config.rows[tile]; ++r)
        std::memcpy(tiles[tile][r], static_cast<const char*>(from) + r * stride, config.row_bytes[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
    for (int r = 0; r < config.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile][r], config.row_bytes[tile]);
}

// sums[r][o] += Σ x[r][i] * w[i / 4][o][i % 4]: signed bytes with unsigned ones.
inline void multiply_bytes(int sums, int x, int w) {
    require(config.rows[x] > 0 && config.rows[x] == config.rows[sums]);
    require(config.rows[w] == config.row_bytes[x] / 4 && config.row_bytes[w] == config.row_bytes[sums]);
    for (int r = 0; r < config.rows[sums]; ++r) {
        for (int o = 0; o < config.row_bytes[sums] / 4; ++o) {
            int32_t sum;
            std::memcpy(&sum, tiles[sums][r] + 4 * o, 4);
            for (int i = 0; i < config.row_bytes[x]; ++i) sum += int8_t(tiles[x][r][i]) * tiles[w][i / 4][4 * o + i % 4];
            std::memcpy(tiles[sums][r] + 4 * o, &sum, 4);
        }
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _tile_loadconfig(from) emulated::configure(from)
#define _tile_release() void()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbsud(sums, x, w) emulated::multiply_bytes(sums, x, w)
#define syscall(...) 0L

// The matrix units' tiles in software, under the names of the processor's own: where a build asks for it, the variant for
// matrix units runs, and can be tested, on a processor that has none.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud

namespace soft_tiles {

struct Tile {
    int64_t rows, column_bytes;
    uint8_t bytes[16][64];
};
inline thread_local Tile tiles[8];

inline void configure(const void* shape) {
    const uint8_t* own = static_cast<const uint8_t*>(shape);
    std::memset(tiles, 0, sizeof(tiles));
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        std::memcpy(&bytes, own + 16 + 2 * t, 2);
        tiles[t].column_bytes = bytes;
        tiles[t].rows = own[48 + t];
    }
}

inline void release() { std::memset(tiles, 0, sizeof(tiles)); }
inline void zero(int t) { std::memset(tiles[t].bytes, 0, sizeof(tiles[t].bytes)); }

inline void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int64_t r = 0; r < tiles[t].rows; r++) std::memcpy(tiles[t].bytes[r], static_cast<const uint8_t*>(from) + r * stride, static_cast<size_t>(tiles[t].column_bytes));
}

inline void store(int t, void* to, int64_t stride) {
    for (int64_t r = 0; r < tiles[t].rows; r++) std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles[t].bytes[r], static_cast<size_t>(tiles[t].column_bytes));
}

// Of each lane the byte that `at` bits precede.
template <typename Byte> inline __m512i bytes_of(__m512i lanes, unsigned at) {
    const __m512i top = _mm512_slli_epi32(lanes, 24 - at);
    return std::is_signed<Byte>::value ? _mm512_srai_epi32(top, 24) : _mm512_srli_epi32(top, 24);
}

// sums[m][n] += left[m][4 k + i] * right[k][4 n + i], modulo 2^32.
template <typename Left, typename Right> void multiply(int sums, int left, int right) {
    for (int64_t m = 0; m < tiles[sums].rows; m++) {
        __m512i own = _mm512_loadu_si512(tiles[sums].bytes[m]);
        for (int64_t k = 0; k < tiles[right].rows; k++) {
            int32_t four;
            std::memcpy(&four, tiles[left].bytes[m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(four), y = _mm512_loadu_si512(tiles[right].bytes[k]);
            for (unsigned at = 0; at < 32; at += 8) own = _mm512_add_epi32(own, _mm512_mullo_epi32(bytes_of<Left>(x, at), bytes_of<Right>(y, at)));
        }
        _mm512_storeu_si512(tiles[sums].bytes[m], own);
    }
}

}  // namespace soft_tiles

#define _tile_loadconfig(shape) soft_tiles::configure(shape)
#define _tile_release() soft_tiles::release()
#define _tile_zero(t) soft_tiles::zero(t)
#define _tile_loadd(t, from, stride) soft_tiles::load(t, from, stride)
#define _tile_stored(t, to, stride) soft_tiles::store(t, to, stride)
#define _tile_dpbssd(sums, left, right) soft_tiles::multiply<int8_t, int8_t>(sums, left, right)
#define _tile_dpbsud(sums, left, right) soft_tiles::multiply<int8_t, uint8_t>(sums, left, right)
#define _tile_dpbusd(sums, left, right) soft_tiles::multiply<uint8_t, int8_t>(sums, left, right)
#define _tile_dpbuud(sums, left, right) soft_tiles::multiply<uint8_t, uint8_t>(sums, left, right)

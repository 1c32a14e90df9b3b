/* AMX: 32 x 32 products in tiles; few rows use the VNNI dot product. */
#ifndef KT_ISA_AMX_H
#define KT_ISA_AMX_H

#define KT_HAVE_TILES
#define KT_HAVE_PROBE
#include "isa_avx512_bf16.h"

/* Palette 1, eight tiles of 16 rows x 64 bytes. Source: Intel SDM volume 1, chapter 18.
 * Static: gcc 12 tells the optimizer that loadconfig reads 8 bytes only, and it drops stores to the others. */
KT_INLINE void kt_tiles_begin(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}
KT_INLINE void kt_tiles_end(void) { _tile_release(); }

/* c[r][n] = sum_k x[r][k] w[n][k] for m <= 32 rows of tiles x, two blocks w0 and w1. Four dots share four
 * tile loads; next is what the caller reads next, fetched into L2 a share each step; between does the caller's
 * vector work, 32 rows over all steps. */
KT_INLINE void s8_tiles(const int8_t *x, int64_t m, const int8_t *w0, const int8_t *w1, int64_t k, int32_t (*c)[32],
                        const int8_t *next, int64_t next_lines, void (*between)(void *, int64_t), void *ctx) {
    const int8_t *lower = x + 16 * k;
    const int64_t share = (32 * 64 + k - 1) / k;
    __asm__ volatile("" : : : "memory"); /* gcc's _tile_loadd does not say that it reads memory */
    _tile_zero(0);
    _tile_zero(1);
    if (m > 16) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < 16 * k; i += 1024) {
            _tile_loadd(4, x + i, 64);
            _tile_loadd(6, w0 + i, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, w1 + i, 64);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(5, lower + i, 64);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
            for (int64_t j = 0; j < next_lines; j++, next += 64)
                _mm_prefetch((const char *)next, _MM_HINT_T1);
            between(ctx, share);
        }
        _tile_stored(2, c[16], 128);
        _tile_stored(3, &c[16][16], 128);
    } else {
        for (int64_t i = 0; i < 16 * k; i += 1024) {
            _tile_loadd(4, x + i, 64);
            _tile_loadd(6, w0 + i, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, w1 + i, 64);
            _tile_dpbssd(1, 4, 7);
            for (int64_t j = 0; j < next_lines; j++, next += 64)
                _mm_prefetch((const char *)next, _MM_HINT_T1);
            between(ctx, share);
        }
    }
    _tile_stored(0, c[0], 128);
    _tile_stored(1, &c[0][16], 128);
}

KT_INLINE uint64_t kt_probe_s8(int64_t rounds) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    static const int8_t ones[1024] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    for (int64_t n = 0; n < rounds; n++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    return (uint64_t)rounds * 4 * 16 * 16 * 64;
}

#endif

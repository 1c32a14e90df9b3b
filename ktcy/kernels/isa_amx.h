/* AMX: 32 x 32 products in tiles; few rows use the VNNI dot product. CPUs with tiles have vpermb. */
#ifndef KT_ISA_AMX_H
#define KT_ISA_AMX_H

#define KT_HAVE_TILES
#define KT_HAVE_PROBE
#define KT_HAVE_PERMB
/* Four rows take 1.2 of what they take the other way, on Emerald Rapids only. */
#define KT_NORMAL_ROWS 2
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

/* c[r][n] = sum over steps of 64 bytes of K, m <= 32 rows of tiles x (the lower 16 rows at x + lower), the lines of two
 * blocks w0 and w1. int8 and int32, or bfloat16 and float32. Four dots share four tile loads; next is what the caller
 * reads next, fetched into L2 a share each step; between, if any, does the caller's vector work, `rows` each step. */
KT_INLINE void kt_tiles(int bf16, const void *x, int64_t lower, int64_t m, const void *w0, const void *w1,
                        int64_t steps, int32_t (*c)[32], const char *next, int64_t share,
                        void (*between)(void *, int64_t), void *ctx, int64_t rows) {
#define KT_TILE_DOT(c, a, b) \
    if (bf16) \
        _tile_dpbf16ps(c, a, b); \
    else \
        _tile_dpbssd(c, a, b)
    const int64_t last = 1024 * (steps - 1);
    __asm__ volatile("" : : : "memory"); /* gcc's _tile_loadd does not say that it reads memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i <= last; i += 1024) {
        _tile_loadd(4, (const char *)x + i, 64);
        _tile_loadd(6, (const char *)w0 + i, 64);
        KT_TILE_DOT(0, 4, 6);
        _tile_loadd(7, (const char *)w1 + i, 64);
        KT_TILE_DOT(1, 4, 7);
        /* Not after the other dots: -4 % at 4096 tokens for groups of 32, which end every step. */
        if (i == last) {
            _tile_stored(0, c[0], 128);
            _tile_stored(1, &c[0][16], 128);
        }
        if (m > 16) {
            _tile_loadd(5, (const char *)x + lower + i, 64);
            KT_TILE_DOT(2, 5, 6);
            KT_TILE_DOT(3, 5, 7);
        }
        for (int64_t j = 0; j < share; j++, next += 64)
            _mm_prefetch((const char *)next, _MM_HINT_T1);
        if (between)
            between(ctx, rows);
    }
#undef KT_TILE_DOT
    if (m > 16) {
        _tile_stored(2, c[16], 128);
        _tile_stored(3, &c[16][16], 128);
    }
}

/* Words of -16 to 15 as bfloat16; vpermw looks at five bits. */
KT_INLINE vi32 vi16_bf16(vi32 words) {
    static const uint16_t table[32] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                       0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                       0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                                       0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    return _mm512_permutexvar_epi16(words, vi32_load(table));
}

#define KT_TILE_PROBE(name, dot, k) \
    KT_INLINE uint64_t name(int64_t rounds) { \
        _tile_zero(0); \
        _tile_zero(1); \
        _tile_zero(2); \
        _tile_zero(3); \
        static const int8_t ones[1024] = {1, 2, 3, 4, 5, 6, 7, 8, 9}; \
        _tile_loadd(4, ones, 64); \
        _tile_loadd(5, ones, 64); \
        _tile_loadd(6, ones, 64); \
        _tile_loadd(7, ones, 64); \
        for (int64_t n = 0; n < rounds; n++) { \
            dot(0, 4, 6); \
            dot(1, 4, 7); \
            dot(2, 5, 6); \
            dot(3, 5, 7); \
        } \
        return (uint64_t)rounds * 4 * 16 * 16 * k; \
    }
KT_TILE_PROBE(kt_probe_s8, _tile_dpbssd, 64)
KT_TILE_PROBE(kt_probe_bf16, _tile_dpbf16ps, 32)

#endif

/* The int8 core: rows of int8 times blocks of 16 weight rows, exact int32 sums.
 *
 * Few rows are read where they lie; many come gathered in 16 x 64 tiles. Both give the same sums.
 */
#ifndef KT_GEMM_H
#define KT_GEMM_H

#include <string.h>

#include "table.h"

/* Rows of one product call: its sums, 32 x 32 int32, stay in L1 between core and epilogue. */
#define KT_STRIP 32
/* Weights are fetched this far ahead of their use. */
#define KT_AHEAD 4096

/* rows and blocks are compile-time constants at each call: the accumulators live in registers. */
KT_INLINE void s8_micro(int rows, int blocks, const int8_t *const *x, int64_t step, const int8_t *w,
                        int64_t block_bytes, int64_t k, const int32_t *sum, int32_t (*c)[32]) {
    vi32 acc[KT_S8_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++)
            acc[r][b] = vi32_set1(0);
    for (int64_t i = 0, at = 0; i < k; i += 64, at += step) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < 64; j += 4) {
            for (int b = 0; b < blocks; b++) {
                const int8_t *line = w + b * block_bytes + (i + j) * KT_BLOCK;
                const vs8w v = vs8w_load(line);
                KT_PREFETCH(line + KT_AHEAD);
                for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, x[r] + at + j, 4);
                    acc[r][b] = vi32_dot_s8(acc[r][b], v, four);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++)
            vi32_store(c[r] + 16 * b, vi32_dot_finish(acc[r][b], sum[r]));
}

#define KT_S8_CASE(n) \
    case n: \
        s8_micro(n, KT_S8_BLOCKS, x, step, w, block_bytes, k, sum, c); \
        break;
static void s8_rows(int rows, const int8_t *const *x, int64_t step, const int8_t *w, int64_t block_bytes, int64_t k,
                    const int32_t *sum, int32_t (*c)[32]) {
    switch (rows) {
        KT_S8_CASE(1)
        KT_S8_CASE(2)
        KT_S8_CASE(3)
        KT_S8_CASE(4)
#if KT_S8_ROWS > 4
        KT_S8_CASE(5)
        KT_S8_CASE(6)
        KT_S8_CASE(7)
        KT_S8_CASE(8)
#endif
    }
}

KT_INLINE int64_t kt_row(const kt_gemm *g, int64_t i) { return g->index ? g->index[i] : i; }

/* Sums of rows r .. r + rows - 1 (at most KT_STRIP) with the two blocks at w; columns 16.. of c are the second
 * block's. next: weights to read after these, fetched a share a call. */
static void s8_product(const kt_gemm *g, int64_t r, int64_t rows, const int8_t *w, int64_t block_bytes,
                       const int8_t *next, int32_t (*c)[32]) {
    const int8_t *tiles = g->tiles;
#ifdef KT_HAVE_TILES
    if (tiles) {
        const int64_t strips = (g->m + KT_STRIP - 1) / KT_STRIP, share = (32 + strips - 1) / strips;
        s8_tiles(tiles + r * g->k, rows, w, w + block_bytes, g->k, c, next + r / KT_STRIP * share * g->k, share);
        return;
    }
#endif
    for (int64_t i = 0; i < rows; i += KT_S8_ROWS) {
        const int n = (int)(rows - i < KT_S8_ROWS ? rows - i : KT_S8_ROWS);
        const int8_t *x[KT_S8_ROWS];
        int32_t sum[KT_S8_ROWS];
        for (int j = 0; j < n; j++) {
            const int64_t at = r + i + j, row = kt_row(g, at);
            x[j] = tiles ? tiles + at / 16 * 16 * g->k + at % 16 * 64 : (const int8_t *)g->x + row * g->ldx;
            sum[j] = g->meta[row].sum;
        }
        for (int b = 0; b < 2; b += KT_S8_BLOCKS)
            s8_rows(n, x, tiles ? 1024 : 64, w + b * block_bytes, block_bytes, g->k, sum,
                    (int32_t(*)[32])(&c[i][16 * b]));
    }
}

#endif

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
KT_INLINE void s8_micro(int rows, int blocks, const int8_t *const *x, int64_t step, const int8_t *w, const int8_t *next,
                        int64_t block_bytes, int64_t k, const int32_t *sum, int32_t (*c)[32]) {
    vi32 acc[KT_S8_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++)
            acc[r][b] = vi32_set1(0);
    for (int64_t i = 0, at = 0; i < k; i += 64, at += step) {
        const int64_t ahead = i * KT_BLOCK + KT_AHEAD, end = k * KT_BLOCK;
        const int8_t *fetch = ahead < end ? w + ahead : next + (ahead - end);
#pragma GCC unroll 4
        for (int64_t j = 0; j < 64; j += 4) {
            for (int b = 0; b < blocks; b++) {
                const int8_t *line = w + b * block_bytes + (i + j) * KT_BLOCK;
                const vs8w v = vs8w_load(line);
                KT_PREFETCH(fetch + b * block_bytes + j * KT_BLOCK);
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
        s8_micro(n, KT_S8_BLOCKS, x, step, w, next, block_bytes, k, sum, c); \
        break;
static void s8_rows(int rows, const int8_t *const *x, int64_t step, const int8_t *w, const int8_t *next,
                    int64_t block_bytes, int64_t k, const int32_t *sum, int32_t (*c)[32]) {
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

/* Work that a product may do between its steps, `rows` at a time: tile dots leave the vector units idle. */
typedef void (*kt_between)(void *ctx, int64_t rows);

/* Sums of rows r .. r + rows - 1 (at most KT_STRIP) with the two blocks at w; columns 16.. of c are the second
 * block's. next: weights to read after these, fetched meanwhile, or NULL. */
KT_INLINE void s8_product(const kt_gemm *g, int64_t r, int64_t rows, const int8_t *w, int64_t block_bytes,
                          const int8_t *next, int32_t (*c)[32], kt_between between, void *ctx) {
    const int8_t *tiles = g->tiles;
#ifdef KT_HAVE_TILES
    if (tiles) {
        /* The two blocks' k / 2 lines, spread over all strips and their k / 64 steps. */
        const int64_t strips = (g->m + KT_STRIP - 1) / KT_STRIP, share = next ? (32 + strips - 1) / strips : 0;
        s8_tiles(tiles + r * g->k, rows, w, w + block_bytes, g->k, c, next + r / KT_STRIP * share * g->k, share,
                 between, ctx);
        return;
    }
#endif
    if (!next)
        next = w;
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
            s8_rows(n, x, tiles ? 1024 : 64, w + b * block_bytes, b + KT_S8_BLOCKS < 2 ? w + block_bytes : next,
                    block_bytes, g->k, sum, (int32_t(*)[32])(&c[i][16 * b]));
    }
}

/* The sums of up to 32 rows with two blocks, and where their epilogue takes them. */
typedef struct {
    const kt_gemm *g;
    const kt_activation *act; /* gate_up */
    const int32_t *row;       /* down */
    const float *route;       /* down */
    float *dst;
    int64_t ld, block, blocks, first, rows, done;
    int32_t (*c)[32];
} s8_strip;

/* All rows of g times blocks b0 .. b1 - 1, two by two. epilogue(strip, n) finishes the next n rows of a strip; those of
 * one strip run between the steps of the next (-8 % at 1024 tokens with AMX). */
KT_INLINE void s8_strips(const s8_strip *start, int64_t b0, int64_t b1, kt_between epilogue) {
    const kt_gemm *g = start->g;
    const int64_t block_bytes = KT_BLOCK * g->k;
    int32_t c[2][KT_STRIP][32] __attribute__((aligned(64)));
    s8_strip strips[2] = {*start, *start};
    s8_strip *now = strips, *last = strips + 1;
    now->c = c[0];
    last->c = c[1];
    for (int64_t b = b0; b < b1; b += 2) {
        const int64_t blocks = b1 - b < 2 ? 1 : 2;
        const int8_t *w = (const int8_t *)g->weight + b * block_bytes;
        const int8_t *next = b + 2 < b1 ? w + 2 * block_bytes : g->next;
        for (int64_t r = 0; r < g->m; r += KT_STRIP) {
            now->block = b;
            now->blocks = blocks;
            now->first = r;
            now->rows = g->m - r < KT_STRIP ? g->m - r : KT_STRIP;
            s8_product(g, r, now->rows, w, blocks == 2 ? block_bytes : 0, next, now->c, epilogue, last);
            epilogue(last, KT_STRIP);
            now->done = 0;
            s8_strip *swap = now;
            now = last;
            last = swap;
        }
    }
    epilogue(last, KT_STRIP);
}

#endif

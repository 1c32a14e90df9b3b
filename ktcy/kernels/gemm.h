/* All rows of a product times its blocks of weights, in strips of rows and pairs of blocks, whatever the core.
 *
 * A core gives the sums of a strip; a format says what a sum means. */
#ifndef KT_GEMM_H
#define KT_GEMM_H

#include <string.h>

#include "activation.h"
#include "rows.h"
#include "table.h"

/* Rows of one product call: its sums, 32 x 32 of 4 bytes, stay in L1 between core and epilogue. */
#define KT_STRIP 32
/* Weights are fetched this far ahead of their use. */
#define KT_AHEAD 4096

KT_INLINE int64_t kt_row(const kt_gemm *g, int64_t i) { return g->index ? g->index[i] : i; }

/* Work that a product may do between its steps, `rows` at a time: tile dots leave the vector units idle. */
typedef void (*kt_between)(void *ctx, int64_t rows);

/* The sums of up to 32 rows with one or two blocks, and where their epilogue takes them. */
typedef struct {
    const kt_gemm *g;
    const kt_activation *act; /* gate_up */
    const int32_t *row;       /* down */
    const float *route;       /* down */
    float *dst;
    int64_t ld, block, blocks, end, first, rows, done; /* end: one past the last block of the call */
    union {
        int32_t (*s32)[32];
        float (*f32)[32];
    } c; /* columns 16.. are the second block's */
} kt_strip;

/* Fills now->c; between(last) may run meanwhile. */
typedef void (*kt_product)(const kt_strip *now, kt_between between, kt_strip *last);
/* Prepares the blocks of a strip for all its rows. */
typedef void (*kt_panel)(const kt_gemm *g, int64_t block, int64_t blocks);
/* y of row i of a strip and its block n. */
typedef vf32 (*kt_value)(const kt_strip *s, int64_t i, int64_t n);

/* epilogue(strip, n) finishes the next n rows of a strip; those of one strip run between the steps of the next (-8 %
 * at 1024 tokens with AMX). */
KT_INLINE void kt_strips(const kt_strip *start, int64_t b0, int64_t b1, kt_panel panel, kt_product product,
                         kt_between epilogue) {
    const kt_gemm *g = start->g;
    float c[2][KT_STRIP][32] __attribute__((aligned(64)));
    kt_strip strips[2] = {*start, *start};
    kt_strip *now = strips, *last = strips + 1;
    now->c.f32 = c[0];
    last->c.f32 = c[1];
    now->end = last->end = b1;
    for (int64_t b = b0; b < b1; b += 2) {
        const int64_t blocks = b1 - b < 2 ? 1 : 2;
        if (panel)
            panel(g, b, blocks);
        for (int64_t r = 0; r < g->m; r += KT_STRIP) {
            now->block = b;
            now->blocks = blocks;
            now->first = r;
            now->rows = g->m - r < KT_STRIP ? g->m - r : KT_STRIP;
            product(now, epilogue, last);
            epilogue(last, KT_STRIP);
            now->done = 0;
            kt_strip *swap = now;
            now = last;
            last = swap;
        }
    }
    epilogue(last, KT_STRIP);
}

KT_INLINE void kt_gate_up_rows(kt_strip *s, int64_t rows, kt_value value) {
    for (; rows && s->done < s->rows; rows--, s->done++) {
        float *dst = s->dst + (s->first + s->done) * s->ld + KT_BLOCK * (s->block / 2);
        vf32_store(dst, kt_activate(s->act, value(s, s->done, 0), value(s, s->done, 1)));
    }
}

KT_INLINE void kt_down_rows(kt_strip *s, int64_t rows, kt_value value) {
    for (; rows && s->done < s->rows; rows--, s->done++) {
        const int64_t r = s->first + s->done;
        const vf32 weight = vf32_set1(s->route[r]);
        float *dst = s->dst + s->row[r] * s->ld + KT_BLOCK * s->block;
        for (int64_t n = 0; n < s->blocks; n++)
            vf32_store(dst + 16 * n, vf32_fma(value(s, s->done, n), weight, vf32_load(dst + 16 * n)));
    }
}

KT_INLINE vf32 kt_bias(const kt_gemm *g, int64_t block) {
    return g->bias ? vf32_load(g->bias + block * KT_BLOCK) : vf32_set1(0.0f);
}

/* The two products of format f from its panel (or NULL), product and value. */
#define KT_PRODUCTS(f, panel, product, value) \
    KT_INLINE void f##_gate_up_rows(void *s, int64_t rows) { kt_gate_up_rows(s, rows, value); } \
    static void f##_gate_up(const kt_gemm *g, const kt_activation *act, int64_t j0, int64_t j1, float *h, \
                            int64_t ldh) { \
        const kt_strip strip = {.g = g, .act = act, .dst = h, .ld = ldh}; \
        kt_strips(&strip, 2 * j0, 2 * j1, panel, product, f##_gate_up_rows); \
    } \
    KT_INLINE void f##_down_rows(void *s, int64_t rows) { kt_down_rows(s, rows, value); } \
    static void f##_down(const kt_gemm *g, const int32_t *row, const float *route, int64_t b0, int64_t b1, \
                         float *out, int64_t ldo) { \
        const kt_strip strip = {.g = g, .row = row, .route = route, .dst = out - KT_BLOCK * b0, .ld = ldo}; \
        kt_strips(&strip, b0, b1, panel, product, f##_down_rows); \
    }

#endif

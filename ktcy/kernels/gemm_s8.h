/* The int8 core: rows of int8 times blocks of 16 weight rows, exact int32 sums.
 *
 * Few rows are read where they lie; many come gathered in 16 x 64 tiles. Both give the same sums. */
#ifndef KT_GEMM_S8_H
#define KT_GEMM_S8_H

#include "gemm.h"

static int64_t s8_row_bytes(int64_t k) { return kt_round_up(k, KT_KPAD); }
static int64_t s8_panel_bytes(int64_t k) { return kt_round_up(k, KT_KPAD); }

KT_INLINE void s8_quantize_as(const void *src, kt_dtype dtype, int64_t k, int8_t *q, kt_meta *meta) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    const int32_t bits = kt_absmax(src, dtype, k);
    float most;
    memcpy(&most, &bits, sizeof most);
    if (bits >= KT_NOT_FINITE || most < KT_TINY) {
        memset(q, 0, (size_t)padded);
        *meta = (kt_meta){bits >= KT_NOT_FINITE ? __builtin_nanf("") : 0.0f, 0};
        return;
    }
    const vf32 inverse = vf32_set1(127.0f / most);
    vi32 sum = vi32_set1(0);
    for (int64_t i = 0; i < padded; i += 16) {
        const vi32 v = vi32_from_vf32(vf32_mul(kt_load_tail(src, dtype, i, k), inverse));
        sum = vi32_add(sum, v);
        vi32_store_s8(q + i, v);
    }
    *meta = (kt_meta){most / 127.0f, vi32_hsum(sum)};
}

static void s8_quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) {
    if (dtype == KT_F32)
        s8_quantize_as(src, KT_F32, k, row, meta);
    else if (dtype == KT_F16)
        s8_quantize_as(src, KT_F16, k, row, meta);
    else
        s8_quantize_as(src, KT_BF16, k, row, meta);
}

static void s8_tile(const void *row, int64_t k, int64_t r, void *tiles) {
    char *p = (char *)tiles + r / 16 * 16 * k + r % 16 * 64;
    for (int64_t i = 0; i < k; i += 64, p += 1024) {
        if (row)
            memcpy(p, (const char *)row + i, 64);
        else
            memset(p, 0, 64);
    }
}

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

/* The sums of a strip with its two blocks at w. next: what is read after these, `lines` of 64 bytes for each 64 of K,
 * fetched meanwhile, or NULL. */
KT_INLINE void s8_sums(const kt_strip *now, const int8_t *w, int64_t block_bytes, const int8_t *next,
                       int64_t lines, kt_between between, kt_strip *last) {
    const kt_gemm *g = now->g;
    const int8_t *tiles = g->tiles;
    if (now->blocks == 1)
        block_bytes = 0;
#ifdef KT_HAVE_TILES
    if (tiles) {
        /* The lines of next, spread over all strips and their k / 64 steps. */
        const int64_t strips = (g->m + KT_STRIP - 1) / KT_STRIP, steps = g->k / 64;
        const int64_t share = next ? (lines + strips - 1) / strips : 0;
        kt_tiles(0, tiles + now->first * g->k, 16 * g->k, now->rows, w, w + block_bytes, steps, now->c.s32,
                 (const char *)next + now->first / KT_STRIP * share * g->k, share, between, last,
                 (KT_STRIP + steps - 1) / steps);
        return;
    }
#endif
    if (!next)
        next = w;
    for (int64_t i = 0; i < now->rows; i += KT_S8_ROWS) {
        const int n = (int)(now->rows - i < KT_S8_ROWS ? now->rows - i : KT_S8_ROWS);
        const int8_t *x[KT_S8_ROWS];
        int32_t sum[KT_S8_ROWS];
        for (int j = 0; j < n; j++) {
            const int64_t at = now->first + i + j, row = kt_row(g, at);
            x[j] = tiles ? tiles + at / 16 * 16 * g->k + at % 16 * 64 : (const int8_t *)g->x + row * g->ldx;
            sum[j] = g->meta[row].sum;
        }
        for (int b = 0; b < 2; b += KT_S8_BLOCKS)
            s8_rows(n, x, tiles ? 1024 : 64, w + b * block_bytes, b + KT_S8_BLOCKS < 2 ? w + block_bytes : next,
                    block_bytes, g->k, sum, (int32_t(*)[32])(&now->c.s32[i][16 * b]));
    }
}

/* y = fma(sum, w_scale * x_scale, bias); the weights' scales are the first 16 float32 of a scale block. */
KT_INLINE vf32 s8_value(const kt_strip *s, int64_t i, int64_t n, int64_t scale_bytes) {
    const kt_gemm *g = s->g;
    const int64_t block = s->block + n;
    const float x_scale = g->meta[kt_row(g, s->first + i)].scale;
    const vf32 w_scale = vf32_load((const float *)((const char *)g->scale + block * scale_bytes));
    const vf32 sum = vf32_from_vi32(vi32_load(s->c.s32[i] + KT_BLOCK * n));
    return vf32_fma(sum, vf32_mul(w_scale, vf32_set1(x_scale)), kt_bias(g, block));
}

#endif

/* The bf16 core: bfloat16 weights times bfloat16 activations in the order of AMX (table.h).
 *
 * A format gives the values of a line of two K; few rows use them at once, many share a decoded panel. */
#ifndef KT_GEMM_BF16_H
#define KT_GEMM_BF16_H

#include "gemm.h"

static int64_t bf16_row_bytes(int64_t k) { return kt_round_up(k, KT_KPAD) * sizeof(float); }
#ifdef KT_HAVE_TILES
static int64_t bf16_panel_bytes(int64_t k) { return kt_round_up(k, KT_KPAD) * 2; }
#else
static int64_t bf16_panel_bytes(int64_t k) { return bf16_row_bytes(k); }
#endif

KT_INLINE vf32 bf16_rounded(vf32 v) { return vi32_float(vi32_shl(kt_bf16_bits(v), 16)); }

KT_INLINE void bf16_quantize_as(const void *src, kt_dtype dtype, int64_t k, float *row) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    vi32 most = vi32_set1(0);
    for (int64_t i = 0; i < padded; i += 16) {
        const vf32 v = bf16_rounded(kt_load_tail(src, dtype, i, k));
        most = vi32_max(most, vi32_and(vf32_bits(v), vi32_set1(0x7fffffff)));
        vf32_store(row + i, v);
    }
    if (vi32_hmax(most) >= KT_NOT_FINITE)
        for (int64_t i = 0; i < padded; i += 16)
            vf32_store(row + i, vf32_set1(__builtin_nanf("")));
}

static void bf16_quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) {
    if (dtype == KT_F32)
        bf16_quantize_as(src, KT_F32, k, row);
    else if (dtype == KT_F16)
        bf16_quantize_as(src, KT_F16, k, row);
    else
        bf16_quantize_as(src, KT_BF16, k, row);
    *meta = (kt_meta){1.0f, 0};
}

static void bf16_tile(const void *row, int64_t k, int64_t r, void *tiles) {
    const float *x = row;
    const int64_t bytes = bf16_panel_bytes(32);
    char *p = (char *)tiles + r / 16 * 16 * bf16_panel_bytes(k) + r % 16 * (bytes / 2);
    for (int64_t i = 0; i < k; i += 32, p += 8 * bytes) {
        if (!row)
            memset(p, 0, (size_t)bytes / 2);
#ifdef KT_HAVE_TILES
        else
            for (int64_t j = 0; j < 32; j += 16)
                vi32_store_u16((uint16_t *)p + j, vi32_shr(vf32_bits(vf32_load(x + i + j)), 16));
#else
        else
            memcpy(p, x + i, (size_t)bytes / 2);
#endif
    }
}

/* Line j of 16 of block n of a strip at i: 16 rows of the bfloat16 values at k = i + 2 j (even) and the one after it
 * (odd), as float32. j is a compile-time constant: what several lines share is computed once. */
typedef void (*bf16_decode)(const kt_strip *now, int64_t n, int64_t i, int64_t j, vf32 *even, vf32 *odd);
/* The scales of its 16 rows for the group of K that begins at i. */
typedef vf32 (*bf16_scale)(const kt_strip *now, int64_t n, int64_t i);

KT_INLINE vf32 bf16_even(vi32 line) { return vi32_float(vi32_shl(line, 16)); }
KT_INLINE vf32 bf16_odd(vi32 line) { return vi32_float(vi32_and(line, vi32_set1((int32_t)0xffff0000))); }

/* Unrolled by force: gcc leaves a loop of two, and its accumulators in memory (half the speed). */
#define KT_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

/* Sums of a few rows x with block n. rows is a compile-time constant at each call: the accumulators live in registers.
 * With a group, the sum of each group of K is scaled before it is added. */
KT_INLINE void bf16_micro(int rows, const float *const *x, int64_t step, const kt_strip *now, int64_t n,
                          float (*c)[32], bf16_decode decode, int64_t group, bf16_scale scale) {
    const int64_t k = now->g->k;
    vf32 total[KT_BF16_ROWS], acc[KT_BF16_ROWS];
    KT_ROWS
        total[r] = acc[r] = vf32_set1(0.0f);
    for (int64_t i = 0, at = 0; i < k; i += 32, at += step) {
        vf32 even[KT_BF16_ROWS], odd[KT_BF16_ROWS];
        KT_ROWS
            even[r] = odd[r] = vf32_set1(0.0f);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            vf32 w_even, w_odd;
            decode(now, n, i, j, &w_even, &w_odd);
            KT_ROWS {
                even[r] = vf32_fma(w_even, vf32_set1(x[r][at + 2 * j]), even[r]);
                odd[r] = vf32_fma(w_odd, vf32_set1(x[r][at + 2 * j + 1]), odd[r]);
            }
        }
        KT_ROWS
            acc[r] = vf32_add(acc[r], vf32_add(even[r], odd[r]));
        if (group && ((i + 32) % group == 0 || i + 32 >= k)) {
            const vf32 s = scale(now, n, i / group * group);
            KT_ROWS {
                total[r] = vf32_fma(acc[r], s, total[r]);
                acc[r] = vf32_set1(0.0f);
            }
        }
    }
    KT_ROWS
        vf32_store(c[r], group ? total[r] : acc[r]);
}

/* The sums of a strip by vectors, rows where they lie or in tiles. */
KT_INLINE void bf16_vectors(const kt_strip *now, bf16_decode decode, int64_t group, bf16_scale scale) {
    const kt_gemm *g = now->g;
    const float *tiles = g->tiles;
    const int64_t step = tiles ? 512 : 32;
    for (int64_t i = 0, count; i < now->rows; i += count) {
        const float *x[KT_BF16_ROWS];
        const int64_t left = now->rows - i;
        count = left >= KT_BF16_ROWS ? KT_BF16_ROWS : left >= 2 ? 2 : 1;
        for (int64_t j = 0; j < count; j++) {
            const int64_t at = now->first + i + j;
            x[j] = tiles ? tiles + at / 16 * 16 * g->k + at % 16 * 32
                         : (const float *)((const char *)g->x + kt_row(g, at) * g->ldx);
        }
        for (int64_t n = 0; n < now->blocks; n++) {
            float(*c)[32] = (float(*)[32])(&now->c.f32[i][KT_BLOCK * n]);
            if (count == 1)
                bf16_micro(1, x, step, now, n, c, decode, group, scale);
            else if (count == 2)
                bf16_micro(2, x, step, now, n, c, decode, group, scale);
            else
                bf16_micro(KT_BF16_ROWS, x, step, now, n, c, decode, group, scale);
        }
    }
}

/* Blocks decoded for many rows: two, one after the other, in kt_gemm.work. */
KT_INLINE int64_t bf16_block_bytes(int64_t k) { return KT_BLOCK * 2 * k; }
KT_INLINE void bf16_from_panel(const kt_strip *now, int64_t n, int64_t i, int64_t j, vf32 *even, vf32 *odd) {
    const char *w = (const char *)now->g->work + n * bf16_block_bytes(now->g->k) + i * 32;
    const vi32 line = vi32_load((const int32_t *)(w + 64 * j));
    *even = bf16_even(line);
    *odd = bf16_odd(line);
}
KT_INLINE void bf16_fill_panel(const kt_gemm *g, int64_t block, int64_t blocks, bf16_decode decode) {
    const kt_strip now = {.g = g, .block = block};
    for (int64_t n = 0; n < blocks; n++)
        for (int64_t i = 0; i < g->k; i += 32) {
            char *w = (char *)g->work + n * bf16_block_bytes(g->k) + i * 32;
            vi32 lines[16];
#pragma GCC unroll 16
            for (int64_t j = 0; j < 16; j++) {
                vf32 even, odd;
                decode(&now, n, i, j, &even, &odd);
                lines[j] = vi32_or(vi32_shr(vf32_bits(even), 16), vf32_bits(odd));
            }
            /* Apart, since after a store the compiler would load scales and pointers again. */
#pragma GCC unroll 16
            for (int64_t j = 0; j < 16; j++)
                vi32_store((int32_t *)(w + 64 * j), lines[j]);
        }
}
/* Whether the rows of g share decoded blocks. */
KT_INLINE int bf16_shares(const kt_gemm *g) { return g->tiles || g->m > KT_FEW_ROWS; }

#ifdef KT_HAVE_TILES
/* The sums of a strip with the two blocks at w. next: what the thread reads next, next_bytes in all strips' steps. */
KT_INLINE void bf16_tiles(const kt_strip *now, const char *w, const char *next, int64_t next_bytes,
                          kt_between between, kt_strip *last, int64_t group, bf16_scale scale) {
    const kt_gemm *g = now->g;
    const char *x = (const char *)g->tiles + now->first * 2 * g->k;
    const char *w1 = w + (now->blocks == 2 ? bf16_block_bytes(g->k) : 0);
    const int64_t steps = g->k / 32, strips = (g->m + KT_STRIP - 1) / KT_STRIP;
    const int64_t share = next ? (next_bytes / 64 + strips * steps - 1) / (strips * steps) : 0;
    const int64_t rows = (KT_STRIP + steps - 1) / steps;
    next += now->first / KT_STRIP * steps * share * 64;
    if (!group) {
        kt_tiles(1, x, 32 * g->k, now->rows, w, w1, steps, now->c.s32, next, share, between, last, rows);
        return;
    }
    memset(now->c.f32, 0, KT_STRIP * 32 * sizeof(float));
    for (int64_t i = 0; i < g->k; i += group) {
        float part[KT_STRIP][32] __attribute__((aligned(64)));
        const int64_t some = (g->k - i < group ? g->k - i : group) / 32;
        kt_tiles(1, x + i * 32, 32 * g->k, now->rows, w + i * 32, w1 + i * 32, some, (int32_t(*)[32])part, next,
                 share, between, last, rows);
        next += some * share * 64;
        for (int64_t n = 0; n < 2; n++) {
            const vf32 s = scale(now, n < now->blocks ? n : 0, i);
            for (int64_t r = 0; r < now->rows; r++) {
                float *c = now->c.f32[r] + KT_BLOCK * n;
                vf32_store(c, vf32_fma(vf32_load(part[r] + KT_BLOCK * n), s, vf32_load(c)));
            }
        }
    }
}
#endif

/* A format of this core: its weights decoded by f_decode; f_group(k) and f_scale as of bf16_micro, or 0 and NULL. */
#define KT_BF16_PRODUCTS(f, group, scale, value) \
    static int64_t f##_work_bytes(int64_t k) { return 2 * bf16_block_bytes(kt_round_up(k, KT_KPAD)); } \
    static void f##_panel(const kt_gemm *g, int64_t block, int64_t blocks) { \
        if (bf16_shares(g)) \
            bf16_fill_panel(g, block, blocks, f##_decode); \
    } \
    static void f##_product(const kt_strip *now, kt_between between, kt_strip *last) { \
        bf16_decoded(now, f##_weight_bytes(now->g->k), between, last, f##_decode, group, scale); \
    } \
    KT_PRODUCTS(f, f##_panel, f##_product, value)

/* The sums of a strip of a format whose blocks of weights are `bytes` long. */
KT_INLINE void bf16_decoded(const kt_strip *now, int64_t bytes, kt_between between, kt_strip *last,
                            bf16_decode decode, int64_t group, bf16_scale scale) {
    const kt_gemm *g = now->g;
    if (!bf16_shares(g)) {
        bf16_vectors(now, decode, group, scale);
        return;
    }
#ifdef KT_HAVE_TILES
    if (g->tiles) {
        const char *next = now->block + 2 < now->end ? (const char *)g->weight + (now->block + 2) * bytes : g->next;
        bf16_tiles(now, g->work, next, 2 * bytes, between, last, group, scale);
        return;
    }
#endif
    bf16_vectors(now, bf16_from_panel, group, scale);
}

/* y = acc + bias */
KT_INLINE vf32 bf16_value(const kt_strip *s, int64_t i, int64_t n) {
    return vf32_add(vf32_load(s->c.f32[i] + KT_BLOCK * n), kt_bias(s->g, s->block + n));
}

#endif

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

/* Rows of values from 2^-KT_MODERATE up to 2^KT_MODERATE, or zero, have a sum of 1 in their kt_meta, others 0. */
#define KT_MODERATE 47

KT_INLINE int bf16_quantize_as(const void *src, kt_dtype dtype, int64_t k, float *row) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    vi32 most = vi32_set1(0), least = most; /* least: 2^31 less the bits of the smallest but zero */
    for (int64_t i = 0; i < padded; i += 16) {
        const vf32 v = bf16_rounded(kt_load_tail(src, dtype, i, k));
        const vi32 bits = vi32_and(vf32_bits(v), vi32_set1(0x7fffffff));
        most = vi32_max(most, bits);
        least = vi32_max(least, vi32_and(vi32_sub(vi32_set1(0), bits), vi32_set1(0x7fffffff)));
        vf32_store(row + i, v);
    }
    if (vi32_hmax(most) >= KT_NOT_FINITE)
        for (int64_t i = 0; i < padded; i += 16)
            vf32_store(row + i, vf32_set1(__builtin_nanf("")));
    const int64_t low = (127 - KT_MODERATE) << 23, high = (127 + KT_MODERATE) << 23;
    return vi32_hmax(most) < high && vi32_hmax(least) <= (INT64_C(1) << 31) - low;
}

static void bf16_quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) {
    meta->scale = 1.0f;
    if (dtype == KT_F32)
        meta->sum = bf16_quantize_as(src, KT_F32, k, row);
    else if (dtype == KT_F16)
        meta->sum = bf16_quantize_as(src, KT_F16, k, row);
    else
        meta->sum = bf16_quantize_as(src, KT_BF16, k, row);
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

/* Line j of 16 of block n of a strip at i: 16 rows of the bfloat16 values at k = i + 2 j (lower halves) and the one
 * after it. j and normal are compile-time constants: what several lines share is computed once. */
typedef vi32 (*bf16_decode)(const kt_strip *now, int64_t n, int64_t i, int64_t j, int normal);
/* Whether the 32 values of a block from i on are such that `normal` decodes them, which is less work. */
typedef int (*bf16_normal)(const kt_strip *now, int64_t n, int64_t i);
/* The scales of its 16 rows for the group of K that begins at i. */
typedef vf32 (*bf16_scale)(const kt_strip *now, int64_t n, int64_t i);

/* Up to so many rows at once take that way. */
#ifndef KT_NORMAL_ROWS
#define KT_NORMAL_ROWS KT_BF16_ROWS
#endif

/* How a format gives lines; compile-time constants at each call. */
typedef struct {
    bf16_decode line;
    bf16_normal normal; /* or NULL: there is one way */
    int64_t group;      /* of K, whose sum is scaled before it is added; or 0 */
    bf16_scale scale;
} bf16_codes;

KT_INLINE vf32 bf16_even(vi32 line) { return vi32_float(vi32_shl(line, 16)); }
KT_INLINE vf32 bf16_odd(vi32 line) { return vi32_float(vi32_and(line, vi32_set1((int32_t)0xffff0000))); }

/* Unrolled by force: gcc leaves a loop of two, and its accumulators in memory (half the speed). */
#define KT_UNROLL _Pragma("GCC unroll 8")
#define KT_EACH \
    KT_UNROLL for (int r = 0; r < rows; r++) \
        KT_UNROLL for (int b = 0; b < blocks; b++)

/* Where a strip's blocks lie, of which 32 values of K take `each` bytes, and where those that are read next and their
 * scales, scale_bytes a block and about scale_each for 32 values of K; 0: nothing to fetch. */
typedef struct {
    const char *w, *next, *next_scale;
    int64_t each, scale_bytes, scale_each;
} bf16_stream;

/* That of a strip's stored weights. */
KT_INLINE bf16_stream bf16_stored(const kt_strip *now, int64_t each, int64_t scale_bytes, int64_t scale_each) {
    const kt_gemm *g = now->g;
    const int64_t bytes = g->k / 32 * each;
    const char *w = (const char *)g->weight + now->block * bytes, *next = g->next, *next_scale = g->next_scale;
    if (now->block + 2 < now->end) {
        next = w + 2 * bytes;
        next_scale = (const char *)g->scale + (now->block + 2) * scale_bytes;
    }
    return (bf16_stream){w, next, next_scale, each, scale_bytes, scale_each};
}

/* Adds the products of 32 values of K from i on, those of x at `at`, to two chains each of rows and blocks. */
KT_INLINE void bf16_step(int rows, int blocks, int normal, const float *const *x, int64_t at, const kt_strip *now,
                         int64_t n, int64_t i, int64_t each, const char *fetch, int64_t bytes, bf16_decode line,
                         vf32 (*even)[KT_BF16_BLOCKS], vf32 (*odd)[KT_BF16_BLOCKS]) {
    const int lines = rows > 1 ? KT_BF16_LINES : 1;
    const char *ahead[KT_BF16_BLOCKS];
    KT_UNROLL for (int b = 0; b < blocks; b++) {
        ahead[b] = fetch + b * bytes;
        /* gcc would compute the addresses of both ways before they part, more than there are registers for. */
        __asm__("" : "+r"(ahead[b]));
    }
#pragma GCC unroll 16
    for (int first = 0; first < 16; first += lines) {
        vi32 w[KT_BF16_LINES][KT_BF16_BLOCKS];
#pragma GCC unroll 16
        for (int j = first; j < first + lines; j++) {
            KT_UNROLL for (int b = 0; b < blocks; b++)
                w[j - first][b] = line(now, n + b, i, j, normal);
            if (each && j * each % 1024 == 0) {
                KT_UNROLL for (int b = 0; b < blocks; b++)
                    KT_PREFETCH(ahead[b] + j * each / 16);
                __asm__ volatile(""); /* or all would go first, and what is needed now would wait for them */
            }
        }
#pragma GCC unroll 16
        for (int j = first; j < first + lines; j++)
            KT_EACH {
                const vi32 v = w[j - first][b];
                even[r][b] = vf32_fma(bf16_even(v), vf32_set1(x[r][at + 2 * j]), even[r][b]);
                odd[r][b] = vf32_fma(bf16_odd(v), vf32_set1(x[r][at + 2 * j + 1]), odd[r][b]);
            }
    }
}

/* Sums of a few rows x with a block or two, from block n on. rows and blocks are compile-time constants at each call:
 * the accumulators live in registers. Two blocks double the chains of fma of one row (-8 % for 8-bit codes at one token
 * with AMX). */
KT_INLINE void bf16_micro(int rows, int blocks, const float *const *x, int64_t step, const kt_strip *now, int64_t n,
                          bf16_stream stream, float (*c)[32], bf16_codes f) {
    const int64_t k = now->g->k, each = stream.each, bytes = k / 32 * each;
    const char *w = stream.w + n * bytes, *next = n + blocks < now->blocks ? w + blocks * bytes : stream.next;
    vf32 total[KT_BF16_ROWS][KT_BF16_BLOCKS], acc[KT_BF16_ROWS][KT_BF16_BLOCKS];
    KT_EACH
        total[r][b] = acc[r][b] = vf32_set1(0.0f);
    for (int64_t i = 0, at = 0; i < k; i += 32, at += step) {
        vf32 even[KT_BF16_ROWS][KT_BF16_BLOCKS], odd[KT_BF16_ROWS][KT_BF16_BLOCKS];
        KT_EACH
            even[r][b] = odd[r][b] = vf32_set1(0.0f);
        const int64_t ahead = i / 32 * each + KT_AHEAD;
        const char *fetch = ahead < bytes ? w + ahead : next + (ahead - bytes);
        if (stream.scale_each)
            KT_UNROLL for (int b = 0; b < blocks; b++)
                KT_PREFETCH(stream.next_scale + (n + b) * stream.scale_bytes + i / 32 * stream.scale_each);
        if (rows <= KT_NORMAL_ROWS && f.normal && f.normal(now, n, i) && (blocks == 1 || f.normal(now, n + 1, i)))
            bf16_step(rows, blocks, 1, x, at, now, n, i, each, fetch, bytes, f.line, even, odd);
        else
            bf16_step(rows, blocks, 0, x, at, now, n, i, each, fetch, bytes, f.line, even, odd);
        KT_EACH
            acc[r][b] = vf32_add(acc[r][b], vf32_add(even[r][b], odd[r][b]));
        if (f.group && ((i + 32) % f.group == 0 || i + 32 >= k)) {
            vf32 s[KT_BF16_BLOCKS];
            KT_UNROLL for (int b = 0; b < blocks; b++)
                s[b] = f.scale(now, n + b, i / f.group * f.group);
            KT_EACH {
                total[r][b] = vf32_fma(acc[r][b], s[b], total[r][b]);
                acc[r][b] = vf32_set1(0.0f);
            }
        }
    }
    KT_EACH
        vf32_store(c[r] + KT_BLOCK * b, f.group ? total[r][b] : acc[r][b]);
}

/* The sums of a strip by vectors, rows where they lie or in tiles. */
KT_INLINE void bf16_vectors(const kt_strip *now, bf16_stream stream, bf16_codes f) {
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
        bf16_stream s = stream;
        if (i + count < now->rows || !s.next)
            s.next = s.w;
        if (!s.next_scale)
            s.next_scale = s.w;
        if (KT_BF16_BLOCKS > 1 && count == 1 && now->blocks == KT_BF16_BLOCKS) {
            bf16_micro(1, KT_BF16_BLOCKS, x, step, now, 0, s, &now->c.f32[i], f);
            continue;
        }
        for (int64_t n = 0; n < now->blocks; n++) {
            float(*c)[32] = (float(*)[32])(&now->c.f32[i][KT_BLOCK * n]);
            if (count == 1)
                bf16_micro(1, 1, x, step, now, n, s, c, f);
            else if (count == 2)
                bf16_micro(2, 1, x, step, now, n, s, c, f);
            else
                bf16_micro(KT_BF16_ROWS, 1, x, step, now, n, s, c, f);
        }
    }
}

/* Blocks decoded for many rows: two, one after the other, in kt_gemm.work. */
KT_INLINE int64_t bf16_block_bytes(int64_t k) { return KT_BLOCK * 2 * k; }
KT_INLINE vi32 bf16_from_panel(const kt_strip *now, int64_t n, int64_t i, int64_t j, int normal) {
    const char *w = (const char *)now->g->work + n * bf16_block_bytes(now->g->k) + i * 32;
    return vi32_load((const int32_t *)(w + 64 * j));
}
/* A line of the core from its values, of which the lower halves are zero. */
KT_INLINE vi32 bf16_joined(vf32 even, vf32 odd) { return vi32_or(vi32_shr(vf32_bits(even), 16), vf32_bits(odd)); }
/* The lines of 32 values of K of a panel, to w: the expression `line` of j makes one, all of them from `each` bytes at
 * from. KT_PANEL_LINES come before they are stored: after a store the compiler would load scales and pointers again. */
#define KT_PANEL_STEP(w, from, each, line) \
    KT_UNROLL for (int64_t first = 0; first < 16; first += KT_PANEL_LINES) { \
        vi32 lines[KT_PANEL_LINES]; \
        KT_UNROLL for (int64_t j = first; j < first + KT_PANEL_LINES; j++) { \
            if (j * each % 1024 == 0) \
                KT_PREFETCH(from + KT_AHEAD + j * each / 16); \
            lines[j - first] = line; \
        } \
        KT_UNROLL for (int64_t j = first; j < first + KT_PANEL_LINES; j++) \
            vi32_store((int32_t *)(w + 64 * j), lines[j - first]); \
    }
KT_INLINE void bf16_fill_panel(const kt_gemm *g, int64_t block, int64_t blocks, int64_t each, int64_t scale_bytes,
                               int64_t scale_each, bf16_codes f) {
    const kt_strip now = {.g = g, .block = block};
    const char *from = (const char *)g->weight + block * (g->k / 32 * each);
    for (int64_t n = 0; n < blocks; n++)
        for (int64_t i = 0; i < g->k; i += 32, from += each) {
            char *w = (char *)g->work + n * bf16_block_bytes(g->k) + i * 32;
            if (scale_each)
                KT_PREFETCH((const char *)g->scale + (block + n) * scale_bytes + i / 32 * scale_each);
            if (f.normal && f.normal(&now, n, i))
                KT_PANEL_STEP(w, from, each, f.line(&now, n, i, j, 1))
            else
                KT_PANEL_STEP(w, from, each, f.line(&now, n, i, j, 0))
        }
}

#ifdef KT_HAVE_TILES
/* Adds the sums of one or two groups from i on to those of a strip. Two at once, since c is loaded and stored as often
 * as tiles are (-13 % with groups of 32, from L2; four leave too little of L1 and lose). */
KT_INLINE void bf16_add_groups(int groups, const kt_strip *now, float (*part)[KT_STRIP][32], int64_t i, int64_t group,
                               bf16_scale scale) {
    /* Copies: what a store of c might change would be loaded again for each row. */
    float(*const c)[32] = now->c.f32;
    const int64_t rows = now->rows, blocks = now->blocks;
    for (int64_t n = 0; n < blocks; n++) {
        vf32 s[2];
        for (int p = 0; p < groups; p++)
            s[p] = scale(now, n, i + p * group);
#pragma GCC unroll 4
        for (int64_t r = 0; r < rows; r++) {
            vf32 sum = vf32_load(c[r] + KT_BLOCK * n);
            for (int p = 0; p < groups; p++)
                sum = vf32_fma(vf32_load(part[p][r] + KT_BLOCK * n), s[p], sum);
            vf32_store(c[r] + KT_BLOCK * n, sum);
        }
    }
}

/* The sums of a strip with the two blocks at w. next: what the thread reads next, next_bytes in all strips' steps. */
KT_INLINE void bf16_tiles(const kt_strip *now, const char *w, const char *next, int64_t next_bytes,
                          kt_between between, kt_strip *last, int64_t group, bf16_scale scale) {
    const kt_gemm *g = now->g;
    const char *x = (const char *)g->tiles + now->first * 2 * g->k;
    const char *w1 = w + (now->blocks == 2 ? bf16_block_bytes(g->k) : 0);
    const int64_t steps = g->k / 32, strips = (g->m + KT_STRIP - 1) / KT_STRIP;
    const int64_t share = next ? (next_bytes / 64 + strips * steps - 1) / (strips * steps) : 0;
    const int64_t passes = group ? (g->k + 2 * group - 1) / (2 * group) : steps;
    const int64_t rows = (KT_STRIP + passes - 1) / passes;
    next += now->first / KT_STRIP * steps * share * 64;
    if (!group) {
        kt_tiles(1, x, 32 * g->k, now->rows, w, w1, steps, now->c.s32, next, share, between, last, rows);
        return;
    }
    memset(now->c.f32, 0, KT_STRIP * sizeof *now->c.f32);
    for (int64_t i = 0; i < g->k; i += 2 * group) {
        float part[2][KT_STRIP][32] __attribute__((aligned(64)));
        const int groups = i + group < g->k ? 2 : 1;
        for (int64_t p = 0, at = i; p < groups; p++, at += group) {
            const int64_t some = (g->k - at < group ? g->k - at : group) / 32;
            kt_tiles(1, x + at * 32, 32 * g->k, now->rows, w + at * 32, w1 + at * 32, some, (int32_t(*)[32])part[p],
                     next, share, NULL, NULL, 0);
            next += some * share * 64;
        }
        between(last, rows);
        if (groups == 2)
            bf16_add_groups(2, now, part, i, group, scale);
        else
            bf16_add_groups(1, now, part, i, group, scale);
    }
}
#endif

typedef void (*bf16_few)(const kt_strip *now, bf16_stream stream, bf16_codes f);

/* A format of this core. few: bf16_vectors, or what gives the same sums of few rows. */
#define KT_BF16_PRODUCTS(f, codes, few, value) \
    static int64_t f##_work_bytes(int64_t k) { return 2 * bf16_block_bytes(kt_round_up(k, KT_KPAD)); } \
    static void f##_panel(const kt_gemm *g, int64_t block, int64_t blocks) { \
        if (g->tiles) \
            bf16_fill_panel(g, block, blocks, f##_weight_bytes(64) / 2, f##_scale_bytes(g->k), \
                             f##_scale_bytes(1024) / 32, codes); \
    } \
    static void f##_product(const kt_strip *now, kt_between between, kt_strip *last) { \
        const bf16_stream stream = bf16_stored(now, f##_weight_bytes(64) / 2, f##_scale_bytes(now->g->k), \
                                               f##_scale_bytes(1024) / 32); \
        bf16_decoded(now, stream, between, last, codes, few); \
    } \
    KT_PRODUCTS(f, f##_panel, f##_product, value)

/* The sums of a strip of a format whose weights are at stream. */
KT_INLINE void bf16_decoded(const kt_strip *now, bf16_stream stream, kt_between between, kt_strip *last,
                            bf16_codes f, bf16_few few) {
    const kt_gemm *g = now->g;
    if (!g->tiles) {
        few(now, stream, f);
        return;
    }
#ifdef KT_HAVE_TILES
    bf16_tiles(now, g->work, stream.next, g->k / 16 * stream.each, between, last, f.group, f.scale);
#else
    f.line = bf16_from_panel;
    f.normal = NULL;
    bf16_vectors(now, (bf16_stream){.w = g->work}, f);
#endif
}

/* y = acc + bias */
KT_INLINE vf32 bf16_value(const kt_strip *s, int64_t i, int64_t n) {
    return vf32_add(vf32_load(s->c.f32[i] + KT_BLOCK * n), kt_bias(s->g, s->block + n));
}

#endif

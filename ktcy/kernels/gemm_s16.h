/* The int16 core: integer codes times activations that are integers of 16 bits in units of their group (table.h).
 *
 * The sum of a group is exact in int32 and in float32 too: AMX takes it of many rows in the bf16 core's tiles, all else
 * multiplies words. */
#ifndef KT_GEMM_S16_H
#define KT_GEMM_S16_H

#include "gemm_bf16.h"

/* Of a group of a row: what one of its integers is worth, and their sum. */
typedef struct {
    float unit;
    int32_t sum;
} s16_group;

/* Groups below are zero and rows that reach KT_S16_HUGE are NaN: no sum overflows or is lost below the normal numbers
 * in tiles, which could not happen to integers. */
#define KT_S16_TINY (127 - 100)
#define KT_S16_HUGE (127 + 112)

KT_INLINE int64_t s16_groups(int64_t k, int64_t group) { return (k + group - 1) / group; }
KT_INLINE const s16_group *s16_of(const void *row, int64_t k) { return (const s16_group *)((const int16_t *)row + k); }
/* Of the integers and groups, k padded; and of the whole row. */
KT_INLINE int64_t s16_whole(int64_t k, int64_t group) {
    return kt_round_up(2 * k + s16_groups(k, group) * (int64_t)sizeof(s16_group), 64);
}
KT_INLINE int64_t s16_bytes(int64_t k, int64_t group) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
#ifdef KT_HAVE_DOT_S8
    return s16_whole(padded, group) + 2 * padded;
#else
    return s16_whole(padded, group);
#endif
}

/* Integers below 2^bits. The sum in meta: as of KT_MODERATE, for the largest values of groups. */
KT_INLINE void s16_quantize_as(const void *src, kt_dtype dtype, int64_t k, int64_t group, int bits, int16_t *row,
                               kt_meta *meta) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    s16_group *of = (s16_group *)(row + padded);
    int moderate = 1;
    for (int64_t start = 0; start < padded; start += group, of++) {
        const int64_t end = start + group < padded ? start + group : padded;
        vi32 most = vi32_set1(0), sum = vi32_set1(0);
        for (int64_t i = start; i < end; i += 16)
            most = vi32_max(most, vi32_and(vf32_bits(bf16_rounded(kt_load_tail(src, dtype, i, k))),
                                           vi32_set1(0x7fffffff)));
        const int32_t exponent = vi32_hmax(most) >> 23;
        if (exponent >= KT_S16_HUGE) {
            memset(row, 0, (size_t)padded * sizeof *row);
            for (int64_t g = 0; g < s16_groups(padded, group); g++)
                ((s16_group *)(row + padded))[g] = (s16_group){__builtin_nanf(""), 0};
            return;
        }
        if (exponent < KT_S16_TINY) {
            memset(row + start, 0, (size_t)(end - start) * sizeof *row);
            *of = (s16_group){0.0f, 0};
            continue;
        }
        moderate &= exponent >= 127 - KT_MODERATE && exponent < 127 + KT_MODERATE;
        const vf32 inverse = vi32_float(vi32_set1((2 * 127 + bits - 1 - exponent) << 23));
        for (int64_t i = start; i < end; i += 16) {
            const vi32 v = vi32_from_vf32(vf32_mul(bf16_rounded(kt_load_tail(src, dtype, i, k)), inverse));
            sum = vi32_add(sum, v);
            vi32_store_u16((uint16_t *)row + i, vi32_and(v, vi32_set1(0xffff)));
        }
        const int32_t unit = (exponent - bits + 1) << 23;
        memcpy(&of->unit, &unit, sizeof unit);
        of->sum = vi32_hsum(sum);
    }
    meta->sum = moderate;
}

KT_INLINE void s16_quantize(const void *src, kt_dtype dtype, int64_t k, int64_t group, int bits, void *row,
                            kt_meta *meta) {
    *meta = (kt_meta){1.0f, 0};
    if (dtype == KT_F32)
        s16_quantize_as(src, KT_F32, k, group, bits, row, meta);
    else if (dtype == KT_F16)
        s16_quantize_as(src, KT_F16, k, group, bits, row, meta);
    else
        s16_quantize_as(src, KT_BF16, k, group, bits, row, meta);
#ifdef KT_HAVE_DOT_S8
    const int64_t padded = kt_round_up(k, KT_KPAD);
    char *split = (char *)row + s16_whole(padded, group);
    for (int64_t i = 0; i < padded; i += 32)
        vi32_store((int32_t *)(split + 2 * i), vi16_split((const int16_t *)row + i, bits > 12));
#endif
}

/* Sixteen values of a group. */
KT_INLINE vf32 s16_values(const int16_t *q, s16_group of) {
    return vf32_mul(vf32_from_vi32(vi32_load_s16(q)), vf32_set1(of.unit));
}

#ifdef KT_HAVE_TILES
/* As the bf16 core's. */
KT_INLINE void s16_tile(const void *row, int64_t k, int64_t group, int64_t r, void *tiles) {
    char *p = (char *)tiles + r / 16 * 16 * bf16_panel_bytes(k) + r % 16 * 64;
    for (int64_t i = 0; i < k; i += 32, p += 1024)
        for (int64_t j = 0; j < 32; j += 16) {
            const vf32 v = row ? s16_values((const int16_t *)row + i + j, s16_of(row, k)[i / group]) : vf32_set1(0.0f);
            vi32_store_u16((uint16_t *)p + j, vi32_shr(vf32_bits(v), 16));
        }
}
KT_INLINE int64_t s16_panel_bytes(int64_t k, int64_t group) { return bf16_panel_bytes(k); }
#else
/* 16 x 32 integers, then the groups of each of the 16 rows. */
KT_INLINE int64_t s16_panel_bytes(int64_t k, int64_t group) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    return 2 * padded + s16_groups(padded, group) * (int64_t)sizeof(s16_group);
}
KT_INLINE void s16_tile(const void *row, int64_t k, int64_t group, int64_t r, void *tiles) {
    const int64_t groups = s16_groups(k, group) * (int64_t)sizeof(s16_group);
    char *tile = (char *)tiles + r / 16 * 16 * s16_panel_bytes(k, group);
    char *p = tile + r % 16 * 64, *of = tile + 32 * k + r % 16 * groups;
    for (int64_t i = 0; i < k; i += 32, p += 1024)
        if (row)
            memcpy(p, (const int16_t *)row + i, 64);
        else
            memset(p, 0, 64);
    if (row)
        memcpy(of, s16_of(row, k), (size_t)groups);
    else
        memset(of, 0, (size_t)groups);
}
#endif

#define KT_S16_ROWS(name, group, bits) \
    static int64_t name##_row_bytes(int64_t k) { return s16_bytes(k, group); } \
    static void name##_quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) { \
        s16_quantize(src, dtype, k, group, bits, row, meta); \
    } \
    static int64_t name##_panel_bytes(int64_t k) { return s16_panel_bytes(k, group); } \
    static void name##_tile(const void *row, int64_t k, int64_t r, void *tiles) { s16_tile(row, k, group, r, tiles); }
KT_S16_ROWS(g32b15, 32, 15)
KT_S16_ROWS(g32b12, 32, 12)
KT_S16_ROWS(g64b14, 64, 14)
KT_S16_ROWS(g128b13, 128, 13)
KT_S16_ROWS(g32b14, 32, 14)

/* How a format gives words; compile-time constants at each call. w: the codes of a block from a multiple of 32 values
 * of K on; of: its scales; group: a group's number, of `groups`. */
typedef struct {
    int64_t group;
    int bits; /* of a field of words */
    int32_t zero; /* what is to be taken off every code */
    /* Codes of 16 rows at k = 2 j (lower halves) and the one after it, j < 16; in place: at bit
     * j % (16 / bits) * bits but for the uppermost field. */
    vi32 (*words)(const char *w, int64_t j, int in_place);
    /* Bytes without sign: codes of 16 rows at four k, j < 8, as a word of a row (table.h) has them; in place: those of
     * an odd j times 16. What is to be taken off, and how many bits lower their values are than those of words. NULL
     * where no instruction multiplies them. */
    vi32 (*bytes)(const char *w, int64_t j, int in_place);
    int32_t offset;
    unsigned lower;
    vf32 (*scale)(const char *of, int64_t group);
    vf32 (*zeros)(const char *of, int64_t group, int64_t groups); /* or NULL: zero points */
} s16_codes;

/* Rows of x: their integers, `step` from one 32 values of K to the next, and their groups. */
typedef struct {
    const int16_t *q[KT_S16_TILE_ROWS];
    const s16_group *of[KT_S16_TILE_ROWS];
    int64_t step;
} s16_rows;

/* Row i of g as row j of x. */
KT_INLINE void s16_take(s16_rows *x, int64_t j, const kt_gemm *g, int64_t i, int64_t group) {
#ifndef KT_HAVE_TILES
    if (g->tiles) {
        const char *tile = (const char *)g->tiles + i / 16 * 16 * s16_panel_bytes(g->k, group);
        x->q[j] = (const int16_t *)tile + i % 16 * 32;
        x->of[j] = (const s16_group *)(tile + 32 * g->k) + i % 16 * s16_groups(g->k, group);
        x->step = 16 * 32;
        return;
    }
#endif
    x->q[j] = (const int16_t *)((const char *)g->x + kt_row(g, i) * g->ldx);
    x->of[j] = s16_of(x->q[j], g->k);
    x->step = 32;
}

/* The scales and zero points of a group of one or two blocks. */
typedef struct {
    vf32 scale[2], zeros[2];
} s16_factors;

KT_INLINE s16_factors s16_factors_of(int blocks, const char *of, int64_t scale_bytes, int64_t group, int64_t groups,
                                     s16_codes f) {
    s16_factors factors;
    KT_UNROLL for (int b = 0; b < blocks; b++) {
        factors.scale[b] = f.scale(of + b * scale_bytes, group);
        if (f.zeros)
            factors.zeros[b] = f.zeros(of + b * scale_bytes, group, groups);
    }
    return factors;
}

/* Adds the sum of a group, the first or a later one, to those before. */
KT_INLINE void s16_join(float *to, int later, vi32 group_sum, s16_group x, const s16_factors *factors, int b,
                        s16_codes f) {
    vf32 sum = vf32_from_vi32(group_sum);
    if (f.zeros)
        sum = vf32_fma(factors->zeros[b], vf32_set1(-(float)x.sum), sum);
    vf32_store(to, vf32_fma(vf32_mul(sum, vf32_set1(x.unit)), factors->scale[b],
                            later ? vf32_load(to) : vf32_set1(0.0f)));
}

/* What 32 values of one or two blocks at w, whose later ones are `left` bytes, ask to be fetched: scales, and the
 * place of the weights. */
KT_INLINE const char *s16_fetch(int blocks, const bf16_stream *next, const char *w, int64_t left, const char *next_of,
                                int64_t scale_bytes) {
    KT_UNROLL for (int b = 0; b < blocks; b++)
        KT_PREFETCH(next_of + b * scale_bytes);
    return KT_AHEAD < left ? w + KT_AHEAD : next->next + (KT_AHEAD - left);
}

/* Sums of rows with a block or two at w, whose scales are at of; scale_bytes from one block's to the next. For one row
 * a field of words has its own sum: to mask it is less work than to shift it too. next: as of bf16_stream, or NULL. */
KT_INLINE void s16_micro(int rows, int blocks, s16_rows x, int64_t k, const char *w, int64_t each, const char *of,
                         int64_t scale_bytes, const bf16_stream *next, float (*c)[32], s16_codes f) {
    const int64_t bytes = k / 32 * each, groups = s16_groups(k, f.group);
    const char *next_of = next ? next->next_scale : NULL;
    const int fields = rows == 1 ? 16 / f.bits : 1;
    int64_t left = bytes;
    for (int64_t g = 0, i = 0, at = 0; g < groups; g++) {
        vi32 acc[KT_S16_TILE_ROWS][2][4];
        KT_EACH {
            acc[r][b][0] = vi32_set1(-f.zero * x.of[r][g].sum);
            KT_UNROLL for (int p = 1; p < fields; p++)
                acc[r][b][p] = vi32_set1(0);
        }
        for (int64_t part = 0; part < f.group && i < k; part += 32, i += 32, at += x.step, w += each, left -= each) {
            const char *fetch = NULL;
            if (next) {
                fetch = s16_fetch(blocks, next, w, left, next_of, scale_bytes);
                next_of += next->scale_each;
            }
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                vi32 words[2];
                KT_UNROLL for (int b = 0; b < blocks; b++)
                    words[b] = f.words(w + b * bytes, j, rows == 1);
                if (next && j * each % 1024 == 0)
                    KT_UNROLL for (int b = 0; b < blocks; b++)
                        KT_PREFETCH(fetch + b * bytes + j * each / 16);
                KT_EACH {
                    int32_t two;
                    memcpy(&two, x.q[r] + at + 2 * j, sizeof two);
                    acc[r][b][j % fields] = vi32_dot_s16(acc[r][b][j % fields], words[b], two);
                }
            }
        }
        const s16_factors factors = s16_factors_of(blocks, of, scale_bytes, g, groups, f);
        KT_EACH {
            KT_UNROLL for (int p = 1; p < fields; p++)
                acc[r][b][0] = vi32_add(acc[r][b][0], p + 1 < fields ? vi32_sar(acc[r][b][p], (unsigned)(p * f.bits))
                                                                     : acc[r][b][p]);
            s16_join(c[r] + KT_BLOCK * b, g > 0, acc[r][b][0], x.of[r][g], &factors, b, f);
        }
    }
}

#ifdef KT_HAVE_DOT_S8
/* The same sums from rows as bytes: one instruction has four products, of codes that take half as much work to unpack.
 * For one row odd vectors have their own sums, in place if codes have 4 bits. */
KT_INLINE void s16_split_micro(int rows, int blocks, s16_rows x, int64_t k, const char *w, int64_t each,
                               const char *of, int64_t scale_bytes, const bf16_stream *next, float (*c)[32],
                               s16_codes f) {
    const int64_t bytes = k / 32 * each, groups = s16_groups(k, f.group);
    const char *next_of = next->next_scale;
    const int parts = rows == 1 ? 2 : 1, in_place = rows == 1 && f.bits == 4;
    int64_t left = bytes;
    for (int64_t g = 0, i = 0; g < groups; g++) {
        vi32 high[KT_S16_FEW_ROWS][2][2], low[KT_S16_FEW_ROWS][2][2];
        KT_EACH {
            high[r][b][0] = high[r][b][1] = low[r][b][1] = vi32_set1(0);
            low[r][b][0] = vi32_set1(f.offset * x.of[r][g].sum);
        }
        for (int64_t part = 0; part < f.group && i < k; part += 32, i += 32, w += each, left -= each) {
            const char *fetch = s16_fetch(blocks, next, w, left, next_of, scale_bytes);
            next_of += next->scale_each;
            KT_UNROLL for (int j = 0; j < 8; j++) {
                vi32 codes[2];
                KT_UNROLL for (int b = 0; b < blocks; b++)
                    codes[b] = f.bytes(w + b * bytes, j, in_place);
                if (j * each % 512 == 0)
                    KT_UNROLL for (int b = 0; b < blocks; b++)
                        KT_PREFETCH(fetch + b * bytes + j * each / 8);
                KT_EACH {
                    int32_t upper, lower;
                    memcpy(&upper, x.q[r] + i + 4 * j, sizeof upper);
                    memcpy(&lower, x.q[r] + i + 4 * j + 2, sizeof lower);
                    high[r][b][j % parts] = vi32_dot_s8(high[r][b][j % parts], codes[b], upper);
                    low[r][b][j % parts] = vi32_dot_s8(low[r][b][j % parts], codes[b], lower);
                }
            }
        }
        const s16_factors factors = s16_factors_of(blocks, of, scale_bytes, g, groups, f);
        KT_EACH {
            vi32 upper = high[r][b][0], lower = low[r][b][0];
            if (parts == 2) {
                upper = vi32_add(upper, in_place ? vi32_sar(high[r][b][1], 4) : high[r][b][1]);
                lower = vi32_add(lower, in_place ? vi32_sar(low[r][b][1], 4) : low[r][b][1]);
            }
            const vi32 sum = vi32_sub(vi32_shl(upper, 8), lower);
            s16_join(c[r] + KT_BLOCK * b, g > 0, f.lower ? vi32_shl(sum, f.lower) : sum, x.of[r][g], &factors, b, f);
        }
    }
}
#endif

/* Few rows where they lie. */
KT_INLINE void s16_few(int rows, int blocks, s16_rows x, int64_t k, const char *w, int64_t each, const char *of,
                       int64_t scale_bytes, const bf16_stream *next, float (*c)[32], s16_codes f) {
#ifdef KT_HAVE_DOT_S8
    KT_UNROLL for (int r = 0; r < rows; r++)
        x.q[r] = (const int16_t *)((const char *)x.q[r] + s16_whole(k, f.group));
    s16_split_micro(rows, blocks, x, k, w, each, of, scale_bytes, next, c, f);
#else
    s16_micro(rows, blocks, x, k, w, each, of, scale_bytes, next, c, f);
#endif
}

/* The sums of a strip from rows where they lie. */
KT_INLINE void s16_vectors(const kt_strip *now, bf16_stream stream, s16_codes f) {
    const kt_gemm *g = now->g;
    const int64_t k = g->k, bytes = k / 32 * stream.each;
    for (int64_t i = 0, count; i < now->rows; i += count) {
        const int64_t left = now->rows - i;
        s16_rows x;
        count = left >= KT_S16_FEW_ROWS ? KT_S16_FEW_ROWS : left >= 2 ? 2 : 1;
        for (int64_t j = 0; j < count; j++)
            s16_take(&x, j, g, now->first + i + j, f.group);
        bf16_stream s = stream;
        if (i + count < now->rows || !s.next)
            s.next = s.w;
        if (!s.next_scale)
            s.next_scale = s.w;
        const int64_t together = count == 1 && now->blocks == KT_BF16_BLOCKS ? KT_BF16_BLOCKS : 1;
        for (int64_t n = 0; n < now->blocks; n += together) {
            const char *w = stream.w + n * bytes, *of = (const char *)g->scale + (now->block + n) * s.scale_bytes;
            float(*c)[32] = (float(*)[32])(&now->c.f32[i][KT_BLOCK * n]);
            bf16_stream next = s;
            if (n + together < now->blocks)
                next.next = w + bytes;
            next.next_scale += n * s.scale_bytes;
            if (KT_BF16_BLOCKS > 1 && together > 1)
                s16_few(1, KT_BF16_BLOCKS, x, k, w, s.each, of, s.scale_bytes, &next, c, f);
            else if (count == 1)
                s16_few(1, 1, x, k, w, s.each, of, s.scale_bytes, &next, c, f);
            else if (count == 2)
                s16_few(2, 1, x, k, w, s.each, of, s.scale_bytes, &next, c, f);
            else
                s16_few(KT_S16_FEW_ROWS, 1, x, k, w, s.each, of, s.scale_bytes, &next, c, f);
        }
    }
}

/* A line of a panel from words, codes less their zero points: bfloat16 for tiles, else as they are. */
KT_INLINE vi32 s16_line(vi32 words, int bits) {
#ifdef KT_HAVE_TILES
    if (bits == 4)
        return vi16_bf16(words);
    const vf32 even = vf32_from_vi32(vi32_sar(vi32_shl(words, 16), 16)), odd = vf32_from_vi32(vi32_sar(words, 16));
    return bf16_joined(even, odd);
#else
    return words;
#endif
}
/* As bf16_fill_panel. */
KT_INLINE void s16_fill_panel(const kt_gemm *g, int64_t block, int64_t blocks, int64_t each, int64_t scale_bytes,
                              int64_t scale_each, s16_codes f) {
    const int64_t groups = s16_groups(g->k, f.group);
    const char *from = (const char *)g->weight + block * (g->k / 32 * each);
    for (int64_t n = 0; n < blocks; n++) {
        const char *of = (const char *)g->scale + (block + n) * scale_bytes;
        for (int64_t i = 0; i < g->k; i += 32, from += each) {
            char *w = (char *)g->work + n * bf16_block_bytes(g->k) + i * 32;
            vi32 zero = vi32_set1(0x10001 * f.zero);
            if (f.zeros) {
                zero = vi32_from_vf32(f.zeros(of, i / f.group, groups));
                zero = vi32_or(zero, vi32_shl(zero, 16));
            }
            KT_PREFETCH(of + i / 32 * scale_each);
            KT_PANEL_STEP(w, from, each, s16_line(vi16_sub(f.words(from, j, 0), zero), f.bits))
        }
    }
}

#ifndef KT_HAVE_TILES
KT_INLINE vi32 s16_panel_words(const char *w, int64_t j, int in_place) {
    return vi32_load((const int32_t *)(w + 64 * j));
}
/* The sums of a strip from tiles and a panel. Tiles are whole: what lies past the rows gives sums that nobody reads. */
KT_INLINE void s16_from_panel(const kt_strip *now, int64_t scale_bytes, s16_codes f) {
    const kt_gemm *g = now->g;
    const int64_t k = g->k, each = 64 * 16;
    const s16_codes words = {.group = f.group, .bits = 16, .words = s16_panel_words, .scale = f.scale};
    for (int64_t i = 0; i < now->rows; i += KT_S16_TILE_ROWS) {
        s16_rows x;
        for (int64_t j = 0; j < KT_S16_TILE_ROWS; j++)
            s16_take(&x, j, g, now->first + i + j, f.group);
        for (int64_t n = 0; n < now->blocks; n += KT_S16_TILE_BLOCKS) {
            const char *w = (const char *)g->work + n * bf16_block_bytes(k);
            const char *of = (const char *)g->scale + (now->block + n) * scale_bytes;
            float(*c)[32] = (float(*)[32])(&now->c.f32[i][KT_BLOCK * n]);
            if (KT_S16_TILE_BLOCKS > 1 && now->blocks == KT_S16_TILE_BLOCKS)
                s16_micro(KT_S16_TILE_ROWS, KT_S16_TILE_BLOCKS, x, k, w, each, of, scale_bytes, NULL, c, words);
            else
                s16_micro(KT_S16_TILE_ROWS, 1, x, k, w, each, of, scale_bytes, NULL, c, words);
        }
    }
}
#endif

/* The sums of a strip in words; from a panel only where the CPU has no tiles. */
KT_INLINE void s16_sums(const kt_strip *now, bf16_stream stream, s16_codes f) {
#ifndef KT_HAVE_TILES
    if (now->g->tiles) {
        s16_from_panel(now, stream.scale_bytes, f);
        return;
    }
#endif
    s16_vectors(now, stream, f);
}

typedef void (*s16_way)(const kt_strip *now, bf16_stream stream, s16_codes f);

KT_INLINE void s16_product(const kt_strip *now, bf16_stream stream, kt_between between, kt_strip *last, s16_codes f,
                           s16_way sums, bf16_scale scale) {
#ifdef KT_HAVE_TILES
    const kt_gemm *g = now->g;
    if (g->tiles) {
        bf16_tiles(now, g->work, stream.next, g->k / 16 * stream.each, between, last, f.group, scale);
        return;
    }
#endif
    sums(now, stream, f);
}

/* A format of this core with codes. sums: s16_sums, or what gives the same; scale: as of bf16_micro. work has room for
 * a row in float32 behind the panel. */
#define KT_S16_PRODUCTS(f, codes, sums, scale) \
    static int64_t f##_work_bytes(int64_t k) { \
        return 2 * bf16_block_bytes(kt_round_up(k, KT_KPAD)) + bf16_row_bytes(k); \
    } \
    static void f##_panel(const kt_gemm *g, int64_t block, int64_t blocks) { \
        if (g->tiles) \
            s16_fill_panel(g, block, blocks, f##_weight_bytes(64) / 2, f##_scale_bytes(g->k), \
                           f##_scale_bytes(1024) / 32, codes); \
    } \
    static void f##_product(const kt_strip *now, kt_between between, kt_strip *last) { \
        const bf16_stream stream = bf16_stored(now, f##_weight_bytes(64) / 2, f##_scale_bytes(now->g->k), \
                                               f##_scale_bytes(1024) / 32); \
        s16_product(now, stream, between, last, codes, sums, scale); \
    } \
    KT_PRODUCTS(f, f##_panel, f##_product, bf16_value)

#endif

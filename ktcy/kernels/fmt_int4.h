/* Format int4 (layout int4-n16k8-g32-v1, table.h): nibbles times a small factor a group, one float32 scale a row.
 *
 * A weight is an exact int8, factor times nibble, so all sums are those of the int8 core. */
#ifndef KT_FMT_INT4_H
#define KT_FMT_INT4_H

#include <float.h>

#include "gemm_s8.h"

#define INT4_GROUP 32
/* Factors are -15..15 without 0, so a weight is at most 15 * 8 = 120 steps of the row. */
#define INT4_MOST 15

static int64_t int4_weight_bytes(int64_t k) { return KT_BLOCK / 2 * kt_round_up(k, KT_KPAD); }
static int64_t int4_scale_bytes(int64_t k) {
    return KT_BLOCK * (sizeof(float) + kt_round_up(k, KT_KPAD) / INT4_GROUP);
}
/* Two blocks in int8-n16k4. */
static int64_t int4_work_bytes(int64_t k) { return 2 * KT_BLOCK * kt_round_up(k, KT_KPAD); }
/* Values and two sets of factors in float32. */
static int64_t int4_pack_work(int64_t k) {
    return KT_BLOCK * sizeof(float) * (kt_round_up(k, KT_KPAD) / INT4_GROUP * (INT4_GROUP + 2));
}

KT_INLINE vf32 int4_code(vf32 w, vf32 inverse) {
    const vf32 q = vf32_mul(w, inverse);
    return vf32_round(vf32_min(vf32_max(q, vf32_set1(-8.0f)), vf32_set1(7.0f)));
}

/* Factors of a group of values, lanes are rows, for steps r; returns their squared error. Of the smallest that clips no
 * value and the next two, with either sign, the best. A fourth gains nothing (Gaussian, uniform, Laplace, t rows). */
KT_INLINE vf32 int4_search(const float *w, vf32 r, float *factors) {
    vf32 low = vf32_set1(0.0f), high = low, factor = low;
    vi32 least = vi32_set1(0x7fffffff);
    for (int64_t i = 0; i < INT4_GROUP; i++) {
        low = vf32_max(low, vf32_sub(vf32_set1(0.0f), vf32_load(w + i * KT_BLOCK)));
        high = vf32_max(high, vf32_load(w + i * KT_BLOCK));
    }
    for (int sign = 1; sign >= -1; sign -= 2) {
        const vf32 eighth = sign > 0 ? low : high, seventh = sign > 0 ? high : low;
        const vf32 whole = vf32_max(vf32_div(eighth, vf32_set1(8.0f)), vf32_div(seventh, vf32_set1(7.0f)));
        const vf32 first = vf32_round(vf32_add(vf32_div(whole, r), vf32_set1(0.5f)));
        for (int j = 0; j < 3; j++) {
            vf32 m = vf32_sub(first, vf32_set1((float)j));
            m = vf32_min(vf32_max(m, vf32_set1(1.0f)), vf32_set1((float)INT4_MOST));
            m = vf32_mul(m, vf32_set1((float)sign));
            const vf32 step = vf32_mul(r, m), inverse = vf32_div(vf32_set1(1.0f), step);
            const vf32 down = vf32_sub(vf32_set1(0.0f), step);
            vf32 error = vf32_set1(0.0f);
            for (int64_t i = 0; i < INT4_GROUP; i++) {
                const vf32 v = vf32_load(w + i * KT_BLOCK);
                const vf32 off = vf32_fma(down, int4_code(v, inverse), v);
                error = vf32_fma(off, off, error);
            }
            /* Errors are not negative: they compare as their bits. */
            const vi32 bits = vf32_bits(error);
            factor = vi32_float(vi32_select_gt(least, bits, vf32_bits(m), vf32_bits(factor)));
            least = vi32_select_gt(least, bits, bits, least);
        }
    }
    vf32_store(factors, factor);
    return vi32_float(least);
}

static int64_t int4_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    const int64_t padded = kt_round_up(k, KT_KPAD), groups = padded / INT4_GROUP;
    float *w = work, *factors = w + padded * KT_BLOCK, *tried = factors + groups * KT_BLOCK; /* lanes are rows */
    vi32 most = vi32_set1(0);
    kt_gather_lanes(src, n, k, padded, w);
    for (int64_t i = 0; i < k; i++)
        most = vi32_max(most, vi32_and(vf32_bits(vf32_load(w + i * KT_BLOCK)), vi32_set1(0x7fffffff)));
    if (vi32_hmax(most) >= KT_NOT_FINITE) {
        int64_t r = 0, j;
        while ((j = kt_not_finite(src, r, k)) == k)
            r++;
        return 1 + r * k + j;
    }

    /* Rows times a power of two, so that their largest value is in [2, 4): squares of errors are normal numbers. */
    const vi32 exponent = vi32_shr(most, 23), zero = vi32_set1(0);
    int32_t tiny;
    const float smallest = KT_TINY;
    memcpy(&tiny, &smallest, sizeof tiny);
    const vi32 down = vi32_shl(vi32_sub(vi32_set1(255), exponent), 23);
    const vi32 up = vi32_shl(vi32_sub(exponent, vi32_set1(1)), 23);
    const vi32 counts = vi32_select_gt(vi32_set1(tiny), most, zero, vi32_set1(-1));
    const vf32 shrink = vi32_float(vi32_and(down, counts)), grow = vi32_float(vi32_and(up, counts));
    for (int64_t i = 0; i < padded; i++)
        vf32_store(w + i * KT_BLOCK, vf32_mul(vf32_load(w + i * KT_BLOCK), shrink));

    /* Steps of three sizes, the middle one just clips nothing, with factors for each; the best of them; the best steps
     * for their codes; codes for those. One size is 0.3 % worse, eight are 0.2 % better (Gaussian rows); a second round
     * of factors, for the last steps, gains less than 0.1 %. */
    static const float sizes[] = {1.0f, 0.92f, 1.08f};
    const vf32 whole = vf32_div(vf32_mul(vi32_float(most), shrink), vf32_set1(8.0f * INT4_MOST));
    const vf32 floor = vf32_set1(0x1p-7f); /* half of whole or less, and the row scale is a normal number */
    vf32 r = floor;
    vi32 least = vi32_set1(0x7fffffff);
    for (int s = 0; s < 3; s++) {
        const vf32 step = vf32_max(vf32_mul(whole, vf32_set1(sizes[s])), floor);
        vf32 error = vf32_set1(0.0f);
        for (int64_t g = 0; g < groups; g++)
            error = vf32_add(error, int4_search(w + g * INT4_GROUP * KT_BLOCK, step, tried + g * KT_BLOCK));
        const vi32 bits = vf32_bits(error);
        for (int64_t i = 0; i < groups * KT_BLOCK; i += KT_BLOCK) {
            const vi32 was = vf32_bits(vf32_load(factors + i)), now = vf32_bits(vf32_load(tried + i));
            vf32_store(factors + i, vi32_float(vi32_select_gt(least, bits, now, was)));
        }
        r = vi32_float(vi32_select_gt(least, bits, vf32_bits(step), vf32_bits(r)));
        least = vi32_select_gt(least, bits, bits, least);
    }
    vf32 product = vf32_set1(0.0f), square = product;
    for (int64_t g = 0; g < groups; g++) {
        const float *at = w + g * INT4_GROUP * KT_BLOCK;
        const vf32 m = vf32_load(factors + g * KT_BLOCK), inverse = vf32_div(vf32_set1(1.0f), vf32_mul(r, m));
        vi32_store_s8((int8_t *)scale + KT_BLOCK * (sizeof(float) + g), vi32_from_vf32(m));
        for (int64_t i = 0; i < INT4_GROUP; i++) {
            const vf32 v = vf32_load(at + i * KT_BLOCK), steps = vf32_mul(m, int4_code(v, inverse));
            product = vf32_fma(steps, v, product);
            square = vf32_fma(steps, steps, square);
        }
    }
    r = vf32_max(vf32_div(product, vf32_max(square, vf32_set1(1.0f))), floor);
    vf32_store(scale, vf32_mul(r, grow));
    for (int64_t i = 0; i < padded; i += 8) {
        const vf32 m = vf32_load(factors + i / INT4_GROUP * KT_BLOCK);
        const vf32 inverse = vf32_div(vf32_set1(1.0f), vf32_mul(r, m));
        vi32 line = zero;
        for (int64_t j = 3; j >= 0; j--) {
            const float *at = w + (i + j) * KT_BLOCK;
            const vi32 first = vi32_from_vf32(int4_code(vf32_load(at), inverse));
            const vi32 second = vi32_from_vf32(int4_code(vf32_load(at + 4 * KT_BLOCK), inverse));
            const vi32 both = vi32_add(vi32_add(first, vi32_shl(second, 4)), vi32_set1(0x88));
            line = vi32_or(vi32_shl(line, 8), both);
        }
        vi32_store((int32_t *)((char *)weight + i * KT_BLOCK / 2), line);
    }
    return 0;
}

static void int4_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    const uint8_t *w = weight;
    const float *scales = scale;
    const int8_t *factors = (const int8_t *)(scales + KT_BLOCK);
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++) {
            const int q = (w[i / 8 * 64 + r * 4 + i % 4] >> (i % 8 / 4 * 4) & 15) - 8;
            const float v = (float)(factors[i / INT4_GROUP * KT_BLOCK + r] * q) * scales[r];
            dst[r * ld + i] = v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v;
        }
}

/* Rows: K int8, and for each group two int16: -8 times the sum of the values at k % 4 < 2, and of the others. */
static int64_t int4_row_bytes(int64_t k) {
    return kt_round_up(k, KT_KPAD) / INT4_GROUP * (INT4_GROUP + 2 * sizeof(int16_t));
}
static int64_t int4_panel_bytes(int64_t k) { return s8_panel_bytes(k); }

static void int4_quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    const int8_t *x = row;
    s8_quantize(src, dtype, k, row, meta);
    for (int64_t i = 0; i < padded; i += INT4_GROUP) {
        int first = 0, second = 0;
        for (int64_t j = i; j < i + INT4_GROUP; j += 4) {
            first += x[j] + x[j + 1];
            second += x[j + 2] + x[j + 3];
        }
        const int16_t words[2] = {(int16_t)(-8 * first), (int16_t)(-8 * second)};
        memcpy((char *)row + padded + i / INT4_GROUP * sizeof words, words, sizeof words);
    }
}

static void int4_tile(const void *row, int64_t k, int64_t r, void *tiles) { s8_tile(row, k, r, tiles); }

#define INT4_LOW 0x0f0f0f0f

/* Sums of a few rows with one block. rows is a compile-time constant at each call: the accumulators live in registers.
 * A word of a group's short sum is made of 16 terms: it begins as x * -8 of all, and step by step a term becomes
 * x * (u - 8). Each is at most 8 * 127, so the word never exceeds 16256, and the two words together 32512. */
KT_INLINE void int4_micro(int rows, const int8_t *const *x, const char *w, const char *next, const int8_t *factors,
                          const int8_t *next_factors, int64_t k, int32_t (*c)[32]) {
    const vi32 low = vi32_set1(INT4_LOW);
    const int64_t end = k * KT_BLOCK / 2;
    vi32 acc[KT_SHORT_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        acc[r] = vi32_set1(0);
    for (int64_t i = 0; i < k; i += INT4_GROUP) {
        const int64_t at = i * KT_BLOCK / 2, ahead = at + KT_AHEAD;
        const char *fetch = ahead < end ? w + ahead : next + (ahead - end);
        vi32 sum[KT_SHORT_ROWS];
        KT_PREFETCH(next_factors + i / INT4_GROUP * KT_BLOCK);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int32_t words;
            memcpy(&words, x[r] + k + i / INT4_GROUP * sizeof words, sizeof words);
            sum[r] = vshort_start(words);
        }
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; j++) {
            const vi32 line = vi32_load((const int32_t *)(w + at + 64 * j));
            const vi32 u[2] = {vi32_and(line, low), vi32_and(vi32_shr(line, 4), low)};
            KT_PREFETCH(fetch + 64 * j);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                for (int h = 0; h < 2; h++) {
                    int32_t four;
                    memcpy(&four, x[r] + i + 8 * j + 4 * h, sizeof four);
                    sum[r] = vshort_dot(sum[r], u[h], four);
                }
        }
        const vi32 factor = vshort_factor(vi32_load_s8(factors + i / INT4_GROUP * KT_BLOCK));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            acc[r] = vshort_add(acc[r], sum[r], factor);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        vi32_store(c[r], acc[r]);
}

/* The factors of a block. */
KT_INLINE const int8_t *int4_factors(const kt_gemm *g, int64_t block) {
    return (const int8_t *)g->scale + block * int4_scale_bytes(g->k) + KT_BLOCK * sizeof(float);
}

/* Whether the rows of g share decoded blocks. */
KT_INLINE int int4_shares(const kt_gemm *g) { return g->tiles || g->m > KT_FEW_ROWS; }

/* Two bytes at once: a word u0 + 256 u1 times |m| is u0 |m| + 256 u1 |m|, each at most 225. Where m is negative, the
 * nibbles are inverted first: m (u - 8) = |m| ((15 - u) - 7). */
static void int4_panel(const kt_gemm *g, int64_t block, int64_t blocks) {
    if (!int4_shares(g))
        return;
    const vi32 low = vi32_set1(INT4_LOW), zero = vi32_set1(0);
    char *to = g->work;
    for (int64_t b = block; b < block + blocks; b++) {
        const char *w = (const char *)g->weight + b * int4_weight_bytes(g->k);
        const int8_t *factors = int4_factors(g, b);
        for (int64_t i = 0; i < g->k; i += INT4_GROUP, factors += KT_BLOCK) {
            const vi32 m = vi32_load_s8(factors), magnitude = vi32_max(m, vi32_sub(zero, m));
            const vi32 invert = vi32_select_gt(zero, m, vi32_set1(-1), zero);
            const vi32 times = vi32_or(magnitude, vi32_shl(magnitude, 16));
            const vi32 middle = vi32_sub(vi32_set1(0x08080808), vi32_and(invert, vi32_set1(0x01010101)));
            const vi32 offset = vi16_mul(times, middle);
#pragma GCC unroll 4
            for (int64_t j = 0; j < 4; j++, w += 64, to += 128) {
                const vi32 line = vi32_xor(vi32_load((const int32_t *)w), invert);
                const vi32 first = vi32_and(line, low), second = vi32_and(vi32_shr(line, 4), low);
                KT_PREFETCH(w + KT_AHEAD);
                vi32_store((int32_t *)to, vi8_sub(vi16_mul(first, times), offset));
                vi32_store((int32_t *)(to + 64), vi8_sub(vi16_mul(second, times), offset));
            }
        }
    }
}

static void int4_product(const kt_strip *now, kt_between between, kt_strip *last) {
    const kt_gemm *g = now->g;
    const int64_t bytes = int4_weight_bytes(g->k);
    const char *w = (const char *)g->weight + now->block * bytes;
    const char *next = now->block + 2 < now->end ? w + 2 * bytes : g->next;
    if (int4_shares(g)) {
        s8_sums(now, g->work, KT_BLOCK * g->k, (const int8_t *)next, 16, between, last);
        return;
    }
    for (int64_t b = 0; b < now->blocks; b++, w += bytes) {
        const char *after = b + 1 < now->blocks ? w + bytes : next ? next : w;
        const int8_t *after_factors = int4_factors(g, now->block + b + 1);
        if (now->block + b + 1 == now->end && g->next_scale)
            after_factors = (const int8_t *)g->next_scale + KT_BLOCK * sizeof(float);
        for (int64_t i = 0, count; i < now->rows; i += count) {
            const int64_t left = now->rows - i;
            const int8_t *x[KT_SHORT_ROWS], *factors = int4_factors(g, now->block + b);
            int32_t(*c)[32] = (int32_t(*)[32])(&now->c.s32[i][KT_BLOCK * b]);
            count = left >= KT_SHORT_ROWS ? KT_SHORT_ROWS : left >= 2 ? 2 : 1;
            for (int64_t j = 0; j < count; j++)
                x[j] = (const int8_t *)g->x + kt_row(g, now->first + i + j) * g->ldx;
            if (count == 1)
                int4_micro(1, x, w, after, factors, after_factors, g->k, c);
            else if (count == 2)
                int4_micro(2, x, w, after, factors, after_factors, g->k, c);
            else
                int4_micro(KT_SHORT_ROWS, x, w, after, factors, after_factors, g->k, c);
        }
    }
}

KT_INLINE vf32 int4_value(const kt_strip *s, int64_t i, int64_t n) {
    return s8_value(s, i, n, int4_scale_bytes(s->g->k));
}

KT_PRODUCTS(int4, int4_panel, int4_product, int4_value)

#endif

/* Formats mxfp8 and mxfp4 (layouts mxfp8-n16k4-g32-v2 and mxfp4-n16k8-g32-v1, table.h): e4m3 and e2m1 codes of a
 * checkpoint with a power of two for each 32 values of K and row. Source: OCP Microscaling Formats 1.0. */
#ifndef KT_FMT_MX_H
#define KT_FMT_MX_H

#include "fmt_fp8.h"
#include "gemm_s16.h"

#define KT_MX_GROUP 32

static float e2m1_float(uint8_t code) {
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}
/* In double: kernels flush what is subnormal in float32. */
static double mx_scale_of(uint8_t e) { return __builtin_ldexp(1.0, e - 127); }

static int64_t mx_scale_bytes(int64_t k) { return kt_round_up(k, KT_KPAD) / KT_MX_GROUP * KT_BLOCK; }
static uint8_t *mx_at(const void *scale, int64_t r, int64_t i) {
    return (uint8_t *)scale + i / KT_MX_GROUP * KT_BLOCK + r;
}

/* Packs scales up to `largest` and codes: a code that is no number or has a larger scale is refused, zeros may have
 * any; one whose value would be subnormal becomes code 0. put(weight, r, i, code) stores a code. */
KT_INLINE int64_t mx_pack(const kt_source *src, int64_t n, int64_t k, uint8_t *weight, void *scale, uint8_t largest,
                          float (*value_of)(uint8_t), void (*put)(uint8_t *, int64_t, int64_t, uint8_t)) {
    memset(scale, 127, (size_t)mx_scale_bytes(k));
    for (int64_t i = 0; i < k; i++)
        for (int64_t r = 0; r < n; r++) {
            const uint8_t code = kt_code(src, r, i);
            const uint8_t e = ((const uint8_t *)src->scale)[r * src->scale_stride + i / KT_MX_GROUP];
            const double value = value_of(code) * mx_scale_of(e);
            if (value != value || (e > largest && value != 0))
                return 1 + r * k + i;
            *mx_at(scale, r, i) = e > largest ? largest : e;
            put(weight, r, i, value < FLT_MIN && value > -FLT_MIN ? 0 : code);
        }
    return 0;
}

/* The e of 16 rows plus `more`, and 2^(e - 127 + more). */
KT_INLINE vi32 mx_exponents(const kt_strip *now, int64_t n, int64_t i, int64_t scale_bytes, int32_t more) {
    const char *scales = (const char *)now->g->scale + (now->block + n) * scale_bytes;
    return vi32_add(vi32_load_u8(mx_at(scales, 0, i)), vi32_set1(more));
}
KT_INLINE vf32 mx_scales(const kt_strip *now, int64_t n, int64_t i, int64_t scale_bytes, int32_t more) {
    return vi32_float(vi32_shl(mx_exponents(now, n, i, scale_bytes, more), 23));
}

/* Whether the scales of a strip may come after the sums of their groups (-10 to -20 % at one token): for powers of two
 * that is the same, bit for bit, if no sum leaves the normal numbers either way. Exponents of scales are -63 to 64 here
 * and rows moderate: sums of 16 products are multiples of 2^(-47 - 7) 2^-9 2^-63 and below 2^47 2^9 2^64 2^4. */
KT_INLINE int mx_late(const kt_strip *now, int64_t scale_bytes) {
    const kt_gemm *g = now->g;
    const int64_t bytes = mx_scale_bytes(g->k);
    for (int64_t i = 0; i < now->rows; i++)
        if (!g->meta[kt_row(g, now->first + i)].sum)
            return 0;
    /* The two upper bits of such a byte differ. */
    vi32 differ = vi32_set1(-1);
    for (int64_t n = 0; n < now->blocks; n++) {
        const char *scales = (const char *)g->scale + (now->block + n) * scale_bytes;
        int64_t i = 0;
        for (; i + 64 <= bytes; i += 64) {
            const vi32 v = vi32_load((const int32_t *)(scales + i));
            differ = vi32_and(differ, vi32_xor(v, vi32_shl(v, 1)));
        }
        if (i < bytes) {
            const vi32 v = vi32_load_u16((const uint16_t *)(scales + i));
            differ = vi32_and(differ, vi32_or(vi32_xor(v, vi32_shl(v, 1)), vi32_set1((int32_t)0xffff0000)));
        }
    }
    return !vi32_hmax(vi32_and(vi32_shr(vi32_xor(differ, vi32_set1(-1)), 7), vi32_set1(0x01010101)));
}

/* 448 * 2^(246 - 127) is the largest finite value, as is 6 * 2^(252 - 127). */
#define KT_MXFP8_LARGEST 246
#define KT_MXFP4_LARGEST 252

#define mxfp8_weight_bytes e4m3_weight_bytes
static int64_t mxfp8_scale_bytes(int64_t k) { return mx_scale_bytes(k) + e4m3_normal_bytes(k); }
static int64_t mxfp8_pack_work(int64_t k) { return 0; }

static float mxfp8_value(uint8_t code) { return e4m3_is_nan(code) ? __builtin_nanf("") : e4m3_float(code); }
static void mxfp8_put(uint8_t *weight, int64_t r, int64_t i, uint8_t code) { weight[e4m3_at(r, i)] = code; }
static int64_t mxfp8_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    memset(weight, 0, (size_t)mxfp8_weight_bytes(k));
    const int64_t wrong = mx_pack(src, n, k, weight, scale, KT_MXFP8_LARGEST, mxfp8_value, mxfp8_put);
    e4m3_find_normal(weight, k, (uint8_t *)scale + mx_scale_bytes(k));
    return wrong;
}

static void mxfp8_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++)
            dst[r * ld + i] = (float)(e4m3_float(((const uint8_t *)weight)[e4m3_at(r, i)]) *
                                      mx_scale_of(*mx_at(scale, r, i)));
}

/* Lines are 256th parts of the values. */
KT_INLINE vf32 mxfp8_scale(const kt_strip *now, int64_t n, int64_t i) {
    return mx_scales(now, n, i, mxfp8_scale_bytes(now->g->k), 8);
}
KT_INLINE int mxfp8_normal(const kt_strip *now, int64_t n, int64_t i) {
    return e4m3_normal(now, n, i, mxfp8_scale_bytes(now->g->k));
}
/* Values of normal codes are normal, or were packed as code 0: their exponents take the scale's. */
KT_INLINE vi32 mxfp8_line(const kt_strip *now, int64_t n, int64_t i, int64_t j, int normal) {
    const vi32 line = e4m3_line(now, n, i, j, normal);
    if (normal) {
        const vi32 more = vi32_shl(mx_exponents(now, n, i, mxfp8_scale_bytes(now->g->k), 8 - 127), 7);
        return vi16_add(line, vi32_or(vi32_shl(more, 16), vi32_and(more, vi32_set1(0xffff))));
    }
    const vf32 scale = mxfp8_scale(now, n, i);
    return bf16_joined(vf32_mul(bf16_even(line), scale), vf32_mul(bf16_odd(line), scale));
}
static const bf16_codes mxfp8_codes = {.line = mxfp8_line, .normal = mxfp8_normal};
static const bf16_codes mxfp8_late_codes = {e4m3_line, mxfp8_normal, KT_MX_GROUP, mxfp8_scale};
KT_INLINE void mxfp8_few(const kt_strip *now, bf16_stream stream, bf16_codes f) {
    if (mx_late(now, mxfp8_scale_bytes(now->g->k)))
        bf16_vectors(now, stream, mxfp8_late_codes);
    else
        bf16_vectors(now, stream, f);
}
KT_BF16_PRODUCTS(mxfp8, mxfp8_codes, mxfp8_few, bf16_value)

static int64_t mxfp4_weight_bytes(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD) / 2; }
#define mxfp4_scale_bytes mx_scale_bytes
static int64_t mxfp4_pack_work(int64_t k) { return 0; }

/* Of a line's 32 bits a row, the lower half has the even and the upper half the odd positions, ascending. */
static int64_t mxfp4_at(int64_t r, int64_t i) { return i / 8 * 64 + r * 4 + i % 2 * 2 + i % 8 / 4; }
static int mxfp4_shift(int64_t i) { return i % 4 / 2 * 4; }
static void mxfp4_put(uint8_t *weight, int64_t r, int64_t i, uint8_t code) {
    weight[mxfp4_at(r, i)] |= (uint8_t)((code & 7 ? code : 0) << mxfp4_shift(i));
}
static int64_t mxfp4_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    memset(weight, 0, (size_t)mxfp4_weight_bytes(k));
    return mx_pack(src, n, k, weight, scale, KT_MXFP4_LARGEST, e2m1_float, mxfp4_put);
}

static void mxfp4_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++) {
            const uint8_t code = ((const uint8_t *)weight)[mxfp4_at(r, i)] >> mxfp4_shift(i) & 15;
            dst[r * ld + i] = (float)(e2m1_float(code) * mx_scale_of(*mx_at(scale, r, i)));
        }
}

KT_INLINE vi32 e2m1_words(const char *w, int64_t j, int in_place) { return vi16_load_e2m1(w + j / 4 * 64, j % 4); }
/* Words are 512 times their values; scales that may come late are far from the ends of the exponents. */
KT_INLINE vf32 e2m1_scale(const char *of, int64_t group) {
    return vi32_float(vi32_shl(vi32_sub(vi32_load_u8((const uint8_t *)of + group * KT_BLOCK), vi32_set1(9)), 23));
}
#ifdef KT_HAVE_DOT_S8
KT_INLINE vi32 e2m1_bytes(const char *w, int64_t j, int in_place) { return vi8_load_e2m1(w + j / 2 * 64, j % 2); }
#else
#define e2m1_bytes NULL
#endif
static const s16_codes e2m1_s16 = {.group = KT_MX_GROUP, .bits = 16, .words = e2m1_words, .bytes = e2m1_bytes,
                                   .offset = 12, .lower = 8, .scale = e2m1_scale};

/* e2m1 as halves of the values: 2^(e - 126) is a normal number for every e. */
KT_INLINE vi32 mxfp4_line(const kt_strip *now, int64_t n, int64_t i, int64_t j, int normal) {
    const int64_t bytes = KT_BLOCK * now->g->k / 2;
    const char *w = (const char *)now->g->weight + (now->block + n) * bytes + i * 8 + j / 4 * 64;
    const vf32 scale = mx_scales(now, n, i, mx_scale_bytes(now->g->k), 1);
    vf32 even, odd;
    vf32_load_e2m1(w, j % 4, &even, &odd);
    return bf16_joined(vf32_mul(even, scale), vf32_mul(odd, scale));
}
static const bf16_codes mxfp4_codes = {.line = mxfp4_line};

/* Scales or rows as no model has them go as the bf16 core's rows, one by one. */
KT_INLINE void mxfp4_sums(const kt_strip *now, bf16_stream stream, s16_codes f) {
    if (mx_late(now, mx_scale_bytes(now->g->k))) {
        s16_sums(now, stream, f);
        return;
    }
    const int64_t k = now->g->k;
    float *row = (float *)((char *)now->g->work + (now->g->tiles ? 2 * bf16_block_bytes(k) : 0));
    const kt_gemm one = {.m = 1, .k = k, .x = row, .weight = now->g->weight, .scale = now->g->scale};
    kt_strip strip = *now;
    strip.g = &one;
    strip.first = 0;
    strip.rows = 1;
    for (int64_t r = 0; r < now->rows; r++) {
        s16_rows x;
        s16_take(&x, 0, now->g, now->first + r, KT_MX_GROUP);
        for (int64_t i = 0; i < k; i += 16)
            vf32_store(row + i, s16_values(x.q[0] + i / 32 * x.step + i % 32, x.of[0][i / KT_MX_GROUP]));
        strip.c.f32 = now->c.f32 + r;
        bf16_vectors(&strip, stream, mxfp4_codes);
    }
}
#ifdef KT_HAVE_TILES
KT_INLINE void mxfp4_few(const kt_strip *now, bf16_stream stream, bf16_codes f) { mxfp4_sums(now, stream, e2m1_s16); }
KT_BF16_PRODUCTS(mxfp4, mxfp4_codes, mxfp4_few, bf16_value)
#else
KT_S16_PRODUCTS(mxfp4, e2m1_s16, mxfp4_sums, NULL)
#endif

#endif

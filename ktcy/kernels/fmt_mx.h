/* Formats mxfp8 and mxfp4 (layouts mxfp8-n16k4-g32-v1 and mxfp4-n16k8-g32-v1, table.h): e4m3 and e2m1 codes of a
 * checkpoint with a power of two for each 32 values of K and row. Source: OCP Microscaling Formats 1.0. */
#ifndef KT_FMT_MX_H
#define KT_FMT_MX_H

#include "fmt_fp8.h"

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

/* 448 * 2^(246 - 127) is the largest finite value, as is 6 * 2^(252 - 127). */
#define KT_MXFP8_LARGEST 246
#define KT_MXFP4_LARGEST 252

#define mxfp8_weight_bytes e4m3_weight_bytes
#define mxfp8_scale_bytes mx_scale_bytes
static int64_t mxfp8_pack_work(int64_t k) { return 0; }

static float mxfp8_value(uint8_t code) { return e4m3_is_nan(code) ? __builtin_nanf("") : e4m3_float(code); }
static void mxfp8_put(uint8_t *weight, int64_t r, int64_t i, uint8_t code) { weight[e4m3_at(r, i)] = code; }
static int64_t mxfp8_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    memset(weight, 0, (size_t)mxfp8_weight_bytes(k));
    return mx_pack(src, n, k, weight, scale, KT_MXFP8_LARGEST, mxfp8_value, mxfp8_put);
}

static void mxfp8_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++)
            dst[r * ld + i] = (float)(e4m3_float(((const uint8_t *)weight)[e4m3_at(r, i)]) *
                                      mx_scale_of(*mx_at(scale, r, i)));
}

/* The scale of e4m3_line's 256th parts: 2^(e - 119) is finite up to KT_MXFP8_LARGEST. */
KT_INLINE void mxfp8_decode(const kt_strip *now, int64_t n, int64_t i, int64_t j, vf32 *even, vf32 *odd) {
    const char *scales = (const char *)now->g->scale + (now->block + n) * mx_scale_bytes(now->g->k);
    const vf32 scale = vi32_float(vi32_shl(vi32_add(vi32_load_u8(mx_at(scales, 0, i)), vi32_set1(8)), 23));
    e4m3_line(now, n, i, j, even, odd);
    *even = vf32_mul(*even, scale);
    *odd = vf32_mul(*odd, scale);
}

KT_BF16_PRODUCTS(mxfp8, 0, NULL, bf16_value)

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

/* The table holds the values of the largest scale. A smaller one takes its distance off the exponents, two bfloat16 at
 * once: zeros stay because the difference saturates, and pack left nothing that would end below the normal numbers. */
KT_INLINE void mxfp4_decode(const kt_strip *now, int64_t n, int64_t i, int64_t j, vf32 *even, vf32 *odd) {
    const kt_gemm *g = now->g;
    const char *scales = (const char *)g->scale + (now->block + n) * mx_scale_bytes(g->k);
    const char *w = (const char *)g->weight + (now->block + n) * (KT_BLOCK * g->k / 2) + i * 8 + j / 4 * 64;
    const vi32 below = vi32_shl(vi32_sub(vi32_set1(KT_MXFP4_LARGEST), vi32_load_u8(mx_at(scales, 0, i))), 7);
    const vi32 line = vi32_e2m1(vi32_load((const int32_t *)w), j % 4);
    const vi32 scaled = vi32_subs_u16(line, vi32_or(below, vi32_shl(below, 16)));
    if (j % 4 == 0)
        KT_PREFETCH(w + KT_AHEAD);
    *even = bf16_even(scaled);
    *odd = bf16_odd(scaled);
}

KT_BF16_PRODUCTS(mxfp4, 0, NULL, bf16_value)

#endif

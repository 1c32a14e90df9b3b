/* Formats fp8 and fp8_channel (layouts fp8-n16k4-g128-v2 and fp8-n16k4-row-v2, table.h): e4m3 codes of a checkpoint,
 * float32 scales of blocks of 128 x 128 or of rows. */
#ifndef KT_FMT_FP8_H
#define KT_FMT_FP8_H

#include <float.h>

#include "gemm_bf16.h"

#define KT_FP8_GROUP 128

/* Source of e4m3: OCP 8-bit Floating Point Specification, 1.0; no inf, one NaN of each sign. */
static int e4m3_is_nan(uint8_t code) { return (code & 0x7f) == 0x7f; }
static float e4m3_float(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float m = exponent ? (float)((8 + mantissa) << exponent >> 1) : (float)mantissa;
    return (code & 0x80 ? -m : m) * 0x1p-9f;
}

static int64_t e4m3_at(int64_t r, int64_t i) { return i / 4 * 64 + r * 4 + i % 2 * 2 + i % 4 / 2; }
static uint8_t kt_code(const kt_source *src, int64_t r, int64_t i) {
    return ((const uint8_t *)src->values)[r * src->row_stride + i * src->col_stride];
}

static int64_t e4m3_weight_bytes(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD); }
/* At the end of a block of scales: for each 32 values of K 1 where all codes are normal numbers, or 0. */
static int64_t e4m3_normal_bytes(int64_t k) { return kt_round_up(kt_round_up(k, KT_KPAD) / 32, 4); }
static void e4m3_find_normal(const uint8_t *weight, int64_t k, uint8_t *normal) {
    memset(normal, 0, (size_t)e4m3_normal_bytes(k));
    for (int64_t i = 0; i < k; i += 32, weight += 32 * KT_BLOCK) {
        int zero = 0;
        for (int64_t j = 0; j < 32 * KT_BLOCK; j++)
            zero |= (weight[j] & 0x78) == 0;
        normal[i / 32] = !zero;
    }
}
static int64_t e4m3_pack(const kt_source *src, int64_t n, int64_t k, uint8_t *weight, uint8_t *normal) {
    memset(weight, 0, (size_t)e4m3_weight_bytes(k));
    for (int64_t i = 0; i < k; i++)
        for (int64_t r = 0; r < n; r++) {
            const uint8_t code = kt_code(src, r, i);
            if (e4m3_is_nan(code))
                return 1 + r * k + i;
            weight[e4m3_at(r, i)] = code;
        }
    e4m3_find_normal(weight, k, normal);
    return 0;
}

/* The codes' values over 256, exact; whoever uses them owes the 256 to their scale. */
KT_INLINE vi32 e4m3_line(const kt_strip *now, int64_t n, int64_t i, int64_t j, int normal) {
    const char *w = (const char *)now->g->weight + ((now->block + n) * now->g->k + i) * KT_BLOCK + j / 2 * 64;
    return normal ? vi16_load_normal_e4m3(w, j % 2) : vi16_load_e4m3(w, j % 2);
}
KT_INLINE int e4m3_normal(const kt_strip *now, int64_t n, int64_t i, int64_t scale_bytes) {
    const char *end = (const char *)now->g->scale + (now->block + n + 1) * scale_bytes;
    return end[i / 32 - e4m3_normal_bytes(now->g->k)];
}

/* Times 256 it stays finite; so do the values, nearly. */
static int fp8_usable(float scale) { return __builtin_fabsf(scale) <= 0x1p119f; }
/* A subnormal scale is zero. */
static float fp8_flushed(float scale) { return __builtin_fabsf(scale) < FLT_MIN ? 0.0f : scale; }

#define fp8_weight_bytes e4m3_weight_bytes
static int64_t fp8_scales(int64_t k) { return kt_round_up(k, KT_FP8_GROUP) / KT_FP8_GROUP * (int64_t)sizeof(float); }
static int64_t fp8_scale_bytes(int64_t k) { return fp8_scales(k) + e4m3_normal_bytes(k); }
static int64_t fp8_pack_work(int64_t k) { return 0; }

static int64_t fp8_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    const float *scales = src->scale;
    const int64_t bytes = fp8_scales(k);
    for (int64_t r = 1; r < n; r++)
        if (memcmp(scales + r * src->scale_stride, scales, (size_t)bytes))
            return KT_SCALES_DIFFER;
    for (int64_t i = 0; i < k; i += KT_FP8_GROUP)
        if (!fp8_usable(scales[i / KT_FP8_GROUP]))
            return 1 + i;
    for (int64_t i = 0; i < k; i += KT_FP8_GROUP)
        ((float *)scale)[i / KT_FP8_GROUP] = fp8_flushed(scales[i / KT_FP8_GROUP]);
    return e4m3_pack(src, n, k, weight, (uint8_t *)scale + bytes);
}

static void fp8_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++)
            dst[r * ld + i] = e4m3_float(((const uint8_t *)weight)[e4m3_at(r, i)]) *
                              ((const float *)scale)[i / KT_FP8_GROUP];
}

KT_INLINE vf32 fp8_scale(const kt_strip *now, int64_t n, int64_t i) {
    const char *scale = (const char *)now->g->scale + (now->block + n) * fp8_scale_bytes(now->g->k);
    return vf32_mul(vf32_set1(((const float *)scale)[i / KT_FP8_GROUP]), vf32_set1(256.0f));
}

KT_INLINE int fp8_normal(const kt_strip *now, int64_t n, int64_t i) {
    return e4m3_normal(now, n, i, fp8_scale_bytes(now->g->k));
}
static const bf16_codes fp8_codes = {e4m3_line, fp8_normal, KT_FP8_GROUP, fp8_scale};
KT_BF16_PRODUCTS(fp8, fp8_codes, bf16_vectors, bf16_value)

#define fp8_channel_weight_bytes e4m3_weight_bytes
static int64_t fp8_channel_scale_bytes(int64_t k) { return KT_BLOCK * sizeof(float) + e4m3_normal_bytes(k); }
static int64_t fp8_channel_pack_work(int64_t k) { return 0; }

static int64_t fp8_channel_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    float *scales = scale;
    for (int64_t r = 0; r < n; r++)
        if (!fp8_usable(((const float *)src->scale)[r * src->scale_stride]))
            return 1 + r * k;
    for (int64_t r = 0; r < KT_BLOCK; r++)
        scales[r] = r < n ? fp8_flushed(((const float *)src->scale)[r * src->scale_stride]) : 0.0f;
    return e4m3_pack(src, n, k, weight, (uint8_t *)(scales + KT_BLOCK));
}

static void fp8_channel_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++)
            dst[r * ld + i] = e4m3_float(((const uint8_t *)weight)[e4m3_at(r, i)]) * ((const float *)scale)[r];
}

KT_INLINE vf32 fp8_channel_value(const kt_strip *s, int64_t i, int64_t n) {
    const int64_t block = s->block + n;
    const char *scales = (const char *)s->g->scale + block * fp8_channel_scale_bytes(s->g->k);
    const vf32 scale = vf32_mul(vf32_load((const float *)scales), vf32_set1(256.0f));
    return vf32_fma(vf32_load(s->c.f32[i] + KT_BLOCK * n), scale, kt_bias(s->g, block));
}

KT_INLINE int fp8_channel_normal(const kt_strip *now, int64_t n, int64_t i) {
    return e4m3_normal(now, n, i, fp8_channel_scale_bytes(now->g->k));
}
static const bf16_codes fp8_channel_codes = {.line = e4m3_line, .normal = fp8_channel_normal};
KT_BF16_PRODUCTS(fp8_channel, fp8_channel_codes, bf16_vectors, fp8_channel_value)

#endif

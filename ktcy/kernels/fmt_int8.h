/* Format int8 (layout int8-n16k4-v1, table.h): symmetric int8 weights, one float32 scale a row. */
#ifndef KT_FMT_INT8_H
#define KT_FMT_INT8_H

#include <float.h>

#include "gemm_s8.h"

static int64_t int8_weight_bytes(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD); }
static int64_t int8_scale_bytes(int64_t k) { return KT_BLOCK * sizeof(float); }
static int64_t int8_work_bytes(int64_t k) { return 0; }
/* One row in float32 and sixteen in int8. */
static int64_t int8_pack_work(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD) * (sizeof(float) + 1); }

static int64_t int8_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    float *wide = work;
    int8_t *rows = (int8_t *)(wide + KT_BLOCK * padded);
    float *scales = scale;
    const int strided = src->col_stride != 1;
    if (strided)
        kt_gather_rows(src, n, k, wide, padded);
    for (int64_t r = 0; r < KT_BLOCK; r++) {
        int8_t *q = rows + r * padded;
        kt_meta meta = {0};
        if (r >= n)
            memset(q, 0, (size_t)padded);
        else if (strided)
            s8_quantize(wide + r * padded, KT_F32, k, q, &meta);
        else
            s8_quantize(kt_source_row(src, r), src->dtype, k, q, &meta);
        if (meta.scale != meta.scale)
            return 1 + r * k + kt_not_finite(src, r, k);
        scales[r] = meta.scale;
    }
    for (int64_t i = 0; i < padded; i += 4)
        for (int64_t r = 0; r < KT_BLOCK; r++)
            memcpy((char *)weight + i * KT_BLOCK + r * 4, rows + r * padded + i, 4);
    return 0;
}

static void int8_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    const int8_t *w = weight;
    const float *scales = scale;
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++) {
            /* 127 steps of a row that holds FLT_MAX may round to inf. */
            const float v = (float)w[i / 4 * 64 + r * 4 + i % 4] * scales[r];
            dst[r * ld + i] = v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v;
        }
}

KT_INLINE void int8_product(const kt_strip *now, kt_between between, kt_strip *last) {
    const int64_t bytes = KT_BLOCK * now->g->k;
    const int8_t *w = (const int8_t *)now->g->weight + now->block * bytes;
    s8_sums(now, w, bytes, now->block + 2 < now->end ? w + 2 * bytes : now->g->next, 32, between, last);
}

KT_INLINE vf32 int8_value(const kt_strip *s, int64_t i, int64_t n) { return s8_value(s, i, n, 64); }

KT_PRODUCTS(int8, NULL, int8_product, int8_value)

#endif

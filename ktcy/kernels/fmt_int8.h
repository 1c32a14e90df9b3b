/* Format int8 (layout int8-n16k4-v1, table.h): symmetric int8 weights, one float32 scale a row. */
#ifndef KT_FMT_INT8_H
#define KT_FMT_INT8_H

#include <float.h>

#include "activation.h"
#include "gemm.h"
#include "rows.h"

#define KT_NOT_FINITE 0x7f800000

static int64_t int8_weight_bytes(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD); }
static int64_t int8_scale_bytes(int64_t k) { return KT_BLOCK * sizeof(float); }
static int64_t int8_row_bytes(int64_t k) { return kt_round_up(k, KT_KPAD); }
/* One row in float32 and sixteen in int8. */
static int64_t int8_pack_work(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD) * (sizeof(float) + 1); }

/* Bits of the largest magnitude; NaN and inf compare above every finite value. */
KT_INLINE int32_t s8_absmax(const void *src, kt_dtype dtype, int64_t k) {
    vi32 most = vi32_set1(0);
    for (int64_t i = 0; i < k; i += 16)
        most = vi32_max(most, vi32_and(vf32_bits(kt_load_tail(src, dtype, i, k)), vi32_set1(0x7fffffff)));
    return vi32_hmax(most);
}

KT_INLINE void s8_quantize_as(const void *src, kt_dtype dtype, int64_t k, int8_t *q, kt_meta *meta) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    const int32_t bits = s8_absmax(src, dtype, k);
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

static void int8_quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) {
    if (dtype == KT_F32)
        s8_quantize_as(src, KT_F32, k, row, meta);
    else if (dtype == KT_F16)
        s8_quantize_as(src, KT_F16, k, row, meta);
    else
        s8_quantize_as(src, KT_BF16, k, row, meta);
}

static void int8_tile(const void *row, int64_t k, int64_t r, void *tiles) {
    char *p = (char *)tiles + r / 16 * 16 * k + r % 16 * 64;
    for (int64_t i = 0; i < k; i += 64, p += 1024) {
        if (row)
            memcpy(p, (const char *)row + i, 64);
        else
            memset(p, 0, 64);
    }
}

/* Sixteen strided rows as contiguous float32; missing rows are not touched. */
static void kt_gather_rows(const char *src, kt_dtype dtype, int64_t row_stride, int64_t col_stride, int64_t n,
                           int64_t k, float *dst, int64_t ld) {
    const int64_t size = kt_size(dtype);
    for (int64_t j = 0; j < k; j++) {
        char values[64] = {0};
        float wide[16];
        for (int64_t r = 0; r < n; r++)
            memcpy(values + r * size, src + (r * row_stride + j * col_stride) * size, (size_t)size);
        vf32_store(wide, kt_load16(values, dtype));
        for (int64_t r = 0; r < n; r++)
            dst[r * ld + j] = wide[r];
    }
}

static int64_t int8_pack(const void *src, kt_dtype dtype, int64_t row_stride, int64_t col_stride, int64_t n, int64_t k,
                         void *weight, void *scale, void *work) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    float *wide = work;
    int8_t *rows = (int8_t *)(wide + KT_BLOCK * padded);
    float *scales = scale;
    const int strided = col_stride != 1;
    if (strided)
        kt_gather_rows(src, dtype, row_stride, col_stride, n, k, wide, padded);
    for (int64_t r = 0; r < KT_BLOCK; r++) {
        int8_t *q = rows + r * padded;
        kt_meta meta = {0};
        if (r >= n)
            memset(q, 0, (size_t)padded);
        else if (strided)
            int8_quantize(wide + r * padded, KT_F32, k, q, &meta);
        else
            int8_quantize((const char *)src + r * row_stride * kt_size(dtype), dtype, k, q, &meta);
        if (meta.scale != meta.scale) {
            for (int64_t j = 0; j < k; j++)
                if (s8_absmax((const char *)src + (r * row_stride + j * col_stride) * kt_size(dtype), dtype, 1) >=
                    KT_NOT_FINITE)
                    return 1 + r * k + j;
        }
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

/* y = fma(sum, w_scale * x_scale, bias) of one row and block. */
KT_INLINE vf32 int8_value(const kt_gemm *g, const int32_t *sum, int64_t block, float x_scale) {
    const vf32 scale = vf32_mul(vf32_load((const float *)g->scale + block * KT_BLOCK), vf32_set1(x_scale));
    const vf32 bias = g->bias ? vf32_load(g->bias + block * KT_BLOCK) : vf32_set1(0.0f);
    return vf32_fma(vf32_from_vi32(vi32_load(sum)), scale, bias);
}

KT_INLINE void int8_gate_up_rows(void *ctx, int64_t rows) {
    s8_strip *s = ctx;
    for (; rows && s->done < s->rows; rows--, s->done++) {
        const int64_t r = s->first + s->done;
        const float x_scale = s->g->meta[kt_row(s->g, r)].scale;
        const vf32 gate = int8_value(s->g, s->c[s->done], s->block, x_scale);
        const vf32 up = int8_value(s->g, s->c[s->done] + 16, s->block + 1, x_scale);
        vf32_store(s->dst + r * s->ld + KT_BLOCK * (s->block / 2), kt_activate(s->act, gate, up));
    }
}

static void int8_gate_up(const kt_gemm *g, const kt_activation *act, int64_t j0, int64_t j1, float *h, int64_t ldh) {
    const s8_strip strip = {.g = g, .act = act, .dst = h, .ld = ldh};
    s8_strips(&strip, 2 * j0, 2 * j1, int8_gate_up_rows);
}

KT_INLINE void int8_down_rows(void *ctx, int64_t rows) {
    s8_strip *s = ctx;
    for (; rows && s->done < s->rows; rows--, s->done++) {
        const int64_t r = s->first + s->done;
        const float x_scale = s->g->meta[kt_row(s->g, r)].scale;
        const vf32 weight = vf32_set1(s->route[r]);
        float *dst = s->dst + s->row[r] * s->ld + KT_BLOCK * s->block;
        for (int64_t n = 0; n < s->blocks; n++) {
            const vf32 y = int8_value(s->g, s->c[s->done] + 16 * n, s->block + n, x_scale);
            vf32_store(dst + 16 * n, vf32_fma(y, weight, vf32_load(dst + 16 * n)));
        }
    }
}

static void int8_down(const kt_gemm *g, const int32_t *row, const float *route, int64_t b0, int64_t b1, float *out,
                      int64_t ldo) {
    const s8_strip strip = {.g = g, .row = row, .route = route, .dst = out - KT_BLOCK * b0, .ld = ldo};
    s8_strips(&strip, b0, b1, int8_down_rows);
}

#endif

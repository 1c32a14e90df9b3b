/* Rows of the caller's dtypes as vectors of 16 float32, tails included. */
#ifndef KT_ROWS_H
#define KT_ROWS_H

#include <string.h>

#include "table.h"

KT_INLINE int64_t kt_round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

KT_INLINE vf32 kt_load16(const void *src, kt_dtype dtype) {
    if (dtype == KT_F32)
        return vf32_load(src);
    if (dtype == KT_F16)
        return vf32_load_f16(src);
    return vi32_float(vi32_shl(vi32_load_u16(src), 16));
}

/* Round to nearest even; NaN stays NaN by setting its quiet bit. */
KT_INLINE vi32 kt_bf16_bits(vf32 v) {
    const vi32 bits = vf32_bits(v), top = vi32_shr(bits, 16);
    const vi32 odd = vi32_and(top, vi32_set1(1));
    const vi32 rounded = vi32_shr(vi32_add(bits, vi32_add(odd, vi32_set1(0x7fff))), 16);
    const vi32 magnitude = vi32_and(bits, vi32_set1(0x7fffffff));
    return vi32_select_gt(magnitude, vi32_set1(0x7f800000), vi32_or(top, vi32_set1(0x40)), rounded);
}

KT_INLINE void kt_store16(void *dst, kt_dtype dtype, vf32 v) {
    if (dtype == KT_F32)
        vf32_store(dst, v);
    else if (dtype == KT_F16)
        vf32_store_f16(dst, v);
    else
        vi32_store_u16(dst, kt_bf16_bits(v));
}

/* Elements i .. i + 15 of a row of n, zeros past its end. */
KT_INLINE vf32 kt_load_tail(const void *src, kt_dtype dtype, int64_t i, int64_t n) {
    const char *p = (const char *)src + i * kt_size(dtype);
    if (i + 16 <= n)
        return kt_load16(p, dtype);
    char buffer[64] = {0};
    if (i < n)
        memcpy(buffer, p, (size_t)((n - i) * kt_size(dtype)));
    return kt_load16(buffer, dtype);
}

static const char *kt_source_row(const kt_source *src, int64_t r) {
    return (const char *)src->values + r * src->row_stride * kt_size(src->dtype);
}

/* Sixteen strided rows as contiguous float32; missing rows are not touched. */
static void kt_gather_rows(const kt_source *src, int64_t n, int64_t k, float *dst, int64_t ld) {
    const int64_t size = kt_size(src->dtype);
    for (int64_t j = 0; j < k; j++) {
        char values[64] = {0};
        float wide[16];
        for (int64_t r = 0; r < n; r++)
            memcpy(values + r * size, kt_source_row(src, r) + j * src->col_stride * size, (size_t)size);
        vf32_store(wide, kt_load16(values, src->dtype));
        for (int64_t r = 0; r < n; r++)
            dst[r * ld + j] = wide[r];
    }
}

/* The same, columns contiguous: dst[j][r] for j < ld, zeros past n rows and k columns. */
KT_INLINE void kt_gather_lanes_of(const kt_source *src, int64_t size, int64_t n, int64_t k, int64_t ld, float *dst) {
    const char *from = src->values;
    for (int64_t j = 0; j < k; j++, from += src->col_stride * size) {
        char values[64] = {0};
        for (int64_t r = 0; r < n; r++)
            memcpy(values + r * size, from + r * src->row_stride * size, (size_t)size);
        vf32_store(dst + j * KT_BLOCK, kt_load16(values, src->dtype));
    }
    memset(dst + k * KT_BLOCK, 0, (size_t)((ld - k) * KT_BLOCK) * sizeof *dst);
}
static void kt_gather_lanes(const kt_source *src, int64_t n, int64_t k, int64_t ld, float *dst) {
    if (src->dtype == KT_F32)
        kt_gather_lanes_of(src, 4, n, k, ld, dst);
    else
        kt_gather_lanes_of(src, 2, n, k, ld, dst);
}

/* Bits of the largest magnitude; NaN and inf compare above every finite value. */
#define KT_NOT_FINITE 0x7f800000
KT_INLINE int32_t kt_absmax(const void *src, kt_dtype dtype, int64_t k) {
    vi32 most = vi32_set1(0);
    for (int64_t i = 0; i < k; i += 16)
        most = vi32_max(most, vi32_and(vf32_bits(kt_load_tail(src, dtype, i, k)), vi32_set1(0x7fffffff)));
    return vi32_hmax(most);
}

/* Where row r has its first value that is not finite, or k. */
static int64_t kt_not_finite(const kt_source *src, int64_t r, int64_t k) {
    int64_t j = 0;
    while (j < k && kt_absmax(kt_source_row(src, r) + j * src->col_stride * kt_size(src->dtype), src->dtype, 1) <
                        KT_NOT_FINITE)
        j++;
    return j;
}

static void kt_store_row(const float *src, int64_t n, kt_dtype dtype, void *dst) {
    for (int64_t i = 0; i < n; i += 16) {
        char *p = (char *)dst + i * kt_size(dtype);
        if (i + 16 <= n) {
            kt_store16(p, dtype, vf32_load(src + i));
        } else {
            char buffer[64];
            kt_store16(buffer, dtype, kt_load_tail(src, KT_F32, i, n));
            memcpy(p, buffer, (size_t)((n - i) * kt_size(dtype)));
        }
    }
}

#endif

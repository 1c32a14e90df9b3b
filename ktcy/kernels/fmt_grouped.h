/* Formats of integer codes with a 16-bit scale for each group of K (layouts in table.h): rawint4, q4_0, q8_0, gptq*. */
#ifndef KT_FMT_GROUPED_H
#define KT_FMT_GROUPED_H

#include "gemm_s16.h"

/* What the instances differ in; a compile-time constant at each call. */
typedef struct {
    int bits;
    int64_t group;
    int zeros; /* whether zero points are stored */
    kt_dtype scale;
} grouped;

KT_INLINE int64_t grouped_weight_bytes(grouped f, int64_t k) { return 2 * f.bits * kt_round_up(k, KT_KPAD); }
KT_INLINE int64_t grouped_groups(grouped f, int64_t k) {
    return (kt_round_up(k, KT_KPAD) + f.group - 1) / f.group;
}
KT_INLINE int64_t grouped_scale_bytes(grouped f, int64_t k) {
    return kt_round_up(grouped_groups(f, k) * (f.zeros ? 40 : 32), 64);
}
/* As they are stored: int8 codes as code + 128. */
KT_INLINE int32_t grouped_zero(grouped f) { return f.bits == 8 ? 128 : 8; }
/* Where a word of row r holds value i. */
KT_INLINE int64_t grouped_shift(grouped f, int64_t i) { return i % 2 * 16 + i % (32 / f.bits) / 2 * f.bits; }

KT_INLINE int64_t grouped_pack(grouped f, const kt_source *src, int64_t n, int64_t k, void *weight, void *scale) {
    const int64_t groups = grouped_groups(f, k), padded = kt_round_up(k, KT_KPAD), per_word = 32 / f.bits;
    uint32_t *words = weight;
    uint16_t *scales = scale;
    uint8_t *zeros = (uint8_t *)(scales + KT_BLOCK * groups);
    memset(scale, 0, (size_t)grouped_scale_bytes(f, k));
    for (int64_t r = 0; r < KT_BLOCK; r++) {
        const uint8_t *codes = src->values + r * src->row_stride;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t i0 = g * f.group, i1 = i0 + f.group < padded ? i0 + f.group : padded;
            const int64_t end = r >= n || k < i0 ? i0 : k < i1 ? k : i1;
            int32_t zero = grouped_zero(f);
            float step[16] = {0};
            if (end > i0) {
                uint16_t *s = &scales[g * KT_BLOCK + r];
                memcpy(s, (const uint16_t *)src->scale + r * src->scale_stride + g, 2);
                vf32_store(step, kt_load_tail(s, f.scale, 0, 1));
            }
            if (f.zeros) {
                zero = end > i0 ? src->zero[r * src->zero_stride + g] : 0;
                zeros[g * 8 + r % 8] |= (uint8_t)(zero << r / 8 * 4);
            }
            for (int64_t i = i0; i < i1; i += per_word) {
                uint32_t word = 0;
                for (int64_t j = i; j < i + per_word; j++) {
                    const int32_t code = j >= end ? zero : codes[j * src->col_stride] ^ (f.bits == 8 ? 0x80 : 0);
                    const float value = (float)(code - zero) * step[0];
                    if (value - value != 0)
                        return 1 + r * k + j;
                    word |= (uint32_t)code << grouped_shift(f, j);
                }
                words[i / per_word * KT_BLOCK + r] = word;
            }
        }
    }
    return 0;
}

KT_INLINE void grouped_unpack(grouped f, const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    const uint32_t *words = weight;
    const uint8_t *zeros = (const uint8_t *)scale + 32 * grouped_groups(f, k);
    for (int64_t i = 0; i < k; i++) {
        const int64_t g = i / f.group;
        float steps[16];
        vf32_store(steps, kt_load16((const uint16_t *)scale + g * KT_BLOCK, f.scale));
        for (int64_t r = 0; r < KT_BLOCK; r++) {
            const int32_t zero = f.zeros ? zeros[g * 8 + r % 8] >> r / 8 * 4 & 15 : grouped_zero(f);
            const int32_t code = words[i * f.bits / 32 * KT_BLOCK + r] >> grouped_shift(f, i) & ((1 << f.bits) - 1);
            dst[r * ld + i] = (float)(code - zero) * steps[r];
        }
    }
}

KT_INLINE vf32 grouped_scale(grouped f, const kt_strip *now, int64_t n, int64_t i) {
    const char *of = (const char *)now->g->scale + (now->block + n) * grouped_scale_bytes(f, now->g->k);
    return kt_load16(of + i / f.group * 32, f.scale);
}

/* Line j of 16 as words: codes as they are stored. */
KT_INLINE vi32 grouped_words(grouped f, const char *w, int64_t j, int in_place) {
    const int64_t lines = 16 / f.bits;
    const vi32 v = vi32_load((const int32_t *)(w + j / lines * 64));
    if (j % lines == lines - 1)
        return vi16_shr(v, (unsigned)(16 - f.bits));
    const int64_t at = j % lines * f.bits, mask = ((1 << f.bits) - 1) << (in_place ? at : 0);
    return vi32_and(in_place || !at ? v : vi32_shr(v, (unsigned)at), vi32_set1((int32_t)(0x10001 * mask)));
}

/* Vector j of 8 as bytes: codes as they are stored. */
KT_INLINE vi32 grouped_bytes(grouped f, const char *w, int64_t j, int in_place) {
    if (f.bits == 8)
        return vi32_load((const int32_t *)(w + j * 64));
    const vi32 v = vi32_load((const int32_t *)(w + j / 2 * 64));
    if (j % 2 && in_place)
        return vi32_and(v, vi32_set1((int32_t)0xf0f0f0f0));
    return vi32_and(j % 2 ? vi32_shr(v, 4) : v, vi32_set1(0x0f0f0f0f));
}

#define KT_GROUPED(name, bits, group, zeros, dtype) \
    static const grouped name##_codes = {bits, group, zeros, dtype}; \
    static int64_t name##_weight_bytes(int64_t k) { return grouped_weight_bytes(name##_codes, k); } \
    static int64_t name##_scale_bytes(int64_t k) { return grouped_scale_bytes(name##_codes, k); } \
    static int64_t name##_pack_work(int64_t k) { return 0; } \
    static int64_t name##_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) { \
        return grouped_pack(name##_codes, src, n, k, weight, scale); \
    } \
    static void name##_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) { \
        grouped_unpack(name##_codes, weight, scale, k, dst, ld); \
    } \
    KT_INLINE vf32 name##_scale(const kt_strip *now, int64_t n, int64_t i) { \
        return grouped_scale(name##_codes, now, n, i); \
    } \
    KT_INLINE vi32 name##_words(const char *w, int64_t j, int in_place) { \
        return grouped_words(name##_codes, w, j, in_place); \
    } \
    KT_INLINE vi32 name##_bytes(const char *w, int64_t j, int in_place) { \
        return grouped_bytes(name##_codes, w, j, in_place); \
    } \
    KT_INLINE vf32 name##_group_scale(const char *of, int64_t g) { return kt_load16(of + 32 * g, dtype); } \
    KT_INLINE vf32 name##_zeros(const char *of, int64_t g, int64_t groups) { \
        return vf32_from_vi32(vi32_load_u4((const uint8_t *)of + 32 * groups + 8 * g)); \
    } \
    enum { name##_zero = zeros ? 0 : 1 << (bits - 1) }; \
    static const s16_codes name##_s16 = {group, bits, name##_zero, name##_words, name##_bytes, name##_zero, 0, \
                                         name##_group_scale, zeros ? name##_zeros : NULL}; \
    KT_S16_PRODUCTS(name, name##_s16, s16_sums, name##_scale)

KT_GROUPED(rawint4, 4, 32, 0, KT_BF16)
KT_GROUPED(q4_0, 4, 32, 0, KT_F16)
KT_GROUPED(q8_0, 8, 32, 0, KT_F16)
KT_GROUPED(gptq32, 4, 32, 1, KT_F16)
KT_GROUPED(gptq64, 4, 64, 1, KT_F16)
KT_GROUPED(gptq128, 4, 128, 1, KT_F16)

#endif

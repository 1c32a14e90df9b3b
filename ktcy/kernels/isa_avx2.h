/* AVX2, FMA and F16C: the vocabulary on pairs of 256-bit registers. */
#ifndef KT_ISA_AVX2_H
#define KT_ISA_AVX2_H

#include "inline.h"
#include <immintrin.h>

typedef struct {
    __m256 lo, hi;
} vf32;
typedef struct {
    __m256i lo, hi;
} vi32;

#define KT_F32_BINARY(name, op) \
    KT_INLINE vf32 name(vf32 a, vf32 b) { return (vf32){op(a.lo, b.lo), op(a.hi, b.hi)}; }
#define KT_I32_BINARY(name, op) \
    KT_INLINE vi32 name(vi32 a, vi32 b) { return (vi32){op(a.lo, b.lo), op(a.hi, b.hi)}; }

KT_F32_BINARY(vf32_add, _mm256_add_ps)
KT_F32_BINARY(vf32_sub, _mm256_sub_ps)
KT_F32_BINARY(vf32_mul, _mm256_mul_ps)
KT_F32_BINARY(vf32_div, _mm256_div_ps)
KT_F32_BINARY(vf32_min, _mm256_min_ps)
KT_F32_BINARY(vf32_max, _mm256_max_ps)
KT_I32_BINARY(vi32_add, _mm256_add_epi32)
KT_I32_BINARY(vi32_sub, _mm256_sub_epi32)
KT_I32_BINARY(vi32_and, _mm256_and_si256)
KT_I32_BINARY(vi32_or, _mm256_or_si256)
KT_I32_BINARY(vi32_max, _mm256_max_epi32)
/* (a & mask) | b */
KT_INLINE vi32 vi32_and_or(vi32 a, vi32 mask, vi32 b) { return vi32_or(vi32_and(a, mask), b); }
KT_I32_BINARY(vi32_xor, _mm256_xor_si256)
KT_I32_BINARY(vi16_mul, _mm256_mullo_epi16)
KT_I32_BINARY(vi16_add, _mm256_add_epi16)
KT_I32_BINARY(vi16_sub, _mm256_sub_epi16)
KT_I32_BINARY(vi8_sub, _mm256_sub_epi8)

KT_INLINE vf32 vf32_load(const float *p) { return (vf32){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KT_INLINE void vf32_store(float *p, vf32 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
KT_INLINE vf32 vf32_set1(float x) { return (vf32){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KT_INLINE vi32 vi32_load(const int32_t *p) {
    return (vi32){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
KT_INLINE void vi32_store(int32_t *p, vi32 v) {
    _mm256_storeu_si256((__m256i *)p, v.lo);
    _mm256_storeu_si256((__m256i *)(p + 8), v.hi);
}
KT_INLINE vi32 vi32_set1(int32_t x) { return (vi32){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

KT_INLINE vf32 vf32_fma(vf32 a, vf32 b, vf32 c) {
    return (vf32){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
KT_INLINE vf32 vf32_round(vf32 a) {
    const int even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (vf32){_mm256_round_ps(a.lo, even), _mm256_round_ps(a.hi, even)};
}
KT_INLINE vi32 vi32_from_vf32(vf32 a) { return (vi32){_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
KT_INLINE vf32 vf32_from_vi32(vi32 a) { return (vf32){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
KT_INLINE vi32 vf32_bits(vf32 a) { return (vi32){_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
KT_INLINE vf32 vi32_float(vi32 a) { return (vf32){_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
#define vi32_shl(a, n) ((vi32){_mm256_slli_epi32((a).lo, n), _mm256_slli_epi32((a).hi, n)})
#define vi32_shr(a, n) ((vi32){_mm256_srli_epi32((a).lo, n), _mm256_srli_epi32((a).hi, n)})
#define vi32_sar(a, n) ((vi32){_mm256_srai_epi32((a).lo, n), _mm256_srai_epi32((a).hi, n)})
#define vi16_shr(a, n) ((vi32){_mm256_srli_epi16((a).lo, n), _mm256_srli_epi16((a).hi, n)})
KT_INLINE vi32 vi32_select_gt(vi32 a, vi32 b, vi32 yes, vi32 no) {
    return (vi32){_mm256_blendv_epi8(no.lo, yes.lo, _mm256_cmpgt_epi32(a.lo, b.lo)),
                  _mm256_blendv_epi8(no.hi, yes.hi, _mm256_cmpgt_epi32(a.hi, b.hi))};
}

KT_INLINE vi32 vi32_load_u16(const uint16_t *p) {
    return (vi32){_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
KT_INLINE vi32 vi32_load_s16(const int16_t *p) {
    return (vi32){_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
/* Lanes 0..7 are the lower, 8..15 the upper halves of 8 bytes. */
KT_INLINE vi32 vi32_load_u4(const uint8_t *p) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return (vi32){_mm256_and_si256(bytes, _mm256_set1_epi32(15)), _mm256_srli_epi32(bytes, 4)};
}
KT_INLINE vi32 vi32_load_s8(const int8_t *p) {
    return (vi32){_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                  _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}
/* Lanes must be in 0..65535. */
KT_INLINE void vi32_store_u16(uint16_t *p, vi32 v) {
    const __m256i w = _mm256_packus_epi32(v.lo, v.hi);
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(w, 0xd8));
}
/* Lanes must be in -128..127. */
KT_INLINE void vi32_store_s8(int8_t *p, vi32 v) {
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
KT_INLINE vf32 vf32_load_f16(const uint16_t *p) {
    return (vf32){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
KT_INLINE void vf32_store_f16(uint16_t *p, vf32 v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}

KT_INLINE int32_t vi32_hmax(vi32 v) {
    const __m256i m = _mm256_max_epi32(v.lo, v.hi);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
KT_INLINE int32_t vi32_hsum(vi32 v) {
    const __m256i m = _mm256_add_epi32(v.lo, v.hi);
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

KT_INLINE vi32 vi32_load_u8(const uint8_t *p) {
    return (vi32){_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                  _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
}

/* The e4m3 codes of the even (odd = 0, a constant) or odd bytes: their values over 256 as bfloat16. 16 times a signed
 * byte has a code's seven lower bits where exponent and mantissa belong. */
KT_INLINE __m256i kt_e4m3_bits(__m256i v, int odd) {
    return odd ? _mm256_srai_epi16(v, 4) : _mm256_maddubs_epi16(_mm256_set1_epi16(16), v);
}
/* Of codes that are normal numbers. */
KT_INLINE vi32 vi16_load_normal_e4m3(const char *p, int odd) {
    const vi32 v = vi32_load((const int32_t *)p), bits = {kt_e4m3_bits(v.lo, odd), kt_e4m3_bits(v.hi, odd)};
    vi32 line = vi32_and_or(bits, vi32_set1((int32_t)0x87f087f0), vi32_set1(0x38003800));
    /* gcc would mask even and odd values apart, with twice the constants, and run out of registers. */
    __asm__("" : "+x"(line.lo), "+x"(line.hi));
    return line;
}
KT_INLINE __m256i kt_e4m3_half(__m256i v, int odd) {
    /* Multiples of 2^-17: lower bytes, then upper ones. */
    const __m128i subnormal = _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60, 0, 0x37, 0x37, 0x37,
                                            0x38, 0x38, 0x38, 0x38);
    const __m256i zero = _mm256_setzero_si256(), least = _mm256_set1_epi16(0x3800);
    const __m256i bits = kt_e4m3_bits(v, odd), m = _mm256_and_si256(_mm256_srli_epi16(bits, 4), _mm256_set1_epi16(7));
    const __m256i at = _mm256_add_epi16(_mm256_or_si256(m, _mm256_slli_epi16(m, 8)), _mm256_set1_epi16(0x0800));
    const __m256i normal = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi16(0x07f0)), least);
    const __m256i small = _mm256_cmpeq_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x0780)), zero);
    const __m256i found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(subnormal), at);
    const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi16((short)0x8000));
    return _mm256_or_si256(_mm256_blendv_epi8(normal, found, small), sign);
}
KT_INLINE vi32 vi16_load_e4m3(const char *p, int odd) {
    const vi32 v = vi32_load((const int32_t *)p);
    return (vi32){kt_e4m3_half(v.lo, odd), kt_e4m3_half(v.hi, odd)};
}

/* Nibble j of each 16 bits, an e2m1 code: the bfloat16 of half its value; -0 is 0. */
KT_INLINE __m256i kt_e2m1_half(__m256i v, int64_t j) {
    const __m128i high = _mm_setr_epi8(0, 0x3e, 0x3f, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0, (char)0xbe, (char)0xbf,
                                       (char)0xbf, (char)0xbf, (char)0xbf, (char)0xc0, (char)0xc0);
    const __m128i low = _mm_setr_epi8(0, (char)0x80, 0, 0x40, (char)0x80, (char)0xc0, 0, 0x40, 0, (char)0x80, 0, 0x40,
                                      (char)0x80, (char)0xc0, 0, 0x40);
    const __m256i code = _mm256_and_si256(j & 1 ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    const __m256i h = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(high), code);
    const __m256i l = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(low), code);
    const __m256i upper = _mm256_set1_epi16((short)0xff00);
    return j < 2 ? _mm256_blendv_epi8(l, _mm256_slli_epi16(h, 8), upper)
                 : _mm256_blendv_epi8(_mm256_srli_epi16(l, 8), h, upper);
}
/* Sixteen rows of two e2m1 codes, nibble j (a constant) of the halves of 32 bits: half of their values; -0 is 0. */
KT_INLINE void vf32_load_e2m1(const char *p, int64_t j, vf32 *even, vf32 *odd) {
    const vi32 v = vi32_load((const int32_t *)p), line = {kt_e2m1_half(v.lo, j), kt_e2m1_half(v.hi, j)};
    *even = vi32_float(vi32_shl(line, 16));
    *odd = vi32_float(vi32_and(line, vi32_set1((int32_t)0xffff0000)));
}

/* maddubs multiplies u8 by s8: |w| by x with the sign of w. |w x| <= 128 * 127, so a pair fits 16 bits. */
typedef vi32 vs8w;
KT_INLINE vs8w vs8w_load(const int8_t *line) { return vi32_load((const int32_t *)line); }
KT_INLINE __m256i kt_dot_half(__m256i acc, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
KT_INLINE vi32 vi32_dot_s8(vi32 acc, vs8w w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    return (vi32){kt_dot_half(acc.lo, w.lo, v), kt_dot_half(acc.hi, w.hi, v)};
}
KT_INLINE vi32 vi32_dot_finish(vi32 acc, int32_t sum) { return acc; }

/* A short sum begins at the sum of two words and takes products u8 x s8 of four bytes a lane; it is kept as two words,
 * which never may leave 16 bits. Its multiple by a factor then joins a sum of 32 bits. */
KT_INLINE vi32 vshort_start(int32_t words) { return vi32_set1(words); }
KT_INLINE vi32 vshort_dot(vi32 sum, vi32 u, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    sum.lo = _mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(u.lo, v));
    sum.hi = _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(u.hi, v));
    /* gcc would add in another order and run out of registers. */
    __asm__("" : "+x"(sum.lo), "+x"(sum.hi));
    return sum;
}
KT_INLINE vi32 vshort_factor(vi32 v) {
    const __m256i twice =
        _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0d0c0d0c09080908, 0x0504050401000100));
    return (vi32){_mm256_shuffle_epi8(v.lo, twice), _mm256_shuffle_epi8(v.hi, twice)};
}
KT_INLINE vi32 vshort_add(vi32 acc, vi32 sum, vi32 factor) {
    return (vi32){_mm256_add_epi32(acc.lo, _mm256_madd_epi16(sum.lo, factor.lo)),
                  _mm256_add_epi32(acc.hi, _mm256_madd_epi16(sum.hi, factor.hi))};
}

/* Plus the products of 16-bit halves with those of x. */
KT_INLINE vi32 vi32_dot_s16(vi32 acc, vi32 words, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    acc.lo = _mm256_add_epi32(acc.lo, _mm256_madd_epi16(words.lo, v));
    acc.hi = _mm256_add_epi32(acc.hi, _mm256_madd_epi16(words.hi, v));
    /* gcc would add in another order and run out of registers. */
    __asm__("" : "+x"(acc.lo), "+x"(acc.hi));
    return acc;
}
/* Nibble j of each 16 bits, an e2m1 code: 512 times its value. */
KT_INLINE __m256i kt_e2m1_word(__m256i v, int64_t j) {
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i code = _mm256_and_si256(j & 1 ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(twice), code);
    return j < 2 ? _mm256_slli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16((short)0xff00));
}
KT_INLINE vi32 vi16_load_e2m1(const char *p, int64_t j) {
    const vi32 v = vi32_load((const int32_t *)p);
    return (vi32){kt_e2m1_word(v.lo, j), kt_e2m1_word(v.hi, j)};
}

/* 16 registers: 4 rows x 1 block of accumulators, |w|, w, x and a product. */
#define KT_S8_ROWS 4
#define KT_S8_BLOCKS 1

/* Rows of the bf16 core at once, and blocks for one row: three accumulators each. */
#define KT_BF16_ROWS 2
#define KT_BF16_BLOCKS 1
/* With less gcc spills an accumulator (1.4 of the time). */
#define KT_BF16_LINES 16

/* Rows of the int16 core at once, few and from tiles, and blocks of the latter: two accumulators each. */
#define KT_S16_FEW_ROWS 4
#define KT_S16_TILE_ROWS 4
#define KT_S16_TILE_BLOCKS 1

/* Lines of a panel that are made before they are stored: more would be spilled. */
#define KT_PANEL_LINES 2

/* Rows of short sums at once: two accumulators each. */
#define KT_SHORT_ROWS 2

#define KT_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)

KT_INLINE uint32_t kt_csr_get(void) { return _mm_getcsr(); }
KT_INLINE void kt_csr_set(uint32_t v) { _mm_setcsr(v); }
KT_INLINE void kt_tiles_begin(void) {}
KT_INLINE void kt_tiles_end(void) {}

/* Register-only multiply-adds, unrolled by force or the sums lie in memory; they feed back into an operand, or the
 * compiler would hoist the product. */
KT_INLINE uint64_t kt_probe_s8(int64_t rounds) {
    const __m256i one = _mm256_set1_epi16(1), w = _mm256_set1_epi8(3);
    __m256i acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        acc[i] = _mm256_set1_epi32(i);
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w, acc[i]), one));
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        __asm__ volatile("" : : "x"(acc[i]));
    return (uint64_t)rounds * 12 * 32;
}

KT_INLINE uint64_t kt_probe_bf16(int64_t rounds) {
    const __m256 w = _mm256_set1_ps(0.5f), x = _mm256_set1_ps(0.25f);
    __m256 acc[10];
#pragma GCC unroll 12
    for (int i = 0; i < 10; i++)
        acc[i] = _mm256_set1_ps((float)i);
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
        for (int i = 0; i < 10; i++)
            acc[i] = _mm256_fmadd_ps(acc[i], w, x);
#pragma GCC unroll 12
    for (int i = 0; i < 10; i++)
        __asm__ volatile("" : : "x"(acc[i]));
    return (uint64_t)rounds * 10 * 8;
}

#define KT_FEW_ROWS 4

#endif

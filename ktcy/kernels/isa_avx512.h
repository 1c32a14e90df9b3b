/* AVX-512 F, BW, DQ, VL: the vocabulary on one 512-bit register. */
#ifndef KT_ISA_AVX512_H
#define KT_ISA_AVX512_H

#include "inline.h"
#include <immintrin.h>

typedef __m512 vf32;
typedef __m512i vi32;

#define vf32_add _mm512_add_ps
#define vf32_sub _mm512_sub_ps
#define vf32_mul _mm512_mul_ps
#define vf32_div _mm512_div_ps
#define vf32_min _mm512_min_ps
#define vf32_max _mm512_max_ps
#define vf32_fma _mm512_fmadd_ps
#define vf32_load(p) _mm512_loadu_ps(p)
#define vf32_store(p, v) _mm512_storeu_ps(p, v)
#define vf32_set1 _mm512_set1_ps
#define vi32_add _mm512_add_epi32
#define vi32_sub _mm512_sub_epi32
#define vi32_and _mm512_and_si512
#define vi32_or _mm512_or_si512
#define vi32_max _mm512_max_epi32
#define vi32_xor _mm512_xor_si512
#define vi16_mul _mm512_mullo_epi16
#define vi16_add _mm512_add_epi16
#define vi16_sub _mm512_sub_epi16
#define vi8_sub _mm512_sub_epi8
#define vi32_load(p) _mm512_loadu_si512(p)
#define vi32_store(p, v) _mm512_storeu_si512(p, v)
#define vi32_set1 _mm512_set1_epi32
#define vi32_shl(a, n) _mm512_slli_epi32(a, n)
#define vi32_shr(a, n) _mm512_srli_epi32(a, n)
#define vi32_sar(a, n) _mm512_srai_epi32(a, n)
#define vi16_shr(a, n) _mm512_srli_epi16(a, n)
#define vi32_from_vf32 _mm512_cvtps_epi32
#define vf32_from_vi32 _mm512_cvtepi32_ps
#define vf32_bits _mm512_castps_si512
#define vi32_float _mm512_castsi512_ps
#define vf32_round(a) _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define vi32_select_gt(a, b, yes, no) _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, b), no, yes)
/* (a & mask) | b */
#define vi32_and_or(a, mask, b) _mm512_ternarylogic_epi32(a, mask, b, 0xea)
/* Lanes 0..7 are the lower, 8..15 the upper halves of 8 bytes. */
KT_INLINE vi32 vi32_load_u4(const uint8_t *p) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p), high = _mm_srli_epi16(bytes, 4);
    return _mm512_cvtepu8_epi32(_mm_and_si128(_mm_unpacklo_epi64(bytes, high), _mm_set1_epi8(15)));
}
#define vi32_load_u16(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define vi32_load_s16(p) _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define vi32_load_s8(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define vi32_store_u16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(v))
#define vi32_store_s8(p, v) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(v))
#define vf32_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define vf32_store_f16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define vi32_hmax _mm512_reduce_max_epi32
#define vi32_hsum _mm512_reduce_add_epi32

#define vi32_load_u8(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))

/* The e4m3 codes of the even (odd = 0, a constant) or odd bytes: their values over 256 as bfloat16. 16 times a signed
 * byte has a code's seven lower bits where exponent and mantissa belong. */
KT_INLINE vi32 kt_e4m3_bits(const char *p, int odd) {
    const vi32 v = vi32_load(p);
    return odd ? _mm512_srai_epi16(v, 4) : _mm512_maddubs_epi16(_mm512_set1_epi16(16), v);
}
/* Of codes that are normal numbers. */
KT_INLINE vi32 vi16_load_normal_e4m3(const char *p, int odd) {
    return vi32_and_or(kt_e4m3_bits(p, odd), _mm512_set1_epi16((short)0x87f0), _mm512_set1_epi16(0x3800));
}
KT_INLINE vi32 vi16_load_e4m3(const char *p, int odd) {
    /* Multiples of 2^-17, by the lower three bits of an index where the upper two are zero. */
    static const uint16_t subnormal[32] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
    const vi32 bits = kt_e4m3_bits(p, odd);
    const vi32 normal = vi32_and_or(bits, _mm512_set1_epi16(0x07f0), _mm512_set1_epi16(0x3800));
    const __mmask32 small = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x0780));
    const vi32 magnitude = _mm512_mask_permutexvar_epi16(normal, small, vi16_shr(bits, 4), vi32_load(subnormal));
    return vi32_and_or(bits, _mm512_set1_epi16((short)0x8000), magnitude);
}

/* Sixteen rows of two e2m1 codes, nibble j (a constant) of the halves of 32 bits: half of their values; -0 is 0.
 * vpermps looks at four bits only. */
KT_INLINE void vf32_load_e2m1(const char *p, int64_t j, vf32 *even, vf32 *odd) {
    static const float table[16] = {0, 0.25f,  0.5f,  0.75f,  1,  1.5f,  2,  3,
                                    0, -0.25f, -0.5f, -0.75f, -1, -1.5f, -2, -3};
    const vi32 v = vi32_load(p);
    *even = _mm512_permutexvar_ps(j ? vi32_shr(v, 4 * (unsigned)j) : v, vf32_load(table));
    *odd = _mm512_permutexvar_ps(vi32_shr(v, 16 + 4 * (unsigned)j), vf32_load(table));
}

#ifndef KT_HAVE_DOT_S8
/* maddubs multiplies u8 by s8: |w| by x with the sign of w. |w x| <= 128 * 127, so a pair fits 16 bits. */
typedef struct {
    __m512i magnitude;
    __mmask64 negative;
} vs8w;
KT_INLINE vs8w vs8w_load(const int8_t *line) {
    const __m512i w = _mm512_loadu_si512(line);
    return (vs8w){_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
KT_INLINE vi32 vi32_dot_s8(vi32 acc, vs8w w, int32_t x) {
    const __m512i v = _mm512_set1_epi32(x);
    const __m512i s = _mm512_mask_sub_epi8(v, w.negative, _mm512_setzero_si512(), v);
    const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, s);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
KT_INLINE vi32 vi32_dot_finish(vi32 acc, int32_t sum) { return acc; }

/* A short sum begins at the sum of two words and takes products u8 x s8 of four bytes a lane; it is kept as two words,
 * which never may leave 16 bits. Its multiple by a factor then joins a sum of 32 bits. */
KT_INLINE vi32 vshort_start(int32_t words) { return _mm512_set1_epi32(words); }
KT_INLINE vi32 vshort_dot(vi32 sum, vi32 u, int32_t x) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(u, _mm512_set1_epi32(x)));
}
KT_INLINE vi32 vshort_factor(vi32 v) { return vi32_or(vi32_shl(v, 16), vi32_and(v, vi32_set1(0xffff))); }
KT_INLINE vi32 vshort_add(vi32 acc, vi32 sum, vi32 factor) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(sum, factor));
}

/* Plus the products of 16-bit halves with those of x. */
KT_INLINE vi32 vi32_dot_s16(vi32 acc, vi32 words, int32_t x) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(words, _mm512_set1_epi32(x)));
}
#endif

/* Nibble j of each 16 bits, an e2m1 code: 512 times its value. vpermw looks at five bits, so the table repeats. */
KT_INLINE vi32 vi16_load_e2m1(const char *p, int64_t j) {
    static const int16_t table[32] = {0, 256,  512,  768,  1024,  1536,  2048,  3072,
                                      0, -256, -512, -768, -1024, -1536, -2048, -3072,
                                      0, 256,  512,  768,  1024,  1536,  2048,  3072,
                                      0, -256, -512, -768, -1024, -1536, -2048, -3072};
    const vi32 v = vi32_load(p);
    return _mm512_permutexvar_epi16(j ? vi32_shr(v, 4 * (unsigned)j) : v, vi32_load(table));
}

/* 32 registers: 8 rows x 2 blocks of accumulators. */
#define KT_S8_ROWS 8
#define KT_S8_BLOCKS 2

/* Rows of the bf16 core at once, and blocks for one row: three accumulators each. */
#define KT_BF16_ROWS 4
#define KT_BF16_BLOCKS 2
/* Lines that are decoded before several rows use them. */
#define KT_BF16_LINES 1

/* Rows of the int16 core at once, few and from tiles, and blocks of the latter: one accumulator each. */
#define KT_S16_FEW_ROWS 4
#define KT_S16_TILE_ROWS 8
#define KT_S16_TILE_BLOCKS 2

/* Lines of a panel that are made before they are stored (up to -2 % at 4096 tokens against sixteen). */
#define KT_PANEL_LINES 4

/* Rows of short sums at once: two accumulators each. */
#define KT_SHORT_ROWS 4

/* To L2 only: -1 % for int8 and int4 at one token, -3 % for int4 at four, else as T0. */
#define KT_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)

KT_INLINE uint32_t kt_csr_get(void) { return _mm_getcsr(); }
KT_INLINE void kt_csr_set(uint32_t v) { _mm_setcsr(v); }
#ifndef KT_HAVE_TILES
KT_INLINE void kt_tiles_begin(void) {}
KT_INLINE void kt_tiles_end(void) {}
#endif

#ifndef KT_HAVE_PROBE
/* Register-only multiply-adds, unrolled by force or the sums lie in memory; they feed back into an operand, or the
 * compiler would hoist the product. */
KT_INLINE uint64_t kt_probe_s8(int64_t rounds) {
    const __m512i one = _mm512_set1_epi16(1), w = _mm512_set1_epi8(3);
    __m512i acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        acc[i] = _mm512_set1_epi32(i);
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            acc[i] = _mm512_add_epi32(acc[i], _mm512_madd_epi16(_mm512_maddubs_epi16(w, acc[i]), one));
    int32_t sum = 0;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        sum += vi32_hsum(acc[i]);
    __asm__ volatile("" : : "r"(sum));
    return (uint64_t)rounds * 12 * 64;
}
#endif

#ifndef KT_HAVE_TILES
KT_INLINE uint64_t kt_probe_bf16(int64_t rounds) {
    const __m512 w = _mm512_set1_ps(0.5f), x = _mm512_set1_ps(0.25f);
    __m512 acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        acc[i] = _mm512_set1_ps((float)i);
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            acc[i] = _mm512_fmadd_ps(acc[i], w, x);
    float sum[16];
#pragma GCC unroll 12
    for (int i = 1; i < 12; i++)
        acc[0] = _mm512_add_ps(acc[0], acc[i]);
    _mm512_storeu_ps(sum, acc[0]);
    __asm__ volatile("" : : "x"(sum[0]));
    return (uint64_t)rounds * 12 * 16;
}
#endif

#ifndef KT_FEW_ROWS
#define KT_FEW_ROWS 4
#endif

#endif

/* AVX-512 VNNI: one instruction for the int8 dot product. */
#ifndef KT_ISA_AVX512_VNNI_H
#define KT_ISA_AVX512_VNNI_H

#include "inline.h"
#include <immintrin.h>

/* vpdpbusd multiplies u8 by s8. The weights become u8 (w + 128), once a line for all rows, so that the
 * activations stay as they are; 128 * sum(x), known since quantization, is taken off at the end. */
#define KT_HAVE_DOT_S8
typedef __m512i vs8w;
KT_INLINE vs8w vs8w_load(const int8_t *line) {
    return _mm512_xor_si512(_mm512_loadu_si512(line), _mm512_set1_epi8((char)0x80));
}
KT_INLINE __m512i vi32_dot_s8(__m512i acc, vs8w w, int32_t x) {
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}
KT_INLINE __m512i vi32_dot_finish(__m512i acc, int32_t sum) {
    return _mm512_sub_epi32(acc, _mm512_set1_epi32((int32_t)(128u * (uint32_t)sum)));
}

/* A short sum (isa_avx512.h) is one number here. It fits 16 bits, so its lower word times the factor's is all of it. */
KT_INLINE __m512i vshort_start(int32_t words) {
    return _mm512_madd_epi16(_mm512_set1_epi32(words), _mm512_set1_epi16(1));
}
KT_INLINE __m512i vshort_dot(__m512i sum, __m512i u, int32_t x) {
    return _mm512_dpbusd_epi32(sum, u, _mm512_set1_epi32(x));
}
KT_INLINE __m512i vshort_factor(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); }
KT_INLINE __m512i vshort_add(__m512i acc, __m512i sum, __m512i factor) {
    return _mm512_dpwssd_epi32(acc, sum, factor);
}

/* Plus the products of 16-bit halves with those of x. */
KT_INLINE __m512i vi32_dot_s16(__m512i acc, __m512i words, int32_t x) {
    return _mm512_dpwssd_epi32(acc, words, _mm512_set1_epi32(x));
}

/* 32 integers of up to 2^15 - 128 as 256 a - b: of each eight, four a, their b, four other a and b. The bytes a word of
 * 8-bit codes is multiplied by, or those for the lower and the upper halves of the bytes of 4-bit codes (table.h). */
KT_INLINE __m512i vi16_split(const int16_t *q, int nibbles) {
    const __m128i order = nibbles ? _mm_setr_epi8(1, 9, 3, 11, 0, 8, 2, 10, 5, 13, 7, 15, 4, 12, 6, 14)
                                  : _mm_setr_epi8(1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14);
    const __m512i v = _mm512_loadu_si512(q), minus = _mm512_sub_epi16(_mm512_setzero_si512(), v);
    const __m512i b = _mm512_srai_epi16(_mm512_slli_epi16(minus, 8), 8);
    const __m512i words = _mm512_or_si512(_mm512_add_epi16(v, b), _mm512_and_si512(b, _mm512_set1_epi16(0xff)));
    return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(order));
}

/* The lower (j = 0) or upper halves of bytes, e2m1 codes: 12 plus twice their values. vpermb looks at six bits of an
 * index, and the table repeats; vpshufb at the uppermost one too. */
KT_INLINE __m512i vi8_load_e2m1(const char *p, int64_t j) {
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i v = _mm512_loadu_si512(p), code = j ? _mm512_srli_epi16(v, 4) : v;
#ifdef KT_HAVE_PERMB
    return _mm512_permutexvar_epi8(code, table);
#else
    return _mm512_shuffle_epi8(table, _mm512_and_si512(code, _mm512_set1_epi8(15)));
#endif
}

#ifndef KT_HAVE_PROBE
#define KT_HAVE_PROBE
KT_INLINE uint64_t kt_probe_s8(int64_t rounds) {
    const __m512i w = _mm512_set1_epi8(3);
    __m512i acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        acc[i] = _mm512_set1_epi32(i);
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            acc[i] = _mm512_dpbusd_epi32(acc[i], w, w);
    int32_t sum = 0;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        sum += _mm512_reduce_add_epi32(acc[i]);
    __asm__ volatile("" : : "r"(sum));
    return (uint64_t)rounds * 12 * 64;
}
#endif

#include "isa_avx512.h"

#endif

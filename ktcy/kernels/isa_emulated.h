/* The AVX-512 and AMX instructions that the isa_*.h headers use, modelled bit for bit on AVX2.
 *
 * Included before a variant's own header, compiled with the flags of avx2: the twins of that variant run its
 * packing, loops and edges on any machine. For tests only; tests/test_isa.py holds the model to the silicon.
 * MXCSR reaches the model by itself, since every float operation is the same one at half the width. */
#ifndef KT_ISA_EMULATED_H
#define KT_ISA_EMULATED_H

#include <immintrin.h>
#include <string.h>

#include "inline.h"

typedef struct {
    __m256 lo, hi;
} emu_m512;
typedef struct {
    __m256i lo, hi;
} emu_m512i;

#define __m512 emu_m512
#define __m512i emu_m512i
/* A mask is kept as lanes of all ones or all zeros. */
#define __mmask64 emu_m512i
#define __mmask32 emu_m512i

#define EMU_PS(name, op) \
    KT_INLINE emu_m512 name(emu_m512 a, emu_m512 b) { return (emu_m512){op(a.lo, b.lo), op(a.hi, b.hi)}; }
#define EMU_SI(name, op) \
    KT_INLINE emu_m512i name(emu_m512i a, emu_m512i b) { return (emu_m512i){op(a.lo, b.lo), op(a.hi, b.hi)}; }

EMU_PS(emu_add_ps, _mm256_add_ps)
EMU_PS(emu_sub_ps, _mm256_sub_ps)
EMU_PS(emu_mul_ps, _mm256_mul_ps)
EMU_PS(emu_div_ps, _mm256_div_ps)
EMU_PS(emu_min_ps, _mm256_min_ps)
EMU_PS(emu_max_ps, _mm256_max_ps)
EMU_SI(emu_add_epi32, _mm256_add_epi32)
EMU_SI(emu_sub_epi32, _mm256_sub_epi32)
EMU_SI(emu_sub_epi16, _mm256_sub_epi16)
EMU_SI(emu_sub_epi8, _mm256_sub_epi8)
EMU_SI(emu_add_epi16, _mm256_add_epi16)
EMU_SI(emu_mullo_epi16, _mm256_mullo_epi16)
EMU_SI(emu_max_epi32, _mm256_max_epi32)
EMU_SI(emu_and_si512, _mm256_and_si256)
EMU_SI(emu_or_si512, _mm256_or_si256)
EMU_SI(emu_xor_si512, _mm256_xor_si256)
EMU_SI(emu_cmpgt_epi32, _mm256_cmpgt_epi32)
EMU_SI(emu_maddubs_epi16, _mm256_maddubs_epi16)
EMU_SI(emu_madd_epi16, _mm256_madd_epi16)
EMU_SI(emu_shuffle_epi8, _mm256_shuffle_epi8)

#define _mm512_add_ps emu_add_ps
#define _mm512_sub_ps emu_sub_ps
#define _mm512_mul_ps emu_mul_ps
#define _mm512_div_ps emu_div_ps
#define _mm512_min_ps emu_min_ps
#define _mm512_max_ps emu_max_ps
#define _mm512_add_epi32 emu_add_epi32
#define _mm512_sub_epi32 emu_sub_epi32
#define _mm512_max_epi32 emu_max_epi32
#define _mm512_and_si512 emu_and_si512
#define _mm512_or_si512 emu_or_si512
#define _mm512_xor_si512 emu_xor_si512
#define _mm512_cmpgt_epi32_mask emu_cmpgt_epi32
#define _mm512_sub_epi16 emu_sub_epi16
#define _mm512_sub_epi8 emu_sub_epi8
#define _mm512_add_epi16 emu_add_epi16
#define _mm512_mullo_epi16 emu_mullo_epi16
#define _mm512_maddubs_epi16 emu_maddubs_epi16
#define _mm512_madd_epi16 emu_madd_epi16
#define _mm512_shuffle_epi8 emu_shuffle_epi8

/* Truth tables of vpternlogd by their number; 0xea is a & b | c. */
KT_INLINE emu_m512i emu_ternarylogic_0xea(emu_m512i a, emu_m512i b, emu_m512i c) {
    return emu_or_si512(emu_and_si512(a, b), c);
}
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32(a, b, c, table) emu_ternarylogic_##table(a, b, c)

KT_INLINE emu_m512 emu_fmadd_ps(emu_m512 a, emu_m512 b, emu_m512 c) {
    return (emu_m512){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
#define _mm512_fmadd_ps emu_fmadd_ps

KT_INLINE emu_m512 emu_loadu_ps(const void *p) {
    return (emu_m512){_mm256_loadu_ps(p), _mm256_loadu_ps((const float *)p + 8)};
}
KT_INLINE void emu_storeu_ps(void *p, emu_m512 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps((float *)p + 8, a.hi);
}
KT_INLINE emu_m512i emu_loadu_si512(const void *p) {
    return (emu_m512i){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
KT_INLINE void emu_storeu_si512(void *p, emu_m512i a) {
    _mm256_storeu_si256(p, a.lo);
    _mm256_storeu_si256((__m256i *)p + 1, a.hi);
}
#define _mm512_loadu_ps emu_loadu_ps
#define _mm512_storeu_ps emu_storeu_ps
#define _mm512_loadu_si512 emu_loadu_si512
#define _mm512_storeu_si512 emu_storeu_si512

KT_INLINE emu_m512 emu_set1_ps(float x) { return (emu_m512){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KT_INLINE emu_m512i emu_set1_epi32(int x) { return (emu_m512i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
KT_INLINE emu_m512i emu_set1_epi16(short x) { return (emu_m512i){_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
KT_INLINE emu_m512i emu_set1_epi8(char x) { return (emu_m512i){_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
KT_INLINE emu_m512i emu_setzero_si512(void) { return emu_set1_epi32(0); }
#define _mm512_set1_ps emu_set1_ps
#define _mm512_set1_epi32 emu_set1_epi32
#define _mm512_set1_epi16 emu_set1_epi16
#define _mm512_set1_epi8 emu_set1_epi8
#define _mm512_setzero_si512 emu_setzero_si512

KT_INLINE emu_m512i emu_castps_si512(emu_m512 a) {
    return (emu_m512i){_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
KT_INLINE emu_m512 emu_castsi512_ps(emu_m512i a) {
    return (emu_m512){_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
KT_INLINE emu_m512i emu_cvtps_epi32(emu_m512 a) {
    return (emu_m512i){_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
KT_INLINE emu_m512 emu_cvtepi32_ps(emu_m512i a) {
    return (emu_m512){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
#define _mm512_castps_si512 emu_castps_si512
#define _mm512_castsi512_ps emu_castsi512_ps
#define _mm512_cvtps_epi32 emu_cvtps_epi32
#define _mm512_cvtepi32_ps emu_cvtepi32_ps

/* The immediates of slli, srli, roundscale and cvtps_ph mean the same at both widths: roundscale's upper four
 * bits, the scale, are zero here. */
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#undef _mm512_slli_epi16
#undef _mm512_srai_epi16
#undef _mm512_roundscale_ps
#undef _mm512_cvtps_ph
#define _mm512_slli_epi32(a, n) ((emu_m512i){_mm256_slli_epi32((a).lo, n), _mm256_slli_epi32((a).hi, n)})
#define _mm512_srli_epi32(a, n) ((emu_m512i){_mm256_srli_epi32((a).lo, n), _mm256_srli_epi32((a).hi, n)})
#define _mm512_srai_epi32(a, n) ((emu_m512i){_mm256_srai_epi32((a).lo, n), _mm256_srai_epi32((a).hi, n)})
#define _mm512_srli_epi16(a, n) ((emu_m512i){_mm256_srli_epi16((a).lo, n), _mm256_srli_epi16((a).hi, n)})
#define _mm512_slli_epi16(a, n) ((emu_m512i){_mm256_slli_epi16((a).lo, n), _mm256_slli_epi16((a).hi, n)})
#define _mm512_srai_epi16(a, n) ((emu_m512i){_mm256_srai_epi16((a).lo, n), _mm256_srai_epi16((a).hi, n)})
#define _mm512_roundscale_ps(a, mode) ((emu_m512){_mm256_round_ps((a).lo, mode), _mm256_round_ps((a).hi, mode)})
#define _mm512_cvtps_ph(a, mode) _mm256_set_m128i(_mm256_cvtps_ph((a).hi, mode), _mm256_cvtps_ph((a).lo, mode))
KT_INLINE emu_m512 emu_cvtph_ps(__m256i a) {
    return (emu_m512){_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
KT_INLINE emu_m512i emu_cvtepu16_epi32(__m256i a) {
    return (emu_m512i){_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                       _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
KT_INLINE emu_m512i emu_cvtepi16_epi32(__m256i a) {
    return (emu_m512i){_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)),
                       _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1))};
}
KT_INLINE emu_m512i emu_cvtepu8_epi32(__m128i a) {
    return (emu_m512i){_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))};
}
KT_INLINE emu_m512i emu_cvtepi8_epi32(__m128i a) {
    return (emu_m512i){_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))};
}
/* vpmovdw and vpmovdb drop the upper bits; they do not saturate. */
KT_INLINE __m256i emu_cvtepi32_epi16(emu_m512i a) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    const __m256i w = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
    return _mm256_permute4x64_epi64(w, 0xd8);
}
KT_INLINE __m128i emu_cvtepi32_epi8(emu_m512i a) {
    const __m256i w = _mm256_and_si256(emu_cvtepi32_epi16(a), _mm256_set1_epi16(0xff));
    return _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
#define _mm512_cvtph_ps emu_cvtph_ps
#define _mm512_cvtepu16_epi32 emu_cvtepu16_epi32
#define _mm512_cvtepi16_epi32 emu_cvtepi16_epi32
#define _mm512_cvtepu8_epi32 emu_cvtepu8_epi32
#define _mm512_cvtepi8_epi32 emu_cvtepi8_epi32
#define _mm512_cvtepi32_epi16 emu_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emu_cvtepi32_epi8

/* vpermps takes the lower four bits of an index; its model on eight lanes takes three, the fourth chooses. */
KT_INLINE __m256 emu_permutexvar_half(__m256i index, emu_m512 table) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.lo, index), _mm256_permutevar8x32_ps(table.hi, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
KT_INLINE emu_m512 emu_permutexvar_ps(emu_m512i index, emu_m512 table) {
    return (emu_m512){emu_permutexvar_half(index.lo, table), emu_permutexvar_half(index.hi, table)};
}
#define _mm512_permutexvar_ps emu_permutexvar_ps
/* vpermw takes the lower five, vpermb six. */
#define EMU_PERMUTE(name, type, count) \
    KT_INLINE emu_m512i name(emu_m512i index, emu_m512i table) { \
        type at[count], from[count]; \
        memcpy(at, &index, 64); \
        memcpy(from, &table, 64); \
        for (int i = 0; i < count; i++) \
            at[i] = from[at[i] % count]; \
        memcpy(&index, at, 64); \
        return index; \
    }
EMU_PERMUTE(emu_permutexvar_epi16, uint16_t, 32)
EMU_PERMUTE(emu_permutexvar_epi8, uint8_t, 64)
#define _mm512_permutexvar_epi16 emu_permutexvar_epi16
#define _mm512_permutexvar_epi8 emu_permutexvar_epi8
KT_INLINE emu_m512i emu_broadcast_i32x4(__m128i a) {
    return (emu_m512i){_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a)};
}
#define _mm512_broadcast_i32x4 emu_broadcast_i32x4

/* Lanes of yes where the mask is set. */
KT_INLINE emu_m512i emu_blend(emu_m512i mask, emu_m512i no, emu_m512i yes) {
    return (emu_m512i){_mm256_blendv_epi8(no.lo, yes.lo, mask.lo), _mm256_blendv_epi8(no.hi, yes.hi, mask.hi)};
}
KT_INLINE emu_m512i emu_mask_sub_epi8(emu_m512i src, emu_m512i mask, emu_m512i a, emu_m512i b) {
    return emu_blend(mask, src, emu_sub_epi8(a, b));
}
KT_INLINE emu_m512i emu_movepi8_mask(emu_m512i a) {
    const __m256i zero = _mm256_setzero_si256();
    return (emu_m512i){_mm256_cmpgt_epi8(zero, a.lo), _mm256_cmpgt_epi8(zero, a.hi)};
}
KT_INLINE emu_m512i emu_abs_epi8(emu_m512i a) { return (emu_m512i){_mm256_abs_epi8(a.lo), _mm256_abs_epi8(a.hi)}; }
KT_INLINE emu_m512i emu_testn_epi16_mask(emu_m512i a, emu_m512i b) {
    const __m256i zero = _mm256_setzero_si256();
    return (emu_m512i){_mm256_cmpeq_epi16(_mm256_and_si256(a.lo, b.lo), zero),
                       _mm256_cmpeq_epi16(_mm256_and_si256(a.hi, b.hi), zero)};
}
KT_INLINE emu_m512i emu_mask_permutexvar_epi16(emu_m512i src, emu_m512i mask, emu_m512i index, emu_m512i table) {
    return emu_blend(mask, src, emu_permutexvar_epi16(index, table));
}
#define _mm512_mask_blend_epi32 emu_blend
#define _mm512_testn_epi16_mask emu_testn_epi16_mask
#define _mm512_mask_permutexvar_epi16 emu_mask_permutexvar_epi16
#define _mm512_mask_sub_epi8 emu_mask_sub_epi8
#define _mm512_movepi8_mask emu_movepi8_mask
#define _mm512_abs_epi8 emu_abs_epi8

KT_INLINE int emu_reduce_add_epi32(emu_m512i a) {
    const __m256i m = _mm256_add_epi32(a.lo, a.hi);
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
KT_INLINE int emu_reduce_max_epi32(emu_m512i a) {
    const __m256i m = _mm256_max_epi32(a.lo, a.hi);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
#define _mm512_reduce_add_epi32 emu_reduce_add_epi32
#define _mm512_reduce_max_epi32 emu_reduce_max_epi32

/* Bytes as 16-bit numbers, even and odd apart: a product of two fits, where maddubs would saturate the sum. */
KT_INLINE __m256i emu_even_s8(__m256i a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
KT_INLINE __m256i emu_odd_s8(__m256i a) { return _mm256_srai_epi16(a, 8); }
KT_INLINE __m256i emu_even_u8(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi16(0xff)); }
KT_INLINE __m256i emu_odd_u8(__m256i a) { return _mm256_srli_epi16(a, 8); }
KT_INLINE __m256i emu_dot4(__m256i acc, __m256i a_even, __m256i a_odd, __m256i b_even, __m256i b_odd) {
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(a_even, b_even), _mm256_madd_epi16(a_odd, b_odd));
    return _mm256_add_epi32(acc, sum);
}
KT_INLINE emu_m512i emu_dpbusd_epi32(emu_m512i acc, emu_m512i a, emu_m512i b) {
    return (emu_m512i){
        emu_dot4(acc.lo, emu_even_u8(a.lo), emu_odd_u8(a.lo), emu_even_s8(b.lo), emu_odd_s8(b.lo)),
        emu_dot4(acc.hi, emu_even_u8(a.hi), emu_odd_u8(a.hi), emu_even_s8(b.hi), emu_odd_s8(b.hi))};
}
#define _mm512_dpbusd_epi32 emu_dpbusd_epi32
KT_INLINE emu_m512i emu_dpwssd_epi32(emu_m512i acc, emu_m512i a, emu_m512i b) {
    return emu_add_epi32(acc, emu_madd_epi16(a, b));
}
#define _mm512_dpwssd_epi32 emu_dpwssd_epi32

/* Eight tiles of 16 rows x 64 bytes, the one configuration that kernels use. A tile instruction without it
 * faults on the silicon, and here. */
typedef struct {
    uint8_t byte[16][64];
} emu_tile;
static __thread emu_tile emu_tiles[8];
static __thread int emu_configured;

__attribute__((unused)) static emu_tile *emu_tile_at(int n) {
    if (!emu_configured)
        __builtin_trap();
    return &emu_tiles[n];
}
KT_INLINE void emu_loadconfig(const void *p) {
    const uint8_t *config = p;
    int wrong = config[0] != 1 || config[1] != 0;
    for (int i = 0; i < 8; i++)
        wrong |= config[16 + 2 * i] != 64 || config[17 + 2 * i] != 0 || config[48 + i] != 16;
    if (wrong)
        __builtin_trap();
    memset(emu_tiles, 0, sizeof emu_tiles);
    emu_configured = 1;
}
KT_INLINE void emu_tile_release(void) { emu_configured = 0; }
KT_INLINE void emu_tile_zero(int dst) { *emu_tile_at(dst) = (emu_tile){0}; }
KT_INLINE void emu_tile_loadd(int dst, const void *p, int64_t stride) {
    emu_tile *t = emu_tile_at(dst);
    for (int r = 0; r < 16; r++)
        memcpy(t->byte[r], (const char *)p + r * stride, 64);
}
KT_INLINE void emu_tile_stored(int src, void *p, int64_t stride) {
    const emu_tile *t = emu_tile_at(src);
    for (int r = 0; r < 16; r++)
        memcpy((char *)p + r * stride, t->byte[r], 64);
}
/* c[m][n] += sum over i, j of a[m][4i + j] * b[i][4n + j], 32 bits that wrap. */
__attribute__((unused)) static void emu_tile_dpbssd(int dst, int a, int b) {
    emu_tile *c = emu_tile_at(dst);
    const emu_tile *x = emu_tile_at(a), *w = emu_tile_at(b);
    __m256i even[16][2], odd[16][2];
    for (int i = 0; i < 16; i++)
        for (int h = 0; h < 2; h++) {
            const __m256i half = _mm256_loadu_si256((const __m256i *)(w->byte[i] + 32 * h));
            even[i][h] = emu_even_s8(half);
            odd[i][h] = emu_odd_s8(half);
        }
    for (int m = 0; m < 16; m++) {
        emu_m512i sum = emu_loadu_si512(c->byte[m]);
        for (int i = 0; i < 16; i++) {
            int32_t four;
            memcpy(&four, x->byte[m] + 4 * i, 4);
            const __m256i v = _mm256_set1_epi32(four), v_even = emu_even_s8(v), v_odd = emu_odd_s8(v);
            sum.lo = emu_dot4(sum.lo, v_even, v_odd, even[i][0], odd[i][0]);
            sum.hi = emu_dot4(sum.hi, v_even, v_odd, even[i][1], odd[i][1]);
        }
        emu_storeu_si512(c->byte[m], sum);
    }
}
/* c[m][n] += (even chain) + (odd chain) of fma over i: a[m][2i + j] * b[i][2n + j] in float32. */
__attribute__((unused)) static void emu_tile_dpbf16ps(int dst, int a, int b) {
    emu_tile *c = emu_tile_at(dst);
    const emu_tile *x = emu_tile_at(a), *w = emu_tile_at(b);
    const __m256i top = _mm256_set1_epi32((int)0xffff0000);
    for (int m = 0; m < 16; m++) {
        emu_m512 chain[2] = {emu_set1_ps(0), emu_set1_ps(0)};
        for (int i = 0; i < 16; i++) {
            int32_t two;
            memcpy(&two, x->byte[m] + 4 * i, 4);
            const __m256i v = _mm256_set1_epi32(two);
            const emu_m512i line = emu_loadu_si512(w->byte[i]);
            const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
            const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(v, top));
            const emu_m512 w_even = {_mm256_castsi256_ps(_mm256_slli_epi32(line.lo, 16)),
                                     _mm256_castsi256_ps(_mm256_slli_epi32(line.hi, 16))};
            const emu_m512 w_odd = {_mm256_castsi256_ps(_mm256_and_si256(line.lo, top)),
                                    _mm256_castsi256_ps(_mm256_and_si256(line.hi, top))};
            chain[0] = emu_fmadd_ps(w_even, (emu_m512){even, even}, chain[0]);
            chain[1] = emu_fmadd_ps(w_odd, (emu_m512){odd, odd}, chain[1]);
        }
        emu_storeu_ps(c->byte[m], emu_add_ps(emu_loadu_ps(c->byte[m]), emu_add_ps(chain[0], chain[1])));
    }
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emu_loadconfig
#define _tile_release emu_tile_release
#define _tile_zero emu_tile_zero
#define _tile_loadd emu_tile_loadd
#define _tile_stored emu_tile_stored
#define _tile_dpbssd emu_tile_dpbssd
#define _tile_dpbf16ps emu_tile_dpbf16ps

#endif

/* The vocabulary as functions on memory, so that tests can hold each operation of each variant to a model. */
#ifndef KT_OPS_H
#define KT_OPS_H

#include "activation.h"
#include "gemm_s8.h"
#include "rows.h"

#define KT_OPS(X) \
    X(vf32_add, 64, 64, 0, 64, vf32_store(out, vf32_add(vf32_load(a), vf32_load(b)))) \
    X(vf32_sub, 64, 64, 0, 64, vf32_store(out, vf32_sub(vf32_load(a), vf32_load(b)))) \
    X(vf32_mul, 64, 64, 0, 64, vf32_store(out, vf32_mul(vf32_load(a), vf32_load(b)))) \
    X(vf32_div, 64, 64, 0, 64, vf32_store(out, vf32_div(vf32_load(a), vf32_load(b)))) \
    X(vf32_min, 64, 64, 0, 64, vf32_store(out, vf32_min(vf32_load(a), vf32_load(b)))) \
    X(vf32_max, 64, 64, 0, 64, vf32_store(out, vf32_max(vf32_load(a), vf32_load(b)))) \
    X(vf32_fma, 64, 64, 64, 64, vf32_store(out, vf32_fma(vf32_load(a), vf32_load(b), vf32_load(c)))) \
    X(vf32_round, 64, 0, 0, 64, vf32_store(out, vf32_round(vf32_load(a)))) \
    X(vf32_exp, 64, 0, 0, 64, vf32_store(out, vf32_exp(vf32_load(a)))) \
    X(vf32_load_f16, 32, 0, 0, 64, vf32_store(out, vf32_load_f16(a))) \
    X(vf32_store_f16, 64, 0, 0, 32, vf32_store_f16(out, vf32_load(a))) \
    X(vf32_from_vi32, 64, 0, 0, 64, vf32_store(out, vf32_from_vi32(vi32_load(a)))) \
    X(vi32_from_vf32, 64, 0, 0, 64, vi32_store(out, vi32_from_vf32(vf32_load(a)))) \
    X(vi32_add, 64, 64, 0, 64, vi32_store(out, vi32_add(vi32_load(a), vi32_load(b)))) \
    X(vi32_sub, 64, 64, 0, 64, vi32_store(out, vi32_sub(vi32_load(a), vi32_load(b)))) \
    X(vi32_and, 64, 64, 0, 64, vi32_store(out, vi32_and(vi32_load(a), vi32_load(b)))) \
    X(vi32_or, 64, 64, 0, 64, vi32_store(out, vi32_or(vi32_load(a), vi32_load(b)))) \
    X(vi32_xor, 64, 64, 0, 64, vi32_store(out, vi32_xor(vi32_load(a), vi32_load(b)))) \
    X(vi32_max, 64, 64, 0, 64, vi32_store(out, vi32_max(vi32_load(a), vi32_load(b)))) \
    X(vi32_shl_16, 64, 0, 0, 64, vi32_store(out, vi32_shl(vi32_load(a), 16))) \
    X(vi32_shr_16, 64, 0, 0, 64, vi32_store(out, vi32_shr(vi32_load(a), 16))) \
    X(vi32_select_gt, 64, 64, 64, 64, \
      vi32_store(out, vi32_select_gt(vi32_load(a), vi32_load(b), vi32_load(c), vi32_load(a)))) \
    X(vi32_and_or, 64, 64, 64, 64, vi32_store(out, vi32_and_or(vi32_load(a), vi32_load(b), vi32_load(c)))) \
    X(vi32_load_u4, 8, 0, 0, 64, vi32_store(out, vi32_load_u4(a))) \
    X(vi16_mul, 64, 64, 0, 64, vi32_store(out, vi16_mul(vi32_load(a), vi32_load(b)))) \
    X(vi16_add, 64, 64, 0, 64, vi32_store(out, vi16_add(vi32_load(a), vi32_load(b)))) \
    X(vi16_sub, 64, 64, 0, 64, vi32_store(out, vi16_sub(vi32_load(a), vi32_load(b)))) \
    X(vi16_shr_12, 64, 0, 0, 64, vi32_store(out, vi16_shr(vi32_load(a), 12))) \
    X(vi32_sar_8, 64, 0, 0, 64, vi32_store(out, vi32_sar(vi32_load(a), 8))) \
    X(vi8_sub, 64, 64, 0, 64, vi32_store(out, vi8_sub(vi32_load(a), vi32_load(b)))) \
    X(vi32_load_s8, 16, 0, 0, 64, vi32_store(out, vi32_load_s8(a))) \
    X(vi32_load_s16, 32, 0, 0, 64, vi32_store(out, vi32_load_s16(a))) \
    X(vi32_load_u16, 32, 0, 0, 64, vi32_store(out, vi32_load_u16(a))) \
    X(vi32_store_u16, 64, 0, 0, 32, vi32_store_u16(out, vi32_load(a))) \
    X(vi32_store_s8, 64, 0, 0, 16, vi32_store_s8(out, vi32_load(a))) \
    X(vi32_hmax, 64, 0, 0, 4, *(int32_t *)out = vi32_hmax(vi32_load(a))) \
    X(vi32_hsum, 64, 0, 0, 4, *(int32_t *)out = vi32_hsum(vi32_load(a))) \
    X(vi32_load_u8, 16, 0, 0, 64, vi32_store(out, vi32_load_u8(a))) \
    KT_NIBBLE_OPS(X, 0) \
    KT_NIBBLE_OPS(X, 1) \
    KT_NIBBLE_OPS(X, 2) \
    KT_NIBBLE_OPS(X, 3) \
    X(vi16_load_e4m3_0, 64, 0, 0, 64, vi32_store(out, vi16_load_e4m3(a, 0))) \
    X(vi16_load_e4m3_1, 64, 0, 0, 64, vi32_store(out, vi16_load_e4m3(a, 1))) \
    X(vi16_load_normal_e4m3_0, 64, 0, 0, 64, vi32_store(out, vi16_load_normal_e4m3(a, 0))) \
    X(vi16_load_normal_e4m3_1, 64, 0, 0, 64, vi32_store(out, vi16_load_normal_e4m3(a, 1))) \
    X(vi32_dot_s8, 64, 64, 8, 64, \
      vi32_store(out, vi32_dot_finish(vi32_dot_s8(vi32_load(a), vs8w_load(b), *(const int32_t *)c), \
                                      ((const int32_t *)c)[1]))) \
    X(vi32_dot_s16, 64, 64, 4, 64, \
      vi32_store(out, vi32_dot_s16(vi32_load(a), vi32_load(b), *(const int32_t *)c))) \
    X(vshort_dot, 64, 64, 24, 64, \
      vi32_store(out, vshort_add(vi32_load(a), \
                                 vshort_dot(vshort_start(*(const int32_t *)c), vi32_load(b), ((const int32_t *)c)[1]), \
                                 vshort_factor(vi32_load_s8((const int8_t *)c + 8))))) \
    KT_SPLIT_OPS(X) \
    KT_TILE_OPS(X)

/* Two vectors of values, one after the other; and both as words. */
#define KT_NIBBLE_OPS(X, j) \
    X(vf32_load_e2m1_##j, 64, 0, 0, 128, vf32 even; vf32 odd; vf32_load_e2m1(a, j, &even, &odd); \
      vf32_store(out, even); vf32_store((float *)out + 16, odd)) \
    X(vi16_load_e2m1_##j, 64, 0, 0, 64, vi32_store(out, vi16_load_e2m1(a, j)))

#ifdef KT_HAVE_DOT_S8
#define KT_SPLIT_OPS(X) \
    X(vi16_split_0, 64, 0, 0, 64, vi32_store(out, vi16_split(a, 0))) \
    X(vi16_split_1, 64, 0, 0, 64, vi32_store(out, vi16_split(a, 1))) \
    X(vi8_load_e2m1_0, 64, 0, 0, 64, vi32_store(out, vi8_load_e2m1(a, 0))) \
    X(vi8_load_e2m1_1, 64, 0, 0, 64, vi32_store(out, vi8_load_e2m1(a, 1)))
#else
#define KT_SPLIT_OPS(X)
#endif

/* A is 32 rows x 64 bytes of activations in tiles, B two blocks of 16 lines, C the 32 x 32 sums. */
#ifdef KT_HAVE_TILES
#define KT_TILE_OP(X, name, bf16, m) \
    X(name, 2048, 2048, 0, 128 * m, \
      kt_tiles(bf16, a, 1024, m, b, (const char *)b + 1024, 1, (int32_t(*)[32])out, b, 0, op_idle, NULL, 0))
#define KT_TILE_OPS(X) \
    X(vi16_bf16, 64, 0, 0, 64, vi32_store(out, vi16_bf16(vi32_load(a)))) \
    KT_TILE_OP(X, tile_dot_s8, 0, 32) \
    KT_TILE_OP(X, tile_dot_s8_half, 0, 16) \
    KT_TILE_OP(X, tile_dot_bf16, 1, 32) \
    KT_TILE_OP(X, tile_dot_bf16_half, 1, 16)
#else
#define KT_TILE_OPS(X)
#endif

KT_INLINE void op_idle(void *ctx, int64_t rows) {}

#define KT_OP_FUNCTION(name, na, nb, nc, no, body) \
    static void op_##name(const void *a, const void *b, const void *c, void *out) { body; }
KT_OPS(KT_OP_FUNCTION)

#define KT_OP_ROW(name, na, nb, nc, no, body) {#name, {na, nb, nc}, no, op_##name},
static const kt_op kt_ops[] = {KT_OPS(KT_OP_ROW)};

#endif

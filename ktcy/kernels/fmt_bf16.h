/* Format bf16 (layout bf16-n16k2-v1, table.h): bfloat16 weights as they are. */
#ifndef KT_FMT_BF16_H
#define KT_FMT_BF16_H

#include "gemm_bf16.h"

static int64_t bf16_weight_bytes(int64_t k) { return KT_BLOCK * 2 * kt_round_up(k, KT_KPAD); }
static int64_t bf16_scale_bytes(int64_t k) { return 0; }
static int64_t bf16_work_bytes(int64_t k) { return 0; }
static int64_t bf16_pack_work(int64_t k) { return KT_BLOCK * kt_round_up(k, KT_KPAD) * sizeof(float); }

static int64_t bf16_pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) {
    const int64_t padded = kt_round_up(k, KT_KPAD);
    float *rows = work;
    memset(rows, 0, (size_t)(KT_BLOCK * padded) * sizeof *rows);
    if (src->col_stride != 1)
        kt_gather_rows(src, n, k, rows, padded);
    for (int64_t r = 0; r < n; r++) {
        vi32 most = vi32_set1(0);
        for (int64_t i = 0; i < padded; i += 16) {
            const vf32 v = src->col_stride != 1 ? vf32_load(rows + r * padded + i)
                                                : kt_load_tail(kt_source_row(src, r), src->dtype, i, k);
            const vf32 rounded = bf16_rounded(v);
            most = vi32_max(most, vi32_and(vf32_bits(rounded), vi32_set1(0x7fffffff)));
            vf32_store(rows + r * padded + i, rounded);
        }
        if (vi32_hmax(most) >= KT_NOT_FINITE) {
            int64_t j = 0;
            while (kt_absmax(rows + r * padded + j, KT_F32, 1) < KT_NOT_FINITE)
                j++;
            return 1 + r * k + j;
        }
    }
    for (int64_t i = 0; i < padded; i += 2)
        for (int64_t r = 0; r < KT_BLOCK; r++)
            for (int64_t j = 0; j < 2; j++)
                memcpy((char *)weight + i * 32 + r * 4 + j * 2, (const char *)(rows + r * padded + i + j) + 2, 2);
    return 0;
}

static void bf16_unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) {
    for (int64_t r = 0; r < KT_BLOCK; r++)
        for (int64_t i = 0; i < k; i++) {
            char value[4] = {0};
            memcpy(value + 2, (const char *)weight + i / 2 * 64 + r * 4 + i % 2 * 2, 2);
            memcpy(dst + r * ld + i, value, 4);
        }
}

KT_INLINE vi32 bf16_line(const kt_strip *now, int64_t n, int64_t i, int64_t j, int normal) {
    const int64_t bytes = bf16_block_bytes(now->g->k);
    const char *w = (const char *)now->g->weight + (now->block + n) * bytes + i * 32 + 64 * j;
    if (KT_BF16_BLOCKS == 1)
        KT_PREFETCH(w + KT_AHEAD);
    return vi32_load((const int32_t *)w);
}

static void bf16_product(const kt_strip *now, kt_between between, kt_strip *last) {
    const bf16_stream stream = bf16_stored(now, 32 * 2 * KT_BLOCK, 0, 0);
#ifdef KT_HAVE_TILES
    if (now->g->tiles) {
        bf16_tiles(now, stream.w, stream.next, 2 * bf16_block_bytes(now->g->k), between, last, 0, NULL);
        return;
    }
#endif
    /* One block at a time: lines fetch what lies behind them; by the stream one token took 1.05 of that (AVX2, Zen). */
    bf16_vectors(now, KT_BF16_BLOCKS == 1 ? (bf16_stream){.w = stream.w} : stream, (bf16_codes){.line = bf16_line});
}

KT_PRODUCTS(bf16, NULL, bf16_product, bf16_value)

#endif

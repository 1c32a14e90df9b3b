/* The contract between the kernels and everything above them.
 *
 * A variant module exports one kt_kernels in a capsule named KT_CAPSULE; the name carries the ABI, so a
 * stale shared object fails to load. Kernels get pointers and sizes, never allocate, know no threads.
 *
 * Words: a matrix is W[N, K], N outputs. N is padded to blocks of 16 rows, K to a multiple of 64, both
 * with zeros. A format stores a matrix as N/16 blocks of weight_bytes(K), and apart from them N/16 scale
 * blocks of scale_bytes(K). The gate and up matrices of a gated layer are one matrix whose blocks alternate:
 * block 2j holds gate rows 16j..16j+15, block 2j+1 the same rows of up.
 *
 * int8-n16k4-v1: block = K/4 lines of 64 bytes; line k holds for row n = 0..15 the bytes W[n, 4k..4k+3].
 *     line k:  | n0: k k+1 k+2 k+3 | n1: ... | ... | n15: ... |
 *   16 consecutive lines are one AMX B tile; a line is one VNNI operand against 4 broadcast bytes.
 *   scale block = 16 float32. scale[n] = absmax(W[n]) / 127, q = round-half-even(W * (127 / absmax)).
 *   A row whose absmax is under KT_TINY is all zeros with scale 0: half a step then stays a normal number, and no
 *   result depends on whether subnormals count. Unpacking saturates where 127 steps of FLT_MAX round to inf.
 *
 * int4-n16k8-g32-v1: W = scale[n] * factor[n, k / 32] * q, q in -8..7, factor in -15..15 and not 0.
 *   block = K/8 lines of 64 bytes; byte j = 0..3 of row n in line k holds q + 8 of 8k + j in its low nibble and of
 *   8k + 4 + j in its high one.
 *     line k:  | n0: k k+4, k+1 k+5, k+2 k+6, k+3 k+7 | n1: ... | ... | n15: ... |
 *   scale block = 16 float32, then int8 factors [K/32][16]. factor * q is an exact int8, so products are those of the
 *   int8 core. Factors and scale are searched for the least squared error of the row, in float32 and in one order
 *   (fmt_int4.h), and each q is the nearest to its value. A row whose absmax is under KT_TINY has scale 0 and q = 0.
 *
 * Activations of the int8 core: a row of K int8 with kt_meta {scale, sum}; quantized as a weight row.
 *   A row with NaN or inf gets scale NaN and zeros, so every product of that token is NaN and no other is.
 *   Rows of int4 go on, after K, with two int16 for each 32 values: -8 times the sum of those at k % 4 < 2, and of the
 *   others; their tiles are the same.
 *   Tiles: rows in tiles of 16 x 64 bytes, [M/16][K/64][16][64]; rows past M are zero.
 *
 * Product of the int8 core: y = fma((float)sum_k x_q w_q, w_scale * x_scale, bias), the sum exact in int32, so
 * every variant, path and order gives the same bits. All float maths runs with FTZ and DAZ set (begin).
 *
 * The bf16 core multiplies activations and weights in bfloat16 in one order, that of AMX: for each 32 values of K
 * the even and the odd positions are two chains of fma from zero, and acc = acc + (even + odd), ascending K. Products
 * are exact in float32. y = acc + bias.
 * Its activation rows are K float32 that are bfloat16 values (rounded to nearest even; a value that rounds to inf
 * counts as inf, and a row with NaN or inf is all NaN). Tiles: on AMX 16 x 64 bytes as above, of bfloat16; elsewhere
 * 16 x 128 bytes of float32.
 *
 * bf16-n16k2-v1: block = K/2 lines of 64 bytes; line k holds for row n = 0..15 the bfloat16 W[n, 2k], W[n, 2k + 1].
 *   No scales. Floats are rounded to nearest even; one that rounds to inf counts as not finite.
 *
 * The int16 core multiplies integer codes. Its activations are those of the bf16 core, each group of K then rounded (to
 * nearest even) to multiples of its unit 2^(e + 1 - B), where 2^e <= absmax of the group < 2^(e + 1): integers below
 * 2^B. B is such that the sum of a group stays below 2^24 units: so it is exact in int32, and in float32 on bfloat16
 * tiles, in whatever order, and each variant may take it as is fastest. B is 15 for 4-bit codes and groups of 32, 14
 * for 64 and for mxfp4, 13 for 128, 12 for 8-bit codes: units are 2^-11 of a group's largest value or less, where
 * bfloat16 rounds that by up to 2^-9. A group under 2^-100 is zeros; a row with a value of 2^112 or more, inf or NaN is
 * all NaN.
 * A row is K int16, then for each group its unit (float32) and the sum of its integers (int32); with VNNI, from the
 * next 64 bytes on, each integer again as two int8, 256 a - b: of each 8 values of K four a, their b, four other a,
 * their b, in the order that codes are unpacked in: k, k+2, k+1, k+3 and k+4, k+6, k+5, k+7 for 8 bits; for 4 bits
 * k, k+4, k+1, k+5 and k+2, k+6, k+3, k+7. Tiles: on AMX those of the bf16 core; elsewhere 16 x 64 bytes of int16, and
 * after those of all K the groups of each of the 16 rows.
 *
 * Codes with a 16-bit scale for each group of K, on the int16 core: a value is (code - zero) * scale. The scale comes
 * after the sum of its group, in float32, y = fma(sum, scale, y), ascending K: nothing of a checkpoint is rounded. (To
 * round values to bfloat16 in the decode took 2.4 times as long for one row on AVX2.) Scales may be negative; a
 * bfloat16 one that is subnormal counts as zero. Zeros past K and N are codes equal to their zero point.
 *   int4-n16k8-*: block = K/8 lines of 64 bytes; line k holds for row n a 32-bit word of the codes 0..15 of
 *     W[n, 8k..8k+7], even ones in the lower half and odd ones in the upper: from the lowest bits k, k+2, k+4, k+6,
 *     k+1, k+3, k+5, k+7. The zero point is 8 where none are stored.
 *   int8-n16k4-*: block = K/4 lines; from the lowest byte k, k+2, k+1, k+3, each code + 128.
 *   scale block: scales [ceil(K / group)][16]; then zero points, if stored, [K/group][8 bytes] of which byte n holds
 *     row n in its lower and row n + 8 in its upper half; padded to 64 bytes.
 *   rawint4, q4_0: int4, group 32, scales bfloat16 (compressed-tensors) or float16 (GGUF Q4_0). q8_0: int8, group 32,
 *   float16 (GGUF Q8_0, IQ4_NL). gptq32, gptq64, gptq128: int4 with zero points, float16 (GPTQ, AWQ).
 *
 * e4m3 codes, in the layouts fp8-n16k4-g128-v2, fp8-n16k4-row-v2, mxfp8-n16k4-g32-v2: block = K/4 lines of 64 bytes;
 *   line k holds for row n, from the lowest byte, the codes of W[n, 4k], W[n, 4k+2], W[n, 4k+1], W[n, 4k+3]. A weight
 *   enters the core as its code's value / 256: as bfloat16 a normal number is the code's lower seven bits, shifted,
 *   and a constant. So a scale block ends with a byte for each 32 of K, 1 where all codes of the block's 16 rows are
 *   normal numbers and 0 elsewhere, padded to 4 bytes. Subnormal float32 scales are packed as zero.
 * fp8 (g128): scale block = ceil(K/128) float32, each for 16 rows of 128 values of K. The core's acc restarts after
 *   each 128: total = fma(acc, 256 scale, total), y = total + bias.
 * fp8_channel (row): scale block = 16 float32. y = fma(acc, 256 scale, bias).
 * mxfp8, mxfp4 (g32): scale block = K/32 lines of 16 bytes e, one a row; weight = value * 2^(e - 127), exact in
 *   bfloat16, on the bf16 core; mxfp4 has the int16 core's rows, the sum of a group being one step of 32 values of that
 *   order. A value below 2^-126 is packed as code 0. A code other than zero is refused where the scale makes the
 *   format's largest value exceed float32 (e above 246 and 252); with zeros only, the scale is packed as that limit.
 * mxfp4-n16k8-g32-v1: block = K/8 lines of 64 bytes of e2m1 codes; line k has 32 bits a row, lowest nibble first:
 *     | n0: 8k 8k+2 8k+4 8k+6 8k+1 8k+3 8k+5 8k+7 | n1: ... | ... | n15: ... |
 * NaN codes are refused. Padding is code 0, of scale 0 (fp8_channel) or 127 (e8m0).
 */
#ifndef KT_TABLE_H
#define KT_TABLE_H

#include <stddef.h>
#include <stdint.h>

#define KT_CAPSULE "ktcy.kernels.v6"
#define KT_BLOCK 16
#define KT_KPAD 64
#define KT_TINY 0x1p-118f
/* 127 * 127 * K must stay below 2^31. */
#define KT_MAX_K 131072
/* What pack returns for rows that share a block of scales and bring different ones. */
#define KT_SCALES_DIFFER -1

/* KT_CODES: one code of a quantized format a byte. */
typedef enum { KT_F32, KT_F16, KT_BF16, KT_CODES } kt_dtype;
static inline int64_t kt_size(kt_dtype dtype) { return dtype == KT_F32 ? 4 : dtype == KT_CODES ? 1 : 2; }

/* swiglu: g = min(g, limit), u = clamp(u, -limit, limit), g * sigmoid(alpha * g) * (u + offset).
 *   SwiGLU is alpha 1, limit inf, offset 0; swigluoai (gpt-oss) alpha 1.702, limit 7, offset 1.
 * gelu: g * Phi(g) * u. gelu_tanh: the tanh approximation of the same. */
typedef enum { KT_SWIGLU, KT_GELU, KT_GELU_TANH } kt_gate;

typedef struct {
    kt_gate gate;
    float alpha, limit, offset;
} kt_activation;

typedef struct {
    float scale;
    int32_t sum; /* int8: of the row, what a u8 x s8 instruction needs to undo its offset; others: see KT_MODERATE */
} kt_meta;

/* One expert's product: m activation rows times blocks of its weights. Row i is row index[i] of x (or i
 * when index is NULL) with meta[index[i]]. tiles, if not NULL, holds the same rows gathered in tiles. */
typedef struct {
    int64_t m, k; /* k padded */
    const void *x;
    int64_t ldx; /* bytes */
    const int32_t *index;
    const kt_meta *meta;
    const void *tiles;
    const void *weight, *scale;
    const float *bias; /* per packed row, or NULL */
    const void *next, *next_scale; /* weights that the same thread reads after these, fetched meanwhile; or NULL */
    void *work;        /* work_bytes(k) of scratch for weights that are decoded once for all rows */
} kt_gemm;

/* Rows of a matrix to pack: floats, or codes with their scales as the format stores them. Strides in elements. */
typedef struct {
    const void *values;
    kt_dtype dtype;
    int64_t row_stride, col_stride;
    const void *scale; /* [n][ceil(k / group)] */
    const uint8_t *zero;
    int64_t scale_stride, zero_stride;
} kt_source;

typedef struct {
    const char *name, *layout, *rows; /* rows: "s8", "int4" (int8 core), "bf16", or "g..b.." (int16 core) */
    /* What pack takes: codes of this kind, whose scales of this dtype hold for group values of K (0: a row), and
     * zero points if zero; codes NULL: floats. Names as of weights/quantized.py. */
    const char *codes, *scale;
    int64_t group, zero;
    int64_t few_rows; /* up to here rows are read through index; above, tiles are faster */

    int64_t (*weight_bytes)(int64_t k);
    int64_t (*scale_bytes)(int64_t k);
    int64_t (*row_bytes)(int64_t k);  /* of an activation row */
    int64_t (*panel_bytes)(int64_t k); /* of one row of a tile panel */
    int64_t (*work_bytes)(int64_t k); /* of kt_gemm.work */

    /* Packs n <= 16 rows of k values into one block; missing rows are zero. work: pack_work(k) bytes.
     * Returns 0, 1 + n * k + k' for a value that is not finite, or KT_SCALES_DIFFER. */
    int64_t (*pack_work)(int64_t k);
    int64_t (*pack)(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work);
    /* The block's float32 values, [16][ld]. */
    void (*unpack)(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld);

    /* One activation row of k values, zero padded to the padded K. */
    void (*quantize)(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta);
    /* Row r of a tile panel from a quantized row; row NULL writes zeros. */
    void (*tile)(const void *row, int64_t k, int64_t r, void *tiles);

    /* h[i, 16 j .. 16 j + 15] = activation(gate, up) for j in [j0, j1); ldh in elements. */
    void (*gate_up)(const kt_gemm *g, const kt_activation *act, int64_t j0, int64_t j1, float *h, int64_t ldh);
    /* out[row[i]] += route[i] * y[i], columns of blocks [b0, b1), at out + row[i] * ldo, ascending i. */
    void (*down)(const kt_gemm *g, const int32_t *row, const float *route, int64_t b0, int64_t b1, float *out,
                 int64_t ldo);
} kt_format;

/* A vocabulary operation exposed to tests: up to three inputs and one output of fixed sizes in bytes. */
typedef struct {
    const char *name;
    int64_t in[3], out;
    void (*call)(const void *a, const void *b, const void *c, void *out);
} kt_op;

typedef struct {
    uint32_t mxcsr;
    int tiles;
} kt_thread;

typedef struct {
    const char *name;
    /* Per-thread set-up around any other call: FTZ, DAZ, and the tile registers if a call may get kt_gemm.tiles or is a
     * probe. end restores what begin found. */
    void (*begin)(kt_thread *t, int tiles);
    void (*end)(kt_thread *t);
    /* n float32 rounded to the caller's type. */
    void (*store)(const float *src, int64_t n, kt_dtype dtype, void *dst);
    /* Limits of this machine: sum of the bytes read; multiply-adds of each core from registers, returns their count. */
    uint64_t (*probe_read)(const void *p, int64_t bytes);
    uint64_t (*probe_s8)(int64_t rounds);
    uint64_t (*probe_bf16)(int64_t rounds);
    const kt_format *formats;
    int64_t n_formats;
    const kt_op *ops;
    int64_t n_ops;
} kt_kernels;

#endif

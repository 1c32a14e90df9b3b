/* One Mixture-of-Experts layer: route -> gate/up -> activation -> down -> combine.
 *
 *   ids [M, k] --counting sort--> slots grouped by expert, ascending; within one by (token, place in the row)
 *   x [M, H]   --quantize-------> rows, and for experts with many tokens 16 x 64 tiles
 *   gate/up    (expert, run of 16-column blocks)   -> h [slots, I] float32
 *   requantize h                                   -> rows or tiles
 *   down       a task owns 16 W output columns and adds the experts in ascending id -> out [M, H]
 *
 * Every output element is summed by one task in one order, and each product is exact up to its documented
 * rounding, so neither threads nor batch nor position change a bit. A `unit` is up to 16 slots of one expert: what
 * one tile row holds.
 */
#ifndef KT_PLAN_H
#define KT_PLAN_H

#include <stdbool.h>
#include <string.h>

#include "kernels/table.h"
#include "pool.h"

/* Below this many elements a stage runs on the calling thread: waking the pool costs more. */
#define KT_INLINE_ELEMENTS 65536
/* Gate/up: blocks of 16 columns that a task takes at most. */
#define KT_MOST_PAIRS 16
/* Down: blocks of 16 columns that a task owns. */
#define KT_DOWN_BLOCKS 2
/* Up to here a down task writes its columns straight to out. Beyond, that is a cache line in another page for each
 * token; columns are kept together and copied row by row at the end (-8 % at 4096 tokens on 16 threads). */
#define KT_DIRECT_TOKENS 64

typedef struct {
    const void *weight, *scale;
    const float *bias;
} kt_matrix;

typedef struct {
    const kt_kernels *kernels;
    const kt_format *format;
    kt_activation activation;
    int64_t experts, hidden, inter;
    const kt_matrix *gate_up, *down; /* [experts] */
} kt_layer;

/* The caller's arrays of one chunk; strides in bytes, x, weights and out contiguous along a row. */
typedef struct {
    int64_t tokens, top_k;
    const char *x, *ids, *weights;
    char *out;
    int64_t x_stride, ids_stride, ids_step, weights_stride, weights_step, out_stride;
    kt_dtype x_dtype, out_dtype;
    bool ids_64; /* else 32 bits */
} kt_batch;

typedef struct {
    int32_t expert, slot, rows, tile; /* tile: number of its tile row, or -1 */
} kt_unit;

typedef struct {
    const kt_layer *layer;
    const kt_batch *batch;
    int64_t slots, units, active, tiles;
    int64_t pairs, blocks, k_hidden, k_inter, x_bytes, h_bytes, ldh; /* sizes derived from the layer */
    int64_t pair_run, runs;                                          /* gate/up: pairs a task, tasks an expert */
    int32_t *offset, *first_tile, *expert_ids, *token;
    float *route, *h, *sums;
    char *x, *x_tiles, *hq, *row, *h_tiles, *columns;
    kt_meta *x_meta, *h_meta;
    kt_unit *unit;
} kt_plan;

static inline int64_t kt_ceil(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

/* Lays the scratch arrays out from base (NULL: only measures) and returns the bytes they take. */
static inline size_t kt_plan_scratch(kt_plan *p, const kt_layer *layer, const kt_batch *batch, int threads, char *base)
{
    const int64_t slots = batch->tokens * batch->top_k;
    const int64_t touched = slots < layer->experts ? slots : layer->experts;
    p->layer = layer;
    p->batch = batch;
    p->pairs = kt_ceil(layer->inter, KT_BLOCK);
    p->blocks = kt_ceil(layer->hidden, KT_BLOCK);
    p->k_hidden = kt_ceil(layer->hidden, KT_KPAD) * KT_KPAD;
    p->k_inter = kt_ceil(layer->inter, KT_KPAD) * KT_KPAD;
    p->x_bytes = layer->format->row_bytes(layer->hidden);
    p->h_bytes = layer->format->row_bytes(layer->inter);
    p->ldh = p->pairs * KT_BLOCK;

    const int64_t units = slots / 16 + touched, many = slots / (layer->format->few_rows + 1);
    const int64_t tiles = slots / 16 + (many < touched ? many : touched);
    size_t at = 0;
#define KT_TAKE(field, type, count) \
    p->field = (type *)(base + at); \
    at += ((size_t)(count) * sizeof(type) + 63) / 64 * 64
    KT_TAKE(offset, int32_t, layer->experts + 1);
    KT_TAKE(first_tile, int32_t, layer->experts);
    KT_TAKE(expert_ids, int32_t, touched);
    KT_TAKE(token, int32_t, slots);
    KT_TAKE(route, float, slots);
    KT_TAKE(unit, kt_unit, units);
    KT_TAKE(x_meta, kt_meta, batch->tokens);
    KT_TAKE(h_meta, kt_meta, slots);
    KT_TAKE(x, char, batch->tokens * p->x_bytes);
    KT_TAKE(hq, char, slots * p->h_bytes);
    KT_TAKE(row, char, threads * p->h_bytes);
    KT_TAKE(h, float, slots * p->ldh);
    KT_TAKE(sums, float, threads * batch->tokens * KT_DOWN_BLOCKS * KT_BLOCK);
    KT_TAKE(x_tiles, char, tiles * 16 * p->x_bytes);
    KT_TAKE(h_tiles, char, tiles * 16 * p->h_bytes);
    if (batch->tokens > KT_DIRECT_TOKENS) {
        KT_TAKE(columns, char, 4 * kt_ceil(p->blocks, KT_DOWN_BLOCKS) * KT_DOWN_BLOCKS * KT_BLOCK * batch->tokens);
    }
#undef KT_TAKE
    return at;
}

static inline int64_t kt_id(const kt_batch *b, int64_t t, int64_t j)
{
    const char *at = b->ids + t * b->ids_stride + j * b->ids_step;
    if (b->ids_64) {
        int64_t id;
        memcpy(&id, at, sizeof id);
        return id;
    }
    int32_t id;
    memcpy(&id, at, sizeof id);
    return id;
}

/* Groups the slots by expert. Returns 0, or 1 + t * top_k + j for the first id outside [-1, experts). */
static inline int64_t kt_plan_route(kt_plan *p)
{
    const kt_batch *b = p->batch;
    const int64_t experts = p->layer->experts, few = p->layer->format->few_rows;
    memset(p->offset, 0, (size_t)(experts + 1) * sizeof *p->offset);
    for (int64_t t = 0; t < b->tokens; t++) {
        for (int64_t j = 0; j < b->top_k; j++) {
            const int64_t id = kt_id(b, t, j);
            if (id < -1 || id >= experts)
                return 1 + t * b->top_k + j;
            p->offset[id + 1]++; /* those of id -1 fall into offset[0], cleared next */
        }
    }
    p->offset[0] = 0;
    p->active = p->units = p->tiles = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int32_t rows = p->offset[e + 1], first = p->offset[e];
        p->offset[e + 1] += first;
        if (!rows)
            continue;
        p->expert_ids[p->active++] = (int32_t)e;
        p->first_tile[e] = rows > few ? (int32_t)p->tiles : -1;
        for (int32_t r = 0; r < rows; r += 16) {
            const int32_t n = rows - r < 16 ? rows - r : 16;
            p->unit[p->units++] = (kt_unit){(int32_t)e, first + r, n, rows > few ? (int32_t)p->tiles++ : -1};
        }
    }
    p->slots = p->offset[experts];
    for (int64_t t = 0; t < b->tokens; t++) {
        for (int64_t j = 0; j < b->top_k; j++) {
            const int64_t id = kt_id(b, t, j);
            if (id < 0)
                continue;
            const int32_t slot = p->offset[id]++;
            p->token[slot] = (int32_t)t;
            memcpy(&p->route[slot], b->weights + t * b->weights_stride + j * b->weights_step, sizeof(float));
        }
    }
    /* Each offset moved to the next expert's start. */
    memmove(p->offset + 1, p->offset, (size_t)experts * sizeof *p->offset);
    p->offset[0] = 0;
    return 0;
}

static inline kt_gemm kt_plan_gemm(const kt_plan *p, int64_t expert, bool down)
{
    const kt_layer *l = p->layer;
    const int32_t first = p->offset[expert], tile = p->first_tile[expert];
    const kt_matrix *w = down ? &l->down[expert] : &l->gate_up[expert];
    kt_gemm g = {.m = p->offset[expert + 1] - first, .weight = w->weight, .scale = w->scale, .bias = w->bias};
    if (down) {
        g.k = p->k_inter;
        g.x = p->hq + first * p->h_bytes;
        g.ldx = p->h_bytes;
        g.meta = p->h_meta + first;
        g.tiles = tile < 0 ? NULL : p->h_tiles + tile * 16 * p->h_bytes;
    } else {
        g.k = p->k_hidden;
        g.x = p->x;
        g.ldx = p->x_bytes;
        g.index = p->token + first;
        g.meta = p->x_meta;
        g.tiles = tile < 0 ? NULL : p->x_tiles + tile * 16 * p->x_bytes;
    }
    return g;
}

static void kt_task_quantize(void *ctx, int64_t t, int thread)
{
    const kt_plan *p = ctx;
    const kt_batch *b = p->batch;
    kt_thread state;
    p->layer->kernels->begin(&state);
    p->layer->format->quantize(b->x + t * b->x_stride, b->x_dtype, p->layer->hidden, p->x + t * p->x_bytes,
                               &p->x_meta[t]);
    p->layer->kernels->end(&state);
}

static void kt_task_gather(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_unit u = p->unit[i];
    if (u.tile < 0)
        return;
    char *tiles = p->x_tiles + u.tile * 16 * p->x_bytes;
    for (int64_t r = 0; r < 16; r++)
        p->layer->format->tile(r < u.rows ? p->x + p->token[u.slot + r] * p->x_bytes : NULL, p->k_hidden, r, tiles);
}

static void kt_task_gate_up(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const int64_t expert = p->expert_ids[i / p->runs], j0 = i % p->runs * p->pair_run;
    const int64_t j1 = j0 + p->pair_run < p->pairs ? j0 + p->pair_run : p->pairs;
    const kt_gemm g = kt_plan_gemm(p, expert, false);
    kt_thread state;
    p->layer->kernels->begin(&state);
    p->layer->format->gate_up(&g, &p->layer->activation, j0, j1, p->h + p->offset[expert] * p->ldh, p->ldh);
    p->layer->kernels->end(&state);
}

static void kt_task_requantize(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_unit u = p->unit[i];
    const kt_format *f = p->layer->format;
    kt_thread state;
    p->layer->kernels->begin(&state);
    for (int64_t r = 0; r < 16; r++) {
        const int64_t slot = u.slot + r;
        char *row = u.tile < 0 ? p->hq + slot * p->h_bytes : p->row + thread * p->h_bytes;
        if (r < u.rows)
            f->quantize(p->h + slot * p->ldh, KT_F32, p->layer->inter, row, &p->h_meta[slot]);
        if (u.tile >= 0)
            f->tile(r < u.rows ? row : NULL, p->k_inter, r, p->h_tiles + u.tile * 16 * p->h_bytes);
    }
    p->layer->kernels->end(&state);
}

static void kt_task_down(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_batch *b = p->batch;
    const int64_t b0 = i * KT_DOWN_BLOCKS, b1 = b0 + KT_DOWN_BLOCKS < p->blocks ? b0 + KT_DOWN_BLOCKS : p->blocks;
    const int64_t width = KT_DOWN_BLOCKS * KT_BLOCK, size = b->out_dtype == KT_F32 ? 4 : 2;
    const int64_t left = p->layer->hidden - b0 * KT_BLOCK, columns = left < width ? left : width;
    const int64_t block_bytes = p->layer->format->weight_bytes(p->layer->inter);
    float *sums = p->sums + thread * b->tokens * width;
    kt_thread state;
    memset(sums, 0, (size_t)(b->tokens * width) * sizeof *sums);
    p->layer->kernels->begin(&state);
    for (int64_t a = 0; a < p->active; a++) {
        const int64_t expert = p->expert_ids[a], first = p->offset[expert];
        kt_gemm g = kt_plan_gemm(p, expert, true);
        if (a + 1 < p->active)
            g.next = (const char *)p->layer->down[p->expert_ids[a + 1]].weight + b0 * block_bytes;
        p->layer->format->down(&g, p->token + first, p->route + first, b0, b1, sums, width);
    }
    if (b->tokens > KT_DIRECT_TOKENS)
        p->layer->kernels->store(sums, b->tokens * width, b->out_dtype, p->columns + i * b->tokens * width * size);
    else
        for (int64_t t = 0; t < b->tokens; t++)
            p->layer->kernels->store(sums + t * width, columns, b->out_dtype,
                                     b->out + t * b->out_stride + b0 * KT_BLOCK * size);
    p->layer->kernels->end(&state);
}

/* KT_BLOCK rows of out from the columns of all down tasks. */
static void kt_task_rows(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_batch *b = p->batch;
    const int64_t size = b->out_dtype == KT_F32 ? 4 : 2, width = KT_DOWN_BLOCKS * KT_BLOCK * size;
    const int64_t bytes = p->layer->hidden * size, t0 = i * KT_BLOCK;
    const int64_t t1 = t0 + KT_BLOCK < b->tokens ? t0 + KT_BLOCK : b->tokens;
    for (int64_t at = 0; at < bytes; at += width)
        for (int64_t t = t0; t < t1; t++)
            memcpy(b->out + t * b->out_stride + at, p->columns + at * b->tokens + t * width,
                   (size_t)(bytes - at < width ? bytes - at : width));
}

static inline void kt_stage(kt_pool *pool, kt_task task, kt_plan *p, int64_t n, int64_t elements)
{
    if (elements > KT_INLINE_ELEMENTS)
        kt_pool_run_locked(pool, task, p, n);
    else
        for (int64_t i = 0; i < n; i++)
            task(p, i, 0);
}

/* One chunk, the pool's lock held and its scratch laid out. Returns as kt_plan_route. */
static inline int64_t kt_forward(kt_plan *p, kt_pool *pool, int threads)
{
    const int64_t bad = kt_plan_route(p);
    if (bad)
        return bad;
    const int64_t tokens = p->batch->tokens;
    kt_stage(pool, kt_task_quantize, p, tokens, tokens * p->k_hidden);
    if (p->tiles)
        kt_stage(pool, kt_task_gather, p, p->units, p->slots * p->k_hidden);
    /* About eight tasks a thread to balance, but panels long enough to stream. */
    const int64_t run = p->active * p->pairs / (threads * 8);
    p->pair_run = run < 1 ? 1 : run > KT_MOST_PAIRS ? KT_MOST_PAIRS : run;
    p->runs = kt_ceil(p->pairs, p->pair_run);
    kt_pool_run_locked(pool, kt_task_gate_up, p, p->active * p->runs);
    kt_stage(pool, kt_task_requantize, p, p->units, p->slots * p->ldh);
    kt_pool_run_locked(pool, kt_task_down, p, kt_ceil(p->blocks, KT_DOWN_BLOCKS));
    if (tokens > KT_DIRECT_TOKENS)
        kt_pool_run_locked(pool, kt_task_rows, p, kt_ceil(tokens, KT_BLOCK));
    return 0;
}

#endif

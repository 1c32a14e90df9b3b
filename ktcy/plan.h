/* One Mixture-of-Experts layer: route -> gate/up -> activation -> down -> combine.
 *
 *   ids [M, k] --counting sort--> slots grouped by expert, ascending; within one by (token, place in the row)
 *   x [M, H]   --quantize-------> rows, and for experts with many tokens 16 x 64 tiles
 *   gate/up    (expert, run of 16-column blocks)   -> h [slots, I] float32
 *   requantize h                                   -> rows or tiles
 *   down       a task owns 16 W output columns and adds the experts in ascending id -> out [M, H]
 *
 * With few tokens and one group, all of it is one loop: tasks that quantize x, then gate/up, of which the last of an
 * expert requantizes its rows, then down. Who needs x or an expert's h before it is there fetches weights meanwhile. On
 * 16 threads with AMX at one token, one loop is 2 % faster than a loop a stage, and to wait for one expert's h instead
 * of all and not for x before the loop 1 % (int8) to 3 % (4 bits) faster again. The last tasks of gate/up and down are
 * finer, so that threads end together (-2 to -4 %): a thread waited for 20 of 226 us.
 *
 * With many tokens and one group, gather, gate/up and requantize are one task over a panel of rows of an expert and
 * all its columns: tiles and h of the panel stay near (-10 % at 4096 tokens, -13 % at 1024 on 16 threads with AMX).
 *
 * Every output element is summed by one task in one order, and each product is exact up to its documented
 * rounding, so neither threads nor batch nor position change a bit. A `unit` is up to 16 slots of one expert: what
 * one tile row holds.
 *
 * Scratch is one block a group of threads, on the group's node. Who writes and who reads decides where an array lies:
 *
 *   array                         block of     written by             read by
 *   h, its group's columns        each group   its gate/up tasks      requantize, all groups: I float32 a slot, once
 *   columns, its down blocks      each group   its down tasks         rows, all groups: H outputs a token, once
 *   sums, row, line, work, panel  each group   one of its threads     the same thread
 *   plan, x and h as the format   group 0      thread 0; quantize,    gate/up and down, all groups
 *   wants them, rows and tiles                 gather, requantize
 *
 * So neither weights nor sums cross between nodes, only activations do: a slot's h once in float32, and once for each
 * other group what is small, x before gate/up and h before down in the format's encoding. With h whole in one block
 * the other groups would pay for two transfers more: a store to a remote line reads it first and writes it back.
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
/* Up to here all stages are one loop (16 tokens of 8 experts: +1 %). */
#define KT_CHAINED_SLOTS 64
/* Bytes of each block that a task fetches before it looks at rows (1-token layer with AMX: int8 -1 %, rawint4 -3 %,
 * gptq128 -2 %; twice or half of it no better; 4 tokens and two cores: no difference). */
#define KT_FETCH 4096
/* Rows of a panel and what they take: shorter ones read the weights too often (64 rows: no gain; 96 instead of 160 at
 * 4096 tokens of bf16 on 16 threads with AMX: 1.1 to 1.5 of the time), larger ones gain nothing more, and with rows of
 * 22 KB panels lose 1 to 11 % (DeepSeek-V3 in bf16). There are so many tasks a thread that the last ones do not weigh.
 */
#define KT_PANEL_ROWS 160
#define KT_PANEL_LEAST 96
#define KT_PANEL_BYTES (2 << 20)
#define KT_PANEL_TASKS 4

typedef struct {
    const void *weight, *scale;
    const float *bias;
    const int32_t *order; /* column j multiplies input order[j]; NULL: input j */
} kt_matrix;

/* What one group of threads (a NUMA node) owns of every expert: a range of gate/up pairs and of down blocks. The
 * matrices begin at the range. Groups exchange activations and never reduce. */
typedef struct {
    const kt_matrix *gate_up, *down; /* [experts] */
    int64_t pair, pairs, block, blocks;
} kt_slice;

typedef struct {
    const kt_kernels *kernels;
    const kt_format *format;
    kt_activation activation;
    int64_t experts, hidden, inter, groups;
    bool ordered; /* matrices have an order of their own: a row of x is sorted and quantized for each slot */
    const kt_slice *slices; /* [groups] */
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

/* What lies in the block of one group. */
typedef struct {
    float *h;      /* [slots, ldh] */
    int64_t ldh;   /* its pairs, in columns */
    char *columns; /* [down tasks, tokens, columns of one] of out's type */
    char *own;     /* [threads, own_bytes]: sums, work, row, line, sorted of a thread */
    int64_t runs;  /* gate/up tasks an expert but the last, which has one a pair */
    int64_t wide;  /* down tasks that own all blocks a task may; later ones own one */
    int64_t downs; /* down tasks */
} kt_part;

typedef struct {
    const kt_layer *layer;
    const kt_batch *batch;
    const kt_pool *pool;
    int64_t slots, units, active, tiles;
    const int32_t *ids;         /* [tokens, top_k] of the batch, -1 to experts - 1 */
    int64_t pair_run;           /* pairs of a gate/up task */
    int64_t panel_rows, panels; /* rows of a panel at most, or 0: no panels */
    /* sizes derived from the layer: bytes of a row and of its part of a tile; where things lie in a thread's own */
    int64_t k_hidden, k_inter, x_bytes, h_bytes, x_tile, h_tile, own_bytes;
    int64_t work_at, row_at, line_at, sorted_at, tiles_at, h_at;
    kt_part *part;  /* [groups] */
    int64_t *tasks; /* [groups] of one stage */
    int32_t *offset, *first_tile, *expert_ids, *token;
    /* Whether all is one loop; its tasks that quantize x; [active + 2] what is not over: gate/up tasks of each active
     * expert and one until its h is requantized, such experts, tasks of x; and when the last of these two were. */
    bool chained;
    int64_t firsts;
    int32_t *left;
    int64_t x_ended, h_ended;
    int32_t *panel; /* [panels + 1] first unit */
    float *route;
    char *x, *x_tiles, *hq, *h_tiles;
    kt_meta *x_meta, *h_meta;
    kt_unit *unit;
} kt_plan;

static inline int64_t kt_ceil(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

static inline int64_t kt_lines(int64_t bytes) { return kt_ceil(bytes, 64) * 64; }

static inline int64_t kt_panel_rows(const kt_plan *p, const kt_layer *layer, int threads)
{
    const int64_t row = p->x_tile + kt_ceil(layer->inter, KT_BLOCK) * KT_BLOCK * (int64_t)sizeof(float);
    const int64_t fit = KT_PANEL_BYTES / row, share = p->slots / (threads * KT_PANEL_TASKS);
    const int64_t least = fit < share ? fit : share, rows = (least < KT_PANEL_ROWS ? least : KT_PANEL_ROWS) / 32 * 32;
    return layer->groups == 1 && rows >= KT_PANEL_LEAST ? rows : 0;
}

/* Lays the arrays in the block of a group out from base, group 0 first (NULL: only measures). Returns their bytes. */
static inline size_t kt_plan_scratch(kt_plan *p, const kt_layer *layer, const kt_batch *batch, int64_t slots,
                                     const kt_pool *pool, int group, char *base)
{
    const int64_t touched = slots < layer->experts ? slots : layer->experts;
    p->layer = layer;
    p->batch = batch;
    p->slots = slots;
    p->pool = pool;
    p->k_hidden = kt_ceil(layer->hidden, KT_KPAD) * KT_KPAD;
    p->k_inter = kt_ceil(layer->inter, KT_KPAD) * KT_KPAD;
    p->x_bytes = layer->format->row_bytes(layer->hidden);
    p->h_bytes = layer->format->row_bytes(layer->inter);
    p->x_tile = layer->format->panel_bytes(layer->hidden);
    p->h_tile = layer->format->panel_bytes(layer->inter);
    const int64_t most = layer->hidden > layer->inter ? layer->hidden : layer->inter;
    p->panel_rows = kt_panel_rows(p, layer, pool->threads);
    p->work_at = kt_lines(batch->tokens * KT_DOWN_BLOCKS * KT_BLOCK * (int64_t)sizeof(float));
    p->row_at = p->work_at + kt_lines(layer->format->work_bytes(most));
    p->line_at = p->row_at + kt_lines(p->h_bytes);
    p->sorted_at = p->line_at + (layer->groups > 1 ? kt_lines(layer->inter * (int64_t)sizeof(float)) : 0);
    p->tiles_at = p->sorted_at + (layer->ordered ? kt_lines(most * (int64_t)sizeof(float)) : 0);
    p->h_at = p->tiles_at + kt_lines(p->panel_rows * p->x_tile);
    p->own_bytes = p->h_at + p->panel_rows * layer->slices->pairs * KT_BLOCK * (int64_t)sizeof(float);

    const int64_t units = slots / 16 + touched, many = slots / (layer->format->few_rows + 1);
    const int64_t tiles = slots / 16 + (many < touched ? many : touched);
    size_t at = 0;
#define KT_TAKE(to, type, count) \
    to = (type *)(base + at); \
    at += kt_lines((count) * (int64_t)sizeof(type))
    if (group == 0) {
        KT_TAKE(p->ids, const int32_t, batch->tokens * batch->top_k); /* first: kt_job_room reads them there */
        KT_TAKE(p->part, kt_part, layer->groups);
        KT_TAKE(p->tasks, int64_t, layer->groups);
        KT_TAKE(p->offset, int32_t, layer->experts + 1);
        KT_TAKE(p->first_tile, int32_t, layer->experts);
        KT_TAKE(p->expert_ids, int32_t, touched);
        KT_TAKE(p->left, int32_t, touched + 2);
        KT_TAKE(p->token, int32_t, slots);
        KT_TAKE(p->route, float, slots);
        KT_TAKE(p->unit, kt_unit, units);
        KT_TAKE(p->panel, int32_t, p->panel_rows ? units + 1 : 0);
        KT_TAKE(p->x_meta, kt_meta, layer->ordered ? slots : batch->tokens);
        KT_TAKE(p->h_meta, kt_meta, slots);
        KT_TAKE(p->x, char, (layer->ordered ? slots : batch->tokens) * p->x_bytes);
        KT_TAKE(p->hq, char, slots * p->h_bytes);
        KT_TAKE(p->x_tiles, char, p->panel_rows ? 0 : tiles * 16 * p->x_tile);
        KT_TAKE(p->h_tiles, char, tiles * 16 * p->h_tile);
    }
    const kt_slice *s = &layer->slices[group];
    kt_part part = {.ldh = s->pairs * KT_BLOCK};
    KT_TAKE(part.own, char, pool->group[group].threads * p->own_bytes);
    KT_TAKE(part.h, float, p->panel_rows ? 0 : slots * part.ldh);
    if (batch->tokens > KT_DIRECT_TOKENS) {
        const int64_t wide = kt_ceil(s->blocks, KT_DOWN_BLOCKS) * KT_DOWN_BLOCKS * KT_BLOCK;
        KT_TAKE(part.columns, char, wide * batch->tokens * kt_size(batch->out_dtype));
    }
#undef KT_TAKE
    if (base)
        p->part[group] = part;
    return at;
}

static inline char *kt_plan_own(const kt_plan *p, int thread)
{
    const int group = kt_pool_group_of(p->pool, thread);
    return p->part[group].own + (thread - p->pool->group[group].thread) * p->own_bytes;
}

/* What the caller's ids say at a place. They may change at any time, so the value is fixed here: the compiler may not
 * read it again after a check. */
static inline int64_t kt_id(const kt_batch *b, int64_t t, int64_t j)
{
    const char *at = b->ids + t * b->ids_stride + j * b->ids_step;
    int64_t id;
    if (b->ids_64) {
        memcpy(&id, at, sizeof id);
    } else {
        int32_t narrow;
        memcpy(&narrow, at, sizeof narrow);
        id = narrow;
    }
    __asm__ volatile("" : "+r"(id));
    return id;
}

/* The first id outside [-1, experts). */
typedef struct {
    int64_t token, place, id;
} kt_bad;

/* The one reader of a batch's ids: checks them and leaves them in `to`, if any. Returns how many name an expert (the
 * others are padding, which may be most of them: C52), or -1 and which one is bad. */
static inline int64_t kt_read_ids(const kt_batch *b, int64_t experts, int32_t *to, kt_bad *bad)
{
    int64_t slots = 0;
    for (int64_t t = 0; t < b->tokens; t++) {
        for (int64_t j = 0; j < b->top_k; j++) {
            const int64_t id = kt_id(b, t, j);
            if (id < -1 || id >= experts) {
                *bad = (kt_bad){t, j, id};
                return -1;
            }
            if (to)
                *to++ = (int32_t)id;
            slots += id >= 0;
        }
    }
    return slots;
}

/* Groups the p->slots by expert. */
static inline void kt_plan_route(kt_plan *p)
{
    const kt_batch *b = p->batch;
    const int64_t experts = p->layer->experts, few = p->layer->format->few_rows;
    memset(p->offset, 0, (size_t)(experts + 1) * sizeof *p->offset);
    for (int64_t i = 0; i < b->tokens * b->top_k; i++)
        p->offset[p->ids[i] + 1]++; /* those of id -1 fall into offset[0], cleared next */
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
    for (int64_t t = 0; t < b->tokens; t++) {
        for (int64_t j = 0; j < b->top_k; j++) {
            const int32_t id = p->ids[t * b->top_k + j];
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
}

static inline kt_gemm kt_plan_gemm(const kt_plan *p, int64_t expert, const kt_matrix *w, bool down, int thread)
{
    const int32_t first = p->offset[expert], tile = p->first_tile[expert];
    kt_gemm g = {.m = p->offset[expert + 1] - first, .weight = w->weight, .scale = w->scale, .bias = w->bias};
    g.work = kt_plan_own(p, thread) + p->work_at;
    if (down) {
        g.k = p->k_inter;
        g.x = p->hq + first * p->h_bytes;
        g.ldx = p->h_bytes;
        g.meta = p->h_meta + first;
        g.tiles = tile < 0 ? NULL : p->h_tiles + tile * 16 * p->h_tile;
    } else {
        g.k = p->k_hidden;
        g.x = p->x + (p->layer->ordered ? first * p->x_bytes : 0);
        g.ldx = p->x_bytes;
        g.index = p->layer->ordered ? NULL : p->token + first;
        g.meta = p->x_meta + (p->layer->ordered ? first : 0);
        g.tiles = tile < 0 ? NULL : p->x_tiles + tile * 16 * p->x_tile;
    }
    return g;
}

/* A row of n elements in an order, or as it is. */
static inline const void *kt_plan_sorted(const void *row, kt_dtype dtype, const int32_t *order, int64_t n, void *to)
{
    if (!order)
        return row;
    for (int64_t j = 0; j < n; j++)
        if (dtype == KT_F32)
            ((float *)to)[j] = ((const float *)row)[order[j]];
        else
            ((uint16_t *)to)[j] = ((const uint16_t *)row)[order[j]];
    return to;
}

/* Tasks that quantize x, and the rows that they make. */
static inline int64_t kt_quantizes(const kt_plan *p) { return p->layer->ordered ? p->units : p->batch->tokens; }
static inline int64_t kt_x_rows(const kt_plan *p) { return p->layer->ordered ? p->slots : p->batch->tokens; }

/* A row of x; in an ordered layer those of a unit, each where its slot is. */
static void kt_task_quantize(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_batch *b = p->batch;
    const kt_unit u = p->layer->ordered ? p->unit[i] : (kt_unit){.slot = (int32_t)i, .rows = 1};
    const int32_t *order = p->layer->ordered ? p->layer->slices->gate_up[u.expert].order : NULL;
    kt_thread state;
    p->layer->kernels->begin(&state, 0);
    for (int64_t at = u.slot; at < u.slot + u.rows; at++) {
        const char *row = b->x + (p->layer->ordered ? p->token[at] : at) * b->x_stride;
        p->layer->format->quantize(kt_plan_sorted(row, b->x_dtype, order, p->layer->hidden,
                                                  kt_plan_own(p, thread) + p->sorted_at),
                                   b->x_dtype, p->layer->hidden, p->x + at * p->x_bytes, &p->x_meta[at]);
    }
    p->layer->kernels->end(&state);
}

static void kt_gather(const kt_plan *p, const kt_unit *u, char *tiles)
{
    for (int64_t r = 0; r < 16; r++) {
        const int64_t row = r >= u->rows ? 0 : p->layer->ordered ? u->slot + r : p->token[u->slot + r];
        p->layer->format->tile(r < u->rows ? p->x + row * p->x_bytes : NULL, p->k_hidden, r, tiles);
    }
}

static void kt_task_gather(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_unit *u = &p->unit[i];
    if (u->tile >= 0)
        kt_gather(p, u, p->x_tiles + u->tile * 16 * p->x_tile);
}

/* The gate/up tasks of a group, and which active expert one of them belongs to. */
static inline int64_t kt_gate_ups(const kt_plan *p, int group)
{
    return p->active ? (p->active - 1) * p->part[group].runs + p->layer->slices[group].pairs : 0;
}

static inline int64_t kt_gate_up_expert(const kt_plan *p, int group, int64_t i)
{
    const int64_t a = i / p->part[group].runs;
    return a < p->active ? a : p->active - 1;
}

/* The start of what a task reads, n blocks of bytes from the same place on: kernels fetch what lies further on. */
static inline void kt_fetch(const void *from, int64_t n, int64_t bytes)
{
    for (int64_t at = 0; at < bytes && at < KT_FETCH; at += 64)
        for (int64_t b = 0; b < n; b++)
            __builtin_prefetch((const char *)from + b * bytes + at, 0, 2);
}

static inline void kt_fetch_blocks(const kt_format *f, const kt_matrix *w, int64_t block, int64_t n, int64_t k)
{
    kt_fetch((const char *)w->weight + block * f->weight_bytes(k), n, f->weight_bytes(k));
    kt_fetch((const char *)w->scale + block * f->scale_bytes(k), n, f->scale_bytes(k));
}

/* Until left is 0, fetching what lies at w meanwhile. */
static inline void kt_await(const int32_t *left, const char *w, int64_t bytes)
{
    for (int64_t rounds = 1, at = 0; __atomic_load_n(left, __ATOMIC_ACQUIRE); rounds++) {
        if (at < bytes)
            for (const int64_t stop = at + 1024 < bytes ? at + 1024 : bytes; at < stop; at += 64)
                __builtin_prefetch(w + at, 0, 2);
        else if (rounds % 1024)
            __builtin_ia32_pause();
        else
            sched_yield();
    }
}

static void kt_task_gate_up(void *ctx, int group, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_slice *s = &p->layer->slices[group];
    const kt_part *part = &p->part[group];
    const int64_t a = kt_gate_up_expert(p, group, i), expert = p->expert_ids[a];
    const int64_t run = a + 1 < p->active ? p->pair_run : 1, j0 = (i - a * part->runs) * run;
    const int64_t j1 = j0 + run < s->pairs ? j0 + run : s->pairs;
    const int64_t block_bytes = p->layer->format->weight_bytes(p->layer->hidden);
    const kt_gemm g = kt_plan_gemm(p, expert, &s->gate_up[expert], false, thread);
    kt_thread state;
    kt_fetch_blocks(p->layer->format, &s->gate_up[expert], 2 * j0, 2, p->layer->hidden);
    if (p->firsts)
        kt_await(&p->left[p->active + 1], (const char *)g.weight + 2 * j0 * block_bytes, 2 * (j1 - j0) * block_bytes);
    p->layer->kernels->begin(&state, g.tiles != NULL);
    p->layer->format->gate_up(&g, &p->layer->activation, j0, j1,
                              part->h + p->offset[expert] * part->ldh, part->ldh);
    p->layer->kernels->end(&state);
}

/* The row of h of a slot: where it lies, or brought together from all groups in `line`. */
static inline const float *kt_plan_h(const kt_plan *p, int64_t slot, float *line)
{
    if (p->layer->groups == 1)
        return p->part->h + slot * p->part->ldh;
    for (int64_t g = 0; g < p->layer->groups; g++) {
        const kt_part *part = &p->part[g];
        const int64_t at = p->layer->slices[g].pair * KT_BLOCK, left = p->layer->inter - at;
        if (left > 0)
            memcpy(line + at, part->h + slot * part->ldh, (size_t)(left < part->ldh ? left : part->ldh) * sizeof *line);
    }
    return line;
}

/* A unit of h at rows of ldh, or NULL: as gate/up tasks wrote it. */
static void kt_requantize(const kt_plan *p, const kt_unit *u, const float *h, int thread)
{
    const kt_format *f = p->layer->format;
    char *own = kt_plan_own(p, thread);
    float *line = (float *)(own + p->line_at);
    const int32_t *order = p->layer->slices->down[u->expert].order;
    for (int64_t r = 0; r < 16; r++) {
        const int64_t slot = u->slot + r;
        char *row = u->tile < 0 ? p->hq + slot * p->h_bytes : own + p->row_at;
        if (r < u->rows) {
            const float *values = h ? h + r * p->part->ldh : kt_plan_h(p, slot, line);
            f->quantize(kt_plan_sorted(values, KT_F32, order, p->layer->inter, own + p->sorted_at), KT_F32,
                        p->layer->inter, row, &p->h_meta[slot]);
        }
        if (u->tile >= 0)
            f->tile(r < u->rows ? row : NULL, p->k_inter, r, p->h_tiles + u->tile * 16 * p->h_tile);
    }
}

static void kt_task_requantize(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    kt_thread state;
    p->layer->kernels->begin(&state, 0);
    kt_requantize(p, &p->unit[i], NULL, thread);
    p->layer->kernels->end(&state);
}

/* Each expert's units in panels of about the same size, whole strips of two units. */
static inline void kt_plan_panels(kt_plan *p)
{
    p->panels = 0;
    for (int64_t u = 0, end; u < p->units; u = end) {
        for (end = u; end < p->units && p->unit[end].expert == p->unit[u].expert;)
            end++;
        const int64_t each = kt_ceil(kt_ceil(end - u, kt_ceil(end - u, p->panel_rows / 16)), 2) * 2;
        for (int64_t at = u; at < end; at += each)
            p->panel[p->panels++] = (int32_t)at;
    }
    p->panel[p->panels] = (int32_t)p->units;
}

static void kt_task_panel(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_unit *first = &p->unit[p->panel[i]], *end = &p->unit[p->panel[i + 1]];
    const kt_slice *s = p->layer->slices;
    char *tiles = kt_plan_own(p, thread) + p->tiles_at;
    float *h = (float *)(kt_plan_own(p, thread) + p->h_at);
    kt_gemm g = kt_plan_gemm(p, first->expert, &s->gate_up[first->expert], false, thread);
    kt_thread state;
    const int64_t row = first->slot - p->offset[first->expert];
    g.m = end[-1].slot + end[-1].rows - first->slot;
    if (g.index) {
        g.index += row;
    } else {
        g.x = (const char *)g.x + row * g.ldx;
        g.meta += row;
    }
    if (g.tiles) {
        g.tiles = tiles;
        for (const kt_unit *u = first; u < end; u++, tiles += 16 * p->x_tile)
            kt_gather(p, u, tiles);
    }
    p->layer->kernels->begin(&state, g.tiles != NULL);
    p->layer->format->gate_up(&g, &p->layer->activation, 0, s->pairs, h, p->part->ldh);
    for (const kt_unit *u = first; u < end; u++, h += 16 * p->part->ldh)
        kt_requantize(p, u, h, thread);
    p->layer->kernels->end(&state);
}

/* The first block of a group's down task, or the end of the one before. */
static inline int64_t kt_down_block(const kt_plan *p, int group, int64_t i)
{
    const int64_t wide = p->part[group].wide, blocks = p->layer->slices[group].blocks;
    const int64_t block = i < wide ? i * KT_DOWN_BLOCKS : wide * KT_DOWN_BLOCKS + i - wide;
    return block < blocks ? block : blocks;
}

static void kt_task_down(void *ctx, int group, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_batch *b = p->batch;
    const kt_format *f = p->layer->format;
    const kt_slice *s = &p->layer->slices[group];
    const int64_t b0 = kt_down_block(p, group, i), b1 = kt_down_block(p, group, i + 1);
    const int64_t width = KT_DOWN_BLOCKS * KT_BLOCK, size = kt_size(b->out_dtype);
    const int64_t block_bytes = f->weight_bytes(p->layer->inter), scale_bytes = f->scale_bytes(p->layer->inter);
    float *sums = (float *)kt_plan_own(p, thread);
    kt_thread state;
    if (p->active)
        kt_fetch_blocks(f, &s->down[p->expert_ids[0]], b0, b1 - b0, p->layer->inter);
    memset(sums, 0, (size_t)(b->tokens * width) * sizeof *sums);
    p->layer->kernels->begin(&state, p->tiles > 0);
    for (int64_t a = 0; a < p->active; a++) {
        const int64_t expert = p->expert_ids[a], first = p->offset[expert];
        const kt_matrix *m = &s->down[expert], *next = a + 1 < p->active ? &s->down[p->expert_ids[a + 1]] : NULL;
        if (p->chained)
            kt_await(&p->left[a], (const char *)m->weight + b0 * block_bytes, (b1 - b0) * block_bytes);
        kt_gemm g = kt_plan_gemm(p, expert, m, true, thread);
        g.next = next ? (const char *)next->weight + b0 * block_bytes : NULL;
        g.next_scale = next ? (const char *)next->scale + b0 * scale_bytes : NULL;
        f->down(&g, p->token + first, p->route + first, b0, b1, sums, width);
    }
    const int64_t column = (s->block + b0) * KT_BLOCK, left = p->layer->hidden - column;
    const int64_t owned = (b1 - b0) * KT_BLOCK, columns = left < owned ? left : owned;
    if (b->tokens > KT_DIRECT_TOKENS)
        p->layer->kernels->store(sums, b->tokens * width, b->out_dtype,
                                 p->part[group].columns + b0 * KT_BLOCK * b->tokens * size);
    else
        for (int64_t t = 0; t < b->tokens; t++)
            p->layer->kernels->store(sums + t * width, columns, b->out_dtype,
                                     b->out + t * b->out_stride + column * size);
    p->layer->kernels->end(&state);
}

/* Counts down what is left; who ends it notes when. */
static inline void kt_one_less(int32_t *left, int64_t *ended)
{
    const int64_t now = kt_now();
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0)
        *ended = now;
}

/* Each expert has one unit, of its own number. What a task waits for was claimed before it. */
static void kt_task_chained(void *ctx, int group, int64_t i, int thread)
{
    kt_plan *p = ctx;
    const int64_t gate_up = i - p->firsts, down = gate_up - kt_gate_ups(p, group);
    if (gate_up < 0) {
        kt_task_quantize(p, i, thread);
        kt_one_less(&p->left[p->active + 1], &p->x_ended);
        return;
    }
    if (down >= 0) {
        kt_task_down(p, group, down, thread);
        return;
    }
    const int64_t a = kt_gate_up_expert(p, group, gate_up);
    kt_task_gate_up(p, group, gate_up, thread);
    if (__atomic_sub_fetch(&p->left[a], 1, __ATOMIC_ACQ_REL) > 1)
        return;
    kt_task_requantize(p, a, thread);
    __atomic_store_n(&p->left[a], 0, __ATOMIC_RELEASE);
    kt_one_less(&p->left[p->active], &p->h_ended);
}

/* KT_BLOCK rows of out from the columns of all down tasks. */
static void kt_task_rows(void *ctx, int64_t i, int thread)
{
    const kt_plan *p = ctx;
    const kt_batch *b = p->batch;
    const int64_t size = kt_size(b->out_dtype), width = KT_DOWN_BLOCKS * KT_BLOCK * size;
    const int64_t bytes = p->layer->hidden * size, t0 = i * KT_BLOCK;
    const int64_t t1 = t0 + KT_BLOCK < b->tokens ? t0 + KT_BLOCK : b->tokens;
    for (int64_t g = 0; g < p->layer->groups; g++) {
        const kt_slice *s = &p->layer->slices[g];
        const int64_t first = s->block * KT_BLOCK * size, end = first + s->blocks * KT_BLOCK * size;
        for (int64_t at = first; at < end && at < bytes; at += width)
            for (int64_t t = t0; t < t1; t++)
                memcpy(b->out + t * b->out_stride + at, p->part[g].columns + (at - first) * b->tokens + t * width,
                       (size_t)(bytes - at < width ? bytes - at : width));
    }
}

static inline void kt_stage(kt_pool *pool, kt_task task, kt_plan *p, int64_t n, int64_t elements)
{
    if (elements > KT_INLINE_ELEMENTS)
        kt_pool_run_locked(pool, task, p, n);
    else
        for (int64_t i = 0; i < n; i++)
            task(p, i, 0);
}

/* When each phase of a forward ended, kt_now() nanoseconds; started[0] is its begin. */
#define KT_PHASES(X) X(plan) X(quantize) X(gather) X(gate_up) X(requantize) X(down) X(rows)
#define KT_PHASE_ENUM(name) KT_PHASE_##name,
enum { KT_PHASES(KT_PHASE_ENUM) KT_N_PHASES };
#define KT_PHASE_NAME(name) #name,
static const char *const kt_phase_names[] = {KT_PHASES(KT_PHASE_NAME)};

typedef struct {
    int64_t started, ended[KT_N_PHASES];
} kt_times;

/* What is left of few slots, on the one group. */
static inline void kt_forward_chained(kt_plan *p, kt_pool *pool, kt_times *times)
{
    for (int64_t a = 0; a + 1 < p->active; a++)
        p->left[a] = (int32_t)p->part->runs + 1;
    p->left[p->active - 1] = (int32_t)p->layer->slices->pairs + 1;
    p->left[p->active] = (int32_t)p->active;
    p->left[p->active + 1] = (int32_t)p->firsts;
    p->tasks[0] += p->firsts + p->part->downs;
    kt_pool_run_groups_locked(pool, kt_task_chained, p, p->tasks);
    if (p->firsts)
        times->ended[KT_PHASE_quantize] = times->ended[KT_PHASE_gather] = p->x_ended;
    times->ended[KT_PHASE_gate_up] = times->ended[KT_PHASE_requantize] = p->h_ended;
    times->ended[KT_PHASE_down] = kt_now();
}

/* x gathered, gate/up and h requantized, each over the whole batch. Returns whether down is done too. */
static inline bool kt_forward_h(kt_plan *p, kt_pool *pool, kt_times *times)
{
    const kt_layer *l = p->layer;
    if (p->tiles)
        kt_stage(pool, kt_task_gather, p, p->units, p->slots * p->k_hidden);
    times->ended[KT_PHASE_gather] = kt_now();
    /* About eight tasks a thread to balance, but panels long enough to stream. */
    const int64_t wanted = p->active * kt_ceil(l->inter, KT_BLOCK) / (pool->threads * 8);
    p->pair_run = wanted < 1 ? 1 : wanted > KT_MOST_PAIRS ? KT_MOST_PAIRS : wanted;
    for (int64_t g = 0; g < l->groups; g++) {
        p->part[g].runs = kt_ceil(l->slices[g].pairs, p->pair_run);
        p->tasks[g] = kt_gate_ups(p, (int)g);
    }
    if (p->chained) {
        kt_forward_chained(p, pool, times);
        return true;
    }
    kt_pool_run_groups_locked(pool, kt_task_gate_up, p, p->tasks);
    times->ended[KT_PHASE_gate_up] = kt_now();
    kt_stage(pool, kt_task_requantize, p, p->units, p->slots * p->k_inter);
    times->ended[KT_PHASE_requantize] = kt_now();
    return false;
}

/* One chunk, the pool's lock held, its scratch laid out and its ids read. */
static inline void kt_forward(kt_plan *p, kt_pool *pool, kt_times *times)
{
    const kt_layer *l = p->layer;
    const int64_t tokens = p->batch->tokens;
    bool done = false;
    kt_plan_route(p);
    times->ended[KT_PHASE_plan] = kt_now();
    p->chained = l->groups == 1 && p->units && p->units == p->active && p->slots <= KT_CHAINED_SLOTS;
    p->firsts = p->chained && !p->tiles ? kt_quantizes(p) : 0;
    if (!p->firsts)
        kt_stage(pool, kt_task_quantize, p, kt_quantizes(p), kt_x_rows(p) * p->k_hidden);
    times->ended[KT_PHASE_quantize] = kt_now();
    for (int64_t g = 0; g < l->groups; g++) {
        /* Two of one block for each thread. */
        const int64_t blocks = l->slices[g].blocks, fine = 2 * pool->group[g].threads;
        const int64_t coarse = tokens > KT_DIRECT_TOKENS || blocks < 2 * fine ? blocks : blocks - fine;
        const int64_t wide = kt_ceil(coarse, KT_DOWN_BLOCKS), left = blocks - wide * KT_DOWN_BLOCKS;
        p->part[g].wide = wide;
        p->part[g].downs = left > 0 ? wide + left : wide;
    }
    if (p->panel_rows) {
        times->ended[KT_PHASE_gather] = times->ended[KT_PHASE_quantize];
        kt_plan_panels(p);
        kt_pool_run_locked(pool, kt_task_panel, p, p->panels);
        times->ended[KT_PHASE_gate_up] = times->ended[KT_PHASE_requantize] = kt_now();
    } else {
        done = kt_forward_h(p, pool, times);
    }
    if (!done) {
        for (int64_t g = 0; g < l->groups; g++)
            p->tasks[g] = p->part[g].downs;
        kt_pool_run_groups_locked(pool, kt_task_down, p, p->tasks);
        times->ended[KT_PHASE_down] = kt_now();
    }
    if (tokens > KT_DIRECT_TOKENS)
        kt_pool_run_locked(pool, kt_task_rows, p, kt_ceil(tokens, KT_BLOCK));
    times->ended[KT_PHASE_rows] = kt_now();
}

enum { KT_NO_MEMORY = 1, KT_BAD_ID };

/* A forward that can run again and again, by the caller or by a queue: it holds all it needs. */
typedef struct {
    const kt_layer *layer;
    kt_pool *pool;
    kt_batch batch;
    int64_t chunk;  /* tokens of one pass: bounds the scratch; passes give the same bits */
    kt_times times;  /* of the last pass */
    kt_times *kept;  /* [passes] of the last kt_job_run, or NULL: nobody wants them */
    int64_t status;  /* of the last kt_job_keep */
    kt_bad bad;      /* where a status is KT_BAD_ID */
} kt_job;

/* Reads the ids of a chunk and lays its scratch out. Where group 0's block has to grow for what they name, they are
 * read again: what is used is what lies in the block at the end. */
static inline int64_t kt_job_room(kt_job *job, const kt_batch *b, kt_plan *plan)
{
    const kt_layer *layer = job->layer;
    size_t bytes = (size_t)(b->tokens * b->top_k) * sizeof(int32_t);
    char *base;
    int64_t slots;
    do {
        base = kt_pool_scratch(job->pool, 0, bytes);
        if (!base)
            return KT_NO_MEMORY;
        slots = kt_read_ids(b, layer->experts, (int32_t *)base, &job->bad);
        if (slots < 0)
            return KT_BAD_ID;
        bytes = kt_plan_scratch(plan, layer, b, slots, job->pool, 0, NULL);
    } while (bytes > job->pool->group[0].scratch_bytes);
    kt_plan_scratch(plan, layer, b, slots, job->pool, 0, base);
    for (int g = 1; g < layer->groups; g++) {
        base = kt_pool_scratch(job->pool, g, kt_plan_scratch(plan, layer, b, slots, job->pool, g, NULL));
        if (!base)
            return KT_NO_MEMORY;
        kt_plan_scratch(plan, layer, b, slots, job->pool, g, base);
    }
    return 0;
}

/* Tokens [start, start + chunk) of the batch. Returns 0 or a status. Before several passes write anything, all ids are
 * looked at; each pass looks at its own again. */
static inline int64_t kt_job_pass(kt_job *job, int64_t start)
{
    kt_batch b = job->batch;
    if (!start && b.tokens > job->chunk && kt_read_ids(&b, job->layer->experts, NULL, &job->bad) < 0)
        return KT_BAD_ID;
    kt_plan plan;
    b.tokens = b.tokens - start < job->chunk ? b.tokens - start : job->chunk;
    b.x += start * b.x_stride;
    b.ids += start * b.ids_stride;
    b.weights += start * b.weights_stride;
    b.out += start * b.out_stride;
    kt_pool_lock(job->pool);
    job->times.started = kt_now();
    const int64_t status = kt_job_room(job, &b, &plan);
    if (!status)
        kt_forward(&plan, job->pool, &job->times);
    kt_pool_unlock(job->pool);
    if (status == KT_BAD_ID)
        job->bad.token += start;
    return status;
}

/* For queues: all passes; the status is the task's. */
static int64_t kt_job_run(void *ctx)
{
    kt_job *job = ctx;
    int64_t status = 0;
    for (int64_t start = 0; start < job->batch.tokens && !status; start += job->chunk) {
        status = kt_job_pass(job, start);
        if (job->kept)
            job->kept[start / job->chunk] = job->times;
    }
    return status;
}

/* As kt_job_run, but the status waits in the job for whoever reads its result. */
static int64_t kt_job_keep(void *ctx)
{
    kt_job *job = ctx;
    job->status = kt_job_run(job);
    return 0;
}

/* A group's own copy of its weights, made by its own threads so that the pages are local. */
typedef struct {
    char *to;
    const char *from;
    size_t bytes;
} kt_copy;

static void kt_task_copy(void *ctx, int group, int64_t i, int thread)
{
    const kt_copy *c = ((kt_copy **)ctx)[group] + i;
    memcpy(c->to, c->from, c->bytes);
}

#endif

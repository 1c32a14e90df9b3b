/* Tasks that show a pool at work: each task exactly once and in its group, the time from run to return with every
 * thread in it, and where the memory of a group lies. */
#ifndef KT_SELFTEST_H
#define KT_SELFTEST_H

#include "pool.h"

static inline void kt_count_task(void *ctx, int64_t i, int thread) { ((int32_t *)ctx)[i]++; }

typedef struct {
    const kt_pool *pool;
    int32_t **counts; /* [groups][n] */
} kt_group_counts;

static inline void kt_count_group_task(void *ctx, int group, int64_t i, int thread)
{
    const kt_group_counts *c = ctx;
    c->counts[group][i] += kt_pool_group_of(c->pool, thread) == group ? 1 : 1000;
}

typedef struct {
    char *base;
    int32_t *nodes; /* of each 2 MiB */
} kt_touch;

static inline void kt_touch_task(void *ctx, int group, int64_t i, int thread)
{
    const kt_touch *t = ctx;
    char *at = t->base + i * KT_HUGE_PAGE;
    *at = 1;
    t->nodes[i] = kt_node_of(at);
}

/* Has the group's threads touch n x 2 MiB of it and writes down the node of each. 0 or ENOMEM. */
static inline int kt_touch_memory(kt_pool *p, int group, int64_t n, int32_t *nodes)
{
    kt_touch t = {kt_group_alloc(p, group, n * KT_HUGE_PAGE), nodes};
    if (!t.base)
        return ENOMEM;
    int64_t counts[p->groups];
    for (int g = 0; g < p->groups; g++)
        counts[g] = g == group ? n : 0;
    kt_pool_lock(p);
    kt_pool_run_groups_locked(p, kt_touch_task, &t, counts);
    kt_pool_unlock(p);
    kt_group_free(p, group, t.base, n * KT_HUGE_PAGE);
    return 0;
}

typedef struct {
    _Atomic int arrived;
    int threads;
} kt_meeting;

/* Waits until all threads are in a task, so none can take two. */
static inline void kt_meet_task(void *ctx, int64_t i, int thread)
{
    kt_meeting *m = ctx;
    atomic_fetch_add(&m->arrived, 1);
    for (int spins = 1; atomic_load(&m->arrived) < m->threads; spins++) {
        if (spins % 256 == 0)
            sched_yield();
        __builtin_ia32_pause();
    }
}

/* Keeps its CPU busy for *ctx loads, about a nanosecond each: work that costs the same on any thread. */
static inline void kt_busy_task(void *ctx, int64_t i, int thread)
{
    for (volatile int64_t left = *(int64_t *)ctx; left > 0; left--)
        ;
}

static inline void kt_sleep(int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    if (ns)
        nanosleep(&t, NULL);
}

/* ns[r]: from the call of run r to its return, for n tasks of so many loads, or (n < 0) one task a thread that waits
 * for all others. Between runs the caller sleeps for idle_ns. */
static inline void kt_time_runs(kt_pool *p, double *ns, int64_t runs, int64_t idle_ns, int64_t n, int64_t loads)
{
    for (int64_t r = 0; r < runs; r++) {
        kt_sleep(idle_ns);
        kt_meeting m = {0, p->threads};
        int64_t start = kt_now();
        if (n < 0)
            kt_pool_run_locked(p, kt_meet_task, &m, p->threads);
        else
            kt_pool_run_locked(p, kt_busy_task, &loads, n);
        ns[r] = kt_now() - start;
    }
}

#endif

/* Tasks that show a pool at work: each task exactly once, and the time from run to return with every thread in it. */
#ifndef KT_SELFTEST_H
#define KT_SELFTEST_H

#include "pool.h"

static inline void kt_count_task(void *ctx, int64_t i, int thread) { ((int32_t *)ctx)[i]++; }

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

/* ns[r]: from the call of run r to its return. Between runs the caller sleeps for idle_ns. */
static inline void kt_round_trips(kt_pool *p, double *ns, int64_t runs, int64_t idle_ns)
{
    struct timespec idle = {idle_ns / 1000000000, idle_ns % 1000000000};
    for (int64_t r = 0; r < runs; r++) {
        if (idle_ns)
            nanosleep(&idle, NULL);
        kt_meeting m = {0, p->threads};
        int64_t start = kt_now();
        kt_pool_run_locked(p, kt_meet_task, &m, p->threads);
        ns[r] = kt_now() - start;
    }
}

#endif

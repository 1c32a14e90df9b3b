/* A pool of pinned threads in groups, one for each NUMA node, that runs one parallel loop at a time.
 *
 * kt_pool_run(p, fn, ctx, n) calls fn(ctx, i, thread) once for every i in [0, n) and returns when all calls have
 * returned; each group gets a run of the i in proportion to its threads. kt_pool_run_groups_locked(p, fn, ctx, n)
 * calls fn(ctx, g, i, thread) for every i in [0, n[g]) of every group g. Inside a group tasks go to whichever thread is
 * free, and never to a thread of another group. The caller works too, as thread 0 and in group 0; its affinity is not
 * touched. At any time at most one call runs with a given `thread`, so per-thread scratch needs no lock. fn must not
 * use the pool, block for long or touch Python.
 *
 * Tasks are claimed through one word a group,
 *
 *     claim = epoch << 32 | KT_CLAIM_END + tasks not yet claimed
 *
 * by subtracting 1. Who finds nothing left has subtracted too, at most once a thread and epoch, so the low half never
 * borrows. fn, ctx, n and first are read only after a successful claim: an unfinished task keeps its job alive, so
 * they are those of the claimed task, and a late worker of an old job either claims nothing or helps the new job. A
 * group is done when its `left` reaches 0, not when every worker has answered: a worker that the system does not
 * schedule delays nobody unless it holds a task.
 *
 * Waiting is a bounded spin, then a futex. The spin does not yield: beside a busy process that would give away a whole
 * time slice, where a sleeper is let in at once when it is woken (measured with two busy processes on two CPUs, runs
 * of 1 ms every 0.2 ms: mean 3.6 ms with, 2.3 ms without). A worker lingers between the two, for the gaps between the
 * layers of a model: it yields all the time, and after a yield that shows that somebody else wants its CPU it does not
 * for a while. Workers sleep on the epoch half of `claim`; the caller sleeps on the low half of `left`, whose top bit
 * asks the last worker for a wake-up.
 *
 * Scratch memory is one block a group, on its node, for all who use the pool: one at a time, under the lock.
 *
 * Everything is to be called without the GIL. kt_pool_run takes the pool's lock; to keep the scratch over several
 * runs use kt_pool_lock, kt_pool_scratch, kt_pool_run_locked ..., kt_pool_unlock. */
#ifndef KT_POOL_H
#define KT_POOL_H

#include "memory.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "glibc.h"

#ifndef KT_SPIN_NS
#define KT_SPIN_NS 100000 /* spin before sleep: about what a wake-up costs in a virtual machine (measured 50-75 us) */
#endif
#ifndef KT_LINGER_NS
#define KT_LINGER_NS 1700000 /* then yields, so that an idle pool sleeps within 2 ms */
#endif
#define KT_WANTED_NS 50000 /* a yield that took so long may have let another thread run */
#define KT_SHY 64          /* waits without lingering after that: a slice of 3 ms is lost in one of so many */
#ifndef KT_FANOUT
#define KT_FANOUT 16 /* threads that one thread wakes: about a microsecond each for it, a wake-up's latency for them */
#endif
#define KT_MOST_THREADS 4096
#define KT_CLAIM_END KT_MOST_THREADS
#define KT_WAITING ((uint64_t)1 << 63)

typedef void (*kt_task)(void *ctx, int64_t i, int thread);
typedef void (*kt_group_task)(void *ctx, int group, int64_t i, int thread);
typedef struct kt_pool kt_pool;

/* Each thread counts for itself; thread 0 is whoever holds the lock. */
typedef struct {
    _Alignas(64) kt_pool *pool;
    int thread, group;
    int cpu; /* its own; see kt_pool_make_room */
    pthread_t id;
    _Atomic uint64_t tasks;
    _Atomic uint64_t steals; /* tasks beyond an even share of a loop, ceil(n / threads of the group) */
    _Atomic uint64_t sleeps;
    _Atomic uint64_t wake_ups; /* sleeping threads that this one woke */
} kt_worker;

typedef struct {
    _Alignas(64) _Atomic uint64_t claim;
    uint32_t n;    /* the job: written before claim, constant until left is 0 */
    int64_t first; /* i of its first task */
    _Alignas(64) _Atomic uint64_t left;
    _Atomic uint32_t sleepers;
    _Alignas(64) int thread; /* its first; the others follow */
    int threads;
    int node; /* to allocate on; -1: where its threads touch it first */
    _Atomic int64_t bytes; /* that kt_group_alloc gave out and has not got back */
    char *scratch;
    size_t scratch_bytes;
} kt_group;

struct kt_pool {
    kt_group_task fn; /* the job, as above */
    void *ctx;
    _Atomic bool stop;
    int threads, groups;
    int64_t spin_ns, linger_ns;
    int started;          /* workers to join */
    int caller_cpu;       /* where the last caller ran */
    kt_worker *displaced; /* who made room for it, on worker[0].cpu */
    pthread_mutex_t lock;
    pid_t owner;
    int pin_error;  /* errno when threads could not be pinned, else 0 */
    int bind_error; /* errno when memory cannot be bound to the nodes, else 0 */
    _Atomic uint64_t runs;
    kt_group *group;   /* [groups] */
    kt_worker *worker; /* [threads], the caller first */
    int *core;         /* [cpus] physical core of each CPU */
    int cpus;
};

static inline void kt_add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

static inline long kt_futex(void *word, int op, uint32_t value)
{
    return syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static inline int64_t kt_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Spins until ((*word ^ value) & mask == 0) == equal; false after about ns. */
static inline bool kt_spin(_Atomic uint64_t *word, uint64_t value, uint64_t mask, bool equal, int64_t ns)
{
    for (int64_t end = 0;;) {
        for (int i = 0; i < 32; i++) {
            if ((((atomic_load_explicit(word, memory_order_acquire) ^ value) & mask) == 0) == equal)
                return true;
            __builtin_ia32_pause();
        }
        int64_t now = kt_now();
        if (!end)
            end = now + ns;
        if (now >= end)
            return false;
    }
}

/* How often this thread's CPU went to another one while it could run. */
static inline long kt_preemptions(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
}

/* As kt_spin, with the CPU on offer to others. *shy, the caller's to keep: waits left without. A yield may also take
 * long because the host runs another machine on this CPU, which to sleep would not help: nine of ten were so on two
 * CPUs, and left the dispatcher asleep at most submits. */
static inline bool kt_linger(_Atomic uint64_t *word, uint64_t value, uint64_t mask, bool equal, int64_t ns, int *shy)
{
    if (ns == 0)
        return false;
    if (*shy) {
        --*shy;
        return false;
    }
    if (kt_spin(word, value, mask, equal, 0))
        return true;
    const long preemptions = kt_preemptions();
    for (int64_t now = kt_now(), end = now + ns; now < end;) {
        const int64_t before = now;
        sched_yield();
        now = kt_now();
        if (now - before > KT_WANTED_NS && kt_preemptions() != preemptions) {
            *shy = KT_SHY;
            return false;
        }
        if (kt_spin(word, value, mask, equal, 0))
            return true;
    }
    return false;
}

/* Claims and runs tasks of its group until none is left to claim; returns a claim word of that epoch. */
static inline uint64_t kt_pool_work(kt_pool *p, kt_worker *self)
{
    kt_group *g = &p->group[self->group];
    uint64_t done = 0, claim = atomic_load_explicit(&g->claim, memory_order_acquire);
    while ((uint32_t)claim > KT_CLAIM_END) {
        claim = atomic_fetch_sub_explicit(&g->claim, 1, memory_order_acquire);
        if ((uint32_t)claim <= KT_CLAIM_END)
            break;
        p->fn(p->ctx, self->group, g->first + (KT_CLAIM_END + g->n - (uint32_t)claim), self->thread);
        done++;
        claim = atomic_load_explicit(&g->claim, memory_order_acquire);
    }
    if (done) {
        uint64_t share = (g->n + (uint64_t)g->threads - 1) / g->threads;
        kt_add(&self->tasks, done);
        if (done > share)
            kt_add(&self->steals, done - share);
        if (atomic_fetch_sub_explicit(&g->left, done, memory_order_acq_rel) == (KT_WAITING | done))
            kt_add(&self->wake_ups, kt_futex(&g->left, FUTEX_WAKE, 1) == 1);
    }
    return claim;
}

/* Wakes as many sleepers of a group as `most` tasks need, up to KT_FANOUT. */
static inline void kt_group_wake(kt_group *g, uint32_t most, kt_worker *self)
{
    uint32_t sleepers = atomic_load(&g->sleepers), wake = most < KT_FANOUT ? most : KT_FANOUT;
    if (sleepers && wake) {
        long woken = kt_futex((char *)&g->claim + 4, FUTEX_WAKE, wake);
        if (woken > 0)
            kt_add(&self->wake_ups, woken);
    }
}

static inline void *kt_pool_main(void *arg)
{
    kt_worker *self = arg;
    kt_pool *p = self->pool;
    kt_group *g = &p->group[self->group];
    int shy = 0;
    for (;;) {
        uint64_t seen = kt_pool_work(p, self);
        if (atomic_load(&p->stop))
            return NULL;
        if (kt_spin(&g->claim, seen, ~(uint64_t)UINT32_MAX, false, p->spin_ns) ||
            kt_linger(&g->claim, seen, ~(uint64_t)UINT32_MAX, false, p->linger_ns, &shy))
            continue;
        /* Sequentially consistent against kt_group_publish: one of the two sees the other. */
        atomic_fetch_add(&g->sleepers, 1);
        if (atomic_load(&g->claim) >> 32 == seen >> 32) {
            kt_add(&self->sleeps, 1);
            kt_futex((char *)&g->claim + 4, FUTEX_WAIT, seen >> 32);
        }
        atomic_fetch_sub(&g->sleepers, 1);
        uint32_t low = atomic_load_explicit(&g->claim, memory_order_relaxed);
        if (g->threads > KT_FANOUT && low > KT_CLAIM_END)
            kt_group_wake(g, low - KT_CLAIM_END, self);
    }
}

/* A new epoch with n tasks. */
static inline void kt_group_publish(kt_group *g, int64_t first, uint32_t n)
{
    uint64_t epoch = (atomic_load_explicit(&g->claim, memory_order_relaxed) >> 32) + 1;
    g->n = n;
    g->first = first;
    atomic_store_explicit(&g->left, n, memory_order_relaxed);
    atomic_store(&g->claim, epoch << 32 | (KT_CLAIM_END + n));
}

/* Until all tasks of a group have returned. */
static inline void kt_group_wait(kt_pool *p, kt_group *g)
{
    if (kt_spin(&g->left, 0, ~(uint64_t)0, true, p->spin_ns))
        return;
    for (;;) {
        uint64_t left = atomic_fetch_or_explicit(&g->left, KT_WAITING, memory_order_acq_rel) | KT_WAITING;
        if (left == KT_WAITING)
            return;
        kt_add(&p->worker[0].sleeps, 1);
        kt_futex(&g->left, FUTEX_WAIT, left);
    }
}

static inline void kt_pool_lock(kt_pool *p) { pthread_mutex_lock(&p->lock); }

static inline void kt_pool_unlock(kt_pool *p) { pthread_mutex_unlock(&p->lock); }

static inline int kt_pool_group_of(const kt_pool *p, int thread) { return p->worker[thread].group; }

static inline int kt_pin(pthread_t id, int cpu)
{
    cpu_set_t set[8]; /* the kernel knows at most 8192 CPUs */
    CPU_ZERO_S(sizeof(set), set);
    CPU_SET_S(cpu, sizeof(set), set);
    return pthread_setaffinity_np(id, sizeof(set), set);
}

static inline int kt_pool_core(const kt_pool *p, int cpu) { return cpu < p->cpus ? p->core[cpu] : cpu; }

/* The caller floats. Where it came to the CPU of a worker, or to a sibling of it, that worker changes to the CPU that
 * was left to the caller, until the caller moves on: the kernel would let the two share theirs for 100 ms and more
 * while the other idles (measured: 300 for 190 us on two CPUs). */
static inline void kt_pool_make_room(kt_pool *p)
{
    int cpu = sched_getcpu(), spare = p->worker[0].cpu;
    if (cpu == p->caller_cpu || spare < 0)
        return;
    p->caller_cpu = cpu;
    int core = kt_pool_core(p, cpu);
    kt_worker *rival = NULL;
    for (kt_worker *w = p->worker + 1; w <= p->worker + p->started; w++) {
        if (w->cpu == cpu) {
            rival = w;
            break;
        }
        if (kt_pool_core(p, w->cpu) == core && kt_pool_core(p, spare) != core)
            rival = w;
    }
    if (rival == p->displaced)
        return;
    if (p->displaced)
        kt_pin(p->displaced->id, p->displaced->cpu);
    if (rival)
        kt_pin(rival->id, spare);
    p->displaced = rival;
}

/* Runs the tasks [first[g], first[g] + n[g]) of every group; the caller holds the lock. Each n[g] < 2**31. */
static inline void kt_pool_run_from(kt_pool *p, kt_group_task fn, void *ctx, const int64_t *first, const int64_t *n)
{
    kt_add(&p->runs, 1);
    if (p->threads == 1) { /* a closed pool too, whatever its groups */
        for (int g = 0; g < p->groups; g++) {
            for (int64_t i = 0; i < n[g]; i++)
                fn(ctx, g, first[g] + i, 0);
            kt_add(&p->worker[0].tasks, n[g] > 0 ? n[g] : 0);
        }
        return;
    }
    kt_pool_make_room(p);
    p->fn = fn;
    p->ctx = ctx;
    for (int g = p->groups - 1; g >= 0; g--) {
        if (n[g] > 0) {
            kt_group_publish(&p->group[g], first[g], n[g]);
            kt_group_wake(&p->group[g], g ? n[g] : n[g] - 1, p->worker);
        }
    }
    kt_pool_work(p, p->worker);
    for (int g = 0; g < p->groups; g++)
        if (n[g] > 0)
            kt_group_wait(p, &p->group[g]);
}

/* n[g] tasks of every group g, for a caller that holds the lock. */
static inline void kt_pool_run_groups_locked(kt_pool *p, kt_group_task fn, void *ctx, const int64_t *n)
{
    int64_t first[p->groups];
    memset(first, 0, sizeof(first));
    kt_pool_run_from(p, fn, ctx, first, n);
}

typedef struct {
    kt_task fn;
    void *ctx;
} kt_flat;

static inline void kt_flat_task(void *ctx, int group, int64_t i, int thread)
{
    kt_flat *flat = ctx;
    flat->fn(flat->ctx, i, thread);
}

/* As kt_pool_run, for a caller that holds the lock. n < 2**31; nothing happens for n <= 0. */
static inline void kt_pool_run_locked(kt_pool *p, kt_task fn, void *ctx, int64_t n)
{
    if (n <= 1) { /* not worth a word to the workers */
        if (n == 1)
            fn(ctx, 0, 0);
        kt_add(&p->runs, 1);
        kt_add(&p->worker[0].tasks, n == 1);
        return;
    }
    kt_flat flat = {fn, ctx};
    int64_t first[p->groups], share[p->groups];
    /* Not p->threads: that is 1 when another thread stopped the pool before this one got the lock. */
    const int threads = p->group[p->groups - 1].thread + p->group[p->groups - 1].threads;
    for (int g = 0; g < p->groups; g++) {
        const kt_group *group = &p->group[g];
        first[g] = n * group->thread / threads;
        share[g] = n * (group->thread + group->threads) / threads - first[g];
    }
    kt_pool_run_from(p, kt_flat_task, &flat, first, share);
}

static inline void kt_pool_run(kt_pool *p, kt_task fn, void *ctx, int64_t n)
{
    kt_pool_lock(p);
    kt_pool_run_locked(p, fn, ctx, n);
    kt_pool_unlock(p);
}

/* Zeroed memory on a page boundary, from 2 MiB on one of 2 MiB, bound to the group's node. Where binding is refused or
 * there is no node, a page comes to lie where it is first touched. NULL when there is none. */
static inline void *kt_group_map(const kt_group *g, size_t bytes)
{
    void *base = kt_map(bytes);
    if (base && g->node >= 0)
        kt_bind(base, kt_whole_pages(bytes), g->node);
    return base;
}

static inline void kt_group_release_scratch(kt_group *g)
{
    if (g->scratch)
        munmap(g->scratch, g->scratch_bytes);
    g->scratch = NULL;
    g->scratch_bytes = 0;
}

static inline void kt_pool_release_scratch(kt_pool *p)
{
    for (int g = 0; g < p->groups; g++)
        kt_group_release_scratch(&p->group[g]);
}

/* At least `bytes` of the group's scratch, as kt_group_map, in huge pages where the system gives them. Holds what the
 * last user left; growing it drops the contents. Only while holding the lock. */
static inline void *kt_pool_scratch(kt_pool *p, int group, size_t bytes)
{
    kt_group *g = &p->group[group];
    if (g->scratch && bytes <= g->scratch_bytes)
        return g->scratch;
    kt_group_release_scratch(g);
    if (bytes > PTRDIFF_MAX)
        return NULL;
    size_t size = (bytes / KT_HUGE_PAGE + 1) * KT_HUGE_PAGE;
    g->scratch = kt_group_map(g, size);
    g->scratch_bytes = g->scratch ? size : 0;
    return g->scratch;
}

/* Memory as kt_group_map for data that the group's threads read again and again: fill it by tasks of that group. From
 * any thread, at any time. */
static inline void *kt_group_alloc(kt_pool *p, int group, size_t bytes)
{
    void *base = kt_group_map(&p->group[group], bytes);
    if (base)
        atomic_fetch_add(&p->group[group].bytes, kt_whole_pages(bytes));
    return base;
}

/* Gives back what kt_group_alloc(p, group, bytes) returned, before or after kt_pool_stop. NULL: nothing. */
static inline void kt_group_free(kt_pool *p, int group, void *base, size_t bytes)
{
    if (base) {
        munmap(base, kt_whole_pages(bytes ? bytes : 1));
        atomic_fetch_sub(&p->group[group].bytes, kt_whole_pages(bytes));
    }
}

/* Ends the workers and releases the scratch; runs after it are done by the caller alone. Call it with the lock held,
 * except in a forked child: there the workers do not exist, and the lock may be held by a thread that does not. */
static inline void kt_pool_stop(kt_pool *p)
{
    if (p->owner == getpid()) {
        atomic_store(&p->stop, true);
        for (int g = 0; g < p->groups; g++) {
            kt_group_publish(&p->group[g], 0, 0);
            kt_futex((char *)&p->group[g].claim + 4, FUTEX_WAKE, INT_MAX);
        }
        for (int i = 1; i <= p->started; i++)
            pthread_join(p->worker[i].id, NULL);
    }
    p->started = 0;
    p->threads = 1;
    kt_pool_release_scratch(p);
}

static inline void kt_pool_free(kt_pool *p)
{
    kt_pool_stop(p);
    free(p);
}

/* Groups of threads[g] threads on nodes[g] (-1: none); thread t, counted over all groups, belongs on cpus[t], where
 * cpus[0] is left to the caller. cores[c] is the physical core of CPU c < n_cores. crowded: CPUs are shared or too few
 * are granted, so that a spinning thread would take them from a working one. Returns 0 or an errno; then nothing is
 * left behind. */
static inline int kt_pool_new(kt_pool **out, int groups, const int *threads, const int *nodes, const int *cpus,
                              const int *cores, int n_cores, bool crowded)
{
    int total = 0;
    for (int g = 0; g < groups; g++)
        total += threads[g];
    size_t head = (sizeof(kt_pool) + 63) / 64 * 64;
    size_t size = head + groups * sizeof(kt_group) + total * sizeof(kt_worker) + n_cores * sizeof(int);
    kt_pool *p = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!p)
        return ENOMEM;
    memset(p, 0, size);
    p->threads = total;
    p->groups = groups;
    p->owner = getpid();
    p->spin_ns = crowded ? 0 : KT_SPIN_NS;
    p->linger_ns = crowded ? 0 : KT_LINGER_NS;
    p->caller_cpu = -1;
    p->group = (kt_group *)((char *)p + head);
    p->worker = (kt_worker *)(p->group + groups);
    p->core = (int *)(p->worker + total);
    p->cpus = n_cores;
    memcpy(p->core, cores, n_cores * sizeof(int));
    pthread_mutex_init(&p->lock, NULL);
    for (int g = 0, t = 0; g < groups; g++) {
        p->group[g].thread = t;
        p->group[g].threads = threads[g];
        p->group[g].node = nodes[g];
        if (nodes[g] >= 0 && !p->bind_error)
            p->bind_error = kt_bind_refused(nodes[g]);
        for (; t < p->group[g].thread + threads[g]; t++) {
            p->worker[t].pool = p;
            p->worker[t].thread = t;
            p->worker[t].group = g;
            p->worker[t].cpu = cpus[t];
        }
    }
    for (int t = 1; t < total; t++)
        if (cpus[t] == cpus[0])
            p->worker[0].cpu = -1; /* no CPU to change to */

    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited by the workers: signals go to the caller's threads */
    int error = 0;
    for (int t = 1; t < total; t++) {
        kt_worker *w = &p->worker[t];
        error = pthread_create(&w->id, NULL, kt_pool_main, w);
        if (error)
            break;
        p->started++;
        char name[20];
        snprintf(name, sizeof(name), "ktcy-%d", t);
        pthread_setname_np(w->id, name);
        int pin_error = kt_pin(w->id, w->cpu);
        if (pin_error)
            p->pin_error = pin_error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        kt_pool_free(p);
    else
        *out = p;
    return error;
}

#endif

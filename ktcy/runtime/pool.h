/* A pool of pinned threads that runs one parallel for at a time, and one block of scratch memory.
 *
 * kt_pool_run(p, fn, ctx, n) calls fn(ctx, i, thread) once for every i in [0, n) and returns when all calls have
 * returned. The caller works too, as thread 0; its affinity is not touched. At any time at most one call runs with a
 * given `thread`, so per-thread scratch needs no lock. fn must not use the pool, block for long or touch Python.
 *
 * Tasks are claimed through one word,
 *
 *     claim = epoch << 32 | tasks not yet claimed
 *
 * by compare-and-swap to claim - 1. fn, ctx and n are read only after a successful claim: an unfinished task keeps
 * its job alive, so they are those of the claimed task, and a late worker of an old job either claims nothing or
 * helps the new job. A job is over when `left` tasks reaches 0, not when every worker has answered: a worker that
 * the system does not schedule delays nobody unless it holds a task.
 *
 * Waiting is a bounded spin, then a futex. A spinning thread yields its CPU every few hundred nanoseconds: the thread
 * it waits for may be queued behind it. Workers sleep on the epoch half of `claim`; the caller sleeps on the low half
 * of `left`, whose top bit asks the last worker for a wake-up.
 *
 * Everything is to be called without the GIL. kt_pool_run takes the pool's lock; to keep the scratch over several
 * runs use kt_pool_lock, kt_pool_scratch, kt_pool_run_locked ..., kt_pool_unlock. */
#ifndef KT_POOL_H
#define KT_POOL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "glibc.h"

#ifndef KT_SPIN_NS
#define KT_SPIN_NS 100000 /* spin before sleep: about what a wake-up costs in a virtual machine (measured 50-75 us) */
#endif
#define KT_WAITING ((uint64_t)1 << 63)
#define KT_HUGE_PAGE ((size_t)2 << 20)

typedef void (*kt_task)(void *ctx, int64_t i, int thread);
typedef struct kt_pool kt_pool;

typedef struct {
    kt_pool *pool;
    int thread;
    int cpu;
    pthread_t id;
} kt_worker;

struct kt_pool {
    _Alignas(64) _Atomic uint64_t claim;
    _Alignas(64) _Atomic uint64_t left;
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic bool stop;
    _Alignas(64) kt_task fn; /* the job: written before claim, constant until left is 0 */
    void *ctx;
    uint32_t n;
    int threads;
    int64_t spin_ns;
    int caller_cpu; /* where the last caller ran */
    int spare_cpu;  /* the one no worker is pinned to; -1 when there is none */
    pthread_mutex_t lock;
    char *scratch;
    size_t scratch_bytes;
    pid_t owner;
    int started;   /* workers to join */
    int pin_error; /* errno when threads could not be pinned, else 0 */
    kt_worker workers[];
};

static inline void kt_futex(void *word, int op, uint32_t value)
{
    syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static inline int64_t kt_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Spins until (*word == value) == equal; false after about ns. */
static inline bool kt_spin(_Atomic uint64_t *word, uint64_t value, bool equal, int64_t ns)
{
    int64_t end = kt_now() + ns;
    do {
        for (int i = 0; i < 32; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) == equal)
                return true;
            __builtin_ia32_pause();
        }
        sched_yield();
    } while (kt_now() < end);
    return false;
}

/* Claims and runs tasks until none is left to claim; returns the claim word that said so. */
static inline uint64_t kt_pool_work(kt_pool *p, int thread)
{
    uint64_t done = 0, claim = atomic_load_explicit(&p->claim, memory_order_acquire);
    while ((uint32_t)claim) {
        if (!atomic_compare_exchange_weak_explicit(&p->claim, &claim, claim - 1, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        p->fn(p->ctx, p->n - (uint32_t)claim, thread);
        done++;
        claim = atomic_load_explicit(&p->claim, memory_order_acquire);
    }
    if (done && atomic_fetch_sub_explicit(&p->left, done, memory_order_acq_rel) == (KT_WAITING | done))
        kt_futex(&p->left, FUTEX_WAKE, 1);
    return claim;
}

static inline void *kt_pool_main(void *arg)
{
    kt_worker *self = arg;
    kt_pool *p = self->pool;
    for (;;) {
        uint64_t seen = kt_pool_work(p, self->thread);
        if (atomic_load(&p->stop))
            return NULL;
        if (kt_spin(&p->claim, seen, false, p->spin_ns))
            continue;
        /* Sequentially consistent against kt_pool_publish: one of the two sees the other. */
        atomic_fetch_add(&p->sleepers, 1);
        if (atomic_load(&p->claim) == seen)
            kt_futex((char *)&p->claim + 4, FUTEX_WAIT, seen >> 32);
        atomic_fetch_sub(&p->sleepers, 1);
    }
}

/* A new epoch with n tasks; wakes as many of the sleepers as are asked for. */
static inline void kt_pool_publish(kt_pool *p, uint32_t n, uint32_t wake)
{
    uint64_t epoch = (atomic_load_explicit(&p->claim, memory_order_relaxed) >> 32) + 1;
    atomic_store(&p->claim, epoch << 32 | n);
    uint32_t sleepers = atomic_load(&p->sleepers);
    if (sleepers)
        kt_futex((char *)&p->claim + 4, FUTEX_WAKE, sleepers < wake ? sleepers : wake);
}

static inline void kt_pool_lock(kt_pool *p) { pthread_mutex_lock(&p->lock); }

static inline void kt_pool_unlock(kt_pool *p) { pthread_mutex_unlock(&p->lock); }

static inline int kt_pin(pthread_t id, int cpu)
{
    cpu_set_t set[8]; /* the kernel knows at most 8192 CPUs */
    CPU_ZERO_S(sizeof(set), set);
    CPU_SET_S(cpu, sizeof(set), set);
    return pthread_setaffinity_np(id, sizeof(set), set);
}

/* The caller floats. Where it came to the CPU of a worker, the worker changes to the spare one: the kernel would let
 * the two share it for 100 ms and more while the other idles (measured: 300 for 190 us on two CPUs). */
static inline void kt_pool_make_room(kt_pool *p)
{
    int cpu = sched_getcpu();
    if (cpu == p->caller_cpu || p->spare_cpu < 0)
        return;
    p->caller_cpu = cpu;
    for (int i = 0; i < p->started; i++) {
        kt_worker *w = &p->workers[i];
        if (w->cpu == cpu && kt_pin(w->id, p->spare_cpu) == 0) {
            w->cpu = p->spare_cpu;
            p->spare_cpu = cpu;
            return;
        }
    }
}

/* As kt_pool_run, for a caller that holds the lock. n < 2**32; nothing happens for n <= 0. */
static inline void kt_pool_run_locked(kt_pool *p, kt_task fn, void *ctx, int64_t n)
{
    if (n <= 1 || p->threads == 1) {
        for (int64_t i = 0; i < n; i++)
            fn(ctx, i, 0);
        return;
    }
    kt_pool_make_room(p);
    p->fn = fn;
    p->ctx = ctx;
    p->n = n;
    atomic_store_explicit(&p->left, n, memory_order_relaxed);
    kt_pool_publish(p, n, n - 1);
    kt_pool_work(p, 0);
    if (kt_spin(&p->left, 0, true, p->spin_ns))
        return;
    for (;;) {
        uint64_t left = atomic_fetch_or_explicit(&p->left, KT_WAITING, memory_order_acq_rel) | KT_WAITING;
        if (left == KT_WAITING)
            return;
        kt_futex(&p->left, FUTEX_WAIT, left);
    }
}

static inline void kt_pool_run(kt_pool *p, kt_task fn, void *ctx, int64_t n)
{
    kt_pool_lock(p);
    kt_pool_run_locked(p, fn, ctx, n);
    kt_pool_unlock(p);
}

static inline void kt_pool_release_scratch(kt_pool *p)
{
    if (p->scratch)
        munmap(p->scratch, p->scratch_bytes);
    p->scratch = NULL;
    p->scratch_bytes = 0;
}

/* At least `bytes` of memory on a 2 MiB boundary, in huge pages where the system gives them; NULL when it gives none.
 * Zero at first, then whatever the last user left; growing it drops the contents. Only while holding the lock. */
static inline void *kt_pool_scratch(kt_pool *p, size_t bytes)
{
    if (p->scratch && bytes <= p->scratch_bytes)
        return p->scratch;
    kt_pool_release_scratch(p);
    if (bytes > PTRDIFF_MAX - 2 * KT_HUGE_PAGE)
        return NULL;
    size_t size = (bytes / KT_HUGE_PAGE + 1) * KT_HUGE_PAGE, mapped = size + KT_HUGE_PAGE;
    char *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    size_t head = -(uintptr_t)base % KT_HUGE_PAGE;
    if (head)
        munmap(base, head);
    munmap(base + head + size, KT_HUGE_PAGE - head);
    madvise(base + head, size, MADV_HUGEPAGE);
    p->scratch = base + head;
    p->scratch_bytes = size;
    return p->scratch;
}

/* Ends the workers and releases the scratch; runs after it are done by the caller alone. Call it with the lock held,
 * except in a forked child: there the workers do not exist, and the lock may be held by a thread that does not. */
static inline void kt_pool_stop(kt_pool *p)
{
    if (p->owner == getpid()) {
        atomic_store(&p->stop, true);
        kt_pool_publish(p, 0, INT_MAX);
        for (int i = 0; i < p->started; i++)
            pthread_join(p->workers[i].id, NULL);
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

/* threads - 1 workers; worker t starts on cpus[t % n_cpus], which leaves cpus[0] to the caller (kt_pool_make_room).
 * Returns 0 or an errno; then nothing is left behind. */
static inline int kt_pool_new(kt_pool **out, const int *cpus, int n_cpus, int threads)
{
    size_t size = sizeof(kt_pool) + (threads - 1) * sizeof(kt_worker);
    kt_pool *p = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!p)
        return ENOMEM;
    bool roomy = threads <= n_cpus;
    *p = (kt_pool){.threads = threads, .owner = getpid(), .caller_cpu = -1};
    p->spin_ns = roomy ? KT_SPIN_NS : 0;
    p->spare_cpu = roomy ? cpus[0] : -1;
    pthread_mutex_init(&p->lock, NULL);

    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited by the workers: signals go to the caller's threads */
    int error = 0;
    for (int t = 1; t < threads; t++) {
        kt_worker *w = &p->workers[t - 1];
        *w = (kt_worker){.pool = p, .thread = t, .cpu = cpus[t % n_cpus]};
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

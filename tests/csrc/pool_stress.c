/* Drives pool.h hard enough for ThreadSanitizer and AddressSanitizer to see every path; exits 1 at the first fault.
 *
 * Every task must run exactly once, no two at a time with one thread number, and see the context of its own run.
 * The marks are plain variables, so a broken guarantee is a data race too. */
#include "pool.h"

#include <string.h>

enum { MAX_TASKS = 300 };

typedef struct {
    unsigned char ran[MAX_TASKS];
    int64_t n;
    int threads;
    uint32_t *busy; /* one a cache line and thread */
} job;

static void fail(const char *what)
{
    fprintf(stderr, "pool_stress: %s\n", what);
    exit(1);
}

static void mark(void *ctx, int64_t i, int thread)
{
    job *j = ctx;
    if (i < 0 || i >= j->n || thread < 0 || thread >= j->threads)
        fail("task or thread out of range");
    if (j->busy[16 * thread]++)
        fail("two tasks at once with one thread number");
    j->ran[i]++;
    for (int spin = i % 7 * 20; spin > 0; spin--)
        __builtin_ia32_pause();
    j->busy[16 * thread]--;
}

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

typedef struct {
    kt_pool *pool;
    uint32_t *busy;
    uint32_t seed;
    int threads, runs;
} client;

static void *submit(void *arg)
{
    client *c = arg;
    uint32_t state = c->seed;
    for (int run = 0; run < c->runs; run++) {
        job j = {.n = next(&state) % MAX_TASKS, .threads = c->threads, .busy = c->busy};
        if (next(&state) % 4 == 0)
            j.n %= 3;
        if (next(&state) % 64 == 0) { /* find the workers asleep */
            struct timespec idle = {0, 500000};
            nanosleep(&idle, NULL);
        }
        if (next(&state) % 2) {
            kt_pool_run(c->pool, mark, &j, j.n);
        } else {
            kt_pool_lock(c->pool);
            size_t bytes = next(&state) % (3 << 20);
            char *scratch = kt_pool_scratch(c->pool, bytes);
            if (!scratch || (uintptr_t)scratch % 64)
                fail("no scratch");
            memset(scratch, run, bytes);
            kt_pool_run_locked(c->pool, mark, &j, j.n);
            if (bytes && scratch[bytes - 1] != (char)run)
                fail("scratch used by another");
            if (next(&state) % 16 == 0)
                kt_pool_release_scratch(c->pool);
            kt_pool_unlock(c->pool);
        }
        for (int64_t i = 0; i < j.n; i++)
            if (j.ran[i] != 1)
                fail("a task did not run exactly once");
    }
    return NULL;
}

static int cpus[CPU_SETSIZE];

static void pool_round(int n_cpus, int threads, int clients, int runs)
{
    kt_pool *pool;
    if (kt_pool_new(&pool, cpus, n_cpus, threads))
        fail("no pool");
    uint32_t *busy = calloc(16 * threads, sizeof(uint32_t));
    pthread_t ids[8];
    client c[8];
    for (int i = 0; i < clients; i++) {
        c[i] = (client){pool, busy, 17 * threads + i, threads, runs};
        pthread_create(&ids[i], NULL, submit, &c[i]);
    }
    for (int i = 0; i < clients; i++)
        pthread_join(ids[i], NULL);
    kt_pool_free(pool);
    free(busy);
}

static void *one_pool(void *arg)
{
    pool_round(*(int *)arg, 3, 2, 300);
    return NULL;
}

int main(void)
{
    cpu_set_t set;
    sched_getaffinity(0, sizeof(set), &set);
    int n_cpus = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set))
            cpus[n_cpus++] = cpu;

    for (int threads = 1; threads <= 8; threads = threads < 4 ? threads + 1 : threads * 2)
        for (int clients = 1; clients <= 3; clients += 2)
            pool_round(n_cpus, threads, clients, 300);
    pool_round(1, 4, 2, 300); /* all on one CPU */
    for (int i = 0; i < 100; i++) /* born and ended, with and without a run between */
        pool_round(n_cpus, 1 + i % 5, i % 2, 1);

    pthread_t ids[2]; /* two pools at once */
    for (int i = 0; i < 2; i++)
        pthread_create(&ids[i], NULL, one_pool, &n_cpus);
    for (int i = 0; i < 2; i++)
        pthread_join(ids[i], NULL);
    puts("ok");
    return 0;
}

/* Drives pool.h hard enough for ThreadSanitizer and AddressSanitizer to see every path; exits 1 at the first fault.
 *
 * Every task must run exactly once, by a thread of its group, no two at a time with one thread number, and see the
 * context of its own run.
 * The marks are plain variables, so a broken guarantee is a data race too. */
#include "memory.h" /* first: it asks for GNU's declarations */

#include <sched.h>

static int stress_yield(void);
#define sched_yield stress_yield
#include "pool.h"
#undef sched_yield

#include <string.h>

static _Thread_local bool stolen; /* yields take long, though no other thread of this system runs */

static int stress_yield(void)
{
    if (!stolen)
        return sched_yield();
    for (const int64_t end = kt_now() + 2 * KT_WANTED_NS; kt_now() < end;)
        ;
    return 0;
}

enum { MAX_TASKS = 300, MAX_GROUPS = 4, RUNS = 100 };

typedef struct {
    unsigned char ran[MAX_TASKS];
    int64_t n;
    int threads;
    uint32_t *busy; /* one a cache line and thread */
    const kt_pool *pool;
    int64_t first[MAX_GROUPS]; /* where a group's tasks lie in ran */
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

static void mark_group(void *ctx, int group, int64_t i, int thread)
{
    job *j = ctx;
    if (kt_pool_group_of(j->pool, thread) != group)
        fail("a task ran in another group");
    mark(ctx, j->first[group] + i, thread);
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

static void memory(kt_pool *p, uint32_t random)
{
    const int group = random % p->groups;
    const size_t bytes = random % 5 ? random % 10000 : 5 << 20;
    char *base = kt_group_alloc(p, group, bytes);
    if (!base || (uintptr_t)base % (bytes < KT_HUGE_PAGE ? KT_PAGE : KT_HUGE_PAGE))
        fail("no memory for a group");
    memset(base, 1, bytes);
    kt_group_free(p, group, base, bytes);
}

static void *submit(void *arg)
{
    client *c = arg;
    uint32_t state = c->seed;
    for (int run = 0; run < c->runs; run++) {
        job j = {.n = next(&state) % MAX_TASKS, .threads = c->threads, .busy = c->busy, .pool = c->pool};
        if (next(&state) % 4 == 0)
            j.n %= 3;
        if (next(&state) % 64 == 0) { /* find the workers asleep */
            struct timespec idle = {0, 500000};
            nanosleep(&idle, NULL);
        }
        uint32_t way = next(&state) % 3;
        if (way == 0) {
            kt_pool_run(c->pool, mark, &j, j.n);
        } else if (way == 1) { /* some groups get nothing */
            int64_t n[MAX_GROUPS], left = j.n;
            for (int g = 0; g < c->pool->groups; g++) {
                n[g] = g == c->pool->groups - 1 ? left : next(&state) % (left + 1) * (next(&state) % 4 > 0);
                j.first[g] = j.n - left;
                left -= n[g];
            }
            kt_pool_lock(c->pool);
            kt_pool_run_groups_locked(c->pool, mark_group, &j, n);
            kt_pool_unlock(c->pool);
        } else {
            kt_pool_lock(c->pool);
            size_t bytes[MAX_GROUPS];
            char *scratch[MAX_GROUPS];
            for (int g = 0; g < c->pool->groups; g++) {
                bytes[g] = next(&state) % (3 << 20);
                scratch[g] = kt_pool_scratch(c->pool, g, bytes[g]);
                if (!scratch[g] || (uintptr_t)scratch[g] % KT_HUGE_PAGE)
                    fail("no scratch");
                memset(scratch[g], run + g, bytes[g]);
            }
            kt_pool_run_locked(c->pool, mark, &j, j.n);
            for (int g = 0; g < c->pool->groups; g++)
                if (bytes[g] && (scratch[g][0] != (char)(run + g) || scratch[g][bytes[g] - 1] != (char)(run + g)))
                    fail("scratch used by another");
            if (next(&state) % 16 == 0)
                kt_pool_release_scratch(c->pool);
            kt_pool_unlock(c->pool);
            memory(c->pool, next(&state));
        }
        for (int64_t i = 0; i < j.n; i++)
            if (j.ran[i] != 1)
                fail("a task did not run exactly once");
    }
    return NULL;
}

static int cpus[CPU_SETSIZE];

static void pool_round(int n_cpus, int groups, int threads, int clients, int runs)
{
    kt_pool *pool;
    int counts[MAX_GROUPS], nodes[MAX_GROUPS], of_thread[64];
    for (int g = 0; g < groups; g++) {
        counts[g] = g ? 1 : threads - groups + 1; /* uneven */
        nodes[g] = g - 1;
    }
    for (int t = 0; t < threads; t++)
        of_thread[t] = cpus[t % n_cpus];
    if (kt_pool_new(&pool, groups, counts, nodes, of_thread, cpus, n_cpus, threads > n_cpus))
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
    for (int g = 0; g < groups; g++)
        if (pool->group[g].bytes)
            fail("memory of a group is not accounted for");
    kt_pool_lock(pool);
    kt_pool_stop(pool);
    kt_pool_unlock(pool);
    /* As for one who waited for the lock meanwhile. */
    job late = {.n = MAX_TASKS, .threads = 1, .busy = busy, .pool = pool};
    kt_pool_run(pool, mark, &late, late.n);
    for (int64_t i = 0; i < late.n; i++)
        if (late.ran[i] != 1)
            fail("a task did not run exactly once on a stopped pool");
    kt_pool_free(pool);
    free(busy);
}

static void nothing(void *ctx, int64_t i, int thread) {}

/* Whether the worker, on the first CPU, makes room for a caller on `cpu`; the spare CPU need not exist. */
static bool makes_room(int cpu, const int *cores, int n_cores)
{
    kt_pool *pool;
    cpu_set_t one, before;
    sched_getaffinity(0, sizeof(before), &before);
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    if (kt_pool_new(&pool, 1, (int[]){2}, (int[]){-1}, (int[]){n_cores - 1, cpus[0]}, cores, n_cores, false))
        fail("no pool");
    kt_pool_run(pool, nothing, NULL, 2);
    bool moved = pool->displaced == &pool->worker[1];
    kt_pool_free(pool);
    sched_setaffinity(0, sizeof(before), &before);
    return moved;
}

static void siblings(void)
{
    int cores[CPU_SETSIZE], n = cpus[1] + 2;
    for (int cpu = 0; cpu < n; cpu++)
        cores[cpu] = cpu;
    if (!makes_room(cpus[0], cores, n) || makes_room(cpus[1], cores, n))
        fail("wrong worker made room");
    cores[cpus[1]] = cores[cpus[0]];
    if (!makes_room(cpus[1], cores, n))
        fail("no room for a caller on a sibling");
    cores[n - 1] = cores[cpus[0]];
    if (makes_room(cpus[1], cores, n))
        fail("changed to another sibling for nothing");
}

static void *one_pool(void *arg)
{
    pool_round(*(int *)arg, 2, 3, 2, RUNS);
    return NULL;
}

static void *hog(void *over)
{
    kt_pin(pthread_self(), cpus[0]);
    while (!atomic_load((_Atomic bool *)over))
        ;
    return NULL;
}

/* Who lingers leaves the CPU to a thread that wants it, and does not mind time that the host takes. */
static void lingering(void)
{
    cpu_set_t before;
    sched_getaffinity(0, sizeof(before), &before);
    kt_pin(pthread_self(), cpus[0]);
    _Atomic uint64_t word = 0;
    int shy = 1;
    stolen = true;
    for (int tries = 0; shy && tries < 1000; tries++) { /* other processes may want this CPU */
        shy = 0;
        kt_linger(&word, 1, ~(uint64_t)0, true, 4 * KT_WANTED_NS, &shy);
    }
    stolen = false;
    if (shy)
        fail("a linger gave up for time that the host took");
    _Atomic bool over = false;
    pthread_t id;
    pthread_create(&id, NULL, hog, &over);
    for (int tries = 0; !shy && tries < 1000; tries++)
        kt_linger(&word, 1, ~(uint64_t)0, true, 4 * KT_WANTED_NS, &shy);
    atomic_store(&over, true);
    pthread_join(id, NULL);
    if (!shy)
        fail("a linger did not see that another thread wants the CPU");
    sched_setaffinity(0, sizeof(before), &before);
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
            for (int groups = 1; groups <= threads && groups <= MAX_GROUPS; groups += 2)
                pool_round(n_cpus, groups, threads, clients, RUNS);
    pool_round(1, 1, 4, 2, RUNS); /* all on one CPU */
    for (int i = 0; i < 60; i++) /* born and ended, with and without a run between */
        pool_round(n_cpus, 1 + i % 2, 2 + i % 5, i % 2, 1);

    lingering();
    if (n_cpus > 1)
        siblings();

    pthread_t ids[2]; /* two pools at once */
    for (int i = 0; i < 2; i++)
        pthread_create(&ids[i], NULL, one_pool, &n_cpus);
    for (int i = 0; i < 2; i++)
        pthread_join(ids[i], NULL);
    puts("ok");
    return 0;
}

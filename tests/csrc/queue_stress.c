/* Drives queue.h hard enough for ThreadSanitizer and AddressSanitizer to see every path; exits 1 at the first fault.
 *
 * Every submitted task must run exactly once, in the order of the tickets, never two at a time, and what it wrote must
 * be seen by who waited for it. The marks are plain variables, so a broken guarantee is a data race too. */
#include "queue.h"

static void fail(const char *what)
{
    fprintf(stderr, "queue_stress: %s\n", what);
    exit(1);
}

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

static void doze(int64_t us)
{
    struct timespec t = {0, us * 1000};
    nanosleep(&t, NULL);
}

/* What the tasks of one queue share; only the dispatcher may touch it. */
typedef struct {
    int64_t runs;
    int busy;
} world;

typedef struct {
    kt_queue_task task;
    world *world;
    int64_t runs, last, status, spin;
} job;

static int64_t run(void *ctx)
{
    job *j = ctx;
    if (j->world->busy++)
        fail("two tasks at once");
    if (atomic_load(&j->task.pending) < 1)
        fail("a running task is not pending");
    for (int64_t i = 0; i < j->spin; i++)
        __builtin_ia32_pause();
    j->runs++;
    j->last = ++j->world->runs;
    j->world->busy--;
    return j->status;
}

typedef struct {
    kt_queue *queue;
    world *world;
    uint32_t seed;
    int rounds;
    int64_t submitted;
    bool until_refused;
} producer;

static void *produce(void *arg)
{
    enum { JOBS = 5 };
    producer *p = arg;
    uint32_t state = p->seed;
    job jobs[JOBS];
    int64_t tickets[JOBS] = {0}, expected[JOBS] = {0}, ticket = 0;
    for (int i = 0; i < JOBS; i++)
        jobs[i] = (job){.task = {run, &jobs[i], 0}, .world = p->world, .spin = next(&state) % 100};
    for (int round = 0; (round < p->rounds || p->until_refused) && ticket != KT_REFUSED; round++) {
        int i = next(&state) % JOBS;
        ticket = kt_queue_submit(p->queue, &jobs[i].task);
        if (ticket == KT_REFUSED)
            break;
        if (ticket <= tickets[i])
            fail("tickets do not grow");
        tickets[i] = ticket;
        expected[i]++;
        p->submitted++;
        uint32_t choice = next(&state) % 64;
        if (choice == 0) { /* find the dispatcher asleep */
            doze(300);
        } else if (choice < 8) {
            i = next(&state) % JOBS;
            int64_t ns = next(&state) % 2 ? KT_HOUR : next(&state) % 100000;
            while (!kt_queue_wait(p->queue, tickets[i], ns))
                ;
            if (jobs[i].runs != expected[i] || jobs[i].last != tickets[i] || atomic_load(&jobs[i].task.pending))
                fail("a task that was waited for did not run in its turn");
        } else if (choice < 10) {
            kt_queue_sync(p->queue, next(&state) % 4);
        }
    }
    if (p->until_refused) {
        while (!kt_queue_wait(p->queue, kt_queue_submitted(p->queue), KT_HOUR))
            ;
    } else {
        kt_queue_sync(p->queue, 0);
    }
    for (int i = 0; i < JOBS; i++)
        if (jobs[i].runs != expected[i] || jobs[i].last != tickets[i] || atomic_load(&jobs[i].task.pending))
            fail("a task did not run as often as it was submitted");
    return NULL;
}

static void *close_queue(void *queue)
{
    kt_queue_close(queue);
    return NULL;
}

static void queue_round(int cpu, uint64_t size, int64_t linger_ns, int producers, int rounds, bool close)
{
    kt_queue *queue;
    if (kt_queue_new(&queue, cpu, size, linger_ns))
        fail("no queue");
    world w = {0};
    pthread_t ids[8];
    producer p[8];
    for (int i = 0; i < producers; i++) {
        p[i] = (producer){queue, &w, 31 * size + i, rounds, 0, close};
        pthread_create(&ids[i], NULL, produce, &p[i]);
    }
    if (close) { /* with submits and waits in flight, from two threads */
        doze(3000);
        pthread_t other;
        pthread_create(&other, NULL, close_queue, queue);
        kt_queue_close(queue);
        pthread_join(other, NULL);
    }
    int64_t submitted = 0;
    for (int i = 0; i < producers; i++) {
        pthread_join(ids[i], NULL);
        submitted += p[i].submitted;
    }
    if (submitted != (int64_t)kt_queue_submitted(queue) || w.runs != submitted)
        fail("a task was lost");
    kt_queue_free(queue);
}

/* Submits and waits that find the other side about to sleep, at every distance. */
static void ping_pong(int cpu)
{
    kt_queue *queue;
    world w = {0};
    if (kt_queue_new(&queue, cpu, 1, 0))
        fail("no queue");
    job j = {{run, &j, 0}, &w, 0, 0, 0, 0};
    uint32_t state = 1;
    for (int i = 0; i < 30000; i++) {
        for (int pause = next(&state) % 400; pause > 0; pause--)
            __builtin_ia32_pause();
        j.spin = next(&state) % 400;
        int64_t ticket = kt_queue_submit(queue, &j.task);
        for (int pause = next(&state) % 400; pause > 0; pause--)
            __builtin_ia32_pause();
        while (!kt_queue_wait(queue, ticket, KT_HOUR))
            ;
    }
    kt_queue_free(queue);
}

static _Atomic int released;

static int64_t blocked(void *ctx)
{
    while (!atomic_load(&released))
        sched_yield();
    return 0;
}

static void *release(void *queue)
{
    while (!kt_queue_wait(queue, 1, KT_HOUR))
        ;
    atomic_store(&released, 1);
    return NULL;
}

/* Task 2 ends when who waits for task 1 has woken, whoever else waits for task 2. */
static void hand_over(int cpu)
{
    kt_queue *queue;
    world w = {0};
    if (kt_queue_new(&queue, cpu, 4, 0))
        fail("no queue");
    atomic_store(&released, 0);
    job first = {{run, &first, 0}, &w, 0, 0, 0, 40000};
    kt_queue_task second = {blocked, NULL, 0};
    kt_queue_submit(queue, &first.task);
    kt_queue_submit(queue, &second);
    pthread_t id;
    pthread_create(&id, NULL, release, queue);
    doze(100);
    kt_queue_sync(queue, 0);
    pthread_join(id, NULL);
    kt_queue_free(queue);
}

static void errors(int cpu)
{
    kt_queue *queue;
    kt_queue_error error;
    world w = {0};
    if (kt_queue_new(&queue, cpu, 4, 0))
        fail("no queue");
    for (int64_t i = 1; i <= 200; i++) {
        job good = {{run, &good, 0}, &w, 0, 0, 0, 3}, bad = {{run, &bad, 0}, &w, 0, 0, i, 3}, worse = bad;
        worse.task.ctx = &worse;
        worse.status = -i;
        kt_queue_submit(queue, &good.task);
        int64_t ticket = kt_queue_submit(queue, &bad.task);
        kt_queue_submit(queue, &worse.task);
        kt_queue_submit(queue, &good.task);
        kt_queue_sync(queue, 0);
        if (!kt_queue_take_error(queue, &error))
            fail("no error came out");
        if (error.task != &bad.task || error.status != i || error.ticket != (uint64_t)ticket)
            fail("not the first error");
        if (kt_queue_take_error(queue, &error))
            fail("an error came out twice");
    }
    kt_queue_free(queue);
}

int main(void)
{
    const int cpu = sched_getcpu();
    for (uint64_t size = 1; size <= 64; size *= 4)
        for (int producers = 1; producers <= 4; producers += 3)
            for (int linger = 0; linger <= 1; linger++) {
                queue_round(cpu, size, linger * 200000, producers, 4000, false);
                queue_round(cpu, size, linger * 200000, producers, 0, true);
            }
    for (int i = 0; i < 100; i++) /* born and ended, with and without a task between */
        queue_round(cpu, 8, 0, i % 2, 1, false);
    queue_round(CPU_SETSIZE - 1, 8, 0, 2, 100, false); /* a CPU that cannot be pinned to */
    ping_pong(cpu);
    for (int i = 0; i < 50; i++)
        hand_over(cpu);
    errors(cpu);
    puts("ok");
    return 0;
}

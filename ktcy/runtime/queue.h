/* A bounded queue of tasks and the one thread that runs them, in the order of their tickets.
 *
 * A task belongs to whoever made it; the queue stores its address and nothing else, so nothing is allocated for a
 * submit. It may be submitted any number of times, also while it is queued or running: each run reads its memory
 * when it runs. `pending` counts its runs that are not over; at 0 the queue knows it no more (but see
 * kt_queue_take_error) and its memory may go.
 *
 *     cells   ... | done: the next to run | queued ... | head: the next to submit | free ...
 *
 * A ticket is the number of a submit, from 1. Producers take the place `head` by compare-and-swap, write the cell and
 * then its sequence number, place + 1; the dispatcher, alone, runs the cell at `done` once it holds that number, and
 * gives it back by raising `done`. Ticket t is over when done >= t. The top bit of head says closed, so that after
 * closing no place can be taken, and what was submitted before runs to its end.
 *
 * A full queue makes kt_queue_submit wait, as kt_queue_wait does: on a futex at once, for the system likes to put a
 * thread that was woken beside the dispatcher that woke it, where its spin delays what it waits for (measured on two
 * CPUs: a task of 320 us took 427 us under a spin of 100 us, and 327 us without). A waiter enters the ticket it waits
 * for in `wake_at`; the dispatcher makes a system call only when it passes that ticket. Who waits reads `wakes` before
 * entering, and the dispatcher raises it after taking the entry: a wake-up is never lost, and one that is not for
 * everyone makes the others enter again. The dispatcher lingers as in pool.h, from the first moment, for the system may
 * put who waited for the task beside it (measured on two busy CPUs: a submit and its wait took 5 us, and 106 us when
 * the dispatcher first spun for 100 us); then it sleeps on `asleep`.
 *
 * Everything is to be called without the GIL, save what never waits: kt_queue_try_submit, kt_queue_refuse,
 * kt_queue_take_error. Any thread may call anything; only kt_queue_free wants to be alone. In a forked child the
 * dispatcher does not exist: there only kt_queue_free may be called. */
#ifndef KT_QUEUE_H
#define KT_QUEUE_H

#include "pool.h"

#define KT_CLOSED ((uint64_t)1 << 63)
#define KT_SECOND INT64_C(1000000000)
#define KT_HOUR (3600 * KT_SECOND)
#define KT_FULL 0
#define KT_REFUSED (-1)

/* Returns 0, or an error's status that means something to the maker of the task. Must not touch Python. */
typedef int64_t (*kt_queue_fn)(void *ctx);

typedef struct {
    kt_queue_fn fn;
    void *ctx;
    _Atomic int64_t pending;
} kt_queue_task;

typedef struct {
    kt_queue_task *task;
    int64_t status;
    uint64_t ticket;
} kt_queue_error;

typedef struct {
    _Atomic uint64_t sequence;
    kt_queue_task *task;
} kt_queue_cell;

typedef struct {
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint64_t done;
    _Atomic uint64_t wake_at; /* UINT64_MAX when nobody waits */
    _Atomic uint32_t wakes;
    _Alignas(64) _Atomic uint32_t asleep;
    _Alignas(64) _Atomic uint32_t failed; /* 0: error is the dispatcher's to write; 1: to be taken; 2: being taken */
    kt_queue_error error;
    uint64_t size; /* a power of two */
    int64_t linger_ns;
    pid_t owner;
    pthread_t id;
    _Atomic bool joined;
    kt_queue_cell cells[];
} kt_queue;

/* Sleeps while *word == value, at most ns; a signal ends it too. */
static inline void kt_queue_sleep(_Atomic uint32_t *word, uint32_t value, int64_t ns)
{
    struct timespec t = {ns / KT_SECOND, ns % KT_SECOND};
    syscall(SYS_futex, word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, value, &t, NULL, 0);
}

static inline uint64_t kt_queue_submitted(kt_queue *q) { return atomic_load(&q->head) & ~KT_CLOSED; }

static inline uint64_t kt_queue_done(kt_queue *q) { return atomic_load(&q->done); }

/* Waits until ticket is over. Returns whether it is; false comes after about ns, and earlier after a signal. */
static inline bool kt_queue_wait(kt_queue *q, uint64_t ticket, int64_t ns)
{
    if (kt_queue_done(q) >= ticket)
        return true;
    const uint32_t wakes = atomic_load(&q->wakes);
    uint64_t at = atomic_load(&q->wake_at);
    while (ticket < at && !atomic_compare_exchange_weak(&q->wake_at, &at, ticket))
        ;
    if (atomic_load(&q->done) < ticket)
        kt_queue_sleep(&q->wakes, wakes, ns);
    return atomic_load(&q->done) >= ticket;
}

/* Waits until at most n of the tasks submitted before this call are queued or running. */
static inline void kt_queue_sync(kt_queue *q, uint64_t n)
{
    const uint64_t submitted = kt_queue_submitted(q);
    while (submitted > n && !kt_queue_wait(q, submitted - n, KT_HOUR))
        ;
}

static inline void kt_queue_rouse(kt_queue *q)
{
    if (atomic_load(&q->asleep) && atomic_exchange(&q->asleep, 0))
        kt_futex(&q->asleep, FUTEX_WAKE, 1);
}

/* The task's ticket, KT_FULL, or KT_REFUSED when the queue is closed. */
static inline int64_t kt_queue_try_submit(kt_queue *q, kt_queue_task *task)
{
    uint64_t at = atomic_load_explicit(&q->head, memory_order_relaxed);
    do {
        if (at & KT_CLOSED)
            return KT_REFUSED;
        /* Negative where `at` is old; then the exchange fails. */
        if ((int64_t)(at - atomic_load_explicit(&q->done, memory_order_acquire)) >= (int64_t)q->size)
            return KT_FULL;
    } while (!atomic_compare_exchange_weak_explicit(&q->head, &at, at + 1, memory_order_relaxed, memory_order_relaxed));
    kt_queue_cell *cell = &q->cells[at & (q->size - 1)];
    cell->task = task;
    atomic_fetch_add_explicit(&task->pending, 1, memory_order_relaxed);
    atomic_store(&cell->sequence, at + 1); /* sequentially consistent against kt_queue_next, as `asleep` */
    kt_queue_rouse(q);
    return (int64_t)(at + 1);
}

/* Waits for room in the queue; returns as kt_queue_wait, and another thread may be quicker to use it. */
static inline bool kt_queue_wait_room(kt_queue *q, int64_t ns)
{
    const uint64_t submitted = kt_queue_submitted(q);
    return submitted < q->size || kt_queue_wait(q, submitted - q->size + 1, ns);
}

/* The task's ticket, or KT_REFUSED when the queue is closed; waits while it is full. */
static inline int64_t kt_queue_submit(kt_queue *q, kt_queue_task *task)
{
    int64_t ticket;
    while ((ticket = kt_queue_try_submit(q, task)) == KT_FULL)
        kt_queue_wait_room(q, KT_HOUR);
    return ticket;
}

/* The first error since the last one taken; false when there is none. Its task is named, not kept alive: until the
 * error is taken, who owns the task must keep it. */
static inline bool kt_queue_take_error(kt_queue *q, kt_queue_error *error)
{
    uint32_t full = 1;
    if (!atomic_compare_exchange_strong(&q->failed, &full, 2))
        return false;
    *error = q->error;
    atomic_store(&q->failed, 0);
    return true;
}

/* Waits for the cell at place `at`; false when the queue is closed and nothing comes any more. */
static inline bool kt_queue_next(kt_queue *q, uint64_t at, int *shy)
{
    _Atomic uint64_t *sequence = &q->cells[at & (q->size - 1)].sequence;
    if (kt_linger(sequence, at + 1, ~(uint64_t)0, true, q->linger_ns, shy))
        return true;
    for (;;) {
        atomic_store(&q->asleep, 1);
        const bool ready = atomic_load(sequence) == at + 1, over = atomic_load(&q->head) == (KT_CLOSED | at);
        if (!ready && !over)
            kt_futex(&q->asleep, FUTEX_WAIT, 1);
        atomic_store(&q->asleep, 0);
        if (ready || over)
            return ready;
    }
}

static inline void *kt_queue_main(void *arg)
{
    kt_queue *q = arg;
    int shy = 0;
    for (uint64_t at = 0; kt_queue_next(q, at, &shy); at++) {
        kt_queue_task *task = q->cells[at & (q->size - 1)].task;
        const int64_t status = task->fn(task->ctx);
        if (status && atomic_load(&q->failed) == 0) {
            q->error = (kt_queue_error){task, status, at + 1};
            atomic_store(&q->failed, 1);
        }
        atomic_fetch_sub(&task->pending, 1); /* the last touch of the task */
        atomic_store(&q->done, at + 1);
        if (at + 1 >= atomic_load(&q->wake_at)) {
            atomic_store(&q->wake_at, UINT64_MAX);
            atomic_fetch_add(&q->wakes, 1);
            kt_futex(&q->wakes, FUTEX_WAKE, INT_MAX);
        }
    }
    return NULL;
}

/* From now on submits are refused; what was submitted runs. */
static inline void kt_queue_refuse(kt_queue *q)
{
    atomic_fetch_or(&q->head, KT_CLOSED);
    kt_queue_rouse(q);
}

/* Refuses, waits until what was submitted has run, and ends the dispatcher. Again: waits only. */
static inline void kt_queue_close(kt_queue *q)
{
    kt_queue_refuse(q);
    kt_queue_sync(q, 0);
    if (!atomic_exchange(&q->joined, true))
        pthread_join(q->id, NULL);
}

static inline void kt_queue_free(kt_queue *q)
{
    if (q->owner == getpid())
        kt_queue_close(q);
    free(q);
}

/* A queue of at most `size` (a power of two) tasks, the running one included; its dispatcher on cpu, or where it is
 * when it may not be pinned; for linger_ns it looks for the next task before it sleeps. Returns 0 or an errno; then
 * nothing is left behind. */
static inline int kt_queue_new(kt_queue **out, int cpu, uint64_t size, int64_t linger_ns)
{
    const size_t bytes = sizeof(kt_queue) + size * sizeof(kt_queue_cell);
    kt_queue *q = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!q)
        return ENOMEM;
    *q = (kt_queue){.wake_at = UINT64_MAX, .size = size, .linger_ns = linger_ns, .owner = getpid()};
    for (uint64_t i = 0; i < size; i++)
        q->cells[i] = (kt_queue_cell){0};

    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: signals go to the callers' threads */
    const int error = pthread_create(&q->id, NULL, kt_queue_main, q);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(q);
        return error;
    }
    pthread_setname_np(q->id, "ktcy-queue");
    kt_pin(q->id, cpu);
    *out = q;
    return 0;
}

#endif

from libc.stdint cimport int64_t
from posix.types cimport pid_t


cdef extern from "pool.h" nogil:
    ctypedef void (*kt_task)(void *ctx, int64_t i, int thread)
    ctypedef void (*kt_group_task)(void *ctx, int group, int64_t i, int thread)
    ctypedef struct kt_group:
        int thread, threads, node
        int64_t bytes
        size_t scratch_bytes
    ctypedef struct kt_worker:
        unsigned long long tasks, steals, sleeps, wake_ups
    ctypedef struct kt_pool:
        int threads, groups
        kt_group *group
        kt_worker *worker
        int64_t linger_ns
        pid_t owner
        int pin_error, bind_error
        unsigned long long runs
    int kt_pool_new(kt_pool **out, int groups, const int *threads, const int *nodes, const int *cpus,
                    const int *cores, int n_cores, bint crowded)
    int kt_pool_group_of(const kt_pool *p, int thread)
    void kt_pool_run(kt_pool *p, kt_task fn, void *ctx, int64_t n)
    void kt_pool_lock(kt_pool *p)
    void kt_pool_unlock(kt_pool *p)
    void kt_pool_run_locked(kt_pool *p, kt_task fn, void *ctx, int64_t n)
    void kt_pool_run_groups_locked(kt_pool *p, kt_group_task fn, void *ctx, const int64_t *n)
    void *kt_pool_scratch(kt_pool *p, int group, size_t bytes)
    void kt_pool_release_scratch(kt_pool *p)
    void *kt_group_alloc(kt_pool *p, int group, size_t bytes)
    void kt_group_free(kt_pool *p, int group, void *base, size_t bytes)
    void kt_pool_stop(kt_pool *p)
    void kt_pool_free(kt_pool *p)


cdef class Pool:
    cdef kt_pool *p
    cdef readonly int threads
    cdef readonly int groups
    cdef readonly tuple group_threads
    cdef readonly tuple group_nodes
    cdef readonly tuple cpus
    cdef readonly bint closed
    cdef dict counted
    cdef object __weakref__
    cdef int check(self) except -1

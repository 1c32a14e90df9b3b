from libc.stdint cimport int64_t
from posix.types cimport pid_t


cdef extern from "pool.h" nogil:
    ctypedef void (*kt_task)(void *ctx, int64_t i, int thread)
    ctypedef struct kt_pool:
        int threads
        size_t scratch_bytes
        pid_t owner
        int pin_error
    int kt_pool_new(kt_pool **out, const int *cpus, int n_cpus, int threads)
    void kt_pool_run(kt_pool *p, kt_task fn, void *ctx, int64_t n)
    void kt_pool_lock(kt_pool *p)
    void kt_pool_unlock(kt_pool *p)
    void kt_pool_run_locked(kt_pool *p, kt_task fn, void *ctx, int64_t n)
    void *kt_pool_scratch(kt_pool *p, size_t bytes)
    void kt_pool_release_scratch(kt_pool *p)
    void kt_pool_stop(kt_pool *p)
    void kt_pool_free(kt_pool *p)


cdef class Pool:
    cdef kt_pool *p
    cdef readonly int threads
    cdef readonly tuple cpus
    cdef readonly bint closed
    cdef object __weakref__
    cdef int check(self) except -1

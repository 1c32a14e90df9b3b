from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.types cimport pid_t

from .pool cimport Pool


cdef extern from "queue.h" nogil:
    enum:
        KT_FULL
        KT_REFUSED
    ctypedef int64_t (*kt_queue_fn)(void *ctx)
    ctypedef struct kt_queue_task:
        kt_queue_fn fn
        void *ctx
        int64_t pending
    ctypedef struct kt_queue_error:
        kt_queue_task *task
        int64_t status
        uint64_t ticket
    ctypedef struct kt_queue:
        uint64_t size
        uint32_t failed
        kt_queue_error error
        pid_t owner
    int kt_queue_new(kt_queue **out, int cpu, uint64_t size, int64_t linger_ns)
    int64_t kt_queue_submit(kt_queue *q, kt_queue_task *task)
    int64_t kt_queue_try_submit(kt_queue *q, kt_queue_task *task)
    bint kt_queue_wait(kt_queue *q, uint64_t ticket, int64_t ns)
    bint kt_queue_wait_room(kt_queue *q, int64_t ns)
    void kt_queue_sync(kt_queue *q, uint64_t n)
    bint kt_queue_take_error(kt_queue *q, kt_queue_error *error)
    uint64_t kt_queue_submitted(kt_queue *q)
    uint64_t kt_queue_done(kt_queue *q)
    void kt_queue_refuse(kt_queue *q)
    void kt_queue_close(kt_queue *q)
    void kt_queue_free(kt_queue *q)


cdef class Task:
    cdef kt_queue_task task
    cdef readonly Pool pool
    cdef int bind(self, Pool pool, kt_queue_fn fn, void *ctx) except -1
    cdef object error(self, int64_t status)


cdef class Queue:
    cdef kt_queue *q
    cdef readonly Pool pool
    cdef readonly bint closed
    cdef set held
    cdef Py_ssize_t most_held
    cdef object __weakref__
    cdef int check(self) except -1
    cdef int await_ticket(self, uint64_t ticket) except -1
    cdef int let_go(self) except -1
    cdef object take_error(self)
    cdef int abandon(self) except -1

"""Work beside the caller: tasks that one thread runs in order on a pool (queue.h).

A `Task` is made by the layer above from a C function and its memory; `CPUInfer` owns a pool and the queue to it.
A submit stores a pointer; the thread that runs tasks never takes the GIL and never touches a Python object.

Life of a task: the queue holds a reference to a submitted Task from Python's side, in a set that `sync` and later
submits clear of the tasks that are over; a Task holds what its function reads and writes. So callers may drop
theirs at once. Code that submits from C (no GIL) holds its Tasks itself.

Free-threaded Python: this module does not declare itself safe without the GIL, so such an interpreter turns the GIL
on when it is imported, with its usual warning.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport getpid, usleep

from .pool cimport Pool, kt_pool, kt_pool_run

import atexit
import logging
import operator
import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np

from . import topology

cdef extern from "queue.h" nogil:
    int64_t kt_now()

logger = logging.getLogger(__name__)

# Places in a queue. A model's layers keep a few each in flight; a submit to a full queue waits.
CAPACITY = 1024
# A wait looks for signals at least so often.
cdef int64_t SLICE_NS = 50_000_000

_live = weakref.WeakSet()


cdef class Task:
    """Work that a queue can run, any number of times, also while it is queued: each run reads its memory when it runs.

    Subclasses, in Cython, hold that memory and all that it points to, call ``bind`` once, and turn the status of a
    failed run into an exception in ``error``. ``del`` of a submitted task is fine.

    Attributes
    ----------
    pool : Pool
        The pool whose queues may run it.
    pending : int
        Runs that were submitted and are not over. At 0 the memory is the caller's again.
    """

    cdef int bind(self, Pool pool, kt_queue_fn fn, void *ctx) except -1:
        """``fn(ctx)`` runs without the GIL and returns 0 or a status; both live as long as this object."""
        self.pool = pool
        self.task.fn = fn
        self.task.ctx = ctx
        return 0

    cdef object error(self, int64_t status):
        """The exception that a status of the C function means; called with the GIL, once, by ``sync``."""
        return RuntimeError(f"a task failed with status {status}")

    @property
    def pending(self):
        return self.task.pending


cdef class Queue:
    """Runs tasks on a pool, in the order of their submission, while the caller goes on. A context manager.

    Any thread may submit; up to 1024 tasks wait or run, then ``submit`` waits for room. A task that fails does not
    stop the queue: the first error since the last one raised comes out of the next ``sync`` or ``close``, once; those
    that follow it until then are dropped.

    Parameters
    ----------
    pool : Pool
        Stays the caller's to close, after the queue.

    Attributes
    ----------
    pool : Pool
    closed : bool

    Raises
    ------
    OSError
        When the system refuses the thread.
    """

    def __init__(self, Pool pool not None):
        cdef int error, cpu
        if self.q != NULL:
            raise RuntimeError("this queue is already open")
        pool.check()
        self.pool = pool
        self.held = set()
        cpu = pool.cpus[0]
        error = kt_queue_new(&self.q, cpu, CAPACITY, pool.p.linger_ns)
        if error == ENOMEM:
            raise MemoryError("no memory for a queue")
        if error:
            raise OSError(error, f"the system refused a thread for a queue: {os.strerror(error)}")
        _live.add(self)

    def __del__(self):
        # As a finalizer, before the garbage collector clears what running tasks hold.
        self.abandon()

    def __dealloc__(self):
        if self.q != NULL:
            with nogil:
                kt_queue_free(self.q)

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make another")

    cdef int check(self) except -1:
        """Raise RuntimeError unless this process may use the queue."""
        if self.closed or self.q == NULL:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        if self.q.owner != getpid():
            raise RuntimeError(f"this {type(self).__name__} belongs to the parent process; make a new one after fork")
        if self.pool.closed:
            raise RuntimeError(f"the pool of this {type(self).__name__} is closed")
        return 0

    cdef int await_ticket(self, uint64_t ticket) except -1:
        cdef bint over = kt_queue_done(self.q) >= ticket
        while not over:
            with nogil:
                over = kt_queue_wait(self.q, ticket, SLICE_NS)
            if not over:
                PyErr_CheckSignals()
        return 0

    cdef int let_go(self) except -1:
        """Drop the references to tasks that are over, save one whose error waits to be raised."""
        cdef Task task
        cdef list over = []  # before the walk: nothing in it lets another Python thread in
        for task in self.held:
            if task.task.pending == 0 and not (self.q.failed and self.q.error.task == &task.task):
                over.append(task)
        self.held.difference_update(over)
        return 0

    cdef object take_error(self):
        """The exception of the first failed task since the last call, or None."""
        cdef kt_queue_error error
        cdef Task task
        if not kt_queue_take_error(self.q, &error):
            return None
        for task in self.held:
            if &task.task == error.task:
                return task.error(error.status)
        return RuntimeError(f"task {error.ticket} failed with status {error.status}")

    def submit(self, task):
        """Queue a task and return at once; wait only while the queue is full.

        Parameters
        ----------
        task : Task
            Kept alive until it has run.

        Returns
        -------
        int
            Its ticket, for ``wait``: 1, 2, ... in the order of submission.

        Raises
        ------
        TypeError, ValueError
            For what is not a task, and for a task of another pool.
        RuntimeError
            After ``close``, and in a forked child.
        """
        cdef Task typed
        cdef int64_t ticket
        if not isinstance(task, Task):
            raise TypeError(f"submit takes a Task that a layer made, not {type(task).__name__}")
        typed = task
        if typed.task.fn == NULL:
            raise TypeError("this Task does nothing; tasks are made by layers")
        self.check()
        if typed.pool is not self.pool:
            raise ValueError("this task belongs to another pool; submit it to the queue that its layer was made with")
        while True:
            if len(self.held) >= self.most_held:
                self.let_go()
                # Twice what is left, so that walks cost each submit the same; 2048 kept tasks took 6 us of a forward.
                self.most_held = max(16, 2 * len(self.held))
            self.held.add(typed)
            ticket = kt_queue_try_submit(self.q, &typed.task)
            if ticket > 0:
                return ticket
            if ticket == KT_REFUSED:
                raise RuntimeError(f"this {type(self).__name__} is closed")
            with nogil:
                kt_queue_wait_room(self.q, SLICE_NS)
            PyErr_CheckSignals()
            self.check()

    def wait(self, ticket):
        """Wait until the submit of this ticket has run; raises no task's error.

        Raises
        ------
        ValueError
            For a ticket that was not given out yet.
        RuntimeError
            After ``close``, and in a forked child.
        """
        self.check()
        ticket = operator.index(ticket)
        if not 0 <= ticket <= self.submitted:
            raise ValueError(f"ticket {ticket} was never given out; the last one is {self.submitted}")
        self.await_ticket(ticket)

    def sync(self, allow_n_pending=0):
        """Wait until at most so many of the tasks submitted before this call are queued or running.

        Raises
        ------
        Exception
            That of the first task that failed since the last one raised.
        TypeError, ValueError
            When ``allow_n_pending`` is not an integer, or negative.
        RuntimeError
            After ``close``, and in a forked child.
        KeyboardInterrupt
            On Ctrl-C; the tasks go on, and ``sync`` may be called again.
        """
        self.check()
        allowed = operator.index(allow_n_pending)
        if allowed < 0:
            raise ValueError(f"allow_n_pending must not be negative, not {allowed}")
        self.await_ticket(max(0, self.submitted - allowed))
        error = self.take_error()
        self.let_go()
        if error is not None:
            raise error

    @property
    def submitted(self):
        """Tasks submitted so far: the last ticket."""
        return kt_queue_submitted(self.q) if self.q != NULL else 0

    @property
    def pending(self):
        """Tasks queued or running."""
        # In this order: a task that ends in between must not make it negative.
        done = kt_queue_done(self.q) if self.q != NULL else 0
        return self.submitted - done

    def close(self):
        """Refuse new tasks, run those submitted before, and end the thread. Again: no effect.

        Raises
        ------
        Exception
            That of a failed task that no ``sync`` raised; the queue is closed then, too.
        KeyboardInterrupt
            On Ctrl-C; the queue takes no tasks any more, and ``close`` may be called again to wait.
        """
        self.closed = True
        if self.q == NULL or self.q.owner != getpid():
            return
        kt_queue_refuse(self.q)
        self.await_ticket(self.submitted)
        with nogil:
            kt_queue_close(self.q)
        error = self.take_error()
        self.let_go()
        if error is not None:
            raise error

    cdef int abandon(self) except -1:
        """Close without a caller who could take an exception: it is logged."""
        if self.q == NULL or self.q.owner != getpid():
            return 0
        self.closed = True
        with nogil:
            kt_queue_close(self.q)
        error = self.take_error()
        if error is not None:
            logger.error("a task failed, and no sync() asked for its error: %r", error)
        return 0

    def __enter__(self):
        self.check()
        return self

    def __exit__(self, kind, *exc):
        if kind is not None:
            self.abandon()
        self.close()

    def round_trips(self, int64_t runs, double idle=0.0):
        """What an empty task costs, timed in C.

        Parameters
        ----------
        runs : int
        idle : float
            Seconds that the caller sleeps before each run; 0.002 and more find the dispatcher asleep.

        Returns
        -------
        ndarray of float64, shape (runs, 3)
            Seconds from the call of submit: to its return, to the start of the task, to the return of the wait.
        """
        cdef SelfTest task = SelfTest(self.pool)
        cdef double[:, ::1] times = np.empty((runs, 3))
        cdef int64_t r, start, submitted, over, ticket = 0, idle_us = <int64_t>(idle * 1e6)
        self.check()
        with nogil:
            for r in range(runs):
                if idle_us:
                    usleep(idle_us)
                start = kt_now()
                ticket = kt_queue_submit(self.q, &task.task)
                submitted = kt_now()
                if ticket == KT_REFUSED:
                    break
                while not kt_queue_wait(self.q, ticket, SLICE_NS):
                    pass
                over = kt_now()
                times[r, 0] = (submitted - start) * 1e-9
                times[r, 1] = (task.work.started - start) * 1e-9
                times[r, 2] = (over - start) * 1e-9
        if ticket == KT_REFUSED:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        return np.asarray(times)

    def __repr__(self):
        return f"<{type(self).__name__} on {self.pool!r}{', closed' if self.closed else f', {self.pending} pending'}>"


@dataclass
class WorkerPoolConfig:
    """How to split a pool, in kt-kernel's words; checked when a `CPUInfer` is made from it.

    Attributes
    ----------
    subpool_count : int
        `Pool`'s ``groups``.
    subpool_numa_map : list of int, optional
        NUMA node of each subpool: `Pool`'s ``numa_nodes``.
    subpool_thread_count : list of int, optional
        Threads of each subpool: `Pool`'s ``group_threads``.
    """

    subpool_count: int = 1
    subpool_numa_map: list = None
    subpool_thread_count: list = None


def _pool_arguments(threads):
    """Keyword arguments of Pool, without those left open."""
    if threads is None:
        return {}
    if isinstance(threads, WorkerPoolConfig):
        arguments = {
            "groups": threads.subpool_count,
            "numa_nodes": threads.subpool_numa_map,
            "group_threads": threads.subpool_thread_count,
        }
        return {name: value for name, value in arguments.items() if value is not None}
    if not hasattr(threads, "__index__"):
        raise TypeError(f"CPUInfer takes a number of threads or a WorkerPoolConfig, not {threads!r}")
    return {"threads": topology.checked_threads(threads)}


@cython.final
cdef class CPUInfer(Queue):
    """A pool of threads and the queue of tasks for it.

    Parameters
    ----------
    threads : int, WorkerPoolConfig or Pool, optional
        By default as many as `Pool` takes. A Pool that is given is used, and closed with the CPUInfer.

    Attributes
    ----------
    pool, backend_ : Pool
    threads : int
    closed : bool

    Raises
    ------
    TypeError, ValueError
        As `Pool`.
    OSError
        When the system refuses the threads.
    """

    def __init__(self, threads=None):
        if self.q != NULL:
            raise RuntimeError("this CPUInfer is already open")
        Queue.__init__(self, threads if isinstance(threads, Pool) else Pool(**_pool_arguments(threads)))

    @property
    def backend_(self):
        return self.pool

    @property
    def threads(self):
        return self.pool.threads

    def submit_with_cuda_stream(self, stream, task):
        """``submit``, in the order of a CUDA stream; there is no such order yet, so the stream is None or 0.

        Raises
        ------
        RuntimeError
            With another stream.
        """
        _no_stream(stream)
        self.submit(task)

    def sync_with_cuda_stream(self, stream, allow_n_pending=0):
        """``sync``, in the order of a CUDA stream; as `submit_with_cuda_stream`."""
        _no_stream(stream)
        self.sync(allow_n_pending)

    def close(self):
        """As `Queue.close`; ends the pool, too."""
        try:
            Queue.close(self)
        finally:
            if self.pool is not None and not self.pending:
                self.pool.close()


def _no_stream(stream):
    if stream is None:
        return
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"a stream is None or the address of a CUDA stream, not {stream!r}")
    if operator.index(stream):
        raise RuntimeError("a CUDA stream was given, but ktcy has no CUDA side yet; pass None and use CPU arrays")


_shared = {}
_shared_lock = threading.Lock()


def shared(threads=None, **options):
    """The CPUInfer of this process for so many threads in such places, made when it is first asked for.

    Parameters
    ----------
    threads : int or WorkerPoolConfig, optional
        By default as many as `Pool` takes.
    **options
        ``groups`` and ``numa_nodes`` of `Pool`, beside a number of threads.

    Returns
    -------
    CPUInfer
        The same one each time; a new one after it was closed, and in a forked child. Another number asked for or
        other CPUs, be it for another affinity mask, mean another CPUInfer, with threads of its own.

    Raises
    ------
    TypeError, ValueError
        As `Pool`.
    """
    machine = topology.here()
    arguments = _pool_arguments(threads) | options
    asked, _, placed = topology.place(machine, **arguments)
    key = asked, *placed
    with _shared_lock:
        if key not in _shared or _shared[key].closed:
            _shared[key] = CPUInfer(Pool(topology=machine, **arguments))
        return _shared[key]


def _forked():
    """The child has none of the parent's threads, and a lock that one of them may have held."""
    global _shared_lock
    _shared.clear()
    _shared_lock = threading.Lock()


def _leave():
    """Ends the threads while all that tasks use is still there."""
    cdef Queue queue
    for queue in list(_live):
        queue.abandon()


os.register_at_fork(after_in_child=_forked)
atexit.register(_leave)


cdef struct selftest:
    kt_pool *pool
    int64_t sleep_us
    int64_t loop
    int64_t status
    int64_t value
    int64_t *log
    int64_t log_size
    int64_t runs
    int64_t started


cdef void nothing(void *ctx, int64_t i, int thread) noexcept nogil:
    pass


cdef int64_t run_selftest(void *ctx) noexcept nogil:
    cdef selftest *work = <selftest *>ctx
    work.started = kt_now()
    if work.sleep_us:
        usleep(work.sleep_us)
    if work.loop:
        kt_pool_run(work.pool, nothing, NULL, work.loop)
    if work.log != NULL and work.log[0] + 1 < work.log_size:
        work.log[0] += 1
        work.log[work.log[0]] = work.value
    work.runs += 1
    return work.status


@cython.final
cdef class SelfTest(Task):
    """A task that shows a queue at work.

    Parameters
    ----------
    pool : Pool
    sleep_us : int
        Microseconds that a run sleeps.
    loop : int
        Empty tasks that a run gives to the pool.
    status : int
        What a run returns; ``sync`` raises a RuntimeError that names it and ``value``.
    value : int
    log : ndarray of int64, optional
        ``log[0]`` counts the runs of all tasks that share it; each appends its ``value``, while there is room.
    """

    cdef selftest work
    cdef int64_t[::1] log

    def __cinit__(self, Pool pool not None, *, sleep_us=0, loop=0, status=0, value=0, int64_t[::1] log=None):
        self.log = log
        self.work.pool = pool.p
        self.work.sleep_us = sleep_us
        self.work.loop = loop
        self.work.status = status
        self.work.value = value
        if log is not None and log.shape[0]:
            self.work.log = &log[0]
            self.work.log_size = log.shape[0]
        self.bind(pool, run_selftest, &self.work)

    cdef object error(self, int64_t status):
        return RuntimeError(f"task {self.work.value} failed with status {status}")

    @property
    def runs(self):
        return self.work.runs

    @property
    def started(self):
        """Nanoseconds of the monotonic clock at which the last run began."""
        return self.work.started

"""Python's handle on a pool of pinned threads (pool.h): its life, its limits and its self-test.

Modules that run tasks cimport ``Pool``: ``pool.check()`` with the GIL, then the functions of pool.h on ``pool.p``
without it. The pointer is valid as long as the object; a pool closed in between runs tasks in the caller alone.
"""

cimport cython
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t
from posix.unistd cimport getpid

import os
import warnings

import numpy as np

from . import topology as _topology


cdef extern from "selftest.h" nogil:
    void kt_count_task(void *ctx, int64_t i, int thread)
    void kt_round_trips(kt_pool *p, double *ns, int64_t runs, int64_t idle_ns)


@cython.final
cdef class Pool:
    """Threads pinned to CPUs, one parallel loop at a time, and the scratch memory of those loops.

    The calling thread works as one of the threads; the others sleep when there is nothing to do. Several Python
    threads may use one pool: they take turns. A context manager.

    Parameters
    ----------
    threads : int, optional
        1 to 4096; by default ``topology.default_threads``. More than there are CPUs share them, with a warning.
    topology : Topology, optional
        Where to run; by default this process's affinity mask.

    Attributes
    ----------
    threads : int
    cpus : tuple of int
        The CPUs in use. One of them is left to the caller, the others have a thread pinned to them.
    closed : bool

    Raises
    ------
    TypeError, ValueError
        For ``threads`` that are not an integer or not in range.
    OSError
        When the system refuses the threads; none is left behind.
    """

    def __cinit__(self, threads=None, topology=None):
        cdef int cpus[4096]
        cdef int n_cpus, error, count
        if topology is None:
            topology = _topology.read()
        count = _topology.default_threads(topology) if threads is None else _topology.checked_threads(threads)
        usable = topology.cpus
        if count > len(usable):
            warnings.warn(
                f"{count} threads asked for, {len(usable)} CPUs usable: all {count} are used and share these CPUs",
                RuntimeWarning,
            )
        elif topology.quota is not None and count > max(1.0, topology.quota):
            warnings.warn(
                f"{count} threads asked for, the cgroup's quota is {topology.quota:g} CPUs: all {count} are used, "
                "and the system will throttle them",
                RuntimeWarning,
            )
        self.threads = count
        self.cpus = usable[:count]
        n_cpus = len(self.cpus)
        for i in range(n_cpus):
            cpus[i] = self.cpus[i]
        with nogil:
            error = kt_pool_new(&self.p, cpus, n_cpus, count)
        if error == ENOMEM:
            raise MemoryError(f"no memory for a pool of {count} threads")
        if error:
            raise OSError(error, f"the system refused a pool of {count} threads: {os.strerror(error)}")
        if self.p.pin_error:
            warnings.warn(
                f"threads could not be pinned to CPUs: {os.strerror(self.p.pin_error)}; they run unpinned",
                RuntimeWarning,
            )

    def __dealloc__(self):
        if self.p != NULL:
            with nogil:
                kt_pool_free(self.p)

    cdef int check(self) except -1:
        """Raise RuntimeError unless this process may use the pool."""
        if self.closed:
            raise RuntimeError("this pool is closed")
        if self.p.owner != getpid():
            raise RuntimeError("this pool belongs to the parent process; make a new Pool after fork")
        return 0

    def close(self):
        """End the threads and release the scratch memory, after the loop that runs, if any. Again: no effect."""
        if self.closed:
            return
        self.closed = True
        if self.p.owner == getpid():
            with nogil:
                kt_pool_lock(self.p)
                kt_pool_stop(self.p)
                kt_pool_unlock(self.p)

    def __enter__(self):
        self.check()
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        return f"<Pool of {self.threads} threads{', closed' if self.closed else ''}>"

    @property
    def scratch_bytes(self):
        """Bytes of scratch memory held now."""
        return self.p.scratch_bytes

    def reserve(self, size_t nbytes):
        """Hold at least ``nbytes`` bytes of scratch memory, so that no later loop has to ask for it.

        Raises
        ------
        MemoryError
            When the system does not give it; the pool then holds none.
        """
        cdef void *base
        self.check()
        with nogil:
            kt_pool_lock(self.p)
            base = kt_pool_scratch(self.p, nbytes)
            kt_pool_unlock(self.p)
        if base == NULL:
            raise MemoryError(f"no {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of scratch memory for this pool")

    def release(self):
        """Give the scratch memory back to the system; the next loop asks for it again."""
        self.check()
        with nogil:
            kt_pool_lock(self.p)
            kt_pool_release_scratch(self.p)
            kt_pool_unlock(self.p)

    def selftest(self, int64_t n):
        """Run n tasks that count themselves.

        Returns
        -------
        ndarray of int32, shape (n,)
            How often each task ran: ones.
        """
        self.check()
        counts = np.zeros(n, np.int32)
        cdef int32_t[::1] view = counts
        cdef void *ctx = &view[0] if n else NULL
        with nogil:
            kt_pool_run(self.p, kt_count_task, ctx, n)
        return counts

    def round_trips(self, int64_t runs, double idle=0.0):
        """Time of a loop with one empty task for each thread, every thread taking part.

        Parameters
        ----------
        runs : int
        idle : float
            Seconds that the caller sleeps before each run; 0.002 and more find all threads asleep.

        Returns
        -------
        ndarray of float64, shape (runs,)
            Seconds.
        """
        self.check()
        times = np.zeros(runs)
        cdef double[::1] view = times
        if runs:
            with nogil:
                kt_pool_lock(self.p)
                kt_round_trips(self.p, &view[0], runs, <int64_t>(idle * 1e9))
                kt_pool_unlock(self.p)
        return times * 1e-9

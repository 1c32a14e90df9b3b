"""Python's handle on a pool of pinned threads (pool.h): its life, its limits and its self-test.

Modules that run tasks cimport ``Pool``: ``pool.check()`` with the GIL, then the functions of pool.h on ``pool.p``
without it. The pointer is valid as long as the object; a pool closed in between runs tasks in the caller alone.
"""

cimport cython
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport getpid

import os
import warnings
import weakref

import numpy as np

from . import memory as _memory
from . import topology as _topology


cdef extern from "selftest.h" nogil:
    ctypedef struct kt_group_counts:
        const kt_pool *pool
        int32_t **counts
    void kt_count_task(void *ctx, int64_t i, int thread)
    void kt_count_group_task(void *ctx, int group, int64_t i, int thread)
    int kt_touch_memory(kt_pool *p, int group, int64_t n, int32_t *nodes)
    void kt_time_runs(kt_pool *p, double *ns, int64_t runs, int64_t idle_ns, int64_t n, int64_t loads)


_pools = weakref.WeakSet()
_warned_of_placement = False


def memory_report():
    """What the pools of this process hold, and what there is.

    Returns
    -------
    dict
        ``pools``: for each its threads, and for each of its groups ``group_nodes`` (None: no node), ``scratch_bytes``
        (the block that all layers share) and ``group_bytes`` (copies of weights), ``placement_enforced``;
        ``scratch_bytes`` of all pools; ``node_bytes``: scratch and copies of all pools, by node;
        ``placement_enforced``: False when the system refuses to bind memory to a node that a group is on, so that
        memory lies where the group's threads touched it first, None when there is nothing to bind; ``huge_pages``:
        the system's mode, ``always``, ``madvise`` (we ask for them) or ``never``; ``huge_page_bytes`` of this process;
        ``available_bytes``, as `memory.available`; ``cgroup_limit``. Sizes in bytes, None where the system does not
        say.
    """
    return _memory.report(sorted(_pools, key=id))


@cython.final
cdef class Pool:
    """Threads pinned to CPUs in groups, one parallel loop at a time, and the scratch memory of those loops.

    The calling thread works as one of the threads; the others sleep when there is nothing to do. Several Python
    threads may use one pool: they take turns. A context manager.

    Parameters
    ----------
    threads : int, optional
        1 to 4096; by default ``topology.default_threads``. More than there are CPUs would only wait for each other:
        then one a CPU is used, with a warning. (A topology that lists a CPU twice gives it two threads.)
    topology : Topology, optional
        Where to run; by default this process's affinity mask.
    groups : int, optional
        Number of groups, each of which owns a share of the work: real NUMA nodes if there are as many, else logical
        ones. By default 1, over all CPUs.
    numa_nodes : sequence of int, optional
        The node of each group, in any order.
    group_threads : sequence of int, optional
        Threads of each group, instead of ``threads``.

    Attributes
    ----------
    threads : int
        In use.
    cpus : tuple of int
        The CPU of each thread. The first is left to the caller, the others have a thread pinned to them.
    groups : int
    group_threads : tuple of int
    group_nodes : tuple of int or None
        None: a logical group, whose memory comes from where its threads run.
    closed : bool

    Raises
    ------
    TypeError, ValueError
        As `topology.place`.
    OSError
        When the system refuses the threads; none is left behind.
    """

    def __cinit__(self, threads=None, topology=None, *, groups=None, numa_nodes=None, group_threads=None):
        cdef int error, t, g, n_cores, count, n_groups, crowded
        cdef int *numbers
        if topology is None:
            topology = _topology.here()
        asked, usable, placed = _topology.place(topology, threads, groups, numa_nodes, group_threads)
        self.group_nodes = tuple(node for node, _ in placed)
        self.group_threads = tuple(len(cpus) for _, cpus in placed)
        self.cpus = tuple(cpu for _, cpus in placed for cpu in cpus)
        self.threads = count = len(self.cpus)
        self.groups = n_groups = len(placed)
        few = topology.quota is not None and count > max(1.0, topology.quota)
        if count > usable:
            warnings.warn(
                f"{asked} threads asked for, {usable} CPUs usable: {count} threads, one for each of {n_groups} groups, "
                "share them", RuntimeWarning
            )
        elif asked > usable:
            warnings.warn(
                f"{asked} threads asked for, {usable} CPUs usable: {count} threads are used", RuntimeWarning
            )
        elif asked > count:
            warnings.warn(
                f"{asked} threads asked for in groups of {group_threads}, which do not fit their nodes: "
                f"{self.group_threads} are used", RuntimeWarning
            )
        elif few:
            warnings.warn(
                f"{count} threads asked for, the cgroup's quota is {topology.quota:g} CPUs: all {count} are used, "
                "and the system will throttle them",
                RuntimeWarning,
            )
        crowded = few or len(set(self.cpus)) < count
        core_of = topology.core_of
        n_cores = max(core_of) + 1
        numbers = <int *>malloc((2 * n_groups + count + n_cores) * sizeof(int))
        if numbers == NULL:
            raise MemoryError(f"no memory for a pool of {count} threads")
        for g in range(n_groups):
            numbers[g] = self.group_threads[g]
            node = self.group_nodes[g]
            # A node without memory has none to bind; nor has one that the system only seems to have.
            numbers[n_groups + g] = node if topology.node_memory.get(node) else -1
        for t in range(count):
            numbers[2 * n_groups + t] = self.cpus[t]
        for t in range(n_cores):
            numbers[2 * n_groups + count + t] = core_of.get(t, t)
        with nogil:
            error = kt_pool_new(&self.p, n_groups, numbers, numbers + n_groups, numbers + 2 * n_groups,
                                numbers + 2 * n_groups + count, n_cores, crowded)
        free(numbers)
        if error == ENOMEM:
            raise MemoryError(f"no memory for a pool of {count} threads")
        if error:
            raise OSError(error, f"the system refused a pool of {count} threads: {os.strerror(error)}")
        self.counted = dict.fromkeys(self._count(), 0)
        _pools.add(self)
        if self.p.pin_error:
            warnings.warn(
                f"threads could not be pinned to CPUs: {os.strerror(self.p.pin_error)}; they run unpinned",
                RuntimeWarning,
            )
        if self.p.bind_error:
            self._warn_of_placement()

    def __dealloc__(self):
        if self.p != NULL:
            with nogil:
                kt_pool_free(self.p)

    def _warn_of_placement(self):
        global _warned_of_placement
        if not _warned_of_placement:
            _warned_of_placement = True
            warnings.warn(
                f"memory cannot be bound to NUMA nodes: {os.strerror(self.p.bind_error)}; it will lie where pinned "
                "threads touch it first. Containers often forbid it (Docker: --cap-add SYS_NICE)",
                RuntimeWarning,
            )

    def __reduce__(self):
        raise TypeError("a Pool cannot be copied or pickled; make another")

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
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"<Pool of {self.threads} threads{groups}{', closed' if self.closed else ''}>"

    @property
    def scratch_bytes(self):
        """Bytes of scratch memory held now, by all groups."""
        return sum(self.group_scratch())

    def group_scratch(self):
        """Bytes of scratch memory that each group holds now, on its node: tuple of int."""
        return tuple(self.p.group[g].scratch_bytes for g in range(self.groups))

    def reserve(self, size_t nbytes):
        """Hold at least ``nbytes`` bytes of scratch memory for each group, so that no later loop has to ask for it.

        Raises
        ------
        MemoryError
            When the system does not give it; the pool then holds none.
        """
        cdef void *base
        cdef int g
        self.check()
        with nogil:
            kt_pool_lock(self.p)
            for g in range(self.groups):
                base = kt_pool_scratch(self.p, g, nbytes)
                if base == NULL:
                    kt_pool_release_scratch(self.p)
                    break
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

    @property
    def placement_enforced(self):
        """Whether memory of the groups is bound to their nodes; None: no group is on a node with memory."""
        cdef int g
        for g in range(self.groups):
            if self.p.group[g].node >= 0:
                return not self.p.bind_error
        return None

    def _memory(self):
        return {
            "threads": self.threads,
            "group_nodes": self.group_nodes,
            "scratch_bytes": self.group_scratch(),
            "group_bytes": tuple(self.p.group[g].bytes for g in range(self.groups)),
            "placement_enforced": self.placement_enforced,
        }

    def _count(self):
        cdef int t
        counts = {
            "runs": self.p.runs, "tasks": 0, "worker_tasks": 0, "steals": 0, "sleeps": 0, "wake_ups": 0,
        }
        for t in range(self.threads):
            counts["tasks"] += self.p.worker[t].tasks
            counts["worker_tasks"] += self.p.worker[t].tasks if t else 0
            counts["steals"] += self.p.worker[t].steals
            counts["sleeps"] += self.p.worker[t].sleeps
            counts["wake_ups"] += self.p.worker[t].wake_ups
        return counts

    def counters(self):
        """What the pool did since it was made or `reset_counters` was called.

        Returns
        -------
        dict of str to int
            ``runs``: parallel loops; ``tasks``: their tasks, ``worker_tasks`` those that the caller did not run itself;
            ``steals``: tasks that a thread ran beyond an even share of a loop, which is the number of its group's
            tasks divided by its group's threads, rounded up: how uneven the tasks or the CPUs were; ``sleeps``: times
            that a thread, or the caller at the end of a loop, went to sleep; ``wake_ups``: sleeping threads woken.
            Counts of a loop that runs now may be partly there.
        """
        return {name: count - self.counted[name] for name, count in self._count().items()}

    def reset_counters(self):
        """Count from zero again."""
        self.counted = self._count()

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

    def selftest_groups(self, counts):
        """Run counts[g] tasks of each group g that count themselves.

        Returns
        -------
        list of ndarray of int32, shape (counts[g],)
            How often each task ran: ones; 1000 and more when a thread of another group ran it.
        """
        self.check()
        if len(counts) != self.groups:
            raise ValueError(f"counts has {len(counts)} entries for {self.groups} groups")
        cdef int64_t[::1] n = np.array(counts, np.int64)
        cdef int32_t[::1] view
        cdef size_t[::1] pointers = np.zeros(self.groups, np.uintp)
        cdef kt_group_counts ctx
        results = [np.zeros(count, np.int32) for count in counts]
        for g in range(self.groups):
            if n[g]:
                view = results[g]
                pointers[g] = <size_t>&view[0]
        ctx.pool = self.p
        ctx.counts = <int32_t **>&pointers[0]
        with nogil:
            kt_pool_lock(self.p)
            kt_pool_run_groups_locked(self.p, kt_count_group_task, &ctx, &n[0])
            kt_pool_unlock(self.p)
        return results

    def selftest_memory(self, int group, int64_t pieces):
        """Allocate pieces x 2 MiB for a group, have its threads touch each piece, and free it.

        Returns
        -------
        ndarray of int32, shape (pieces,)
            The node that each piece came to lie on; -1 where the system does not tell.
        """
        cdef int error
        self.check()
        if not 0 <= group < self.groups:
            raise ValueError(f"group must be from 0 to {self.groups - 1}, not {group}")
        if pieces < 1:
            raise ValueError(f"pieces must be at least 1, not {pieces}")
        nodes = np.zeros(pieces, np.int32)
        cdef int32_t[::1] view = nodes
        with nogil:
            error = kt_touch_memory(self.p, group, pieces, &view[0])
        if error:
            raise MemoryError(f"no {pieces * 2} MiB of memory for group {group}")
        return nodes

    def round_trips(self, int64_t runs, double idle=0.0, *, tasks=None, int64_t loads=0):
        """Time of loops on the pool, from call to return.

        Parameters
        ----------
        runs : int
        idle : float
            Seconds that the caller sleeps before each run; 0.002 and more find all threads asleep.
        tasks : int, optional
            Tasks a run, for whichever thread is free. By default one for each thread, and every thread takes part.
        loads : int
            Work of each of these tasks, about a nanosecond a load.

        Returns
        -------
        ndarray of float64, shape (runs,)
            Seconds.
        """
        cdef int64_t n = -1 if tasks is None else max(0, tasks)
        self.check()
        times = np.zeros(runs)
        cdef double[::1] view = times
        if runs:
            with nogil:
                kt_pool_lock(self.p)
                kt_time_runs(self.p, &view[0], runs, <int64_t>(idle * 1e9), n, loads)
                kt_pool_unlock(self.p)
        return times * 1e-9

"""The layer itself, between Python objects and plan.h: pointers are taken here, once, from checked arrays."""

cimport cython
cimport numpy as cnp
from cpython.contextvars cimport get_value
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free

from ktcy.kernels._table cimport (
    KT_BLOCK, KT_F32, Format, dtype_code, kt_activation, kt_dtype, kt_format, kt_kernels,
)
from ktcy.runtime.pool cimport (
    Pool, kt_group_alloc, kt_group_free, kt_pool, kt_pool_lock, kt_pool_run_groups_locked, kt_pool_unlock,
)
from ktcy.runtime.queue cimport Task

import numpy as np

from .kernels._table import GATES
from .runtime import memory
from .trace import active

cnp.import_array()


cdef extern from "plan.h" nogil:
    ctypedef struct kt_matrix:
        const void *weight
        const void *scale
        const float *bias
        const int32_t *order

    ctypedef struct kt_slice:
        const kt_matrix *gate_up
        const kt_matrix *down
        int64_t pair, pairs, block, blocks

    ctypedef struct kt_layer:
        const kt_kernels *kernels
        const kt_format *format
        kt_activation activation
        int64_t experts, hidden, inter, groups
        bint ordered
        const kt_slice *slices

    ctypedef struct kt_batch:
        int64_t tokens, top_k
        const char *x
        const char *ids
        const char *weights
        char *out
        int64_t x_stride, ids_stride, ids_step, weights_stride, weights_step, out_stride
        kt_dtype x_dtype, out_dtype
        bint ids_64

    ctypedef struct kt_times:
        int64_t started
        int64_t *ended

    ctypedef struct kt_bad:
        int64_t token, place, id

    ctypedef struct kt_job:
        const kt_layer *layer
        kt_pool *pool
        kt_batch batch
        int64_t chunk
        kt_times times
        kt_times *kept
        int64_t status
        kt_bad bad

    ctypedef struct kt_copy:
        char *to
        const char *from_ "from"
        size_t bytes

    ctypedef struct kt_plan:
        pass

    int64_t KT_NO_MEMORY, KT_N_PHASES, KT_DOWN_BLOCKS
    const char *kt_phase_names[]
    size_t kt_plan_scratch(kt_plan *p, const kt_layer *layer, const kt_batch *batch, int64_t slots,
                           const kt_pool *pool, int group, char *base)
    int64_t kt_job_pass(kt_job *job, int64_t start)
    int64_t kt_job_run(void *ctx)
    int64_t kt_job_keep(void *ctx)
    void kt_task_copy(void *ctx, int group, int64_t i, int thread)


#: Tokens of one pass: bounds the scratch memory; a longer input runs as several passes with the same bits.
CHUNK = 4096


@cython.final
@cython.no_gc_clear
cdef class MoE:
    """One Mixture-of-Experts layer on packed weights.

    Parameters
    ----------
    fmt : Format
        The kernels to use, of the variant to use.
    layer : PackedLayer
        Packed weights; kept alive and used where they lie.
    pool : Pool
        Threads and scratch memory, shared with other layers.
    expert_map : sequence of int
        Expert id of a token -> expert in ``layer``.
    local : bool, optional
        Each group of threads copies its slice of the weights to its own node's memory; by default if the groups
        lie on several nodes. The slices together are one copy.

    Raises
    ------
    MemoryError
        When the copy does not fit what is available; with figures.
    """

    cdef kt_layer layer
    cdef list copies
    cdef kt_slice *slices
    cdef kt_matrix *matrices
    cdef readonly Format format
    cdef readonly Pool pool
    cdef readonly object packed

    def __init__(self, Format fmt, packed, Pool pool, expert_map, local=None):
        cdef int64_t experts = len(expert_map), groups = pool.groups, g
        self.format = fmt
        self.pool = pool
        self.packed = packed
        self.slices = <kt_slice *>calloc(groups, sizeof(kt_slice))
        self.matrices = <kt_matrix *>calloc(2 * groups * experts, sizeof(kt_matrix))
        if self.slices == NULL or self.matrices == NULL:
            raise MemoryError(f"pointers of {experts} experts")
        self.layer.kernels = fmt.kernels.table
        self.layer.format = fmt.fmt
        activation = packed.activation
        self.layer.activation.gate = GATES[activation.gate]
        self.layer.activation.alpha = activation.alpha
        self.layer.activation.limit = activation.limit
        self.layer.activation.offset = activation.offset
        self.layer.experts = experts
        self.layer.hidden = packed.shape.hidden_size
        self.layer.inter = packed.shape.moe_intermediate_size
        self.layer.groups = groups
        self.layer.ordered = "gate_up.order" in packed.tensors
        self.layer.slices = self.slices
        pairs = _shares((self.layer.inter + KT_BLOCK - 1) // KT_BLOCK, 1, pool.group_threads)
        blocks = _shares((self.layer.hidden + KT_BLOCK - 1) // KT_BLOCK, KT_DOWN_BLOCKS, pool.group_threads)
        for g in range(groups):
            slice = &self.slices[g]
            slice.pair, slice.pairs = pairs[g], pairs[g + 1] - pairs[g]
            slice.block, slice.blocks = blocks[g], blocks[g + 1] - blocks[g]
            slice.gate_up = self.matrices + 2 * g * experts
            slice.down = slice.gate_up + experts
            for e in range(experts):
                self.point(<kt_matrix *>&slice.gate_up[e], "gate_up", expert_map[e], 2 * slice.pair)
                self.point(<kt_matrix *>&slice.down[e], "down", expert_map[e], slice.block)
        self.copies = []
        if local or (local is None and len(set(pool.group_nodes) - {None}) > 1):
            self.localize(expert_map)

    cdef point(self, kt_matrix *matrix, part, source, block):
        """Where ``part`` of the stored expert ``source`` begins for a group that owns blocks from ``block``."""
        weight, scale, bias = (self.packed.tensors.get(f"{part}.{kind}") for kind in ("weight", "scale", "bias"))
        if self.layer.ordered:
            matrix.order = <const int32_t *>cnp.PyArray_DATA(self.packed.tensors[f"{part}.order"][source])
        if block < weight.shape[1]:
            matrix.weight = cnp.PyArray_DATA(weight[source, block])
            matrix.scale = cnp.PyArray_DATA(scale[source, block])
            if bias is not None:
                matrix.bias = <const float *>cnp.PyArray_DATA(bias[source, block])

    cdef localize(self, expert_map):
        """Moves every group's weights to its node; scales and biases, under a percent, stay."""
        cdef int64_t g, e, at, experts = self.layer.experts
        cdef int64_t width[2]
        cdef kt_slice *slice
        cdef kt_matrix *matrix
        cdef kt_copy *copy
        cdef char *base
        cdef int64_t stored = len(set(expert_map)), groups = self.layer.groups
        self.pool.check()
        memory.require(stored * self.packed.tensors["gate_up.weight"][0].nbytes +
                       stored * self.packed.tensors["down.weight"][0].nbytes, f"layer {self.packed.layer}")
        cdef kt_copy **lists
        lists = <kt_copy **>calloc(groups, sizeof(kt_copy *))
        if lists == NULL:
            raise MemoryError(f"pointers of {groups} groups")
        counts = np.zeros(groups, np.int64)
        cdef int64_t[::1] tasks = counts
        try:
            for g in range(groups):
                slice = &self.slices[g]
                width[0] = 2 * slice.pairs * self.layer.format.weight_bytes(self.layer.hidden)
                width[1] = slice.blocks * self.layer.format.weight_bytes(self.layer.inter)
                base = <char *>kt_group_alloc(self.pool.p, g, stored * (width[0] + width[1]))
                if base == NULL:
                    raise MemoryError(f"no memory on the node of group {g} for its part of layer {self.packed.layer}")
                self.copies.append((g, <uintptr_t>base, stored * (width[0] + width[1])))
                lists[g] = <kt_copy *>calloc(2 * stored, sizeof(kt_copy))
                if lists[g] == NULL:
                    raise MemoryError(f"pointers of {stored} experts")
                at, places = 0, {}
                for e in range(experts):
                    for i in range(2):
                        matrix = <kt_matrix *>(&slice.gate_up[e] if i == 0 else &slice.down[e])
                        if width[i] == 0:
                            continue
                        place = places.get((expert_map[e], i))
                        if place is None:
                            place = places[expert_map[e], i] = at
                            copy = &lists[g][tasks[g]]
                            copy.to, copy.from_, copy.bytes = base + at, <const char *>matrix.weight, width[i]
                            tasks[g] += 1
                            at += width[i]
                        matrix.weight = base + <int64_t>place
            with nogil:
                kt_pool_lock(self.pool.p)
                kt_pool_run_groups_locked(self.pool.p, kt_task_copy, lists, &tasks[0])
                kt_pool_unlock(self.pool.p)
        finally:
            for g in range(groups):
                free(lists[g])
            free(lists)

    def __dealloc__(self):
        for group, base, size in self.copies or ():
            kt_group_free(self.pool.p, group, <void *><uintptr_t>base, size)
        free(self.matrices)
        free(self.slices)

    def __reduce__(self):
        raise TypeError("a loaded layer cannot be copied or pickled; make another and load its weights again")

    def scratch_bytes(self, int64_t tokens, int64_t top_k):
        """Bytes of scratch memory of a forward of so many tokens, none padding, to float32: a list, one a group."""
        cdef kt_plan plan
        cdef kt_batch batch
        cdef int g
        batch.tokens = min(tokens, <int64_t>CHUNK)
        batch.top_k = top_k
        batch.out_dtype = KT_F32
        return [
            kt_plan_scratch(&plan, &self.layer, &batch, batch.tokens * top_k, self.pool.p, g, NULL)
            for g in range(self.pool.groups)
        ]

    cdef kt_job job(self, cnp.ndarray x, cnp.ndarray ids, cnp.ndarray weights, cnp.ndarray out):
        cdef kt_job job
        job.kept = NULL
        job.layer = &self.layer
        job.pool = self.pool.p
        job.chunk = CHUNK
        job.batch.tokens = x.shape[0]
        job.batch.top_k = ids.shape[1]
        job.batch.x = <const char *>cnp.PyArray_DATA(x)
        job.batch.ids = <const char *>cnp.PyArray_DATA(ids)
        job.batch.weights = <const char *>cnp.PyArray_DATA(weights)
        job.batch.out = <char *>cnp.PyArray_DATA(out)
        job.batch.x_stride = x.strides[0]
        job.batch.ids_stride = ids.strides[0]
        job.batch.ids_step = ids.strides[1]
        job.batch.weights_stride = weights.strides[0]
        job.batch.weights_step = weights.strides[1]
        job.batch.out_stride = out.strides[0]
        job.batch.x_dtype = <kt_dtype>dtype_code(x.descr)
        job.batch.out_dtype = <kt_dtype>dtype_code(out.descr)
        job.batch.ids_64 = cnp.PyArray_ITEMSIZE(ids) == 8
        return job

    cdef error(self, int64_t status, const kt_job *job):
        """The exception that the status of a forward means."""
        tokens = job.batch.tokens
        if status == KT_NO_MEMORY:
            need = sum(self.scratch_bytes(tokens, job.batch.top_k))
            return MemoryError(f"no {need / 2**20:.0f} MiB of scratch memory for {tokens} tokens{memory.limits(need)}")
        return ValueError(
            f"topk_ids[{job.bad.token}, {job.bad.place}] is {job.bad.id}; ids run from 0 to "
            f"{self.layer.experts - 1}, and -1 means no expert"
        )

    cdef record(self, trace, const kt_job *job, int64_t start, const kt_times *times):
        """Adds the pass from token ``start`` on."""
        phases, before = {}, times.started
        for i in range(KT_N_PHASES):
            phases[kt_phase_names[i].decode()] = (times.ended[i] - before) * 1e-9
            before = times.ended[i]
        tokens = min(job.batch.tokens - start, job.chunk)
        trace.add(self.packed.layer, tokens, times.started * 1e-9, phases, self.pool.counters())

    def forward(self, cnp.ndarray x, cnp.ndarray ids, cnp.ndarray weights, cnp.ndarray out):
        """Computes ``out`` from checked arrays.

        Parameters
        ----------
        x : numpy.ndarray
            [M, H] float32, float16 or bfloat16, rows contiguous.
        ids : numpy.ndarray
            [M, k] int32 or int64, any strides; -1 is skipped.
        weights : numpy.ndarray
            [M, k] float32, any strides.
        out : numpy.ndarray
            [M, H] float32, float16 or bfloat16, rows contiguous; written.

        Raises
        ------
        ValueError
            For an id outside [-1, experts); names token and place.
        MemoryError
            When there is no memory for the scratch.
        KeyboardInterrupt
            Between passes of `CHUNK` tokens.
        """
        cdef int64_t start = 0, status
        trace = get_value(active)
        self.pool.check()
        cdef kt_job job = self.job(x, ids, weights, out)
        while start < job.batch.tokens:
            with nogil:
                status = kt_job_pass(&job, start)
            if status:
                raise self.error(status, &job)
            if trace is not None:
                self.record(trace, &job, start, &job.times)
            PyErr_CheckSignals()
            start += job.chunk

    def task(self, x, ids, weights, out, keep=False):
        """A forward as a task for the queues of this layer's pool; it reads and writes the arrays each time it runs.

        Parameters
        ----------
        x, ids, weights, out : numpy.ndarray
            As of `forward`; held by the task.
        keep : bool
            A failure is kept for `Forward.result`, instead of for the queue's ``sync``.

        Returns
        -------
        Forward
        """
        cdef Forward task = Forward.__new__(Forward)
        task.moe = self
        task.arrays = (x, ids, weights, out)
        task.job = self.job(x, ids, weights, out)
        task.trace = get_value(active)
        if task.trace is not None:
            task.passes = np.zeros((-(-task.job.batch.tokens // task.job.chunk), sizeof(kt_times)), np.uint8)
            task.job.kept = <kt_times *>cnp.PyArray_DATA(task.passes)
        task.bind(self.pool, kt_job_keep if keep else kt_job_run, &task.job)
        return task


@cython.final
cdef class Forward(Task):
    """A forward that a queue runs. Made by `MoE.task`."""

    cdef kt_job job
    cdef MoE moe
    cdef readonly tuple arrays
    cdef object trace
    cdef cnp.ndarray passes

    def result(self):
        """The output of the last run that is over; raises what it failed with."""
        if self.job.status:
            raise self.error(self.job.status)
        if self.trace is not None:
            for n in range(len(self.passes)):
                self.moe.record(self.trace, &self.job, n * self.job.chunk, &self.job.kept[n])
        return self.arrays[3]

    cdef object error(self, int64_t status):
        return self.moe.error(status, &self.job)


def _shares(int64_t count, int64_t unit, threads):
    """Where each group's part of ``count`` begins, in proportion to its threads, in whole ``unit``; and the end."""
    total, at, result = sum(threads), 0, []
    for n in threads:
        result.append(min(count, count * at // total // unit * unit))
        at += n
    return result + [count]

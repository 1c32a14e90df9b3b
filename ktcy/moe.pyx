"""The layer itself, between Python objects and plan.h: pointers are taken here, once, from checked arrays."""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from ktcy.kernels._table cimport (
    KT_GELU, KT_GELU_TANH, KT_SWIGLU, Format, dtype_code, kt_activation, kt_dtype, kt_format, kt_kernels,
)
from ktcy.runtime.pool cimport Pool, kt_pool, kt_pool_lock, kt_pool_scratch, kt_pool_unlock

import numpy as np

cnp.import_array()


cdef extern from "plan.h" nogil:
    ctypedef struct kt_matrix:
        const void *weight
        const void *scale
        const float *bias

    ctypedef struct kt_layer:
        const kt_kernels *kernels
        const kt_format *format
        kt_activation activation
        int64_t experts, hidden, inter
        const kt_matrix *gate_up
        const kt_matrix *down

    ctypedef struct kt_batch:
        int64_t tokens, top_k
        const char *x
        const char *ids
        const char *weights
        char *out
        int64_t x_stride, ids_stride, ids_step, weights_stride, weights_step, out_stride
        kt_dtype x_dtype, out_dtype
        bint ids_64

    ctypedef struct kt_plan:
        pass

    size_t kt_plan_scratch(kt_plan *p, const kt_layer *layer, const kt_batch *batch, int threads, char *base)
    int64_t kt_forward(kt_plan *p, kt_pool *pool, int threads)


# Tokens of one pass: bounds the scratch memory; a longer input runs as several passes with the same bits.
CHUNK = 4096

_GATES = {"swiglu": KT_SWIGLU, "gelu": KT_GELU, "gelu_tanh": KT_GELU_TANH}


@cython.final
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
    """

    cdef kt_layer layer
    cdef kt_matrix *matrices
    cdef readonly Format format
    cdef readonly Pool pool
    cdef readonly object packed

    def __cinit__(self):
        self.matrices = NULL

    def __init__(self, Format fmt, packed, Pool pool, expert_map):
        cdef int64_t e, experts = len(expert_map), source
        cdef kt_matrix *matrix
        self.format = fmt
        self.pool = pool
        self.packed = packed
        self.matrices = <kt_matrix *>calloc(2 * experts, sizeof(kt_matrix))
        if self.matrices == NULL:
            raise MemoryError(f"pointers of {experts} experts")
        self.layer.kernels = fmt.kernels.table
        self.layer.format = fmt.fmt
        activation = packed.activation
        self.layer.activation.gate = _GATES[activation.gate]
        self.layer.activation.alpha = activation.alpha
        self.layer.activation.limit = activation.limit
        self.layer.activation.offset = activation.offset
        self.layer.experts = experts
        self.layer.hidden = packed.shape.hidden_size
        self.layer.inter = packed.shape.moe_intermediate_size
        self.layer.gate_up = self.matrices
        self.layer.down = self.matrices + experts
        for e in range(experts):
            source = expert_map[e]
            for i, name in enumerate(("gate_up", "down")):
                matrix = &self.matrices[i * experts + e]
                matrix.weight = cnp.PyArray_DATA(getattr(packed, name + "_weight")[source])
                matrix.scale = cnp.PyArray_DATA(getattr(packed, name + "_scale")[source])
                bias = getattr(packed, name + "_bias")
                matrix.bias = <const float *>cnp.PyArray_DATA(bias[source]) if bias is not None else NULL

    def __dealloc__(self):
        free(self.matrices)

    def scratch_bytes(self, int64_t tokens, int64_t top_k):
        """Bytes of scratch memory that a forward of so many tokens needs."""
        cdef kt_plan plan
        cdef kt_batch batch
        batch.tokens = min(tokens, CHUNK)
        batch.top_k = top_k
        return kt_plan_scratch(&plan, &self.layer, &batch, self.pool.threads, NULL)

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
        """
        cdef kt_batch batch
        cdef kt_plan plan
        cdef kt_pool *pool
        cdef int64_t total = x.shape[0], start = 0, bad = 0
        cdef int threads
        cdef char *base
        self.pool.check()
        pool = self.pool.p
        threads = self.pool.threads
        batch.top_k = ids.shape[1]
        batch.x_stride = x.strides[0]
        batch.ids_stride = ids.strides[0]
        batch.ids_step = ids.strides[1]
        batch.weights_stride = weights.strides[0]
        batch.weights_step = weights.strides[1]
        batch.out_stride = out.strides[0]
        batch.x_dtype = <kt_dtype>dtype_code(x.dtype)
        batch.out_dtype = <kt_dtype>dtype_code(out.dtype)
        batch.ids_64 = ids.itemsize == 8
        while start < total:
            batch.tokens = min(total - start, <int64_t>CHUNK)
            batch.x = <const char *>cnp.PyArray_DATA(x) + start * batch.x_stride
            batch.ids = <const char *>cnp.PyArray_DATA(ids) + start * batch.ids_stride
            batch.weights = <const char *>cnp.PyArray_DATA(weights) + start * batch.weights_stride
            batch.out = <char *>cnp.PyArray_DATA(out) + start * batch.out_stride
            with nogil:
                kt_pool_lock(pool)
                base = <char *>kt_pool_scratch(pool, kt_plan_scratch(&plan, &self.layer, &batch, threads, NULL))
                if base != NULL:
                    kt_plan_scratch(&plan, &self.layer, &batch, threads, base)
                    bad = kt_forward(&plan, pool, threads)
                kt_pool_unlock(pool)
            if base == NULL:
                need = self.scratch_bytes(batch.tokens, batch.top_k)
                raise MemoryError(f"no {need / 2**20:.0f} MiB of scratch memory for {batch.tokens} tokens")
            if bad:
                token = start + (bad - 1) // batch.top_k
                slot = (bad - 1) % batch.top_k
                raise ValueError(
                    f"topk_ids[{token}, {slot}] is {ids[token, slot]}; ids run from 0 to {self.layer.experts - 1}, "
                    "and -1 means no expert"
                )
            PyErr_CheckSignals()
            start += batch.tokens

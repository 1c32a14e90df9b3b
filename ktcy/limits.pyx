"""What this machine can do at most: the roofline that benches and the demo put their figures beside."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from ktcy.kernels._table cimport Kernels, kt_kernels, kt_thread
from ktcy.runtime.pool cimport Pool, kt_pool_run

import time
from pathlib import Path

import numpy as np

cnp.import_array()

cdef struct Probe:
    const kt_kernels *kernels
    const char *memory
    const int64_t *piece
    int64_t piece_bytes, slices, rounds
    uint64_t *result
    bint bf16


cdef void read_slice(void *ctx, int64_t i, int thread) noexcept nogil:
    cdef Probe *p = <Probe *>ctx
    cdef int64_t width = p.piece_bytes // p.slices // 256 * 256
    cdef const char *at = p.memory + p.piece[i // p.slices] * p.piece_bytes + i % p.slices * width
    p.result[i] = p.kernels.probe_read(at, width)


cdef void dot(void *ctx, int64_t i, int thread) noexcept nogil:
    cdef Probe *p = <Probe *>ctx
    cdef kt_thread state
    p.kernels.begin(&state, 1)
    p.result[i] = p.kernels.probe_bf16(p.rounds) if p.bf16 else p.kernels.probe_s8(p.rounds)
    p.kernels.end(&state)


def cache_bytes(root="/"):
    """Size of the last-level cache of CPU 0 in bytes; 0 where the system does not say."""
    sizes = [0]
    for path in Path(root).glob("sys/devices/system/cpu/cpu0/cache/index*/size"):
        text = path.read_text().strip()
        number = text.rstrip("KM")
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20}[text[len(number):]])
    return max(sizes)


def read_bandwidth(Kernels kernels, Pool pool, memory, int64_t piece_bytes, int pieces=64, int repeats=9):
    """Bytes per second when all threads stream randomly chosen pieces of ``memory``, each piece split over them.

    Parameters
    ----------
    memory : numpy.ndarray
        uint8; more than twice the last-level cache, or the figure is that of the cache.
    piece_bytes : int
        Size of a piece, as of one expert.

    Returns
    -------
    float
        The median of ``repeats`` runs.
    """
    cdef Probe p
    cdef cnp.ndarray data = memory, order, result
    count = memory.nbytes // piece_bytes
    if count < 1:
        raise ValueError(f"{memory.nbytes} bytes hold no piece of {piece_bytes}")
    rng = np.random.default_rng()  # the same pieces again would come from the cache
    p.kernels = kernels.table
    p.memory = <const char *>cnp.PyArray_DATA(data)
    p.piece_bytes = piece_bytes
    p.slices = pool.threads
    result = np.empty(pieces * pool.threads, np.uint64)
    p.result = <uint64_t *>cnp.PyArray_DATA(result)
    cdef int64_t tasks = pieces * pool.threads
    rates = []
    for _ in range(repeats):
        order = rng.integers(0, count, pieces)
        p.piece = <int64_t *>cnp.PyArray_DATA(order)
        start = time.perf_counter()
        with nogil:
            kt_pool_run(pool.p, read_slice, &p, tasks)
        rates.append(pieces * (piece_bytes // pool.threads // 256 * 256 * pool.threads) / (time.perf_counter() - start))
    return float(np.median(rates))


def peak(Kernels kernels, Pool pool, core, int repeats=9):
    """Operations per second (two a multiply-add) of a core's instructions on registers, all threads.

    Parameters
    ----------
    core : {"int8", "bf16"}
        As of `Format.core`.
    """
    cdef Probe p
    cdef cnp.ndarray result = np.empty(pool.threads * 4, np.uint64)
    cdef int64_t tasks = pool.threads * 4
    p.kernels = kernels.table
    p.rounds = 20000
    p.bf16 = core == "bf16"
    p.result = <uint64_t *>cnp.PyArray_DATA(result)
    rates = []
    while len(rates) < repeats:
        start = time.perf_counter()
        with nogil:
            kt_pool_run(pool.p, dot, &p, tasks)
        seconds = time.perf_counter() - start
        if seconds < 0.01:
            p.rounds *= 2
        else:
            rates.append(2 * int(result.sum()) / seconds)
    return float(np.median(rates))

cimport numpy as cnp
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "table.h" nogil:
    const char *KT_CAPSULE
    int64_t KT_BLOCK, KT_KPAD, KT_MAX_K, KT_SCALES_DIFFER

    ctypedef enum kt_dtype:
        KT_F32
        KT_F16
        KT_BF16
        KT_CODES

    ctypedef enum kt_gate:
        KT_SWIGLU
        KT_GELU
        KT_GELU_TANH

    ctypedef struct kt_activation:
        kt_gate gate
        float alpha, limit, offset

    ctypedef struct kt_meta:
        float scale
        int32_t sum

    ctypedef struct kt_gemm:
        int64_t m, k
        const void *x
        int64_t ldx
        const int32_t *index
        const kt_meta *meta
        const void *tiles
        const void *weight
        const void *scale
        const float *bias
        const void *next
        const void *next_scale
        void *work

    ctypedef struct kt_source:
        const void *values
        kt_dtype dtype
        int64_t row_stride, col_stride
        const void *scale
        const uint8_t *zero
        int64_t scale_stride, zero_stride

    ctypedef struct kt_format:
        const char *name
        const char *layout
        const char *rows
        const char *codes
        const char *scale
        int64_t group, zero, few_rows
        int64_t weight_bytes(int64_t k) noexcept nogil
        int64_t scale_bytes(int64_t k) noexcept nogil
        int64_t row_bytes(int64_t k) noexcept nogil
        int64_t panel_bytes(int64_t k) noexcept nogil
        int64_t work_bytes(int64_t k) noexcept nogil
        int64_t pack_work(int64_t k) noexcept nogil
        int64_t pack(const kt_source *src, int64_t n, int64_t k, void *weight, void *scale, void *work) noexcept nogil
        void unpack(const void *weight, const void *scale, int64_t k, float *dst, int64_t ld) noexcept nogil
        void quantize(const void *src, kt_dtype dtype, int64_t k, void *row, kt_meta *meta) noexcept nogil
        void tile(const void *row, int64_t k, int64_t r, void *tiles) noexcept nogil
        void gate_up(const kt_gemm *g, const kt_activation *act, int64_t j0, int64_t j1, float *h,
                     int64_t ldh) noexcept nogil
        void down(const kt_gemm *g, const int32_t *row, const float *route, int64_t b0, int64_t b1, float *out,
                  int64_t ldo) noexcept nogil

    ctypedef struct kt_op:
        const char *name
        int64_t *in_ "in"
        int64_t out
        void call(const void *a, const void *b, const void *c, void *out) noexcept nogil

    ctypedef struct kt_thread:
        pass

    ctypedef struct kt_kernels:
        const char *name
        void begin(kt_thread *t, int tiles) noexcept nogil
        void end(kt_thread *t) noexcept nogil
        void store(const float *src, int64_t n, kt_dtype dtype, void *dst) noexcept nogil
        uint64_t probe_read(const void *p, int64_t bytes) noexcept nogil
        uint64_t probe_s8(int64_t rounds) noexcept nogil
        uint64_t probe_bf16(int64_t rounds) noexcept nogil
        const kt_format *formats
        int64_t n_formats
        const kt_op *ops
        int64_t n_ops


cdef class Kernels:
    cdef const kt_kernels *table
    cdef readonly object capsule
    cdef readonly str name


cdef class Format:
    cdef const kt_format *fmt
    cdef readonly Kernels kernels
    cdef readonly str name
    cdef readonly str layout


cdef int dtype_code(cnp.dtype dtype) except -1

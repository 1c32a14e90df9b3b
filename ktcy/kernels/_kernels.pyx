"""One CPU variant's kernels: this source is compiled once for each row of _variants.py."""

from cpython.pycapsule cimport PyCapsule_New


cdef extern from "variant.h" nogil:
    ctypedef struct kt_kernels:
        pass
    const kt_kernels kt_table
    const char *KT_CAPSULE


table = PyCapsule_New(<void *>&kt_table, KT_CAPSULE, NULL)

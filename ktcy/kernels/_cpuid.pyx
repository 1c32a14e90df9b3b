"""What the CPU announces, what the operating system enables, what the kernel permits.

Baseline code: it runs on any x86-64. Facts only; ``ktcy.kernels`` draws the conclusions.
"""

from libc.errno cimport errno

cdef extern from *:
    """
    #include <cpuid.h>
    #define kt_cpuid(leaf, sub, r) __cpuid_count(leaf, sub, r[0], r[1], r[2], r[3])
    #define kt_xgetbv(lo, hi) __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0))
    """
    void kt_cpuid(unsigned leaf, unsigned subleaf, unsigned *registers) nogil
    void kt_xgetbv(unsigned lo, unsigned hi) nogil

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_arch_prctl

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

# <asm/prctl.h> and the kernel's xfeature number of AMX tile data; older headers have neither.
cdef enum:
    ARCH_REQ_XCOMP_PERM = 0x1023
    XFEATURE_XTILEDATA = 18
    OSXSAVE = 1 << 27


def cpuid(unsigned leaf, unsigned subleaf):
    """(eax, ebx, ecx, edx); zeros for a leaf above the highest, where Intel CPUs answer with another leaf."""
    cdef unsigned[4] r
    kt_cpuid(0, 0, r)
    if leaf > r[0]:
        return 0, 0, 0, 0
    kt_cpuid(leaf, subleaf, r)
    return r[0], r[1], r[2], r[3]


def xgetbv():
    """XCR0, the states that the operating system saves; 0 where it has not enabled XGETBV."""
    cdef unsigned lo = 0, hi = 0
    if not cpuid(1, 0)[2] & OSXSAVE:
        return 0
    kt_xgetbv(lo, hi)
    return lo | <unsigned long long>hi << 32


def request_amx():
    """Asks the kernel for AMX tiles in this process; 0 or an errno. Ask only a CPU that has them."""
    return errno if syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) else 0

"""The table of CPU variants: the one place that names an instruction set.

setup.py and the loader read it, so compiler flags and run-time checks cannot drift apart: gcc spells
the flag of feature ``f`` as ``-m<f>``. Standard library only, since setup.py reads it before any install.
"""

from typing import NamedTuple, Optional


class Feature(NamedTuple):
    """Where CPUID announces a feature, and which XCR0 bits the OS must set before it may be used.

    Source: Intel SDM volume 1, chapter 13 (XSAVE state components) and volume 2, CPUID.
    """

    leaf: int
    subleaf: int
    register: str
    bit: int
    xcr0: int


YMM = 0x6
ZMM = 0xE6
TILE = 0x60000

FEATURES = {
    "avx2": Feature(7, 0, "ebx", 5, YMM),
    "fma": Feature(1, 0, "ecx", 12, YMM),
    "f16c": Feature(1, 0, "ecx", 29, YMM),
    "avx512f": Feature(7, 0, "ebx", 16, ZMM),
    "avx512bw": Feature(7, 0, "ebx", 30, ZMM),
    "avx512dq": Feature(7, 0, "ebx", 17, ZMM),
    "avx512vl": Feature(7, 0, "ebx", 31, ZMM),
    "avx512vbmi": Feature(7, 0, "ecx", 1, ZMM),
    "avx512vnni": Feature(7, 0, "ecx", 11, ZMM),
    "avx512bf16": Feature(7, 1, "eax", 5, ZMM),
    "amx-tile": Feature(7, 0, "edx", 24, TILE),
    "amx-int8": Feature(7, 0, "edx", 25, TILE),
    "amx-bf16": Feature(7, 0, "edx", 22, TILE),
}


class Variant(NamedTuple):
    """One row: the features it adds to those of the row it extends.

    The loader takes the usable row of the highest priority. A row with ``emulates`` is that row's
    kernel source compiled for AVX2 with ``isa_emulated.h``: for tests, never picked, never in wheels.
    """

    name: str
    extends: Optional[str]
    adds: tuple
    priority: Optional[int]
    emulates: Optional[str] = None

    @property
    def features(self):
        inherited = VARIANTS[self.extends].features if self.extends else ()
        return inherited + self.adds

    @property
    def cflags(self):
        return ["-m" + f for f in self.features]

    @property
    def isa(self):
        return self.emulates or self.name


_ROWS = [
    Variant("avx2", None, ("avx2", "fma", "f16c"), 10),
    Variant("avx512", "avx2", ("avx512f", "avx512bw", "avx512dq", "avx512vl"), 20),
    Variant("avx512_vnni", "avx512", ("avx512vnni",), 30),
    Variant("avx512_bf16", "avx512_vnni", ("avx512bf16",), 40),
    Variant("amx", "avx512_bf16", ("avx512vbmi", "amx-tile", "amx-int8", "amx-bf16"), 50),
]
_TWINS = [Variant(v.name + "_emu", "avx2", (), None, v.name) for v in _ROWS[1:]]

VARIANTS = {v.name: v for v in _ROWS + _TWINS}

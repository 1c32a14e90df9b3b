"""What the compiler and the linker made: instructions, start-up code, symbols and libraries of every module."""

import re
import subprocess
import sys
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import ktcy
from ktcy.kernels import VARIANTS

PACKAGE = Path(ktcy.__file__).parent
MODULES = sorted(PACKAGE.rglob(f"*{EXTENSION_SUFFIXES[0]}"))
VARIANT = {f"_kernels_{v.name}": v for v in VARIANTS.values()}

# The newest glibc a wheel may ask for: manylinux_2_28.
GLIBC = (2, 28)
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}

# Instructions and registers in objdump's spelling, by the feature that brings them.
MARKS = {
    "avx2": r"%ymm|\tv[a-z]",
    "fma": r"\tvfn?m(add|sub)",
    "f16c": r"\tvcvt(ph2ps|ps2ph)\b",
    "avx512f": r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]",
    "avx512vnni": r"\tvpdp(bu|ws)sd",
    "avx512bf16": r"\tv(dpbf16ps|cvtne2?ps2?pbh|cvtneps2bf16|cvtne2ps2bf16)",
    "amx-tile": r"\t(tile(load|stored|zero|release)|ldtilecfg|sttilecfg)",
    "amx-int8": r"\ttdpb[su][su]d",
    "amx-bf16": r"\ttdpbf16ps",
}
# What the int8 core must really use: a variant compiled from the wrong header would pass every other test.
USES = ("avx2", "fma", "avx512f", "avx512vnni", "amx-tile", "amx-int8")


def tool(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stem(path):
    return path.name.split(".")[0]


@lru_cache(None)
def marks(path):
    """The features whose instructions occur in a module."""
    text = tool("objdump", "-d", "--no-show-raw-insn", path)
    return {feature for feature, pattern in MARKS.items() if re.search(pattern, text)}


every_module = pytest.mark.parametrize("path", MODULES, ids=[stem(p) for p in MODULES])


def test_every_variant_and_twin_was_built():
    """C04: the set of modules follows from the table, not from the machine that built them."""
    assert {stem(p) for p in MODULES} >= set(VARIANT) | {"_cpuid", "_table"}


@every_module
def test_instructions_are_those_of_the_table(path):
    """C03 C09: baseline modules use no vector extension at all, a variant nothing outside its features."""
    allowed = VARIANT[stem(path)].features if stem(path) in VARIANT else ()
    assert marks(path) <= set(allowed)


@pytest.mark.parametrize("path", [p for p in MODULES if stem(p) in VARIANT], ids=stem)
def test_variants_use_what_they_are_for(path):
    assert marks(path) >= set(USES) & set(VARIANT[stem(path)].features)


@every_module
def test_nothing_runs_at_load_time(path):
    """C03 C25: .init_array holds the compiler's own frame_dummy and nothing else."""
    sections = dict(re.findall(r"\] (\.\S+)\s+\w+\s+\w+ \w+ (\w+)", tool("readelf", "-SW", path)))
    assert int(sections[".init_array"], 16) == 8
    assert not {".ctors", ".preinit_array"} & set(sections)


@every_module
def test_only_the_init_function_is_exported(path):
    names = [line.split()[-1] for line in tool("nm", "-D", "--defined-only", path).splitlines()]
    assert names == [f"PyInit_{stem(path)}"]


@every_module
def test_libraries(path):
    """C01 C02 C05: neither libstdc++ nor torch nor CUDA."""
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", tool("readelf", "-dW", path))) <= LIBRARIES


@every_module
def test_glibc_versions(path):
    """C02: no symbol newer than the wheel's manylinux tag."""
    symbols = re.findall(r"\bUND (\w+)@GLIBC_(\d+)\.(\d+)", tool("readelf", "--dyn-syms", "-W", path))
    assert symbols
    assert [s for s in symbols if (int(s[1]), int(s[2])) > GLIBC] == []


def test_denormals_survive_loading():
    """C25: opening every module this CPU can run changes no floating-point mode of the caller."""
    code = (
        "import numpy as np, ktcy.kernels as k\n"
        "for name in k.VARIANTS:\n"
        "    if not k.missing(name): k.load(name)\n"
        "tiny = np.full(8, 5e-324)\n"
        "assert (tiny * 1 > 0).all() and np.float32(1e-39) * np.float32(1) > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

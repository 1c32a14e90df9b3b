"""The choice of a variant: made-up CPUs through the decision, real environments through subprocesses."""

import ctypes
import errno
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ktcy import kernels
from ktcy.kernels import _cpuid
from ktcy.kernels._variants import FEATURES, TILE, VARIANTS, YMM, ZMM

REAL = [v.name for v in VARIANTS.values() if not v.emulates]
X87_SSE = 0x3

AVX2 = ("avx2", "fma", "f16c")
AVX512 = AVX2 + ("avx512f", "avx512bw", "avx512dq", "avx512vl")
CASCADE_LAKE = AVX512 + ("avx512vnni",)
ZEN4 = CASCADE_LAKE + ("avx512bf16",)
SAPPHIRE_RAPIDS = ZEN4 + ("avx512vbmi", "amx-tile", "amx-int8", "amx-bf16")

# name, features, XCR0, answer of the kernel to the AMX request, best variant
MACHINES = [
    ("haswell", AVX2, YMM, 0, "avx2"),
    ("skylake_x", AVX512, ZMM, 0, "avx512"),
    ("cascade_lake", CASCADE_LAKE, ZMM, 0, "avx512_vnni"),
    ("zen4", ZEN4, ZMM, 0, "avx512_bf16"),
    ("sapphire_rapids", SAPPHIRE_RAPIDS, ZMM | TILE, 0, "amx"),
    ("sapphire_rapids_without_permission", SAPPHIRE_RAPIDS, ZMM | TILE, errno.EPERM, "avx512_bf16"),
    ("sapphire_rapids_old_kernel", SAPPHIRE_RAPIDS, ZMM, errno.EINVAL, "avx512_bf16"),
    ("guest_without_zmm", SAPPHIRE_RAPIDS, YMM, 0, "avx2"),
    ("guest_without_opmask", SAPPHIRE_RAPIDS, ZMM & ~0x20, 0, "avx2"),
    ("guest_without_ymm", SAPPHIRE_RAPIDS, 0, 0, None),
    ("nehalem", (), 0, 0, None),
]


class Cpu:
    """A machine by its features, XCR0 and the kernel's answer; counts the AMX requests."""

    def __init__(self, features, xcr0, permission=0):
        self.leaves = {}
        for f in features:
            leaf, subleaf, register, bit, _ = FEATURES[f]
            registers = self.leaves.setdefault((leaf, subleaf), [0] * 4)
            registers[("eax", "ebx", "ecx", "edx").index(register)] |= 1 << bit
        self.xcr0 = xcr0 and xcr0 | X87_SSE
        self.permission = permission
        self.requests = 0

    def cpuid(self, leaf, subleaf):
        return tuple(self.leaves.get((leaf, subleaf), [0] * 4))

    def xgetbv(self):
        return self.xcr0

    def request_amx(self):
        self.requests += 1
        return self.permission


def machine(name):
    return next(Cpu(*row[1:4]) for row in MACHINES if row[0] == name)


def python(code, **env):
    env = {k: v for k, v in {**os.environ, **env}.items() if k != "KTCY_VARIANT" or k in env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def last_line(process):
    assert process.returncode == 1, process
    return process.stderr.strip().splitlines()[-1]


IMPORT_ON = """
import sys, types
fake = types.ModuleType("ktcy.kernels._cpuid")
leaves = {leaves}
fake.cpuid = lambda leaf, subleaf: tuple(leaves.get((leaf, subleaf), (0, 0, 0, 0)))
fake.xgetbv = lambda: {xcr0}
fake.request_amx = lambda: {permission}
sys.modules[fake.__name__] = fake
import ktcy
print(ktcy.__cpu_variant__, ktcy.show_config()["variants"])
"""


def import_on(name, **env):
    return python(IMPORT_ON.format(**vars(machine(name))), **env)


@pytest.mark.parametrize("features, xcr0, permission, best", [m[1:] for m in MACHINES], ids=[m[0] for m in MACHINES])
def test_choice_on_made_up_cpus(features, xcr0, permission, best):
    """C03 C06 C07 C09: every row up to the best one, and no other, in order."""
    ladder = REAL[: REAL.index(best) + 1] if best else []
    assert kernels.available(Cpu(features, xcr0, permission)) == ladder[::-1]


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("lost", FEATURES)
def test_each_feature_is_needed(name, lost):
    """C03 C09: without one listed feature the variant is refused and the feature named; others do not matter."""
    cpu = Cpu([f for f in FEATURES if f != lost], ZMM | TILE)
    expected = [f"the CPU lacks {lost}"] if lost in VARIANTS[name].features else []
    assert kernels.missing(name, cpu) == expected


def test_reason_names_cpu_or_operating_system():
    """C06: announced but not enabled is told apart from not announced."""
    [reason] = kernels.missing("avx512", machine("guest_without_zmm"))
    assert reason == (
        "the CPU has avx512f, avx512bw, avx512dq, avx512vl but the operating system does not enable their state (XCR0)"
    )
    lacks, held = kernels.missing("avx512", Cpu(AVX2, X87_SSE))
    assert lacks.startswith("the CPU lacks avx512f") and held.startswith("the CPU has avx2, fma, f16c but")
    [reason] = kernels.missing("amx", machine("sapphire_rapids_old_kernel"))
    assert reason.startswith("the CPU has amx-tile, amx-int8, amx-bf16 but")


def test_amx_permission_refused():
    """C07: the reason is the kernel's, and only AMX goes."""
    cpu = machine("sapphire_rapids_without_permission")
    [reason] = kernels.missing("amx", cpu)
    assert "the kernel refuses permission for AMX tiles" in reason and os.strerror(errno.EPERM) in reason
    assert kernels.missing("avx512_bf16", cpu) == []


@pytest.mark.parametrize("name", [m[0] for m in MACHINES])
def test_amx_is_asked_for_only_where_it_is(name):
    """C07: a CPU or an operating system without tiles is never asked."""
    cpu = machine(name)
    for variant in VARIANTS:
        kernels.missing(variant, cpu)
    has_tiles = name in ("sapphire_rapids", "sapphire_rapids_without_permission")
    assert cpu.requests == has_tiles


@pytest.mark.parametrize("name", ["nehalem", "guest_without_ymm"])
def test_import_below_avx2(name):
    """C03 C06: an ImportError that names what is missing, no signal."""
    error = last_line(import_on(name))
    assert error.startswith("ImportError: ktcy needs a CPU with AVX2: ")
    assert all(f in error for f in AVX2)
    assert ("lacks" if name == "nehalem" else "XCR0") in error


def test_import_does_not_open_what_cannot_run():
    """C03: only the chosen variant's shared object is mapped."""
    code = "import ktcy; print(ktcy.__cpu_variant__); print(*[l for l in open('/proc/self/maps') if '_kernels_' in l])"
    variant, maps = python(code).stdout.split("\n", 1)
    assert set(re.findall(r"_kernels_(\w+)\.", maps)) == {variant}


def test_forced_variant_is_used():
    for name in kernels.available():
        assert python("import ktcy; print(ktcy.__cpu_variant__)", KTCY_VARIANT=name).stdout == f"{name}\n"


def test_default_is_the_best():
    """C04: the choice follows the machine, not the build."""
    assert python("import ktcy; print(ktcy.__cpu_variant__)").stdout.strip() == kernels.available()[0]
    assert python("import ktcy; print(ktcy.__cpu_variant__)", KTCY_VARIANT="").stdout.strip() == kernels.available()[0]


@pytest.mark.parametrize("name", ["avx1024", "AVX2", "avx2 ", "../avx2"])
def test_unknown_variant_lists_the_choices(name):
    error = last_line(python("import ktcy", KTCY_VARIANT=name))
    assert error.startswith(f"ImportError: KTCY_VARIANT={name} is not a variant.")
    assert ", ".join(REAL) in error and f"this machine can run {', '.join(kernels.available())}" in error


@pytest.mark.parametrize("twin", [v.name for v in VARIANTS.values() if v.emulates])
def test_twins_load_but_are_never_chosen(twin):
    assert kernels.load(twin).name == twin
    assert twin not in kernels.available()
    error = last_line(python("import ktcy", KTCY_VARIANT=twin))
    assert f"KTCY_VARIANT={twin} emulates {VARIANTS[twin].emulates} and is for tests." in error


def test_forced_variant_that_cannot_run():
    """C07: forcing what cannot run says why, whatever this machine has."""
    error = last_line(import_on("haswell", KTCY_VARIANT="amx"))
    assert "ImportError: KTCY_VARIANT=amx cannot run here: the CPU lacks avx512f, " in error
    assert error.endswith("this machine can run avx2")
    error = last_line(import_on("sapphire_rapids_without_permission", KTCY_VARIANT="amx"))
    assert "the kernel refuses permission" in error
    assert error.endswith("can run avx512_bf16, avx512_vnni, avx512, avx2")
    assert last_line(import_on("nehalem", KTCY_VARIANT="avx2")).endswith("this machine can run none of them")


def test_avx2_runs_where_better_ones_do_not():
    """C06: a guest without zmm state gets AVX2, and the report says what better ones lack."""
    process = import_on("guest_without_zmm")
    assert process.stdout.startswith("avx2 ") and "XCR0" in process.stdout, process.stderr


def test_variant_left_out_of_the_build(monkeypatch):
    find = kernels.importlib.util.find_spec
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda n: None if n.endswith("_avx512") else find(n))
    cpu = machine("cascade_lake")
    assert kernels.available(cpu) == ["avx512_vnni", "avx2"]
    [reason] = kernels.missing("avx512", cpu)
    assert "was not built" in reason and "KTCY_VARIANTS" in reason


def test_stale_shared_object_is_refused(monkeypatch):
    """A module of another ABI fails by its capsule's name, and the message names the file."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    stale = SimpleNamespace(table=new(1, b"ktcy.kernels.v0", None), __file__="_kernels_old.so")
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: stale)
    with pytest.raises(ImportError, match=r"_kernels_old\.so is from another version of ktcy .*install ktcy again"):
        kernels.load.__wrapped__("avx2")


@pytest.mark.parametrize("call", [kernels.missing, kernels.load])
def test_unknown_name(call):
    with pytest.raises(ValueError, match="unknown variant 'avx3'; the variants are avx2, avx512, "):
        call("avx3")


def test_load_gives_the_variant_asked_for():
    for name in kernels.available():
        assert kernels.load(name).name == name
        assert kernels.load(name) is kernels.load(name)


@pytest.mark.parametrize("system, machine", [("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_other_platforms_are_refused(system, machine):
    """C11: one sentence that says what is supported."""
    code = f"import sys, platform, numpy; sys.platform = {system!r}; platform.machine = lambda: {machine!r}; import ktcy"
    error = last_line(python(code))
    assert error == f"ImportError: ktcy supports Linux on x86-64; this is {system} on {machine}."


def cpuinfo_flags():
    with open("/proc/cpuinfo") as f:
        line = next(line for line in f if line.startswith("flags"))
    return {flag.replace("_", "") for flag in line.split(":")[1].split()}


def test_detection_agrees_with_the_kernel():
    """Linux drops a flag from cpuinfo when it does not enable the state, so both must agree on every row."""
    flags = cpuinfo_flags()
    for name in REAL:
        lacking = [f for f in VARIANTS[name].features if f.replace("-", "") not in flags]
        named = [f for f in VARIANTS[name].features if f in re.findall(r"[\w-]+", " ".join(kernels.missing(name)))]
        assert named == lacking


def test_cpuid_beyond_the_last_leaf_is_zero():
    last = _cpuid.cpuid(0, 0)[0]
    assert last >= 7
    assert _cpuid.cpuid(last + 1, 0) == (0, 0, 0, 0)
    assert _cpuid.xgetbv() & X87_SSE == X87_SSE


def test_table_is_a_ladder():
    """Each row adds features to the row below, and its priority is higher; a twin needs no more than AVX2."""
    rows = [VARIANTS[name] for name in REAL]
    assert [r.extends for r in rows] == [None] + REAL[:-1]
    assert [r.priority for r in rows] == sorted({r.priority for r in rows})
    for row in VARIANTS.values():
        assert len(set(row.features)) == len(row.features) and set(row.features) <= set(FEATURES)
        if row.emulates:
            assert row.features == VARIANTS["avx2"].features and row.priority is None

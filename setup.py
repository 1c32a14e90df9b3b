"""Builds the baseline modules and one kernel module per row of ktcy/kernels/_variants.py.

KTCY_VARIANTS  unset: every variant; "twins": also their emulated twins (tests); "native": what this
               machine runs; or names separated by commas.
KTCY_DEBUG=1   ASan, UBSan and Cython's own checks; built in build/debug (make sanitize runs tests with it).
"""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

HERE = Path(__file__).parent
KERNELS = Path("ktcy/kernels")
DEBUG = os.environ.get("KTCY_DEBUG") == "1"
BUILD = Path("build/debug" if DEBUG else "build")

if sys.platform != "linux" or platform.machine() != "x86_64":
    sys.exit(f"ktcy supports Linux on x86-64; this is {sys.platform} on {platform.machine()}.")


def variant_table():
    spec = importlib.util.spec_from_file_location("_variants", HERE / KERNELS / "_variants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.VARIANTS


def chosen(variants):
    choice = os.environ.get("KTCY_VARIANTS", "")
    real = [v for v in variants.values() if not v.emulates]
    if choice == "":
        return real
    if choice == "twins":
        return list(variants.values())
    if choice == "native":
        flags = Path("/proc/cpuinfo").read_text().replace("_", "").split()
        return [v for v in real if all(f.replace("-", "") in flags for f in v.features)]
    unknown = set(choice.split(",")) - set(variants)
    if unknown:
        sys.exit(f"KTCY_VARIANTS: unknown {', '.join(sorted(unknown))}; choose from {', '.join(variants)}, twins, native.")
    return [variants[name] for name in choice.split(",")]


CFLAGS = ["-std=gnu11", "-O2", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra"]
CFLAGS += ["-Wno-unused-parameter", "-Wno-missing-field-initializers"]
LDFLAGS = []
if DEBUG:
    CFLAGS += ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    # Checks by calls, not inline: a variant's kernels take one minute to compile instead of five.
    CFLAGS += ["-O1", "--param=asan-instrumentation-with-call-threshold=0"]
    LDFLAGS += ["-fsanitize=address,undefined"]
DIRECTIVES = dict(
    language_level=3,
    embedsignature=True,
    cdivision=False,
    boundscheck=DEBUG,
    wraparound=False,
    initializedcheck=DEBUG,
)


def flavour():
    """A file that is new when KTCY_DEBUG is not what it was: modules built in place the other way are out of date."""
    stamp = HERE / "build" / "flavour"
    text = BUILD.name
    if not stamp.exists() or stamp.read_text() != text:
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(text)
    return str(stamp.relative_to(HERE))


def extension(name, source, **options):
    depends = [str(p.relative_to(HERE)) for p in (HERE / "ktcy").rglob("*.h")]
    depends += ["setup.py", str(KERNELS / "_variants.py"), flavour()]
    options.setdefault("extra_compile_args", CFLAGS)
    include = [str(KERNELS), "ktcy/runtime", "ktcy", numpy.get_include()]
    return Extension(name, [source], depends=depends, include_dirs=include, extra_link_args=LDFLAGS, **options)


def baseline():
    sources = [p.relative_to(HERE) for p in sorted((HERE / "ktcy").rglob("*.pyx")) if p.name != "_kernels.pyx"]
    return [extension(str(p.with_suffix("")).replace("/", "."), str(p), libraries=["pthread"]) for p in sources]


def kernel(variant, c_file):
    """Each variant compiles its own copy: objects of one source would collide under a parallel build."""
    copy = HERE / BUILD / "variants" / variant.name / "_kernels.c"
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not copy.exists() or copy.read_bytes() != Path(c_file).read_bytes():
        shutil.copyfile(c_file, copy)
    name = f"_kernels_{variant.name}"
    macros = [("PyInit__kernels", f"PyInit_{name}"), ("KT_ISA", variant.isa), ("KT_NAME", f'"{variant.name}"')]
    if variant.emulates:
        macros.append(("KT_EMULATE", "1"))
    flags = CFLAGS + variant.cflags + ["-Wno-psabi"]
    return extension(
        f"ktcy.kernels.{name}", str(copy.relative_to(HERE)), define_macros=macros, extra_compile_args=flags
    )


if __name__ == "__main__":
    if "bdist_wheel" in sys.argv:
        # A wheel takes all of build/lib*: also modules and twins that another build left there.
        for stale in (HERE / BUILD).glob("lib*"):
            shutil.rmtree(stale)
    variants = chosen(variant_table())
    options = dict(compiler_directives=DIRECTIVES, build_dir=str(BUILD / "cython"))
    modules = cythonize(baseline(), **options)
    [shared] = cythonize([extension("ktcy.kernels._kernels", str(KERNELS / "_kernels.pyx"))], **options)
    modules += [kernel(v, shared.sources[0]) for v in variants]
    parallel = len(os.sched_getaffinity(0))
    setup(ext_modules=modules, options={"build": {"build_base": str(BUILD)}, "build_ext": {"parallel": parallel}})

"""The CPU variants: which can run here, and the kernels of one.

Features are read by baseline code first; a variant's shared object is opened only when this CPU, the
operating system and the kernel allow all of its instructions. The choice is made once, for every format.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import sys

if sys.platform != "linux" or platform.machine() != "x86_64":
    raise ImportError(f"ktcy supports Linux on x86-64; this is {sys.platform} on {platform.machine()}.")
if importlib.machinery.PathFinder.find_spec(f"{__name__}._cpuid", __path__) is None:
    raise ImportError(
        f"ktcy in {os.path.dirname(__path__[0])} is not built for Python {platform.python_version()}: run "
        "`pip install -e .` beside it, or, if ktcy is installed elsewhere, start Python in another folder"
    )

from . import _cpuid
from ._table import Kernels
from ._variants import FEATURES, TILE, VARIANTS

__all__ = ["VARIANTS", "available", "default", "load", "missing"]

REGISTERS = ("eax", "ebx", "ecx", "edx")


def _row(name):
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}; the variants are {', '.join(VARIANTS)}")
    return VARIANTS[name]


def _module(name):
    return f"{__name__}._kernels_{name}"


def _refused(variant, cpu):
    announced = [f for f in variant.features if _announces(cpu, FEATURES[f])]
    xcr0 = cpu.xgetbv()
    held = [f for f in announced if FEATURES[f].xcr0 & ~xcr0]
    lacking = [f for f in variant.features if f not in announced]
    if lacking:
        yield f"the CPU lacks {', '.join(lacking)}"
    if held:
        yield f"the CPU has {', '.join(held)} but the operating system does not enable their state (XCR0)"
    if not lacking and not held and any(FEATURES[f].xcr0 == TILE for f in announced):
        error = cpu.request_amx()
        if error:
            yield (
                f"the kernel refuses permission for AMX tiles (arch_prctl: {os.strerror(error)}); "
                "it takes Linux 5.16 and a container or VM that allows the call"
            )


def _announces(cpu, feature):
    return cpu.cpuid(feature.leaf, feature.subleaf)[REGISTERS.index(feature.register)] >> feature.bit & 1


def missing(name, cpu=_cpuid):
    """Why a variant cannot run here.

    Parameters
    ----------
    name : str
        A name of ``VARIANTS``.
    cpu : object, optional
        What to ask: ``cpuid(leaf, subleaf)``, ``xgetbv()``, ``request_amx()``. The default is this machine.

    Returns
    -------
    list of str
        One reason for each that refuses: the CPU, the operating system, the kernel, or the build that left
        the variant out. Empty if the variant can run.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    reasons = list(_refused(_row(name), cpu))
    if not reasons and importlib.util.find_spec(_module(name)) is None:
        reasons.append("it was not built; KTCY_VARIANTS chooses what an install of ktcy builds")
    return reasons


def available(cpu=_cpuid):
    """The names of the variants that can run here, best first; twins left out."""
    rows = sorted((v for v in VARIANTS.values() if not v.emulates), key=lambda v: -v.priority)
    return [v.name for v in rows if not missing(v.name, cpu)]


@functools.lru_cache(None)
def load(name):
    """The kernels of a variant, emulated twins included.

    Parameters
    ----------
    name : str
        A name of ``VARIANTS``.

    Returns
    -------
    Kernels

    Raises
    ------
    ValueError
        For an unknown name.
    ImportError
        If the variant cannot run here, or its shared object is from another version of ktcy.
    """
    reasons = missing(name)
    if reasons:
        raise ImportError(f"variant {name} cannot run here: {'; '.join(reasons)}")
    module = importlib.import_module(_module(name))
    try:
        return Kernels(module.table)
    except ValueError as error:
        raise ImportError(
            f"{module.__file__} is from another version of ktcy ({error}); install ktcy again", path=module.__file__
        ) from None


@functools.lru_cache(None)
def default():
    """The kernels that ktcy uses: the best that can run here, or the one that KTCY_VARIANT names.

    Returns
    -------
    Kernels

    Raises
    ------
    ImportError
        If KTCY_VARIANT names no variant, a twin, or one that cannot run here, with the names that can and
        what is missing; if no variant can run.
    """
    forced = os.environ.get("KTCY_VARIANT")
    if forced:
        return _forced(forced)
    names = available()
    if not names:
        raise ImportError(f"ktcy needs a CPU with AVX2: {'; '.join(missing('avx2'))}")
    return load(names[0])


def _forced(name):
    if name not in VARIANTS:
        reason = "is not a variant"
    elif VARIANTS[name].emulates:
        reason = f"emulates {VARIANTS[name].emulates} and is for tests"
    elif reasons := missing(name):
        reason = "cannot run here: " + "; ".join(reasons)
    else:
        return load(name)
    names = ", ".join(v.name for v in VARIANTS.values() if not v.emulates)
    here = ", ".join(available()) or "none of them"
    raise ImportError(f"KTCY_VARIANT={name} {reason}. The variants are {names}; this machine can run {here}")

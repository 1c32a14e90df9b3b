"""Mixture-of-Experts layers on the CPU: one packed file for every instruction set, the same bits on each.

The CPU variant is chosen here, at import, so a machine that cannot run ktcy gets its ImportError at once;
everything else is imported when it is first used.
"""

import importlib

from . import kernels
from ._version import __version__

__cpu_variant__ = kernels.default().name

# public name -> the module it comes from
_LAZY = {
    "Activation": "config",
    "CPUInfer": "runtime.queue",
    "Checkpoint": "weights",
    "KTMoEWrapper": "experts",
    "Trace": "trace",
    "WorkerPoolConfig": "runtime.queue",
    "convert": "conversion",
    "show_config": "doctor",
}

__all__ = ["__cpu_variant__", "__version__", *_LAZY]


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)

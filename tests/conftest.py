"""Every test of kernels runs on every variant: those this machine has, and the emulated twin of every row."""

import os
import signal

# A shell's background job ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before numpy and torch come: on many small matrices their threads only hinder each other and the pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from ktcy import kernels as registry

settings.register_profile("ktcy", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ktcy")

NATIVE = registry.available()
TWINS = [v.name for v in registry.VARIANTS.values() if v.emulates]


@pytest.fixture(scope="session", params=NATIVE + TWINS)
def kernels(request):
    """The kernels of one variant."""
    loaded = registry.load(request.param)
    assert loaded.name == request.param
    return loaded

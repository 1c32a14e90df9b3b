"""Benches measure the machine's limits in the same run and report every figure as a fraction of them."""

import pytest

from ktcy import kernels
from ktcy.runtime import topology
from ktcy.runtime.pool import Pool


@pytest.fixture(scope="session")
def table():
    """The kernels in use: the best variant, or KTCY_VARIANT."""
    return kernels.default()


@pytest.fixture(scope="session")
def pool():
    """One thread a physical core, or KTCY_THREADS."""
    with Pool(topology.default_threads(topology.read())) as pool:
        yield pool


def pytest_terminal_summary(terminalreporter):
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    for bench in session.benchmarks if session else ():
        info = " ".join(f"{key}={value}" for key, value in bench.extra_info.items())
        spread = f"{bench.stats.median * 1e6:12.1f} us  iqr {bench.stats.iqr * 1e6:10.1f}"
        terminalreporter.write_line(f"{bench.name:52} {spread}  {info}")

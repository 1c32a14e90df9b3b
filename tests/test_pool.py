"""The pool: every task once at any size, pinned, quiet when idle, and safe over fork, close and misuse."""

import dataclasses
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from ktcy.runtime import Pool, topology

MACHINE = dataclasses.replace(topology.read(), quota=None)
CPUS = len(MACHINE.cpus)
SOURCE = Path(__file__).parent / "csrc" / "pool_stress.c"
RUNTIME = Path(topology.__file__).parent


def make(threads):
    """A pool of so many threads; more than there are CPUs without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return Pool(threads, MACHINE)


@pytest.fixture
def tasks():
    """A function: directories in /proc of the pool threads that this test started."""
    def pool_threads():
        return {path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text().startswith("ktcy-")}

    before = pool_threads()
    return lambda: sorted(pool_threads() - before)


def status(task, name):
    return re.search(rf"^{name}:\s*(\S+)", (task / "status").read_text(), re.MULTILINE)[1]


def python(code, **options):
    """Run a script of its own process with warnings as errors; returns its standard output."""
    options.setdefault("timeout", 60)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("threads", sorted({1, 2, 3, CPUS, 2 * CPUS, 4 * CPUS}))
def test_each_task_runs_once(threads):
    """Thousands of runs of every small size, from one thread to four times the cores."""
    rng = random.Random(threads)
    with make(threads) as pool:
        for n in [0, 1, 2, threads - 1, threads, threads + 1, 100_000] + [rng.randrange(200) for _ in range(2000)]:
            assert (pool.selftest(n) == 1).all()


def test_all_threads_take_part():
    with make(CPUS) as pool:
        assert (pool.round_trips(200) > 0).all()
        assert (pool.round_trips(5, idle=0.003) > 0).all()
        assert pool.round_trips(0).shape == (0,)


def test_python_threads_take_turns():
    """Several Python threads on one pool, while another pool works too."""
    wrong = []

    def work(pool, seed):
        rng = random.Random(seed)
        for _ in range(500):
            if (pool.selftest(rng.randrange(100)) != 1).any():
                wrong.append(seed)

    with make(3) as one, make(2) as two:
        threads = [threading.Thread(target=work, args=(one if seed % 2 else two, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_one_thread_starts_none(tasks):
    with make(1) as pool:
        assert tasks() == []
        assert (pool.selftest(50) == 1).all()


def test_threads_are_pinned_and_block_signals(tasks):
    """C41: each thread on one CPU of the mask, no two on the same one."""
    with make(CPUS) as pool:
        assert pool.cpus == MACHINE.cpus
        for _ in range(50):
            pool.selftest(100)
        mine = [int(status(task, "Cpus_allowed_list")) for task in tasks()]
        assert len(mine) == pool.threads - 1
        assert len(set(mine)) == len(mine) and set(mine) < set(pool.cpus)
        for task in tasks():
            assert int(status(task, "SigBlk"), 16) >> (signal.SIGINT - 1) & 1


def test_affinity_of_the_caller_is_not_touched():
    before = os.sched_getaffinity(0)
    with make(CPUS) as pool:
        pool.selftest(1000)
        assert os.sched_getaffinity(0) == before


def test_threads_never_leave_the_mask():
    """C41: a process allowed the last CPU only; there is no CPU 0 for it."""
    last = max(os.sched_getaffinity(0))
    code = f"""
import os, re, warnings
os.sched_setaffinity(0, {{{last}}})
from ktcy.runtime import Pool
pool = Pool()
assert (pool.threads, pool.cpus) == (1, ({last},)), pool.cpus
warnings.simplefilter("ignore")
pool = Pool(3)
assert (pool.selftest(1000) == 1).all()
for task in os.listdir("/proc/self/task"):
    status = open(f"/proc/self/task/{{task}}/status").read()
    if "ktcy-" in status:
        print(re.search(r"Cpus_allowed_list:\\s*(\\S+)", status)[1])
"""
    environment = {name: value for name, value in os.environ.items() if name != "KTCY_THREADS"}
    assert python(code, env=environment).split() == [str(last)] * 2


def test_worker_makes_room_for_the_caller(tasks):
    """A caller on a worker's CPU: the worker moves to the CPU that would idle otherwise."""
    mask = os.sched_getaffinity(0)
    try:
        with make(min(CPUS, 3)) as pool:
            for cpu in pool.cpus + pool.cpus[::-1]:
                os.sched_setaffinity(0, {cpu})
                pool.selftest(10)
                workers = sorted(int(status(task, "Cpus_allowed_list")) for task in tasks())
                assert workers == sorted(set(pool.cpus) - {cpu})
    finally:
        os.sched_setaffinity(0, mask)


def test_idle_pool_uses_no_cpu(tasks):
    """C43: soon after the last run all threads sleep: they are not scheduled any more, and their clocks stand still."""
    def used():
        clocks = [(task / "stat").read_text().rsplit(")", 1)[1].split()[11:13] for task in tasks()]
        return clocks, [status(task, "voluntary_ctxt_switches") for task in tasks()]

    with make(CPUS + 1) as crowded, make(CPUS) as pool:
        crowded.selftest(1000)
        pool.selftest(1000)
        for _ in range(50):  # a busy machine may let a thread wait before it can go to sleep
            before = used()
            time.sleep(0.1)
            if used() == before:
                break
        time.sleep(0.3)
        assert used() == before and len(before[0]) == 2 * CPUS - 1


def test_more_threads_than_cpus_warns(tasks):
    """C46: nothing is ignored or capped in silence."""
    asked = len(MACHINE.cpus) + 3
    message = rf"{asked} threads asked for, {asked - 3} CPUs usable: all {asked} are used"
    with pytest.warns(RuntimeWarning, match=message):
        pool = Pool(asked, MACHINE)
    with pool:
        assert pool.threads == asked and pool.cpus == MACHINE.cpus
        assert len(tasks()) == asked - 1


def test_more_threads_than_quota_warns():
    """C42: the default respects the quota; asking for more says so."""
    limited = dataclasses.replace(MACHINE, cpus=MACHINE.cpus[:1] * 4, cores=4, performance_cores=4, quota=1.5)
    with Pool(topology=limited) as pool:
        assert pool.threads == 1
    with pytest.warns(RuntimeWarning, match=r"2 threads asked for, the cgroup's quota is 1\.5 CPUs: all 2 are used"):
        Pool(2, limited).close()


@pytest.mark.parametrize("threads", [0, -1, 4097, 1 << 40, -(1 << 80)])
def test_threads_out_of_range(threads):
    with pytest.raises(ValueError, match=f"threads must be from 1 to 4096, not {threads}"):
        Pool(threads)


@pytest.mark.parametrize("threads", [2.0, "2", True, b"2"])
def test_threads_of_other_types(threads):
    with pytest.raises(TypeError, match="threads must be an integer"):
        Pool(threads)
    assert Pool(np.int64(1)).threads == 1


def test_use_after_close(tasks):
    pool = make(3)
    pool.reserve(1)
    pool.close()
    pool.close()
    assert pool.closed and tasks() == [] and pool.scratch_bytes == 0
    for use in (lambda: pool.selftest(1), lambda: pool.reserve(1), pool.release, pool.__enter__):
        with pytest.raises(RuntimeError, match="this pool is closed"):
            use()


def test_close_while_another_thread_runs():
    """close() waits for the run in progress; later runs of that thread are refused."""
    pool = make(2)
    seen = []

    def work():
        try:
            while True:
                seen.append((pool.selftest(2000) == 1).all())
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while len(seen) < 20:
        time.sleep(0.001)
    pool.close()
    thread.join()
    assert seen.pop() == "this pool is closed" and all(seen)


def test_forgotten_pool_ends_its_threads(tasks):
    pool = make(3)
    assert len(tasks()) == 2
    del pool
    gc.collect()
    assert tasks() == []


def test_scratch_is_kept_and_released():
    with make(2) as pool:
        assert pool.scratch_bytes == 0
        pool.reserve(3 << 20)
        assert pool.scratch_bytes == 4 << 20
        pool.reserve(1)
        assert pool.scratch_bytes == 4 << 20
        pool.release()
        assert pool.scratch_bytes == 0
        for size in (1 << 60, (1 << 64) - 1):
            with pytest.raises(MemoryError, match=f"no {size} bytes .*GiB"):
                pool.reserve(size)
        pool.reserve(0)
        assert (pool.selftest(10) == 1).all()


def test_refused_threads_leave_nothing_behind():
    """Stacks for 4096 threads do not fit the limit: an error, no thread left, and a smaller pool works."""
    code = """
import os, resource, warnings
warnings.simplefilter("ignore")
from ktcy.runtime import Pool
before = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    Pool(4096)
except OSError as error:
    print(error.errno, error)
assert len(os.listdir("/proc/self/task")) == before
assert (Pool(2).selftest(100) == 1).all()
"""
    assert "the system refused a pool of 4096 threads" in python(code)


def test_no_growth_over_many_pools_and_runs():
    """Address space and resident pages stay flat; glibc keeps up to 40 MB of stacks of ended threads."""
    def life():
        with make(3) as pool:
            pool.reserve(1 << 20)
            for n in range(100):
                pool.selftest(n)

    def pages():
        return [int(number) for number in Path("/proc/self/statm").read_text().split()[:2]]

    for _ in range(20):
        life()
    gc.collect()
    before = pages()
    for _ in range(200):
        life()
    gc.collect()
    size, resident = np.subtract(pages(), before) * os.sysconf("SC_PAGE_SIZE")
    assert size < 48e6 and resident < 4e6


FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from ktcy.runtime import Pool
warnings.simplefilter("ignore", RuntimeWarning)
pool = Pool(3)
stop = False
def work():
    while not stop:
        assert (pool.selftest(500) == 1).all()
thread = threading.Thread(target=work)
thread.start()
children = []
for i in range(20):
    child = os.fork()
    if child == 0:
        try:
            pool.selftest(1)
        except RuntimeError as error:
            assert "belongs to the parent" in str(error)
        else:
            os._exit(3)
        if i % 2:
            pool.close()
        own = Pool(2)
        assert (own.selftest(500) == 1).all()
        if i % 4 < 2:
            del pool
            sys.exit(7)
        os._exit(7)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stop = True
thread.join()
assert codes == [7] * 20, codes
assert (pool.selftest(500) == 1).all()
"""


def test_fork():
    """C44: children forked in the middle of runs get an error, make their own pool, and exit without a hang."""
    python(FORK)


def test_interpreter_exit():
    """Idle pools, closed and not, in globals and in cycles: the process ends at once and says nothing."""
    code = """
import warnings
warnings.simplefilter("ignore", RuntimeWarning)
from ktcy.runtime import Pool
pool = Pool(4)
pool.selftest(100)
cycle = [Pool(3)]
cycle.append(cycle)
Pool(2).close()
"""
    python(code)


def test_interpreter_exit_with_work_in_flight():
    code = """
import threading, time, warnings
warnings.simplefilter("ignore", RuntimeWarning)
from ktcy.runtime import Pool
pool = Pool(2)
def work():
    while True:
        pool.selftest(1_000_000)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""
    python(code)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress_under_sanitizers(tmp_path, sanitizer):
    """The C of the pool alone, several callers, under the sanitizers of gcc."""
    program = tmp_path / "pool_stress"
    flags = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, f"-I{RUNTIME}", str(SOURCE), "-o", str(program), "-lpthread"], check=True)
    # Older sanitizers do not start where the system randomizes more than 28 bits of an address.
    fixed = "import ctypes, os, sys; ctypes.CDLL(None).personality(0x40000); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", fixed, program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), done.stderr

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
import own_threads
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktcy.runtime import Pool, topology

MACHINE = dataclasses.replace(topology.read(), quota=None)
CPUS = len(MACHINE.cpus)
CROWDED = dataclasses.replace(MACHINE, cpus=MACHINE.cpus * 4)  # four threads on each CPU
SOURCE = Path(__file__).parent / "csrc" / "pool_stress.c"
RUNTIME = Path(topology.__file__).parent


def make(threads, **options):
    """A pool of just so many threads, also where there are fewer CPUs."""
    return Pool(threads, MACHINE if threads <= CPUS else CROWDED, **options)


@pytest.fixture
def tasks():
    """A function: directories in /proc of the pool threads that this test started."""
    before = own_threads.named("ktcy-")
    return lambda: sorted(own_threads.named("ktcy-") - before)


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
        assert pool.threads == threads
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
        assert sorted(pool.cpus) == sorted(MACHINE.cpus)
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
pool = Pool(3, groups=3)
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
    """C46: nothing is capped in silence; one warning says what was asked and what is used."""
    message = f"^{CPUS + 3} threads asked for, {CPUS} CPUs usable: {CPUS} threads are used$"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        pool = Pool(CPUS + 3, dataclasses.replace(MACHINE, quota=0.5))
    with pool:
        assert len(caught) == 1
        assert pool.threads == CPUS and sorted(pool.cpus) == sorted(MACHINE.cpus)
        assert len(tasks()) == CPUS - 1


def test_mistyped_options_are_refused():
    """C46: a name nobody knows is an error, not a default."""
    for name in ("thread", "num_threads", "numa_node"):
        with pytest.raises(TypeError, match=name):
            Pool(**{name: 2})


def test_more_threads_than_quota_warns():
    """C42: the default respects the quota; asking for more says so, once."""
    limited = dataclasses.replace(CROWDED, quota=1.5)
    with Pool(topology=limited) as pool:
        assert pool.threads == 1
    message = r"^2 threads asked for, the cgroup's quota is 1\.5 CPUs: all 2 are used"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        pool = Pool(2, limited)
    with pool:
        assert len(caught) == 1
        assert (pool.selftest(1000) == 1).all()
        pool.reset_counters()
        # Its threads do not spend the quota on waiting. A busy machine may take long to wake one.
        for _ in range(1000):
            pool.round_trips(3, 0.001, tasks=4, loads=1000)
            if pool.counters()["sleeps"]:
                break
        assert pool.counters()["sleeps"] > 0


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
    assert pool.closed and own_threads.settles(lambda: not tasks()) and pool.scratch_bytes == 0
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
    assert own_threads.settles(lambda: not tasks())


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
from dataclasses import replace
from ktcy.runtime import topology
machine = topology.read()
machine = replace(machine, cpus=machine.cpus * 4096)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    Pool(4096, machine)
except OSError as error:
    print(error.errno, error)
while len(os.listdir("/proc/self/task")) > before:
    pass
assert (Pool(2).selftest(100) == 1).all()
"""
    assert "the system refused a pool of 4096 threads" in python(code)


def test_no_growth_over_1e5_runs():
    """Resident pages stay flat while one pool runs a hundred thousand loops."""
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with make(3, groups=2) as pool:
        pool.reserve(1 << 20)
        pool.round_trips(1000, tasks=3, loads=1)
        before = resident()
        for _ in range(100):
            pool.round_trips(1000, tasks=3, loads=1)
        assert resident() - before < 1e6
        assert pool.counters()["runs"] == 101_000


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
pool = Pool(3, groups=3)
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


class Life(RuleBasedStateMachine):
    """Any order of runs, reservations, closing and forking."""

    def __init__(self):
        super().__init__()
        self.pools, self.runs, self.held = [], {}, {}

    some = st.integers(0, 2)

    @rule(threads=st.integers(1, 5), groups=st.integers(1, 3))
    def new(self, threads, groups):
        if len(self.pools) < 3:
            pool = make(max(threads, groups), groups=groups)
            self.pools.append(pool)
            self.runs[pool], self.held[pool] = 0, 0

    def pool(self, i):
        return self.pools[i % len(self.pools)]

    @precondition(lambda self: self.pools)
    @rule(i=some, n=st.integers(0, 300))
    def run(self, i, n):
        pool = self.pool(i)
        if pool.closed:
            with pytest.raises(RuntimeError, match="closed"):
                pool.selftest(n)
        else:
            assert (pool.selftest(n) == 1).all()
            self.runs[pool] += 1
            assert pool.counters()["runs"] == self.runs[pool]

    @precondition(lambda self: self.pools)
    @rule(i=some, data=st.data())
    def run_groups(self, i, data):
        pool = self.pool(i)
        if not pool.closed:
            counts = data.draw(st.lists(st.integers(0, 50), min_size=pool.groups, max_size=pool.groups))
            assert all((ran == 1).all() for ran in pool.selftest_groups(counts))
            self.runs[pool] += 1

    @precondition(lambda self: self.pools)
    @rule(i=some, nbytes=st.integers(0, 1 << 22))
    def reserve(self, i, nbytes):
        pool = self.pool(i)
        if not pool.closed:
            pool.reserve(nbytes)
            self.held[pool] = max(self.held[pool], pool.groups * (nbytes // (2 << 20) + 1) * (2 << 20))

    @precondition(lambda self: self.pools)
    @rule(i=some)
    def release(self, i):
        pool = self.pool(i)
        if not pool.closed:
            pool.release()
            self.held[pool] = 0

    @precondition(lambda self: self.pools)
    @rule(i=some)
    def close(self, i):
        self.pool(i).close()
        self.held[self.pool(i)] = 0

    @precondition(lambda self: self.pools)
    @rule(i=some)
    def forget(self, i):
        self.pools.remove(self.pool(i))

    @precondition(lambda self: any(not pool.closed for pool in self.pools))
    @rule()
    def fork(self):
        pool = next(pool for pool in self.pools if not pool.closed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                pool.selftest(3)
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    @invariant()
    def memory_is_what_was_asked_for(self):
        assert all(pool.scratch_bytes == self.held[pool] for pool in self.pools)

    def teardown(self):
        for pool in self.pools:
            pool.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_interpreter_exit():
    """Idle pools, closed and not, in globals and in cycles: the process ends at once and says nothing."""
    code = """
import warnings
warnings.simplefilter("ignore", RuntimeWarning)
from ktcy.runtime import Pool
pool = Pool(4)
pool.selftest(100)
cycle = [Pool(3, groups=3)]
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
    # With a fan-out of 2 the woken threads wake others already in small groups; 0.5 ms find threads asleep.
    flags = ["-std=gnu11", "-DKT_FANOUT=2", "-DKT_LINGER_NS=200000", "-g", "-O1"]
    flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, f"-I{RUNTIME}", str(SOURCE), "-o", str(program), "-lpthread"], check=True)
    # Older sanitizers do not start where the system randomizes more than 28 bits of an address.
    fixed = "import ctypes, os, sys; ctypes.CDLL(None).personality(0x40000); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", fixed, program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), done.stderr

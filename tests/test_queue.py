"""The queue: every task once and in order, errors once, no hang over a full queue, signals, fork, close and exit."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import own_threads
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktcy.runtime import Pool, topology
from ktcy.runtime.queue import CAPACITY, CPUInfer, Queue, SelfTest, Task, WorkerPoolConfig, shared

CPUS = len(topology.read().cpus)
SOURCE = Path(__file__).parent / "csrc" / "queue_stress.c"
RUNTIME = Path(topology.__file__).parent


def make(threads=1):
    """A CPUInfer; more threads than there are CPUs without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return CPUInfer(threads)


@pytest.fixture
def queue():
    with make() as queue:
        yield queue


@pytest.fixture
def no_shared():
    """No shared CPUInfer before and after the test."""
    shared().close()
    yield
    shared().close()


def new_log(size=100_000):
    return np.zeros(size, np.int64)


def entries(log):
    return log[1 : log[0] + 1].tolist()


def python(code, errors="", **options):
    """Run a script of its own process with warnings as errors; returns its standard output."""
    options.setdefault("timeout", 60)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, **options)
    assert done.returncode == 0 and re.fullmatch(errors, done.stderr.strip()), done.stderr
    return done.stdout.strip()


def dispatchers():
    return own_threads.named("ktcy-queue")


@pytest.mark.parametrize("threads", sorted({1, 2, CPUS, 2 * CPUS, 4 * CPUS}))
def test_tasks_run_once_and_in_order(threads):
    """Thousands of tasks, each with a loop on the pool, from one thread to four times the cores."""
    log = new_log()
    with make(threads) as queue:
        tasks = [SelfTest(queue.pool, loop=i % 5, value=i, log=log) for i in range(3000)]
        assert [queue.submit(task) for task in tasks] == list(range(1, 3001))
        queue.sync()
        assert entries(log) == list(range(3000))
        assert queue.pending == 0 and queue.submitted == 3000
        assert {task.runs for task in tasks} == {1} and {task.pending for task in tasks} == {0}


def test_a_task_may_be_submitted_again_while_in_flight(queue):
    task = SelfTest(queue.pool, sleep_us=100)
    for _ in range(200):
        queue.submit(task)
    assert task.pending > 0
    queue.sync()
    assert task.runs == 200 and task.pending == 0


@pytest.mark.parametrize("threads", [1, CPUS])
def test_many_python_threads_submit(threads):
    """Each thread's tasks run in its order, none is lost, and every wait sees its task done."""
    log, wrong = new_log(), []
    with make(threads) as queue:

        def work(seed):
            for i in range(1000):
                task = SelfTest(queue.pool, value=1000 * seed + i, log=log)
                ticket = queue.submit(task)
                if i % 10 == 0:
                    queue.wait(ticket)
                    if task.runs != 1:
                        wrong.append(seed)
                if i % 70 == 0:
                    queue.sync(i % 3)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        queue.sync()
    found = entries(log)
    assert wrong == [] and len(found) == 6000
    for seed in range(6):
        assert [value for value in found if value // 1000 == seed] == list(range(1000 * seed, 1000 * seed + 1000))


def test_two_at_once():
    log_one, log_two = new_log(), new_log()
    with make(2) as one, make(2) as two:
        for i in range(1000):
            one.submit(SelfTest(one.pool, loop=3, value=i, log=log_one))
            two.submit(SelfTest(two.pool, loop=2, value=-i, log=log_two))
        one.sync()
        two.sync()
    assert entries(log_one) == list(range(1000)) and entries(log_two) == [-i for i in range(1000)]


def test_beside_direct_use_of_the_pool():
    with make(2) as queue:
        for _ in range(300):
            queue.submit(SelfTest(queue.pool, loop=20))
            assert (queue.pool.selftest(50) == 1).all()
        queue.sync()


def test_an_error_comes_out_once_and_the_first_one(queue):
    log = new_log()
    for status, value in (0, 1), (5, 2), (6, 3), (0, 4):
        queue.submit(SelfTest(queue.pool, status=status, value=value, log=log))
    gc.collect()
    with pytest.raises(RuntimeError, match="^task 2 failed with status 5$"):
        queue.sync()
    assert entries(log) == [1, 2, 3, 4]
    queue.sync()
    queue.submit(SelfTest(queue.pool, value=5, log=log))
    queue.sync()
    for value in range(6, 50):
        queue.submit(SelfTest(queue.pool, status=-value, value=value, log=log))
        with pytest.raises(RuntimeError, match=f"^task {value} failed with status -{value}$"):
            queue.sync()
        queue.sync()
    assert entries(log) == list(range(1, 50))


def test_a_failed_task_is_kept_until_its_error_is_raised(queue):
    """Thousands of other tasks later, and the caller let go of it long ago."""
    queue.submit(SelfTest(queue.pool, status=1, value=77))
    for _ in range(3 * CAPACITY):
        queue.submit(SelfTest(queue.pool))
    queue.wait(queue.submitted)
    gc.collect()
    with pytest.raises(RuntimeError, match="^task 77 failed"):
        queue.sync()


def test_tasks_are_let_go():
    """After sync the queue holds none; without any sync it holds a bounded number."""
    made = []

    class Buffer(np.ndarray):
        """Can be referred to weakly, so it tells when its task is gone."""

    def task(pool):
        log = np.zeros(4, np.int64).view(Buffer)
        made.append(weakref.ref(log))
        return SelfTest(pool, log=log)

    with make() as queue:
        for _ in range(5 * CAPACITY):
            queue.submit(task(queue.pool))
        assert sum(ref() is not None for ref in made) <= 2 * CAPACITY
        queue.sync()
        assert sum(ref() is not None for ref in made) == 0


def test_full_queue_makes_submit_wait(queue):
    """No task is lost, none too many is queued, and other Python threads go on meanwhile."""
    log, ticks, stop = new_log(), [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(queue.submitted)
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    queue.submit(SelfTest(queue.pool, sleep_us=200_000, log=log))
    most = 0
    for i in range(CAPACITY + 300):
        queue.submit(SelfTest(queue.pool, sleep_us=10, value=i, log=log))
        most = max(most, queue.pending)
    stop.set()
    ticker.join()
    assert log[0] >= 301 and most <= CAPACITY
    assert ticks.count(CAPACITY) > 10
    queue.sync()
    assert entries(log) == [0, *range(CAPACITY + 300)]


def test_full_queue_with_many_threads(queue):
    log = new_log()

    def work(seed):
        for i in range(1500):
            queue.submit(SelfTest(queue.pool, sleep_us=5, value=seed, log=log))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    queue.sync()
    assert sorted(entries(log)) == sorted([0, 1, 2, 3] * 1500)


def test_sync_allows_some_pending(queue):
    log = new_log()
    queue.sync(0)
    queue.sync(5)
    for allowed in (0, 1, 2, 5, 30):
        for _ in range(20):
            queue.submit(SelfTest(queue.pool, sleep_us=200, log=log))
        queue.sync(allowed)
        assert log[0] >= queue.submitted - allowed
    queue.sync()
    queue.submit(SelfTest(queue.pool, log=log))
    queue.submit(SelfTest(queue.pool, sleep_us=500_000, log=log))
    queue.sync(np.int64(1))
    assert queue.pending == 1
    queue.sync(1 << 70)
    assert queue.pending == 1


def test_wait_for_one_ticket(queue):
    first = queue.submit(SelfTest(queue.pool, status=3))
    last = queue.submit(SelfTest(queue.pool, sleep_us=500_000))
    queue.wait(0)
    queue.wait(first)
    assert queue.pending == 1
    with pytest.raises(RuntimeError, match="status 3"):
        queue.sync(1)
    for ticket in (last + 1, -1, 1 << 70):
        with pytest.raises(ValueError, match=f"ticket {ticket} was never given out; the last one is 2"):
            queue.wait(ticket)


@pytest.mark.parametrize("thing", [None, 3, (1, 2), lambda: None])
def test_submit_takes_tasks(queue, thing):
    with pytest.raises(TypeError, match=f"submit takes a Task that a layer made, not {type(thing).__name__}"):
        queue.submit(thing)
    with pytest.raises(TypeError, match="this Task does nothing"):
        queue.submit(Task())
    assert queue.submitted == 0


def test_task_of_another_pool(queue):
    with make() as other:
        task = SelfTest(other.pool)
        with pytest.raises(ValueError, match="this task belongs to another pool"):
            queue.submit(task)
        other.submit(task)
        other.sync()
        assert (task.runs, queue.submitted) == (1, 0)


def test_two_queues_of_one_pool():
    with Pool(1) as pool, Queue(pool) as one, Queue(pool) as two:
        task = SelfTest(pool, loop=3)
        for _ in range(100):
            one.submit(task)
            two.submit(task)
            one.sync()
        two.sync()
        assert task.pending == 0


def test_allow_n_pending_is_checked(queue):
    with pytest.raises(ValueError, match="allow_n_pending must not be negative, not -1"):
        queue.sync(-1)
    for value in (1.0, "1", None):
        with pytest.raises(TypeError):
            queue.sync(value)


def test_streams_without_cuda(queue):
    task = SelfTest(queue.pool)
    for stream in (None, 0, np.int64(0)):
        queue.submit_with_cuda_stream(stream, task)
        queue.sync_with_cuda_stream(stream)
    queue.sync_with_cuda_stream(None, 3)
    assert task.runs == 3
    for call in (queue.submit_with_cuda_stream, queue.sync_with_cuda_stream):
        with pytest.raises(RuntimeError, match="ktcy has no CUDA side yet"):
            call(0x7F0012345678, task)
        with pytest.raises(TypeError, match="a stream is None or the address"):
            call("stream", task)
    assert queue.submitted == 3


def test_use_after_close(queue):
    task, before = SelfTest(queue.pool), dispatchers()
    queue.submit(task)
    queue.close()
    queue.close()
    assert queue.closed and task.runs == 1 and queue.pool.closed
    assert own_threads.settles(lambda: len(before - dispatchers()) == 1)
    for use in (
        lambda: queue.submit(task),
        queue.sync,
        lambda: queue.wait(1),
        lambda: queue.submit_with_cuda_stream(0, task),
        lambda: queue.sync_with_cuda_stream(0),
        lambda: queue.round_trips(1),
        queue.__enter__,
    ):
        with pytest.raises(RuntimeError, match="this CPUInfer is closed"):
            use()
    assert task.pending == 0


def test_pool_closed_below_the_queue(queue):
    task = SelfTest(queue.pool, sleep_us=100_000, loop=3)
    queue.submit(task)
    queue.pool.close()
    for use in (lambda: queue.submit(task), queue.sync):
        with pytest.raises(RuntimeError, match="the pool of this CPUInfer is closed"):
            use()
    queue.close()
    assert task.runs == 1
    with pytest.raises(RuntimeError, match="this pool is closed"):
        Queue(queue.pool)


def test_close_runs_what_was_submitted():
    log = new_log()
    queue = make(2)
    for i in range(50):
        queue.submit(SelfTest(queue.pool, sleep_us=1000, loop=2, value=i, log=log))
    queue.close()
    assert entries(log) == list(range(50))


def test_close_while_other_threads_submit_and_wait():
    """Every task that was accepted runs, later ones are refused, and nobody hangs."""
    for _ in range(30):
        log, accepted, messages = new_log(), [], set()
        queue = make()

        def work():
            try:
                while True:
                    accepted.append(queue.submit(SelfTest(queue.pool, sleep_us=10, log=log)))
                    queue.sync(3)
            except RuntimeError as error:
                messages.add(str(error))

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        while len(accepted) < 20:
            time.sleep(0.0005)
        closers = [threading.Thread(target=queue.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in closers + workers:
            thread.join()
        assert messages == {"this CPUInfer is closed"}
        assert sorted(accepted) == list(range(1, len(accepted) + 1)) and log[0] == len(accepted)


def test_close_raises_what_no_sync_did(caplog):
    queue = make()
    queue.submit(SelfTest(queue.pool, status=1, value=9))
    with pytest.raises(RuntimeError, match="task 9 failed"):
        queue.close()
    queue.close()
    assert queue.closed and queue.pool.closed
    with pytest.raises(RuntimeError, match="task 10 failed"), make() as queue:
        queue.submit(SelfTest(queue.pool, status=1, value=10))
    assert caplog.records == []
    with pytest.raises(KeyError), make() as queue:
        queue.submit(SelfTest(queue.pool, status=1, value=11))
        raise KeyError
    assert queue.closed and queue.pool.closed
    [record] = caplog.records
    assert record.levelno == logging.ERROR and "task 11 failed" in record.getMessage()


def test_forgotten_queue_runs_its_tasks_and_ends(caplog):
    """By reference count and in a cycle: no memory goes before its task has run."""
    log = new_log()

    class Layer:
        pass

    for cycle in (False, True):
        before = dispatchers()
        layer = Layer()
        layer.queue = make(2)
        for _ in range(20):
            layer.queue.submit(SelfTest(layer.queue.pool, sleep_us=2000, loop=3, log=log))
        layer.queue.submit(SelfTest(layer.queue.pool, status=1, value=cycle))
        if cycle:
            layer.itself = layer
        del layer
        gc.collect()
        assert log[0] == 20 + 20 * cycle and own_threads.settles(lambda: dispatchers() == before)
    assert [re.search(r"task (\d) failed", record.getMessage())[1] for record in caplog.records] == ["0", "1"]


def interrupt_in(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_interrupt_while_sync_waits(queue):
    """Ctrl-C comes out at once, the task goes on, and the queue works as before."""
    task = SelfTest(queue.pool, sleep_us=800_000)
    for call in (queue.sync, lambda: queue.wait(queue.submitted)):
        queue.submit(task)
        interrupt_in(0.1)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert queue.pending == 1
        queue.sync()
    queue.submit(task)
    queue.sync()
    assert task.runs == 3


def test_other_signals_while_sync_waits(queue):
    """Their handlers run at once, in the main thread, and sync waits on."""
    task, seen = SelfTest(queue.pool, sleep_us=400_000), []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(queue.pending))
    try:
        queue.submit(task)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        queue.sync()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert task.runs == 1 and seen.count(1) >= 2


def test_interrupt_while_submit_waits(queue):
    queue.submit(SelfTest(queue.pool, sleep_us=800_000))
    short = SelfTest(queue.pool)
    interrupt_in(0.3)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(CAPACITY):
            queue.submit(short)
    assert queue.pending == CAPACITY
    queue.sync()
    assert short.runs == CAPACITY - 1


def test_interrupt_while_close_waits():
    queue = make()
    task = SelfTest(queue.pool, sleep_us=1_000_000)
    queue.submit(task)
    interrupt_in(0.1)
    with pytest.raises(KeyboardInterrupt):
        queue.close()
    assert queue.pending == 1 and queue.closed
    queue.close()
    assert task.runs == 1 and queue.pool.closed


def test_dispatcher_is_pinned_named_and_deaf_to_signals():
    """C41: on the pool's first CPU, which the pool leaves to the thread that calls it."""
    before = dispatchers()
    with make(CPUS) as queue:
        [task] = dispatchers() - before
        for _ in range(100):
            queue.submit(SelfTest(queue.pool, loop=50))
        queue.sync()
        status = (task / "status").read_text()
        assert re.search(r"Cpus_allowed_list:\s*(\S+)", status)[1] == str(queue.pool.cpus[0])
        assert int(re.search(r"SigBlk:\s*(\S+)", status)[1], 16) >> (signal.SIGINT - 1) & 1


def test_idle_queue_uses_no_cpu():
    """C43: soon after the last task the dispatcher sleeps: it is not scheduled any more."""
    before = dispatchers()
    with make(CPUS) as queue:
        queue.submit(SelfTest(queue.pool, loop=100))
        queue.sync()
        [task] = dispatchers() - before

        def switches():
            return re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)[1]

        for _ in range(50):  # a busy machine may let it wait before it can go to sleep
            seen = switches()
            time.sleep(0.1)
            if switches() == seen:
                break
        time.sleep(0.3)
        assert switches() == seen


def test_floating_point_mode_of_the_caller_is_not_touched(queue):
    """C25: subnormals stay what they are."""
    for _ in range(10):
        queue.submit(SelfTest(queue.pool, loop=10))
        queue.sync()
    assert 5e-324 * np.float64(1) > 0 and np.float32(1e-45) * np.float32(1) > 0


def test_no_module_claims_to_be_safe_without_the_gil():
    """A free-threaded interpreter turns the GIL on when one of ours is imported, with its own warning."""
    sources = [Path(__file__).parents[1] / "setup.py", *RUNTIME.parent.rglob("*.pyx")]
    assert len(sources) > 5 and not [path for path in sources if "freethreading_compatible" in path.read_text()]


def test_round_trips(queue):
    for times in (queue.round_trips(200), queue.round_trips(5, idle=0.003)):
        submit, start, over = times.T
        assert (submit > 0).all() and (0 < start).all() and (start <= over).all() and (submit <= over).all()
    assert queue.round_trips(0).shape == (0, 3)


def test_no_growth_over_many_submits(queue):
    """Memory stays flat over 1e5 submits, of one task and of new ones, with and without sync between."""
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def life():
        again = SelfTest(queue.pool)
        for i in range(10_000):
            queue.submit(again if i % 2 else SelfTest(queue.pool, log=np.zeros(8, np.int64)))
            if i % 5000 > 2500 and i % 7 == 0:
                queue.sync(1)

    life()
    gc.collect()
    before = resident()
    for _ in range(10):
        life()
    gc.collect()
    assert resident() - before < 4e6


def test_no_growth_over_many_queues():
    def life():
        with make(2) as queue:
            queue.submit(SelfTest(queue.pool, loop=2))

    for _ in range(20):
        life()
    before = len(os.listdir("/proc/self/task")), int(Path("/proc/self/statm").read_text().split()[1])
    for _ in range(200):
        life()
    assert own_threads.settles(lambda: len(os.listdir("/proc/self/task")) <= before[0])
    assert (int(Path("/proc/self/statm").read_text().split()[1]) - before[1]) * os.sysconf("SC_PAGE_SIZE") < 4e6


@pytest.mark.parametrize("threads", [0, -1, 4097, 1 << 40])
def test_threads_out_of_range(threads):
    with pytest.raises(ValueError, match=f"threads must be from 1 to 4096, not {threads}"):
        CPUInfer(threads)


@pytest.mark.parametrize("threads", [2.0, "2", True, [1]])
def test_threads_of_other_types(threads):
    with pytest.raises(TypeError, match="number of threads or a WorkerPoolConfig|threads must be an integer"):
        CPUInfer(threads)


@pytest.mark.parametrize(
    ("error", "message", "attributes"),
    [
        (ValueError, "groups must be from 1 to 4096, not 0", {"subpool_count": 0}),
        (TypeError, "groups must be an integer", {"subpool_count": "2"}),
        (ValueError, "numa_nodes has 1 entries for 2 groups", {"subpool_numa_map": [0]}),
        (ValueError, "there is no node 99", {"subpool_numa_map": [0, 99]}),
        (ValueError, "more than once", {"subpool_numa_map": [0, 0]}),
        (TypeError, "numa_nodes", {"subpool_numa_map": 0}),
        (ValueError, "group_threads has 3 entries for 2 groups", {"subpool_thread_count": [1, 1, 1]}),
        (ValueError, r"group_threads\[1\] must be from 1 to 4096, not 0", {"subpool_thread_count": [1, 0]}),
    ],
)
def test_config_is_checked_when_it_is_used(error, message, attributes):
    """C45, C46: nothing of it is ignored."""
    config = WorkerPoolConfig(2)
    for name, value in attributes.items():
        setattr(config, name, value)
    with pytest.raises(error, match=message):
        CPUInfer(config)


def test_config_splits_the_pool():
    config = WorkerPoolConfig()
    config.subpool_count = 2
    config.subpool_thread_count = [1, 1]
    with make(config) as queue:
        assert queue.pool.groups == 2 and queue.backend_ is queue.pool
        task = SelfTest(queue.pool, loop=20)
        queue.submit(task)
        queue.sync()
        assert task.runs == 1


def test_refused_thread_leaves_nothing_behind():
    """The stack of a thread does not fit the limit: an error, no thread left, and later it works."""
    code = """
import os, resource
from pathlib import Path
from ktcy.runtime.queue import CPUInfer, SelfTest
before = len(os.listdir("/proc/self/task"))
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 20), -1))
try:
    CPUInfer(1)
except OSError as error:
    print(error)
while len(os.listdir("/proc/self/task")) > before:
    pass
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
with CPUInfer(1) as queue:
    queue.submit(SelfTest(queue.pool))
"""
    assert "the system refused a thread for a queue" in python(code)


def test_shared(no_shared):
    """C46: asking for other threads is another CPUInfer, never ignored."""
    one, two = shared(1), shared(2)
    assert shared(1) is one and shared(2) is two and two is not one
    assert (one.threads, two.threads) == (1, 2)
    config = shared(WorkerPoolConfig(1, None, [1]))
    assert shared(WorkerPoolConfig(1, None, (1,))) is config
    with pytest.raises(ValueError, match="from 1 to 4096"):
        shared(0)
    one.close()
    assert shared(1) is not one and not shared(1).closed and shared(2) is two
    for infer in (shared(1), two, config):
        infer.close()


def test_shared_goes_by_where_the_threads_are(no_shared):
    """The same number and places, however they are said; another mask of this thread means other CPUs."""
    with make_shared(3, groups=3) as three, make_shared(1) as one:
        assert make_shared(WorkerPoolConfig(3, None, [1, 1, 1])) is three
        default = max(3, topology.default_threads(topology.here()))
        assert make_shared(WorkerPoolConfig(3)) is make_shared(default, groups=3)
        assert make_shared(topology.default_threads(topology.here())) is make_shared()
        assert (one.pool.groups, three.pool.groups) == (1, 3) and make_shared(1, groups=1) is one
        make_shared().close()
        mask = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {max(mask)})
            with make_shared(1) as last:
                assert last.pool.cpus == (max(mask),) and (last is one) == (one.pool.cpus == (max(mask),))
        finally:
            os.sched_setaffinity(0, mask)
    for options in (dict(groups=2), dict(groups=0), dict(numa_nodes=[0, 999]), dict(group=1)):
        with pytest.raises((ValueError, TypeError)):
            shared(1, **options)


def make_shared(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return shared(*args, **options)


def test_the_machine_is_read_once_for_a_mask(monkeypatch, no_shared):
    reads, read, mask = [], topology.read, os.sched_getaffinity(0)
    monkeypatch.setattr(topology, "read", lambda **options: reads.append(options) or read(**options))
    topology._here.cache_clear()
    try:
        for _ in range(3):
            assert topology.here() == read()
            shared(1), shared()
            Pool(1).close()
        assert reads == [dict(affinity=mask)]
        os.sched_setaffinity(0, {max(mask)})
        for _ in range(3):
            assert topology.here().cpus == (max(mask),)
        assert len(reads) == 1 + (len(mask) > 1)
    finally:
        os.sched_setaffinity(0, mask)
        shared(1).close()


def test_shared_from_many_threads(no_shared):
    found = []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        found.append(shared())

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


FORK = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from ktcy.runtime.queue import CPUInfer, SelfTest, shared
queue = shared(1)
stop = False
def work():
    while not stop:
        queue.submit(SelfTest(queue.pool, sleep_us=50, loop=3))
        queue.sync(2)
workers = [threading.Thread(target=work) for _ in range(2)]
for worker in workers:
    worker.start()
children = []
for i in range(20):
    child = os.fork()
    if child == 0:
        for use in (lambda: queue.submit(SelfTest(queue.pool)), queue.sync, lambda: queue.wait(0), queue.__enter__):
            try:
                use()
            except RuntimeError as error:
                assert "belongs to the parent process" in str(error)
            else:
                os._exit(3)
        if i % 2:
            queue.close()
        own = shared(2 if i % 3 else 1)
        assert own is not queue
        task = SelfTest(own.pool, loop=10)
        for _ in range(20):
            own.submit(task)
        own.sync()
        assert task.runs == 20
        if i % 5 == 4:
            own.submit(SelfTest(own.pool, sleep_us=10_000_000))
            os.kill(os.getpid(), signal.SIGKILL)
        if i % 4 < 2:
            del queue
            sys.exit(7)
        os._exit(7)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stop = True
for worker in workers:
    worker.join()
assert codes == [-9 if i % 5 == 4 else 7 for i in range(20)], codes
queue.sync()
task = SelfTest(queue.pool)
queue.submit(task)
queue.sync()
assert task.runs == 1 and shared(1) is queue
"""


def test_fork():
    """C44: children forked in the middle of tasks get an error, make their own, are killed; the parent goes on."""
    python(FORK)


def test_exit_with_work_in_flight():
    """Tasks queued, running and failed, in globals, in cycles and held by Python threads: no hang, exit code 0."""
    code = """
import contextlib, threading, time
import numpy as np
from ktcy.runtime.queue import CPUInfer, SelfTest, shared
log = np.zeros(1000, np.int64)
for queue in (shared(1), CPUInfer(1)):
    for _ in range(20):
        queue.submit(SelfTest(queue.pool, sleep_us=1000, loop=3, log=log))
queue.submit(SelfTest(queue.pool, status=4, value=6))
cycle = [CPUInfer(1)]
cycle.append(cycle)
cycle[0].submit(SelfTest(cycle[0].pool, sleep_us=20_000, log=np.zeros(100, np.int64)))
def work():
    with contextlib.suppress(RuntimeError):  # closed at exit
        while True:
            queue.submit(SelfTest(queue.pool, sleep_us=10))
def wait():
    with contextlib.suppress(RuntimeError):
        while True:
            queue.sync()
busy = [threading.Thread(target=target, daemon=True) for target in (work, wait)]
"""
    message = r"""a task failed, and no sync\(\) asked for its error: RuntimeError\('task 6 failed with status 4'\)"""
    python(code, errors=message)
    code = code.replace("queue.submit(SelfTest(queue.pool, status=4, value=6))", "")
    python(code + "for thread in busy: thread.start()\ntime.sleep(0.1)\n")


def test_exit_runs_what_was_submitted(tmp_path):
    """Also of a queue that nothing would ever collect."""
    code = """
import ctypes
import numpy as np
from ktcy.runtime.queue import CPUInfer, SelfTest
log = np.memmap("log", np.int64, "w+", shape=100)
queue = CPUInfer(1)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(queue))
for i in range(30):
    queue.submit(SelfTest(queue.pool, sleep_us=10_000, value=i, log=log))
"""
    python(code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(RUNTIME.parents[1])})
    assert entries(np.fromfile(tmp_path / "log", np.int64)) == list(range(30))


def test_exit_after_an_interrupt():
    code = """
import signal, threading, os
from ktcy.runtime.queue import shared, SelfTest
queue = shared(1)
queue.submit(SelfTest(queue.pool, sleep_us=500_000))
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    queue.sync()
except KeyboardInterrupt:
    print("interrupted", queue.pending)
"""
    assert python(code) == "interrupted 1"


class Machine(RuleBasedStateMachine):
    """Submits, waits, errors, close and reopening in another size in any order, against a list."""

    def __init__(self):
        super().__init__()
        self.open(1)

    def open(self, threads):
        self.queue = make(threads)
        self.log = new_log(4096)
        self.tasks = [SelfTest(self.queue.pool, value=i, loop=i, log=self.log) for i in range(3)]
        self.expected, self.unread, self.most = [], [], 0

    def first_error(self, call, must=True):
        """Calls, and checks that the first unread error comes out, or may be only where ``must`` is false."""
        try:
            call()
        except RuntimeError as error:
            assert str(error) == f"task {self.unread[0]} failed with status 1"
            return True
        assert not (must and self.unread)
        return False

    @rule(index=st.integers(0, 2), count=st.integers(1, 40))
    def submit_again(self, index, count):
        for _ in range(count):
            assert self.queue.submit(self.tasks[index]) == len(self.expected) + 1
            self.expected.append(index)

    @rule(value=st.integers(100, 1000), failed=st.booleans(), sleep=st.sampled_from([0, 0, 200]))
    def submit_new(self, value, failed, sleep):
        self.queue.submit(SelfTest(self.queue.pool, value=value, status=failed, sleep_us=sleep, log=self.log))
        self.expected.append(value)
        if failed:
            self.unread.append(value)

    @rule()
    def sync(self):
        self.first_error(self.queue.sync)
        self.unread = []
        assert entries(self.log) == self.expected and self.queue.pending == 0

    @rule(allowed=st.integers(1, 10))
    def sync_some(self, allowed):
        done = max(0, len(self.expected) - allowed)
        if self.first_error(lambda: self.queue.sync(allowed), must=False):
            # Which of the later errors were dropped depends on time: start afresh.
            self.queue.wait(self.queue.submitted)
            try:
                self.queue.sync()
            except RuntimeError as error:
                assert int(str(error).split()[1]) in self.unread[1:]
            self.unread = []
        assert self.log[0] >= done

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def wait(self, data):
        ticket = data.draw(st.integers(1, len(self.expected)))
        self.queue.wait(ticket)
        assert self.log[0] >= ticket

    @rule(threads=st.integers(1, 4), groups=st.none() | st.integers(1, 3))
    def resize(self, threads, groups):
        self.first_error(self.queue.close)
        self.queue.close()
        assert entries(self.log) == self.expected
        for call in (lambda: self.queue.submit(self.tasks[0]), self.queue.sync):
            with pytest.raises(RuntimeError, match="closed"):
                call()
        old = self.tasks[0]
        self.open(threads if groups is None else WorkerPoolConfig(groups))
        assert self.queue.pool.groups == (groups or 1)
        with pytest.raises(ValueError, match="another pool"):
            self.queue.submit(old)

    @invariant()
    def counts(self):
        assert self.queue.submitted == len(self.expected)
        assert 0 <= self.queue.pending <= len(self.expected)
        found = entries(self.log)
        assert found == self.expected[: len(found)]

    def teardown(self):
        self.first_error(self.queue.close)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_stress_under_sanitizers(tmp_path, sanitizer):
    """The C of the queue alone, several producers, under the sanitizers of gcc."""
    program = tmp_path / "queue_stress"
    flags = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, f"-I{RUNTIME}", str(SOURCE), "-o", str(program), "-lpthread"], check=True)
    # Older sanitizers do not start where the system randomizes more than 28 bits of an address.
    fixed = "import ctypes, os, sys; ctypes.CDLL(None).personality(0x40000); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", fixed, program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), done.stderr

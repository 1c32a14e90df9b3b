"""Groups of threads and memory on NUMA nodes: made-up machines with this one's CPU numbers, and logical nodes."""

import ctypes
import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcy.runtime import Pool, memory, memory_report, topology
from ktcy.runtime.topology import default_threads, place, read
from test_topology import FS, GIB, V1, V2, cores, nodes, tree

MACHINE = dataclasses.replace(topology.read(), quota=None)
CPUS = len(MACHINE.cpus)


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv("KTCY_THREADS", raising=False)


@pytest.fixture(scope="module")
def sockets(tmp_path_factory):
    """Two sockets of four cores with two threads each; the siblings are numbered last."""
    files = cores(*[(c, c + 8) for c in range(4)]) | cores(*[(c, c + 8) for c in range(4, 8)], package=1)
    return read(tree(tmp_path_factory.mktemp("sockets"), files | nodes(n0="0-3,8-11", n1="4-7,12-15")), range(16))


@pytest.fixture
def two_nodes(tmp_path):
    """Two nodes, both on the CPUs that this machine really has: four threads on each CPU."""
    machine = read(tree(tmp_path, nodes(n0="0", n3="0")), MACHINE.cpus)
    twice = MACHINE.cpus * 4
    return dataclasses.replace(machine, cpus=twice, nodes={0: MACHINE.cpus, 3: MACHINE.cpus})


def quiet(*args, **options):
    """A pool on nodes that the kernel may not know, or with more groups than CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return Pool(*args, **options)


def groups_of(*args, **options):
    return place(*args, **options)[2]


def test_one_group_by_default(sockets):
    assert groups_of(sockets) == [(None, tuple(range(8)))]
    assert groups_of(sockets, 3) == [(None, (0, 1, 2))]
    assert groups_of(sockets, groups=1) == groups_of(sockets)


def test_one_group_a_node(sockets):
    """C46: in each node physical cores come before SMT siblings."""
    assert groups_of(sockets, groups=2) == [(0, (0, 1, 2, 3)), (1, (4, 5, 6, 7))]
    assert groups_of(sockets, 11, 2) == [(0, (0, 1, 2, 3, 8, 9)), (1, (4, 5, 6, 7, 12))]
    assert groups_of(sockets, 3, 2) == [(0, (0, 1)), (1, (4,))]


def test_nodes_as_named(sockets):
    """C45: which nodes, and in which order; the default number of threads is theirs."""
    assert groups_of(sockets, numa_nodes=[1]) == [(1, (4, 5, 6, 7))]
    assert groups_of(sockets, 2, numa_nodes=(1, 0)) == [(1, (4,)), (0, (0,))]
    assert groups_of(sockets, 3, numa_nodes=np.array([1, 0])) == [(1, (4, 5)), (0, (0,))]


def test_more_groups_than_nodes(sockets):
    """C40: the number of groups does not depend on that of nodes; a logical group stays in a node where it can."""
    assert groups_of(sockets, groups=4) == [(None, (c, c + 1)) for c in (0, 2, 4, 6)]
    assert groups_of(sockets, 8, 3) == [(None, (0, 1, 2)), (None, (3, 4, 5)), (None, (6, 7))]


def test_logical_groups_keep_to_a_node_however_cpus_are_numbered(tmp_path):
    machine = read(tree(tmp_path, cores((0,), (1,), (2,), (3,)) | nodes(n0="0,2", n1="1,3")), range(4))
    assert groups_of(machine, 4, 4) == [(None, (c,)) for c in (0, 2, 1, 3)]
    assert groups_of(machine, 4, 2) == [(0, (0, 2)), (1, (1, 3))]


def test_sub_numa_clusters_and_gaps(tmp_path):
    """C40: four nodes of two sockets, numbers with gaps, one node of memory only, one whose CPUs are not allowed."""
    files = cores(*[(c,) for c in range(8)]) | nodes(n0="0-1", n2="2-3", n5="4-5", n6="6-7", n9="")
    machine = read(tree(tmp_path, files), range(6))
    assert groups_of(machine, groups=3) == [(0, (0, 1)), (2, (2, 3)), (5, (4, 5))]
    assert groups_of(machine, numa_nodes=[5, 0]) == [(5, (4, 5)), (0, (0, 1))]
    there = r"the nodes are 0 \(2 CPUs\), 2 \(2 CPUs\), 5 \(2 CPUs\)$"
    for node in (6, 9, 1, -1, 1 << 70):
        with pytest.raises(ValueError, match=f"there is no node {node} with usable CPUs; {there}"):
            place(machine, numa_nodes=[0, node])


def test_uneven_nodes_are_filled(tmp_path):
    """What does not fit into a small node goes to the others."""
    machine = read(tree(tmp_path, cores(*[(c,) for c in range(10)]) | nodes(n0="0-1", n1="2-9")), range(10))
    assert [len(cpus) for _, cpus in groups_of(machine, 10, 2)] == [2, 8]
    assert [len(cpus) for _, cpus in groups_of(machine, 6, 2)] == [2, 4]
    asked, usable, placed = place(machine, 12, 2)
    assert (asked, usable) == (12, 10) and [len(cpus) for _, cpus in placed] == [2, 8]


def test_hybrid_cores_in_a_node(tmp_path):
    """C10: the default counts performance cores of the nodes in use."""
    files = cores((0, 1), (2, 3), (4,), (5,)) | nodes(n0="0-3", n1="4-5") | {"sys/devices/cpu_atom/cpus": "4-5"}
    machine = read(tree(tmp_path, files), range(6))
    assert groups_of(machine, groups=2) == [(0, (0,)), (1, (4,))]
    assert groups_of(machine, numa_nodes=[1]) == [(1, (4, 5))]
    assert groups_of(machine) == [(None, (0, 2))]


def test_threads_of_each_group(sockets):
    assert groups_of(sockets, group_threads=[3, 1]) == [(0, (0, 1, 2)), (1, (4,))]
    assert groups_of(sockets, 4, numa_nodes=[1, 0], group_threads=[3, 1]) == [(1, (4, 5, 6)), (0, (0,))]
    assert groups_of(sockets, groups=3, group_threads=[1, 4, 2]) == [(None, (0,)), (None, (1, 2, 3, 4)), (None, (5, 6))]


def test_quota_and_groups(tmp_path):
    """C42: a group needs a thread, whatever the quota."""
    files = cores((0,), (1,), (2,), (3,)) | V2 | {f"{FS}/a.slice/b/cpu.max": "150000 100000"}
    machine = read(tree(tmp_path, files), range(4))
    assert default_threads(machine) == 1
    assert [len(cpus) for _, cpus in groups_of(machine)] == [1]
    assert [len(cpus) for _, cpus in groups_of(machine, groups=2)] == [1, 1]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(groups=0), "groups must be from 1 to 4096, not 0"),
        (dict(groups=-2), "groups must be from 1 to 4096, not -2"),
        (dict(groups=2, numa_nodes=[0]), "numa_nodes has 1 entries for 2 groups"),
        (dict(groups=1, numa_nodes=[0, 1]), "numa_nodes has 2 entries for 1 groups"),
        (dict(numa_nodes=[]), "the number of groups must be from 1 to 4096, not 0"),
        (dict(numa_nodes=[1, 1]), r"numa_nodes names node 1 more than once: \[1, 1\]"),
        (dict(numa_nodes=[0, 7]), r"no node 7 with usable CPUs; the nodes are 0 \(8 CPUs\), 1 \(8 CPUs\)"),
        (dict(threads=1, groups=2), "1 threads for 2 groups: every group needs at least one"),
        (dict(group_threads=[2, 0]), r"group_threads\[1\] must be from 1 to 4096, not 0"),
        (dict(groups=3, group_threads=[2, 2]), "group_threads has 2 entries for 3 groups"),
        (dict(numa_nodes=[0], group_threads=[2, 2]), "group_threads has 2 entries for 1 groups"),
        (dict(threads=3, group_threads=[2, 2]), "threads is 3, but group_threads add up to 4"),
        (dict(group_threads=[4096, 1]), "the sum of group_threads must be from 1 to 4096, not 4097"),
    ],
)
def test_bad_values(sockets, options, message):
    """C40 C45: counts and nodes that do not fit are refused, with what there is."""
    with pytest.raises(ValueError, match=message):
        Pool(topology=sockets, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(groups="2"), dict(groups=2.0), dict(groups=True), dict(numa_nodes=0), dict(numa_nodes="01"),
        dict(numa_nodes=[0.0]), dict(numa_nodes=[False, True]), dict(numa_nodes=["0"]), dict(group_threads=4),
        dict(group_threads=[1, 2.0]),
    ],
)
def test_bad_types(sockets, options):
    with pytest.raises(TypeError, match=f"{next(iter(options))}.* must be an? (integer|list of integers), not"):
        Pool(topology=sockets, **options)


@given(st.data())
def test_placing_keeps_its_promises(data):
    """Every group has a thread, on its own node; no CPU has two threads unless there are more groups than CPUs."""
    order = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=24, unique=True))
    node_of = {cpu: data.draw(st.sampled_from([0, 1, 4])) for cpu in order}
    machine = dataclasses.replace(
        MACHINE, cpus=tuple(order), core_of={cpu: cpu // 2 for cpu in order}, slow=frozenset(),
        nodes={n: tuple(c for c in sorted(order) if node_of[c] == n) for n in (0, 1, 4)},
    )
    real = [n for n, cpus in machine.nodes.items() if cpus]
    groups = data.draw(st.integers(1, 6))
    threads = data.draw(st.none() | st.integers(groups, 40))
    named = data.draw(st.none() | st.permutations(real).map(lambda p: p[:groups]))
    if named is not None:
        groups = len(named)
    asked, usable, placed = place(machine, threads, groups, named)
    used = [cpu for _, cpus in placed for cpu in cpus]
    assert len(placed) == groups and all(cpus for _, cpus in placed)
    assert named is None or [node for node, _ in placed] == list(named)
    assert all(node is None or node_of[cpu] == node for node, cpus in placed for cpu in cpus)
    assert set(used) <= set(order)
    assert len(used) == max(groups, min(asked, usable))
    assert len(set(used)) == len(used) or groups > len(order)
    if placed[0][0] is None and threads is not None:
        sizes = [len(cpus) for _, cpus in placed]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("shape", [[1, 1], [3, 1], [1, 4], [1, 1, 1], [2, 5, 1], [1] * 8])
def test_tasks_stay_in_their_group(shape):
    """Uneven groups, with and without tasks for each, and flat loops over all of them."""
    crowded = dataclasses.replace(MACHINE, cpus=MACHINE.cpus * 8)
    rng = np.random.default_rng(len(shape))
    with quiet(topology=crowded, group_threads=shape) as pool:
        assert (pool.groups, pool.group_threads) == (len(shape), tuple(shape))
        assert pool.threads == sum(shape) == len(pool.cpus)
        for _ in range(300):
            counts = rng.integers(0, 30, len(shape)) * rng.integers(0, 2, len(shape))
            assert all((ran == 1).all() for ran in pool.selftest_groups(counts))
            n = int(rng.integers(0, 100))
            assert (pool.selftest(n) == 1).all()
        assert (pool.round_trips(20) > 0).all()
        pool.reserve(1)
    with pytest.raises(RuntimeError, match="this pool is closed"):
        pool.selftest_groups([0] * len(shape))


def test_flat_loops_are_split_by_threads():
    """Of 40 tasks for 1 + 3 threads, the group of 3 runs 30; nothing is taken from another group."""
    crowded = dataclasses.replace(MACHINE, cpus=MACHINE.cpus * 4)
    with quiet(topology=crowded, group_threads=[1, 3]) as pool:
        for _ in range(50):
            pool.selftest(40)
        assert pool.counters()["worker_tasks"] == 50 * 30


def test_made_up_second_node(two_nodes):
    """A machine with node 3, on CPUs that exist: groups, memory and report work, wherever the memory lies."""
    with quiet(5, two_nodes, groups=2) as pool:
        assert pool.group_nodes == (0, 3) and pool.group_threads == (3, 2)
        assert repr(pool) == "<Pool of 5 threads in 2 groups>"
        assert all((ran == 1).all() for ran in pool.selftest_groups([50, 70]))
        for group in range(2):
            assert pool.selftest_memory(group, 3).shape == (3,)
        before = memory_report()["node_bytes"]
        pool.reserve(3 << 20)
        report = memory_report()
        [entry] = [e for e in report["pools"] if e["group_nodes"] == (0, 3)]
        assert entry["group_bytes"] == (0, 0) and entry["scratch_bytes"] == (4 << 20, 4 << 20)
        assert entry["threads"] == 5 and pool.scratch_bytes == 8 << 20
        assert [report["node_bytes"][node] - before[node] for node in (0, 3)] == [4 << 20, 4 << 20]


def mbind_works(node):
    libc = ctypes.CDLL(None, use_errno=True)
    page = (ctypes.c_char * 8192)()
    mask = (ctypes.c_ulong * 16)(1 << node)
    base = ctypes.addressof(page) + 4095 & ~4095
    return libc.syscall(237, ctypes.c_void_p(base), ctypes.c_ulong(4096), 1, mask, ctypes.c_ulong(1025), 0) == 0


def test_placement_is_what_the_kernel_says():
    """C39: where binding works, memory lies on its node and the report says so; where not, neither."""
    for node in (n for n, cpus in MACHINE.nodes.items() if cpus and MACHINE.node_memory.get(n)):
        with quiet(1, MACHINE, numa_nodes=[node]) as pool:
            assert pool.placement_enforced == mbind_works(node)
            assert set(pool.cpus) <= set(MACHINE.nodes[node])
            if pool.placement_enforced:
                assert set(pool.selftest_memory(0, 4).tolist()) <= {node, -1}
                before = bound_to(node)
                pool.reserve(1)
                assert bound_to(node) - before == NUMA_MAPS.exists()


NUMA_MAPS = Path("/proc/self/numa_maps")


def bound_to(node):
    """Mappings of this process that are bound to the node; 0 where the kernel does not list them."""
    lines = NUMA_MAPS.read_text().splitlines() if NUMA_MAPS.exists() else []
    return sum(line.split()[1] == f"prefer:{node}" for line in lines)


REFUSED = """
import ctypes, dataclasses, sys, warnings
import ktcy
from ktcy.runtime import Pool, memory_report, topology
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]
rules = (Filter * 6)(
    (0x20, 0, 0, 0),  # the number of the call: set_mempolicy, mbind, get_mempolicy and move_pages are refused
    (0x15, 3, 0, 237), (0x15, 2, 0, 238), (0x15, 1, 0, 239),
    (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001),
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(6, rules)), 0, 0) == 0, ctypes.get_errno()
cpu = topology.read().cpus[0]
machine = dataclasses.replace(topology.read(), quota=None, nodes={0: (cpu,)}, node_memory={0: 1 << 30})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pools = [Pool(1, machine, numa_nodes=[0]) for _ in range(3)]
    for pool in pools:
        assert not pool.placement_enforced
        assert pool.selftest_memory(0, 2).tolist() == [-1, -1]
        pool.reserve(1)
        assert pool.scratch_bytes == 2 << 20 and (pool.selftest(100) == 1).all()
    assert memory_report()["placement_enforced"] is False
    assert ktcy.show_config()["numa_placement"].startswith("refused by the system")
print(*(str(w.message) for w in caught), sep="\\n")
"""


def test_refused_memory_policy():
    """C39: a seccomp filter as of a container: all works, one warning a process, and the report does not lie."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.startswith("memory cannot be bound to NUMA nodes: Operation not permitted; it will lie where")


def test_node_without_memory(tmp_path):
    """C40: nothing is bound to a node that has no memory, so nothing fails and nothing is claimed."""
    machine = dataclasses.replace(MACHINE, nodes={5: MACHINE.cpus}, node_memory={0: GIB})
    with Pool(1, machine, numa_nodes=[5]) as pool:
        assert pool.group_nodes == (5,) and pool.placement_enforced is None
        assert pool.selftest_memory(0, 1).shape == (1,)


def test_groups_of_a_forked_child():
    """C44: also with groups."""
    with quiet(3, MACHINE, groups=3) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            try:
                pool.selftest_groups([1, 1, 1])
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert all((ran == 1).all() for ran in pool.selftest_groups([1, 1, 1]))


def test_counters():
    with quiet(3, MACHINE, groups=3) as pool:
        pool.selftest(0)
        pool.selftest(1)
        pool.selftest(30)
        pool.selftest_groups([1, 2, 3])
        counted = pool.counters()
        assert (counted["runs"], counted["tasks"], counted["worker_tasks"]) == (4, 37, 25)
        assert counted["steals"] == 0  # with one thread a group every share is its own
        pool.reset_counters()
        assert set(pool.counters().values()) == {0}
        pool.round_trips(3, 0.01, tasks=30, loads=1000)
        counted = pool.counters()
        assert (counted["runs"], counted["tasks"], counted["worker_tasks"]) == (3, 90, 60)
        assert counted["wake_ups"] >= 1 and counted["sleeps"] >= 1
    assert pool.counters()["runs"] == 3  # still told after close


def test_steals_are_tasks_beyond_an_even_share():
    """Two threads, two tasks: a steal for each loop that one thread ran alone."""
    with quiet(topology=dataclasses.replace(MACHINE, cpus=MACHINE.cpus[:1] * 2), threads=2) as pool:
        pool.round_trips(50, tasks=2, loads=10)
        counted = pool.counters()
        # Loops of the caller alone less those of the worker alone, and their sum.
        difference = 50 - counted["worker_tasks"]
        assert abs(difference) <= counted["steals"] <= 50 and (counted["steals"] - difference) % 2 == 0


def test_memory_report():
    before = memory_report()
    with quiet(1, MACHINE) as pool:
        pool.reserve(3 << 20)
        now = memory_report()
        assert now["scratch_bytes"] - before["scratch_bytes"] == 4 << 20
        assert len(now["pools"]) == len(before["pools"]) + 1
        assert now["available_bytes"] > 0
        assert pool.placement_enforced is None  # nothing is claimed where there is nothing to bind
        assert now["huge_pages"] in ("always", "madvise", "never", "unknown")
    assert memory_report()["scratch_bytes"] == before["scratch_bytes"]


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:   {20 * GIB // 1024} kB"}


@pytest.mark.parametrize(
    "files, there",
    [
        ({}, None),
        (MEMINFO, 20 * GIB),
        (MEMINFO | V2 | {f"{FS}/a.slice/b/memory.max": "max"}, 20 * GIB),
        (
            MEMINFO
            | V2
            | {f"{FS}/a.slice/memory.max": str(8 * GIB), f"{FS}/a.slice/memory.current": str(5 * GIB)}
            | {f"{FS}/a.slice/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 3"},
            4 * GIB,
        ),
        (
            V1
            | {f"{FS}/memory/memory.limit_in_bytes": str(8 * GIB), f"{FS}/memory/memory.usage_in_bytes": str(9 * GIB)},
            0,
        ),
        (
            V1
            | {f"{FS}/memory/memory.limit_in_bytes": str(8 * GIB), f"{FS}/memory/memory.usage_in_bytes": str(6 * GIB)}
            | {f"{FS}/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}"},
            4 * GIB,
        ),
    ],
)
def test_available_memory(tmp_path, files, there):
    """C64: within the cgroup's limit, whose file cache can be dropped."""
    assert memory.available(tree(tmp_path, files)) == there


def test_need_is_compared_with_what_is_available(tmp_path):
    """C64: an error with figures before anything is taken, not a kill in the middle."""
    limit = {f"{FS}/a.slice/b/memory.max": str(8 * GIB), f"{FS}/a.slice/b/memory.current": str(5 * GIB)}
    tree(tmp_path, MEMINFO | V2 | limit)
    memory.require(3 * GIB, "a copy", tmp_path)
    message = r"^a copy needs 3\.50 GiB of memory; 3\.00 GiB is available, within the cgroup's limit of 8\.00 GiB$"
    with pytest.raises(MemoryError, match=message):
        memory.require(7 * GIB // 2, "a copy", tmp_path)
    memory.require(1 << 60, "a copy", tmp_path / "no such machine")

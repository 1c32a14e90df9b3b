"""The topology of made-up machines, each a small tree of files."""

import os

import pytest

from ktcy.runtime import topology
from ktcy.runtime.topology import checked_threads, default_threads, read

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv("KTCY_THREADS", raising=False)


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cores(*groups, package=0, name="core_cpus_list"):
    """Files of physical cores, each given by its CPUs."""
    files = {}
    for group in groups:
        for cpu in group:
            files[f"{CPU}/cpu{cpu}/topology/{name}"] = ",".join(map(str, group))
            files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = str(package)
    return files


def nodes(**cpus):
    """Files of NUMA nodes: n0="0-3" and so on, each with 64 GiB."""
    files = {}
    for name, listed in cpus.items():
        number = name[1:]
        files[f"{NODE}/node{number}/cpulist"] = listed
        files[f"{NODE}/node{number}/meminfo"] = f"Node {number} MemTotal:       {64 * GIB // 1024} kB"
    return files


def test_siblings_come_after_all_cores(tmp_path):
    """C46: physical cores are filled before SMT siblings, whatever the numbering."""
    machine = read(tree(tmp_path, cores((0, 1), (2, 3), (4, 5), (6, 7))), range(8))
    assert machine.cpus == (0, 2, 4, 6, 1, 3, 5, 7)
    assert machine.cores == machine.performance_cores == 4
    assert default_threads(machine) == 4


def test_siblings_numbered_after_the_cores(tmp_path):
    """C46: the other usual numbering, and the file name of older kernels."""
    machine = read(tree(tmp_path, cores((0, 4), (1, 5), (2, 6), (3, 7), name="thread_siblings_list")), range(8))
    assert machine.cpus == (0, 1, 2, 3, 4, 5, 6, 7)
    assert machine.cores == 4


def test_siblings_that_a_virtual_machine_hides(tmp_path):
    """C46: neighbours may share a core, so few threads go to every second CPU, on each node."""
    machine = read(tree(tmp_path, cores(*[(cpu,) for cpu in range(8)]) | nodes(n0="0-3", n1="4-7")), range(8))
    assert machine.cpus == (0, 2, 4, 6, 1, 3, 5, 7)
    assert machine.on([1]).cpus == (4, 6, 5, 7)
    assert machine.cores == default_threads(machine) == 8


def test_two_sockets(tmp_path):
    files = cores((0, 4), (1, 5)) | cores((2, 6), (3, 7), package=1) | nodes(n0="0-1,4-5", n1="2-3,6-7")
    machine = read(tree(tmp_path, files), range(8))
    assert machine.nodes == {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}
    assert machine.packages == {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}
    assert machine.node_memory == {0: 64 * GIB, 1: 64 * GIB}
    assert machine.cpus[:4] == (0, 1, 2, 3)


def test_four_sockets_with_sub_numa_clustering(tmp_path):
    """Two nodes a socket and SMT siblings: a pool a node takes the cores of all eight, in order."""
    files = {}
    for package in range(4):
        first = 4 * package
        files |= cores(*((cpu, cpu + 16) for cpu in range(first, first + 4)), package=package)
    files |= nodes(**{f"n{n}": f"{2 * n}-{2 * n + 1},{2 * n + 16}-{2 * n + 17}" for n in range(8)})
    machine = read(tree(tmp_path, files), range(32))
    assert machine.nodes == {n: (2 * n, 2 * n + 1, 2 * n + 16, 2 * n + 17) for n in range(8)}
    assert {package: len(cpus) for package, cpus in machine.packages.items()} == {0: 8, 1: 8, 2: 8, 3: 8}
    assert machine.cores == 16 and machine.cpus == tuple(range(32)) and default_threads(machine) == 16


def test_hybrid_counts_performance_cores(tmp_path):
    """C10: one thread per physical P core; E cores come next, the siblings of P cores last."""
    files = cores((0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,))
    files |= {"sys/devices/cpu_core/cpus": "0-7", "sys/devices/cpu_atom/cpus": "8-11"}
    machine = read(tree(tmp_path, files), range(12))
    assert machine.cpus == (0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7)
    assert (machine.cores, machine.performance_cores) == (8, 4)
    assert default_threads(machine) == 4


def test_only_efficiency_cores_allowed(tmp_path):
    """C10: E cores count when they are all there is."""
    files = cores((0, 1), (8,), (9,)) | {"sys/devices/cpu_core/cpus": "0-1", "sys/devices/cpu_atom/cpus": "8-9"}
    machine = read(tree(tmp_path, files), {8, 9})
    assert (machine.cores, machine.performance_cores) == (2, 2)
    assert default_threads(machine) == 2


def test_mask_without_cpu_0(tmp_path):
    """C41: the mask cuts everything down, also where lxcfs shows other CPUs as online."""
    files = cores(*[(cpu,) for cpu in range(8)]) | nodes(n0="0-3", n1="4-7") | {f"{CPU}/online": "0-1"}
    machine = read(tree(tmp_path, files), {6, 7})
    assert machine.cpus == (6, 7)
    assert machine.nodes == {0: (), 1: (6, 7)}
    assert machine.packages == {0: (6, 7)}
    assert default_threads(machine) == 2


def test_mask_with_one_sibling_of_a_core(tmp_path):
    """C41: two siblings in the mask are one core, one sibling alone is one core too."""
    machine = read(tree(tmp_path, cores((0, 4), (1, 5), (2, 6))), {4, 1, 5})
    assert machine.cpus == (1, 4, 5)
    assert machine.cores == 2


def test_sparse_and_memoryless_nodes(tmp_path):
    """C40: node numbers with gaps, a node of CPUs only and a node of memory only."""
    files = cores((0,), (1,)) | nodes(n1="0", n8="") | {f"{NODE}/node5/cpulist": "1", f"{NODE}/online": "1,5,8"}
    machine = read(tree(tmp_path, files), {0, 1})
    assert machine.nodes == {1: (0,), 5: (1,), 8: ()}
    assert machine.node_memory == {1: 64 * GIB, 8: 64 * GIB}


def test_offline_cpus_are_not_used(tmp_path):
    files = cores((0,), (1,), (3,)) | {f"{CPU}/cpu2/online": "0", f"{CPU}/cpu3/online": "1"}
    assert read(tree(tmp_path, files), range(4)).cpus == (0, 1, 3)
    with pytest.raises(ValueError, match=r"no CPU of the affinity mask \[2\] is online"):
        read(tmp_path, {2})


def test_no_sys_at_all(tmp_path):
    machine = read(tmp_path, {3, 5})
    assert machine.cpus == (3, 5)
    assert machine.cores == machine.performance_cores == 2
    assert machine.nodes == {0: (3, 5)}
    assert (machine.quota, machine.node_memory, machine.memory_limit) == (None, {}, None)
    assert default_threads(machine) == 2


def test_unreadable_numbers_do_not_matter(tmp_path):
    files = {f"{CPU}/cpu0/topology/core_cpus_list": "", f"{CPU}/cpu0/topology/physical_package_id": "-1"}
    machine = read(tree(tmp_path, files), {0})
    assert machine.cpus == (0,)
    assert machine.packages == {-1: (0,)}


V2 = {"proc/self/cgroup": "0::/a.slice/b"}
V1 = {"proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/"}
FS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    "files, quota",
    [
        (V2 | {f"{FS}/a.slice/b/cpu.max": "150000 100000"}, 1.5),
        (V2 | {f"{FS}/a.slice/b/cpu.max": "max 100000"}, None),
        (V2 | {f"{FS}/a.slice/b/cpu.max": "max 100000", f"{FS}/a.slice/cpu.max": "400000 200000"}, 2.0),
        (V2 | {f"{FS}/a.slice/b/cpu.max": "300000 100000", f"{FS}/cpu.max": "250000 100000"}, 2.5),
        (V2 | {f"{FS}/other/cpu.max": "100000 100000"}, None),
        ({"proc/self/cgroup": "0::/../../x", f"{FS}/cpu.max": "300000 100000"}, 3.0),
        ({"proc/self/cgroup": "0::/x", f"{FS}/unified/x/cpu.max": "300000 100000"}, 3.0),
        (V1 | {f"{FS}/cpu,cpuacct/cpu.cfs_quota_us": "200000", f"{FS}/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.0),
        (
            V1
            | {f"{FS}/cpu/docker/x/cpu.cfs_quota_us": "-1", f"{FS}/cpu/docker/x/cpu.cfs_period_us": "100000"}
            | {f"{FS}/cpu/docker/cpu.cfs_quota_us": "50000", f"{FS}/cpu/docker/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        (V1, None),
    ],
)
def test_quota(tmp_path, files, quota):
    """C42: cgroup v1 and v2, parents included; inside a container the own group is the mount point."""
    machine = read(tree(tmp_path, files), range(16))
    assert machine.quota == quota
    assert default_threads(machine) == (16 if quota is None else max(1, int(quota)))


@pytest.mark.parametrize(
    "files, limit",
    [
        (V2 | {f"{FS}/a.slice/b/memory.max": "max", f"{FS}/a.slice/memory.max": str(3 * GIB)}, 3 * GIB),
        (V1 | {f"{FS}/memory/memory.limit_in_bytes": str(5 * GIB)}, 5 * GIB),
        (V1 | {f"{FS}/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (V2, None),
    ],
)
def test_memory_limit(tmp_path, files, limit):
    assert read(tree(tmp_path, files), {0}).memory_limit == limit


def test_ktcy_threads(tmp_path, monkeypatch):
    machine = read(tmp_path, range(4))
    monkeypatch.setenv("KTCY_THREADS", "7")
    assert default_threads(machine) == 7
    for text in ("", "all", "0", "-1", "4097", "2.0", "1e3", "\u0663"):
        monkeypatch.setenv("KTCY_THREADS", text)
        with pytest.raises(ValueError, match="KTCY_THREADS must be .*4096, not"):
            default_threads(machine)


@pytest.mark.parametrize("bad", [True, 2.0, "2", None, [2]])
def test_threads_of_other_types(bad):
    with pytest.raises(TypeError, match="threads must be an integer, not"):
        checked_threads(bad)


def test_this_machine():
    """The real files: all CPUs of the mask, each once, and no other."""
    machine = topology.read()
    assert sorted(machine.cpus) == sorted(os.sched_getaffinity(0))
    assert 1 <= machine.performance_cores <= machine.cores <= len(machine.cpus)
    assert sorted(cpu for cpus in machine.packages.values() for cpu in cpus) == sorted(machine.cpus)

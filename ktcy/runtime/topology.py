"""Which CPUs this process may use, how they belong together, and how much of them and of memory it gets.

``read`` is a function of a directory root and an affinity mask and nothing else, so made-up machines are as good
as real ones. Whatever the system does not tell (no /sys in a sandbox, no cgroups) is left out, never guessed.
``place`` decides which threads of a pool belong where, and is as pure.
"""

import functools
import heapq
import math
import operator
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

MAX_THREADS = 4096


@dataclass(frozen=True)
class Topology:
    """The part of a machine that a process may use.

    Attributes
    ----------
    cpus : tuple of int
        Usable CPUs in the order to fill them: one of each physical core, performance cores before efficiency
        cores, then the SMT siblings in the same order. Where no CPU has a sibling, even numbers come first: virtual
        machines often hide that 2n and 2n + 1 share a core.
    core_of : dict of int to int
        Physical core of each of them, by the core's first CPU, which need not be usable.
    slow : frozenset of int
        Those on efficiency cores.
    nodes, packages : dict of int to tuple of int
        Usable CPUs of each NUMA node (none for a node of memory only) and of each package.
    quota : float or None
        CPUs that the cgroups grant, parents included; None without a limit.
    node_memory : dict of int to int
        Bytes of each NUMA node.
    memory_limit : int or None
        Bytes that the cgroups grant, parents included; None without a limit.
    """

    cpus: tuple
    core_of: dict
    slow: frozenset
    nodes: dict
    packages: dict
    quota: float | None
    node_memory: dict
    memory_limit: int | None

    @property
    def cores(self):
        """Number of physical cores."""
        return len({self.core_of[cpu] for cpu in self.cpus})

    @property
    def performance_cores(self):
        """Number of physical cores without the efficiency cores, unless there are no others."""
        return len({self.core_of[cpu] for cpu in self.cpus if cpu not in self.slow}) or self.cores

    def on(self, nodes):
        """The same machine with the CPUs of some nodes only, in the order of ``cpus``."""
        local = {cpu for node in nodes for cpu in self.nodes[node]}
        return replace(self, cpus=tuple(cpu for cpu in self.cpus if cpu in local))


def read(root="/", affinity=None):
    """The topology under ``root``, cut down to an affinity mask.

    Parameters
    ----------
    root : path
        Directory with ``sys`` and ``proc``.
    affinity : iterable of int, optional
        CPUs allowed; by default those of this process.

    Raises
    ------
    ValueError
        When no CPU of ``affinity`` is online.
    """
    root = Path(root)
    cpu_dir, node_dir = root / "sys/devices/system/cpu", root / "sys/devices/system/node"
    allowed = sorted(os.sched_getaffinity(0) if affinity is None else set(affinity))
    # Not cpu_dir/online: lxcfs replaces it by numbers that do not match the mask.
    mask = [cpu for cpu in allowed if _text(cpu_dir / f"cpu{cpu}/online") != "0"]
    if not mask:
        raise ValueError(f"no CPU of the affinity mask {allowed} is online")

    core, package, hidden = {}, {}, True
    for cpu in mask:
        where = cpu_dir / f"cpu{cpu}/topology"
        siblings = _cpu_list(where / "core_cpus_list") or _cpu_list(where / "thread_siblings_list")
        core[cpu] = min(siblings, default=cpu)
        hidden = hidden and len(siblings) < 2
        package[cpu] = int(_text(where / "physical_package_id") or 0)
    slow = _cpu_list(root / "sys/devices/cpu_atom/cpus")
    siblings_before, count = {}, {}
    for cpu in mask:
        siblings_before[cpu] = count.get(core[cpu], 0)
        count[core[cpu]] = siblings_before[cpu] + 1

    nodes, node_memory = {}, {}
    for node in sorted(int(p.name[4:]) for p in node_dir.glob("node*") if p.name[4:].isdecimal()):
        local = _cpu_list(node_dir / f"node{node}/cpulist")
        nodes[node] = tuple(cpu for cpu in mask if cpu in local)
        total = re.search(r"MemTotal:\s*(\d+) kB", _text(node_dir / f"node{node}/meminfo"))
        if total:
            node_memory[node] = int(total[1]) * 1024
    if not any(nodes.values()):
        nodes = {0: tuple(mask)}
    return Topology(
        cpus=tuple(sorted(mask, key=lambda cpu: (siblings_before[cpu], cpu in slow, hidden and cpu % 2, cpu))),
        core_of=core,
        slow=frozenset(slow.intersection(mask)),
        nodes=nodes,
        packages={p: tuple(cpu for cpu in mask if package[cpu] == p) for p in sorted(set(package.values()))},
        quota=min(_quotas(root), default=None),
        node_memory=node_memory,
        memory_limit=min((limit for limit, _ in _memory_cgroups(root)), default=None),
    )


def here():
    """This machine for the calling thread: read once for each affinity mask that it comes with."""
    return _here(frozenset(os.sched_getaffinity(0)))


@functools.lru_cache(maxsize=8)
def _here(affinity):
    return read(affinity=affinity)


def default_threads(topology):
    """Number of threads to use: ``KTCY_THREADS``, else one for each performance core, within the cgroup's quota.

    Raises
    ------
    ValueError
        When ``KTCY_THREADS`` is not an integer from 1 to 4096.
    """
    text = os.environ.get("KTCY_THREADS")
    if text is None:
        return max(1, min(topology.performance_cores, math.floor(topology.quota or MAX_THREADS)))
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError(f"KTCY_THREADS must be an integer from 1 to {MAX_THREADS}, not {text!r}")
    return checked_threads(int(text), "KTCY_THREADS")


def checked_threads(threads, name="threads"):
    """``threads`` as an int in [1, 4096].

    Raises
    ------
    TypeError, ValueError
        Naming what was given.
    """
    number = _integer(threads, name)
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"{name} must be from 1 to {MAX_THREADS}, not {number}")
    return number


def place(topology, threads=None, groups=None, numa_nodes=None, group_threads=None):
    """Where the threads of a pool go: groups, one a NUMA node, and a CPU for each thread.

    Every group gets an even share of the threads, the first ones one more; what does not fit into a node goes to
    the others. More threads than CPUs would only wait for each other, so no more are used, except that every group
    has one.

    Parameters
    ----------
    topology : Topology
    threads : int, optional
        In all; by default ``default_threads`` of the nodes in use, at least one a group.
    groups : int, optional
        By default as many as the lists below have, else 1. With n > 1 and at least n nodes that have CPUs, the first n
        of these; otherwise all CPUs are cut into n logical nodes.
    numa_nodes : sequence of int, optional
        The node of each group.
    group_threads : sequence of int, optional
        Threads of each group, instead of ``threads``.

    Returns
    -------
    asked : int
        Number of threads asked for.
    usable : int
        Number of CPUs there are for them.
    placed : list of (int or None, tuple of int)
        For each group its node, None for a logical one, and the CPU of each of its threads.

    Raises
    ------
    TypeError, ValueError
        For anything out of range, nodes that do not exist or have no usable CPU, lists of different lengths, and
        fewer threads than groups.
    """
    nodes = None if numa_nodes is None else _list(numa_nodes, "numa_nodes")
    shares = None if group_threads is None else _list(group_threads, "group_threads")
    lists = {name: value for name, value in (("numa_nodes", nodes), ("group_threads", shares)) if value is not None}
    if groups is not None:
        groups = checked_threads(groups, "groups")
    elif lists:
        groups = checked_threads(len(next(iter(lists.values()))), "the number of groups")
    else:
        groups = 1
    for name, value in lists.items():
        if len(value) != groups:
            raise ValueError(f"{name} has {len(value)} entries for {groups} groups")

    real = [node for node, cpus in topology.nodes.items() if cpus]
    if nodes is not None:
        for node in nodes:
            if node not in real:
                there = ", ".join(f"{n} ({len(topology.nodes[n])} CPUs)" for n in real)
                raise ValueError(f"numa_nodes: there is no node {node} with usable CPUs; the nodes are {there}")
            if nodes.count(node) > 1:
                raise ValueError(f"numa_nodes names node {node} more than once: {nodes}")
    elif 1 < groups <= len(real):
        nodes = real[:groups]
    machine = topology if nodes is None else topology.on(nodes)

    if shares is not None:
        shares = [checked_threads(share, f"group_threads[{g}]") for g, share in enumerate(shares)]
        asked = checked_threads(sum(shares), "the sum of group_threads")
        if threads is not None and checked_threads(threads) != asked:
            raise ValueError(f"threads is {threads}, but group_threads add up to {asked}")
    elif threads is not None:
        asked = checked_threads(threads)
        if asked < groups:
            raise ValueError(f"{asked} threads for {groups} groups: every group needs at least one")
    else:
        asked = max(default_threads(machine), groups)

    room = shares or [asked] * groups
    if nodes is None:
        counts = _shares(max(groups, min(asked, len(machine.cpus))), room)
        node_of = {cpu: node for node, cpus in topology.nodes.items() for cpu in cpus}
        cpus = [machine.cpus[t % len(machine.cpus)] for t in range(sum(counts))]
        cpus = iter(sorted(cpus, key=lambda cpu: node_of.get(cpu, -1)))
        placed = [(None, tuple(next(cpus) for _ in range(count))) for count in counts]
    else:
        local = [topology.on([node]).cpus for node in nodes]
        counts = _shares(asked, [min(here, len(cpus)) for here, cpus in zip(room, local)])
        placed = [(node, cpus[:count]) for node, cpus, count in zip(nodes, local, counts)]
    return asked, len(machine.cpus), placed


def _shares(total, room):
    """``total``, as far as there is room, shared out evenly and the first ones first."""
    shares = [0] * len(room)
    heap = [(0, g) for g in range(len(room))]
    for _ in range(min(total, sum(room))):
        share, g = heap[0]
        shares[g] = share + 1
        if share + 1 < room[g]:
            heapq.heapreplace(heap, (share + 1, g))
        else:
            heapq.heappop(heap)
    return shares


def _integer(value, name):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return operator.index(value)


def _list(value, name):
    """A list of ints from any sequence of integers."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list of integers, not {value!r}")
    return [_integer(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _text(path):
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cpu_list(path):
    """The set of CPUs that a file like ``0-3,8`` names."""
    cpus = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", _text(path)):
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _cgroup_dirs(root, controller):
    """(version, directory) of this process's cgroups with ``controller``, from its own up to the mount point.

    Inside a container the path in /proc/self/cgroup may be that of the host: then only the mount point exists, and
    it is the container's own cgroup.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            version, mounts = 2, ("", "unified")
        elif controller in names.split(","):
            version, mounts = 1, (names, controller)
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield version, root.joinpath("sys/fs/cgroup", mount, *parts[:depth])


def _quotas(root):
    for version, where in _cgroup_dirs(root, "cpu"):
        if version == 2:
            quota, period = (_text(where / "cpu.max").split() + ["", ""])[:2]
        else:
            quota, period = _text(where / "cpu.cfs_quota_us"), _text(where / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield int(quota) / int(period)


def _memory_cgroups(root):
    """(limit, bytes in use that cannot be dropped) of each memory cgroup of this process that has a limit."""
    for version, where in _cgroup_dirs(root, "memory"):
        limit = _text(where / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        # Version 1 says "no limit" by the largest multiple of a page.
        if limit.isdecimal() and int(limit) < 1 << 62:
            used = _text(where / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
            name = "inactive_file" if version == 2 else "total_inactive_file"
            cached = re.search(rf"^{name} (\d+)", _text(where / "memory.stat"), re.MULTILINE)
            yield int(limit), max(0, int(used or 0) - (int(cached[1]) if cached else 0))

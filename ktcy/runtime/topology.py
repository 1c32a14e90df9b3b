"""Which CPUs this process may use, how they belong together, and how much of them and of memory it gets.

``read`` is a function of a directory root and an affinity mask and nothing else, so made-up machines are as good
as real ones. Whatever the system does not tell (no /sys in a sandbox, no cgroups) is left out, never guessed.
"""

import math
import operator
import os
import re
from dataclasses import dataclass
from pathlib import Path

MAX_THREADS = 4096


@dataclass(frozen=True)
class Topology:
    """The part of a machine that a process may use.

    Attributes
    ----------
    cpus : tuple of int
        Usable CPUs in the order to fill them: one of each physical core, performance cores before efficiency
        cores, then the SMT siblings in the same order.
    cores, performance_cores : int
        Physical cores among them; the second without the efficiency cores, unless there are no others.
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
    cores: int
    performance_cores: int
    nodes: dict
    packages: dict
    quota: float | None
    node_memory: dict
    memory_limit: int | None


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

    core, package = {}, {}
    for cpu in mask:
        where = cpu_dir / f"cpu{cpu}/topology"
        siblings = _cpu_list(where / "core_cpus_list") or _cpu_list(where / "thread_siblings_list")
        core[cpu] = min(siblings, default=cpu)
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
        cpus=tuple(sorted(mask, key=lambda cpu: (siblings_before[cpu], cpu in slow, cpu))),
        cores=len(count),
        performance_cores=len({core[cpu] for cpu in mask if cpu not in slow}) or len(count),
        nodes=nodes,
        packages={p: tuple(cpu for cpu in mask if package[cpu] == p) for p in sorted(set(package.values()))},
        quota=min(_quotas(root), default=None),
        node_memory=node_memory,
        memory_limit=min(_memory_limits(root), default=None),
    )


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
    if isinstance(threads, bool) or not hasattr(threads, "__index__"):
        raise TypeError(f"{name} must be an integer, not {threads!r}")
    number = operator.index(threads)
    if not 1 <= number <= MAX_THREADS:
        raise ValueError(f"{name} must be from 1 to {MAX_THREADS}, not {number}")
    return number


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


def _memory_limits(root):
    for version, where in _cgroup_dirs(root, "memory"):
        limit = _text(where / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        # Version 1 says "no limit" by the largest multiple of a page.
        if limit.isdecimal() and int(limit) < 1 << 62:
            yield int(limit)

"""How much memory there is for this process, in figures for people and before anything is taken."""

import re
import resource
from pathlib import Path

from .topology import _memory_cgroups, _text


def available(root="/"):
    """Bytes that this process can still take: what the machine has free or can free, within the cgroups' limits.

    Parameters
    ----------
    root : path
        Directory with ``sys`` and ``proc``.

    Returns
    -------
    int or None
        None where the system does not say.
    """
    root = Path(root)
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    rooms = [int(free[1]) * 1024] if free else []
    rooms += [limit - used for limit, used in _memory_cgroups(root)]
    return max(0, min(rooms)) if rooms else None


def require(nbytes, what, root="/"):
    """Refuse to start what cannot end.

    Parameters
    ----------
    nbytes : int
        Need.
    what : str
        Who needs it, for the message.
    root : path
        As of `available`.

    Raises
    ------
    MemoryError
        When less is available; with both figures and the cgroup's limit.
    """
    there = available(root)
    if there is not None and nbytes > there:
        limits = [limit for limit, _ in _memory_cgroups(Path(root))]
        limit = f", within the cgroup's limit of {_gib(min(limits))}" if limits else ""
        raise MemoryError(f"{what} needs {_gib(nbytes)} of memory; {_gib(there)} is available{limit}")


def limits(nbytes):
    """What of this process's own limits stands against so many bytes more, as the end of a message; or nothing."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = re.search(r"^VmSize:\s*(\d+) kB", _text(Path("/proc/self/status")), re.MULTILINE)
    used = int(used[1]) * 1024 if used else 0
    if limit == resource.RLIM_INFINITY or limit - used >= nbytes + (4 << 20):
        return ""
    return f"; RLIMIT_AS (ulimit -v) allows this process {_gib(limit)} of addresses, and it has {_gib(used)}"


def report(pools, root="/"):
    """The figures behind ``ktcy.runtime.memory_report``."""
    root = Path(root)
    held = [pool._memory() for pool in pools]
    enforced = {entry["placement_enforced"] for entry in held} - {None}
    by_node = {}
    for entry in held:
        for node, *sizes in zip(entry["group_nodes"], entry["scratch_bytes"], entry["group_bytes"]):
            by_node[node] = by_node.get(node, 0) + sum(sizes)
    limits = [limit for limit, _ in _memory_cgroups(root)]
    mode = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    huge = re.search(r"^AnonHugePages:\s*(\d+) kB", _text(root / "proc/self/smaps_rollup"), re.MULTILINE)
    return {
        "pools": held,
        "scratch_bytes": sum(sum(entry["scratch_bytes"]) for entry in held),
        "node_bytes": by_node,
        "placement_enforced": all(enforced) if enforced else None,
        "huge_pages": mode[1] if mode else "unknown",
        "huge_page_bytes": int(huge[1]) * 1024 if huge else None,
        "available_bytes": available(root),
        "cgroup_limit": min(limits, default=None),
    }


def _gib(size):
    return f"{size / 2**30:.2f} GiB"

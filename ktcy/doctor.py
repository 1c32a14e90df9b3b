"""What ktcy uses on this machine and why: `show_config` for programs and notebooks, `doctor` for the whole report.

Reports are dicts that JSON can hold and whose repr is the table for people. Sizes are in bytes.
"""

import os
import platform
import re
from pathlib import Path

import numpy as np

from . import kernels
from ._version import __version__
from .runtime import default_threads, memory_report, topology


class Report(dict):
    """A dict whose repr is a readable table."""

    def __repr__(self):
        return "\n".join(_table(self))


# By memory_report()["placement_enforced"].
PLACEMENT = {True: "enforced", False: "refused by the system: first touch decides", None: "not asked for"}


def show_config(root="/"):
    """What is in use here, and why nothing better is.

    Parameters
    ----------
    root : path
        Directory with ``sys`` and ``proc``.

    Returns
    -------
    dict
        Versions; ``variant`` and ``reason``; ``variants``: for each, whether it can run and what is missing;
        ``formats``: what each weight format uses; ``topology``; ``numa_placement``: whether memory of this process's
        pools lies on the nodes they asked for. Its repr is a table.
    """
    chosen = kernels.default()
    forced = os.environ.get("KTCY_VARIANT") == chosen.name
    formats = [chosen.format(name) for name in chosen.formats]
    return Report(
        ktcy=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_find(r"model name\s*:\s*(.+)", _read(root, "proc/cpuinfo"), "unknown"),
        variant=chosen.name,
        reason="KTCY_VARIANT names it" if forced else _reason(chosen.name),
        variants={v.name: _availability(v.name) for v in reversed(kernels.VARIANTS.values()) if not v.emulates},
        formats={f.name: {"layout": f.layout, "variant": chosen.name, "tiles_above_rows": f.few_rows} for f in formats},
        topology=_topology(topology.read(root)),
        numa_placement=PLACEMENT[memory_report()["placement_enforced"]],
    )


def doctor(root="/"):
    """`show_config`, memory, huge pages and NUMA nodes, and a check that all variants and threads agree.

    Parameters
    ----------
    root : path
        Directory with ``sys`` and ``proc``.

    Returns
    -------
    dict
        As of `show_config`, with ``memory``, ``huge_pages``, ``numa_memory`` and ``same_bits``.
    """
    machine = topology.read(root)
    meminfo = _read(root, "proc/meminfo")
    report = show_config(root)
    report["memory"] = {
        "total": _kilobytes("MemTotal", meminfo),
        "available": _kilobytes("MemAvailable", meminfo),
        "cgroup_limit": machine.memory_limit,
    }
    report["huge_pages"] = _huge_pages(root)
    report["numa_memory"] = {str(node): size for node, size in machine.node_memory.items()}
    report["same_bits"] = same_bits()
    return report


def same_bits():
    """Runs one small layer on every variant of this machine with several thread counts, and compares the bits.

    All tokens at once take the path of many rows, one by one that of few.

    Returns
    -------
    dict
        ``variants`` and ``threads`` that were compared, and ``differ``: those whose bits are not the first run's.
    """
    from .experts import KTMoEWrapper
    from .runtime.queue import CPUInfer

    rng = np.random.default_rng(0)
    tokens, experts, top_k, hidden, inter = 70, 6, 3, 160, 112
    x, gate, up, down = (
        rng.standard_normal(shape, np.float32)
        for shape in ((tokens, hidden), (experts, inter, hidden), (experts, inter, hidden), (experts, hidden, inter))
    )
    ids = rng.integers(-1, experts, (tokens, top_k))
    weights = rng.random((tokens, top_k), np.float32)
    _, _, placed = topology.place(topology.read())
    most = sum(len(cpus) for _, cpus in placed)
    counts = sorted({1, min(2, most), most})
    names = kernels.available()
    sizes = (experts, top_k, hidden, inter)
    first, differ = None, []
    for count in counts:
        with CPUInfer(count) as infer:
            for name in names:
                with KTMoEWrapper(0, *sizes, method="int8", variant=name, cpu_infer=infer) as layer:
                    layer.load_weights_from_tensors(gate, up, down)
                    whole = layer.forward(x, ids, weights)
                    singly = [layer.forward(x[[t]], ids[[t]], weights[[t]]) for t in range(tokens)]
                first = whole if first is None else first
                if not all(np.array_equal(first, y) for y in (whole, np.concatenate(singly))):
                    differ.append(f"{name} with {count} threads")
    return {"variants": names, "threads": counts, "differ": differ}


def _reason(chosen):
    """Why the loader took it; a better one that only the build left out is named."""
    real = [v for v in kernels.VARIANTS.values() if not v.emulates]
    better = sorted((v for v in real if v.priority > kernels.VARIANTS[chosen].priority), key=lambda v: -v.priority)
    for v in better:
        if any(reason.startswith("it was not built") for reason in kernels.missing(v.name)):
            return f"the best of those built; this machine can run {v.name}"
    return "the best that can run here"


def _availability(name):
    missing = kernels.missing(name)
    return {"available": not missing, "missing": missing}


def _topology(machine):
    return {
        "cpus": _ranges(machine.cpus),
        "cores": machine.cores,
        "performance_cores": machine.performance_cores,
        "nodes": {str(node): _ranges(cpus) for node, cpus in machine.nodes.items()},
        "cpu_quota": machine.quota,
        "default_threads": default_threads(machine),
    }


def _huge_pages(root):
    pages = {"transparent": _find(r"\[(\w+)\]", _read(root, "sys/kernel/mm/transparent_hugepage/enabled"))}
    for folder in sorted(Path(root, "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        reserved, free = (int(_read(folder, name) or 0) for name in ("nr_hugepages", "free_hugepages"))
        pages[folder.name.removeprefix("hugepages-")] = {"reserved": reserved, "free": free}
    return pages


def _read(root, path):
    try:
        return Path(root, path).read_text()
    except OSError:
        return ""


def _find(pattern, text, default=None):
    match = re.search(pattern, text)
    return match[1] if match else default


def _kilobytes(name, meminfo):
    value = _find(rf"{name}:\s*(\d+) kB", meminfo)
    return int(value) * 1024 if value else None


def _ranges(cpus):
    """(0, 1, 2, 8) as "0-2,8"."""
    cpus = sorted(cpus)
    starts = [c for c in cpus if c - 1 not in cpus]
    ends = [c for c in cpus if c + 1 not in cpus]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))


def _table(report):
    widest = max(len(key) for key, value in report.items() if not isinstance(value, dict))
    for key, value in report.items():
        if not isinstance(value, dict):
            yield f"{key:{widest}}  {_text(value)}"
            continue
        yield ""
        yield key
        width = max(map(len, value), default=0)
        size = _size if key in ("memory", "numa_memory") else _text
        yield from (f"  {name:{width}}  {size(item)}" for name, item in value.items())


def _size(value):
    return "none" if value is None else f"{value / 2**30:.1f} GiB"


def _text(value):
    if value is None or value == [] or value == "":
        return "none"
    if isinstance(value, dict) and "missing" in value:
        return "available" if value["available"] else _text(value["missing"])
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)

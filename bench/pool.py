"""What a parallel loop costs: medians over threads up to four times the CPUs, groups, and beside busy processes.

``empty``: one empty task for each thread, the caller may do them all. ``all``: every thread takes part, so it is the
time to start and to end all of them. ``job``: 64 tasks of about 32 us, as a layer with few rows has. All timed in C;
``gap`` starts 0.5 ms after the last loop, as the next layer of a model does; ``asleep`` 3 ms, when all threads sleep.
``step``: a job's time by that of the line above; ``mean`` shows what the median hides beside busy processes.
"""

import contextlib
import subprocess
import sys
import time
import warnings

import numpy as np

from ktcy.runtime import Pool, topology

RUNS, SLEEPS, JOBS, GAP, IDLE = 2000, 200, 300, 0.0005, 0.003
TASKS, SECONDS = 64, 32e-6


def loads_of_a_task():
    """Loads that keep one thread busy for SECONDS."""
    with Pool(1) as pool:
        return int(1e6 * SECONDS / np.median(pool.round_trips(20, tasks=1, loads=1_000_000)))


@contextlib.contextmanager
def busy(processes):
    """Beside so many processes that each want a CPU."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    time.sleep(0.5 * bool(others))
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def cell(times):
    return f"{np.median(times) * 1e6:8.2f} ({np.percentile(times, 90) * 1e6:7.2f})"


def table(title, pools, loads):
    print(f"\n{title}; us, median (90th percentile)")
    names = ["empty, awake", "empty, asleep", "all, awake", "all, asleep", "job, awake"]
    names += ["job, gap", "job, asleep"]
    print(f"{'asked':>6} {'used':>5} {'groups':>6} " + " ".join(f"{name:>18}" for name in names) + "     mean  step")
    before = None
    for asked, make in pools:
        with make() as pool:
            count = pool.threads
            rows = [pool.round_trips(RUNS, tasks=count), pool.round_trips(SLEEPS, IDLE, tasks=count)]
            rows += [pool.round_trips(RUNS), pool.round_trips(SLEEPS, IDLE)]
            rows += [pool.round_trips(JOBS, idle, tasks=TASKS, loads=loads) for idle in (0, GAP, IDLE)]
            job = np.median(rows[4])
            step = f"{job / before:5.2f}" if before else ""
            before = job
            cells = " ".join(cell(row) for row in rows)
            print(f"{asked:6} {count:5} {pool.groups:6} {cells} {rows[4].mean() * 1e6:8.1f} {step}", flush=True)


def main():
    warnings.simplefilter("ignore", RuntimeWarning)
    machine = topology.read()
    cpus, loads = len(machine.cpus), loads_of_a_task()
    print(f"CPUs {cpus}, cores {machine.cores}, nodes {len(machine.nodes)}, quota {machine.quota}")
    counts = sorted({1, 2, 3, cpus // 2, cpus - 1, cpus, cpus + 1, 2 * cpus, 3 * cpus, 4 * cpus} - {0})
    by_threads = [(count, lambda count=count: Pool(count, machine)) for count in counts]
    table("threads", by_threads, loads)
    for processes in sorted({1, cpus // 2, cpus}):
        with busy(processes):
            table(f"threads, beside {processes} busy processes", by_threads, loads)
    groups = [g for g in (1, 2, 3, 4, 8) if g <= cpus]
    table("groups", [(cpus, lambda g=g: Pool(cpus, machine, groups=g)) for g in groups], loads)


if __name__ == "__main__":
    main()

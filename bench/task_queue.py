"""What a task costs: medians of a submit, of the way to the start of the task, and of the whole round trip.

``C``: an empty task, timed in C (`Queue.round_trips`). ``Python``: the same from Python, without the wait. ``asleep``:
the caller slept for 3 ms before, so the dispatcher sleeps, too, and submit pays for waking it.
Prints one line for each number of threads.
"""

import time
import warnings

import numpy as np

from ktcy.runtime import topology
from ktcy.runtime.queue import CPUInfer, SelfTest

RUNS, SLEEPS, IDLE = 5000, 300, 0.003


def from_python(queue, runs, idle=0.0):
    task = SelfTest(queue.pool)
    times = np.zeros((runs, 2))
    for r in range(runs):
        if idle:
            time.sleep(idle)
        start = time.monotonic_ns()
        queue.submit(task)
        submitted = time.monotonic_ns()
        queue.sync()
        times[r] = submitted - start, task.started - start
    return times * 1e-9


def main():
    warnings.simplefilter("ignore", RuntimeWarning)
    cpus = len(topology.read().cpus)
    print(f"CPUs {cpus}; us, median (90th percentile)")
    names = [f"{what}, {state}" for state in ("awake", "asleep") for what in ("submit", "start", "round trip")]
    print(f"{'':16}" + " ".join(f"{name:>18}" for name in names))
    for threads in sorted({1, max(1, cpus // 2), cpus, 2 * cpus}):
        with CPUInfer(threads) as queue:
            for name, measure in ("C", queue.round_trips), ("Python", lambda *a: from_python(queue, *a)):
                cells = []
                for times in measure(RUNS), measure(SLEEPS, IDLE):
                    cells += [f"{np.median(row) * 1e6:.2f} ({np.percentile(row, 90) * 1e6:.2f})" for row in times.T]
                    cells += ["-"] * (3 - times.shape[1])
                print(f"{threads:3} threads {name:6}" + " ".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()

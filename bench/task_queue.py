"""What a task costs: medians of a submit, of the way to the start of the task, and of the whole round trip.

``C``: an empty task, timed in C (`Queue.round_trips`). ``Python``: the same from Python. Before each submit the caller
sleeps for the gap (0: not at all): up to almost 2 ms the dispatcher is awake, after 5 ms it sleeps, and submit
pays for waking it. ``idle``: CPU time that the process takes in the second after its last task.
Prints one line for each number of threads, language and gap; microseconds, median (90th percentile).
"""

import time
import warnings

import numpy as np

from ktcy.runtime import topology
from ktcy.runtime.queue import CPUInfer, SelfTest

GAPS = {0: 5000, 50e-6: 2000, 500e-6: 1000, 1e-3: 500, 1.5e-3: 500, 5e-3: 200}  # seconds: runs


def from_python(queue, runs, idle=0.0):
    task = SelfTest(queue.pool)
    times = np.zeros((runs, 3))
    for r in range(runs):
        if idle:
            time.sleep(idle)
        start = time.monotonic_ns()
        queue.submit(task)
        submitted = time.monotonic_ns()
        queue.sync()
        times[r] = submitted - start, task.started - start, time.monotonic_ns() - start
    return times * 1e-9


def idle_cpu():
    start = time.process_time()
    time.sleep(1)
    return time.process_time() - start


def main():
    warnings.simplefilter("ignore", RuntimeWarning)
    cpus = len(topology.here().cpus)
    print(f"CPUs {cpus}\n{'threads':>7} {'':6} {'gap':>6} {'submit':>17} {'start':>17} {'round trip':>17}")
    for threads in sorted({1, max(1, cpus // 2), cpus, 2 * cpus}):
        with CPUInfer(threads) as queue:
            for name, measure in ("C", queue.round_trips), ("Python", lambda *a: from_python(queue, *a)):
                for gap, runs in GAPS.items():
                    rows = measure(runs, gap).T * 1e6
                    cells = " ".join(f"{np.median(row):8.2f} ({np.percentile(row, 90):6.1f})" for row in rows)
                    print(f"{threads:7} {name:6} {gap * 1e6:6.0f} {cells}", flush=True)
            print(f"{threads:7} idle: {idle_cpu() * 1e3:.2f} ms of CPU in a second")


if __name__ == "__main__":
    main()

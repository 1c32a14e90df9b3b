"""What a parallel loop costs: medians of an empty loop's time, threads awake and asleep.

``empty``: one empty task for each thread; the caller may do them all; called from Python, whose share the line of
one thread shows. ``all``: every thread takes part, so it is the time to start and to end all of them; timed in C.
Prints one line for each number of threads, up to four times the CPUs.
"""

import time
import warnings

import numpy as np

from ktcy.runtime import Pool, topology

RUNS, SLEEPS, IDLE = 2000, 200, 0.003


def empty(pool, runs, idle=0.0):
    times = np.zeros(runs)
    for r in range(runs):
        if idle:
            time.sleep(idle)
        start = time.perf_counter()
        pool.selftest(pool.threads)
        times[r] = time.perf_counter() - start
    return times


def main():
    warnings.simplefilter("ignore", RuntimeWarning)
    machine = topology.read()
    print(f"CPUs {len(machine.cpus)}, cores {machine.cores}; us, median (90th percentile)")
    print(f"{'threads':>7} {'empty, awake':>18} {'empty, asleep':>18} {'all, awake':>18} {'all, asleep':>18}")
    threads = 1
    while threads <= 4 * len(machine.cpus):
        with Pool(threads, machine) as pool:
            rows = [empty(pool, RUNS), empty(pool, SLEEPS, IDLE)]
            rows += [pool.round_trips(RUNS), pool.round_trips(SLEEPS, IDLE)]
        cells = [f"{np.median(row) * 1e6:.2f} ({np.percentile(row, 90) * 1e6:.2f})" for row in rows]
        print(f"{threads:7} " + " ".join(f"{cell:>18}" for cell in cells))
        threads *= 2


if __name__ == "__main__":
    main()

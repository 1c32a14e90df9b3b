"""One token through a Qwen3-30B-A3B layer at 1 to 4 times the cores, alone and beside busy processes: no cliff.

Prints the median in microseconds: python bench/threads.py [busy processes ...]
"""

import subprocess
import sys
import time
import warnings

import numpy as np
from bench_layer import SHAPES, Model

from ktcy import CPUInfer, kernels
from ktcy.runtime import topology


def medians(threads, fmt, model, seconds=1.0):
    """Median and 90th percentile of forwards on the caller's thread, and the median through the queue."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        infer = CPUInfer(threads)
    with infer:
        moes = model.moes(fmt, infer.pool)
        x, routes = model.batch(1)
        out = np.empty_like(x)
        tasks = [moes[i % len(moes)].task(x, *route, out) for i, route in enumerate(routes)]

        def forward(i):
            moes[i % len(moes)].forward(x, *routes[i % len(routes)], out)

        def submit(i):
            infer.submit(tasks[i % len(tasks)])
            infer.sync()

        result = [infer.threads]
        for call in (forward, submit):
            times, end, i = [], time.perf_counter() + seconds, 0
            while time.perf_counter() < end:
                start = time.perf_counter()
                call(i)
                times.append(time.perf_counter() - start)
                i += 1
            result.append(np.median(times[3:]) * 1e6)
            result.append(np.quantile(times[3:], 0.9) * 1e6)
        return result


def main(loads):
    fmt = kernels.default().format("int8")
    model = Model(SHAPES["qwen3-30b-a3b"], fmt)
    cores = len(topology.read().cpus)
    counts = sorted({1, 2, 4, 8, cores - 4, cores - 3, cores - 2, cores - 1, cores, cores + 1, 2 * cores, 4 * cores})
    for load in loads:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            for threads in (n for n in counts if n > 0):
                used, *us = medians(threads, fmt, model)
                figures = " ".join(f"{name} {value:8.0f}" for name, value in zip(("forward", "p90", "queue", "p90"), us))
                print(f"{load} busy, {threads:3} threads ({used} used): {figures} us", flush=True)
        finally:
            for process in busy:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [0])

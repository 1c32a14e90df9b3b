"""One token through a Qwen3-30B-A3B layer at 1 to 4 times the cores, alone and beside busy processes: no cliff.

Prints the median in microseconds: python bench/threads.py [busy processes ...]
"""

import subprocess
import sys
import time
import warnings

import ml_dtypes
import numpy as np
from bench_layer import SHAPES, stored

from ktcy import CPUInfer, kernels
from ktcy.demo import routing
from ktcy.moe import MoE
from ktcy.runtime import topology


def medians(threads, fmt, layers, routes, x, seconds=1.0):
    """Median and 90th percentile of forwards on the caller's thread, and the median through the queue."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        infer = CPUInfer(threads)
    with infer:
        shape = layers[0].shape
        moes = [MoE(fmt, layer, infer.pool, range(shape.num_experts)) for layer in layers]
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
    shape = SHAPES["qwen3-30b-a3b"]
    fmt = kernels.default().format("int8")
    _, layers = stored(fmt, shape, shape.num_experts, 3)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, shape.hidden_size), np.float32).astype(ml_dtypes.bfloat16)
    routes = [routing(rng, 1, shape.num_experts, shape.num_experts_per_tok) for _ in range(61)]
    cores = len(topology.read().cpus)
    counts = sorted({1, 2, 4, 8, cores - 4, cores - 3, cores - 2, cores - 1, cores, cores + 1, 2 * cores, 4 * cores})
    for load in loads:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            for threads in (n for n in counts if n > 0):
                used, *us = medians(threads, fmt, layers, routes, x)
                figures = " ".join(f"{name} {value:8.0f}" for name, value in zip(("forward", "p90", "queue", "p90"), us))
                print(f"{load} busy, {threads:3} threads ({used} used): {figures} us", flush=True)
        finally:
            for process in busy:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [0])

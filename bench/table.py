"""Every format on every variant of this machine, a Qwen3-30B-A3B layer: python bench/table.py [format ...]

Prints a row a format and variant: whether it is correct (token 0 within the float64 bound, all tokens the bits of the
first variant), the median of 1 token and its fraction of the read bandwidth in the format's own bytes, and of 1024
tokens and its fraction of the variant's own peak. Limits are the larger of one before and one after each figure.
"""

import sys
import time

import numpy as np
from bench_layer import SHAPES, Model, check

from ktcy import kernels, limits
from ktcy.runtime import topology
from ktcy.runtime.pool import Pool


def median(moes, x, routes, out, seconds=0.5):
    times, end = [], time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < end:
        i, start = len(times), time.perf_counter()
        moes[i % len(moes)].forward(x, *routes[i % len(routes)], out)
        times.append(time.perf_counter() - start)
    return np.median(times[1:])


def main(names):
    print("| format | variant | correct | 1 token | of bandwidth | 1024 tokens | of peak |")
    print("|---|---|---|---|---|---|---|")
    with Pool(topology.default_threads(topology.read())) as pool:
        for name in names:
            model, first = Model(SHAPES["qwen3-30b-a3b"], kernels.default().format(name)), None
            for variant in kernels.available():
                table = kernels.load(variant)
                fmt = table.format(name)
                moes = model.moes(fmt, pool)
                time.sleep(0.5)  # numpy's BLAS threads spin for a while after the last check
                x, routes = model.batch(1)
                rates = [limits.read_bandwidth(table, pool, model.memory, model.expert_bytes)]
                one = median(moes, x, routes, np.empty_like(x))
                rates.append(limits.read_bandwidth(table, pool, model.memory, model.expert_bytes))
                bandwidth = model.touched(routes) / one / max(rates)
                x, routes = model.batch(1024)
                out = np.empty_like(x)
                peaks = [limits.peak(table, pool, fmt.core)]
                many = median(moes, x, routes, out)
                peaks.append(limits.peak(table, pool, fmt.core))
                peak = model.ops(1024) / many / max(peaks)
                moes[0].forward(x, *routes[0], out)
                check(moes[0], model.layers[0], model.expert_map, x, *routes[0])
                first = out if first is None else first
                correct = "yes" if (first.view(np.uint16) == out.view(np.uint16)).all() else "no"
                print(
                    f"| {name} | {variant} | {correct} | {one * 1e6:.0f} us | {bandwidth:.2f} | {many * 1e3:.1f} ms "
                    f"| {peak:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:] or kernels.default().formats)

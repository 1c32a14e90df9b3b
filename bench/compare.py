"""Two builds of a variant's kernels in one process, forward by forward: python bench/compare.py OTHER.so [format ...]

OTHER.so is the `_kernels_<variant>` module of another tree with the same kernels/table.h; this tree's default variant
must be the same one. Prints for each format and number of tokens the medians of this build and the other, and the
median and quartiles of this over other in pairs of forwards next to each other: what a noisy machine does to one of a
pair it mostly does to both.
"""

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
from bench_layer import SHAPES, Model

from ktcy import kernels
from ktcy.runtime import topology
from ktcy.runtime.pool import Pool

TOKENS = (1, 16, 1024, 4096)


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).name.split(".")[0], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return kernels.Kernels(module.table)


def pairs(both, x, routes, seconds):
    """[pairs, 2] seconds of forwards of the two builds, whose turn to be first changes."""
    out, times, end = np.empty_like(x), [], time.perf_counter() + seconds
    while len(times) < 6 or time.perf_counter() < end:
        i, pair = len(times), [0, 0]
        for which in (0, 1) if i % 2 else (1, 0):
            moes, route = both[which], routes[(2 * i + which) % len(routes)]
            start = time.perf_counter()
            moes[i % len(moes)].forward(x, *route, out)
            pair[which] = time.perf_counter() - start
        times.append(pair)
    return np.array(times[2:])


def quartiles(values):
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main(other, names):
    table = kernels.default()
    tables = table, load(other)
    if tables[1].name != table.name:
        sys.exit(f"{other} is of variant {tables[1].name}; this tree runs {table.name}: set KTCY_VARIANT")
    with Pool(topology.default_threads(topology.read())) as pool:
        for name in names:
            fmts = [t.format(name) for t in tables]
            models = {f.layout: Model(SHAPES["qwen3-30b-a3b"], f) for f in fmts}
            both = [models[f.layout].moes(f, pool) for f in fmts]
            for tokens in TOKENS:
                times = pairs(both, *models[fmts[0].layout].batch(tokens), 1.5)
                this, that = np.median(times, 0) * 1e6
                ratio = quartiles(times[:, 0] / times[:, 1])
                print(f"{name:12} {tokens:5} tokens: {this:9.0f} and {that:9.0f} us, ratio {ratio}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or kernels.default().formats)

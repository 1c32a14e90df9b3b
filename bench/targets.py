"""Every format beside what its targets name, turn by turn in one run: python bench/targets.py [format ...]

One token of a Qwen3-30B-A3B layer: the share of the read bandwidth in the format's own bytes. 1024 and 4096 tokens: the
time over that of int8 for int4, of bf16 for the others. Medians and quartiles of pairs of turns next to each other: what
a noisy machine does to one of a pair it mostly does to both.
"""

import sys
import time

import numpy as np
from bench_layer import SHAPES, Model
from compare import pairs, quartiles

from ktcy import kernels, limits
from ktcy.runtime import topology
from ktcy.runtime.pool import Pool

FORWARDS = 8  # of one token, between two reads of as much


def shares(table, pool, model, fmt, seconds):
    """[turns] the share of the bandwidth and [turns] seconds of a forward of one token."""
    moes, (x, routes) = model.moes(fmt, pool), model.batch(1)
    out, touched = np.empty_like(x), model.touched(routes)
    pieces = FORWARDS * model.shape.num_experts_per_tok
    result, end = [], time.perf_counter() + seconds
    while len(result) < 4 or time.perf_counter() < end:
        turn = FORWARDS * len(result)
        rate = limits.read_bandwidth(table, pool, model.memory, model.expert_bytes, pieces, 1)
        start = time.perf_counter()
        for i in range(turn, turn + FORWARDS):
            moes[i % len(moes)].forward(x, *routes[i % len(routes)], out)
        each = (time.perf_counter() - start) / FORWARDS
        result.append((touched / each / rate, each))
    return np.array(result[2:]).T


def main(names):
    table, models = kernels.default(), {}
    with Pool(topology.default_threads(topology.read())) as pool:
        for name in names:
            base = "int8" if name == "int4" else "bf16"
            for needed in {name, base} - set(models):
                models[needed] = Model(SHAPES["qwen3-30b-a3b"], table.format(needed))
            both = [models[n].moes(table.format(n), pool) for n in (name, base)]
            share, each = shares(table, pool, models[name], table.format(name), 2)
            print(f"{name:12} 1 token {np.median(each) * 1e6:6.0f} us, {quartiles(share)} of bandwidth", end="", flush=True)
            for tokens in (1024, 4096):
                times = pairs(both, *models[name].batch(tokens), 2)
                this = np.median(times[:, 0]) * 1e3
                print(f"; {tokens} {this:.1f} ms, {quartiles(times[:, 0] / times[:, 1])} of {base}", end="", flush=True)
            print()


if __name__ == "__main__":
    main(sys.argv[1:] or kernels.default().formats)

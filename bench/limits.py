"""Prints this machine's limits by variant and thread count: python bench/limits.py"""

import numpy as np

from ktcy import kernels, limits
from ktcy.runtime import topology
from ktcy.runtime.pool import Pool

if __name__ == "__main__":
    cpus = len(topology.read().cpus)
    memory = np.full(max(2**29, 5 * limits.cache_bytes() // 2), 1, np.uint8)
    print(f"last-level cache {limits.cache_bytes() / 2**20:.0f} MiB, streaming {memory.nbytes / 2**20:.0f} MiB in experts of 4.5 MiB")
    for threads in sorted({1, 2, 4, 8, 16, 32, cpus} & set(range(1, cpus + 1))):
        with Pool(threads) as pool:
            read = limits.read_bandwidth(kernels.default(), pool, memory, 3 * 2048 * 768)
            print(f"{threads:3} threads: read {read / 1e9:6.1f} GB/s", end="", flush=True)
            for core in ("int8", "bf16"):
                peaks = [f"{n} {limits.peak(kernels.load(n), pool, core) / 1e9:.0f}" for n in kernels.available()]
                print(f"; {core} GOPS: {', '.join(peaks)}", end="", flush=True)
            print()

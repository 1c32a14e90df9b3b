"""One layer at decode and prefill sizes, in the shapes of real models and every format, beside this machine's roofline.

Stored experts exceed four times the last-level cache; all hold the same Gaussian weights, each at its own place. Ids of
a model with more experts share them, so each is still read from memory.
"""

import mmap
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from ktcy import limits
from ktcy.config import Activation, LayerShape
from ktcy.demo import routing
from ktcy.moe import MoE
from ktcy.weights.packed import PackedLayer, layer_tensors, pack_expert

# The float64 oracle encodes weights.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
import oracle  # noqa: E402

SHAPES = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
}
TOKENS = (1, 16, 64, 256, 1024, 4096)


def stored(fmt, shape, experts, layers, seed=0):
    """Layers in one block of memory."""
    rng = np.random.default_rng(seed)
    small = LayerShape(experts, min(shape.num_experts_per_tok, experts), shape.hidden_size, shape.moe_intermediate_size)
    tensors = layer_tensors(fmt, small, False)
    size = max(t.end for t in tensors.values())
    size += -size % 4096
    mapped = mmap.mmap(-1, layers * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)  # as packed layers ask
    memory = np.frombuffer(mapped, np.uint8)
    result = [PackedLayer(fmt, n, small, Activation(), False, memory[n * size : (n + 1) * size]) for n in range(layers)]
    h, i = shape.hidden_size, shape.moe_intermediate_size
    matrices = {}
    for part, dims in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
        matrix = rng.standard_normal(dims, np.float32) / np.float32(np.sqrt(dims[1]))
        matrices[part] = oracle.encode(matrix, fmt.name) if fmt.codes else matrix
    one = {name: np.empty(t.shape[1:], np.uint8) for name, t in tensors.items()}
    pack_expert(fmt, SimpleNamespace(**matrices, source={part: part for part in matrices}), one)
    for layer in result:
        for name, t in layer.tensors.items():
            t[:] = one[name]
    return memory, result


def rounded(fmt, row):
    """A row as the core's activations stand for it, float64."""
    return oracle.rows(row[None], fmt.name)[0][0]


def check(moe, layer, expert_map, x, ids, weights):
    """Token 0 against the scheme in float64; float32 moves a few values to the next step, under 1e-3 of all, and codes
    times their scales are rounded to bfloat16, under 4e-3."""
    fmt, out = moe.format, np.zeros(x.shape[1])
    token = rounded(fmt, x[0])
    for e, weight in zip(ids[0], weights[0]):
        gate, up, down = (m.astype(np.float64) for m in layer.unpack(expert_map[e]))
        g, u = gate @ token, up @ token
        out += weight * (down @ rounded(fmt, (g / (1 + np.exp(-g)) * u).astype(np.float32)))
    got = np.empty((1, x.shape[1]), np.float32)
    moe.forward(x[:1], ids[:1], weights[:1], got)
    error = np.linalg.norm(got - out) / np.linalg.norm(out)
    assert error < (4e-3 if fmt.codes else 1e-3), error
    return error


class Model:
    """Layers to rotate over, more than four times the last-level cache; as many stored experts as that takes."""

    def __init__(self, shape, fmt):
        h, i = shape.hidden_size, shape.moe_intermediate_size
        per_expert = 2 * -(-i // 16) * (fmt.weight_bytes(h) + fmt.scale_bytes(h))
        self.expert_bytes = per_expert + -(-h // 16) * (fmt.weight_bytes(i) + fmt.scale_bytes(i))
        wanted = max(2**30, 4 * limits.cache_bytes()) // self.expert_bytes + 1
        experts = min(shape.num_experts, max(2 * shape.num_experts_per_tok, wanted))
        self.shape = shape
        self.memory, self.layers = stored(fmt, shape, experts, -(-wanted // experts))
        self.expert_map = [e % experts for e in range(shape.num_experts)]

    def moes(self, fmt, pool):
        return [MoE(fmt, layer, pool, self.expert_map) for layer in self.layers]

    def batch(self, tokens):
        """Hidden states and so many routes that few experts come again before the cache has forgotten them."""
        rng, shape = np.random.default_rng(tokens), self.shape
        x = rng.standard_normal((tokens, shape.hidden_size), np.float32).astype(ml_dtypes.bfloat16)
        count = 61 if tokens <= 64 else 3
        return x, [routing(rng, tokens, shape.num_experts, shape.num_experts_per_tok) for _ in range(count)]

    def touched(self, routes):
        """Bytes of weights that a forward reads."""
        return np.mean([np.unique(ids).size for ids, _ in routes]) * self.expert_bytes

    def ops(self, tokens):
        shape = self.shape
        return 6 * shape.hidden_size * shape.moe_intermediate_size * shape.num_experts_per_tok * tokens


# Every format in one shape, and int8 in all.
CASES = [(name, "int8") for name in SHAPES] + [("qwen3-30b-a3b", name) for name in ("int4", "bf16", *oracle.CODED)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, table, pool):
    name, fmt = request.param
    fmt = table.format(fmt)
    model = Model(SHAPES[name], fmt)
    return model, model.moes(fmt, pool)


@pytest.mark.parametrize("tokens", TOKENS)
def test_layer(benchmark, case, tokens, table, pool):
    model, moes = case
    x, routes = model.batch(tokens)
    out = np.empty_like(x)
    time.sleep(0.5)  # numpy's BLAS threads spin for a while after the last test's check
    rate_bytes = limits.read_bandwidth(table, pool, model.memory, model.expert_bytes)
    core = moes[0].format.core
    rate_ops = limits.peak(table, pool, core)
    turn = 0

    def forward():
        nonlocal turn
        turn += 1
        moes[turn % len(moes)].forward(x, *routes[turn % len(routes)], out)

    ops = model.ops(tokens)
    budget = ops / rate_ops
    benchmark.pedantic(forward, rounds=max(3, min(300, int(3 / (budget + 2e-3)))), warmup_rounds=3)
    seconds = benchmark.stats.stats.median
    error = check(moes[0], model.layers[0], model.expert_map, x, *routes[0])
    touched = model.touched(routes)
    benchmark.extra_info.update(
        variant=table.name,
        threads=pool.threads,
        gbs=round(touched / seconds / 1e9, 1),
        bandwidth=round(touched / seconds / rate_bytes, 3),
        of=f"{rate_bytes / 1e9:.1f}GB/s",
        **{core: round(ops / seconds / rate_ops, 3)},
        peak=f"{rate_ops / 1e9:.0f}GOPS",
        error=f"{error:.1e}",
    )

"""One layer at decode and prefill sizes, in the shapes of real models, beside this machine's roofline.

Weights are random bytes over so many stored experts that they exceed twice the last-level cache; ids of a model
with more experts share them, so each is still read from memory.
"""

import mmap
import time

import ml_dtypes
import numpy as np
import pytest

from ktcy import limits
from ktcy.config import Activation, LayerShape
from ktcy.demo import routing
from ktcy.moe import MoE
from ktcy.weights.packed import PackedLayer, layer_tensors

SHAPES = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
}
TOKENS = (1, 16, 64, 256, 1024, 4096)


def stored(fmt, shape, experts, layers, seed=0):
    """Layers of random weights in one block of memory: bytes cut from one sample, scales for outputs of unit size."""
    rng = np.random.default_rng(seed)
    sample = rng.integers(-127, 128, 1 << 24, np.int8).view(np.uint8)
    small = LayerShape(experts, min(shape.num_experts_per_tok, experts), shape.hidden_size, shape.moe_intermediate_size)
    size = max(t.end for t in layer_tensors(fmt, small, False).values())
    size += -size % 4096
    memory = np.frombuffer(mmap.mmap(-1, layers * size), np.uint8)
    for at in range(0, memory.size, sample.size):
        memory[at : at + sample.size] = np.roll(sample, at // 4096)[: memory.size - at]
    result = []
    for n in range(layers):
        layer = PackedLayer(fmt, n, small, Activation(), False, memory[n * size : (n + 1) * size])
        layer.gate_up_scale.view(np.float32)[...] = 1e-3
        layer.down_scale.view(np.float32)[...] = 1e-3
        result.append(layer)
    return memory, result


def rounded(fmt, row):
    """A row as its int8 activations stand for it, float64."""
    q, scale, _ = fmt.quantize(row[None])
    return q.view(np.int8)[0, : row.size] * np.float64(scale[0])


def check(moe, layer, expert_map, x, ids, weights):
    """Token 0 against the int8 scheme in float64; float32 moves a few values to the next step, under 1e-3 of all."""
    fmt, out = moe.format, np.zeros(x.shape[1])
    token = rounded(fmt, x[0])
    for e, weight in zip(ids[0], weights[0]):
        gate, up, down = (m.astype(np.float64) for m in layer.unpack(expert_map[e]))
        g, u = gate @ token, up @ token
        out += weight * (down @ rounded(fmt, (g / (1 + np.exp(-g)) * u).astype(np.float32)))
    got = np.empty((1, x.shape[1]), np.float32)
    moe.forward(x[:1], ids[:1], weights[:1], got)
    error = np.linalg.norm(got - out) / np.linalg.norm(out)
    assert error < 1e-3, error
    return error


@pytest.fixture(scope="module", params=SHAPES)
def case(request, table, pool):
    """Layers to rotate over, more than four times the last-level cache; as many stored experts as that takes."""
    shape = SHAPES[request.param]
    per_expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    wanted = max(2**30, 4 * limits.cache_bytes()) // per_expert + 1
    experts = min(shape.num_experts, max(2 * shape.num_experts_per_tok, wanted))
    fmt = table.format("int8")
    memory, layers = stored(fmt, shape, experts, -(-wanted // experts))
    expert_map = [e % experts for e in range(shape.num_experts)]
    moes = [MoE(fmt, layer, pool, expert_map) for layer in layers]
    return shape, per_expert, expert_map, memory, layers, moes


@pytest.mark.parametrize("tokens", TOKENS)
def test_layer(benchmark, case, tokens, table, pool):
    shape, per_expert, expert_map, memory, layers, moes = case
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, shape.hidden_size), np.float32).astype(ml_dtypes.bfloat16)
    out = np.empty_like(x)
    routes = [
        routing(rng, tokens, shape.num_experts, shape.num_experts_per_tok) for _ in range(61 if tokens <= 64 else 3)
    ]
    time.sleep(0.5)  # numpy's BLAS threads spin for a while after the last test's check
    rate_bytes = limits.read_bandwidth(table, pool, memory, per_expert)
    rate_ops = limits.peak_int8(table, pool)
    turn = 0

    def forward():
        nonlocal turn
        turn += 1
        moes[turn % len(moes)].forward(x, *routes[turn % len(routes)], out)

    budget = 2 * per_expert * shape.num_experts_per_tok * tokens / rate_ops
    benchmark.pedantic(forward, rounds=max(3, min(300, int(3 / (budget + 2e-3)))), warmup_rounds=3)
    seconds = benchmark.stats.stats.median
    error = check(moes[0], layers[0], expert_map, x, *routes[0])
    touched = np.mean([np.unique(ids).size for ids, _ in routes]) * per_expert
    ops = 2 * per_expert * shape.num_experts_per_tok * tokens
    benchmark.extra_info.update(
        variant=table.name,
        threads=pool.threads,
        gbs=round(touched / seconds / 1e9, 1),
        bandwidth=round(touched / seconds / rate_bytes, 3),
        of=f"{rate_bytes / 1e9:.1f}GB/s",
        int8=round(ops / seconds / rate_ops, 3),
        peak=f"{rate_ops / 1e9:.0f}GOPS",
        error=f"{error:.1e}",
    )

"""One layer at decode and prefill sizes, in the shapes of real models, beside this machine's roofline.

Weights are random bytes over so many stored experts that they exceed twice the last-level cache; ids of a model
with more experts share them, so each is still read from memory.
"""

import mmap

import ml_dtypes
import numpy as np
import pytest

from ktcy import limits
from ktcy.config import Activation, LayerShape
from ktcy.demo import roofline_seconds, routing
from ktcy.moe import MoE
from ktcy.weights.packed import PackedLayer, layer_tensors

SHAPES = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
}
TOKENS = (1, 16, 64, 256, 1024, 4096)


def stored(fmt, shape, experts, seed=0):
    """A layer of random weights: bytes are cut from one sample, scales make outputs of about unit size."""
    rng = np.random.default_rng(seed)
    sample = rng.integers(-127, 128, 1 << 24, np.int8).view(np.uint8)
    small = LayerShape(experts, min(shape.num_experts_per_tok, experts), shape.hidden_size, shape.moe_intermediate_size)
    size = max(t.end for t in layer_tensors(fmt, small, False).values())
    layer = PackedLayer(fmt, 0, small, Activation(), False, np.frombuffer(mmap.mmap(-1, size), np.uint8))
    for array in (layer.gate_up_weight, layer.down_weight):
        flat = array.reshape(-1)
        for at in range(0, flat.size, sample.size):
            flat[at : at + sample.size] = np.roll(sample, at // 4096)[: flat.size - at]
    layer.gate_up_scale.view(np.float32)[...] = 1e-3
    layer.down_scale.view(np.float32)[...] = 1e-3
    return layer


def check(moe, layer, expert_map, x, ids, weights):
    """Token 0 against float64 on the dequantized weights; int8 activations cost about a percent."""
    out = np.zeros(x.shape[1])
    for e, weight in zip(ids[0], weights[0]):
        gate, up, down = (m.astype(np.float64) for m in layer.unpack(expert_map[e]))
        g, u = gate @ x[0].astype(np.float64), up @ x[0].astype(np.float64)
        out += weight * (down @ (g / (1 + np.exp(-g)) * u))
    got = np.empty((1, x.shape[1]), np.float32)
    moe.forward(x[:1], ids[:1], weights[:1], got)
    error = np.linalg.norm(got - out) / np.linalg.norm(out)
    assert error < 0.025, error
    return error


@pytest.fixture(scope="module", params=SHAPES)
def layer(request, table, pool):
    shape = SHAPES[request.param]
    per_expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    experts = min(shape.num_experts, max(2 * shape.num_experts_per_tok, 3 * limits.cache_bytes() // per_expert, 2**31 // per_expert))
    fmt = table.format("int8")
    packed = stored(fmt, shape, experts)
    expert_map = [e % experts for e in range(shape.num_experts)]
    return shape, packed, expert_map, MoE(fmt, packed, pool, expert_map), per_expert


@pytest.mark.parametrize("tokens", TOKENS)
def test_layer(benchmark, layer, tokens, table, pool, stream):
    shape, packed, expert_map, moe, per_expert = layer
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, shape.hidden_size), np.float32).astype(ml_dtypes.bfloat16)
    out = np.empty_like(x)
    routes = [routing(rng, tokens, shape.num_experts, shape.num_experts_per_tok) for _ in range(16 if tokens <= 64 else 2)]
    error = check(moe, packed, expert_map, x, *routes[0])
    rate_bytes = limits.read_bandwidth(table, pool, stream, per_expert)
    rate_ops = limits.peak_int8(table, pool)
    turn = 0

    def forward():
        nonlocal turn
        turn += 1
        moe.forward(x, *routes[turn % len(routes)], out)

    budget = 2 * per_expert * shape.num_experts_per_tok * tokens / rate_ops
    benchmark.pedantic(forward, rounds=max(3, min(200, int(3 / (budget + 2e-3)))), warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    unique = np.mean([np.unique([expert_map[e] for e in ids.flat]).size if tokens == 1 else np.unique(ids).size for ids, _ in routes])
    sizes = dict(hidden_size=shape.hidden_size, moe_intermediate_size=shape.moe_intermediate_size)
    benchmark.extra_info.update(
        variant=table.name,
        threads=pool.threads,
        gbs=round(unique * per_expert / seconds / 1e9, 1),
        bandwidth=round(unique * per_expert / seconds / rate_bytes, 3),
        of=f"{rate_bytes / 1e9:.1f}GB/s",
        int8=round(2 * per_expert * shape.num_experts_per_tok * tokens / seconds / rate_ops, 3),
        peak=f"{rate_ops / 1e9:.0f}GOPS",
        roofline=round(np.mean([roofline_seconds(sizes, ids, rate_bytes, rate_ops) for ids, _ in routes]) / seconds, 3),
        error=f"{error:.1e}",
    )

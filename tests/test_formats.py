"""The whole layer in every format: float64 within derived bounds, the same bits on every variant and however it is cut."""

import functools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import oracle
import pytest
import strategies
from cases import ACTIVATIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layer import pools, same  # noqa: F401

from ktcy import kernels as registry
from ktcy.config import Activation, LayerShape
from ktcy.moe import MoE
from ktcy.weights.packed import PackedLayer

BF16 = ml_dtypes.bfloat16
FORMATS = ["int8", "int4", "bf16", *oracle.CODED]


@pytest.fixture(params=FORMATS, scope="module")
def fmt(request, kernels):
    """Every format, on every variant."""
    return kernels.format(request.param)


def test_every_format_is_here(kernels):
    assert sorted(kernels.formats) == sorted(FORMATS)


class Source:
    """A `strategies.Layer` as a model in files of a format's own codes, or of floats."""

    def __init__(self, layer, name):
        self.layer, self.name = layer, name
        self.shape, self.activation, self.has_bias = layer.shape, layer.activation, layer.gate_bias is not None
        self.has_order = False

    def expert(self, number, e):
        kept = self.layer.expert(e)
        coded = {part: self.coded(getattr(kept, part)) for part in ("gate", "up", "down")}
        return SimpleNamespace(**{**kept._asdict(), **coded}, source={part: part for part in coded})

    def coded(self, matrix):
        return oracle.encode(matrix, self.name) if self.name in oracle.CODED else matrix


def packed(layer, name):
    return PackedLayer.read(registry.load("avx2").format(name), Source(layer, name), 0)


def forward(fmt, layer, weights, pool, rows=slice(None)):
    moe = MoE(fmt, weights, pool.pool, range(layer.shape.num_experts))
    out = np.empty_like(layer.x[rows])
    moe.forward(layer.x[rows], layer.ids[rows], layer.route[rows], out)
    return out


def check(fmt, pools, layer, threads=2):  # noqa: F811
    weights = packed(layer, fmt.name)
    got = forward(fmt, layer, weights, pools[threads])
    out, bound = layer.reference(fmt.name)
    oracle.assert_within(got, out, oracle.stored(out, bound, got.dtype))
    return weights, got


@settings(max_examples=4)
@given(case=strategies.layers(), threads=st.sampled_from((1, 2, 3)))
def test_any_layer_is_within_the_bound(fmt, pools, case, threads):  # noqa: F811
    """C13 C20 C21 C24 C26: any sizes, values, dtypes, activation and routing; AVX2 gives the same bits."""
    weights, got = check(fmt, pools, case, threads)
    assert same(got, forward(registry.load("avx2").format(fmt.name), case, weights, pools[1]))


@functools.lru_cache(None)
def batch(act):
    """80 tokens of 4 experts with biases: threads, tiles and rows are all in use, K cuts through groups."""
    shape = LayerShape(4, 2, 300, 200)
    return strategies.layer(np.random.default_rng(1), shape, act, 80, dtype=BF16, bias=True, route="padded")


@functools.lru_cache(None)
def one_by_one(name, act):
    """The answer of `batch` on AVX2, one token a call."""
    avx2, layer = registry.load("avx2").format(name), batch(act)
    weights = packed(layer, name)
    from ktcy import CPUInfer

    with CPUInfer(1) as pool:
        return np.concatenate([forward(avx2, layer, weights, pool, slice(t, t + 1)) for t in range(len(layer.x))])


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test_every_activation_and_cut_gives_the_same_bits(fmt, pools, act):  # noqa: F811
    """C27 C29: any thread count, batch and position, with biases."""
    layer = batch(act)
    weights, got = check(fmt, pools, layer, 3)
    assert same(got, one_by_one(fmt.name, act))
    assert same(forward(fmt, layer, weights, pools[1], slice(7, 40)), got[7:40])
    turned = layer._replace(x=layer.x[::-1], ids=layer.ids[::-1], route=layer.route[::-1])
    assert same(forward(fmt, turned, weights, pools[2]), got[::-1])


@functools.lru_cache(None)
def real_sizes(name, hidden, inter):
    shape = LayerShape(1, 1, hidden, inter)
    layer = strategies.layer(np.random.default_rng(hidden + inter), shape, Activation(), 20, dtype=BF16)
    return layer, packed(layer, name), layer.reference(name)


@pytest.mark.parametrize("hidden, inter", [(2880, 96), (704, 1408), (96, 768)])
def test_sizes_of_real_models(fmt, pools, hidden, inter):  # noqa: F811
    """C13: off every multiple of a group, few tokens and many, with one and with three threads."""
    layer, weights, (out, bound) = real_sizes(fmt.name, hidden, inter)
    for threads in (1, 3):
        got = forward(fmt, layer, weights, pools[threads])
        oracle.assert_within(got, out, oracle.stored(out, bound, got.dtype))
        assert same(forward(fmt, layer, weights, pools[threads], slice(0, 3)), got[:3])


def test_packed_weights_read_back(fmt):
    """C37: exactly what the codes mean, or what the format makes of floats; and packing that changes nothing."""
    layer = strategies.layer(np.random.default_rng(3), LayerShape(2, 1, 300, 200), Activation(), 1)
    weights = packed(layer, fmt.name)
    source = Source(layer, fmt.name)
    for e in range(2):
        for back, part in zip(weights.unpack(e), ("gate", "up", "down")):
            matrix = getattr(source.expert(0, e), part)
            if fmt.codes:
                # By value: mxfp4 has one zero.
                assert (back == matrix.dequantize()).all()
            elif fmt.name == "bf16":
                assert same(back, matrix.astype(BF16).astype(np.float32))
            else:
                assert np.linalg.norm(back - matrix) < 0.12 * np.linalg.norm(matrix)
    if fmt.name in ("int8", "bf16"):  # int4 searches for its steps anew
        values = [np.stack(part) for part in zip(*(weights.unpack(e) for e in range(2)))]
        again = PackedLayer.pack(fmt, *values, shape=layer.shape)
        assert [same(a, b) for a, b in zip(again.unpack(0), weights.unpack(0))] == [True] * 3


# Output error against float64 of the original weights, of codes against their own values.
ACCURACY = {"int8": 0.0265, "int4": 0.148, "bf16": 0.003}


@pytest.mark.parametrize("name", FORMATS)
def test_accuracy(name, pools):  # noqa: F811
    """C28: of bf16 Gaussian experts 2048 x 768, activations N(0, 1). Other variants give the same bits."""
    fmt = registry.load("avx2").format(name)
    r = np.random.default_rng(0)
    shape = LayerShape(1, 1, 2048, 768)
    gate, up = (0.02 * r.standard_normal((2, 1, 768, 2048))).astype(BF16)
    down = (0.02 * r.standard_normal((1, 2048, 768))).astype(BF16)
    x = r.standard_normal((24, 2048)).astype(BF16)
    ids, route = np.zeros((24, 1), np.int64), np.ones((24, 1), np.float32)
    layer = strategies.Layer(shape, Activation(), gate, up, down, None, None, None, x, ids, route)
    source = Source(layer, fmt.name).expert(0, 0)
    gate, up, down = (
        (m.dequantize() if fmt.codes else m).astype(np.float64) for m in (source.gate, source.up, source.down)
    )
    x = x.astype(np.float64)
    g, u = x @ gate.T, x @ up.T
    want = (g / (1 + np.exp(-g)) * u) @ down.T
    wide = layer._replace(x=layer.x.astype(np.float32))
    error = np.linalg.norm(forward(fmt, wide, packed(layer, fmt.name), pools[2]) - want) / np.linalg.norm(want)
    assert error <= ACCURACY.get(fmt.name, 0.004)


def test_packed_bytes(kernels):
    """At most 1.01 times the format's own bits, for sizes of real models."""
    bits = dict(int8=8, int4=4.25, bf16=16, fp8=8, fp8_channel=8, mxfp8=8.25, mxfp4=4.25, rawint4=4.5, q4_0=4.5)
    bits |= dict(q8_0=8.5, gptq32=4 + 20 / 32, gptq64=4 + 20 / 64, gptq128=4 + 20 / 128)
    for name in kernels.formats:
        fmt = kernels.format(name)
        for k in (768, 1408, 2048, 2880, 4096, 7168):
            held = fmt.weight_bytes(k) + fmt.scale_bytes(k)
            assert held <= 1.01 * 16 * k * bits[name] / 8 + 64, (name, k)

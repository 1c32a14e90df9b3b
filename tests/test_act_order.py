"""GPTQ's act-order: columns sorted by group, each matrix in its own order, from checkpoint to answer."""

import dataclasses
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import oracle
import pytest
import strategies
from test_layer import pools  # noqa: F401
from test_numa import quiet
from test_schemes import GPTQ, config, experts, gptq, store

import ktcy
from ktcy import kernels as registry
from ktcy.config import Activation, LayerShape
from ktcy.moe import MoE
from ktcy.weights._header import read_header
from ktcy.weights.packed import PackedLayer, layer_path

SHAPE = LayerShape(5, 2, 300, 200)
FORMATS = ["gptq32", "gptq128", "q8_0"]
MATRICES = ("gate", "up", "down")


def coded(rng, w, name, order):
    """A matrix whose columns a quantizer has sorted."""
    return dataclasses.replace(oracle.encode(w if order is None else w[:, order], name), order=order)


def ordered(name, dtype=np.float32, tokens=40):
    """A layer, and its experts as `Quantized`; the first is not sorted."""
    rng = np.random.default_rng(7)
    layer = strategies.layer(rng, SHAPE, Activation(), tokens, dtype=dtype, bias=True, route="padded")
    result = []
    for e, kept in enumerate(layer.experts):
        inputs, middle = (rng.permutation(k) if e else None for k in (SHAPE.hidden_size, SHAPE.moe_intermediate_size))
        matrices = (coded(rng, w, name, o) for w, o in zip(kept[:3], (inputs, inputs, middle)))
        result.append(oracle.Expert(*matrices, *kept[3:]))
    return layer, result


def pack(fmt, layer, coded_experts):
    gate, up, down = zip(*(e[:3] for e in coded_experts))
    return PackedLayer.pack(fmt, gate, up, down, layer.gate_bias, layer.up_bias, layer.down_bias, shape=SHAPE)


def forward(fmt, packed, pool, layer, rows=slice(None)):
    out = np.empty_like(layer.x[rows])
    MoE(fmt, packed, pool, range(SHAPE.num_experts)).forward(
        layer.x[rows], layer.ids[rows], layer.route[rows], out
    )
    return out


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_sorted_layers_are_within_the_bound(kernels, pools, name, dtype):  # noqa: F811
    """Few rows and tiles, one thread and three, alone and in a batch, one group and two: the same bits everywhere."""
    fmt = kernels.format(name)
    layer, quantized = ordered(name, dtype)
    packed = pack(fmt, layer, quantized)
    got = forward(fmt, packed, pools[3].pool, layer)
    out, bound = oracle.moe_layer(layer.x, layer.ids, layer.route, quantized, layer.activation, name)
    oracle.assert_within(got, out, oracle.stored(out, bound, got.dtype))
    assert (forward(fmt, packed, pools[1].pool, layer, slice(11, 12)) == got[11:12]).all()
    with quiet(2, groups=2) as two:
        assert (forward(fmt, packed, two, layer) == got).all()
    avx2 = registry.load("avx2").format(name)
    assert (forward(avx2, packed, pools[2].pool, layer) == got).all()


@pytest.mark.parametrize("name", FORMATS)
def test_panels_of_sorted_layers_give_the_bits_of_pieces(kernels, pools, name):  # noqa: F811
    """C18: so many tokens that panels of rows are taken."""
    fmt = kernels.format(name)
    layer, quantized = ordered(name, tokens=900)
    packed = pack(fmt, layer, quantized)
    got = forward(fmt, packed, pools[2].pool, layer)
    pieces = [forward(fmt, packed, pools[2].pool, layer, slice(at, at + 60)) for at in range(0, 900, 60)]
    assert (got == np.concatenate(pieces)).all()


def test_unpacked_columns_are_those_of_the_inputs():
    fmt = registry.default().format("gptq64")
    layer, quantized = ordered("gptq64")
    packed = pack(fmt, layer, quantized)
    for e, expert in enumerate(quantized):
        assert all((got == q.dequantize()).all() for got, q in zip(packed.unpack(e), expert[:3]))


def test_layers_that_are_not_sorted_store_no_order():
    layer, quantized = ordered("gptq32")
    plain = [e._replace(**{n: dataclasses.replace(getattr(e, n), order=None) for n in MATRICES}) for e in quantized]
    packed = pack(registry.default().format("gptq32"), layer, plain)
    assert packed.gate_up_order is None and packed.down_order is None


def test_orders_survive_the_file(tmp_path, pools):  # noqa: F811
    fmt = registry.default().format("gptq32")
    layer, quantized = ordered("gptq32")
    packed = pack(fmt, layer, quantized)
    packed.save(tmp_path)
    opened = PackedLayer.open(tmp_path, 0)
    for e, expert in enumerate(quantized[1:], 1):
        assert (opened.gate_up_order[e, :300] == expert.gate.order).all()
        assert (opened.down_order[e, :200] == expert.down.order).all()
    assert (opened.gate_up_order == packed.gate_up_order).all() and (opened.down_order[0] == np.arange(256)).all()
    assert (forward(fmt, opened, pools[2].pool, layer) == forward(fmt, packed, pools[2].pool, layer)).all()


@pytest.mark.parametrize("value", [-1, 300, 2**31 - 1, 7])
def test_a_damaged_order_is_refused(tmp_path, value):
    """An index outside the row would read past it; one that comes twice loses another."""
    layer, quantized = ordered("gptq32")
    pack(registry.default().format("gptq32"), layer, quantized).save(tmp_path)
    path = layer_path(tmp_path, 0)
    header = read_header(path)
    data = bytearray(path.read_bytes())
    at = header.tensors["gate_up.order"].begin + 3 * 4 * 320
    order = np.frombuffer(data, "<i4", 300, at)
    order[np.flatnonzero(order != value)[5]] = value
    path.write_bytes(data)
    with pytest.raises(ValueError, match="tensor gate_up.order of expert 3 is no order of 300 inputs"):
        PackedLayer.open(tmp_path, 0)


def test_gate_and_up_in_different_orders_are_refused():
    layer, quantized = ordered("gptq32")
    other = dataclasses.replace(quantized[2].up, order=np.roll(quantized[2].up.order, 1))
    quantized[2] = quantized[2]._replace(up=other)
    with pytest.raises(ValueError, match="up of expert 2: gate and up have different g_idx.*int8, int4 or bf16"):
        pack(registry.default().format("gptq32"), layer, quantized)


def alike(rng, n, k):
    """GPTQ matrices sorted by what is known of their inputs: gate and up in the same order."""
    same = SimpleNamespace(integers=rng.integers, uniform=rng.uniform, shuffle=np.random.default_rng(k).shuffle)
    return gptq(same, n, k, act_order=True)


def test_from_checkpoint_to_converted_folder(tmp_path):
    """Read directly or converted: the values of the checkpoint, columns where they belong."""
    tensors, values = experts("qwen3_moe", alike, 128, 64)
    model = store(tmp_path / "model", tensors, config("qwen3_moe", {**GPTQ, "desc_act": True}, 128, 64))
    ktcy.convert(model, tmp_path / "out", "gptq", verify=True)
    packed = PackedLayer.open(tmp_path / "out", 1)
    assert packed.format == "gptq32" and packed.gate_up_order is not None
    for e in range(packed.shape.num_experts):
        assert all((got == want).all() for got, want in zip(packed.unpack(e), values[1, e]))


def test_an_order_that_the_config_denies_is_refused(tmp_path):
    tensors, _ = experts("qwen3_moe", alike, 128, 64)
    model = store(tmp_path / "model", tensors, config("qwen3_moe", GPTQ, 128, 64))
    with pytest.raises(ValueError, match="gate_proj.*g_idx sorts the inputs.*desc_act"):
        ktcy.convert(model, tmp_path / "out", "gptq")

"""Quantized checkpoints: every packing, written once more here with loops of its own, is read back exactly."""

import json
import os
import tracemalloc

import ml_dtypes
import models
import numpy as np
import pytest

from ktcy.weights import Checkpoint
from ktcy.weights._header import ITEMSIZE
from ktcy.weights.quantized import Quantized

E, LAYERS = 3, 2
RNG = np.random.default_rng


def e4m3(codes):
    """The values of e4m3 codes, from sign, exponent and mantissa."""
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(int) - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where(codes & 127 == 127, np.nan, value * np.where(sign, -1, 1))


def e2m1(codes):
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return values[codes & 7] * np.where(codes & 8, -1, 1)


def int32s(nibbles):
    """[..., 8] to one int32, the first in the lowest bits."""
    value = np.zeros(nibbles.shape[:-1], np.uint32)
    for j in range(8):
        value |= nibbles[..., j].astype(np.uint32) << np.uint32(4 * j)
    return value.view(np.int32)


# Each writer gives the tensors of one matrix [n, k], {suffix: (dtype, array)}, and its float32 values.


def fp8_codes(rng, n, k):
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    codes[codes & 127 == 127] = 0
    return codes


def fp8(rng, n, k, name="weight_scale_inv", dtype="F32", parts=1, flat=False):
    """``parts`` matrices one below the other, each with blocks of its own. flat: one row or column has one axis."""
    codes = fp8_codes(rng, n, k)
    part = n // parts
    rows = -(-part // 128)
    scale = rng.uniform(1e-4, 1e-2, (parts * rows, -(-k // 128))).astype(np.float32)
    scale[0, 0] = 1e-23
    stored = as_dtype(scale, dtype)
    if dtype == "F8_E8M0":
        stored = rng.integers(100, 130, scale.shape, dtype=np.uint8)
        scale = (2.0 ** (stored.astype(float) - 127)).astype(np.float32)
    else:
        scale = stored.astype(np.float32)
    values = np.empty((n, k), np.float32)
    for r in range(n):
        for c in range(0, k, 128):
            block = scale[r // part * rows + r % part // 128, c // 128]
            values[r, c : c + 128] = e4m3(codes[r, c : c + 128]).astype(np.float32) * block
    if flat and 1 in stored.shape:
        stored = stored.reshape(-1)
    return {"weight": ("F8_E4M3", codes), name: (dtype, stored)}, values


def fp8_channel(rng, n, k, dtype="F32", column=True):
    codes = fp8_codes(rng, n, k)
    scale = as_dtype(rng.uniform(1e-4, 1e-2, (n, 1)), dtype)
    values = e4m3(codes).astype(np.float32) * scale.astype(np.float32)
    return {"weight": ("F8_E4M3", codes), "weight_scale": (dtype, scale if column else scale[:, 0])}, values


def mxfp8(rng, n, k, dtype="U8", name="weight_scale_inv"):
    codes = fp8_codes(rng, n, k)
    scale = rng.integers(90, 140, (n, k // 32), dtype=np.uint8)
    values = e4m3(codes).reshape(n, k // 32, 32) * 2.0 ** (scale[:, :, None].astype(float) - 127)
    return {"weight": ("F8_E4M3", codes), name: (dtype, scale)}, values.reshape(n, k).astype(np.float32)


def mxfp4(rng, n, k, dtype="U8", blocks=True):
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scale = rng.integers(90, 140, (n, k // 32), dtype=np.uint8)
    values = e2m1(codes).reshape(n, k // 32, 32) * 2.0 ** (scale[:, :, None].astype(float) - 127)
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    if blocks:
        tensors = {"blocks": ("U8", packed.reshape(n, k // 32, 16)), "scales": (dtype, scale)}
    else:
        tensors = {"weight": ("I8", packed), "scale": (dtype, scale)}
    return tensors, values.reshape(n, k).astype(np.float32)


def rawint4(rng, n, k, group=32, dtype="BF16", shape="I64"):
    q = rng.integers(-8, 8, (n, k))
    groups = k // group if group else 1
    scale = as_dtype(rng.uniform(1e-3, 1e-2, (n, groups)), dtype)
    values = q.reshape(n, groups, -1).astype(np.float32) * scale[:, :, None].astype(np.float32)
    padded = np.zeros((n, -(-k // 8) * 8), np.uint8)
    padded[:, :k] = q + 8
    tensors = {"weight_packed": ("I32", int32s(padded.reshape(n, -1, 8))), "weight_scale": (dtype, scale)}
    if shape:
        tensors["weight_shape"] = (shape, np.array([n, k], np.int64 if shape == "I64" else np.int32))
    return tensors, values.reshape(n, k)


def gptq(rng, n, k, group=32, version=1, symmetric=False, act_order=False, g_idx=True, dtype="F16", bias=False):
    size = group if group > 0 else k
    q = rng.integers(0, 16, (n, k), dtype=np.uint8)
    zero = np.full((k // size, n), 8) if symmetric else rng.integers(0, 16, (k // size, n))
    scale = as_dtype(rng.uniform(1e-3, 1e-2, (k // size, n)), dtype)
    index = np.arange(k) // size
    if act_order:
        rng.shuffle(index)
    values = np.empty((n, k), np.float32)
    for c in range(k):
        g = index[c]
        values[:, c] = (q[:, c] - zero[g]).astype(np.float32) * scale[g].astype(np.float32)
    # Eight inputs of one output make an int32; zero points eight outputs.
    stored = zero - 1 & 15 if version == 1 else zero
    tensors = {
        "qweight": ("I32", int32s(q.T.reshape(k // 8, 8, n).transpose(0, 2, 1))),
        "qzeros": ("I32", int32s(stored.reshape(k // size, n // 8, 8))),
        "scales": (dtype, scale),
    }
    if g_idx:
        tensors["g_idx"] = ("I32", index.astype(np.int32))
    if bias:
        tensors["bias"] = (dtype, np.zeros_like(scale[0]))
    return tensors, values


def awq(rng, n, k, group=32, zeros=True, dtype="F16"):
    size = group if group > 0 else k
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    zero = rng.integers(0, 16, (k // size, n)) if zeros else np.full((k // size, n), 8)
    scale = as_dtype(rng.uniform(1e-3, 1e-2, (k // size, n)), dtype)
    values = (q - np.repeat(zero, size, 0)).astype(np.float32) * np.repeat(scale, size, 0).astype(np.float32)
    # AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of every eight, in this order.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"qweight": ("I32", int32s(q.reshape(k, -1, 8)[:, :, order])), "scales": (dtype, scale)}
    if zeros:
        tensors["qzeros"] = ("I32", int32s(zero.reshape(len(zero), -1, 8)[:, :, order]))
    return tensors, values.T


def as_dtype(values, dtype):
    return values.astype({"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E8M0": "f4"}[dtype])


FP8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
GPTQ = dict(quant_method="gptq", bits=4, group_size=32, sym=False, desc_act=False)
AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")


def compressed(stored="pack-quantized", **weights):
    plain = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, actorder=None)
    group = dict(targets=["Linear"], weights={**plain, **weights})
    return dict(quant_method="compressed-tensors", format=stored, config_groups=dict(group_0=group))


# FP8 attention and INT4 experts, each group with a format of its own.
MIXED = dict(
    quant_method="compressed-tensors",
    format="mixed-precision",
    config_groups=dict(
        group_0=dict(targets=["re:.*self_attn.*"], format="float-quantized", weights=dict(num_bits=8, type="float")),
        group_1=dict(
            targets=["re:.*mlp.experts.*"],
            format="pack-quantized",
            weights=compressed()["config_groups"]["group_0"]["weights"],
        ),
    ),
)
CHANNEL = compressed("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None)


# Files.


def save(path, tensors):
    """{name: (dtype, array)} as a safetensors file."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        stored = np.ascontiguousarray(array).tobytes()
        header[name] = dict(dtype=dtype, shape=array.shape, data_offsets=(len(data), len(data) + len(stored)))
        data += stored
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def store(folder, tensors, config, sharded=False):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save(folder / "model.safetensors", tensors)
        return folder
    # Tensors of one matrix lie in different shards.
    placed = {name: f"model-{n % 3 + 1:05d}-of-00003.safetensors" for n, name in enumerate(tensors)}
    for shard in set(placed.values()):
        save(folder / shard, {name: tensors[name] for name in tensors if placed[name] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=placed)))
    return folder


# model -> root of a layer's experts, names of gate, up and down, and the config
MODELS = {
    "qwen3_moe": ("model.layers.{}.mlp.experts.", ("gate_proj", "up_proj", "down_proj"), {}),
    "deepseek_v3": (
        "model.layers.{}.mlp.experts.",
        ("gate_proj", "up_proj", "down_proj"),
        dict(first_k_dense_replace=0),
    ),
    "kimi_k2": (
        "language_model.model.layers.{}.mlp.experts.",
        ("gate_proj", "up_proj", "down_proj"),
        dict(first_k_dense_replace=0),
    ),
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.", ("w1", "w3", "w2"), {}),
    "minimax_m2": ("model.layers.{}.block_sparse_moe.experts.", ("w1", "w3", "w2"), {}),
    "minimax_m3_vl_text": ("language_model.model.layers.{}.block_sparse_moe.experts.", ("w1", "w3", "w2"), {}),
    "deepseek_v4": ("layers.{}.ffn.experts.", ("w1", "w3", "w2"), dict(swiglu_limit=10.0)),
    "glm4_moe": (
        "model.layers.{}.mlp.experts.",
        ("gate_proj", "up_proj", "down_proj"),
        dict(first_k_dense_replace=0),
    ),
    "gpt_oss": ("model.layers.{}.mlp.experts.", ("gate_proj", "up_proj", "down_proj"), {}),
}


def config(model, quantization, h, i):
    plain = dict(
        model_type=model,
        hidden_act="silu",
        hidden_size=h,
        moe_intermediate_size=i,
        intermediate_size=i,
        num_experts=E,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
        quantization_config=quantization,
    )
    return {**plain, **MODELS[model][2]}


def experts(model, write, h, i, seed=0):
    """Tensors of all experts, one matrix a time, and ``{(layer, e): [gate, up, down]}``."""
    rng = RNG(seed)
    root, names, _ = MODELS[model]
    tensors, values = {}, {}
    for layer in range(LAYERS):
        for e in range(E):
            values[layer, e] = []
            for name, (n, k) in zip(names, ((i, h), (i, h), (h, i))):
                parts, value = write(rng, n, k)
                values[layer, e].append(value)
                tensors |= {f"{root.format(layer)}{e}.{name}.{suffix}": part for suffix, part in parts.items()}
    return tensors, values


def assert_reads(folder, values, kind, code, group):
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.kind == kind
        assert checkpoint.layers == list(range(LAYERS))
        for (layer, e), matrices in values.items():
            expert = checkpoint.expert(layer, e)
            for part, value in zip((expert.gate, expert.up, expert.down), matrices):
                assert isinstance(part, Quantized)
                assert part.kind == code and part.group == group
                assert part.codes.dtype == np.uint8 and part.shape == value.shape
                assert part.scale.shape == (part.shape[0], -(-part.shape[1] // group) if group else 1)
                np.testing.assert_array_equal(part.dequantize(), value)


def part(write, **options):
    return lambda rng, n, k: write(rng, n, k, **options)


CASES = {
    # name -> model, writer, quantization_config, H, I, kind, kind of the codes, group
    "fp8": ("deepseek_v3", fp8, FP8, 256, 128, "fp8", "e4m3", 128),
    "fp8 flat": ("qwen3_moe", part(fp8, flat=True), FP8, 256, 128, "fp8", "e4m3", 128),
    "fp8 qwen": ("qwen3_moe", fp8, FP8, 128, 384, "fp8", "e4m3", 128),
    "fp8 minimax": ("minimax_m2", fp8, {**FP8, "fmt": "float8_e4m3fn"}, 256, 128, "fp8", "e4m3", 128),
    "fp8 cut blocks": ("deepseek_v3", fp8, FP8, 200, 328, "fp8", "e4m3", 128),
    "fp8 small": ("deepseek_v3", fp8, FP8, 8, 6, "fp8", "e4m3", 128),
    "fp8 bf16 scales": ("qwen3_moe", part(fp8, dtype="BF16"), FP8, 200, 136, "fp8", "e4m3", 128),
    "fp8 e8m0 scales": ("qwen3_moe", part(fp8, dtype="F8_E8M0"), FP8, 200, 136, "fp8", "e4m3", 128),
    "fp8 weight_scale": ("qwen3_moe", part(fp8, name="weight_scale"), FP8, 200, 136, "fp8", "e4m3", 128),
    "fp8 compressed": (
        "qwen3_moe",
        part(fp8, name="weight_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        200,
        136,
        "fp8",
        "e4m3",
        128,
    ),
    "channel": ("glm4_moe", fp8_channel, CHANNEL, 72, 48, "fp8_perchannel", "e4m3", 0),
    "channel bf16": ("glm4_moe", part(fp8_channel, dtype="BF16"), CHANNEL, 72, 48, "fp8_perchannel", "e4m3", 0),
    "channel flat": (
        "glm4_moe",
        part(fp8_channel, column=False),
        dict(quant_method="fp8"),
        72,
        48,
        "fp8_perchannel",
        "e4m3",
        0,
    ),
    "mxfp8": ("minimax_m3_vl_text", mxfp8, dict(quant_method="mxfp8"), 64, 96, "mxfp8", "e4m3", 32),
    "mxfp8 e8m0": (
        "minimax_m3_vl_text",
        part(mxfp8, dtype="F8_E8M0"),
        dict(quant_method="fp8", weight_block_size=[1, 32], scale_fmt="ue8m0"),
        160,
        128,
        "mxfp8",
        "e4m3",
        32,
    ),
    "mxfp4": (
        "deepseek_v4",
        part(mxfp4, blocks=False, dtype="F8_E8M0"),
        {**FP8, "scale_fmt": "ue8m0"},
        64,
        96,
        "mxfp4",
        "e2m1",
        32,
    ),
    "rawint4": ("kimi_k2", rawint4, compressed(), 64, 96, "rawint4", "int4", 32),
    "rawint4 f16": ("kimi_k2", part(rawint4, dtype="F16", shape="I32"), compressed(), 64, 96, "rawint4", "int4", 32),
    "rawint4 128": (
        "qwen3_moe",
        part(rawint4, group=128, shape=None),
        compressed(group_size=128),
        256,
        128,
        "rawint4",
        "int4",
        128,
    ),
    "rawint4 rows": (
        "qwen3_moe",
        part(rawint4, group=0),
        compressed(strategy="channel", group_size=None),
        60,
        36,
        "rawint4",
        "int4",
        0,
    ),
    "gptq": ("mixtral", gptq, GPTQ, 64, 96, "gptq_int4", "int4", 32),
    "gptq v2": (
        "qwen3_moe",
        part(gptq, version=2),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        64,
        96,
        "gptq_int4",
        "int4",
        32,
    ),
    "gptq v1 named": ("qwen3_moe", gptq, {**GPTQ, "checkpoint_format": "gptq"}, 64, 96, "gptq_int4", "int4", 32),
    "gptq sym": ("qwen3_moe", part(gptq, symmetric=True), {**GPTQ, "sym": True}, 64, 96, "gptq_int4", "int4", 32),
    "gptq 64": ("qwen3_moe", part(gptq, group=64), {**GPTQ, "group_size": 64}, 192, 128, "gptq_int4", "int4", 64),
    "gptq 128": (
        "qwen3_moe",
        part(gptq, group=128, act_order=True, dtype="BF16"),
        {**GPTQ, "group_size": 128, "desc_act": True},
        256,
        128,
        "gptq_int4",
        "int4",
        128,
    ),
    "gptq rows": ("qwen3_moe", part(gptq, group=-1), {**GPTQ, "group_size": -1}, 64, 40, "gptq_int4", "int4", 0),
    "gptq no g_idx": ("qwen3_moe", part(gptq, g_idx=False, bias=True), GPTQ, 64, 96, "gptq_int4", "int4", 32),
    "gptq act-order": (
        "qwen3_moe",
        part(gptq, act_order=True),
        {**GPTQ, "desc_act": True},
        64,
        96,
        "gptq_int4",
        "int4",
        32,
    ),
    "awq": ("mixtral", awq, AWQ, 64, 96, "awq_int4", "int4", 32),
    "awq 128": ("qwen3_moe", part(awq, group=128), {**AWQ, "group_size": 128}, 256, 128, "awq_int4", "int4", 128),
    "awq rows": (
        "qwen3_moe",
        part(awq, group=-1, dtype="BF16"),
        {**AWQ, "group_size": -1},
        40,
        64,
        "awq_int4",
        "int4",
        0,
    ),
    "gptq v2 of newer writers": (
        "qwen3_moe",
        part(gptq, version=2),
        {**GPTQ, "format": "gptq_v2"},
        64,
        96,
        "gptq_int4",
        "int4",
        32,
    ),
    "rawint4 beside fp8": ("kimi_k2", rawint4, MIXED, 64, 96, "rawint4", "int4", 32),
    "awq of other keys": (
        "qwen3_moe",
        awq,
        dict(quant_method="awq", w_bit=4, q_group_size=32, format="gemm"),
        64,
        96,
        "awq_int4",
        "int4",
        32,
    ),
    "awq no zeros": (
        "qwen3_moe",
        part(awq, zeros=False),
        {**AWQ, "zero_point": False},
        64,
        96,
        "awq_int4",
        "int4",
        32,
    ),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("case", CASES)
def test_packing_reads_back(case, sharded, tmp_path):
    """C21 C30 C34 Order of nibbles, offsets, interleaves, blocks that K and N cut, scales of 1e-23."""
    model, write, quantization, h, i, *expected = CASES[case]
    tensors, values = experts(model, write, h, i)
    settings = config(model, quantization, h, i)
    if MODELS[model][0].startswith("language_model"):
        # The quantization stands in the half of the text in Kimi-K2.5, beside it elsewhere.
        outer = {} if model == "kimi_k2" else {"quantization_config": settings.pop("quantization_config")}
        settings = dict(model_type="multimodal", text_config=settings, **outer)
    assert_reads(store(tmp_path, tensors, settings, sharded), values, *expected)


# Fused forms.


def fuse(model, tensors, suffixes, interleaved=False, drop=True):
    """Per-expert tensors as fused ones, ``{suffix: fused suffix}``; gate over up, or row by row."""
    root, names, _ = MODELS[model]
    fused = {} if drop else dict(tensors)
    for layer in range(LAYERS):
        at = root.format(layer)
        for suffix, new in suffixes.items():
            stacks = []
            for name in names:
                parts = [tensors[f"{at}{e}.{name}.{suffix}"] for e in range(E)]
                stacks.append((parts[0][0], np.stack([array for _, array in parts])))
                if not drop:
                    for e in range(E):
                        del fused[f"{at}{e}.{name}.{suffix}"]
            (dtype, gate), (_, up), down = stacks
            both = np.stack([gate, up], 2).reshape(E, -1, *gate.shape[2:]) if interleaved else np.hstack([gate, up])
            fused[f"{at}gate_up_proj{new}"], fused[f"{at}down_proj{new}"] = (dtype, both), down
    return fused


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("drop", [True, False], ids=["all", "scales"])
@pytest.mark.parametrize("sizes", [(256, 128), (200, 192), (200, 40)], ids=str)
def test_fused_fp8(sizes, drop, sharded, tmp_path):
    """C31 C34 Each half has blocks of its own; also with split weights, as transformers 5 saves them."""
    tensors, values = experts("qwen3_moe", fp8, *sizes)
    suffixes = {"weight": "", "weight_scale_inv": "_scale_inv"}
    if not drop:
        del suffixes["weight"]
    tensors = fuse("qwen3_moe", tensors, suffixes, drop=drop)
    store(tmp_path, tensors, config("qwen3_moe", FP8, *sizes), sharded)
    assert_reads(tmp_path, values, "fp8", "e4m3", 128)


@pytest.mark.parametrize("inter", [72, 96, 200, 328])
def test_fused_fp8_blocks_through_the_seam(inter, tmp_path):
    """C34 Gate and up are one matrix whose blocks go on from one to the other."""
    hidden, root = 200, MODELS["qwen3_moe"][0]
    rng, tensors, values = RNG(0), {}, {}
    for layer in range(LAYERS):
        both = [fp8(rng, 2 * inter, hidden) for _ in range(E)]
        down = [fp8(rng, hidden, inter) for _ in range(E)]
        for name, made in (("gate_up_proj", both), ("down_proj", down)):
            for suffix, new in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                stack = np.stack([parts[suffix][1] for parts, _ in made])
                tensors[root.format(layer) + name + new] = made[0][0][suffix][0], stack
        for e in range(E):
            values[layer, e] = [both[e][1][:inter], both[e][1][inter:], down[e][1]]
    store(tmp_path, tensors, config("qwen3_moe", FP8, hidden, inter))
    assert_reads(tmp_path, values, "fp8", "e4m3", 128)


def gpt_oss(h=64, i=96, seed=0):
    """MXFP4 as gpt-oss is released: gate and up rows alternate; biases."""
    tensors, values = experts("gpt_oss", mxfp4, h, i, seed)
    tensors = fuse("gpt_oss", tensors, {"blocks": "_blocks", "scales": "_scales"}, interleaved=True)
    rng, biases = RNG(seed + 1), {}
    for layer in range(LAYERS):
        both, down = (as_dtype(rng.standard_normal((E, n)), "BF16") for n in (2 * i, h))
        root = MODELS["gpt_oss"][0].format(layer)
        tensors[root + "gate_up_proj_bias"], tensors[root + "down_proj_bias"] = ("BF16", both), ("BF16", down)
        for e in range(E):
            biases[layer, e] = both[e, 0::2], both[e, 1::2], down[e]
    return tensors, values, biases


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_gpt_oss_mxfp4(sharded, tmp_path):
    tensors, values, biases = gpt_oss()
    store(tmp_path, tensors, config("gpt_oss", dict(quant_method="mxfp4"), 64, 96), sharded)
    assert_reads(tmp_path, values, "mxfp4", "e2m1", 32)
    with Checkpoint(tmp_path) as checkpoint:
        for (layer, e), bias in biases.items():
            expert = checkpoint.expert(layer, e)
            for got, want in zip((expert.gate_bias, expert.up_bias, expert.down_bias), bias):
                assert got.dtype == np.float32
                np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("drop", [True, False], ids=["fused", "scales"])
def test_halves_are_not_guessed_where_rows_alternate(drop, tmp_path):
    """C30 C34 Blocks of one half make no sense, and split weights no fused tensor, where gate and up alternate."""
    tensors, _ = experts("gpt_oss", fp8, 200, 192)
    suffixes = {"weight": "", "weight_scale_inv": "_scale_inv"}
    if not drop:
        del suffixes["weight"]
    tensors = fuse("gpt_oss", tensors, suffixes, drop=drop)
    for layer in range(LAYERS):
        root = MODELS["gpt_oss"][0].format(layer)
        tensors[root + "gate_up_proj_bias"] = "F32", np.zeros((E, 384), np.float32)
        tensors[root + "down_proj_bias"] = "F32", np.zeros((E, 200), np.float32)
    store(tmp_path, tensors, config("gpt_oss", FP8, 200, 192))
    refuses(tmp_path, None, "gate_up_proj_scale_inv has shape" if drop else "lacks expert tensors")


def test_scales_of_two_names(tmp_path):
    """C30"""
    tensors, settings, _ = tensor_of("fp8")
    twice = {k.removesuffix("_inv"): v for k, v in tensors.items()}
    refuses(store(tmp_path, {**tensors, **twice}, settings), None, "weight_scale_inv and weight_scale beside it")


# What is kept and what is not.


def test_scales_of_int4_keep_their_dtype(tmp_path):
    for dtype, kept in (("BF16", ml_dtypes.bfloat16), ("F16", np.float16)):
        for n, (write, quantization) in enumerate([(rawint4, compressed()), (gptq, GPTQ), (awq, AWQ)]):
            tensors, _ = experts("qwen3_moe", part(write, dtype=dtype), 64, 32)
            with Checkpoint(store(tmp_path / f"{dtype}{n}", tensors, config("qwen3_moe", quantization, 64, 32))) as c:
                assert c.expert(0, 0).gate.scale.dtype == kept


@pytest.mark.parametrize("dtype", ["BF16", "F16", None])
def test_float32_scales_of_int4_must_be_narrower_numbers(dtype, tmp_path):
    def write(rng, n, k):
        parts, values = rawint4(rng, n, k, dtype=dtype or "F32")
        parts["weight_scale"] = "F32", parts["weight_scale"][1].astype(np.float32)
        return parts, values

    tensors, values = experts("qwen3_moe", write, 64, 32)
    store(tmp_path, tensors, config("qwen3_moe", compressed(), 64, 32))
    if dtype:
        assert_reads(tmp_path, values, "rawint4", "int4", 32)
    else:
        refuses(tmp_path, (0, 0), "0.gate_proj.weight_scale", "at [0, 0]", "bfloat16 or float16")


def test_zero_points_and_order_only_where_they_say_something(tmp_path):
    plain, _ = experts("qwen3_moe", part(gptq, symmetric=True), 64, 32)
    full, _ = experts("qwen3_moe", part(gptq, act_order=True), 64, 32)
    with Checkpoint(store(tmp_path / "a", plain, config("qwen3_moe", GPTQ, 64, 32))) as c:
        up = c.expert(0, 0).up
        assert up.zero is None and up.order is None
    with Checkpoint(store(tmp_path / "b", full, config("qwen3_moe", GPTQ, 64, 32))) as c:
        up = c.expert(1, 2).up
        assert up.zero.shape == up.scale.shape == (32, 2) and up.zero.dtype == np.uint8
        index = full["model.layers.1.mlp.experts.2.up_proj.g_idx"][1]
        np.testing.assert_array_equal(up.order, np.argsort(index, kind="stable"))


def test_zero_scales_are_zero_weights(tmp_path):
    """C21 C22 A dead block."""
    tensors, _ = experts("deepseek_v3", fp8, 200, 136)
    for name, (_, array) in tensors.items():
        if "scale" in name:
            array[:] = 0
    with Checkpoint(store(tmp_path, tensors, config("deepseek_v3", FP8, 200, 136))) as c:
        assert not np.any(c.expert(0, 1).up.dequantize())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_stay_nan(code, tmp_path):
    """C22 Who packs the codes refuses them, with row and column; nothing makes numbers of them."""
    tensors, _ = experts("deepseek_v3", fp8, 200, 136)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][1][135, 7] = code
    with Checkpoint(store(tmp_path, tensors, config("deepseek_v3", FP8, 200, 136))) as c:
        values = c.expert(1, 2).up.dequantize()
    assert np.argwhere(np.isnan(values)).tolist() == [[135, 7]]


def test_quantized_layers_of_multi_token_prediction_are_ignored(tmp_path):
    tensors, values = experts("deepseek_v3", fp8, 200, 136)
    extra = {k.replace("layers.1", "layers.2"): v for k, v in tensors.items() if "layers.1" in k}
    store(tmp_path, {**tensors, **extra}, config("deepseek_v3", FP8, 200, 136))
    assert_reads(tmp_path, values, "fp8", "e4m3", 128)


@pytest.mark.parametrize("kind", ["fp8", "rawint4", "gptq_int4", "awq_int4", "mxfp4"])
def test_memory_is_that_of_two_experts(kind, tmp_path):
    """C63 C65 Raw bytes and codes of one expert, not of a model; the file is sparse, all zeros."""
    h, i = 2048, 1024
    one = 3 * h * i
    quantization = dict(fp8=FP8, rawint4=compressed(), gptq_int4=GPTQ, awq_int4=AWQ, mxfp4=dict(quant_method="mxfp4"))

    def parts(n, k):
        if kind == "fp8":
            return {".weight": ("F8_E4M3", (n, k)), ".weight_scale_inv": ("F32", (n // 128, k // 128))}
        if kind == "rawint4":
            return {".weight_packed": ("I32", (n, k // 8)), ".weight_scale": ("BF16", (n, k // 32))}
        if kind == "mxfp4":
            groups = (E, n, k // 32)
            return {"_blocks": ("U8", (*groups, 16)), "_scales": ("U8", groups), "_bias": ("BF16", (E, n))}
        weight = (k // 8, n) if kind == "gptq_int4" else (k, n // 8)
        groups = k // 32
        return {".qweight": ("I32", weight), ".qzeros": ("I32", (groups, n // 8)), ".scales": ("F16", (groups, n))}

    root, header, end = MODELS["qwen3_moe"][0], {}, 0
    matrices = {f"{e}.{name}": s for e in range(E) for name, s in zip(MODELS["qwen3_moe"][1], [(i, h), (i, h), (h, i)])}
    if kind == "mxfp4":
        matrices = dict(gate_up_proj=(2 * i, h), down_proj=(h, i))
    for layer in range(LAYERS):
        for name, shape in matrices.items():
            for suffix, (dtype, dims) in parts(*shape).items():
                begin, end = end, end + ITEMSIZE[dtype] * int(np.prod(dims))
                header[root.format(layer) + name + suffix] = dict(dtype=dtype, shape=dims, data_offsets=(begin, end))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(tmp_path / "model.safetensors", 8 + len(text) + end)
    settings = config("gpt_oss" if kind == "mxfp4" else "qwen3_moe", quantization[kind], h, i)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tracemalloc.start()
    try:
        with Checkpoint(tmp_path) as checkpoint:
            assert checkpoint.kind == kind
            for layer in range(LAYERS):
                for e in range(E):
                    assert checkpoint.expert(layer, e).down.shape == (h, i)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert one <= peak < 2 * one


# Bad input.


def refuses(folder, read=None, *words):
    """Opening fails, or opening does not and reading the expert does; the message holds the words."""
    if read is None:
        with pytest.raises(ValueError) as caught:
            Checkpoint(folder)
    else:
        with Checkpoint(folder) as checkpoint, pytest.raises(ValueError) as caught:
            checkpoint.expert(*read)
    for word in (folder, *words):
        assert str(word) in str(caught.value)


INF, NAN = np.inf, np.nan


def tensor_of(case):
    """The tensors of a case and where those of layer 1, expert 1, up begin."""
    model, write, quantization, h, i, *_ = CASES[case]
    tensors, _ = experts(model, write, h, i)
    root, names, _ = MODELS[model]
    return tensors, config(model, quantization, h, i), f"{root.format(1)}1.{names[1]}."


SCALES = {
    "fp8": "weight_scale_inv",
    "fp8 bf16 scales": "weight_scale_inv",
    "channel": "weight_scale",
    "rawint4": "weight_scale",
    "rawint4 f16": "weight_scale",
    "gptq": "scales",
    "awq": "scales",
}


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1e-3])
@pytest.mark.parametrize("case", SCALES)
def test_scale_that_is_no_scale(case, value, tmp_path):
    """C22 The message names file, tensor with layer and expert, and position."""
    tensors, settings, at = tensor_of(case)
    array = tensors[at + SCALES[case]][1]
    array[-1, -1] = value
    store(tmp_path, tensors, settings)
    position = [array.shape[0] - 1, array.shape[1] - 1]
    refuses(tmp_path, (1, 1), "model.safetensors", at + SCALES[case], f"at {position}", "expected a finite number")
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.expert(1, 0)


@pytest.mark.parametrize(
    "case, suffix",
    [("mxfp4", "scale"), ("mxfp8", "weight_scale_inv"), ("fp8 e8m0 scales", "weight_scale_inv")],
)
def test_e8m0_nan(case, suffix, tmp_path):
    """C22 0xFF."""
    tensors, settings, at = tensor_of(case)
    tensors[at + suffix][1][1, 1] = 0xFF
    refuses(store(tmp_path, tensors, settings), (1, 1), at + suffix, "scale 255 at [1, 1]", "e8m0")


def test_e8m0_nan_of_a_fused_tensor_names_the_expert(tmp_path):
    """C22"""
    tensors, _, _ = gpt_oss()
    tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][1][2, 5, 1] = 0xFF
    store(tmp_path, tensors, config("gpt_oss", dict(quant_method="mxfp4"), 64, 96))
    refuses(tmp_path, (1, 2), "experts.gate_up_proj_scales, expert 2 ", "at [5, 1]")


@pytest.mark.parametrize(
    "case, suffix",
    [
        ("fp8", "weight"),
        ("fp8", "weight_scale_inv"),
        ("channel", "weight_scale"),
        ("mxfp4", "scale"),
        ("mxfp8", "weight_scale_inv"),
        ("rawint4", "weight_packed"),
        ("rawint4", "weight_scale"),
        ("gptq", "qweight"),
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("gptq act-order", "g_idx"),
        ("awq", "qweight"),
        ("awq", "qzeros"),
        ("awq", "scales"),
    ],
)
def test_tensor_of_a_matrix_that_is_missing_or_wrong(case, suffix, tmp_path):
    """C30 C31 C33 Missing, of another shape, cut short, of another dtype, for one matrix; missing for all."""
    tensors, settings, at = tensor_of(case)
    name = at + suffix
    dtype, array = tensors.pop(name)
    refuses(store(tmp_path / "missing", tensors, settings), None, "lacks expert tensors of layer 1", name)
    for n, wrong in enumerate((array[:-1], array[..., :-1], array.reshape(1, *array.shape))):
        folder = store(tmp_path / f"shape{n}", {**tensors, name: (dtype, wrong)}, settings)
        refuses(folder, None, "model.safetensors", f"{name} has shape {list(wrong.shape)}", "config.json makes it")
    folder = store(tmp_path / "dtype", {**tensors, name: ("F64", array.astype(np.float64))}, settings)
    refuses(folder, None, "model.safetensors", f"{name} has dtype F64, expected", dtype)
    others = {k: v for k, v in tensors.items() if not k.endswith("." + suffix)}
    refuses(store(tmp_path / "all", others, settings), None, "experts.0.")


@pytest.mark.parametrize("case", ["fp8", "channel", "mxfp4", "mxfp8", "rawint4", "gptq", "awq"])
def test_formats_mixed_in_one_layer(case, tmp_path):
    """C30 One matrix, one expert or one layer is float, the others are not; and the other way round."""
    tensors, settings, at = tensor_of(case)
    root = at.rsplit(".", 3)[0] + "."
    h, i = settings["hidden_size"], settings["moe_intermediate_size"]
    names = MODELS[settings["model_type"]][1]
    shapes = dict(zip(names, ((i, h), (i, h), (h, i))))
    floats = {
        f"{r}{e}.{name}.weight": ("BF16", as_dtype(np.ones(shape), "BF16"))
        for r in (root, root.replace("layers.1", "layers.0"))
        for e in range(E)
        for name, shape in shapes.items()
    }
    for n, start in enumerate((at, root + "1.", root)):
        mixed = {k: v for k, v in tensors.items() if not k.startswith(start)}
        mixed |= {k: v for k, v in floats.items() if k.startswith(start)}
        refuses(store(tmp_path / f"float{n}", mixed, settings), None, start, "all experts must be stored in one way")
        mixed = {k: v for k, v in floats.items() if not k.startswith(start)}
        mixed |= {k: v for k, v in tensors.items() if k.startswith(start)}
        refuses(store(tmp_path / f"coded{n}", mixed, settings), None, start)


@pytest.mark.parametrize("case, group", [("rawint4", 16), ("gptq", 64), ("awq", 16)])
def test_group_sizes_mixed_in_one_layer(case, group, tmp_path):
    """C30"""
    tensors, settings, at = tensor_of(case)
    write = {"rawint4": rawint4, "gptq": gptq, "awq": awq}[case]
    parts, _ = write(RNG(1), settings["moe_intermediate_size"], settings["hidden_size"], group=group)
    store(tmp_path, {**tensors, **{at + suffix: tensor for suffix, tensor in parts.items()}}, settings)
    refuses(tmp_path, None, at, "has shape", "config.json makes it")


@pytest.mark.parametrize("case", ["rawint4", "gptq", "awq", "mxfp4", "mxfp8"])
def test_group_that_does_not_divide(case, tmp_path):
    """C30"""
    tensors, settings, _ = tensor_of(case)
    if case in ("rawint4", "gptq", "awq"):
        quantization = settings["quantization_config"]
        args = quantization["config_groups"]["group_0"]["weights"] if case == "rawint4" else quantization
        args = {**args, "group_size": 48}
        quantization = compressed(**args) if case == "rawint4" else args
        settings = {**settings, "quantization_config": quantization}
        word = "the group size 48 does not divide 64"
    else:
        settings = {**settings, "hidden_size": 72}
        word = "the group size 32 does not divide 72"
    refuses(store(tmp_path, tensors, settings), None, "layers.0.", word)


def test_sizes_that_int32_cannot_hold(tmp_path):
    """C30"""
    tensors, settings, _ = tensor_of("gptq rows")
    for key, size in (("moe_intermediate_size", 36), ("hidden_size", 68)):
        refuses(store(tmp_path, tensors, {**settings, key: size}), None, f"{size} is no multiple of 8")


@pytest.mark.parametrize("shape", [(64, 96), (96, 65), (0, 0)])
def test_weight_shape_that_disagrees(shape, tmp_path):
    """C30"""
    tensors, settings, at = tensor_of("rawint4")
    tensors[at + "weight_shape"][1][:] = shape
    refuses(store(tmp_path, tensors, settings), (1, 1), f"{at}weight_shape says {list(shape)}", "[96, 64]")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda index: index.__setitem__(3, 2), ["has 2 at [3]", "0 to 1"]),
        (lambda index: index.__setitem__(63, -1), ["has -1 at [63]", "0 to 1"]),
        (lambda index: index.__setitem__(0, 1), ["puts 31 inputs in group 0", "32 to a group"]),
    ],
)
def test_g_idx_that_is_wrong(change, words, tmp_path):
    """C30 Out of range, or groups of another size."""
    tensors, settings, at = tensor_of("gptq")
    change(tensors[at + "g_idx"][1])
    refuses(store(tmp_path, tensors, settings), (1, 1), at + "g_idx", *words)


def test_bias_of_gptq_must_be_zero(tmp_path):
    """C31 Where the architecture has none, it is not dropped unseen."""
    tensors, settings, at = tensor_of("gptq no g_idx")
    tensors[at + "bias"][1][5] = 1
    refuses(store(tmp_path, tensors, settings), (1, 1), at + "bias is not zero")


def test_bytes_that_no_scheme_asked_for(tmp_path):
    """C31"""
    tensors, settings, at = tensor_of("fp8")
    tensors[at + "input_scale"] = "F32", np.ones(1, np.float32)
    refuses(store(tmp_path, tensors, settings), None, "nothing uses", at + "input_scale")


@pytest.mark.parametrize(
    "case, quantization, word",
    [
        ("fp8", None, "no quantization_config"),
        ("rawint4", None, "no quantization_config"),
        ("fp8", dict(quant_method="modelopt"), "'modelopt'"),
        ("fp8", {**FP8, "weight_block_size": [1, 32]}, "[1, 32]"),
        ("awq", {**AWQ, "version": None, "format": "gemv_fast"}, "'gemv_fast'"),
        ("fp8", {**FP8, "weight_block_size": [64, 128]}, "[64, 128]"),
        ("fp8", {**FP8, "fmt": "e5m2"}, "'e5m2'"),
        ("fp8", CHANNEL, "weight_scale_inv has shape"),
        ("fp8", compressed("pack-quantized", num_bits=8, type="float"), "'pack-quantized'"),
        ("channel", compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "'tensor'"),
        ("channel", {**CHANNEL, "config_groups": {}}, "config_groups"),
        ("mxfp4", dict(quant_method="quark"), "'quark'"),
        ("rawint4", dict(quant_method="humming"), "'humming'"),
        ("rawint4", compressed(num_bits=8), "num_bits 8"),
        ("rawint4", compressed(symmetric=False), "symmetric False"),
        ("rawint4", compressed(type="float"), "'float'"),
        ("rawint4", compressed(actorder="group"), "actorder 'group'"),
        ("rawint4", compressed(strategy="tensor"), "strategy 'tensor'"),
        ("rawint4", compressed(group_size=0), "group_size 0"),
        ("rawint4", compressed(group_size=None), "group_size None"),
        ("rawint4", compressed("nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        ("gptq", AWQ, "has shape"),
        ("gptq", {**GPTQ, "bits": 8}, "bits 8"),
        ("gptq", {**GPTQ, "group_size": -2}, "group_size -2"),
        ("gptq", {**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
        ("gptq", {**GPTQ, "is_marlin_format": True}, "'marlin'"),
        ("gptq no g_idx", {**GPTQ, "desc_act": True}, "g_idx"),
        ("gptq", dict(quant_method="auto-round"), "'auto-round'"),
        ("awq", {**AWQ, "version": "gemv"}, "'gemv'"),
        ("awq", {**AWQ, "bits": 8}, "bits 8"),
        ("awq no zeros", AWQ, "qzeros"),
    ],
)
def test_packing_that_is_not_known_is_refused_by_name(case, quantization, word, tmp_path):
    """C30 C33"""
    tensors, settings, _ = tensor_of(case)
    refuses(store(tmp_path, tensors, {**settings, "quantization_config": quantization}), None, word)


# What transformers saves and makes of it.


@pytest.fixture
def without_gpu(monkeypatch):
    """transformers quantizes to FP8, and keeps FP8, only where it finds a GPU and accelerate; neither is used here."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


@pytest.mark.parametrize("save", [{}, dict(save_original_format=False), dict(max_shard_size="200KB")], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3", "minimax_m2"])
def test_fp8_that_transformers_saves(architecture, save, tmp_path, without_gpu):
    """C31 C34 Split weights with fused scales, or all fused, against transformers' own dequantization."""
    import torch
    import transformers
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    (tmp_path / "plain").mkdir()
    _, plain = models.make(architecture, tmp_path / "plain", hidden_size=256, moe_intermediate_size=128)
    wanted = transformers.FineGrainedFP8Config()
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=wanted)
    model.save_pretrained(tmp_path / "fp8", **save)
    with Checkpoint(tmp_path / "fp8") as checkpoint:
        assert checkpoint.kind == "fp8"
        for layer in checkpoint.layers:
            module = models.experts_module(model, layer)
            gate_up, down = (
                Fp8Dequantize(None)
                ._dequantize_one(getattr(module, name), getattr(module, f"{name}_scale_inv"), torch.float32)
                .detach()
                .numpy()
                for name in ("gate_up_proj", "down_proj")
            )
            for e in range(4):
                expert = checkpoint.expert(layer, e)
                np.testing.assert_array_equal(expert.gate.dequantize(), gate_up[e, :128])
                np.testing.assert_array_equal(expert.up.dequantize(), gate_up[e, 128:])
                np.testing.assert_array_equal(expert.down.dequantize(), down[e])


def replaced(path, tensors, quantization):
    """A folder with the experts of a saved model replaced by quantized ones, all else as it is."""
    from safetensors.numpy import load_file

    names = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
    kept = {k: v for k, v in load_file(path / "model.safetensors").items() if ".experts." not in k}
    kept = {k: (names[v.dtype], v) for k, v in kept.items()}
    settings = json.loads((path / "config.json").read_text())
    return store(path.parent / "quantized", {**kept, **tensors}, {**settings, "quantization_config": quantization})


def assert_same_as_loaded(folder, kind, dtype):
    """What transformers dequantizes a folder to is what we do, rounded to its dtype."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.kind == kind
        for layer in checkpoint.layers:
            for e in range(E):
                expert = checkpoint.expert(layer, e)
                gate, up, down, *_ = models.expert_arrays(model, layer, e)
                for ours, theirs in zip((expert.gate, expert.up, expert.down), (gate, up, down)):
                    values = ours.dequantize()
                    if dtype == "bfloat16":
                        values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
                    np.testing.assert_array_equal(values, theirs)


SIZES = dict(num_experts=E, num_hidden_layers=LAYERS, hidden_size=64, moe_intermediate_size=96)


def test_gpt_oss_mxfp4_is_what_transformers_loads(tmp_path):
    """Its own file needs its triton kernels; so ours, dequantized by it."""
    _, path = models.make("gpt_oss", tmp_path, **SIZES)
    tensors, _, _ = gpt_oss()
    assert_same_as_loaded(replaced(path, tensors, dict(quant_method="mxfp4", dequantize=True)), "mxfp4", "bfloat16")


def test_fp8_is_what_transformers_loads(tmp_path, without_gpu):
    tensors, _ = experts("mixtral", fp8, 256, 128)
    _, path = models.make("mixtral", tmp_path, **{**SIZES, "hidden_size": 256, "moe_intermediate_size": 128})
    folder = replaced(path, tensors, {**FP8, "dequantize": True, "modules_to_not_convert": ["self_attn", "lm_head"]})
    assert_same_as_loaded(folder, "fp8", "float32")


@pytest.mark.parametrize("group", [32, None])
def test_compressed_tensors_int4(group, tmp_path):
    """C30 Packed by the compressed-tensors package, dequantized by it for transformers."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group" if group else "channel", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")

    def write(rng, n, k):
        weight = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32)).bfloat16()
        scale = weight.view(n, -1, group or k).abs().amax(2) / 7
        made = compressor.compress(dict(weight=weight, weight_scale=scale), scheme)
        return {
            "weight_packed": ("I32", made["weight_packed"].numpy()),
            "weight_scale": ("BF16", made["weight_scale"].view(torch.int16).numpy().view(ml_dtypes.bfloat16)),
            "weight_shape": ("I64", made["weight_shape"].numpy()),
        }, compressor.decompress(made, scheme)["weight"].float().numpy()

    tensors, values = experts("mixtral", write, 64, 96)
    _, path = models.make("mixtral", tmp_path, **SIZES)
    # What is not packed is named: older transformers look for packed weights in all the rest.
    settings = dict(ignore=["re:.*self_attn.*", "lm_head"], quantization_status="compressed", dequantize=True)
    folder = replaced(path, tensors, {**compressed(**weights), **settings})
    assert_same_as_loaded(folder, "rawint4", "bfloat16")
    with Checkpoint(folder) as checkpoint:
        for (layer, e), matrices in values.items():
            expert = checkpoint.expert(layer, e)
            for ours, theirs in zip((expert.gate, expert.up, expert.down), matrices):
                np.testing.assert_array_equal(ours.dequantize().astype(ml_dtypes.bfloat16).astype(np.float32), theirs)

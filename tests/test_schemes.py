"""Quantized checkpoints: every packing, written once more here with loops of its own, is read back exactly."""

import json

import ml_dtypes
import numpy as np
import pytest

from ktcy.weights import Checkpoint
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


def fp8(rng, n, k, name="weight_scale_inv", dtype="F32", parts=1):
    """``parts`` matrices one below the other, each with blocks of its own."""
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
    "awq rows": ("qwen3_moe", part(awq, group=-1, dtype="BF16"), {**AWQ, "group_size": -1}, 40, 64, "awq_int4", "int4", 0),
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

"""Models in their own files: what each method makes of them, converted or run directly."""

import json

import ml_dtypes
import numpy as np
import pytest
import test_schemes
from safetensors.numpy import save_file

import ktcy
from ktcy import kernels
from ktcy.conversion import convert
from ktcy.weights.quantized import Quantized
from ktcy.weights.source import layer_format, open_source

E, K, H, I = 3, 2, 128, 96  # noqa: E741
SIZES = dict(num_experts=E, num_experts_per_tok=K, hidden_size=H, moe_intermediate_size=I)
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def experts(seed=0):
    r = np.random.default_rng(seed)
    shapes = dict(gate=(I, H), up=(I, H), down=(H, I))
    return [{part: r.standard_normal(s).astype(np.float32) / 16 for part, s in shapes.items()} for _ in range(E)]


def checkpoint(folder, kind="bf16"):
    """A Qwen3-MoE checkpoint of one layer."""
    folder.mkdir()
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": matrix.astype(DTYPES[kind])
        for e, expert in enumerate(experts())
        for part, matrix in expert.items()
    }
    save_file(tensors, folder / "model.safetensors")
    settings = dict(model_type="qwen3_moe", hidden_act="silu", num_hidden_layers=1, **SIZES)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def inputs():
    r = np.random.default_rng(1)
    x = r.standard_normal((5, H)).astype(ml_dtypes.bfloat16)
    return x, r.integers(-1, E, (5, K)), r.random((5, K), np.float32)


def layer(**options):
    return ktcy.KTMoEWrapper(0, E, K, H, I, cpuinfer_threads=2, **options)


def answer(**options):
    with layer(**options) as moe:
        moe.load_weights()
        return moe.forward(*inputs()), moe.packed.format


@pytest.mark.parametrize("method", ["int8", "bf16", "auto", "AMXINT8", "BF16"])
@pytest.mark.parametrize("kind", DTYPES)
def test_a_checkpoint_runs_as_its_tensors_and_its_conversion_do(tmp_path, kind, method):
    """C32 C60: three ways, one answer; auto keeps bfloat16, and rounds other floats to it."""
    model = checkpoint(tmp_path / "model", kind)
    direct, fmt = answer(weight_path=model, method=method)
    assert fmt == ("bf16" if method in ("auto", "bf16", "BF16") else "int8")
    manifest = convert(model, tmp_path / "out", format=method)
    assert manifest["layers"]["0"]["kind"] == kind and manifest["layers"]["0"]["format"] == fmt
    converted, same = answer(weight_path=tmp_path / "out", method=method)
    with layer(method=method) as moe:
        stacks = [np.stack([e[part] for e in experts()]).astype(DTYPES[kind]) for part in ("gate", "up", "down")]
        moe.load_weights_from_tensors(*stacks)
        tensors = moe.forward(*inputs())
    assert same == fmt and (direct == tensors).all() and (converted == tensors).all()


def test_a_method_that_contradicts_the_files(tmp_path):
    """What they hold, and what to use."""
    model = checkpoint(tmp_path / "model")
    for method in ("FP8", "FP8_PERCHANNEL", "RAWINT4", "GPTQ_INT4", "MXFP4", "MXFP8"):
        with pytest.raises(ValueError, match="layer 0 are bf16, but method is .*; use method 'auto', or one of int8"):
            layer(weight_path=model, method=method).load_weights()
        with pytest.raises(ValueError, match="layer 0 are bf16, but method is"):
            convert(model, tmp_path / "out", format=method)
        with pytest.raises(ValueError, match="keeps the codes of a checkpoint's own files; tensors can be packed as"):
            layer(method=method).load_weights_from_tensors(*np.zeros((3, 1, 1, 1), np.float32))
    with pytest.raises(ValueError, match="no GGUF file, which method 'gguf' is for"):
        layer(weight_path=model, method="LLAMAFILE").load_weights()
    assert not (tmp_path / "out").exists()
    convert(model, tmp_path / "out")
    with pytest.raises(ValueError, match="holds int8 weights, but method is 'BF16'"):
        layer(weight_path=tmp_path / "out", method="BF16").load_weights()


def test_a_model_of_other_sizes_is_refused_before_it_is_packed(tmp_path):
    """C16 C60."""
    model = checkpoint(tmp_path / "model")
    moe = ktcy.KTMoEWrapper(0, E, K, H, I + 1, weight_path=model)
    with pytest.raises(ValueError, match="has moe_intermediate_size 96, expected 97"):
        moe.load_weights()
    moe = ktcy.KTMoEWrapper(1, E, K, H, I, weight_path=model)
    with pytest.raises(ValueError, match="layer 1 of .* has no experts; the layers are 0"):
        moe.load_weights()


def test_too_large_for_the_memory(tmp_path, monkeypatch):
    """C64: need and available, before anything is taken."""
    from ktcy.runtime import memory

    model = checkpoint(tmp_path / "model")
    monkeypatch.setattr(memory, "available", lambda root="/": 1000)
    with pytest.raises(MemoryError, match="layer 0 needs .* GiB of memory; 0.00 GiB is available"):
        layer(weight_path=model).load_weights()


def coded(kind, group, scale, zero=None):
    r = np.random.default_rng(2)
    codes = r.integers(0, 16, (32, 256)).astype(np.uint8)
    groups = 256 // group if group else 1
    if scale == "uint8":
        values = r.integers(100, 140, (32, groups)).astype(np.uint8)
    else:
        values = r.integers(1, 9, (32, groups)).astype(np.float32).astype(scale) / np.dtype(scale).type(64)
    return Quantized(kind, codes, values, group, None if zero is None else np.full((32, groups), zero, np.uint8))


class Stub:
    """A `Format` of codes, as far as `packs_as` looks."""

    def __init__(self, codes, code_scale, group, zero=False):
        self.codes, self.code_scale, self.group, self.zero = codes, code_scale, group, zero


@pytest.mark.parametrize(
    "matrix, fmt, fits",
    [
        (coded("int4", 32, "bfloat16"), Stub("int4", "bfloat16", 32), True),
        (coded("int4", 32, "bfloat16"), Stub("int4", "float16", 32), True),
        (coded("int4", 64, "float16"), Stub("int4", "float16", 32), True),
        (coded("int4", 0, "float16"), Stub("int4", "float16", 128, True), True),
        (coded("int4", 32, "float16", 8), Stub("int4", "float16", 32), True),
        (coded("int4", 32, "float16", 7), Stub("int4", "float16", 32), False),
        (coded("int4", 32, "float16", 7), Stub("int4", "float16", 32, True), True),
        (coded("int4", 32, "float16"), Stub("int4", "float16", 64), False),
        (coded("int4", 32, "float16"), Stub("int4", "float16", 0), False),
        (coded("int4", 32, "float16"), Stub("int8", "float16", 32), False),
        (coded("e4m3", 32, "uint8"), Stub("e4m3", "float32", 32), False),
        (coded("e4m3", 32, "uint8"), Stub("e4m3", "uint8", 32), True),
        (coded("e4m3", 32, "float32"), Stub("e4m3", "uint8", 32), False),
    ],
)
def test_what_a_format_can_hold(matrix, fmt, fits):
    """Exactly or not at all."""
    packed = matrix.packs_as(fmt)
    assert (packed is not None) == fits
    if fits:
        groups = -(-256 // (fmt.group or 256))
        assert packed.scale.shape == (32, groups) and packed.scale.dtype.name == fmt.code_scale
        assert (packed.zero is not None) == fmt.zero and packed.group == fmt.group
        assert (packed.dequantize() == matrix.dequantize()).all()


def test_scales_that_do_not_fit_another_dtype():
    large = coded("int4", 32, "bfloat16")
    large.scale[3, 2] = 1e30
    small = coded("int4", 32, "bfloat16")
    small.scale[3, 2] = 2.0**-30
    for matrix in (large, small):
        assert matrix.packs_as(Stub("int4", "float16", 32)) is None
        assert matrix.packs_as(Stub("int4", "bfloat16", 32)) is not None


def test_formats_of_floats(tmp_path):
    with open_source(checkpoint(tmp_path / "model", "fp16")) as source:
        table = kernels.default()
        assert [layer_format(source, 0, m, table).name for m in ("auto", "bf16", "int8")] == ["bf16", "bf16", "int8"]


# name of a case of test_schemes -> the format that keeps its numbers
NATIVE = {
    "fp8": "fp8",
    "fp8 minimax": "fp8",
    "fp8 cut blocks": "fp8",
    "fp8 bf16 scales": "fp8",
    "fp8 e8m0 scales": "fp8",
    "channel": "fp8_channel",
    "channel bf16": "fp8_channel",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "rawint4": "rawint4",
    "rawint4 f16": "q4_0",
    "rawint4 rows": "rawint4",
    "gptq": "gptq32",
    "gptq v2": "gptq32",
    "gptq sym": "q4_0",
    "gptq 64": "gptq64",
    "gptq no g_idx": "gptq32",
    "awq": "gptq32",
    "awq 128": "gptq128",
}


@pytest.mark.parametrize("name", NATIVE)
def test_codes_of_a_checkpoint_stay_as_they_are(tmp_path, name):
    """C30 C32 C33 C37: converted with auto and read back, run from the folder and from the files themselves; and made
    into int8, int4 and bf16."""
    model, write, quantization, h, i, *_ = test_schemes.CASES[name]
    tensors, values = test_schemes.experts(model, write, h, i)
    path = test_schemes.store(tmp_path / "model", tensors, test_schemes.config(model, quantization, h, i))
    convert(path, tmp_path / "out", format="auto")
    sizes = dict(num_experts=test_schemes.E, num_experts_per_tok=2, hidden_size=h, moe_intermediate_size=i)
    r = np.random.default_rng(1)
    x = r.standard_normal((9, h)).astype(np.float32)
    ids, route = r.integers(0, test_schemes.E, (9, 2)), r.random((9, 2), np.float32)
    answers = []
    for where in (path, tmp_path / "out"):
        moe = ktcy.KTMoEWrapper(1, **sizes, cpuinfer_threads=2, weight_path=where, method="auto")
        moe.load_weights()
        assert moe.packed.format == NATIVE[name]
        answers.append(moe.forward(x, ids, route))
        for e in range(test_schemes.E):
            for back, value in zip(moe.packed.unpack(e), values[1, e]):
                assert (back == value).all()
    assert (answers[0] == answers[1]).all() and np.isfinite(answers[0]).all()
    entry = json.loads((tmp_path / "out" / "ktcy.json").read_text())["layers"]["1"]
    assert entry["format"] == NATIVE[name] and entry["error"]["worst"] == 0
    stacks = [np.stack([values[1, e][part] for e in range(test_schemes.E)]) for part in range(3)]
    for method in ("int8", "int4", "bf16"):
        direct, tensors = (
            ktcy.KTMoEWrapper(1, **sizes, cpuinfer_threads=2, weight_path=path, method=method, activation=activation)
            for activation in (None, moe.packed.activation)
        )
        direct.load_weights()
        tensors.load_weights_from_tensors(*stacks)
        assert (direct.forward(x, ids, route) == tensors.forward(x, ids, route)).all()


def test_a_layer_that_a_gguf_file_does_not_have(tmp_path):
    """C66: the layers that it has, and no bare KeyError, whatever the method."""
    import test_inspect

    parts = [dict(gate=np.ones((96, 64)), up=np.ones((96, 64)), down=np.ones((64, 96))) for _ in range(test_inspect.E)]
    stored = [{part: matrix.astype(np.float32) for part, matrix in expert.items()} for expert in parts]
    path = test_inspect.write_gguf(tmp_path / "m.gguf", stored, ["Q8_0"])
    for method in ("auto", "gguf", "int8"):
        moe = ktcy.KTMoEWrapper(7, test_inspect.E, 2, 64, 96, weight_path=path, method=method)
        with pytest.raises(ValueError, match="layer 7 of .* has no experts; the layers are 0"):
            moe.load_weights()

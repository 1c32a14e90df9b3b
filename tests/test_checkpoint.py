"""Checkpoints: what transformers saves is read back bit for bit, and what is wrong with a folder is said."""

import json
import os
import random
import threading

import ml_dtypes
import models
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ktcy.config import Activation, LayerShape
from ktcy.weights import Checkpoint
from ktcy.weights.architectures import ARCHITECTURES

E, H, I, LAYERS = 3, 8, 6, 2  # noqa: E741
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def config(**changes):
    plain = dict(
        model_type="qwen3_moe",
        hidden_act="silu",
        hidden_size=H,
        moe_intermediate_size=I,
        num_experts=E,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
    )
    return {k: v for k, v in {**plain, **changes}.items() if v is not None}


def weights(dtype=ml_dtypes.bfloat16, layers=LAYERS, root="model.layers.{}.mlp.experts."):
    """Random experts by name, one tensor a projection."""
    rng = np.random.default_rng(0)
    shapes = dict(gate_proj=(I, H), up_proj=(I, H), down_proj=(H, I))
    return {
        f"{root.format(layer)}{e}.{name}.weight": rng.standard_normal(shape).astype(dtype)
        for layer in range(layers)
        for e in range(E)
        for name, shape in shapes.items()
    }


def write(folder, tensors, settings=None, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(settings or config()))
    return folder


def raw(header, data=b"", length=None):
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def contents(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def assert_holds(folder, tensors, root="model.layers.{}.mlp.experts."):
    with Checkpoint(folder) as checkpoint:
        for layer in checkpoint.layers:
            for e in range(E):
                expert = checkpoint.expert(layer, e)
                for part in ("gate", "up", "down"):
                    stored = tensors[f"{root.format(layer)}{e}.{part}_proj.weight"]
                    assert getattr(expert, part).dtype == stored.dtype
                    np.testing.assert_array_equal(getattr(expert, part), stored)
        return checkpoint


def fails(folder, *words, kind=ValueError):
    with pytest.raises(kind) as caught:
        Checkpoint(folder)
    for word in words:
        assert str(word) in str(caught.value)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Tiny models by architecture, each made once."""
    cache = {}

    def get(architecture):
        if architecture not in cache:
            cache[architecture] = models.make(architecture, tmp_path_factory.mktemp(architecture))
        return cache[architecture]

    return get


def assert_same_as_module(checkpoint, model, dtype=ml_dtypes.bfloat16):
    text = model.config.get_text_config()
    dense = [n for n in range(text.num_hidden_layers) if models.experts_module(model, n) is None]
    assert sorted(checkpoint.layers + dense) == list(range(text.num_hidden_layers))
    for layer in checkpoint.layers:
        for e in range(checkpoint.shape.num_experts):
            expert = checkpoint.expert(layer, e)
            gate, up, down, *biases = models.expert_arrays(model, layer, e)
            for got, want in zip((expert.gate, expert.up, expert.down), (gate, up, down)):
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.astype(np.float32), want)
            for got, want in zip((expert.gate_bias, expert.up_bias, expert.down_bias), biases):
                assert (got is None) == (want is None) == (not checkpoint.has_bias)
                if want is not None:
                    assert got.dtype == np.float32
                    np.testing.assert_array_equal(got, want)


# What transformers saves.


def test_every_architecture_has_a_model():
    assert {*ARCHITECTURES} <= {*models.ARCHITECTURES}


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_saved_model_reads_back(architecture, made):
    model, path = made(architecture)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.architecture == {"llama4": "llama4_text"}.get(architecture, architecture)
        assert checkpoint.kind == "bf16"
        assert checkpoint.shape == LayerShape(4, 2, 64, 48)
        assert_same_as_module(checkpoint, model)


@pytest.mark.parametrize("save", [dict(max_shard_size="30KB"), dict(save_original_format=False)], ids=["shards", "v5"])
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_saved_model_reads_back_sharded_and_fused(architecture, save, made, tmp_path):
    """C31 transformers 5 keeps experts fused in memory and may write them so."""
    model, _ = made(architecture)
    model.save_pretrained(tmp_path, **save)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("max_shard_size" in save)
    with Checkpoint(tmp_path) as checkpoint:
        assert_same_as_module(checkpoint, model)


@pytest.mark.parametrize("form", ["split", "fused", "transposed"])
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_saved_model_reads_back_in_other_forms(architecture, form, made, tmp_path):
    """C31 per expert, [E, 2I, H] or [E, H, 2I], told apart by the shapes."""
    model, path = made(architecture)
    row = ARCHITECTURES[model.config.get_text_config().model_type]
    tensors = load_file(path / "model.safetensors")
    roots = {k[: k.index(".experts.") + 9] for k in tensors if ".experts." in k}
    tensors = {k: v for k, v in tensors.items() if ".experts." not in k}
    for root in roots:
        layer = int(root.split("layers.")[1].split(".")[0])
        experts = [models.expert_arrays(model, layer, e) for e in range(4)]
        if form == "split":
            for e, arrays in enumerate(experts):
                for name, matrix, bias in zip(row.names, arrays[:3], arrays[3:]):
                    tensors[f"{root}{e}.{name}.weight"] = matrix
                    if bias is not None:
                        tensors[f"{root}{e}.{name}.bias"] = bias
            continue
        gate, up, down, *biases = (np.stack(a) if a[0] is not None else None for a in zip(*experts))
        if row.interleaved:
            both = np.stack([gate, up], 2).reshape(4, -1, gate.shape[2])
        else:
            both = np.concatenate([gate, up], 1)
        axes = (0, 2, 1) if form == "transposed" else (0, 1, 2)
        tensors[root + "gate_up_proj"], tensors[root + "down_proj"] = both.transpose(axes), down.transpose(axes)
        if row.bias:
            tensors[root + "gate_up_proj_bias"] = np.stack(biases[:2], 2).reshape(4, -1)
            tensors[root + "down_proj_bias"] = biases[2]
    tensors = {k: np.ascontiguousarray(v).astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    write(tmp_path, tensors, json.loads((path / "config.json").read_text()))
    with Checkpoint(tmp_path) as checkpoint:
        assert_same_as_module(checkpoint, model)


@pytest.mark.parametrize("sizes", [(64, 64), (64, 32), (32, 64), (96, 40)], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_orientation_is_told_when_one_shape_fits_both(architecture, sizes, tmp_path):
    """C31 H = I and H = 2I make one of the two fused tensors square, never both."""
    hidden, inter = sizes
    options = dict(hidden_size=hidden, moe_intermediate_size=inter, save_original_format=False)
    model, path = models.make(architecture, tmp_path, **options)
    with Checkpoint(path) as checkpoint:
        assert_same_as_module(checkpoint, model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_kept(dtype, tmp_path):
    tensors = weights(DTYPES[dtype])
    kind = assert_holds(write(tmp_path, tensors), tensors).kind
    assert kind == {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]


def test_kind_is_the_widest_dtype(tmp_path):
    tensors = weights(np.float16)
    tensors["model.layers.1.mlp.experts.0.up_proj.weight"] = np.ones((I, H), np.float32)
    assert assert_holds(write(tmp_path, tensors), tensors).kind == "fp32"


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_bare_and_multimodal_models(prefix, tmp_path):
    root = prefix + "layers.{}.mlp.experts."
    tensors = weights(root=root)
    settings = dict(model_type="some_vl", text_config=config()) if "language" in prefix else config()
    assert_holds(write(tmp_path, tensors, settings), tensors, root)


def test_gpt_oss_activation_comes_from_the_config(made, tmp_path):
    _, path = made("gpt_oss")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.activation == Activation(alpha=1.702, limit=7, offset=1)
    settings = json.loads((path / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**settings, "swiglu_limit": 5.5, "swiglu_alpha": 1.25}))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.activation == Activation(alpha=1.25, limit=5.5, offset=1)


@pytest.mark.parametrize("act, gate", [("silu", "swiglu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_activation_comes_from_the_config(act, gate, tmp_path):
    with Checkpoint(write(tmp_path, weights(), config(hidden_act=act))) as checkpoint:
        assert checkpoint.activation == Activation(gate)


# Experts and config that do not agree.


def test_layers_without_experts_are_skipped(tmp_path):
    """C33 dense layers."""
    tensors = weights(layers=4)
    only = {k: v for k, v in tensors.items() if ".layers.1." in k}
    folder = write(tmp_path, only, config(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert assert_holds(folder, only).layers == [1]


def test_mtp_layers_are_ignored(tmp_path):
    tensors = weights(layers=3)
    settings = config(model_type="deepseek_v3", first_k_dense_replace=0, num_experts=None, n_routed_experts=E)
    assert assert_holds(write(tmp_path, tensors, settings), tensors).layers == [0, 1]


def test_mtp_layers_with_a_prefix_of_their_own_are_ignored(tmp_path):
    tensors = weights()
    extra = weights(layers=1, root="mtp.layers.{}.mlp.experts.")
    write(tmp_path, {**tensors, **extra}, config(model_type="qwen3_next"))
    assert assert_holds(tmp_path, tensors).layers == [0, 1]


@pytest.mark.parametrize(
    "changes, layers",
    [
        (dict(mlp_layer_types=["dense", "sparse"]), [1]),
        (dict(moe_layer_freq=[0, 1]), [1]),
        ({}, [0, 1]),
    ],
    ids=str,
)
def test_minimax_m3_lists_its_layers(changes, layers, tmp_path):
    names = dict(gate_proj="w1", up_proj="w3", down_proj="w2")
    tensors = {k: v for k, v in weights().items() if int(k.split(".")[2]) in layers}
    for old, new in names.items():
        tensors = {k.replace(old, new).replace("mlp", "block_sparse_moe"): v for k, v in tensors.items()}
    settings = config(model_type="minimax_m3_vl_text", intermediate_size=I, **changes)
    with Checkpoint(write(tmp_path, tensors, settings)) as checkpoint:
        assert checkpoint.layers == layers
        assert checkpoint.activation == Activation(alpha=1.702, limit=7, offset=1)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.experts.0"])
def test_missing_expert_tensor_is_named(name, tmp_path):
    """C31"""
    tensors = {k: v for k, v in weights().items() if not k.startswith(name)}
    fails(write(tmp_path, tensors), name, tmp_path)


def test_missing_fused_tensor_is_named(tmp_path):
    """C31"""
    tensors = {f"model.layers.{n}.mlp.experts.down_proj": np.zeros((E, H, I), np.float32) for n in range(LAYERS)}
    fails(write(tmp_path, tensors), "model.layers.0.mlp.experts.gate_up_proj")


def test_missing_layer_names_both_forms(tmp_path):
    """C31"""
    tensors = {k: v for k, v in weights().items() if ".layers.1." not in k}
    fails(write(tmp_path, tensors), "model.layers.1.mlp.experts.0.gate_proj.weight", "experts.gate_up_proj")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.bias",
        "model.layers.1.mlp.experts.0.w1.weight",
        "model.layers.1.mlp.experts.gate_up_proj_bias",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
        "blocks.0.experts.w1",
    ],
)
def test_left_over_expert_tensor_is_named(name, tmp_path):
    """C31"""
    fails(write(tmp_path, {**weights(), name: np.zeros((I, H), np.float32)}), name, tmp_path / "model.safetensors")


def test_experts_of_a_dense_layer_are_left_over(tmp_path):
    """C31"""
    fails(write(tmp_path, weights(), config(mlp_only_layers=[0])), "nothing uses", "model.layers.0.mlp.experts.")


def test_experts_under_two_prefixes(tmp_path):
    """C31"""
    tensors = {**weights(), **weights(root="layers.{}.mlp.experts.")}
    fails(write(tmp_path, tensors), "model.layers.0.mlp.experts.", "as layers.0.mlp.experts.")


def test_shared_experts_and_routers_are_no_experts(tmp_path):
    tensors = weights()
    others = dict.fromkeys(("mlp.gate.weight", "mlp.shared_experts.up_proj.weight", "mlp.shared_expert_gate.weight"))
    others = {f"model.layers.0.{name}": np.zeros((2, 2), np.int8) for name in others}
    assert_holds(write(tmp_path, {**tensors, **others}), tensors)


@pytest.mark.parametrize("changes", [dict(hidden_size=16), dict(moe_intermediate_size=5)], ids=str)
def test_shape_that_contradicts_the_config(changes, tmp_path):
    fails(write(tmp_path, weights(), config(**changes)), "0.gate_proj.weight has shape [6, 8]", "model.safetensors")


def test_fused_shape_that_contradicts_the_config(tmp_path):
    root = "model.layers.{}.mlp.experts."
    tensors = {root.format(n) + "gate_up_proj": np.zeros((E, 2 * I, H), np.float32) for n in range(LAYERS)}
    tensors |= {root.format(n) + "down_proj": np.zeros((E, I, H), np.float32) for n in range(LAYERS)}
    fails(write(tmp_path, tensors), "down_proj has shape [3, 6, 8]", "[3, 8, 6]")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "BOOL"])
def test_other_dtypes_are_refused_by_name(dtype, tmp_path):
    """C30 C33"""
    write(tmp_path, weights(), config(quantization_config=dict(quant_method="fp8")))
    header, data = contents(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    header[name].update(dtype=dtype, shape=[I, 2 * H])
    (tmp_path / "model.safetensors").write_bytes(raw(header, data))
    fails(tmp_path, f"{name} has dtype {dtype}", "BF16, F16, F32", "'fp8'", "model.safetensors")


def test_packed_int4_without_its_config_is_refused(tmp_path):
    """C30 Eight INT4 in an int32 have other names; the dtype says more than the missing names."""
    tensors = {k.replace("weight", "weight_packed"): np.zeros((I, 1), np.int32) for k in weights()}
    fails(write(tmp_path, tensors), "_proj.weight_packed is quantized (weight_packed I32)", "quantization_config")


@pytest.mark.parametrize("key", [k for k in config() if k != "num_experts"])
def test_config_key_that_is_missing(key, tmp_path):
    fails(write(tmp_path, weights(), config(**{key: None})), tmp_path / "config.json", f"has no {key}")


def test_config_without_the_number_of_experts(tmp_path):
    fails(write(tmp_path, weights(), config(num_experts=None)), "num_experts or n_routed_experts or num_local_experts")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe_", 5])
def test_unknown_model_lists_the_known(name, tmp_path):
    fails(write(tmp_path, weights(), config(model_type=name)), repr(name), *ARCHITECTURES)


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(num_experts=0), "num_experts"),
        (dict(num_experts=1), "num_experts_per_tok"),
        (dict(num_experts="8"), "num_experts"),
        (dict(hidden_size=-1), "hidden_size"),
        (dict(num_hidden_layers=2.5), "num_hidden_layers"),
        (dict(num_hidden_layers=10**15), "num_hidden_layers"),
        (dict(decoder_sparse_step=-1), "decoder_sparse_step"),
        (dict(decoder_sparse_step=0), "no layer"),
        (dict(mlp_only_layers=3), "mlp_only_layers 3; expected a list"),
        (dict(swiglu_limit="x"), "the limit of an activation must be a number, not 'x'"),
        (dict(mlp_only_layers=[0, 1]), "no layer"),
        (dict(hidden_act="relu"), "relu"),
        (dict(model_type="deepseek_v2"), "first_k_dense_replace"),
        (dict(model_type="llama4_text", intermediate_size=I, moe_layers=[1, 2]), "moe_layers"),
        (dict(model_type="llama4_text", intermediate_size=I), "interleave_moe_layer_step"),
        (dict(model_type="minimax_m3_vl_text", intermediate_size=I, moe_layer_freq=[1]), "moe_layer_freq"),
    ],
    ids=str,
)
def test_config_with_wrong_values(changes, word, tmp_path):
    fails(write(tmp_path, weights(), config(**changes)), tmp_path / "config.json", word)


# Files.


def shards(folder, tensors, count=3, index=True):
    names = sorted(tensors)
    placed = {name: f"model-{n % count + 1:05d}-of-{count:05d}.safetensors" for n, name in enumerate(names)}
    for shard in sorted(set(placed.values())):
        write(folder, {k: tensors[k] for k in names if placed[k] == shard}, name=shard)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=placed)))
    return sorted(set(placed.values()))


@pytest.mark.parametrize("index", [True, False])
def test_shards(index, tmp_path):
    tensors = weights()
    shards(tmp_path, tensors, index=index)
    assert_holds(tmp_path, tensors)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(index, tmp_path):
    _, lost, _ = shards(tmp_path, weights(), index=index)
    (tmp_path / lost).unlink()
    fails(tmp_path, lost, "3 shards", kind=FileNotFoundError)


@pytest.mark.parametrize("keep", [0, 4, 200, 400, -64, -1])
@pytest.mark.parametrize("index", [True, False])
def test_truncated_shard_names_file_and_bytes(keep, index, tmp_path):
    """C35"""
    *_, shard = shards(tmp_path, weights(), index=index)
    whole = (tmp_path / shard).stat().st_size
    size = keep if keep >= 0 else whole + keep
    os.truncate(tmp_path / shard, size)
    found = ["empty"] if not size else [f"{size} bytes"] if size < 200 else [size]
    fails(tmp_path, tmp_path / shard, *found, *[whole] * (keep < 0))


def test_bytes_after_the_last_tensor(tmp_path):
    """C35"""
    with open(write(tmp_path, weights()) / "model.safetensors", "ab") as file:
        size = file.tell()
        file.write(b"\0" * 5)
    fails(tmp_path, tmp_path / "model.safetensors", size, size + 5)


def test_shard_that_is_cut_while_in_use(tmp_path):
    """C35 An exception where a mapping would kill the process."""
    file = write(tmp_path, weights()) / "model.safetensors"
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(OSError, match="model.safetensors ends at byte"):
            for layer in checkpoint.layers:
                for e in range(E):
                    checkpoint.expert(layer, e)


@pytest.mark.parametrize("length", [None, 1, 3, 99_999, 100_000, 100_001, 1_000_003])
def test_header_of_any_length(length, tmp_path):
    """C36 Also odd lengths, after which no tensor is aligned."""
    tensors = weights(np.float32)
    file = write(tmp_path, tensors) / "model.safetensors"
    header, data = contents(file)
    text = json.dumps(header).encode()
    text = text.ljust(length if length and length > len(text) else len(text) + (length or 0))
    file.write_bytes(raw(text, data))
    assert_holds(tmp_path, tensors)
    with Checkpoint(tmp_path) as checkpoint:
        expert = checkpoint.expert(0, 0)
        assert expert.gate.flags.aligned and expert.up.flags.aligned and expert.down.flags.aligned


@pytest.mark.parametrize("header", [{}, {"__metadata__": {"format": "pt"}}, {"__metadata__": None}], ids=str)
def test_shard_without_tensors(header, tmp_path):
    """C36"""
    tensors = weights()
    write(tmp_path, tensors, name="model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(raw(header))
    assert_holds(tmp_path, tensors)


def test_file_with_metadata_only_lacks_the_experts(tmp_path):
    """C36"""
    (write(tmp_path, weights()) / "model.safetensors").write_bytes(raw({"__metadata__": {"format": "pt"}}))
    fails(tmp_path, "no experts at all", "model.layers.0.mlp.experts.0.gate_proj.weight")


def test_tensors_of_size_zero(tmp_path):
    """C36"""
    tensors = weights()
    empty = {"a": np.zeros((0,), np.float32), "model.z": np.zeros((3, 0, 2), np.int64), "s": np.zeros((), np.float32)}
    assert_holds(write(tmp_path, {**tensors, **empty}), tensors)


def test_tens_of_thousands_of_tensors(tmp_path):
    """C36"""
    experts, layers = 256, 40
    names = [(layer, e, p) for layer in range(layers) for e in range(experts) for p in ("gate", "up", "down")]
    header = {
        f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight": dict(
            dtype="BF16", shape=[2, 1] if p == "down" else [1, 2], data_offsets=[4 * n, 4 * n + 4]
        )
        for n, (layer, e, p) in enumerate(names)
    }
    values = np.arange(2 * len(names), dtype=np.uint16)
    settings = config(num_experts=experts, num_hidden_layers=layers, hidden_size=2, moe_intermediate_size=1)
    (write(tmp_path, {}, settings) / "model.safetensors").write_bytes(raw(header, values.tobytes()))
    with Checkpoint(tmp_path) as checkpoint:
        last = checkpoint.expert(39, 255).down.view(np.uint16)
        np.testing.assert_array_equal(last.ravel(), values[-2:])


def test_with_an_index_only_listed_files_are_read(tmp_path):
    """C38"""
    tensors = weights()
    shards(tmp_path, tensors)
    (tmp_path / "adapter.safetensors").write_bytes(b"not even safetensors")
    write(tmp_path, {k: v + 1 for k, v in tensors.items()}, name="model.safetensors")
    assert_holds(tmp_path, tensors)


@pytest.mark.parametrize("stray", ["adapter.safetensors", "a-00001-of-00003.safetensors", "z.safetensors"])
@pytest.mark.parametrize("sharded", [True, False])
def test_without_an_index_stray_files_are_listed(stray, sharded, tmp_path):
    """C38"""
    if sharded:
        names = shards(tmp_path, weights(), index=False)
    else:
        names = [write(tmp_path, weights()).joinpath("model.safetensors").name]
    save_file({"lora.weight": np.zeros(3, np.float32)}, tmp_path / stray)
    fails(tmp_path, stray, *names, "index")


def test_without_an_index_duplicate_tensors_are_listed(tmp_path):
    """C38"""
    tensors = weights()
    first, second, _ = shards(tmp_path, tensors, index=False)
    twice = sorted(tensors)[0]
    save_file({**load_file(tmp_path / second), twice: tensors[twice]}, tmp_path / second)
    fails(tmp_path, twice, first, second)


def test_expert_that_the_index_does_not_list(tmp_path):
    """C31 C38"""
    shards(tmp_path, weights())
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name, shard = listed["weight_map"].popitem()
    index.write_text(json.dumps(listed))
    fails(tmp_path, name, tmp_path / shard, index.name)


@pytest.mark.parametrize(
    "weight_map, word",
    [
        (None, "weight_map"),
        ({}, "weight_map"),
        ([], "weight_map"),
        ({"a": 5}, "5"),
        ({"a": "../model.safetensors"}, "'../model.safetensors'"),
        ({"lost.weight": "model-00001-of-00003.safetensors"}, "lost.weight"),
    ],
    ids=str,
)
def test_index_that_is_wrong(weight_map, word, tmp_path):
    shards(tmp_path, weights())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map=weight_map)))
    fails(tmp_path, index, word)


JUNK = {
    "html": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
    "html2": (b"\n <html>\n<head><title>404</title></head>" + b"x" * 5000, "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4998781136\n", "Git LFS pointer"),
    "zeros": (bytes(10_000), "zero bytes"),
    "few zeros": (bytes(5), "zero bytes"),
    "empty": (b"", "empty"),
    "gguf": (b"GGUF" + bytes(range(1, 100)), "GGUF"),
    "pickle": (b"PK\x03\x04" + bytes(range(1, 100)), "PyTorch pickle"),
    "short": (b"Entry", "5 bytes"),
}


@pytest.mark.parametrize("what", JUNK)
@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "config.json", "model.safetensors.index.json"])
def test_file_that_is_something_else(what, name, tmp_path):
    """C67"""
    shards(tmp_path, weights())
    data, word = JUNK[what]
    (tmp_path / name).write_bytes(data)
    fails(tmp_path, tmp_path / name, word)


def tensor(dtype="F32", shape=(2,), data_offsets=(0, 8)):
    return dict(dtype=dtype, shape=shape, data_offsets=data_offsets)


@pytest.mark.parametrize(
    "header",
    [
        dict(a=tensor(data_offsets=(8, 16)), b=tensor(data_offsets=(8, 16))),
        dict(a=tensor(data_offsets=(0, 8)), b=tensor(data_offsets=(4, 12))),
        dict(a=tensor(data_offsets=(0, 8)), b=tensor(data_offsets=(12, 20))),
        dict(a=tensor(data_offsets=(8, 0))),
        dict(a=tensor(data_offsets=(-8, 0))),
        dict(a=tensor(data_offsets=(0, 8.0))),
        dict(a=tensor(data_offsets=(0.0, 8))),
        dict(a=tensor(data_offsets=(0, 8, 16))),
        dict(a=tensor(data_offsets=(0,))),
        dict(a=tensor(data_offsets="08")),
        dict(a=tensor(data_offsets=None)),
        dict(a=tensor(shape=(3,))),
        dict(a=tensor(shape=(-1, -2))),
        dict(a=tensor(shape=(True, 2))),
        dict(a=tensor(shape=(2.0,))),
        dict(a=tensor(shape=("2",))),
        dict(a=tensor(shape=2)),
        dict(a=tensor(dtype="F64")),
        dict(a=tensor(dtype=["F32"])),
        dict(a=tensor(dtype="XX", data_offsets=(16, 0)), b=tensor(data_offsets=(0, 16), shape=(4,))),
        dict(a={"dtype": "F32", "shape": [2]}),
        dict(a={"shape": [2], "data_offsets": [0, 8]}),
        dict(a=5),
        dict(a=None),
        b'{"',
        b'{"a": \xff}',
        b"{" * 200_000,
        b'{"a":' * 200_000,
        b"[]",
        b"5",
        b"  {}",
        b'{"a": NaN}',
    ],
    ids=lambda header: str(header)[:60],
)
@pytest.mark.parametrize("size", [0, 8, 16, 24])
def test_header_that_contradicts_itself(header, size, tmp_path):
    """C35 C36 Overlaps, gaps, sizes that do not fit the shape, broken JSON."""
    (write(tmp_path, weights()) / "model.safetensors").write_bytes(raw(header, bytes(size)))
    is_json = not isinstance(header, bytes) or header.startswith(b"{")
    fails(tmp_path, tmp_path / "model.safetensors", "damaged safetensors header" if is_json else "no safetensors file")


@pytest.mark.parametrize("end", [24, 1 << 60, 1 << 80])
def test_offsets_outside_the_file(end, tmp_path):
    """C35"""
    header = dict(a=tensor(data_offsets=(0, end), shape=(end // 4,)))
    file = write(tmp_path, weights()) / "model.safetensors"
    file.write_bytes(raw(header, bytes(16)))
    size = file.stat().st_size
    fails(tmp_path, file, f"asks for {size - 16 + end} bytes, found {size}")


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_header_length_that_cannot_be(length, tmp_path):
    """C36"""
    (write(tmp_path, weights()) / "model.safetensors").write_bytes(raw({}, b"x" * 50, length))
    fails(tmp_path, tmp_path / "model.safetensors")


def test_damaged_bytes_never_do_more_than_raise(tmp_path):
    """C35 Any byte of header, index or config may be wrong."""
    rng = random.Random(0)
    shards(tmp_path, weights(), count=2)
    targets = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"]
    saved = {name: (tmp_path / name).read_bytes() for name in targets}
    raised = 0
    for _ in range(600):
        name = rng.choice(targets)
        data = bytearray(saved[name])
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(min(len(data), 1200))] = rng.choice(b'\0\x80\xff"0123456789-[]{},:. aZ')
        (tmp_path / name).write_bytes(data)
        try:
            with Checkpoint(tmp_path) as checkpoint:
                checkpoint.expert(checkpoint.layers[-1], 0)
        except (ValueError, TypeError, OSError):
            raised += 1
        (tmp_path / name).write_bytes(saved[name])
    assert raised > 300


# Folders.


def test_no_such_folder(tmp_path):
    """C66"""
    fails(tmp_path / "none", tmp_path / "none", "no such folder", kind=FileNotFoundError)


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, ["empty", "Download"]),
        ({"model-q4.gguf": b"GGUF"}, ["GGUF", "the .gguf file itself"]),
        ({"config.json": b"{}", "model-q4.gguf": b"GGUF"}, ["GGUF"]),
        ({"ktcy.json": b"{}", "layer-00000.safetensors": raw({})}, ["converted by ktcy", "weight_path"]),
        ({"ktcy.json": b"{}", "config.json": b"{}", "layer-00000.safetensors": raw({})}, ["converted by ktcy"]),
        ({"model.safetensors": raw({})}, ["without a config.json", "Copy"]),
        ({"config.json": b"{}", "pytorch_model.bin": b"PK"}, ["PyTorch", "save_pretrained"]),
        ({"config.json": b"{}"}, ["config.json", "Download"]),
        ({"notes.txt": b"hello"}, ["notes.txt", "Download"]),
        ({"snapshots/0f/config.json": b"{}", "refs/main": b"0f"}, ["cache", "snapshots"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_folder_that_holds_something_else(files, words, tmp_path):
    """C66 What it holds, what was expected, what to run."""
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(data)
    fails(tmp_path, tmp_path, "expected config.json and *.safetensors", *words)
    with pytest.raises(ValueError) as caught:
        Checkpoint(tmp_path)
    assert ("python -m ktcy convert" in str(caught.value)) == ("ktcy.json" not in files)


@pytest.mark.parametrize("name, data", [("m.gguf", b"GGUF" + b"x" * 50), ("model.safetensors", raw({}))])
def test_file_instead_of_a_folder(name, data, tmp_path):
    """C66"""
    (tmp_path / name).write_bytes(data)
    fails(tmp_path / name, tmp_path / name, "expected the folder")


def test_gguf_beside_a_checkpoint_is_no_matter(tmp_path):
    tensors = weights()
    write(tmp_path, tensors)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert_holds(tmp_path, tensors)


# Reading.


def test_source_names_file_and_tensor(made, tmp_path):
    with Checkpoint(write(tmp_path, weights())) as checkpoint:
        assert checkpoint.expert(1, 2).source == {
            part: f"{tmp_path}/model.safetensors: model.layers.1.mlp.experts.2.{part}_proj.weight"
            for part in ("gate", "up", "down")
        }
    _, path = made("gpt_oss")
    with Checkpoint(path) as checkpoint:
        root = f"{path}/model.safetensors: model.layers.0.mlp.experts."
        source = checkpoint.expert(0, 3).source
        assert source["gate"] == source["up"] == root + "gate_up_proj, expert 3"
        assert source["down"] == root + "down_proj, expert 3"


def test_layers_and_experts_that_are_not_there(tmp_path):
    with Checkpoint(write(tmp_path, weights())) as checkpoint:
        for layer, e, word in ((2, 0, "0-1"), (-1, 0, "0-1"), (0, E, "0 to 2"), (0, -1, "0 to 2")):
            with pytest.raises(ValueError, match=word):
                checkpoint.expert(layer, e)


def test_after_close(tmp_path):
    tensors = weights()
    checkpoint = Checkpoint(write(tmp_path, tensors))
    expert = checkpoint.expert(0, 1)
    checkpoint.close()
    checkpoint.close()
    np.testing.assert_array_equal(expert.down, tensors["model.layers.0.mlp.experts.1.down_proj.weight"])
    with pytest.raises(ValueError, match="closed"):
        checkpoint.expert(0, 1)


def test_no_file_stays_open(tmp_path):
    shards(tmp_path, weights())
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint(tmp_path):
        assert len(os.listdir("/proc/self/fd")) == before + 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_read_at_once(tmp_path):
    tensors = weights(layers=8)
    write(tmp_path, tensors, config(num_hidden_layers=8))
    wrong = []
    with Checkpoint(tmp_path) as checkpoint:
        start = threading.Barrier(4)

        def work(seed):
            rng = random.Random(seed)
            start.wait()
            for _ in range(300):
                layer, e = rng.randrange(8), rng.randrange(E)
                expert = checkpoint.expert(layer, e)
                for part in ("gate", "up", "down"):
                    stored = tensors[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"]
                    if not np.array_equal(getattr(expert, part), stored):
                        wrong.append((layer, e, part))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("fused", [True, False])
def test_memory_does_not_grow_with_the_model(fused, tmp_path):
    """C63 C65 One expert a thread, mapped pages included; the file is sparse, 288 MB."""
    experts, hidden, inter = 32, 1024, 768
    one = 2 * 3 * hidden * inter
    shapes = dict(gate_up_proj=(2 * inter, hidden), down_proj=(hidden, inter))
    if not fused:
        split = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
        shapes = {f"{e}.{name}.weight": shape for e in range(experts) for name, shape in split.items()}
    header, end = {}, 0
    for layer in range(2):
        for name, shape in shapes.items():
            shape = (experts, *shape) if fused else shape
            begin, end = end, end + 2 * int(np.prod(shape))
            header[f"model.layers.{layer}.mlp.experts.{name}"] = tensor("BF16", shape, (begin, end))
    settings = config(num_experts=experts, hidden_size=hidden, moe_intermediate_size=inter)
    file = write(tmp_path, {}, settings) / "model.safetensors"
    file.write_bytes(raw(header))
    os.truncate(file, file.stat().st_size + end)
    before = peak = resident()
    with Checkpoint(tmp_path) as checkpoint:
        for layer in range(2):
            for e in range(experts):
                expert = checkpoint.expert(layer, e)
                assert not expert.gate[-1, -1] and not expert.down[-1, -1]
                peak = max(peak, resident())
    assert peak - before < 2 * one + (8 << 20)

"""GGUF files: every type is read exactly as the packing rule written here says, and what is wrong is said."""

import os
import struct
import subprocess
import sys
import threading
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest

from ktcy.config import Activation, LayerShape
from ktcy.weights import gguf as reader
from ktcy.weights.gguf import Gguf, common_kind
from ktcy.weights.quantized import Quantized

E, H, I = 3, 256, 512  # noqa: E741
PARTS = ("gate", "up", "down")
DIMS = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I), "gate_up": (E, 2 * I, H)}
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# Each function makes random blocks of a type: their bytes [n, size] and the float32 values [n, count] they mean.


def halves(r, n):
    return (r.standard_normal((n, 1)) / 64).astype(np.float16)


def nibbles(q):
    """Value j in the low half of byte j, value j + 16 in the high half."""
    return (q[:, :16] | q[:, 16:] << 4).astype(np.uint8)


def q8_0(r, n):
    d, q = halves(r, n), r.integers(-128, 128, (n, 32)).astype(np.int8)
    return np.hstack([d.view(np.uint8), q.view(np.uint8)]), d.astype(np.float32) * q


def q4_0(r, n):
    d, q = halves(r, n), r.integers(0, 16, (n, 32))
    return np.hstack([d.view(np.uint8), nibbles(q)]), d.astype(np.float32) * (q - 8).astype(np.float32)


def iq4_nl(r, n):
    d, q = halves(r, n), r.integers(0, 16, (n, 32))
    return np.hstack([d.view(np.uint8), nibbles(q)]), d.astype(np.float32) * np.float32(IQ4_NL)[q]


def mxfp4(r, n):
    e, q = r.integers(0, 250, (n, 1)), r.integers(0, 16, (n, 32))
    exponent, mantissa = q >> 1 & 3, q & 1
    value = np.where(exponent == 0, mantissa / 2, 2.0 ** (exponent - 1) * (1 + mantissa / 2)) * np.where(q & 8, -1, 1)
    return np.hstack([e.astype(np.uint8), nibbles(q)]), (value * 2.0 ** (e - 127)).astype(np.float32)


def six_bits(sc, m):
    """Eight scales and eight minima in 12 bytes; the last four of each leave their top two bits in the first ones."""
    first = [low[:, :4] | low[:, 4:] >> 4 << 6 for low in (sc, m)]
    return np.hstack([*first, sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4])


def two_levels(r, n, bits):
    d, dmin, sc, m = halves(r, n), halves(r, n), *r.integers(0, 64, (2, n, 8))
    q = r.integers(0, 1 << bits, (n, 256))
    scale, least = (np.repeat(np.float32(a) * np.float32(b), 32, axis=1) for a, b in ((d, sc), (dmin, m)))
    by_64 = (q & 15).reshape(n, 4, 2, 32)
    low = (by_64[:, :, 0] | by_64[:, :, 1] << 4).reshape(n, 128)
    head = [d.view(np.uint8), dmin.view(np.uint8), six_bits(sc, m)]
    return head, q, low, scale * q.astype(np.float32) - least


def q4_k(r, n):
    head, _, low, values = two_levels(r, n, 4)
    return np.hstack([*head, low]).astype(np.uint8), values


def q5_k(r, n):
    head, q, low, values = two_levels(r, n, 5)
    high = sum((q[:, 32 * j : 32 * j + 32] >> 4) << j for j in range(8))
    return np.hstack([*head, high, low]).astype(np.uint8), values


def q6_k(r, n):
    d, sc, q = halves(r, n), r.integers(-128, 128, (n, 16)).astype(np.int8), r.integers(0, 64, (n, 256))
    a = q.reshape(n, 2, 4, 32)
    low = np.concatenate([a[:, :, 0] & 15 | (a[:, :, 2] & 15) << 4, a[:, :, 1] & 15 | (a[:, :, 3] & 15) << 4], axis=2)
    high = sum((a[:, :, j] >> 4) << 2 * j for j in range(4))
    data = [low.reshape(n, 128), high.reshape(n, 64), sc.view(np.uint8), d.view(np.uint8)]
    scale = np.repeat(d.astype(np.float32) * sc.astype(np.float32), 16, axis=1)
    return np.hstack(data).astype(np.uint8), scale * (q - 32).astype(np.float32)


def plain(dtype):
    def make(r, n):
        values = r.standard_normal((n, 32)).astype(dtype)
        return values.view(np.uint8), values.astype(np.float32)

    return make


TYPES = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "IQ4_NL": iq4_nl,
    "MXFP4": mxfp4,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "F32": plain(np.float32),
    "F16": plain(np.float16),
    "BF16": plain(ml_dtypes.bfloat16),
}
KINDS = {"Q8_0": "q8_0", "Q4_0": "q4_0", "IQ4_NL": "q8_0", "MXFP4": "mxfp4"}
KINDS |= {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
# What `expert` gives by kind: Quantized codes or a dtype.
HELD = {"q8_0": "int8", "q4_0": "int4", "mxfp4": "e2m1", "fp16": "float16", "bf16": "bfloat16"}
HELD |= {"fp32": "float32", "repacked": "float32"}


def matrix(name, dims, seed=0):
    """Bytes and values of a tensor of a type."""
    block = 256 if name.endswith("_K") else 32
    data, values = TYPES[name](np.random.default_rng(seed), int(np.prod(dims)) // block)
    return data.reshape(*dims[:-1], -1), values.reshape(dims)


def layer_tensors(layer=0, **types):
    """``{name: (bytes, type)}`` and ``{part: values}`` of the experts of a layer."""
    tensors, values = {}, {}
    for seed, (part, name) in enumerate(types.items()):
        data, values[part] = matrix(name, DIMS[part], 10 * layer + seed)
        tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = data, name
    return tensors, values


def model(name="Q8_0", layers=2):
    tensors = {}
    for layer in range(layers):
        tensors |= layer_tensors(layer, gate=name, up=name, down=name)[0]
    return tensors


def write(path, tensors, arch="qwen3moe", alignment=None, **changes):
    """A GGUF file; ``changes`` add or replace metadata, None leaves them out."""
    count = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("blk.")), default=0)
    meta = dict(block_count=count, expert_count=E, expert_used_count=2, embedding_length=H, feed_forward_length=96)
    meta |= dict(expert_feed_forward_length=I)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_token_list(["some", "words"])
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in {**{f"{arch}.{key}": v for key, v in meta.items()}, **changes}.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values_of(stored):
    return stored.dequantize() if isinstance(stored, Quantized) else stored.astype(np.float32)


def held(stored):
    return stored.kind if isinstance(stored, Quantized) else stored.dtype.name


def fails(path, *words, kind=ValueError):
    with pytest.raises(kind) as caught:
        Gguf(path)
    for word in words:
        assert str(word) in str(caught.value)


def patch(path, where, data):
    content = bytearray(path.read_bytes())
    content[where : where + len(data)] = data
    path.write_bytes(content)
    return path


def after_name(path, name, offset=0):
    """Where the description of a tensor goes on after its name."""
    content = path.read_bytes()
    return content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + offset


# What is read.


@pytest.mark.parametrize("name", TYPES)
def test_type_is_read_exactly(name, tmp_path):
    """C30 the packing rules above, gguf's own and the reader give the same numbers, bit for bit."""
    tensors, values = layer_tensors(gate=name, up=name, down=name)
    with Gguf(write(tmp_path / "m.gguf", tensors)) as model:
        assert (model.architecture, model.layers, model.has_bias) == ("qwen3moe", [0], False)
        assert model.shape == LayerShape(E, 2, H, I) and model.activation == Activation()
        assert model.types == {0: dict.fromkeys(PARTS, name)}
        assert model.kinds == {0: KINDS.get(name, "repacked")}
        for e in range(E):
            expert = model.expert(0, e)
            for part in PARTS:
                data, _ = tensors[f"blk.0.ffn_{part}_exps.weight"]
                want = gguf.quants.dequantize(data[e], gguf.GGMLQuantizationType[name])
                got = getattr(expert, part)
                np.testing.assert_array_equal(values[part][e], want)
                np.testing.assert_array_equal(values_of(got), want)
                assert f"blk.0.ffn_{part}_exps.weight, expert {e}" in expert.source[part]
                assert held(got) == HELD[model.kinds[0]]
            assert (expert.gate_bias, expert.up_bias, expert.down_bias) == (None, None, None)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "IQ4_NL", "MXFP4"])
def test_codes_and_scales_are_those_of_the_file(name, tmp_path):
    with Gguf(write(tmp_path / "m.gguf", model(name, 1))) as file:
        for part, (n, k) in dict(gate=(I, H), down=(H, I)).items():
            got = getattr(file.expert(0, 1), part)
            assert got.codes.dtype == np.uint8 and got.codes.shape == (n, k)
            assert got.scale.dtype == (np.uint8 if name == "MXFP4" else np.float16)
            assert got.scale.shape == (n, k // 32) and got.group == 32
            assert got.zero is None and got.order is None


def test_iq4_nl_values():
    assert tuple(reader.IQ4_NL.view(np.int8)) == IQ4_NL == gguf.quants.IQ4_NL.kvalues


OTHERS = "Q4_1 Q5_0 Q5_1 Q2_K Q3_K IQ4_XS IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M TQ1_0 TQ2_0".split()


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_give_the_values_of_the_gguf_package(name, tmp_path):
    number = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[number]
    r, tensors = np.random.default_rng(0), {}
    for part in PARTS:
        *lead, k = DIMS[part]
        # Below 60 in every byte: no scale, wherever the type keeps it, is inf or NaN.
        tensors[f"blk.0.ffn_{part}_exps.weight"] = r.integers(0, 60, (*lead, k // block * size), np.uint8), name
    with Gguf(write(tmp_path / "m.gguf", tensors)) as model:
        assert model.kinds == {0: "repacked"}
        for part in PARTS:
            want = gguf.quants.dequantize(tensors[f"blk.0.ffn_{part}_exps.weight"][0][2], number)
            np.testing.assert_array_equal(getattr(model.expert(0, 2), part), want)


MIXED = {
    ("Q4_0", "Q4_0", "Q8_0"): "q8_0",
    ("Q4_0", "IQ4_NL", "Q4_0"): "q8_0",
    ("Q8_0", "IQ4_NL", "IQ4_NL"): "q8_0",
    ("BF16", "F16", "BF16"): "fp32",
    ("Q4_K", "Q4_K", "Q6_K"): "repacked",
    ("Q4_K", "Q4_K", "Q8_0"): "repacked",
    ("MXFP4", "MXFP4", "Q8_0"): "repacked",
    ("BF16", "Q8_0", "Q8_0"): "repacked",
    ("Q4_0", "Q4_0", "F32"): "repacked",
}


@pytest.mark.parametrize("types, kind", MIXED.items(), ids=["-".join(types) for types in MIXED])
def test_mixed_types_have_one_kind_and_their_values(types, kind, tmp_path):
    """Real files hold Q6_K down beside Q4_K gate and up: one format takes the layer, exactly where it can."""
    assert common_kind(types) == kind
    tensors, values = layer_tensors(**dict(zip(PARTS, types)))
    with Gguf(write(tmp_path / "m.gguf", tensors)) as model:
        assert model.kinds == {0: kind} and model.types == {0: dict(zip(PARTS, types))}
        for e in range(E):
            expert = model.expert(0, e)
            for part in PARTS:
                got = getattr(expert, part)
                assert held(got) == HELD[kind]
                np.testing.assert_array_equal(values_of(got), values[part][e])


@pytest.mark.parametrize("name", TYPES)
def test_merged_gate_and_up(name, tmp_path):
    """C31 one tensor, gate's rows first."""
    tensors, values = layer_tensors(gate_up=name, down=name)
    with Gguf(write(tmp_path / "m.gguf", tensors)) as model:
        assert model.types == {0: dict.fromkeys(PARTS, name)}
        for e in range(E):
            expert = model.expert(0, e)
            np.testing.assert_array_equal(values_of(expert.gate), values["gate_up"][e, :I])
            np.testing.assert_array_equal(values_of(expert.up), values["gate_up"][e, I:])
            np.testing.assert_array_equal(values_of(expert.down), values["down"][e])


@pytest.mark.parametrize("merged", [False, True])
def test_gpt_oss_biases_and_activation(merged, tmp_path):
    r = np.random.default_rng(5)
    parts = ("gate_up", "down") if merged else PARTS
    tensors, values = layer_tensors(**dict.fromkeys(parts, "MXFP4"))
    biases = {part: r.standard_normal(DIMS[part][:2]).astype(np.float32) for part in parts}
    tensors |= {f"blk.0.ffn_{part}_exps.bias": (bias, "F32") for part, bias in biases.items()}
    with Gguf(write(tmp_path / "m.gguf", tensors, "gpt-oss")) as model:
        assert model.has_bias and model.activation == Activation(alpha=1.702, limit=7.0, offset=1.0)
        for e in range(E):
            expert = model.expert(0, e)
            want = np.split(biases["gate_up"][e], 2) if merged else (biases["gate"][e], biases["up"][e])
            for got, bias in zip((expert.gate_bias, expert.up_bias, expert.down_bias), (*want, biases["down"][e])):
                assert got.dtype == np.float32
                np.testing.assert_array_equal(got, bias)
            np.testing.assert_array_equal(expert.down.dequantize(), values["down"][e])


@pytest.mark.parametrize("arch", reader.ARCHITECTURES)
def test_every_architecture_opens(arch, tmp_path):
    tensors = model(layers=1)
    if arch == "gpt-oss":
        tensors |= {f"blk.0.ffn_{p}_exps.bias": (np.zeros(DIMS[p][:2], np.float32), "F32") for p in PARTS}
    with Gguf(write(tmp_path / "m.gguf", tensors, arch)) as file:
        assert file.architecture == arch and file.layers == [0]


def test_intermediate_size_without_a_key_of_its_own(tmp_path):
    """Mixtral has feed_forward_length only."""
    changes = {"llama.expert_feed_forward_length": None, "llama.feed_forward_length": I}
    with Gguf(write(tmp_path / "m.gguf", model(layers=1), "llama", **changes)) as file:
        assert file.shape.moe_intermediate_size == I


def test_dense_layers_and_those_for_multi_token_prediction_are_passed_by(tmp_path):
    """C33 experts in layers 1 and 3 of four, layer 4 predicts further tokens."""
    tensors = {k: v for k, v in model(layers=5).items() if k.split(".")[1] in "134"}
    tensors |= {f"blk.{n}.ffn_down.weight": (np.zeros((H, 96), np.float32), "F32") for n in (0, 2)}
    path = write(tmp_path / "m.gguf", tensors, "glm4moe", **{"glm4moe.nextn_predict_layers": 1})
    with Gguf(path) as file:
        assert file.layers == [1, 3]
        assert list(file.tensors[3]) == [f"blk.3.ffn_{part}_exps.weight" for part in PARTS]
        with pytest.raises(ValueError, match="layer 2 .* has no experts; the layers are 1, 3"):
            file.expert(2, 0)


@pytest.mark.parametrize("given", [1, 3])
def test_set_of_files(given, tmp_path):
    names = write_set(tmp_path)
    whole, _ = layer_tensors(1, gate="Q8_0", up="Q8_0", down="Q8_0")
    with Gguf(tmp_path / names[given - 1]) as file:
        assert file.layers == [0, 1] and set(file.files) <= {*names}
        for e in range(E):
            for part in PARTS:
                data, _ = whole[f"blk.1.ffn_{part}_exps.weight"]
                want = gguf.quants.dequantize(data[e], gguf.GGMLQuantizationType.Q8_0)
                np.testing.assert_array_equal(getattr(file.expert(1, e), part).dequantize(), want)


def write_set(folder):
    """Three files of two layers, as llama.cpp splits them."""
    writer = gguf.GGUFWriter(folder / "m", "qwen3moe", split_max_tensors=2)
    for key, value in dict(block_count=2, expert_count=E, expert_used_count=2, embedding_length=H).items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_uint32("qwen3moe.expert_feed_forward_length", I)
    for name, (data, kind) in model().items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file(folder / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return names


def test_version_2_and_another_alignment(tmp_path):
    tensors, values = layer_tensors(gate="Q8_0", up="Q8_0", down="Q8_0")
    path = write(tmp_path / "m.gguf", tensors, alignment=4096)
    with Gguf(patch(path, 4, struct.pack("<I", 2))) as file:
        assert file.tensors[0]["blk.0.ffn_gate_exps.weight"].begin == 4096
        np.testing.assert_array_equal(file.expert(0, 2).down.dequantize(), values["down"][2])


def test_header_is_what_stands_before_the_tensors(tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=1))
    with Gguf(path) as file:
        header = file.header()
        first = min(tensor.begin for tensor in file.tensors[0].values())
    assert path.read_bytes().startswith(header) and -(-len(header) // 32) * 32 == first


def test_threads_read_at_once(tmp_path):
    tensors, values = layer_tensors(gate="Q8_0", up="Q4_K", down="F16")
    wrong = []
    with Gguf(write(tmp_path / "m.gguf", tensors)) as file:

        def read(e):
            for _ in range(20):
                expert = file.expert(0, e)
                if any((values_of(getattr(expert, part)) != values[part][e]).any() for part in PARTS):
                    wrong.append(e)

        threads = [threading.Thread(target=read, args=(n % E,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "BF16"])
def test_memory_is_that_of_one_expert(name, tmp_path):
    """C63 C65 a mapped or whole file would be 16 times an expert's float32 values."""
    n_experts, values = 64, 3 * H * I * 4
    tensors = {}
    for part in PARTS:
        data, _ = matrix(name, (n_experts, *DIMS[part][1:]))
        tensors[f"blk.0.ffn_{part}_exps.weight"] = data, name
    path = write(tmp_path / "m.gguf", tensors, **{"qwen3moe.expert_count": n_experts})
    del tensors, data
    with Gguf(path) as file:
        file.expert(0, 0)
        tracemalloc.start()
        try:
            for e in range(n_experts):
                file.expert(0, e)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # The values, the parts that the gguf package concatenates, its floats of one matrix: the last is a third.
    assert peak <= 3 * values


def test_closed_and_out_of_range(tmp_path):
    with Gguf(write(tmp_path / "m.gguf", model(layers=1))) as file:
        for e in (-1, E):
            with pytest.raises(ValueError, match=f"no expert {e}; the experts are 0 to 2"):
                file.expert(0, e)
    file.close()
    assert file.files == {}
    with pytest.raises(ValueError, match="is closed"):
        file.expert(0, 0)


# What is wrong.


def test_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    fails(tmp_path / "m.gguf", "pip install ktcy[gguf]", kind=ImportError)


def test_reader_alone_does_not_import_the_package():
    code = "import sys, ktcy.weights.gguf; print('gguf' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


WRONG = {
    "empty": (b"", "it is empty"),
    "zeros": (bytes(5000), "zero bytes"),
    "page": (b"<!DOCTYPE html><html>", "web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "other": (b"GGML" + bytes(range(100)), "starts with b'GGML'"),
    "magic only": (b"GGUF", "is it cut off?"),
}


@pytest.mark.parametrize("data, word", WRONG.values(), ids=list(WRONG))
def test_not_a_gguf_file(data, word, tmp_path):
    """C67 what it is instead."""
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    fails(path, path, word)


def test_no_such_file_and_folders(tmp_path):
    """C66"""
    fails(tmp_path / "m.gguf", "there is no such file", kind=FileNotFoundError)
    fails(tmp_path, "nothing: it is empty", "expected a GGUF file")
    write(tmp_path / "m.gguf", model(layers=1))
    fails(tmp_path, "holds GGUF files; give one of them: m.gguf")


@pytest.mark.parametrize("version", [1, 4, 77])
def test_other_version(version, tmp_path):
    path = patch(write(tmp_path / "m.gguf", model(layers=1)), 4, struct.pack("<I", version))
    fails(path, path, f"version {version} of GGUF", "reads versions 2 and 3", "update ktcy")


def test_big_endian(tmp_path):
    path = patch(write(tmp_path / "m.gguf", model(layers=1)), 4, struct.pack(">I", 3))
    fails(path, "big-endian")


@pytest.mark.parametrize("number, name", [(99, "number 99"), (24, "I8"), (15, "Q8_K")])
def test_type_that_cannot_be_read(number, name, tmp_path):
    path = write(tmp_path / "m.gguf", model())
    tensor = "blk.1.ffn_up_exps.weight"
    patch(path, after_name(path, tensor, 4 + 3 * 8), struct.pack("<I", number))
    fails(path, path, tensor, f"GGML type {name}", "Q8_0, Q4_0", "Take the model in another type")


def test_unreadable_types_of_other_tensors_are_no_matter(tmp_path):
    path = write(tmp_path / "m.gguf", {**model(), "token_embd.weight": (np.zeros((8, H), np.float32), "F32")})
    patch(path, after_name(path, "token_embd.weight", 4 + 2 * 8), struct.pack("<I", 99))
    with Gguf(path) as file:
        assert file.layers == [0, 1]


def test_cut_off_anywhere(tmp_path):
    """C35 expected and found bytes before any is used."""
    path = write(tmp_path / "m.gguf", model(layers=1))
    whole = path.read_bytes()
    with Gguf(path) as file:
        header, end = len(file.header()), max(t.end for t in file.tensors[0].values())
    for size in (end - 1, end - 1000, header, -(-header // 32) * 32):
        path.write_bytes(whole[:size])
        fails(path, path, "cut off", f"asks for {end} bytes, found {size}")
    for size in range(4, header, 7):
        path.write_bytes(whole[:size])
        fails(path, path, "cut off", f"found {size} in the file")


def test_cut_while_in_use(tmp_path):
    """C35 an exception and no SIGBUS."""
    path = write(tmp_path / "m.gguf", model(layers=1))
    with Gguf(path) as file:
        file.expert(0, 0)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(OSError, match="m.gguf ends at byte"):
            file.expert(0, E - 1)


def test_damaged_headers(tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=1))
    whole = path.read_bytes()
    name = "blk.0.ffn_up_exps.weight"
    at = after_name(path, name)
    key = whole.index(b"qwen3moe.expert_count") + len("qwen3moe.expert_count")
    for where, data, words in (
        (at - len(name) - 8, struct.pack("<Q", 1 << 62), ["cut off"]),
        (at - 3, b"\xff", ["utf-8"]),
        (at + 4, struct.pack("<Q", H + 1), [name, "rows of 257 values", "blocks of Q8_0 hold 32"]),
        (key, struct.pack("<I", 13), ["a value of type 13"]),
        (key, struct.pack("<III", 9, 0, 1 << 30), ["cut off"]),
        (8, struct.pack("<Q", 1 << 60), ["GGUF header"]),
    ):
        path.write_bytes(whole)
        patch(path, where, data)
        fails(path, path, *words)


def test_names_twice(tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=2))
    whole = path.read_bytes()
    patch(path, whole.index(b"blk.1.ffn_up_exps.weight"), b"blk.0")
    fails(path, path, "blk.0.ffn_up_exps.weight stands twice")
    path = write(tmp_path / "m.gguf", model(layers=1), **{"qwen3moe.expert_kount": 1})
    patch(path, path.read_bytes().index(b"qwen3moe.expert_kount"), b"qwen3moe.expert_count")
    fails(path, path, "qwen3moe.expert_count stands twice")


def test_arrays_in_arrays(tmp_path):
    """Some are legal; thousands, one in another, are damage."""
    path = write(tmp_path / "m.gguf", model(layers=1))
    start, rest = path.read_bytes()[:24], path.read_bytes()[24:]
    count = struct.pack("<Q", struct.unpack("<Q", start[16:])[0] + 1)
    key = struct.pack("<Q3s", 3, b"key")
    for depth in (2, 100_000):
        nested = key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQB", 0, 1, 7)
        # With as many bytes as the alignment asks for, the tensors keep their place.
        nested += struct.pack("<Q3sIQ", 3, b"pad", 8, -(len(nested) + 23) % 32) + bytes(-(len(nested) + 23) % 32)
        path.write_bytes(start[:16] + struct.pack("<Q", struct.unpack("<Q", count)[0] + 1) + nested + rest)
        if depth == 2:
            with Gguf(path) as file:
                file.expert(0, 2)
        else:
            fails(path, path, "recursion")


def test_any_byte_of_the_header_may_be_wrong(tmp_path):
    """Whatever it makes of the file: it opens, or the error is of the kind that the command line shows."""
    path = write(tmp_path / "m.gguf", model(layers=1))
    whole, r, refused = path.read_bytes(), np.random.default_rng(0), 0
    with Gguf(path) as file:
        length = len(file.header())
    for _ in range(400):
        path.write_bytes(whole)
        patch(path, r.integers(4, length), r.bytes(r.integers(1, 4)))
        try:
            Gguf(path).close()
        except (TypeError, ValueError) as error:
            assert str(path) in str(error)
            refused += 1
    assert 200 < refused < 400


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_alignment_that_is_no_power_of_two(alignment, tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=1), **{"general.alignment": alignment})
    fails(path, f"general.alignment is {alignment}")


@pytest.mark.parametrize("part", PARTS)
def test_missing_tensor(part, tmp_path):
    """C31"""
    tensors = model()
    del tensors[f"blk.1.ffn_{part}_exps.weight"]
    fails(write(tmp_path / "m.gguf", tensors), "layer 1", f"blk.1.ffn_{part}_exps.weight", "fetch or convert it again")


def test_missing_layer(tmp_path):
    tensors = {k: v for k, v in model(layers=3).items() if not k.startswith("blk.1.")}
    fails(write(tmp_path / "m.gguf", tensors), "lacks expert tensors of layer 1", "blk.1.ffn_gate_exps.weight")


def test_missing_bias(tmp_path):
    fails(write(tmp_path / "m.gguf", model(layers=1), "gpt-oss"), "lacks", "blk.0.ffn_gate_exps.bias")


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.scale", "blk.0.ffn_down_exps.bias", "blk.0.ffn_gate_up_exps.bias"])
def test_tensor_that_nothing_uses(name, tmp_path):
    """C31 scales or biases that would be left out are an error that names them."""
    tensors = {**model(), name: (np.ones((E, 1), np.float32), "F32")}
    fails(write(tmp_path / "m.gguf", tensors), "nothing uses the expert tensor", name)


def test_one_tensor_for_each_expert(tmp_path):
    tensors = {f"blk.0.ffn_{p}.{e}.weight": (np.zeros(DIMS[p][1:], np.float32), "F32") for p in PARTS for e in range(E)}
    fails(write(tmp_path / "m.gguf", tensors, "llama"), "early format", "blk.0.ffn_gate.0.weight", "today's llama.cpp")


SIZES = dict(expert_count=4, embedding_length=128, expert_feed_forward_length=64)


@pytest.mark.parametrize("key, value", SIZES.items())
def test_shape_that_contradicts_the_metadata(key, value, tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=1), **{f"qwen3moe.{key}": value})
    fails(path, "blk.0.ffn_gate_exps.weight", f"shape [{E}, {I}, {H}]", "but the metadata make it", value)


KEYS = ["block_count", "expert_used_count", "embedding_length"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [None, "many", 0])
def test_metadata_missing_or_odd(key, value, tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=1), **{f"qwen3moe.{key}": value})
    fails(path, f"{path}: ", kind=(TypeError, ValueError))


def test_metadata_missing_are_named(tmp_path):
    for key in KEYS:
        path = write(tmp_path / "m.gguf", model(layers=1), **{f"qwen3moe.{key}": None})
        fails(path, f"has no qwen3moe.{key}")
    changes = {"qwen3moe.feed_forward_length": None, "qwen3moe.expert_feed_forward_length": None}
    path = write(tmp_path / "m.gguf", model(layers=1), **changes)
    fails(path, "has no qwen3moe.expert_feed_forward_length or qwen3moe.feed_forward_length")


@pytest.mark.parametrize("count", [None, 0])
def test_model_without_experts(count, tmp_path):
    path = write(tmp_path / "m.gguf", model(layers=1), "gemma3", **{"gemma3.expert_count": count})
    fails(path, "no gemma3.expert_count", "Mixture-of-Experts")


def test_unknown_architecture(tmp_path):
    fails(write(tmp_path / "m.gguf", model(layers=1), "newmoe"), "'newmoe'", "ktcy reads qwen2moe")


def test_all_layers_dense(tmp_path):
    path = write(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": (np.zeros((H, 96), np.float32), "F32")})
    fails(path, "no layer of this model has experts")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "IQ4_NL"])
def test_scale_that_is_not_finite(name, value, tmp_path):
    """C22 tensor, expert, row and group."""
    tensors = model(name, 1)
    data, _ = tensors["blk.0.ffn_up_exps.weight"]
    size = data.shape[-1] // (H // 32)
    data[1, 37, 3 * size : 3 * size + 2] = np.array([value], np.float16).view(np.uint8)
    with Gguf(write(tmp_path / "m.gguf", tensors)) as file:
        file.expert(0, 0)
        with pytest.raises(ValueError, match=f"ffn_up_exps.weight, expert 1: the scale at row 37, group 3 is {value}"):
            file.expert(0, 1)


def test_e8m0_scale_that_is_nan(tmp_path):
    """C22 0xFF is NaN in OCP MX; llama.cpp would read 2^127."""
    tensors = model("MXFP4", 1)
    tensors["blk.0.ffn_down_exps.weight"][0][2, 5, 17] = 255
    with Gguf(write(tmp_path / "m.gguf", tensors)) as file:
        with pytest.raises(ValueError, match="ffn_down_exps.weight, expert 2: the scale at row 5, group 1 is nan"):
            file.expert(0, 2)


@pytest.mark.parametrize("name, at", [("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208)])
def test_repacked_value_that_is_not_finite(name, at, tmp_path):
    """C22"""
    tensors = model(name, 1)
    tensors["blk.0.ffn_gate_exps.weight"][0][2, 41, at : at + 2] = np.array(["nan"], np.float16).view(np.uint8)
    with Gguf(write(tmp_path / "m.gguf", tensors)) as file:
        with pytest.raises(ValueError, match="gate_exps.weight, expert 2: the value at row 41, column 0 is nan"):
            file.expert(0, 2)


def test_set_with_missing_renamed_or_foreign_files(tmp_path):
    """C35 C38"""
    first, second, third = (tmp_path / name for name in write_set(tmp_path))
    content = second.read_bytes()
    second.unlink()
    fails(first, "one of 3 files, 1 are not there: m-00002-of-00003.gguf", kind=FileNotFoundError)
    second.write_bytes(third.read_bytes())
    fails(first, "m-00002-of-00003.gguf", "split.count and split.no are 3 and 2, by its name 3 and 1")
    second.write_bytes(content)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    fails(alone, "by its name 1 and 0")
    for path in (first, second, third):
        patch(path, after_name(path, "split.tensors.count", 4), struct.pack("<i", 9))
    fails(first, "hold 6 tensors, expected 9")
    write(tmp_path / "n-00001-of-00002.gguf", model(layers=1), **{"split.no": 0, "split.count": 2})
    write(tmp_path / "n-00002-of-00002.gguf", model(layers=1), **{"split.no": 1, "split.count": 2})
    fails(tmp_path / "n-00001-of-00002.gguf", "blk.0.ffn_gate_exps.weight stands twice")

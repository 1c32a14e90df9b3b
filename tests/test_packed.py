"""The packed weights of a layer: bytes of the layout, mapping in place, and what is refused."""

import collections
import copy
import json
import os
import pickle
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

import oracle
from ktcy import kernels
from ktcy.config import Activation, LayerShape
from ktcy.weights.packed import PackedLayer, layer_path

SHAPES = [(3, 2, 100, 40), (1, 1, 64, 16), (2, 1, 96, 2880), (5, 5, 1, 1), (4, 2, 129, 17)]
BUILT = [name for name in kernels.VARIANTS if not kernels.missing(name)]
GPT_OSS = Activation(alpha=1.702, limit=7.0, offset=1.0)


def int8():
    return kernels.default().format("int8")


def made(shape, dtype=np.float32, seed=0):
    r = np.random.default_rng(seed)
    e, h, i = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
    values = [r.standard_normal(s, np.float32) for s in ((e, i, h), (e, i, h), (e, h, i))]
    return [(0.02 * v).astype(dtype) for v in values]


def made_biases(shape, seed=1):
    r = np.random.default_rng(seed)
    sizes = shape.moe_intermediate_size, shape.moe_intermediate_size, shape.hidden_size
    return [r.standard_normal((shape.num_experts, n), np.float32) for n in sizes]


def reference(matrix):
    """int8-n16k4-v1 as kernels/table.h words it: lines [K/4][16][4] and 16 scales a block."""
    n, k = matrix.shape
    w = np.zeros((-(-n // 16) * 16, -(-k // 64) * 64), np.float32)
    w[:n, :k] = matrix
    absmax = np.abs(w).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), absmax, out=np.zeros_like(absmax), where=absmax >= 2.0**-118)
    q = np.rint(w * inverse).astype(np.int8)
    lines = q.reshape(len(w) // 16, 16, -1, 4).transpose(0, 2, 1, 3)
    scale = (absmax / np.float32(127)).reshape(-1, 16)
    return lines.reshape(len(lines), -1).view(np.uint8), scale.view(np.uint8)


@pytest.fixture
def saved(tmp_path):
    shape = LayerShape(3, 2, 100, 40)
    PackedLayer.pack(int8(), *made(shape), *made_biases(shape), shape=shape, activation=GPT_OSS, layer=7).save(tmp_path)
    return tmp_path


def same(a, b):
    assert list(a.tensors) == list(b.tensors)
    for name in a.tensors:
        assert a.tensors[name].tobytes() == b.tensors[name].tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sizes", SHAPES)
def test_bytes_are_those_of_the_layout(sizes, dtype):
    shape = LayerShape(*sizes)
    gate, up, down = made(shape, dtype)
    packed = PackedLayer.pack(int8(), gate, up, down, shape=shape)
    assert (packed.format, packed.layout) == ("int8", "int8-n16k4-v1")
    for e in range(shape.num_experts):
        parts = [(gate, "gate_up", np.s_[0::2]), (up, "gate_up", np.s_[1::2]), (down, "down", np.s_[:])]
        for matrix, part, blocks in parts:
            weight, scale = reference(matrix[e].astype(np.float32))
            np.testing.assert_array_equal(packed.tensors[f"{part}.weight"][e, blocks], weight)
            np.testing.assert_array_equal(packed.tensors[f"{part}.scale"][e, blocks], scale)


@pytest.mark.parametrize("variant", BUILT)
def test_every_variant_packs_the_same_bytes(variant):
    shape = LayerShape(2, 1, 100, 40)
    weights = made(shape)
    fmt = kernels.load(variant).format("int8")
    same(PackedLayer.pack(fmt, *weights, shape=shape), PackedLayer.pack(int8(), *weights, shape=shape))


@pytest.mark.parametrize("threads", [2, 7])
def test_threads_do_not_matter(threads):
    shape = LayerShape(5, 1, 100, 40)
    args = [*made(shape), *made_biases(shape)]
    same(
        PackedLayer.pack(int8(), *args, shape=shape, threads=threads),
        PackedLayer.pack(int8(), *args, shape=shape, threads=1),
    )


def test_biases_are_padded_with_zeros():
    shape = LayerShape(3, 1, 20, 40)
    gate, up, down = made_biases(shape)
    packed = PackedLayer.pack(int8(), *made(shape), gate, up, down, shape=shape)
    assert packed.gate_up_bias.shape == (3, 6, 16) and packed.down_bias.shape == (3, 2, 16)
    np.testing.assert_array_equal(packed.gate_up_bias[:, 0::2].reshape(3, -1), np.pad(gate, ((0, 0), (0, 8))))
    np.testing.assert_array_equal(packed.gate_up_bias[:, 1::2].reshape(3, -1), np.pad(up, ((0, 0), (0, 8))))
    np.testing.assert_array_equal(packed.down_bias.reshape(3, -1), np.pad(down, ((0, 0), (0, 12))))


@pytest.mark.parametrize("transposed", [False, True])
def test_views_of_one_fused_tensor_are_packed_in_place(transposed):
    """C15: gate and up are views of [E, 2I, H] (or of its transpose); nothing is copied, not even one expert."""
    shape = LayerShape(8, 1, 512, 256)
    gate, up, down = made(shape)
    fused = np.concatenate([gate, up], axis=1)
    if transposed:
        fused = np.ascontiguousarray(fused.swapaxes(1, 2)).swapaxes(1, 2)
        down = np.ascontiguousarray(down.swapaxes(1, 2)).swapaxes(1, 2)
    views = fused[:, :256], fused[:, 256:], down
    tracemalloc.start()
    packed = PackedLayer.pack(int8(), *views, shape=shape)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < gate[0].nbytes
    same(packed, PackedLayer.pack(int8(), *(np.ascontiguousarray(v) for v in views), shape=shape))


def test_experts_may_come_as_a_sequence_in_any_order():
    shape = LayerShape(4, 1, 64, 32)
    order = [2, 0, 3, 1]
    stacks = made(shape)
    packed = PackedLayer.pack(int8(), *([stack[e] for e in order] for stack in stacks), shape=shape)
    same(packed, PackedLayer.pack(int8(), *(stack[order] for stack in stacks), shape=shape))


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_wrong_shape_is_named(which, axis):
    """C16: expected and found sizes, before any pointer is taken."""
    shape = LayerShape(3, 1, 64, 32)
    args = [*made(shape), *made_biases(shape)]
    expected = args[which].shape
    args[which] = np.repeat(args[which], 2, axis=axis)
    name = ["gate", "up", "down", "gate_bias", "up_bias", "down_bias"][which]
    message = re.escape(f"{name} has shape {args[which].shape}; this layer needs {expected}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        PackedLayer.pack(int8(), *args, shape=shape)


def test_wrong_shape_in_a_sequence_is_named():
    """C16"""
    shape = LayerShape(3, 1, 64, 32)
    gate, up, down = made(shape)
    with pytest.raises(ValueError, match=re.escape("up has shape (3, 31, 64); this layer needs (3, 32, 64)")):
        PackedLayer.pack(int8(), gate, [up[0], up[1, :31], up[2]], down, shape=shape)


def test_some_biases_are_missing():
    shape = LayerShape(3, 1, 64, 32)
    gate, up, _ = made_biases(shape)
    with pytest.raises(ValueError, match="down_bias is missing; give all three or none"):
        PackedLayer.pack(int8(), *made(shape), gate, up, shape=shape)


def test_wrong_dtype_is_named():
    shape = LayerShape(3, 1, 64, 32)
    gate, up, down = made(shape)
    with pytest.raises(TypeError, match="up of expert 0: dtype float64 is not supported"):
        PackedLayer.pack(int8(), gate, up.astype(np.float64), down, shape=shape)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_is_named(value):
    shape = LayerShape(3, 1, 64, 32)
    gate, up, down = made(shape)
    down[1, 33, 5] = value
    down[2, 0, 0] = value
    with pytest.raises(ValueError, match="down of expert 1: the value .* at row 33, column 5 is not finite"):
        PackedLayer.pack(int8(), gate, up, down, shape=shape, threads=3)


def test_bias_that_is_not_finite_is_named():
    shape = LayerShape(3, 1, 64, 32)
    biases = made_biases(shape)
    biases[1][2, 20] = np.nan
    with pytest.raises(ValueError, match="up of expert 2: the bias of row 20 is nan"):
        PackedLayer.pack(int8(), *made(shape), *biases, shape=shape)


@pytest.mark.parametrize("sizes", SHAPES)
def test_saved_file_is_plain_safetensors(sizes, tmp_path):
    shape = LayerShape(*sizes)
    packed = PackedLayer.pack(int8(), *made(shape), *made_biases(shape), shape=shape, activation=GPT_OSS, layer=3)
    packed.save(tmp_path / "new" / "folder")
    path = layer_path(tmp_path / "new" / "folder", 3)
    assert os.listdir(path.parent) == ["layer-00003.safetensors"]
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, packed.tensors[name])
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(packed.tensors)
        metadata = file.metadata()
    producer = metadata.pop("producer")
    assert re.fullmatch(r"ktcy \d.*", producer)
    assert metadata == {
        "ktcy": "1", "format": "int8", "layout": "int8-n16k4-v1", "layer": "3",
        "num_experts": str(sizes[0]), "num_experts_per_tok": str(sizes[1]), "hidden_size": str(sizes[2]),
        "moe_intermediate_size": str(sizes[3]), "gate": "swiglu", "alpha": "1.702", "limit": "7.0", "offset": "1.0",
    }  # fmt: skip


@pytest.mark.parametrize("biases", [False, True])
def test_data_are_aligned_and_weights_come_first(biases, tmp_path):
    shape = LayerShape(3, 1, 100, 17)
    PackedLayer.pack(int8(), *made(shape), *(made_biases(shape) if biases else ()), shape=shape).save(tmp_path)
    data = layer_path(tmp_path, 0).read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    entries = json.loads(data[8 : 8 + length])
    del entries["__metadata__"]
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    assert order == ["gate_up.weight", "down.weight", "gate_up.scale", "down.scale", "gate_up.bias", "down.bias"][
        : 6 if biases else 4
    ]
    assert all(offset % 64 == 0 for entry in entries.values() for offset in entry["data_offsets"])


def test_opened_layer_equals_the_saved_one(saved):
    opened = PackedLayer.open(saved, 7)
    shape = LayerShape(3, 2, 100, 40)
    packed = PackedLayer.pack(int8(), *made(shape), *made_biases(shape), shape=shape)
    same(opened, packed)
    assert (opened.shape, opened.activation, opened.layer) == (shape, GPT_OSS, 7)
    assert opened.path == saved / "layer-00007.safetensors" and packed.path is None
    assert opened.nbytes == packed.nbytes
    with pytest.raises(ValueError, match="read-only"):
        opened.gate_up_weight[0] = 0


def test_arrays_outlive_their_layer(saved):
    weight = PackedLayer.open(saved, 7).gate_up_weight
    expected = load_file(saved / "layer-00007.safetensors")["gate_up.weight"]
    np.testing.assert_array_equal(weight, expected)


def mapping(path):
    """The counters of a file's mappings in /proc/self/smaps, in bytes."""
    total = collections.Counter()
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags"):
        if str(path) in entry:
            total.update({name: int(kib) * 1024 for name, kib in re.findall(r"(\w+): +(\d+) kB", entry)})
    return total


@pytest.fixture
def large(tmp_path):
    shape = LayerShape(8, 2, 256, 512)
    PackedLayer.pack(int8(), *made(shape), shape=shape).save(tmp_path)
    return tmp_path


def test_mapped_pages_stay_clean_and_file_backed(large):
    """C65: reading all of a layer makes no private or dirty page, so the kernel can drop any of them."""
    packed = PackedLayer.open(large, 0)
    for tensor in packed.tensors.values():
        tensor.sum()
    counters = mapping(packed.path)
    assert counters["Rss"] >= packed.nbytes
    assert counters["Private_Dirty"] == counters["Shared_Dirty"] == counters["Anonymous"] == counters["Swap"] == 0


def test_opening_copies_no_weights(large):
    """C65: what is read is the header and the scales; the other pages are not even mapped yet."""
    packed = PackedLayer.open(large, 0)
    weights = packed.gate_up_weight.nbytes + packed.down_weight.nbytes
    ahead = 16 * 4096  # the kernel maps some pages around a fault
    assert mapping(packed.path)["Rss"] <= os.path.getsize(packed.path) - weights + 4 * ahead


def test_prefault_maps_all_pages(large):
    packed = PackedLayer.open(large, 0, prefault=True)
    assert mapping(packed.path)["Rss"] >= packed.nbytes


def test_lock_keeps_all_pages(large):
    packed = PackedLayer.open(large, 0, lock=True)
    assert mapping(packed.path)["Locked"] >= packed.nbytes
    path = packed.path
    del packed
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_lock_beyond_the_limit_says_so(large):
    """In a process without the capability to lock more than RLIMIT_MEMLOCK allows."""
    code = """
import ctypes, resource, sys
from ktcy.weights.packed import PackedLayer
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
libc = ctypes.CDLL(None)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # capget, version 3
assert libc.capget(header, data) == 0
data[0] &= ~(1 << 14)  # CAP_IPC_LOCK, effective
assert libc.capset(header, data) == 0
try:
    PackedLayer.open(sys.argv[1], 0, lock=True)
except OSError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code, str(large)], capture_output=True, text=True, check=True)
    assert "layer-00000.safetensors in memory (Cannot allocate memory)" in run.stdout
    assert "RLIMIT_MEMLOCK allows 65536 bytes: raise it (ulimit -l" in run.stdout


@pytest.mark.parametrize("sizes", SHAPES)
def test_packed_weights_read_back(sizes, tmp_path):
    """C37: within half a step of the input, and packing what was read back gives the same bytes."""
    shape = LayerShape(*sizes)
    weights = made(shape)
    packed = PackedLayer.pack(int8(), *weights, shape=shape)
    read = [packed.unpack(e) for e in range(shape.num_experts)]
    for e, matrices in enumerate(read):
        for matrix, original in zip(matrices, (stack[e] for stack in weights)):
            assert matrix.dtype == np.float32 and matrix.shape == original.shape
            step = np.abs(original).max(axis=1, keepdims=True).astype(np.float64) / 127
            # Half a step, and the roundings of scale, w * (127 / absmax) and q * scale at up to 127 steps.
            assert (np.abs(matrix.astype(np.float64) - original) <= step * (0.5 + 4 * 127 * 2.0**-24)).all()
    same(packed, PackedLayer.pack(int8(), *zip(*read), shape=shape))
    packed.save(tmp_path)
    for e, matrices in enumerate(read):
        for a, b in zip(PackedLayer.open(tmp_path, 0).unpack(e), matrices):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("expert", [-1, 3])
def test_unpack_of_an_expert_that_is_not_there(saved, expert):
    with pytest.raises(IndexError, match=f"layer 7 has experts 0 to 2, not {expert}"):
        PackedLayer.open(saved, 7).unpack(expert)


def test_mapped_layer_can_be_pickled(saved):
    """C37: as the name of its file, not as its bytes."""
    opened = PackedLayer.open(saved, 7)
    data = pickle.dumps(opened)
    assert len(data) < 1000
    same(pickle.loads(data), opened)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_layer_in_memory_says_that_it_cannot_be_pickled(copied):
    """C37"""
    shape = LayerShape(1, 1, 64, 16)
    packed = PackedLayer.pack(int8(), *made(shape), shape=shape)
    with pytest.raises(TypeError, match=r"cannot be pickled or copied; save\(folder\) it"):
        copied(packed)


def rewritten(folder, change):
    """Changes the header of layer 7, by a function of its dict."""
    path = layer_path(folder, 7)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(ktcy="2"), ["file version 2", "reads version 1", "convert the model again"]),
        (dict(ktcy=None), ["is not a layer converted by ktcy", "convert the model again"]),
        (dict(format="int5"), ["format int5", "knows int8", "convert the model again"]),
        (dict(layout="int8-n32k4-v1"), ["layout int8-n32k4-v1", "expected int8-n16k4-v1", "convert the model again"]),
        (dict(layout=None), ["layout None", "expected int8-n16k4-v1"]),
        (dict(layer="6"), ["holds layer 6, expected layer 7"]),
        (dict(num_experts="x"), ["damaged metadata"]),
        (dict(num_experts="0"), ["damaged metadata", "num_experts must be at least 1"]),
        (dict(hidden_size=None), ["damaged metadata", "hidden_size"]),
        (dict(alpha="nan"), ["damaged metadata", "alpha"]),
        (dict(gate="relu"), ["damaged metadata", "relu"]),
        (dict(hidden_size="5000"), ["tensor down.bias", "expected"]),
        (dict(num_experts="4"), ["tensor down.bias", "shape=(3,", "shape=(4,"]),
    ],
)
def test_metadata_that_do_not_fit(saved, change, words):
    """C66: the file, what was found, what was expected, what to run."""

    def apply(header):
        for key, value in change.items():
            header["__metadata__"].pop(key)
            if value is not None:
                header["__metadata__"][key] = value

    path = rewritten(saved, apply)
    with pytest.raises(ValueError) as error:
        PackedLayer.open(saved, 7)
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_file_without_metadata(saved):
    """C66: any other safetensors file under the name of a layer."""
    path = rewritten(saved, lambda header: header.pop("__metadata__"))
    with pytest.raises(ValueError, match=f"{path} is not a layer converted by ktcy"):
        PackedLayer.open(saved, 7)


def test_tensor_under_another_name(saved):
    path = rewritten(saved, lambda header: header.update(gate=header.pop("down.weight")))
    with pytest.raises(ValueError, match=f"{path}: tensor down.weight is None, expected Tensor"):
        PackedLayer.open(saved, 7)


def test_data_off_the_page(saved):
    path = layer_path(saved, 7)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 64).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 64 + data[8 + length :])
    with pytest.raises(ValueError, match=f"{path}: data start at byte {length + 72}, expected a multiple of 4096"):
        PackedLayer.open(saved, 7)


@pytest.mark.parametrize("keep", [4, 100, 4096, -64, -1])
def test_cut_file_names_file_and_bytes(saved, keep):
    """C35"""
    path = layer_path(saved, 7)
    size = path.stat().st_size
    found = keep if keep > 0 else size + keep
    os.truncate(path, found)
    with pytest.raises(ValueError) as error:
        PackedLayer.open(saved, 7)
    assert str(path) in str(error.value) and str(found) in str(error.value)
    if found >= 4096:
        assert f"asks for {size} bytes, found {found}" in str(error.value)


def test_longer_file_names_file_and_bytes(saved):
    """C35"""
    path = layer_path(saved, 7)
    size = path.stat().st_size
    os.truncate(path, size + 10)
    with pytest.raises(ValueError, match=f"{path} .*asks for {size} bytes, found {size + 10}"):
        PackedLayer.open(saved, 7)


@pytest.mark.parametrize(
    "data, what",
    [
        (b"", "empty"),
        (b"\0" * 9000, "zero bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"GGUF\3\0\0\0" + bytes(100), "GGUF"),
    ],
)
def test_something_else_in_place_of_a_layer(tmp_path, data, what):
    """C67"""
    path = layer_path(tmp_path, 7)
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        PackedLayer.open(tmp_path, 7)
    assert str(path) in str(error.value) and what in str(error.value)


@pytest.mark.parametrize(
    "files, words",
    [
        ([], ["found nothing: it is empty", "convert MODEL {folder}"]),
        (["model.gguf"], ["found GGUF files", "give one of the files", "convert FILE.gguf OUT"]),
        (["config.json", "model.safetensors"], ["found a Hugging Face checkpoint", "convert {folder} OUT"]),
        (["_layer_0"], ["found weights converted by kt-kernel", "convert MODEL OUT"]),
        (["notes.txt"], ["notes.txt", "expected a folder of weights converted by ktcy"]),
        (["layer-00003.safetensors", "layer-00005.safetensors"], ["2 converted layers from 3 to 5", "--layers 7:8"]),
    ],
)
def test_folder_of_another_kind(tmp_path, files, words):
    """C66: what it holds, what was expected, what to run."""
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError) as error:
        PackedLayer.open(tmp_path, 7)
    for word in words:
        assert word.format(folder=tmp_path) in str(error.value)


def test_folder_that_does_not_exist(tmp_path):
    """C66"""
    with pytest.raises(FileNotFoundError, match="there is no such folder; make one with: python -m ktcy convert"):
        PackedLayer.open(tmp_path / "no", 7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize(
    "name, at, where",
    [
        ("gate_up.scale", (2, 2, 3), "expert 2, gate row 19"),
        ("gate_up.scale", (0, 5, 0), "expert 0, up row 32"),
        ("down.scale", (1, 6, 3), "expert 1, down row 99"),
    ],
)
def test_stored_scale_that_cannot_be_is_named(saved, value, name, at, where):
    """C22: tensor, expert and position, when the layer is opened."""
    poke(saved, name, at, value)
    with pytest.raises(ValueError, match=f"layer-00007.safetensors: tensor {name} has {value} for {where}$"):
        PackedLayer.open(saved, 7)


@pytest.mark.parametrize("hidden", [256, 2048])
@pytest.mark.parametrize("name, at, row", [("fp8", 1, 16), ("fp8_channel", 3, 19)])
def test_stored_scale_of_codes_that_cannot_be_is_named(tmp_path, name, at, row, hidden):
    """C22: of the scales, not of what lies behind them; also where a block of 16 rows shares 16 scales (2048)."""
    up, down = ([oracle.encode(np.ones(dims, np.float32), name)] * 2 for dims in ((64, hidden), (hidden, 64)))
    layer = PackedLayer.pack(
        kernels.default().format(name), up, up, down, shape=LayerShape(2, 1, hidden, 64), layer=7
    )
    layer.save(tmp_path)
    assert (PackedLayer.open(tmp_path, 7).unpack(1)[2] == 1).all()
    layer.tensors["gate_up.scale"][1, 3].view(np.float32)[at] = np.nan
    layer.save(tmp_path)
    with pytest.raises(ValueError, match=f"tensor gate_up.scale has nan for expert 1, up row {row}$"):
        PackedLayer.open(tmp_path, 7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_stored_bias_that_is_not_finite_is_named(saved, value):
    poke(saved, "gate_up.bias", (2, 3, 1), value)
    with pytest.raises(ValueError, match=f"tensor gate_up.bias has {value} for expert 2, up row 17$"):
        PackedLayer.open(saved, 7)


def poke(folder, name, at, value):
    path = layer_path(folder, 7)
    blocks = PackedLayer.open(folder, 7).tensors[name].shape[1]
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    start += json.loads(data[8:start])[name]["data_offsets"][0]
    expert, block, n = at
    start += 4 * ((expert * blocks + block) * 16 + n)
    data[start : start + 4] = np.float32(value).tobytes()
    path.write_bytes(data)


def test_save_that_fails_leaves_the_old_file(saved, monkeypatch):
    path = layer_path(saved, 7)
    before = path.read_bytes()
    packed = PackedLayer.open(saved, 7)

    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=f"No space left on device: {path} needs {len(before)} bytes, [0-9]+ are free"):
        packed.save(saved)
    assert os.listdir(saved) == [path.name] and path.read_bytes() == before


def test_short_writes_are_continued(saved, tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    PackedLayer.open(saved, 7).save(tmp_path / "other")
    assert layer_path(tmp_path / "other", 7).read_bytes() == layer_path(saved, 7).read_bytes()

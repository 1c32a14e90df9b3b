"""Conversion: the same bytes whatever happens on the way, and errors that say what to do."""

import errno
import fcntl
import json
import logging
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ktcy
from ktcy import cli, kernels
from ktcy.config import Activation, LayerShape
from ktcy.conversion import LOCK, MANIFEST, convert, verify_folder
from ktcy.weights.packed import PackedLayer, layer_path

BUILT = [name for name in kernels.VARIANTS if not kernels.missing(name)]
SIZES = dict(num_experts=4, num_experts_per_tok=2, hidden_size=100, moe_intermediate_size=40)
SHAPE = LayerShape(**SIZES)
LAYERS = 3
NAMES = "gate_proj", "up_proj", "down_proj"


def key(layer, expert, name):
    return f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"


def weights(layers=range(LAYERS), seed=0, shape=SHAPE):
    r = np.random.default_rng(seed)
    h, i = shape.hidden_size, shape.moe_intermediate_size
    return {
        key(layer, expert, name): (0.02 * r.standard_normal(dims, np.float32)).astype(ml_dtypes.bfloat16)
        for layer in layers
        for expert in range(shape.num_experts)
        for name, dims in zip(NAMES, ((i, h), (i, h), (h, i)))
    }


def write(folder, tensors, **config):
    """A Qwen3-MoE checkpoint in one file, as Hugging Face writes it."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_hidden_layers": LAYERS, **SIZES, **config}
    config = {"decoder_sparse_step": 1, "mlp_only_layers": [], **config}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model", weights())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def expected(model, tmp_path):
    """What a conversion that nothing disturbs writes."""
    convert(model, tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != LOCK}


def finished(folder):
    """The layers that a later run would trust, each compared with its checksum."""
    if not (folder / MANIFEST).exists():
        return []
    return [int(number) for number in verify_folder(folder)["layers"]]


def run(*args):
    return cli.main(["convert", *map(str, args)])


# What comes out


def test_layers_are_the_packed_experts(model, out):
    """C32"""
    ktcy.convert(model, out)
    tensors = load_file(model / "model.safetensors")
    for layer in range(LAYERS):
        stacks = [[tensors[key(layer, e, name)] for e in range(SHAPE.num_experts)] for name in NAMES]
        packed = PackedLayer.pack(kernels.default().format("int8"), *stacks, shape=SHAPE)
        opened = PackedLayer.open(out, layer)
        assert (opened.shape, opened.activation, opened.layer) == (SHAPE, Activation(), layer)
        for name, array in packed.tensors.items():
            np.testing.assert_array_equal(opened.tensors[name], array)


def test_fused_experts_give_the_same_layers(expected, model, out, tmp_path):
    """C31 C32: per-expert and fused tensors of one model."""
    tensors, fused = load_file(model / "model.safetensors"), {}
    for layer in range(LAYERS):
        gate, up, down = (np.stack([tensors[key(layer, e, name)] for e in range(4)]) for name in NAMES)
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    convert(write(tmp_path / "fused", fused), out)
    assert all(contents(out)[name] == data for name, data in expected.items() if name != MANIFEST)


def test_biases_and_activation_are_kept(out, tmp_path):
    r = np.random.default_rng(0)
    e, h, i = 2, 32, 48
    root = "model.layers.0.mlp.experts."
    tensors = {
        root + "gate_up_proj": r.standard_normal((e, h, 2 * i), np.float32),
        root + "down_proj": r.standard_normal((e, i, h), np.float32),
        root + "gate_up_proj_bias": r.standard_normal((e, 2 * i), np.float32),
        root + "down_proj_bias": r.standard_normal((e, h), np.float32),
    }
    config = dict(num_local_experts=e, num_experts_per_tok=1, hidden_size=h, intermediate_size=i, num_hidden_layers=1)
    convert(write(tmp_path / "oss", tensors, model_type="gpt_oss", num_experts=None, **config), out, verify=True)
    opened = PackedLayer.open(out, 0)
    assert opened.activation == Activation(alpha=1.702, limit=7.0, offset=1.0)
    both = tensors[root + "gate_up_proj_bias"]
    np.testing.assert_array_equal(opened.gate_up_bias[:, 0::2].reshape(e, -1), both[:, 0::2])
    np.testing.assert_array_equal(opened.gate_up_bias[:, 1::2].reshape(e, -1), both[:, 1::2])
    np.testing.assert_array_equal(opened.down_bias.reshape(e, -1), tensors[root + "down_proj_bias"])


@pytest.mark.parametrize("variant", BUILT)
def test_bytes_depend_on_neither_variant_nor_threads(expected, model, out, variant, monkeypatch):
    monkeypatch.setattr(kernels, "default", lambda: kernels.load(variant))
    convert(model, out, threads=1 + BUILT.index(variant))
    assert contents(out) == expected


def test_manifest(model, out):
    manifest = convert(model, out)
    assert manifest == json.loads((out / MANIFEST).read_text())
    assert (manifest["ktcy"], manifest["format"]) == (1, "int8")
    assert manifest["model"] == "model" and manifest["producer"] == f"ktcy {ktcy.__version__}"
    assert list(manifest["source"]["shards"]) == ["model.safetensors"]
    for number, entry in manifest["layers"].items():
        path = layer_path(out, int(number))
        assert (entry["file"], entry["bytes"]) == (path.name, path.stat().st_size)
        assert (entry["format"], entry["layout"], entry["kind"]) == ("int8", "int8-n16k4-v1", "bf16")


@pytest.mark.parametrize("method", ["AMXINT8", "MOE_INT8", "int8"])
def test_method_names_are_one_format(expected, model, out, method):
    convert(model, out, format=method)
    assert contents(out) == expected


@pytest.mark.parametrize(
    "chosen, layers",
    [
        (None, [1, 3, 5]),
        (slice(3, 9), [3, 5]),
        (slice(None, 3), [1]),
        (slice(2, None), [3, 5]),
        ([5, 1, 5], [1, 5]),
        (iter([3]), [3]),
    ],
)
def test_layers_that_are_chosen(out, tmp_path, chosen, layers):
    """C33: layers without experts are skipped."""
    model = write(tmp_path / "model", weights((1, 3, 5)), num_hidden_layers=6, decoder_sparse_step=2)
    convert(model, out, layers=chosen)
    assert finished(out) == layers
    assert sorted(contents(out)) == [MANIFEST, *(f"layer-{n:05d}.safetensors" for n in layers)]


@pytest.mark.parametrize("chosen", [[0, 1], [17], [], slice(7, 9), slice(0, 1)])
def test_layers_without_experts_cannot_be_chosen(out, tmp_path, chosen):
    model = write(tmp_path / "model", weights((1, 3, 5)), num_hidden_layers=6, decoder_sparse_step=2)
    with pytest.raises(ValueError, match="the layers with experts are 1, 3, 5"):
        convert(model, out, layers=chosen)
    assert not out.exists()


@pytest.mark.parametrize("chosen", ["1", [1.0], [True, False, True], 1])
def test_layers_of_the_wrong_type(out, tmp_path, chosen):
    model = write(tmp_path / "model", weights((1, 3, 5)), num_hidden_layers=6, decoder_sparse_step=2)
    with pytest.raises(TypeError, match="must be an? .*integer|must be a slice or a list of integers"):
        convert(model, out, layers=chosen)
    assert not out.exists()


def test_without_a_stderr(model, out, monkeypatch):
    """A daemon has none."""
    monkeypatch.setattr("sys.stderr", None)
    convert(model, out)
    assert verify_folder(out)


# What the weights lose


def test_error_is_reported_for_each_layer(model, out):
    """C28: the relative error of a block of 16 rows of each matrix of each expert, another one in each expert."""
    manifest = convert(model, out)
    tensors = load_file(model / "model.safetensors")
    for layer in range(LAYERS):
        opened = PackedLayer.open(out, layer)
        parts = []
        for e in range(4):
            lost = total = 0
            for name, back in zip(NAMES, opened.unpack(e)):
                matrix = tensors[key(layer, e, name)].astype(np.float64)
                at = 16 * (e % -(-len(matrix) // 16))
                lost += ((back - matrix)[at : at + 16] ** 2).sum()
                total += (matrix[at : at + 16] ** 2).sum()
            parts.append((lost, total))
        each = [(lost / total) ** 0.5 for lost, total in parts]
        whole = (sum(lost for lost, _ in parts) / sum(total for _, total in parts)) ** 0.5
        error = manifest["layers"][str(layer)]["error"]
        # Stated with four digits: half a unit of the last is at most 0.5e-3 of it.
        assert abs(error["rms"] - whole) <= 0.5001e-3 * whole
        assert abs(error["worst"] - max(each)) <= 0.5001e-3 * max(each)
        assert error["expert"] == each.index(max(each))


def test_bad_layer_is_warned_of(out, tmp_path, caplog):
    """C28: a weight far above its row costs the others their digits; Gaussian layers are not complained about."""
    shape = LayerShape(4, 2, 256, 256)
    tensors = weights(shape=shape)
    for e in range(4):
        for name in NAMES:
            tensors[key(1, e, name)][:, 3] = 4 + e
    sizes = {name: getattr(shape, name) for name in SIZES}
    manifest = convert(write(tmp_path / "model", tensors, **sizes), out)
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith("layer 1: int8 changes its weights by ")
    assert manifest["layers"]["1"]["error"]["rms"] < manifest["layers"]["1"]["error"]["worst"]


def test_layer_of_zeros(out, tmp_path):
    """C23 C28: no error, and no 0 / 0."""
    tensors = {name: np.zeros_like(array) for name, array in weights().items()}
    manifest = convert(write(tmp_path / "model", tensors), out, verify=True)
    assert manifest["layers"]["0"]["error"] == {"rms": 0.0, "worst": 0.0, "expert": 0}
    assert not any(matrix.any() for matrix in PackedLayer.open(out, 0).unpack(0))


@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_error_of_weights_of_any_size(out, tmp_path, value):
    """C24 C28: the squares of such weights are no float32."""
    tensors = {n: (a.astype(np.float64) * value).astype(ml_dtypes.bfloat16) for n, a in weights().items()}
    error = convert(write(tmp_path / "model", tensors), out)["layers"]["0"]["error"]
    assert 0.002 < error["rms"] < 0.008


# Weights that cannot be converted


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_is_named(expected, out, tmp_path, value, capsys):
    """C22: file, tensor, row and column; nothing of the layer is left, the layers before are."""
    tensors = weights()
    tensors[key(1, 2, "down_proj")][77, 5] = value
    tensors[key(1, 3, "gate_proj")][0, 0] = value
    bad = write(tmp_path / "bad", tensors)
    assert run(bad, out, "--threads", 2) == 1
    message = capsys.readouterr().err
    assert re.fullmatch(
        rf"ktcy: {bad}/model.safetensors: {re.escape(key(1, 2, 'down_proj'))}: the value \S+ at row 77, column 5 "
        "is not finite\n",
        message,
    )
    assert set(contents(out)) == {MANIFEST, "layer-00000.safetensors"} and finished(out) == [0]
    assert contents(out)["layer-00000.safetensors"] == expected["layer-00000.safetensors"]


def test_cut_checkpoint_leaves_nothing(model, out, capsys):
    """C35"""
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert run(model, out) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"ktcy: {path} is cut off") and message.count("\n") == 1
    assert not out.exists()


def test_header_of_exactly_100000_bytes(expected, model, out):
    """C36"""
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((100_000).to_bytes(8, "little") + data[8 : 8 + length].ljust(100_000) + data[8 + length :])
    convert(model, out)
    assert all(contents(out)[name] == data for name, data in expected.items() if name != MANIFEST)


def test_missing_expert_leaves_nothing(out, tmp_path):
    """C31"""
    tensors = weights()
    del tensors[key(2, 3, "up_proj")]
    with pytest.raises(ValueError, match=re.escape(key(2, 3, "up_proj"))):
        convert(write(tmp_path / "model", tensors), out)
    assert not out.exists()


def test_weights_that_contradict_the_config(out, tmp_path):
    """C16"""
    with pytest.raises(ValueError, match=r"has shape \[40, 100\].*\[48, 100\]"):
        convert(write(tmp_path / "model", weights(), moe_intermediate_size=48), out)
    assert not out.exists()


# Killed, interrupted, out of room

KILLED = """
import json, os, signal, sys, warnings
from ktcy.conversion import convert

warnings.simplefilter("ignore")  # Python 3.12 warns of fork beside threads, such as those of BLAS

def counted(function, name):
    def call(*args):
        global left
        left -= 1
        if left < 0:
            if name == "pwrite":
                function(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call

model, *jobs = json.loads(sys.argv[1])
calls = ("posix_fallocate", "pwrite", "fsync", "replace")
for out, left in jobs:
    start = left
    child = os.fork()
    if child == 0:
        for name in calls:
            setattr(os, name, counted(getattr(os, name), name))
        convert(model, out, threads=2)
        print(start - left, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)
"""


def killed(model, *jobs):
    """Runs conversions that are killed in the midst of their n-th call for the disk, for (folder, n) in jobs."""
    args = json.dumps([str(model), *((str(folder), n) for folder, n in jobs)])
    return subprocess.run([sys.executable, "-c", KILLED, args], stdout=subprocess.PIPE, text=True).stdout.split()


def test_killed_at_random_points_and_resumed(expected, model, tmp_path):
    """C63: whatever SIGKILL leaves, what the manifest names is whole, and the next run gives the same bytes."""
    calls, ended = killed(model, (tmp_path / "counted", 1_000_000))
    assert ended == "ended" and contents(tmp_path / "counted") == expected

    points = sorted({int(calls) - 6, *random.Random(1).sample(range(int(calls)), 11)})
    folders = [tmp_path / f"killed-{point}" for point in points]
    assert killed(model, *zip(folders, points)) == ["killed"] * len(points)
    kept = set()
    for folder in folders:
        kept.add(len(finished(folder)))
        convert(model, folder)
        assert contents(folder) == expected
    assert kept >= {0, 2}

    killed(model, *((tmp_path / "again", point) for point in points))
    finished(tmp_path / "again")
    convert(model, tmp_path / "again")
    assert contents(tmp_path / "again") == expected


def test_finished_layers_are_kept(expected, model, out):
    convert(model, out, layers=[1])
    before = layer_path(out, 1).stat()
    convert(model, out)
    after = layer_path(out, 1).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert contents(out) == expected


def test_layer_of_wrong_size_is_made_again(expected, model, out):
    convert(model, out)
    os.truncate(layer_path(out, 1), 5000)
    convert(model, out)
    assert contents(out) == expected


def test_layer_that_the_manifest_lacks_is_made_again(expected, model, out):
    convert(model, out, layers=[0])
    layer_path(out, 1).write_bytes(b"left by a run that was killed before it wrote the manifest")
    convert(model, out)
    assert contents(out) == expected


def fails_after(function, calls, error):
    left = iter(range(calls))

    def call(*args):
        if next(left, None) is None:
            raise error
        return function(*args)

    return call


@pytest.mark.parametrize("after", [0, 8, 30, 50])
def test_interrupt_keeps_whole_layers_only(expected, model, out, after, monkeypatch, capsys):
    """Ctrl-C: no half file, the exit code of an interrupted program, and a word on how to go on."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails_after(os.pwrite, after, KeyboardInterrupt()))
        assert run(model, out, "--threads", 2) == 130
    assert capsys.readouterr().err == (
        "ktcy: interrupted; run the same command again and it goes on from the last whole layer\n"
    )
    assert not [name for name in os.listdir(out) if name.endswith(".tmp")]
    assert len(finished(out)) < LAYERS
    convert(model, out)
    assert contents(out) == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("function, after", [("posix_fallocate", 2), ("pwrite", 30), ("fsync", 4)])
def test_full_disk(expected, model, out, function, after, code, monkeypatch, capsys):
    """C63: the file, bytes needed and free; no half file; the next run goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fails_after(getattr(os, function), after, OSError(code, os.strerror(code))))
        assert run(model, out) == 1
    message = capsys.readouterr().err
    assert re.search(rf"{os.strerror(code)}: {out}/\S+ needs [0-9]+ bytes, [0-9]+ are free there", message)
    assert message.count("\n") == 1
    assert not [name for name in os.listdir(out) if name.endswith(".tmp")]
    assert len(finished(out)) < LAYERS
    convert(model, out)
    assert contents(out) == expected


def test_file_size_limit(expected, model, out, capsys):
    """The kernel refuses, not a mock: RLIMIT_FSIZE below one layer's size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        code = run(model, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and f"File too large: {layer_path(out, 0)} needs " in capsys.readouterr().err
    assert set(contents(out)) == {MANIFEST} and finished(out) == []
    convert(model, out)
    assert contents(out) == expected


def test_too_little_room_is_found_before_the_first_layer(expected, model, out, monkeypatch, capsys):
    free = len(expected["layer-00000.safetensors"]) * 3 - 1
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(free))
        assert run(model, out) == 1
    assert f"{out} needs {free + 1} bytes, {free} are free there" in capsys.readouterr().err
    assert set(contents(out)) == {MANIFEST}
    convert(model, out)
    assert contents(out) == expected


PEAK = """
import re, sys
from pathlib import Path
from ktcy.conversion import convert
convert(sys.argv[1], sys.argv[2], layers=range(int(sys.argv[3])), threads=2)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_peak_memory_is_flat_over_layers(tmp_path):
    """C63: ten layers take no more memory than two, give or take a third of one."""
    shape = LayerShape(8, 2, 1024, 256)
    one = weights([0], shape=shape)
    sizes = {name: getattr(shape, name) for name in SIZES}
    tensors = {name.replace("layers.0", f"layers.{layer}"): a for layer in range(10) for name, a in one.items()}
    model = write(tmp_path / "model", tensors, num_hidden_layers=10, **sizes)
    peaks = []
    for layers in (2, 10):
        args = [sys.executable, "-c", PEAK, str(model), str(tmp_path / f"out-{layers}"), str(layers)]
        peaks.append(1024 * int(subprocess.run(args, capture_output=True, text=True, check=True).stdout))
    layer = sum(array.nbytes for array in one.values())
    assert peaks[1] - peaks[0] < layer / 3


# Folders that are not ours to write


@pytest.mark.parametrize("changed", ["weights", "config", "names"])
def test_another_model_is_refused(model, out, tmp_path, changed):
    """C63: layers of two models never mix, be they of the same sizes and names as a fine-tuned one has."""
    convert(model, out, layers=[0])
    before = contents(out)
    other = write(tmp_path / "other", weights(seed=changed == "weights"), rms_norm_eps=1e-5 * (changed == "config"))
    same = write(tmp_path / "same", weights(), rms_norm_eps=0.0)
    if changed == "names":
        shutil.copy(model / "config.json", other)
        (other / "model.safetensors").rename(other / "model-00001-of-00001.safetensors")
    if changed == "weights":
        shutil.copy(model / "config.json", other)
        assert (other / "model.safetensors").stat().st_size == (same / "model.safetensors").stat().st_size
    with pytest.raises(ValueError, match=f"{out} was made from another model .*: .* there and .* here"):
        convert(other, out)
    assert contents(out) == before


def test_moved_model_goes_on(expected, model, out, tmp_path):
    convert(model, out, layers=[0])
    convert(model.rename(tmp_path / "elsewhere"), out)
    assert contents(out) == expected


def test_other_options_are_refused(model, out):
    convert(model, out, layers=[0])
    with pytest.raises(ValueError, match="format is int8 there and bf16 here. Convert into another folder"):
        convert(model, out, format="bf16")


def test_layers_of_another_layout_are_made_again(expected, model, out):
    convert(model, out)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["layers"]["1"]["layout"] = "int8-n32k4-v1"
    (out / MANIFEST).write_text(json.dumps(manifest))
    layer_path(out, 1).write_bytes(bytes(manifest["layers"]["1"]["bytes"]))
    convert(model, out)
    assert contents(out) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ktcy": 1}', '{"ktcy": 1, "layers": {"a": {}}}'])
@pytest.mark.parametrize("call", [convert, lambda model, out: verify_folder(out)])
def test_damaged_manifest(model, out, text, call):
    convert(model, out, layers=[0])
    (out / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=f"{out / MANIFEST} is damaged"):
        call(model, out)


def test_manifest_of_another_version(model, out):
    convert(model, out, layers=[0])
    (out / MANIFEST).write_text('{"ktcy": 2}')
    with pytest.raises(ValueError, match=f"{out / MANIFEST} has version 2; ktcy .* reads version 1"):
        convert(model, out)


def test_two_conversions_into_one_folder(model, out):
    out.mkdir()
    with open(out / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=f"another conversion is writing to {out}"):
            convert(model, out)
    convert(model, out)
    assert finished(out) == [0, 1, 2]


def test_file_system_without_locks(expected, model, out, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", fails_after(None, 0, OSError(errno.ENOLCK, "No locks available")))
    convert(model, out)
    assert contents(out) == expected and "No locks available" in caplog.text


def test_folder_that_holds_something_else(model, tmp_path):
    """C66: a checkpoint is never written into, and gets no litter."""
    before = contents(model)
    with pytest.raises(ValueError, match=f"{model} is not empty, it holds a Hugging Face checkpoint; give a new"):
        convert(model, model)
    assert contents(model) == before and not (model / LOCK).exists()


def test_stale_temporary_files_are_removed(expected, model, out):
    out.mkdir()
    for name in ("layer-00001.safetensors.4711.tmp", "ktcy.json.4711.tmp", LOCK):
        (out / name).touch()
    convert(model, out)
    assert contents(out) == expected


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_that_cannot_be(model, out, threads):
    with pytest.raises(ValueError, match="threads must be from 1 to 4096"):
        convert(model, out, threads=threads)
    assert not out.exists()


def test_unknown_format_lists_the_known(model, out):
    with pytest.raises(ValueError, match="unknown method 'int3'; the methods are AMXINT8, MOE_INT8, int8"):
        convert(model, out, format="int3")


# Verification


def test_verify_finds_every_damaged_layer(expected, model, out):
    convert(model, out, verify=True)
    with open(layer_path(out, 0), "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    layer_path(out, 2).unlink()
    with pytest.raises(ValueError) as error:
        convert(model, out, layers=[0, 1], verify=True)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(f"2 of 3 layers in {out} are damaged; delete their files and run the conversion again")
    assert str(layer_path(out, 0)) in rest[0] and "expected crc32-sha256:" in rest[0]
    assert "not layer 2" in rest[1]

    layer_path(out, 0).unlink()
    convert(model, out, verify=True)
    assert contents(out) == expected


@pytest.mark.parametrize("place", [9, 4000, 5000, -1])
def test_verify_finds_one_changed_bit(model, out, place):
    convert(model, out, layers=[0])
    path = layer_path(out, 0)
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"1 of 1 layers in {out} are damaged"):
        verify_folder(out)


def test_what_verify_may_not_read_is_not_damaged(model, out, monkeypatch):
    convert(model, out)

    def refuse(folder, number):
        raise PermissionError(errno.EACCES, "Permission denied", str(layer_path(folder, number)))

    monkeypatch.setattr(PackedLayer, "open", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        verify_folder(out)


def test_verify_of_a_folder_without_manifest(model):
    """C66"""
    with pytest.raises(FileNotFoundError, match=f"{model} has no ktcy.json: .*found a Hugging Face checkpoint"):
        verify_folder(model)


# The command line


def test_command_converts_resumes_and_verifies(expected, model, out, capsys):
    assert run(model, out, "--layers", "1:", "--threads", 1) == 0
    assert sorted(contents(out)) == [MANIFEST, "layer-00001.safetensors", "layer-00002.safetensors"]
    assert run(model, out, "--layers", "0", "--format", "AMXINT8", "--verify") == 0
    assert contents(out) == expected
    assert run(out, "--verify") == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert re.fullmatch(
        rf"{out}: 2 layers in int8, weights changed by at most 0\.\d\d% \(RMS\)\n"
        rf"{out}: 3 layers in int8, weights changed by at most 0\.\d\d% \(RMS\)\n"
        rf"{out}: 3 layers verified\n",
        text,
    )


def test_command_reports_a_damaged_folder(model, out, capsys):
    convert(model, out)
    os.truncate(layer_path(out, 1), 5000)
    assert run(out, "--verify") == 1
    assert "1 of 3 layers" in capsys.readouterr().err


def test_command_needs_a_folder_for_the_result(model, capsys):
    assert run(model) == 1
    assert "convert needs MODEL and OUT" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ["x", "1:x", "", "1-2"])
def test_command_refuses_layers_that_are_no_numbers(model, out, layers, capsys):
    with pytest.raises(SystemExit) as exit:
        run(model, out, "--layers", layers)
    assert exit.value.code == 2 and "argument --layers" in capsys.readouterr().err


def test_progress_bar(model, out, capsys):
    """Bytes of input, bytes/s and time left; silent unless stderr is a terminal or it is asked for."""
    convert(model, out, progress=True)
    text = capsys.readouterr().err
    total = sum(array.nbytes for array in weights().values())
    assert f"{total / 1000:.0f}k/{total / 1000:.0f}k" in text and "B/s" in text and "<" in text
    verify_folder(out)
    assert capsys.readouterr().err == ""

"""`inspect`: what weights hold, and commands that do run as printed."""

import json
import shlex

import gguf
import ml_dtypes
import numpy as np
import oracle
import pytest
from safetensors.numpy import save_file

import ktcy
from ktcy import cli, kernels
from ktcy.conversion import convert
from ktcy.inspection import NATIVE, inspect
from ktcy.weights import gguf as gguf_reader
from ktcy.weights import schemes
from ktcy.weights.packed import layer_path

E, H, I = 3, 64, 96  # noqa: E741
SIZES = dict(num_experts=E, num_experts_per_tok=2, hidden_size=H, moe_intermediate_size=I)
ACTIVATION = dict(gate="swiglu", alpha=1.0, limit=None, offset=0.0)
SHAPES = dict(gate=(I, H), up=(I, H), down=(H, I))


@pytest.fixture
def experts():
    r = np.random.default_rng(0)
    return [{part: r.standard_normal(shape).astype(np.float32) for part, shape in SHAPES.items()} for _ in range(E)]


@pytest.fixture
def checkpoint(tmp_path, experts):
    """Layers 1 and 2 of a bf16 model have experts, the same ones."""
    folder = tmp_path / "a model"
    folder.mkdir()
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight": matrix.astype(ml_dtypes.bfloat16)
        for layer in (1, 2)
        for e, expert in enumerate(experts)
        for part, matrix in expert.items()
    }
    save_file(tensors, folder / "model.safetensors")
    settings = dict(model_type="qwen3_moe", hidden_act="silu", num_hidden_layers=3, mlp_only_layers=[0], **SIZES)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_gguf(path, experts, types):
    """One layer for each type, "+" between several for gate, up and down."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    sizes = dict(block_count=len(types), expert_count=E, expert_used_count=2, embedding_length=H)
    for key, value in {**sizes, "expert_feed_forward_length": I}.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    for layer, names in enumerate(types):
        for part, name in zip(SHAPES, (names.split("+") * 3)[:3]):
            number = gguf.GGMLQuantizationType[name]
            data = gguf.quants.quantize(np.stack([expert[part] for expert in experts]), number)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def int8_error(expert):
    """Of the scheme, computed by the oracle."""
    error = total = 0.0
    for values in expert:
        error += np.square(oracle.dequantize(*oracle.quantize_rows(values)) - values.astype(np.float64)).sum()
        total += np.square(values.astype(np.float64)).sum()
    return np.sqrt(error / total)


def run(command):
    """A command of the report: of the shell, or a Python expression."""
    if not command.startswith("python -m ktcy "):
        return eval(command, {"ktcy": ktcy})
    return cli.main(shlex.split(command)[3:])


def test_checkpoint(checkpoint):
    report = inspect(checkpoint)
    runs = report.pop("runs")
    row = dict(dtype="BF16", count=E)
    assert report == {
        "path": str(checkpoint),
        "holds": "a Hugging Face checkpoint",
        "architecture": "qwen3_moe",
        **SIZES,
        "activation": ACTIVATION,
        "has_bias": False,
        "bytes": 2 * E * 3 * H * I * 2,
        "layers": {
            layer: {
                "kind": "bf16",
                "bytes": E * 3 * H * I * 2,
                "tensors": [
                    dict(name=f"model.layers.{layer}.mlp.experts.E.{part}_proj.weight", shape=list(shape), **row)
                    for part, shape in SHAPES.items()
                ],
            }
            for layer in (1, 2)
        },
    }
    (entry,) = runs
    assert (entry["kind"], entry["layers"], entry["how"], entry["method"]) == ("bf16", [1, 2], "as it is", "BF16")
    assert entry["error"] is None


def test_commands_run_as_printed(checkpoint, experts, monkeypatch, tmp_path, capsys):
    """C32 what is said to run the weights does."""
    monkeypatch.chdir(tmp_path)
    (entry,) = inspect(checkpoint)["runs"]
    (load,) = entry["commands"]
    run(load)
    (entry,) = inspect(write_gguf(tmp_path / "a model.gguf", experts, ["Q5_1", "Q5_0"]))["runs"]
    convert_it, load = entry["commands"]
    assert run(convert_it) == 0
    run(load)
    (again,) = inspect(tmp_path / "a model-int8")["runs"]
    (load,) = again["commands"]
    run(load)
    assert (again["how"], again["method"], again["layers"]) == ("as it is", "int8", [0, 1])


def test_fused_checkpoint_with_biases(tmp_path):
    import models

    _, path = models.make("gpt_oss", tmp_path, num_hidden_layers=1)
    report = inspect(path)
    assert report["has_bias"] and report["activation"] == dict(gate="swiglu", alpha=1.702, limit=7.0, offset=1.0)
    names = {tensor["name"].rsplit(".", 1)[1]: tensor["count"] for tensor in report["layers"][0]["tensors"]}
    assert names == dict(gate_up_proj=1, gate_up_proj_bias=1, down_proj=1, down_proj_bias=1)


def test_converted_folder(checkpoint, tmp_path):
    out = tmp_path / "out"
    manifest = convert(checkpoint, out)
    report = inspect(out)
    assert (report["holds"], report["architecture"], report["model"]) == ("weights converted by ktcy", None, "a model")
    assert {key: report[key] for key in SIZES} == SIZES and report["activation"] == ACTIVATION
    assert list(report["layers"]) == [1, 2]
    fmt = kernels.default().format("int8")
    rows = {t["name"]: (t["dtype"], t["shape"]) for t in report["layers"][1]["tensors"]}
    assert rows["gate_up.weight"] == ("U8", [E, 2 * I // 16, fmt.weight_bytes(H)])
    assert report["layers"][1]["bytes"] == sum(int(np.prod(shape)) for _, shape in rows.values())
    (entry,) = report["runs"]
    assert entry["error"] == max(layer["error"]["rms"] for layer in manifest["layers"].values())


def test_converted_layers_without_manifest(checkpoint, tmp_path):
    """What `KTMoEWrapper` saved."""
    out = tmp_path / "out"
    convert(checkpoint, out)
    (out / "ktcy.json").unlink()
    report = inspect(out)
    assert list(report["layers"]) == [1, 2] and report["model"] is None and report["runs"][0]["error"] is None


def test_gguf_by_conversion(experts, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", experts, ["Q5_1", "Q8_0+Q8_0+Q5_1", "Q8_0"])
    report = inspect(path)
    assert (report["holds"], report["architecture"]) == ("a GGUF file", "qwen3moe")
    assert {n: layer["kind"] for n, layer in report["layers"].items()} == {0: "repacked", 1: "repacked", 2: "q8_0"}
    assert [t["dtype"] for t in report["layers"][1]["tensors"]] == ["Q8_0", "Q8_0", "Q5_1"]
    assert report["layers"][2]["bytes"] == E * 3 * H * I // 32 * 34
    repacked, kept = report["runs"]
    assert (repacked["layers"], kept["layers"]) == ([0, 1], [2])
    assert (repacked["how"], kept["how"]) == ("by conversion", "as it is")
    assert f"convert {path} m-int8 --format int8" in repacked["commands"][0]
    with gguf_reader.Gguf(path) as reader:
        first = reader.expert(0, 0)
        want = int8_error([first.gate, first.up, first.down])
    assert repacked["error"] == pytest.approx(want, rel=1e-3)


def test_gguf_as_it_is(experts, tmp_path):
    """Each kind is run by its own method; only what no format holds is repacked."""
    types = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    path = write_gguf(tmp_path / "m.gguf", experts, [*types, "Q5_1"])
    *native, last = inspect(path)["runs"]
    assert [entry["kind"] for entry in native] == [*types.values()]
    for layer, entry in enumerate(native):
        method = NATIVE[entry["kind"]]
        assert (entry["how"], entry["method"], entry["error"]) == ("as it is", method, None)
        sizes = f"{layer}, {E}, 2, {H}, {I}, weight_path={str(path)!r}, method={method!r}"
        assert entry["commands"] == [f"ktcy.KTMoEWrapper({sizes}).load_weights()"]
        assert entry["note"] == ("rounded to bfloat16" if entry["kind"] in ("fp16", "fp32") else None)
    assert (last["kind"], last["how"]) == ("repacked", "by conversion")


def test_every_kind_has_a_method():
    ours = {vars(c)["kind"] for c in vars(schemes).values() if isinstance(c, type) and "kind" in vars(c)} - {None, ""}
    kinds = ours | {*gguf_reader.EXACT.values(), *gguf_reader.FLOATS.values()}
    assert len(ours) > 5 and kinds <= {*NATIVE}


def test_text(checkpoint, experts, tmp_path, capsys):
    assert cli.main(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    for line in (
        f"{checkpoint}: a Hugging Face checkpoint of qwen3_moe",
        "experts            3, top-2",
        "hidden size        64",
        "intermediate size  96",
        "activation         swiglu (alpha 1.0, offset 0.0)",
        "experts in all     0.21 MiB in 2 layers",
        "bf16, 0.11 MiB a layer: layers 1-2",
        "  model.layers.N.mlp.experts.E.down_proj.weight  BF16  [64, 96]  x 3",
    ):
        assert line in text.splitlines()
    assert "bf16 runs as it is: layers 1-2" in text

    path = write_gguf(tmp_path / "m.gguf", experts, ["Q8_0", "Q8_0", "Q4_0"])
    assert cli.main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert "q8_0, 0.06 MiB a layer: layers 0-1" in text
    assert "  blk.N.ffn_down_exps.weight  Q4_0  [3, 64, 96]" in text


@pytest.mark.parametrize("kind", ["checkpoint", "converted", "gguf"])
def test_json(kind, checkpoint, experts, tmp_path, capsys):
    path = checkpoint
    if kind == "converted":
        path = tmp_path / "out"
        convert(checkpoint, path)
    elif kind == "gguf":
        path = write_gguf(tmp_path / "m.gguf", experts, ["Q4_0"])
    assert cli.main(["inspect", str(path), "--json"]) == 0

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert read == json.loads(json.dumps(inspect(path)))


def test_what_is_no_weights(checkpoint, experts, tmp_path, capsys):
    """C66 what it is, what was expected, what to do."""
    write_gguf(tmp_path / "m.gguf", experts, ["Q8_0"])
    (tmp_path / "text").write_text("hello there")
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.gguf").write_text("<!doctype html>")
    for path, words in {
        tmp_path / "nowhere": ["no such file or folder"],
        tmp_path / "text": ["no GGUF file", "b'hell'"],
        tmp_path / "page.gguf": ["web page"],
        tmp_path / "empty": ["it is empty", "config.json and *.safetensors"],
        tmp_path: ["GGUF files", "give one of them: m.gguf"],
        checkpoint / "model.safetensors": ["one file of several", str(checkpoint)],
    }.items():
        assert cli.main(["inspect", str(path)]) == 1
        printed = capsys.readouterr()
        assert not printed.out and printed.err.startswith("ktcy: ") and str(path) in printed.err
        assert all(word in printed.err for word in words)


def test_damaged_weights(checkpoint, tmp_path, capsys):
    """C35"""
    out = tmp_path / "out"
    convert(checkpoint, out)
    path = layer_path(out, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["inspect", str(out)]) == 1
    assert f"{path} is cut off" in capsys.readouterr().err
    path.unlink()
    assert cli.main(["inspect", str(out)]) == 1
    assert "holds 1 converted layers from 1 to 1, but not layer 2" in capsys.readouterr().err
    (out / "ktcy.json").write_text("{")
    assert cli.main(["inspect", str(out)]) == 1
    assert "ktcy.json is damaged" in capsys.readouterr().err


def test_folder_of_a_conversion_that_wrote_no_layer(checkpoint, tmp_path):
    out = tmp_path / "out"
    convert(checkpoint, out)
    manifest = json.loads((out / "ktcy.json").read_text())
    (out / "ktcy.json").write_text(json.dumps({**manifest, "layers": {}}))
    for layer in (1, 2):
        layer_path(out, layer).unlink()
    with pytest.raises(ValueError, match="holds no layer yet"):
        inspect(out)

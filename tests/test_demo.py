"""The demo on small layers: what it writes, what it reports, and what it leaves behind."""

import functools
import json
import re

import ml_dtypes
import numpy as np
import pytest

import oracle
from ktcy import cli, demo, kernels
from ktcy.config import Activation
from ktcy.weights import Checkpoint

SMALL = dict(num_experts=6, num_experts_per_tok=2, hidden_size=136, moe_intermediate_size=80)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of one small run, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("demo")
    return list(demo.run(folder, layers=2, sizes=SMALL, batches=(1, 24), threads=2)), folder


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The command line's demo on small layers, its temporary folders under tmp_path."""
    monkeypatch.setattr(demo, "run", functools.partial(demo.run, sizes=SMALL, batches=(1, 5)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_best_variant_and_avx2_run_every_layer_and_batch(rows):
    variants = dict.fromkeys([kernels.default().name, "avx2"])
    expected = [(v, n, layer) for v in variants for n in (1, 24) for layer in (0, 1)]
    assert [(row["variant"], row["tokens"], row["layer"]) for row in rows[0]] == expected
    assert {row["threads"] for row in rows[0]} == {2}


def test_fractions_follow_from_the_limits(rows):
    weight = 3 * SMALL["hidden_size"] * SMALL["moe_intermediate_size"]
    for row in rows[0]:
        operations = 2 * weight * 2 * row["tokens"]
        touched = row["bandwidth"] * row["seconds"] / weight
        assert touched == pytest.approx(2 if row["tokens"] == 1 else 6, rel=1e-12)
        assert row["rate"] * row["seconds"] == pytest.approx(operations, rel=1e-12)
        least = {"read": touched * weight / row["read_bandwidth"], "int8": operations / row["peak_int8"]}
        assert row["bound"] == max(least, key=least.get)
        assert row["fraction"] * row["seconds"] == pytest.approx(max(least.values()), rel=1e-12)


def test_errors_are_those_of_the_scheme(rows):
    """Against the oracle of the original weights: the demo's float64 is right, its error within the derived bound."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((24, SMALL["hidden_size"]), np.float32).astype(ml_dtypes.bfloat16)
    ids, weights = (a[:2] for a in demo.routing(rng, 24, 6, 2))
    with Checkpoint(rows[1] / "model") as checkpoint:
        for layer in (0, 1):
            experts = {}
            for e in np.unique(ids):
                expert = checkpoint.expert(layer, e)
                experts[e] = oracle.Expert(*(np.array(w) for w in (expert.gate, expert.up, expert.down)))
            out, bound = oracle.moe_layer(x[:2], ids, weights, experts, Activation(), "exact")
            mine = demo.reference(checkpoint, layer, x[:2], ids, weights)
            assert (np.abs(mine - out) <= 2.0**-40 * bound).all()
            bound = oracle.stored(out, bound, ml_dtypes.bfloat16)
            for row in rows[0]:
                if row["layer"] == layer:
                    n = min(row["tokens"], 2)
                    assert 0 < row["error"] <= np.linalg.norm(bound[:n]) / np.linalg.norm(out[:n])


def test_the_checkpoint_is_what_hugging_face_writes(tmp_path):
    demo.write_checkpoint(tmp_path / "a", 2, SMALL)
    demo.write_checkpoint(tmp_path / "b", 2, SMALL)
    demo.write_checkpoint(tmp_path / "c", 2, SMALL, seed=1)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == 2 * 2 * 6 * 3 * 136 * 80
    for name in shards:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()
    with Checkpoint(tmp_path / "a") as checkpoint:
        assert (checkpoint.architecture, checkpoint.layers) == ("qwen3_moe", [0, 1])
        assert [checkpoint.expert(1, 5).down.shape, checkpoint.expert(1, 5).gate.shape] == [(136, 80), (80, 136)]


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 10**9})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=rf"needs 5\.5 GB on the disk of {tmp_path}, 1\.0 GB are free.*--layers 1"):
        next(demo.run(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_aligned_and_the_folder_removed(small, tmp_path, capsys):
    assert cli.main(["demo", "--layers", "2", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if re.fullmatch(r" *\d+ +\d+ .*%", line)]
    variants = dict.fromkeys([kernels.default().name, "avx2"])
    assert len(table) == 4 * len(variants)
    heads = [line for line in lines if line == cli.HEAD]
    assert len(heads) == len(variants) and {len(line) for line in table} == {len(cli.HEAD)}
    for name in variants:
        assert any(re.match(rf"{name} \(.*\), 1 threads: read [\d.]+ GB/s, int8 \d+ GOPS", line) for line in lines)
    assert any(line.startswith("One table") for line in lines) == (len(variants) == 1)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_removed_after_a_failure(small, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise ValueError("no such luck")

    monkeypatch.setattr(demo, "convert", fail)
    assert cli.main(["demo", "--layers", "1"]) == 1
    assert capsys.readouterr().err == "ktcy: no such luck\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_user_is_kept_and_never_mixed_with_files_that_are_there(small, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    command = ["demo", "--layers", "1", "--folder", str(folder)]
    assert cli.main(command) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["int8", "model"]
    capsys.readouterr()
    assert cli.main(command) == 1
    assert capsys.readouterr().err == f"ktcy: {folder} is not empty; give a new folder\n"


@pytest.mark.parametrize("option", ["--layers", "--threads"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_sizes_that_are_none(small, option, value, capsys):
    assert cli.main(["demo", option, value]) == 1
    assert f"ktcy: {option[2:]} must be" in capsys.readouterr().err

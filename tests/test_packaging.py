"""What is handed out: source archive, wheel, metadata, README, the two commands."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest

import ktcy
from ktcy import demo
from ktcy.kernels import VARIANTS

ROOT = Path(__file__).parents[1]
REAL = [v.name for v in VARIANTS.values() if not v.emulates]
SMALL = dict(num_experts=128, num_experts_per_tok=8, hidden_size=64, moe_intermediate_size=32)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def setup(code, variants="avx2", **options):
    """Runs setup.py after a line of Python that changes the machine it sees."""
    code = f"import runpy, sys\n{code}\nsys.argv = ['setup.py', 'build']\nrunpy.run_path('setup.py', run_name='__main__')"
    environment = {**os.environ, "KTCY_VARIANTS": variants}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source archive, made from a copy of the tree."""
    tree, out = tmp_path_factory.mktemp("tree") / "ktcy", tmp_path_factory.mktemp("sdist")
    # build/cython goes along: C files that are up to date save time, and must not get into the archive.
    ignored = shutil.ignore_patterns(".*", "lib.*", "temp.*", "debug", "variants", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    run(sys.executable, "setup.py", "-q", "sdist", "-d", str(out), cwd=tree)
    [archive] = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """The wheel of the source archive with the AVX2 variant, and what its build said."""
    tree, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(source) as archive:
        archive.extractall(tree, filter="data")
    [tree] = tree.iterdir()
    # What another build of the same tree would have left there.
    stale = tree / "build" / f"lib.linux-x86_64-{sys.implementation.cache_tag}" / "ktcy" / "kernels"
    stale.mkdir(parents=True)
    (stale / f"_kernels_amx_emu{EXTENSION_SUFFIXES[0]}").touch()
    (stale / "gone.py").touch()
    environment = {**os.environ, "KTCY_VARIANTS": "avx2", "CFLAGS": ""}
    said = run(*PIP, "wheel", "-v", *OFFLINE, "-w", str(out), str(tree), env=environment)
    [wheel] = out.iterdir()
    return wheel, said


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder with the wheel's content alone, to be imported from elsewhere."""
    folder = tmp_path_factory.mktemp("installed")
    run(*PIP, "install", "-q", "--no-deps", "--no-index", "--target", str(folder), str(built[0]))
    return folder


def elsewhere(installed, tmp_path, code):
    environment = {**os.environ, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    return run(sys.executable, "-c", code, cwd=tmp_path, env=environment)


def test_the_source_archive_is_complete(source):
    """Built from as it is (the fixtures below); and no C that Cython made, for another Cython may read it later."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [p for p in (ROOT / "ktcy").rglob("*") if p.suffix in (".py", ".pyx", ".pxd", ".h")]
    wanted += (ROOT / "tests").glob("*.py")
    assert names >= {str(p.relative_to(ROOT)) for p in wanted} | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert not [name for name in names if name.endswith((".so", ".o")) or re.match(r"(build|ktcy)/.*\.c$", name)]


def test_the_build_is_silent(built):
    """No warning of gcc, none of Cython, none of its performance hints."""
    assert re.findall(r"(?m)^(?:.*\.(?:c|h|pyx|pxd):\d.*|.*performance hint.*)$", built[1]) == []


def test_the_wheel_holds_python_and_modules_only(built):
    """Neither sources nor twins, nor what an earlier build left in the tree."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    modules = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert all(name.startswith("ktcy/") and name.endswith((".py", EXTENSION_SUFFIXES[0])) for name in names)
    assert {name for name in names if name.endswith(".py")} == {
        str(p.relative_to(ROOT)) for p in (ROOT / "ktcy").rglob("*.py")
    }
    pyx = {str(p.relative_to(ROOT).with_suffix("")) for p in (ROOT / "ktcy").rglob("*.pyx")}
    assert modules == pyx - {"ktcy/kernels/_kernels"} | {"ktcy/kernels/_kernels_avx2"}


def test_a_wheel_of_all_variants_is_small(built):
    """At most 5 MB: the other variants are at most four times the size of this one together with their tables."""
    with zipfile.ZipFile(built[0]) as wheel:
        sizes = {info.filename: info.file_size for info in wheel.infolist()}
    tree = sum((ROOT / "ktcy/kernels" / f"_kernels_{v}{EXTENSION_SUFFIXES[0]}").stat().st_size for v in REAL)
    assert sum(sizes.values()) + tree <= 5e6


def test_the_installed_wheel_runs_alone(installed, tmp_path):
    """C03 C05: on AVX2, without torch, CuPy or a GPU: import, convert, load, forward, command line."""
    demo.write_checkpoint(tmp_path / "model", 1, SMALL)
    said = elsewhere(installed, tmp_path, f"""
import sys, numpy as np, ktcy
assert ktcy.__file__.startswith({str(installed)!r}) and ktcy.__cpu_variant__ == "avx2"
assert not {{"torch", "cupy", "transformers", "ml_dtypes", "tqdm"}} & set(sys.modules)
ktcy.convert("model", "int8")
moe = ktcy.KTMoEWrapper(0, 128, 8, 64, 32, weight_path="int8")
moe.load_weights()
y = moe.forward(np.ones((3, 64), np.float32), np.arange(24).reshape(3, 8), np.ones((3, 8), np.float32))
assert np.isfinite(y).all() and y.any()
assert not {{"torch", "cupy", "transformers"}} & set(sys.modules)
from ktcy.cli import main
main(["--version"])
""")
    assert said == f"ktcy {ktcy.__version__}\n"


def test_a_variant_left_out_of_the_build_is_named(installed, tmp_path):
    code = "import ktcy.kernels; print(ktcy.kernels.missing('avx512'), ktcy.kernels.missing('avx2'))"
    said = elsewhere(installed, tmp_path, code)
    assert said.endswith(" []\n") and ("not built" in said or "lacks" in said)


def test_sources_that_were_not_built_say_so(tmp_path):
    """Python started beside the sources imports them, not the ktcy that is installed."""
    shutil.copytree(ROOT / "ktcy", tmp_path / "ktcy", ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run([sys.executable, "-c", "import ktcy"], cwd=tmp_path, capture_output=True, text=True)
    assert re.search(rf"ImportError: ktcy in {tmp_path}/ktcy is not built .*pip install -e", done.stderr)


def test_other_processors_are_refused_when_building():
    """C11: one sentence that names what is supported."""
    done = setup("import platform; platform.machine = lambda: 'aarch64'", cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ktcy supports Linux on x86-64; this is linux on aarch64.\n"


@pytest.mark.parametrize("variants, chosen", [("", REAL), ("twins", list(VARIANTS)), ("avx512,avx2", ["avx512", "avx2"])])
def test_variants_to_build_do_not_depend_on_the_machine(variants, chosen):
    """C04: what is built follows from the table and KTCY_VARIANTS, whatever /proc/cpuinfo says."""
    assert built_variants(variants, "") == chosen


@pytest.mark.parametrize(
    "flags, chosen",
    [
        ("sse4_2", []),
        ("avx2 fma f16c avx512f", ["avx2"]),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", ["avx2", "avx512", "avx512_vnni"]),
        (
            "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8 "
            "amx_bf16",
            REAL,
        ),
    ],
)
def test_native_builds_what_this_machine_runs(flags, chosen):
    assert built_variants("native", flags) == chosen


def built_variants(variants, flags):
    code = f"""
import pathlib, runpy
names = runpy.run_path("setup.py")
pathlib.Path.read_text = lambda path: "flags : {flags}\\n"
print(*(v.name for v in names["chosen"](names["variant_table"]())))
"""
    return run(sys.executable, "-c", code, cwd=ROOT, env={**os.environ, "KTCY_VARIANTS": variants}).split()


def test_an_unknown_variant_is_refused_when_building():
    done = setup("", variants="avx2,axv512", cwd=ROOT)
    assert done.returncode == 1
    assert f"KTCY_VARIANTS: unknown axv512; choose from {', '.join(VARIANTS)}, twins, native." in done.stderr


def test_setup_is_short():
    assert len((ROOT / "setup.py").read_text().splitlines()) < 120


def test_the_version_stands_in_one_place(built):
    assert built[0].name.startswith(f"ktcy-{ktcy.__version__}-")
    assert (ROOT / "CHANGELOG.md").read_text().splitlines()[2].startswith(f"## {ktcy.__version__}")
    others = [*ROOT.glob("*.toml"), *ROOT.glob("*.py"), *(ROOT / "ktcy").rglob("*.py")]
    assert [p.name for p in others if f'"{ktcy.__version__}"' in p.read_text()] == ["_version.py"]


def test_requirements_and_extras(built):
    with zipfile.ZipFile(built[0]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        text = wheel.read(name).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.MULTILINE)
    assert sorted(required) == ["ml_dtypes", "numpy", "safetensors", "tqdm"]
    assert {"torch", "transformers", "cuda", "test", "bench"} <= set(re.findall(r"^Provides-Extra: (\w+)$", text, re.M))
    assert "Requires-Python: >=3.10\n" in text and "License-Expression: Apache-2.0\n" in text


def test_the_readme_runs(tmp_path, monkeypatch):
    """Its cells in order, as in a notebook; the last one on a model of the same name and smaller sizes."""
    first, second, last = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    cells = {}
    exec(first, cells)
    y = cells["y"]
    assert y.shape == (4, 64) and np.isfinite(y).all()
    exec(second, cells)
    assert (cells["y"] == y).all() and (tmp_path / "trace.json").exists()
    demo.write_checkpoint("Qwen3-30B-A3B", 1, SMALL)
    ktcy.convert("Qwen3-30B-A3B", "Qwen3-30B-A3B-int8")
    exec(last.replace("2048", "64").replace("768", "32"), cells)
    assert cells["moe"].packed.layer == 0


def test_the_example_runs(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = run(sys.executable, str(ROOT / "examples" / "quickstart.py"), cwd=tmp_path, env=environment)
    assert said.endswith("(5, 256) float32\n")


@pytest.mark.parametrize("name", ["README.md", "docs/FAQ.md"])
def test_links_lead_somewhere(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_case_has_a_test_or_a_reason():
    """Of the cases of install, CPU detection, shapes, numbers, checkpoints (1 to 38) and messages (66, 67)."""
    pages = [*(ROOT / "tests").glob("*.py"), ROOT / "docs" / "FAQ.md"]
    named = {int(n) for page in pages for n in re.findall(r"\bC(\d\d)\b", page.read_text())}
    assert {*range(1, 39), 66, 67} - named == set()


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert "\nmake test\n" in script and "set -euo pipefail" in script
    assert "make test" in (ROOT / "README.md").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("root", [True, False])
def test_make_gets_what_debian_leaves_out(root, tmp_path):
    """Python without venv and headers: root gets them from apt-get, others are told what to install."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "ktcy").mkdir()
    log, tools = tmp_path / "log", tmp_path / "bin"
    tools.mkdir()
    for name, script in {
        "python3": f'echo "python3 $1 $2" >> {log}; test "$1" != -c && exit 7; exit 1',
        "apt-get": f'echo "apt-get $@" >> {log}',
        "id": f"echo {0 if root else 1000}",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "-C", str(tmp_path), "demo"], env=environment, capture_output=True, text=True)
    calls = log.read_text().splitlines()[1:]
    installed = ["apt-get -q update", "apt-get -q -y install python3-venv python3-dev", "python3 -m venv"]
    assert calls == (installed if root else []) and done.returncode == 2
    assert ("python3 lacks venv or Python.h; on Debian: sudo apt-get install" in done.stderr) is not root


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_does_nothing_twice(target, tmp_path):
    """With everything in place, make runs the command and builds nothing; after a change it does."""
    shutil.copytree(ROOT / "ktcy", tmp_path / "ktcy", ignore=shutil.ignore_patterns("*.so"))
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    ready = tmp_path / ".venv" / target / "ready"
    ready.parent.mkdir(parents=True)
    ready.touch()
    command = ["make", "-n", "-C", str(tmp_path), target]
    assert "pip" not in run(*command)
    os.utime(tmp_path / "ktcy" / "plan.h", (ready.stat().st_mtime + 2,) * 2)
    assert "pip" in run(*command)

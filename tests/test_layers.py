"""The house rules, read from the sources: who may import whom, where intrinsics live, what never appears."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ktcy

PACKAGE = Path(__file__).parents[1] / "ktcy"
CODE = sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".pyx", ".pxd", ".pxi", ".h", ".c", ".cu"))
PYTHON = [p for p in CODE if p.suffix == ".py"]
CYTHON = [p for p in CODE if p.suffix in (".pyx", ".pxd", ".pxi")]
C = [p for p in CODE if p.suffix in (".h", ".c")]

# What a part of ktcy may import besides itself; parts that are not named stand on top and may import all.
MAY_IMPORT = {
    "_version": set(),
    "config": set(),
    "kernels": set(),
    "runtime": set(),
    "weights": {"kernels", "runtime", "config", "_version"},
    "plan": {"kernels", "runtime"},
    "moe": {"kernels", "runtime", "config", "plan", "trace"},
    "trace": set(),
    "placement": {"config"},
    "cuda": {"runtime"},
}
TOP = {"cli", "__main__", "doctor"}
INTRINSIC = re.compile(
    r"\b(_mm\d*_|_tile_|__m(128|256|512)|__tile|__builtin_ia32_(?!pause\b))|\b\w+mmintrin\.h|\bimmintrin\.h"
)
MOE_WORDS = re.compile(r"(?<![a-z])(expert|token|gate|bf16|bfloat16)s?(?![a-z])", re.IGNORECASE)


def name_of(path):
    return str(path.relative_to(PACKAGE))


def ids(paths):
    return dict(argvalues=paths, ids=[name_of(p) for p in paths])


def part(path):
    return path.relative_to(PACKAGE).parts[0].split(".")[0]


def absolute(path, dots, module):
    """The dotted name that an import statement of ``path`` means."""
    if not dots:
        return module
    package = ("ktcy",) + path.relative_to(PACKAGE).parts[:-1]
    return ".".join(package[: len(package) - dots + 1] + ((module,) if module else ()))


def python_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(path, node.level, node.module)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def cython_imports(path):
    for line in path.read_text().splitlines():
        if m := re.match(r"\s*from\s+(\.*)([\w.]*)\s+c?import\s+\(?([\w, ]+)", line):
            module = absolute(path, len(m[1]), m[2])
            yield from (f"{module}.{name.split()[0]}" for name in m[3].split(",") if name.strip())
        elif m := re.match(r"\s*c?import\s+([\w.]+)", line):
            yield m[1]


def imports(path):
    return set(python_imports(path) if path.suffix == ".py" else cython_imports(path))


def test_the_tree_was_found():
    assert {"kernels", "runtime", "weights", "config"} <= {part(p) for p in CODE}
    assert C and CYTHON and PYTHON


@pytest.mark.parametrize("path", **ids(PYTHON + CYTHON))
def test_imports_follow_the_arrows(path):
    me = part(path)
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("ktcy.")}
    allowed = MAY_IMPORT.get(me)
    if allowed is not None:
        assert ours <= allowed | {me}
    elif me not in TOP and me != "__init__":
        assert not ours & TOP


@pytest.mark.parametrize("path", **ids(C + CYTHON))
def test_includes_follow_the_arrows(path):
    """Kernel and runtime headers stand alone; only the C of the layer sees both."""
    names = re.findall(r'#\s*include\s*"([^"]+)"|cdef extern from "([^"]+)"', path.read_text())
    homes = {p.name: part(p) for p in C}
    parts = {homes.get(Path(a or b).name) for a, b in names} - {None}
    assert parts <= MAY_IMPORT.get(part(path), {"kernels", "runtime"}) | {part(path)}


@pytest.mark.parametrize("path", **ids([p for p in C + CYTHON if not p.name.startswith("isa_")]))
def test_intrinsics_live_in_isa_headers(path):
    assert not INTRINSIC.findall(path.read_text())


@pytest.mark.parametrize("path", **ids([p for p in C if p.name.startswith("fmt_")]))
def test_formats_know_no_instruction_set(path):
    text = path.read_text()
    assert not re.findall(r"\b(KT_ISA|isa_\w+|__AVX\w+|__AMX\w+)\b", text)


@pytest.mark.parametrize("path", **ids([p for p in CODE if part(p) == "kernels" and p.suffix in (".h", ".c")]))
def test_kernels_know_no_threads_and_allocate_nothing(path):
    assert not re.findall(r"\b(pthread_\w+|malloc|calloc|realloc|aligned_alloc|posix_memalign|mmap)\b", path.read_text())


@pytest.mark.parametrize("path", **ids([p for p in CODE if part(p) == "runtime"]))
def test_runtime_knows_nothing_of_experts(path):
    assert not MOE_WORDS.findall(path.read_text())


@pytest.mark.parametrize("path", **ids(CODE))
def test_ascii_and_line_length(path):
    lines = path.read_bytes().decode("ascii").splitlines()
    assert [i for i, line in enumerate(lines, 1) if len(line) > 120 or line != line.rstrip() or "\t" in line] == []


@pytest.mark.parametrize("path", **ids([p for p in CODE if p.name != "cli.py"]))
def test_the_library_never_prints(path):
    text = path.read_text()
    if path.suffix == ".py":
        calls = [n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
        assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]
        assert not re.findall(r"\bsys\.(stdout|stderr)\.write\b", text)
    else:
        assert not re.findall(r"\b(v?f?printf|puts|fputs|putchar|perror|print)\s*\(", text)


@pytest.mark.parametrize("path", **ids(CODE))
def test_no_fast_math_and_no_constructors(path):
    """C25: nothing runs at load time, and nothing relaxes floating point."""
    assert not re.findall(r"fast-math|Ofast|__attribute__\s*\(\(\s*constructor", path.read_text())


def test_import_is_light():
    """C01 C05: neither torch nor CuPy nor transformers is imported, whether installed or not."""
    code = "import sys, ktcy; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ktcy" in loaded
    assert not {"torch", "cupy", "transformers", "tqdm", "triton"} & set(loaded)


def test_every_public_name_resolves():
    assert "importlib" not in dir(ktcy)
    for name in dir(ktcy):
        getattr(ktcy, name)
    with pytest.raises(AttributeError, match="no attribute 'KTMoeWraper'"):
        ktcy.KTMoeWraper

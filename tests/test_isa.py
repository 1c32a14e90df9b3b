"""The emulated twins against the silicon, where it exists, and against AVX2 everywhere."""

import pytest
from hypothesis import given

import strategies
from conftest import NATIVE, TWINS
from ktcy import kernels as registry

every_twin = pytest.mark.parametrize("twin", [registry.VARIANTS[name] for name in TWINS], ids=TWINS)


def different(a, b, words, legal):
    """Operations that both have and that give other bytes."""
    common = {name: sizes for name, (sizes, _) in a.ops.items() if name in b.ops}
    assert len(common) > 20
    for name, sizes in common.items():
        inputs = strategies.operands(name, sizes, words, legal)
        if (a.op(name, *inputs) != b.op(name, *inputs)).any():
            yield name


@every_twin
@given(a=strategies.lanes, b=strategies.lanes, c=strategies.lanes)
def test_twin_equals_silicon(twin, a, b, c):
    """On any bytes, those that kernels never use included: the model is of the instruction.

    Each twin is held to the best of the rows up to its own that this machine has. Against a lower row, which
    has other instructions, only what both are documented for can agree.
    """
    rows = [v for v in NATIVE if set(registry.VARIANTS[v].features) <= set(registry.VARIANTS[twin.emulates].features)]
    same = rows[0] == twin.emulates
    assert list(different(registry.load(twin.name), registry.load(rows[0]), (a, b, c), legal=not same)) == []
    if same:
        assert registry.load(twin.name).ops == registry.load(rows[0]).ops


@given(a=strategies.lanes, b=strategies.lanes, c=strategies.lanes)
def test_every_variant_equals_avx2(kernels, a, b, c):
    """C26: one answer, whatever the instruction set."""
    assert list(different(kernels, registry.load("avx2"), (a, b, c), legal=True)) == []


@every_twin
def test_twin_keeps_tiles_apart_from_rows(twin):
    """The twins of rows with tiles have the tile operations, the others do not."""
    has = {name for name in registry.load(twin.name).ops if name.startswith("tile_")}
    assert bool(has) == ("amx-int8" in registry.VARIANTS[twin.emulates].features)

"""int8 weights and activations: bit for bit the scheme of table.h, on every variant (C26: so all are equal)."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import strategies
from cases import DEPTHS

F32 = np.float32
GUARD = 0xA5
every_dtype = pytest.mark.parametrize("dtype", strategies.DTYPES.values(), ids=list(strategies.DTYPES))


def pack(kernels, w):
    """Packed weight and scale blocks, written between guard bytes that must survive."""
    fmt = kernels.format("int8")
    n, k = w.shape
    outputs = []
    for width in (fmt.weight_bytes(k), fmt.scale_bytes(k)):
        outputs.append(np.full((-(-n // 16) + 2, width + 64), GUARD, np.uint8))
    weight, scale = (o[1:-1, 32:-32] for o in outputs)
    fmt.pack(w, weight, scale)
    for o, inner in zip(outputs, (weight, scale)):
        result = inner.copy()
        inner[:] = GUARD
        assert (o == GUARD).all()
        inner[:] = result
    return weight, scale


def unpacked(kernels, packed, shape):
    return kernels.format("int8").unpack(*packed, *shape)


def scales(packed, n):
    return np.ascontiguousarray(packed[1]).view(F32).ravel()[:n]


def assert_packed(kernels, w):
    got, want = pack(kernels, w), oracle.pack_int8(*oracle.quantize_rows(w))
    assert (got[0] == want[0]).all() and (got[1] == want[1]).all()
    return got


@given(w=strategies.matrices())
def test_pack_follows_the_scheme(kernels, w):
    """C23 C24 C26: layout bytes, scales and zero padding; the values within half a step; back exactly (C37)."""
    packed = assert_packed(kernels, w)
    q, scale = oracle.quantize_rows(w)
    back = unpacked(kernels, packed, w.shape)
    limit = float(np.finfo(F32).max)
    assert (back == np.clip(oracle.dequantize(q, scale), -limit, limit).astype(F32)).all()
    value, bound = oracle.weights(w, "exact")
    oracle.assert_within(back, value, bound)


@pytest.mark.parametrize("k", DEPTHS)
def test_pack_of_every_depth(kernels, k):
    """C13: K off every multiple, N off 16; what lies past K in the source is not read."""
    rng = np.random.default_rng(k)
    for n in (1, 15, 16, 17, 33):
        wide = np.full((n, k + 16), np.nan, F32)
        wide[:, :k] = rng.standard_normal((n, k))
        assert_packed(kernels, wide[:, :k])
        assert_packed(kernels, np.asfortranarray(wide)[:, :k])


@given(w=strategies.matrices())
def test_pack_does_not_depend_on_strides(kernels, w):
    """C14 C15: views of any strides give the bytes of a packed copy, and stay as they are."""
    want = pack(kernels, w)
    for name, view in strategies.views(w).items():
        before = view.copy()
        got = pack(kernels, view)
        assert (got[0] == want[0]).all() and (got[1] == want[1]).all(), name
        assert (view == before).all(), name


@given(w=strategies.matrices())
def test_pack_does_not_depend_on_dtype(kernels, w):
    """C20: a 16-bit value and the same value in float32 are one."""
    assert all((a == b).all() for a, b in zip(pack(kernels, w), pack(kernels, w.astype(F32))))


def test_gate_and_up_pack_into_alternate_blocks(kernels):
    fmt = kernels.format("int8")
    gate, up = np.random.default_rng(0).standard_normal((2, 40, 100)).astype(F32)
    weight = np.full((6, fmt.weight_bytes(100)), GUARD, np.uint8)
    scale = np.full((6, fmt.scale_bytes(100)), GUARD, np.uint8)
    fmt.pack(gate, weight[0::2], scale[0::2])
    assert (weight[1::2] == GUARD).all() and (scale[1::2] == GUARD).all()
    fmt.pack(up, weight[1::2], scale[1::2])
    for rows, part in ((gate, 0), (up, 1)):
        want = oracle.pack_int8(*oracle.quantize_rows(rows))
        assert (weight[part::2] == want[0]).all() and (scale[part::2] == want[1]).all()


@given(w=strategies.matrices())
def test_pack_is_idempotent(kernels, w):
    """C37: what was unpacked packs to the same bytes; a scale may move by its last bit, a boundary row is zero."""
    packed = pack(kernels, w)
    again = pack(kernels, unpacked(kernels, packed, w.shape))
    a, b = scales(packed, len(w)), scales(again, len(w))
    kept = b > 0
    assert (np.abs(a - b)[kept] <= np.spacing(a[kept])).all()
    assert (a[~kept] <= F32(oracle.TINY) / 127 * (1 + 2.0**-20)).all()
    q = oracle.quantize_rows(w)[0][kept]
    assert (np.rint(unpacked(kernels, again, w.shape)[kept] / b[kept, None]) == q).all()


@every_dtype
def test_zero_rows(kernels, dtype):
    """C23: exact zeros and a finite scale, whatever the sign of the zeros."""
    w = np.zeros((20, 70), dtype)
    w[3] = -w[3]
    packed = assert_packed(kernels, w)
    assert not packed[0].any() and not packed[1].any()
    assert not unpacked(kernels, packed, w.shape).any()


@pytest.mark.parametrize("value", [2.0**-149, 2.0**-130, 2.0**-126, 2.0**-120, np.nextafter(F32(2.0**-118), F32(0))])
def test_rows_below_the_smallest_scale_are_zero(kernels, value):
    """C24: subnormal and tiny rows, with no division by zero."""
    packed = assert_packed(kernels, np.full((3, 5), value, F32))
    assert not unpacked(kernels, packed, (3, 5)).any()


@pytest.mark.parametrize("value", [2.0**-118, 2.0**-100, 1e-6, 1.0, 65504.0, 2.0**120, float(np.finfo(F32).max)])
def test_constant_rows_are_exact(kernels, value):
    """C24 C26: all values at +-absmax are +-127 steps, down to the smallest scale and up to the largest float."""
    sign = np.where(np.random.default_rng(0).random((18, 77)) < 0.5, -1, 1)
    w = (sign * value).astype(F32)
    packed = assert_packed(kernels, w)
    back = unpacked(kernels, packed, w.shape)
    assert np.isfinite(back).all() and (np.abs(back / w - 1) <= 2.0**-23).all()
    assert (oracle.quantize_rows(w)[0] == 127 * sign).all()


def test_tiny_float16_rows(kernels):
    """C24: magnitudes near 1e-6 are subnormal in float16, and ordinary here."""
    w = np.random.default_rng(0).uniform(-1e-6, 1e-6, (16, 64)).astype(np.float16)
    back = unpacked(kernels, assert_packed(kernels, w), w.shape)
    most = np.abs(w.astype(np.float64)).max(axis=1, keepdims=True)
    assert (most > 0).all() and (np.abs(back - w) <= oracle.HALF * most / 127).all()


def test_float32_extremes_in_one_row(kernels):
    """The largest float beside the smallest: finite, within half a step."""
    most = np.finfo(F32).max
    w = np.array([[most, -most, 1.0, 1e-45, most / 254, -most / 3, 0.0, -0.0]], F32)
    back = unpacked(kernels, assert_packed(kernels, w), w.shape)
    assert np.isfinite(back).all()


def test_heavy_tails_and_outlier_channels(kernels):
    """C28: half a step of its own row bounds each value, so an outlier costs its row and no other."""
    rng = np.random.default_rng(0)
    w = rng.standard_t(2, (64, 512)).astype(F32)
    w[7] *= 1e4
    w[:, 100] *= 50
    back = unpacked(kernels, assert_packed(kernels, w), w.shape)
    most = np.abs(w.astype(np.float64)).max(axis=1, keepdims=True)
    assert (np.abs(back - w.astype(np.float64)) <= oracle.HALF * most / 127).all()


@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (15, 129), (16, 63), (39, 64), (31, 100)])
def test_error_names_the_first_value_that_is_not_finite(kernels, dtype, bad, at):
    """C22: row and column, in any block and behind any strides."""
    w = np.random.default_rng(0).standard_normal((40, 130)).astype(dtype)
    w[at] = bad
    w[39, 129] = np.nan
    for view in [w, *strategies.views(w).values()]:
        with pytest.raises(ValueError, match=rf"at row {at[0]}, column {at[1]} is not finite"):
            pack(kernels, view)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w=np.zeros(64, F32)), "1 dimensions"),
        (dict(w=np.zeros((2, 16, 64), F32)), "3 dimensions"),
        (dict(w=np.zeros((32, 0), F32)), "K must be from 1 to 131072, not 0"),
        (dict(w=np.zeros((33, 64), F32)), r"weight must be uint8 \[3, 1024\]"),
        (dict(w=np.zeros((32, 65), F32)), r"weight must be uint8 \[2, 2048\]"),
        (dict(weight=np.zeros((2, 1024), np.int8)), "weight must be uint8"),
        (dict(weight=np.zeros((2, 2048), np.uint8)[:, ::2]), "contiguous rows"),
        (dict(scale=np.zeros((2, 16), F32)), r"scale must be uint8 \[2, 64\]"),
    ],
)
def test_shapes_that_do_not_fit(kernels, change, message):
    arrays = dict(w=np.ones((32, 64), F32), weight=np.zeros((2, 1024), np.uint8), scale=np.zeros((2, 64), np.uint8))
    with pytest.raises(ValueError, match=message):
        kernels.format("int8").pack(*{**arrays, **change}.values())


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint16, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(kernels, dtype):
    with pytest.raises(TypeError, match="use float32, float16 or bfloat16"):
        pack(kernels, np.ones((16, 64), dtype))


@given(
    x=strategies.matrices(),
    poison=st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=3),
    seed=strategies.seeds,
)
def test_activation_rows_follow_the_scheme(kernels, x, poison, seed):
    """C23 C24: also rows with NaN or inf: scale NaN, zeros, and no other row differs."""
    rng = np.random.default_rng(seed)
    for value in poison:
        x[rng.integers(len(x)), rng.integers(x.shape[1])] = value
    wide = np.concatenate([x, x], axis=1)[:, : x.shape[1]]
    q, scale = oracle.quantize_rows(x)
    for source in (x, wide):
        rows, got, total = kernels.format("int8").quantize(source)
        assert (rows.view(np.int8)[:, : x.shape[1]] == q).all() and not rows[:, x.shape[1] :].any()
        assert (got.view(np.uint32) == scale.view(np.uint32)).all()
        assert (total == q.sum(axis=1, dtype=np.int32)).all()
    lost = ~np.isfinite(x.astype(F32)).all(axis=1)
    assert (np.isnan(got) == lost).all() and not rows[lost].any()


@pytest.mark.parametrize("k", DEPTHS)
def test_activation_rows_of_every_depth(kernels, k):
    """What lies past K is not read, and the padding is zero."""
    for dtype in strategies.DTYPES.values():
        wide = np.full((3, k + 16), np.nan, F32)
        wide[:, :k] = np.random.default_rng(k).standard_normal((3, k))
        wide = wide.astype(dtype)
        rows, scale, total = kernels.format("int8").quantize(wide[:, :k])
        q, want = oracle.quantize_rows(wide[:, :k])
        assert (rows.view(np.int8)[:, :k] == q).all() and not rows[:, k:].any()
        assert (scale == want).all() and (total == q.sum(axis=1)).all()


def test_no_rows(kernels):
    """C55: nothing in, nothing out."""
    rows, scale, total = kernels.format("int8").quantize(np.zeros((0, 70), F32))
    assert rows.shape == (0, 128) and scale.shape == total.shape == (0,)
    weight, scale = pack(kernels, np.zeros((0, 70), F32))
    assert unpacked(kernels, (weight, scale), (0, 70)).shape == (0, 70)

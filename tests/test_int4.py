"""int4 weights: every variant packs the same bytes, they mean what unpack says, and their errors are bounded."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import oracle
import strategies
from cases import DEPTHS
from ktcy import kernels as registry

F32 = np.float32
every_dtype = pytest.mark.parametrize("dtype", strategies.DTYPES.values(), ids=list(strategies.DTYPES))


def pack(kernels, w):
    """Packed weight and scale blocks of all bytes written."""
    fmt = kernels.format("int4")
    n, k = w.shape
    results = []
    for guard in (0x00, 0xFF):
        sizes = fmt.weight_bytes(k), fmt.scale_bytes(k)
        outputs = [np.full((-(-n // 16) + 2, size + 64), guard, np.uint8) for size in sizes]
        inner = [o[1:-1, 32:-32] for o in outputs]
        fmt.pack(w, *inner)
        results.append([i.copy() for i in inner])
        for o, i in zip(outputs, inner):
            i[:] = guard
            assert (o == guard).all()
    for first, second in zip(*results):
        assert (first == second).all()
    return results[0]


def groups(w):
    """Rows [N, K] as float64 [N, K / 32, 32], zeros past K."""
    padded = np.zeros((len(w), -(-w.shape[1] // 32) * 32))
    padded[:, : w.shape[1]] = w
    return padded.reshape(len(w), -1, 32)


def flushed(w):
    """float64 values of rows as kernels see them: without subnormals, and a row below TINY is zero."""
    w = w.astype(F32).astype(np.float64)
    w[np.abs(w) < oracle.FLUSH] = 0
    w[np.abs(w).max(axis=1) < oracle.TINY] = 0
    return w


def simple_error(w):
    """Squared error of each row of a quantizer without any search: steps that just clip nothing.

    The row's step is absmax / 120; a group's factor the smallest that reaches its largest value with -8.
    """
    g = groups(w)
    step = np.abs(g).max(axis=(1, 2)) / 120
    at = np.abs(g).argmax(axis=2)
    extreme = np.take_along_axis(g, at[..., None], axis=2)[..., 0]
    factor = -np.sign(extreme) * np.ceil(np.abs(extreme) / 8 / np.where(step > 0, step, 1)[:, None] * (1 - 1e-12))
    d = (step[:, None] * factor)[..., None]
    q = np.clip(np.rint(np.divide(g, d, out=np.zeros_like(g), where=d != 0)), -8, 7)
    return ((g - d * q) ** 2).sum(axis=(1, 2))


def assert_packed(kernels, w):
    """All that holds for any matrix; returns nibbles, factors, scales."""
    n, k = w.shape
    packed = pack(kernels, w)
    fmt = kernels.format("int4")
    u, factor, scale = oracle.unpack_int4(*packed, n, k)
    for mine, again in zip(packed, oracle.pack_int4(u, factor, scale)):
        assert (mine == again).all()
    assert (np.abs(factor) <= 15).all() and (factor != 0).all()
    value = oracle.dequantize(oracle.int4_steps(u, factor), scale)
    limit = float(np.finfo(F32).max)
    assert (fmt.unpack(*packed, n, k) == np.clip(value, -limit, limit).astype(F32)).all()

    w = flushed(w)
    assert ((scale == 0) == ~w.any(axis=1)).all() and np.isfinite(scale).all()
    assert (scale[scale > 0] >= oracle.FLUSH).all()
    # Each nibble is the nearest to its value; the division and its reciprocal round by at most 3 U of 8.
    step = (scale.astype(np.float64)[:, None] * factor).repeat(32, axis=1)[:, :k]
    t = np.divide(w, step, out=np.zeros_like(w), where=step != 0)
    q = u.astype(np.int64) - 8
    assert (np.abs(np.clip(t, -8, 7) - q) <= 0.5 + 8 * 3 * oracle.U).all()
    # Float32 sums of a row err by K / 32 + 32 roundings of the row's own squares.
    got, simple = ((w - value) ** 2).sum(axis=1), simple_error(w)
    assert (got <= simple + (k / 32 + 40) * 4 * oracle.U * (w**2).sum(axis=1)).all()
    return u, factor, scale


@given(w=strategies.matrices())
def test_pack_of_anything(kernels, w):
    """C23 C24 C28 C37: layout, ranges, nearest nibbles, no worse than without a search; the bytes of AVX2 (C26)."""
    assert_packed(kernels, w)
    for mine, theirs in zip(pack(kernels, w), pack(registry.load("avx2"), w)):
        assert (mine == theirs).all()


@pytest.mark.parametrize("k", DEPTHS)
def test_pack_of_every_depth(kernels, k):
    """C13: K off every multiple, N off 16; what lies past K in the source is not read."""
    rng = np.random.default_rng(k)
    for n in (1, 15, 16, 17, 33):
        wide = np.full((n, k + 16), np.nan, F32)
        wide[:, :k] = rng.standard_normal((n, k))
        assert_packed(kernels, wide[:, :k])


@given(w=strategies.matrices())
def test_pack_does_not_depend_on_strides_or_dtype(kernels, w):
    """C14 C15 C20: views of any strides, and the same values in float32, give the bytes of a packed copy."""
    want = pack(kernels, w)
    for name, view in {**strategies.views(w), "float32": w.astype(F32)}.items():
        assert all((a == b).all() for a, b in zip(pack(kernels, view), want)), name


@every_dtype
def test_zero_rows(kernels, dtype):
    """C23: exact zeros and a finite scale, whatever the sign of the zeros."""
    w = np.zeros((20, 70), dtype)
    w[3] = -w[3]
    u, _, scale = assert_packed(kernels, w)
    assert (u == 8).all() and not scale.any()


@pytest.mark.parametrize("value", [2.0**-118, 2.0**-100, 1e-6, 1.0, 65504.0, 2.0**120, float(np.finfo(F32).max)])
def test_constant_rows_are_exact(kernels, value):
    """C24: down to the smallest scale and up to the largest float."""
    w = np.full((18, 77), value, F32)
    w[1::2] *= -1
    u, factor, scale = assert_packed(kernels, w)
    back = kernels.format("int4").unpack(*pack(kernels, w), 18, 77)
    assert np.isfinite(back).all() and (np.abs(back / w - 1) <= 2.0**-22).all()


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


def test_error_of_gaussian_experts(kernels):
    """The figure of the design: at most 14.8 % of the output of a SwiGLU expert, int8 activations included."""
    rng = np.random.default_rng(0)
    shapes = ((768, 2048), (768, 2048), (2048, 768))
    gate, up, down = ((rng.standard_normal(s) / np.sqrt(s[1])).astype(ml_dtypes.bfloat16) for s in shapes)
    x = rng.standard_normal((256, 2048)).astype(F32)

    def expert(rows, matrices, rounded):
        g, u = rows @ matrices[0].T, rows @ matrices[1].T
        return rounded(g * oracle.sigmoid(g) * u) @ matrices[2].T

    exact = expert(x.astype(np.float64), [m.astype(np.float64) for m in (gate, up, down)], lambda h: h)
    decoded = []
    for m in (gate, up, down):
        u, factor, scale = oracle.unpack_int4(*pack(kernels, m), *m.shape)
        decoded.append(oracle.dequantize(oracle.int4_steps(u, factor), scale))
    got = expert(oracle.rows(x, "int4")[0], decoded, lambda h: oracle.int8_rounding(h, np.zeros(h.shape))[0])
    assert np.sqrt(((got - exact) ** 2).sum() / (exact**2).sum()) <= 0.148


@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("k", [64, 1408, 16384, 131072])
def test_sums_at_the_limits_are_exact(kernels, tiles, k):
    """C26: nibbles 0 and 15, factors +-15, activations +-127, in step and against each other."""
    fmt = kernels.format("int4")
    rng = np.random.default_rng(k)
    x = np.full((35, k), 127, F32)
    x[1] = -127
    x[2:] *= np.where(rng.random((33, k)) < 0.5, -1, 1)
    u = np.zeros((32, k), np.uint8)
    u[1] = 15
    u[2:] = np.where(rng.random((30, k)) < 0.5, 0, 15)
    u[20] = np.where(x[7] > 0, 0, 15)
    factor = np.full((32, k // 32), -15, np.int8)
    factor[16:20] = 15
    factor[24:] *= np.where(rng.random((8, k // 32)) < 0.5, -1, 1)
    weight, scale = oracle.pack_int4(u, factor, np.ones(32, F32))
    exact = x.astype(np.float64) @ oracle.int4_steps(u, factor).T.astype(np.float64)
    rows, scales, sums = fmt.quantize(x)
    assert (scales == 1).all() and (rows[:, :k].view(np.int8) == x).all()
    for count in (1, 2, 3, 4, 35):
        out = np.zeros((count, 32), F32)
        x_of = rows[:count], scales[:count], sums[:count]
        fmt.down(x_of, weight, scale, None, np.arange(count), np.ones(count), out, tiles=tiles)
        assert (out == exact[:count].astype(F32)).all()
    assert exact[0, 0] == 120 * 127 * k


@given(x=strategies.matrices())
def test_activation_rows_are_those_of_int8_and_their_offsets(kernels, x):
    """C23 C24: two int16 for each 32 values: -8 times the sums of the first and of the second two of each four."""
    n, k = x.shape
    padded = -(-k // 64) * 64
    rows, scale, total = kernels.format("int4").quantize(x)
    want = kernels.format("int8").quantize(x)
    assert (rows[:, :padded] == want[0]).all() and (scale == want[1]).all() and (total == want[2]).all()
    sums = want[0].view(np.int8).reshape(n, padded // 32, 8, 2, 2).sum(axis=(2, 4), dtype=np.int16)
    assert (np.ascontiguousarray(rows[:, padded:]).view(np.int16) == -8 * sums.reshape(n, -1)).all()

"""What is particular to the formats of float codes: every code at every scale, layouts, what packing refuses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from ktcy.weights.quantized import CODES, Quantized

F32 = np.float32
FORMATS = ("fp8", "fp8_channel", "mxfp8", "mxfp4")
# The largest e8m0 scale with which every code is finite.
LARGEST = {"mxfp8": 246, "mxfp4": 252}
both_mx = pytest.mark.parametrize("name", LARGEST)
paths = pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])


@pytest.fixture(params=FORMATS, scope="module")
def fmt(request, kernels):
    return kernels.format(request.param)


def pack(fmt, q):
    n, k = q.shape
    blocks = -(-n // 16)
    weight = np.full((blocks, fmt.weight_bytes(k)), 0xA5, np.uint8)
    scale = np.full((blocks, fmt.scale_bytes(k)), 0xA5, np.uint8)
    fmt.pack(q.codes, weight, scale, q.scale)
    return weight, scale


def quantized(fmt, codes, scale):
    """codes [N, K] with scale, a number or one for each row and group."""
    codes = np.asarray(codes, np.uint8)
    groups = -(-codes.shape[1] // fmt.group) if fmt.group else 1
    wide = np.empty((len(codes), groups), fmt.code_scale)
    wide[...] = scale
    return Quantized(fmt.codes, codes, wide, fmt.group)


def finite_codes(fmt):
    return np.flatnonzero(np.isfinite(CODES[fmt.codes])).astype(np.uint8)


def flushed(values):
    return np.where(np.abs(values) < oracle.FLUSH, F32(0), values)


def meant(q):
    """The values of table.h: subnormal scales are zero, and so are values of e8m0 scales that would be subnormal."""
    if q.scale.dtype == np.uint8:
        return flushed(q.dequantize())
    return replace(q, scale=flushed(q.scale)).dequantize()


def scales(fmt):
    """Ordinary scales and the ends of what is allowed."""
    if fmt.name in LARGEST:
        return np.arange(LARGEST[fmt.name] + 1, dtype=np.uint8)
    return np.array([0, 2.0**-149, 2.0**-127, 1e-23, 2.0**-126, 2.0**-100, 0.0123, 1, 7.7, 1e30], F32)


def test_every_code_at_every_scale_is_exact(fmt):
    """C21 C22: unpacked values are the checkpoint's."""
    codes = np.resize(finite_codes(fmt), (48, 256))
    for scale in scales(fmt):
        q = quantized(fmt, codes, scale)
        got = fmt.unpack(*pack(fmt, q), *codes.shape)
        assert np.isfinite(got).all() and (got == meant(q)).all(), scale


@paths
def test_every_code_at_every_scale_in_a_product(fmt, tiles):
    """Rows with a single one pick out the weights: decoding gives exactly what unpacking says."""
    codes = finite_codes(fmt)
    k = 256 if fmt.codes == "e4m3" else 64
    weights = np.resize(codes, (16, k))
    x = np.zeros((len(codes), k), F32)
    x[np.arange(len(codes)), np.arange(len(codes))] = 1
    for scale in scales(fmt)[:: 1 if fmt.group != 32 else 5]:
        q = quantized(fmt, weights, scale)
        out = np.zeros((len(x), 16), F32)
        fmt.down(x, *pack(fmt, q), None, np.arange(len(x)), np.ones(len(x)), out, tiles=tiles)
        assert (out == flushed(meant(q))[:, : len(x)].T).all(), scale


@st.composite
def matrices(draw):
    """Codes of any shape and strides, and the seed of their scales."""
    n, k = draw(strategies.sizes), draw(strategies.sizes)
    rng = np.random.default_rng(draw(strategies.seeds))
    return rng, rng.integers(256, size=(n, k)), draw(st.sampled_from(["as it is", "transposed", "slice", "reversed"]))


@settings(max_examples=30)
@given(case=matrices())
def test_codes_come_back_from_any_shape_and_strides(fmt, case):
    rng, codes, view = case
    codes = np.resize(finite_codes(fmt), 256)[codes]
    codes = strategies.views(codes).get(view, codes)
    groups = quantized(fmt, codes, 1).scale.shape
    if fmt.name in LARGEST:
        scale = rng.integers(20, 240, groups, np.uint8)
    else:
        scale = rng.standard_normal(groups).astype(F32) ** 2
    if fmt.name == "fp8":
        scale = scale[:: 16].repeat(16, axis=0)[: len(codes)]
    q = Quantized(fmt.codes, codes, scale, fmt.group)
    assert (fmt.unpack(*pack(fmt, q), *codes.shape) == q.dequantize()).all()


def test_layouts_are_those_of_table_h(fmt):
    """The bytes, written once more in numpy."""
    e4m3 = fmt.codes == "e4m3"
    codes = finite_codes(fmt)
    codes = codes[codes & 0x78 != 0] if e4m3 else codes[1:8]
    codes = np.random.default_rng(3).choice(codes, (20, 100))
    groups = quantized(fmt, codes, 1).scale.shape
    scale = np.arange(60, 60 + groups[0] * groups[1]).reshape(groups)
    if fmt.name == "fp8":
        scale = np.array([60, 61])[np.arange(20) // 16, None]
    weight, packed = pack(fmt, quantized(fmt, codes, scale))
    full = np.zeros((32, 128), np.uint8)
    full[:20, :100] = codes
    if e4m3:
        want = full.reshape(2, 16, 32, 4)[..., [0, 2, 1, 3]].swapaxes(1, 2)
        packed, normal = packed[:, :-4], packed[:, -4:]
        assert (normal == [[1, 1, 1, 0], [0, 0, 0, 0]]).all()  # what pads K and N is zero
    else:
        eight = full.reshape(2, 16, 16, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].swapaxes(1, 2)
        want = eight[..., ::2] | eight[..., 1::2] << 4
    assert (weight == want.reshape(2, -1)).all()
    want = np.full((32, groups[1]), 127 if fmt.group == 32 else 0, fmt.code_scale)
    want[:20] = scale
    want = want.reshape(2, 16, -1)[:, : 1 if fmt.name == "fp8" else 16]
    assert (packed == np.ascontiguousarray(want.swapaxes(1, 2)).reshape(2, -1).view(np.uint8)).all()


@paths
@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "mxfp8"])
@pytest.mark.parametrize("code", [0, 0x80, 1, 7, 0x87, 8])
def test_one_small_code_among_normal_numbers(kernels, name, tiles, code):
    """Blocks of normal numbers are decoded another way: zeros and subnormal numbers of either sign end that."""
    fmt, rng = kernels.format(name), np.random.default_rng(code)
    codes = rng.choice(finite_codes(fmt)[8:127], (32, 256)) | rng.choice([0, 0x80], (32, 256))
    codes[rng.integers(32), rng.integers(256)] = code
    q = quantized(fmt, codes, 121)
    out = np.zeros((256, 32), F32)
    fmt.down(np.eye(256, dtype=F32), *pack(fmt, q), None, np.arange(256), np.ones(256), out, tiles=tiles)
    assert (out == meant(q).T).all()


@pytest.mark.parametrize("k", [768, 1408, 2048, 2880, 7168])
def test_packed_bytes_are_the_bits_of_the_format(fmt, k):
    """At most 1.01 of them where K is that of a model; K is padded to 64, so K = 65 takes nearly twice."""
    bits = {"fp8": 8 + 32 / (16 * 128), "fp8_channel": 8 + 32 / k, "mxfp8": 8.25, "mxfp4": 4.25}[fmt.name]
    assert fmt.weight_bytes(k) + fmt.scale_bytes(k) <= 1.01 * 16 * k * bits / 8


@paths
@pytest.mark.parametrize("seed", range(3))
def test_dead_experts_give_tiny_or_zero(fmt, tiles, seed):
    """C21: scales near 1e-23, and zero ones beside ordinary ones, never NaN."""
    rng = np.random.default_rng(seed)
    k, n = 200, 40
    codes = rng.choice(finite_codes(fmt), (3, n, k))
    dead = 127 - 76 if fmt.name in LARGEST else 1e-23
    packed = [pack(fmt, quantized(fmt, c, dead)) for c in codes]
    pair = [np.stack(p, 1).reshape(6, -1) for p in zip(*packed[:2])]
    x = rng.standard_normal((37, k)).astype(F32)
    h = fmt.gate_up(x, *pair, tiles=tiles)
    y = np.zeros((37, 48), F32)
    fmt.down(x, *packed[2], None, np.arange(37), np.ones(37), y, tiles=tiles)
    largest = np.abs(CODES[fmt.codes][finite_codes(fmt)]).max() * (2.0**-76 if fmt.name in LARGEST else 1e-23)
    for out in (h, y):
        assert (np.abs(out) <= largest * np.abs(x).sum(axis=1, keepdims=True)).all()
    assert y[:, :n].any()


@both_mx
@pytest.mark.parametrize("k", [40, 96, 330])
@pytest.mark.parametrize(
    "most, one", [(127, 127), (64, 191), (191, 64), (127, 63), (127, 192), (63, 63), (20, 240), (192, 1)]
)
def test_few_rows_round_as_many_where_scales_come_after_the_sums(kernels, name, k, most, one):
    """Few rows of moderate values and scales are scaled a group at a time, many rows a weight at a time; one scale or
    value beyond that and sums would overflow, or lose what is subnormal, in one of the two only."""
    fmt, n, rng = kernels.format(name), 40, np.random.default_rng(k)
    q = quantized(fmt, rng.choice(finite_codes(fmt), (n, k)), most)
    q.scale[rng.integers(n), -1] = one
    packed = pack(fmt, q)
    exponents = np.repeat([-125, -100, -64, -48, -47, 0, 46, 47, 60, 100], 2)
    x = np.ldexp(1 + rng.random((len(exponents), k)), exponents[:, None]) * rng.choice([-1, 1], (len(exponents), k))
    x[1::2] = np.where(rng.random((len(x) // 2, k)) < 0.1, x[1::2], rng.choice([0, 1, -1], (len(x) // 2, k)))
    x = x.astype(F32)
    many = np.zeros((len(x), n + 8), F32)
    fmt.down(x, *packed, None, np.arange(len(x)), np.ones(len(x)), many)
    for i in range(len(x)):
        few = np.zeros((1, n + 8), F32)
        fmt.down(x[i : i + 1], *packed, None, np.zeros(1, np.int32), np.ones(1), few)
        assert (few.view(np.uint32) == many[i : i + 1].view(np.uint32)).all(), exponents[i]


@paths
def test_zero_scales_give_zero_and_the_bias(kernels, tiles):
    """C22 C23: no reciprocal of a scale is ever taken."""
    for name in ("fp8", "fp8_channel"):
        fmt = kernels.format(name)
        codes = np.resize(finite_codes(fmt), (32, 130))
        scale = np.zeros((32, 2 if name == "fp8" else 1), F32)
        scale[16:, 0] = 1
        x, bias, out = np.ones((20, 130), F32), np.full((2, 16), 0.25, F32), np.zeros((20, 32), F32)
        q = quantized(fmt, codes, scale)
        fmt.down(x, *pack(fmt, q), bias, np.arange(20), np.ones(20), out, tiles=tiles)
        assert (out[:, :16] == 0.25).all() and np.isfinite(out).all() and (out[:, 16:] != 0.25).all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("row, column", [(0, 0), (20, 77), (32, 129)])
def test_nan_codes_are_refused_where_they_are(kernels, code, row, column):
    """C22"""
    for name in ("fp8", "fp8_channel", "mxfp8"):
        fmt = kernels.format(name)
        codes = np.full((33, 130), 0x38)
        codes[row, column] = code
        with pytest.raises(ValueError, match=f"e4m3 code {code} at row {row}, column {column} is NaN"):
            pack(fmt, quantized(fmt, codes, 1))


@both_mx
def test_scales_past_float32_are_refused_unless_all_is_zero(kernels, name):
    """C22: also e8m0's NaN, 0xFF, which readers refuse by name."""
    fmt = kernels.format(name)
    for scale in range(LARGEST[name] + 1, 256):
        codes = np.zeros((20, 96))
        codes[17] = 0x80 if name == "mxfp8" else 8
        q = quantized(fmt, codes, scale)
        weight = pack(fmt, q)
        assert (fmt.unpack(*weight, 20, 96) == 0).all()
        out = np.zeros((1, 32), F32)
        fmt.down(np.ones((1, 96), F32), *weight, None, [0], [1.0], out)
        assert (out == 0).all()
        codes[18, 65] = 1
        with pytest.raises(ValueError, match="code 1 at row 18, column 65 is NaN or has too large a scale"):
            pack(fmt, quantized(fmt, codes, scale))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**120])
@pytest.mark.parametrize("name", ["fp8", "fp8_channel"])
def test_scales_that_values_cannot_take_are_refused(kernels, name, bad):
    """C22: NaN, inf, and what codes times 256 would take past float32; the largest below is exact."""
    fmt = kernels.format(name)
    scale = np.full((32, 1), 2.0**119, F32)
    codes = np.full((32, 64), 0x38)
    weight = pack(fmt, quantized(fmt, codes, scale))
    assert (fmt.unpack(*weight, 32, 64) == 2.0**119).all()
    out = np.zeros((1, 32), F32)
    fmt.down(np.full((1, 64), 2.0**-110, F32), *weight, None, [0], [1.0], out)
    assert (out == 64 * 2.0**9).all()
    scale[16:] = bad
    with pytest.raises(ValueError, match="at row 16, column 0 is NaN or has too large a scale"):
        pack(fmt, quantized(fmt, codes, scale))


def test_scales_that_part_a_block_of_rows_are_refused(kernels):
    """Blocks of 128 rows that start at row 8 of what is packed."""
    fmt = kernels.format("fp8")
    scale = np.ones((50, 2), F32)
    scale[40:] = 2
    with pytest.raises(ValueError, match="rows 32 to 47 have different scales, and fp8 keeps one for each 16 rows"):
        pack(fmt, quantized(fmt, np.zeros((50, 200)), scale))
    scale[32:] = 2
    assert (fmt.unpack(*pack(fmt, quantized(fmt, np.full((50, 200), 0x38), scale)), 50, 200)[32:] == 2).all()

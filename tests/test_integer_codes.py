"""Formats of integer codes: every code, zero point and kind of scale means exactly what the checkpoint's means."""

import ml_dtypes
import numpy as np
import oracle
import pytest

from ktcy.weights.quantized import Quantized

BF16 = ml_dtypes.bfloat16
F32 = np.float32
NAMES = ["rawint4", "q4_0", "q8_0", "gptq32", "gptq64", "gptq128"]
# Normal of both signs, the smallest normal, subnormal, both zeros, the largest. A code of rawint4 reaches -8 times it.
SCALES = {
    "float16": np.array([1, -0.37, 2.0**-14, 2.0**-24, -1023 * 2.0**-24, 0, -0.0, 65504, -65504], np.float16),
    "bfloat16": np.array([1, -0.37, 2.0**-126, 2.0**-133, -127 * 2.0**-133, 0, -0.0, 255 * 2.0**116], BF16),
}


@pytest.fixture(params=NAMES, scope="module")
def fmt(request, kernels):
    return kernels.format(request.param)


def random_codes(fmt, n, k, seed=0):
    rng = np.random.default_rng(seed)
    dims = n, -(-k // fmt.group)
    return Quantized(
        fmt.codes,
        rng.integers(0, 256 if fmt.codes == "int8" else 16, (n, k), np.uint8),
        rng.choice(SCALES[fmt.code_scale], dims),
        fmt.group,
        rng.integers(0, 16, dims, np.uint8) if fmt.zero else None,
    )


def packed(fmt, q):
    (n, k), blocks = q.shape, -(-len(q.codes) // 16)
    weight = np.empty((blocks, fmt.weight_bytes(k)), np.uint8)
    scale = np.empty((blocks, fmt.scale_bytes(k)), np.uint8)
    fmt.pack(q.codes, weight, scale, q.scale, q.zero)
    return weight, scale


def every_code(fmt):
    """All codes along K for all zero points, a row for each scale."""
    scales = SCALES[fmt.code_scale]
    count = 256 if fmt.codes == "int8" else 16
    zeros = np.arange(16 if fmt.zero else 1, dtype=np.uint8)
    each = np.resize(np.arange(count, dtype=np.uint8), (len(zeros), -(-count // fmt.group) * fmt.group))
    groups = each.size // fmt.group
    zero = np.tile(zeros.repeat(groups // len(zeros)), (len(scales), 1)) if fmt.zero else None
    codes = np.tile(each.ravel(), (len(scales), 1))
    return Quantized(fmt.codes, codes, scales[:, None].repeat(groups, 1), fmt.group, zero)


def bits(a):
    return np.ascontiguousarray(a, F32).view(np.uint32)


def test_unpacked_values_are_the_checkpoints_own(fmt):
    """Each code with each zero point and scale, bit for bit."""
    q = every_code(fmt)
    assert (bits(fmt.unpack(*packed(fmt, q), *q.shape)) == bits(q.dequantize())).all()


@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
def test_products_with_unit_vectors_are_the_values(fmt, tiles):
    """What kernels decode, by either path: exact, but that a subnormal scale or product is zero inside kernels."""
    q = every_code(fmt)
    (n, k), want = q.shape, q.dequantize()
    lost = np.abs(q.scale.astype(F32)) < oracle.FLUSH
    want[(np.abs(want) < oracle.FLUSH) | lost.repeat(fmt.group, axis=1)] = 0
    weight, scale = packed(fmt, q)
    count = 32 if tiles else 4
    for at in range(0, k, count):
        x = np.eye(count, k, at, F32)
        got = np.zeros((count, 16 * len(weight)), F32)
        fmt.down(x, weight, scale, None, np.arange(count), np.ones(count), got, tiles=tiles)
        assert (got[:, :n] == want[:, at : at + count].T).all() and not got[:, n:].any()


@pytest.mark.parametrize("k", [1, 31, 33, 65, 96, 704, 768, 1408, 2880])
def test_sizes_off_every_multiple(fmt, k):
    """C13: 23 rows, K cut within words, groups and padding."""
    q = random_codes(fmt, 23, k, k)
    weight, scale = packed(fmt, q)
    assert (bits(fmt.unpack(weight, scale, *q.shape)) == bits(q.dequantize())).all()
    padded = -(-k // 64) * 64
    whole = fmt.unpack(weight, scale, 32, padded)
    assert not whole[23:].any() and not whole[:, k:].any()


def test_codes_of_any_strides(fmt):
    """C15: views of one fused tensor, transposed and reversed ones, are packed where they lie."""
    n, k = 20, 100
    q = random_codes(fmt, n, k)
    want = packed(fmt, q)
    fused = np.zeros((n, 2, k + 3), np.uint8)
    fused[:, 1, :k] = q.codes
    for codes in (fused[:, 1, :k], np.asfortranarray(q.codes), q.codes[:, ::-1].copy()[:, ::-1]):
        view = Quantized(q.kind, codes, np.asfortranarray(q.scale), q.group, q.zero)
        assert all((got == w).all() for got, w in zip(packed(fmt, view), want))


def by_the_book(fmt, q):
    """The layout of table.h, written a second time: integers per row and eight (four) values."""
    (n, k), group = q.shape, q.group
    blocks, padded = -(-n // 16), -(-k // 64) * 64
    groups = -(-padded // group)
    scale = np.zeros((16 * blocks, groups), np.uint16)
    scale[:n, : q.scale.shape[1]] = q.scale.view(np.uint16)
    zero = np.full((16 * blocks, groups), 0 if fmt.zero else 8, np.int64)
    if fmt.zero:
        zero[:n, : q.zero.shape[1]] = q.zero
    if fmt.codes == "int8":
        full = np.zeros((16 * blocks, padded), np.int64)
        full[:n, :k] = q.codes.view(np.int8)
        full, order, width = full + 128, (0, 2, 1, 3), 8
    else:
        full = zero.repeat(group, axis=1)[:, :padded].copy()
        full[:n, :k] = q.codes
        order, width = (0, 2, 4, 6, 1, 3, 5, 7), 4
    words = full.reshape(blocks, 16, -1, len(order))[..., order] << width * np.arange(len(order))
    weight = words.sum(axis=-1).swapaxes(1, 2).astype("<u4")
    tail = scale.reshape(blocks, 16, groups).swapaxes(1, 2).astype("<u2").reshape(blocks, -1).view(np.uint8)
    if fmt.zero:
        halves = zero.reshape(blocks, 2, 8, groups)
        nibbles = (halves[:, 0] | halves[:, 1] << 4).swapaxes(1, 2).astype(np.uint8)
        tail = np.concatenate([tail, nibbles.reshape(blocks, -1)], axis=1)
    return weight.reshape(blocks, -1).view(np.uint8), np.pad(tail, ((0, 0), (0, -tail.shape[1] % 64)))


@pytest.mark.parametrize("k", [70, 192, 320])
def test_bytes_are_those_of_the_layout(fmt, k):
    """C30: the order of codes in a word is fixed by table.h, not by whoever packs."""
    q = random_codes(fmt, 37, k, k)
    assert all((got == want).all() for got, want in zip(packed(fmt, q), by_the_book(fmt, q)))


@pytest.mark.parametrize("k", [704, 768, 1408, 2048, 2880, 7168])
def test_packed_bytes_are_those_of_the_format(fmt, k):
    """At most 1.01 of what codes, scales and zero points take by themselves."""
    width = 8 if fmt.codes == "int8" else 4
    own = 2 * width * k + -(-k // fmt.group) * (16 * 2 + (8 if fmt.zero else 0))
    assert own <= fmt.weight_bytes(k) + fmt.scale_bytes(k) <= 1.01 * own


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(fmt, bad):
    """C22: with the place of the first value that it spoils."""
    q = random_codes(fmt, 18, 160)
    q.scale[17, 1] = bad
    with pytest.raises(ValueError, match=f"row 17, column {fmt.group} is NaN or has too large a scale"):
        packed(fmt, q)


def test_a_product_past_float32_is_refused(kernels):
    """bfloat16 scales reach 2^128: finite, but not times a code."""
    fmt = kernels.format("rawint4")
    q = random_codes(fmt, 3, 64)
    q.scale[:] = 1
    q.scale[2, 1] = 2.0**126
    q.codes[2, 32:] = 8
    packed(fmt, q)
    q.codes[2, 40] = 0
    with pytest.raises(ValueError, match="row 2, column 40 is NaN or has too large a scale"):
        packed(fmt, q)


@pytest.fixture(params=oracle.GRIDS, scope="module")
def grid(request, kernels):
    return kernels.format(request.param)


def extreme_rows(k, seed=0):
    """Rows of one magnitude each from the subnormal to the largest, and rows of all magnitudes at once."""
    rng = np.random.default_rng(seed)
    exponents = np.array([-140, -126, -113, -101, -100, -99, -80, -48, -47, -1, 0, 46, 47, 80, 110, 111, 112, 127])
    x = np.ldexp(1 + rng.random((len(exponents), k)), exponents[:, None])
    wild = np.ldexp(1 + rng.random((8, k)), rng.integers(-30, 30, (8, k)))
    x = np.concatenate([x, wild, np.where(rng.random((8, k)) < 0.9, 0, wild), np.zeros((1, k))])
    x = (x * rng.choice([-1, 1], x.shape)).clip(-3.4e38, 3.4e38).astype(F32)
    x[-2, k // 2] = 2 - 2.0**-10  # rounds to 2 in bfloat16, and its group's unit with it
    return np.concatenate([x, np.where(np.arange(k) == k // 2, [[np.nan], [np.inf]], 1).astype(F32)])


@pytest.mark.parametrize("k", [1, 33, 100, 200, 330])
def test_rows_are_integers_in_units_of_their_group(kernels, grid, k):
    """table.h, written once more: bfloat16, then multiples of 2^(e + 1 - bits), and their sums."""
    group, bits = oracle.GRIDS[grid.name]
    x, padded = extreme_rows(k, k), -(-k // 64) * 64
    wide = np.zeros((len(x), -(-padded // group) * group), F32)
    wide[:, :k] = x.astype(BF16).astype(F32)
    parts = wide.reshape(len(x), -1, group).astype(np.float64)
    most = np.abs(parts).max(axis=2)
    lost = ~(most < 2.0**112).all(axis=1)
    used = (most >= 2.0**-100) & ~lost[:, None]
    unit = np.where(used, np.ldexp(1.0, np.frexp(np.where(used, most, 1))[1] - bits), 0)
    q = np.rint(np.divide(parts, unit[..., None], out=np.zeros_like(parts), where=used[..., None])).astype(np.int64)
    assert np.abs(q).max() < 2**bits
    rows, scale, moderate = grid.quantize(x)
    got = rows[:, : 2 * padded].copy().view(np.int16)
    assert (got == q.reshape(len(x), -1)[:, :padded]).all()
    of = rows[:, 2 * padded : 2 * padded + 8 * unit.shape[1]].copy().view([("unit", F32), ("sum", np.int32)])
    assert (of["sum"] == q.sum(axis=2)).all() and (scale == 1).all()
    assert np.isnan(of["unit"][lost]).all() and (of["unit"][~lost] == unit[~lost]).all()
    split = rows[:, -(-(2 * padded + 8 * unit.shape[1]) // 64) * 64 :].copy().view(np.int8)
    assert bool(split.size) == ("vi16_split_0" in kernels.ops)
    if split.size:
        a, b = np.moveaxis(split.reshape(len(x), -1, 2, 2, 4).astype(np.int64), 3, 0)
        order = [0, 4, 1, 5, 2, 6, 3, 7] if grid.codes != "int8" else [0, 2, 1, 3, 4, 6, 5, 7]
        assert ((256 * a - b).reshape(len(x), -1, 8) == got.reshape(len(x), -1, 8)[..., order]).all()
    far = used & ((most < 2.0**-47) | (most >= 2.0**47))
    assert (moderate == ~(lost | far.any(axis=1))).all()


@pytest.mark.parametrize("k", [40, 330])
def test_few_rows_give_the_bits_of_many(grid, k):
    """Sums of integers and of float32 tiles are the same, from the smallest values to the largest, NaN included."""
    n, rng, x = 40, np.random.default_rng(k), extreme_rows(k)
    if grid.codes == "e2m1":
        scale = rng.choice(np.array([1, 60, 100, 127, 140, 191, 230], np.uint8), (n, -(-k // 32)))
        q = Quantized("e2m1", rng.integers(0, 16, (n, k), np.uint8), scale, 32)
    else:
        q = random_codes(grid, n, k)
    weight = packed(grid, q)
    many = np.zeros((len(x), 48), F32)
    grid.down(x, *weight, None, np.arange(len(x)), np.ones(len(x)), many, tiles=True)
    for count in (1, 2, 3, 4, 7):
        for at in range(0, len(x), count):
            few = np.zeros((len(x[at : at + count]), 48), F32)
            grid.down(x[at : at + count], *weight, None, np.arange(len(few)), np.ones(len(few)), few)
            assert (bits(few) == bits(many[at : at + count])).all(), (count, at)


def test_rows_of_huge_values_are_nan_and_tiny_groups_zero(grid):
    """A value of 2^112 and more spoils its row and no other; a group under 2^-100 is nothing."""
    k = 256
    x = np.ones((4, k), F32)
    x[1, 3], x[2, :128] = 2.0**112, 2.0**-101
    if grid.codes == "e2m1":
        q = Quantized("e2m1", np.full((16, k), 2, np.uint8), np.full((16, k // 32), 127, np.uint8), 32)
    else:
        q = random_codes(grid, 16, k)
        q.scale[:] = 1
        q.codes[:] = 1 if grid.codes == "int8" else 9
        if q.zero is not None:
            q.zero[:] = 8
    for tiles in (False, True):
        out = np.zeros((4, 16), F32)
        grid.down(x, *packed(grid, q), None, np.arange(4), np.ones(4), out, tiles=tiles)
        assert np.isnan(out[1]).all() and (out[[0, 3]] == k).all() and (out[2] == k - 128).all()

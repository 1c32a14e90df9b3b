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

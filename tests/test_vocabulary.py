"""Every vocabulary operation of every variant against a numpy model, with FTZ and DAZ as kernels run."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import strategies
from ktcy import kernels as registry
from ktcy.weights.quantized import CODES

F32, I32 = np.float32, np.int32
NORMAL = F32(oracle.FLUSH)


def daz(x):
    return np.where(np.abs(x) < NORMAL, np.copysign(F32(0), x), x)


def ftz(exact):
    """float64, or an odd-rounded one, to float32. The silicon rounds as if exponents had no end, then flushes."""
    tiny = np.abs(exact) < oracle.FLUSH * (1 - 2.0**-25)
    return np.where(tiny, np.copysign(0.0, exact), exact).astype(F32)


def odd_sum(p, c):
    """p + c rounded to odd (two-sum gives the error): rounding that to float32 rounds the exact sum once."""
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(np.int64)
    away = (error > 0) == (s > 0)
    inexact = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


def fma(a, b, c):
    a, b, c = (daz(v).astype(np.float64) for v in (a, b, c))
    return ftz(odd_sum(a * b, c))


def binary(op):
    def model(a, b):
        a, b = daz(a).astype(np.float64), daz(b).astype(np.float64)
        return ftz(op(a, b))

    return model


def added(sign):
    def model(a, b):
        return ftz(odd_sum(daz(a).astype(np.float64), sign * daz(b).astype(np.float64)))

    return model


def to_int(a):
    r = np.rint(a.astype(np.float64))
    fits = (r >= -(2.0**31)) & (r < 2.0**31)
    return np.where(fits, r, -(2.0**31)).astype(np.int64).astype(I32)


def dot(acc, w, c):
    x = c[:1].view(np.int8).astype(np.int64)
    return (acc + w.view(np.int8).reshape(16, 4) @ x).astype(np.uint64).astype(np.uint32).view(I32)


def word_dot(acc, w, c):
    x = c[:1].view(np.int16).astype(np.int64)
    return (acc + w.view(np.int16).reshape(16, 2) @ x).astype(np.uint64).astype(np.uint32).view(I32)


def short_dot(acc, u, c):
    words, x = c[:1].view(np.int16).astype(np.int64), c[1:2].view(np.int8).astype(np.int64)
    sums = u.view(np.uint8).reshape(16, 4) @ x + words.sum()
    return (acc + sums * c[2:].view(np.int8)).astype(np.uint64).astype(np.uint32).view(I32)


def tiles(rows):
    def model(a, b):
        x = a.reshape(32, 64)[:rows].astype(I32)
        w = b.reshape(2, 16, 16, 4).transpose(0, 2, 1, 3).reshape(32, 64).astype(I32)
        return x @ w.T

    return model


def bf16_tiles(rows):
    def model(a, b):
        x = a.reshape(32, 32)[:rows].astype(F32)
        w = b.reshape(2, 16, 16, 2).transpose(0, 2, 1, 3).reshape(32, 32).astype(F32)
        chains = [np.zeros((rows, 32), F32), np.zeros((rows, 32), F32)]
        for k in range(32):
            chains[k % 2] = fma(x[:, k, None], w[None, :, k], chains[k % 2])
        return added(1)(np.zeros((rows, 32), F32), added(1)(*chains))

    return model


def nibbles(j, values):
    """Those of the lower halves of 32 bits, then those of the upper."""
    return lambda a: values[a.reshape(16, 2).T >> (4 * j) & 15].astype(F32)


def words(j, values):
    return lambda a: values[a >> (4 * j) & 15].astype(np.int16)


def e4m3(j):
    """Those of even or odd bytes: values over 256 as bfloat16."""
    return lambda a: (CODES["e4m3"][a[j::2]] / F32(256)).astype(ml_dtypes.bfloat16).view(np.uint16)


def split(*order):
    """256 a - b: bytes a and b of eight words, four of the order at a time."""

    def model(v):
        b = (-v).astype(np.int8)
        a = ((v + b.astype(np.int16)) >> 8).astype(np.int8)
        both = np.stack([a, b]).reshape(2, 4, 8)[..., order].reshape(2, 4, 2, 4)
        return both.transpose(1, 2, 0, 3)

    return model


# Operation: types of the inputs, type of the output, model.
MODELS = {
    "vf32_add": (F32, F32, added(1)),
    "vf32_sub": (F32, F32, added(-1)),
    "vf32_mul": (F32, F32, binary(np.multiply)),
    "vf32_div": (F32, F32, binary(np.divide)),
    "vf32_min": (F32, F32, lambda a, b: np.where(daz(a) < daz(b), daz(a), daz(b))),
    "vf32_max": (F32, F32, lambda a, b: np.where(daz(a) > daz(b), daz(a), daz(b))),
    "vf32_fma": (F32, F32, fma),
    "vf32_round": (F32, F32, np.rint),
    "vf32_load_f16": (np.float16, F32, lambda a: a.astype(F32)),
    "vf32_store_f16": (F32, np.float16, lambda a: a.astype(np.float16)),
    "vf32_from_vi32": (I32, F32, lambda a: a.astype(F32)),
    "vi32_from_vf32": (F32, I32, to_int),
    "vi32_add": (I32, I32, np.add),
    "vi32_sub": (I32, I32, np.subtract),
    "vi32_and": (I32, I32, np.bitwise_and),
    "vi32_or": (I32, I32, np.bitwise_or),
    "vi32_xor": (I32, I32, np.bitwise_xor),
    "vi32_max": (I32, I32, np.maximum),
    "vi16_mul": (np.uint16, np.uint16, np.multiply),
    "vi16_add": (np.uint16, np.uint16, np.add),
    "vi16_sub": (np.uint16, np.uint16, np.subtract),
    "vi16_shr_12": (np.uint16, np.uint16, lambda a: a >> 12),
    "vi32_sar_8": (I32, I32, lambda a: a >> 8),
    "vi8_sub": (np.uint8, np.uint8, np.subtract),
    "vi32_load_s8": (np.int8, I32, lambda a: a.astype(I32)),
    "vi32_shl_16": (I32, I32, lambda a: a << 16),
    "vi32_shr_16": (np.uint32, np.uint32, lambda a: a >> 16),
    "vi32_select_gt": (I32, I32, lambda a, b, c: np.where(a > b, c, a)),
    "vi32_and_or": (I32, I32, lambda a, b, c: (a & b) | c),
    "vi32_load_u4": (np.uint8, I32, lambda a: np.concatenate([a & 15, a >> 4]).astype(I32)),
    "vi32_load_u16": (np.uint16, I32, lambda a: a.astype(I32)),
    "vi32_load_s16": (np.int16, I32, lambda a: a.astype(I32)),
    "vi32_store_u16": (I32, np.uint16, lambda a: a.astype(np.uint16)),
    "vi32_store_s8": (I32, np.int8, lambda a: a.astype(np.int8)),
    "vi32_hmax": (I32, I32, lambda a: a.max(keepdims=True)),
    "vi32_hsum": (I32, I32, lambda a: a.sum(keepdims=True, dtype=I32)),
    "vi32_load_u8": (np.uint8, I32, lambda a: a.astype(I32)),
    **{f"vf32_load_e2m1_{j}": (np.uint16, F32, nibbles(j, CODES["e2m1"] / 2 + 0.0)) for j in range(4)},
    **{f"vi16_load_e2m1_{j}": (np.uint16, np.int16, words(j, CODES["e2m1"] * 512)) for j in range(4)},
    "vi16_split_0": (np.int16, np.int8, split(0, 2, 1, 3, 4, 6, 5, 7)),
    "vi16_split_1": (np.int16, np.int8, split(0, 4, 1, 5, 2, 6, 3, 7)),
    "vi8_load_e2m1_0": (np.uint8, np.uint8, lambda a: (12 + 2 * CODES["e2m1"][a & 15]).astype(np.uint8)),
    "vi8_load_e2m1_1": (np.uint8, np.uint8, lambda a: (12 + 2 * CODES["e2m1"][a >> 4]).astype(np.uint8)),
    **{f"vi16_load{normal}_e4m3_{j}": (np.uint8, np.uint16, e4m3(j)) for normal in ("", "_normal") for j in (0, 1)},
    "vi32_dot_s8": (I32, I32, dot),
    "vi32_dot_s16": (I32, I32, word_dot),
    "vshort_dot": (I32, I32, short_dot),
    "vi16_bf16": (np.int16, np.uint16, lambda a: ((a + 16) % 32 - 16).astype(ml_dtypes.bfloat16).view(np.uint16)),
    "tile_dot_s8": (np.int8, I32, tiles(32)),
    "tile_dot_s8_half": (np.int8, I32, tiles(16)),
    "tile_dot_bf16": (ml_dtypes.bfloat16, F32, bf16_tiles(32)),
    "tile_dot_bf16_half": (ml_dtypes.bfloat16, F32, bf16_tiles(16)),
}


def same(got, want):
    """Equal bits, a zero's sign included; any NaN equals any."""
    if got.dtype.kind != "f":
        return (got == want).all()
    return ((got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)).all()


# Operations that not every variant has, by the feature that brings them.
SOME = {"avx512vnni": ("vi16_split", "vi8_load_e2m1"), "amx-int8": ("tile_", "vi16_bf16")}


def test_every_operation_has_a_model(kernels):
    """And every variant has those of its features, no other."""
    features = registry.VARIANTS[registry.VARIANTS[kernels.name].isa].features
    lacking = tuple(name for feature, names in SOME.items() if feature not in features for name in names)
    has = {name for name in MODELS if not lacking or not name.startswith(lacking)}
    assert set(kernels.ops) == has | {"vf32_exp"}


@given(a=strategies.lanes, b=strategies.lanes, c=strategies.lanes)
def test_operation_equals_its_model(kernels, a, b, c):
    """Zeros of both signs, subnormals, huge values, inf, NaN, limits of int32, int16 and int8."""
    for name, (sizes, _) in kernels.ops.items():
        if name not in MODELS:
            continue
        source, target, model = MODELS[name]
        inputs = [v.view(source) for v in strategies.operands(name, sizes, (a, b, c))]
        with np.errstate(all="ignore"):
            want = model(*inputs)
        got = kernels.op(name, *inputs).view(target)
        assert same(got, want.ravel()), (name, inputs, got, want)


def test_fma_is_fused(kernels):
    """Rounding the product first would give zero."""
    a = np.full(16, 1 + 2.0**-12, F32)
    c = np.full(16, -(1 + 2.0**-11), F32)
    assert (kernels.op("vf32_fma", a, a, c).view(F32) == 2.0**-24).all()


def test_subnormals_are_zero_inside_only(kernels):
    """C25: kernels flush, the caller's thread does not."""
    tiny = np.full(16, 2.0**-130, F32)
    assert (kernels.op("vf32_mul", tiny, np.full(16, 2.0**10, F32)).view(F32) == 0).all()
    assert (kernels.op("vf32_mul", np.full(16, NORMAL), np.full(16, 0.5, F32)).view(F32) == 0).all()
    assert (tiny * F32(1) > 0).all() and np.float64(5e-324) * 1 > 0


def exp_error(kernels, x):
    with np.errstate(all="ignore"):
        want = np.exp(np.clip(x.astype(np.float64), -87, 88))
    got = kernels.op("vf32_exp", x).view(F32)
    assert (np.isnan(got) == np.isnan(x)).all()
    known = ~np.isnan(x)
    return np.max(np.abs(got[known] - want[known]) / want[known], initial=0)


@given(x=strategies.lanes)
def test_exp_of_anything_is_within_its_bound(kernels, x):
    assert exp_error(kernels, x.view(F32)) <= oracle.EXP


def test_exp_over_its_range_is_within_its_bound(kernels):
    for x in np.linspace(-90, 90, 40000, dtype=F32).reshape(-1, 16):
        assert exp_error(kernels, x) <= oracle.EXP


@pytest.mark.parametrize("dtype", strategies.DTYPES.values(), ids=list(strategies.DTYPES))
@given(words=strategies.lanes, n=st.integers(0, 70))
def test_store_rounds_to_nearest_even(kernels, dtype, words, n):
    """NaN stays NaN, overflow gives inf, ties go to even, at every length."""
    x = np.resize(words, n).view(F32)
    with np.errstate(all="ignore"):
        want = x.astype(dtype)
    got = kernels.store(x, dtype)
    assert got.dtype == np.dtype(dtype) and same(got.astype(F32), want.astype(F32))


def test_store_to_bfloat16_at_every_tie(kernels):
    """All upper halves with the lower half at, below and above the middle."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | low).view(F32)
        with np.errstate(all="ignore"):
            want, got = x.astype(ml_dtypes.bfloat16), kernels.store(x, ml_dtypes.bfloat16)
            assert same(got.astype(F32), want.astype(F32))


def test_float16_round_trip_of_every_value(kernels):
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        wide = x.astype(F32)
    assert same(kernels.store(wide, np.float16), x)
    for part, values in zip(x.reshape(-1, 16)[::16], wide.reshape(-1, 16)[::16]):
        assert same(kernels.op("vf32_load_f16", part).view(F32), values)

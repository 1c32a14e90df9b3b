"""The maths of a layer in float64, with a bound for what float32 kernels may add, derived and never chosen by eye.

Every number travels as a value and a bound: ``(v, e)`` says that the kernels hold something within e of v.
Bounds are first order times ``SLACK``; the relative errors here stay under 1e-3, so that covers their products.
The forms of the layer share the code and differ in how they round weights and activations:

- a format's name (``int8``, ``int4``, ``bf16``): follow its scheme of table.h. What is left is float32
  arithmetic, and a value of the intermediate that lies so close to the middle of two steps that arithmetic
  decides between them.
- ``exact``: keep the original numbers. The bound is then the error of the int8 scheme itself.
"""

import math
from dataclasses import replace
from typing import NamedTuple, Optional

import numpy as np

from ktcy import kernels as registry
from ktcy.weights.quantized import CODES, Quantized

U = 2.0**-24
SLACK = 1.01
# The smallest normal float32: kernels flush what is smaller.
FLUSH = 2.0**-126
# A row whose absmax is smaller is zero (table.h).
TINY = 2.0**-118
EXP = 1.5e-7
GELU_FIT = 9.2e-7
# The largest slope of x * sigmoid(x) is 1.0998, of x * Phi(x) and its tanh form 1.1290.
SLOPE = 1.13
# Half a step of int8; float32 moves x / scale by at most 3 U of 127.
HALF = 0.5 + 127 * 3 * U * SLACK
# Unit roundoff and smallest step of what a layer writes.
STORE = {"float32": (0.0, 0.0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


class Expert(NamedTuple):
    """Weights of one expert: gate and up [I, H], down [H, I], biases [I], [I], [H] or None."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: Optional[np.ndarray] = None
    up_bias: Optional[np.ndarray] = None
    down_bias: Optional[np.ndarray] = None


def quantize_rows(x):
    """The int8 scheme of table.h on rows [N, K]: q int8 [N, K] and scale float32 [N], bit for bit."""
    x = np.asarray(x).astype(np.float32)
    x = np.where(np.abs(x) < np.float32(FLUSH), np.float32(0), x)
    most = np.abs(x).max(axis=1, initial=0)
    finite = np.isfinite(most)
    used = finite & (most >= TINY)
    divisor = np.where(used, most, np.float32(1))[:, None]
    q = np.rint(np.where(used[:, None], x, 0) * (np.float32(127) / divisor)).astype(np.int8)
    scale = np.where(used, most / np.float32(127), np.float32(0))
    return q, np.where(finite, scale, np.float32("nan")).astype(np.float32)


def dequantize(q, scale):
    """float64 values of quantized rows; a row of scale NaN is all NaN."""
    return q.astype(np.float64) * scale.astype(np.float64)[:, None]


def pack_int8(q, scale):
    """Quantized rows in the layout int8-n16k4-v1: weight uint8 [blocks, bytes], scale uint8 [blocks, 64]."""
    n, k = q.shape
    blocks, padded = -(-n // 16), -(-k // 64) * 64
    full = np.zeros((blocks * 16, padded), np.int8)
    full[:n, :k] = q
    lines = full.reshape(blocks, 16, padded // 4, 4).swapaxes(1, 2)
    scales = np.zeros(blocks * 16, np.float32)
    scales[:n] = scale
    return lines.reshape(blocks, 16 * padded).view(np.uint8), scales.reshape(blocks, 16).view(np.uint8)


def pack_int4(u, factor, scale):
    """Nibbles [N, K], factors [N, K / 32] and scales [N] in the layout int4-n16k8-g32-v1, as `pack_int8`."""
    n, k = u.shape
    blocks, padded = -(-n // 16), -(-k // 64) * 64
    codes, factors = np.full((blocks * 16, padded), 8, np.uint8), np.ones((blocks * 16, padded // 32), np.int8)
    scales = np.zeros(blocks * 16, np.float32)
    codes[:n, :k], factors[:n, : factor.shape[1]], scales[:n] = u, factor, scale
    lines = codes.reshape(blocks, 16, padded // 8, 2, 4).transpose(3, 0, 2, 1, 4)
    factors = np.ascontiguousarray(factors.reshape(blocks, 16, -1).swapaxes(1, 2)).reshape(blocks, -1)
    weight = (lines[0] | lines[1] << 4).reshape(blocks, 8 * padded)
    return weight, np.concatenate([scales.reshape(blocks, 16).view(np.uint8), factors.view(np.uint8)], axis=1)


def unpack_int4(weight, scale, n, k):
    """What `pack_int4` packed: nibbles [n, k], factors [n, ceil(k / 32)], scales [n]."""
    blocks = len(weight)
    lines = weight.reshape(blocks, -1, 16, 4)
    u = np.stack([lines & 15, lines >> 4], axis=2).transpose(0, 3, 1, 2, 4).reshape(blocks * 16, -1)
    factor = scale[:, 64:].view(np.int8).reshape(blocks, -1, 16).swapaxes(1, 2).reshape(blocks * 16, -1)
    return u[:n, :k], factor[:n, : -(-k // 32)], np.ascontiguousarray(scale[:, :64]).view(np.float32).ravel()[:n]


def int4_steps(u, factor):
    """The integers that nibbles and factors stand for."""
    return factor.astype(np.int64).repeat(32, axis=1)[:, : u.shape[1]] * (u.astype(np.int64) - 8)


def int4_weights(w):
    """float64 values that AVX2 packs w to (test_int4.py: what every variant packs, and how good it is)."""
    fmt = registry.load("avx2").format("int4")
    blocks, (n, k) = -(-len(w) // 16), w.shape
    packed = [np.empty((blocks, size), np.uint8) for size in (fmt.weight_bytes(k), fmt.scale_bytes(k))]
    fmt.pack(w, *packed)
    u, factor, scale = unpack_int4(*packed, n, k)
    return dequantize(int4_steps(u, factor), scale)


def int8_rounding(v, e):
    """What the scheme makes of rows v known within e, and how far the kernels' may be from it.

    Both lie within half a step of what they round. Where no error within e can change q, only the scale's own
    error is left.
    """
    v = np.where(np.isfinite(v).all(axis=1, keepdims=True), v, np.nan)
    most = np.abs(v).max(axis=1, keepdims=True, initial=0)
    error = np.max(e, axis=1, keepdims=True, initial=0)
    step = most / 127
    step_error = (error / 127 + step * U) * SLACK
    safe = np.where(step > 0, step, 1)
    t = v / safe
    q = np.rint(t)
    moved = (e / safe + np.abs(t) * (step_error / safe + 3 * U)) * SLACK
    sure = (np.rint(t - moved) == q) & (np.rint(t + moved) == q) & (most - error >= 2 * TINY)
    apart = HALF * (2 * step + step_error) + e + 2 * TINY
    return q * step, np.where(sure, np.abs(q) * step_error, apart)


def to_bf16(v):
    """float64 to the nearest bfloat16, ties to even; past its range, inf."""
    mantissa, exponent = np.frexp(v)
    exponent = np.maximum(exponent, -125)
    q = np.ldexp(np.rint(np.ldexp(v, 8 - exponent)), exponent - 8)
    return np.where(np.abs(q) < 2.0**128, q, np.copysign(np.inf, v))


def bf16_rounding(v, e):
    """The bf16 core's activation rows: rounding is monotone, so that of v - e and v + e bounds it."""
    q = to_bf16(v)
    with np.errstate(invalid="ignore"):
        q = np.where(np.isfinite(q).all(axis=1, keepdims=True), q, np.nan)
        return q, np.maximum(to_bf16(v + e) - q, q - to_bf16(v - e)) + FLUSH


def grid_rounding(v, e, group, bits):
    """The int16 core's activation rows: bfloat16 values in units of their group, fewer than 2^bits of them."""
    q, bound = bf16_rounding(v, e)
    n, k = v.shape
    pad = ((0, 0), (0, -k % group))

    def unit(most):
        """Of the groups of magnitudes [N, groups, group], each as wide."""
        most = most.max(axis=2, keepdims=True)
        _, exponent = np.frexp(np.where((most >= 2.0**-100) & (most < 2.0**112), most, 0.5))
        return np.where(most < 2.0**-100, 0, np.ldexp(1.0, exponent - bits)).repeat(group, axis=2)

    q, bound = (np.pad(a, pad).reshape(n, -(-k // group), group) for a in (q, bound))
    step = unit(np.abs(q))
    lost = np.isnan(q) | (np.abs(q) >= 2.0**112)
    safe = np.where(step == 0, 1, step)
    got = np.where(step == 0, 0, np.rint(np.where(lost, 0, q) / safe) * safe)
    # Where a value may be another one, or its group may have another unit, it lies within half a step of either.
    sure = (bound <= FLUSH) & (unit(np.abs(q) - bound) == unit(np.abs(q) + bound))
    apart = bound + unit(np.abs(q) + bound) + np.where(np.abs(q) + bound < 2.0**-99, 2.0**-99, 0)
    got, apart = (a.reshape(n, q.shape[1] * group)[:, :k] for a in (got, np.where(sure, 0, apart)))
    got = np.where(lost.any(axis=(1, 2))[:, None], np.nan, got)
    return got, apart


def exact_rounding(v, e):
    """Rows v known within e as they are; the bound takes in half a step, or all of a row that counts as zero."""
    v = np.where(np.isfinite(v).all(axis=1, keepdims=True), v, np.nan)
    most = np.abs(v).max(axis=1, keepdims=True, initial=0)
    error = np.max(e, axis=1, keepdims=True, initial=0)
    return v, e + HALF * (most + error) / 127 + np.where(most - error < 2 * TINY, 2 * TINY, FLUSH)


# Formats of the int16 core: the groups of activations and the bits of their integers.
GRIDS = {
    "rawint4": (32, 15),
    "q4_0": (32, 15),
    "q8_0": (32, 12),
    "gptq32": (32, 15),
    "gptq64": (64, 14),
    "gptq128": (128, 13),
    "mxfp4": (32, 14),
}


def rounding(form):
    """How a form rounds activations: a function of rows and their bound."""
    if form in GRIDS:
        return lambda v, e: grid_rounding(v, e, *GRIDS[form])
    return {"int8": int8_rounding, "int4": int8_rounding, "exact": exact_rounding}.get(form, bf16_rounding)


class Coded(NamedTuple):
    """A format that keeps a checkpoint's codes: what `encode` makes, and how the bf16 core uses the values."""

    kind: str
    group: int
    scale: str
    zero: bool = False
    block: int = 1  # so many rows share a scale
    late: bool = False  # scales are applied to the sums of groups, else value times scale is rounded to bfloat16


# The formats of codes; keys are also forms.
CODED = {
    "rawint4": Coded("int4", 32, "bfloat16", late=True),
    "q4_0": Coded("int4", 32, "float16", late=True),
    "q8_0": Coded("int8", 32, "float16", late=True),
    "gptq32": Coded("int4", 32, "float16", zero=True, late=True),
    "gptq64": Coded("int4", 64, "float16", zero=True, late=True),
    "gptq128": Coded("int4", 128, "float16", zero=True, late=True),
    "fp8": Coded("e4m3", 128, "float32", block=128, late=True),
    "fp8_channel": Coded("e4m3", 0, "float32", late=True),
    "mxfp8": Coded("e4m3", 32, "uint8"),
    "mxfp4": Coded("e2m1", 32, "uint8"),
}


def encode(w, name):
    """A float matrix [N, K] in the codes of a format, nearest values, each group scaled so that its largest fits."""
    kind, group, dtype, has_zero, block, _ = CODED[name]
    n, k = w.shape
    w = w.astype(np.float64)
    table = CODES[kind].astype(np.float64)
    finite = np.flatnonzero(np.isfinite(table))
    if kind == "int4":
        table = table - 8
    size = group or k
    padded = np.zeros((-(-n // block) * block, -(-k // size) * size))
    padded[:n, :k] = w
    parts = padded.reshape(len(padded) // block, block, -1, size)
    most = np.abs(parts).max(axis=(1, 3)).repeat(block, axis=0)[:n]
    step = np.minimum(most / np.abs(table[finite]).max(), 2.0**100)
    positive = parts.max(axis=(1, 3)).repeat(block, axis=0)[:n] == most
    if kind.startswith("int") and not has_zero:
        # Codes reach further below zero: the scale takes its sign from the largest value, as in GGUF.
        step *= np.where(positive, -1, 1)
    if dtype == "uint8":
        scale = np.clip(np.ceil(np.log2(np.maximum(step, 2.0**-126))) + 127, 1, 254).astype(np.uint8)
        step = np.ldexp(1.0, scale.astype(int) - 127)
    else:
        with np.errstate(over="ignore"):
            scale = np.clip(np.where(np.abs(step) < FLUSH, 0, step), -60000.0, 60000.0).astype(np.float32).astype(dtype)
        step = scale.astype(np.float64)
    zero = None
    if has_zero:
        zero = np.where(positive, 7, 8)
        zero = np.where(most > 0, zero, np.arange(zero.size).reshape(zero.shape) % 16).astype(np.uint8)
        table = table + 8
    wide = step.repeat(size, axis=1)[:, :k]
    t = np.divide(w, wide, out=np.zeros_like(w), where=wide != 0)
    if has_zero:
        t += zero.repeat(size, axis=1)[:, :k]
    by_value = finite[np.argsort(table[finite], kind="stable")]
    middles = (table[by_value][1:] + table[by_value][:-1]) / 2
    codes = by_value[np.searchsorted(middles, t)].astype(np.uint8)
    return Quantized(kind, codes, scale, group, zero)


def rows(x, form):
    """Activation rows [M, K] as a form of the layer sees them: value and bound."""
    x = x.astype(np.float32).astype(np.float64)
    if form in ("int8", "int4"):
        return dequantize(*quantize_rows(x)), np.zeros(x.shape)
    value, bound = rounding(form)(x, np.zeros(x.shape))
    return value, bound


def weights(w, form):
    """A matrix [N, K], floats or `Quantized`, as a form of the layer sees it: value and bound."""
    if form == "int4":
        return int4_weights(w), np.zeros(w.shape)
    if form not in CODED:
        return rows(w, form)
    q = w if isinstance(w, Quantized) else encode(w, form)
    # What is subnormal is zero to kernels: a scale that comes late, or a value.
    if CODED[form].late:
        q = replace(q, scale=np.where(np.abs(q.scale) < FLUSH, 0, q.scale).astype(q.scale.dtype))
        return q.dequantize().astype(np.float64), np.zeros(w.shape)
    value = q.dequantize().astype(np.float64)
    return to_bf16(np.where(np.abs(value) < FLUSH, 0, value)), np.zeros(w.shape)


def product(x, w, bias=None, form="int8"):
    """x [M, K] times w [N, K], each with its bound, plus bias [N], in the arithmetic of the form's core."""
    (x, ex), (w, ew) = x, w
    k = x.shape[1]
    bias = 0.0 if bias is None else bias.astype(np.float64)
    s = x @ w.T
    y = s + bias
    mass = np.abs(x) @ np.abs(w).T
    e = np.abs(x) @ ew.T + k * 2.0**-52 * mass
    if ex.any():
        e += ex @ (ew + np.abs(w)).T
    if form in CODED or form == "bf16":
        # A term passes at most 16 fma of its chain, even + odd, and one sum for each 32 of K and each group of it;
        # each may flush, before its scale where scales come late.
        late = form in CODED and CODED[form].late
        groups = -(-k // (CODED[form].group or k)) if late else 0
        # The smallest code is 2^-9 and enters as 2^-17: so much may follow what is flushed.
        largest = max(1.0, np.abs(w).max(initial=0) * 2.0**17) if late else 1.0
        e += (17 + -(-k // 32) + groups) * U * SLACK * (mass + e) + 2 * k * FLUSH * largest
        return y, (e + U * (np.abs(y) + e)) * SLACK + FLUSH
    # Rounded: the sum, the product of the scales, the fma. Flushed: the product of the scales, the fma.
    rounded = 2 * U * (np.abs(s) + e) + U * (np.abs(y) + e)
    return y, (e + rounded) * SLACK + (127.0 * 127.0 * k + 1) * FLUSH


def sigmoid(a):
    e = np.exp(-np.abs(a))
    return np.where(a >= 0, 1, e) / (1 + e)


_erfc = np.frompyfunc(math.erfc, 1, 1)


def phi(x):
    """The normal distribution function; exact on both tails."""
    return 0.5 * _erfc(-np.asarray(x, np.float64) / math.sqrt(2)).astype(np.float64)


def _parameters(act):
    return (float(np.float32(v)) for v in (act.alpha, act.limit, act.offset))


def _gate(act, g):
    """The gate's part of an activation: value, relative error of its arithmetic for exact g.

    swish: alpha * g rounds once, and |a| (1 - sigmoid(a)) is how much of that reaches the sigmoid; then exp,
    1 + exp, the division. gelu_tanh: the same, its argument six times rounded (two constants, x * c, x * x, fma,
    product). gelu: see kernels/activation.h; Horner's sum of R is 6.5 U and the error of u another 6 U of it,
    exp's argument rounds once.
    """
    alpha, _, _ = _parameters(act)
    if act.gate == "gelu":
        lower = phi(-np.abs(g))
        upper = phi(g)
        relative = GELU_FIT + EXP + (15 + np.minimum(g * g / 2, 88)) * U
        return g * upper, np.where(g < 0, relative, (lower * relative + U) / np.maximum(upper, 0.5)) + U
    if act.gate == "gelu_tanh":
        a, rounded = 2 * math.sqrt(2 / math.pi) * g * (1 + 0.044715 * g * g), 6
    else:
        a, rounded = alpha * g, 1
    rest = sigmoid(-a)
    return g * sigmoid(a), rest * (EXP + rounded * U * np.minimum(np.abs(a), 88)) + 2 * U


def activation(act, gate, up=None):
    """The gated activation in float64, and the bound, of gate and up (each value and bound, or a plain value)."""
    (g, eg), (u, eu) = (v if isinstance(v, tuple) else (v, np.zeros_like(v)) for v in (gate, up))
    _, limit, offset = _parameters(act)
    if act.gate == "swiglu":
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        u = u + offset
    s, _ = _gate(act, g)
    es = SLOPE * eg
    # Below zero the relative error falls as the argument grows, above it rises by less than 2 U.
    _, relative = _gate(act, g - np.copysign(eg, act.alpha))
    rounded = (relative + 4 * U) * (np.abs(s) + es) * (np.abs(u) + eu)
    flushed = 2 * FLUSH * (1 + (1 + np.abs(g) + eg) * (np.abs(u) + eu))
    e = es * (np.abs(u) + eu) + np.abs(s) * eu
    return s * u, (e + rounded) * SLACK + flushed


def gate_up(x, expert, act, form="int8"):
    """The intermediate rows [M, I] of quantized or original rows x (value and bound)."""
    gate = product(x, weights(expert.gate, form), expert.gate_bias, form)
    up = product(x, weights(expert.up, form), expert.up_bias, form)
    return activation(act, gate, up)


def moe_layer(x, ids, route, experts, act, form="int8"):
    """A whole layer.

    Parameters
    ----------
    x : array [M, H]
        float32, float16 or bfloat16. A row with NaN or inf is all NaN in the answer.
    ids : int array [M, top_k]
        Experts of each token; -1 is no expert, an expert may come twice.
    route : array [M, top_k]
    experts : sequence of Expert, or a dict
    act : ktcy.config.Activation
    form : str
        A format's name or "exact": follow the scheme of the format, or keep the original weights and activations.

    Returns
    -------
    (out, bound) : float64 [M, H]
        Float32 kernels of the scheme give something within bound of out. `stored` adds what rounding to
        the caller's dtype does.
    """
    route = route.astype(np.float32).astype(np.float64)
    out, bound, mass = (np.zeros(x.shape) for _ in range(3))
    x = rows(x, form)
    for e in np.unique(ids[ids >= 0]):
        token, slot = np.nonzero(ids == e)
        h = rounding(form)(*gate_up((x[0][token], x[1][token]), experts[e], act, form))
        y, ey = product(h, weights(experts[e].down, form), experts[e].down_bias, form)
        r = route[token, slot][:, None]
        np.add.at(out, token, r * y)
        np.add.at(bound, token, np.abs(r) * ey)
        np.add.at(mass, token, np.abs(r) * (np.abs(y) + ey))
    # One fma a slot.
    return out, bound + ids.shape[1] * (U * mass * SLACK + FLUSH)


def stored(out, bound, dtype):
    """The bound after rounding to the dtype of the caller."""
    unit, least = STORE[np.dtype(dtype).name]
    return bound + unit * (np.abs(out) + bound) + least


def assert_within(got, want, bound):
    """got is NaN exactly where want is, infinite only where want may not fit its dtype, else within the bound."""
    import ml_dtypes

    limit = float(ml_dtypes.finfo(got.dtype).max)
    got = got.astype(np.float64)
    lost = np.isnan(want)
    assert (np.isnan(got) == lost).all(), f"NaN at {np.argwhere(np.isnan(got) != lost)[:5].tolist()}"
    got, want, bound = got[~lost], want[~lost], np.broadcast_to(bound, want.shape)[~lost]
    assert not (np.isinf(got) & (np.abs(want) + bound < limit)).any(), "infinite, but the answer fits"
    error = np.abs(np.clip(got, -limit, limit) - np.clip(want, -limit, limit))
    assert (error <= bound).all(), f"{np.max(error / bound)} of the bound, worst error {error.max()}"

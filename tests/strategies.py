"""Every hypothesis strategy: sizes, values, routings, layers.

Hypothesis draws the structure and a seed, numpy the numbers: arrays of thousands stay cheap, and shrinking
works on what matters, sizes and kinds of rows.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import oracle
from cases import ACTIVATIONS
from ktcy.config import Activation, LayerShape

MAX_TOKENS = 70
MAX_EXPERTS = 512
MAX_TOP_K = 16
MAX_SIZE = 200
# Values in one projection of all experts.
MAX_WEIGHTS = 1 << 20
# hidden, intermediate of real models beside a small partner.
WIDE = ((2880, 96), (96, 2880), (1408, 96), (96, 1408), (2880, 17), (1, 1408))
# A layer multiplies three weights and three activations: 2^90 times sums stays in float32.
MAX_LAYER_VALUE = 2.0**15

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
KINDS = ("normal", "zero", "constant", "tiny", "subnormal", "huge", "spiky", "signs", "sparse")

dtypes = st.sampled_from(list(DTYPES.values()))
seeds = st.integers(0, 2**32 - 1)
activations = st.sampled_from(list(ACTIVATIONS.values())) | st.builds(
    Activation, st.just("swiglu"), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.5, 7.0, np.inf]),
    st.sampled_from([0.0, -1.0]),
)
tokens = st.integers(0, 8) | st.integers(0, MAX_TOKENS)
sizes = st.integers(1, MAX_SIZE) | st.sampled_from([64, 96, 128])


def block(rng, kind, shape, top):
    """float64 rows [n, k] of a kind, magnitudes at most top."""
    n, k = shape
    x = rng.standard_normal(shape)
    if kind == "zero":
        x = np.copysign(0.0, x)
    elif kind == "constant":
        x[:] = rng.choice([1.0, -0.37, top, -top, 2.0**-120, 1e-3], (n, 1))
    elif kind == "tiny":
        x *= 2.0 ** rng.integers(-124, -110, (n, 1))
    elif kind == "subnormal":
        x *= 2.0**-135
    elif kind == "huge":
        x = rng.uniform(-top, top, shape)
    elif kind == "signs":
        x = np.copysign(rng.choice([1.0, top, 0.1], (n, 1)), x)
    elif kind == "spiky":
        x *= np.exp(3 * rng.standard_normal(shape))
        x[np.arange(n), rng.integers(k, size=n)] *= 1000
    elif kind == "sparse":
        x = np.where(rng.random(shape) < 0.9, np.copysign(0.0, x), x)
    return np.clip(x, -top, top)


def fill(rng, kinds, shape, dtype=np.float32, top=MAX_LAYER_VALUE):
    """An array whose rows, along its last axis, are each of a random one of the kinds."""
    top = min(top, float(ml_dtypes.finfo(dtype).max))
    out = np.empty((int(np.prod(shape[:-1])), shape[-1]))
    chosen = rng.integers(len(kinds), size=len(out))
    for i, kind in enumerate(kinds):
        out[chosen == i] = block(rng, kind, (int((chosen == i).sum()), shape[-1]), top)
    return out.reshape(shape).astype(dtype)


kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True)


@st.composite
def matrices(draw, rows=sizes, columns=sizes, top=float(np.finfo(np.float32).max)):
    """A matrix of any dtype and kinds of rows."""
    rng = np.random.default_rng(draw(seeds))
    return fill(rng, draw(kinds), (draw(rows), draw(columns)), draw(dtypes), top)


ROUTINGS = ("distinct", "one", "repeated", "padded", "none")


def routing(rng, kind, tokens, experts, top_k, dtype=np.int64):
    """ids [tokens, top_k] and weights: distinct experts, all to one, any with repetition, some -1, only -1."""
    if kind == "distinct":
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    elif kind == "one":
        ids = np.full((tokens, top_k), rng.integers(experts))
    else:
        ids = rng.integers(experts, size=(tokens, top_k))
    if kind == "padded":
        ids[rng.random(ids.shape) < 0.3] = -1
    if kind == "none":
        ids[:] = -1
    return np.ascontiguousarray(ids, dtype), rng.random(ids.shape).astype(np.float32)


class Layer(NamedTuple):
    """A layer, its input and its routing: gate and up [E, I, H], down [E, H, I], biases [E, ...] or None."""

    shape: LayerShape
    activation: Activation
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: object
    up_bias: object
    down_bias: object
    x: np.ndarray
    ids: np.ndarray
    route: np.ndarray

    def __repr__(self):
        return (
            f"Layer({self.shape}, {self.activation}, bias={self.gate_bias is not None}, "
            f"weights {self.gate.dtype}, x {self.x.dtype} {list(self.x.shape)}, ids {self.ids.tolist()})"
        )

    def expert(self, e):
        bias = (None, None, None) if self.gate_bias is None else (self.gate_bias[e], self.up_bias[e], self.down_bias[e])
        return oracle.Expert(self.gate[e], self.up[e], self.down[e], *bias)

    @property
    def experts(self):
        return [self.expert(e) for e in range(self.shape.num_experts)]

    def reference(self, form="int8"):
        return oracle.moe_layer(self.x, self.ids, self.route, self.experts, self.activation, form)


def layer(rng, shape, activation, n_tokens, weight_kinds=("normal",), row_kinds=("normal",), dtype=np.float32,
          weight_dtype=np.float32, bias=False, route="distinct", ids_dtype=np.int64):
    """A layer of given sizes and kinds."""
    e, k, h, i = shape.num_experts, shape.num_experts_per_tok, shape.hidden_size, shape.moe_intermediate_size
    gate, up = (fill(rng, weight_kinds, (e, i, h), weight_dtype) for _ in range(2))
    down = fill(rng, weight_kinds, (e, h, i), weight_dtype)
    biases = [rng.standard_normal((e, n)).astype(np.float32) if bias else None for n in (i, i, h)]
    x = fill(rng, row_kinds, (n_tokens, h), dtype)
    return Layer(shape, activation, gate, up, down, *biases, x, *routing(rng, route, n_tokens, e, k, ids_dtype))


@st.composite
def shapes(draw):
    """Sizes of a layer: off every multiple, or as in real models, experts from 1 to 512 as far as memory goes."""
    h, i = draw(st.tuples(sizes, sizes) | st.sampled_from(WIDE))
    most = min(MAX_EXPERTS, MAX_WEIGHTS // (h * i))
    experts = draw(st.integers(1, min(8, most)) | st.integers(1, most))
    return LayerShape(experts, draw(st.integers(1, min(MAX_TOP_K, experts))), h, i)


@st.composite
def layers(draw, shapes=shapes(), tokens=tokens):
    """A layer, its input and its routing, all of them varied."""
    return layer(
        np.random.default_rng(draw(seeds)),
        draw(shapes),
        draw(activations),
        draw(tokens),
        draw(kinds),
        draw(kinds),
        draw(dtypes),
        draw(dtypes),
        draw(st.booleans()),
        draw(st.sampled_from(ROUTINGS)),
        draw(st.sampled_from([np.int32, np.int64])),
    )


def views(array):
    """The same values behind other strides: name -> view."""
    wide = np.zeros((len(array) + 1, 2 * array.shape[1] + 3), array.dtype)
    wide[1:, 3::2] = array
    raw = np.zeros(array.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(array.dtype).reshape(array.shape)
    unaligned[:] = array
    return {
        "transposed": np.ascontiguousarray(array.T).T,
        "slice": wide[1:, 3::2],
        "row slice": np.concatenate([array, array], axis=1)[:, array.shape[1] :],
        "reversed": np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1],
        "row by row": np.repeat(array, 2, axis=0)[::2],
        "unaligned": unaligned,
    }


NAN = 0x7FC00000
_FLOATS = [0.0, 1.0, 0.5, 1.5, 2.5, 1 + 2.0**-12, 87.0, 88.0, 88.5, 65504.0, 65520.0, 1e10, 2.0**31, 2.0**31 - 128,
           2.0**-14, 2.0**-25, 2.0**-63, 2.0**-126, 2.0**-127, 2.0**-149, 3.4028235e38, 3.39e38, np.inf]
_INTS = [0, 1, 127, 128, 255, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1, 0x7F7F7F7F, 0x80808080, 0x81818181]
EXTREMES = [int(np.float32(sign * f).view(np.uint32)) for f in _FLOATS for sign in (1, -1)] + _INTS + [NAN]

#: Sixteen 32-bit lanes: bit patterns at the limits of floats, ints and bytes, and any others.
lanes = arrays(np.uint32, 16, elements=st.sampled_from(EXTREMES) | st.integers(0, 2**32 - 1))


def operands(name, sizes, words, legal=True):
    """Inputs of a vocabulary operation, uint8, made of three arrays of lanes.

    With two NaN operands the payload of the result depends on the order that a compiler chose, so there is one
    NaN. ``legal`` keeps to what the operation is documented for.
    """
    if name.startswith("tile_"):
        rng = np.random.default_rng(words[0])
        if "bf16" in name:
            # Products from subnormal to huge, their sums finite.
            size = np.ldexp(1 + rng.random((2, 1024)), rng.integers(-75, 57, (2, 1024)))
            size = np.where(rng.random((2, 1024)) < 0.1, rng.choice([0.0, 2.0**-130], (2, 1024)), size)
            return list(np.copysign(size, rng.normal(size=(2, 1024))).astype(ml_dtypes.bfloat16).view(np.uint8))
        ends = rng.choice(np.array([-128, -127, 0, 127], np.int8), (2, 2048))
        values = rng.integers(-128, 128, (2, 2048), dtype=np.int8)
        return list(np.where(rng.random((2, 2048)) < rng.random(), ends, values).view(np.uint8))
    words = [w.copy() for w in words]
    if name.startswith("vf32_"):
        for w in words:
            w[np.isnan(w.view(np.float32))] = NAN
    if legal and name == "vi32_store_u16":
        words[0] &= 0xFFFF
    if legal and name == "vi32_store_s8":
        words[0] = words[0].astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    if legal and name == "vi32_dot_s8":
        four = np.maximum(words[2][:1].view(np.int8), -127)
        words[2][:2] = np.array([four.view(np.int32)[0], four.sum(dtype=np.int32)]).view(np.uint32)
    if legal and name == "vshort_dot":
        # Nibbles, and sums that stay in 16 bits with four more products.
        words[1] &= 0x0F0F0F0F
        words[2][:1] = np.clip(words[2][:1].view(np.int16), -12288, 12288).view(np.uint32)
    if legal and "e4m3" in name:
        codes = words[0].view(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x80
        if "normal" in name:
            codes[codes & 0x78 == 0] |= 0x38
    return [w.view(np.uint8)[:size] for w, size in zip(words, sizes)]

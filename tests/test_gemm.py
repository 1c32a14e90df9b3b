"""The products of every format on every variant: float64 within derived bounds, one answer for every path."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from cases import ACTIVATIONS, DEPTHS, ROWS
from ktcy import kernels as registry
from ktcy.config import Activation

F32 = np.float32
paths = pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
# Less those that differ from others in a constant only; test_formats.py has all.
FORMATS = ["int8", "int4", "bf16", *(name for name in oracle.CODED if name not in ("q4_0", "gptq32", "gptq128"))]
every_activation = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=list(ACTIVATIONS))


@pytest.fixture(params=FORMATS, scope="module")
def fmt(request, kernels):
    """Every format, on every variant."""
    return kernels.format(request.param)


def same_on(name, fmt):
    return registry.load(name).format(fmt.name)


def packed(fmt, *matrices):
    """Matrices of one shape packed into alternating blocks."""
    n, k = matrices[0].shape
    blocks = len(matrices) * -(-n // 16)
    weight = np.empty((blocks, fmt.weight_bytes(k)), np.uint8)
    scale = np.empty((blocks, fmt.scale_bytes(k)), np.uint8)
    for i, w in enumerate(matrices):
        to = weight[i :: len(matrices)], scale[i :: len(matrices)]
        if fmt.codes:
            q = oracle.encode(w, fmt.name)
            fmt.pack(q.codes, *to, q.scale, q.zero)
        else:
            fmt.pack(w, *to)
    return weight, scale


def packed_bias(*biases):
    if biases[0] is None:
        return None
    full = np.zeros((-(-len(biases[0]) // 16), len(biases), 16), F32)
    for i, b in enumerate(biases):
        full[:, i] = np.pad(b, (0, -len(b) % 16)).reshape(-1, 16)
    return full.reshape(-1, 16)


def bits(a):
    return np.ascontiguousarray(a).view(np.uint32)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


@st.composite
def products(draw):
    """Rows x, an expert's gate, up and down with or without biases, an activation."""
    n_in, n_out = draw(st.tuples(strategies.sizes, strategies.sizes) | st.sampled_from([(2880, 96), (1408, 17)]))
    rng = np.random.default_rng(draw(strategies.seeds))
    kinds = draw(strategies.kinds)
    gate, up, down = (strategies.fill(rng, kinds, (n_out, n_in)) for _ in range(3))
    biases = [rng.standard_normal(n_out).astype(F32) for _ in range(3)] if draw(st.booleans()) else [None] * 3
    x = strategies.fill(rng, draw(strategies.kinds), (draw(strategies.tokens), n_in), draw(strategies.dtypes))
    return x, oracle.Expert(gate, up, down, *biases), draw(strategies.activations)


@settings(max_examples=40)
@given(case=products())
def test_gate_up_is_within_the_bound(fmt, case):
    """C13 C27: any shape, values and activation; both paths, and AVX2, give the same bits."""
    x, expert, act = case
    weight, scale = packed(fmt, expert.gate, expert.up)
    bias = packed_bias(expert.gate_bias, expert.up_bias)
    got, tiled = (
        fmt.gate_up(x, weight, scale, bias, astuple(act), tiles=tiles) for tiles in (False, True)
    )
    oracle.assert_within(got[:, : len(expert.gate)], *oracle.gate_up(oracle.rows(x, fmt.name), expert, act, fmt.name))
    avx2 = same_on("avx2", fmt).gate_up(x, weight, scale, bias, astuple(act))
    assert (bits(got) == bits(tiled)).all() and (bits(got) == bits(avx2)).all()


@settings(max_examples=40)
@given(case=products(), seed=strategies.seeds)
def test_down_is_within_the_bound(fmt, case, seed):
    """Rows are added where they belong, one fma each in their order, onto what is there."""
    x, expert, _ = case
    n, m = len(expert.down), len(x)
    rng = np.random.default_rng(seed)
    row, route = rng.integers(0, m + 1, m), rng.standard_normal(m).astype(F32)
    weight, scale = packed(fmt, expert.down)
    bias = packed_bias(expert.down_bias)
    start = rng.standard_normal((m + 1, 16 * len(weight))).astype(F32)
    got, tiled, avx2 = start.copy(), start.copy(), start.copy()
    fmt.down(x, weight, scale, bias, row, route, got)
    fmt.down(x, weight, scale, bias, row, route, tiled, tiles=True)
    same_on("avx2", fmt).down(x, weight, scale, bias, row, route, avx2)
    assert (bits(got) == bits(tiled)).all() and (bits(got) == bits(avx2)).all()

    y, e = oracle.product(oracle.rows(x, fmt.name), oracle.weights(expert.down, fmt.name), expert.down_bias, fmt.name)
    want, bound = start[:, :n].astype(np.float64), np.zeros((m + 1, n))
    for i in range(m):
        term = route[i] * y[i]
        want[row[i]] += term
        bound[row[i]] += np.abs(route[i]) * e[i]
        bound[row[i]] += oracle.U * oracle.SLACK * (np.abs(want[row[i]]) + bound[row[i]]) + oracle.FLUSH
    oracle.assert_within(got[:, :n], want, bound)


@paths
@pytest.mark.parametrize("k", [64, 1408, 16384, 131072])
def test_sums_at_the_limits_are_exact(kernels, tiles, k):
    """C26: all values at +-127, in step and against each other; 127 * 127 * 131072 is just below 2^31."""
    fmt = kernels.format("int8")
    rng = np.random.default_rng(k)
    x = np.full((35, k), 127, F32)
    x[1] = -127
    x[2:] *= np.where(rng.random((33, k)) < 0.5, -1, 1)
    w = np.full((32, k), 127, F32)
    w[1] = -127
    w[2:16] *= np.where(rng.random((14, k)) < 0.5, -1, 1)
    w[20] = x[7]
    weight, scale = packed(fmt, w)
    out = np.zeros((35, 32), F32)
    fmt.down(x, weight, scale, None, np.arange(35), np.ones(35), out, tiles=tiles)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    assert (out == exact.astype(F32)).all() and out[7, 20] == out.max() == F32(127 * 127 * k)


@pytest.mark.parametrize("m", ROWS)
def test_every_row_count_gives_the_same_bits_per_row(fmt, m):
    """C27: a row alone, in a batch of any size, through either path."""
    k, n = 200, 40
    x, gate, up = normal(1, 70, k), normal(2, n, k), normal(3, n, k)
    weight, scale = packed(fmt, gate, up)
    whole = fmt.gate_up(x, weight, scale)
    for tiles in (False, True):
        assert (bits(fmt.gate_up(x[:m], weight, scale, tiles=tiles)) == bits(whole[:m])).all()
    down = packed(fmt, normal(4, n, k))
    want, got = np.zeros((70, 48), F32), np.zeros((70, 48), F32)
    for i in range(m):
        fmt.down(x[i : i + 1], *down, None, [i], [0.5], want)
    fmt.down(x[:m], *down, None, np.arange(m), np.full(m, 0.5), got, tiles=m > fmt.few_rows)
    assert (bits(got) == bits(want)).all()


@pytest.mark.parametrize("k", DEPTHS)
def test_every_depth_within_the_bound(fmt, k):
    """C13: K off every multiple, on both paths."""
    x = normal(k, 37, k)
    expert = oracle.Expert(normal(k + 1, 17, k), normal(k + 2, 17, k), None)
    weight, scale = packed(fmt, expert.gate, expert.up)
    for tiles in (False, True):
        got = fmt.gate_up(x, weight, scale, tiles=tiles)
        oracle.assert_within(got[:, :17], *oracle.gate_up(oracle.rows(x, fmt.name), expert, Activation(), fmt.name))


@paths
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 7), max_size=4), m=st.sampled_from(ROWS))
def test_any_partition_gives_the_same_bits(fmt, tiles, cuts, m):
    """Slices of blocks together are the whole, and each writes its own columns only."""
    k, n = 100, 100
    x = normal(5, m, k)
    pair = packed(fmt, normal(6, n, k), normal(7, n, k))
    down = packed(fmt, normal(8, n, k))
    row, route = np.arange(m)[::-1], normal(9, m)
    h, y = fmt.gate_up(x, *pair, tiles=tiles), np.zeros((m, 112), F32)
    fmt.down(x, *down, None, row, route, y, tiles=tiles)
    parts, sums = np.full(h.shape, np.nan, F32), np.zeros(y.shape, F32)
    edges = [0, *sorted(cuts), 7]
    for cut in zip(edges, edges[1:]):
        alone, added = np.full(h.shape, np.nan, F32), np.zeros(y.shape, F32)
        fmt.gate_up(x, *pair, tiles=tiles, blocks=cut, out=alone)
        fmt.down(x, *down, None, row, route, added, tiles=tiles, blocks=cut)
        inside = np.zeros(112, bool)
        inside[16 * cut[0] : 16 * cut[1]] = True
        assert np.isnan(alone[:, ~inside]).all() and (added[:, ~inside] == 0).all()
        parts[:, inside], sums[:, inside] = alone[:, inside], added[:, inside]
    assert (bits(parts) == bits(h)).all() and (bits(sums) == bits(y)).all()


@paths
@given(index=st.lists(st.integers(0, 19), max_size=70))
@settings(max_examples=30)
def test_rows_are_taken_by_index(fmt, tiles, index):
    """Any selection, order and repetition of rows gives the bits that those rows give in place."""
    k, n = 70, 20
    x = normal(10, 20, k)
    pair = packed(fmt, normal(11, n, k), normal(12, n, k))
    whole = fmt.gate_up(x, *pair)
    for source in (x, fmt.quantize(x)):
        assert (bits(fmt.gate_up(source, *pair, index=index, tiles=tiles)) == bits(whole[index])).all()
    down = packed(fmt, normal(13, n, k))
    want, got = (np.zeros((len(index), 32), F32) for _ in range(2))
    for i, j in enumerate(index):
        fmt.down(x[j : j + 1], *down, None, [i], [1.0], want)
    fmt.down(x, *down, None, np.arange(len(index)), np.ones(len(index)), got, index=index, tiles=tiles)
    assert (bits(got) == bits(want)).all()


@paths
@every_activation
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_alone(fmt, tiles, act, bad):
    """C22 C27: it is NaN throughout, and every other row keeps its bits."""
    k, n, m = 130, 40, 37
    x = normal(14, m, k)
    pair, down = packed(fmt, normal(15, n, k), normal(16, n, k)), packed(fmt, normal(17, n, k))
    clean = fmt.gate_up(x, *pair, activation=astuple(act), tiles=tiles)
    y, z = np.zeros((m, 48), F32), np.zeros((m, 48), F32)
    fmt.down(x, *down, None, np.arange(m), np.ones(m), y, tiles=tiles)
    x[[3, 18], [0, 129]] = bad
    lost = np.isin(np.arange(m), (3, 18))
    h = fmt.gate_up(x, *pair, activation=astuple(act), tiles=tiles)
    fmt.down(x, *down, None, np.arange(m), np.ones(m), z, tiles=tiles)
    for got, want in ((h, clean), (z, y)):
        assert np.isnan(got[lost][:, :n]).all() and (bits(got[~lost]) == bits(want[~lost])).all()


@paths
def test_zero_rows_and_weights_give_zero(fmt, tiles):
    """C23: exact zeros, and the bias where there is one."""
    k, n = 66, 18
    x, w = normal(18, 20, k), normal(19, n, k)
    x[4] = 0
    w[5] = 0
    bias = normal(20, n)
    out = np.zeros((2, 20, 32), F32)
    for o, b in zip(out, (None, packed_bias(bias))):
        fmt.down(x, *packed(fmt, w), b, np.arange(20), np.ones(20), o, tiles=tiles)
    assert (out[0, 4] == 0).all() and (out[0, :, 5] == 0).all() and (out[:, :, n:] == 0).all()
    assert (out[1, 4, :n] == bias).all() and (out[1, :, 5] == bias[5]).all()


@pytest.mark.parametrize("act", [*ACTIVATIONS.values(), Activation(alpha=-2.0, offset=0.5)], ids=str)
def test_activation_over_its_whole_range(fmt, act):
    """Gates from -1e38 to 1e38, dense where the functions bend; up at several sizes and signs."""
    near = np.concatenate([np.linspace(-15, 15, 6000), np.linspace(-110, 110, 2001), np.geomspace(1e-36, 1e36, 300)])
    gates = np.concatenate([near, -near[-300:], [0.0, -0.0, 7.0, -7.0, 6.999999]]).astype(F32)[:, None]
    x = np.ones((1, 1), F32)
    for up in (1.0, -3.5, 1e-20, 7.0, 0.0):
        expert = oracle.Expert(gates, np.full_like(gates, up), None)
        got = fmt.gate_up(x, *packed(fmt, expert.gate, expert.up), activation=astuple(act))
        oracle.assert_within(got[:, : len(gates)], *oracle.gate_up(oracle.rows(x, fmt.name), expert, act, fmt.name))


@every_activation
def test_known_values_of_activations(fmt, act):
    """Numbers from the literature, so that oracle and kernel cannot share a mistake."""
    known = {"silu": 0.7310586, "swigluoai": 0.8457958 * 2, "gelu": 0.8413447, "gelu_tanh": 0.8411920}
    [name] = [n for n, a in ACTIVATIONS.items() if a == act]
    one = np.ones((1, 1), F32)
    got = fmt.gate_up(one, *packed(fmt, one, one), activation=astuple(act))[0, 0]
    assert abs(got - known[name]) < 5e-7
    value, _ = oracle.activation(act, one.astype(np.float64), one.astype(np.float64))
    assert abs(value[0, 0] - known[name]) < 2e-7


def test_heavy_tailed_weights_stay_within_the_quantization_bound(fmt):
    """C28: outlier channels in weights and activations; the answer against the original numbers or codes."""
    rng = np.random.default_rng(21)
    gate, up = rng.standard_t(2, (2, 48, 512)).astype(F32)
    x = normal(22, 40, 512)
    x[:, 77] *= 60
    gate[:, 200] *= 30
    expert = oracle.Expert(gate, up, None)
    exact = x.astype(np.float64), np.zeros(x.shape)
    got = fmt.gate_up(x, *packed(fmt, gate, up), tiles=True)
    form = fmt.name if fmt.codes else "exact"
    oracle.assert_within(got, *oracle.gate_up(oracle.exact_rounding(*exact), expert, Activation(), form))


def test_arguments_that_do_not_fit(fmt):
    x = normal(23, 3, 64)
    weight, scale = packed(fmt, normal(24, 32, 64))
    out = np.zeros((3, 32), F32)
    for arguments, message in (
        (dict(index=[3]), "index must be"),
        (dict(index=[-1]), "index must be"),
        (dict(blocks=(0, 3)), "blocks 0 to 3"),
        (dict(bias=np.zeros(32, F32)), "bias must be"),
        (dict(row=[0, 1, 3]), "row must be"),
        (dict(route=[1.0]), "route must be"),
        (dict(out=np.zeros((3, 31), F32)), "out must be"),
        (dict(weight=weight[:, :-1]), "weight must be"),
        (dict(x=normal(25, 3, 65)), "weight must be"),
    ):
        full = dict(x=x, weight=weight, scale=scale, bias=None, row=[0, 1, 2], route=[1.0] * 3, out=out)
        with pytest.raises(ValueError, match=message):
            fmt.down(**{**full, **arguments})
    assert not out.any()

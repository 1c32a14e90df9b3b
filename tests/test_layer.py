"""The whole layer of every variant: float64 within derived bounds, and the same bits however the work is cut."""

import ctypes
import dataclasses
import functools
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import oracle
import pytest
import strategies
from cases import ACTIVATIONS, ROWS
from hypothesis import given, settings
from hypothesis import strategies as st

import ktcy.moe
from ktcy import KTMoEWrapper
from ktcy.config import Activation, LayerShape
from ktcy.runtime import Pool, topology
from ktcy.runtime.queue import CPUInfer

F32 = np.float32
THREADS = (1, 2, 3, 4)
every_activation = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=list(ACTIVATIONS))


@pytest.fixture(scope="session")
def pools():
    """CPUInfers of 1 to 4 threads, on any machine: a topology that lists a CPU four times gives it four threads."""
    machine = topology.read()
    crowd = dataclasses.replace(machine, cpus=machine.cpus * 4, quota=None)
    made = {n: CPUInfer(Pool(n, crowd)) for n in THREADS}
    assert [made[n].threads for n in THREADS] == list(THREADS)
    yield made
    for infer in made.values():
        infer.close()


def loaded(layer, kernels="avx2", pool=None, **options):
    """A `strategies.Layer` as users load it."""
    moe = KTMoEWrapper(
        3,
        *layer.shape.__dict__.values(),
        activation=layer.activation,
        variant=getattr(kernels, "name", kernels),
        cpu_infer=pool,
        **options,
    )
    biases = {name: getattr(layer, name) for name in ("gate_bias", "up_bias", "down_bias")}
    moe.load_weights_from_tensors(layer.gate, layer.up, layer.down, **biases)
    return moe


def forward(moe, layer, rows=slice(None)):
    return moe.forward(layer.x[rows], layer.ids[rows], layer.route[rows])


def bits(a):
    return np.ascontiguousarray(a).view(f"u{a.itemsize}")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and (bits(a) == bits(b)).all()


def assert_within(got, layer, form="int8"):
    out, bound = layer.reference(form)
    oracle.assert_within(got, out, oracle.stored(out, bound, got.dtype))


@functools.lru_cache(None)
def batch():
    """150 tokens of 8 experts with biases: threads, tiles and rows are all in use."""
    shape = LayerShape(8, 4, 300, 200)
    rng = np.random.default_rng(1)
    return strategies.layer(rng, shape, Activation(), 150, dtype=ml_dtypes.bfloat16, bias=True, route="padded")


@functools.lru_cache(None)
def one_by_one():
    """The answer of `batch` on AVX2, one thread, one token a call."""
    with CPUInfer(1) as pool:
        moe = loaded(batch(), pool=pool)
        return np.concatenate([forward(moe, batch(), slice(t, t + 1)) for t in range(len(batch().x))])


@functools.lru_cache(None)
def loaded_batch(name, pool):
    return loaded(batch(), name, pool)


# Against float64


@settings(max_examples=25)
@given(case=strategies.layers(), threads=st.sampled_from(THREADS))
def test_any_layer_is_within_the_bound(kernels, pools, case, threads):
    """C13 C20 C21 C24 C26: any sizes, values, dtypes, activation and routing; AVX2 gives the same bits."""
    got = forward(loaded(case, kernels, pools[threads]), case)
    assert got.dtype == case.x.dtype
    assert_within(got, case)
    assert same(got, forward(loaded(case, pool=pools[1]), case))


@functools.lru_cache(None)
def real_sizes(hidden, inter):
    shape = LayerShape(2, 2, hidden, inter)
    layer = strategies.layer(np.random.default_rng(hidden + inter), shape, Activation(), 40, dtype=ml_dtypes.bfloat16)
    return layer, layer.reference()


@pytest.mark.parametrize("hidden, inter", [(2880, 96), (96, 2880), (1408, 704), (704, 1408), (768, 2880), (96, 768)])
def test_sizes_of_real_models(kernels, pools, hidden, inter):
    """C13: off every multiple of a block, with one and with three threads, few tokens and many."""
    layer, (out, bound) = real_sizes(hidden, inter)
    for threads in (1, 3):
        moe = loaded(layer, kernels, pools[threads])
        got = forward(moe, layer)
        oracle.assert_within(got, out, oracle.stored(out, bound, got.dtype))
        assert same(forward(moe, layer, slice(0, 3)), got[:3])


@pytest.mark.parametrize("route", strategies.ROUTINGS)
def test_512_experts_top_16(kernels, pools, route):
    layer = strategies.layer(
        np.random.default_rng(512), LayerShape(512, 16, 40, 24), Activation(), 70, route=route, ids_dtype=np.int32
    )
    assert_within(forward(loaded(layer, kernels, pools[2]), layer), layer)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@every_activation
def test_every_activation(kernels, pools, act, bias):
    """Gates and ups far past the clamp of swigluoai and into the tails of gelu."""
    layer = strategies.layer(np.random.default_rng(7), LayerShape(5, 3, 70, 50), act, 66, bias=bias)
    layer.gate[1:3] *= 3
    layer.x[::5] /= 1000
    assert_within(forward(loaded(layer, kernels, pools[2]), layer), layer)


@pytest.mark.parametrize("tokens", [2, 40])
def test_heavy_tails_and_outlier_channels(kernels, pools, tokens):
    """C28: the error against the original numbers stays within what the scheme may do."""
    rng = np.random.default_rng(28)
    layer = strategies.layer(rng, LayerShape(4, 2, 256, 128), Activation(), tokens, weight_kinds=("spiky",))
    layer.x[:, 77] *= 60
    layer.gate[:, :, 200] *= 30
    assert_within(forward(loaded(layer, kernels, pools[2]), layer), layer, "exact")


@pytest.mark.parametrize("tokens", [1, 40])
def test_values_at_the_ends_of_int8(kernels, pools, tokens):
    """C26: all values at +-127 and of one sign, so that 16-bit sums would saturate."""
    rng = np.random.default_rng(26)
    layer = strategies.layer(rng, LayerShape(2, 2, 2880, 320), Activation(), tokens)
    for array in (layer.x, layer.gate, layer.up, layer.down):
        array[:] = np.where(rng.random(array.shape) < 0.5, -127, 127)
    layer.x[0] = layer.gate[0] = layer.up[1, :5] = layer.down[0, ::2] = 127
    layer.gate[1, 0] = -127
    assert_within(forward(loaded(layer, kernels, pools[2]), layer), layer)


def test_tiny_and_subnormal_rows_stay_finite(kernels, pools):
    """C21 C24: rows of 1e-6 in float16, weights down to subnormals; within the bound, never NaN."""
    rng = np.random.default_rng(24)
    layer = strategies.layer(rng, LayerShape(6, 3, 80, 48), Activation(), 30)
    layer = layer._replace(x=(layer.x * 1e-6).astype(np.float16))
    layer.gate[1], layer.up[2], layer.down[3] = (1e-23 * w[0] for w in (layer.gate, layer.up, layer.down))
    layer.gate[4, ::3], layer.down[5, 1::2] = 1e-40, np.finfo(F32).smallest_subnormal
    for dtype in (np.float16, np.float32):
        layer = layer._replace(x=layer.x.astype(dtype))
        got = forward(loaded(layer, kernels, pools[2]), layer)
        assert np.isfinite(got).all()
        assert_within(got, layer)


# Zero, nothing, not a number


def test_zero_tokens_first_and_later(kernels, pools):
    """C55: an empty batch as the very first call, and between others."""
    moe, layer = loaded(batch(), kernels, pools[2]), batch()
    for _ in range(2):
        got = forward(moe, layer, slice(0))
        assert got.shape == (0, 300) and got.dtype == layer.x.dtype
        assert same(forward(moe, layer, slice(0, 40)), one_by_one()[:40])


def test_zeros_contribute_exactly_nothing(kernels, pools):
    """C23: zero tokens, rows and experts."""
    layer = strategies.layer(np.random.default_rng(23), LayerShape(4, 2, 72, 40), Activation(), 40)
    layer.x[[3, 20]] = 0
    layer.gate[1] = layer.up[1] = layer.down[1] = 0
    layer.down[:, 5] = 0
    layer.gate[0, :3] = layer.up[2, 7] = 0
    moe = loaded(layer, kernels, pools[2])
    got = forward(moe, layer)
    assert_within(got, layer)
    assert (got[[3, 20]] == 0).all() and (got[:, 5] == 0).all()
    without = np.where(layer.ids == 1, -1, layer.ids)
    assert (got == moe.forward(layer.x, without, layer.route)).all()


def test_padding_is_zero_and_changes_nobody(kernels, pools):
    """C52: slots of -1 add nothing, rows of only -1 are exactly zero, whatever the output held and the row holds."""
    layer, moe = batch(), loaded(batch(), kernels, pools[2])
    ids, x = layer.ids.copy(), layer.x.copy()
    ids[::3] = -1
    x[::6] = np.nan
    kept = [a.copy() for a in (x, ids, layer.route)]
    out = np.full(x.shape, 7, x.dtype)
    moe.forward(x, ids, layer.route, out=out)
    assert (bits(out[::3]) == 0).all()
    others = np.arange(150) % 3 > 0
    assert same(out[others], one_by_one()[others])
    assert all(same(a, b) for a, b in zip((x, ids, layer.route), kept))


def test_the_weight_of_padding_does_not_matter(kernels, pools):
    """C52: routers leave anything beside an id of -1."""
    layer, moe = batch(), loaded(batch(), kernels, pools[2])
    route = np.where(layer.ids < 0, F32("nan"), layer.route)
    assert same(moe.forward(layer.x, layer.ids, route), one_by_one())


def test_repeated_experts_add_up(kernels, pools):
    """C54: the same expert twice with a half is that expert once with one, to the bit."""
    layer, moe = batch(), loaded(batch(), kernels, pools[2])
    ids, route = np.full((150, 4), -1), np.full((150, 4), F32(0.5))
    ids[:, 0] = ids[:, 3] = np.arange(150) % 8
    twice = moe.forward(layer.x, ids, route)
    ids[:, 3] = -1
    assert same(twice, moe.forward(layer.x, ids, 2 * route))


@pytest.mark.parametrize("dtype", strategies.DTYPES.values(), ids=list(strategies.DTYPES))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_alone(kernels, pools, bad, dtype):
    """C27: all of it is NaN, and every other token keeps its bits."""
    layer = strategies.layer(np.random.default_rng(22), LayerShape(4, 2, 130, 40), Activation(), 70, dtype=dtype)
    moe = loaded(layer, kernels, pools[2])
    clean = forward(moe, layer)
    layer.x[[0, 33, 69], [129, 64, 0]] = bad
    got = forward(moe, layer)
    lost = np.isin(np.arange(70), (0, 33, 69))
    assert np.isnan(got[lost]).all() and same(got[~lost], clean[~lost])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_route_that_is_not_finite_stays_alone(kernels, pools, bad):
    layer, moe = batch(), loaded(batch(), kernels, pools[2])
    ids, route = layer.ids.copy(), layer.route.copy()
    ids[60, 2], route[60, 2] = 1, bad
    got = moe.forward(layer.x, ids, route)
    others = np.arange(150) != 60
    assert not np.isfinite(got[60]).any() and same(got[others], one_by_one()[others])


@every_activation
def test_overflow_stays_with_its_token(kernels, pools, act):
    """A product or an activation past float32 makes that token NaN; huge weights alone do no harm."""
    layer = strategies.layer(np.random.default_rng(38), LayerShape(4, 2, 96, 80), act, 50)
    layer.gate[2] *= F32(1e25)
    layer.up[2] *= F32(1e30)
    layer.x[:] *= F32(1e-20)
    moe = loaded(layer, kernels, pools[2])
    clean = forward(moe, layer)
    layer.x[[4, 40]] *= F32(1e37)
    layer.ids[[4, 40], 0] = 2
    got = forward(moe, layer)
    others = ~np.isin(np.arange(50), (4, 40))
    assert same(got[others], clean[others])
    assert np.isnan(got[[4, 40]]).all()


def test_overflow_of_the_last_sum_or_the_callers_type(kernels, pools):
    """Infinite or NaN where the answer does not fit, and right where it does."""
    layer = strategies.layer(np.random.default_rng(39), LayerShape(4, 2, 96, 80), Activation(), 50)
    layer.route[7] = 3e38
    moe = loaded(layer, kernels, pools[2])
    got = forward(moe, layer)
    assert not np.isfinite(got[7]).all()
    others = np.arange(50) != 7
    out, bound = layer.reference()
    oracle.assert_within(got[others], out[others], bound[others])
    layer = layer._replace(x=(1000 * layer.x).astype(np.float16))
    layer.route[:] = 1
    got = forward(moe, layer)
    assert np.isinf(got).any()
    assert_within(got, layer)


# The same bits


@pytest.mark.parametrize("threads", THREADS)
def test_every_variant_and_thread_count_gives_the_same_bits(kernels, pools, threads):
    """C26 C29: a whole batch on any of them is the tokens one by one on AVX2."""
    assert same(forward(loaded_batch(kernels.name, pools[threads]), batch()), one_by_one())


@pytest.mark.parametrize("count", (1, 2, 5, 8))
def test_every_pool_count_gives_the_same_bits(count):
    """C12: 320 = 2560 / 8 missed a block size elsewhere; here the intermediate size need not divide by anything."""
    layer = strategies.layer(np.random.default_rng(12), LayerShape(2, 2, 96, 323), Activation(), 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = forward(loaded(layer, threadpool_count=count, cpuinfer_threads=count + 1), layer)
    assert_within(got, layer)
    assert same(got, forward(loaded(layer, cpuinfer_threads=1), layer))


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 150), max_size=6), threads=st.sampled_from(THREADS))
def test_any_split_of_the_batch_gives_the_same_bits(kernels, pools, cuts, threads):
    """C18 C19: any sequence of batch sizes on one layer."""
    moe = loaded_batch(kernels.name, pools[threads])
    edges = [0, *sorted(cuts), 150]
    parts = [forward(moe, batch(), slice(*cut)) for cut in zip(edges, edges[1:])]
    assert same(np.concatenate(parts), one_by_one())


@settings(max_examples=25)
@given(rows=st.lists(st.integers(0, 149), max_size=100))
def test_any_order_and_repetition_of_tokens_gives_the_same_bits(kernels, pools, rows):
    """C27: what else is in the batch, and where a token stands, does not matter."""
    assert same(forward(loaded_batch(kernels.name, pools[2]), batch(), rows), one_by_one()[rows])


@settings(max_examples=10)
@given(seed=strategies.seeds)
def test_any_order_of_the_slots_gives_the_same_bits(kernels, pools, seed):
    """Experts are added in ascending order, so the order in which a router lists them does not matter."""
    layer = batch()
    ids = strategies.routing(np.random.default_rng(0), "distinct", 150, 8, 4)[0]
    order = np.argsort(np.random.default_rng(seed).random((150, 4)), axis=1)
    moe = loaded_batch(kernels.name, pools[2])
    shuffled = (np.take_along_axis(a, order, axis=1) for a in (ids, layer.route))
    assert same(moe.forward(layer.x, *shuffled), moe.forward(layer.x, ids, layer.route))


@functools.lru_cache(None)
def all_experts():
    """Every expert has every token: its row count is the batch's."""
    layer = strategies.layer(np.random.default_rng(27), LayerShape(3, 3, 130, 50), Activation(), max(ROWS))
    return layer, forward(loaded(layer), layer)


@pytest.mark.parametrize("tokens", ROWS)
def test_every_token_count_gives_the_same_bits(kernels, pools, tokens):
    """C27 C19: from none to past each switch of paths."""
    layer, want = all_experts()
    moe = loaded(layer, kernels, pools[2])
    assert same(forward(moe, layer, slice(tokens)), want[:tokens])
    assert same(forward(moe, layer, slice(70 - tokens, None)), want[70 - tokens :])


@pytest.mark.parametrize("threads", THREADS)
def test_very_many_tokens_give_the_same_bits(kernels, pools, threads):
    """C18 C27: panels of rows; one expert gets no row, others a few."""
    tokens = 2100
    rng = np.random.default_rng(tokens)
    layer = strategies.layer(rng, LayerShape(7, 2, 100, 40), Activation(), tokens, bias=True)
    layer.ids[:] = rng.choice([-1, 1, 2, 3, 4], (tokens, 2), p=[0.1, 0.4, 0.3, 0.1, 0.1])
    layer.ids[[3, 1023], 0] = 5
    layer.ids[1100:1118, 1] = 6
    moe = loaded(layer, kernels, pools[threads])
    pieces = [forward(moe, layer, slice(at, at + 250)) for at in range(0, tokens, 250)]
    assert same(forward(moe, layer), np.concatenate(pieces))


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("experts", [1, 5])
@pytest.mark.parametrize("tokens", [40, 100, 2000])
def test_few_tokens_among_padding_give_the_same_bits(kernels, pools, tokens, experts, threads):
    """C18 C52: one loop for few slots, however many tokens have none; so many that panels were laid out."""
    layer = strategies.layer(np.random.default_rng(tokens), LayerShape(5, 1, 600, 40), Activation(), tokens)
    every = -(-tokens // 8)
    layer.ids[:] = -1
    layer.ids[::every, 0] = np.arange(8) % experts
    moe = loaded(layer, kernels, pools[threads])
    pools[threads].pool.release()
    got = forward(moe, layer)
    assert not got[np.arange(tokens) % every > 0].any()
    assert same(got[::every], np.concatenate([forward(moe, layer, slice(at, at + 1)) for at in range(0, tokens, every)]))


@settings(max_examples=10)
@given(
    tokens=st.integers(1, 900),
    padding=st.sampled_from([0, 0.5, 0.97, 0.995]),
    top_k=st.integers(1, 4),
    threads=st.sampled_from(THREADS),
    released=st.booleans(),
)
def test_any_share_of_padding_gives_the_bits_of_the_pieces(
    kernels, pools, tokens, padding, top_k, threads, released
):
    """C18 C52: whichever of the layer's ways the tokens and their slots choose, panels among them."""
    rng = np.random.default_rng(tokens)
    layer = strategies.layer(rng, LayerShape(5, top_k, 70, 40), Activation(), tokens)
    layer.ids[rng.random(layer.ids.shape) < padding] = -1
    moe = loaded(layer, kernels, pools[threads])
    if released:
        pools[threads].pool.release()
    got = forward(moe, layer)
    assert same(got, np.concatenate([forward(moe, layer, slice(at, at + 60)) for at in range(0, tokens, 60)]))


@settings(max_examples=10)
@given(counts=st.lists(st.integers(0, 150), min_size=1, max_size=6))
def test_no_call_leaves_anything_for_the_next(kernels, pools, counts):
    """C19: after any other batches, scratch memory given back or not, a call gives the bits of a fresh layer."""
    moe = loaded_batch(kernels.name, pools[3])
    for n in counts:
        assert same(forward(moe, batch(), slice(n)), one_by_one()[:n])
        if n % 2:
            pools[3].pool.release()


# Long inputs


def test_long_inputs_are_cut_into_chunks(pools):
    """C18: more tokens than one pass takes give the bits of the pieces; an id's error counts from the start."""
    tokens = 2 * ktcy.moe.CHUNK + 5
    layer = strategies.layer(np.random.default_rng(18), LayerShape(4, 2, 16, 16), Activation(), tokens)
    moe = loaded(layer, pool=pools[2])
    got = forward(moe, layer)
    pieces = [forward(moe, layer, slice(at, at + 1000)) for at in range(0, tokens, 1000)]
    assert same(got, np.concatenate(pieces))
    layer.ids[8194, 1] = 4
    with pytest.raises(ValueError, match=r"topk_ids\[8194, 1\] is 4; ids run from 0 to 3"):
        forward(moe, layer)


@pytest.mark.parametrize("chunk", [1, 7, 149, 150])
def test_any_chunk_gives_the_same_bits(kernels, pools, monkeypatch, chunk):
    """C18"""
    monkeypatch.setattr(ktcy.moe, "CHUNK", chunk)
    assert same(forward(loaded_batch(kernels.name, pools[2]), batch()), one_by_one())


# The caller's floating-point state

MXCSR = slice(28, 32)
FENV = 32


def mxcsr(new=None):
    """The control bits of this thread's MXCSR, after setting them to ``new``. fenv_t as in glibc for x86-64."""
    libm, env = ctypes.CDLL("libm.so.6"), ctypes.create_string_buffer(FENV)
    assert libm.fegetenv(env) == 0
    if new is not None:
        env[MXCSR] = new.to_bytes(4, "little")
        assert libm.fesetenv(env) == 0
    return int.from_bytes(env.raw[MXCSR], "little") & 0xFFC0


@pytest.mark.parametrize("state", [0x1F80, 0x9FC0, 0x1FC0, 0x9F80, 0x5F80, 0x7F80], ids=hex)
def test_the_callers_float_state_is_kept_and_does_not_matter(kernels, pools, state):
    """C25: FTZ, DAZ and rounding as the caller set them, and the same bits whatever they are."""
    moes = [loaded_batch(kernels.name, pools[n]) for n in (1, 2)]
    before = mxcsr()
    try:
        mxcsr(state)
        found = [(forward(moe, batch()), mxcsr()) for moe in moes]
    finally:
        mxcsr(before)
    assert all(same(got, one_by_one()) and after == state for got, after in found)


def test_subnormals_survive_import_and_forward():
    """C25: in a process of its own, as a user meets it; the main thread and another one."""
    code = """
import threading, numpy as np
tiny = np.array([1e-310, 5e-324]), np.array([1e-40], np.float32)
def check(when):
    assert 5e-324 > 0 and all((t * t.dtype.type(1) > 0).all() for t in tiny), when
check("before")
import ktcy
check("after import")
moe = ktcy.KTMoEWrapper(0, 2, 2, 256, 256, cpuinfer_threads=1)
check("after the pool started")
moe.load_weights_from_tensors(*np.ones((3, 2, 256, 256), np.float32))
check("after loading")
def forward():
    moe.forward(np.ones((300, 256), np.float32), np.tile([0, 1], (300, 1)), np.ones((300, 2), np.float32))
    check("after forward")
forward()
failed = []
threading.excepthook = failed.append
thread = threading.Thread(target=forward)
thread.start()
thread.join()
assert not failed, failed[0].exc_value
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr

"""Arrays that other threads change while a forward reads them: garbage numbers or an error, never a crash."""

import threading

import numpy as np
import pytest
import strategies

from ktcy import CPUInfer
from ktcy.config import Activation, LayerShape
from ktcy.moe import MoE
from ktcy.runtime import Pool
from ktcy.weights.packed import PackedLayer

SHAPE = LayerShape(7, 3, 64, 48)
ROUNDS = 300


def layer_of(kernels, form, pool, tokens):
    layer = strategies.layer(np.random.default_rng(0), SHAPE, Activation(), tokens)
    fmt = kernels.format(form)
    packed = PackedLayer.pack(fmt, layer.gate, layer.up, layer.down, shape=SHAPE, activation=layer.activation)
    return MoE(fmt, packed, pool, range(SHAPE.num_experts)), layer


class Changing:
    """A thread that writes one of a few contents after the other into an array, all the time."""

    def __init__(self, array, contents):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(array, contents))

    def run(self, array, contents):
        while not self.over.is_set():
            for content in contents:
                array[...] = content

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *exc):
        self.over.set()
        self.thread.join()


def contents(name, rng, shape):
    if name == "ids":
        return [rng.integers(-1, SHAPE.num_experts, shape), 2**40, -1, rng.integers(-(2**62), 2**62, shape), 0]
    return [rng.standard_normal(shape), np.nan, 3e38, 0, np.inf]


@pytest.mark.parametrize("form", ["int8", "bf16"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("name", ["ids", "weights", "x", "out"])
def test_arrays_that_change_during_forwards(form, tokens, name):
    from ktcy import kernels

    rng = np.random.default_rng(1)
    with Pool(2) as pool, CPUInfer(2) as infer:
        for threads, run in ((pool, None), (infer.pool, infer)):
            moe, layer = layer_of(kernels.default(), form, threads, tokens)
            arrays = dict(x=layer.x, ids=layer.ids, weights=layer.route, out=np.empty_like(layer.x))
            want = np.empty_like(layer.x)
            moe.forward(*list(arrays.values())[:3], want)
            kept = arrays[name].copy()
            task = moe.task(*arrays.values())
            with np.errstate(all="ignore"), Changing(arrays[name], contents(name, rng, kept.shape)):
                for _ in range(ROUNDS // 2):
                    try:
                        if run is None:
                            moe.forward(*arrays.values())
                        else:
                            run.submit(task)
                            run.sync()
                    except ValueError as error:
                        assert name == "ids" and "ids run from 0 to 6" in str(error)
            arrays[name][...] = kept
            moe.forward(*arrays.values())
            assert (arrays["out"] == want).all()


def test_a_refused_id_is_named_as_it_was_read():
    """The message holds the value that was refused, not what the caller's array holds by then."""
    from ktcy import kernels

    with Pool(1) as pool:
        moe, layer = layer_of(kernels.default(), "int8", pool, 4)
        ids = layer.ids.copy()
        with Changing(ids[:1, :1], [0, 99]):
            for _ in range(ROUNDS):
                try:
                    moe.forward(layer.x, ids, layer.route, np.empty_like(layer.x))
                except ValueError as error:
                    assert "topk_ids[0, 0] is 99;" in str(error)


def test_ids_that_ask_for_more_room_than_was_measured():
    """From padding to every place in use: the block grows after the ids were read, and they are read again."""
    from ktcy import kernels

    with Pool(2) as pool:
        moe, layer = layer_of(kernels.default(), "int8", pool, 4000)
        want, out = np.empty_like(layer.x), np.empty_like(layer.x)
        moe.forward(layer.x, layer.ids, layer.route, want)
        for _ in range(20):
            ids = np.full_like(layer.ids, -1)
            pool.release()
            with Changing(ids, [layer.ids, -1]):
                moe.forward(layer.x, ids, layer.route, out)
        pool.release()
        moe.forward(layer.x, layer.ids, layer.route, out)
        assert (out == want).all()

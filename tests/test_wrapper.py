"""`KTMoEWrapper` as users and engines call it: signatures, arrays of any kind, bad input, and its life."""

import copy
import functools
import inspect
import json
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc
import warnings
from dataclasses import astuple

import ml_dtypes
import numpy as np
import oracle
import pytest
import strategies
import torch

import ktcy.moe
from ktcy import Activation, CPUInfer, KTMoEWrapper
from ktcy.config import LayerShape
from ktcy.runtime import topology

F32 = np.float32
BF16 = ml_dtypes.bfloat16
E, K, H, I, T = 6, 3, 96, 40, 12  # noqa: E741
every_dtype = pytest.mark.parametrize("dtype", strategies.DTYPES.values(), ids=list(strategies.DTYPES))
REQUIRED = "layer_idx", "num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size"


def wrapper(**options):
    sizes = dict(zip(REQUIRED, (3, E, K, H, I)))
    return KTMoEWrapper(**{**sizes, "cpuinfer_threads": 2, **options})


def case(dtype=F32, **options):
    return strategies.layer(np.random.default_rng(3), LayerShape(E, K, H, I), Activation(), T, dtype=dtype, **options)


def loaded(layer=None, **options):
    layer = layer or case()
    moe = wrapper(**options)
    biases = {name: getattr(layer, name) for name in ("gate_bias", "up_bias", "down_bias")}
    moe.load_weights_from_tensors(layer.gate, layer.up, layer.down, **biases)
    return moe


@functools.lru_cache(None)
def answer(dtype=F32, bias=False):
    layer = case(dtype, bias=bias)
    return loaded(layer).forward(layer.x, layer.ids, layer.route)


@pytest.fixture(scope="module")
def moe():
    return loaded()


@pytest.fixture
def inputs():
    layer = case()
    return dict(hidden_states=layer.x, topk_ids=layer.ids, topk_weights=layer.route)


def array(value):
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(BF16)
    return np.asarray(value)


def same(a, b):
    a, b = array(a), array(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def tensor(array):
    """A torch tensor of the same values."""
    if array.dtype == BF16:
        return torch.from_numpy(array.astype(F32)).bfloat16()
    return torch.from_numpy(array.copy())


class Dlpack:
    """What a library that ktcy does not know hands over."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# Signatures


def test_signatures_that_peers_call():
    """C58: names, order and defaults; those behind the star are ours to move, their names are not."""
    assert str(inspect.signature(KTMoEWrapper)) == (
        "(layer_idx, num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size, gpu_experts_mask=None, "
        "cpuinfer_threads=None, threadpool_count=None, weight_path=None, chunked_prefill_size=None, cpu_save=False, "
        "max_deferred_experts_per_token=None, method='AMXINT8', numa_nodes=None, mode='inference', num_gpu_experts=0, "
        "*, swiglu_limit=0.0, swiglu_alpha=0.0, activation=None, variant=None, cpu_infer=None)"
    )
    assert str(inspect.signature(KTMoEWrapper.load_weights)) == (
        "(self, physical_to_logical_map_cpu=None, *, prefault=False, lock=False)"
    )
    assert str(inspect.signature(KTMoEWrapper.load_weights_from_tensors)) == (
        "(self, gate_proj, up_proj, down_proj, physical_to_logical_map_cpu=None, *, "
        "gate_bias=None, up_bias=None, down_bias=None)"
    )
    assert str(inspect.signature(KTMoEWrapper.forward)) == (
        "(self, hidden_states, topk_ids, topk_weights, cuda_stream=None, *, out=None)"
    )


def test_constructors_of_released_engines(tmp_path):
    """C58: SGLang upstream passes a count and no mask, its fork a mask and no count."""
    common = dict(
        zip(REQUIRED, (0, 8, 2, 64, 32)),
        cpuinfer_threads=2,
        threadpool_count=1,
        weight_path=str(tmp_path),
        chunked_prefill_size=512,
        method="AMXINT8",
        max_deferred_experts_per_token=0,
    )
    with pytest.warns(UserWarning, match="2 experts were asked for on the GPU"):
        upstream = KTMoEWrapper(**common, num_gpu_experts=2)
    with pytest.warns(UserWarning, match="2 experts"):
        mask = torch.arange(8) < 2
        fork = KTMoEWrapper(**common, gpu_experts_mask=mask, numa_nodes=[0], swiglu_limit=0.0, swiglu_alpha=0.0)
    for moe in (upstream, fork):
        assert moe.num_gpu_experts == 2 and moe.gpu_experts_mask.tolist() == mask.tolist()
    KTMoEWrapper(**common, gpu_experts_mask=None)
    assert fork.weight_path == str(tmp_path) and fork.method == "AMXINT8" and fork.layer_idx == 0


def test_unknown_options_are_refused():
    """C46: a mistyped option is not ignored."""
    with pytest.raises(TypeError, match="cpu_threads"):
        wrapper(cpu_threads=2)


@pytest.mark.parametrize("name", ["AMXINT8", "MOE_INT8", "int8"])
def test_methods_are_one_format(name):
    moe = loaded(method=name)
    assert moe.packed.format == "int8" and moe.method == name
    layer = case()
    assert same(moe.forward(layer.x, layer.ids, layer.route), answer())


def test_unknown_method_lists_all():
    for name in ("int5", "AMXINT5", "", None):
        with pytest.raises(ValueError, match=f"{name!r}; the methods are AMXINT8, MOE_INT8, int8, AMXINT4.*, gguf, auto"):
            wrapper(method=name)


def test_what_a_layer_says_of_itself(moe):
    """C08 C46: variant and threads really in use."""
    assert (moe.num_experts, moe.num_experts_per_tok, moe.hidden_size, moe.moe_intermediate_size) == (E, K, H, I)
    assert moe.variant == ktcy.__cpu_variant__ and moe.threads == 2
    assert all(word in repr(moe) for word in (moe.variant, "2 threads", "layer 3", f"{E} experts", "int8", "loaded"))
    twin = wrapper(variant="amx_emu")
    assert twin.variant == "amx_emu" and "not loaded" in repr(twin) and twin.packed is None


def test_one_pool_for_all_layers_of_so_many_threads():
    with CPUInfer(1) as infer:
        first, second, own = wrapper(), wrapper(layer_idx=4), wrapper(cpu_infer=infer)
        assert first.pool is second.pool and own.pool is infer.pool and own.threads == 1
    assert wrapper(cpuinfer_threads=None).threads == topology.default_threads(topology.read())


# Arrays of any kind


@every_dtype
def test_numpy_in_numpy_out(dtype):
    """C20"""
    layer = case(dtype)
    got = loaded(layer).forward(layer.x, layer.ids, layer.route)
    assert type(got) is np.ndarray and got.dtype == dtype and got.shape == (T, H)
    out, bound = layer.reference()
    oracle.assert_within(got, out, oracle.stored(out, bound, dtype))


@every_dtype
def test_torch_in_torch_out(dtype):
    """C20: the same bits as numpy; tensors that require gradients, and arguments of mixed kinds, too."""
    layer = case(dtype, bias=True)
    want = answer(dtype, bias=True)
    stacks = layer.gate, layer.up, layer.down
    biases = {name: tensor(getattr(layer, name)) for name in ("gate_bias", "up_bias", "down_bias")}
    moe = wrapper()
    moe.load_weights_from_tensors(*(torch.nn.Parameter(tensor(a)) for a in stacks), **biases)
    x, ids, route = (tensor(a) for a in (layer.x, layer.ids, layer.route))
    for got in (
        moe.forward(x, ids, route),
        moe.forward(x.clone().requires_grad_(), ids.int(), route.clone().requires_grad_()),
        moe.forward(x, layer.ids, layer.route),
    ):
        assert type(got) is torch.Tensor and got.dtype == x.dtype and not got.requires_grad and same(got, want)
    got = moe.forward(layer.x, ids, route)
    assert type(got) is np.ndarray and same(got, want)
    with torch.inference_mode():
        assert same(moe.forward(tensor(layer.x), ids, route), want)


@every_dtype
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_weights_of_any_dtype(dtype, kind):
    """C20: float32, float16 and bfloat16 weights and biases."""
    layer = case(weight_dtype=dtype, bias=True)
    arrays = layer.gate, layer.up, layer.down, *(b.astype(dtype) for b in layer[5:8])
    layer = layer._replace(**dict(zip(("gate_bias", "up_bias", "down_bias"), arrays[3:])))
    gate, up, down, *biases = arrays if kind == "numpy" else map(tensor, arrays)
    moe = wrapper()
    moe.load_weights_from_tensors(gate, up, down, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2])
    oracle.assert_within(moe.forward(layer.x, layer.ids, layer.route), *layer.reference())


def test_dlpack_in_numpy_out(moe, inputs):
    layer = case()
    from_dlpack = wrapper()
    from_dlpack.load_weights_from_tensors(*map(Dlpack, (layer.gate, layer.up, layer.down)))
    for m in (moe, from_dlpack):
        got = m.forward(*map(Dlpack, inputs.values()))
        assert type(got) is np.ndarray and same(got, answer())
    with pytest.raises(TypeError, match="hidden_states cannot be read through DLPack"):
        moe.forward(Dlpack(tensor(layer.x.astype(BF16))), *list(inputs.values())[1:])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_of_both_widths(moe, inputs, dtype):
    """C17"""
    inputs["topk_ids"] = inputs["topk_ids"].astype(dtype)
    assert same(moe.forward(**inputs), answer())


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BF16, ">f4"], ids=str)
def test_routing_weights_are_converted(moe, inputs, dtype):
    inputs["topk_weights"] = inputs["topk_weights"].astype(dtype)
    want = moe.forward(**{**inputs, "topk_weights": inputs["topk_weights"].astype(F32)})
    assert same(moe.forward(**inputs), want)


@pytest.mark.parametrize("view", list(strategies.views(np.eye(2))))
@every_dtype
def test_strided_inputs_give_the_same_bits(dtype, view):
    """C14: hidden states, ids and weights as slices of wider buffers, transposed, reversed, at odd addresses."""
    layer = case(dtype)
    moe = loaded(layer)
    x, ids, route = (strategies.views(a)[view] for a in (layer.x, layer.ids, layer.route))
    assert not (x.flags.c_contiguous and x.flags.aligned)
    assert same(moe.forward(x, ids, route), answer(dtype))
    assert same(moe.forward(x, layer.ids.astype(np.int32)[:], strategies.views(layer.route)["slice"]), answer(dtype))


@every_dtype
def test_strided_torch_inputs_give_the_same_bits(dtype):
    """C14: the slice of a wider router buffer, and the rest, as torch tensors."""
    layer = case(dtype)
    x, ids, route = (tensor(a) for a in (layer.x, layer.ids, layer.route))
    wide = [torch.cat([a, a * 0, a], dim=1) for a in (x, ids, route)]
    moe = loaded(layer)
    assert same(moe.forward(wide[0][:, 2 * H :], wide[1][:, 2 * K :], wide[2][:, 2 * K :]), answer(dtype))
    assert same(moe.forward(*(a.t().contiguous().t() for a in (x, ids, route))), answer(dtype))
    assert same(moe.forward(*(a.repeat_interleave(2, dim=0)[::2] for a in (x, ids, route))), answer(dtype))


def test_one_token_broadcast(moe):
    """Rows with a stride of 0."""
    layer = case()
    x, ids, route = (np.broadcast_to(a[3], (50, a.shape[1])) for a in (layer.x, layer.ids, layer.route))
    assert same(moe.forward(x, ids, route), np.repeat(answer()[3:4], 50, axis=0))


def test_the_callers_arrays_are_not_changed(moe, inputs):
    """C52"""
    kept = {name: a.copy() for name, a in inputs.items()}
    for a in inputs.values():
        a.flags.writeable = False
    assert same(moe.forward(**inputs), answer())
    assert all(same(inputs[name], kept[name]) for name in kept)


def weight_views():
    """name -> function from [E, N, K] to a view with the same values."""
    return {
        "transposed": lambda w: np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2),
        "experts last": lambda w: np.ascontiguousarray(np.moveaxis(w, 0, 2)).transpose(2, 0, 1),
        "experts reversed": lambda w: w[::-1].copy()[::-1],
        "columns of a wider one": lambda w: np.concatenate([w * 0, w], axis=2)[:, :, w.shape[2] :],
        "every second column": lambda w: np.repeat(w, 2, axis=2)[:, :, ::2],
        "read-only": lambda w: np.frombuffer(w.tobytes(), w.dtype).reshape(w.shape),
    }


@pytest.mark.parametrize("view", list(weight_views()))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_strided_weights_pack_to_the_same_bytes(dtype, view):
    """C14 C15"""
    layer = case(weight_dtype=dtype)
    moe = wrapper()
    moe.load_weights_from_tensors(*(weight_views()[view](w) for w in (layer.gate, layer.up, layer.down)))
    want = loaded(layer)
    assert all(same(moe.packed.tensors[name], t) for name, t in want.packed.tensors.items())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_fused_views_are_packed_without_a_copy(kind, interleaved):
    """C15: gate and up as views of one [E, 2I, H]; the extra memory is less than one expert's."""
    e, h, i = 32, 256, 128
    layer = strategies.layer(np.random.default_rng(15), LayerShape(e, 2, h, i), Activation(), 4)
    halves = (np.s_[:, 0::2], np.s_[:, 1::2]) if interleaved else (np.s_[:, :i], np.s_[:, i:])
    fused = np.empty((e, 2 * i, h), F32)
    for half, w in zip(halves, (layer.gate, layer.up)):
        fused[half] = w
    down = np.ascontiguousarray(layer.down.swapaxes(1, 2))
    if kind == "torch":
        fused, down = torch.from_numpy(fused), torch.from_numpy(down)
    moe = KTMoEWrapper(0, *astuple(layer.shape), cpuinfer_threads=1)
    tracemalloc.start()
    try:
        moe.load_weights_from_tensors(fused[halves[0]], fused[halves[1]], down.swapaxes(1, 2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * h * i * 4, f"{peak} bytes for experts of {3 * h * i * 4}"
    oracle.assert_within(moe.forward(layer.x, layer.ids, layer.route), *layer.reference())


# out=


@every_dtype
def test_out_is_filled_and_returned(moe, inputs, dtype):
    """Any of the dtypes, whatever that of the hidden states: rounded once from float32."""
    for out in (np.full((T, H), 7, dtype), tensor(np.full((T, H), 7, dtype))):
        assert moe.forward(**inputs, out=out) is out
        assert same(out, answer().astype(dtype))
    assert moe.forward(*map(tensor, inputs.values()), out=out) is out


@pytest.mark.parametrize("kind", ["columns", "rows", "every second column", "transposed", "odd address", "reversed"])
@every_dtype
def test_a_strided_out_leaves_its_neighbours_alone(moe, inputs, kind, dtype):
    """C14"""
    buffer = np.full((3 * T, 3 * H), 7, dtype)
    raw = np.full(T * H * buffer.itemsize + 64, 7, np.uint8)
    out, whole = {
        "columns": (buffer[:T, 5 : 5 + H], buffer),
        "rows": (buffer[1::3, :H], buffer),
        "every second column": (buffer[:T, 1 : 1 + 2 * H : 2], buffer),
        "transposed": (buffer.reshape(3 * H, 3 * T)[:H, :T].T, buffer),
        "odd address": (raw[33:][: T * H * buffer.itemsize].view(dtype).reshape(T, H), raw),
        "reversed": (buffer[T:0:-1, H:0:-1], buffer),
    }[kind]
    before = whole.copy()
    moe.forward(**inputs, out=out)
    assert same(out.copy(), answer().astype(dtype))
    out[:] = 7
    if kind == "odd address":
        out.view(np.uint8)[:] = 7
    assert same(whole, before)


@pytest.mark.parametrize("kind", ["same", "shifted", "reversed", "ids", "weights"])
def test_out_may_overlap_the_inputs(moe, inputs, kind, monkeypatch):
    """The answer is that of a separate output, also where a later chunk reads what an earlier one wrote."""
    monkeypatch.setattr(ktcy.moe, "CHUNK", 5)
    x = inputs["hidden_states"]
    buffer = np.zeros((T + 1, H), F32)
    if kind in ("ids", "weights"):
        name = "topk_" + kind
        array = buffer.reshape(-1).view(inputs[name].dtype)[: T * K].reshape(T, K)
        array[:] = inputs[name]
        inputs[name] = array
        out = buffer[:T]
    else:
        inputs["hidden_states"] = buffer[:T]
        buffer[:T] = x
        out = {"same": buffer[:T], "shifted": buffer[1:], "reversed": buffer[T - 1 :: -1]}[kind]
    moe.forward(**inputs, out=out)
    assert same(out.copy(), answer())


def test_a_bad_id_in_a_later_chunk_leaves_out_alone(moe, inputs, monkeypatch):
    """C53: ids are looked at before anything is written, however many passes there are."""
    monkeypatch.setattr(ktcy.moe, "CHUNK", 5)
    ids = inputs["topk_ids"].copy()
    ids[T - 1, 0] = E
    out = np.full((T, H), 7, F32)
    with pytest.raises(ValueError, match=rf"topk_ids\[{T - 1}, 0\] is {E}"):
        moe.forward(**{**inputs, "topk_ids": ids}, out=out)
    assert (out == 7).all()


def read_only():
    array = np.zeros((T, H), F32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "out, error, message",
    [
        (np.zeros((T - 1, H), F32), ValueError, r"out has shape \[11, 96\], expected \[12, 96\]"),
        (np.zeros((T, H + 1), F32), ValueError, r"out has shape \[12, 97\], expected \[12, 96\]"),
        (np.zeros(T * H, F32), ValueError, r"out has shape \[1152\]"),
        (np.zeros((0, 0), F32), ValueError, "out has shape"),
        (np.zeros((T, H)), TypeError, "out is float64; float32, float16 and bfloat16 are supported"),
        (np.zeros((T, H), np.int32), TypeError, "out is int32"),
        (read_only(), ValueError, "out is read-only"),
        (np.broadcast_to(np.zeros(H, F32), (T, H)), ValueError, "out is read-only"),
        (torch.zeros(1, H).expand(T, H), ValueError, "out is a broadcast"),
        (torch.zeros(T, 1).expand(T, H), ValueError, "out is a broadcast"),
        (torch.zeros((T, H), device="meta"), TypeError, "out is on meta"),
        ([[0.0] * H] * T, TypeError, "out must be .* not list"),
    ],
)
def test_an_out_that_does_not_fit(moe, inputs, out, error, message):
    readable = isinstance(out, np.ndarray) or isinstance(out, torch.Tensor) and out.device.type == "cpu"
    kept = array(out).copy() if readable else None
    with pytest.raises(error, match=message):
        moe.forward(**inputs, out=out)
    assert not readable or same(out, kept)
    assert same(moe.forward(**inputs), answer())


# Bad input


def test_wrong_ndim_and_shapes(moe, inputs):
    """C17: found and expected stand in the message."""
    for name, value, message in (
        ("hidden_states", np.zeros(H, F32), r"hidden_states has shape \[96\], expected \[n, 96\]"),
        ("hidden_states", np.zeros((1, 1, T, H), F32), r"hidden_states has shape \[1, 1, 12, 96\]"),
        ("hidden_states", np.zeros((T, H - 1), F32), r"hidden_states has shape \[12, 95\], expected \[n, 96\]"),
        ("hidden_states", np.zeros((H, T), F32), r"expected \[n, 96\]"),
        ("hidden_states", np.zeros((), F32), r"hidden_states has shape \[\]"),
        ("hidden_states", np.zeros((T, 0), F32), r"expected \[n, 96\]"),
        ("topk_ids", np.zeros((T, K - 1), np.int64), r"topk_ids has shape \[12, 2\], expected \[12, 3\]"),
        ("topk_ids", np.zeros((T, K + 1), np.int64), r"expected \[12, 3\]"),
        ("topk_ids", np.zeros((T + 1, K), np.int64), r"expected \[12, 3\]"),
        ("topk_ids", np.zeros((T - 1, K), np.int64), r"expected \[12, 3\]"),
        ("topk_ids", np.zeros(T * K, np.int64), r"topk_ids has shape \[36\]"),
        ("topk_ids", np.zeros((T, K, 1), np.int64), r"topk_ids has shape \[12, 3, 1\]"),
        ("topk_weights", np.zeros((T, K - 1), F32), r"topk_weights has shape \[12, 2\], expected \[12, 3\]"),
        ("topk_weights", np.zeros((1, K), F32), r"expected \[12, 3\]"),
        ("topk_weights", np.zeros((K, T), F32), r"expected \[12, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.forward(**{**inputs, name: value})
    assert same(moe.forward(**inputs), answer())


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int64, np.complex64, ">f4", "U1", object, bool], ids=str)
def test_hidden_states_of_a_wrong_dtype(moe, inputs, dtype):
    with pytest.raises(TypeError, match=f"hidden_states is {np.dtype(dtype)}; float32, float16 and bfloat16 are supp"):
        moe.forward(**{**inputs, "hidden_states": np.zeros((T, H), dtype)})


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.uint64, F32, bool, ">i8", object], ids=str)
def test_ids_of_a_wrong_dtype(moe, inputs, dtype):
    with pytest.raises(TypeError, match=f"topk_ids is {np.dtype(dtype)}; int32 and int64 are supported"):
        moe.forward(**{**inputs, "topk_ids": np.zeros((T, K), dtype)})


@pytest.mark.parametrize("dtype", [np.int64, np.complex128, bool, object], ids=str)
def test_routing_weights_of_a_wrong_dtype(moe, inputs, dtype):
    with pytest.raises(TypeError, match=f"topk_weights is {np.dtype(dtype)}; a float type"):
        moe.forward(**{**inputs, "topk_weights": np.zeros((T, K), dtype)})


@pytest.mark.parametrize("name", ["hidden_states", "topk_ids", "topk_weights"])
def test_what_is_no_array(moe, inputs, name):
    for value, kind in ((inputs[name].tolist(), "list"), (None, "NoneType"), ({}, "dict"), (1.0, "float")):
        with pytest.raises(TypeError, match=f"{name} must be a numpy array, .* not {kind}"):
            moe.forward(**{**inputs, name: value})
    with pytest.raises(TypeError, match=rf"{name} is on meta; ktcy takes CPU tensors: pass {name}.cpu\(\)"):
        moe.forward(**{**inputs, name: torch.zeros(inputs[name].shape, device="meta")})
    with pytest.raises(TypeError, match=f"{name} of torch.float8_e4m3fn cannot be read"):
        moe.forward(**{**inputs, name: torch.zeros(inputs[name].shape, dtype=torch.float8_e4m3fn)})


OUTSIDE = [E, E + 1, -2, -3, 2**31 - 1, -(2**31)]
FAR_OUTSIDE = [2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), -(2**63) + 1]
OUTSIDE = [(i, np.int32) for i in OUTSIDE] + [(i, np.int64) for i in OUTSIDE + FAR_OUTSIDE]


@pytest.mark.parametrize("bad, dtype", OUTSIDE)
def test_ids_out_of_range(moe, inputs, bad, dtype):
    """C53: an error with token and slot, nothing written; 2^32 + 1 is not taken for 1."""
    ids = inputs["topk_ids"].astype(dtype)
    ids[7, 2] = bad
    out = np.full((T, H), 7, F32)
    message = rf"topk_ids\[7, 2\] is {bad}; ids run from 0 to {E - 1}, and -1 means no expert"
    for array in (ids, strategies.views(ids)["slice"], torch.from_numpy(ids)):
        with pytest.raises(ValueError, match=message):
            moe.forward(**{**inputs, "topk_ids": array}, out=out)
    assert (out == 7).all() and same(moe.forward(**inputs), answer())


def test_a_stream_without_a_gpu(moe, inputs):
    assert same(moe.forward(**inputs, cuda_stream=0), answer())
    with pytest.raises(RuntimeError, match="cuda_stream .* no GPU"):
        moe.forward(**inputs, cuda_stream=12345)


@pytest.mark.parametrize("name", [*REQUIRED, "cpuinfer_threads", "threadpool_count", "chunked_prefill_size"])
def test_sizes_and_threads_that_are_none(name):
    """0, negative, huge, not an integer; one message that names the parameter."""
    values = [-1, -(2**40)] if name == "layer_idx" else [0, -1, -(2**40)]
    if name in (*REQUIRED[1:], "cpuinfer_threads", "threadpool_count"):
        values.append(2**40)
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be at least [01].* not {value}"):
            wrapper(**{name: value})
    for value in (1.5, "8", True, [1]):
        with pytest.raises(TypeError, match=f"{name} must be an integer, not {re.escape(repr(value))}"):
            wrapper(**{name: value})


def test_sizes_may_be_numpy_integers():
    sizes = dict(zip(REQUIRED, map(np.int32, (3, E, K, H, I))))
    assert all(type(getattr(wrapper(**sizes), name)) is int for name in REQUIRED)


def test_more_experts_per_token_than_experts():
    with pytest.raises(ValueError, match=r"num_experts_per_tok \(7\) is larger than num_experts \(6\)"):
        wrapper(num_experts_per_tok=7)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(mode="sft"), "mode 'sft' is not supported"),
        (dict(max_deferred_experts_per_token=2), "max_deferred_experts_per_token is not supported"),
        (dict(numa_nodes=[0, 1]), "numa_nodes has 2 entries for 1 groups"),
        (dict(variant="neon"), "unknown variant 'neon'; the variants are avx2, avx512"),
        (dict(activation="relu"), "unknown activation 'relu'; the activations are silu, swigluoai, gelu, gelu_tanh"),
        (dict(swiglu_limit=-1.0), "limit of an activation must be positive, not -1"),
        (dict(swiglu_alpha=float("nan")), "alpha .* must be finite"),
        (dict(activation=Activation(), swiglu_limit=3.0), "belong into the Activation"),
        (dict(activation="silu", swiglu_alpha=1.7), "'silu' takes a limit but no alpha"),
        (dict(activation="gelu", swiglu_limit=3.0), "'gelu' takes neither limit nor alpha"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        wrapper(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(activation=5), "activation must be a name or an Activation, not 5"),
        (dict(swiglu_limit="7"), "the limit of an activation must be a number, not '7'"),
        (dict(swiglu_alpha="x"), "the alpha of an activation must be a number, not 'x'"),
    ],
)
def test_options_of_the_wrong_type(options, message):
    with pytest.raises(TypeError, match=message):
        wrapper(**options)


@pytest.mark.parametrize("kind", ["numpy", "torch", "transposed", "flat ids"])
def test_three_dimensions(moe, inputs, kind):
    """[B, S, H] in and out, as transformers and kt-kernel's callers have them."""
    args = {name: a.reshape(3, 4, -1) for name, a in inputs.items()}
    want, out = answer().reshape(3, 4, H), np.empty((3, 4, H), F32)
    if kind == "torch":
        args, out = {name: torch.from_numpy(a) for name, a in args.items()}, torch.from_numpy(out)
    elif kind == "transposed":
        args = {name: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for name, a in args.items()}
        out = np.empty((4, 3, H), F32).swapaxes(0, 1)
    elif kind == "flat ids":
        args |= {name: inputs[name] for name in ("topk_ids", "topk_weights")}
    assert same(moe.forward(**args), want)
    assert moe.forward(**args, out=out) is out and same(array(out).copy(), want)
    out[...] = 7
    moe.submit_forward(**args, out=out)
    assert moe.sync_forward() is out and same(array(out).copy(), want)
    moe.submit_forward(**args)
    assert same(moe.sync_forward(args["hidden_states"], None), want)
    with pytest.raises(ValueError, match=r"out has shape \[12, 96\], expected \[3, 4, 96\]"):
        moe.forward(**args, out=np.empty((T, H), F32))


@pytest.mark.parametrize("method", ["int8", "int4", "bf16"])
def test_overflow_is_nan_before_down_and_inf_after(method):
    def run(x, up, down, route):
        moe = KTMoEWrapper(0, 1, 1, 64, 64, method=method, cpuinfer_threads=1)
        moe.load_weights_from_tensors(*(np.full((1, 64, 64), value, F32) for value in (up, up, down)))
        return moe.forward(np.full((1, 64), x, F32), np.zeros((1, 1), int), np.full((1, 1), route, F32))

    assert np.isnan(run(2.0**60, 2.0**60, 1, 1)).all()
    assert (run(2.0**30, 1, 2.0**100, 1) == np.inf).all() and (run(1, 1, 1, -3e38) == -np.inf).all()


def test_objects_that_are_not_copied(moe):
    with CPUInfer(1) as infer:
        for value in (moe, infer, infer.pool):
            for spread in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled; make another"):
                    spread(value)
    with pytest.raises(ValueError, match="cpu_infer is closed"):
        wrapper(cpu_infer=infer)


def test_no_tokens_and_an_array_for_the_output(moe, inputs):
    """C55: numpy gives arrays without elements strides of 0, as broadcasts have."""
    none = {name: a[:0] for name, a in inputs.items()}
    for out in (np.empty((0, H), F32), torch.empty(0, H, dtype=torch.bfloat16)):
        assert moe.forward(**none, out=out) is out


def test_loaded_layers_are_not_copied(moe):
    """C37"""
    for spread in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a loaded layer cannot be copied or pickled"):
            spread(moe._moe)


def test_finite_value_that_bfloat16_cannot_hold():
    layer = case()
    layer.gate[1, 2, 3] = np.finfo(F32).max
    with pytest.raises(ValueError, match="3.4.*e.38 at row 2, column 3 is too large for bfloat16"):
        loaded(layer, method="BF16")


def test_tensors_that_numpy_cannot_see(moe, inputs):
    for x in (torch.zeros(T, H).bfloat16().to_sparse(), torch._neg_view(torch.zeros(T, H).bfloat16())):
        with pytest.raises(TypeError, match="hidden_states of torch.bfloat16 cannot be read"):
            moe.forward(**{**inputs, "hidden_states": x})


def test_routing_weights_beyond_float32_and_of_other_types(moe, inputs):
    wide = inputs["topk_weights"].astype(np.float64)
    wide[1, 0] = 1e300
    assert not np.isfinite(moe.forward(**{**inputs, "topk_weights": wide})[1]).any()
    for kind in (np.dtype([("w", F32)]), np.dtype("V4"), np.dtype(ml_dtypes.int4)):
        with pytest.raises(TypeError, match="topk_weights is .*; a float type is needed"):
            moe.forward(**{**inputs, "topk_weights": np.zeros(wide.shape, kind)})


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), Activation()),
        (dict(activation="silu"), Activation()),
        (dict(activation="gelu_pytorch_tanh"), Activation("gelu_tanh")),
        (dict(activation=Activation("gelu")), Activation("gelu")),
        (dict(activation="swigluoai"), Activation(alpha=1.702, limit=7.0, offset=1.0)),
        (dict(swiglu_alpha=1.5), Activation(alpha=1.5, limit=7.0, offset=1.0)),
        (dict(swiglu_alpha=1.5, swiglu_limit=5.0), Activation(alpha=1.5, limit=5.0, offset=1.0)),
        (dict(swiglu_limit=10.0), Activation(limit=10.0)),
    ],
    ids=str,
)
def test_activations_by_the_names_of_peers(options, expected):
    layer = case()
    moe = loaded(layer, **options)
    assert moe.packed.activation == expected
    want = layer._replace(activation=expected).reference()
    oracle.assert_within(moe.forward(layer.x, layer.ids, layer.route), *want)


# GPU experts


@pytest.mark.parametrize("count", [0, 1, E - 1, E])
def test_any_number_of_gpu_experts_gives_the_same_answer(inputs, count):
    """C56 C05: without a GPU they run here, and one warning says so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        by_count = loaded(num_gpu_experts=count)
        by_mask = loaded(gpu_experts_mask=np.arange(E) >= E - count)
        both = loaded(num_gpu_experts=count, gpu_experts_mask=torch.arange(E) < count)
        for moe in (by_count, by_mask, both):
            assert moe.num_gpu_experts == count == moe.gpu_experts_mask.sum()
            assert same(moe.forward(**inputs), answer())
    assert len(said) == (3 if count else 0)
    for warning in said:
        assert f"{count} experts were asked for on the GPU; all run on the CPU" in str(warning.message)


def test_the_warning_points_at_the_caller():
    with pytest.warns(UserWarning) as said:
        KTMoEWrapper(0, E, K, H, I, num_gpu_experts=1, cpuinfer_threads=2)
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(num_gpu_experts=2, gpu_experts_mask=np.arange(E) < 3), ValueError, "is 2, .* marks 3; give one"),
        (dict(num_gpu_experts=E + 1), ValueError, "num_gpu_experts must be at least 0 and at most 6, not 7"),
        (dict(num_gpu_experts=-1), ValueError, "num_gpu_experts must be at least 0"),
        (dict(num_gpu_experts=0.5), TypeError, "num_gpu_experts must be an integer"),
        (dict(gpu_experts_mask=np.zeros(E + 1, bool)), ValueError, r"must be bool \[6\], not bool \[7\]"),
        (dict(gpu_experts_mask=np.zeros((1, E), bool)), ValueError, r"must be bool \[6\], not bool \[1, 6\]"),
        (dict(gpu_experts_mask=np.zeros(E, int)), ValueError, r"must be bool \[6\], not int64"),
        (dict(gpu_experts_mask=[False] * E), TypeError, "gpu_experts_mask must be a numpy array"),
    ],
)
def test_masks_and_counts_that_disagree(options, error, message):
    """C58 C16"""
    with pytest.raises(error, match=message):
        wrapper(**options)


# Maps of experts

ORDER = [3, 0, 5, 5, 1, 2]


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.int32, np.uint8, torch.int64, torch.int32], ids=str)
def test_physical_to_logical_map(inputs, kind, tmp_path):
    """C16: id i of a token means stored expert map[i], in memory as in a folder."""
    layer = case()
    if isinstance(kind, torch.dtype):
        order = torch.tensor(ORDER, dtype=kind)
    else:
        order = kind(ORDER) if isinstance(kind, type) and issubclass(kind, (list, tuple)) else np.array(ORDER, kind)
    stacks = layer.gate, layer.up, layer.down
    moe = wrapper(cpu_save=True, weight_path=tmp_path)
    moe.load_weights_from_tensors(*stacks, order)
    again = wrapper(weight_path=tmp_path)
    again.load_weights(order)
    for m in (moe, again):
        got = m.forward(**inputs)
        # The sum goes by id, not by stored expert, so its rounding is another.
        oracle.assert_within(got, *layer._replace(ids=np.array(ORDER)[layer.ids]).reference())
    assert same(moe.forward(**inputs), again.forward(**inputs))


@pytest.mark.parametrize(
    "order, error, message",
    [
        ({0: 1}, TypeError, "physical_to_logical_map must be a numpy array, .* not dict"),
        ("012345", TypeError, "not str"),
        ([0.0] * E, TypeError, "physical_to_logical_map must hold integers, not float64"),
        (np.zeros(E, bool), TypeError, "must hold integers, not bool"),
        (list(range(E - 1)), ValueError, r"physical_to_logical_map has shape \[5\], expected \[6\]"),
        ([list(range(E))], ValueError, r"physical_to_logical_map has shape \[1, 6\], expected \[6\]"),
        ([], (TypeError, ValueError), "physical_to_logical_map"),
        ([0, 1, 2, E, 4, 5], ValueError, r"physical_to_logical_map\[3\] is 6; experts run from 0 to 5"),
        ([0, 1, 2, 3, -1, 5], ValueError, r"physical_to_logical_map\[4\] is -1"),
        (np.array([2**63] * E, np.uint64), ValueError, "is 9223372036854775808"),
    ],
)
def test_maps_that_do_not_fit(order, error, message):
    """C16"""
    layer, moe = case(), wrapper()
    with pytest.raises(error, match=message):
        moe.load_weights_from_tensors(layer.gate, layer.up, layer.down, order)
    with pytest.raises(error, match=message):
        moe.load_weights(order)
    moe.load_weights_from_tensors(layer.gate, layer.up, layer.down)


# Weights that do not fit


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_weights_that_do_not_fit(name, inputs):
    """C16: shapes, dtypes and kinds are checked before anything is read, and the layer can still be loaded."""
    layer, moe = case(), wrapper()
    stacks = dict(gate_proj=layer.gate, up_proj=layer.up, down_proj=layer.down)
    w = stacks[name]
    shape = re.escape(str(list(w.shape)))
    for value, error, message in (
        (w[:-1], ValueError, rf"{name} has shape \[5, .*expected {shape}"),
        (w.swapaxes(1, 2), ValueError, f"{name} has shape .*expected {shape}"),
        (w[:, :-1], ValueError, f"{name} has shape .*expected {shape}"),
        (w[..., :-1], ValueError, f"{name} has shape .*expected {shape}"),
        (w[0], ValueError, f"{name} has shape .*expected {shape}"),
        (w.astype(float), TypeError, f"{name} is float64; float32, float16 and bfloat16 are supported"),
        (w.astype(np.int8), TypeError, f"{name} is int8"),
        (list(w), TypeError, f"{name} must be a numpy array, .* not list"),
        (None, TypeError, f"{name} must be .* not NoneType"),
        (torch.zeros(w.shape, device="meta"), TypeError, f"{name} is on meta"),
    ):
        with pytest.raises(error, match=message):
            moe.load_weights_from_tensors(**{**stacks, name: value})
    moe.load_weights_from_tensors(**stacks)
    assert same(moe.forward(**inputs), answer())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_weights_that_are_not_finite(name, bad, inputs):
    """C22: refused with tensor, expert, row and column."""
    moe, layer = wrapper(), case()
    stacks = dict(gate=layer.gate, up=layer.up, down=layer.down)
    stacks[name][4, 19, 33] = bad
    with pytest.raises(ValueError, match=f"{name} of expert 4: .*row 19.*column 33"):
        moe.load_weights_from_tensors(*stacks.values())
    stacks[name][4, 19, 33] = 0
    moe.load_weights_from_tensors(*stacks.values())
    assert np.isfinite(moe.forward(**inputs)).all()


def test_biases_that_do_not_fit():
    layer = case(bias=True)
    good = {name: getattr(layer, name) for name in ("gate_bias", "up_bias", "down_bias")}
    for name, bias in good.items():
        nan = bias.copy()
        nan[2, 7] = np.nan
        for changed, error, message in (
            ({**good, name: None}, ValueError, f"{name} is missing; give all three or none"),
            ({name: bias}, ValueError, "bias is missing"),
            ({**good, name: bias[:, :-1]}, ValueError, f"{name} has shape .*expected"),
            ({**good, name: bias[0]}, ValueError, f"{name} has shape .*expected"),
            ({**good, name: bias.astype(float)}, TypeError, f"{name} is float64"),
            ({**good, name: nan}, ValueError, f"{name[:-5]} of expert 2: the bias of row 7 is nan"),
        ):
            with pytest.raises(error, match=message):
                wrapper().load_weights_from_tensors(layer.gate, layer.up, layer.down, **changed)


# Weights of a folder


@pytest.fixture
def folder(tmp_path):
    """A folder with layer 3, of `case`."""
    loaded(weight_path=tmp_path, cpu_save=True).close()
    return tmp_path


def test_a_folder_gives_the_bits_of_the_tensors(folder, inputs, kernels):
    """One folder serves every variant and thread count, prefaulted or not, locked or not."""
    for options, load in ((dict(cpuinfer_threads=1), {}), ({}, dict(prefault=True)), ({}, dict(lock=True))):
        moe = wrapper(weight_path=str(folder), variant=kernels.name, **options)
        moe.load_weights(**load)
        assert moe.packed.path.parent == folder and not moe.packed.gate_up_weight.flags.writeable
        assert same(moe.forward(**inputs), answer())


def test_no_weight_path():
    """C60: one error with the command, before anything is allocated."""
    moe = wrapper(num_experts=512, hidden_size=7168, moe_intermediate_size=2048)
    for _ in range(2):
        with pytest.raises(ValueError, match="no weight_path; .*python -m ktcy convert MODEL OUT --format int8"):
            moe.load_weights()


def wrong_folders(tmp_path):
    """name -> (weight_path, what the message says)."""
    names = dict(missing=[], empty=[], tensors=["model.safetensors"], gguf=["m.gguf"])
    names |= dict(kt_kernel=["_layer_0"], pickles=["pytorch_model.bin"], other=["notes.txt"])
    for name, files in names.items():
        for file in files:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    return {
        "missing": "there is no such folder",
        "empty": "it is empty",
        "tensors": "safetensors files without a config.json",
        "gguf": "GGUF files",
        "kt_kernel": "weights converted by kt-kernel",
        "pickles": "PyTorch pickles",
        "other": "notes.txt",
    }


def test_folders_of_another_kind(tmp_path):
    """C60 C66: what was found there, and the command that makes the weights."""
    for name, found in wrong_folders(tmp_path).items():
        with pytest.raises((OSError, ValueError), match=f"{re.escape(found)}.*python -m ktcy convert"):
            wrapper(weight_path=tmp_path / name).load_weights()


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(layer_idx=4), OSError, "holds 1 converted layers from 3 to 3, but not layer 4; .*convert.*--layers 4:5"),
        (dict(num_experts=E + 1), ValueError, "layer 3 in .* has num_experts 6, expected 7"),
        (dict(hidden_size=H + 32), ValueError, "has hidden_size 96, expected 128"),
        (dict(hidden_size=H - 1), ValueError, "has hidden_size 96, expected 95"),
        (dict(moe_intermediate_size=I + 1), ValueError, "has moe_intermediate_size 40, expected 41"),
        (dict(activation="gelu"), ValueError, r"made for Activation\(gate='swiglu'.*gelu.* was asked for"),
    ],
    ids=str,
)
def test_weights_of_another_layer_or_size(folder, inputs, options, error, message):
    """C16: and the folder is as good as before."""
    moe = wrapper(weight_path=folder, **options)
    with pytest.raises(error, match=message):
        moe.load_weights()
    with pytest.raises(RuntimeError, match="load_weights"):
        moe.forward(**inputs)
    good = wrapper(weight_path=folder)
    good.load_weights()
    assert same(good.forward(**inputs), answer())


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layout="int8-n32k4-v0"), "layout int8-n32k4-v0 .*expected int8-n16k4-v1.*python -m ktcy convert"),
        (dict(layout=None), "layout None .*expected int8-n16k4-v1"),
        (dict(ktcy="2"), "file version 2 .*reads version 1.*python -m ktcy convert"),
        (dict(ktcy=None), "not a layer converted by ktcy.*python -m ktcy convert"),
        (dict(format="int3"), "format int3 .*knows int8.*python -m ktcy convert"),
        (dict(layer="5"), "holds layer 5, expected layer 3; it was renamed"),
        (dict(hidden_size="97"), "expected"),
    ],
    ids=str,
)
def test_folders_of_a_wrong_layout_or_version(folder, changes, message):
    path = folder / "layer-00003.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"].update(changes)
    header["__metadata__"] = {k: v for k, v in header["__metadata__"].items() if v is not None}
    text = json.dumps(header).encode()
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])
    with pytest.raises(ValueError, match=message):
        wrapper(weight_path=folder).load_weights()


def test_cpu_save_needs_a_place(inputs):
    layer, moe = case(), wrapper(cpu_save=True)
    with pytest.raises(ValueError, match="cpu_save needs a weight_path"):
        moe.load_weights_from_tensors(layer.gate, layer.up, layer.down)
    with pytest.raises(RuntimeError, match="load_weights"):
        moe.forward(**inputs)


# Life


def test_forward_before_load(inputs):
    with pytest.raises(RuntimeError, match=r"call load_weights\(\) first"):
        wrapper().forward(**inputs)


def test_load_twice(folder, inputs):
    layer = case()
    for first in ("tensors", "folder"):
        moe = wrapper(weight_path=folder)
        if first == "tensors":
            moe.load_weights_from_tensors(layer.gate, layer.up, layer.down)
        else:
            moe.load_weights()
        for again in (moe.load_weights, lambda: moe.load_weights_from_tensors(layer.up, layer.gate, layer.down)):
            with pytest.raises(RuntimeError, match="has its weights; make another"):
                again()
        assert same(moe.forward(**inputs), answer())


def test_use_after_close(inputs):
    layer = case()
    with loaded() as moe:
        assert same(moe(*inputs.values()), answer())
    for _ in range(2):
        moe.close()
        assert "closed" in repr(moe) and moe.packed is None
        for use in (
            lambda: moe.forward(**inputs),
            moe.load_weights,
            lambda: moe.load_weights_from_tensors(layer.gate, layer.up, layer.down),
        ):
            with pytest.raises(RuntimeError, match="this layer is closed"):
                use()
    assert same(loaded().forward(**inputs), answer())


def test_a_closed_pool(inputs):
    with CPUInfer(1) as infer:
        moe = loaded(cpu_infer=infer)
    with pytest.raises(RuntimeError, match="this pool is closed"):
        moe.forward(**inputs)


def test_the_weights_outlive_what_they_came_from(inputs, folder):
    """Packed or mapped bytes are held by the layer alone: arrays, file name and folder may go."""
    moe, mapped = loaded(), wrapper(weight_path=folder)
    mapped.load_weights()
    (folder / "layer-00003.safetensors").unlink()
    for m in (moe, mapped):
        assert same(m.forward(**inputs), answer())


def test_python_threads_share_layers_and_pools(inputs):
    """Several threads on one layer, and on another one of the same pool."""
    layer = case()
    moes, want = [loaded(), loaded(), loaded(cpuinfer_threads=1)], answer()
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for i in range(60):
            rows = rng.integers(T, size=rng.integers(0, 200))
            if not same(moes[i % 3].forward(layer.x[rows], layer.ids[rows], layer.route[rows]), want[rows]):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_close_while_others_compute(inputs):
    """Each call gives the whole answer or says that the layer is closed."""

    class Closing(Dlpack):
        def __dlpack__(self, **options):
            moe.close()
            return super().__dlpack__(**options)

    moe = loaded()
    assert same(moe.forward(**{**inputs, "topk_weights": Closing(inputs["topk_weights"])}), answer())
    found = []

    def work(moe, started):
        try:
            while True:
                found.append(same(moe.forward(**inputs), answer()))
                started.set()
        except Exception as error:
            found.append(str(error))

    for _ in range(20):
        moe, started = loaded(), threading.Event()
        threads = [threading.Thread(target=work, args=(moe, started)) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        moe.close()
        for thread in threads:
            thread.join()
    assert set(found) == {True, "this layer is closed"}


FORK = """
import os, warnings
import numpy as np
from ktcy import KTMoEWrapper
warnings.simplefilter("ignore", DeprecationWarning)
stacks = np.random.default_rng(0).standard_normal((3, 2, 64, 64)).astype(np.float32)
inputs = np.ones((300, 64), np.float32), np.tile([0, 1], (300, 1)), np.ones((300, 2), np.float32)
moe = KTMoEWrapper(0, 2, 2, 64, 64, cpuinfer_threads=2)
moe.load_weights_from_tensors(*stacks)
want = moe.forward(*inputs)
child = os.fork()
if child == 0:
    for tokens in (300, 1, 0):
        try:
            moe.forward(*(a[:tokens] for a in inputs))
        except RuntimeError as error:
            assert "belongs to the parent process" in str(error), error
        else:
            os._exit(3)
    own = KTMoEWrapper(0, 2, 2, 64, 64, cpuinfer_threads=2)
    own.load_weights_from_tensors(*stacks)
    os._exit(7 if (own.forward(*inputs) == want).all() else 4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 7, code
assert (moe.forward(*inputs) == want).all()
"""


def test_fork():
    """C44: a child gets an error at once, makes its own layer, and the parent goes on."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_more_threads_than_cpus_still_answer(inputs):
    """C46: said once, when the pool is made."""
    with pytest.warns(RuntimeWarning, match="500 threads asked for"):
        infer = CPUInfer(500)
    with infer:
        assert same(loaded(cpu_infer=infer).forward(**inputs), answer())


def test_no_torch_is_needed():
    """C01 C05: import, load and forward without torch, cupy and transformers."""
    code = """
import sys
for name in ("torch", "cupy", "transformers"):
    sys.modules[name] = None
import numpy as np, ktcy
moe = ktcy.KTMoEWrapper(0, 2, 2, 64, 32, cpuinfer_threads=1)
moe.load_weights_from_tensors(*np.ones((2, 2, 32, 64), np.float32), np.ones((2, 64, 32), np.float32))
print(moe.forward(np.ones((1, 64), np.float32), np.array([[0, 1]]), np.ones((1, 2), np.float32)).shape)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(1, 64)\n", "")

"""Submitted forwards, pools over NUMA nodes, traces: the same bits as a plain forward, whatever the order."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import strategies
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ktcy
from ktcy import CPUInfer, KTMoEWrapper, Trace, WorkerPoolConfig
from ktcy.buffers import Buffers
from ktcy.config import Activation, LayerShape
from ktcy.moe import MoE
from ktcy.runtime import Pool, memory, topology
from ktcy.weights.packed import PackedLayer, layer_tensors

F32 = np.float32
FORMATS = ("int8", "bf16")  # one of each GEMM core
CROWD = dataclasses.replace(topology.read(), cpus=topology.read().cpus * 16, quota=None)
SHAPE = LayerShape(6, 2, 96, 80)


def case(seed=0, shape=SHAPE, tokens=9, bias=True):
    return strategies.layer(np.random.default_rng(seed), shape, Activation(), tokens, bias=bias)


def loaded(layer, layer_idx=0, **options):
    moe = KTMoEWrapper(layer_idx, *layer.shape.__dict__.values(), **{"cpuinfer_threads": 2, **options})
    biases = {name: getattr(layer, name) for name in ("gate_bias", "up_bias", "down_bias")}
    moe.load_weights_from_tensors(layer.gate, layer.up, layer.down, **biases)
    return moe


def inputs(layer, rows=slice(None)):
    return layer.x[rows], layer.ids[rows], layer.route[rows]


@pytest.fixture(scope="module")
def pair():
    """Two layers and what each gives."""
    cases = [case(0), case(1)]
    moes = [loaded(c, n) for n, c in enumerate(cases)]
    return cases, moes, [moe.forward(*inputs(c)) for moe, c in zip(moes, cases)]


def test_submitted_gives_the_bits_of_forward(pair):
    cases, moes, expected = pair
    moes[0].submit_forward(*inputs(cases[0]))
    assert (moes[0].sync_forward() == expected[0]).all()


def test_next_layer_is_submitted_before_the_last_is_read(pair):
    cases, moes, expected = pair
    for _ in range(3):
        for moe, layer in zip(moes, cases):
            moe.submit_forward(*inputs(layer))
        for moe, want in zip(moes, expected):
            assert (moe.sync_forward() == want).all()


def test_results_belong_to_the_caller(pair):
    """No later call changes them, of any layer, whether they were read at once or not, nor views of them."""
    cases, moes, expected = pair
    kept = []
    for n in range(50):
        for moe, layer in zip(moes, cases):
            moe.submit_forward(*inputs(layer))
        kept += [(moe.sync_forward(), want) for moe, want in zip(moes, expected)]
        moes[0].submit_forward(*map(torch.from_numpy, map(np.array, inputs(cases[0]))))
        kept.append((moes[0].sync_forward()[n % 9], expected[0][n % 9]))
        moes[1].forward(*inputs(cases[1]))
    assert all((np.asarray(got) == want).all() for got, want in kept)


def test_threads_with_a_layer_each_keep_their_results(pair):
    cases, moes, expected = pair
    wrong = []

    def work(n):
        kept = []
        for _ in range(100):
            moes[n % 2].submit_forward(*inputs(cases[n % 2]))
            kept.append(moes[n % 2].sync_forward())
        if not all((got == expected[n % 2]).all() for got in kept):
            wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_submitted_forward_is_asked_for_by_what_submit_returned(pair):
    cases, moes, expected = pair
    first, second = (moes[0].submit_forward(*inputs(cases[0], slice(n))) for n in (4, 9))
    with pytest.raises(ValueError, match="was submitted to <KTMoEWrapper layer 0"):
        moes[1].sync_forward(second)
    assert (moes[0].sync_forward(second) == expected[0]).all()
    with pytest.raises(RuntimeError, match="taken already"):
        moes[0].sync_forward(second)
    found = []

    def other():
        with pytest.raises(RuntimeError, match="by this thread"):
            moes[0].sync_forward()
        found.append(moes[0].sync_forward(first))
        moes[0].submit_forward(*inputs(cases[0]))  # and ends without asking for it

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (found[0] == expected[0][:4]).all()
    with pytest.raises(RuntimeError, match="by this thread"):
        moes[0].sync_forward(cases[0].x, None)


def test_submit_to_an_array_of_the_callers(pair):
    cases, moes, expected = pair
    wide = np.full((9, 2 * 96), 7, F32)
    for out in (np.empty((9, 96), F32), torch.empty(9, 96), wide[:, ::2]):
        moes[0].submit_forward(*inputs(cases[0]), out=out)
        assert moes[0].sync_forward() is out and (np.asarray(out) == expected[0]).all()
    assert (wide[:, 1::2] == 7).all()
    rows = np.lib.stride_tricks.as_strided(np.empty(2000, F32), (9, 96), (400 - 40, 4))
    with pytest.raises(ValueError, match="its rows overlap"):
        moes[0].submit_forward(*inputs(cases[0]), out=rows)
    with pytest.raises(ValueError, match="its rows overlap"):
        moes[0].forward(*inputs(cases[0]), out=rows)


def test_caller_may_change_its_arrays_at_once(pair):
    cases, moes, expected = pair
    x, ids, route = (a.copy() for a in inputs(cases[0]))
    moes[0].submit_forward(x, ids, route)
    x[:], ids[:], route[:] = 7, -1, 0
    assert (moes[0].sync_forward() == expected[0]).all()


def test_several_of_one_layer_come_back_in_order(pair):
    cases, moes, expected = pair
    for n in (1, 9, 4, 9, 0):
        moes[0].submit_forward(*inputs(cases[0], slice(n)))
    for n in (1, 9, 4, 9, 0):
        got = moes[0].sync_forward()
        assert got.shape == (n, 96) and (got == expected[0][:n]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_comes_back_as_torch(pair, dtype):
    cases, moes, _ = pair
    x, ids, route = (torch.from_numpy(np.array(a)) for a in inputs(cases[0]))
    x = x.to(dtype)
    moes[0].submit_forward(x, ids, route)
    got = moes[0].sync_forward(x, None)
    assert got.dtype == dtype and torch.equal(got, moes[0].forward(x, ids, route))


def test_bad_id_comes_out_of_its_own_sync_once(pair):
    cases, moes, expected = pair
    x, ids, route = inputs(cases[0])
    bad = ids.copy()
    bad[5, 1] = 77
    moes[0].submit_forward(x, bad, route)
    moes[1].submit_forward(*inputs(cases[1]))
    assert (moes[1].sync_forward() == expected[1]).all()
    with pytest.raises(ValueError, match=r"topk_ids\[5, 1\] is 77"):
        moes[0].sync_forward()
    with pytest.raises(RuntimeError, match="no forward was submitted"):
        moes[0].sync_forward()
    moes[0].submit_forward(x, ids, route)
    assert (moes[0].sync_forward() == expected[0]).all()


def test_submit_checks_as_forward_does(pair):
    cases, moes, _ = pair
    x, ids, route = inputs(cases[0])
    with pytest.raises(ValueError, match="hidden_states has shape"):
        moes[0].submit_forward(x[:, :50], ids, route)
    with pytest.raises(RuntimeError, match="cuda_stream"):
        moes[0].submit_forward(x, ids, route, 12345)
    with pytest.raises(RuntimeError, match="load_weights"):
        KTMoEWrapper(0, 6, 2, 96, 80, cpuinfer_threads=2).submit_forward(x, ids, route)


def test_close_with_a_forward_in_flight():
    layer = case(2)
    moe = loaded(layer)
    for _ in range(5):
        moe.submit_forward(*inputs(layer))
    moe.close()
    with pytest.raises(RuntimeError, match="closed"):
        moe.sync_forward()


def test_tasks_on_an_explicit_cpuinfer(pair):
    cases, _, expected = pair
    with CPUInfer(WorkerPoolConfig(2, None, [1, 1])) as infer:
        moe = loaded(cases[0], cpu_infer=infer)
        out = np.empty_like(expected[0])
        task = moe._moe.task(*inputs(cases[0]), out)
        for _ in range(3):
            out[:] = np.nan
            infer.submit(task)
            infer.sync()
            assert (out == expected[0]).all()
        bad = cases[0].ids.copy()
        bad[0, 0] = -2
        infer.submit(moe._moe.task(cases[0].x, bad, cases[0].route, out))
        with pytest.raises(ValueError, match=r"topk_ids\[0, 0\] is -2"):
            infer.sync()
        infer.sync()
    with pytest.raises(TypeError, match="CPUInfer"):
        loaded(cases[0], cpu_infer=3)


@pytest.mark.parametrize("pools", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(64, 1408), (704, 96), (2880, 33), (17, 768), (96, 16), (16, 2880)])
def test_pool_counts_give_the_same_bits(sizes, pools):
    """C12 C13: any size is cut over any number of pools, unevenly if need be."""
    layer = case(3, LayerShape(3, 2, *sizes), tokens=70)
    want = loaded(layer, cpuinfer_threads=1).forward(*inputs(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        moe = loaded(layer, cpuinfer_threads=pools + 1, threadpool_count=pools)
    assert moe.pool.groups == pools
    assert (moe.forward(*inputs(layer)) == want).all()


@pytest.fixture(scope="module")
def grouped():
    """Pools of 1 to 9 groups; from the third on more groups than this machine may have CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pools = [Pool(max(groups, 3), groups=groups) for groups in range(1, 10)]
    yield pools
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("form", FORMATS)
def test_group_counts_give_the_same_bits(kernels, form, grouped):
    """C12: blocks of scratch that differ from group to group, groups that own nothing, columns straight to out or not."""
    layer = case(6, LayerShape(5, 2, 130, 84), tokens=70, bias=False)
    fmt = kernels.format(form)
    packed = PackedLayer.pack(fmt, layer.gate, layer.up, layer.down, shape=layer.shape, activation=layer.activation)
    want = None
    for pool in grouped:
        moe = MoE(fmt, packed, pool, range(5))
        for tokens in (70, 1, 9):
            out = np.full((tokens, 130), np.nan, F32)
            moe.forward(*inputs(layer, slice(tokens)), out)
            want = out if want is None else want
            assert (out == want[:tokens]).all(), (pool.groups, tokens)


def test_groups_hold_what_they_own(grouped):
    """A group's block: its columns of h and out and what its threads need; the blocks together hold nothing twice."""
    from ktcy import kernels

    tokens, shape = 70, LayerShape(5, 2, 1024, 768)
    fmt = kernels.default().format("int8")
    values = np.zeros((5, 768, 1024), F32)
    packed = PackedLayer.pack(fmt, values, values, values.reshape(5, 1024, 768), shape=shape)
    for pool in grouped:
        moe = MoE(fmt, packed, pool, range(5))
        needs = moe.scratch_bytes(tokens, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            one = Pool(topology=dataclasses.replace(CROWD, quota=None), threads=pool.threads)
        with one:
            [alone] = MoE(fmt, packed, one, range(5)).scratch_bytes(tokens, 2)
        lines = pool.threads * 4 * 768 if pool.groups > 1 else 0  # rows of h brought together
        # Each array begins at a cache line, and a group has three of its own and a few words in two shared ones.
        assert 0 <= sum(needs) - lines - alone <= 64 * 5 * pool.groups
        for group, need in enumerate(needs):
            begin, total = sum(pool.group_threads[:group]), sum(pool.group_threads)
            end = begin + pool.group_threads[group]
            mine = [max(0, n // 16 * end // total - n // 16 * begin // total - 2) * 16 for n in (768, 1024)]
            assert need >= 4 * tokens * (2 * mine[0] + mine[1])
        pool.release()
        ids = np.zeros((tokens, 2), np.int32)
        moe.forward(np.ones((tokens, 1024), F32), ids, np.ones((tokens, 2), F32), np.empty((tokens, 1024), F32))
        held = pool.group_scratch()
        assert held == tuple((need // (2 << 20) + 1) * (2 << 20) for need in needs)
        moe.forward(np.ones((1, 1024), F32), ids[:1], np.ones((1, 2), F32), np.empty((1, 1024), F32))
        assert pool.group_scratch() == held  # reused


def test_scratch_grows_between_forwards_only(kernels, grouped):
    """Python threads with batches of all sizes on one pool, whose memory comes and goes meanwhile."""
    layer = case(7, LayerShape(5, 2, 130, 84), tokens=80, bias=False)
    fmt, pool, wrong = kernels.format("int8"), grouped[2], []
    packed = PackedLayer.pack(fmt, layer.gate, layer.up, layer.down, shape=layer.shape, activation=layer.activation)
    moe, want = MoE(fmt, packed, pool, range(5)), np.empty((80, 130), F32)
    moe.forward(*inputs(layer), want)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            tokens = int(rng.integers(1, 81))
            out = np.full((tokens, 130), np.nan, F32)
            if tokens % 5 == 0:
                pool.release()
            moe.forward(*inputs(layer, slice(tokens)), out)
            if not (out == want[:tokens]).all():
                wrong.append((seed, tokens))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("groups", [1, 2, 5, 9])
def test_each_group_may_hold_its_own_slice(kernels, groups):
    """C64: slices are local copies, together one copy; repeated experts of the map are copied once."""
    layer = case(4, LayerShape(5, 2, 130, 96), tokens=70, bias=False)
    fmt = kernels.format("int8")
    packed = PackedLayer.pack(fmt, layer.gate, layer.up, layer.down, shape=layer.shape, activation=layer.activation)
    expert_map = [4, 0, 0, 3, 1]
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pool = Pool(9, groups=groups)
    with pool:
        for local in (False, True):
            moe = MoE(fmt, packed, pool, expert_map, local)
            results.append(np.full((70, 130), np.nan, F32))
            moe.forward(*inputs(layer), results[-1])
            held = sum(memory_of(pool))
            assert held == 0 if not local else 0 < held <= 4 / 5 * packed.nbytes + groups * 4096
            del moe
        assert sum(memory_of(pool)) == 0
    assert (results[0] == results[1]).all()


def memory_of(pool):
    return pool._memory()["group_bytes"]


def test_local_copy_that_does_not_fit_says_so(monkeypatch):
    """C64: need and available are compared first, with figures."""
    from ktcy import kernels

    layer = case(5, bias=False)
    fmt = kernels.default().format("int8")
    packed = PackedLayer.pack(fmt, layer.gate, layer.up, layer.down, shape=layer.shape)
    monkeypatch.setattr(memory, "available", lambda root="/": 1000)
    with Pool(1) as pool, pytest.raises(MemoryError, match="layer 0 needs .* GiB of memory; .* available"):
        MoE(fmt, packed, pool, range(6), True)


def test_threads_that_are_fewer_than_pools():
    """C45: nor are there nodes that do not exist."""
    with pytest.raises(ValueError, match="there is no node 999 with usable CPUs; the nodes are"):
        KTMoEWrapper(0, 6, 2, 96, 80, numa_nodes=[999])
    with pytest.raises(ValueError, match="1 threads for 2 groups: every group needs at least one"):
        KTMoEWrapper(0, 6, 2, 96, 80, cpuinfer_threads=1, threadpool_count=2)


def test_capture_sizes():
    try:
        KTMoEWrapper.set_capture_batch_sizes([8, 1, 4])
        assert KTMoEWrapper.get_capture_batch_sizes() == [1, 4, 8]
        with pytest.raises(ValueError, match="capture batch size"):
            KTMoEWrapper.set_capture_batch_sizes([0])
        assert KTMoEWrapper.get_capture_batch_sizes() == [1, 4, 8]
    finally:
        KTMoEWrapper.set_capture_batch_sizes([])
        KTMoEWrapper.clear_buffer_cache()


def test_buffers_are_reused_and_only_capture_sizes_stay():
    buffers = Buffers()
    buffers.set_capture([4])

    def cycle(tokens, times):
        seen = set()
        for _ in range(times):
            slot = buffers.take(tokens, 8, 2, np.dtype(F32))
            seen.add(slot.x.ctypes.data)
            buffers.give(slot)
        return seen

    kept, other = cycle(4, 6), cycle(5, 6)
    assert len(kept) == 1 and len(other) == 1
    assert cycle(4, 6) == kept
    assert len(buffers._free) == 1
    buffers.clear()
    assert not buffers._free


def test_trace_sums_to_the_forward_and_opens_as_json(pair, tmp_path):
    cases, moes, _ = pair
    with Trace() as trace:
        moes[0].forward(*inputs(cases[0]))
        moes[1].submit_forward(*inputs(cases[1]))
        moes[1].sync_forward()
    moes[0].forward(*inputs(cases[0]))
    assert [f["layer"] for f in trace.forwards] == [0, 1]
    assert list(trace.summary()) == ["plan", "quantize", "gather", "gate_up", "requantize", "down", "rows"]
    assert all(seconds >= 0 for seconds in trace.summary().values())
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters, whole, *phases = events[:9]
    assert counters["ph"] == "C" and counters["args"]["tasks"] > 0 and {"steals", "sleeps"} <= set(counters["args"])
    assert whole["name"] == "layer 0" and whole["args"] == {"tokens": 9}
    assert all({"ph", "ts", "dur", "pid", "tid", "name"} <= set(event) for event in events if event["ph"] == "X")
    assert phases[0]["ts"] == whole["ts"] and abs(sum(p["dur"] for p in phases) - whole["dur"]) < 1e-3
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 17])
def test_submitted_and_direct_forwards_have_the_same_passes(pair, monkeypatch, tokens):
    monkeypatch.setattr(ktcy.moe, "CHUNK", 8)
    cases, moes, _ = pair
    batch = [np.resize(a, (tokens, *a.shape[1:])) for a in inputs(cases[0])]
    with Trace() as trace:
        moes[0].forward(*batch)
        moes[0].submit_forward(*batch)
        moes[0].sync_forward()
    half = len(trace.forwards) // 2
    direct, submitted = ([f["tokens"] for f in part] for part in (trace.forwards[:half], trace.forwards[half:]))
    assert direct == submitted and sum(direct) == tokens
    starts = [f["start"] for f in trace.forwards]
    assert starts == sorted(starts) and all(s >= 0 for f in trace.forwards for s in f["phases"].values())


def test_trace_to_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder to write trace.json to"):
        Trace().save(tmp_path / "missing" / "trace.json")


def test_trace_within_itself(pair):
    cases, moes, _ = pair
    trace = Trace()
    with trace, trace:
        moes[0].forward(*inputs(cases[0]))
    moes[0].forward(*inputs(cases[0]))
    assert len(trace.forwards) == 1


@pytest.mark.parametrize("tokens", [1, 16, 64, 600, 4096, 100_000])
@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (256, 8, 7168, 2048), (8, 2, 4096, 14336), (512, 16, 96, 64)])
@pytest.mark.parametrize("threads, groups", [(1, 1), (16, 1), (16, 4)])
def test_memory_beyond_the_weights_is_bounded(sizes, tokens, threads, groups):
    """64 MB and 64 bytes for each token and value of hidden and top-k times intermediate size."""
    from ktcy import kernels

    shape, fmt = LayerShape(*sizes), kernels.default().format("int8")
    one = LayerShape(1, 1, *sizes[2:])
    memory = np.zeros(max(t.end for t in layer_tensors(fmt, one, False).values()), np.uint8)
    with Pool(threads, CROWD, groups=groups) as pool:
        moe = MoE(fmt, PackedLayer(fmt, 0, one, Activation(), False, memory), pool, [0] * shape.num_experts)
        took = sum(moe.scratch_bytes(tokens, shape.num_experts_per_tok))
    values = shape.hidden_size + shape.num_experts_per_tok * shape.moe_intermediate_size
    assert took <= (64 << 20) + 64 * tokens * values


def test_memory_is_flat_over_many_forwards(pair):
    """No leak: 1e5 forwards, half of them submitted."""
    cases, moes, _ = pair
    one = inputs(cases[0], slice(1))

    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    def run(times):
        for _ in range(times):
            moes[0].forward(*one)
            moes[0].submit_forward(*one)
            moes[0].sync_forward()

    run(2000)
    before = rss()
    run(50000)
    assert rss() - before < 4 << 20


CTRL_C = """
import os, signal, threading, time
import numpy as np, ktcy, ktcy.moe
rng = np.random.default_rng(0)
moe = ktcy.KTMoEWrapper(0, 4, 2, 256, 512, cpuinfer_threads=2)
moe.load_weights_from_tensors(*(rng.standard_normal(s, np.float32) for s in [(4, 512, 256)] * 2 + [(4, 256, 512)]))
ktcy.moe.CHUNK = 64
tokens = 1 << 16
x = np.zeros((tokens, 256), np.float16)
ids, weights = np.zeros((tokens, 2), np.int32), np.zeros((tokens, 2), np.float32)
def interrupt():
    while moe.pool.counters()["runs"] < 20:
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    {call}
    print("ran to the end")
except KeyboardInterrupt:
    print("interrupted")
print(moe.forward(x[:3], ids[:3], weights[:3]).shape)
"""


@pytest.mark.parametrize(
    "call", ["moe.forward(x, ids, weights)", "moe.submit_forward(x, ids, weights); moe.sync_forward()"]
)
def test_ctrl_c_during_a_long_forward(call):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CTRL_C.format(call=call)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["interrupted", "(3, 256)"]


def test_exit_with_work_in_flight():
    code = CTRL_C.split("def interrupt")[0] + "moe.submit_forward(x[:5000], ids[:5000], weights[:5000])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


class Rows(torch.utils.data.Dataset):
    """Rows of the output of a layer that the worker makes, and what it is told when it uses the parent's."""

    def __init__(self, layer, parents):
        self.layer, self.parents = layer, parents

    def __len__(self):
        return 4

    def __getitem__(self, i):
        row, told = inputs(self.layer, slice(i, i + 1)), None
        try:
            self.parents.forward(*row)
        except RuntimeError as error:
            told = str(error)
        return loaded(self.layer).forward(*row), told


def test_workers_of_a_data_loader(pair):
    """C44: forked beside the parent's threads, they have layers of their own; the parent's is an error, not a hang."""
    cases, moes, expected = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: fork beside threads
        options = dict(batch_size=None, num_workers=2, multiprocessing_context="fork")
        rows, told = zip(*torch.utils.data.DataLoader(Rows(cases[0], moes[0]), **options))
    assert (np.concatenate(rows) == expected[0][:4]).all()
    assert all("belongs to the parent process" in message for message in told)
    assert (moes[0].forward(*inputs(cases[0])) == expected[0]).all()


class Traffic(RuleBasedStateMachine):
    """Any order of submits, syncs and plain forwards on two layers gives each its own bits."""

    def __init__(self):
        super().__init__()
        self.flights = [[], []]

    @rule(layer=st.integers(0, 1), tokens=st.integers(0, 9))
    def submit(self, layer, tokens):
        MOES[layer].submit_forward(*inputs(CASES[layer], slice(tokens)))
        self.flights[layer].append(tokens)

    @precondition(lambda self: any(self.flights))
    @rule(layer=st.integers(0, 1))
    def sync(self, layer):
        if not self.flights[layer]:
            layer = 1 - layer
        tokens = self.flights[layer].pop(0)
        got = MOES[layer].sync_forward()
        assert got.shape == (tokens, 96) and (got == EXPECTED[layer][:tokens]).all()

    @rule(layer=st.integers(0, 1), tokens=st.integers(0, 9))
    def forward(self, layer, tokens):
        got = MOES[layer].forward(*inputs(CASES[layer], slice(tokens)))
        assert (got == EXPECTED[layer][:tokens]).all()

    @rule()
    def clear(self):
        KTMoEWrapper.clear_buffer_cache()

    @invariant()
    def nothing_fails_in_the_queue(self):
        assert MOES[0].cpu_infer is MOES[1].cpu_infer and MOES[0].cpu_infer.pending >= 0

    def teardown(self):
        for layer, flights in enumerate(self.flights):
            for _ in flights:
                MOES[layer].sync_forward()


def test_any_order_of_submits_and_syncs(pair):
    global CASES, MOES, EXPECTED
    CASES, MOES, EXPECTED = pair
    Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
    Traffic.TestCase().runTest()

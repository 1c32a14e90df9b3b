"""The whole path on made-up weights: write a Hugging Face checkpoint, convert it, run it, hold it to float64."""

import errno
import json
import shutil
import statistics
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm.auto import tqdm

from . import kernels, limits
from .config import integer
from .conversion import convert
from .experts import KTMoEWrapper
from .runtime import topology
from .weights import Checkpoint

# Qwen3-30B-A3B.
SIZES = dict(num_experts=128, num_experts_per_tok=8, hidden_size=2048, moe_intermediate_size=768)


def write_checkpoint(folder, layers, sizes, seed=0):
    """Writes a seeded Qwen3-MoE checkpoint (experts only) as Hugging Face does: config, shards, index.

    Weights are bfloat16, normal with standard deviation 0.02, cut at random places from one long sample: drawing
    every value would take longer than everything after it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    h, i, e = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["num_experts"]
    sample = (rng.standard_normal(8 * h * i, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    weight_map, total = {}, 0
    for layer in tqdm(range(layers), "checkpoint", unit="layer", disable=None):
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        tensors = {}
        for expert in range(e):
            for projection, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
                start = rng.integers(0, 7 * h * i)
                key = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                tensors[key] = sample[start : start + h * i].reshape(shape)
                weight_map[key] = name
                total += tensors[key].nbytes
        save_file(tensors, folder / name, {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "torch_dtype": "bfloat16",
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))


def reference(checkpoint, layer, x, ids, weights):
    """The layer in float64 on the checkpoint's own weights: [T, H]."""
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        token = x[t].astype(np.float64)
        for e, weight in zip(ids[t], weights[t]):
            expert = checkpoint.expert(layer, e)
            gate = expert.gate.astype(np.float64) @ token
            up = expert.up.astype(np.float64) @ token
            out[t] += weight * (expert.down.astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return out


def routing(rng, tokens, experts, top_k):
    """Random distinct experts a token and softmax weights: ids int64, weights float32, both [T, k]."""
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int64)
    scores = np.exp(rng.standard_normal((tokens, top_k)))
    return ids, (scores / scores.sum(1, keepdims=True)).astype(np.float32)


def expert_weights(sizes):
    """Weights of one expert: gate, up and down."""
    return 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"]


def check_room(folder, layers, sizes):
    """Raises OSError (ENOSPC) unless the checkpoint (bfloat16) and its int8 copy fit on the disk of ``folder``."""
    needed = 3.05 * layers * sizes["num_experts"] * expert_weights(sizes)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the demo needs {needed / 1e9:.1f} GB on the disk of {folder}, {free / 1e9:.1f} GB are free; "
            "choose fewer layers (--layers 1), or a folder on another disk (--folder DIR)",
        )


def run(folder, *, layers=3, sizes=SIZES, batches=(1, 16, 256, 1024), threads=None):
    """Writes a checkpoint, converts it, and runs every layer on the best variant and on AVX2.

    Shows progress bars where standard error is a terminal.

    Parameters
    ----------
    folder : path-like
        An existing folder; gets ``model`` (about 1.2 GB a layer) and ``int8`` (0.6 GB).
    layers : int
    sizes : dict
        num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size.
    batches : sequence of int
        Numbers of tokens.
    threads : int, optional

    Yields
    ------
    dict
        One a variant, batch and layer. variant, threads, layer, tokens; seconds: median of the runs, each with
        other tokens; read_bandwidth (bytes/s) and peak_int8 (operations/s): what `limits` measured on these threads
        just before and just after, the higher; bandwidth: bytes of the experts touched a second; rate: operations a
        second, two for each multiply-add; bound: which of the limits allows less, "read" or "int8"; fraction: of that
        limit; error: relative to float64 on the weights of the checkpoint, of the first two tokens.

    Raises
    ------
    TypeError, ValueError
        For layers or threads that are no positive integers.
    OSError
        For a disk without enough room.
    """
    if threads is not None:
        topology.checked_threads(threads)
    check_room(folder, integer("layers", layers, 1), sizes)
    source, packed = Path(folder) / "model", Path(folder) / "int8"
    write_checkpoint(source, layers, sizes)
    convert(source, packed, format="int8", threads=threads)
    rng = np.random.default_rng(1)
    tokens = max(batches)
    x = rng.standard_normal((tokens, sizes["hidden_size"]), np.float32).astype(ml_dtypes.bfloat16)
    ids, weights = routing(rng, tokens, sizes["num_experts"], sizes["num_experts_per_tok"])
    with Checkpoint(source) as checkpoint:
        numbers = tqdm(range(layers), "float64", unit="layer", disable=None)
        expected = [reference(checkpoint, n, x[:2], ids[:2], weights[:2]) for n in numbers]
    weight = expert_weights(sizes)
    memory = np.full(max(2**29, 5 * limits.cache_bytes() // 2, weight), 1, np.uint8)
    for variant in dict.fromkeys([kernels.default().name, "avx2"]):
        options = dict(cpuinfer_threads=threads, weight_path=packed, variant=variant)
        moes = [KTMoEWrapper(n, **sizes, **options) for n in range(layers)]
        for moe in moes:
            moe.load_weights(prefault=True)
        table, pool = kernels.load(variant), moes[0].pool

        def measured():
            return limits.read_bandwidth(table, pool, memory, weight), limits.peak(table, pool, "int8")

        after = measured()
        for n in batches:
            before, runs, first = after, {}, {}
            for start in range(0, tokens - n + 1, n)[:20]:
                part = slice(start, start + n)
                touched = np.unique(ids[part]).size * weight
                for layer, moe in enumerate(moes):
                    begin = time.perf_counter()
                    y = moe.forward(x[part], ids[part], weights[part])
                    runs.setdefault(layer, []).append((time.perf_counter() - begin, touched))
                    first.setdefault(layer, y[:2].astype(np.float64))
            after = measured()
            read, peak = map(max, before, after)
            operations = 2 * n * ids.shape[1] * weight
            for layer, got in first.items():
                seconds, touched = statistics.median_low(runs[layer])
                least = {"read": touched / read, "int8": operations / peak}
                bound = max(least, key=least.get)
                right = expected[layer][: len(got)]
                yield dict(
                    variant=variant,
                    threads=pool.threads,
                    layer=layer,
                    tokens=n,
                    seconds=seconds,
                    bandwidth=touched / seconds,
                    rate=operations / seconds,
                    read_bandwidth=read,
                    peak_int8=peak,
                    bound=bound,
                    fraction=least[bound] / seconds,
                    error=float(np.linalg.norm(got - right) / np.linalg.norm(right)),
                )
        for moe in moes:
            moe.close()

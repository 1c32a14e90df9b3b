"""The whole path on made-up weights: write a Hugging Face checkpoint, convert it, run it, hold it to float64."""

import json
import statistics
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import serialize_file

from . import kernels, limits
from .conversion import convert
from .experts import KTMoEWrapper
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
    for layer in range(layers):
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        tensors = {}
        for expert in range(e):
            for projection, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
                start = rng.integers(0, 7 * h * i)
                key = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                data = sample[start : start + h * i].tobytes()
                tensors[key] = {"dtype": "bfloat16", "shape": list(shape), "data": data}
                weight_map[key] = name
                total += len(data)
        serialize_file(tensors, str(folder / name), {"format": "pt"})
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


def roofline_seconds(shape, ids, rate_bytes, rate_ops):
    """The least time of one forward: int8 weights of the experts touched, or its multiply-adds."""
    per_expert = 3 * shape["hidden_size"] * shape["moe_intermediate_size"]
    return max(np.unique(ids).size * per_expert / rate_bytes, 2 * per_expert * ids.size / rate_ops)


def run(folder, *, layers=3, sizes=SIZES, batches=(1, 16, 256, 1024), threads=None):
    """Runs the demo in ``folder``; yields one dict a layer, variant and batch.

    Returns
    -------
    iterator of dict
        variant, layer, tokens, seconds (median), gbs (weight bytes a second / 1e9), fraction (of this machine's
        roofline, measured in the same run), error (relative to float64 of the original weights, first 2 tokens).
    """
    source, packed = Path(folder) / "model", Path(folder) / "int8"
    write_checkpoint(source, layers, sizes)
    convert(source, packed, format="int8", threads=threads)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((max(batches), sizes["hidden_size"]), np.float32).astype(ml_dtypes.bfloat16)
    per_expert = 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"]
    routes = {n: routing(rng, n, sizes["num_experts"], sizes["num_experts_per_tok"]) for n in batches}
    with Checkpoint(source) as checkpoint:
        expected = {n: reference(checkpoint, n, x[:2], *(a[:2] for a in routes[max(batches)])) for n in range(layers)}
    for variant in dict.fromkeys([kernels.default().name, "avx2"]):
        options = dict(cpuinfer_threads=threads, weight_path=packed, variant=variant)
        moes = [KTMoEWrapper(n, **sizes, **options) for n in range(layers)]
        for moe in moes:
            moe.load_weights(prefault=True)
        pool, table = moes[0].pool, kernels.load(variant)
        memory = np.concatenate([moe.packed.gate_up_weight.reshape(-1) for moe in moes])
        rate_bytes = limits.read_bandwidth(table, pool, memory, per_expert)
        rate_ops = limits.peak_int8(table, pool)
        del memory
        for n in batches:
            ids, weights = routes[n]
            repeats = max(1, min(20, 64 // n))
            seconds = {layer: [] for layer in range(layers)}
            for _ in range(repeats):
                for layer, moe in enumerate(moes):
                    start = time.perf_counter()
                    moe.forward(x[:n], ids, weights)
                    seconds[layer].append(time.perf_counter() - start)
            for layer, moe in enumerate(moes):
                median = statistics.median(seconds[layer])
                ids2, weights2 = (a[:2] for a in routes[max(batches)])
                got = moe.forward(x[:2].astype(np.float32), ids2, weights2)
                error = np.linalg.norm(got - expected[layer]) / np.linalg.norm(expected[layer])
                yield dict(
                    variant=variant,
                    layer=layer,
                    tokens=n,
                    seconds=median,
                    gbs=np.unique(ids).size * per_expert / median / 1e9,
                    fraction=roofline_seconds(sizes, ids, rate_bytes, rate_ops) / median,
                    error=float(error),
                )

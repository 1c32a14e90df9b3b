"""From a checkpoint to an answer, on weights made up here: python examples/quickstart.py"""

import tempfile

import numpy as np

import ktcy
from ktcy.demo import write_checkpoint

LAYERS, TOKENS = 2, 5
SIZES = dict(num_experts=16, num_experts_per_tok=4, hidden_size=256, moe_intermediate_size=192)


def route(x, router):
    """Top-k experts of each token and their softmax weights, as the model's router gives them."""
    scores = np.exp(x @ router)
    ids = np.argsort(-scores, axis=1)[:, : SIZES["num_experts_per_tok"]]
    chosen = np.take_along_axis(scores, ids, axis=1)
    return ids, chosen / chosen.sum(axis=1, keepdims=True)


rng = np.random.default_rng(0)
x = rng.standard_normal((TOKENS, SIZES["hidden_size"]), np.float32)
with tempfile.TemporaryDirectory() as folder:
    write_checkpoint(f"{folder}/model", LAYERS, SIZES)  # in real life: a model from Hugging Face
    ktcy.convert(f"{folder}/model", f"{folder}/int8")
    for layer in range(LAYERS):
        router = 0.1 * rng.standard_normal((SIZES["hidden_size"], SIZES["num_experts"]), np.float32)
        with ktcy.KTMoEWrapper(layer, **SIZES, weight_path=f"{folder}/int8", method="int8") as moe:
            moe.load_weights()
            print(moe)
            x = x + moe.forward(x, *route(x, router))
print(f"{TOKENS} tokens after {LAYERS} layers, the same bits on every machine's kernels: {x.shape} {x.dtype}")

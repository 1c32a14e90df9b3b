"""From a checkpoint that transformers saved to an answer: our layer against transformers' own expert block."""

import copy
import functools
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import models
import numpy as np
import oracle
import pytest
import torch

import ktcy
from ktcy import Activation, Checkpoint, KTMoEWrapper, cli
from ktcy.config import LayerShape
from ktcy.kernels import load as kernels_of
from ktcy.weights.packed import PackedLayer

H, I, E = 64, 48, 4  # noqa: E741
# Tokens, and what their hidden states are multiplied by: few and many for each expert; past the clamps of gpt-oss.
BATCHES = (3, 1), (40, 16)


class Block:
    """The experts of one layer of a model, and what its own router sent them in one run of the model."""

    def __init__(self, model, layer, activation, tokens, scale):
        self.module, self.activation = models.experts_module(model, layer), activation
        seen = []
        hook = self.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
        with torch.no_grad():
            text = getattr(model, "language_model", model)
            text(input_ids=torch.from_numpy(np.random.default_rng(layer).integers(3, 64, (1, tokens))))
        hook.remove()
        x, *routed = (a.detach() for a in seen[0])
        self.llama4 = not routed
        if self.llama4:
            # Its block gets the rows of each expert in turn, times the router's score, which is 0 but for the top-1.
            rows = x.view(E, tokens, H)
            routed = rows.any(dim=2).int().argmax(dim=0, keepdim=True).T, torch.ones(tokens, 1)
            x = rows.sum(dim=0)
        self.x, (self.ids, self.route) = x * scale, routed
        self.experts = [oracle.Expert(*models.expert_arrays(model, layer, e)) for e in range(E)]

    @functools.cache
    def transformers(self, dtype):
        """What transformers' module makes of it in a dtype, float64."""
        module = copy.deepcopy(self.module).to(dtype)
        if getattr(module, "config", None) is not None:
            module.config._experts_implementation = "eager"
        for name in ("alpha", "swiglu_alpha"):
            if hasattr(module, name):
                setattr(module, name, float(np.float32(getattr(module, name))))
        x, inputs = self.x.to(dtype), (self.ids, self.route.to(dtype))
        if self.llama4:
            rows = torch.zeros(E, len(x), H, dtype=dtype)
            rows[self.ids[:, 0], torch.arange(len(x))] = x
            x, inputs = rows.view(-1, H), ()
        with torch.no_grad():
            out = module(x, *inputs)
        return (out.view(E, -1, H).sum(dim=0) if self.llama4 else out).double().numpy()

    @functools.cache
    def reference(self, form):
        x, ids, route = (a.numpy() for a in (self.x.float(), self.ids, self.route.float()))
        return oracle.moe_layer(x, ids, route, self.experts, self.activation, form)

    def stacks(self):
        """gate, up, down and the biases as views of the module's parameters."""
        fused, down = self.module.gate_up_proj, self.module.down_proj
        if fused.shape[2] == 2 * I:
            fused, down = fused.transpose(1, 2), down.transpose(1, 2)
        bias = getattr(self.module, "gate_up_proj_bias", None)
        if bias is None:
            return (fused[:, :I], fused[:, I:], down), {}
        biases = dict(gate_bias=bias[:, 0::2], up_bias=bias[:, 1::2], down_bias=self.module.down_proj_bias)
        return (fused[:, 0::2], fused[:, 1::2], down), biases


class Model(NamedTuple):
    """A saved model: its folder, what `Checkpoint` says of it, a folder with its converted layers, and its blocks."""

    path: Path
    shape: LayerShape
    activation: Activation
    converted: Path
    blocks: dict

    def wrapper(self, layer, **options):
        return KTMoEWrapper(layer, *astuple(self.shape), cpuinfer_threads=2, **options)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A function: the `Model` of an architecture."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def made(architecture):
        sizes = dict(num_experts=E, hidden_size=H, moe_intermediate_size=I)
        top_k = 1 if architecture.startswith("llama4") else 2
        model, path = models.make(architecture, folder, num_experts_per_tok=top_k, **sizes)
        converted = folder / f"{architecture}-converted"
        ktcy.convert(path, converted)
        with Checkpoint(path) as c:
            blocks = {n: [Block(model, n, c.activation, *batch) for batch in BATCHES] for n in c.layers}
            return Model(path, c.shape, c.activation, converted, blocks)

    return made


def within(got, want, bound, dtype="float64"):
    if dtype != "float64":
        bound = oracle.stored(want, bound, dtype)
    oracle.assert_within(got, want, bound)


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_our_layer_is_transformers_expert_block(architecture, model, kernels):
    """C31 C32: saved by transformers, converted, loaded; on the hidden states, ids and weights of its own router."""
    m = model(architecture)
    assert m.blocks
    for layer, blocks in m.blocks.items():
        moe = m.wrapper(layer, weight_path=m.converted, variant=kernels.name)
        moe.load_weights()
        for block in blocks:
            got = moe.forward(block.x, block.ids, block.route)
            assert got.dtype == torch.bfloat16
            ours = got.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            scheme, arithmetic = block.reference("int8")
            exact, bound = block.reference("exact")
            within(ours, scheme, arithmetic, "bfloat16")
            for dtype, unit in ((torch.float64, 2.0**-53), (torch.float32, 2.0**-24)):
                theirs = block.transformers(dtype)
                # A sum of n terms errs by n units of the sum of their magnitudes. The bound of the int8 scheme has
                # for each term half a step, 1 / 254 of the largest magnitude.
                own = 254 * (H + I) * unit * bound
                within(theirs, exact, own)
                within(ours, theirs, np.abs(scheme - exact) + arithmetic + own, "bfloat16")


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_the_modules_own_tensors_give_the_same_bytes(architecture, model):
    """C15 C32: views of transformers' fused parameters, as they lie, instead of its files."""
    m = model(architecture)
    for layer, (block, _) in m.blocks.items():
        moe = m.wrapper(layer, activation=m.activation)
        stacks, biases = block.stacks()
        moe.load_weights_from_tensors(*stacks, **biases)
        converted = PackedLayer.open(m.converted, layer)
        assert converted.tensors.keys() == moe.packed.tensors.keys()
        assert all((moe.packed.tensors[name] == t).all() for name, t in converted.tensors.items())


def by_function(m, out):
    ktcy.convert(m.path, out)


def layer_by_layer(m, out):
    for layer in (2, 0):
        ktcy.convert(str(m.path), str(out), format="AMXINT8", layers=[layer], threads=1)


def by_command(m, out):
    command = [sys.executable, "-m", "ktcy", "convert", m.path, out, "--format", "int8", "--threads", "2", "--verify"]
    subprocess.run(command, check=True, capture_output=True)


def by_script(m, out):
    assert cli.main(["convert", str(m.path), str(out), "--layers", "0:1"]) == 0


def by_cpu_save(m, out):
    stacks, biases = m.blocks[0][0].stacks()
    moe = m.wrapper(0, activation=m.activation, weight_path=out, cpu_save=True)
    moe.load_weights_from_tensors(*stacks, **biases)


def by_pack(m, out):
    names = "gate", "up", "down", "gate_bias", "up_bias", "down_bias"
    stacks = {name: [getattr(e, name) for e in m.blocks[0][0].experts] for name in names}
    stacks = {name: stack for name, stack in stacks.items() if stack[0] is not None}
    fmt = kernels_of("avx2").format("int8")
    PackedLayer.pack(fmt, **stacks, shape=m.shape, activation=m.activation, layer=0).save(out)


WAYS = by_function, layer_by_layer, by_command, by_script, by_cpu_save, by_pack


@pytest.mark.parametrize("convert", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_each_way_to_convert_end_to_end(architecture, convert, model, tmp_path):
    """C32: convert, load, compare with the oracle; and all ways write the same bytes."""
    m = model(architecture)
    convert(m, tmp_path)
    moe = m.wrapper(0, weight_path=tmp_path)
    moe.load_weights()
    for block in m.blocks[0]:
        got = moe.forward(block.x.float(), block.ids, block.route).numpy()
        within(got, *block.reference("int8"), "float32")
    files = [(place / "layer-00000.safetensors").read_bytes() for place in (tmp_path, m.converted)]
    assert files[0] == files[1]

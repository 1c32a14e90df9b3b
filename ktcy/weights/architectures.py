"""The Mixture-of-Experts models that ktcy reads: one row each, and nothing about them anywhere else.

A row says how the model's ``config.json`` spells its sizes, which of its layers hold experts, and how the
expert tensors are called on disk and lie in them. Source: what transformers 4 and 5 save, and the released
checkpoints.
"""

from dataclasses import dataclass
from typing import Callable, Optional

from ..config import Activation, LayerShape, integer

# Before "layers.": of a causal model, a bare one, and the text half of a multimodal one (both orders occur).
PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")


def get(config, *keys):
    """The value of the first of ``keys`` that the config has and that is not null.

    Raises
    ------
    ValueError
        Naming the keys, if it has none.
    """
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(f"has no {' or '.join(keys)}")


def _number(config, key, default=None):
    value = get(config, key) if default is None else config.get(key, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"has {key} {value!r}; expected a number, 0 or more")
    return value


def _list(config, key):
    value = config.get(key)
    if not isinstance(value, (list, type(None))):
        raise ValueError(f"has {key} {value!r}; expected a list")
    return value


def _all_layers(config):
    return range(integer("num_hidden_layers", get(config, "num_hidden_layers"), 1, 1 << 16))


def _after_first_dense(config):
    return _all_layers(config)[_number(config, "first_k_dense_replace") :]


def _by_sparse_step(config):
    dense, step = _list(config, "mlp_only_layers") or (), _number(config, "decoder_sparse_step", 1)
    return [layer for layer in _all_layers(config) if layer not in dense and step and (layer + 1) % step == 0]


def _listed_or_interleaved(config):
    listed, everything = _list(config, "moe_layers"), _all_layers(config)
    if listed is not None:
        if not all(layer in everything for layer in listed):
            raise ValueError(f"has moe_layers {listed!r}, of a model of {len(everything)} layers")
        return listed
    step = _number(config, "interleave_moe_layer_step")
    return everything[step - 1 :: step] if step else ()


def _sparse(config):
    """Of MiniMax-M3: ``mlp_layer_types`` ("sparse" or "dense"), or ``moe_layer_freq`` (1 or 0), one a layer."""
    everything = _all_layers(config)
    kinds = _list(config, "mlp_layer_types") or _list(config, "moe_layer_freq") or ["sparse"] * len(everything)
    if len(kinds) != len(everything):
        raise ValueError(f"has {len(kinds)} mlp_layer_types or moe_layer_freq, of a model of {len(everything)} layers")
    return [layer for layer, kind in zip(everything, kinds) if kind in ("sparse", 1)]


@dataclass(frozen=True)
class Architecture:
    """How one kind of model keeps its experts.

    On disk an expert is three matrices ``gate, up [I, H]`` and ``down [H, I]``, called
    ``<prefix>layers.<layer>.<block>.experts.<expert>.<name>.weight``; or all experts of a layer are the two
    tensors ``experts.gate_up_proj [E, 2I, H]`` and ``experts.down_proj [E, H, I]``, or their transposes. Quantized
    matrices are several tensors each, of names like these (`schemes`).

    Attributes
    ----------
    model_type : str
        As in ``config.json``.
    layers : callable
        The numbers of the layers with experts, from the config.
    blocks : tuple of str
        What the module around the experts may be called.
    names : tuple of str
        Of gate, up and down of one expert.
    intermediate : str
        The config's key of the experts' intermediate size.
    interleaved : bool
        In the fused tensor gate and up alternate, instead of all of gate first.
    bias : bool
        Gate, up and down have biases.
    mtp : bool
        Layers past ``num_hidden_layers``, or under ``mtp.``, may follow (multi-token prediction); they are not read.
    activation : str or None
        For `Activation.named`; None means the config's ``hidden_act``.
    """

    model_type: str
    layers: Callable
    blocks: tuple = ("mlp",)
    names: tuple = ("gate_proj", "up_proj", "down_proj")
    intermediate: str = "moe_intermediate_size"
    interleaved: bool = False
    bias: bool = False
    mtp: bool = False
    activation: Optional[str] = None

    def shape(self, config):
        return LayerShape(
            get(config, "num_experts", "n_routed_experts", "num_local_experts"),
            get(config, "num_experts_per_tok"),
            get(config, "hidden_size"),
            get(config, self.intermediate),
        )

    def activation_of(self, config):
        name = self.activation or get(config, "hidden_act")
        return Activation.named(name, config.get("swiglu_alpha"), config.get("swiglu_limit"))


_MIXTRAL = dict(blocks=("block_sparse_moe", "mlp"), names=("w1", "w3", "w2"), intermediate="intermediate_size")

ARCHITECTURES = {
    row.model_type: row
    for row in (
        Architecture("qwen2_moe", _by_sparse_step),
        Architecture("qwen3_moe", _by_sparse_step),
        Architecture("qwen3_next", _by_sparse_step, mtp=True),
        Architecture("mixtral", _all_layers, **_MIXTRAL),
        Architecture("deepseek_v2", _after_first_dense),
        Architecture("deepseek_v3", _after_first_dense, mtp=True),
        Architecture("deepseek_v4", _all_layers, ("ffn", "mlp"), ("w1", "w3", "w2"), mtp=True),
        Architecture("kimi_k2", _after_first_dense, mtp=True),
        Architecture("olmoe", _all_layers, intermediate="intermediate_size"),
        Architecture("glm4_moe", _after_first_dense, mtp=True),
        Architecture("phimoe", _all_layers, **_MIXTRAL),
        Architecture("minimax_m2", _all_layers, mtp=True, **_MIXTRAL),
        Architecture("minimax_m3_vl_text", _sparse, activation="swigluoai", **_MIXTRAL),
        Architecture("llama4_text", _listed_or_interleaved, ("feed_forward",), intermediate="intermediate_size"),
        Architecture(
            "gpt_oss",
            _all_layers,
            intermediate="intermediate_size",
            interleaved=True,
            bias=True,
            activation="swigluoai",
        ),
    )
}


def architecture_of(config):
    """The row of a model and the part of its config that describes its text half.

    Parameters
    ----------
    config : dict
        ``config.json``.

    Raises
    ------
    ValueError
        For a model that has no row; the message lists those that have.
    """
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    name = get(config, "model_type")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        raise ValueError(f"has model_type {name!r}; ktcy reads {', '.join(ARCHITECTURES)}")
    return row, config

"""Tiny Mixture-of-Experts models, made, seeded and saved by transformers."""

import json
import logging
import re

import numpy as np

_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
_IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
_DEEPSEEK = dict(
    first_k_dense_replace=1,
    intermediate_size=80,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_group=1,
    topk_group=1,
)
# model -> prefix of its classes, what its config calls num_experts and moe_intermediate_size, what else it needs
_MODELS = {
    "qwen2_moe": ("Qwen2Moe", "num_experts", "moe_intermediate_size", dict(decoder_sparse_step=2)),
    "qwen3_moe": ("Qwen3Moe", "num_experts", "moe_intermediate_size", dict(mlp_only_layers=[1], head_dim=16)),
    "qwen3_next": (
        "Qwen3Next",
        "num_experts",
        "moe_intermediate_size",
        dict(
            mlp_only_layers=[1],
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            shared_expert_intermediate_size=16,
        ),
    ),
    "mixtral": ("Mixtral", "num_local_experts", "intermediate_size", {}),
    "deepseek_v2": ("DeepseekV2", "n_routed_experts", "moe_intermediate_size", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3", "n_routed_experts", "moe_intermediate_size", _DEEPSEEK),
    # Kimi-K2 is DeepSeek-V3 under another name; transformers has no class of its own for it.
    "kimi_k2": ("DeepseekV3", "n_routed_experts", "moe_intermediate_size", _DEEPSEEK),
    "deepseek_v4": (
        "DeepseekV4",
        "n_routed_experts",
        "moe_intermediate_size",
        dict(head_dim=16, q_lora_rank=16, o_lora_rank=16, o_groups=2),
    ),
    "olmoe": ("Olmoe", "num_experts", "intermediate_size", {}),
    "glm4_moe": (
        "Glm4Moe",
        "n_routed_experts",
        "moe_intermediate_size",
        dict(first_k_dense_replace=1, intermediate_size=80, head_dim=16, n_group=1, topk_group=1),
    ),
    "phimoe": ("Phimoe", "num_local_experts", "intermediate_size", {}),
    "minimax_m2": ("MiniMaxM2", "num_local_experts", "intermediate_size", dict(head_dim=16, rotary_dim=8)),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLText",
        "num_local_experts",
        "intermediate_size",
        dict(
            head_dim=16,
            rotary_dim=8,
            dense_intermediate_size=80,
            shared_intermediate_size=32,
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
    ),
    "llama4_text": (
        "Llama4Text",
        "num_local_experts",
        "intermediate_size",
        dict(intermediate_size_mlp=80, head_dim=16, interleave_moe_layer_step=2),
    ),
    "llama4": (
        "Llama4Text",
        "num_local_experts",
        "intermediate_size",
        dict(intermediate_size_mlp=80, head_dim=16, interleave_moe_layer_step=1),
    ),
    "gpt_oss": (
        "GptOss",
        "num_local_experts",
        "intermediate_size",
        dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    ),
}
ARCHITECTURES = tuple(_MODELS)

_VISION = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    vision_output_dim=16,
    image_size=28,
    patch_size=14,
    projector_input_dim=16,
    projector_output_dim=16,
)


def make(
    architecture,
    tmpdir,
    *,
    num_experts=4,
    num_experts_per_tok=2,
    hidden_size=64,
    moe_intermediate_size=48,
    num_hidden_layers=3,
    dtype="bfloat16",
    seed=0,
    **save,
):
    """Makes a model and saves it.

    Parameters
    ----------
    architecture : str
        One of `ARCHITECTURES`: the model_type in ``config.json``; "llama4" is the multimodal one.
    tmpdir : path-like
        Parent of the folder to save in.
    **save
        Of ``save_pretrained``: max_shard_size, save_original_format, ...

    Returns
    -------
    model, path : PreTrainedModel, Path
        All parameters of the experts are random (transformers leaves biases 0).
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    prefix, experts_key, intermediate_key, extra = _MODELS[architecture]
    config_class = getattr(transformers, f"{prefix}Config")
    sizes = dict(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_experts_per_tok=num_experts_per_tok,
        **{experts_key: num_experts, intermediate_key: moe_intermediate_size},
    )
    config = config_class(**{**_HEADS, **_IDS, **sizes, **extra})
    if architecture == "llama4":
        config = transformers.Llama4Config(text_config=config.to_dict(), vision_config=_VISION)
        model_class = transformers.Llama4ForConditionalGeneration
    else:
        model_class = transformers.AutoModelForCausalLM._model_mapping[config_class]
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=0.1)
        # Parameters only: transformers keeps some buffers (complex rotary tables) as they are, too.
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = dtype
    path = tmpdir / f"{architecture}-{len(list(tmpdir.iterdir()))}"
    model.save_pretrained(path, **save)
    if architecture == "kimi_k2":
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**settings, "model_type": architecture}))
    return model, path


def experts_module(model, layer):
    """The module of a layer that holds the experts, with ``gate_up_proj`` and ``down_proj``; None for a dense layer."""
    for name, module in model.named_modules():
        if re.search(rf"(^|\.)layers\.{layer}\.\w+\.experts$", name):
            return module
    return None


def expert_arrays(model, layer, e):
    """gate, up, down and their biases (or None) as float32, in the orientation of ktcy, straight from the module."""
    module = experts_module(model, layer)
    both, down = (getattr(module, name).detach()[e].float().numpy() for name in ("gate_up_proj", "down_proj"))
    kind = type(module).__name__
    if kind.startswith(("GptOss", "Llama4")):
        both, down = both.T, down.T
    cut = np.split if not kind.startswith("GptOss") else (lambda rows, _: (rows[0::2], rows[1::2]))
    biases = None, None, None
    if getattr(module, "gate_up_proj_bias", None) is not None:
        bias, down_bias = (getattr(module, f"{n}_proj_bias").detach()[e].float().numpy() for n in ("gate_up", "down"))
        biases = *cut(bias, 2), down_bias
    return (*cut(both, 2), down, *biases)

"""Named shapes and activations, shared by tests and benchmarks."""

from ktcy.config import Activation, LayerShape

# num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size
SHAPES = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "deepseek-v2-lite": LayerShape(64, 6, 2048, 1408),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
    "glm-4.5-air": LayerShape(128, 8, 4096, 1408),
    "gpt-oss-120b": LayerShape(128, 4, 2880, 2880),
}

ACTIVATIONS = {name: Activation.named(name) for name in ("silu", "swigluoai", "gelu", "gelu_tanh")}

# Row counts on both sides of every path switch: few rows, a tile, a strip of two tiles, the second strip.
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70)

# K on both sides of a line (4), a vector (16), a padding unit (64), and sizes of real models.
DEPTHS = (1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 96, 127, 128, 130, 1408, 2880)

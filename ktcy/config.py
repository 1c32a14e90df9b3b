"""What a layer is: its sizes, its activation, its weight format. The one place that validates them."""

import math
import numbers
import operator
from dataclasses import dataclass

# The names of ours and of kt-kernel, by method. int8, int4 and bf16 are made from any weights, the others keep the
# codes of a checkpoint; auto is what the files hold, gguf the same for GGUF files.
METHODS = {
    "int8": ("AMXINT8", "MOE_INT8", "int8"),
    "int4": ("AMXINT4", "MOE_INT4", "int4"),
    "bf16": ("BF16", "bf16"),
    "fp8": ("FP8", "fp8"),
    "fp8_channel": ("FP8_PERCHANNEL", "fp8_channel"),
    "rawint4": ("RAWINT4", "rawint4"),
    "gptq": ("GPTQ_INT4", "gptq"),
    "mxfp4": ("MXFP4", "mxfp4"),
    "mxfp8": ("MXFP8", "mxfp8"),
    "gguf": ("LLAMAFILE", "gguf"),
    "auto": ("auto",),
}
MADE = ("int8", "int4", "bf16")
# The formats of the kernels' table in which a method may hold a layer, where not the one of its own name.
_INT4 = ("rawint4", "q4_0", "gptq32", "gptq64", "gptq128")
FORMATS = {"gptq": _INT4, "rawint4": _INT4}

GATES = ("swiglu", "gelu", "gelu_tanh")

# 127 * 127 * K stays below 2**31 (kernels/table.h, KT_MAX_K).
MAX_K = 131072


def method_of(name):
    """The method, a key of `METHODS`, that a name of ktcy (``"int8"``) or kt-kernel (``"AMXINT8"``) means.

    Raises
    ------
    ValueError
        For an unknown name; the message lists all.
    """
    for method, names in METHODS.items():
        if name in names:
            return method
    known = ", ".join(name for names in METHODS.values() for name in names)
    raise ValueError(f"unknown method {name!r}; the methods are {known}")


def method_takes(method, fmt):
    """Whether weights in a format, named as in the kernels' table, are what a method means."""
    return method in ("auto", "gguf") or fmt in FORMATS.get(method, (method,))


def integer(name, value, least=1, most=None):
    """``value`` as an int in [least, most].

    Raises
    ------
    TypeError, ValueError
        Naming the parameter and what was found.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if number < least or (most is not None and number > most):
        upper = f" and at most {most}" if most is not None else ""
        raise ValueError(f"{name} must be at least {least}{upper}, not {number}")
    return number


@dataclass(frozen=True)
class Activation:
    """The gated activation between the two products of an expert.

    ``swiglu``: ``g = min(g, limit); u = clamp(u, -limit, limit); g * sigmoid(alpha * g) * (u + offset)``.
    The defaults are SwiGLU; gpt-oss ("swigluoai") is ``alpha=1.702, limit=7, offset=1``.
    ``gelu`` and ``gelu_tanh``: ``gelu(g) * u``, exact or by tanh.
    """

    gate: str = "swiglu"
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __post_init__(self):
        if self.gate not in GATES:
            raise ValueError(f"unknown activation {self.gate!r}; the activations are silu, swigluoai, gelu, gelu_tanh")
        for name in ("alpha", "limit", "offset"):
            if not isinstance(getattr(self, name), numbers.Real):
                raise TypeError(f"the {name} of an activation must be a number, not {getattr(self, name)!r}")
        if not (math.isfinite(self.alpha) and math.isfinite(self.offset)):
            raise ValueError(f"alpha and offset of an activation must be finite, not {self.alpha} and {self.offset}")
        if not self.limit > 0:
            raise ValueError(f"the limit of an activation must be positive, not {self.limit}")

    @classmethod
    def named(cls, name, alpha=None, limit=None):
        """The activation of a configuration's ``hidden_act``: silu, swiglu, swigluoai, gelu, gelu_tanh."""
        limit = limit or math.inf
        if name == "swigluoai":
            return cls(alpha=alpha or 1.702, limit=7.0 if limit == math.inf else limit, offset=1.0)
        if name in ("silu", "swish", "swiglu"):
            if alpha:
                raise ValueError(f"activation {name!r} takes a limit but no alpha; with both there is swigluoai")
            return cls(limit=limit)
        if alpha or limit != math.inf:
            raise ValueError(f"activation {name!r} takes neither limit nor alpha; with both there is swigluoai")
        if name in ("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"):
            return cls("gelu_tanh")
        return cls(name)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one Mixture-of-Experts layer."""

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int

    def __post_init__(self):
        for name, limit in (
            ("num_experts", 1 << 16),
            ("num_experts_per_tok", 1 << 16),
            ("hidden_size", MAX_K),
            ("moe_intermediate_size", MAX_K),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1, limit))
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is larger than num_experts ({self.num_experts})"
            )

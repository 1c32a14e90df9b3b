"""How a checkpoint packs one matrix [N, K] of an expert: one class for each packing.

A scheme says which tensors a matrix is stored in, with which dtypes and shapes, and turns their arrays into a
`Quantized` without changing a number (a float matrix stays what it is). `scheme_of` finds the scheme in the
tensors of one matrix and in the ``quantization_config`` of ``config.json``; what it does not know it refuses by
name. Finiteness of the scales is checked where a matrix is read.

Tensors are named by their suffix: what follows ``experts.0.up_proj.`` of a matrix that is stored alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from .quantized import Quantized

FLOATS = ("BF16", "F16", "F32")
_E8M0 = ("U8", "F8_E8M0")
# Suffixes by which a matrix of any scheme can be found; `stored` makes the names of fused tensors of them.
SUFFIXES = (
    "weight",
    "weight_scale_inv",
    "weight_scale",
    "scale",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "blocks",
)
BLOCK = 128


class Part(NamedTuple):
    """One tensor of a matrix: the dtypes and shapes it may have, and whether it may be absent."""

    dtypes: tuple
    shapes: tuple
    optional: bool = False


def _grids(rows, columns):
    """Shapes of a grid of blocks: transformers 5.17 saves a single row or column of them without the other axis."""
    return ((rows, columns), (rows * columns,)) if 1 in (rows, columns) else ((rows, columns),)


def fused_name(name, suffix):
    """Of the tensor that holds a part of all experts: ``gate_up_proj``, ``gate_up_proj_scale_inv``, ``..._blocks``."""
    return name + suffix.removeprefix("weight") if suffix.startswith("weight") else f"{name}_{suffix}"


@dataclass(frozen=True)
class Float:
    """bfloat16, float16 or float32, as they are; which of them, the checkpoint says."""

    kind: None = None

    def parts(self, n, k, halves=1):
        return {"weight": Part(FLOATS, ((n, k),))}

    def work(self, n, k):
        return 0

    def matrix(self, arrays, n, k, work, where):
        return arrays["weight"]


@dataclass(frozen=True)
class Fp8Block:
    """e4m3 ``weight`` and one scale for each 128 x 128 block, the last ones cut off where N or K end."""

    scale: str
    kind: str = "fp8"

    def parts(self, n, k, halves=1):
        columns = _ceil(k, BLOCK)
        # Gate over up is one matrix, whose blocks run through the seam. Where the number of blocks says that each half
        # was quantized alone, they do not.
        rows = {_ceil(n, BLOCK), halves * _ceil(n // halves, BLOCK)}
        return {
            "weight": Part(("F8_E4M3",), ((n, k),)),
            self.scale: Part(FLOATS + _E8M0, tuple(shape for r in sorted(rows) for shape in _grids(r, columns))),
        }

    def work(self, n, k):
        return 0

    def matrix(self, arrays, n, k, work, where):
        scale = arrays[self.scale].reshape(-1, _ceil(k, BLOCK))
        if scale.dtype == np.uint8:
            scale = np.ldexp(np.float32(1), _exponents(scale, where(self.scale)).astype(np.int32) - 127)
        else:
            scale = _finite(scale, where(self.scale))
        half = n if scale.shape[0] == _ceil(n, BLOCK) else n // 2
        block_rows = np.arange(half) // BLOCK
        if half < n:
            block_rows = np.concatenate([block_rows, block_rows + _ceil(half, BLOCK)])
        return Quantized("e4m3", arrays["weight"], scale.astype(np.float32)[block_rows], BLOCK)


@dataclass(frozen=True)
class Fp8Channel:
    """e4m3 ``weight`` and one scale a row, [N] or [N, 1]."""

    scale: str
    kind: str = "fp8_perchannel"

    def parts(self, n, k, halves=1):
        return {"weight": Part(("F8_E4M3",), ((n, k),)), self.scale: Part(FLOATS, ((n,), (n, 1)))}

    def work(self, n, k):
        return 0

    def matrix(self, arrays, n, k, work, where):
        scale = _finite(arrays[self.scale], where(self.scale)).astype(np.float32)
        return Quantized("e4m3", arrays["weight"], scale.reshape(n, 1), 0)


@dataclass(frozen=True)
class Mxfp8:
    """e4m3 ``weight`` and e8m0 scales of 32 values along K (OCP Microscaling Formats 1.0)."""

    scale: str
    kind: str = "mxfp8"

    def parts(self, n, k, halves=1):
        groups = _groups(k, 32)
        return {"weight": Part(("F8_E4M3",), ((n, k),)), self.scale: Part(_E8M0, ((n, groups),))}

    def work(self, n, k):
        return 0

    def matrix(self, arrays, n, k, work, where):
        return Quantized("e4m3", arrays["weight"], _exponents(arrays[self.scale], where(self.scale)), 32)


@dataclass(frozen=True)
class Mxfp4:
    """e2m1, two a byte, the lower nibble first, and e8m0 scales of 32 values along K.

    ``blocks`` [N, K/32, 16] of gpt-oss, or ``weight`` [N, K/2] of DeepSeek-V4.
    """

    codes: str
    scale: str
    kind: str = "mxfp4"

    def parts(self, n, k, halves=1):
        groups = _groups(k, 32)
        packed = (n, groups, 16) if self.codes == "blocks" else (n, k // 2)
        return {self.codes: Part(("U8", "I8"), (packed,)), self.scale: Part(_E8M0, ((n, groups),))}

    def work(self, n, k):
        return n * k

    def matrix(self, arrays, n, k, work, where):
        codes = _along_rows(arrays[self.codes].reshape(n, -1), work)
        return Quantized("e2m1", codes, _exponents(arrays[self.scale], where(self.scale)), 32)


@dataclass(frozen=True)
class PackedInt4:
    """``weight_packed`` of compressed-tensors: eight values plus 8 an int32, lowest nibble first, along K."""

    group: int
    kind: str = "rawint4"

    def parts(self, n, k, halves=1):
        return {
            "weight_packed": Part(("I32",), ((n, _ceil(k, 8)),)),
            "weight_scale": Part(FLOATS, ((n, _groups(k, self.group)),)),
            "weight_shape": Part(("I64", "I32"), ((2,),), optional=True),
        }

    def work(self, n, k):
        return n * _ceil(k, 8) * 8

    def matrix(self, arrays, n, k, work, where):
        shape = arrays.get("weight_shape")
        if shape is not None and shape.tolist() != [n, k]:
            raise ValueError(
                f"{where('weight_shape')} says {shape.tolist()}, but weight_packed and config.json make it {[n, k]}"
            )
        codes = _along_rows(arrays["weight_packed"].view(np.uint8), work)[:, :k]
        return Quantized("int4", codes, _narrow(arrays["weight_scale"], where("weight_scale")), self.group)


@dataclass(frozen=True)
class Gptq:
    """``qweight`` [K/8, N] and ``qzeros`` [K/group, N/8], eight values an int32, lowest nibble first.

    In version 1 the zero points are stored less one, modulo 16. With ``g_idx`` [K], input k belongs to group g_idx[k]
    (act-order). Source: AutoGPTQ's and GPTQModel's ``checkpoint_format`` "gptq" (1) and "gptq_v2".
    """

    group: int
    version: int
    act_order: bool
    kind: str = "gptq_int4"

    def parts(self, n, k, halves=1):
        _eights(n)
        _eights(k)
        groups = _groups(k, self.group)
        return {
            "qweight": Part(("I32",), ((k // 8, n),)),
            "qzeros": Part(("I32",), ((groups, n // 8),)),
            "scales": Part(FLOATS, ((groups, n),)),
            "g_idx": Part(("I32",), ((k,),), optional=not self.act_order),
            # AutoGPTQ wrote zeros for layers that have no bias.
            "bias": Part(FLOATS, ((n,),), optional=True),
        }

    def work(self, n, k):
        return n * k

    def matrix(self, arrays, n, k, work, where):
        if "bias" in arrays and np.any(arrays["bias"] != 0):
            raise ValueError(f"{where('bias')} is not zero; experts of this architecture have no bias")
        order = self._order(arrays.get("g_idx"), k, where)
        # Row of each input: where the sort by group puts it.
        rows = np.arange(k)
        if order is not None:
            rows[order] = np.arange(k)
        codes, packed = work.reshape(k, n), arrays["qweight"].view(np.uint8).reshape(k // 8, n, 4)
        for byte in range(4):
            codes[rows[2 * byte :: 8]] = packed[:, :, byte] & 15
            codes[rows[2 * byte + 1 :: 8]] = packed[:, :, byte] >> 4
        zero = np.empty((len(arrays["qzeros"]), n), np.uint8)
        _along_rows(arrays["qzeros"].view(np.uint8), zero.reshape(-1))
        if self.version == 1:
            zero = (zero + 1) & 15
        scale = _narrow(arrays["scales"], where("scales"))
        return Quantized("int4", codes.T, scale.T, self.group, None if np.all(zero == 8) else zero.T, order)

    def _order(self, g_idx, k, where):
        """The inputs sorted by group, or None where they are so already."""
        if g_idx is None:
            return None
        size = self.group or k
        low, high = int(g_idx.min()), int(g_idx.max())
        if low < 0 or high >= k // size:
            at = int(np.flatnonzero((g_idx < 0) | (g_idx >= k // size))[0])
            raise ValueError(f"{where('g_idx')} has {g_idx[at]} at [{at}]; the groups are 0 to {k // size - 1}")
        counts = np.bincount(g_idx, minlength=k // size)
        if np.any(counts != size):
            group = int(np.flatnonzero(counts != size)[0])
            raise ValueError(
                f"{where('g_idx')} puts {counts[group]} inputs in group {group}; config.json says {size} to a group"
            )
        order = np.argsort(g_idx, kind="stable")
        return None if np.array_equal(order, np.arange(k)) else order


@dataclass(frozen=True)
class Awq:
    """``qweight`` [K, N/8] and ``qzeros`` [K/group, N/8], eight columns an int32 in AutoAWQ's interleaved order."""

    group: int
    zeros: bool
    kind: str = "awq_int4"

    def parts(self, n, k, halves=1):
        _eights(n)
        groups = _groups(k, self.group)
        return {
            "qweight": Part(("I32",), ((k, n // 8),)),
            "qzeros": Part(("I32",), ((groups, n // 8),), optional=not self.zeros),
            "scales": Part(FLOATS, ((groups, n),)),
        }

    def work(self, n, k):
        return n * k

    def matrix(self, arrays, n, k, work, where):
        codes = self._columns(arrays["qweight"], work.reshape(k, n))
        zero = None
        if "qzeros" in arrays:
            zero = self._columns(arrays["qzeros"], np.empty((len(arrays["qzeros"]), n), np.uint8)).T
            zero = None if np.all(zero == 8) else zero
        return Quantized("int4", codes.T, _narrow(arrays["scales"], where("scales")).T, self.group, zero)

    @staticmethod
    def _columns(packed, out):
        packed = packed.view(np.uint8).reshape(*packed.shape, 4)
        for byte in range(4):
            # Nibbles 0 to 7 hold columns 0, 2, 4, 6, 1, 3, 5, 7.
            column = 4 * byte if byte < 2 else 4 * byte - 7
            np.bitwise_and(packed[:, :, byte], 15, out=out[:, column::8])
            np.right_shift(packed[:, :, byte], 4, out=out[:, column + 2 :: 8])
        return out


def scheme_of(tensors, quantization):
    """The scheme of a matrix.

    Parameters
    ----------
    tensors : dict of str to Tensor
        The tensors it is stored in by suffix, without the axis of the experts.
    quantization : dict
        ``quantization_config`` of ``config.json``; empty if it has none.

    Returns
    -------
    object
        One of the classes above, with ``kind``, ``parts``, ``work`` and ``matrix``.

    Raises
    ------
    ValueError
        For a packing that is not known, saying what it is; the message continues the name of a tensor.
    """
    method = quantization.get("quant_method")
    weight = tensors.get("weight")
    if weight is not None and weight.dtype in FLOATS or not tensors:
        return Float()
    if not quantization:
        some = ", ".join(f"{suffix} {t.dtype}" for suffix, t in tensors.items())
        raise ValueError(
            f"is quantized ({some}), but config.json has no quantization_config that says how. Fetch the model's own"
            " config.json"
        )
    if "qweight" in tensors:
        if method == "gptq":
            return _gptq(quantization)
        if method == "awq":
            return _awq(quantization)
    elif "weight_packed" in tensors:
        if method == "compressed-tensors":
            return _packed(quantization)
    elif "blocks" in tensors:
        if method == "mxfp4":
            return Mxfp4("blocks", _scale_of(tensors, "scales"))
    elif weight is not None and weight.dtype == "F8_E4M3":
        if method in ("fp8", "mxfp8", "compressed-tensors"):
            return _fp8(tensors, quantization)
    elif weight is not None and weight.dtype == "I8" and "scale" in tensors:
        if method == "fp8":
            return Mxfp4("weight", "scale")
    elif weight is not None:
        raise ValueError(
            f"has dtype {weight.dtype}; experts of dtype {', '.join(FLOATS)} and F8_E4M3 can be read, and packed ones."
            " Use the model's bfloat16 release, or dequantize it first"
        )
    raise ValueError(
        f"is stored as {', '.join(tensors)} by quant_method {method!r}, which ktcy does not read; it reads fp8, mxfp8,"
        " mxfp4, compressed-tensors (pack-quantized, float-quantized), gptq and awq. Use the model's bfloat16 release"
    )


def _fp8(tensors, quantization):
    if "e4m3" not in str(quantization.get("fmt") or "e4m3"):
        raise ValueError(f"has dtype F8_E4M3, but config.json says fmt {quantization['fmt']!r}")
    name = _scale_of(tensors, "weight_scale_inv", "weight_scale")
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") == "compressed-tensors":
        args = _weights(quantization, ("float-quantized", "naive-quantized", "mxfp8-quantized"))
        _expect(args, "of its weights", num_bits=(8,), type=("float",), symmetric=(True, None))
        if args.get("strategy") == "channel":
            return Fp8Channel(name)
        _expect(args, "of its weights", strategy=("block", "group"))
        block = args.get("block_structure") if args["strategy"] == "block" else [1, args.get("group_size")]
    if block is None:
        return Mxfp8(name) if tensors[name].dtype in _E8M0 else Fp8Channel(name)
    if block == [1, 32] and tensors[name].dtype in _E8M0:
        return Mxfp8(name)
    if block == [BLOCK, BLOCK]:
        return Fp8Block(name)
    raise ValueError(
        f"has scales of dtype {tensors[name].dtype} for blocks of {block}; ktcy reads blocks of [128, 128], of [1, 32]"
        " with e8m0 scales, and one scale a row"
    )


def _packed(quantization):
    args = _weights(quantization, ("pack-quantized",))
    what = "of its weights"
    _expect(args, what, num_bits=(4,), type=("int",), symmetric=(True,), actorder=(None, False, "weight", "static"))
    _expect(args, what, strategy=("group", "channel"))
    return PackedInt4(_group(args, "group_size") if args["strategy"] == "group" else 0)


def _weights(quantization, formats):
    """The arguments of the weights in a compressed-tensors config: of its only group, or of the one for experts."""
    groups = quantization.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    if len(groups) > 1:
        groups = [g for g in groups if "experts" in str(g.get("targets"))]
    args = groups[0].get("weights") if len(groups) == 1 else None
    if not isinstance(args, dict):
        raise ValueError("is quantized, but config.json has no single group for experts in config_groups")
    stored = groups[0].get("format") or quantization.get("format")
    if stored not in formats:
        raise ValueError(f"has the compressed-tensors format {stored!r}; expected {' or '.join(formats)} for its dtype")
    return args


def _gptq(quantization):
    _expect(quantization, "", bits=(4,))
    stored = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if stored not in ("gptq", "gptq_v2") or quantization.get("is_marlin_format"):
        raise ValueError(
            f"is stored in the GPTQ checkpoint_format {'marlin' if stored == 'gptq' else stored!r}; ktcy reads 'gptq'"
            " and 'gptq_v2'. Use a release in one of these"
        )
    act_order = bool(quantization.get("desc_act"))
    return Gptq(_group(quantization, "group_size"), 2 if stored == "gptq_v2" else 1, act_order)


def _awq(quantization):
    stored = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    if stored != "gemm":
        raise ValueError(f"is stored in the AWQ version {stored!r}; ktcy reads 'gemm'. Use a release in that one")
    if "bits" not in quantization and "w_bit" in quantization:
        quantization = {**quantization, "bits": quantization["w_bit"], "group_size": quantization.get("q_group_size")}
    _expect(quantization, "", bits=(4,))
    return Awq(_group(quantization, "group_size"), quantization.get("zero_point", True) is not False)


def _expect(values, what, **allowed):
    for key, choices in allowed.items():
        if values.get(key) not in choices:
            raise ValueError(
                f"is quantized with {key} {values.get(key)!r} {what}".rstrip()
                + f" (config.json); ktcy reads {' or '.join(repr(c) for c in choices if c is not None)}"
            )


def _group(values, key):
    size = values.get(key)
    if type(size) is not int or size < -1 or size == 0:
        raise ValueError(f"is quantized with {key} {size!r} (config.json); expected a positive number, or -1: a row")
    return max(size, 0)


def _groups(k, group):
    if group and k % group:
        raise ValueError(f"the group size {group} does not divide {k}")
    return k // group if group else 1


def _eights(n):
    if n % 8:
        raise ValueError(f"eight values make an int32, and {n} is no multiple of 8")


def _scale_of(tensors, *names):
    found = [name for name in names if name in tensors]
    if len(found) != 1:
        raise ValueError(f"has {' and '.join(found) or 'no scales'} beside it; expected {' or '.join(names)}")
    return found[0]


def _ceil(n, size):
    return -(-n // size)


def _along_rows(packed, work):
    """Bytes [R, C] as their nibbles [R, 2 C], lower one first, in ``work``."""
    out = work[: packed.size * 2].reshape(len(packed), -1)
    np.bitwise_and(packed, 15, out=out[:, 0::2])
    np.right_shift(packed, 4, out=out[:, 1::2])
    return out


def _finite(scale, where):
    """The scales, once they are known to be finite and not negative."""
    with np.errstate(invalid="ignore"):
        values = scale.astype(np.float32)
        good = (values >= 0) & (values < np.inf)
    if not good.all():
        _refuse(scale, ~good, where, "a finite number, 0 or more")
    return scale


def _exponents(scale, where):
    """e8m0 scales, once none is known to be NaN."""
    if (scale == 0xFF).any():
        _refuse(scale, scale == 0xFF, where, "an e8m0 exponent up to 254 (255 is NaN)")
    return scale


def _narrow(scale, where):
    """Scales of INT4 as bfloat16 or float16; float32 only if one of these holds them all."""
    _finite(scale, where)
    if scale.dtype != np.float32:
        return scale
    with np.errstate(over="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            narrow = scale.astype(dtype)
            if np.array_equal(narrow.astype(np.float32), scale):
                return narrow
    _refuse(scale, scale.astype(ml_dtypes.bfloat16) != scale, where, "a number that bfloat16 or float16 holds exactly")


def _refuse(scale, bad, where, expected):
    at = tuple(np.argwhere(bad)[0])
    raise ValueError(
        f"{where} has the scale {scale[at]} at {[int(i) for i in at]}; expected {expected}. The file is damaged, or was"
        " quantized wrongly: fetch it again, or use another release"
    )

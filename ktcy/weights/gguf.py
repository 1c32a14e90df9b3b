"""Reads the experts of a GGUF file, one at a time, with the interface of `checkpoint.Checkpoint`.

The header is parsed here: the gguf package maps the file, so that one cut while in use is a SIGBUS, and makes arrays
of every word of the vocabulary, 19 s and 0.5 GB for 300 000 words and merges (here 0.5 s). Types, their sizes and the
values of K-quants are the package's. Sources: docs/gguf.md of ggml-org/ggml; the names of tensors and keys in
gguf.constants; the layouts of blocks in ggml-common.h of ggml.
"""

import contextlib
import math
import os
import re
import struct
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import Activation, LayerShape, integer
from ._header import Tensor, what_file, what_folder
from .architectures import get
from .checkpoint import ALIGN, DTYPES, Expert, _fill, check_expert
from .quantized import Quantized

VERSIONS = (2, 3)
# general.architecture -> activation, and whether experts have biases; llama.cpp's graphs of these models fix both.
ARCHITECTURES = {
    **dict.fromkeys(
        "qwen2moe qwen3moe qwen3next llama llama4 deepseek2 olmoe glm4moe phimoe minimax-m2".split(), ("silu", False)
    ),
    "gpt-oss": ("swigluoai", True),
}
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
TENSOR = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\..+")
OLD_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
# Types of metadata values.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Vocabularies of 256k words take 10 MB; more than this is damage that would take the memory of the machine.
MAX_HEADER = 1 << 30

# GGML type -> kind. Matrices of the first ones become `Quantized` as they are, with 32 codes a scale.
EXACT = {"Q8_0": "q8_0", "Q4_0": "q4_0", "IQ4_NL": "q8_0", "MXFP4": "mxfp4"}
FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
CODES = {"q8_0": "int8", "q4_0": "int4", "mxfp4": "e2m1"}
GROUP = 32
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8).view(np.uint8)


def common_kind(types):
    """How the three matrices of a layer can be held in one way, so that one format can take them.

    Their kind, if they have the same. "q8_0" for it and "q4_0" together: the codes fit, the scales stay. "fp32" for
    several float types. All else is "repacked": float32 values for our nearest format, int8, which changes them
    (K-quants and others with two levels of scales; float beside quantized matrices).

    Parameters
    ----------
    types : iterable of str
        GGML types.

    Returns
    -------
    str
    """
    kinds = {(EXACT | FLOATS).get(name, "repacked") for name in types}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds == {"q4_0", "q8_0"}:
        return "q8_0"
    return "fp32" if kinds <= {*FLOATS.values()} else "repacked"


class Gguf:
    """The experts of a Mixture-of-Experts model in a GGUF file.

    Several threads may call `expert` at once. Use as a context manager, or `close` it.

    Parameters
    ----------
    path : path-like
        A ``.gguf`` file, or one of a set ``model-00001-of-00003.gguf``, which is then read whole.

    Attributes
    ----------
    path : Path
    architecture : str
        ``general.architecture``, such as "qwen3moe".
    layers : list of int
        The layers that have experts, ascending.
    shape : LayerShape
    activation : Activation
    has_bias : bool
    has_order : bool
        False: no GGUF type sorts columns.
    types : dict of int to dict
        For each layer the GGML type of "gate", "up" and "down".
    kinds : dict of int to str
        For each layer what `expert` gives (`common_kind`): `Quantized` int8, int4 or e2m1 for "q8_0", "q4_0" and
        "mxfp4", arrays of that dtype for "fp32", "fp16" and "bf16", float32 arrays for "repacked".
    tensors : dict of int to dict
        For each layer its tensors: ``{name: Tensor}``, with the GGML type for ``dtype``.
    files : dict of str to file
        The files that hold experts, open; empty after `close`.

    Raises
    ------
    ImportError
        Without the gguf package.
    ValueError
        If the file is something else, of another version, cut off or damaged, of a model that is unknown or has no
        experts, if a tensor's type cannot be read, or if expert tensors are missing, left over or of another shape
        than the metadata say. The message names file and tensor.
    OSError
        If a file is missing or cannot be read.
    """

    has_order = False

    what = "GGUF file"

    def __init__(self, path):
        self.path = Path(path)
        self._local = threading.local()
        self._gguf = _package()
        self.files = {}
        meta, held, self._header = _read_parts(self.path)
        try:
            self._describe(meta)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {error}") from None
        self.layers, self._tensors, self.types, self.kinds, self.tensors = [], {}, {}, {}, {}
        for layer in range(self._depth):
            names = self._layer(layer, held)
            if names is None:
                continue
            self.layers.append(layer)
            self._tensors[layer] = {name: held.pop(name) for name in names}
            self.tensors[layer] = {name: tensor for name, (_, tensor) in self._tensors[layer].items()}
            self.types[layer] = {
                part: self.tensors[layer][self._name(layer, part)].dtype for part in ("gate", "up", "down")
            }
            self.kinds[layer] = common_kind(self.types[layer].values())
        for name, (file, _) in held.items():
            match = TENSOR.fullmatch(name)
            if match and int(match[1]) < self._depth:
                raise ValueError(f"{file}: nothing uses the expert tensor {name} of a {self.architecture} model")
        if not self.layers:
            raise ValueError(f"{self.path}: no layer of this model has experts")

        with contextlib.ExitStack() as stack:
            for tensors in self._tensors.values():
                for file, _ in tensors.values():
                    if file.name not in self.files:
                        self.files[file.name] = stack.enter_context(open(file, "rb", buffering=0))
            self._close = stack.pop_all().close

    def _describe(self, meta):
        """Architecture, sizes and activation."""
        name = self.architecture = get(meta, "general.architecture")

        def number(*keys):
            return get(meta, *(f"{name}.{key}" for key in keys))

        if not meta.get(f"{name}.expert_count"):
            raise ValueError(f"has no experts (no {name}.expert_count); ktcy runs those of Mixture-of-Experts models")
        if name not in ARCHITECTURES:
            raise ValueError(f"has general.architecture {name!r}; ktcy reads {', '.join(ARCHITECTURES)}")
        self.shape = LayerShape(
            number("expert_count"),
            number("expert_used_count"),
            number("embedding_length"),
            number("expert_feed_forward_length", "feed_forward_length"),
        )
        activation, self.has_bias = ARCHITECTURES[name]
        self.activation = Activation.named(activation)
        # The last ones may be for multi-token prediction, which the model itself does not run.
        self._depth = integer("block_count", number("block_count"), 1, 1 << 16)
        self._depth -= integer("nextn_predict_layers", meta.get(f"{name}.nextn_predict_layers", 0), 0)

    def _layer(self, layer, held):
        """The names of a layer's tensors, checked; None if the layer is dense."""
        e, h, i = self.shape.num_experts, self.shape.hidden_size, self.shape.moe_intermediate_size
        fused = f"blk.{layer}.ffn_gate_up_exps.weight" in held
        rows = {"gate_up": (2 * i, h)} if fused else {"gate": (i, h), "up": (i, h)}
        expected = {}
        for part, (n, k) in {**rows, "down": (h, i)}.items():
            expected[f"blk.{layer}.ffn_{part}_exps.weight"] = e, n, k
            if self.has_bias:
                expected[f"blk.{layer}.ffn_{part}_exps.bias"] = e, n
        missing = [name for name in expected if name not in held]
        if len(missing) == len(expected) and f"blk.{layer}.ffn_down.weight" in held:
            return None
        if missing:
            old = next(filter(OLD_TENSOR.fullmatch, held), None)
            advice = (
                f"it has {old}, of an early format with a tensor for each expert: convert the model again with "
                "today's llama.cpp"
                if old
                else "fetch or convert it again"
            )
            raise ValueError(f"{self.path} lacks expert tensors of layer {layer}: {', '.join(missing)}; {advice}")
        for name, dims in expected.items():
            file, tensor = held[name]
            if tensor.shape != dims:
                raise ValueError(
                    f"{file}: {name} has shape {list(tensor.shape)}, but the metadata make it {list(dims)} "
                    f"({e} experts, hidden size {h}, intermediate size {i})"
                )
            readable = FLOATS if name.endswith(".bias") else EXACT | FLOATS
            if tensor.dtype not in readable and (name.endswith(".bias") or not self._has_values(tensor)):
                raise ValueError(
                    f"{file}: {name} has GGML type {tensor.dtype}, which cannot be read; expected {', '.join(readable)}"
                    " or one that the gguf package can dequantize. Take the model in another type, Q8_0 for example, "
                    "or a newer gguf package"
                )
        return expected

    def _name(self, layer, part):
        """The tensor that holds a matrix."""
        fused = f"blk.{layer}.ffn_gate_up_exps.weight"
        return fused if part != "down" and fused in self._tensors[layer] else f"blk.{layer}.ffn_{part}_exps.weight"

    def _has_values(self, tensor):
        if tensor.begin == tensor.end:
            return False
        try:
            self._values(np.zeros(_row_bytes(tensor), np.uint8), tensor.dtype)
        except NotImplementedError:
            return False
        return True

    def _values(self, rows, type_name):
        with np.errstate(all="ignore"):
            return self._gguf.quants.dequantize(rows, self._gguf.GGMLQuantizationType[type_name])

    def header(self):
        """The bytes of the first file before its tensors: what config.json is to a checkpoint.

        Returns
        -------
        bytes
        """
        path, length = self._header
        with open(path, "rb") as file:
            return file.read(length)

    def expert(self, layer, e):
        """Reads one expert.

        Parameters
        ----------
        layer : int
            One of `layers`.
        e : int
            In [0, num_experts).

        Returns
        -------
        Expert
            Its matrices are as ``kinds[layer]`` says, all three alike. Quantized ones have 32 codes a scale, which may
            be negative. Arrays are overwritten by the next call of the same thread; copy what must last.

        Raises
        ------
        ValueError
            For a layer or expert that the model does not have, after `close`, or for a scale or value that is NaN or
            inf: the message names file, tensor, expert and row. (Those of float types are found when packed.)
        OSError
            If the file cannot be read, or was cut since it was opened.
        """
        check_expert(self, layer, e)
        raw = self._read(layer, e)
        half = self.shape.moe_intermediate_size
        found = {}
        for part in ("gate", "up", "down"):
            name = self._name(layer, part)
            file, tensor = self._tensors[layer][name]
            source = f"{file}: {name}, expert {e}"
            rows = np.s_[:]
            if "gate_up" in name:
                rows = np.s_[half:] if part == "up" else np.s_[:half]
            matrix = self._matrix(raw[name][rows], tensor, source)
            bias = raw.get(name.replace(".weight", ".bias"))
            found[part] = _as(self.kinds[layer], matrix), None if bias is None else bias[rows], source
        matrices, biases, sources = zip(*found.values())
        return Expert(*matrices, *biases, dict(zip(found, sources)))

    def _matrix(self, rows, tensor, source):
        """The bytes [N, row] of a matrix as `Quantized` or array."""
        name = tensor.dtype
        if name in FLOATS:
            return rows.view(DTYPES[name])
        if name not in EXACT:
            values = self._values(rows, name)
            _check_finite(values, source)
            return values
        size = _row_bytes(tensor) // (tensor.shape[-1] // GROUP)
        blocks = rows.reshape(len(rows), -1, size)
        if name == "MXFP4":
            scale, packed = blocks[..., 0].copy(), blocks[..., 1:]
            _check_finite(np.where(scale == 255, np.float32("nan"), 1), source, "scale")
        else:
            scale, packed = blocks[..., :2].copy().view("<f2")[..., 0], blocks[..., 2:]
            _check_finite(scale, source, "scale")
        if name == "Q8_0":
            codes = packed
        else:
            codes = np.empty((*blocks.shape[:2], GROUP), np.uint8)
            codes[..., : GROUP // 2] = packed & 15
            codes[..., GROUP // 2 :] = packed >> 4
            if name == "IQ4_NL":
                codes = IQ4_NL[codes]
        return Quantized(CODES[EXACT[name]], codes.reshape(len(rows), -1), scale, GROUP)

    def _read(self, layer, e):
        """The bytes of one expert by tensor: [N, row] of a matrix, in this thread's buffer; float32 [N] of a bias."""
        tensors = self._tensors[layer]
        starts, total = {}, 0
        for name, (_, t) in tensors.items():
            starts[name] = total
            total += -(-((t.end - t.begin) // t.shape[0]) // ALIGN) * ALIGN
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < total:
            self._local.buffer = buffer = None
            self._local.buffer = buffer = np.empty(total, np.uint8)
        arrays = {}
        for name, (file, t) in tensors.items():
            size = (t.end - t.begin) // t.shape[0]
            array = buffer[starts[name] : starts[name] + size]
            _fill(self.files[file.name], array, t.begin + e * size)
            if name.endswith(".bias"):
                arrays[name] = array.view(DTYPES[t.dtype]).astype(np.float32)
            else:
                arrays[name] = array.reshape(t.shape[1], -1)
        return arrays

    def close(self):
        """Closes the files; closing twice is fine."""
        self.files = {}
        self._local = threading.local()
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def _as(kind, matrix):
    """The matrix in the kind of its layer, exactly."""
    if not isinstance(matrix, Quantized):
        return matrix.astype(np.float32, copy=False) if kind in ("fp32", "repacked") else matrix
    if CODES.get(kind) == matrix.kind:
        return matrix
    if kind == "q8_0":
        return replace(matrix, kind="int8", codes=matrix.codes - np.uint8(8))
    return matrix.dequantize()


def _check_finite(values, source, what="value"):
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        where = f"row {row}, group {column}" if what == "scale" else f"row {row}, column {column}"
        raise ValueError(f"{source}: the {what} at {where} is {values[row, column]}; fetch or convert the file again")


def _row_bytes(tensor):
    return (tensor.end - tensor.begin) // math.prod(tensor.shape[:-1])


def _package():
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise ImportError("the gguf package is needed to read GGUF files: pip install ktcy[gguf]") from None
    return gguf


def _read_parts(path):
    """Metadata of a model, ``{name: (file, Tensor)}`` over its files, its first file and the length of that header."""
    if path.is_dir():
        names = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:5])
        advice = f"give one of them: {names}" if names else "expected a GGUF file"
        raise ValueError(f"{path} is a folder and holds {what_folder(path)}; {advice}")
    files, count = [path], 1
    if match := PART.fullmatch(path.name):
        count = int(match[3])
        files = [path.with_name(f"{match[1]}-{n + 1:05d}-of-{match[3]}.gguf") for n in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    if missing and match:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise FileNotFoundError(f"{path} is one of {count} files, {len(missing)} are not there: {some}; download them")
    if missing:
        raise FileNotFoundError(f"{path}: there is no such file; expected a GGUF file")
    first, held = None, {}
    for n, file in enumerate(files):
        meta, tensors, length = _read_header(file)
        first = first or (meta, length)
        found = meta.get("split.count", 1), meta.get("split.no", 0)
        if found != (count, n):
            raise ValueError(
                f"{file}: split.count and split.no are {found[0]} and {found[1]}, by its name {count} and {n}; "
                "give the files of a set the names they had"
            )
        for name, tensor in tensors.items():
            if name in held:
                raise ValueError(f"the tensor {name} stands twice: in {held[name][0]} and in {file}")
            held[name] = file, tensor
    meta, length = first
    total = meta.get("split.tensors.count", len(held))
    if total != len(held):
        raise ValueError(f"{path} and the files beside it hold {len(held)} tensors, expected {total}; fetch them again")
    return meta, held, (files[0], length)


def _read_header(path):
    """Metadata, ``{name: Tensor}`` and length of the header of one file, which has the bytes of every tensor."""
    with open(path, "rb") as file:
        header = _Header(path, file)
        try:
            meta, tensors = header.parse()
        except (RecursionError, UnicodeDecodeError) as error:
            raise header.damaged(error) from None
    end = max((t.end for t in tensors.values()), default=0)
    if end > header.size:
        raise ValueError(
            f"{path} is cut off: its header asks for {end} bytes, found {header.size}; fetch or convert it again"
        )
    return meta, tensors, header.at


class _Header:
    """What stands in a GGUF file before the tensors, piece by piece."""

    def __init__(self, path, file):
        self.path, self.file, self.at = path, file, 0
        self.size = os.fstat(file.fileno()).st_size

    def damaged(self, reason):
        return ValueError(f"{self.path} has a damaged GGUF header ({reason}); fetch or convert it again")

    def take(self, n):
        self.at += n
        if self.at > min(self.size, MAX_HEADER):
            raise self.damaged(f"it asks for {self.at} bytes, found {self.size} in the file: is it cut off?")
        return self.file.read(n)

    def number(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self):
        return self.take(self.number("Q")).decode()

    def value(self, kind):
        """A metadata value; of an array only that it is one."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(self.scalar(kind))
        kind, n = self.number("I"), self.number("Q")
        if kind == STRING:
            for _ in range(n):
                self.take(int.from_bytes(self.take(8), "little"))
        elif kind == ARRAY:
            for _ in range(n):
                self.value(kind)
        else:
            self.take(n * struct.calcsize(self.scalar(kind)))
        return "an array"

    def scalar(self, kind):
        if kind not in SCALARS:
            raise self.damaged(f"a value of type {kind}")
        return SCALARS[kind]

    def parse(self):
        """Metadata and tensors; the header ends at ``self.at``."""
        start = self.file.read(4096)
        self.file.seek(0)
        if start[:4] != b"GGUF":
            what = what_file(start, self.size) or f"it starts with {start[:4]!r}"
            raise ValueError(f"{self.path} is no GGUF file: {what}")
        self.take(4)
        version = self.number("I")
        if version not in VERSIONS:
            found = f"version {version}" if version & 0xFFFF else "big-endian numbers"
            raise ValueError(
                f"{self.path} has {found} of GGUF; ktcy reads versions {VERSIONS[0]} and {VERSIONS[1]}, little-endian. "
                "Take a file that today's llama.cpp made, or update ktcy"
            )
        n_tensors, n_values = self.number("Q"), self.number("Q")
        meta, infos = {}, {}
        for _ in range(n_values):
            self.add(meta, self.string(), self.value(self.number("I")))
        for _ in range(n_tensors):
            name, dims = self.string(), [self.number("Q") for _ in range(self.number("I"))]
            self.add(infos, name, (tuple(dims[::-1]), self.number("I"), self.number("Q")))
        align = meta.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise self.damaged(f"general.alignment is {align}, no power of two")
        data = -(-self.at // align) * align
        return meta, {name: self.tensor(name, *info, data) for name, info in infos.items()}

    def add(self, entries, name, value):
        if name in entries:
            raise self.damaged(f"{name} stands twice")
        entries[name] = value

    def tensor(self, name, shape, number, offset, data):
        """A tensor whose type the package does not know has no bytes."""
        constants, begin = _package().constants, data + offset
        try:
            known = constants.GGMLQuantizationType(number)
        except ValueError:
            return Tensor(f"number {number}", shape, begin, begin)
        block, size = constants.GGML_QUANT_SIZES[known]
        row = shape[-1] if shape else 1
        if row % block:
            raise self.damaged(f"{name} has rows of {row} values, but blocks of {known.name} hold {block}")
        return Tensor(known.name, shape, begin, begin + math.prod(shape) // block * size)

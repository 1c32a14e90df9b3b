"""Reads the experts of a Hugging Face checkpoint, one at a time.

Opening reads the config and the headers of the shards and checks everything that they say: sizes of files,
names, dtypes and shapes of all experts. The weights are read expert by expert into one buffer per thread
(pread, no mapping): memory does not grow with the model, a file that is cut while it is read is an exception
and not a SIGBUS, and the arrays are aligned whatever the length of the header. How a matrix is packed is the matter
of `schemes`; here is where its tensors are.
"""

import contextlib
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional, Union

import ml_dtypes
import numpy as np

from ._header import Tensor, read_header, what_file, what_folder
from .architectures import PREFIXES, architecture_of, get
from .quantized import Quantized
from .schemes import FLOATS, SUFFIXES, Float, Part, fused_name, scheme_of

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_CODES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
# `Checkpoint.kind` of float experts, the narrowest first.
_FLOAT_KINDS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}

INDEX = "model.safetensors.index.json"
# What one tensor of an expert has in its name; shared experts have "_experts.", routers neither.
EXPERTS = ".experts."
FUSED = ("gate_up_proj", "down_proj")
_SPLIT = re.compile(r"\d+\.\w+\.").match
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
ALIGN = 64


@dataclass(frozen=True)
class Expert:
    """The weights of one expert. The arrays may be strided views, and hold until the thread's next `expert`.

    Attributes
    ----------
    gate, up : ndarray or Quantized [I, H]
        float32, float16 or bfloat16, as stored; or the codes and scales of a quantized checkpoint.
    down : ndarray or Quantized [H, I]
    gate_bias, up_bias : ndarray [I] of float32, or None
    down_bias : ndarray [H] of float32, or None
    source : dict of str to str
        For "gate", "up" and "down": the file and tensor it came from, for messages.
    """

    gate: Union[np.ndarray, Quantized]
    up: Union[np.ndarray, Quantized]
    down: Union[np.ndarray, Quantized]
    gate_bias: Optional[np.ndarray]
    up_bias: Optional[np.ndarray]
    down_bias: Optional[np.ndarray]
    source: dict


class _Layer(NamedTuple):
    """The tensors of a layer by what follows ``experts.``, each with the file it is in."""

    root: str
    tensors: dict
    # "split": one tensor an expert and matrix; "fused": all experts in one, gate over up; "scales": split weights with
    # fused scales, as transformers 5 saves the FP8 experts that it has fused in memory.
    form: str
    transposed: bool


class _Matrix(NamedTuple):
    """One matrix [n, k] of a form: what its parts are called in either form, and of how many halves it is made."""

    n: int
    k: int
    fused: str
    names: tuple
    halves: int = 1


class Checkpoint:
    """The experts of a Mixture-of-Experts model in a folder that transformers saved.

    Several threads may call `expert` at once. Use as a context manager, or `close` it.

    Parameters
    ----------
    path : path-like
        Folder with ``config.json`` and safetensors files: one, or the shards that ``model.safetensors.index.json``
        lists, or, without an index, a whole set named ``model-00001-of-00002.safetensors``.

    Attributes
    ----------
    path : Path
    architecture : str
        The model's ``model_type``.
    layers : list of int
        The layers that have experts, ascending.
    shape : LayerShape
    activation : Activation
    has_bias : bool
    has_order : bool
        Whether columns of `Quantized` may be sorted (``desc_act`` of GPTQ).
    kind : str
        How the experts are stored: "bf16", "fp16" or "fp32" (the widest that occurs), or the ``kind`` of one of
        `schemes`: "fp8", "fp8_perchannel", "rawint4", "gptq_int4", "awq_int4", "mxfp4", "mxfp8".
    kinds : dict of int to str
        The same for each layer, as of `Gguf`.
    files : dict of str to file
        The shards that hold experts, open; empty after `close`.

    Raises
    ------
    ValueError
        If the folder holds something else, if the model or the way it is quantized is unknown, if a file is
        damaged, or if experts are missing, left over, stored in several ways or of another shape or dtype than the
        config says. The message names the file and the tensor.
    OSError
        If the folder or a shard is missing or cannot be read.
    """

    what = "checkpoint"

    def __init__(self, path):
        self.path = Path(path)
        self._local = threading.local()
        self.files = {}
        _check_folder(self.path)
        config_path = self.path / "config.json"
        whole = _read_json(config_path)
        try:
            self._row, config = architecture_of(whole)
            self.architecture = self._row.model_type
            self.shape = self._row.shape(config)
            self.activation = self._row.activation_of(config)
            self.layers = sorted(self._row.layers(config))
            depth = get(config, "num_hidden_layers")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{config_path}: {error}") from None
        if not self.layers:
            raise ValueError(f"{config_path}: no layer of this model has experts")
        self.has_bias = self._row.bias

        quantization = whole.get("quantization_config") or config.get("quantization_config")
        self._quantization = quantization if isinstance(quantization, dict) else {}
        method = self._quantization.get("quant_method")
        self._note = f" (config.json says quant_method {method!r})" if method else ""
        self._scheme = None
        groups = self._groups(_read_headers(self.path), depth)
        self._layers = {layer: self._layer(layer, groups) for layer in self.layers}
        self.kind = self._scheme.kind or self._float_kind()
        self.kinds = dict.fromkeys(self.layers, self.kind)
        self.has_order = getattr(self._scheme, "act_order", False)
        for root, held in groups.items():
            for name, (shard, _) in held.items():
                raise ValueError(
                    f"{self.path / shard}: nothing uses the expert tensor {root}{name}; {config_path} says "
                    f"{self.shape.num_experts} experts in layers {_runs(self.layers)} of a {self.architecture} model"
                )

        with contextlib.ExitStack() as stack:
            for layer in self._layers.values():
                for shard, _ in layer.tensors.values():
                    if shard not in self.files:
                        self.files[shard] = stack.enter_context(open(self.path / shard, "rb", buffering=0))
            self._close = stack.pop_all().close

    def _groups(self, headers, depth):
        """All expert tensors as ``{root: {name: (shard, Tensor)}}``, where root ends in ``experts.``."""
        groups = {}
        for shard, tensors in headers.items():
            for full, tensor in tensors.items():
                if EXPERTS not in full:
                    continue
                cut = full.index(EXPERTS) + len(EXPERTS)
                root, name = full[:cut], full[cut:]
                if root not in groups:
                    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", root)
                    mtp = self._row.mtp and (root.startswith("mtp.") or layer and int(layer[1]) >= depth)
                    groups[root] = None if mtp else {}
                if groups[root] is not None:
                    groups[root][name] = shard, tensor
        return {root: held for root, held in groups.items() if held is not None}

    def _layer(self, layer, groups):
        """The tensors of one layer, taken out of ``groups``."""
        e, h, i = self.shape.num_experts, self.shape.hidden_size, self.shape.moe_intermediate_size
        roots = [f"{p}layers.{layer}.{block}{EXPERTS}" for p in PREFIXES for block in self._row.blocks]
        held_roots = [root for root in roots if root in groups]
        if len(held_roots) > 1:
            raise ValueError(f"{self.path} has the experts of layer {layer} twice: as {' and as '.join(held_roots)}*")
        root = held_roots[0] if held_roots else roots[0]
        held = groups.get(root, {})

        form = "split"
        if any(name.startswith(FUSED) and not name.endswith("_bias") for name in held):
            split = any(map(_SPLIT, held)) and not any(name in held for name in FUSED)
            form = "scales" if split and not self._row.interleaved else "fused"
        if self._scheme is None:
            self._scheme = self._scheme_of(root, held, form)
        # No sizes make both shapes their own transposes, so the pair always tells.
        transposed = form == "fused" and isinstance(self._scheme, Float)
        for name, dims in zip(FUSED, ((e, 2 * i, h), (e, h, i))):
            transposed = transposed and name in held and _swapped(held[name][1].shape) == dims

        expected = self._expected(form, transposed, root)
        missing = [name for name, part in expected.items() if name not in held and not part.optional]
        if missing:
            some = ", ".join(root + name for name in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            if not held:
                other = next(iter(groups), None)
                more += f", nor {root}gate_up_proj; " + (f"it has {other}*" if other else "it has no experts at all")
            elif self._scheme.kind:
                more += f"; all experts must be stored in one way, and the first is {self._scheme.kind}"
            raise ValueError(f"{self.path} lacks expert tensors of layer {layer}: {some}{more}")
        tensors = {name: held.pop(name) for name in expected if name in held}
        for name, (shard, tensor) in tensors.items():
            part = expected[name]
            if tensor.dtype not in part.dtypes:
                raise ValueError(
                    f"{self.path / shard}: {root}{name} has dtype {tensor.dtype}, expected {', '.join(part.dtypes)}"
                    f"{self._note}; all experts must be stored in one way"
                )
            if tensor.shape not in part.shapes:
                raise ValueError(
                    f"{self.path / shard}: {root}{name} has shape {list(tensor.shape)}, but config.json makes it "
                    f"{' or '.join(str(list(dims)) for dims in part.shapes)} ({e} experts, hidden size {h}, "
                    f"intermediate size {i}){self._note}"
                )
        return _Layer(root, tensors, form, transposed)

    def _scheme_of(self, root, held, form):
        """How the first matrix that a layer holds is packed."""
        first = next(filter(None, map(_SPLIT, held)), None)
        found = {}
        for suffix in SUFFIXES:
            names = [first[0] + suffix] if first else []
            names += [fused_name(name, suffix) for name in FUSED if form != "split"]
            found.update({suffix: name for name in names[::-1] if name in held})
        try:
            return scheme_of({suffix: held[name][1] for suffix, name in found.items()}, self._quantization)
        except ValueError as error:
            name = next(iter(found.values()))
            raise ValueError(f"{self.path / held[name][0]}: {root}{name} {error}{self._note}") from None

    def _matrices(self, form):
        h, i = self.shape.hidden_size, self.shape.moe_intermediate_size
        gate, up, down = self._row.names
        last = _Matrix(h, i, "down_proj", (down,))
        if form == "split":
            return _Matrix(i, h, "", (gate,)), _Matrix(i, h, "", (up,)), last
        return _Matrix(2 * i, h, "gate_up_proj", (gate, up), 1 if self._row.interleaved else 2), last

    def _names(self, form, matrix, suffix, e):
        """The tensors, one below the other, that hold a part of a matrix, and whether they hold it for all experts."""
        if form == "split" or form == "scales" and suffix == "weight":
            return [f"{e}.{name}.{suffix}" for name in matrix.names], False
        return [fused_name(matrix.fused, suffix)], True

    def _parts(self, matrix):
        parts = self._scheme.parts(matrix.n, matrix.k, matrix.halves)
        return {**parts, "bias": Part(FLOATS, ((matrix.n,),))} if self.has_bias else parts

    def _expected(self, form, transposed, root):
        """``{name: Part}`` of a layer."""
        expected = {}
        experts = self.shape.num_experts
        for matrix in self._matrices(form):
            try:
                parts = self._parts(matrix)
            except ValueError as error:
                raise ValueError(f"{self.path}: {root}*: {error}{self._note}") from None
            for suffix, part in parts.items():
                names, fused = self._names(form, matrix, suffix, 0)
                if not fused:
                    shapes = [(dims[0] // len(names), *dims[1:]) for dims in part.shapes]
                elif transposed:
                    shapes = [(experts, *dims[::-1]) for dims in part.shapes]
                else:
                    shapes = [(experts, *dims) for dims in part.shapes]
                part = part._replace(shapes=tuple(shapes))
                for e in range(1 if fused else experts):
                    expected.update(dict.fromkeys(self._names(form, matrix, suffix, e)[0], part))
        return expected

    def _float_kind(self):
        """The widest dtype of float experts."""
        dtypes = {t.dtype for layer in self._layers.values() for _, t in layer.tensors.values()}
        return [kind for dtype, kind in _FLOAT_KINDS.items() if dtype in dtypes][-1]

    @property
    def tensors(self):
        """For each layer its tensors: ``{name: Tensor}``, as of `Gguf`."""
        return {
            n: {layer.root + name: tensor for name, (_, tensor) in layer.tensors.items()}
            for n, layer in self._layers.items()
        }

    def header(self):
        """The bytes of config.json."""
        return (self.path / "config.json").read_bytes()

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
            Its arrays are overwritten by the next call of the same thread; copy what must last.

        Raises
        ------
        ValueError
            For a layer or expert that the model does not have, after `close`, or if quantized weights hold scales that
            are negative, inf or NaN, or other contradictions; the message names file, tensor, expert and position.
        OSError
            If the file cannot be read, or was cut since it was opened.
        """
        check_expert(self, layer, e)
        plan = self._layers[layer]
        matrices = self._matrices(plan.form)
        stored, labels = {}, {}
        for m, matrix in enumerate(matrices):
            for suffix in self._parts(matrix):
                names, fused = self._names(plan.form, matrix, suffix, e)
                if names[0] in plan.tensors:
                    held = [plan.tensors[name] for name in names]
                    stored[m, suffix] = [(shard, _slice(t, e)) for shard, t in held] if fused else held
                    which = f", expert {e}" if fused else ""
                    labels[m, suffix] = [
                        f"{self.path / shard}: {plan.root}{name}{which}" for name, (shard, _) in zip(names, held)
                    ]
        arrays, works = self._read(stored, [self._scheme.work(matrix.n, matrix.k) for matrix in matrices])
        values, biases, sources = [], [], []
        for m, (matrix, work) in enumerate(zip(matrices, works)):
            own = {suffix: array for (at, suffix), array in arrays.items() if at == m}
            bias = own.pop("bias").astype(np.float32) if self.has_bias else None
            value = self._scheme.matrix(own, matrix.n, matrix.k, work, lambda suffix, m=m: labels[m, suffix][0])
            source = labels[m, next(iter(own))]
            if len(matrix.names) == 2:
                values += self._halves(value.T if plan.transposed else value)
                biases += self._halves(bias) if self.has_bias else (None, None)
                sources += source[0], source[-1]
            else:
                values.append(value.T if plan.transposed else value)
                biases.append(bias)
                sources += source
        return Expert(*values, *biases, dict(zip(("gate", "up", "down"), sources)))

    def _halves(self, rows):
        """Gate and up of a fused tensor, along its first axis."""
        half = self.shape.moe_intermediate_size
        return (rows[0::2], rows[1::2]) if self._row.interleaved else (rows[:half], rows[half:])

    def _read(self, stored, works):
        """``{key: [(shard, Tensor), ...]}`` as ``{key: array}``, tensors of one key one below the other, and as many
        bytes of work as asked for; all in this thread's buffer.
        """
        starts, total = [], 0
        for size in [*(sum(t.end - t.begin for _, t in held) for held in stored.values()), *works]:
            starts.append(total)
            total += -(-size // ALIGN) * ALIGN
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < total:
            self._local.buffer = buffer = None
            self._local.buffer = buffer = np.empty(total, np.uint8)
        arrays = {}
        for (key, held), start in zip(stored.items(), starts):
            end = start
            for shard, tensor in held:
                begin, end = end, end + tensor.end - tensor.begin
                _fill(self.files[shard], buffer[begin:end], tensor.begin)
            dtype = DTYPES.get(tensor.dtype) or _CODES.get(tensor.dtype) or np.dtype(np.uint8)
            shape = (len(held) * tensor.shape[0], *tensor.shape[1:])
            arrays[key] = buffer[start:end].view(dtype).reshape(shape)
        return arrays, [buffer[start : start + size] for start, size in zip(starts[len(stored) :], works)]

    def close(self):
        """Closes the files and frees the buffers. Arrays that `expert` returned stay valid."""
        self.files = {}
        self._local = threading.local()
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def check_expert(source, layer, e):
    """Refuses an expert that an open `Checkpoint` or `Gguf` does not have, or one of a closed one."""
    if not source.files:
        raise ValueError(f"the {source.what} {source.path} is closed")
    if layer not in source.layers:
        raise ValueError(f"layer {layer} of {source.path} has no experts; the layers are {_runs(source.layers)}")
    if not 0 <= e < source.shape.num_experts:
        raise ValueError(f"no expert {e}; the experts are 0 to {source.shape.num_experts - 1}")


def _check_folder(path):
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such folder; expected that of a Hugging Face checkpoint")
        with open(path, "rb") as file:
            what = what_file(file.read(4096), path.stat().st_size) or "it is a file"
        raise ValueError(f"{path}: {what}; expected the folder of a Hugging Face checkpoint")
    what = what_folder(path)
    weights = (path / INDEX).is_file() or any(path.glob("*.safetensors"))
    if (path / "config.json").is_file() and weights and "ktcy" not in what:
        return
    if "ktcy" in what:
        advice = "These are ready to use: give the folder to KTMoEWrapper as weight_path"
    else:
        if (path / "snapshots").is_dir():
            advice = f"This is a folder of the Hugging Face cache, so take one of {path / 'snapshots'}/*"
        elif "GGUF" in what:
            advice = "Give the .gguf file itself as MODEL"
        elif "PyTorch" in what:
            advice = "Load the model with transformers and save it again with save_pretrained"
        elif weights:
            advice = "Copy the model's config.json there"
        else:
            advice = "Download the whole model"
        advice += ", then run `python -m ktcy convert MODEL OUT`"
    raise ValueError(f"{path} holds {what}; expected config.json and *.safetensors of a Hugging Face model. {advice}")


def _read_json(path):
    text = path.read_bytes()
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        what = what_file(text[:4096], len(text)) or error
        raise ValueError(f"{path} is no JSON file of a checkpoint: {what}") from None
    return value


def _read_headers(folder):
    """``{shard: {name: Tensor}}`` of the files that make up the model; every name stands once."""
    index = folder / INDEX
    if not index.is_file():
        shards = _shards_without_index(folder)
        headers = {shard: read_header(folder / shard).tensors for shard in shards}
        first = {}
        for shard, tensors in headers.items():
            for name in tensors:
                if first.setdefault(name, shard) != shard:
                    raise ValueError(f"{folder} has the tensor {name} twice: in {first[name]} and in {shard}")
        return headers

    placed = _read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index} has no weight_map")
    shards = list(dict.fromkeys(placed.values()))
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} lists {shard!r}, which is no name of a file in its folder")
    _check_present(folder, shards, f"{index} lists")
    headers = {shard: read_header(folder / shard).tensors for shard in shards}
    for name, shard in placed.items():
        if name not in headers[shard]:
            raise ValueError(f"{index} places the tensor {name} in {shard}, which does not hold it")
    for shard, tensors in headers.items():
        for name in tensors:
            if EXPERTS in name and name not in placed:
                raise ValueError(f"{folder / shard}: {INDEX} does not list the expert tensor {name}")
    return {
        shard: {name: tensor for name, tensor in tensors.items() if placed.get(name) == shard}
        for shard, tensors in headers.items()
    }


def _shards_without_index(folder):
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) == 1 and not SHARD.fullmatch(names[0]):
        return names
    match = SHARD.fullmatch(names[0])
    shards = [f"{match[1]}-{n + 1:05d}-of-{match[2]}.safetensors" for n in range(int(match[2]))] if match else names
    if not match or set(names) - set(shards):
        raise ValueError(
            f"{folder} has no {INDEX} and {len(names)} safetensors files, so which of them make up the model is not "
            f"known: {', '.join(names)}. Expected one file, or a set model-00001-of-00002.safetensors...; fetch the "
            "index, or move the stray files away"
        )
    _check_present(folder, shards, f"{folder} has no index and the shard names ask for")
    return shards


def _check_present(folder, shards, who):
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise FileNotFoundError(
            f"{who} {len(shards)} shards, but {len(missing)} of them are not there: {some}; download them"
        )


def _swapped(shape):
    return shape[:1] + shape[:0:-1]


def _slice(tensor, e):
    size = (tensor.end - tensor.begin) // tensor.shape[0]
    return Tensor(tensor.dtype, tensor.shape[1:], tensor.begin + e * size, tensor.begin + (e + 1) * size)


def _fill(file, array, offset):
    """Reads ``array.size`` bytes; pread, as threads share the file."""
    view = memoryview(array)
    while view:
        try:
            got = os.preadv(file.fileno(), [view], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from None
        if not got:
            raise OSError(f"{file.name} ends at byte {offset}, {len(view)} bytes early: it was cut while in use")
        view, offset = view[got:], offset + got


def _runs(numbers):
    """[1, 2, 3, 7] as "1-3, 7"."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)

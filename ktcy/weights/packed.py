"""The packed weights of one layer: in memory, or mapped from a converted folder and used where they lie.

A layer is one safetensors file, ``layer-00003.safetensors``. E experts, H = hidden size, I = intermediate size,
J = ceil(I / 16), B = ceil(H / 16); the bytes of a block and of its scales are the format's (kernels/table.h)::

    gate_up.weight  U8  [E, 2J, weight_bytes(H)]   block 2j: gate rows 16j.., block 2j + 1: the same rows of up
    down.weight     U8  [E, B, weight_bytes(I)]
    gate_up.scale   U8  [E, 2J, scale_bytes(H)]
    down.scale      U8  [E, B, scale_bytes(I)]
    gate_up.bias    F32 [E, 2J, 16]                both only if the model has biases; rows past I or H are 0
    down.bias       F32 [E, B, 16]
    gate_up.order   I32 [E, H']                    both only if columns are sorted (act-order of GPTQ): column j
    down.order      I32 [E, I']                    multiplies input order[j]; H' and I' are H and I rounded up to 64

Data start at a multiple of 4096 bytes, every tensor at a multiple of 64. The same bytes serve every CPU variant
and any number of threads.
"""

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import numpy as np

from .. import kernels
from .._version import __version__
from ..config import Activation, LayerShape
from ..runtime.memory import require
from ._header import Tensor, read_header, what_folder
from .quantized import Quantized

FILE_VERSION = 1
PAGE = 4096
ROWS = 16

NUMPY = {"U8": np.dtype("u1"), "F32": np.dtype("<f4"), "I32": np.dtype("<i4")}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def layer_path(folder, layer):
    return Path(folder) / f"layer-{layer:05d}.safetensors"


def layer_tensors(fmt, shape, has_bias, has_order=False):
    """Name to `Tensor` in file order; offsets count from where the data start."""
    e, h, i = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
    gate_up, down = 2 * -(-i // ROWS), -(-h // ROWS)
    dims = {
        "gate_up.weight": ("U8", (e, gate_up, fmt.weight_bytes(h))),
        "down.weight": ("U8", (e, down, fmt.weight_bytes(i))),
        "gate_up.scale": ("U8", (e, gate_up, fmt.scale_bytes(h))),
        "down.scale": ("U8", (e, down, fmt.scale_bytes(i))),
    }
    if has_bias:
        dims["gate_up.bias"] = ("F32", (e, gate_up, ROWS))
        dims["down.bias"] = ("F32", (e, down, ROWS))
    if has_order:
        dims["gate_up.order"] = ("I32", (e, -(-h // 64) * 64))
        dims["down.order"] = ("I32", (e, -(-i // 64) * 64))
    tensors, end = {}, 0
    for name, (dtype, size) in dims.items():
        begin, end = end, end + NUMPY[dtype].itemsize * math.prod(size)
        tensors[name] = Tensor(dtype, size, begin, end)
    return tensors


def layer_header(fmt, layer, shape, activation, has_bias, has_order=False):
    """The bytes of a layer file before its data."""
    metadata = {
        "ktcy": str(FILE_VERSION),
        "format": fmt.name,
        "layout": fmt.layout,
        "layer": str(layer),
        **{name: str(value) for name, value in vars(shape).items()},
        **{name: value if name == "gate" else repr(float(value)) for name, value in vars(activation).items()},
        "producer": f"ktcy {__version__}",
    }
    entries = {"__metadata__": metadata}
    for name, t in layer_tensors(fmt, shape, has_bias, has_order).items():
        entries[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.begin, t.end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def pack_expert(fmt, expert, out):
    """Packs one expert.

    Parameters
    ----------
    fmt : Format
    expert : object
        ``gate, up [I, H]`` and ``down [H, I]``, arrays of any strides, dtype float32, float16 or bfloat16, or
        `Quantized`;
        ``gate_bias, up_bias [I]``, ``down_bias [H]`` or None; ``source``, a dict of what to call each in errors.
    out : dict of str to ndarray
        Where to: the tensors of one expert, named as in the file.

    Raises
    ------
    ValueError
        For NaN or inf, naming the tensor, row and column; for gate and up that are sorted differently.
    TypeError
        For another dtype, naming the tensor.
    """
    for name, part, blocks in (
        ("gate", "gate_up", np.s_[0::2]),
        ("up", "gate_up", np.s_[1::2]),
        ("down", "down", np.s_[:]),
    ):
        weight, scale = out[f"{part}.weight"][blocks], out[f"{part}.scale"][blocks]
        try:
            matrix = getattr(expert, name)
            if fmt.codes is None:
                fmt.pack(matrix.dequantize() if isinstance(matrix, Quantized) else matrix, weight, scale)
            else:
                coded = matrix.packs_as(fmt)
                if coded is None:
                    raise ValueError(f"{fmt.name} cannot hold its scales and zero points; use int8, int4 or bf16")
                fmt.pack(coded.codes, weight, scale, coded.scale, coded.zero)
                _pack_order(matrix.order, matrix.shape[1], out.get(f"{part}.order"), name == "up")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{expert.source[name]}: {error}") from None
        if f"{part}.bias" in out:
            bias = getattr(expert, f"{name}_bias")
            wrong = np.flatnonzero(~np.isfinite(bias))
            if wrong.size:
                raise ValueError(f"{expert.source[name]}: the bias of row {wrong[0]} is {bias[wrong[0]]}")
            padded = np.zeros((len(weight), ROWS), np.float32)
            padded.reshape(-1)[: len(bias)] = bias
            out[f"{part}.bias"][blocks] = padded


def _pack_order(order, k, out, second):
    """Stores where columns belong, or compares: gate and up multiply the same sorted row."""
    if out is None:
        if order is not None:
            raise ValueError("its g_idx sorts the inputs, but config.json does not say desc_act; correct one of them")
        return
    full = np.arange(len(out), dtype=out.dtype)
    if order is not None:
        full[:k] = order
    if second and np.any(full != out):
        raise ValueError("gate and up have different g_idx, so they cannot share an input; use int8, int4 or bf16")
    out[:] = full


def in_order(pool, function, items, done=lambda result: None):
    """``done(function(item))`` for each item, the functions in threads of ``pool``, ``done`` here and in order.

    After the first exception, in the order of the items, nothing runs any more when it is raised.
    """
    futures = [pool.submit(function, item) for item in items]
    try:
        for future in futures:
            done(future.result())
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


@contextlib.contextmanager
def new_file(path, size):
    """Gives the descriptor of a file to be filled, which takes its name only when all of it is on the disk.

    Raises
    ------
    OSError
        ENOSPC, EDQUOT, EFBIG with the bytes needed and free, before the first byte is written where the file
        system can tell.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in FULL:
            raise no_room(path, size, error.errno) from None
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def no_room(path, size, code):
    free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    return OSError(
        code,
        f"{os.strerror(code)}: {path} needs {size} bytes, {free} are free there. "
        "Make room and run the same again: finished layers are kept",
    )


def write_at(fd, data, offset):
    data = memoryview(data)
    data = data.cast("B") if data.nbytes else b""  # a format without scales
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class _Expert:
    def __init__(self, e, matrices, biases):
        self.gate, self.up, self.down = (stack[e] for stack in matrices)
        self.gate_bias, self.up_bias, self.down_bias = (
            None if stack is None else np.asarray(stack[e], np.float32) for stack in biases
        )
        self.source = {name: f"{name} of expert {e}" for name in ("gate", "up", "down")}


class PackedLayer:
    """The packed weights of one layer. Made by `pack` or `open`.

    Attributes
    ----------
    gate_up_weight, gate_up_scale, down_weight, down_scale : ndarray of uint8
    gate_up_bias, down_bias : ndarray of float32, or None
    gate_up_order, down_order : ndarray of int32, or None
        Shapes as in the module's description. Read-only if mapped.
    format, layout : str
    layer : int
    shape : LayerShape
    activation : Activation
    path : Path or None
        The file that is mapped.
    nbytes : int
        Bytes of the tensors.
    """

    def __init__(self, fmt, layer, shape, activation, has_bias, memory, path=None, has_order=False):
        self._fmt, self._memory, self._optional = fmt, memory, (has_bias, has_order)
        self.format, self.layout = fmt.name, fmt.layout
        self.layer, self.shape, self.activation, self.path = layer, shape, activation, path
        self.nbytes = memory.nbytes
        self.tensors = {
            name: memory[t.begin : t.end].view(NUMPY[t.dtype]).reshape(t.shape)
            for name, t in layer_tensors(fmt, shape, has_bias, has_order).items()
        }
        for part in ("gate_up", "down"):
            for kind in ("weight", "scale", "bias", "order"):
                setattr(self, f"{part}_{kind}", self.tensors.get(f"{part}.{kind}"))

    def __reduce__(self):
        if self.path is None:
            raise TypeError(
                f"the packed layer {self.layer} lives in the memory of this process and cannot be pickled or copied; "
                "save(folder) it and open it from there, then it can"
            )
        return PackedLayer.open, (self.path.parent, self.layer)

    @classmethod
    def pack(
        cls,
        fmt,
        gate,
        up,
        down,
        gate_bias=None,
        up_bias=None,
        down_bias=None,
        *,
        shape,
        activation=Activation(),
        layer=0,
        threads=1,
    ):
        """Packs a layer into anonymous memory, expert by expert; nothing of the input is copied.

        Parameters
        ----------
        fmt : Format
            Of `ktcy.kernels`.
        gate, up : array [E, I, H], or sequence of E arrays [I, H]
            float32, float16 or bfloat16, any strides: views of one fused tensor are packed where they lie.
        down : array [E, H, I], or sequence of E arrays [H, I]
        gate_bias, up_bias : array [E, I], optional
        down_bias : array [E, H], optional
            All three or none.
        shape : LayerShape
        activation : Activation
        layer : int
        threads : int
            How many experts are packed at once; the result does not depend on it.

        Raises
        ------
        ValueError
            For a shape that does not fit the layer, or NaN or inf, naming the tensor, expert and position.
        TypeError
            For another dtype, naming the tensor.
        """
        e, h, i = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
        matrices, biases = (gate, up, down), (gate_bias, up_bias, down_bias)
        has_bias = any(stack is not None for stack in biases)
        for name, stack, dims in zip(("gate", "up", "down"), matrices, ((i, h), (i, h), (h, i))):
            _check_stack(name, stack, (e, *dims))
        for name, stack, size in zip(("gate", "up", "down"), biases, (i, i, h)):
            if has_bias:
                _check_stack(f"{name}_bias", stack, (e, size))

        has_order = fmt.codes is not None and any(
            getattr(m, "order", None) is not None for stack in matrices for m in stack
        )
        expert = partial(_Expert, matrices=matrices, biases=biases)
        return cls._filled(fmt, expert, shape, activation, has_bias, has_order, layer, threads)

    @classmethod
    def read(cls, fmt, source, layer, threads=1):
        """Packs a layer of a model's own files into anonymous memory, expert by expert.

        Parameters
        ----------
        fmt : Format
            Of `weights.source.layer_format`.
        source : Checkpoint or Gguf
        layer : int
        threads : int

        Raises
        ------
        MemoryError
            When it does not fit what is available; with figures.
        ValueError, OSError
            For damaged files, and values that are not finite or that the format cannot hold: file, tensor, expert.
        """
        expert = partial(source.expert, layer)
        has_order = fmt.codes is not None and source.has_order
        return cls._filled(fmt, expert, source.shape, source.activation, source.has_bias, has_order, layer, threads)

    @classmethod
    def _filled(cls, fmt, expert, shape, activation, has_bias, has_order, layer, threads):
        size = max(t.end for t in layer_tensors(fmt, shape, has_bias, has_order).values())
        require(size, f"layer {layer}")
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        packed = cls(fmt, layer, shape, activation, has_bias, np.frombuffer(memory, np.uint8), has_order=has_order)

        def one(e):
            pack_expert(fmt, expert(e), {name: t[e] for name, t in packed.tensors.items()})

        with ThreadPoolExecutor(threads) as pool:
            in_order(pool, one, range(shape.num_experts))
        return packed

    @classmethod
    def open(cls, folder, layer, *, prefault=False, lock=False):
        """Maps a converted layer read-only; nothing is copied, and processes share the pages.

        Parameters
        ----------
        folder : path-like
            What ``python -m ktcy convert`` or `save` wrote.
        layer : int
        prefault : bool
            Read all of it into the page cache now, so that the first tokens do not wait for the disk.
        lock : bool
            Also keep it in memory (mlock).

        Raises
        ------
        FileNotFoundError
            If the folder has no such layer: what it holds instead, and what to run.
        ValueError
            If the file is damaged, of another version, format or layout, or has a scale or bias that is not
            finite or an order that is no permutation, naming the file, what was found and what was expected.
        OSError
            If it cannot be read or locked.
        """
        path = layer_path(folder, layer)
        if not path.is_file():
            raise FileNotFoundError(absent(path, layer))
        header = read_header(path)
        fmt, shape, activation, has_bias, has_order = described(path, header, layer)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        memory = np.frombuffer(mapped, np.uint8)[header.data :]
        if lock:
            _lock(memory, path)
        packed = cls(fmt, layer, shape, activation, has_bias, memory, path, has_order)
        _check_scales(packed)
        if has_bias:
            packed._check_finite("gate_up.bias", packed.gate_up_bias)
            packed._check_finite("down.bias", packed.down_bias)
        if has_order:
            packed._check_order("gate_up.order", shape.hidden_size)
            packed._check_order("down.order", shape.moe_intermediate_size)
        return packed

    def save(self, folder):
        """Writes the layer's file into a folder, which is made if need be; an older file is replaced whole.

        Raises
        ------
        OSError
            If it cannot be written; no part of it is left.
        """
        path = layer_path(folder, self.layer)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = layer_header(self._fmt, self.layer, self.shape, self.activation, *self._optional)
        with new_file(path, len(header) + self.nbytes) as fd:
            write_at(fd, header, 0)
            write_at(fd, self._memory, len(header))

    def unpack(self, expert):
        """The weights that the packed bytes of one expert mean.

        Returns
        -------
        gate, up, down : ndarray of float32, [I, H], [I, H] and [H, I]

        Raises
        ------
        IndexError
            If there is no such expert.
        """
        if not 0 <= expert < self.shape.num_experts:
            raise IndexError(f"layer {self.layer} has experts 0 to {self.shape.num_experts - 1}, not {expert}")
        h, i = self.shape.hidden_size, self.shape.moe_intermediate_size
        weight, scale = self.gate_up_weight[expert], self.gate_up_scale[expert]
        gate, up = (self._fmt.unpack(weight[part::2], scale[part::2], i, h) for part in (0, 1))
        down = self._fmt.unpack(self.down_weight[expert], self.down_scale[expert], h, i)
        if self.gate_up_order is not None:
            back, down_back = (np.argsort(o[expert][:k]) for o, k in ((self.gate_up_order, h), (self.down_order, i)))
            gate, up, down = gate[:, back], up[:, back], down[:, down_back]
        return gate, up, down

    def _check_order(self, name, k):
        order = self.tensors[name][:, :k]
        wrong = np.flatnonzero((np.sort(order, axis=1) != np.arange(k)).any(axis=1))
        if wrong.size:
            raise ValueError(f"{self.path}: tensor {name} of expert {wrong[0]} is no order of {k} inputs")

    def _check_finite(self, name, values, lowest=-math.inf, shared=False):
        """values: [E, blocks, 16], or [E, blocks, groups] if the 16 rows of a block share them. min and max see a NaN
        too, and need no array of booleans."""
        with np.errstate(invalid="ignore"):
            low, high = values.min(), values.max()
        if lowest <= low and abs(low) < math.inf and high < math.inf:
            return
        at = expert, block, n = tuple(np.argwhere(~(np.isfinite(values) & (values >= lowest)))[0])
        if shared:
            n = 0
        matrix = "down"
        if name.startswith("gate_up"):
            matrix, block = ("gate", "up")[block % 2], block // 2
        raise ValueError(
            f"{self.path}: tensor {name} has {values[at]} for expert {expert}, {matrix} row {block * ROWS + n}"
        )


def _check_scales(packed):
    """Formats whose scales are a small part of the file, and so can be read whole when it is opened."""
    fmt, shape = packed._fmt, packed.shape
    if fmt.name not in ("int8", "fp8", "fp8_channel"):
        return
    for part, k in (("gate_up", shape.hidden_size), ("down", shape.moe_intermediate_size)):
        name, count = f"{part}.scale", -(-k // fmt.group) if fmt.group else ROWS
        values = packed.tensors[name].view(np.float32)[..., :count]
        packed._check_finite(name, values, lowest=0, shared=fmt.group > 0)


def _check_stack(name, stack, expected):
    if stack is None:
        raise ValueError(f"{name} is missing; give all three or none")
    found = getattr(stack, "shape", None)
    if found is None:
        found = (len(stack), *next((s for s in map(np.shape, stack) if s != expected[1:]), expected[1:]))
    if tuple(found) != expected:
        raise ValueError(f"{name} has shape {tuple(found)}; this layer needs {expected}")


def absent(path, layer):
    """What to say when a folder has no such layer: what it holds, and what to do."""
    folder = path.parent
    others = sorted(int(p.name[6:11]) for p in folder.glob("layer-[0-9][0-9][0-9][0-9][0-9].safetensors"))
    if others:
        return (
            f"{folder} holds {len(others)} converted layers from {others[0]} to {others[-1]}, but not layer {layer}; "
            f"add it with: python -m ktcy convert MODEL {folder} --layers {layer}:{layer + 1}"
        )
    found = what_folder(folder)
    if found == "GGUF files":
        advice = "give one of the files itself, or convert it with: python -m ktcy convert FILE.gguf OUT"
    elif found == "a Hugging Face checkpoint":
        advice = f"make one with: python -m ktcy convert {folder} OUT"
    else:
        out = folder if found.startswith("nothing") else "OUT"
        advice = f"make one with: python -m ktcy convert MODEL {out}"
    return f"{folder} has no {path.name}: expected a folder of weights converted by ktcy, found {found}; {advice}"


def described(path, header, layer):
    """Format, shape, activation, has_bias and has_order that a layer's file states, once they are known to be sound."""
    meta = header.metadata
    again = "convert the model again with: python -m ktcy convert MODEL OUT"
    if "ktcy" not in meta:
        raise ValueError(f"{path} is not a layer converted by ktcy (its metadata do not say so); {again}")
    producer = meta.get("producer", "an unknown program")
    if meta["ktcy"] != str(FILE_VERSION):
        raise ValueError(
            f"{path} has file version {meta['ktcy']} (written by {producer}); ktcy {__version__} reads "
            f"version {FILE_VERSION}. Install the version that wrote it, or {again}"
        )
    table = kernels.default()
    if meta.get("format") not in table.formats:
        raise ValueError(
            f"{path} has weights of format {meta.get('format')} (written by {producer}); ktcy {__version__} knows "
            f"{', '.join(table.formats)}; {again}"
        )
    fmt = table.format(meta["format"])
    if meta.get("layout") != fmt.layout:
        raise ValueError(
            f"{path} has layout {meta.get('layout')} (written by {producer}), expected {fmt.layout}; {again}"
        )
    try:
        number = int(meta["layer"])
        shape = LayerShape(**{name: int(meta[name]) for name in LayerShape.__dataclass_fields__})
        activation = Activation(meta["gate"], *(float(meta[name]) for name in ("alpha", "limit", "offset")))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} has damaged metadata ({error}); {again}") from None
    if number != layer:
        raise ValueError(f"{path} holds layer {number}, expected layer {layer}; it was renamed")
    has_bias = "down.bias" in header.tensors
    has_order = "gate_up.order" in header.tensors
    expected = layer_tensors(fmt, shape, has_bias, has_order)
    found = {name: Tensor(*t[:2], t.begin - header.data, t.end - header.data) for name, t in header.tensors.items()}
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise ValueError(f"{path}: tensor {name} is {found.get(name)}, expected {expected.get(name)}; {again}")
    if header.data % PAGE:
        raise ValueError(f"{path}: data start at byte {header.data}, expected a multiple of {PAGE}; {again}")
    return fmt, shape, activation, has_bias, has_order


def _lock(memory, path):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)):
        error = ctypes.get_errno()
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "without limit" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise OSError(
            error,
            f"cannot lock {memory.nbytes} bytes of {path} in memory ({os.strerror(error)}). RLIMIT_MEMLOCK allows "
            f"{allowed}: raise it (ulimit -l, systemd LimitMEMLOCK=, docker --ulimit memlock=) or do without lock",
        )

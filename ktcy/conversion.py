"""Conversion of a checkpoint's experts to packed layer files that are mapped and used where they lie.

One file a layer (weights/packed.py) and a manifest, ``ktcy.json``. A file takes its name when all of it is on
the disk, and enters the manifest after that; so a run that is killed leaves nothing that a later one would trust
wrongly, and the later one goes on where it stopped. The bytes depend on the checkpoint, the format and ktcy's
version only, not on threads, variant or interruptions.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from . import kernels
from ._version import __version__
from .config import integer, method_of
from .runtime import topology
from .weights._header import what_folder
from .weights.source import layer_format, open_source
from .weights.packed import (
    FILE_VERSION,
    NUMPY,
    ROWS,
    PackedLayer,
    in_order,
    layer_header,
    layer_path,
    layer_tensors,
    new_file,
    no_room,
    pack_expert,
    write_at,
)
from .weights.quantized import Quantized

log = logging.getLogger(__name__)

MANIFEST = "ktcy.json"
LOCK = ".ktcy.lock"
TEMPORARY = re.compile(r"(layer-\d+\.safetensors|ktcy\.json)\.\d+\.tmp")

# Relative error (RMS) of Gaussian weights: in int8 a row's absmax is about 3.5 times its RMS, and the error
# absmax / (127 sqrt(12)). Three times as much, where convert warns, is as if 1.6 of the 8 bits were lost. bf16 rounds
# once, with an error of 2^-9 / sqrt(3) of the largest mantissas. Formats of codes change nothing.
GAUSSIAN_ERROR = {"int8": 0.008, "int4": 0.1, "bf16": 0.0017}
WARN_ABOVE = 3


def convert(model, out, format="int8", layers=None, threads=None, verify=False, progress=None):
    """Converts the experts of a checkpoint; goes on where an earlier run of the same conversion stopped.

    Parameters
    ----------
    model : path-like
        Folder of a Hugging Face checkpoint, or a GGUF file.
    out : path-like
        Folder for the result: new, empty, or of an earlier run with the same model and format.
    format : str
        A method name of `ktcy.config.METHODS`: int8, int4 or bf16 from any weights; ``"auto"`` or the name of what the
        files hold keeps their numbers.
    layers : slice or iterable of int, optional
        Which layers; a slice picks those with experts from a range of layer numbers. The default is all.
    threads : int, optional
        The default is that of layers: one for each core that this process may use. Each takes the memory of two
        experts.
    verify : bool
        Read all of ``out`` again afterwards and compare checksums.
    progress : bool, optional
        Show a progress bar; the default is only on a terminal or in a notebook.

    Returns
    -------
    dict
        The manifest. ``manifest["layers"][str(layer)]`` has ``file``, ``bytes``, ``checksum`` and ``error``, the
        relative error (RMS) of the weights: ``rms`` of the layer, and ``worst`` with its ``expert``. Each expert is
        sampled: a block of 16 rows of gate, up and down. ``format`` and ``layout`` are the layer's, ``kind`` is how the
        model held it.

    Raises
    ------
    ValueError
        For a checkpoint that is damaged or of unknown kind, weights with NaN or inf (file, tensor, expert, row
        and column), layers without experts, a format that contradicts the files, or an ``out`` that holds something
        else.
    OSError
        For a full disk (bytes needed and free), files that cannot be read, or an ``out`` that another run writes.
    """
    method = method_of(format)
    threads = _threads(threads)
    out = Path(out)
    with open_source(model) as source:
        chosen = _chosen(layers, source.layers)
        formats = _formats(source, chosen, method)
        _check_out(out)
        with _locked(out), ThreadPoolExecutor(threads) as pool, _bar(progress, "converting") as bar:
            job = _Job(source, method, out, pool)
            job.run(formats, bar)
    return verify_folder(out, threads, progress) if verify else job.manifest


def verify_folder(folder, threads=None, progress=None):
    """Reads the layers of a converted folder again and compares them with the manifest's checksums.

    Parameters
    ----------
    folder : path-like
    threads : int, optional
    progress : bool, optional

    Returns
    -------
    dict
        The manifest.

    Raises
    ------
    ValueError
        Naming each layer that is damaged or missing, and what to do.
    FileNotFoundError
        If the folder has no manifest: what it holds instead.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: expected a folder made by `python -m ktcy convert MODEL OUT`, "
            f"found {what_folder(folder)}"
        )
    damaged = []
    with ThreadPoolExecutor(_threads(threads)) as pool, _bar(progress, "verifying") as bar:
        bar.reset(sum(entry["bytes"] for entry in manifest["layers"].values()))
        for number, entry in manifest["layers"].items():
            path = layer_path(folder, int(number))
            try:
                packed = PackedLayer.open(folder, int(number))
                with open(path, "rb") as file:
                    checksum = _Checksum(file.read(entry["bytes"] - packed.nbytes))
                in_order(pool, lambda e: _crc(packed, e), range(packed.shape.num_experts), checksum.add)
                if checksum.text() != entry["checksum"]:
                    damaged.append(f"{path}: checksum {checksum.text()}, expected {entry['checksum']}")
            except (FileNotFoundError, ValueError) as error:
                damaged.append(str(error))
            bar.update(entry["bytes"])
    if damaged:
        raise ValueError(
            f"{len(damaged)} of {len(manifest['layers'])} layers in {folder} are damaged; delete their files and run "
            "the conversion again, it makes these only:\n" + "\n".join(damaged)
        )
    return manifest


def _crc(packed, expert):
    return _crc32([tensor[expert] for tensor in packed.tensors.values()])


def _crc32(arrays):
    value = 0
    for array in arrays:
        value = zlib.crc32(array, value)
    return value


class _Checksum:
    """Of a layer file: SHA-256 of its header and of the CRC-32 of each expert's bytes, in order.

    It is to find damage, not forgery; this way the threads compute it as they write, at little cost (CRC-32 runs
    at 2.6 GB/s where BLAKE2b does 0.4 and SHA-256 needs special instructions to do 1.2).
    """

    def __init__(self, header):
        self.hash = hashlib.sha256(header)

    def add(self, crc):
        self.hash.update(crc.to_bytes(4, "little"))

    def text(self):
        return "crc32-sha256:" + self.hash.hexdigest()


class _Job:
    """One conversion: what is open, and a buffer for one packed expert for each thread."""

    def __init__(self, source, method, out, pool):
        self.source, self.method, self.out, self.pool = source, method, out, pool
        self.buffers = threading.local()
        self.manifest = self._begin()

    def _begin(self):
        """The manifest to go on with. Removes what a killed run left."""
        identity = {"ktcy": FILE_VERSION, "format": self.method, "source": _identity(self.source)}
        manifest = read_manifest(self.out)
        for path in self.out.iterdir():
            if TEMPORARY.fullmatch(path.name):
                path.unlink()
        if manifest is None:
            name = self.source.path.resolve().name
            manifest = {**identity, "model": name, "producer": f"ktcy {__version__}", "layers": {}}
            _write_manifest(self.out, manifest)
        for key, value in identity.items():
            if manifest.get(key) != value:
                raise ValueError(
                    f"{self.out} was made from another model or with other options: "
                    f"{_difference(key, manifest.get(key), value)}. Convert into another folder, or delete this one"
                )
        return manifest

    def run(self, formats, bar):
        """Converts the layers that are not done, each to its format."""
        c = self.source
        todo = [layer for layer, fmt in formats.items() if not self._done(layer, fmt)]
        if not todo:
            return
        optional = {n: (c.has_bias, c.has_order and formats[n].codes is not None) for n in todo}
        headers = {n: layer_header(formats[n], n, c.shape, c.activation, *optional[n]) for n in todo}
        tensors = {n: layer_tensors(formats[n], c.shape, *optional[n]) for n in todo}
        sizes = {n: len(headers[n]) + max(t.end for t in tensors[n].values()) for n in todo}
        if sum(sizes.values()) > shutil.disk_usage(self.out).free:
            raise no_room(self.out, sum(sizes.values()), errno.ENOSPC)
        first = c.expert(todo[0], 0)
        one = sum(matrix.nbytes for matrix in (first.gate, first.up, first.down))
        bar.reset(one * c.shape.num_experts * len(todo))
        # The disk takes a layer while the next one is packed.
        with ThreadPoolExecutor(1) as disk:
            written = disk.submit(lambda: None)
            for layer in todo:
                with contextlib.ExitStack() as stack:
                    fd = stack.enter_context(new_file(layer_path(self.out, layer), sizes[layer]))
                    fmt, header = formats[layer], headers[layer]
                    entry = self._pack(fd, layer, fmt, header, tensors[layer], lambda: bar.update(one))
                    entry["bytes"] = sizes[layer]
                    written.result()
                    written = disk.submit(self._finish, stack.pop_all(), layer, entry)
            written.result()

    def _done(self, layer, fmt):
        entry = self.manifest["layers"].get(str(layer))
        path = layer_path(self.out, layer)
        if entry is None or (entry.get("format"), entry.get("layout")) != (fmt.name, fmt.layout):
            return False
        return path.is_file() and path.stat().st_size == entry["bytes"]

    def _pack(self, fd, layer, fmt, header, tensors, step):
        """Fills the layer's file; what the manifest says of it."""
        checksum, errors = _Checksum(header), []

        def done(result):
            crc, error = result
            checksum.add(crc)
            errors.append(error)
            step()

        write_at(fd, header, 0)
        experts = range(self.source.shape.num_experts)
        in_order(self.pool, lambda e: self._expert(fd, len(header), layer, fmt, tensors, e), experts, done)
        error = _summary(errors)
        usual = GAUSSIAN_ERROR.get(fmt.name, 0)
        if error["rms"] > WARN_ABOVE * usual:
            log.warning(
                "layer %d: %s changes its weights by %.1f %% (RMS; %.1f %% is usual), those of expert %d by %.1f %%: "
                "a few weights are far larger than the rest of their rows",
                *(layer, fmt.name, 100 * error["rms"], 100 * usual, error["expert"], 100 * error["worst"]),
            )
        return {
            "file": layer_path(self.out, layer).name,
            "format": fmt.name,
            "layout": fmt.layout,
            "kind": self.source.kinds[layer],
            "checksum": checksum.text(),
            "error": error,
        }

    def _finish(self, file, layer, entry):
        file.close()
        self.manifest["layers"][str(layer)] = entry
        _write_manifest(self.out, self.manifest)

    def _expert(self, fd, start, layer, fmt, tensors, e):
        """Packs one expert and writes it; its checksum and (squared error, squared weights) of its sample."""
        buffers = vars(self.buffers).get(fmt.name)
        if buffers is None:
            buffers = {name: np.empty(t.shape[1:], NUMPY[t.dtype]) for name, t in tensors.items()}
            vars(self.buffers).clear()
            vars(self.buffers)[fmt.name] = buffers
        expert = self.source.expert(layer, e)
        pack_expert(fmt, expert, buffers)
        for name, t in tensors.items():
            write_at(fd, buffers[name], start + t.begin + e * buffers[name].nbytes)
        return _crc32(buffers.values()), _sample_error(fmt, expert, buffers, e)


def _sample_error(fmt, expert, packed, e):
    """Squared error and squared weights over one block of rows of each matrix, another block in each expert."""
    error = total = 0.0
    for matrix, part, first, step in (
        (expert.gate, "gate_up", 0, 2),
        (expert.up, "gate_up", 1, 2),
        (expert.down, "down", 0, 1),
    ):
        block = e % -(-matrix.shape[0] // ROWS)
        rows = matrix[block * ROWS : (block + 1) * ROWS]
        if isinstance(rows, Quantized):
            # Packed columns keep the order of the codes.
            rows = (rows if fmt.codes is None else replace(rows, order=None)).dequantize()
        rows = rows.astype(np.float32)
        at = slice(first + step * block, first + step * block + 1)
        back = fmt.unpack(packed[f"{part}.weight"][at], packed[f"{part}.scale"][at], *rows.shape)
        back -= rows
        # In float32 the square of a weight near 1e-30 would be lost, of one near 1e30 too large.
        error += np.square(back, dtype=np.float64).sum()
        total += np.square(rows, dtype=np.float64).sum()
    return error, total


def relative_rms(error, total):
    """Of a squared error and squared weights. Four digits: the last ones of a sum differ between versions of numpy."""
    return float(f"{math.sqrt(error / total):.4g}") if total else 0.0


def _summary(errors):
    each = [relative_rms(*error) for error in errors]
    worst = max(each)
    return {"rms": relative_rms(*map(math.fsum, zip(*errors))), "worst": worst, "expert": each.index(worst)}


def _threads(threads):
    return topology.default_threads(topology.read()) if threads is None else topology.checked_threads(threads)


def _chosen(layers, have):
    if layers is None:
        return have
    if isinstance(layers, slice):
        chosen = [n for n in have if n in range(*layers.indices(have[-1] + 1))]
    else:
        if not isinstance(layers, Iterable):
            raise TypeError(f"layers must be a slice or a list of integers, not {layers!r}")
        chosen = sorted({integer("a layer", layer, 0) for layer in layers})
    wrong = sorted(set(chosen) - set(have))
    if wrong or not chosen:
        what = f"layer {wrong[0]} has no experts" if wrong else "none of the chosen layers has experts"
        raise ValueError(f"{what}; the layers with experts are {', '.join(map(str, have))}")
    return chosen


def _formats(source, layers, method):
    """The format of each layer; layers of one kind have the same."""
    by_kind = {}
    for layer in layers:
        kind = source.kinds[layer]
        if kind not in by_kind:
            by_kind[kind] = layer_format(source, layer, method, kernels.default())
    return {layer: by_kind[source.kinds[layer]] for layer in layers}


def _identity(source):
    """What makes a model another one: its configuration, and the files that its experts are in."""
    return {
        "config": hashlib.sha256(source.header()).hexdigest(),
        "shards": {name: _sample(file) for name, file in sorted(source.files.items())},
    }


def _sample(file):
    """Size and a digest of a few places of a file: fine-tuned models have the same names, sizes and headers."""
    size = os.fstat(file.fileno()).st_size
    digest = hashlib.sha256()
    for place in range(8):
        digest.update(os.pread(file.fileno(), 4096, size * (2 * place + 1) // 16))
    return f"{size} bytes, sha256 of samples {digest.hexdigest()}"


def _difference(key, there, here):
    if isinstance(there, dict) and isinstance(here, dict):
        key = next(k for k in (*here, *there) if there.get(k) != here.get(k))
        return _difference(key, there.get(key), here.get(key))
    return f"{key} is {there} there and {here} here"


def _check_out(out):
    if out.is_dir() and not (out / MANIFEST).is_file():
        if any(path.name != LOCK and not TEMPORARY.fullmatch(path.name) for path in out.iterdir()):
            raise ValueError(f"{out} is not empty, it holds {what_folder(out)}; give a new or an empty folder")


def read_manifest(folder):
    """The manifest of a converted folder, or None where there is none; ValueError for a damaged one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["ktcy"]
        if version == FILE_VERSION:
            for number, entry in manifest["layers"].items():
                int(number), int(entry["bytes"]), entry["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete the folder and convert again") from None
    if version != FILE_VERSION:
        raise ValueError(
            f"{path} has version {version}; ktcy {__version__} reads version {FILE_VERSION}. "
            "Use the version of ktcy that wrote it, or convert into another folder"
        )
    return manifest


def _write_manifest(folder, manifest):
    manifest["layers"] = dict(sorted(manifest["layers"].items(), key=lambda item: int(item[0])))
    text = json.dumps(manifest, indent=1).encode()
    with new_file(folder / MANIFEST, len(text)) as fd:
        write_at(fd, text, 0)


@contextlib.contextmanager
def _locked(out):
    """Makes the folder, and keeps other conversions out of it; a killed run's lock is released by the kernel."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another conversion is writing to {out}; wait for it, or take another") from None
        except OSError as error:
            log.warning("%s: no lock against other conversions into this folder (%s)", out, error)
        yield


@contextlib.contextmanager
def _bar(progress, what):
    from tqdm.auto import tqdm

    if progress is None:
        progress = getattr(sys.stderr, "isatty", bool)() or "ipykernel" in sys.modules
    with tqdm(desc=what, unit="B", unit_scale=True, total=0, disable=not progress) as bar:
        yield bar

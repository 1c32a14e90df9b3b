"""What a folder or file of weights holds, and whether and how ktcy runs it. The command line prints it.

Not `inspect.py`: the name stays free for the function, and for the standard library's module.
"""

import math
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from . import kernels
from .conversion import read_manifest, relative_rms
from .weights._header import read_header, what_folder
from .weights.gguf import Gguf
from .weights.packed import absent, described, layer_path
from .weights.quantized import Quantized
from .weights.source import layer_format, open_source

# The method that runs experts of a kind (of `Checkpoint` and `Gguf`) as they are; others are converted.
NATIVE = {
    "bf16": "BF16",
    "fp16": "BF16",
    "fp32": "BF16",
    "fp8": "FP8",
    "fp8_perchannel": "FP8_PERCHANNEL",
    "rawint4": "RAWINT4",
    "gptq_int4": "GPTQ_INT4",
    "awq_int4": "GPTQ_INT4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "q8_0": "gguf",
    "q4_0": "gguf",
}
# What the method changes nevertheless.
ROUNDED = {"fp16": "rounded to bfloat16", "fp32": "rounded to bfloat16"}
REPACKED = "int8"


def inspect(path):
    """What a folder or file of weights holds.

    Parameters
    ----------
    path : path-like
        A converted folder, the folder of a Hugging Face checkpoint, or a GGUF file.

    Returns
    -------
    dict
        ``path``; ``holds``: which of the three; ``architecture``, None for a converted folder, which has ``model``
        instead: the name of what was converted; ``num_experts``, ``num_experts_per_tok``, ``hidden_size``,
        ``moe_intermediate_size``; ``activation`` (limit None: no limit); ``has_bias``; ``bytes`` of all experts.

        ``layers[n]`` has ``kind``, how the experts are stored; ``bytes``; and ``tensors``, a list of ``name`` (E for
        the number of an expert), ``dtype``, ``shape`` and ``count``.

        ``runs`` is a list, an entry for each kind: ``kind``; ``layers``; ``how``, "as it is" or "by conversion";
        ``method``; ``commands``; ``error``, the relative RMS error of the weights, by conversion that of the first
        expert, in a converted folder what its manifest says, else None; ``note``.

    Raises
    ------
    ValueError, OSError, ImportError
        For anything else, damaged files and unknown models, as of the reader: what it is, what was expected.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    found = what_folder(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ValueError(f"{path} is one file of several; give its folder, {path.parent}")
        return _read(open_source(path), "a GGUF file")
    if "ktcy" in found:
        return _converted(path)
    if "GGUF" in found and not (path / "config.json").is_file():
        Gguf(path)
    return _read(open_source(path), "a Hugging Face checkpoint")


def _read(reader, holds):
    """The report on what a `Checkpoint` or `Gguf` reads."""
    with reader:
        kinds = reader.kinds
        layers = {n: _layer(kinds[n], tensors) for n, tensors in reader.tensors.items()}
        report = _report(reader.path, holds, reader.architecture, reader, layers)
        for kind in dict.fromkeys(kinds.values()):
            chosen = [n for n in layers if kinds[n] == kind]
            report["runs"].append({"kind": kind, "layers": chosen, **_how(report, reader, kind, chosen[0])})
    return report


def _layer(kind, tensors):
    """One entry for the tensors of all experts that differ by the expert's number only."""
    folded = {}
    for name, tensor in tensors.items():
        key = re.sub(r"\.experts\.\d+\.", ".experts.E.", name), tensor.dtype, tensor.shape
        folded[key] = folded.get(key, 0) + 1
    return {
        "kind": kind,
        "bytes": sum(t.end - t.begin for t in tensors.values()),
        "tensors": [dict(name=n, dtype=d, shape=list(s), count=count) for (n, d, s), count in folded.items()],
    }


def _report(path, holds, architecture, layer, layers):
    """``layer`` has ``shape``, ``activation`` and ``has_bias``."""
    activation = {k: None if v == math.inf else v for k, v in asdict(layer.activation).items()}
    return {
        "path": str(path),
        "holds": holds,
        "architecture": architecture,
        **asdict(layer.shape),
        "activation": activation,
        "has_bias": layer.has_bias,
        "bytes": sum(entry["bytes"] for entry in layers.values()),
        "layers": layers,
        "runs": [],
    }


def _how(report, reader, kind, layer):
    method = NATIVE.get(kind)
    if method and _held(reader, layer):
        commands = [_wrapper(report, report["path"], method, layer)]
        return dict(how="as it is", method=method, commands=commands, error=None, note=ROUNDED.get(kind))
    out = f"{reader.path.resolve().name.removesuffix('.gguf')}-{REPACKED}"
    commands = [
        f"python -m ktcy convert {shlex.quote(report['path'])} {shlex.quote(out)} --format {REPACKED}",
        _wrapper(report, out, REPACKED, layer),
    ]
    error = _error(kernels.default().format(REPACKED), reader.expert(layer, 0))
    return dict(how="by conversion", method=REPACKED, commands=commands, error=error, note=None)


def _held(reader, layer):
    try:
        return layer_format(reader, layer, "auto", kernels.default())
    except ValueError:
        return None


def _wrapper(report, path, method, layer):
    sizes = ", ".join(str(report[k]) for k in ("num_experts", "num_experts_per_tok", "hidden_size"))
    sizes += f", {report['moe_intermediate_size']}"
    return f"ktcy.KTMoEWrapper({layer}, {sizes}, weight_path={path!r}, method={method!r}).load_weights()"


def _error(fmt, expert):
    """How far the weights of an expert are from what a format makes of them: RMS, relative to theirs."""
    error = total = 0.0
    for name in ("gate", "up", "down"):
        values = getattr(expert, name)
        values = values.dequantize() if isinstance(values, Quantized) else values
        n, k = values.shape
        weight = np.empty((-(-n // 16), fmt.weight_bytes(k)), np.uint8)
        scale = np.empty((-(-n // 16), fmt.scale_bytes(k)), np.uint8)
        try:
            fmt.pack(values, weight, scale)
        except ValueError as reason:
            raise ValueError(f"{expert.source[name]}: {reason}") from None
        values = values.astype(np.float64)
        error += np.square(fmt.unpack(weight, scale, n, k) - values).sum()
        total += np.square(values).sum()
    return relative_rms(error, total)


def _converted(folder):
    manifest = read_manifest(folder) or {"layers": {}}
    numbers = {int(n) for n in manifest["layers"]}
    numbers |= {int(path.name[6:11]) for path in folder.glob("layer-[0-9][0-9][0-9][0-9][0-9].safetensors")}
    layers, first = {}, None
    for n in sorted(numbers):
        path = layer_path(folder, n)
        if not path.is_file():
            raise FileNotFoundError(absent(path, n))
        header = read_header(path)
        fmt, *stated = described(path, header, n)
        first = first or SimpleNamespace(**dict(zip(("shape", "activation", "has_bias"), stated)))
        layers[n] = _layer(fmt.name, header.tensors)
    if not layers:
        raise ValueError(f"{folder} holds no layer yet; run the conversion that began it again")
    report = _report(folder, "weights converted by ktcy", None, first, layers)
    report["model"] = manifest.get("model")
    errors = {int(n): entry.get("error", {}).get("rms") for n, entry in manifest["layers"].items()}
    for fmt in dict.fromkeys(entry["kind"] for entry in layers.values()):
        chosen = [n for n in layers if layers[n]["kind"] == fmt]
        known = [errors[n] for n in chosen if errors.get(n) is not None]
        report["runs"].append(
            dict(
                kind=fmt,
                layers=chosen,
                how="as it is",
                method=fmt,
                commands=[_wrapper(report, str(folder), fmt, chosen[0])],
                error=max(known, default=None),
                note=None,
            )
        )
    return report

"""What weights come from: the experts of a model in the files it has, and the format that a method makes of them."""

from pathlib import Path

from ..config import MADE
from .checkpoint import Checkpoint, check_expert
from .gguf import Gguf
from .quantized import Quantized

# Which kinds of experts (`Checkpoint.kinds`) a method that keeps their numbers is for.
KINDS = {
    "fp8": ("fp8",),
    "fp8_channel": ("fp8_perchannel",),
    "rawint4": ("rawint4",),
    "gptq": ("gptq_int4", "awq_int4"),
    "mxfp4": ("mxfp4",),
    "mxfp8": ("mxfp8",),
}


def open_source(path):
    """A `Gguf` of a GGUF file, else the `Checkpoint` of a folder.

    Raises
    ------
    ValueError, OSError, ImportError
        As of these: for files that are damaged, unknown or something else.
    """
    path = Path(path)
    return Gguf(path) if path.is_file() else Checkpoint(path)


def is_source(path):
    """Whether a path is a model's own files and not a converted folder (which may be missing or empty)."""
    path = Path(path)
    return path.is_file() or (path / "config.json").is_file() and not (path / "ktcy.json").is_file()


def layer_format(source, layer, method, table):
    """The format in which a method holds a layer.

    Parameters
    ----------
    source : Checkpoint or Gguf
    layer : int
    method : str
        A key of `ktcy.config.METHODS`: int8, int4 and bf16 are made from anything; the others keep the numbers of the
        files, if they are of that kind. Repacked kinds of GGUF files become int8.
    table : Kernels

    Returns
    -------
    Format

    Raises
    ------
    ValueError
        If the files hold another kind than the method means, or one that no format holds exactly: what they hold
        and which methods there are.
    """
    if method in MADE:
        return table.format(method)
    check_expert(source, layer, 0)
    kind = source.kinds[layer]
    others = f"use method 'auto', or one of {', '.join(MADE)}"
    if method == "gguf" and not isinstance(source, Gguf):
        raise ValueError(f"{source.path} is no GGUF file, which method {method!r} is for; {others}")
    if kind not in KINDS.get(method, (kind,)):
        raise ValueError(f"{source.path}: the experts of layer {layer} are {kind}, but method is {method!r}; {others}")
    matrix = source.expert(layer, 0).gate
    if not isinstance(matrix, Quantized):
        return table.format("int8" if kind == "repacked" else "bf16")
    formats = [table.format(name) for name in table.formats]
    formats = [f for f in formats if f.codes is not None and matrix.packs_as(f) is not None]
    if not formats:
        raise ValueError(
            f"{source.path}: the experts of layer {layer} are {kind} with {matrix.scale.dtype} scales of "
            f"{matrix.group} values, which no format holds exactly; use method {' or '.join(MADE)}"
        )

    def change(fmt):
        """The scales as they are rather than repeated, spelled out or cast."""
        return fmt.group != matrix.group, fmt.zero and matrix.zero is None, fmt.code_scale != matrix.scale.dtype.name

    return min(formats, key=lambda fmt: (*change(fmt), -fmt.group))

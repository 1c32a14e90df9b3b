"""The header of a safetensors file, checked before anything it says is used; and what a wrong file or folder is.

The format: 8 bytes with the length n of the header (little endian), n bytes of JSON padded with spaces, then
the tensors without gaps. Source: the "Format" section of the safetensors documentation.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

# The limit of the reference implementation, safetensors' MAX_HEADER_SIZE.
MAX_HEADER = 100_000_000

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class Tensor(NamedTuple):
    """Where a tensor lies: safetensors' dtype name, shape, and the bytes [begin, end) of the file."""

    dtype: str
    shape: tuple
    begin: int
    end: int


class Header(NamedTuple):
    metadata: dict
    tensors: dict
    data: int


def read_header(path):
    """Header of a safetensors file.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Header
        ``metadata`` (dict of str), ``tensors`` (dict of name to `Tensor`, as in the file) and ``data``, the
        offset in bytes at which the tensors start.

    Raises
    ------
    ValueError
        If the file is no safetensors file (the message says what it is instead), is longer or shorter than
        its header says, or has a header that contradicts itself. The message names the file.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) == 8 and 2 <= length <= min(MAX_HEADER, size - 8):
            text = file.read(length)
            if text[:1] == b"{":
                return _parse(path, text, size)
        file.seek(0)
        text = file.read(4096)
    what = what_file(text, size) or f"its header would have {length} bytes, the file has {size}"
    raise ValueError(f"{path} is no safetensors file, or only part of one: {what}")


def _parse(path, text, size):
    data = 8 + len(text)

    def tensor(entry):
        """Called by the parser, so that the dicts of tens of thousands of tensors never live at once."""
        if "data_offsets" not in entry or "dtype" not in entry:
            return entry
        begin, end = entry["data_offsets"]
        return Tensor(entry["dtype"], tuple(entry["shape"]), data + begin, data + end)

    try:
        tensors = json.loads(text, object_hook=tensor)
        metadata = tensors.pop("__metadata__", None) or {}
        for name, entry in tensors.items():
            if type(entry) is not Tensor:
                raise ValueError(f"tensor {name} lacks dtype, shape or data_offsets")
        end = data
        for name, (dtype, shape, begin, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if not all([type(n) is int and n >= 0 for n in shape]):
                raise ValueError(f"tensor {name} has shape {list(shape)}")
            # Types that this table does not know (of part of a byte, say) may stand in files we only pass by.
            expected = math.prod(shape) * ITEMSIZE[dtype] if dtype in ITEMSIZE else max(stop - begin, 0)
            whole = type(begin) is int and type(stop) is int
            if begin != end or stop - begin != expected or not whole:
                where = f"bytes {begin} to {stop}"
                raise ValueError(f"tensor {name} ({dtype} {list(shape)}) is said to lie in {where}, not from {end} on")
            end = stop
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} has a damaged safetensors header ({reason}); fetch or convert it again") from None
    if end != size:
        cut = "is cut off" if size < end else "has bytes after its last tensor"
        raise ValueError(f"{path} {cut}: its header asks for {end} bytes, found {size}; fetch or convert it again")
    return Header(metadata, tensors, data)


def what_file(text, size):
    """What a file is, from its first bytes, if it is one of the things that come in place of what was wanted."""
    if size == 0:
        return "it is empty"
    if not text.strip(b"\0"):
        return f"it starts with {len(text)} zero bytes (an unfinished download?)"
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if text.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is a web page (HTML); the download got an error page instead of the file"
    if text.startswith(b"GGUF"):
        return "it is a GGUF file"
    if text.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "it is a PyTorch pickle"
    if size < 8:
        return f"it has {size} bytes"
    return None


def what_folder(path):
    """What a folder holds, for an error that expected something else there: "a Hugging Face checkpoint", ..."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        return f"a file of type {path.suffix or 'unknown'}"
    if not path.is_dir():
        return "nothing: there is no such folder"
    names = sorted(entry.name for entry in path.iterdir())
    if "ktcy.json" in names or any(n.startswith("layer-") and n.endswith(".safetensors") for n in names):
        return "weights converted by ktcy"
    if any(n.endswith(".gguf") for n in names):
        return "GGUF files"
    if any(n.startswith("_layer_") for n in names):
        return "weights converted by kt-kernel"
    if any(n.endswith(".safetensors") for n in names):
        holder = "a Hugging Face checkpoint" if "config.json" in names else "safetensors files without a config.json"
        return holder
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        return "PyTorch pickles"
    return f"{len(names)} other files ({', '.join(names[:3])}, ...)" if names else "nothing: it is empty"

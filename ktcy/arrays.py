"""Arrays of others as numpy views, without importing their libraries: numpy, torch CPU tensors, DLPack."""

import sys

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: Element types of hidden states, weights and outputs.
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


def is_torch(value):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_numpy(value, name):
    """A numpy view of ``value``; never a copy of an array.

    Parameters
    ----------
    value : numpy.ndarray, torch.Tensor or any object with ``__dlpack__``
    name : str
        For messages.

    Raises
    ------
    TypeError
        For anything else, a tensor that is not in CPU memory, or an element type that numpy cannot hold.
    """
    if isinstance(value, np.ndarray):
        return value
    if is_torch(value):
        if not value.is_cpu:
            raise TypeError(f"{name} is on {value.device}; ktcy takes CPU tensors: pass {name}.cpu()")
        tensor = value.detach() if value.requires_grad else value
        torch = sys.modules["torch"]
        try:
            if tensor.dtype == torch.bfloat16:
                return tensor.view(torch.int16).numpy().view(BFLOAT16)
            return tensor.numpy()
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"{name} of {tensor.dtype} cannot be read: {error}") from None
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(f"{name} cannot be read through DLPack: {error}") from None
    raise TypeError(f"{name} must be a numpy array, a torch CPU tensor or a DLPack object, not {type(value).__name__}")


def like(array, value):
    """``array`` as the kind of array that ``value`` is: torch for torch, else numpy. No copy."""
    if not is_torch(value):
        return array
    torch = sys.modules["torch"]
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def floats(value, name, shape):
    """A view of ``value`` checked for a supported float type and a shape.

    ``shape`` holds sizes; the first is None where any will do.
    """
    array = as_numpy(value, name)
    if array.dtype not in FLOATS:
        raise TypeError(f"{name} is {array.dtype}; float32, float16 and bfloat16 are supported")
    if array.shape != (array.shape[:1] + shape[1:] if shape[0] is None else shape):
        wanted = ", ".join("n" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} has shape {list(array.shape)}, expected [{wanted}]")
    return array

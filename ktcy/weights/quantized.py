"""A matrix as a quantized checkpoint holds it: codes, one a byte, and the scales that give them meaning.

Readers make one whatever the packing on disk was; formats pack it without changing a number, and every other
target takes `Quantized.dequantize`.
"""

from dataclasses import dataclass, replace
from typing import Optional

import ml_dtypes
import numpy as np

# Value of each code. int4 and int8 subtract a zero point first, 8 and 0 where the checkpoint stores none.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CODES = {
    "e4m3": _E4M3,
    "e2m1": np.concatenate([_E2M1, -_E2M1]),
    "int4": np.arange(16, dtype=np.float32),
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}


@dataclass(frozen=True)
class Quantized:
    """One matrix [N, K] of codes.

    Attributes
    ----------
    kind : str
        A key of `CODES`: e4m3, e2m1 (OCP Microscaling Formats 1.0), int4 (0 to 15, less a zero point), int8.
    codes : ndarray of uint8 [N, K]
        One code a byte, any strides.
    scale : ndarray [N, ceil(K / group)]
        float32, float16, bfloat16, or uint8: e8m0, 2 ** (scale - 127). Finite; negative only as GGUF has it.
    group : int
        So many values along K share a scale; 0 means all of a row.
    zero : ndarray of uint8 [N, ceil(K / group)], optional
        Zero points of int4; without them it is 8.
    order : ndarray of int [K], optional
        Column j of ``codes`` multiplies input ``order[j]`` (GPTQ's act-order, sorted by group).
    """

    kind: str
    codes: np.ndarray
    scale: np.ndarray
    group: int
    zero: Optional[np.ndarray] = None
    order: Optional[np.ndarray] = None

    @property
    def shape(self):
        return self.codes.shape

    @property
    def nbytes(self):
        """Bytes that the codes have in a checkpoint."""
        return self.codes.size // (2 if len(CODES[self.kind]) == 16 else 1)

    def packs_as(self, fmt):
        """The same numbers as a `Format` of codes takes them, or None if it cannot hold them all exactly.

        Scales of a larger group are repeated, those of another dtype cast, and zero points spelled out.
        """
        groups = -(-self.shape[1] // (fmt.group or self.shape[1]))
        if self.kind != fmt.codes or not (self.group == 0 or fmt.group and self.group % fmt.group == 0):
            return None
        scale, zero = self.scale, self.zero
        if scale.dtype.name != fmt.code_scale:
            if np.dtype(np.uint8) in (scale.dtype, np.dtype(fmt.code_scale)):
                return None
            with np.errstate(over="ignore"):
                scale = scale.astype(fmt.code_scale)
            if np.any(scale.astype(np.float32) != self.scale.astype(np.float32)):
                return None
        if fmt.zero and zero is None:
            zero = np.full(scale.shape, 8, np.uint8)
        elif not fmt.zero and zero is not None:
            if np.any(zero != 8):
                return None
            zero = None
        if self.group != fmt.group:
            times = groups if self.group == 0 else self.group // fmt.group
            scale = np.repeat(scale, times, axis=1)[:, :groups]
            zero = None if zero is None else np.repeat(zero, times, axis=1)[:, :groups]
        return replace(self, scale=scale, zero=zero, group=fmt.group)

    def __getitem__(self, rows):
        """Some of the rows, a slice of N."""
        return replace(
            self, codes=self.codes[rows], scale=self.scale[rows], zero=None if self.zero is None else self.zero[rows]
        )

    def dequantize(self):
        """The float32 values [N, K], columns in the order of the inputs: exact but for e8m0 scales past float32."""
        k = self.codes.shape[1]

        def spread(values):
            return np.repeat(values, self.group or k, axis=1)[:, :k]

        values = CODES[self.kind][self.codes]
        if self.kind == "int4":
            values -= 8 if self.zero is None else spread(self.zero.astype(np.float32))
        if self.scale.dtype == np.uint8:
            values = np.ldexp(values, spread(self.scale.astype(np.int32)) - 127)
        else:
            values *= spread(self.scale.astype(np.float32))
        if self.order is not None:
            sorted_values, values = values, np.empty_like(values)
            values[:, self.order] = sorted_values
        return values

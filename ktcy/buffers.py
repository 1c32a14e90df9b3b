"""Arrays that submitted forwards are copied to, shared by all layers."""

import threading
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from .config import integer


class Slot(NamedTuple):
    """The inputs of one forward in flight."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


class Buffers:
    """Slots by size and dtype.

    Slots of the capture sizes are kept for ever, of the others those of the last size. Results are not among them:
    each is an array of its own, for it belongs to the caller.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._free = defaultdict(deque)
        self._capture = frozenset()
        self._last = None

    def take(self, tokens, hidden, top_k, dtype):
        key = (tokens, hidden, top_k, dtype)
        with self._lock:
            if self._last not in (None, key) and self._last[0] not in self._capture:
                self._free.pop(self._last, None)
            self._last = key
            free = self._free[key]
            if free:
                return free.popleft()
        return Slot(
            np.empty((tokens, hidden), dtype),
            np.empty((tokens, top_k), np.int64),
            np.empty((tokens, top_k), np.float32),
        )

    def give(self, slot):
        key = (*slot.x.shape, slot.ids.shape[1], slot.x.dtype)
        with self._lock:
            if key in self._free:
                self._free[key].append(slot)

    def set_capture(self, sizes):
        sizes = [integer("a capture batch size", size) for size in sizes]
        with self._lock:
            self._capture = frozenset(sizes)

    def capture(self):
        return sorted(self._capture)

    def clear(self):
        with self._lock:
            self._free.clear()
            self._last = None

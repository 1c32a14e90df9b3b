"""Arrays of submitted forwards, shared by all layers: inputs are copied in, outputs stay until they are read."""

import threading
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from .config import integer


class Slot(NamedTuple):
    """Arrays of one forward in flight."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    out: np.ndarray


class Buffers:
    """Slots by size and dtype.

    A slot that was given back is taken again only when another one is free, so the output of a forward stays
    intact while the next one of its size is submitted. Slots of the capture sizes are kept for ever, of the others
    those of the last size.
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
            if len(free) > 1:
                return free.popleft()
        return Slot(
            np.empty((tokens, hidden), dtype),
            np.empty((tokens, top_k), np.int64),
            np.empty((tokens, top_k), np.float32),
            np.empty((tokens, hidden), dtype),
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

"""Where a forward's time goes: phases of each layer, as a dict or as a trace file for Perfetto."""

import errno
import json
import os
import threading
from contextvars import ContextVar
from pathlib import Path

#: The trace of a context, or None.
active = ContextVar("ktcy_trace", default=None)


class Trace:
    """Records every forward of this context while active.

    ::

        with ktcy.Trace() as trace:
            moe.forward(x, ids, weights)
        trace.summary()            # {"plan": seconds, "quantize": ..., "gate_up": ..., "down": ...}
        trace.save("trace.json")   # opens in Perfetto (ui.perfetto.dev) and chrome://tracing

    Attributes
    ----------
    forwards : list of dict
        One for each pass of up to ``ktcy.moe.CHUNK`` tokens: layer, tokens, thread, start (seconds of the monotonic
        clock), phases (name -> seconds, in order) and counters (of the pool at its end: `Pool.counters`). Where
        "requantize" is 0, "gate_up" has it too: many tokens, and few on one group of threads.
    """

    def __init__(self):
        self.forwards = []
        self._tokens = []

    def __enter__(self):
        self._tokens.append(active.set(self))
        return self

    def __exit__(self, *exc):
        active.reset(self._tokens.pop())

    def add(self, layer, tokens, start, phases, counters):
        thread = threading.get_native_id()
        forward = dict(layer=layer, tokens=tokens, thread=thread, start=start, phases=phases, counters=counters)
        self.forwards.append(forward)

    def summary(self):
        """Seconds by phase, over all forwards."""
        total = {}
        for forward in self.forwards:
            for name, seconds in forward["phases"].items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def events(self):
        """Chrome trace events: one a forward, one a phase inside it, and the pool's counters; microseconds.

        Source: the Trace Event Format, as Perfetto reads it.
        """
        events = []
        for forward in self.forwards:
            common = dict(ph="X", pid=os.getpid(), tid=forward["thread"], cat="ktcy")
            at = forward["start"]
            args = dict(tokens=forward["tokens"])
            spans = [(f"layer {forward['layer']}", at, sum(forward["phases"].values()))]
            for name, seconds in forward["phases"].items():
                spans.append((name, at, seconds))
                at += seconds
            counters = {name: n for name, n in forward["counters"].items() if isinstance(n, int)}
            events.append(dict(ph="C", pid=os.getpid(), name="ktcy pool", ts=at * 1e6, args=counters))
            events += [dict(common, name=n, ts=begin * 1e6, dur=long * 1e6, args=args) for n, begin, long in spans]
        return events

    def save(self, path):
        """Writes the events as JSON; the file appears whole or not at all."""
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no such folder to write {path.name} to", str(path.parent))
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
        part.replace(path)

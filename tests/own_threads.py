"""The threads of this process as /proc shows them; one that was joined may stay there for a moment."""

import time
from pathlib import Path


def named(prefix):
    """Directories of the threads whose name begins so; a thread that ends meanwhile is none of them."""
    found = set()
    for path in Path("/proc/self/task").iterdir():
        try:
            if (path / "comm").read_text().startswith(prefix):
                found.add(path)
        except OSError:
            pass
    return found


def settles(condition, seconds=20):
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True

"""Threads, topology and memory: the machine as the layers above use it."""

from .pool import Pool, memory_report
from .topology import Topology, default_threads

__all__ = ["Pool", "Topology", "default_threads", "memory_report"]

"""Weights at rest: checkpoints as Hugging Face saves them, and the converted, packed format (`packed`)."""

from .checkpoint import Checkpoint, Expert

__all__ = ["Checkpoint", "Expert"]

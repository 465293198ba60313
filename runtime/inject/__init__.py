"""Puts tensor-parallel layers, ring attention and the parallel loss into a Hugging Face model."""

from .model import inject

__all__ = ["inject"]

"""Puts tensor-parallel layers, ring attention and the parallel loss into a Hugging Face model."""

from .model import inject, sum_partial_gradients
from .slices import Slices

__all__ = ["Slices", "inject", "sum_partial_gradients"]

"""Puts tensor-parallel layers, ring attention and the parallel loss into a Hugging Face model."""

from .adapters import adapter_state
from .model import inject, sum_partial_gradients
from .own import describe
from .slices import Slice, Slices

__all__ = ["Slice", "Slices", "adapter_state", "describe", "inject", "sum_partial_gradients"]

"""Puts tensor-parallel layers, ring attention and the parallel loss into a Hugging Face model."""

from parcompile.runtime.model.slices import Slice, Slices

from .adapters import adapter_state
from .injection import inject, register_gradient_sums
from .user_module import describe

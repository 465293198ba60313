"""Batches for the ranks of a plan: which samples, which of their tokens, with which positions and labels."""

from .batches import Batch, ready_inputs, split_batch, stack
from .loader import PackedPlanLoader, PlanLoader

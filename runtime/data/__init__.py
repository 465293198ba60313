"""Batches for the ranks of a plan: which samples, which of their tokens, with which positions and labels."""

from .batches import Batch, split_batch, stack
from .loader import PlanLoader
from .packed_loader import PackedPlanLoader

__all__ = ["Batch", "PackedPlanLoader", "PlanLoader", "split_batch", "stack"]

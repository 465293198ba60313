"""Batches for the ranks of a plan: which samples, which of their tokens, with which positions and labels."""

from .batches import Batch, split_batch, stack
from .inputs import ready_inputs
from .loader import PackedPlanLoader, PlanLoader

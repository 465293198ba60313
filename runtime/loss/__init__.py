"""The loss of a plan over all its ranks."""

from .causal import IGNORED, ParallelCausalLoss, reduce_loss

__all__ = ["IGNORED", "ParallelCausalLoss", "reduce_loss"]

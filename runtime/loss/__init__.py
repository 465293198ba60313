"""The loss of a plan over all its ranks."""

from .causal import ParallelCausalLoss, reduce_loss

__all__ = ["ParallelCausalLoss", "reduce_loss"]

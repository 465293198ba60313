"""The loss of a plan over all its ranks."""

from .causal import ParallelCausalLoss, loss_of_step, reduce_loss

__all__ = ["ParallelCausalLoss", "loss_of_step", "reduce_loss"]

"""The loss of a plan over all its ranks."""

from .causal import ParallelCausalLoss, loss_of_step, reduce_loss
from .sequence import own_part, without_waiting

__all__ = ["ParallelCausalLoss", "loss_of_step", "own_part", "reduce_loss", "without_waiting"]

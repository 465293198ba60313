"""Stacks of layers that run several times in a forward pass: runs are counted, parameters exist once.

The layers of a model are its runs, as transformers counts them in `num_hidden_layers`: each attends, computes and keeps
activations. A stack's parameters belong to its first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """The stacks of a model, one after the other as it registers them."""

    stacks: tuple[tuple[str, int], ...]
    """The name of each, and the run in which its first layer runs first."""
    layers: int
    """Of each stack."""
    total: int
    """Runs of layers in a forward pass."""
    untrained: int = 0
    """Those among them that gradients do not pass: nothing is kept of them."""

    @property
    def counted(self) -> float:
        """Runs as operations of training count them: a forward pass is a third of a run."""
        return self.total - self.untrained * 2 / 3


def alternating(layers: int, high_cycles: int, low_cycles: int, trained: Sequence[int]) -> LayerRuns:
    """Cycles of a low stack, and a high one that runs once behind each of them (arXiv 2506.21734).

    Args:
        layers: of each stack.
        high_cycles: how often the high stack runs.
        low_cycles: how often the low one runs before each of these.
        trained: in the last of the high cycles, how many of the low cycles gradients pass; one in those before.
    """
    padded = [1] * max(0, high_cycles - len(trained)) + list(trained)
    passed = sum(max(0, min(low_cycles, cycles)) for cycles in padded[:high_cycles])
    stacks = (("L_module.layers", 0), ("H_module.layers", low_cycles * layers))
    runs = high_cycles * (low_cycles + 1)
    return LayerRuns(stacks, layers, layers * runs, layers * (high_cycles * low_cycles - passed))

"""The plan's learning rates, step by step.

DeepSpeed's own schedules are others for the same words (runtime/lr_schedules.py): the first two steps have the lowest
rate, that of the cosine 0 in the first, and the cosine begins to fall one step early.
"""

from __future__ import annotations

from typing import Any

import torch

from parcompile.spec import Training, learning_rate


class PlanSchedule:
    """Sets the rates of an optimizer before its first step and after each one; DeepSpeed calls `step`.

    A group with a rate of its own rises to that rate, and falls in proportion. The state is that of DeepSpeed's
    schedules: the number of steps made, less one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        self.optimizer, self._training = optimizer, training
        self._highest = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = -1
        self._set()

    def step(self) -> None:
        """Goes on to the next step's rate."""
        self.last_batch_iteration += 1
        self._set()

    def get_lr(self) -> list[float]:
        """The rate of each group for the next step."""
        share = learning_rate(self._training, self.last_batch_iteration + 2) / self._training.optimizer.lr
        return [highest * share for highest in self._highest]

    def get_last_lr(self) -> list[float]:
        """As `get_lr`."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """How many steps have been made."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the steps of a state."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

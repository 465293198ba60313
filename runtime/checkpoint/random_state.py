"""The random generators of a rank, saved and restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from parcompile.runtime.errors import RunError


def random_file(rank: int) -> str:
    """The file of a rank's state."""
    return f"random_rank_{rank:05d}.pt"


def random_state() -> dict[str, Any]:
    """Torch's generators (of this process's device too) and Python's, as they are."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_random_state(folder: Path, rank: int) -> None:
    """Continues where the saved generators stopped.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / random_file(rank)
    try:
        state = torch.load(file, weights_only=True)
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except Exception as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None

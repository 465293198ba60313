"""Reads DeepSpeed's pickled files without running what is in them.

DeepSpeed loads its own files with the whole of pickle, which can run any code. What they need beyond tensors is three
classes; a file that asks for anything else is not DeepSpeed's and is refused before anything loads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parcompile.runtime.errors import RunError


def _classes() -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
    return {f"{one.__module__}.{one.__qualname__}": one for one in classes}


def check_trusted(file: Path) -> None:
    """Refuses a file whose pickle asks for anything that DeepSpeed's does not.

    Raises:
        RunError: it does, or is no file of torch.
    """
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    except Exception as error:  # a broken pickle raises what it likes
        raise RunError(f"{file} cannot be read: {_first_line(error)}") from None
    strange = sorted(set(asked) - _classes().keys())
    if strange:
        raise RunError(f"{file} asks to load {', '.join(strange)}, which no checkpoint of DeepSpeed holds: not loaded")


def load_trusted(file: Path) -> Any:
    """The content of a file, its tensors mapped rather than read; no code of it runs.

    Raises:
        RunError: it cannot be read, or holds more than data.
    """
    check_trusted(file)
    try:
        with torch.serialization.safe_globals(list(_classes().values())):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise RunError(f"{file} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

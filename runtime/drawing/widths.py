"""How many numbers a whole model draws for each token: a rank that draws fewer holds some of the features.

Nothing is computed: the whole model runs on two short sequences without values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parcompile.runtime.errors import RunError

from .mode import recording

_ROWS, _LENGTH = 2, 5


def record_widths(model: nn.Module, widths: dict[tuple[str, int], int], sequence_length: int) -> None:
    """Fills `widths`, which `draw_by_place` returned for this model, before it is cut.

    Raises:
        RunError: the model cannot run without values.
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    ids = torch.zeros(_ROWS, min(_LENGTH, sequence_length), dtype=torch.int64, device="meta")
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": ids}
    was_training = model.training
    found: dict[tuple[str, int], int] = {}
    model.train()
    try:
        with torch.device("meta"), recording(found), torch.no_grad():
            torch.func.functional_call(model, empty, kwargs=batch)
    except RunError:
        raise
    except Exception as error:  # the module is the user's: it raises what it likes
        raise RunError(
            f"{type(model).__name__} draws at random, and which of the features a rank draws for cannot be seen: on "
            f"tensors without values its forward fails ({type(error).__name__}: {error}); without tp, or without the "
            "drawing, it trains",
            everywhere=True,
        ) from error
    finally:
        model.train(was_training)
    widths.update(found)

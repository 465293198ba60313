"""One sample of a data set as tensors, in whatever form tokenizers, `datasets` and arrays have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_WHOLE_NUMBERS = ("input_ids", "labels", "shift_labels", "position_ids")


def tensors_of(sample: Any, number: int | None = None) -> dict[str, Tensor]:
    """The tensors of a sample by name: `input_ids` [S], `labels` [S] and what else it has.

    Token ids alone, or a sample without labels, are their own labels.

    Args:
        sample: a mapping of tensors, arrays or lists, as tokenizers and `datasets` give it, or token ids alone.
        number: of the sample in its data set, for messages.

    Raises:
        ValueError: there are no token ids, or a value is no numbers, or not in one row.
    """
    where = "a sample" if number is None else f"sample {number}"
    columns = dict(sample) if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in columns:
        raise ValueError(
            f"{where} has {', '.join(map(str, columns)) or 'nothing'}, but no input_ids: tokenize it first"
        )
    found = {name: _tensor(name, value, where) for name, value in columns.items()}
    shape = found["input_ids"].shape
    if len(shape) != 1:
        raise ValueError(
            f"{where}: input_ids have shape {list(shape)}; a sample is one row of token ids [S] (a tokenizer's "
            'return_tensors="pt" makes a batch of one: leave it out)'
        )
    for name in _WHOLE_NUMBERS:
        if name not in found:
            continue
        if found[name].numel() and (found[name].is_floating_point() or found[name].is_complex()):
            raise ValueError(f"{where}: {name} are {found[name].dtype}, not whole numbers")
        if found[name].shape != shape:
            raise ValueError(f"{where}: {name} have shape {list(found[name].shape)}, input_ids {list(shape)}")
        found[name] = found[name].long()
    if "labels" not in found and "shift_labels" not in found:
        found["labels"] = found["input_ids"]
    return found


def _tensor(name: str, value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value[0] if isinstance(value, Sequence) and value else value).__name__
        raise ValueError(
            f"{where}: {name} holds {kind}, which is no tensor of numbers: leave it out "
            f"(datasets: data.remove_columns({name!r}))"
        ) from None

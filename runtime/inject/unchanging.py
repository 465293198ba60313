"""What people do to a model of transformers that an injected one does not survive: each says what to do instead."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh


def refuse_changes(model: nn.Module, mesh: Mesh) -> None:
    """Lets copies, pickles and another vocabulary of an injected model say what to do."""
    model.__reduce_ex__ = _refuse_copy  # type: ignore[assignment, method-assign]
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_resize, model, mesh)  # type: ignore[assignment]


def _refuse_copy(_: object) -> NoReturn:
    raise RunError(
        "an injected model cannot be copied or pickled: its layers hold the process groups of this run. Copy the whole "
        "model before initialize (copy.deepcopy); for the weights of a run, save(engine, folder, step), and write them "
        "with `parcompile checkpoint export DIR --hf OUT`"
    )


def _resize(
    model: Any, mesh: Mesh, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
) -> nn.Module:
    """`resize_token_embeddings` of transformers, as far as it changes nothing.

    Raises:
        RunError: it asks for another vocabulary.
    """
    size = mesh.plan.spec.model.shape.vocab_size
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise RunError(
            f"resize_token_embeddings to {wanted} tokens: the plan has model.vocab_size {size}, whose rows are dealt "
            "to the ranks. Resize the whole model before initialize, save it (save_pretrained), and compile a plan of "
            f"its config.json, with vocab_size {wanted}",
            everywhere=True,
        )
    found: nn.Module = model.get_input_embeddings()
    return found

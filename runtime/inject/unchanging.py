"""What people do to a model of transformers that an injected one does not survive: each says what to do instead."""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

from torch import nn

from parcompile.layout.grid import Axis
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh

from .adapters import INJECTED_FIRST

_PATCHED = "parcompile_patched"


def refuse_changes(model: nn.Module, mesh: Mesh) -> None:
    """Lets copies, pickles, another vocabulary and new adapters of an injected model say what to do."""
    if mesh.size("tp-pp") * mesh.size("cp") > 1 or mesh.parallel_group(Axis.EP) is not None:
        _refuse_adapters()
    model.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]
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


def _refuse_adapters() -> None:
    """Lets peft, where a program has imported it, say how adapters come to a model that is injected."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or hasattr(peft.BaseTuner.inject_adapter, _PATCHED):
        return
    original = peft.BaseTuner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(tuner: Any, model: Any, *args: Any, **options: Any) -> Any:
        if getattr(model, "parcompile_mesh", None) is not None:
            raise RunError(INJECTED_FIRST, everywhere=True)
        return original(tuner, model, *args, **options)

    setattr(inject_adapter, _PATCHED, True)
    peft.BaseTuner.inject_adapter = inject_adapter

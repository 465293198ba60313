"""What people call to save a model: `save_pretrained` and `save_16bit_model` write the whole one, whatever the layout.

A rank of an injected model holds slices. Every rank makes the call; rank 0 puts one tensor after the other together
and writes what `parcompile checkpoint export` writes. `state_dict()` of such a model, which other savers would take for
the whole one, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from parcompile.plan import Plan
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.liveness import doing
from parcompile.runtime.model.lora import plain_name, without_peft

from .agreement import on_all_ranks, one_line
from .exporting import (
    INDEX,
    SHARD_BYTES,
    ModelWriter,
    whole_adapters,
    whole_weights,
    write_adapter,
    write_config,
    write_tensors,
)
from .whole_tensors import LiveTensors, is_whole

_UNFINISHED = "unfinished"
_BINARY = "pytorch_model.bin"
_FORMATS = frozenset(
    {"token", "save_peft_format", "save_original_format", "save_embedding_layers", "create_model_card"}
)
"""Arguments of transformers' and peft's `save_pretrained` that change nothing here."""

_slices_wanted = False


def let_save(model: nn.Module, mesh: Mesh) -> None:
    """Gives an injected model, with or without peft, a `save_pretrained` that writes the whole one.

    Where a rank has a part of it only, its `state_dict` is refused, except for `slices_wanted`.
    """
    for one in {id(one): one for one in (model, without_peft(model))}.values():
        if hasattr(one, "save_pretrained"):
            one.save_pretrained = functools.partial(_save_pretrained, one, mesh, one.save_pretrained)  # type: ignore[assignment, arg-type]
        if not is_whole(mesh.plan):
            sentence = _SHARDS if mesh.plan.spec.shards_weights else _SLICES
            one.register_state_dict_pre_hook(functools.partial(_refuse_state, sentence))  # type: ignore[no-untyped-call]


def let_engine_save(engine: Any) -> None:
    """Gives an engine a `save_16bit_model` that writes the whole model; its checkpoints may hold slices."""
    engine.save_16bit_model = functools.partial(_save_16bit_model, engine)
    engine.save_fp16_model = engine.save_16bit_model
    # At stage 3 there is nothing in what the second gives: the first, which calls it, is DeepSpeed's own.
    for name in ("save_checkpoint", "module_state_dict")[: 1 if engine.mesh.plan.spec.shards_weights else 2]:
        setattr(engine, name, slices_wanted()(getattr(engine, name)))


@contextlib.contextmanager
def slices_wanted() -> Iterator[None]:
    """Within it `state_dict` of an injected model gives the slices of this rank."""
    with mock.patch.object(sys.modules[__name__], "_slices_wanted", True):
        yield


def _refuse_state(sentence: str, *_: Any) -> None:
    if not _slices_wanted:
        raise everywhere(f"state_dict() of this model would hold {sentence}")


_SLICES = (
    "the slices of one rank: model.save_pretrained(folder), called on every rank, writes the whole model; "
    "engine.module_state_dict() gives the slices"
)
_SHARDS = (
    "nothing: at zero.stage 3 weights are in shards. model.save_pretrained(folder), called on every rank, writes the "
    "whole model"
)


def _save_pretrained(
    model: nn.Module,
    mesh: Mesh,
    original: Callable[..., None],
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Writes the whole model, or the adapters of a peft model, for `from_pretrained`. Every rank calls it.

    Rank 0 writes: config.json, generation_config.json and safetensors, in parts with an index from `max_shard_size` on.
    Files of the same names are replaced when all new ones are there. Where every rank holds the whole model (tp, pp and
    ep 1) the others do nothing, and rank 0 may be the only one that calls it.

    Args:
        model: an injected model.
        mesh: the live ranks.
        original: transformers' or peft's own.
        save_directory: the folder.
        is_main_process: as transformers has it; which rank writes does not depend on it.
        state_dict: whole weights, which are written as transformers does.
        options: `max_shard_size` in bytes or as "5GB".

    Raises:
        RunError: `state_dict` holds slices, an argument is not supported, not all ranks call it, or the folder cannot
            be written to. Every rank that calls raises.
    """
    if state_dict is not None:
        _refuse_slices_in(state_dict, mesh.plan)
        with slices_wanted():
            original(save_directory, is_main_process=is_main_process, state_dict=state_dict, **options)
        return
    shard_bytes = _bytes(options.pop("max_shard_size", SHARD_BYTES))
    plain = options.pop("safe_serialization", True)
    unknown = sorted(name for name, value in options.items() if value not in (None, False) and name not in _FORMATS)
    if unknown or not plain:
        raise everywhere(
            f"save_pretrained of a model in a plan does not take {', '.join(unknown) or 'safe_serialization=False'}: "
            "save it to a folder of safetensors first"
        )
    folder, call = Path(save_directory), f"save_pretrained({str(save_directory)!r})"
    if model is not without_peft(model):
        _on_rank_0(model, mesh, call, whole_adapters, functools.partial(_write_adapter, folder))
    else:
        _on_rank_0(model, mesh, call, whole_weights, functools.partial(_write_model, folder, model, shard_bytes))


def _save_16bit_model(
    engine: Any, save_dir: str | Path, save_filename: str = _BINARY, exclude_frozen_parameters: bool = False
) -> bool:
    """Writes the whole model as DeepSpeed would write that of one rank, in one file; every rank calls it.

    Adapters are merged. config.json lies beside it, so that `from_pretrained` loads the folder. A name that ends with
    .safetensors gives such a file.

    Raises:
        RunError: as `save_pretrained`.
    """
    if exclude_frozen_parameters and engine.module is not without_peft(engine.module):
        raise everywhere(
            "save_16bit_model merges adapters into frozen weights: leave out exclude_frozen_parameters, or save the "
            "adapters with engine.module.save_pretrained(folder)"
        )
    folder, call = Path(save_dir), f"save_16bit_model({str(save_dir)!r})"

    def write(tensors: LiveTensors, weights: Iterator[tuple[str, Tensor]]) -> None:
        state = {
            name: one.contiguous() for name, one in weights if not exclude_frozen_parameters or tensors.is_trained(name)
        }
        state.update(tensors.buffers)
        with _put_together(folder) as part:
            write_config(tensors.plan, part)
            if save_filename.endswith(".safetensors"):
                write_tensors(state, part / save_filename)
            else:
                torch.save(state, part / save_filename)

    _on_rank_0(engine.module, engine.mesh, call, whole_weights, write)
    return True


def whole_state_dict(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Copies of the whole weights of an injected model on the host of rank 0, adapters merged; nothing on other ranks.

    Every rank calls it.

    Raises:
        RunError: not all ranks call it.
    """
    state: dict[str, Tensor] = {}

    def keep(tensors: LiveTensors, weights: Iterator[tuple[str, Tensor]]) -> None:
        every = itertools.chain(weights, tensors.buffers.items())
        state.update((name, one.detach().to("cpu", copy=True).contiguous()) for name, one in every)

    _on_rank_0(model, mesh, "get_state_dict", whole_weights, keep)
    return state


def _on_rank_0(
    model: nn.Module,
    mesh: Mesh,
    call: str,
    of: Callable[[LiveTensors], Iterator[tuple[str, Tensor]]],
    write: Callable[[LiveTensors, Iterator[tuple[str, Tensor]]], None],
) -> None:
    """Lets rank 0 write whole tensors that all ranks send, and every rank raise what goes wrong there."""
    if is_whole(mesh.plan) and mesh.rank:
        return
    with doing("saving the model"):
        tensors = LiveTensors(model, mesh, call)
        try:
            error: RunError | None = None
            found = of(tensors)
            try:
                if tensors.is_first:
                    write(tensors, found)
            except Exception as reason:  # safetensors and transformers raise what they like
                error = reason if isinstance(reason, RunError) else RunError(f"{call}: {one_line(reason)}")
            for _ in found:  # the others send all the same
                pass
            error = error or tensors.error

            def raise_error() -> None:
                if error is not None:
                    raise error

            if tensors.is_alone:
                raise_error()
            else:
                on_all_ranks(raise_error)
        finally:
            tensors.close()


def _write_model(
    folder: Path, model: Any, shard_bytes: int, tensors: LiveTensors, weights: Iterator[tuple[str, Tensor]]
) -> None:
    with _put_together(folder) as part:
        write_config(tensors.plan, part)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(part)
        writer = ModelWriter(part, shard_bytes)
        for name, weight in weights:
            writer.add(name, weight.contiguous())
        writer.add_all(tensors.buffers)
        files = {file.name for file in writer.finish()}
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / "model.safetensors", folder / INDEX):
        if old.name not in files:
            old.unlink(missing_ok=True)


def _write_adapter(folder: Path, tensors: LiveTensors, state: Iterator[tuple[str, Tensor]]) -> None:
    adapters = tensors.described_adapters
    assert adapters is not None
    with _put_together(folder) as part:
        write_adapter(part, adapters, dict(state))


@contextlib.contextmanager
def _put_together(folder: Path) -> Iterator[Path]:
    """A folder whose files are put into `folder` at the end; when something goes wrong, none."""
    part = folder / _UNFINISHED
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for file in sorted(part.iterdir()):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse_slices_in(state: Mapping[str, Tensor], plan: Plan) -> None:
    shapes = {name: parameter.shape for name, parameter in plan.parameters.expanded()}
    for name, tensor in state.items():
        whole = shapes.get(plain_name(name))
        if whole is not None and tuple(tensor.shape) != tuple(whole):
            raise everywhere(
                f"state_dict holds slices of one rank, such as {name} {list(tensor.shape)} of {list(whole)}: call "
                "save_pretrained(folder) without it on every rank, which writes the whole model"
            )
    missing = shapes.keys() - {plain_name(name) for name in state}
    if missing and plan.spec.parallelism.pp > 1:
        raise everywhere(
            f"state_dict holds one stage's layers, without {min(missing)}: call save_pretrained(folder) without it on "
            "every rank, which writes the whole model"
        )


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    from huggingface_hub.serialization._base import parse_size_to_int

    try:
        return int(parse_size_to_int(size))
    except ValueError as error:
        raise everywhere(f"max_shard_size is {size!r}: {error}") from None

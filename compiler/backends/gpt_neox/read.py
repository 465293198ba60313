"""A spec's values out of a gpt-neox configuration, and parts of its file as documents of their own.

gpt-neox hands part of its keys on to DeepSpeed as they are; those follow the importer of DeepSpeed's files. Read off
gpt-neox of 2026-05-20: megatron/neox_arguments/arguments.py (`calculate_derived`), training.py, learning_rates.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from parcompile.backends import reading as table
from parcompile.backends.architecture import InexpressibleError
from parcompile.backends.deepspeed.read import ADAM_ON_HOST, carry_sums, read_further, read_offload, sum_as_weights
from parcompile.backends.reading import (
    Draft,
    Importer,
    RefusedError,
    Source,
    UndecidedError,
    leaves,
    leaving_open,
    refuse_optimizer,
)
from parcompile.diagnostics import Diagnostic, Path
from parcompile.layout.shards import BIASES_AND_NORMS
from parcompile.text import Document, Place
from parcompile.text.typed import integer, number

from . import fate, fields, model

# Parts of a gpt-neox file as documents of their own: its keys under the names of their fields, and DeepSpeed's.

_EXTRA = "deepspeed_extra_args"
"""Holds what goes to DeepSpeed beside the fields for it."""


class Excerpt(NamedTuple):
    """A document of its own whose top-level keys stand at `origins` of the file."""

    document: Document
    origins: Mapping[str, Path]

    def in_file(self, one: Diagnostic) -> Diagnostic:
        """A diagnostic of the excerpt with the paths of the file. Positions are those of the file anyway."""
        return one.moved(self._path)

    def _path(self, path: Path) -> Path:
        if not path:
            return ()
        name = str(path[0])
        return (*self.origins.get(name, (name,)), *path[1:])


def whole(document: Document) -> Excerpt:
    """All keys as gpt-neox names them: it reads a hyphen as an underscore."""
    tree = document.tree if isinstance(document.tree, dict) else {}
    return _excerpt(document, {_name(key): (key,) for key in tree})


def for_deepspeed(document: Document) -> Excerpt:
    """What gpt-neox hands on to `deepspeed.initialize`: what differs from the default, and deepspeed_extra_args."""
    known = fields()
    origins: dict[str, Path] = {}
    for name, path in whole(document).origins.items():
        if name == _EXTRA:
            extra = document.get(path)
            origins.update({key: (*path, key) for key in (extra if isinstance(extra, dict) else {})})
        elif name in known and known[name].handed_on and document.get(path) != known[name].default:
            origins.setdefault(name, path)
    return _excerpt(document, origins)


def _name(key: object) -> str:
    return str(key).replace("-", "_")


def _excerpt(document: Document, origins: Mapping[str, Path]) -> Excerpt:
    places = {name: place for name, path in origins.items() if (place := document.place(path)) is not None}
    tree: dict[str, Any] = {name: document.get(origins[name]) for name in places}

    def moved(paths: frozenset[Path]) -> frozenset[Path]:
        return frozenset(
            (name, *path[len(origin) :])
            for path in paths
            for name, origin in origins.items()
            if path[: len(origin)] == origin
        )

    root = Place(*document.root[:4], places)
    part = replace(
        document, tree=tree, root=root, invalid=moved(document.invalid), duplicates=moved(document.duplicates)
    )
    return Excerpt(part, origins)


# A spec's values out of a gpt-neox configuration.

_TUNING = "DeepSpeed's autotuning"
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


def options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration by their dotted names, with underscores; what is "auto" is undecided."""
    found = leaves({_name(key): value for key, value in tree.items()}, auto=_TUNING)
    return {name: value for name, value in found if value is not None}


@functools.cache
def defaults() -> Mapping[str, Any]:
    """gpt-neox's own value of each key that is left out, with those that stand for a whole section."""
    sections = {
        "zero_optimization.stage": 0,
        "optimizer.type": "Adam",
        "optimizer.params.lr": 0.001,
        "optimizer.params.betas": [0.9, 0.999],
        "optimizer.params.eps": 1e-8,
    }
    return {name: field.default for name, field in fields().items() if field.is_current} | sections


def read(source: Source, draft: Draft) -> None:
    """Everything of the configuration that a spec can say.

    Raises:
        RefusedError: no spec can say what model it is.
    """
    try:
        model.read(source, draft)
    except InexpressibleError as error:
        raise RefusedError(f"this model cannot be carried into a spec: {error}") from None
    except UndecidedError as error:
        draft.leave_open(source, error, ("model",))
    table.read(table.carried("gpt-neox"), source, draft)
    if source.has("num_nodes") and source.given["num_nodes"] != -1:
        draft.carry(source, "num_nodes", ("cluster", "nodes"))
    # 0 stands for one stage without DeepSpeed's pipeline engine.
    draft.carry(source, "pipe_parallel_size", ("parallelism", "pp"), lambda stages, name: max(1, integer(stages, name)))
    draft.carry(source, "checkpoint_activations", table.RECOMPUTE, lambda on, _name: "full" if on else "none")
    _precision(source, draft)
    _optimizer(source, draft)
    _schedule(source, draft)
    _handed_on(source, draft)


@leaving_open(table.PRECISION)
def _precision(source: Source, draft: Draft) -> None:
    on = [name for name in ("fp16", "bf16") if source.value(f"{name}.enabled", table.PRECISION) is True]
    said = source.value("precision", table.PRECISION)
    precision = _DTYPES.get(str(said), on[0] if on else "fp32")
    draft.set(table.PRECISION, precision, said=bool(on) or said is not None)
    if precision == "fp16":
        draft.carry(source, "fp16.loss_scale", ("training", "loss_scale"), number)
    for section in {"fp16", "bf16"} - {precision}:
        source.ignore({*source.under(section)} - {f"{section}.enabled"}, f"{section} is off")
    if source.has("data_types.grad_accum_dtype"):
        carry_sums(source, draft, precision)
    else:
        sum_as_weights(draft, precision)


@leaving_open(table.OPTIMIZER)
def _optimizer(source: Source, draft: Draft) -> None:
    """Its Adam is apex's or DeepSpeed's FusedAdam, which decays weights directly, by the top-level `weight_decay`.

    On the host `cpu_adam` is DeepSpeedCPUAdam, which does so too; so is `cpu_torch_adam`, which its code looks for in
    the wrong place (megatron/training.py, `get_optimizer`).
    """
    kind = source.value("optimizer.type", (*table.OPTIMIZER, "type"))
    on_host = source.given.get("zero_optimization.offload_optimizer.device") == "cpu"
    if str(kind).lower() not in ("adam", *(ADAM_ON_HOST if on_host else ())):
        made = "MuSGD" if str(kind).lower() == "sgd" else kind
        refuse_optimizer(source, draft, "optimizer.type", made, source.under("optimizer"))
        return
    draft.set((*table.OPTIMIZER, "type"), "adamw", said=True)
    for name in ("lr", "betas", "eps"):
        draft.carry(source, f"optimizer.params.{name}", (*table.OPTIMIZER, name))
    inner = "optimizer.params.weight_decay"
    source.ignore(inner, "the top-level weight_decay replaces it")
    draft.carry_decay(source, "weight_decay", BIASES_AND_NORMS)


@leaving_open(table.SCHEDULE)
def _schedule(source: Source, draft: Draft) -> None:
    """That of gpt-neox rises from nearly nothing (megatron/learning_rates.py)."""
    names = ("lr_decay_style", "warmup", "min_lr", "lr_decay_iters")
    style = source.value("lr_decay_style", table.SCHEDULE)
    warmup, least = (number(source.value(name, table.SCHEDULE), name) for name in ("warmup", "min_lr"))
    until, steps = source.integer("lr_decay_iters", table.SCHEDULE), source.integer("train_iters")
    why, rise = None, warmup * (steps or 0)
    if style not in ("constant", "linear", "cosine"):
        why = f"a spec has the schedules constant, linear and cosine, not {style}"
    elif steps is None or (until not in (None, steps) and style != "constant"):
        why = f"a spec's schedule ends with the training, after {steps} steps, not {until}"
    elif least and style == "linear":
        why = f"gpt-neox's linear rate falls as if to 0 and stops at {least:g}; a spec's is a straight line to min_lr"
    elif round(rise) < 2:
        why = f"a spec's warm-up has 2 steps or more, this one {warmup:g} · {steps} = {rise:g}"
    if why is not None:
        source.lose(names, why)
        return
    draft.fill(table.SCHEDULE, {"type": style, "warmup_steps": round(rise)})
    floor = 0.0 if style == "constant" else least
    draft.set((*table.SCHEDULE, "min_lr"), floor, said=bool(floor))
    if floor:
        draft.set((*table.SCHEDULE, "warmup_start_lr"), 0.0, said=True)


def _handed_on(source: Source, draft: Draft) -> None:
    """What gpt-neox hands on to DeepSpeed becomes a further DeepSpeed key of the spec, where a plan can have it."""
    for part in ("optimizer", "param"):
        read_offload(source, draft, part)
    for name in list(source.unread()):
        field = fields().get(name.partition(".")[0])
        if field is None or not field.handed_on:
            continue
        if name == field.name and source.given[name] == field.default:
            source.ignore(name, "it is gpt-neox's own default")
        else:
            read_further(source, draft, name, left_to=_TUNING)


IMPORTER = Importer(
    tool="gpt-neox",
    options=options,
    defaults=defaults,
    read=read,
    fate=fate,
    model_options=model.described,
)
"""Without an exporter to compare with: what is carried is what `read` takes."""

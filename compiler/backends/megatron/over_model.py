"""Programs over Megatron-Core that take their model from the Hub and everything else in Megatron-LM's words.

Megatron-Bridge's recipes are read here (source: its `recipes/` and `training/config.py` at 2026-08-22); ms-swift's
`megatron sft` uses the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.backends import reading as table
from parcompile.backends.reading import Account, Draft, Importer, Outcome, Source, Undecided, fate_of
from parcompile.backends.recipes import flattened
from parcompile.backends.trainers import ADAPTER
from parcompile.backends.trainers.read import read_model
from parcompile.text.python import Made
from parcompile.text.typed import integer, number
from parcompile.user_files import shipped

from . import layout, training
from .arguments import line
from .write import effect

_ROWS = (*layout.ROWS, *training.ROWS)
_NAMES = table.names(_ROWS)


def read_megatron(source: Source, draft: Draft) -> None:
    """Layout and training, where Megatron-LM's defaults hold for what the tool has no default of its own for."""
    own = source.defaults
    source.defaults = {**{name: line().defaults.get(name) for name in _NAMES}, **own}
    table.read(_ROWS, source, draft)
    if not source.has("global_batch_size") and source.defaults["global_batch_size"] is None:
        draft.ask(("training", "global_batch_size"), "the file does not say it")
    source.defaults = own


def typed(name: str, value: Any) -> Any:
    """A value by the type of Megatron-LM's option; numbers may be text, as in scripts and YAML 1.1.

    Raises:
        WrongValueError: it is of another type.
    """
    option = line().options.get(name)
    if option is None or value is None or isinstance(value, Undecided) or option.newest.kind != "value":
        return value
    read = {"int": integer, "float": number}.get(option.newest.type)
    return value if read is None else read(value, name)


def settle(source: Source) -> None:
    """What there is to say of Megatron-LM's options that nobody has read."""
    for name in list(source.unread()):
        found = effect(name)
        if found is not None:
            source.reasons[name] = found.account(name)


# Megatron-Bridge: sections of a `ConfigContainer` whose keys are Megatron-LM's.

_SECTIONS = {
    "model": layout.ROWS,
    "train": training.ROWS,
    "optimizer": training.ROWS,
    "scheduler": training.ROWS,
    "ddp": layout.ROWS,
    "rng": training.ROWS,
}
_RENAMED: dict[str, str] = shipped(__package__, "groups.json")["renamed"]
"""Keys that are not in the section, or not called, as Megatron-LM's option."""
_OPTIONS = {f"{section}.{name}": name for section, rows in _SECTIONS.items() for name in table.names(rows)} | _RENAMED
_KNOWN = tuple(
    name
    for name in (*_OPTIONS, "mixed_precision")
    if name.partition(".")[0] != "model"
    and (
        name.startswith(("train.", "rng.", "ddp.use_dist", "mixed"))
        or ".lr" in name
        or "adam" in name
        or "weight" in name
    )
)
"""Of these a function that is not followed may set any: what a model's own has by default is one rank of each axis."""
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "16": "fp16"}


def _options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a recipe: Megatron-LM's by its names, all others by their path."""
    found: dict[str, Any] = {}
    for name, value in flattened(tree, _KNOWN).items():
        if isinstance(value, Made):
            value = value.said or f"{value.name}()"
        option = _OPTIONS.get(name, name)
        if option == "use_distributed_optimizer":
            found[option] = True if found.get(option) is True else value  # either turns on both
        elif value is not None:
            found[option] = typed(option, value)
    return found


def _read(source: Source, draft: Draft) -> None:
    """Everything of a recipe that a spec can say."""
    name = source.given.get("model")
    if isinstance(name, str) and name.endswith("()"):
        source.given["model"] = Undecided(name, f"{name}, a class of Megatron-Bridge,")
        source.used["model"] = {("model",)}
        draft.ask(("model",), f"the recipe builds it as {name}")
    read_model("model", source, draft)
    read_megatron(source, draft)
    _precision(source, draft)
    settle(source)


def _precision(source: Source, draft: Draft) -> None:
    """A recipe of mixed precision overrides what the other sections say (training/mixed_precision.py)."""
    name = source.given.get("mixed_precision")
    if name is None or isinstance(name, Undecided):
        if name is not None:
            draft.ask(table.PRECISION, f"mixed_precision: {name.decided_by} sets it")
            source.used["mixed_precision"] = {table.PRECISION}
        return
    words = str(name).rpartition(".")[2].removesuffix("()").replace("-", "_").split("_")
    kind = next((_PRECISIONS[word] for word in words if word in _PRECISIONS), None)
    if kind is None:
        draft.ask(table.PRECISION, f"mixed_precision is {name}")
        return
    draft.set(table.PRECISION, kind, said=True)
    draft.set(table.SUMS, "fp32" if kind == "bf16" else kind, said=True)
    source.used["mixed_precision"] = {table.PRECISION}
    types = ("bf16", "fp16", "accumulate_allreduce_grads_in_fp32", "optimizer.bf16", "optimizer.fp16")
    source.ignore(types, "set by mixed_precision")
    if isinstance(source.given.get(sums := "mixed_precision.grad_reduce_in_fp32"), bool):
        draft.carry(source, sums, table.SUMS, lambda value, _name: "fp32" if value else kind)
    if any(word.startswith(("fp8", "mxfp8", "nvfp4")) for word in words):
        source.reasons["mixed_precision"] = Account(
            "mixed_precision", Outcome.LOST, "the runtime has no FP8 and no FP4: it works in bf16", changes=True
        )


def _fate(name: str, value: object) -> Account | None:
    section, _, key = name.partition(".")
    if section == "peft":
        return Account(name, Outcome.LOST, ADAPTER, changes=True)
    if section == "optimizer" and value in (False, "torch.float32"):
        return Account(name, Outcome.NO_EFFECT, "as in a plan")
    kind = effect(key) if section == "model" else None
    return fate_of(name, "megatron_over_model") if kind is None else kind.account(name)


BRIDGE_IMPORTER = Importer(tool="Megatron-Bridge", options=_options, defaults=dict, read=_read, fate=_fate)
"""Reads recipes of Megatron-Bridge, which are Python functions."""

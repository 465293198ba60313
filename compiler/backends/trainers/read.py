"""The arguments of transformers' `Trainer`, under the names of any tool, as values of a spec.

Sources: transformers 5.23, `training_args.py` and `trainer.py` (the schedules of `optimization.py`). DeepSpeed's own
schedules, which a plan uses, rise one step later than those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parcompile.backends import deepspeed, reading
from parcompile.backends.deepspeed.read import RECOMPUTED_ON_HOST, sum_as_weights
from parcompile.backends.deepspeed.read import read as read_keys
from parcompile.backends.kinds import ACCELERATE, named_files
from parcompile.backends.reading import (
    Account,
    Draft,
    Outcome,
    RefusedError,
    Source,
    SpecPath,
    Undecided,
    UndecidedError,
    carried,
    refuse_optimizer,
)
from parcompile.layout.shards import BIASES_AND_NORMS
from parcompile.model.presets import find_preset, preset_alike
from parcompile.schema.values import as_number
from parcompile.text import Document, SourceError, read_file
from parcompile.text.typed import integer, number
from parcompile.user_files import parse_json

from . import CHANGING, Tool

# The DeepSpeed configuration inside of a trainer's file, or named by it.

PREFIX = "deepspeed."
_BUFFERS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Sizes that transformers computes from the hidden size, and that change no numbers."""


def with_deepspeed(document: Document, kind: str) -> dict[str, Any]:
    """The values of a trainer's file, with those of the DeepSpeed configuration that it names in its place.

    Raises:
        RefusedError: that file is not there, or cannot be read.
    """
    tree: dict[str, Any] = dict(document.tree) if isinstance(document.tree, Mapping) else {}
    nested = tree.get("deepspeed_config") if kind == ACCELERATE else None
    name = nested.get("deepspeed_config_file") if isinstance(nested, Mapping) else tree.get("deepspeed")
    if not isinstance(name, str):
        return tree
    if kind == ACCELERATE and not named_files(kind, tree, Path(document.file).resolve()):
        return tree  # what it would say is asked for
    if name.lstrip().startswith("{"):
        try:
            return {**tree, "deepspeed": parse_json(name)}
        except ValueError as error:
            raise RefusedError(f"deepspeed holds text that is not JSON: {error}") from error
    found = named_files(kind, tree, Path(document.file).resolve())
    if not found:
        raise RefusedError(f"deepspeed names {name}, which is not there: put it beside the file, or remove the key")
    try:
        read = read_file(found[0])
    except SourceError as error:
        raise RefusedError(str(error)) from error
    if read.document is None or not isinstance(read.document.tree, Mapping):
        why = read.why_unread or "a configuration is an object of keys and values"
        raise RefusedError(f"{found[0]} cannot be read: {why}")
    return {**tree, "deepspeed": dict(read.document.tree)}


def read_deepspeed(source: Source, draft: Draft) -> Draft | None:
    """Reads the DeepSpeed options of a source into a draft of their own; None when there are none.

    Values "auto" are those of the trainer, which it writes in their place: they are carried by its own options.
    """
    names = [name for name in source.given if name.startswith(PREFIX)]
    if not names:
        return None
    own: dict[str, Any] = {}
    for name in names:
        key = name.removeprefix(PREFIX)
        if source.given[name] != "auto":
            own[key] = source.given[name]
        elif key.rpartition(".")[2] in _BUFFERS:
            source.ignore(name, "the size of a buffer, which the plan writes itself")
        else:
            source.ignore(name, "overridden by the options beside it")
    inner, found = Source(own, deepspeed.DEFAULTS), Draft(draft.answers)
    read_keys(inner, found)
    for name, paths in inner.used.items():
        source.used[PREFIX + name] = paths
    for name, account in inner.reasons.items():
        source.reasons[PREFIX + name] = replace(account, option=PREFIX + name)
    # What the file leaves to the trainer is no default of DeepSpeed's.
    found.questions.pop(reading.OPTIMIZER, None)
    return found


def sum_as_deepspeed(draft: Draft, inner: Draft | None) -> None:
    """Gradients are summed in the type of the weights where a DeepSpeed configuration `inner` does not say it."""
    precision = draft.values.get(reading.PRECISION, draft.answers.get(reading.PRECISION))
    if (inner is None or reading.SUMS not in inner.said) and precision is not None:
        sum_as_weights(draft, precision)


def reduced_by_fsdp(source: Source, draft: Draft, name: str, precision: str) -> None:
    """What an option that names the type of the weights means to accelerate's FSDP (`set_mixed_precision`).

    Micro-batches are summed where they lie, in the type of the weights in use; one that is reduced at once, as with
    `sync_each_batch`, is added to a sum in fp32.
    """
    if reading.SUMS not in draft.answers:
        said = f"accelerate's FSDP sums gradients of micro-batches and over ranks in {precision}, as the plan does"
        if any(name.endswith("sync_each_batch") and on is True for name, on in source.given.items()):
            said = f"accelerate's FSDP reduces gradients over ranks in {precision}, as the plan does"
            said += f", and adds micro-batches in fp32 (sync_each_batch), the plan in {precision}"
        source.remark(name, f"{said}; in fp32 with --set {'.'.join(reading.SUMS)}=fp32")
        draft.set(reading.SUMS, precision, said=True)


# The arguments of transformers' `Trainer`, under the names of any tool, as values of a spec.

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision", "adamw")
OPTIMIZERS = {**dict.fromkeys((*_ADAMW, "paged_adamw_32bit"), "adamw"), "sgd": "sgd", "adagrad": "adagrad"}
"""Of `optim` those that a spec has."""
_ARGUMENTS = {"sgd": ("momentum", "nesterov", "dampening"), "adagrad": ("eps", "lr_decay")}
"""What the Trainer reads of `optim_args` (transformers, trainer_optimizer.py); weight decay is that of its groups."""
_SCHEDULES = {name: name for name in ("constant", "linear", "cosine", "inverse_sqrt")} | {
    "constant_with_warmup": "constant"
}


LINEAR_LOSS = ("use_liger_kernel", "enable_liger_kernel", "cut_cross_entropy", "liger_fused_linear_cross_entropy")
"""Switches of trainers (transformers, LLaMA-Factory, axolotl) that leave the logits to the loss; the first two fuse
norms and MLPs, too, and leave this to `liger_kernel_config`."""


OFFLOADING = "activation_offloading"
"""The switch of TRL and axolotl (its schema, `utils/schemas/config.py`) that moves activations to the host."""


TILED_MLP = "tiled_mlp"
"""Axolotl's switch (its schema, `utils/schemas/config.py`), which computes MLPs in tiles of tokens."""


def reader(tool: Tool) -> Callable[[Source, Draft], None]:
    """What reads the options of a tool."""

    def read(source: Source, draft: Draft) -> None:
        source.ignore([name for name, value in source.given.items() if value is None], "null: as if it was left out")
        inner = read_deepspeed(source, draft)
        read_model(tool.model, source, draft)
        _training(tool, source, draft)
        _precision(tool, source, draft)
        _optimizer(tool, source, draft)
        _schedule(tool, source, draft)
        _axes(tool, source, draft)
        if inner is not None:
            _joined(tool, draft, inner)
            sum_as_deepspeed(draft, inner)
        for name in list(source.unread()):
            why = tool.reason(name)
            if name in tool.unplaced and source.given[name] == tool.unplaced[name]:
                source.ignore(name, f"the default of {tool.name}")
            elif why is not None:
                source.lose(name, why, changes=why in CHANGING and bool(source.given[name]))

    return read


def read_model(option: str, source: Source, draft: Draft) -> None:
    """A model by its name: a preset, or the folder of its config.json."""
    name = source.given.get(option)
    if not isinstance(name, str):
        return
    if ("model",) in draft.answers:
        source.reasons[option] = Account(option, Outcome.CARRIED, "model (as you say)")
        return
    preset, file = find_preset(name), Path(name) / "config.json"
    if preset is not None:
        draft.set(("model", "preset"), preset.name, said=True)
    elif file.is_file():
        draft.set(("model", "hf_config"), str(file), said=True)
    elif (alike := preset_alike(name)) is not None:
        draft.set(("model", "preset"), alike.name, said=True)
        said = f"{name} is read as the preset {alike.name}: where its config.json differs, name that file with --model"
        source.remark(option, said)
    else:
        draft.ask(("model",), f"{name} is no preset: download its config.json")
    source.used[option] = {("model",)}


def _training(tool: Tool, source: Source, draft: Draft) -> None:
    for row in carried("trainer"):
        draft.carry(source, tool.own(row.option), row.path, row.read)
    draft.carry(source, tool.length, ("training", "sequence_length"), integer)
    steps = _number(source, tool.own("max_steps"))
    if steps is not None and steps > 0:
        draft.carry(source, tool.own("max_steps"), reading.STEPS, integer)
    elif source.has(tool.own("max_steps")):
        source.ignore(tool.own("max_steps"), "no limit of steps")
    fuses = source.given.get(tool.own("liger_kernel_config") + ".fused_linear_cross_entropy") is not False
    for name in LINEAR_LOSS:
        if source.given.get(name) is True and (fuses or "liger_kernel" not in name):
            draft.take(source, [name], {("training", "linear_cross_entropy"): True})
    if source.given.get(TILED_MLP) is True:
        draft.take(source, [TILED_MLP], {("training", "tiled_mlp"): True})
    recompute = tool.own("gradient_checkpointing")
    value = source.given.get(recompute)
    if isinstance(value, (bool, str)) and value in (True, False, "true", "false"):
        kind = "full" if value in (True, "true") else "none"
        draft.carry(source, recompute, reading.RECOMPUTE, lambda _value, _name: kind)
    elif value == "offload" and recompute not in source.reasons:
        draft.take(source, [recompute], RECOMPUTED_ON_HOST)
    elif value is not None and recompute not in source.reasons:
        draft.set(reading.RECOMPUTE, "full", said=True)
        source.lose(recompute, f"{value!r} moves activations to the host; the spec recomputes them instead")
    if source.given.get(OFFLOADING) is True:
        if draft.values.get(reading.RECOMPUTE) == "none":
            source.lose(OFFLOADING, "the runtime moves what recomputed layers keep, and these are not recomputed")
            return
        draft.take(source, [OFFLOADING], RECOMPUTED_ON_HOST)


def _precision(tool: Tool, source: Source, draft: Draft) -> None:
    path: SpecPath = reading.PRECISION
    names = tool.own("bf16"), tool.own("fp16")
    source.note(names, path)
    try:
        bf16, fp16 = (source.value(name, path) for name in names)
    except UndecidedError as error:
        draft.leave_open(source, error, path)
        return
    precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    draft.set(path, precision, said=bool(bf16 or fp16))


def _optimizer(tool: Tool, source: Source, draft: Draft) -> None:
    name, own = tool.own("optim"), source.given.get(f"{PREFIX}optimizer.type")
    kind = source.value(name, (*reading.OPTIMIZER, "type"))
    found = None if own is not None else OPTIMIZERS.get(str(kind))
    if own is not None:
        source.ignore(name, f"the optimizer of the DeepSpeed configuration, {own}, takes its place")
    elif found is not None:
        draft.set((*reading.OPTIMIZER, "type"), found, said=source.has(name))
    elif (*reading.OPTIMIZER, "type") not in draft.answers:
        refuse_optimizer(source, draft, name, kind, whole=False)
    draft.carry(source, tool.own("learning_rate"), (*reading.OPTIMIZER, "lr"), number)
    if own is None:
        draft.carry_decay(source, tool.own("weight_decay"), BIASES_AND_NORMS)
    else:  # DeepSpeed's takes all parameters in one group (`deepspeed_optim_sched`)
        draft.carry(source, tool.own("weight_decay"), (*reading.OPTIMIZER, "weight_decay"), number)
    if found in _ARGUMENTS:
        if found == "adagrad":
            draft.set((*reading.OPTIMIZER, "eps"), deepspeed.OPTIMIZERS[found]["eps"], said=False)
        _arguments(source, draft, tool.own("optim_args"), _ARGUMENTS[found])
        source.ignore(map(tool.own, ("adam_beta1", "adam_beta2", "adam_epsilon")), f"{found} does not read it")
        return
    draft.carry(source, tool.own("adam_epsilon"), (*reading.OPTIMIZER, "eps"), number)
    betas = [tool.own(name) for name in ("adam_beta1", "adam_beta2")]
    try:
        values = [source.number(name, (*reading.OPTIMIZER, "betas")) for name in betas]
    except UndecidedError as error:
        draft.leave_open(source, error, (*reading.OPTIMIZER, "betas"))
        return
    draft.set((*reading.OPTIMIZER, "betas"), values, said=any(source.has(name) for name in betas))


def _arguments(source: Source, draft: Draft, option: str, keys: Sequence[str]) -> None:
    """What `optim_args`, such as "momentum=0.9,nesterov=true", says of an optimizer."""
    lost = []
    for part in filter(None, str(source.value(option, reading.OPTIMIZER) or "").replace(" ", "").split(",")):
        name, _, text = part.partition("=")
        if name in ("dampening", "lr_decay") and name in keys and as_number(text):
            lost.append(part)
        elif name == "nesterov" and name in keys:
            draft.set((*reading.OPTIMIZER, name), text.lower() in ("true", "1", "yes"), said=True)
        elif name in ("momentum", "eps") and name in keys:
            draft.set((*reading.OPTIMIZER, name), number(as_number(text), f"{option}: {name}"), said=True)
    if lost:
        source.lose(option, f"the optimizers of a spec have no such setting: {', '.join(lost)}", changes=True)


def _schedule(tool: Tool, source: Source, draft: Draft) -> None:
    """The schedule. What it needs and the file leaves to the number of samples is asked for."""
    name = tool.own("lr_scheduler_type")
    if any(one == _OWN_SCHEDULE or one.startswith(f"{_OWN_SCHEDULE}.") for one in source.given):
        _own_schedule(tool, source, draft)
        return
    kind = str(source.value(name, reading.SCHEDULE))
    if kind not in _SCHEDULES:
        draft.ask(reading.SCHEDULE, f"{name} is {kind!r}: a spec has constant, linear, cosine, inverse_sqrt and wsd")
        source.lose(name, "of these schedules constant, linear, cosine and inverse_sqrt are read")
        return
    if kind == "constant":
        # The rate stays: a spec without a schedule.
        source.ignore((tool.own("warmup_steps"), "warmup_ratio"), "a constant rate has no warm-up")
        return
    steps = _train_steps(source, draft, tool)
    warmup = _warmup(source, draft, tool, steps)
    if kind in ("cosine", "linear") and steps is None:
        draft.ask(reading.STEPS, f"the {kind} schedule ends with the last step, which depends on the data")
    if kind == "inverse_sqrt" and warmup == 0:
        why = (
            "inverse_sqrt without a warm-up falls over 10,000 steps in transformers, and from the first step in a spec"
        )
        draft.ask(reading.SCHEDULE, why)
        source.lose(name, why, changes=True)
        return
    draft.set((*reading.SCHEDULE, "type"), _SCHEDULES[kind], said=True)
    if warmup is not None:
        draft.set((*reading.SCHEDULE, "warmup_steps"), warmup, said=True)


_OWN_SCHEDULE = f"{PREFIX}scheduler"
_OWN_PARAMS: SpecPath = ("deepspeed", "scheduler", "params")


def _own_schedule(tool: Tool, source: Source, draft: Draft) -> None:
    """A schedule in the DeepSpeed configuration replaces the trainer's (transformers, `deepspeed_optim_sched`).

    The trainer writes its values for "auto" (`HfTrainerDeepSpeedConfig`).
    """
    name, kind = tool.own("lr_scheduler_type"), source.given.get(f"{_OWN_SCHEDULE}.type")
    said = source.given.get(name)
    why = f"the scheduler of the DeepSpeed configuration, {kind}, takes its place"
    if said is None or said in _SAME_SCHEDULE.get(str(kind), ()):
        source.ignore(name, why)
    else:
        source.lose(name, f"{why}, in transformers too")
    steps = _train_steps(source, draft, tool)
    filled: dict[str, Callable[[], Any]] = {
        "warmup_min_lr": lambda: 0.0,
        "warmup_max_lr": lambda: source.number(tool.own("learning_rate"), (*reading.OPTIMIZER, "lr")),
        "total_num_steps": lambda: steps,
        "warmup_num_steps": lambda: _warmup(source, draft, tool, steps, (*_OWN_PARAMS, "warmup_num_steps")),
    }
    for key, value in filled.items():
        option, path = f"{_OWN_SCHEDULE}.params.{key}", (*_OWN_PARAMS, key)
        if source.given.get(option) == "auto" and path not in draft.answers:
            found = value()
            if found is not None:
                draft.set(path, max(1, found) if key == "warmup_num_steps" else found, said=True)
            elif key == "total_num_steps":
                draft.ask(reading.STEPS, "the schedule ends with the last step, which depends on the data")
            source.reasons.pop(option, None)
            source.used[option] = {reading.STEPS if found is None else path}
    source.ignore({tool.own("warmup_steps"), "warmup_ratio"} - source.used.keys(), why)


_SAME_SCHEDULE = {"WarmupLR": ("constant_with_warmup",), "WarmupDecayLR": ("linear",), "WarmupCosineLR": ("cosine",)}
"""Schedules of transformers that rise and fall as one of DeepSpeed's does, but for the form of the warm-up."""


def _train_steps(source: Source, draft: Draft, tool: Tool) -> int | None:
    answered = draft.answers.get(reading.STEPS)
    given = _number(source, tool.own("max_steps"))
    found = answered if isinstance(answered, int) else given
    return math.floor(found) if found is not None and found > 0 else None


def _warmup(
    source: Source, draft: Draft, tool: Tool, steps: int | None, path: SpecPath = (*reading.SCHEDULE, "warmup_steps")
) -> int | None:
    """Steps of the warm-up; None when they are asked for, or when the user says them."""
    count, ratio = _number(source, tool.own("warmup_steps")), _number(source, "warmup_ratio")
    if count is not None and 0 < count < 1:
        count, ratio = None, count  # transformers 5 takes a fraction as the ratio
    source.note({tool.own("warmup_steps"), "warmup_ratio"} - source.reasons.keys(), path)
    if path in draft.answers:
        return None
    if count:
        return math.floor(count)
    if not ratio and "warmup_ratio" in tool.defaults and count is None:
        if steps is not None:
            share: float = tool.defaults["warmup_ratio"]
            return min(math.floor(share * steps), 100)
        ratio = tool.defaults["warmup_ratio"]
    if not ratio:
        return 0
    if steps is None:
        draft.ask(reading.STEPS, f"the warm-up is {ratio:g} of all steps, whose number depends on the data")
        for name in (tool.own("warmup_steps"), "warmup_ratio"):
            if source.given.get(name):
                source.used[name] = {reading.STEPS}
        return None
    return math.ceil(ratio * steps)


def _number(source: Source, name: str) -> float | None:
    """The number of an option; None where the file does not say it, or leaves it to something else."""
    value = source.given.get(name)
    return None if value is None or isinstance(value, Undecided) else number(value, name)


def _axes(tool: Tool, source: Source, draft: Draft) -> None:
    for axis, names in tool.parallel.items():
        for name in names:
            if source.given.get(name) is not None:
                draft.carry(source, name, ("parallelism", axis), integer)


def _joined(tool: Tool, draft: Draft, inner: Draft) -> None:
    """Adds what the DeepSpeed configuration says. Where the trainer says something else, it would not start.

    Raises:
        RefusedError: the two disagree.
    """
    for path in sorted(inner.said):
        if any(path[: len(known)] == known and path != known for known in draft.said):
            continue
        if path in draft.said and draft.values[path] != inner.values[path]:
            raise RefusedError(
                f"{tool.name} says {'.'.join(path)} {draft.values[path]!r} and its DeepSpeed configuration "
                f"{inner.values[path]!r}: transformers refuses to start with such a file"
            )
        draft.set(path, inner.values[path], said=True)
    for path, question in inner.questions.items():
        if not any(known[: len(path)] == path for known in draft.values):
            draft.questions.setdefault(path, question)

"""A spec's values out of a DeepSpeed configuration.

DeepSpeed derives what a configuration leaves out, and so does this module, by the same rules (runtime/config.py): with
the total batch alone there is one micro-batch in a step; without a precision the weights are fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.backends import deepspeed, reading
from parcompile.backends.reading import (
    Draft,
    Importer,
    Source,
    SpecPath,
    Undecided,
    UndecidedError,
    leaves,
    refuse_optimizer,
)
from parcompile.schema import load
from parcompile.spec import OPTIMIZER_KEYS
from parcompile.text.typed import Reader, integer, number

from .lax import is_on
from .table import find, newest
from .write import ds_config

_TYPE: SpecPath = (*reading.OPTIMIZER, "type")
_PARAMS = "optimizer.params."
_TRAINER = "the Trainer of transformers"
_BATCH = {
    "train_batch_size": ("training", "global_batch_size"),
    "train_micro_batch_size_per_gpu": ("training", "micro_batch_size"),
    "gradient_accumulation_steps": ("training", "gradient_accumulation_steps"),
}


def options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration by their dotted names; what is "auto" is undecided."""
    return dict(leaves(tree, auto=_TRAINER))


_TO_HOST = "activation_checkpointing.cpu_checkpointing"
RECOMPUTED_ON_HOST: Mapping[SpecPath, Any] = {reading.RECOMPUTE: "full", ("training", "activation_offloading"): True}
"""What layers keep that are computed again goes to the host."""


def read_file(source: Source, draft: Draft) -> None:
    """A configuration on its own: what its script recomputes with `deepspeed.checkpointing` may go to the host."""
    if source.given.get(_TO_HOST) is True:
        draft.take(source, [_TO_HOST], RECOMPUTED_ON_HOST)
    read(source, draft)


def read(source: Source, draft: Draft) -> None:
    """Everything of the configuration that a spec can say."""
    _batch(source, draft)
    _precision(source, draft)
    _schedule(source, draft, _optimizer(source, draft))
    draft.carry(source, "gradient_clipping", ("training", "gradient_clipping"), number)
    draft.carry(source, "zero_optimization.stage", reading.STAGE)
    for part in ("optimizer", "param"):
        read_offload(source, draft, part)
    for name in list(source.unread()):
        read_further(source, draft, name, left_to=_TRAINER)


def _batch(source: Source, draft: Draft) -> None:
    steps = "gradient_accumulation_steps"
    for name, path in _BATCH.items():
        if name == steps and isinstance(source.given.get(name), Undecided):
            source.used[name] = {path}  # it follows from the two batch sizes
        elif source.has(name):
            draft.carry(source, name, path)
    if [name for name in _BATCH if source.has(name)] == ["train_batch_size"]:
        # DeepSpeed takes the whole batch of a rank in one pass then; a spec would take one sequence in each.
        draft.set(_BATCH["gradient_accumulation_steps"], 1, said=False)


def _precision(source: Source, draft: Draft) -> None:
    try:
        on = [
            name for name in ("fp16", "bf16", "bfloat16") if source.value(f"{name}.enabled", reading.PRECISION) is True
        ]
    except UndecidedError as error:
        draft.leave_open(source, error, reading.PRECISION)
        source.note(("fp16.enabled", "bf16.enabled"), reading.PRECISION)
        precision = draft.answers.get(reading.PRECISION)
    else:
        precision = "fp32" if not on else "fp16" if on[0] == "fp16" else "bf16"
        draft.set(reading.PRECISION, precision, said=bool(on))
    if precision in ("fp16", None):
        draft.carry(source, "fp16.loss_scale", ("training", "loss_scale"), number)
    else:
        source.ignore({*source.under("fp16")} - {"fp16.enabled"}, "fp16 is off")
    if source.has("data_types.grad_accum_dtype") and source.given["data_types.grad_accum_dtype"] is not None:
        carry_sums(source, draft, precision)
    elif precision is not None:
        sum_as_weights(draft, precision)


def carry_sums(source: Source, draft: Draft, precision: Any) -> None:
    """The type that sums gradients; DeepSpeed reduces in that of the weights, where nobody says another."""
    name, said = "data_types.grad_accum_dtype", source.given.get("communication_data_type")
    if source.given[name] == "fp32" and precision in ("fp16", "bf16") and said is None:
        why = f"DeepSpeed reduces in {precision}, as communication_data_type is left out: a plan reduces in fp32"
        source.remark(name, why)
    draft.carry(source, name, reading.SUMS)


def sum_as_weights(draft: Draft, precision: Any) -> None:
    """DeepSpeed sums gradients in the type of the weights where nobody says another; a spec's default is fp32."""
    draft.set(reading.SUMS, precision, said=precision != "fp32")


def _optimizer(source: Source, draft: Draft) -> float | None:
    """The optimizer; returns its learning rate, which a schedule needs."""
    if not any(name == "optimizer" or name.startswith("optimizer.") for name in source.given):
        draft.ask(reading.OPTIMIZER, "the configuration has no optimizer: the training script brings its own")
        return None
    try:
        kind = source.value("optimizer.type", (*reading.OPTIMIZER, "type"))
    except UndecidedError as error:
        draft.leave_open(source, error, reading.OPTIMIZER)
        return None
    # DeepSpeed takes its own in any case, and torch's classes by their names.
    own = "sgd" if kind == "SGD" else str(kind).lower()
    if kind == "sgd":
        draft.ask(
            reading.OPTIMIZER, "optimizer.type is 'sgd': DeepSpeed takes torch's classes by their names, here SGD"
        )
        return None
    if not isinstance(kind, str) or own not in OPTIMIZER_KEYS:
        refuse_optimizer(source, draft, "optimizer.type", kind, source.under("optimizer"))
        return None
    of_torch, coupled = (source.value(_PARAMS + name, _TYPE) for name in ("torch_adam", "adam_w_mode"))
    if own in ("adam", "adamw"):
        own = "adam" if own == "adam" and coupled is False else "adamw"
        defaults = deepspeed.TORCH_ADAMW if of_torch is True and own == "adamw" else deepspeed.ADAM
    else:
        defaults = deepspeed.OPTIMIZERS[own]
    draft.set(_TYPE, own, said=True)
    source.defaults = {**source.defaults, **{_PARAMS + name: value for name, value in defaults.items()}}
    for name in defaults:
        if name != "lr":
            draft.carry(source, _PARAMS + name, (*reading.OPTIMIZER, name))
    rate = _muon(source, draft, coupled=coupled is False) if own == "muon" else _PARAMS + "lr"
    for name in source.under("optimizer.params"):
        key = name.removeprefix(_PARAMS)
        if key in deepspeed.OFF and source.given[name] != deepspeed.OFF[key]:
            source.lose(name, "the optimizers of a spec have no such setting", changes=True)
        elif key in deepspeed.OFF or key in deepspeed.SAME_NUMBERS:
            source.ignore(name, "DeepSpeed computes the same without it")
    found = draft.carry(source, rate, (*reading.OPTIMIZER, "lr"))
    return None if found is None else number(found, rate)


def _muon(source: Source, draft: Draft, *, coupled: bool) -> str:
    """What DeepSpeed's Muon has beside; returns the option with its rate for matrices."""
    draft.set((*reading.OPTIMIZER, "adjust_lr"), "original", said=False)
    why = (
        "DeepSpeed's Muon clips what it has orthogonalised, and takes routers as matrices; that of a plan does neither"
    )
    source.lose("optimizer.type", why, changes=True)
    if coupled:
        source.lose(_PARAMS + "adam_w_mode", "what is no matrix takes AdamW in a plan", changes=True)
    source.ignore(_PARAMS + "ns_method", "the same iteration: a plan runs it in bf16, in torch's order of products")
    rate, of_matrices, of_others = (_PARAMS + name for name in ("lr", "muon_lr", "adam_lr"))
    first = of_matrices if source.has(of_matrices) else rate
    value = source.given.get(first)
    for name in (rate, of_others):
        if name != first and source.given.get(name, value) != value:
            said = "" if value is None else f", here that of matrices, {value}"
            source.lose(name, f"a spec has one lr{said}", changes=True)
        elif name != first:
            source.ignore(name, f"the same as {first}")
    if value is None:
        draft.ask(
            (*reading.OPTIMIZER, "lr"),
            "DeepSpeed's Muon takes 0.02 for matrices and 3e-4 for all else: a spec has one lr",
        )
    return first


def _schedule(source: Source, draft: Draft, lr: float | None) -> None:
    """A schedule that a spec can say becomes training.lr_scheduler; any other one stays a further DeepSpeed key."""
    names, kind = source.under("scheduler"), source.given.get("scheduler.type")
    open_names = [name for name in names if isinstance(source.given[name], Undecided)]
    if open_names:
        draft.ask(reading.SCHEDULE, f"{', '.join(open_names)}: {_TRAINER} sets them")
        source.note(names, reading.SCHEDULE)
        return
    if not isinstance(kind, str) or kind not in deepspeed.SCHEDULERS:
        return
    given = {name.removeprefix("scheduler.params."): source.given[name] for name in source.under("scheduler.params")}
    found = _as_spec(kind, {**deepspeed.SCHEDULERS[kind], **given}, lr)
    if found is None:
        return
    rate, schedule = found
    draft.fill(reading.SCHEDULE, schedule)
    if rate is not None:
        # The schedule sets the rate, whatever the optimizer was given.
        draft.set((*reading.OPTIMIZER, "lr"), rate, said=True)
        draft.questions.pop((*reading.OPTIMIZER, "lr"), None)
    if "total_num_steps" in given:
        total = integer(given["total_num_steps"], "scheduler.params.total_num_steps")
        draft.set(reading.STEPS, total, said=True)
    source.note(names, reading.SCHEDULE)


def _as_spec(kind: str, params: Mapping[str, Any], lr: float | None) -> tuple[float | None, dict[str, Any]] | None:
    """A schedule in the spec's terms, with the rate that it rises to if it sets one; None when a spec cannot say it.

    A spec's warm-up is linear.
    """
    if params["warmup_type"] != "linear":
        return None
    read = Reader(params, "scheduler.params")
    steps = max(2, read.integer("warmup_num_steps"))
    said = {"type": deepspeed.SCHEDULE_TYPES[kind], "warmup_steps": steps}
    if kind != "WarmupCosineLR":
        return read.number("warmup_max_lr"), {**said, "min_lr": read.number("warmup_min_lr")}
    first, least = read.number("warmup_min_ratio"), read.number("cos_min_ratio")
    if lr is None:
        return None
    start = {} if first == least else {"warmup_start_lr": first * lr}
    return None, {**said, "min_lr": least * lr, **start}


_FIRST_STAGE = {"optimizer": 1, "param": 3}
_OF_DRIVES = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
_OLD = {"optimizer": "zero_optimization.cpu_offload", "param": "zero_optimization.cpu_offload_param"}


def read_offload(source: Source, draft: Draft, part: str, device: str = "") -> None:
    """What of the "optimizer" or of weights ("param") is on the host: the option `device` names it, or DeepSpeed's."""
    host, old, path = f"zero_optimization.offload_{part}", _OLD[part], ("zero", f"offload_{part}")
    device = device or f"{host}.device"
    where, stage = source.given.get(device, "none"), draft.values.get(reading.STAGE)
    reaches = not isinstance(stage, int) or stage >= _FIRST_STAGE[part]
    if source.given.get(old) is True and reaches:
        draft.take(source, [old], {(*path, "device"): "cpu"})
    elif where == "cpu" and reaches:
        draft.carry(source, device, (*path, "device"))
        if source.has(pinned := f"{host}.pin_memory"):
            draft.carry(source, pinned, (*path, "pin_memory"))
        if part == "optimizer":
            source.value("optimizer.params.fused", (*path, "device"))
        else:
            source.ignore((f"{host}.{name}" for name in _OF_DRIVES), "DeepSpeed reads it for nvme alone")
    elif where == "nvme" and reaches:
        source.lose(device, deepspeed.NO_NVME)
    elif where in ("none", None, "cpu", "nvme"):
        why = "off" if reaches else f"DeepSpeed reads it from stage {_FIRST_STAGE[part]} on"
        source.ignore({device, *source.under(host)}, why)
    if part == "optimizer":
        _implementation(source, draft, path)


ADAM_ON_HOST = ("cpu_adam", "cpu_torch_adam")
"""What gpt-neox calls DeepSpeedCPUAdam."""
_FORCED = "zero_force_ds_cpu_optimizer"


def _implementation(source: Source, draft: Draft, host: SpecPath) -> None:
    """Whose kernel steps on the host: DeepSpeed's Adam, unless the file asks for torch's or leaves it to the script.

    With `zero_force_ds_cpu_optimizer`, the default, DeepSpeed refuses another optimizer that a script brings, and
    accelerate puts DeepSpeed's in the place of torch's.
    """
    kind, path = source.given.get("optimizer.type"), (*host, "implementation")
    if (*host, "device") not in draft.values or isinstance(kind, str):
        source.ignore(_FORCED, "it is for the optimizer on the host that a script brings")
    if (*host, "device") not in draft.values:
        return
    if isinstance(kind, str):
        native = (
            kind.lower() in ("adam", "adamw", *ADAM_ON_HOST) and source.given.get(_PARAMS + "torch_adam") is not True
        )
    else:
        native = source.value(_FORCED, path) is not False
    draft.set(path, "deepspeed" if native else "torch", said=native)


# Keys that a file gives and a plan does not decide: they become the spec's further DeepSpeed keys.


def read_further(source: Source, draft: Draft, name: str, *, left_to: str) -> None:
    """Takes a key over by its dotted name, unless it cannot go with a plan; `left_to` decides what is "auto"."""
    path = tuple(name.split("."))
    reason = deepspeed.refusal(path)
    if path[0] not in load("ds_config")["properties"]:
        source.lose(name, "DeepSpeed has no such key")
    elif isinstance(source.given[name], Undecided):
        source.lose(name, f"left to {left_to}; the plan has a value of its own")
    elif reason is not None and _is_off(path, source.given[name]):
        source.ignore(name, "DeepSpeed does the same without it")
    elif reason is not None:
        source.lose(name, reason)
    elif switch := next(
        (one for one in deepspeed.SWITCHED if one.startswith(f"{path[0]}.") and is_on(one, source.given.get(one))), None
    ):
        source.lose(name, deepspeed.SWITCHED[switch], changes=path[0] == "data_efficiency")
    else:
        draft.carry(source, name, ("deepspeed", *path))


def _is_off(path: tuple[str, ...], value: Any) -> bool:
    """Whether a key of ZeRO asks for nothing: by DeepSpeed's default, or as an old key that stands for none."""
    key = find(newest(), *path) if path[0] == "zero_optimization" else None
    if key is None:
        return False
    if key.deprecated is not None:
        return key.deprecated.get("changes", {}).get(str(value).lower(), value) is None
    return bool(value == key.default) and type(value) is type(key.default)


def _lower(kind: Any) -> Any:
    """DeepSpeed's own optimizers in any case."""
    return kind.lower() if isinstance(kind, str) and kind.lower() in OPTIMIZER_KEYS else kind


IMPORTER = Importer(
    tool="DeepSpeed",
    options=options,
    defaults=lambda: deepspeed.DEFAULTS,
    read=read_file,
    written=lambda plan: options(ds_config(plan)),
    meaning=lambda given: {**given, "optimizer.type": _lower(given.get("optimizer.type"))},
)

"""gpt-neox's options of the training: batch, optimizer, schedule, precision, recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from parcompile.backends.losses import Loss
from parcompile.backends.reading import Draft, Source, SpecPath, UndecidedError
from parcompile.backends.table import Arguments, Entry, Part, Row
from parcompile.spec import Precision, Spec

_OPTIMIZER: SpecPath = ("training", "optimizer")
_SCHEDULE: SpecPath = ("training", "lr_scheduler")
_STEPS: SpecPath = ("training", "train_steps")
_PRECISION: SpecPath = ("training", "precision")
_RECOMPUTE: SpecPath = ("training", "activation_checkpointing")
_BATCH = {
    "train_batch_size": ("training", "global_batch_size"),
    "train_micro_batch_size_per_gpu": ("training", "micro_batch_size"),
    "gradient_accumulation_steps": ("training", "gradient_accumulation_steps"),
}
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}
"""What FusedAdam uses where the file does not say it."""
PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32"}


def _write_batch(spec: Spec) -> Arguments:
    training = spec.training
    return {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
    }


def _read_batch(source: Source, draft: Draft) -> None:
    """Two of the three decide the third; gradient_accumulation_steps is 1 where the file does not say it."""
    if not any(source.has(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")):
        draft.ask(_BATCH["train_micro_batch_size_per_gpu"], "the file says no batch; it may stand in another one")
    for name, path in _BATCH.items():
        draft.carry(source, name, path)


def _write_optimizer(spec: Spec) -> Arguments:
    optimizer = spec.training.optimizer
    return {
        "optimizer.type": "Adam",
        "optimizer.params.lr": optimizer.lr,
        "optimizer.params.betas": list(optimizer.betas),
        "optimizer.params.eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }


def _read_optimizer(source: Source, draft: Draft) -> None:
    """The "adam" of gpt-neox is FusedAdam, which decays weights as AdamW does (megatron/training.py)."""
    names = source.under("optimizer")
    if not names:
        draft.ask(_OPTIMIZER, "the file has no optimizer; it may stand in another one")
        draft.carry(source, "weight_decay", (*_OPTIMIZER, "weight_decay"), float)
        return
    try:
        kind = str(source.value("optimizer.type", (*_OPTIMIZER, "type")) or "Adam")
    except UndecidedError as error:
        draft.leave_open(source, error, _OPTIMIZER)
        return
    if kind.lower() != "adam" or source.given.get("use_bnb_optimizer") is True:
        draft.ask(_OPTIMIZER, f"optimizer.type is {kind!r}: a spec has adam and adamw")
        for name in (*names, "weight_decay", "use_bnb_optimizer"):
            source.lose(name, "a spec has the optimizers adam and adamw")
        return
    draft.set((*_OPTIMIZER, "type"), "adamw", said=True)
    source.defaults = {**source.defaults, **{f"optimizer.params.{name}": value for name, value in _ADAM.items()}}
    if draft.carry(source, "optimizer.params.lr", (*_OPTIMIZER, "lr"), float) is None:
        draft.ask((*_OPTIMIZER, "lr"), "the file does not say optimizer.params.lr")
    draft.carry(source, "optimizer.params.betas", (*_OPTIMIZER, "betas"), lambda pair: [float(one) for one in pair])
    draft.carry(source, "optimizer.params.eps", (*_OPTIMIZER, "eps"), float)
    draft.carry(source, "weight_decay", (*_OPTIMIZER, "weight_decay"), float)
    source.lose("optimizer.params.weight_decay", "gpt-neox fails with it beside its own weight_decay")


def _optimizer_losses(spec: Spec) -> Iterator[Loss]:
    if spec.training.optimizer.type == "adam" and spec.training.optimizer.weight_decay:
        yield Loss("optimizer adam", "gpt-neox's Adam decays weights as AdamW does", "set weight_decay 0, or adamw")


SCHEDULE_OPTIONS = ("lr_decay_style", "lr_decay_iters", "lr_decay_fraction", "warmup", "min_lr")


def _write_schedule(spec: Spec) -> Arguments:
    schedule, steps = spec.training.lr_scheduler, spec.training.train_steps
    if schedule is None:
        return {"lr_decay_style": "constant", "warmup": 0.0, "min_lr": 0.0}
    found: Arguments = {"lr_decay_style": schedule.type, "min_lr": schedule.min_lr}
    if steps is not None:
        found |= {"lr_decay_iters": steps, "warmup": schedule.warmup_steps / steps}
    return found


def _read_schedule(source: Source, draft: Draft) -> None:
    try:
        found = _schedule(source)
    except UndecidedError as error:
        draft.leave_open(source, error, _SCHEDULE)
        return
    if isinstance(found, str):
        if not any(source.has(name) for name in SCHEDULE_OPTIONS):
            draft.ask(_SCHEDULE, f"gpt-neox's own schedule would be used, and {found}")
        for name in SCHEDULE_OPTIONS:
            source.lose(name, found)
        return
    for key, value in found.items():
        draft.set((*_SCHEDULE, key), value, said=True)


def _schedule(source: Source) -> dict[str, Any] | str:
    """The schedule in a spec's terms (megatron/learning_rates.py), empty without one; or why a spec cannot say it."""

    def value(name: str) -> Any:
        return source.value(name, _SCHEDULE)

    style, least, total = value("lr_decay_style"), value("min_lr"), source.value("train_iters")
    end, part, fraction = value("lr_decay_iters"), value("lr_decay_fraction"), value("warmup")
    if end is None:
        end = math.floor(total * part) if total is not None and part is not None else total
    if style == "constant" and not fraction:
        source.ignore("min_lr", "the rate never changes")
        return {}
    if style not in ("constant", "linear", "cosine"):
        return f"a spec has no schedule {style}: constant, linear and cosine"
    if end is None:
        return "the warm-up is a part of the steps, which the file does not say"
    warmup = fraction * end
    if warmup < 2 or abs(warmup - round(warmup)) > 1e-6 * end:
        return f"a spec's schedule has a whole number of warm-up steps, 2 or more, not {warmup:g}"
    if least and style != "constant":
        return f"a spec's warm-up rises from the lowest rate ({least:g}), that of gpt-neox from 0"
    if style != "constant" and end != total:
        return f"a spec's schedule ends with the training steps ({total}), not after {end}"
    if style == "constant":
        source.ignore("min_lr", "the rate does not fall")
    return {"type": style, "warmup_steps": round(warmup), "min_lr": 0.0}


def _schedule_losses(spec: Spec) -> Iterator[Loss]:
    schedule = spec.training.lr_scheduler
    if schedule is None:
        return
    if schedule.min_lr:
        yield Loss(f"min_lr {schedule.min_lr:g}", "the warm-up of gpt-neox rises from 0", "min_lr 0")
    if spec.training.train_steps is None:
        yield Loss("warmup_steps", "gpt-neox's warm-up is a part of train_iters", "training.train_steps")


def _write_precision(spec: Spec) -> Arguments:
    names = {ours: theirs for theirs, ours in PRECISIONS.items()}
    return {"precision": names[spec.training.precision.value]}


def _read_precision(source: Source, draft: Draft) -> None:
    """`precision`, or which of DeepSpeed's two sections is on; fp32 where neither says it (calculate_derived)."""
    try:
        said = source.value("precision", _PRECISION)
        on = [name for name in ("fp16", "bf16") if source.value(f"{name}.enabled", _PRECISION) is True]
    except UndecidedError as error:
        draft.leave_open(source, error, _PRECISION)
        return
    precision = PRECISIONS[str(said).lower()] if said is not None else on[0] if on else "fp32"
    draft.set(_PRECISION, precision, said=said is not None or bool(on))
    if precision == "fp16":
        draft.carry(source, "fp16.loss_scale", ("training", "loss_scale"), float)
    else:
        for name in source.under("fp16"):
            if name != "fp16.enabled":
                source.ignore(name, "fp16 is off")
    name = "data_types.grad_accum_dtype"
    if source.given.get(name) is not None:
        draft.carry(source, name, ("training", "gradient_accumulation_dtype"))


def _precision_losses(spec: Spec) -> Iterator[Loss]:
    training = spec.training
    if training.precision is Precision.FP32 and training.gradient_accumulation_dtype is not Precision.FP32:
        yield Loss("gradient_accumulation_dtype", "fp32 gradients are summed in fp32", "precision bf16")


def _write_recomputation(spec: Spec) -> Arguments:
    full = spec.training.activation_checkpointing == "full"
    return {"checkpoint_activations": full, **({"checkpoint_num_layers": 1} if full else {})}


def _read_recomputation(source: Source, draft: Draft) -> None:
    try:
        on = source.value("checkpoint_activations", _RECOMPUTE) is True
        layers = source.value("checkpoint_num_layers", _RECOMPUTE)
    except UndecidedError as error:
        draft.leave_open(source, error, _RECOMPUTE)
        return
    draft.set(_RECOMPUTE, "full" if on else "none", said=source.has("checkpoint_activations"))
    if not on:
        source.ignore("checkpoint_num_layers", "nothing is recomputed")
    elif layers != 1:
        source.lose("checkpoint_num_layers", "a plan recomputes every layer on its own: memory differs, numbers do not")


def _recomputation_losses(spec: Spec) -> Iterator[Loss]:
    if spec.training.activation_checkpointing == "selective":
        yield Loss("activation_checkpointing selective", "gpt-neox recomputes whole layers", "none is used")


ROWS: tuple[Row, ...] = (
    Entry("seq_length", ("training", "sequence_length")),
    Part(tuple(_BATCH), _write_batch, _read_batch),
    Entry("train_iters", _STEPS),
    Part(
        (
            "optimizer.type",
            "optimizer.params.lr",
            "optimizer.params.betas",
            "optimizer.params.eps",
            "optimizer.params.weight_decay",
            "weight_decay",
            "use_bnb_optimizer",
        ),
        _write_optimizer,
        _read_optimizer,
        _optimizer_losses,
    ),
    Part(SCHEDULE_OPTIONS, _write_schedule, _read_schedule, _schedule_losses),
    Entry("gradient_clipping", ("training", "gradient_clipping"), read=float),
    Entry("seed", ("training", "seed")),
    Part(
        ("precision", "fp16.enabled", "bf16.enabled", "fp16.loss_scale", "data_types.grad_accum_dtype"),
        _write_precision,
        _read_precision,
        _precision_losses,
    ),
    Part(
        ("checkpoint_activations", "checkpoint_num_layers"),
        _write_recomputation,
        _read_recomputation,
        _recomputation_losses,
    ),
)
"""The training, in the order in which it is written."""

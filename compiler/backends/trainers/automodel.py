"""NeMo Automodel's YAML. Source: Automodel 36044ad3, `recipes/llm/train_ft.py` and `components/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.backends import deepspeed
from parcompile.backends import reading as table
from parcompile.backends.reading import Bundle, Draft, Entry, Importer, Row, Source, fate_of, refuse_optimizer
from parcompile.backends.recipes import flattened
from parcompile.text.typed import integer, number, word

from . import AUTOMODEL, METHOD, REASONS
from .read import read_model

_LENGTHS = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length")
_SEEDS = ("rng.seed", "seed")
_NAMES = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config")
_TARGET, _RESHARD, _ZERO3 = "optimizer._target_", "distributed.reshard_after_forward", "distributed.zero_dp_strategy"
_STRATEGY, _DP, _RECOMPUTE = "distributed.strategy", "distributed.dp_size", "distributed.activation_checkpointing"
_OLD_RECOMPUTE = "parallelizer.activation_checkpointing"
"""Where files of 2025 say it."""
_DTYPES = ("model.torch_dtype", "model.config.torch_dtype")
_SCHEDULE = tuple(
    f"lr_scheduler.{name}"
    for name in ("lr_decay_style", "lr_warmup_steps", "lr_decay_steps", "init_lr", "min_lr", "max_lr")
)


def _read_model(source: Source, draft: Draft) -> None:
    name = next((one for one in _NAMES if isinstance(source.given.get(one), str)), None)
    if name is not None:
        read_model(name, source, draft)
    elif source.under("model"):
        draft.ask(("model",), "the file builds it from its own settings")


def _read_sharding(source: Source, draft: Draft) -> None:
    """fsdp2 shards weights as ZeRO stage 3; a pipeline keeps them gathered, as stage 2, unless it is told not to."""
    strategy = word(source.value(_STRATEGY, table.STAGE), _STRATEGY)
    reshard, pp = source.value(_RESHARD, table.STAGE), draft.values.get(("parallelism", "pp"), 1)
    keeps = reshard is False or (reshard is None and pp != 1)
    stage = {"ddp": 0, "megatron_fsdp": source.integer(_ZERO3, table.STAGE)}.get(strategy, 2 if keeps else 3)
    draft.set(table.STAGE, stage, said=True)
    draft.carry(source, _DP, table.DP, integer)


def _read_length(source: Source, draft: Draft) -> None:
    for name in _LENGTHS:
        if draft.values.get(("training", "sequence_length")) is None and source.given.get(name):
            draft.carry(source, name, ("training", "sequence_length"), integer)
        elif source.has(name):
            source.ignore(name, "no packing" if name == _LENGTHS[0] else "packing decides the length")


def _read_seed(source: Source, draft: Draft) -> None:
    """The recipe seeds its ranks with `seed`, and reads no rng section where it does not build one."""
    for name in _SEEDS:
        if ("training", "seed") not in draft.values and source.has(name):
            draft.carry(source, name, ("training", "seed"), integer)
        else:
            source.ignore(name, "set by rng.seed")


def _read_precision(source: Source, draft: Draft) -> None:
    draft.set(table.PRECISION, "bf16", said=True)
    for name in _DTYPES:
        kind = str(source.given.get(name, "")).rpartition(".")[2]
        if kind in ("bfloat16", "bf16", "auto"):
            why = "weights and optimizer states are of this type there, and fp32 in a plan"
            source.lose(name, why, changes=True)
        elif kind in ("float32", "fp32"):
            source.used[name] = {table.PRECISION}


def _read_optimizer(source: Source, draft: Draft) -> None:
    kind = str(source.value(_TARGET, (*table.OPTIMIZER, "type"))).rpartition(".")[2]
    own = {"Adam": "adam", "AdamW": "adamw", "FusedAdam": "adamw", "SGD": "sgd", "Adagrad": "adagrad"}.get(kind)
    if own is not None:
        draft.set((*table.OPTIMIZER, "type"), own, said=True)
    elif (*table.OPTIMIZER, "type") not in draft.answers:
        refuse_optimizer(source, draft, _TARGET, kind, whole=False)
    if own is not None and own in deepspeed.OPTIMIZERS:
        for name, default in deepspeed.OPTIMIZERS[own].items():
            draft.set(
                (*table.OPTIMIZER, name),
                source.given.get(f"optimizer.{name}", default),
                said=source.has(f"optimizer.{name}"),
            )
            source.used[f"optimizer.{name}"] = {(*table.OPTIMIZER, name)}
        return
    table.read(table.carried("optimizer"), source, draft)


def _read_schedule(source: Source, draft: Draft) -> None:
    """Without the section the rate stays; with it, from a tenth of the rate up, and down to a hundredth."""
    if not source.under("lr_scheduler"):
        return
    style, warmup, end, start, least, most = (source.value(name, table.SCHEDULE) for name in _SCHEDULE)
    lr, steps = source.number("optimizer.lr"), draft.values.get(table.STEPS)
    if style not in ("constant", "linear", "cosine", "inverse-square-root"):
        source.lose(_SCHEDULE[0], "of these schedules constant, linear, cosine and inverse_sqrt are read", changes=True)
        draft.ask(table.SCHEDULE, f"{_SCHEDULE[0]} is {style!r}")
    elif steps is None and (warmup is None or (end is None and style in ("linear", "cosine"))):
        draft.ask(table.STEPS, "the schedule is a share of all steps")
    elif lr is not None:
        if most is not None and number(most, _SCHEDULE[5]) != lr:
            source.lose(_SCHEDULE[5], f"a spec's schedule rises to the rate of the optimizer, {lr:g}", changes=True)
        rises = min(1000, (steps or 0) // 10) if warmup is None else integer(warmup, _SCHEDULE[1], least=0)
        found: dict[str, Any] = {
            "type": str(style).replace("inverse-square-root", "inverse_sqrt"),
            "warmup_steps": rises,
        }
        found["min_lr"] = lr / 100 if least is None else number(least, _SCHEDULE[4])
        if rises:
            found["warmup_start_lr"] = lr / 10 if start is None else number(start, _SCHEDULE[3])
        if end is not None and end != steps:
            end = integer(end, _SCHEDULE[2], least=1)
            if style in ("linear", "cosine"):
                found["total_steps"] = end
            elif style != "constant" and (steps is None or end < steps):
                said = f"a spec's {found['type']} does not drop to the lowest rate after {end} steps"
                source.lose(_SCHEDULE[2], said, changes=True)
        draft.fill(table.SCHEDULE, found)


def _recompute(value: Any, _name: str) -> str:
    return {True: "full", False: "none"}.get(value, str(value)) if isinstance(value, bool) else str(value)


ROWS: tuple[Row, ...] = (
    Bundle(_NAMES, _read_model),
    *table.carried("automodel.axes"),
    Bundle((_STRATEGY, _RESHARD, _ZERO3, _DP), _read_sharding),
    *table.carried("automodel.batch"),
    Bundle(_LENGTHS, _read_length),
    Entry("clip_grad_norm.max_norm", ("training", "gradient_clipping"), read=number),
    Bundle(_SEEDS, _read_seed),
    Bundle(_DTYPES, _read_precision),
    Bundle((_TARGET,), _read_optimizer),
    Bundle(_SCHEDULE, _read_schedule),
    Entry(_RECOMPUTE, table.RECOMPUTE, read=_recompute),
)
DEFAULTS: Mapping[str, Any] = AUTOMODEL["defaults"]
_CHANGING = {section: REASONS[why] for section, why in AUTOMODEL["changing"].items()}
"""Sections that make another training."""


def _options(tree: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in flattened(tree, ()).items() if value not in (None, "None", "none")}
    if _OLD_RECOMPUTE in given:
        given.setdefault(_RECOMPUTE, given.pop(_OLD_RECOMPUTE))
    return given


def _read(source: Source, draft: Draft) -> None:
    table.read(ROWS, source, draft)
    for section, why in _CHANGING.items():
        if source.given.get(f"{section}.enabled", True) is not False:
            source.lose(source.under(section), why, changes=True)
    kind = str(source.given.get("recipe", ""))
    if kind and "NextTokenPrediction" not in kind:
        source.lose("recipe", METHOD, changes=True)


IMPORTER = Importer(
    tool="NeMo Automodel",
    options=_options,
    defaults=lambda: DEFAULTS,
    read=_read,
    fate=lambda name, _value: fate_of(name, "automodel"),
)

"""Megatron-LM's options of the training: batch, length, optimizer, schedule, precision, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parcompile.backends import reading
from parcompile.backends.artefacts import Loss, losses_of, option_names
from parcompile.backends.reading import (
    Arguments,
    Bundle,
    Draft,
    Entry,
    Row,
    Source,
    SpecPath,
    Undecided,
    UndecidedError,
    carried,
    leaving_open,
    refuse_optimizer,
    stored_bundle,
)
from parcompile.backends.statements import Facts
from parcompile.layout.shards import VECTORS
from parcompile.model.layer_parts import ATTENTION, MLP, NORMS, PARTS, parts_of
from parcompile.spec import RampupBatchSize, Spec
from parcompile.text.typed import WrongValueError, integer, number

_RAMP: SpecPath = ("training", "rampup_batch_size")
_PARTS_OF_RAMP = ("start", "increment", "samples")
_DYNAMIC = ("initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")


@leaving_open(_RAMP)
def _read_ramp(source: Source, draft: Draft) -> None:
    given = source.value("rampup_batch_size", _RAMP)
    if given is None:
        return
    unknown = [one for one in given if isinstance(one, Undecided)]
    if unknown:
        draft.leave_open(source, UndecidedError("rampup_batch_size", unknown[0]), _RAMP)
    elif len(given) != len(_PARTS_OF_RAMP):
        raise WrongValueError("--rampup-batch-size", given, "three numbers: start, increment and samples")
    else:
        values = (integer(value, "rampup_batch_size") for value in given)
        draft.fill(_RAMP, dict(zip(_PARTS_OF_RAMP, values, strict=True)))


def _ramp(source: Source) -> RampupBatchSize | None:
    """The ramp of the file, where it has one that a batch can follow."""
    given, full = source.given.get("rampup_batch_size"), source.given.get("global_batch_size")
    if not isinstance(given, list) or [type(one) for one in given] != [int] * len(_PARTS_OF_RAMP):
        return None
    found = RampupBatchSize(*given)
    return found if isinstance(full, int) and found.fits(full) else None


@leaving_open(reading.STEPS)
def _read_length(source: Source, draft: Draft) -> None:
    """The steps of the run, or the samples in steps."""
    draft.carry(source, "train_iters", reading.STEPS)
    samples, batch = source.value("train_samples", reading.STEPS), source.value("global_batch_size")
    if samples is None:
        return
    if batch is not None:
        integer(batch, "global_batch_size", least=1)
    if (ramp := _ramp(source)) is not None:
        full, samples = integer(batch, "global_batch_size"), integer(samples, "train_samples")
        if samples <= ramp.samples:
            why = f"a spec counts steps: {samples} samples end within the ramp, where Megatron-LM goes on a step"
            source.lose("train_samples", why)
            return
        steps = ramp.steps_until(samples, full)
        if (taken := ramp.samples_after(steps, full)) > samples:
            steps, taken = steps - 1, ramp.samples_after(steps - 1, full)
            source.remark(
                "train_samples", f"train_steps {steps}: Megatron-LM leaves out the last {samples - taken} samples"
            )
            source.used["train_samples"] = {reading.STEPS}
        draft.set(reading.STEPS, steps, said=True)
    elif source.has("rampup_batch_size") or source.has("step_batch_size_schedule"):
        source.lose("train_samples", "a spec counts steps, and the batch grows")
    elif not isinstance(batch, int) or samples % batch:
        source.lose("train_samples", f"a spec counts steps: {samples} / global batch {batch} is not whole")
    else:
        draft.set(reading.STEPS, samples // batch, said=True)


_DECAYS = ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style")
"""Of a weight decay that changes."""
_SCALES_OF_MUON = {"match_rms_adamw": ("spectral", 0.2), "original": ("shape_scaling", 1.0)}
"""--muon-scale-mode and --muon-extra-scale-factor (emerging_optimizers, `get_muon_scale_factor`)."""
_PRECISIONS_OF_MUON = {"bf16": "medium", "fp32": "high"}
_FUSED = "Megatron-LM's Muon takes gate and up of an MLP as one matrix, and routers as matrices"


def _read_optimizer(source: Source, draft: Draft) -> None:
    """The "adam" of Megatron-LM decays weights as AdamW does (core/optimizer/__init__.py)."""
    try:
        kind = source.value("optimizer", (*reading.OPTIMIZER, "type"))
        betas = [source.value(f"adam_beta{number}", (*reading.OPTIMIZER, "betas")) for number in (1, 2)]
    except UndecidedError as error:
        draft.leave_open(source, error, reading.OPTIMIZER)
        return
    own = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}.get(str(kind))
    if own is None:
        refuse_optimizer(source, draft, "optimizer", kind)
        return
    draft.set((*reading.OPTIMIZER, "type"), own, said=source.has("optimizer"))
    keys = {"lr": "lr"}
    if own == "sgd":
        keys["sgd_momentum"] = "momentum"
    else:
        draft.set((*reading.OPTIMIZER, "betas"), betas, said=source.has("adam_beta1") or source.has("adam_beta2"))
        keys["adam_eps"] = "eps"
    if own == "muon":
        keys["muon_momentum"] = "momentum"
        _read_muon(source, draft)
    draft.carry_decay(source, "weight_decay", VECTORS)
    _read_decays(source, draft)
    for name, key in keys.items():
        found = draft.carry(source, name, (*reading.OPTIMIZER, key), number)
        if name == "lr" and found is None:
            draft.ask((*reading.OPTIMIZER, "lr"), "the file does not say --lr")


@leaving_open(reading.DECAY)
def _read_decays(source: Source, draft: Draft) -> None:
    """A weight decay that goes from one value to another until the end of the run (core/optimizer_param_scheduler.py).

    The scheduler sets it, whatever the optimizer says; that of Megatron-Bridge's recipes stays.
    """
    start, end, style = (source.value(name, reading.DECAY) for name in _DECAYS)
    if start is None and end is None and style in (None, "constant"):
        return
    why = None
    if start is None or end is None:
        why = f"Megatron-LM refuses {style} without start_weight_decay and end_weight_decay"
    elif number(start, _DECAYS[0]) > number(end, _DECAYS[1]):
        why = f"Megatron-LM refuses a weight decay that falls: {start:g} > {end:g}"
    elif start != end and style in (None, "constant"):
        why = f"Megatron-LM refuses the style constant from {start:g} to {end:g}"
    elif start != end and (_ends_early(source) or steps(source, "train") is None):
        why = "weight decay of a spec rises until the end of train_steps, which this file does not say"
    if why is not None:
        source.lose(_DECAYS, why, changes=True)
        return
    draft.set(reading.DECAY, number(end, _DECAYS[1]), said=True)
    draft.leave_out_of_decay(VECTORS, said=True)
    source.ignore("weight_decay", "end_weight_decay takes its place")
    if start != end:
        draft.set((*reading.OPTIMIZER, "start_weight_decay"), number(start, _DECAYS[0]), said=True)
        draft.set((*reading.OPTIMIZER, "weight_decay_style"), style, said=True)


def _read_muon(source: Source, draft: Draft) -> None:
    """What is written otherwise, defaults included, the comparison with what a plan writes says."""
    source.lose("optimizer", _FUSED, changes=True)
    draft.carry(source, "muon_num_ns_steps", (*reading.OPTIMIZER, "ns_steps"))
    nesterov = any(
        source.value(name, (*reading.OPTIMIZER, "nesterov")) is True for name in ("muon_nesterov", "muon_use_nesterov")
    )
    draft.set((*reading.OPTIMIZER, "nesterov"), nesterov, said=True)
    scale = source.value("muon_scale_mode", (*reading.OPTIMIZER, "adjust_lr"))
    source.value("muon_extra_scale_factor", (*reading.OPTIMIZER, "adjust_lr"))
    modes = {mode: name for name, (mode, _) in _SCALES_OF_MUON.items()}
    draft.set((*reading.OPTIMIZER, "adjust_lr"), modes.get(str(scale), "match_rms_adamw"), said=True)
    types = {word: name for name, word in _PRECISIONS_OF_MUON.items()}
    precision = source.value("muon_fp32_matmul_prec", (*reading.OPTIMIZER, "ns_dtype"))
    draft.set((*reading.OPTIMIZER, "ns_dtype"), types.get(str(precision), "bf16"), said=True)


_STYLES, _FALLS = {"inverse_sqrt": "inverse-square-root", "wsd": "WSD"}, {"sqrt": "minus_sqrt"}
"""Megatron-LM's words for schedules and for falls, where they differ from a spec's."""


def _read_schedule(source: Source, draft: Draft) -> None:
    """A schedule that a spec can say; a rate that never changes is none."""
    try:
        found = _schedule(source)
    except UndecidedError as error:
        draft.leave_open(source, error, reading.SCHEDULE)
        source.note(SCHEDULE_OPTIONS, reading.SCHEDULE)
        return
    if isinstance(found, str):
        source.lose(SCHEDULE_OPTIONS, found, changes=True)
        return
    draft.fill(reading.SCHEDULE, found)


SCHEDULE_OPTIONS = (*option_names("megatron.schedule"), "lr_warmup_fraction")


def with_further(found: Arguments, further: Mapping[str, Any]) -> Arguments:
    """The arguments of a plan with verbatim ones, of which one of a schedule takes the place of the whole schedule."""
    if any(name in SCHEDULE_OPTIONS for name in further):
        found = {name: value for name, value in found.items() if name not in SCHEDULE_OPTIONS}
    return {**found, **further}


def _schedule(source: Source) -> dict[str, Any] | str:
    """The schedule in a spec's terms, empty without one; or why a spec cannot say it."""

    def value(name: str) -> Any:
        return source.value(name, reading.SCHEDULE)

    style, least, start = value("lr_decay_style"), value("min_lr"), value("lr_warmup_init")
    total, lr = steps(source, "train"), source.value("lr")
    end = steps(source, "decay")
    end = total if end is None else end
    fraction = value("lr_warmup_fraction")
    warmup: Any = steps(source, "warmup") if fraction is None else None if end is None else fraction * end
    kind = {theirs: ours for ours, theirs in _STYLES.items()}.get(style, style)
    if kind != "wsd":
        of_wsd = ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")
        source.ignore(of_wsd, "only --lr-decay-style WSD reads it")
    if style == "constant" and not warmup:
        source.ignore("min_lr", "the rate never changes")
        return {}
    if kind not in ("constant", "linear", "cosine", *_STYLES):
        return f"a spec has no schedule {style}: constant, linear, cosine, inverse_sqrt and wsd"
    if warmup is None or warmup % 1:
        return f"a spec's schedule has a whole number of warm-up steps, not {warmup or 0:g}"
    if style != "constant" and end is None:
        return "a spec's schedule ends with a step, and the file says neither --train-iters nor --lr-decay-iters"
    if kind == "inverse_sqrt" and end is not None and (total is None or end < total):
        return f"a spec's inverse_sqrt does not drop to --min-lr after {end} of {total} steps"
    if lr is not None and start > lr:
        return f"the warm-up falls: {start:g} > {lr:g}"
    # Of a rate that never falls, --min-lr has no effect.
    lowest = float(start if style == "constant" else least)
    found = {"type": kind, "warmup_steps": int(warmup), "min_lr": lowest}
    if start != lowest:
        found["warmup_start_lr"] = float(start)
    if kind in ("linear", "cosine", "wsd") and (end != total or _ends_early(source)) and not float(end or 0) % 1:
        found["total_steps"] = int(end or 0)
    if kind == "wsd":
        decay, shape = steps(source, "wsd"), value("lr_wsd_decay_style")
        if not decay:
            return "a spec's wsd has a whole number of steps in which the rate falls (--lr-wsd-decay-iters)"
        shapes = {theirs: ours for ours, theirs in _FALLS.items()}
        found |= {"decay_steps": decay, "decay_type": shapes.get(shape, shape)}
    return found


def _ends_early(source: Source) -> bool:
    """Whether samples are left out behind the last step of a ramp, of which a schedule knows nothing."""
    ramp, samples, full = _ramp(source), source.value("train_samples"), source.value("global_batch_size")
    return ramp is not None and isinstance(samples, int) and ramp.steps_of(samples, full) is None


def steps(source: Source, what: str) -> float | None:
    """The steps of a run, its decay or its warm-up, given as such or in samples; None when they are not given.

    Where the batch grows they are global batches, of which the run may end with a part.

    Raises:
        UndecidedError: the file does not say the value.
    """
    names = {"train": "train", "decay": "lr_decay", "warmup": "lr_warmup", "wsd": "lr_wsd_decay"}
    iters = source.value(f"{names[what]}_iters", reading.SCHEDULE) if what != "train" else source.value("train_iters")
    if iters:
        return int(iters)
    samples = (
        source.value(f"{names[what]}_samples", reading.SCHEDULE) if what != "train" else source.value("train_samples")
    )
    batch = source.value("global_batch_size")
    if samples and isinstance(batch, int) and batch > 0:
        if samples % batch == 0:
            return int(samples) // batch
        if what == "train" and source.has("rampup_batch_size"):
            return float(samples / batch)
    return 0 if what == "warmup" and not samples else None


def _read_precision(source: Source, draft: Draft) -> None:
    try:
        on = [name for name in ("fp16", "bf16") if source.value(name, reading.PRECISION) is True]
        summed = source.value("accumulate_allreduce_grads_in_fp32", reading.SUMS) is True
        reduced = source.value("grad_reduce_in_bf16", reading.SUMS) is True
    except UndecidedError as error:
        draft.leave_open(source, error, reading.PRECISION)
        return
    precision = on[0] if on else "fp32"
    draft.set(reading.PRECISION, precision, said=bool(on))
    # Gradients of bf16 weights are summed in fp32 unless --grad-reduce-in-bf16 is given (validate_args).
    sums = "fp32" if precision == "fp32" or summed or (precision == "bf16" and not reduced) else precision
    draft.set(reading.SUMS, sums, said=True)
    if precision == "fp16":
        draft.carry(source, "loss_scale", ("training", "loss_scale"), number)
        for name in _DYNAMIC:
            source.value(name, ("training", "loss_scale"))
    else:
        source.ignore(("loss_scale", *_DYNAMIC), "fp16 is off")


def _write_recomputation(spec: Spec) -> Arguments:
    kind = spec.training.activation_checkpointing
    if kind == "none" or not isinstance(kind, str):
        return {}
    if parts := parts_of(kind):
        modules = [*(["core_attn"] if ATTENTION in parts else []), *(["layernorm"] if NORMS in parts else [])]
        if MLP in parts:
            shape = spec.model.shape
            modules += _mlps(shape.moe is not None, dense=shape.dense(range(shape.num_hidden_layers)) > 0)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    found: Arguments = {"recompute_granularity": kind}
    return found | ({"recompute_method": "uniform", "recompute_num_layers": 1} if kind == "full" else {})


def _mlps(experts: bool, *, dense: bool) -> list[str]:
    """What `--recompute-modules` calls MLPs: those with experts, and dense ones."""
    return [*(["mlp"] if dense else []), *(["moe"] if experts else [])]


_PARTS_OF_MODULES = {"core_attn": (), "layernorm": (NORMS,), "mlp": (MLP,), "moe": (MLP,)}
"""Fused attention, as the runtime's, stores nothing that core_attn would compute again."""


def _read_modules(source: Source, modules: Sequence[str]) -> str:
    """The word for `--recompute-modules`, of which what a plan has no word for is lost."""
    experts = source.given.get("num_experts") is not None
    mixed = experts and source.given.get("moe_layer_freq") not in (None, 1, "1")
    parts = {part for one in modules for part in _PARTS_OF_MODULES.get(one, ())}
    unknown = [one for one in modules if one not in _PARTS_OF_MODULES]
    if not {*_mlps(experts, dense=mixed or not experts)} <= {*modules}:
        parts.discard(MLP)
        unknown += [one for one in modules if one in ("mlp", "moe") and (experts or one == "mlp")]
    if unknown:
        why = f"a plan does not recompute {', '.join(unknown)} alone: memory differs, numbers do not"
        source.lose("recompute_modules", why)
    return "+".join(part for part in PARTS if part in parts) or "selective"


@leaving_open(reading.RECOMPUTE)
def _read_recomputation(source: Source, draft: Draft) -> None:
    """How much is recomputed changes memory and time, no numbers."""
    kind = source.value("recompute_granularity", reading.RECOMPUTE)
    if source.value("recompute_activations", reading.RECOMPUTE) is True:
        kind = "selective"
    how = ("recompute_method", "recompute_num_layers")
    values = [source.value(name, reading.RECOMPUTE) for name in how]
    modules = source.value("recompute_modules", reading.RECOMPUTE)
    if kind != "selective":
        source.ignore("recompute_modules", "only --recompute-granularity selective reads it")
    elif modules == ["core_attn"]:
        source.ignore("recompute_modules", "it is what --recompute-granularity selective recomputes by itself")
    elif modules:
        kind = _read_modules(source, modules)
    draft.set(reading.RECOMPUTE, kind or "none", said=kind is not None)
    if kind != "full":
        source.ignore(how, "only --recompute-granularity full reads it")
    elif values != ["uniform", 1]:
        source.lose(how, "a plan recomputes every layer on its own: memory differs, numbers do not")


def _recomputation_losses(spec: Spec) -> Iterator[Loss]:
    kind = spec.training.activation_checkpointing
    recomputes = isinstance(kind, str) and ATTENTION in parts_of(kind)
    return losses_of("megatron.recomputation", spec, {"recomputes_attention": lambda _spec: recomputes})


def _samples(spec: Spec) -> int | None:
    """The samples of the run: validate_args refuses --train-iters beside a ramp."""
    steps = spec.training.train_steps
    return None if steps is None else spec.training.samples_after(steps)


def _style(spec: Spec) -> str:
    kind = "constant" if spec.training.lr_scheduler is None else spec.training.lr_scheduler.type
    return _STYLES.get(kind, kind)


def _fall(spec: Spec) -> str | None:
    kind = None if spec.training.lr_scheduler is None else spec.training.lr_scheduler.decay_type
    return None if kind is None else _FALLS.get(kind, kind)


_FACTS: Facts = {
    "samples_or_iters": lambda spec: "train-iters" if spec.training.rampup_batch_size is None else "train-samples",
    "samples_of_run": _samples,
    "scales_of_muon": lambda _spec: _SCALES_OF_MUON,
    "precisions_of_muon": lambda _spec: _PRECISIONS_OF_MUON,
    "style": _style,
    "fall": _fall,
}

ROWS: tuple[Row, ...] = (
    *carried("megatron.batch"),
    stored_bundle("megatron.ramp", _read_ramp),
    stored_bundle("megatron.length", _read_length, facts=_FACTS),
    stored_bundle("megatron.optimizer", _read_optimizer, facts=_FACTS),
    stored_bundle("megatron.schedule", _read_schedule, "lr_warmup_fraction", facts=_FACTS),
    Entry("clip_grad", ("training", "gradient_clipping"), read=number),
    Entry("seed", ("training", "seed")),
    stored_bundle("megatron.precision", _read_precision),
    Bundle(
        (
            *("recompute_granularity", "recompute_activations", "recompute_method", "recompute_num_layers"),
            "recompute_modules",
        ),
        _read_recomputation,
        _write_recomputation,
        _recomputation_losses,
    ),
)
"""The training, in the order in which it is written."""

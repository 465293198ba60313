"""The model can be read, its positions reach as far as the sequence, and its schedule and module fit."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity, closest
from parcompile.layout.groups import divisors
from parcompile.model.family import by_type
from parcompile.model.hf_config import InjectionError, ModelConfigError
from parcompile.model.key_types import misspelt, turned_width
from parcompile.model.presets import near_presets, presets
from parcompile.spec import LrScheduler
from parcompile.spec.resolve import Resolution, Unavailable

from . import Finding, also, listed, model_path, removable, rule, settable

# The model can be read, and its positions reach as far as the sequence.

_LENGTH = ("training", "sequence_length")

_SHARED = (
    "model_type hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size max_position_embeddings "
    "tie_word_embeddings initializer_range num_labels"
)
_FILE = '"model": {"hf_config": "config.json"}'
_KEYS = by_type("keys")
"""What the configuration class of each family reads beside the keys that all read."""


@rule("S003")
def model_can_be_read(spec: Resolution) -> Iterator[Finding]:
    try:
        spec.described_shape  # noqa: B018 -- it says what is wrong
    except InjectionError:
        return  # rule S008 says what is wrong
    except ModelConfigError as error:
        path = model_path(spec, str(error.key))
        given = spec.get("model")
        hint: str | None = error.instead or None
        fixes: tuple[Fix, ...] = ()
        if "preset" in given:
            near = near_presets(given["preset"])
            known = near[0] if len(near) == 1 else None if near else closest(given["preset"], list(presets()))
            hint = f"did you mean {known}?" if known else f"known presets: {', '.join(near or presets())}"
            if "/" in given["preset"] or known is None:
                hint += f"; any other model: download its config.json and write {_FILE}"
            if known:
                fixes = (Fix(f"use {known}", Safety.CHANGES_NUMERICS, (Edit(("model", "preset"), known),)),)
        elif hint is None and error.key == "num_attention_heads":
            hint = "write head_dim, or other heads"
        elif hint is None and "is missing" in str(error):
            hint = f"add {error.key}" + (f" to {given['hf_config']}" if "hf_config" in given else "")
        elif hint is None and error.key not in (None, "hf_config") and "hf_config" in given:
            hint = f"change {error.key} in {given['hf_config']}"
        elif hint is None and error.key not in given and "hf_config" not in given:
            hint = f"add {error.key}"
        yield Finding(str(error), path, help=hint, fixes=fixes)


@rule("S004", severity=Severity.WARNING)
def rotary_positions_reach(spec: Resolution) -> Iterator[Finding]:
    length, limit = spec.sequence_length, spec.shape.max_position_embeddings
    if spec.shape.attends and spec.shape.positions.rotary and not spec.shape.positions.alibi and length > limit:
        # transformers 5 keeps both in rope_parameters.
        rope = spec.model_config.get("rope_parameters") or spec.model_config
        base = rope.get("rope_theta", "of the family")
        scaling = rope.get("rope_scaling") or rope
        kind = scaling.get("rope_type") or scaling.get("type") or "none"
        yield Finding(
            f"sequence_length {length} > max_position_embeddings {limit} (rope_theta {base}, rope_scaling {kind})",
            _LENGTH,
            help="for long-context training use a config with a larger rope_theta and max_position_embeddings",
        )


@rule("S009")
def heads_fit_together(spec: Resolution) -> Iterator[Finding]:
    shape = spec.shape
    heads = shape.num_attention_heads
    for kv_heads in shape.kv_head_counts if shape.attention.projections is None else ():
        if heads % kv_heads == 0:
            continue
        fitting = divisors(heads)
        near = min(fitting, key=lambda one: abs(one - kv_heads))
        path = model_path(spec, "num_key_value_heads")
        message = f"num_attention_heads {heads} / num_key_value_heads {kv_heads} is not whole"
        hint, values = f"num_key_value_heads can be {listed(fitting)}", [near] * (path[-1] == "num_key_value_heads")
        yield settable(path, values, message, hint, (), Safety.CHANGES_NUMERICS)
    turned = turned_width(spec.model_config, None if shape.attention.projections else shape.head_dim)
    if turned is not None and turned[1] % 2:
        key, width = turned
        path = model_path(spec, key, "num_attention_heads")
        yield Finding(f"{key} {width} is odd: rotary positions turn pairs", path, help="write an even width")


@rule("S005", severity=Severity.WARNING)
def dimensions_have_an_effect(spec: Resolution) -> Iterator[Finding]:
    given = spec.get("model")
    if "hf_config" in given:
        try:
            config = spec.model_config
        except ModelConfigError:
            return  # rule S003 says what is wrong
        for key, meant in sorted(misspelt(str(config.get("model_type")), config)):
            yield Finding(
                f"{key} has no effect: transformers' {config['model_type']} does not read it",
                ("model", "hf_config"),
                help=f"did you mean {meant}?",
            )
        if "quantization_config" in {*config, *(spec.whole_config or ())}:
            yield Finding(
                "quantization_config has no effect: weights are trained, or frozen under LoRA, in the plan's precision",
                ("model", "hf_config"),
                help="remove it; load quantized weights once with transformers' dequantize=True, and save them",
            )
        return
    family = spec.get("model", "model_type") if "model_type" in given else None
    if family is None or family not in _KEYS:
        return
    for key in given:
        if spec.given("model", key) and key not in f"{_SHARED} {_KEYS[family]}".split():
            message = f"{key} has no effect: a {family} model does not read it"
            yield removable(("model", key), message, "remove it, or choose the model_type that has it")


# A user module: its rules fit its parameters, and tp divides what they cut.


@rule("S008")
def rules_fit_the_module(spec: Resolution) -> Iterator[Finding]:
    try:
        spec.described_shape  # noqa: B018 -- it says what is wrong
    except InjectionError as error:
        for problem in error.problems:
            path, meant = ("model", *problem.path), problem.rename_to
            fixes: tuple[Fix, ...] = ()
            if meant is not None and meant not in spec.get("model", "injection"):
                fixes = (Fix(f"rename {path[-1]} to {meant}", Safety.CHANGES_COST, (Edit(path, rename_to=meant),)),)
            yield Finding(problem.message, path, help=problem.help, fixes=fixes)
    except ValueError:
        raise Unavailable("model") from None


# The learning-rate schedule.

_SCHEDULE = ("training", "lr_scheduler")
_WARMUP, _TYPE, _DECAY, _SHAPE, _TOTAL = (
    (*_SCHEDULE, name) for name in ("warmup_steps", "type", "decay_steps", "decay_type", "total_steps")
)
_WARMUPS = (_WARMUP, *((*_SCHEDULE, f"warmup_{unit}") for unit in ("ratio", "samples", "tokens")))
_STEPS = ("training", "train_steps")
_LEAST_WARMUP = 2


@rule("S006")
def schedule_ends_with_training(spec: Resolution) -> Iterator[Finding]:
    warmup = next((path for path in _WARMUPS if spec.given(*path)), _WARMUP)
    if warmup[-1] == "warmup_ratio" and spec.steps_of_schedule is None:
        yield Finding(
            "warmup_ratio is a share of all steps, but train_steps is not given",
            warmup,
            help="add train_steps under training, or total_steps or warmup_steps under lr_scheduler",
        )
        return
    schedule = spec.lr_scheduler
    if schedule is None:
        return
    steps, end = schedule.end(spec.get(*_STEPS)), _STEPS if schedule.total_steps is None else _TOTAL
    ramp, full, said = spec.rampup_batch_size, spec.global_batch_size, f"{end[-1]} {steps}"
    if ramp is not None and ramp.fits(full) and steps is not None and end is _STEPS:
        steps = ramp.samples_after(steps, full) // full  # as the schedule counts them
        said = f"the {steps} global batches of {said}"
    yield from _decay(spec, schedule, steps, end, said)
    constant = Fix("set type to constant", Safety.CHANGES_NUMERICS, (Edit(_TYPE, "constant"),))
    if steps is None and schedule.type not in ("constant", "inverse_sqrt"):
        yield Finding(
            f"lr_scheduler {schedule.type} falls until the last training step, but train_steps is not given",
            _TYPE,
            help="add train_steps under training, or total_steps under lr_scheduler",
            fixes=(constant,),
        )
    elif steps is not None and schedule.warmup_steps >= steps:
        shorter = max(_LEAST_WARMUP, steps // 10)
        given = "" if warmup == _WARMUP else f"{warmup[-1]} {spec.get(*warmup)}: "
        removal = Fix.removing(_SCHEDULE, Safety.CHANGES_NUMERICS)
        change = Fix.setting(_WARMUP, shorter, Safety.CHANGES_NUMERICS)
        yield Finding(
            f"{given}warmup_steps {schedule.warmup_steps} ≥ {said}: the warm-up does not end",
            warmup,
            help=f"use less than {steps} steps",
            fixes=(change, removal) if shorter < steps and warmup == _WARMUP else (removal,),
            related=also(spec, end),
        )


def _decay(
    spec: Resolution, schedule: LrScheduler, steps: int | None, end: tuple[str, ...], said: str
) -> Iterator[Finding]:
    falls = schedule.type not in ("constant", "inverse_sqrt")
    unread = [(path, "wsd's", "wsd") for path in (_DECAY, _SHAPE) if schedule.type != "wsd"]
    unread += [] if falls else [(_TOTAL, "that of linear, cosine and wsd", "one of them")]
    for path, owner, instead in unread:
        if spec.given(*path):
            message = f"{path[-1]} has no effect on the schedule {schedule.type}: it is {owner}"
            yield removable(path, message, f"remove it, or set type to {instead}")
    if schedule.type != "wsd":
        return
    if schedule.decay_steps is None:
        yield Finding(
            "wsd falls in the last decay_steps training steps, but decay_steps is not given",
            _TYPE,
            help="add decay_steps under lr_scheduler: usually 10 to 20 % of train_steps",
        )
    elif steps is not None and schedule.warmup_steps < steps < schedule.warmup_steps + schedule.decay_steps:
        most = steps - schedule.warmup_steps
        message = f"warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps} > {said}"
        hint = f"use a decay_steps of {most} or less"
        yield settable(_DECAY, [most], message, hint, also(spec, end), Safety.CHANGES_NUMERICS)

"""torchtitan: the configuration that a plan is written as, and specs out of its Python functions and its earlier TOML.

torchtitan 0.3 takes its configuration from a Python function that `--module` and `--config` name. The written module
has two: `apply` changes any configuration into the plan's layout, batch, optimizer and schedule; `plan` does so with
torchtitan's own configuration of the model, where it has that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parcompile.plan import Plan
from parcompile.spec import Spec
from parcompile.text.python import Made
from parcompile.text.typed import WrongValueError, integer, number, word
from parcompile.user_files import shipped

from . import reading
from .artefacts import Loss, end_of_schedule, from_template, losses_of
from .reading import (
    Arguments,
    Draft,
    Entry,
    Importer,
    Row,
    Source,
    SpecPath,
    Undecided,
    UndecidedError,
    fate_of,
    leaving_open,
    refuse_optimizer,
    stored_bundle,
)
from .recipes import built, flattened
from .statements import Facts

VERSION = "0.3.0"
"""Version of torchtitan whose configuration classes were read and ran with what is written here."""

_STORED = shipped("parcompile.backends", "torchtitan.json")
FLAVORS: Mapping[str, str] = _STORED["flavors"]
"""Presets that torchtitan has a configuration for, as MODEL.FUNCTION, of that model's `config_registry`: those whose
parameters are as many there as here."""


def files(plan: Plan) -> dict[str, str]:
    """torchtitan_config.py."""
    spec = plan.spec
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options(spec).items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    rows = "\n".join(f"        {name}={value!r}," for name, value in sections.pop("parallelism").items())
    settings = "\n".join(f"    config.{name} = {value}" for name, value in _settings(sections))
    about = f"Written for torchtitan {VERSION}; apply() is the plan, plan() the plan with torchtitan's own model."
    text = from_template("torchtitan.py", plan, about, VERSION=VERSION, PARALLELISM=rows, SETTINGS=settings)
    flavor = FLAVORS.get(spec.model.source)
    if flavor is not None:
        module, function = flavor.split(".")
        text += from_template("torchtitan_model.py", plan, PRESET=spec.model.source, MODULE=module, FUNCTION=function)
    return {"torchtitan_config.py": text}


_CALLS = {"optimizer": "default_adamw", "lr_scheduler": "LRSchedulersContainer.Config"}
_RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Further attributes of the configuration, each as Python source."""
    for section, values in sections.items():
        if section in _CALLS:
            yield section, f"{_CALLS[section]}({', '.join(f'{name}={value!r}' for name, value in values.items())})"
        elif section:
            for key, value in values.items():
                yield f"{section}.{key}", 'float("inf")' if value == math.inf else repr(value)
        else:
            # One for all stages: `losses` refuses others.
            yield from ((key, _RECOMPUTE.get(value, "SelectiveAC.Config()")) for key, value in values.items())


# What torchtitan's options are in a spec: the table that `files` writes and `IMPORTER` reads.

_DEGREE = "parallelism.data_parallel_shard_degree"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_REPLICAS = "parallelism.data_parallel_replicate_degree"


@leaving_open(reading.STAGE)
def _read_sharding(source: Source, draft: Draft) -> None:
    """FSDP is ZeRO stage 3, or 2 where weights stay gathered after the forward; DDP, which shards nothing, is 0."""
    replicas, degree = source.integer(_REPLICAS, reading.DP), source.value(_DEGREE, reading.DP)
    reshard, cp, pp = source.value(_RESHARD, reading.STAGE), source.value(_AXES["cp"]), source.value(_AXES["pp"])
    degree = -1 if degree is None else integer(degree, _DEGREE, least=-1)
    if degree > 0:
        draft.set(reading.DP, degree * (replicas or 1), said=source.has(_DEGREE) or source.has(_REPLICAS))
    elif source.has(_DEGREE):
        source.ignore(_DEGREE, "all ranks that are left: dp auto")
    if replicas and replicas > 1 and degree != 1:
        source.lose(_REPLICAS, "a spec shards over all of dp: less memory, the same numbers")
    if not source.has(_RESHARD) and degree == 1 and cp == 1:
        stage = 0
    else:
        stage = 2 if reshard == "never" or (reshard == "default" and pp != 1) else 3
    draft.set(reading.STAGE, stage, said=True)


_AXES = {
    axis: f"parallelism.{name}_parallel_degree"
    for axis, name in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert"))
}
_SP = "parallelism.enable_sequence_parallel"


def _read_sequence(source: Source, draft: Draft) -> None:
    if draft.values.get(("parallelism", "tp"), 1) == 1:
        source.ignore(_SP, "one rank holds all heads")
    else:
        draft.carry(source, _SP, ("parallelism", "sequence_parallel"))


_BALANCER = "parallelism.context_parallel_load_balancer"


def _read_context(source: Source, draft: Draft) -> None:
    """Torch gathers all keys, and deals a sequence out in zigzag unless it is told not to."""
    if draft.values.get(("parallelism", "cp"), 1) == 1:
        source.ignore(_BALANCER, "one rank holds the whole sequence")
        return
    draft.set(("parallelism", "cp_implementation"), "all_gather", said=True)
    kind = source.value(_BALANCER, ("parallelism", "cp_layout"))
    draft.set(("parallelism", "cp_layout"), "contiguous" if kind is None else "zigzag", said=True)


_SCHEDULES = {"1F1B": 1, "Interleaved1F1B": 2}
_SCHEDULE_OF_STAGES, _MICRO = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_microbatch_size"
_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"


@leaving_open(("training", "micro_batch_size"))
def _read_batch(source: Source, draft: Draft) -> None:
    stages = draft.values.get(("parallelism", "pp"), 1)
    path = ("training", "micro_batch_size")
    schedule = source.value(_SCHEDULE_OF_STAGES, ("parallelism", _VIRTUAL)) if stages != 1 else None
    local, total = source.integer(_LOCAL, path, least=1), source.integer(_GLOBAL, _BATCH, least=-1)
    micro = draft.carry(source, _MICRO if stages != 1 else _LOCAL, path, integer)
    if stages == 1:
        source.ignore((_MICRO, _SCHEDULE_OF_STAGES), "there is one stage")
    elif schedule in _SCHEDULES:
        draft.set(("parallelism", _VIRTUAL), _SCHEDULES[schedule], said=schedule != "1F1B")
    else:
        source.lose(_SCHEDULE_OF_STAGES, "a spec has 1F1B, also interleaved: the same numbers in another order")
    if total is not None and total > 0:
        draft.set(_BATCH, total, said=True)
    elif local and micro:
        source.ignore(_GLOBAL, "one batch of each rank")
        draft.set(("training", "gradient_accumulation_steps"), local // micro, said=True)


_VIRTUAL = "num_virtual_stages_per_pipeline_rank"
_BATCH: SpecPath = ("training", "global_batch_size")
_DTYPE, _WORK = "training.dtype", "training.mixed_precision_param"


def _read_precision(source: Source, draft: Draft) -> None:
    draft.carry(
        source, _WORK, reading.PRECISION, lambda value, _name: {"float32": "fp32", "bfloat16": "bf16"}.get(value, value)
    )
    if not isinstance(source.given.get(_DTYPE), Undecided) and source.value(_DTYPE, reading.PRECISION) == "bfloat16":
        source.lose(_DTYPE, "weights and optimizer states of a spec are fp32, not bf16", changes=True)
        draft.set(reading.PRECISION, "bf16", said=True)
    draft.set(reading.SUMS, "fp32", said=True)


def _read_optimizer(source: Source, draft: Draft) -> None:
    kind = source.given.get("optimizer.name", "AdamW")
    if kind in ("Adam", "AdamW"):
        draft.set((*reading.OPTIMIZER, "type"), kind.lower(), said=kind == "Adam")
    else:
        refuse_optimizer(source, draft, "optimizer.name", kind, whole=False)
    source.used["optimizer.name"] = {(*reading.OPTIMIZER, "type")}
    reading.read(reading.carried("optimizer"), source, draft)


_RATE_OPTIONS = tuple(
    f"lr_scheduler.{name}" for name in ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor", "total_steps")
)


_FALLS_ON = "torchtitan's rate falls on below its lowest after total_steps"


@leaving_open(reading.SCHEDULE)
def _read_schedule(source: Source, draft: Draft) -> None:
    """A rise, a level and a fall (components/optimizer/lr_scheduler.py): linear and cosine fall at once, wsd last."""
    warmup, ratio = (source.value(name, reading.SCHEDULE) for name in _RATE_OPTIONS[:2])
    kind, floor, total = (source.value(name, reading.SCHEDULE) if ratio != 0 else 0 for name in _RATE_OPTIONS[2:])
    lr = source.number("optimizer.lr")
    try:
        steps = source.integer("training.steps")
    except UndecidedError:
        steps = None
    warmup, floor = integer(warmup, _RATE_OPTIONS[0], least=0), number(floor, _RATE_OPTIONS[3])
    decay = None if ratio is None else number(ratio, _RATE_OPTIONS[1])
    if decay == 0:
        if warmup:
            draft.set(reading.SCHEDULE, {"type": "constant", "warmup_steps": warmup}, said=True)
        source.ignore(_RATE_OPTIONS[2:], "the rate never falls")
        return
    found: dict[str, Any] = {"type": kind, "warmup_steps": warmup, "min_lr": float(f"{floor * (lr or 0):.12g}")}
    if total is not None:
        total = integer(total, _RATE_OPTIONS[4], least=1)
        if steps is not None and total < steps:
            source.lose(_RATE_OPTIONS[4], f"{_FALLS_ON}; a spec's stays there", changes=True)
        found["total_steps"] = steps = total
    if steps is None:
        draft.ask(reading.STEPS, "the schedule ends with the last step")
        steps = draft.answers.get(reading.STEPS)
    if decay is not None or kind == "sqrt":
        if not isinstance(steps, int):
            draft.ask((*reading.SCHEDULE, "decay_steps"), "it is a share of all steps")
            return
        fall = steps - warmup if decay is None else min(round(steps * decay), steps - warmup)
        found |= {"type": "wsd", "decay_steps": fall, "decay_type": kind}
    draft.fill(reading.SCHEDULE, found)


def _limit(value: Any, name: str) -> float:
    return 0.0 if str(value) in ("inf", "float('inf')") else number(value, name)


def _recompute(value: Any, name: str) -> str:
    if word(value, name) not in _RECOMPUTE:
        raise WrongValueError(name, value, "none, selective or full")
    return str(value)


def _optional(option: str, path: SpecPath) -> Callable[[Source, Draft], None]:
    """Reads a value that a spec may leave out: what a function sets that is not found is not asked for."""

    def read_one(source: Source, draft: Draft) -> None:
        if not isinstance(source.given.get(option), Undecided):
            draft.carry(source, option, path, integer)

    return read_one


def _falls(spec: Spec) -> bool:
    schedule = spec.training.lr_scheduler
    return schedule is not None and schedule.type not in ("constant", "inverse_sqrt")


def _shape_of_fall(spec: Spec) -> str | None:
    schedule = spec.training.lr_scheduler
    shape = None if schedule is None else schedule.decay_type or schedule.type
    return "linear" if shape == "exponential" else shape


_FACTS: Facts = {"falls": _falls, "end_of_schedule": end_of_schedule, "shape_of_fall": _shape_of_fall}

ROWS: tuple[Row, ...] = (
    *(Entry(name, ("parallelism", axis), read=integer) for axis, name in _AXES.items()),
    stored_bundle("torchtitan.sharding", _read_sharding),
    stored_bundle("torchtitan.sequence", _read_sequence),
    stored_bundle("torchtitan.context", _read_context),
    # A pipeline cuts the batch of a rank into its micro-batches; without one torchtitan accumulates gradients.
    stored_bundle("torchtitan.batch", _read_batch),
    Entry("training.seq_len", ("training", "sequence_length"), read=integer),
    Entry("training.max_norm", ("training", "gradient_clipping"), lambda value: value or math.inf, _limit),
    # Weights, sums and optimizer states are fp32 here as in the plan; the precision is that of a layer's work.
    stored_bundle("torchtitan.precision", _read_precision),
    stored_bundle("torchtitan.optimizer", _read_optimizer),
    stored_bundle("torchtitan.steps", _optional("training.steps", reading.STEPS)),
    stored_bundle("torchtitan.schedule", _read_schedule, facts=_FACTS),
    Entry("activation_checkpoint", reading.RECOMPUTE, read=_recompute),
    stored_bundle("torchtitan.seed", _optional("debug.seed", ("training", "seed"))),
)
DEFAULTS: Mapping[str, Any] = _STORED["defaults"]
"""torchtitan's own values of the options that the table speaks of, of its classes and of its earlier TOML."""


def options(spec: Spec) -> Arguments:
    """Every option that a plan decides."""
    return reading.write(ROWS, spec)


_RENAMED: Mapping[str, str] = _STORED["renamed"]
"""Options of its TOML that have another name in its classes."""
_MODEL_OPTION = "model"


def _given(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file by their names in torchtitan's classes, with `model` for the model and its flavor."""
    found = {_RENAMED.get(name, name): value for name, value in flattened(tree, DEFAULTS).items()}
    made, root = found.pop("model_spec", None), built(tree)
    found.pop("optimizer", None)  # what default_adamw is given stands below it
    if isinstance(made, Made) and made.said:
        found[_MODEL_OPTION] = f"{made.name.split('.')[-2]} {made.said}"
    elif root is not None and root.is_left and root.name.count(".") >= 2:
        found[_MODEL_OPTION] = f"{root.name.split('.')[-3]} {root.name.rpartition('.')[2]}"
    elif "model.name" in found:
        found[_MODEL_OPTION] = f"{found.pop('model.name')} {found.pop('model.flavor', 'debugmodel')}"
    kind = found.get("activation_checkpoint", "")
    if root is not None:  # with what it is given it is among the file's values by its attributes alone
        kind = root.fields.get("activation_checkpoint", kind)
    if isinstance(kind, Made):
        name = kind.name.rpartition(".Config")[0].rpartition(".")[2]
        found["activation_checkpoint"] = {"SelectiveAC": "selective", "FullAC": "full"}.get(name, name)
    elif kind is None:
        found["activation_checkpoint"] = "none"
    betas = [found.pop(f"optimizer.beta{number}", None) for number in (1, 2)]
    if any(one is not None for one in betas):
        found["optimizer.betas"] = [own if one is None else one for one, own in zip(betas, (0.9, 0.95), strict=True)]
    return {
        name: f"{value.name}()" if isinstance(value, Made) else value
        for name, value in found.items()
        if value is not None or name in DEFAULTS
    }


def _read(source: Source, draft: Draft) -> None:
    """Everything of a configuration that a spec can say."""
    name = source.given.get(_MODEL_OPTION)
    if isinstance(name, str):
        module, _, flavor = name.partition(" ")
        own = flavor.lower().replace(".", "_").replace("-", "_")
        places = (f"{module}.{own}", f"{module}.{module}_{own}")
        preset = next((one for one, place in FLAVORS.items() if place in places), None)
        source.used[_MODEL_OPTION] = {("model",)}
        if preset is not None and ("model",) not in draft.answers:
            draft.set(("model", "preset"), preset, said=True)
        else:
            draft.ask(("model",), f"{flavor} of torchtitan's {module} is no preset")
    reading.read(ROWS, source, draft)
    if not source.given.get("model.converters"):
        source.ignore("model.converters", "it names none")
        for section in ("float8", "mx", "quantize"):
            source.ignore(source.under(section), "model.converters does not name it")


def _meaning(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a file means where one option hangs on others."""
    found = dict(given)
    if found.get(_RESHARD, "default") == "default":
        found[_RESHARD] = "never" if found.get(_AXES["pp"], 1) != 1 else "always"
    if found.get(_AXES["tp"], 1) == 1:
        found[_SP] = False
    return found


IMPORTER = Importer(
    tool="torchtitan",
    options=_given,
    defaults=lambda: DEFAULTS,
    read=_read,
    written=lambda plan: options(plan.spec),
    fate=lambda name, _value: fate_of(name, "torchtitan"),
    meaning=_meaning,
    changes=lambda name: name.startswith(("optimizer.", "lr_scheduler.", "training.")) and name != _LOCAL,
)


def losses(plan: Plan) -> Iterator[Loss]:
    """What torchtitan does not do as the plan says."""
    embedding = plan.tensors()[next(iter(plan.tensors()))][1]
    facts: dict[str, Callable[[Spec], bool]] = {
        "has_unlike_stages": lambda spec: len({len(stage.layers) for stage in spec.stages}) > 1,
        "is_padded": lambda spec: spec.model.shape.vocab_size != embedding.full_shape[0],
        "is_known": lambda spec: spec.model.source in FLAVORS,
    }
    return losses_of("torchtitan", plan.spec, facts)

"""A DeepSpeed configuration on its own: what DeepSpeed accepts without a word and does not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity

from .arithmetic import listed, nearest_multiples
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding
from .z_zero import first_effective_stage

_ZERO = "zero_optimization"
_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_BATCH: Mapping[str, Any] = {_MICRO: 1, "gradient_clipping": 1.0}
_TESTED = frozenset({"adam", "adamw", "lamb", "lion", "adagrad", "muon", "onebitadam", "onebitlamb", "zerooneadam"})
_COMPRESSED = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


def autos(tree: object, path: Path = ()) -> Iterator[Path]:
    """The paths of all values that are "auto"."""
    if tree == "auto":
        yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from autos(value, (*path, key))


def _filled(path: Path) -> bool:
    """Whether the Transformers integration replaces "auto" at a path."""
    from parcompile.schema import load

    node: Any = load("ds_config")
    for step in path:
        node = node.get("properties", {}).get(step) if isinstance(node, dict) else None
    return isinstance(node, dict) and bool(node.get("x-filled-by-transformers"))


@file_rule(
    "F001",
    DEEPSPEED,
    '"auto" that nobody replaces',
    """DeepSpeed has no "auto". Transformers replaces it in some keys before DeepSpeed starts; in all others it arrives
    as it stands, and is mostly taken for something else: "stage": "auto" runs at stage 0.""",
    wrong={**_BATCH, _ZERO: {"stage": "auto"}},
    right={**_BATCH, _ZERO: {"stage": 1}},
    sources=("DeepSpeed#1270; accelerate#3152; trl#2154",),
)
def auto_is_not_a_value(settings: Settings) -> Iterator[Finding]:
    """Fires for each "auto" in a key that Transformers does not fill."""
    for path in autos(settings.tree):
        if not _filled(path):
            stage = path[-1] == "stage"
            name = ".".join(map(str, path))
            yield Finding(
                f'nobody replaces "auto" in {name}' + (": it runs at stage 0" if stage else ""),
                path,
                help="write 1, 2 or 3" if stage else "write a value",
            )


@file_rule(
    "F002",
    DEEPSPEED,
    '"auto" that only Transformers replaces',
    """With the Trainer of Transformers, or accelerate, "auto" becomes the value of the trainer's own argument. With
    deepspeed.initialize alone it arrives as it stands.""",
    wrong={_MICRO: "auto", "gradient_clipping": 1.0},
    right={_MICRO: 1, "gradient_clipping": 1.0},
    severity=Severity.WARNING,
    sources=("transformers integrations/deepspeed.py",),
)
def auto_needs_transformers(settings: Settings) -> Iterator[Finding]:
    """Fires for each "auto" in a key that Transformers fills."""
    for path in autos(settings.tree):
        if _filled(path):
            name = ".".join(map(str, path))
            yield Finding(f'{name} is "auto": only the Trainer of Transformers replaces it', path, help="write a value")


@file_rule(
    "F003",
    DEEPSPEED,
    "the batch sizes do not multiply up",
    """train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · data-parallel ranks, without
    remainder. Where one is left out, DeepSpeed rounds down and trains on another batch.""",
    wrong={_TOTAL: 100, _MICRO: 8, _STEPS: 4, "gradient_clipping": 1.0},
    right={_TOTAL: 96, _MICRO: 8, _STEPS: 4, "gradient_clipping": 1.0},
    sources=("DeepSpeed runtime/config.py; DeepSpeed#6914",),
)
def batches_multiply(settings: Settings) -> Iterator[Finding]:
    """Fires when no number of ranks gives the batch."""
    total, factors = settings.number(_TOTAL), {name: settings.number(name) for name in (_MICRO, _STEPS)}
    given = {name: int(value) for name, value in factors.items() if value}
    if not total or not given:
        return
    divisor = given.get(_MICRO, 1) * given.get(_STEPS, 1)
    if int(total) % divisor:
        terms = " · ".join(f"{name} {value}" for name, value in given.items())
        near = nearest_multiples(int(total), divisor)
        yield Finding(
            f"{_TOTAL} {int(total)} / ({terms}) is not whole; nearest: {listed(near)}",
            (_TOTAL,),
            help=f"write a multiple of {divisor}",
            fixes=tuple(
                Fix(f"set {_TOTAL} to {value}", Safety.CHANGES_NUMERICS, (Edit((_TOTAL,), value),)) for value in near
            ),
            related=tuple(Related(f"{name} is set here", (name,)) for name in given),
        )


@file_rule(
    "F004",
    DEEPSPEED,
    "two precisions at once",
    """fp16, bf16 and amp exclude each other.""",
    wrong={**_BATCH, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
    right={**_BATCH, "bf16": {"enabled": True}, "fp16": {"enabled": False}},
    sources=("DeepSpeed runtime/config.py",),
)
def one_precision(settings: Settings) -> Iterator[Finding]:
    """Fires when more than one is enabled."""
    on = [name for name in ("bf16", "bfloat16", "fp16", "amp") if settings.get(name, "enabled") is True]
    if len(on) > 1:
        yield Finding(
            f"{' and '.join(on)} are enabled",
            (on[1], "enabled"),
            help="enable one of them",
            fixes=tuple(
                Fix(f"disable {name}", Safety.CHANGES_NUMERICS, (Edit((name, "enabled"), value=False),))
                for name in reversed(on)
            ),
            related=(Related(f"{on[0]} is enabled here", (on[0], "enabled")),),
        )


@file_rule(
    "F005",
    DEEPSPEED,
    "a ZeRO key has no effect at this stage",
    """DeepSpeed takes every key of zero_optimization at every stage and silently ignores those of a higher one:
    offload_param or a stage-3 key below stage 3, bucket sizes at stage 0.""",
    wrong={**_BATCH, _ZERO: {"stage": 1, "offload_param": {"device": "cpu"}}},
    right={**_BATCH, _ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/zero/config.py",),
)
def zero_keys_have_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires for each key that the stage ignores; quiet when the stage itself is wrong or missing."""
    zero = settings.section(_ZERO)
    stage = settings.number(_ZERO, "stage")
    if stage is None:
        return
    for key in zero:
        needed = 1 if key == "offload_optimizer" else first_effective_stage(key)
        if needed > stage:
            yield Finding(
                f"{key} has no effect at stage {int(stage)}: DeepSpeed reads it from stage {needed} on",
                (_ZERO, key),
                help=f"remove it, or set stage to {needed}",
                fixes=(Fix(f"remove {key}", Safety.SAFE, (Edit((_ZERO, key), remove=True),)),),
                related=(Related(f"stage {int(stage)} is set here", (_ZERO, "stage")),),
            )


@file_rule(
    "F006",
    DEEPSPEED,
    "gradient clipping is left to DeepSpeed's version",
    """Left out, gradient_clipping is 1.0 in newer DeepSpeed (since #8068) and 0.0, no clipping, in older: the same file
    trains differently after an upgrade.""",
    wrong={_MICRO: 1},
    right={_MICRO: 1, "gradient_clipping": 1.0},
    severity=Severity.WARNING,
    sources=("DeepSpeed#8068",),
)
def clipping_is_given(settings: Settings) -> Iterator[Finding]:
    """Fires when the key is missing."""
    path = ("gradient_clipping",)
    if settings.left_out(*path) and any(name in settings.tree for name in (_TOTAL, _MICRO, _ZERO, "optimizer")):
        yield Finding(
            "gradient_clipping is not given: 1.0 in newer versions of DeepSpeed, no clipping in older",
            path,
            help='write "gradient_clipping": 1.0, or 0.0 for none',
            fixes=(Fix("set gradient_clipping to 1.0", Safety.CHANGES_NUMERICS, (Edit(path, 1.0),)),),
        )


@file_rule(
    "F007",
    DEEPSPEED,
    "ZeRO without a stage shards nothing",
    """The default of stage is 0: a section zero_optimization without it leaves ZeRO off.""",
    wrong={**_BATCH, _ZERO: {"overlap_comm": True}},
    right={**_BATCH, _ZERO: {"stage": 1, "overlap_comm": True}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/zero/config.py",),
)
def zero_has_a_stage(settings: Settings) -> Iterator[Finding]:
    """Fires when the section has no stage."""
    zero = settings.get(_ZERO)
    if isinstance(zero, dict) and "stage" not in zero:
        yield Finding(
            "zero_optimization has no stage: the default is 0, nothing is sharded",
            (_ZERO,),
            help='write "stage": 1, 2 or 3',
            fixes=(Fix("set stage to 1", Safety.CHANGES_COST, (Edit((_ZERO, "stage"), 1),)),),
        )


@file_rule(
    "F008",
    DEEPSPEED,
    "ZeRO with an optimizer that it does not know",
    """ZeRO runs with the optimizers that DeepSpeed has tested; with others it stops unless
    zero_allow_untested_optimizer is true. The compressed optimizers (1-bit Adam and the like) never go with it.""",
    wrong={**_BATCH, _ZERO: {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    right={
        **_BATCH,
        _ZERO: {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    },
    sources=("DeepSpeed runtime/engine.py",),
)
def optimizer_goes_with_zero(settings: Settings) -> Iterator[Finding]:
    """Fires for untested and for compressed optimizers at stage 1 and above."""
    kind, stage = settings.get("optimizer", "type"), settings.number(_ZERO, "stage")
    if not isinstance(kind, str) or not stage:
        return
    related = (Related(f"stage {int(stage)} is set here", (_ZERO, "stage")),)
    if kind.lower() in _COMPRESSED:
        message = f"{kind} compresses gradients itself and does not go with ZeRO stage {int(stage)}"
        edit = Edit((_ZERO, "stage"), 0)
        fixes = (Fix("set stage to 0", Safety.CHANGES_COST, (edit,)),)
        yield Finding(message, ("optimizer", "type"), help="use stage 0, or AdamW", fixes=fixes, related=related)
    elif kind.lower() not in _TESTED and settings.get("zero_allow_untested_optimizer") is not True:
        allow = Edit(("zero_allow_untested_optimizer",), value=True)
        yield Finding(
            f"{kind} is not among the optimizers that DeepSpeed has tested with ZeRO",
            ("optimizer", "type"),
            help='write "zero_allow_untested_optimizer": true',
            fixes=(Fix("allow it", Safety.CHANGES_COST, (allow,)),),
            related=related,
        )


@file_rule(
    "F009",
    DEEPSPEED,
    "gradients are divided and not multiplied back",
    """With reduce_scatter off, a gradient_predivide_factor other than 1 is not taken back after the reduction:
    gradients come out scaled.""",
    wrong={**_BATCH, "gradient_predivide_factor": 2.0, _ZERO: {"stage": 1, "reduce_scatter": False}},
    right={**_BATCH, "gradient_predivide_factor": 2.0, _ZERO: {"stage": 1, "reduce_scatter": True}},
    sources=("DeepSpeed runtime/zero/stage_1_and_2.py",),
)
def predivision_is_taken_back(settings: Settings) -> Iterator[Finding]:
    """Fires for both together."""
    factor = settings.number("gradient_predivide_factor")
    if factor not in (None, 1) and settings.get(_ZERO, "reduce_scatter") is False:
        path = ("gradient_predivide_factor",)
        yield Finding(
            f"gradient_predivide_factor {factor} with reduce_scatter false",
            path,
            help="remove one of the two",
            fixes=(Fix("remove gradient_predivide_factor", Safety.CHANGES_NUMERICS, (Edit(path, remove=True),)),),
            related=(Related("reduce_scatter is off here", (_ZERO, "reduce_scatter")),),
        )

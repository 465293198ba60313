"""A DeepSpeed configuration on its own: keys of zero_optimization that the stage does not read."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.stages import MEMORY, first_stage, has_effect, last_stage, reach
from parcompile.diagnostics import Edit, Fix, Related, Safety, Severity

from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

ZERO = "zero_optimization"
BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
"""What the examples of other rules begin with."""


def stage_of(settings: Settings) -> int | None:
    """The ZeRO stage of a file: 0 without one, None when it is "auto" or wrong."""
    if settings.get(ZERO) is True:
        return 1  # the old form
    if settings.left_out(ZERO) or settings.left_out(ZERO, "stage"):
        return 0
    stage = settings.number(ZERO, "stage")
    return None if stage is None else int(stage)


def _is_on(settings: Settings, key: str) -> bool:
    """Whether a key asks for something: an offload to nowhere, a false or a default asks for nothing."""
    value = settings.get(ZERO, key)
    if isinstance(value, dict):
        return value.get("device") not in (None, "none", "auto")
    return value is True or value not in (None, False, 1)


@file_rule(
    "F005",
    DEEPSPEED,
    "a ZeRO key has no effect at this stage",
    """DeepSpeed takes every key of zero_optimization at every stage and silently ignores those that the stage does
    not read: offload_param and all stage3_ keys below stage 3, offload_optimizer and the buckets at stage 0, and at
    stage 3 round_robin_gradients, parameter_alignment and ignore_unused_parameters. Where memory was to be saved this
    is a warning; the others are named in one remark.""",
    wrong={**BATCH, ZERO: {"stage": 1, "offload_param": {"device": "cpu"}}},
    right={**BATCH, ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/engine.py",),
)
def zero_keys_have_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires for keys that the stage does not read; quiet when the stage itself is wrong, missing or "auto"."""
    stage, zero = stage_of(settings), settings.section(ZERO)
    if stage is None or "stage" not in zero:
        return
    related = (Related(f"stage {stage} is set here", (ZERO, "stage")),)
    idle = [key for key in zero if not has_effect(key, stage)]
    heavy = [key for key in idle if (key in MEMORY or stage > last_stage(key)) and _is_on(settings, key)]
    heavy = [key for key in heavy if key in MEMORY or key == "round_robin_gradients"]
    for key in heavy:
        yield Finding(
            f"{key} has no effect at stage {stage}: DeepSpeed reads it {reach(key)}",
            (ZERO, key),
            help=f"remove it, or set stage to {first_stage(key) if stage < first_stage(key) else last_stage(key)}",
            fixes=(Fix(f"remove {key}", Safety.SAFE, (Edit((ZERO, key), remove=True),)),),
            related=related,
        )
    rest = [key for key in idle if key not in heavy]
    if rest:
        names = ", ".join(rest[:3]) + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")
        have = "has" if len(rest) == 1 else "have"
        edits = tuple(Edit((ZERO, key), remove=True) for key in rest)
        yield Finding(
            f"{names} {have} no effect at stage {stage}",
            (ZERO, rest[0]),
            help="remove what is not read",
            fixes=(Fix("remove what is not read", Safety.SAFE, edits),),
            related=(*related, *(Related("and here", (ZERO, key)) for key in rest[1:])),
            severity=Severity.INFO,
        )


@file_rule(
    "F007",
    DEEPSPEED,
    "ZeRO without a stage shards nothing",
    """The default of stage is 0: a section zero_optimization without it leaves ZeRO off.""",
    wrong={**BATCH, ZERO: {"overlap_comm": True}},
    right={**BATCH, ZERO: {"stage": 1, "overlap_comm": True}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/zero/config.py",),
)
def zero_has_a_stage(settings: Settings) -> Iterator[Finding]:
    """Fires when the section has no stage."""
    zero = settings.get(ZERO)
    if isinstance(zero, dict) and settings.left_out(ZERO, "stage"):
        yield Finding(
            "zero_optimization has no stage: the default is 0, nothing is sharded",
            (ZERO,),
            help='write "stage": 1, 2 or 3',
            fixes=(Fix("set stage to 1", Safety.CHANGES_COST, (Edit((ZERO, "stage"), 1),)),),
        )

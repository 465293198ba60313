"""A DeepSpeed configuration on its own: how gradients are scaled, summed and clipped."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.gradients import refused_scaling, wrong_scale
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety

from .f_deepspeed_batch import ranks
from .f_deepspeed_stages import BATCH, ZERO, stage_of
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_PREDIVIDE, _PRESCALE, _SCATTER = "gradient_predivide_factor", "prescale_gradients", (ZERO, "reduce_scatter")
_HALF_DONE = ("fp32", "fp16", "bf16")


@file_rule(
    "F009",
    DEEPSPEED,
    "a way of scaling gradients that the stage does not have",
    """With reduce_scatter, which is on unless it is switched off, ZeRO stages 2 and 3 refuse prescale_gradients and a
    gradient_predivide_factor other than 1. Without reduce_scatter they take a factor, but stage 3 forgets to multiply
    it back when it equals the number of data-parallel ranks.""",
    wrong={**BATCH, _PREDIVIDE: 2.0, ZERO: {"stage": 2, "reduce_scatter": True}},
    right={**BATCH, _PREDIVIDE: 2.0, ZERO: {"stage": 2, "reduce_scatter": False}},
    sources=("DeepSpeed runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py",),
)
def gradients_can_be_scaled_so(settings: Settings) -> Iterator[Finding]:
    """Fires for what DeepSpeed refuses, and for a factor that is not taken back."""
    stage = stage_of(settings)
    if stage is None or settings.get("gradient_allreduce_op") == "sum":
        return
    scatter = settings.get(*_SCATTER, default=True) is not False
    factor = settings.number(_PREDIVIDE)
    prescale = settings.get(_PRESCALE) is True
    predivide = 1.0 if factor is None else factor
    path: Path = (_PREDIVIDE,) if predivide != 1 else (_PRESCALE,)
    refused = refused_scaling(stage, reduce_scatter=scatter, prescale=prescale, predivide=predivide)
    fixes = (Fix(f"remove {path[0]}", Safety.CHANGES_NUMERICS, (Edit(path, remove=True),)),)
    related = (Related(f"stage {stage} is set here", (ZERO, "stage")),)
    if refused:
        yield Finding(refused, path, help="remove it, or switch reduce_scatter off", fixes=fixes, related=related)
        return
    wrong = wrong_scale(
        stage, reduce_scatter=scatter, prescale=prescale, predivide=predivide, ranks=ranks(settings) or 0
    )
    if wrong:
        yield Finding(
            f"{_PREDIVIDE} {predivide:g}: gradients are {wrong}", path, help="write another factor", fixes=fixes
        )


@file_rule(
    "F019",
    DEEPSPEED,
    "a sum of gradients that the engine does not support",
    """gradient_allreduce_op "sum" adds gradients over the ranks without dividing by their number. ZeRO stage 3,
    ZenFlow and DeepCompile do not support it.""",
    wrong={**BATCH, "gradient_allreduce_op": "sum", ZERO: {"stage": 3}},
    right={**BATCH, "gradient_allreduce_op": "sum", ZERO: {"stage": 2}},
    sources=("DeepSpeed runtime/config.py; DeepSpeed#8232",),
)
def sums_have_their_engine(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the three."""
    operation = settings.get("gradient_allreduce_op")
    if not isinstance(operation, str) or operation.lower() != "sum":
        return
    others = {
        "zero_optimization.stage 3": stage_of(settings) == 3,
        "zenflow": isinstance(settings.get(ZERO, "zenflow"), dict),
        "compile.deepcompile": settings.get("compile", "deepcompile") is True,
    }
    for name in (name for name, given in others.items() if given):
        path: Path = ("gradient_allreduce_op",)
        fix = Fix("remove gradient_allreduce_op", Safety.CHANGES_NUMERICS, (Edit(path, remove=True),))
        yield Finding(f'gradient_allreduce_op "sum" with {name}: DeepSpeed refuses the combination', path, fixes=(fix,))


@file_rule(
    "F020",
    DEEPSPEED,
    "the gradient norm is needed after all",
    """compute_grad_norm false saves the norm of the whole gradient at ZeRO stages 1 and 2. It is needed for clipping,
    which is on unless gradient_clipping is 0, for an optimizer on the host, for ZenFlow, and for bf16 weights with
    sums in fp32 at stage 1.""",
    wrong={**BATCH, ZERO: {"stage": 2, "compute_grad_norm": False}},
    right={**BATCH, "gradient_clipping": 0.0, ZERO: {"stage": 2, "compute_grad_norm": False}},
    sources=("DeepSpeed runtime/zero/config.py, runtime/zero/stage_1_and_2.py, runtime/engine.py",),
)
def the_norm_is_not_needed(settings: Settings) -> Iterator[Finding]:
    """Fires for whatever needs the norm."""
    path, stage = (ZERO, "compute_grad_norm"), stage_of(settings)
    if settings.get(*path) is not False or stage is None:
        return
    clipping = settings.number("gradient_clipping")
    offload = settings.get(ZERO, "offload_optimizer", "device")
    sums = settings.get("data_types", "grad_accum_dtype")
    reasons = {
        f"at stage {stage}, only at stages 1 and 2": stage not in (1, 2),
        "with clipping: write gradient_clipping 0": clipping is None or clipping > 0,
        "with ZenFlow": isinstance(settings.get(ZERO, "zenflow"), dict),
        "with the optimizer on the host": offload in ("cpu", "nvme"),
        "at stage 1 with bf16 and sums in fp32": stage == 1
        and settings.get("bf16", "enabled") is True
        and sums in ("fp32", "float32", "float", "torch.float32")
        and offload not in ("cpu", "nvme"),
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is not None:
        fix = Fix("remove compute_grad_norm", Safety.CHANGES_COST, (Edit(path, remove=True),))
        yield Finding(f"compute_grad_norm false does not go {reason}", path, fixes=(fix,))


@file_rule(
    "F021",
    DEEPSPEED,
    "accumulation that the caller manages has limits",
    """managed_gradient_accumulation false leaves the boundary of a step to the caller. It goes with overlap_comm at
    ZeRO stages 2 and 3 only, and not with DeepCompile.""",
    wrong={**BATCH, "managed_gradient_accumulation": False, ZERO: {"stage": 1, "overlap_comm": True}},
    right={**BATCH, "managed_gradient_accumulation": False, ZERO: {"stage": 1, "overlap_comm": False}},
    sources=("DeepSpeed runtime/engine.py",),
)
def callers_can_manage_accumulation(settings: Settings) -> Iterator[Finding]:
    """Fires for overlap_comm below stage 2, and for DeepCompile."""
    path, stage = ("managed_gradient_accumulation",), stage_of(settings)
    if settings.get(*path) is not False or stage is None:
        return
    if settings.get(ZERO, "overlap_comm") is True and stage < 2:
        message = f"managed_gradient_accumulation false with overlap_comm at stage {stage}: that needs stage 2"
        yield Finding(message, path, help='write "overlap_comm": false')
    if settings.get("compile", "deepcompile") is True:
        yield Finding(
            "managed_gradient_accumulation false cannot be combined with DeepCompile",
            path,
            help="remove one of the two",
        )


@file_rule(
    "F022",
    DEEPSPEED,
    "buckets of odd size",
    """ZeRO stages 1 and 2 gather parameters in buckets of an even number of elements.""",
    wrong={**BATCH, ZERO: {"stage": 2, "allgather_bucket_size": 500000001}},
    right={**BATCH, ZERO: {"stage": 2, "allgather_bucket_size": 500000000}},
    sources=("DeepSpeed runtime/zero/stage_1_and_2.py",),
)
def buckets_are_even(settings: Settings) -> Iterator[Finding]:
    """Fires for an odd allgather_bucket_size."""
    path, size = (ZERO, "allgather_bucket_size"), settings.number(ZERO, "allgather_bucket_size")
    if size is not None and int(size) % 2 and stage_of(settings) in (1, 2):
        even = int(size) + 1
        fix = Fix(f"set allgather_bucket_size to {even}", Safety.SAFE, (Edit(path, even),))
        yield Finding(
            f"allgather_bucket_size {int(size)} is odd: DeepSpeed refuses it", path, help=f"write {even}", fixes=(fix,)
        )

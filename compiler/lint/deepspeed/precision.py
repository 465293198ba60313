"""A DeepSpeed configuration on its own: types, and how gradients are scaled, summed and clipped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parcompile.backends.deepspeed import refused_scaling, wrong_scale
from parcompile.backends.deepspeed.table import order
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity
from parcompile.lint.deepspeed.constructors import on_host
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding

from .optimizer import ranks
from .stages import ZERO, stage_of

# A DeepSpeed configuration on its own: types of weights, gradients and sums.

_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
_NUMBERS = ("loss_scale", "loss_scale_window", "min_loss_scale")
_STRICT_SINCE = "0.19.3"
"""Before this version a switch counted as a number."""
_WHOLE = re.compile(r"\s*[+-]?\d+\s*")
_MASTERS = {"fp16": "fp16_master_weights_and_grads", "bf16": "bf16_master_weights_and_grads"}


def bf16_name(settings: Settings) -> str:
    """The section of bf16 that DeepSpeed reads: the old name only counts without the new one."""
    return "bfloat16" if settings.left_out("bf16") and not settings.left_out("bfloat16") else "bf16"


def model_dtype(settings: Settings) -> str | None:
    """The type of the weights, None where "auto" leaves it open."""
    for name, kind in (("fp16", "fp16"), (bf16_name(settings), "bf16")):
        enabled = settings.tree.get(name, {}).get("enabled") if isinstance(settings.tree.get(name), dict) else None
        if enabled == "auto":
            return None
        if settings.get(name, "enabled") is True:
            return kind
    return "fp32"


@file_rule("F004", DEEPSPEED)
def one_precision(settings: Settings) -> Iterator[Finding]:
    """Fires when both are enabled."""
    on = [name for name in (bf16_name(settings), "fp16") if settings.get(name, "enabled") is True]
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


@file_rule("F013", DEEPSPEED)
def half_master_weights_have_their_place(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the three keys whose conditions do not hold."""
    stage = stage_of(settings)
    sections = {"fp16": "fp16", "bf16": bf16_name(settings)}
    states = settings.get(sections["bf16"], "bf16_optimizer_states") is True
    for kind, key in _MASTERS.items():
        path = (sections[kind], key)
        if settings.get(*path) is not True or stage is None:
            continue
        if stage == 0:
            yield Finding(
                f"{key} at stage 0: it is for ZeRO stages 1, 2 and 3", path, help="set zero_optimization.stage"
            )
        elif not on_host(settings.tree) and not (kind == "bf16" and states):
            more = " or bf16_optimizer_states" if kind == "bf16" else ""
            message = f"{key} needs offload_optimizer to cpu{more}: DeepSpeed's Adam on the host keeps such weights"
            yield Finding(message, path, help='add "offload_optimizer": {"device": "cpu"}')
    path = (sections["bf16"], "bf16_optimizer_states")
    if states and settings.get(sections["bf16"], _MASTERS["bf16"]) is not True:
        yield Finding("bf16_optimizer_states needs bf16_master_weights_and_grads", path, help="set both, or none")
    if all(settings.get(sections[kind], key) is True for kind, key in _MASTERS.items()):
        yield Finding("fp16 and bf16 master weights exclude each other", (sections["bf16"], _MASTERS["bf16"]))


@file_rule("F014", DEEPSPEED)
def types_agree(settings: Settings) -> Iterator[Finding]:
    """Fires for another type of parameters, and for one of sums at stage 0."""
    weights, stage = model_dtype(settings), stage_of(settings)
    if weights is None:
        return
    param, total = (_NAMES.get(str(settings.get("data_types", key))) for key in ("param_dtype", "grad_accum_dtype"))
    if param is not None and param != weights:
        message = f"param_dtype {param} with weights in {weights}: fp16 and bf16 decide that"
        yield Finding(message, ("data_types", "param_dtype"), help=f"write {weights}, or remove it")
    if total is not None and total != weights and stage == 0:
        message = f"grad_accum_dtype {total} with weights in {weights} at stage 0: DeepSpeed has no optimizer for that"
        yield Finding(
            message, ("data_types", "grad_accum_dtype"), help="set zero_optimization.stage to 1, or remove it"
        )


@file_rule("F015", DEEPSPEED)
def loss_scale_works(settings: Settings) -> Iterator[Finding]:
    """Fires for a negative scale, and for a window or a floor of 0 under the adapted one."""
    scale = settings.number("fp16", "loss_scale")
    if scale is not None and scale < 0:
        yield Finding(f"fp16.loss_scale {scale:g} is below 0", ("fp16", "loss_scale"), help="write 0 to adapt it")
    for key in _NUMBERS if order(settings.usage.version) >= order(_STRICT_SINCE) else ():
        value = settings.get("fp16", key)
        fraction = isinstance(value, str) and key != "loss_scale" and _WHOLE.fullmatch(value) is None
        if isinstance(value, bool) or fraction:
            message = f"fp16.{key} {str(value).lower()}: DeepSpeed {settings.usage.version} wants a number"
            yield Finding(message, ("fp16", key), help="write the number, without quotes")
    if settings.get("fp16", "enabled") is True and not scale:
        for key in ("loss_scale_window", "min_loss_scale"):
            value = settings.number("fp16", key)
            if value is not None and value <= 0:
                message = f"fp16.{key} {value:g} with an adapted loss scale: it must be above 0"
                yield Finding(message, ("fp16", key), help="write 1 or more")
    kind = settings.get("optimizer", "type")
    if isinstance(kind, str) and kind.lower() == "lamb" and scale:
        message = f"Lamb with fp16.loss_scale {scale:g}: DeepSpeed's Lamb needs the adapted scale"
        yield Finding(message, ("fp16", "loss_scale"), help="write 0")


@file_rule("F016", DEEPSPEED, severity=Severity.WARNING)
def bf16_has_one_name(settings: Settings) -> Iterator[Finding]:
    """Fires when both stand in the file."""
    if "bf16" in settings.tree and "bfloat16" in settings.tree:
        yield Finding(
            "bfloat16 has no effect: it is the old name of bf16, which is set too",
            ("bfloat16",),
            help="remove it",
            fixes=(Fix.removing(("bfloat16",), Safety.SAFE),),
            related=(Related("bf16 is given here", ("bf16",)),),
        )


# A DeepSpeed configuration on its own: how gradients are scaled, summed and clipped.

_PREDIVIDE, _PRESCALE, _SCATTER = "gradient_predivide_factor", "prescale_gradients", (ZERO, "reduce_scatter")


@file_rule("F009", DEEPSPEED)
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
    fixes = (Fix.removing(path, Safety.CHANGES_NUMERICS),)
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


@file_rule("F019", DEEPSPEED)
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
        fix = Fix.removing(path, Safety.CHANGES_NUMERICS)
        yield Finding(f'gradient_allreduce_op "sum" with {name}: DeepSpeed refuses the combination', path, fixes=(fix,))


@file_rule("F020", DEEPSPEED)
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
        fix = Fix.removing(path, Safety.CHANGES_COST)
        yield Finding(f"compute_grad_norm false does not go {reason}", path, fixes=(fix,))


@file_rule("F021", DEEPSPEED)
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


@file_rule("F022", DEEPSPEED)
def buckets_are_even(settings: Settings) -> Iterator[Finding]:
    """Fires for an odd allgather_bucket_size."""
    path, size = (ZERO, "allgather_bucket_size"), settings.number(ZERO, "allgather_bucket_size")
    if size is not None and int(size) % 2 and stage_of(settings) in (1, 2):
        even = int(size) + 1
        fix = Fix.setting(path, even, Safety.SAFE)
        yield Finding(
            f"allgather_bucket_size {int(size)} is odd: DeepSpeed refuses it", path, help=f"write {even}", fixes=(fix,)
        )

"""A DeepSpeed configuration on its own: optimizers and what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.constructors import ADAM, on_host, optimizers
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity

from .f_deepspeed_stages import BATCH, ZERO, stage_of
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_TYPE: Path = ("optimizer", "type")
_TESTED = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
_TESTED_OF_TORCH = frozenset({"Adam", "AdamW", "Adagrad"})
_COMPRESSED = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


@file_rule(
    "F008",
    DEEPSPEED,
    "ZeRO with an optimizer that it was not tested with",
    """ZeRO starts with Adam, AdamW, Adagrad, Lion and Muon; with others, Lamb among them, it stops unless
    zero_allow_untested_optimizer is true. The compressed optimizers of older versions never go with it.""",
    wrong={**BATCH, ZERO: {"stage": 1}, "optimizer": {"type": "Lamb", "params": {"lr": 0.001}}},
    right={
        **BATCH,
        ZERO: {"stage": 1},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.001}},
        "zero_allow_untested_optimizer": True,
    },
    sources=("DeepSpeed runtime/engine.py, runtime/zero/utils.py",),
)
def optimizer_goes_with_zero(settings: Settings) -> Iterator[Finding]:
    """Fires for untested and for compressed optimizers at stage 1 and above."""
    kind, stage = settings.get(*_TYPE), stage_of(settings)
    if not isinstance(kind, str) or not stage:
        return
    related = (Related(f"stage {stage} is set here", (ZERO, "stage")),)
    own = kind.lower() in optimizers(settings.around.version)
    if own and kind.lower() in _COMPRESSED:
        message = f"{kind} compresses gradients itself and cannot be combined with ZeRO stage {stage}"
        fixes = (Fix("set stage to 0", Safety.CHANGES_COST, (Edit((ZERO, "stage"), 0),)),)
        yield Finding(message, _TYPE, help="use stage 0, or AdamW", fixes=fixes, related=related)
    elif not (own and kind.lower() in _TESTED) and kind not in _TESTED_OF_TORCH:
        if settings.get("zero_allow_untested_optimizer") is True:
            return
        allow = Edit(("zero_allow_untested_optimizer",), value=True)
        yield Finding(
            f"{kind} is not among the optimizers that DeepSpeed has tested with ZeRO: it refuses stage {stage}",
            _TYPE,
            help='write "zero_allow_untested_optimizer": true',
            fixes=(Fix("allow it", Safety.CHANGES_COST, (allow,)),),
            related=related,
        )


@file_rule(
    "F023",
    DEEPSPEED,
    "a parameter that this implementation of the optimizer refuses",
    """DeepSpeed's fused Adam, Lamb and Adam on the host have no AMSGrad; torch's own Adam ("torch_adam": true) has.
    Betas lie from 0 to below 1.""",
    wrong={**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "amsgrad": True}}},
    right={**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "amsgrad": True, "torch_adam": True}}},
    sources=("DeepSpeed ops/adam/fused_adam.py, ops/lamb/fused_lamb.py",),
)
def implementation_has_it(settings: Settings) -> Iterator[Finding]:
    """Fires for amsgrad with DeepSpeed's own implementations."""
    kind, params = settings.get(*_TYPE), settings.section("optimizer", "params")
    if not isinstance(kind, str) or settings.get("optimizer", "params", "amsgrad") is not True:
        return
    fused = kind.lower() in ADAM and not params.get("torch_adam") and not on_host(settings.tree)
    if fused or kind.lower() == "lamb":
        path: Path = ("optimizer", "params", "amsgrad")
        fix = Fix("remove amsgrad", Safety.CHANGES_NUMERICS, (Edit(path, remove=True),))
        yield Finding(f"DeepSpeed's {kind} has no AMSGrad and refuses it", path, help="remove it", fixes=(fix,))


@file_rule(
    "F024",
    DEEPSPEED,
    "Muon at ZeRO stage 3 without reduce_scatter",
    """Muon orthogonalizes whole matrices. At stage 3 DeepSpeed runs it only with reduce_scatter false, which is not the
    default.""",
    wrong={**BATCH, ZERO: {"stage": 3}, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
    right={**BATCH, ZERO: {"stage": 3, "reduce_scatter": False}, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
    sources=("DeepSpeed runtime/zero/stage3.py",),
)
def muon_has_whole_matrices(settings: Settings) -> Iterator[Finding]:
    """Fires at stage 3 with reduce_scatter."""
    kind, path = settings.get(*_TYPE), (ZERO, "reduce_scatter")
    if not isinstance(kind, str) or kind.lower() != "muon" or stage_of(settings) != 3:
        return
    if settings.get(*path, default=True) is not False:
        yield Finding(
            "Muon at stage 3 with reduce_scatter: DeepSpeed refuses the combination",
            _TYPE,
            help='write "reduce_scatter": false',
            fixes=(Fix("set reduce_scatter to false", Safety.CHANGES_COST, (Edit(path, value=False),)),),
        )


@file_rule(
    "F025",
    DEEPSPEED,
    "a switch that does not work any more",
    """legacy_stage1 asks for an implementation that is long gone: DeepSpeed stops at stages 1 and above.
    elastic_checkpoint is ignored at stage 3; universal checkpoints took its place.""",
    wrong={**BATCH, ZERO: {"stage": 1, "legacy_stage1": True}},
    right={**BATCH, ZERO: {"stage": 1}},
    sources=("DeepSpeed runtime/engine.py, runtime/zero/config.py",),
)
def switches_work(settings: Settings) -> Iterator[Finding]:
    """Fires for both."""
    stage = stage_of(settings)
    path: Path = (ZERO, "legacy_stage1")
    if settings.get(*path) is True and stage:
        fix = Fix("remove legacy_stage1", Safety.SAFE, (Edit(path, remove=True),))
        yield Finding(
            "legacy_stage1: DeepSpeed has no such implementation any more", path, help="remove it", fixes=(fix,)
        )
    path = (ZERO, "elastic_checkpoint")
    if settings.get(*path) is True and stage == 3:
        fix = Fix("remove elastic_checkpoint", Safety.SAFE, (Edit(path, remove=True),))
        message = "elastic_checkpoint has no effect at stage 3"
        advice = "use universal checkpoints: checkpoint.load_universal"
        yield Finding(message, path, help=advice, fixes=(fix,), severity=Severity.WARNING)

"""Activation checkpointing: what is recomputed, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.model.layer_parts import parts_of, why_whole
from parcompile.spec.resolve import Resolution

from . import Finding, also, removable, rule, settable

_PATH = ("training", "activation_checkpointing")
_OFFLOADING = ("training", "activation_offloading")
_VIRTUAL = ("parallelism", "num_virtual_stages_per_pipeline_rank")
_PP = ("parallelism", "pp")


@rule("R001", severity=Severity.INFO)
def selective_recomputes_nothing(spec: Resolution) -> Iterator[Finding]:
    """Fires for selective."""
    given = spec.get(*_PATH)
    if given == "selective" or (isinstance(given, list) and "selective" in given):
        yield Finding(
            "activation_checkpointing selective saves nothing: fused attention never stores the scores",
            _PATH,
            help="full saves memory, for about a third more computation",
        )


@rule("R002", severity=Severity.WARNING, targets=("deepspeed",))
def deepspeed_checkpointing_is_unused(spec: Resolution) -> Iterator[Finding]:
    """Fires when the further DeepSpeed keys hold that section."""
    further = spec.get("deepspeed")
    path = ("deepspeed", "activation_checkpointing")
    if isinstance(further, Mapping) and spec.given(*path):
        message = "deepspeed.activation_checkpointing has no effect: training.activation_checkpointing decides"
        yield removable(path, message, 'remove it, and set "activation_checkpointing": "full" under training')


@rule("R003")
def one_word_for_each_stage(spec: Resolution) -> Iterator[Finding]:
    """Fires when the words are not as many as the stages, and beside virtual stages."""
    given = spec.get(*_PATH)
    if not isinstance(given, list):
        return
    words, pp, virtual = ", ".join(given), spec.axis(Axis.PP), spec.virtual_stages
    most = "full" if "full" in given else given[0]
    fixes = [Fix.setting(_PATH, most, Safety.CHANGES_COST)]
    if len(given) != pp:
        longer = [*given, *[given[-1]] * (pp - len(given))][:pp]
        if pp > 1:
            fixes.append(Fix(f"one for each of {pp} stages", Safety.CHANGES_COST, (Edit(_PATH, longer),)))
        yield Finding(
            f"activation_checkpointing has {len(given)} words ({words}) for pp {pp}: {len(given)} ≠ {pp}",
            _PATH,
            help=f"write one word for each of {pp} stages, or one word for all" if pp > 1 else "write one word",
            fixes=tuple(fixes),
            related=also(spec, _PP),
        )
    elif virtual > 1:
        yield Finding(
            f"activation_checkpointing ({words}) for each stage with {virtual} virtual stages on each rank: "
            "a rank has layers from several places of the model",
            _PATH,
            help="write one word for all stages, or remove the virtual stages",
            fixes=tuple(fixes),
            related=also(spec, _VIRTUAL),
        )


@rule("R004")
def recomputed_layers_are_offloaded(spec: Resolution) -> Iterator[Finding]:
    """Fires for activation_offloading where no stage recomputes its layers."""
    given = spec.activation_checkpointing
    words = [given] if isinstance(given, str) else given
    if spec.activation_offloading and "full" not in words:
        yield Finding(
            f"activation_offloading with activation_checkpointing {', '.join(words)}: only what recomputed layers keep "
            "goes to the host, and no stage recomputes its layers",
            _OFFLOADING,
            help='set activation_checkpointing to "full", or activation_offloading to false',
            fixes=tuple(
                Fix.setting(path, value, Safety.CHANGES_COST) for path, value in ((_PATH, "full"), (_OFFLOADING, False))
            ),
            related=also(spec, _PATH),
        )


@rule("R005")
def parts_of_layers_are_told_apart(spec: Resolution) -> Iterator[Finding]:
    """Fires for parts of layers that a model does not have as modules of their own."""
    given = spec.activation_checkpointing
    words = [given] if isinstance(given, str) else given
    parts = frozenset(part for word in words for part in parts_of(word))
    why = why_whole(spec.shape, parts) if parts else None
    if why is not None:
        message = f"activation_checkpointing {', '.join(words)} of {spec.shape.model_type or 'this model'}: {why}"
        hint = "full recomputes its layers whole, and saves more memory"
        yield settable(_PATH, ("full", "none"), message, hint)

"""Activation checkpointing: what is recomputed, and by whom."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety
from parcompile.layout.groups import Axis
from parcompile.model.layer_parts import parts_of, why_whole
from parcompile.spec.resolve import Resolution

from . import Finding, also, rule, settable

_PATH = ("training", "activation_checkpointing")
_VIRTUAL = ("parallelism", "num_virtual_stages_per_pipeline_rank")
_PP = ("parallelism", "pp")


@rule("R003")
def one_word_for_each_stage(spec: Resolution) -> Iterator[Finding]:
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


@rule("R005")
def parts_of_layers_are_told_apart(spec: Resolution) -> Iterator[Finding]:
    given = spec.activation_checkpointing
    words = [given] if isinstance(given, str) else given
    parts = frozenset(part for word in words for part in parts_of(word))
    why = why_whole(spec.shape, parts) if parts else None
    if why is not None:
        message = f"activation_checkpointing {', '.join(words)} of {spec.shape.model_type or 'this model'}: {why}"
        hint = "full recomputes its layers whole, and saves more memory"
        yield settable(_PATH, ("full", "none"), message, hint)

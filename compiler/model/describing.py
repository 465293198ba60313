"""What a model type is made of, in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from .catalogue import ALIKE, ModelType, model_types
from .compressed_keys import WORDS
from .derived_rows import norms_queries
from .presets import bare, find_preset, presets

AXES = "tp, cp, pp, dp, sequence parallelism"
"""What the runtime runs every type that works with; mixtures of experts run with ep too."""


def axes_of(one: ModelType) -> list[str]:
    """What the runtime runs a type with."""
    family = one.family
    if family is None:
        return AXES.split(", ")
    axes = [*AXES.split(", "), *(["ep"] if family.experts else [])]
    return [axis for axis in axes if axis not in family.refused_axes]


def kinds_of(one: ModelType) -> list[str]:
    """What distinguishes a type from Llama, most telling first; "dense" where nothing does."""
    family = one.family
    if family is None:
        return []
    experts = family.experts

    def parts(telling: int) -> list[tuple[object, str]]:
        return [(True, one.described) for one in family.parts if one.telling == telling]

    def of_experts(telling: int) -> list[tuple[object, str]]:
        return [(True, words) for words in (experts.words(telling) if experts else ())]

    told: list[tuple[object, str]] = [
        (True, "mixture of experts" if experts else "dense"),
        *parts(-1),
        (family.layer_shapes, "layers of different shapes"),
        *parts(0),
        (family.hyper_streams, "several residual streams"),
        (family.layers_per_module > 1, "two layers in a module"),
        *of_experts(0),
        (family.layer_inputs, "an input of each layer"),
        (family.runs, "stacks of layers that run several times"),
        *parts(1),
        (family.latent, "latent attention"),
        *parts(2),
        (family.low_rank, WORDS),
        *of_experts(1),
        (family.positions, "learned positions"),
        (family.alibi, "ALiBi" if family.alibi is True else "rotary positions or ALiBi"),
        *((True, f"no {axis}") for axis in family.refused_axes),
        (family.paired_heads, "differential attention"),
        (family.sinks, "attention sinks"),
        (family.gate or family.query_gate, "gated attention"),
        (family.defaults.get("sliding_window") or family.window_key, "windows"),
        (norms_queries(one.name, family), "norm of queries and keys"),
    ]
    return [words for holds, words in told if holds]


def summary_of(types: Iterable[ModelType]) -> str:
    """How many types work."""
    every = list(types)
    causal = [one for one in every if one.causal]
    texts = sum(one.text_works for one in every)
    works = sum(one.works for one in causal)
    return (
        f"{works} of {len(causal)} types of causal language models work. {texts} of the multimodal types, {len(every)} "
        "with the others, can be trained as their text part."
    )


def presets_of(name: str) -> tuple[str, ...]:
    """The presets of a type."""
    return tuple(preset.name for preset in presets().values() if preset.config["model_type"] == name)


def type_named(name: str) -> str | None:
    """The model type that a person means: its name with any case and separators, or the name of a preset."""
    names = {*model_types(), *ALIKE}
    if name in names:
        return name
    preset = find_preset(name)
    if preset is not None:
        return str(preset.config["model_type"])
    found = [one for one in names if bare(one) == bare(name)]
    return found[0] if len(found) == 1 else None


def near_types(name: str) -> list[str]:
    """The types that work, alone or as a text part, and begin with the letters that `name` begins with.

    A name of the Hugging Face Hub is read without its owner. Less than 3 letters give none.
    """
    letters = "".join(itertools.takewhile(str.isalpha, bare(name.rpartition("/")[2])))
    if len(letters) < 3:
        return []
    return [
        one.name for one in model_types().values() if (one.works or one.text_works) and one.name.startswith(letters)
    ]

"""What the class of a type does not take of a configuration: null, wrong types, unknown words, misspelt keys.

Most classes of transformers are strict, and refuse such a value before a model is built. A word that they do not know,
as of an activation, fails when the model is built or computes. A key that they do not have they keep and never read.
What they have and check stands in `key_types.json`, which `.ci/generate/key_types.py` writes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parcompile.diagnostics import closest
from parcompile.user_files import shipped

_NEAR = 0.85
"""How alike a key that a class lacks is to the one that was meant; keys of a model's own code are less alike."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "switch": (bool,),
    "whole": (int,),
    "fraction": (float,),
    "text": (str,),
    "list": (list, tuple),
    "mapping": (Mapping,),
}
"""In this order: in Python a switch is a whole number too."""
LISTS_OF_KINDS = frozenset({"layer_types", "mlp_layer_types", "no_rope_layers"})
"""Keys whose lists transformers compares with the number of layers, or reads for each."""
_POSITIVE = frozenset(
    {
        *("attention_chunk_size", "no_rope_layer_interval", "head_dim", "rotary_dim", "query_pre_attn_scalar"),
        "dim_model_base",
    }
)
"""Sizes by which classes divide or which they count with, beside those that parameters follow from."""
_LISTED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("layer_types", "mlp_layer_types", "layers_block_type"), ("text",)),
    **dict.fromkeys(("mlp_only_layers", "moe_layers", "num_attention_heads_per_layer"), ("whole",)),
    "no_rope_layers": ("switch", "whole"),
    "activation_sparsity_pattern": ("whole", "fraction"),
}
"""What lists hold that families read, also of types whose class does not check them."""
_OR_ONE = "activation_sparsity_pattern"
"""One number may stand for its list."""
_NO_SIZE = frozenset({("glm5_next_text", "head_dim")})
"""Of these types' keys those whose value their class writes over with 0."""
_MEANT = {
    "whole": "a whole number",
    "fraction": "a number with a point, as 1.0",
    "switch": "true or false",
    "text": "text",
    "list": "a list",
    "mapping": "a mapping",
    "null": "null",
}


@functools.cache
def _stored() -> Mapping[str, Any]:
    found: Mapping[str, Any] = shipped("parcompile.model", "key_types.json")
    return found


def mistyped(model_type: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key whose value its class refuses, with what is wrong; None where there is none.

    A type of which nothing is known, such as a plug-in's, has none.
    """
    for kinds, keys in _stored()["types"].get(model_type, {}).items():
        taken = kinds.split()
        for key in keys:
            if key not in config or _kind(config[key]) in taken:
                continue
            if config[key] is None:
                return key, f"{key} is null, which transformers refuses: write {_meant(taken)}, or leave the key out"
            return key, f"{key} is {json.dumps(config[key], default=str)[:60]}: it has to be {_meant(taken)}"
    for key in sorted(_LISTED.keys() & config.keys()):
        value = config[key]
        listed = value if isinstance(value, list | tuple) else [value if key == _OR_ONE else None]
        if value is not None and not {*map(_kind, listed)} <= {*_LISTED[key]}:
            said = json.dumps(value, default=str)[:60]
            return key, f"{key} is {said}: it has to be a list, each entry of it {_meant(_LISTED[key])}"
    for key in sorted(_POSITIVE & fields_of(model_type) & config.keys()):
        if isinstance(number := config[key], int | float) and number <= 0 and (model_type, key) not in _NO_SIZE:
            return key, f"{key} is {number}: it has to be more than 0"
    for key, words in _stored()["words"].get(model_type, {}).items():
        known = _stored()[words] if isinstance(words, str) else words
        if isinstance(word := config.get(key), str) and word not in known:
            return key, f"{key} is {json.dumps(word)[:60]}, which transformers does not know: {_word(word, known)}"
    # Classes that have positions for each kind of layer do not check others.
    by_kind = shipped("parcompile.model", "families.json").get(model_type, {}).get("positions_by_kind")
    return _stretched_otherwise(config) if "rope_parameters" in fields_of(model_type) and not by_kind else None


_STRETCHES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    **dict.fromkeys(("default", "proportional", "axial", "mrope", "su"), ()),
}
"""Kinds of stretched positions and the keys that transformers asks for (modeling_rope_utils.py), or a class renames."""


def _stretched_otherwise(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with the stretched positions: a misspelt kind, or one without its keys."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(rope := config.get(key), Mapping):
            continue
        if not isinstance(kind := rope.get("rope_type", rope.get("type")), str):
            continue
        if kind not in _STRETCHES and (meant := closest(kind, list(_STRETCHES))) is not None:
            return key, f"{key} has the rope_type {json.dumps(kind)[:60]}: did you mean {meant}?"
        missing = [name for name in _STRETCHES.get(kind, ()) if name not in rope]
        if missing:
            return key, f"{key} has the rope_type {kind} and lacks {', '.join(missing)}, which transformers refuses"
    return None


@functools.cache
def fields_of(model_type: str) -> frozenset[str]:
    """The keys whose values a class checks."""
    return frozenset(key for keys in _stored()["types"].get(model_type, {}).values() for key in keys)


def _word(word: str, known: Sequence[str]) -> str:
    """What to write for a word that is not known."""
    meant = closest(word, known)
    return f"write {', '.join(known)}" if meant is None else f"did you mean {meant}?"


def _meant(taken: Sequence[str]) -> str:
    number = {"whole", "fraction"} <= set(taken)
    words = [_MEANT[kind] for kind in _MEANT if kind in taken and not (number and kind in ("whole", "fraction"))]
    return " or ".join(["a number", *words] if number else words)


def listed_otherwise(config: Mapping[str, Any], layers: int) -> tuple[str, str] | None:
    """The first list of kinds of layers that has not one for each, with what is wrong; None where there is none."""
    for key in sorted(LISTS_OF_KINDS):
        listed = config.get(key)
        if isinstance(listed, list | tuple) and len(listed) != layers:
            return key, f"{key} has {len(listed)} entries for {layers} layers: write the kind of each"
    return None


def misspelt(model_type: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key that its class does not have and that misspells one which it has and the configuration does not say.

    Other unknown keys are those of a model's own code, which published files carry along.
    """
    stored = _stored()
    own = stored["keys"].get(model_type)
    if own is None:
        return
    known = {*own, *stored["common"]}
    for key in config.keys() - known:
        meant = closest(key, known - config.keys(), least=_NEAR)
        if meant is not None:
            yield key, meant


def turned_width(config: Mapping[str, Any], head_dim: int | None) -> tuple[str, int] | None:
    """The key and the width of each head that rotary positions turn whole; None where they turn a part, or none.

    `head_dim` is the width where the configuration does not state it.
    """
    key = _stored()["turned"].get(config.get("model_type"))
    rope = config.get("rope_parameters")
    part = config.get("partial_rotary_factor", 1.0)
    if isinstance(rope, Mapping):
        part = rope.get("partial_rotary_factor", part)
    width = head_dim if key == "head_dim" and head_dim is not None else config.get(key or "")
    whole = isinstance(part, int | float) and part >= 1
    return (key, width) if key and whole and isinstance(width, int) else None


def stored_groups(model_type: object) -> Mapping[str, Any]:
    """What a class whose router looks at groups of experts takes where a configuration says nothing; else empty."""
    found: Mapping[str, Any] = _stored()["groups"].get(model_type, {})
    return found


def classified() -> Sequence[str]:
    """Types with a classifier of sequences that is a linear behind the model, of the last token."""
    found: Sequence[str] = _stored()["classified"]
    return found


def whole_heads(model_type: str) -> bool:
    """Whether a class takes no hidden_size but a multiple of num_attention_heads, beside any head_dim."""
    return model_type in _stored()["multiples"]


def _kind(value: Any) -> str:
    """What a value is, in the words of the file; what no JSON file holds is none."""
    for kind, types in _TYPES.items():
        if isinstance(value, types):
            return kind
    return ""

"""What the class of a type does not take of a configuration: null, wrong types, unknown words, misspelt keys.

Most classes of transformers are strict, and refuse such a value before a model is built. A word that they do not know,
as of an activation, fails when the model is built or computes. A key that they do not have they keep and never read.
What they have and check stands in `key_types.json`, which `.ci/generate/key_types.py` writes.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parcompile.diagnostics.suggest import closest

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
    text = (importlib.resources.files("parcompile.model") / "key_types.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
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
    for key, words in _stored()["words"].get(model_type, {}).items():
        known = _stored()[words] if isinstance(words, str) else words
        if isinstance(word := config.get(key), str) and word not in known:
            return key, f"{key} is {json.dumps(word)[:60]}, which transformers does not know: {_word(word, known)}"
    return None


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


def _kind(value: Any) -> str:
    """What a value is, in the words of the file; what no JSON file holds is none."""
    for kind, types in _TYPES.items():
        if isinstance(value, types):
            return kind
    return ""

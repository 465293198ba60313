"""Every model type that the installed transformers may name: what works, and why the others do not.

A type works when it has a row in `families/` that the runtime injects. The others stand in `model_types.json`, which
`.ci/generate/model_types.py` writes, with the key of their reason.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parcompile.user_files import shipped

from .families import BUILT_IN, FAMILIES
from .family import Family, by_type, types_with
from .tables import counts_of, table_of

# Why the runtime refuses a model type, in words, by the key that `model_types.json` names.


class Reason(NamedTuple):
    """Why a type is refused."""

    title: str
    why: str
    """After "NAME is refused: "."""
    instead: str = ""
    """What would run."""


REASONS: Mapping[str, Reason] = {
    name: Reason(**stored) for name, stored in shipped("parcompile.model", "reasons.json").items()
}


# Every model type that the installed transformers may name: what works, and why the others are refused.

TEXT_PARTS = types_with("text_part")
"""Multimodal types whose text part, given text alone, computes what a model of its type does."""

TEXT_ALIKE: Mapping[str, str] = by_type("text_alike")
"""Types of text parts that are no causal language models of their own, and the type that computes the same of text
alone: where they rotate each feature by one of three positions, those of a token of text are one."""

RUNTIME_FAMILIES = tuple(BUILT_IN)
"""Model types that the runtime injects."""


CORRECTED = types_with("corrected_routers")
"""Model types whose routers have such scores."""

_ROUTER_SCORES = by_type("router_scores")


def router_scores(model_type: str) -> str | None:
    """What makes scores of a router's logits: "softmax" or "sigmoid"; None: its class has no logits of these."""
    found: str | None = _ROUTER_SCORES.get(model_type, "sigmoid" if model_type in CORRECTED else "softmax")
    return found


SCALED_INPUTS = types_with("scaled_inputs")
"""Model types of which the router's scores scale what experts take, not what they give."""

WEIGHTED_IN_TYPE = types_with("weighted_in_type")
"""Model types whose routers weight experts in the type of the weights; others do in fp32."""


LOGIT_CAP = "final_logit_softcapping"
CAPPED_LOGITS = by_type("logit_cap")
"""Model types that keep logits within a cap (`LOGIT_CAP`), and what their classes have for it."""

SCORE_CAP = "attn_logit_softcapping"
CAPPED_SCORES = by_type("score_cap")
"""Model types whose classes keep scores of attention within a cap where nobody says another (`SCORE_CAP`)."""
SCORE_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
DROPPED_SCORES = by_type("score_dropout")
"""Model types whose classes drop weights of attention where nobody says how many."""

_NEAREST = by_type("nearest")
ALIKE: Mapping[str, str] = by_type("alike")
"""Types of code that comes with the weights, or of a tokenizer, and the type that has their layers."""


TYING: Mapping[str, Callable[[bool | None, bool | None], bool]] = {
    "": lambda whole, _: bool(whole),
    "yes": lambda whole, _: whole is None or whole,
    "either": lambda whole, text: bool(whole or text),
    "either or yes": lambda whole, text: bool(whole) or text is None or text,
    "unless both": lambda whole, text: whole is not False or text is not False,
    "text": lambda whole, text: bool(text if whole is None else whole),
}
"""Whether a multimodal model ties its head, from what the whole and its text part say (None: nothing)."""


class ModelType(NamedTuple):
    """A model type."""

    name: str
    works: bool
    planned: bool
    """The compiler knows the names and shapes of its parameters."""
    reason: Reason | None = None
    text: str | None = None
    """The type as which the text part of a multimodal model is trained, where the file says nothing."""
    text_kind: str | None = None
    """The type that transformers gives it; `TEXT_ALIKE` has that of the layers."""
    nearest: str | None = None
    note: str = ""
    causal: bool = True
    """transformers builds it as a causal language model, and not only as a multimodal one."""
    tied: str = ""
    """Of a multimodal model, who says whether the head is tied to the embedding: a key of `TYING`."""

    @property
    def text_works(self) -> bool:
        """Whether the text part can be trained alone."""
        return self.name in TEXT_PARTS and self.text in RUNTIME_FAMILIES

    @property
    def family(self) -> Family | None:
        """Its row."""
        return FAMILIES.get(ALIKE.get(self.name, self.name))


_stored = functools.partial(shipped, "parcompile.model", "model_types.json")


def transformers_version() -> str:
    """The version that the list was read from."""
    return str(_stored()["transformers"])


@functools.cache
def model_types() -> Mapping[str, ModelType]:
    """Every known type by name, in alphabetical order."""
    refused = {name: _refused(name, entry) for name, entry in _stored()["types"].items()}
    works = {name: ModelType(name, works=True, planned=True) for name in RUNTIME_FAMILIES}
    alike = {
        name: ModelType(name, works=True, planned=True, note=refused[name].note)
        for name, other in ALIKE.items()
        if name in refused and other in RUNTIME_FAMILIES
    }
    both = {**refused, **works, **alike}
    return {name: both[name] for name in sorted(both)}


def model_type(name: str) -> ModelType:
    """What is known of a type; of a name that transformers does not know, the nearest type."""
    return model_types().get(name) or _refused(name, {"reason": "unknown"})


def _refused(name: str, entry: Mapping[str, str]) -> ModelType:
    nearest = _NEAREST.get(name)
    kind = entry.get("text")
    text = None if kind is None else TEXT_ALIKE.get(kind, kind)
    if nearest is None and text is not None:
        nearest = text if text in RUNTIME_FAMILIES else _NEAREST.get(text)
    if nearest is None:
        close = difflib.get_close_matches(name, RUNTIME_FAMILIES, 1, 0.7)
        nearest = close[0] if close else None
    reason = REASONS[entry["reason"]]
    note = f"its layers are those of {ALIKE[name]}, as which it is planned and trained" if name in ALIKE else ""
    described = name in FAMILIES or table_of(name) is not None
    causal, tied = "only" not in entry, entry.get("tied", "")
    return ModelType(name, False, described, reason, text, kind, nearest, note, causal, tied)


_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")


def refusal(name: Any, config: Mapping[str, Any]) -> tuple[str, str]:
    """Why a configuration of this type is refused, in a sentence, and what to do instead."""
    if not isinstance(name, str):
        return f"model_type is {name!r}: it has to be the name of a model type", "`parcompile models` lists them"
    known, whole = model_type(name), _whole_of(name)
    assert known.reason is not None
    if whole is not None:
        return _part_alone(name, whole)
    sentence = f"model_type {name!r} is refused: {known.reason.why}{_layers(config)}"
    inner = config.get("text_config")
    told = known.reason is not REASONS["multimodal"]
    if isinstance(inner, Mapping) and not told:
        part = inner.get("model_type") or known.text
        if not isinstance(part, str) or part not in FAMILIES:
            why = model_type(str(part)).reason
            sentence += f"; its text part is {part!r}, which is refused too: {why.why if why else ''}"
    elif known.text_works:
        sentence += f"; its text part is {known.text!r}, which works, but the configuration has no text_config"
    if (counts := counts_of(config)) is not None:
        sentence += f"; this configuration has {counts.total:,} parameters"
    found = [f"what runs: {known.reason.instead}"] if told and inner is not None and known.reason.instead else []
    if known.note:
        found.append(known.note)
    if known.nearest and not known.note:
        found.append(f"the nearest type that works is {known.nearest}")
    found.append(f"`parcompile models {name}` says more" if name in model_types() else "`parcompile models` lists all")
    return sentence, "; ".join(found)


def _whole_of(name: str) -> ModelType | None:
    """The multimodal type whose text part has this type, where the type is no model of its own."""
    if name in model_types():
        return None
    found = {one.name: one for one in model_types().values() if one.text_kind == name}
    near = difflib.get_close_matches(name, found, 1, 0.0)
    return found[near[0]] if near else None


def _part_alone(name: str, whole: ModelType) -> tuple[str, str]:
    why = f"it is the text part of {whole.name}, and no causal language model of transformers has its layers alone"
    assert whole.reason is not None
    if whole.text_works:
        instead = f"give the config.json of the whole model, whose model_type is {whole.name}: its text part is trained"
        return f"model_type {name!r} is refused: {why}", instead
    told = "" if whole.reason is REASONS["multimodal"] else f"; {whole.reason.why}"
    return f"model_type {name!r} is refused: {why}{told}", f"`parcompile models {whole.name}` says more"


def _layers(config: Mapping[str, Any]) -> str:
    """Which layers a configuration has, where it lists their kinds."""
    for key in _KINDS:
        kinds = config.get(key)
        if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            return f" ({key}: {', '.join(f'{count} {kind}' for kind, count in counts.items())})"
    return ""

"""What the class of a type does not take of a configuration: null, wrong types, unknown words, misspelt keys.

Most classes of transformers are strict, and refuse such a value before a model is built. A word that they do not know,
as of an activation, fails when the model is built or computes. A key that they do not have they keep and never read.
What they have and check stands in `key_types.json`, which `.ci/generate/key_types.py` writes.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from parcompile.diagnostics import closest
from parcompile.model import ModelConfigError
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
LISTS_OF_KINDS = frozenset({"layer_types", "mlp_layer_types", "no_rope_layers", "layer_rope_theta"})
"""Keys whose lists transformers compares with the number of layers, or reads for each layer."""
_LISTED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers"), ("text",)),
    **dict.fromkeys(("mlp_only_layers", "moe_layers", "num_attention_heads_per_layer"), ("whole",)),
    "no_rope_layers": ("switch", "whole"),
    "activation_sparsity_pattern": ("whole", "fraction"),
}
"""What lists hold that families read, also of types whose class does not check them."""
_BY_LAYER = "per_layer_config"
"""What single layers have in the place of the model's, in a class of any type."""
_FITS: Mapping[str, Callable[[float], bool]] = {
    "more than 0": lambda number: number > 0,
    "0 or more": lambda number: number >= 0,
    "between 0 and 1": lambda number: 0 <= number <= 1,
}
_BASES = re.compile(r"(?!layer_)(\w+_)?rope_theta|rope_local_base_freq|rotary_emb_base")
_COUNTED = re.compile(
    rf"{_BASES.pattern}|(\w+_)?eps|rotary_(pct|dim)|partial_rotary_factor|factor|beta_(fast|slow)"
    r"|((low|high)_freq|attention|short|long)_factor|mscale(_all_dim)?|llama_4_scaling_beta|original_max_position_embeddings|initializer_range|num_nextn_predict_layers"
)
"""Keys that models count with, of classes too that do not check them."""
_BOUNDS = tuple(
    (re.compile(keys), fits, why)
    for keys, fits, why in (
        ("attention_chunk_size|no_rope_layer_interval|head_dim|rotary_dim|dim_model_base", "more than 0", ""),
        (_BASES.pattern, "more than 0", ": positions turn by base^(-2i / head_dim)"),
        ("rotary_pct", "between 0 and 1", ": it is a share of head_dim"),
        ("query_pre_attn_scalar|attention_multiplier", "more than 0", ": attention scores are scaled by it"),
        ("logits_scaling|(attn|final)_logit_softcapping", "more than 0", ": logits are divided by it"),
        (r"(\w+_)?(eps|epsilon)", "0 or more", ": norms divide by √(variance + epsilon)"),
        (r"(\w+_)?(initializer_range|init_std|std_dev)", "0 or more", ": it is a standard deviation"),
        (r"(\w+_)?(dropout|dropout_prob|pdrop)", "between 0 and 1", ": it is a share"),
    )
)
"""What numbers have to be with which classes compute, beside the sizes that parameters follow from, and why."""
_ENDLESS = "time_step_limit"
"""A key whose numbers may be infinite."""
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


_stored = functools.partial(shipped, "parcompile.model", "key_types.json")


def mistyped(model_type: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first key whose value its class refuses, with what is wrong; None where there is none.

    A type of which nothing is known, such as a plug-in's, has none.
    """
    if (wrong := _out_of_bounds(model_type, config)) is not None:
        return wrong
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
        listed = value if isinstance(value, list | tuple) else [None]
        if value is not None and not {*map(_kind, listed)} <= {*_LISTED[key]}:
            said = json.dumps(value, default=str)[:60]
            return key, f"{key} is {said}: it has to be a list, each entry of it {_meant(_LISTED[key])}"
    for key in shipped("parcompile.model", "families.json").get(model_type, {}).get("sections", ()):
        if (section := config.get(key)) and not isinstance(section, Mapping):
            return key, f"{key} is {json.dumps(section, default=str)[:60]}: it has to be {_MEANT['mapping']}"
    if (by_layer := config.get(_BY_LAYER)) is not None and not (
        isinstance(by_layer, Mapping)
        and all(str(layer).isdecimal() and isinstance(own, Mapping) for layer, own in by_layer.items())
    ):
        said = json.dumps(by_layer, default=str)[:60]
        return _BY_LAYER, f"{_BY_LAYER} is {said}: it has to be a mapping from numbers of layers to mappings"
    for key, words in _stored()["words"].get(model_type, {}).items():
        known = _stored()[words] if isinstance(words, str) else words
        if isinstance(word := config.get(key), str) and word not in known:
            return key, f"{key} is {json.dumps(word)[:60]}, which transformers does not know: {_word(word, known)}"
    return _stretched_otherwise(model_type, config) if "rope_parameters" in fields_of(model_type) else None


def _out_of_bounds(model_type: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first number with which no class can compute, of keys inside others too."""
    own, known = fields_of(model_type), keys_of(model_type)
    for name, key, value in _leaves(portable(architecture(config))):
        if isinstance(value, Mapping) and FLOAT in value:
            if key != _ENDLESS:
                return name, f"{key} is {value[FLOAT]}: it has to be a finite number"
            continue
        is_base = _BASES.fullmatch(key) is not None
        is_number = is_base or (name in known and _COUNTED.fullmatch(key) is not None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            if is_number and value is not None:
                return name, f"{key} is {json.dumps(value, default=str)[:60]}: it has to be a number"
            continue
        is_bound = is_base or key == "rotary_pct" or (key in own and (model_type, key) not in _NO_SIZE)
        for keys, fits, why in _BOUNDS if is_bound else ():
            if keys.fullmatch(key) and not _FITS[fits](value):
                return name, f"{key} is {value}: it has to be {fits}{why}"
    return None


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each value that holds no others: the outermost key, its own key, and itself."""
    waiting = [(key, key, value) for key, value in config.items()]
    for name, key, value in waiting:
        if isinstance(value, Mapping) and value.keys() - {FLOAT} and not _COUNTED.fullmatch(key):
            waiting += [(name, str(inner), one) for inner, one in value.items()]
        elif isinstance(value, list | tuple) and value and not _BASES.fullmatch(key):
            waiting += [(name, key, one) for one in value]
        else:
            yield name, key, value


_STRETCHES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "proportional"), ()),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kinds of positions that transformers computes and the keys that it asks for (modeling_rope_utils.py)."""


def _stretched_otherwise(model_type: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with the positions: a kind that transformers does not know, or one without its keys."""
    row = shipped("parcompile.model", "families.json").get(model_type, {})
    known = [*_STRETCHES, *row.get("renamed_positions", ())]
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(given := config.get(key), Mapping):
            continue
        for kind, own in given.items():
            if kind.endswith("_attention") and own is not None and not isinstance(own, Mapping):
                return key, f"{key} has {json.dumps(own, default=str)[:60]} for {kind}: it has to be a mapping"
        for rope in (given, *(one for one in given.values() if isinstance(one, Mapping))):
            kind = rope.get("rope_type", rope.get("type"))
            if kind is not None and kind not in known:
                said = f"{key} has the rope_type {json.dumps(kind)[:60]}, which transformers does not know"
                return key, f"{said}: {_word(str(kind), known)}"
        # Classes that have positions for each kind of layer do not check others.
        kind = None if row.get("positions_by_kind") else given.get("rope_type", given.get("type"))
        # Where yarn has null, transformers divides the positions by the original ones.
        keys = given.keys() if kind == "yarn" else {name for name in given if given[name] is not None}
        missing = [name for name in _STRETCHES.get(str(kind), ()) if name not in keys]
        if missing:
            return key, f"{key} has the rope_type {kind} and lacks {', '.join(missing)}, which transformers needs"
    return None


@functools.cache
def fields_of(model_type: str) -> frozenset[str]:
    """The keys whose values a class checks."""
    return frozenset(key for keys in _stored()["types"].get(model_type, {}).values() for key in keys)


@functools.cache
def keys_of(model_type: str) -> frozenset[str]:
    """The keys that a class has, whether it checks them or not."""
    stored = _stored()
    return frozenset((*stored["keys"].get(model_type, ()), *stored["common"]))


def _word(word: str, known: Sequence[str]) -> str:
    """What to write for a word that is not known."""
    meant = closest(word, known)
    return f"write {', '.join(known)}" if meant is None else f"did you mean {meant}?"


def _meant(taken: Sequence[str]) -> str:
    number = {"whole", "fraction"} <= set(taken)
    words = [_MEANT[kind] for kind in _MEANT if kind in taken and not (number and kind in ("whole", "fraction"))]
    return " or ".join(["a number", *words] if number else words)


def check_lists(config: Mapping[str, Any], layers: int) -> None:
    """Refuses lists that have not one entry for each layer.

    Raises:
        ModelConfigError: the first of them.
    """
    for key in sorted(LISTS_OF_KINDS):
        listed = config.get(key)
        if isinstance(listed, list | tuple) and len(listed) != layers:
            raise ModelConfigError(f"{key} has {len(listed)} entries for {layers} layers: write one for each", key)


def misspelt(model_type: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key that its class does not have and that misspells one which it has and the configuration does not say.

    Other unknown keys are those of a model's own code, which published files carry along.
    """
    if model_type not in _stored()["keys"]:
        return
    known = keys_of(model_type)
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


WITHOUT_EFFECT = (
    *("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache"),
    "quantization_config",
)
"""Keys that change no number of a training step.

They name who wrote the file and where it lay, the class that was saved, the type of its weights (a spec has its own)
and the cache of keys and values, which serves generation. Quantized weights cannot be loaded (`PretrainedFolder` says
so): how they were quantized holds for no weight of a run.
"""


FLOAT = "__float__"
"""The key of an object that stands for a number without a name: {"__float__": "Infinity"}."""


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the keys that have no effect on training."""
    return {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}


def portable(value: Any) -> Any:
    """A configuration whose numbers JSON has names for; others are objects, as transformers writes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: portable(one) for key, one in value.items()}
    return [portable(one) for one in value] if isinstance(value, list | tuple) else value

"""Public models by short name, and the causal language model inside the configuration of a multimodal one.

A preset holds every key of the published `config.json` that changes numbers or that generation needs, under the names
that stand there; `source` says where it was published. What a published file leaves out has the default of the model's
configuration class. The tests check the counts and that no class reads a key that is neither stated nor known to be
left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from parcompile.user_files import shipped

from .catalogue import ALIKE, TEXT_ALIKE, TEXT_PARTS, TYING, model_types
from .family import by_type, types_with
from .tables import alias_of, table_of


class Preset(NamedTuple):
    """A public model."""

    name: str
    hf_name: str
    source: str
    """Where the configuration was published."""
    parameters: int
    config: Mapping[str, Any]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """All presets under their short names."""
    return {name: Preset(name, **entry) for name, entry in shipped("parcompile.model", "presets.json").items()}


def near_presets(name: str) -> tuple[str, ...]:
    """The presets that a name may mean: those that begin with it, or the longest that it begins or ends with.

    A name of the Hugging Face Hub is read without its owner, and as that of the model that was trained further.
    """
    wanted = bare(_untuned(name))
    longer = [one for one in presets() if bare(one).startswith(wanted)] if len(wanted) > 2 else []
    if longer:
        return tuple(longer)
    shorter = [one for one in presets() if wanted.startswith(bare(one)) or wanted.endswith(bare(one))]
    return (max(shorter, key=len),) if shorter else ()


_TUNED = ("instruct", "chat", "it", "base", "hf", "pt", "thinking")
"""What the names of further trained models of one shape have: parts between hyphens."""


def preset_alike(name: str) -> Preset | None:
    """The preset of which a name of the Hugging Face Hub names a further trained model, without or with its owner.

    Such a model has the same dimensions; its `config.json` may say other positions or tokens.
    """
    wanted = _untuned(name)
    return next((one for one in presets().values() if wanted in {_untuned(one.name), _untuned(one.hf_name)}), None)


def _untuned(name: str) -> str:
    parts = name.rpartition("/")[2].lower().split("-")
    return "-".join(part for part in parts if part not in _TUNED).removeprefix("meta-")


def bare(name: str) -> str:
    """A name without case and separators."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_preset(name: str) -> Preset | None:
    """The preset of this short or Hugging Face name, in any case; None when there is none."""
    wanted = name.lower()
    for preset in presets().values():
        if wanted in {preset.name, preset.hf_name.lower()}:
            return preset
    return None


Config = Mapping[str, Any]

_BESIDE = frozenset(
    {
        *("architectures", "model_type", "text_config", "torch_dtype", "dtype", "transformers_version"),
        "tie_word_embeddings",  # read by text_part
    }
)
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_POSITIONS: Mapping[str, int] = by_type("positions")
"""`max_position_embeddings` of the classes of text parts, for files that leave it out and rows that do not say it.
Source: the configuration classes of transformers 5.23."""
_FLAT = types_with("flat_file")
"""Types whose published files have the keys of the text part beside those of the whole."""
_OF_THE_WHOLE = frozenset(
    {
        *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
        *(f"{kind}_{end}_token_id" for kind in ("image", "video", "vision") for end in ("start", "end")),
        *("im_start_id", "im_end_id", "im_newline_id"),
    }
)
"""Keys of these files that are not the text part's."""

_OLD_NAMES: Mapping[str, Mapping[str, str]] = by_type("old_names")
"""Keys of published files that a class of transformers takes under another name (configuration_bloom.py)."""

_DEFAULTS: Mapping[str, Config] = by_type("class_defaults")
"""What the class of a text part has for a key that is left out, where the class that it is read as has another value.
Source: the configuration classes of transformers 5.23."""
_ALWAYS: Mapping[str, Config] = by_type("always")
"""What the class of a text part does whatever a configuration says of these keys, which it does not read."""
_NAMED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hunyuan_vl_text": {"attention_head_dim": ("head_dim",), "org_vocab_size": ("vocab_size",)},
    "paddleocr_vl_text": {"use_bias": ("attention_bias", "mlp_bias")},
}
"""Keys of text parts, and those of the class that they are read as which say the same."""
_UNUSED: Mapping[str, frozenset[str]] = {"unlimited_ocr_text": frozenset({"layer_types", "sliding_window"})}
"""Keys of text parts that change no number of a training step: windows that begin behind the prompt, in generation."""
_OF_ANY_TYPE = types_with("text_of_any_type")
"""Multimodal types whose class builds a text part of the type that it names; others build their own in any case."""
_SHARED_OUT = types_with("heads_share_hidden_size")
"""Types whose heads share out the hidden size where `head_dim` is left out; those that they are read as have 128."""
_ROPE_TYPES = {"mrope": "default", "xdrope": "dynamic"}
"""Names of rotations by several positions, and what they are of one."""


def text_part(config: Config) -> Config:
    """The configuration of the text part of a multimodal model; any other configuration as it is.

    A type of code that comes with the weights is read as the type of transformers that has its layers.

    What the text part leaves out keeps the default of its own class, except for `tie_word_embeddings`: the class of
    the whole decides whether that of the whole counts, or that of the text part (`TYING`).
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        return config  # refused as what it is
    inner = config.get("text_config", _flat_part(config))
    if name in _OLD_NAMES:
        return _renamed(config, _OLD_NAMES[str(name)])
    if name in ALIKE:
        return {key: value for key, value in config.items() if key != "auto_map"} | {"model_type": ALIKE[name]}
    if name not in TEXT_PARTS or not isinstance(inner, Mapping):
        return config
    known = model_types()[name]
    kind = inner.get("model_type") or known.text_kind
    if not isinstance(kind, str):
        return config
    if known.text_kind in TEXT_ALIKE and name not in _OF_ANY_TYPE:
        kind = known.text_kind
    if kind in TEXT_ALIKE:
        inner = _as_alike(str(kind), inner)
        kind = TEXT_ALIKE[str(kind)]
    kind = ALIKE.get(str(kind), kind)
    if not (kind in model_types() and model_types()[str(kind)].works):
        return config  # refused, with the reasons of both
    tied = TYING[known.tied](config.get("tie_word_embeddings"), inner.get("tie_word_embeddings"))
    return {**_left_to_class(str(kind), inner), **inner, "model_type": kind, "tie_word_embeddings": tied}


def _renamed(config: Config, names: Mapping[str, str]) -> Config:
    """With keys under the names that their class gives them; an old name counts before the new one there."""
    old = {key: config[key] for key in names if config.get(key) is not None}
    return {key: value for key, value in config.items() if key not in names} | {names[key]: old[key] for key in old}


def _left_to_class(kind: str, inner: Config) -> Config:
    """Sizes that the text part leaves to its class; files of models without other parts have to state theirs."""
    table = table_of(kind)
    if table is None:
        return {}
    positions = {"max_position_embeddings": _POSITIONS[kind]} if kind in _POSITIONS else {}
    sizes = {key: value for key in _SIZES if (value := table.defaults.get(key)) is not None} | positions
    said = {table.names.get(key, key) for key in inner}
    return {key: value for key, value in sizes.items() if key not in said}


def _flat_part(config: Config) -> Config | None:
    if config.get("model_type") not in _FLAT or "hidden_size" not in config:
        return None
    return {key: value for key, value in config.items() if key not in _OF_THE_WHOLE | _BESIDE}


def _as_alike(kind: str, inner: Config) -> Config:
    """The text part of this type, as one of the type that computes the same of text alone."""
    named = _NAMED.get(kind, {})
    known = {key: value for key, value in inner.items() if key not in named and key not in _UNUSED.get(kind, ())}
    known |= {other: inner[key] for key, others in named.items() if key in inner for other in others}
    said = {alias_of(TEXT_ALIKE[kind], key) for key in known}
    defaults = {key: value for key, value in _DEFAULTS.get(kind, {}).items() if key not in said}
    found = {**defaults, **known, **_ALWAYS.get(kind, {})}
    if kind == "unlimited_ocr_text" and found.get("mlp_layer_types") is None:
        found |= _first_dense(found.get("first_k_dense_replace", 1), found["num_hidden_layers"])
    if kind in _SHARED_OUT and "head_dim" not in found:
        sizes = {**_left_to_class(TEXT_ALIKE[kind], found), **found}
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            found["head_dim"] = hidden // heads
    for key in ("rope_parameters", "rope_scaling"):
        rope = found.get(key)
        if not isinstance(rope, Mapping):
            continue
        kept = {one: value for one, value in rope.items() if not one.startswith(("mrope_", "xdrope_"))}
        found[key] = {one: _ROPE_TYPES.get(str(value), value) for one, value in kept.items()}
        if "rope_theta" in kept:
            found.pop("rope_theta", None)
    return found


def _first_dense(dense: Any, layers: Any) -> Config:
    """The kinds of MLPs of layers of which the first are dense; nothing where these are no numbers."""
    if not (isinstance(dense, int) and isinstance(layers, int)):
        return {}
    return {"mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)]}


def left_out(config: Config) -> tuple[str, ...]:
    """The keys of a multimodal configuration that its text part does not have."""
    kept = _BESIDE | (config.keys() - _OF_THE_WHOLE if "text_config" not in config else frozenset())
    return tuple(key for key in config if key not in kept)

"""A Hugging Face configuration in the switches by which other tools describe a layer, and back.

Megatron-LM and gpt-neox describe a model by switches: which norm, which activation, which biases. A Hugging Face
configuration describes it by a model type and a few keys. `families` says for each model type which switches its keys
set, so that both directions follow from one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from parcompile.backends.artefacts import losses_of
from parcompile.backends.statements import Facts, Values, holds
from parcompile.model import families as model_families
from parcompile.model.shape import ModelShape, MoeShape
from parcompile.model.tables import class_default, reads
from parcompile.spec import Spec

from .families import (
    ACTIVATIONS,
    FAMILIES,
    LACKS,
    SCALING_KEYS,
    Architecture,
    InexpressibleError,
    Rope,
    Router,
    Switches,
)


def config_of(wanted: Architecture, sizes: Mapping[str, int], moe: MoeShape | None = None) -> dict[str, Any]:
    """The Hugging Face configuration of a model with these switches: that of the plainest family that has them.

    Args:
        wanted: the switches.
        sizes: those of heads and of the dense MLP, under Hugging Face's names.
        moe: the sizes of the experts, when there are any.

    Raises:
        InexpressibleError: no family has them together; it names what the nearest one has instead.
    """
    lacks = {name: _lacks(family, name, wanted) for name, family in FAMILIES.items()}
    nearest = min(lacks, key=lambda name: len(lacks[name]))
    if lacks[nearest]:
        why = f"no model type of this compiler has them together; {nearest} comes nearest, with {lacks[nearest][0]}"
        raise InexpressibleError(f"layers with {_described(wanted)}", why)
    found = {"model_type": nearest, **_sizes(nearest, wanted, sizes), **_switches(FAMILIES[nearest], wanted)}
    return found if moe is None else found | _expert_sizes(nearest, moe)


def _lacks(family: Switches, name: str, wanted: Architecture) -> list[str]:
    """What a family has in place of what is wanted, the greatest difference first."""
    facts: Facts = {
        "family.": _switch_of(family),
        "wanted.": _switch_of(wanted),
        "has_head_dim": lambda _wanted: family.reads_head_dim and reads(name, "head_dim"),
        "has_dropouts": lambda _wanted: _has_dropouts(family, wanted),
        "has_router": lambda _wanted: _has_router(family.router, wanted.router, family),
    }
    values = Values(wanted, facts, lambda _name: None)
    return [row["lack"] for row in LACKS if holds(row, values)]


def _has_dropouts(family: Switches, wanted: Architecture) -> bool:
    """Dropouts of one key have to be equal. One that a family lacks is named as lost later, not refused here."""
    keys: dict[str, float] = {}
    return all(
        keys.setdefault(key, getattr(wanted, part)) == getattr(wanted, part)
        for part, (key, _) in family.dropouts.items()
    )


def _has_router(fixed: Router | None, wanted: Router | None, family: Switches) -> bool:
    if fixed is None or wanted is None:
        return True
    parts = {one.name for one in dataclasses.fields(Router)} - {"dense_layers", *family.router_keys}
    same = all(getattr(fixed, part) == getattr(wanted, part) for part in parts)
    return same and (family.has_dense_layers or not wanted.dense_layers)


def _sizes(name: str, wanted: Architecture, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that the family has keys for, where it would not derive the same."""
    found = dict(sizes)
    if not FAMILIES[name].grouped:
        found.pop("num_key_value_heads", None)
    if not wanted.own_head_dim and class_default(name, "head_dim") is None:
        found.pop("head_dim", None)
    return found


def _switches(family: Switches, wanted: Architecture) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if wanted.tied != family.tied:
        found["tie_word_embeddings"] = wanted.tied
    found[family.epsilon[0]] = wanted.epsilon
    found |= _activation(family, wanted)
    for keys in (family.biases[wanted.biases], family.qk_norm[wanted.qk_norm], family.parallel[wanted.parallel]):
        found |= keys
    if wanted.rope is not None:
        found[family.theta_key] = wanted.rope.theta
        if family.percent is not None:
            found[family.percent[0]] = wanted.rope.percent
        if wanted.rope.scaling:
            found["rope_scaling"] = dict(wanted.rope.scaling)
    if wanted.window is not None:
        found["sliding_window"] = wanted.window
    found |= {key: getattr(wanted, part) for part, (key, _) in family.dropouts.items()}
    found["initializer_range"] = wanted.initializer_range
    if wanted.router is not None:
        found |= {key: getattr(wanted.router, part) for part, (key, _) in family.router_keys.items()}
    return found


def _expert_sizes(name: str, moe: MoeShape) -> dict[str, Any]:
    """The sizes of the experts under the family's own names."""
    keys = model_families.FAMILIES[name].experts
    assert keys is not None
    found: dict[str, Any] = {
        keys.count[0]: moe.num_experts,
        keys.per_token[0]: moe.num_experts_per_token,
        keys.width[0]: moe.intermediate_size,
    }
    if keys.shared_width:
        found[keys.shared_width[0]] = moe.shared_intermediate_size
    if keys.shared_count:
        count, rest = divmod(moe.shared_intermediate_size, moe.intermediate_size)
        if rest:
            raise InexpressibleError(
                f"shared experts {moe.shared_intermediate_size} wide",
                f"{name} has several of {moe.intermediate_size}, the width of the others",
            )
        found[keys.shared_count[0]] = count
    if moe.first_moe_layer:
        if keys.dense_layers:
            found[keys.dense_layers[0]] = moe.first_moe_layer
        else:
            found["mlp_only_layers"] = list(range(moe.first_moe_layer))
    elif keys.dense_layers:
        found[keys.dense_layers[0]] = 0
    return found


def _activation(family: Switches, wanted: Architecture) -> dict[str, str]:
    key, default = family.activation
    if ACTIVATIONS[default] == wanted.activation:
        return {}
    return {key: next(name for name, computes in ACTIVATIONS.items() if computes == wanted.activation)}


def _described(wanted: Architecture) -> str:
    parts = [
        "RMSNorm" if wanted.rms_norm else "LayerNorm",
        f"{'gated ' if wanted.gated else ''}{wanted.activation}",
        "rotary positions" if wanted.rope else "a table of positions",
        "biases" if all(wanted.biases) else "some biases" if any(wanted.biases) else "no biases",
    ]
    extra = {
        "norms of queries and keys": wanted.qk_norm,
        "attention beside the MLP": wanted.parallel,
        "latent attention": wanted.latent,
        f"a window of {wanted.window}": wanted.window is not None,
        "experts": wanted.router is not None,
    }
    return ", ".join([*parts, *(name for name, on in extra.items() if on)])


Config = Mapping[str, Any]

_NO_SCALING = ("default", None)


def architecture_of(config: Config, shape: ModelShape) -> Architecture:
    """The switches of a model.

    Raises:
        InexpressibleError: a model type with activations, norms or scales of its own, or a key that no switch stands
            for.
    """
    name = shape.model_type
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InexpressibleError(f"model_type {name}", f"its layers are none of those that can be described: {known}")
    family = FAMILIES[name]
    activation = str(_value(config, *family.activation))
    if activation not in ACTIVATIONS:
        raise InexpressibleError(f"{family.activation[0]} {activation}", "there is no switch for it")
    if shape.head.labels:
        raise InexpressibleError(f"num_labels {shape.head.labels}", "it trains language models, and no classifiers")
    if shape.biases.head:
        raise InexpressibleError("head_bias", "there is no switch for a bias of the head")
    return Architecture(
        rms_norm=family.rms_norm,
        epsilon=float(_value(config, *family.epsilon)),
        activation=ACTIVATIONS[activation],
        gated=shape.mlp.gated,
        biases=(shape.biases.qkv, shape.biases.attention_output, shape.biases.mlp),
        rope=_rope(config, family),
        tied=shape.tie_word_embeddings,
        grouped=shape.num_key_value_heads != shape.num_attention_heads,
        own_head_dim=shape.head_dim * shape.num_attention_heads != shape.hidden_size,
        centered_norm=family.centered_norm,
        qk_norm=shape.heads.qk_norm,
        parallel=_switch(config, family.parallel, default=family.parallel_by_default),
        window=_window(config, shape),
        **{part: float(_value(config, *key)) for part, key in family.dropouts.items()},
        initializer_range=float(_value(config, "initializer_range", family.initializer_range)),
        router=_router(config, family, shape.moe),
        latent=family.latent,
    )


def _value(config: Config, key: str, default: Any) -> Any:
    found = config.get(key)
    return default if found is None else found


def _switch(config: Config, ways: Mapping[bool, Mapping[str, bool]], *, default: bool) -> bool:
    keys = {key for way in ways.values() for key in way}
    return bool(_value(config, next(iter(keys)), default)) if keys else next(iter(ways))


def _router(config: Config, family: Switches, moe: MoeShape | None) -> Router | None:
    if family.router is None or moe is None:
        return None
    given = {part: _value(config, *key) for part, key in family.router_keys.items()}
    fixed = family.router
    return dataclasses.replace(
        fixed,
        normalized=bool(given.get("normalized", fixed.normalized)),
        scale=float(given.get("scale", fixed.scale)),
        groups=int(given.get("groups", fixed.groups)),
        groups_per_token=int(given.get("groups_per_token", fixed.groups_per_token)),
        dense_layers=moe.first_moe_layer > 0 or moe.layers is not None,
    )


def _window(config: Config, shape: ModelShape) -> int | None:
    window = shape.attention.sliding_window
    kinds = set(config.get("layer_types") or ())
    if window is None or kinds == {"full_attention"} or window >= shape.max_position_embeddings:
        return None
    first = config.get("max_window_layers")
    if len(kinds) > 1 or (config.get("use_sliding_window") and first not in (None, 0)):
        raise InexpressibleError(f"sliding_window {window}", "only some layers have it")
    return window


def _rope(config: Config, family: Switches) -> Rope | None:
    """Rotary positions, as transformers 5 writes them (`rope_parameters`) or as transformers 4 did."""
    if family.theta is None:
        return None
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise InexpressibleError("rope_parameters", "layers have rotary positions of different kinds")
    theta = given.get("rope_theta", _value(config, family.theta_key, family.theta))
    percent = 1.0
    if family.percent is not None:
        percent = given.get("partial_rotary_factor", _value(config, *family.percent))
    kind = given.get("rope_type", given.get("type"))
    scaling: dict[str, Any] = {}
    if kind not in _NO_SCALING:
        kept = {key: given[key] for key in SCALING_KEYS if given.get(key) is not None}
        original = config.get("original_max_position_embeddings")
        if original is not None:
            kept.setdefault("original_max_position_embeddings", original)
        scaling = {"rope_type": str(kind), **kept}
    if family.latent and config.get("rope_interleave") is False:
        raise InexpressibleError("rope_interleave false", "latent attention turns neighbouring elements together")
    return Rope(float(theta), float(percent), scaling)


def facts_of(found: Architecture) -> Facts:
    """What tables read of a model: its switches as "found.NAME"."""
    return {"found.": _switch_of(found)}


def _switch_of(switches: Architecture | Switches) -> Callable[[Any, str], Any]:
    def read(_subject: Any, path: str) -> Any:
        one: Any = switches
        for key in path.split("."):
            one = getattr(one, key, None)
        return one

    return read


def refuse(name: str, spec: Spec, facts: Facts) -> None:
    """Refuses what a tool cannot express at all: the rows that `losses.json` has by this name.

    Raises:
        InexpressibleError: there is such a thing.
    """
    for one in losses_of(name, spec, facts):
        raise InexpressibleError(one.what, one.why)

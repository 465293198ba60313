"""One layer of each kind, and what a configuration lists for those that are left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.layout.pipeline import PipelineSplit
from parcompile.model.families import FAMILIES
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape
from parcompile.plan import Plan


def kept_layers(plan: Plan, config: Any) -> list[int]:
    """One layer of each kind, in order, and further ones until every stage has as many."""
    shape, split = plan.spec.model.shape, plan.spec.parallelism.pipeline_split
    kinds: dict[tuple[Any, ...], int] = {}
    lists = [value for _, value in _by_layer(config, shape)]
    attending = set(shape.attention_layers)
    for layer in range(shape.num_hidden_layers):
        dense = shape.moe is not None and not shape.routed(range(layer, layer + 1))
        keys = shape.of_layer(layer).keys_and_values if shape.kinds else None
        parts = tuple(layer in one.layers for one in shape.parts)
        kind = (dense, layer in attending, keys, parts, *(value[layer] for value in lists))
        kinds.setdefault(kind, layer)
        if shape.kinds and layer == shape.num_hidden_layers - 1:
            kinds[kind] = layer  # some models have a kind for the last layer, whatever their list says
    if shape.shared_blocks is not None:
        # A use of each block, and a second one of the first.
        for layer in shape.shared_blocks.layers[: shape.shared_blocks.count + 1]:
            kinds.setdefault((False, True, None, (), layer), layer)
    stages = split.pp * split.virtual
    if stages > 1 and any(kind[2] is KeysAndValues.OF_ANOTHER_LAYER for kind in kinds):
        return list(range(shape.num_hidden_layers))  # fewer could part layers from those whose keys they use
    # A layer that takes the choice of another stands behind it, in the same stage.
    least = 2 * stages if any(one.behind for one in shape.parts) else 2
    # Layers that come once in a period stay where they are: up to the first of the last kind.
    periodic = _has_periods(shape)
    chosen = list(dict.fromkeys(kinds.values()))
    unit = stages * shape.layers_per_module
    wanted = -(-max(max(chosen) + 1 if periodic else len(chosen), least) // unit) * unit
    if wanted >= shape.num_hidden_layers:
        return list(range(shape.num_hidden_layers))
    if periodic or shape.layers_per_module > 1:
        return list(range(wanted))
    chosen += [layer for layer in range(shape.num_hidden_layers) if layer not in chosen][: wanted - len(chosen)]
    assert len(PipelineSplit(split.pp, split.virtual).counts(wanted)) == stages
    return sorted(chosen)


def _has_periods(shape: ModelShape) -> bool:
    """Whether a period and an offset say which layers attend, or have experts."""
    family = FAMILIES[shape.model_type]
    experts = family.experts
    alternate = shape.moe is not None and shape.moe.layers is not None
    return any(one.is_periodic for one in family.parts) or (
        experts is not None and (experts.period is not None or (alternate and not experts.by_layer))
    )


def lists_of_layers(config: Any, shape: ModelShape, layers: list[int]) -> dict[str, Any]:
    """The keys that say how many layers there are, and of which kind each is."""
    found: dict[str, Any] = {"num_hidden_layers": len(layers) // shape.layers_per_module}
    if shape.runs is not None:
        found["num_layers_per_stack"] = None  # then the other counts the layers of a stack
    if hasattr(config, "num_attention_heads_per_layer"):
        found["num_attention_heads_per_layer"] = None  # all are num_attention_heads
    for key, value in _by_layer(config, shape):
        found[key] = [value[layer] for layer in layers]
    if getattr(config, "moe_layers", None) is not None:
        # The numbers of the layers with experts.
        found["moe_layers"] = [place for place, layer in enumerate(layers) if shape.routed(range(layer, layer + 1))]
    if "attention_types" in config.to_dict():
        # GPT-Neo's list of kinds follows from runs of them.
        found["attention_types"] = [[[kind], 1] for kind in found.pop("attention_layers")]
    experts = FAMILIES[shape.model_type].experts
    if shape.moe is not None and experts is not None:
        dense = sum(layer < shape.moe.first_moe_layer for layer in layers)
        if experts.dense_layers is not None:
            found[experts.dense_layers[0]] = dense
        elif listed := getattr(config, "mlp_only_layers", None):
            found["mlp_only_layers"] = [place for place, layer in enumerate(layers) if layer in listed]
    return found


def kinds_of_layers(plan: Plan, config: Any, layers: list[int], heads: Mapping[str, Any]) -> dict[str, Any]:
    """What the layers have otherwise than others: widths of heads as they are, as many kv heads to a query head."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    found: dict[str, Any] = {}
    if getattr(config, "num_kv_shared_layers", None):
        first = shape.num_hidden_layers - config.num_kv_shared_layers
        found["num_kv_shared_layers"] = sum(layer >= first for layer in layers)
    overrides = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_overrides", None)
    if overrides is None:
        return found
    found["per_layer_config"] = {}
    for place, layer in enumerate(layers):
        own = dict(overrides.get(layer, {}))
        if "num_key_value_heads" in own:
            # As many ranks as before share a kv head.
            own["num_key_value_heads"] = _few(own["num_key_value_heads"], tp, heads["num_attention_heads"])
        if own:
            found["per_layer_config"][str(place)] = own
    return found


def _few(kv_heads: int, tp: int, heads: int) -> int:
    """A count of kv heads that is held by as many ranks each, and divides the query heads of the small model."""
    return kv_heads if kv_heads <= tp and heads % kv_heads == 0 else tp


_BY_LAYER = ("layer_types", "_layers", "layer_rope_theta", "layers_block_type")
"""Endings of keys that list something for each layer."""


def _by_layer(config: Any, shape: ModelShape) -> list[tuple[str, list[Any]]]:
    endings = (*_BY_LAYER, *(key for one in FAMILIES[shape.model_type].parts for key in one.lists))
    count = shape.num_hidden_layers
    return [
        (key, value)
        for key, value in config.to_dict().items()
        if key.endswith(endings) and isinstance(value, list) and len(value) == count
        if key not in ("mlp_only_layers", "moe_layers")
    ]

"""A small model of the same kind as a plan's: what computes differently stays, what is only more of the same goes.

Each kind of layer, the heads of a rank, how kv heads are repeated, routing, rotary embeddings, scales and norms stay.
Windows, and the lengths at which rotary embeddings change, become so short that a short sequence crosses them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parcompile.layout.pipeline import PipelineSplit
from parcompile.model.blocks import Small
from parcompile.model.families import FAMILIES
from parcompile.model.hf_config import shape_from_config
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape
from parcompile.model.shared_blocks import FOLLOWING
from parcompile.model.tables import class_default
from parcompile.plan import Plan, identified
from parcompile.runtime.model.configuration import planned_config


def kept_layers(plan: Plan, config: Any) -> list[int]:
    """One layer of each kind, in order, and further ones until every stage has as many."""
    shape, split = plan.spec.model.shape, plan.spec.parallelism.pipeline_split
    kinds: dict[tuple[Any, ...], int] = {}
    lists = [value for _, value in _by_layer(config, shape)]
    attending = set(shape.attention_layers)
    for layer in range(shape.num_hidden_layers):
        dense = shape.moe is not None and not shape.routed(range(layer, layer + 1))
        keys = shape.of_layer(layer).attention.keys_and_values if shape.kinds else None
        parts = tuple(layer in one.layers for one in shape.parts)
        kind = (dense, layer in attending, keys, parts, *(value[layer] for value in lists))
        kinds.setdefault(kind, layer)
        if shape.kinds and layer == shape.num_hidden_layers - 1:
            kinds[kind] = layer  # some models have a kind for the last layer, whatever their list says
    if shape.stack.shared_blocks is not None:
        # A use of each block, and a second one of the first.
        for layer in shape.stack.shared_blocks.layers[: shape.stack.shared_blocks.count + 1]:
            kinds.setdefault((False, True, None, (), layer), layer)
    stages = split.pp * split.virtual
    if stages > 1 and any(kind[2] is KeysAndValues.OF_ANOTHER_LAYER for kind in kinds):
        return list(range(shape.num_hidden_layers))  # fewer could part layers from those whose keys they use
    # A layer that takes the choice of another stands behind it, in the same stage.
    least = 2 * stages if any(one.behind for one in shape.parts) else 2
    # Layers that come once in a period stay where they are: up to the first of the last kind.
    periodic = _has_periods(shape)
    chosen = list(dict.fromkeys(kinds.values()))
    unit = stages * shape.stack.layers_per_module
    wanted = -(-max(max(chosen) + 1 if periodic else len(chosen), least) // unit) * unit
    if wanted >= shape.num_hidden_layers:
        return list(range(shape.num_hidden_layers))
    if periodic or shape.stack.layers_per_module > 1:
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
    found: dict[str, Any] = {"num_hidden_layers": len(layers) // shape.stack.layers_per_module}
    if shape.stack.runs is not None:
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
            # As many ranks as before share a kv head; its count divides the query heads of the small model.
            kv_heads = own["num_key_value_heads"]
            fits = kv_heads <= tp and heads["num_attention_heads"] % kv_heads == 0
            own["num_key_value_heads"] = kv_heads if fits else tp
        if own:
            found["per_layer_config"][str(place)] = own
    return found


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


# As many heads, kv heads and groups as show how a rank holds them: a few on each.

_WIDTH_OF_A_RANK, _HIDDEN_OF_A_HEAD = 32, 64


def small_heads(plan: Plan, config: Any) -> dict[str, Any]:
    """One or two kv heads on a rank, a few query heads for each; as many ranks as before share a kv head."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if not shape.attends:
        return {"hidden_size": _HIDDEN_OF_A_HEAD * tp}
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    exchanging = plan.spec.parallelism.context.head_ranks
    ratio, family = heads // kv_heads, FAMILIES[shape.model_type]
    of_rank = max(kv_heads // tp, 1)
    few = max(exchanging, 2 if tp <= 4 else 1)
    if of_rank > few and of_rank % exchanging == 0:
        of_rank = few
    fewer = of_rank * tp if kv_heads >= tp else kv_heads
    # Heads that work in pairs, or lie in blocks, are cut as they were.
    fewer = math.lcm(fewer, math.gcd(kv_heads, max(family.fused_blocks, 2 * family.paired_heads, 1) * tp))
    unit = math.lcm(max(tp // kv_heads, 1), exchanging // math.gcd(of_rank, exchanging))
    if ratio % unit == 0:
        ratio = min(ratio, unit if unit > 1 else 2)
    of_head = max(shape.hidden_size // heads, 1)
    if shape.kinds and not family.hidden_is_heads:  # heads have widths of their own
        of_head = min(of_head, _HIDDEN_OF_A_HEAD)
    found: dict[str, Any] = {"num_attention_heads": fewer * ratio, "hidden_size": fewer * ratio * of_head}
    if shape.kinds or hasattr(config, "num_key_value_heads"):
        found["num_key_value_heads"] = fewer
    found |= _low_rank(plan, of_head)
    found |= _windowed(shape, fewer)
    if shape.attention.projections is None and (
        "head_dim" in plan.spec.model.hf_config or class_default(shape.model_type, "head_dim")
    ):
        found["head_dim"] = shape.head_dim
    return found


def _low_rank(plan: Plan, of_head: int) -> dict[str, Any]:
    """Two heads in each group whose outputs are projected together, a group or two on a rank, narrow projections."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if shape.heads.low_rank is None:
        return {}
    low = shape.heads.low_rank
    groups = tp * (2 if tp == 1 and low.output_groups % 2 == 0 else 1)
    heads = groups * min(shape.num_attention_heads // low.output_groups, 2)
    ranks = {"q_lora_rank": low.query_rank, "o_lora_rank": low.output_rank}
    narrow = {key: min(rank, _WIDTH_OF_A_RANK) for key, rank in ranks.items()}
    return {**narrow, "o_groups": groups, "num_attention_heads": heads, "hidden_size": heads * of_head}


def _windowed(shape: ModelShape, heads: int) -> Mapping[str, Any]:
    """Where attention has other sizes in windows: those, with as few heads."""
    if not shape.kinds:
        return {}
    windows = (
        one.attention.projections
        for _, one in shape.by_kind
        if one.attention.projections is not None and one.attention.sliding_window
    )
    return next((one.small_windows(heads) for one in windows), {})


_MLP_OF_A_RANK = 32


def small_widths(plan: Plan) -> dict[str, Any]:
    """A narrow MLP."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if not shape.attends:
        return {}  # nor has any layer an MLP
    found: dict[str, Any] = {"intermediate_size": min(shape.intermediate_size, _MLP_OF_A_RANK * tp)}
    if (experts := FAMILIES[shape.model_type].experts) is not None:
        found[experts.dense_width[0]] = found["intermediate_size"]
    return found


WINDOW, SWITCH = 7, 24
"""Of a small model, in tokens: its windows, and where its rotary embeddings change."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "index_topk")


def borders(plan: Plan, config: Any) -> list[int]:
    """The lengths, in tokens, from which on a model computes otherwise: of windows, and where rotary embeddings change.

    Args:
        plan: of its sequences. What is not shorter never begins, and is left out.
        config: of transformers, as the plan has it.
    """
    shape, sequence_length = plan.spec.model.shape, plan.spec.training.sequence_length
    found = [getattr(config, key, None) for key in _WINDOWS]
    rates = _rates(config)
    if rates:
        # Queries choose among keys of so many tokens each.
        found[_WINDOWS.index("index_topk")] = config.index_topk * min(rates.values())
    found += [*rates.values(), *(place for one in shape.parts for place in one.borders())]
    found += [_switch(rope, config) for rope in _ropes(config)]
    return sorted({place for place in found if isinstance(place, int) and 0 < place < sequence_length})


def short_lengths(config: Any, before: int, length: int) -> dict[str, Any]:
    """Windows and switches that a real sequence crosses are crossed by a short one; others are not."""
    found: dict[str, Any] = {}
    for key in _WINDOWS:
        if isinstance(window := getattr(config, key, None), int):
            found[key] = min(window, WINDOW) if window < before else max(window, length)
    if rates := _rates(config):
        found["compress_rates"] = {kind: min(rate, WINDOW) if rate < before else rate for kind, rate in rates.items()}
    switches = [switch for rope in _ropes(config) if (switch := _switch(rope, config)) is not None]
    if not switches:
        return found
    crossed = min(switches) < before
    start = min(*switches, SWITCH) if crossed else max(*switches, length)
    found["rope_parameters"] = _moved(config.to_dict()["rope_parameters"], start)
    if any(_kind(rope) == "dynamic" for rope in _ropes(config)):
        return {**found, "max_position_embeddings": start}
    # The attention factor of longrope follows from how much longer a sequence may become.
    longer = config.max_position_embeddings / min(switches)
    found["max_position_embeddings"] = max(round(start * longer), length)
    if getattr(config, "original_max_position_embeddings", None):
        found["original_max_position_embeddings"] = start
    return found


def _rates(config: Any) -> Mapping[str, int]:
    """How many tokens a compressed key stands for, in layers of each kind."""
    return getattr(config, "compress_rates", None) or {}


def _moved(rope: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Rotary parameters, of all layers or by the type of the layer, with another original length."""
    moved = {key: _moved(value, start) if isinstance(value, Mapping) else value for key, value in rope.items()}
    return moved | {key: start for key in moved if key == "original_max_position_embeddings"}


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = [value for value in rope.values() if isinstance(value, Mapping)]
    return by_type or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _switch(rope: Mapping[str, Any], config: Any) -> int | None:
    """The position from which on other frequencies, or another scale of queries, hold."""
    original = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
    if _kind(rope) == "dynamic":
        return int(config.max_position_embeddings)
    if _kind(rope) == "longrope" or rope.get("llama_4_scaling_beta") is not None:
        return None if original is None else int(original)
    return None


LENGTH, VOCABULARY = 48, 256
"""Of a small model: its sequences, in tokens, and its vocabulary (at most this many beside what is left over when the
real one is divided by it)."""
_SAID_AGAIN = frozenset(
    {
        *("compress_rate_csa", "compress_rate_hca", "compress_ratios", "hybrid_layer_pattern", "moe_layer_freq"),
        *("num_hash_layers", "sliding_window_size", "swa_num_attention_heads", "swa_num_key_value_heads"),
    }
)
"""Keys of published files of MiMo and DeepSeek-V4 that say what other keys say too."""


def shrunk(plan: Plan) -> Plan:
    """A plan of the same layout for a small model of the same kind, and short sequences that cross its borders.

    Raises:
        ModelConfigError: the small configuration does not describe a model.
    """
    config, spec, shape = planned_config(plan), plan.spec, plan.spec.model.shape
    unit = 2 * spec.parallelism.cp * spec.parallelism.tp
    length = min(-(-LENGTH // unit) * unit, spec.training.sequence_length)
    layers, split = kept_layers(plan, config), spec.parallelism.pipeline_split
    starts = itertools.accumulate(PipelineSplit(split.pp, split.virtual).counts(len(layers)), initial=0)
    heads, experts = small_heads(plan, config), FAMILIES[shape.model_type].experts
    parts = Small(
        layers,
        set(starts),
        spec.training.sequence_length,
        length,
        written=spec.model.hf_config,
        tp=spec.parallelism.tp,
        hidden=heads["hidden_size"],
        whole_hidden=shape.hidden_size,
    )
    changes = {
        **heads,
        **small_widths(plan),
        **({} if shape.moe is None or experts is None else experts.small(shape.moe, config, parts)),
        **lists_of_layers(config, shape, layers),
        **kinds_of_layers(plan, config, layers, heads),
        **short_lengths(config, spec.training.sequence_length, length),
        **{key: value for one in shape.parts for key, value in one.small(config, parts).items()},
        **small_tokens(config, min(shape.vocab_size, VOCABULARY + shape.vocab_size % VOCABULARY)),
    }
    # Weights of this size keep the variance of what they multiply: with smaller ones scores are all but equal, and
    # whatever is wrong with positions hardly shows.
    changes["initializer_range"] = 1 / math.sqrt(changes["hidden_size"])
    names = FAMILIES[shape.model_type].keys
    changes = {name: value for key, value in changes.items() if (name := names.get(key, key)) is not None}
    # What rope_scaling says stands in rope_parameters too.
    replaced = {"rope_scaling"} if "rope_parameters" in changes else set()
    replaced |= {"per_layer_config"} if "use_dsa" in changes else set()
    replaced |= _SAID_AGAIN
    replaced |= FOLLOWING if shape.stack.shared_blocks is not None else set()
    hf_config = {key: value for key, value in spec.model.hf_config.items() if key not in replaced} | changes
    model = replace(spec.model, shape=shape_from_config(hf_config), hf_config=hf_config)
    axes = spec.parallelism
    if len(layers) < shape.num_hidden_layers:
        axes = replace(
            axes,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        )
    training = replace(spec.training, sequence_length=length)
    return identified(replace(plan, spec=replace(spec, model=model, parallelism=axes, training=training)))


def small_tokens(config: Any, vocabulary: int) -> dict[str, Any]:
    """A small vocabulary, with the special tokens in it: the padding's row of an embedding gets no gradient."""

    def inside(token: Any) -> Any:
        return [min(one, vocabulary - 1) for one in token] if isinstance(token, list) else min(token, vocabulary - 1)

    special = {key: getattr(config, key, None) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    found = {"vocab_size": vocabulary}
    if getattr(config, "vocab_size_per_layer_input", None):
        found["vocab_size_per_layer_input"] = vocabulary
    return found | {key: inside(token) for key, token in special.items() if token is not None}

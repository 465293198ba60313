"""The small plan of all its parts, with lengths that a short sequence crosses."""

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
from parcompile.model.shared_blocks import FOLLOWING
from parcompile.plan import Plan
from parcompile.plan.tree import identified
from parcompile.runtime.model.configuration import planned_config

from .layers import kept_layers, kinds_of_layers, lists_of_layers, small_heads, small_widths

# Windows, and the lengths at which rotary embeddings change, that a short sequence crosses.

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
    ropes = config.to_dict()["rope_parameters"]
    found["rope_parameters"] = _moved(ropes, start)
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
    return {
        key: _moved(value, start)
        if isinstance(value, Mapping)
        else start
        if key == "original_max_position_embeddings"
        else value
        for key, value in rope.items()
    }


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


# The small plan, of all its parts.

LENGTH, VOCABULARY = 48, 256
"""Of a small model: its sequences, in tokens, and its vocabulary (at most this many beside what is left over when the
real one is divided by it)."""
_SAID_AGAIN = frozenset(
    (
        "compress_rate_csa",
        "compress_rate_hca",
        "compress_ratios",
        "hybrid_layer_pattern",
        "moe_layer_freq",
        "num_hash_layers",
        "sliding_window_size",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
    )
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

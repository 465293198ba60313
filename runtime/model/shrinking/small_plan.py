"""The small plan, of all its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from parcompile.model.families import FAMILIES
from parcompile.model.hf_config import shape_from_config
from parcompile.model.shared_blocks import FOLLOWING
from parcompile.plan import Plan
from parcompile.plan.tree import identified
from parcompile.runtime.model.configuration import planned_config

from .heads import small_heads
from .layers import kept_layers, kinds_of_layers, lists_of_layers
from .lengths import short_lengths, small_blocks
from .widths import small_states, small_widths

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
    layers = kept_layers(plan, config)
    heads = small_heads(plan, config)
    changes = {
        **heads,
        **small_widths(plan, config),
        **small_states(plan),
        **lists_of_layers(config, shape, layers, spec.parallelism.pipeline_split),
        **kinds_of_layers(plan, config, layers, heads),
        **short_lengths(config, spec.training.sequence_length, length),
        **{key: value for one in shape.parts for key, value in one.small(config, layers).items()},
        **small_blocks(shape, spec.training.sequence_length, length),
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
    replaced |= FOLLOWING if shape.shared_blocks is not None else set()
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

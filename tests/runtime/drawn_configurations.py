"""Configurations drawn at random: each key of a family's class that changes numbers takes other values than its own.

The suite trains a few of them; `.ci/configuration_matrix.py` as many as one likes, and writes `docs/configurations.md`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from families import FAMILIES, tiny_config

from parcompile.model.blocks.indexer import IndexerTraits
from parcompile.model.blocks.mamba1 import Mamba1Traits
from parcompile.model.blocks.mamba2 import Mamba2Traits
from parcompile.model.blocks.ngrams import NgramTraits
from parcompile.model.blocks.recurrent import RecurrentTraits
from parcompile.model.tables import reads

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp 2": (2, {"tp": 2}),
    "cp 2": (2, {"cp": 2}),
    "pp 2": (2, {"pp": 2}),
    "tp 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "cp 2, Ulysses": (2, {"cp": 2, "cp_implementation": "ulysses"}),
    "cp 2, all-gather, striped": (2, {"cp": 2, "cp_implementation": "all_gather", "cp_layout": "striped"}),
    "tp 2 x cp 2, sequence parallel": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "tp 4": (4, {"tp": 4}),
    "cp 4, contiguous": (4, {"cp": 4, "cp_layout": "contiguous"}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
    "pp 2 x cp 2": (4, {"pp": 2, "cp": 2}),
    "dp 2 x ep 2": (2, {"dp": 2, "ep": 2}),
}
LENGTH = 16
HEAD_DIM = 8

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "post_norm_eps")
_SWITCHES = (
    *("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias", "lm_head_bias"),
    *("qk_layernorm", "use_qk_norm", "norm_topk_prob", "output_router_logits", "use_parallel_residual"),
    *("tie_word_embeddings", "rope_interleave", "mup_enabled", "use_post_norm", "use_qkv_bias"),
    "mamba_norm_before_gate",
)
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 2.0, 20.0),
    "final_logit_softcapping": (None, 3.0, 15.0),
    "query_pre_attn_scalar": (5, 17),
    "logit_scale": (0.3, 1.7),
    "embedding_multiplier": (0.6, 3.0),
    "logits_scaling": (0.7, 4.0),
    "residual_multiplier": (0.3, 1.4),
    "attention_multiplier": (0.2, 0.6),
    "clip_qkv": (None, 0.4, 1.5),
    "qk_scale_factor": (0.8, 3.0),
    "output_multiplier": (0.3, 1.6),
    "residual_gate_temperature": (0.2, 1.5),
    "moe_hidden_size": (16, 40),
    "scale_emb": (2, 5),
    "scale_depth": (0.8, 2.1),
    "dim_model_base": (8, 16),
    "routed_scaling_factor": (0.6, 2.5),
    "router_aux_loss_coef": (0.01, 0.2),
    "shared_expert_intermediate_size": (16, 56),
    "gating": (True, "per-element"),
    "moe_norm_min": (1e-12, 0.3),
    "moe_routed_scaling_factor": (0.6, 2.5),
    "moe_router_logit_softcapping": (0.0, 4.0),
    "route_scale": (0.6, 2.5),
    "router_scaling_factor": (0.6, 2.5),
    "shared_expert_combination_strategy": ("sum", "average"),
    "shared_intermediate_size": (16, 56),
    "dense_intermediate_size": (24, 56),
    "prefix_dense_intermediate_size": (24, 56),
    "lm_head_multiplier": (0.4, 1.5),
    "key_multiplier": (0.4, 1.5),
    "attention_in_multiplier": (0.4, 1.5),
    "attention_out_multiplier": (0.4, 1.5),
    "ssm_in_multiplier": (0.4, 1.5),
    "ssm_out_multiplier": (0.4, 1.5),
    "ssm_multipliers": ([0.8, 1.1, 0.9, 1.2, 0.7], None),
    "mlp_multipliers": ([0.9, 1.2], None),
    "time_step_limit": ([0.0, 0.5], [0.2, 1.0]),
    "swiglu_alpha": (1.0, 2.5),
    "swiglu_limit": (0.5, 7.0),
    "hc_mult": (1, 2, 5),
    "hc_magnitude": (0.7, 3.0),
    "hc_eps": (1e-6, 0.1),
    "topk_method": ("greedy", "group_limited_greedy"),
    "intermediate_size": (24, 56),
}
_ALWAYS_COMPRESSED = ("minicpm3", "longcat_flash", "hy_v4", "dots3_note_text", "glm5_next_text")
"""Whose class takes no null for the rank of queries."""
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
_RARE = {
    "use_bidirectional_attention": (True,),
}
"""What is refused: one draw in twelve."""


@dataclass(frozen=True)
class Drawn:
    """A configuration and a layout."""

    number: int
    family: str
    layout: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def parallelism(self) -> dict[str, Any]:
        return LAYOUTS[self.layout][1]

    @property
    def text(self) -> str:
        """For a table."""
        return f"{self.number}: {self.family}, {self.layout}: {self.changes}"


def draw(number: int, families: tuple[str, ...], layout: str | None = None) -> Drawn:
    """The same for the same number; families take turns, so that each is drawn as often as the others."""
    from transformers import CONFIG_MAPPING

    choose = random.Random(number)
    family = families[number % len(families)]
    base = {key: value for key, value in tiny_config(family).items() if key != "model_type"}
    config = CONFIG_MAPPING[family](**base)
    known = config.to_dict().keys() | base.keys()
    names = {config.attribute_map.get(key, key) for key in known}
    layers = choose.choice([2, 2, 4])
    changes: dict[str, Any] = {"num_hidden_layers": layers}

    def maybe(key: str, values: tuple[Any, ...], chance: float = 0.5) -> None:
        if key in names and choose.random() < chance:
            changes[key] = choose.choice(values)

    for key in _EPSILONS:
        maybe(key, (1e-6, 1e-3, 3e-2))
    for key in _SWITCHES:
        maybe(key, (False, True))
    if family == "internlm3":  # both or neither
        changes |= dict.fromkeys(("attention_bias", "mlp_bias"), changes.get("attention_bias", False))
    for key, values in _NUMBERS.items():
        maybe(key, values)
    for key, values in _RARE.items():
        if not FAMILIES[family].layer_shapes:  # whose classes have words for it
            maybe(key, values, 1 / 12)
    for key in ("hidden_act", "hidden_activation"):
        if family != "apertus":  # its activation has parameters
            maybe(key, _ACTIVATIONS)
    changes |= _heads(choose, family, names)
    changes |= _experts(choose, family, config, names, layers)
    changes |= _layer_kinds(choose, family, config, names, layers)
    changes |= _state_space(choose, family)
    changes |= _selective(choose, family)
    changes |= _linear_attention(choose, family, names)
    if FAMILIES[family].shared_blocks:
        adapters = changes["num_key_value_heads"] == changes["num_attention_heads"]
        changes |= {"use_shared_attention_adapter": adapters, "tie_word_embeddings": True}
    changes |= _rope(choose, family, config, changes)
    if "layer_rope_theta" in names:  # 0: the layer is not rotated
        base = changes.get("rope_parameters", config.rope_parameters)["rope_theta"]
        changes["layer_rope_theta"] = [choose.choice([0, base]) for _ in range(layers)]
    changes |= _layer_shapes(choose, family, names, changes)
    if FAMILIES[family].low_rank is not None:
        changes = {key: value for key, value in changes.items() if key not in ("attention_bias", "norm_topk_prob")}
        changes["o_groups"] = min(changes["o_groups"], changes["num_attention_heads"])
    if any(isinstance(one, NgramTraits) for one in FAMILIES[family].parts):
        changes |= _ngrams(choose, layers)
    return Drawn(number, family, layout or choose.choice([name for name in LAYOUTS if runs(family, name)]), changes)


def runs(family: str, layout: str) -> bool:
    """Whether a family runs in a layout, whatever is drawn (rules X004, C005 and C010; ep deals experts)."""
    return runs_over(family, LAYOUTS[layout][1])


def runs_over(family: str, parallelism: dict[str, Any]) -> bool:
    """The same of the axes themselves."""
    traits = FAMILIES[family]
    windows, states = traits.low_rank is not None, traits.part(RecurrentTraits) is not None
    return not (
        traits.refused_axes.keys() & parallelism.keys()
        or ("ep" in parallelism and traits.experts is None)
        or (windows and parallelism.get("cp_implementation") == "ulysses")
        or ((windows or states) and parallelism.get("cp_layout") == "striped")
    )


def _heads(choose: random.Random, family: str, names: set[str]) -> dict[str, Any]:
    traits = FAMILIES[family]
    if traits.latent is not None:
        latent = {
            "q_lora_rank": choose.choice([8, 12] if family in _ALWAYS_COMPRESSED else [None, 8, 12]),
            "kv_lora_rank": choose.choice([8, 16]),
            "qk_nope_head_dim": choose.choice([4, 8]),
            "qk_rope_head_dim": choose.choice([4, 8]),
            "v_head_dim": choose.choice([4, 8]),
        }
        if family == "longcat_flash":  # angles for the features that it rotates, no others
            latent["head_dim"] = latent["qk_rope_head_dim"]
        if not traits.latent.qk_rope_head_dim:
            del latent["qk_rope_head_dim"]
        return latent
    if family in ("gpt_neox", "persimmon"):
        return {"num_attention_heads": choose.choice([4, 8])}
    heads = choose.choice([4, 8])
    if traits.low_rank is not None:
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "head_dim": choose.choice([8, 16]),
            "q_lora_rank": choose.choice([6, 12]),
            "o_lora_rank": choose.choice([3, 8]),
        }
    found: dict[str, Any] = {"num_attention_heads": heads}
    if "num_key_value_heads" in names:
        found["num_key_value_heads"] = choose.choice([1, 2, 4, heads])
    if reads(family, "head_dim") and not traits.hidden_is_heads and "head_dim" in names:
        found["head_dim"] = choose.choice([8, 16])
    elif traits.hidden_is_heads and "head_dim" in names:
        found["head_dim"] = 32 // heads
    return found


def _experts(choose: random.Random, family: str, config: Any, names: set[str], layers: int) -> dict[str, Any]:
    experts = FAMILIES[family].experts
    if experts is None:
        return {}
    count = choose.choice([4, 8])
    found: dict[str, Any] = {experts.count[0]: count, experts.per_token[0]: choose.choice([1, 2, 3])}
    if family == "longcat_flash":  # of one expert for each token transformers computes nothing
        found[experts.per_token[0]] = choose.choice([2, 3])
    if experts.width[0] == "moe_intermediate_size":
        found["moe_intermediate_size"] = choose.choice([8, 24])
    if experts.shared_count is not None:
        found[experts.shared_count[0]] = choose.choice([1, 2])
    if experts.hashed is not None:
        found["n_shared_experts"] = 1  # transformers builds no other number
        found["mlp_layer_types"] = [choose.choice(["hash_moe", "moe"]) for _ in range(layers - 1)] + ["moe"]
    if "n_group" in names:
        groups = choose.choice([1, 2])
        found |= {"n_group": groups, "topk_group": choose.choice([1, groups])}
        if groups == 2:
            # A group has to hold two experts at least, and those chosen have to fit into the chosen groups.
            found[experts.per_token[0]] = 2
    if experts.by_layer is not None:
        dense = choose.choice([0, 1])
        found[experts.by_layer] = ["dense"] * dense + ["sparse"] * (layers - dense)
        if experts.dense_layers is not None:
            found[experts.dense_layers[0]] = dense
    elif experts.dense_layers is not None:
        found[experts.dense_layers[0]] = choose.choice([0, 1])
    elif "mlp_only_layers" in names:
        found["mlp_only_layers"] = choose.choice([[], [0]])
    if getattr(config, "mtp_layer_types", None) is not None:
        found |= {"num_nextn_predict_layers": 0}
    return found


def _ngrams(choose: random.Random, layers: int) -> dict[str, Any]:
    """Tables of any orders and heads, whose convolution sees no more than a piece of the sequence has."""
    longest, heads, block = choose.choice([2, 3]), choose.choice([1, 2]), choose.choice([1, 2, 3])
    return {
        "layer_types": ["linear_attention", choose.choice(["indexed_attention", "full_attention"])] * (layers // 2),
        "ple_layer_ids": choose.choice([[1], list(range(1, layers, 2)), []]),
        "ple_embed_dim": 8 * (longest - 1) * heads,
        "ngram_size": longest,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": choose.choice([7, 50, 90]),
        "ple_conv_kernel_size": choose.choice([1, 2]),
        "seed": choose.choice([1234, 7]),
        "eos_token_id": choose.choice([2, [5, 2]]),
        "hc_count": choose.choice([2, 3, 4]),
        "hc_lowrank": choose.choice([4, 9]),
        "indexer_n_heads": choose.choice([1, 3]),
        "indexer_head_dim": 16,
        "indexer_compress_ratio": block,
        "indexer_budget": block * choose.choice([1, 2, 20]),
        "output_gate_type": choose.choice(["silu", "sigmoid"]),
    }


def _state_space(choose: random.Random, family: str) -> dict[str, Any]:
    states = FAMILIES[family].part(Mamba2Traits)
    if states is None:
        return {}
    keys, heads = states.keys, choose.choice([8, 16])
    switches = {*_biases(keys.kernel[0]), *(keys.norm or ())[:1]}
    if family == "zamba2":
        switches = {"add_bias_linear"}
    elif family == "falcon_h1":
        switches.add("projectors_bias")
    # What follows from other keys is left out.
    if FAMILIES[family].shared_blocks:
        width: dict[str, Any] = {}
    elif keys.expand and keys.head_dim[1]:  # no class that has a default takes "auto"
        width = {keys.head_dim[0]: tiny_config(family)["hidden_size"] * keys.expand[1] // heads}
    else:
        width = {keys.head_dim[0]: "auto" if keys.expand else choose.choice([4, 6])}
    return {
        keys.heads[0]: heads,
        **width,
        keys.groups[0]: choose.choice([1, 1, 4]),
        keys.state[0]: choose.choice([3, 6]),
        keys.kernel[0]: choose.choice([2, 3, 4]),
        keys.chunk[0]: choose.choice([2, 4, 64]),
        **{switch: choose.choice([True, False]) for switch in sorted(switches)},
    }


def _selective(choose: random.Random, family: str) -> dict[str, Any]:
    keys = FAMILIES[family].part(Mamba1Traits)
    if keys is None:
        return {}
    return {
        keys.expand[0]: choose.choice([1, 2]),
        keys.state[0]: choose.choice([3, 6]),
        keys.convolution[0]: choose.choice([2, 3, 4]),
        keys.step_rank: choose.choice([2, 5, "auto"]),
        **{switch: choose.choice([True, False]) for switch in _biases(keys.convolution[0])},
    }


def _biases(kernel: str) -> tuple[str, str]:
    """What switches biases on, by the name of the key of a kernel."""
    return ("use_conv_bias", "use_bias") if kernel == "conv_kernel" else ("mamba_conv_bias", "mamba_proj_bias")


def _periods(choose: random.Random, family: str, layers: int) -> dict[str, Any]:
    """Which layers attend, a layer of each kind at least, and which have experts, of all if there is one expert."""
    states, experts = FAMILIES[family].part(RecurrentTraits), FAMILIES[family].experts
    found: dict[str, Any] = {}
    for one, longest in ((states and states.attending_period, layers), (experts and experts.period, 3)):
        if one:
            period = choose.randint(2, min(longest, 3))
            found |= {one.period[0]: period, one.offset[0]: choose.randrange(min(period, layers))}
    if experts is not None and experts.one_is_dense and choose.random() < 0.2:
        found |= {experts.count[0]: 1, experts.per_token[0]: 1}
    return found


def _linear_attention(choose: random.Random, family: str, names: set[str]) -> dict[str, Any]:
    """Heads, widths and kernels of layers that carry a state."""
    states = FAMILIES[family].part(RecurrentTraits)
    if states is None or isinstance(states, Mamba1Traits | Mamba2Traits):
        return {}
    sizes = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": choose.choice([4, 8]),
        "linear_key_head_dim": choose.choice([4, 6]),
        "linear_value_head_dim": choose.choice([4, 8]),
        "linear_conv_kernel_dim": choose.choice([2, 3, 4]),
        "linear_allow_neg_eigval": choose.choice([False, True]),
        "conv_L_cache": choose.choice([2, 3, 4]),
        "conv_bias": choose.choice([False, True]),
        "block_size": choose.choice([2, 5, 64]),
    }
    return {key: size for key, size in sizes.items() if key in names}


def _layer_kinds(choose: random.Random, family: str, config: Any, names: set[str], layers: int) -> dict[str, Any]:
    """Windows, and which layers have them or rotary embeddings."""
    found: dict[str, Any] = {}
    if "no_rope_layers" in names:
        found["no_rope_layers"] = [choose.choice([0, 1]) for _ in range(layers)]
    if "attention_types" in names:
        found["attention_types"] = [[["global", "local"], layers // 2]]
    kinds = getattr(config, "layer_types", None)
    states = FAMILIES[family].part(RecurrentTraits)
    if FAMILIES[family].low_rank is not None:
        words = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        return {
            "layer_types": [choose.choice(words) for _ in range(layers)],
            "compress_rates": {one: choose.choice([1, 2, 3, 5]) for one in words[1:]},
            "sliding_window": choose.choice([2, 5, LENGTH, 40]),
            "index_topk": choose.choice([1, 3, 40]),
            "o_groups": choose.choice([4, 4, 8]),
        }
    indexer = next((one for one in FAMILIES[family].parts if isinstance(one, IndexerTraits)), None)
    if indexer is not None and indexer.pool is not None:
        return _pools(choose, layers)
    if indexer is not None:
        # Every layer has one; its heads hold the rotary part of the others'.
        sizes = {"index_head_dim": 16, "index_n_heads": choose.choice([2, 4]), "index_topk": choose.choice([2, 5, 40])}
        return {key: size for key, size in sizes.items() if key in names}
    if states is not None:
        # A layer of each kind at least.
        attends = [True, False] + [choose.choice([True, False]) for _ in range(layers - 2)]
        choose.shuffle(attends)
        if family == "falcon_h1" or not FAMILIES[family].attends:
            return {}
        if states.attending_period is not None:
            return _periods(choose, family, layers)
        if FAMILIES[family].shared_blocks:
            return {
                # Every block is used, and the first one twice.
                "num_hidden_layers": layers + 2,
                "layers_block_type": [*("hybrid" if one else states.word for one in attends), "hybrid", "hybrid"],
                "num_mem_blocks": choose.choice([1, 2]),
                "adapter_rank": choose.choice([1, 5]),
                "use_mem_rope": choose.choice([False, True]),
                "use_conv_bias": choose.choice([False, True]),
            }
        if FAMILIES[family].layer_blocks is not None:
            others = ["mlp", "moe", "full_attention"]
            kinds = [states.word, choose.choice(others)] if layers == 2 else [states.word, *others]
            choose.shuffle(kinds)
            return {"layers_block_type": kinds}
        if states.layers_key in names or not states.attending_key:
            return {states.layers_key: ["full_attention" if one else states.word for one in attends]}
        return {states.attending_key: [layer for layer, one in enumerate(attends) if one]}
    key = FAMILIES[family].window_key
    if "sliding_window" in names:
        found["sliding_window"] = choose.choice([2, 5, 11, LENGTH, 40])
        if key is not None:
            found[key] = choose.choice([True, True, False])
            found["max_window_layers"] = choose.choice([0, 1])
        elif kinds is None and choose.random() < 0.3:
            found["sliding_window"] = None
    if kinds is not None:
        mixed = "sliding_window" in names and found.get(key, True) if key else "sliding_window" in names
        words = ["sliding_attention", "full_attention"] if mixed else ["full_attention"]
        if "attention_chunk_size" in names:
            words, found["attention_chunk_size"] = ["chunked_attention", "full_attention"], choose.choice([4, 6, 40])
        found["layer_types"] = [choose.choice(words) for _ in range(layers)]
    return found


def _pools(choose: random.Random, layers: int) -> dict[str, Any]:
    """Layers that choose pools of keys between such as carry a state; one may take the choice of that before it."""
    pool = choose.choice([1, 2, 3, 5])
    attends = [True, False] + [choose.choice([True, False]) for _ in range(layers - 2)]
    choose.shuffle(attends)
    found: dict[str, Any] = {
        "layer_types": ["indexed_attention" if one else "linear_attention" for one in attends],
        "index_kpool": pool,
        "index_topk": pool * choose.choice([1, 2, 20]),
        "index_head_dim": choose.choice([4, 16]),
        "index_n_heads": choose.choice([2, 4]),
        "linear_num_heads": choose.choice([4, 8]),
        "linear_head_dim": choose.choice([4, 6]),
        "linear_conv_kernel_dim": choose.choice([2, 3, 4]),
        "linear_lower_bound": choose.choice([None, -5.0, -0.5]),
        "hc_sinkhorn_iters": choose.choice([1, 3, 20]),
        "indexer_types": ["full"] * layers,
    }
    if pool == 1:
        found["index_kpool_always_select_tail"] = choose.choice([False, True])
    if all(attends[:2]) and layers == 4:  # both on one of two stages
        found["indexer_types"][1] = "shared"
    return found


def _layer_shapes(choose: random.Random, family: str, names: set[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Layers of different shapes: heads of full ones, whose keys they use, and further embeddings."""
    if not FAMILIES[family].layer_shapes or FAMILIES[family].low_rank or family == "dots3_note_text":
        return {}
    layers = changes["num_hidden_layers"]
    if family == "mimo_v2_flash":  # whose layers with a window have twice as many kv heads
        return {"num_key_value_heads": choose.choice([1, 2]), "v_head_dim": choose.choice([4, 12])}
    found: dict[str, Any] = {
        "layer_types": (["sliding_attention", "full_attention"] * layers)[:layers],
        "num_kv_shared_layers": layers - 2,
        "head_dim": choose.choice([4, 8]),
    }
    if family == "gemma3n_text":
        widths = [choose.choice([24, 40]) for _ in range(layers)]
        return {
            **found,
            # Of two layers none has keys of its own kind before it.
            "num_kv_shared_layers": choose.choice([0, layers - 2]),
            "intermediate_size": widths,
            "activation_sparsity_pattern": [choose.choice([0.0, 0.7]) for _ in range(layers)],
            "hidden_size_per_layer_input": choose.choice([4, 12]),
            "altup_correct_scale": True,
            "final_logit_softcapping": changes.get("final_logit_softcapping") or 30.0,
        }
    found |= {
        "global_head_dim": choose.choice([4, 8, 12]),
        "attention_k_eq_v": choose.choice([False, True]),
        "num_global_key_value_heads": choose.choice([None, changes["num_key_value_heads"]]),
        "use_double_wide_mlp": choose.choice([False, True]),
    }
    if "hidden_size_per_layer_input" in names:
        found["hidden_size_per_layer_input"] = choose.choice([4, 12])
    if choose.random() < 0.5 and "enable_moe_block" in names:
        found |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    return found


def _rope(choose: random.Random, family: str, config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None)
    if rope is None or choose.random() < 0.25:
        return {}
    if FAMILIES[family].layer_shapes and all(isinstance(value, dict) for value in rope.values()):
        # Widths of heads differ, and with them the frequencies that other kinds list.
        return {
            "rope_parameters": {
                kind: {**value, "rope_theta": choose.choice([50.0, 10000.0])} for kind, value in rope.items()
            }
        }
    width = changes.get("head_dim", 32 // changes.get("num_attention_heads", 4))
    width *= 2 if FAMILIES[family].shared_blocks else 1
    width = changes.get("qk_rope_head_dim", width)
    if all(isinstance(value, dict | None) for value in rope.values()):
        # One set of parameters for each kind of layer; none for those without positions.
        found = {kind: value and _kind_of_rope(choose, value, width) for kind, value in rope.items()}
        return {"rope_parameters": found}
    if family == "mistral4":  # angles for the features that it rotates, no others
        rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    found = _kind_of_rope(choose, rope, width)
    if family != "phi3":
        return {"rope_parameters": found}
    while found["rope_type"] not in ("default", "longrope"):  # others are read as longrope
        found = _kind_of_rope(choose, rope, width)
    original = found.get("original_max_position_embeddings", 32)
    return {"rope_parameters": found, "original_max_position_embeddings": original, "max_position_embeddings": 32}


def _kind_of_rope(choose: random.Random, before: dict[str, Any], width: int) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_theta": choose.choice([50.0, 10000.0, 500000.0])}
    if "partial_rotary_factor" in before:
        base["partial_rotary_factor"] = choose.choice([0.5, 1.0])
        width = int(width * base["partial_rotary_factor"])
    pairs = width // 2
    original = choose.choice([6, 12])
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": choose.choice([2.0, 3.5])},
        "dynamic": {"factor": choose.choice([2.0, 4.0])},
        "yarn": {
            "factor": choose.choice([2.0, 4.0]),
            "original_max_position_embeddings": original,
            **choose.choice(({}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"attention_factor": 1.3})),
            **choose.choice(({}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"truncate": False})),
        },
        "longrope": {
            "factor": 4.0,
            "original_max_position_embeddings": original,
            "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
            "long_factor": [1.5 + 0.7 * pair for pair in range(pairs)],
            **choose.choice(({}, {"attention_factor": 1.2})),
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": choose.choice([2.0, 4.0]),
            "original_max_position_embeddings": original,
        },
    }
    if "llama_4_scaling_beta" in before:
        kinds = {"yarn": kinds["yarn"] | {"llama_4_scaling_beta": choose.choice([0.1, 0.4])}}
    kind = choose.choice(list(kinds))
    return {**base, "rope_type": kind, **kinds[kind]}


def varied(drawn: Drawn) -> set[str]:
    """The keys that a draw sets, down to those of rotary embeddings."""
    found = set(drawn.changes)
    rope = drawn.changes.get("rope_parameters", {})
    for value in [rope, *(one for one in rope.values() if isinstance(one, dict))]:
        found |= {f"rope_parameters.{key}" for key, one in value.items() if not isinstance(one, dict)}
    return found

"""Values that follow the number of layers or each other: a class takes no others, or draws hardly meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

SMALL_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29)


def _jamba(_: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """Layers of each kind: offsets below their periods, and periods below the number of layers."""
    found: dict[str, Any] = {"mamba_dt_rank": pick.choice(["auto", "auto", *SMALL_PRIMES])}
    found["num_experts"] = pick.choice([1, 1, 4, 6, 8])
    for kind in ("attn", "expert"):
        period = pick.randint(2, max(2, layers))
        found |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": pick.randrange(period)}
    return found


def _gemma4_text(_: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """Layers that share keys: of each kind among them there is one before them that has its own."""
    if pick.random() < 0.4:
        return {}
    kinds = ["sliding_attention", "full_attention"]
    shared = pick.randint(0, layers - 1)
    own = [pick.choice(kinds) for _ in range(layers - shared)]
    own[pick.randrange(len(own))] = "full_attention"  # the class makes the last layer one of these
    rest = [pick.choice(sorted(set(own))) for _ in range(shared)]
    return {"layer_types": own + rest, "num_kv_shared_layers": shared}


_DOTS3_PARTS = (
    *("num_attention_heads", "num_key_value_heads", "qk_nope_head_dim", "swa_num_attention_heads"),
    *("swa_num_key_value_heads", "swa_head_dim", "swa_qk_nope_head_dim", "swa_qk_rope_head_dim"),
)


def _dots3_note_text(given: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """As many keys as queries, for both kinds of layers; widths of heads that are those of their parts."""
    for key in list(given):
        if key in _DOTS3_PARTS or key == "use_dsa":
            del given[key]
    found: dict[str, Any] = {"q_lora_rank": given.get("q_lora_rank") or 1024}
    found["topk_group"] = min(given.get("topk_group", 1), given.get("n_group", 1))
    found["n_shared_experts"] = max(given.get("n_shared_experts", 1), 1)
    for prefix in ("", "swa_"):
        if pick.random() < 0.7:
            heads = pick.choice([1, 2, 4, 6])
            found |= {f"{prefix}num_attention_heads": heads, f"{prefix}num_key_value_heads": heads}
    if pick.random() < 0.7:
        plain, rotated = 2 * pick.choice(SMALL_PRIMES), 2 * pick.choice(SMALL_PRIMES)
        found |= {"swa_qk_nope_head_dim": plain, "swa_head_dim": plain + rotated}
        found |= {"swa_qk_rope_head_dim": rotated} if pick.random() < 0.5 else {}
    if pick.random() < 0.7:
        found["qk_nope_head_dim"] = 2 * pick.choice(SMALL_PRIMES)
    kinds = ("full_attention", "indexed_attention", "sliding_attention")
    found["layer_types"] = [pick.choice(kinds) for _ in range(layers)] if pick.random() < 0.5 else None
    found["use_sliding_window"] = pick.random() < 0.6
    if pick.random() < 0.7:
        found["use_dsa"] = pick.choice([True, False, None])
    if pick.random() < 0.2:
        found["moe_layer_freq"] = [pick.randint(0, 1) for _ in range(layers)]
    return found


def _deepseek_v4(given: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """Both rates of compression or none, groups of heads, and now and then kinds of layers in older words."""
    rates = [key for key in given if key.startswith("compress_rates.")]
    for key in rates:
        del given[key]
    found: dict[str, Any] = {}
    if rates:
        found = {f"compress_rates.{kind}_attention": pick.choice(SMALL_PRIMES) for kind in _COMPRESSED}
    for key in ("compress_rate_csa", "compress_rate_hca"):
        if key in given:
            found[key] = pick.choice([None, *SMALL_PRIMES])
    if pick.random() < 0.7:
        groups = pick.choice([1, 2, 3, 5])
        found |= {"o_groups": groups, "num_attention_heads": groups * pick.choice([1, 2, 3, 4, 7])}
    if pick.random() < 0.3:
        found["compress_ratios"] = [pick.choice([0, 4, 128]) for _ in range(layers + pick.choice([0, 0, 1]))]
    return found


_COMPRESSED = ("compressed_sparse", "heavily_compressed")


def _glm5_next_text(given: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """As many keys as queries, compressed queries, nothing that is rotated, and choices of whole pools of keys."""
    for key in _GLM5_PARTS:
        given.pop(key, None)
    found: dict[str, Any] = {"q_lora_rank": given.get("q_lora_rank") or 1536}
    if pick.random() < 0.7:
        heads = pick.choice([1, 2, 4, 6])
        found |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    if pick.random() < 0.5:
        pool = pick.choice([1, 2, *SMALL_PRIMES])
        found |= {"index_kpool": pool, "index_topk": pool * pick.choice([1, 2, 3])}
    if pick.random() < 0.6:
        found["indexer_types"] = [pick.choice(["full", "shared"]) for _ in range(layers)]
    else:
        found |= {"index_topk_freq": pick.choice([1, 2, 3, 4]), "index_skip_topk_offset": pick.choice([1, 2, 3])}
    if pick.random() < 0.7:
        found["layer_types"] = [pick.choice(["linear_attention", "indexed_attention"]) for _ in range(layers)]
    return found


_GLM5_PARTS = (
    *("num_attention_heads", "num_key_value_heads", "qk_rope_head_dim", "index_kpool", "index_topk"),
    *("linear_attn_config", "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    "layer_types",
)


def _mamba(_: dict[str, Any], __: int, pick: random.Random) -> dict[str, Any]:
    """The rank of step sizes as a word or a number."""
    return {"time_step_rank": pick.choice(["auto", "auto", *SMALL_PRIMES])}


def _mamba2(_: dict[str, Any], __: int, pick: random.Random) -> dict[str, Any]:
    """Heads times their width are `expand` times the hidden size, which the class checks."""
    heads, width, expand = pick.choice(SMALL_PRIMES), pick.choice(SMALL_PRIMES), pick.choice([1, 2, 3])
    return {"num_heads": heads, "head_dim": width * expand, "expand": expand, "hidden_size": heads * width}


def _qwen4_exp_text(given: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """An indexer in whole, and embeddings of n-grams in layers that carry a state, whose heads divide their width."""
    for key in (*given,):
        if key.startswith(("indexer_", "ple_", "ngram_", "heads_per_ngram", "make_ngram", "output_gate_type")):
            del given[key]
    given["num_experts_per_tok"] = min(given.get("num_experts_per_tok", 1), given.get("num_experts", 512)) or 1
    small = pick.choice(SMALL_PRIMES)
    sizes = (pick.choice([1, 2, 3, 4, 7]), 1, 2 * small, 16 * small, pick.choice([1, 2, 4]))
    found: dict[str, Any] = dict(zip(_QSA, sizes, strict=True))
    given.setdefault("head_dim", 10)
    given["head_dim"] = min(given["head_dim"], 2 * small)
    kinds = given.get("layer_types")
    if kinds is None:
        every = given.get("full_attention_interval", 4)
        carrying = [layer for layer in range(layers) if not every or (layer + 1) % every]
    else:
        carrying = [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]
    if len(carrying) == layers and pick.random() < 0.5:
        found = {}
    found["output_gate_type"] = pick.choice([None, "silu", "sigmoid"])
    if not carrying or pick.random() < 0.35:
        return found
    orders, heads = pick.choice([2, 3, 4]), pick.choice([1, 2, 3])
    found |= {"ngram_size": orders, "heads_per_ngram": heads, "eos_token_id": 1}
    found["ple_layer_ids"] = [one + 1 for one in sorted(pick.sample(carrying, pick.randint(1, len(carrying))))]
    found["ple_embed_dim"] = (orders - 1) * heads * pick.choice(SMALL_PRIMES)
    found["ngram_vocab_size_base"] = pick.randint(2, 3000)
    found["make_ngram_vocab_size_divisible_by"] = pick.choice([1, 7, 64, 128])
    if pick.random() < 0.5:
        found["ple_conv_kernel_size"] = pick.randint(1, 6)
    return found


_QSA = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")

COMPUTED: Mapping[str, Mapping[str, str]] = {
    "qwen4_exp_text": {
        "ngram_rows": "[ceil(sum_of_primes(ngram_vocab_size_base,"
        " len([one for one in range(layer) if one + 1 in ple_layer_ids]) * (ngram_size - 1) * heads_per_ngram,"
        " (ngram_size - 1) * heads_per_ngram) / make_ngram_vocab_size_divisible_by)"
        " * make_ngram_vocab_size_divisible_by if layer + 1 in ple_layer_ids else 0"
        " for layer in range(num_hidden_layers)]",
        "ngram_width": "ple_embed_dim // ((ngram_size - 1) * heads_per_ngram) if ple_layer_ids else 0",
    }
}
"""Sizes that no search finds, as expressions over keys of a type: its models show whether they hold.

Each becomes a value that follows from others."""


def _recurrent_gemma(_: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """Kinds of layers that begin anew where there are fewer than layers."""
    kinds = [pick.choice(["recurrent", "attention"]) for _ in range(pick.randint(1, layers))]
    return {"block_types": kinds, "attention_bias": pick.random() < 0.5}


def _zamba2(given: dict[str, Any], layers: int, pick: random.Random) -> dict[str, Any]:
    """A kind for every layer: the class names 54 where none is given, and takes no other number."""
    found: dict[str, Any] = {"num_mem_blocks": pick.choice([1, 2, 2, 3])}
    if pick.random() < 0.1:
        given.pop("layers_block_type", None)
        return {**found, "num_hidden_layers": 54}
    return {**found, "layers_block_type": [pick.choice(["hybrid", "linear_attention"]) for _ in range(layers)]}


FOLLOWING: Mapping[str, Callable[[dict[str, Any], int, random.Random], dict[str, Any]]] = {
    "deepseek_v4": _deepseek_v4,
    "dots3_note_text": _dots3_note_text,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _gemma4_text),
    "glm5_next_text": _glm5_next_text,
    "granitemoehybrid": lambda _, __, pick: {"position_embedding_type": pick.choice([None, "rope", "nope"])},
    "gpt_neo": lambda _, layers, __: {"attention_types": [[["global"], layers]]},
    "jamba": _jamba,
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba),
    "mamba2": _mamba2,
    "qwen4_exp_text": _qwen4_exp_text,
    "recurrent_gemma": _recurrent_gemma,
    "zamba2": _zamba2,
}
"""What changes in a draw of a type: from what was drawn and the number of layers."""

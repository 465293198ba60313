"""Names in files of DeepSeek-V4, several parts of which are others than the model's.

transformers writes them back so, with `model.` in front of the layers, which published files leave out.
"""

from __future__ import annotations

import re

_SHORTER = (
    (r"^lm_head\.", "head."),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(\w+)$", r".hc_\1_\2"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
)
_NORM = (r"\.kv_norm\.", ".norm.")
_PUBLISHED = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
)


def short_names(name: str) -> tuple[str, ...]:
    """What a tensor of the model may be called: as transformers writes it, and as it is published."""
    short = _replaced(name, _SHORTER)
    found = (short, _replaced(short, (_NORM,)))
    return (*found, *(_replaced(one, _PUBLISHED) for one in found))


def _replaced(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name

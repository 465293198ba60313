"""Decoders most of whose layers carry a state along the sequence in the place of attention."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Experts, Family, QkNorm
from parcompile.model.recurrent import Recurrent, RecurrentKind

from .traits import defaults_of

_QWEN3_5 = Recurrent(
    RecurrentKind.GATED_DELTA_NET,
    projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    output_last=False,
)


def _experts(count: int, per_token: int) -> Experts:
    return Experts(
        shared="shared_expert",
        shared_gate="shared_expert_gate",
        count=("num_experts", count),
        per_token=("num_experts_per_tok", per_token),
        width=("moe_intermediate_size", 512),
        shared_width=("shared_expert_intermediate_size", 512),
    )


HYBRIDS: Mapping[str, Family] = {
    "qwen3_next": Family(
        qk_norm=QkNorm.HEAD,
        query_gate=True,
        recurrent=Recurrent(RecurrentKind.GATED_DELTA_NET),
        experts=_experts(512, 10),
        defaults=defaults_of(2, 256),
    ),
    "qwen3_5_text": Family(
        qk_norm=QkNorm.HEAD,
        query_gate=True,
        recurrent=_QWEN3_5,
        defaults=defaults_of(4, 256),
    ),
    "qwen3_5_moe_text": Family(
        qk_norm=QkNorm.HEAD,
        query_gate=True,
        recurrent=_QWEN3_5,
        experts=_experts(256, 8),
        defaults=defaults_of(2, 256),
    ),
}

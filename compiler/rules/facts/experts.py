"""What rules read of experts."""

from __future__ import annotations

from parcompile.layout.groups import Axis
from parcompile.layout.shards import expert_rows, shared_tokens
from parcompile.rules import nearest_divisors
from parcompile.spec.resolve import Resolution


def near_ep(spec: Resolution) -> tuple[int, ...]:
    """Other sizes of ep. The experts that give back what they take are dealt too."""
    moe = spec.shape.moe
    counts = () if moe is None else filter(None, (moe.num_experts, moe.num_identities))
    return nearest_divisors(spec.axis(Axis.EP), *counts, count=4)


def tokens_of_rank(spec: Resolution) -> int:
    """The tokens of a micro-batch that a rank sends to experts."""
    tokens = spec.micro_batch_size * spec.sequence_length // spec.axis(Axis.CP)
    return shared_tokens(tokens, spec.axis(Axis.TP), 0)[1]


def rows_of_expert(spec: Resolution) -> int | None:
    """Of these those that one expert takes at most; None: as many as choose it."""
    moe, factor = spec.shape.moe, spec.if_given("training", "router", "expert_capacity")
    if moe is None or factor is None:
        return None
    return expert_rows(factor, tokens_of_rank(spec), moe.num_experts_per_token, moe.num_experts)

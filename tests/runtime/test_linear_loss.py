"""Contract: with training.linear_cross_entropy a plan trains as one process, and no logits exist whole.

`.ci/pipeline_matrix.py --draws linear_loss` draws as many plans as one likes; docs/fit_larger.md says what they found.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from closeness import assert_close, judge
from drawn_stages import CHUNK_ELEMENTS, compare, draw
from families import tiny_config
from family_runs import batch_of, config_plan, drawn_model, train_injected, train_plain
from ranks import RankError, run_ranks
from training_runs import compared, make_plan

from parcompile.plan import Plan
from parcompile.runtime.preflight import preflight

SP = {"tp": 2, "sequence_parallel": True}
FAMILIES = (
    "llama",
    "gemma2",
    "granite",
    "cohere2",
    "gpt2",
    "phi",
    "mixtral",
    "nemotron_h",
    "deepseek_v3",
    "muse_spark_text",
)
"""Heads with a cap, a scale, a bias, a tied weight, a multiplier and a cap; routers with losses of their own."""
CHUNKS = "parcompile.layout.shards.LOSS_CHUNK_ELEMENTS"


def in_chunks(rank: int, plans: list[Plan]) -> list[dict[str, Any]]:
    with mock.patch(CHUNKS, CHUNK_ELEMENTS):
        return train_injected(rank, plans)


@pytest.mark.ranks
def test_every_kind_of_head_trains_as_one_process() -> None:
    plans = [config_plan(name, tiny_config(name), 2, SP, linear_cross_entropy=True) for name in FAMILIES]
    ranks = run_ranks(2, in_chunks, plans)
    for place, (name, plan) in enumerate(zip(FAMILIES, plans, strict=True)):
        found = [rank[place] for rank in ranks]
        assert "error" not in found[0], found[0]
        alone = config_plan(name, tiny_config(name), 1, {})
        judge(compared(plan, found, lambda seed, alone=alone: train_plain(alone, seed=seed)))


@pytest.mark.ranks
@pytest.mark.parametrize("number", [0, 4, 6, 9])
def test_drawn_stages_and_axes_train_as_one_process(number: int) -> None:
    plan, _ = draw(number, 4, switch="linear_cross_entropy")
    judge(compare(plan))


def look_at_logits(_rank: int, plan: Plan) -> dict[str, Any]:
    """What a script finds that computes with the logits itself; `before`: whether they were there before."""
    from parcompile.runtime import join, split_batch
    from parcompile.runtime.inject import inject
    from parcompile.runtime.inject.deferred_logits import DeferredLogits

    mesh = join(plan)
    model: Any = inject(drawn_model(plan), mesh)
    output = model(**split_batch(batch_of(plan), mesh))
    logits = output.logits
    shape, dtype = tuple(logits.shape), logits.dtype
    few = logits[..., :5] * 2.0
    before = [one._computed is not None for one in (logits, few)] if isinstance(logits, DeferredLogits) else None
    parts = {"row": logits[1], "last": logits[:, -1], "few": few, "twice": 2 * logits, "half": logits / 2}
    own = logits.float().log_softmax(-1)[..., 0].sum() + (logits * 2).square().mean()
    own.backward()
    return {
        "shape": shape,
        "dtype": dtype,
        "before": before,
        "parts": {name: one.detach().clone() for name, one in parts.items()},
        "sums": torch.stack([own.detach(), model.get_output_embeddings().weight.grad.norm(), output.loss.detach()]),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("parallelism", [{}, {"tp": 2, "sequence_parallel": True}], ids=["one rank", "tp2 sp"])
def test_whoever_looks_at_logits_gets_them_with_their_gradient(parallelism: dict[str, Any]) -> None:
    plans = [
        config_plan("gemma2", tiny_config("gemma2"), parallelism.get("tp", 1), parallelism, linear_cross_entropy=one)
        for one in (True, False)
    ]
    deferred, whole = (run_ranks(one.world_size, look_at_logits, one) for one in plans)
    for one, other in zip(deferred, whole, strict=True):
        assert one["before"] == [False, False], "the logits were computed before anybody looked at them"
        assert other["before"] is None
        assert (one["shape"], one["dtype"]) == (other["shape"], other["dtype"])
        assert_close(one["parts"], other["parts"])
        assert_close(one["sums"], other["sums"])


class OwnLinear(torch.nn.Linear):
    """A head of which nobody knows what it computes."""


def with_own_head(_rank: int, plan: Plan, kind: str) -> None:
    from parcompile.runtime import join, split_batch
    from parcompile.runtime.inject import inject

    mesh = join(plan)
    model: Any = drawn_model(plan)
    if kind == "head":
        model.lm_head.__class__ = OwnLinear
    inject(model, mesh)
    if kind == "loss":
        inner = model.loss_function
        model.loss_function = lambda logits, *args, **kwargs: inner(logits.sin(), *args, **kwargs)
    model(**split_batch(batch_of(plan), mesh))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("head", "training.linear_cross_entropy: the head is a layer of the class OwnLinear, not a plain"),
        ("loss", "training.linear_cross_entropy: the model computes with its logits before the loss, so that they are"),
    ],
)
def test_a_head_that_cannot_be_left_to_the_loss_is_refused(kind: str, message: str) -> None:
    plan = config_plan("llama", tiny_config("llama", vocab_size=64), 1, {}, linear_cross_entropy=True)
    with pytest.raises(RankError, match=message):
        run_ranks(1, with_own_head, plan, kind)


@pytest.mark.parametrize(
    ("parallelism", "changes", "extra"),
    [
        (SP, {}, {}),
        ({"tp": 2}, {"precision": "fp32", "activation_checkpointing": "none"}, {}),
        ({"cp": 2}, {}, {"zero": {"stage": 3}}),
        ({"tp": 2, "pp": 2}, {"gradient_accumulation_steps": 4}, {}),
    ],
    ids=["tp2 sp", "tp2 in fp32", "cp2 at stage 3", "tp2 pp2"],
)
def test_memory_and_messages_are_the_plans(
    parallelism: dict[str, Any], changes: dict[str, Any], extra: dict[str, Any]
) -> None:
    model = tiny_config("llama", vocab_size=32000, hidden_size=128, num_hidden_layers=2, max_position_embeddings=4096)
    training = {
        "sequence_length": 4096,
        "micro_batch_size": 1,
        "precision": "bf16",
        "activation_checkpointing": "full",
        "linear_cross_entropy": True,
        **changes,
    }
    steps = training.setdefault("gradient_accumulation_steps", 2)
    training["global_batch_size"] = steps * (4 // (2 * parallelism.get("pp", 1)))
    plan = make_plan(4, parallelism, model=model, whole_model=True, training=training, extra=extra)
    with mock.patch(CHUNKS, 2**22):
        # Compiled with the same chunks, which the estimate counts anew.
        report = preflight(plan, [3])
    subjects = {one.subject for one in report.findings}
    assert "activations of a micro-batch" in subjects
    about_loss = ("sent over tp", "activations of a micro-batch")
    assert [one for one in report.differing if one.subject in about_loss] == []

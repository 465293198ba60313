"""Contract: a user module, injected by the rules of the spec, trains as it does in one process.

Two AdamW steps in fp32 under the engine: losses, gradient norms and gathered parameters within 1e-5 relative.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close, judge, nudge
from ranks import run_ranks
from torch import Tensor
from training_runs import compared, make_plan, samples, whole_parameters
from user_module import (
    HEADS,
    HIDDEN,
    INJECTION,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    Decoder,
    HandMade,
    OwnCount,
    drawn_decoder,
)

from parcompile.plan import Plan, plan_from_tree, plan_tree

pytestmark = pytest.mark.ranks

STEPS = 2


def user_plan(
    world_size: int, parallelism: dict[str, Any], *, tied: bool = False, without: str = "", **training: Any
) -> Plan:
    from parcompile.runtime import describe

    rules = {name: rule for name, rule in INJECTION.items() if name not in ("unembed" if tied else "", without)}
    model = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "injection": rules,
        **describe(drawn_decoder(tied=tied)),
    }
    return make_plan(world_size, parallelism, model=model, training=training, whole_model=True)


def train(rank: int, plan: Plan, tied: bool, dropping: bool = False) -> dict[str, Any]:
    from parcompile.runtime import initialize, reduce_loss

    engine, _, loader, _ = initialize(
        plan=plan, model=drawn_decoder(tied=tied, dropping=dropping), training_data=samples(plan)
    )
    losses, norms = [], []
    batches = iter(loader)
    for _ in range(STEPS):
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        losses.append(reduce_loss(loss, engine.mesh))
        norms.append(float(engine.get_global_grad_norm()))
    parameters = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return {"rank": rank, "losses": losses, "norms": norms, "parameters": parameters}


def train_plain(plan: Plan, tied: bool, seed: int | None = None) -> dict[str, Any]:
    model, training, data = drawn_decoder(tied=tied), plan.spec.training, samples(plan)
    nudge(model, seed)
    settings = training.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses, norms = [], []
    for step in range(STEPS):
        ids = torch.stack([sample["input_ids"] for sample in data[step * 4 : step * 4 + 4]])
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "norms": norms,
        "parameters": {name: one.detach() for name, one in model.named_parameters()},
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any], bool, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}, False, {}),
    "tp4, two ranks hold each kv head": (4, {"tp": 4}, False, {}),
    "cp2": (2, {"cp": 2}, False, {}),
    "tp2 × cp2": (4, {"tp": 2, "cp": 2}, False, {}),
    "tp2 × cp2, 9 tokens on a rank, sequence parallel, tied, recomputed": (
        4,
        {"tp": 2, "cp": 2, "sequence_parallel": True, "cp_layout": "contiguous"},
        True,
        {"activation_checkpointing": "full", "sequence_length": 18},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_user_module_trains_as_in_one_process(layout: str) -> None:
    world_size, parallelism, tied, training = LAYOUTS[layout]
    plan = user_plan(world_size, parallelism, tied=tied, **training)
    assert plan_from_tree(plan_tree(plan)).plan_hash == plan.plan_hash
    ranks = run_ranks(world_size, train, plan, tied)
    judge(compared(plan, ranks, lambda seed: train_plain(plan, tied, seed)))


def refusals(rank: int, plan: Plan) -> list[str]:
    """What is said of modules that do not keep to the rules; one world serves all."""
    from parcompile.runtime import RunError, initialize

    found = []
    for broken in ("order", "attention", "names", "counts"):
        model = drawn_decoder()
        if broken == "order":
            model.blocks[0].before_mix = model.blocks[0]._modules.pop("before_mix")
        elif broken == "attention":
            model.blocks[1].mix.__class__ = HandMade
        elif broken == "names":
            model.blocks[1].mixed = model.blocks[1]._modules.pop("mix")
        else:
            for block in model.blocks:
                block.mix.heads = block.mix.__dict__.pop("n_heads")
                block.mix.__class__ = OwnCount
        try:
            initialize(plan=plan, model=model)
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def test_a_module_that_does_not_keep_to_the_rules_is_refused() -> None:
    order, attention, names, counts = run_ranks(4, refusals, user_plan(4, {"tp": 2, "cp": 2}))[0]
    assert (
        "the module registers blocks.0.before_up.weight where model.parameters has blocks.0.before_mix.weight" in order
    )
    assert "blocks.1.mix does not call torch.nn.functional.scaled_dot_product_attention" in attention
    assert "the model has blocks.1.mixed.wqkv.weight [64, 32], which the plan does not know" in names
    assert "the injected module cannot be called" in counts
    assert "under the name" in counts


def forgotten_rule(rank: int, plan: Plan) -> str:
    from parcompile.runtime import RunError, initialize

    try:
        initialize(plan=plan, model=drawn_decoder())
    except RunError as error:
        return str(error)
    return ""


def test_the_self_check_finds_a_forgotten_rule() -> None:
    plan = user_plan(2, {"tp": 2}, without="blocks.*.mix.key_norm")
    assert "the gradient of blocks.0.mix.key_norm.weight differs" in run_ranks(2, forgotten_rule, plan)[0]


def test_a_module_cannot_be_built_from_its_plan() -> None:
    from parcompile.runtime import RunError, build_model

    with pytest.raises(RunError, match="which only you can build"):
        build_model(user_plan(1, {}))


def test_dropout_is_the_same_in_every_layout_also_of_features_that_are_cut() -> None:
    layouts: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (1, {}, {}),
        (2, {"tp": 2}, {}),
        (4, {"tp": 2, "cp": 2, "sequence_parallel": True}, {"activation_checkpointing": "full"}),
    ]
    expected: dict[str, Any] = {}
    for world_size, parallelism, training in layouts:
        plan = user_plan(world_size, parallelism, **training)
        ranks = run_ranks(world_size, train, plan, False, True)
        found = {key: ranks[0][key] for key in ("losses", "norms")} | {"parameters": whole_parameters(plan, ranks)}
        expected = expected or found
        assert_close(found, expected)


class Noisy(Decoder):
    """Draws what no layout could draw alike."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits: Tensor = super().forward(ids, position_ids)
        return logits + torch.rand(())


def call_noisy(rank: int, plan: Plan) -> str:
    from parcompile.runtime import RunError, initialize

    engine, _, loader, _ = initialize(plan=plan, model=Noisy(), training_data=samples(plan))
    try:
        engine.train_batch(iter(loader))
    except RunError as error:
        return str(error)
    return "it ran"


def test_random_numbers_without_a_place_are_refused() -> None:
    assert (
        "the model calls rand, whose numbers would be others in each layout"
        in run_ranks(1, call_noisy, user_plan(1, {}))[0]
    )

"""Contract: a model begins with the same weights in every layout, and no rank draws what it does not hold a part of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import judge
from families import FAMILIES
from family_runs import family_plan
from ranks import run_ranks
from torch import nn
from training_runs import compared, make_plan, train_in_one_process, train_with_engine

from parcompile.plan import Plan
from parcompile.runtime import join
from parcompile.runtime.engine import initialization
from parcompile.runtime.inject import inject
from parcompile.runtime.inject.injection import draws_all, initial_model
from parcompile.runtime.model import pretrained
from parcompile.runtime.model.pretrained import InitialWeights, UndrawnError, build_model, instantiate, without_memory

LEFT_OUT = {"apertus": "mlp.act_fn.alpha_p", "openai-gpt": "attn.c_attn.weight"}
"""Types whose rules in transformers leave a parameter to its module, and the first such parameter."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parts_are_drawn_as_transformers_draws_the_whole(family: str) -> None:
    plan = family_plan(family, 1, {})
    weights = InitialWeights(without_memory(plan), 1)
    if family in LEFT_OUT:
        with pytest.raises(UndrawnError, match=rf"no first weights for \S*{LEFT_OUT[family]} of"):
            weights.whole(next(iter(dict(plan.parameters.expanded()))))
            weights.whole(f"{plan.parameters.layer[0].name}".format(layer=0))
        assert not weights.draws_all()
        return
    with torch.random.fork_rng():
        torch.manual_seed(1)
        whole = instantiate(plan, torch.float32)
    for name, theirs in whole.named_parameters():
        ours = weights.whole(name)
        assert ours.shape == theirs.shape, name
        spread = theirs.std(correction=0), ours.std(correction=0)
        if min(spread) == 0:
            assert torch.equal(ours, theirs), name
        elif theirs.numel() >= 64:
            assert 0.7 < spread[1] / spread[0] < 1.4, name


@pytest.mark.parametrize("small", [0, 10**9], ids=["part by part", "whole"])
def test_a_model_has_weights_of_its_seed_and_leaves_the_random_state(small: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(pretrained, "SMALL_NUMEL", small)
    plan = make_plan(1, {})
    state = torch.random.get_rng_state()
    one, same, other = build_model(plan), build_model(plan), build_model(plan, seed=7)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    first, second = (next(iter(model.parameters())) for model in (one, other))
    assert not torch.equal(first, second)
    layers = [one.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(2)]
    assert not torch.equal(*layers)


def test_a_type_that_leaves_a_parameter_out_is_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "SMALL_NUMEL", 0)
    model = build_model(family_plan("openai-gpt", 1, {}))
    assert not any(one.isnan().any() or one.is_meta for one in model.parameters())
    assert not draws_all(family_plan("apertus", 1, {}))
    assert draws_all(family_plan("llama", 1, {}))


def compare_slices(rank: int, plan: Plan) -> tuple[list[str], int]:
    """Parameters of this rank that are not those of the whole model, and how many parts it drew."""
    mesh, drawn, draw = join(plan), list[str](), InitialWeights.draw

    def noted(self: InitialWeights, part: str) -> Any:
        drawn.append(part)
        return draw(self, part)

    pretrained.SMALL_NUMEL = 0
    whole = inject(build_model(plan), mesh)
    InitialWeights.draw = noted  # type: ignore[method-assign]
    model = initial_model(plan, mesh)
    ours, theirs = (dict(one.named_parameters()) for one in (model, whole))
    assert ours.keys() == theirs.keys()
    assert len(drawn) == len(set(drawn)), "a part was drawn twice"
    return [name for name, one in ours.items() if not torch.equal(one, theirs[name])], len(drawn)


LAYOUTS = [
    ("llama", {"tp": 2, "pp": 2}, 2),
    ("gpt2", {"tp": 2, "pp": 2}, 2),
    ("gemma2", {"tp": 2, "dp": 2}, 3),
    ("qwen3_moe", {"tp": 2, "ep": 2, "dp": 2}, 3),
    ("zamba2", {"tp": 2, "dp": 2}, None),
    ("deepseek_v3", {"pp": 2, "ep": 2, "dp": 2}, 2),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "parallelism", "parts"), LAYOUTS, ids=[one[0] for one in LAYOUTS])
def test_each_rank_draws_its_slices_of_the_same_weights(family: str, parallelism: Any, parts: int | None) -> None:
    """With two layers on two stages a rank draws one layer and what lies outside of layers."""
    for different, drawn in run_ranks(4, compare_slices, family_plan(family, 4, parallelism)):
        assert different == []
        assert parts in (None, drawn)


def not_built(_: Plan) -> Any:
    """In place of a model: `initialize` has to make it."""
    return None


def train_in_slices(rank: int, plan: Plan) -> dict[str, Any]:
    def refuse(_: Plan) -> nn.Module:
        raise AssertionError("the model was built whole")

    pretrained.SMALL_NUMEL, initialization.build_model = 0, refuse  # type: ignore[assignment]
    return train_with_engine(rank, plan, built=not_built)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelism", [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_a_large_model_without_weights_trains_as_one_process(
    parallelism: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, ranks = make_plan(4, parallelism), run_ranks(4, train_in_slices, make_plan(4, parallelism))
    monkeypatch.setattr(pretrained, "SMALL_NUMEL", 0)
    judge(compared(plan, ranks, lambda seed: train_in_one_process(plan, built=build_model, seed=seed)))

"""Contract: limits of numeric comparisons let rounding pass and no defect, and a thin margin fails too."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import CEILING, FOLDER, ROUNDING, assert_apart, assert_close, margins, nudge
from torch import Tensor, nn
from training_runs import initial_model, make_plan, plain_optimizer, samples

LIMIT = ROUNDING[torch.float32]
STEPS = 3
PLAN = make_plan(1, {})
NAMES = [name for name, _ in initial_model(PLAN).named_parameters()]


@cache
def train(seed: int | None = None, defect: str = "", of: str = "", pieces: int = 1) -> dict[str, Any]:
    """Steps whose gradients are sums over `pieces` of the batch, with a `defect` in the gradient of a parameter."""
    model, data = initial_model(PLAN), samples(PLAN)
    nudge(model, seed)
    optimizer, named, rows = plain_optimizer(model, PLAN), dict(model.named_parameters()), 4
    losses, norms = [], []
    for step in range(STEPS):
        ids = torch.stack([one["input_ids"] for one in data[step * rows : (step + 1) * rows]])
        parts = []
        for piece in ids.chunk(pieces):
            loss = model(input_ids=piece, labels=piece).loss / pieces
            parts.append((float(loss.detach()), torch.autograd.grad(loss, list(named.values()))))
        for place, (name, parameter) in enumerate(named.items()):
            shares = [gradients[place] for _, gradients in parts]
            hit = of in ("", name)
            parameter.grad = sum(shares[1:] if hit and defect == "a missing sum" else shares, torch.zeros(()))
            if hit and defect == "scale":
                parameter.grad = parameter.grad * 1.001
        losses.append(sum(loss for loss, _ in parts))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), PLAN.spec.training.gradient_clipping)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "parameters": {name: one.detach() for name, one in named.items()}}


def test_sums_in_another_order_pass() -> None:
    for pieces in (2, 4):
        assert_close(train(pieces=pieces), train(), rerun=train)


def test_a_gradient_norm_of_other_scale_is_red() -> None:
    with pytest.raises(AssertionError, match=r"norms.*: different"):
        assert_close(train(defect="scale"), train(), rerun=train)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_that_is_missing_in_one_parameter_is_red(name: str) -> None:
    with pytest.raises(AssertionError, match=": different"):
        assert_close(train(defect="a missing sum", of=name, pieces=2), train(), rerun=train)


def gradients(seed: int | None = None) -> dict[str, Tensor]:
    model, ids = initial_model(PLAN), samples(PLAN)[0]["input_ids"][None]
    nudge(model, seed)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_one_gradient_of_other_scale_is_red(name: str) -> None:
    expected = gradients()
    with pytest.raises(AssertionError, match=f"{name}: relative difference 1.00e-03, .*: different"):
        assert_close({**expected, name: 1.001 * expected[name]}, expected, rerun=gradients)


@pytest.mark.parametrize(
    ("distance", "said"), [(0.3, ""), (0.5, "a thin margin, 0.50 of the limit"), (1.5, "different")]
)
def test_a_difference_within_a_third_of_the_limit_is_thin(distance: float, said: str) -> None:
    one = torch.tensor([3.0, 4.0])
    two = one + distance * LIMIT * one
    if not said:
        assert_close(two, one)
        return
    with pytest.raises(AssertionError, match=said):
        assert_close({"losses": [1.0], "whole": two}, {"losses": [1.0], "whole": one}, about="rank 0")


def test_what_cannot_be_compared_is_red() -> None:
    for found, expected in (
        ([1.0, float("nan")], [1.0, 1.0]),
        ([1.0], [1.0, 1.0]),
        ({"a": 1.0}, {"b": 1.0}),
        (torch.ones(2), torch.ones(1)),
        (torch.ones(2), torch.zeros(2)),
    ):
        with pytest.raises(AssertionError):
            assert_close(found, expected)


def test_the_limit_follows_what_last_bits_do_to_the_reference_up_to_a_ceiling() -> None:
    def magnified(seed: int | None, factor: float = 50.0) -> dict[str, list[float]]:
        return {"losses": [1.0, 1.0 + (seed or 0) * factor * 1e-7]}

    found = margins({"losses": [1.0 + 5e-6, 1.0]}, magnified(None), rerun=magnified)
    assert [one.limit for one in found] == pytest.approx([1.5e-4, LIMIT])
    assert found[0].noise == pytest.approx(1.5e-5)
    wild = margins({"losses": [1.01, 1.0]}, magnified(None), rerun=lambda seed: magnified(seed, 1e6))
    assert wild[0].limit == CEILING < wild[0].difference


def test_what_is_next_to_nothing_is_judged_by_the_size_that_the_test_says() -> None:
    expected, found = torch.full((4,), 1e-9), torch.full((4,), 2e-9)
    with pytest.raises(AssertionError, match="different"):
        assert_close(found, expected)
    assert_close(found, expected, least=1e-3)


def test_results_that_must_differ_do_so_by_three_times() -> None:
    assert_apart([1.0, 1.1], [1.0, 1.0], 0.03)
    with pytest.raises(AssertionError, match="not apart"):
        assert_apart([1.0, 1.1], [1.0, 1.0], 0.05)


def test_every_comparison_leaves_its_worst_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert_close({"a": [1.0, 1.0 + 1e-6], "b": 2.0}, {"a": [1.0, 1.0], "b": 2.0}, about="rank 1")
    (file,) = tmp_path.iterdir()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["test"].endswith("::test_every_comparison_leaves_its_worst_number")
    assert (line["what"], line["limit"], line["noise"]) == ("rank 1 a[1]", LIMIT, None)
    assert line["difference"] == pytest.approx(1e-6)

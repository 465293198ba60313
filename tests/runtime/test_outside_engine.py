"""Contract: what people do to the model of an engine is right, or one sentence says what to do instead."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_close
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples, train_in_one_process

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

STEPS = 3


def run(rank: int, plan: Plan) -> dict[str, Any]:
    """Steps with a backward pass written in each of the ways that are right, and what the others say."""
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    batches, losses, norms = iter(loader), [], []

    def backward(kind: str, batch: dict[str, Any]) -> torch.Tensor:
        if kind == "of torch":
            loss: torch.Tensor = engine(**batch).loss
            loss.backward()
            return loss
        loss = (engine.module if kind == "of the module" else engine)(**batch).loss
        engine.backward(loss)
        return loss

    for kind in ("of the engine", "of torch", "of the module"):
        batch = next(batches)
        with torch.no_grad():
            evaluated = float(engine.module(**batch).loss)
        loss = backward(kind, batch)
        engine.step()
        assert float(loss.detach()) == evaluated
        losses.append(evaluated)
        norms.append(float(engine.get_global_grad_norm()))
    batch, module = next(batches), engine.module
    refused: dict[str, Callable[[], Any]] = {
        "loss": lambda: module(**batch).loss.backward(),
        "logits": lambda: module(**batch).logits.sum().backward(),
        "copied": lambda: copy.deepcopy(module),
        "pickled": lambda: torch.save(module, io.BytesIO()),
        "resized": lambda: module.resize_token_embeddings(70),
        "padded": lambda: module.resize_token_embeddings(pad_to_multiple_of=64),
        "decoded": lambda: module(**batch, past_key_values=object()),
    }
    assert module.resize_token_embeddings(61) is module.get_input_embeddings()
    return {"losses": losses, "norms": norms, "said": {name: said(call) for name, call in refused.items()}}


def said(call: Callable[[], Any]) -> str:
    from parcompile.runtime import RunError

    try:
        call()
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("parallelism", [{"tp": 2}, {"cp": 2}, {"dp": 2}], ids=lambda one: next(iter(one)))
def test_what_is_done_outside_of_the_engine_is_right_or_says_what_to_call(parallelism: dict[str, int]) -> None:
    plan = make_plan(2, parallelism)

    def rerun(seed: int | None) -> dict[str, Any]:
        return train_in_one_process(plan, steps=STEPS, seed=seed)

    ranks = run_ranks(2, run, plan)
    means = [sum(losses) / 2 for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    expected = {name: value for name, value in rerun(None).items() if name != "parameters"}
    assert_close({"losses": means, "norms": ranks[0]["norms"]}, expected, rerun=rerun)
    for rank in ranks:
        for kind in ("loss", "logits"):
            assert "write loss = engine(**batch).loss and engine.backward(loss)" in rank["said"][kind]
        for kind in ("copied", "pickled"):
            assert "Copy the whole model before initialize (copy.deepcopy)" in rank["said"][kind]
        assert "resize_token_embeddings to 70 tokens: the plan has model.vocab_size 61" in rank["said"]["resized"]
        assert "resize_token_embeddings to 64 tokens" in rank["said"]["padded"]
        assert "keys of earlier calls are taken for decoding only" in rank["said"]["decoded"]

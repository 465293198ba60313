"""What a run writes behind prompts is the same in every layout, and kept with the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_runs import adapted
from ranks import run_ranks
from test_padded_shards import MIXTURE
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan
from parcompile.runtime import Prompts, RunError
from parcompile.runtime.run_log import SAMPLES, RunLog

TEXTS = ("\x05\x11\x07", "\x2a")
SPEC: dict[str, Any] = {"model": {"vocab_size": 256}, "training": {"micro_batch_size": 1, "sequence_length": 16}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 × cp2, sequence parallel": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "dp2, ZeRO 3": (2, {"zero_stage": 3}),
    "dp2 × ep2 × tp2, experts": (4, {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}),
    "tp2 × cp2, adapters": (4, {"tp": 2, "cp": 2}),
}
ADAPTERS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def plan_of(layout: str, size: int, parallelism: dict[str, Any]) -> Plan:
    model = {**(MIXTURE if "experts" in layout else {}), "vocab_size": 256}
    return make_plan(size, parallelism, **{**SPEC, "model": model})


def train_and_continue(_: int, plan: Plan, adapts: bool) -> tuple[dict[str, str], bool]:
    from parcompile.runtime import initialize

    model = adapted(plan, ADAPTERS) if adapts else initial_model(plan)
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    batches = iter(loader)
    for _ in range(2):
        engine.train_batch(batches)
    return Prompts(TEXTS, plan, new_tokens=9).continued(engine), engine.module.training


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_continues_prompts_as_one_process(layout: str) -> None:
    size, parallelism = LAYOUTS[layout]
    adapts = "adapters" in layout
    ((expected, _),) = run_ranks(1, train_and_continue, plan_of(layout, 1, {}), adapts)
    assert expected.keys() == set(TEXTS)
    assert all(expected.values())
    for found, trains in run_ranks(size, train_and_continue, plan_of(layout, size, parallelism), adapts):
        assert found == expected
        assert trains


@pytest.mark.parametrize(
    ("text", "parallelism", "said"),
    [
        ("", {}, "the prompt '' has no token: write some text"),
        ("a" * 16, {}, "has 16 tokens, and sequence_length is 16: no token can follow"),
        ("a", {"pp": 2}, "a plan with pp 2 continues no prompts while it trains"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(text: str, parallelism: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said):
        Prompts([text], make_plan(parallelism.get("pp", 1), parallelism, **SPEC))


def test_a_token_that_the_model_does_not_have_names_the_tokenizer() -> None:
    with pytest.raises(RunError, match="has the token 122, and the model's vocabulary 61: name the model's tokenizer"):
        Prompts(["z"], make_plan(1, {}))


def test_a_run_without_prompts_leaves_no_empty_file_of_texts(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.say(1, {})
    assert not (tmp_path / SAMPLES).exists()


def test_a_run_that_goes_on_keeps_the_texts_of_the_steps_before_it(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.add(step, loss=1.0)
            log.say(step, {"The river": f"of step {step}"})
    with (tmp_path / SAMPLES).open("a", encoding="utf-8") as stream:
        stream.write('{"step": 4, "prom')  # cut off
    with RunLog(tmp_path, 2) as log:
        log.say(3, {"The river": "again"})
    rows = [json.loads(line) for line in (tmp_path / SAMPLES).read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["text"]) for row in rows] == [(1, "of step 1"), (2, "of step 2"), (3, "again")]

"""Contract: scripts of trl train by a plan with a line more; every line of their log is that of one process.

A few of the draws of `.ci/trl_matrix.py`: SFT, DPO, KTO and reward models, with and without LoRA, also with a last
batch that does not fill all ranks. What a plan cannot do for a class of trl is refused before it trains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from closeness import assert_close, judge
from launched import run_forked
from ranks import run_ranks
from training_runs import initial_model, make_plan, whole_parameters, whole_weights
from trl_runs import Run, compare, draw, in_one_process, on_ranks, script, tokenizer, write_data

from parcompile.cli import cli
from parcompile.plan import Plan

pytest.importorskip("trl", reason="needs trl: its trainers train by a plan")
pytestmark = pytest.mark.ranks

DRAWS = {
    8: "SFT, dft, chats, cp2 x dp2, ZeRO 2, 3 rows of 4 in the last batch",
    17: "DPO, experts, ep4 x dp4, recomputed, 3 rows of 8 in the last step",
    7: "KTO with LoRA, whose reference is the model without it, tp2",
    1024: "a reward model, tp2 x cp2, sequence parallelism",
    1003: "a reward model of experts, tp2 x ep2 x dp2, 3 pairs of 4 in the last batch",
}


@pytest.mark.parametrize("number", DRAWS, ids=DRAWS.values())
def test_a_script_of_trl_trains_by_a_plan_with_a_line_more(number: int, tmp_path: Path) -> None:
    judge(compare(draw(number), str(tmp_path)))


_FOUR = {"micro_batch_size": 4, "activation_checkpointing": "none", "gradient_clipping": 100.0}
# Of scaled advantages of pairs with equally many tokens the loss is 0, and a relative difference says nothing.
_PAIRS = {"num_generations": 2, "scale_rewards": "none"}
SAMPLED = {
    "given completions, dp2": Run("GRPO", "llama", 2, {}, {**_FOUR, "global_batch_size": 8}, _PAIRS, rows=12),
    "completions of the model, tp2 x cp2": Run(
        "GRPO", "llama", 4, {"tp": 2, "cp": 2}, {**_FOUR, "global_batch_size": 4}, _PAIRS, data="generated"
    ),
}


@pytest.mark.parametrize("run", SAMPLED.values(), ids=SAMPLED)
def test_policies_are_trained_by_a_plan_as_in_one_process(run: Run, tmp_path: Path) -> None:
    judge(compare(run, str(tmp_path)))


NOT_SAMPLED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beta is 0.1: trl would load its reference model anew. Write beta=0.0": ({"beta": 0.1}, {}),
    "top_entropy_quantile 0.5) looks at all ranks": ({"top_entropy_quantile": 0.5}, {}),
    "use_vllm is True: a plan's ranks have no vLLM": ({"use_vllm": True}, {}),
    "reward_funcs has a model, which trl would prepare": ({}, {"reward_funcs": ["folder"]}),
    "tools and environments answer on each rank": ({}, {"tools": [len]}),
    "zero.stage 3 shards the weights that generate needs": ({}, {"zero": 3}),
    "positions of gpt2 are a table": ({}, {"family": "gpt2"}),
}


@pytest.mark.parametrize("words", NOT_SAMPLED)
def test_what_grpo_asks_and_a_plan_cannot_do_is_named(words: str, tmp_path: Path) -> None:
    import trl

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise

    arguments, others = NOT_SAMPLED[words]
    others = {"reward_funcs": len, **others}
    layout = {"zero": others.pop("zero", 1), "family": others.pop("family", "llama")}
    plan = SAMPLED["given completions, dp2"]._replace(**layout).plan()
    args = trl.GRPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False, **arguments)
    with pytest.raises(RunError) as error:
        parallelise(trl.GRPOTrainer, plan)(model=None, args=args, **others)
    assert words in str(error.value)


STOPPED = Run(
    "SFT", "llama", 4, {"tp": 2, "cp": 2},
    {"micro_batch_size": 2, "global_batch_size": 4, "activation_checkpointing": "full"},
    {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
        "lr_scheduler_type": "linear", "include_num_input_tokens_seen": "all",
    },
    rows=12,
)  # fmt: skip
"""The evaluation loss falls, and is taken for a worse one: the second evaluation ends the run."""


def resumed_on_ranks(rank: int, run: Run, plan: Plan, folder: str) -> list[dict[str, Any]]:
    """A run to its end, and one more from the checkpoint in the middle of an epoch."""
    return [on_ranks(rank, run._replace(given={**run.given, **more}), plan, folder) for more in _RUNS]


_RUNS: tuple[dict[str, Any], ...] = ({}, {"resume": "checkpoint-2"})


# Of a llama of this size a reward comes so near to 0 that its relative difference says nothing.
@pytest.mark.parametrize(("kind", "family"), [("SFT", "llama"), ("Reward", "qwen3")])
def test_a_run_resumes_and_stops_early_as_in_one_process(kind: str, family: str, tmp_path: Path) -> None:
    stopped = STOPPED._replace(kind=kind, family=family)
    plan, places = stopped.plan(), [tmp_path / "ranks", tmp_path / "plain"]
    for place in places:
        write_data(stopped, f"{place}/rows", stopped.rows)
        write_data(stopped, f"{place}/eval", 4, seed=5)
    ranks = run_ranks(4, resumed_on_ranks, stopped, plan, str(places[0]))
    whole, resumed = ([rank[one] for rank in ranks] for one in (0, 1))
    steps = [line["step"] for line in whole[0]["log"] if "eval_loss" in line]
    assert steps == [2, 4], "it did not stop early"
    assert whole[0]["parameters"].keys() == resumed[0]["parameters"].keys()
    tails = [
        [line["loss"] for line in one[0]["log"] if line["step"] > 2 and "loss" in line] for one in (whole, resumed)
    ]
    assert len(tails[0]) == 2
    assert tails[0] == tails[1], "the resumed run is not the same to the bit"
    for one, more in zip((whole, resumed), _RUNS, strict=True):
        run = stopped._replace(given={**stopped.given, **more})
        found = {"log": one[0]["log"], "parameters": whole_parameters(plan, one)}
        assert_close(found, in_one_process(run, plan, str(places[1])))
    states = [json.loads((place / "checkpoint-4" / "trainer_state.json").read_text("utf-8")) for place in places]
    for state in states:
        state["log_history"] = len(state["log_history"])  # compared above
        state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
        state["best_metric"] = round(state["best_metric"], 4)
    assert states[0] == states[1]


def test_recomputation_that_trl_switches_off_and_on_keeps_the_contexts_of_the_plan() -> None:
    from parcompile.runtime.inject.regions import recompute_as_planned

    plan = STOPPED.plan()
    model: Any = initial_model(plan)
    recompute_as_planned(model, plan, 0)
    before = model.model.layers[0]._gradient_checkpointing_func.keywords
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable(None)
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == before
    assert "context_fn" in before


REWARDED = Run("Reward", "qwen3", 2, {"tp": 2}, {"micro_batch_size": 4}, {})
WORDS = REWARDED._replace(kind="SFT")


def saved_on_ranks(rank: int, folder: str) -> dict[str, Any]:
    """A reward model, saved; and what is said of models, classes and calls that do not fit the plan."""
    import transformers
    import trl

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise

    plan, said, made = REWARDED.plan(), [], []

    def keep(trainer: Any) -> Any:
        return lambda **named: made.append(parallelise(trainer, plan)(**named)) or made[-1]

    script(REWARDED, plan, folder, keep)
    made[0].save_model(f"{folder}/saved")
    ids = torch.arange(8)[None] + 5
    for call in (
        lambda: parallelise(trl.RewardTrainer, plan)(model=initial_model(WORDS.plan()), args=made[0].args),
        lambda: parallelise(transformers.Trainer, plan)(model=initial_model(plan), args=made[0].args),
        lambda: made[0].model(input_ids=ids, labels=ids[:, 0]),
        lambda: made[0].model(inputs_embeds=torch.zeros(1, 8, 32)),
    ):
        try:
            call()
        except RunError as error:
            said.append(str(error))
    return {"rank": rank, "said": said, "parameters": whole_weights(made[0].model)}


def test_a_reward_model_is_saved_whole_and_what_does_not_fit_it_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    write_data(REWARDED, f"{tmp_path}/rows", REWARDED.rows)
    ranks, plan = run_ranks(2, saved_on_ranks, str(tmp_path)), REWARDED.plan()
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert read.config.num_labels == 1
    saved = {name: one.detach() for name, one in read.named_parameters()}
    trained = whole_parameters(plan, ranks)
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], one) for name, one in trained.items())
    initial = dict(initial_model(plan).named_parameters())
    assert not torch.equal(saved["score.weight"], initial["score.weight"]), "the head is not trained"
    for rank in ranks:
        words, plain, labels, embedded = rank["said"]
        assert (
            "the plan is for a classifier of sequences (score.weight [1, 32]), which Qwen3ForCausalLM is not" in words
        )
        assert "Trainer has no loss of its own for a classifier" in plain
        assert "a classifier (num_labels 1) was called with labels" in labels
        assert "was called with inputs_embeds alone: call it with input_ids" in embedded


MIXED = Run("SFT", "mixtral", 2, {"tp": 2}, {"micro_batch_size": 4, "router": {"aux_loss": 0.1}}, {})
PAIRS = MIXED._replace(kind="DPO", given={"router_aux_loss_coef": 0.0})
ROUTED = MIXED._replace(given=PAIRS.given)
REFUSED: dict[str, tuple[Run, dict[str, Any], dict[str, Any]]] = {
    "router_aux_loss_coef is 0.001: SFTTrainer adds a balancing loss of its own": (MIXED, {}, {}),
    "SFTTrainer computes its own loss, without those of routers: leave training.router out": (ROUTED, {}, {}),
    "sync_ref_model is True: the reference model is whole": (PAIRS, {"sync_ref_model": True}, {}),
    "model_init_kwargs is {'dtype': 'bfloat16'}": (PAIRS, {"model_init_kwargs": {"dtype": "bfloat16"}}, {}),
    "precompute_ref_log_probs without a ref_model": (PAIRS, {"precompute_ref_log_probs": True}, {"ref_model": None}),
    "the model has adapters already, and there is no ref_model": (PAIRS, {}, {"ref_model": None, "adapted": True}),
    "quantization_config is not for a plan": (PAIRS, {}, {"quantization_config": "of bitsandbytes"}),
}


def refusals(rank: int, folder: str) -> list[str]:
    from peft import LoraConfig, get_peft_model

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise

    found, plan = [], MIXED.plan()
    for run, given, changes in REFUSED.values():
        others = dict(changes)
        if others.pop("adapted", False):
            config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
            others["model"] = get_peft_model(initial_model(plan), config)

        def changed(trainer: Any, others: dict[str, Any] = others) -> Any:
            return lambda **named: parallelise(trainer, plan)(**{**named, **others})

        try:
            script(run, plan, f"{folder}/{run.kind}", changed, **given)
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def test_what_a_class_of_trl_asks_and_a_plan_cannot_do_is_named(tmp_path: Path) -> None:
    for run in (MIXED, PAIRS):
        write_data(run, f"{tmp_path}/{run.kind}/rows", run.rows)
    for rank in run_ranks(2, refusals, str(tmp_path)):
        for said, expected in zip(rank, REFUSED, strict=True):
            assert expected in said


def written_script_trains(folder: Path, ranks: int) -> list[dict[str, float]]:
    """What the script of the target trl logs, which ends with the whole model."""
    tree = {
        "version": 1,
        "name": "written",
        "model": {"hf_config": str(folder / "model" / "config.json")},
        "cluster": {"gpus_per_node": ranks, "accelerator": "cpu"},
        "parallelism": {"tp": ranks},
        "training": {
            "sequence_length": 32,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "precision": "fp32",
            "train_steps": 3,
        },
    }
    (folder / "spec.json").write_text(json.dumps(tree), encoding="utf-8")
    plan, output = folder / f"plan-{ranks}", folder / f"runs-{ranks}"
    told = CliRunner().invoke(cli, [str(folder / "spec.json"), "-o", str(plan), "--target", "trl"])
    assert told.exit_code == 0, told.output
    words = ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--output", str(output)]
    codes, said = run_forked(folder / f"ranks-{ranks}", ranks, plan / "trl_sft.py", *words)
    assert not any(codes), said
    state = json.loads(next(output.glob("checkpoint-*/trainer_state.json")).read_text(encoding="utf-8"))
    return [{name: one[name] for name in ("loss", "grad_norm")} for one in state["log_history"] if "loss" in one]


def test_the_script_of_the_target_trl_trains_on_ranks_as_on_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = initial_model(make_plan(1, {}))
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(5)
    lines = [" ".join(map(str, torch.randint(3, 61, (20,), generator=generator).tolist())) for _ in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in lines), encoding="utf-8")
    alone, together = (written_script_trains(tmp_path, ranks) for ranks in (1, 2))
    assert len(alone) == 3
    assert_close(together, alone)
    assert_close(*(load_file(tmp_path / f"runs-{ranks}" / "model.safetensors") for ranks in (2, 1)))

"""Contract: LoRA adapters of peft train on an injected model as they do in one process.

Two AdamW steps in fp32 under the engine: losses, gradient norms and the gathered adapters within 1e-5 relative; the
second one also after a change of layout. What is exported computes what the run does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import STEPS, adapted, assert_exported, assert_same, peft, stored, train, train_plain
from closeness import assert_close
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

IN_SHARDS = {
    "zero": {"stage": 3},
    "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}
"""At ZeRO stage 3 frozen weights are sharded too."""
ALL: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("other", ["cp", "pp"])
def test_adapters_train_as_in_one_process(other: str, tmp_path: Path) -> None:
    """Also beside a weight that fuses queries, keys and values, some of whose rows both tp ranks hold."""
    model = {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None}
    extra = IN_SHARDS if other == "cp" else {}
    plan = make_plan(4, {"tp": 2, other: 2, "sequence_parallel": True}, model=model, extra=extra)
    assert_same(run_ranks(4, train, plan, ALL, str(tmp_path), False, False), train_plain(plan, ALL), 2)


def test_adapters_on_a_model_that_was_loaded_in_slices_through_a_change_of_layout_to_the_export(tmp_path: Path) -> None:
    from parcompile.runtime import RunError
    from parcompile.runtime.checkpoint.adapting import convert

    plan, folder = make_plan(2, {"tp": 2}), str(tmp_path)
    expected = train_plain(plan, ALL)
    stored(plan, ALL, tmp_path)
    assert_same(run_ranks(2, train, plan, ALL, folder, False, True), expected, 2)
    in_shards = make_plan(2, {"cp": 2}, extra=IN_SHARDS)
    assert_same(run_ranks(2, train, in_shards, ALL, folder, True, False), expected, 1)
    assert_same(run_ranks(2, train, make_plan(2, {"pp": 2}), ALL, folder, True, True), expected, 1)
    assert_same(run_ranks(2, train, plan, ALL, folder, True, True), expected, 1)

    staged = tmp_path / "of stages"
    stored(plan, ALL, staged)
    assert_same(run_ranks(2, train, make_plan(2, {"pp": 2}), ALL, str(staged), False, True), expected, 2)
    assert_same(run_ranks(2, train, plan, ALL, str(staged), True, False), expected, 1)

    with pytest.raises(RunError, match="has adapters, which are not converted"):
        convert(tmp_path / "end", plan, tmp_path / "converted")
    assert_exported(plan, tmp_path, staged, expected)


def refusals(rank: int, plan: Plan, folder: str) -> list[str]:
    from parcompile.runtime import RunError, adapter_state, initialize, join, load_pretrained

    drawn = load_pretrained(f"{folder}/base", plan, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    state = adapter_state(drawn, join(plan))
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in state.items())
    found = []
    for targets, options in ((["lm_head"], {}), (["q_proj"], {"use_dora": True}), (["q_proj"], {"lora_bias": True})):
        try:
            initialize(plan=plan, model=adapted(plan, {**ALL, "target_modules": targets, **options}))
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def test_what_is_not_injected_is_named(tmp_path: Path) -> None:
    plan = make_plan(2, {"tp": 2})
    stored(plan, ALL, tmp_path)
    head, dora, bias = run_ranks(2, refusals, plan, str(tmp_path))[0]
    assert head == "lm_head is the head: leave it out of target_modules"
    assert "model.layers.0.self_attn.q_proj uses DoRA (use_dora)" in dora
    assert "write LoraConfig(use_dora=False), with use_rslora=True" in dora
    assert "model.layers.0.self_attn.q_proj has lora_bias" in bias


def quantized(rank: int, plan: Plan, folder: str) -> str:
    from transformers import AutoModelForCausalLM

    from parcompile.runtime import RunError, initialize

    model = AutoModelForCausalLM.from_pretrained(folder)
    try:
        initialize(plan=plan, model=peft.get_peft_model(model, peft.LoraConfig(**ALL)))
    except RunError as error:
        return str(error)
    return ""


def test_a_model_whose_weights_are_quantized_is_refused(tmp_path: Path) -> None:
    """By a method of transformers that needs no other package; bitsandbytes marks its models alike."""
    plan, file = make_plan(2, {"tp": 2}), tmp_path / "config.json"
    initial_model(plan).save_pretrained(tmp_path)
    method = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "quantization_config": method}), "utf-8")
    for said in run_ranks(2, quantized, plan, str(tmp_path)):
        assert "LlamaForCausalLM is quantized (bitnet): QLoRA is not supported" in said


DRAWN = {**ALL, "init_lora_weights": False, "use_rslora": True}
"""B is drawn too, for it starts at zero. Products are scaled by 1 / √r (rank-stabilized LoRA)."""


def train_by_config(rank: int, plan: Plan, folder: str, sft: bool) -> dict[str, Any]:
    """Steps of a trainer that is handed a `peft_config`; what it refuses."""
    from parcompile.runtime import RunError, adapter_state
    from parcompile.runtime.trainer import PlanTrainer, training_arguments

    kind: Any = PlanTrainer
    data: Any = samples(plan)
    further: dict[str, Any] = {}
    if sft:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTTrainer

        kind = type("PlanSFTTrainer", (PlanTrainer, SFTTrainer), {})
        data = Dataset.from_list([{name: value.tolist() for name, value in sample.items()} for sample in data])
        words = models.WordLevel({str(number): number for number in range(61)}, unk_token="0")
        tokens = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="2", pad_token="0")
        further = {"processing_class": tokens}
    args = training_arguments(
        plan, folder, max_steps=STEPS, logging_steps=1, report_to=[], disable_tqdm=True, save_steps=STEPS
    )
    args.save_strategy = "steps"
    trainer = kind(
        plan=plan,
        args=args,
        train_dataset=data,
        model=initial_model(plan),
        peft_config=peft.LoraConfig(**DRAWN),
        **further,
    )
    trainer.train()
    found: dict[str, Any] = {"adapters": adapter_state(trainer.model_wrapped.module, trainer.mesh)}
    for name, key in (("losses", "loss"), ("norms", "grad_norm")):
        found[name] = [entry[key] for entry in trainer.state.log_history if key in entry]
    base = trainer.model_wrapped.module.get_base_model()
    refused = (
        lambda: peft.get_peft_model(base, peft.LoraConfig(**DRAWN)),
        lambda: kind(plan=plan, args=args, train_dataset=data, model=base, peft_config=peft.LoraConfig(**DRAWN)),
    )
    found["said"] = []
    for call in refused:
        try:
            call()
        except RunError as error:
            found["said"].append(str(error))
    return found


@pytest.mark.parametrize("trainer", ["PlanTrainer", "SFTTrainer of trl"])
def test_a_trainer_takes_a_peft_config(trainer: str, tmp_path: Path) -> None:
    from parcompile.runtime.checkpoint import export_adapter

    sft = trainer.startswith("SFT")
    if sft:
        pytest.importorskip("trl", reason="needs trl: SFTTrainer takes the peft_config there")
    plan = make_plan(2, {"tp": 2, "sequence_parallel": True})
    ranks = run_ranks(2, train_by_config, plan, str(tmp_path), sft)

    def drawn(_: Plan, options: Any) -> Any:
        model = initial_model(plan)
        torch.manual_seed(plan.spec.training.seed)
        return peft.get_peft_model(model, peft.LoraConfig(**options))

    expected = train_plain(plan, DRAWN, drawn)
    assert_same(ranks, expected, 2)
    for found in ranks:
        assert all("adapters are put on a model before it is injected" in said for said in found["said"])
        assert len(found["said"]) == 2
    out = tmp_path / "adapter"
    export_adapter(tmp_path / "checkpoints", out)
    loaded = peft.PeftModel.from_pretrained(initial_model(plan), str(out))
    found = peft.get_peft_model_state_dict(loaded)
    assert found
    assert_close(found, {name: expected["adapters"][name] for name in found})

"""Contract: scripts of trl train by a plan with a line more; every line of their log is that of one process.

`SFTTrainer` on prompts and completions (prompts are masked), `DPOTrainer` on pairs with a reference model, in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from ranks import run_ranks
from test_trainer import logged
from training_runs import initial_model, make_plan, whole_parameters

from parcompile.plan import Plan

pytest.importorskip("trl", reason="needs trl: its SFTTrainer and DPOTrainer train by a plan")
pytestmark = pytest.mark.ranks


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(61)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0")


def data(kind: str) -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(3)

    def text(words: int) -> str:
        return " ".join(map(str, torch.randint(3, 60, (words,), generator=generator).tolist()))

    if kind == "SFT":
        return Dataset.from_list([{"prompt": text(3 + n % 3) + " ", "completion": text(4 + n % 4)} for n in range(12)])
    return Dataset.from_list(
        [{"prompt": text(3) + " ", "chosen": text(4 + n % 4), "rejected": text(5)} for n in range(12)]
    )


def script(kind: str, plan: Plan, folder: str, changed: Any, nudged: int | None = None, **given: Any) -> Any:
    """What somebody has written for trl; `changed` is what the line more does."""
    import trl

    trainer, arguments = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    args = arguments(
        folder, num_train_epochs=1, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True,
        bf16=False, max_length=16, **given,
    )  # fmt: skip
    model, further = initial_model(plan), {}
    nudge(model, nudged)
    if kind == "DPO":
        further["ref_model"] = initial_model(plan)
        for parameter in further["ref_model"].parameters():
            parameter.data *= 0.9
    made = changed(trainer)(model=model, args=args, train_dataset=data(kind), processing_class=tokenizer(), **further)
    made.train()
    return made


def on_ranks(rank: int, kind: str, plan: Plan, folder: str) -> dict[str, Any]:
    from parcompile.runtime.trainer import parallelise

    trainer = script(kind, plan, folder, lambda trainer: parallelise(trainer, plan))
    parameters = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    return {"rank": rank, "log": logged(trainer), "parameters": parameters}


@pytest.mark.parametrize("axes", [{"tp": 2, "cp": 2}, {"cp": 2}], ids=["tp2 x cp2", "cp2 x dp2"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_script_of_trl_trains_by_a_plan_with_a_line_more(kind: str, axes: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(4, axes, training={"micro_batch_size": 2 if "tp" in axes else 1})
    spec = plan.spec.training
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": spec.optimizer.lr,
        "adam_beta2": spec.optimizer.betas[1],
        "weight_decay": spec.optimizer.weight_decay,
        "max_grad_norm": spec.gradient_clipping,
        "seed": spec.seed,
    }

    def one_process(seed: int | None) -> dict[str, Any]:
        trainer = script(kind, plan, str(tmp_path / "plain"), lambda trainer: trainer, seed, **given)
        return {"log": logged(trainer), "parameters": {n: one.detach() for n, one in trainer.model.named_parameters()}}

    ranks = run_ranks(4, on_ranks, kind, plan, str(tmp_path))
    expected, noise = one_process(None), one_process
    assert_close({"log": ranks[0]["log"], "parameters": whole_parameters(plan, ranks)}, expected, rerun=noise)

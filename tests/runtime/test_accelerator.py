"""Contract: a loop of one's own around accelerate trains by a plan what accelerate trains in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from expert_runs import Case
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan

pytest.importorskip("accelerate")
pytestmark = pytest.mark.ranks

STEPS = 3


def train(rank: int, plan: Plan, alone: bool, masked: bool, folder: str, seed: int | None = None) -> dict[str, Any]:
    """Three steps of the usual loop; with a folder the state is saved behind the second, and the third done twice."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from parcompile.runtime.trainer import parallelise

    training, dp = plan.spec.training, 1 if alone else plan.spec.parallelism.dp
    steps, rows = training.gradient_accumulation_steps, training.micro_batch_size
    if alone:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        rows *= plan.spec.parallelism.dp
    else:
        accelerator = parallelise(Accelerator, plan)(gradient_accumulation_steps=steps)
    model = initial_model(plan)
    nudge(model, seed)
    names = [name for name, _ in model.named_parameters()]
    settings = {"lr": training.optimizer.lr, "betas": training.optimizer.betas, "eps": training.optimizer.eps}
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    decay = training.optimizer.weight_decay
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, **settings)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / dp))
    loader: Any = DataLoader(samples(plan, masked=masked), batch_size=rows)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    sums = torch.zeros(())
    for batch in loader:
        with accelerator.accumulate(model):
            output = model(**batch)
            accelerator.backward(output.loss)
            sums += output.loss.detach() / steps
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), training.gradient_clipping)
                found["norms"].append(float(norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        found["losses"].append(float(accelerator.gather(sums).mean()))
        found["rates"].append(scheduler.get_last_lr()[0])
        sums.zero_()
        if folder and len(found["losses"]) == STEPS - 1:
            accelerator.save_state(folder)
        if len(found["losses"]) == STEPS:
            break
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
        assert torch.equal(model(**batch, return_dict=False)[1], logits)
        found["logits"] = accelerator.gather_for_metrics(logits).double().sum()
    whole = accelerator.get_state_dict(model)
    found["parameters"] = {name: whole[name] for name in names if name in whole}
    if folder:
        accelerator.save_model(model, f"{folder}/model")
        model.train()
        accelerator.load_state(folder)
        index = accelerator.process_index
        found |= {"index": index, "padded": accelerator.pad_across_processes(torch.ones(index + 1))}
        found["rate again"] = [group["lr"] for group in model.optimizer.param_groups]
    return found


def assert_like_one_process(plan: Plan, masked: bool, folder: Path) -> list[dict[str, Any]]:
    def one_process(seed: int | None) -> dict[str, Any]:
        return run_ranks(1, train, plan, True, masked, "", seed)[0]

    ranks = run_ranks(plan.world_size, train, plan, False, masked, str(folder))
    expected = one_process(None)
    for rank in ranks:
        kept = ("losses", "norms", "rates", "logits", *(["parameters"] if rank["parameters"] else []))
        assert_close({key: rank[key] for key in kept}, {key: expected[key] for key in kept}, rerun=one_process)
    assert [bool(rank["parameters"]) for rank in ranks] == [True] + [False] * (plan.world_size - 1)
    return ranks


@pytest.mark.parametrize("case", ["tp2 x cp2", "ep2 x dp2, ZeRO 3"])
def test_a_loop_around_accelerate_trains_by_a_plan(case: str, tmp_path: Path) -> None:
    """Loss, norm, rate, weights, whole logits of evaluation; what was saved loads in transformers, and goes on."""
    from transformers import AutoModelForCausalLM

    if case == "tp2 x cp2":
        plan = make_plan(4, {"tp": 2, "cp": 2}, training={"micro_batch_size": 2})
    else:
        plan = Case("mixtral", {"dp": 2, "ep": 2}, {}, zero=3).plan()
    ranks = assert_like_one_process(plan, case == "tp2 x cp2", tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    for name, weight in ranks[0]["parameters"].items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=0)
    for rank in ranks:
        assert set(rank["rate again"]) == {rank["rates"][STEPS - 2]}
        if plan.spec.parallelism.dp > 1:
            assert rank["padded"].tolist() == [[1, 0], [1, 1]][rank["index"]]


def refused(rank: int, plan: Plan) -> dict[str, str]:
    """What is said to scripts that differ from the plan."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise

    said: dict[str, str] = {}

    def hear(name: str, call: Any) -> None:
        with pytest.raises(RunError) as error:
            call()
        said[name] = str(error.value)

    launched = {"ACCELERATE_USE_FSDP": "true", "PARALLELISM_CONFIG_TP_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "fp16"}
    os.environ.update(launched)
    hear("launch", lambda: parallelise(Accelerator, plan))
    os.environ.update(PARALLELISM_CONFIG_TP_SIZE="1", ACCELERATE_MIXED_PRECISION="no")
    kind = parallelise(Accelerator, plan)  # FSDP is what the file for accelerate asks for: the plan has the engine
    hear("precision", lambda: kind(mixed_precision="bf16"))
    hear("accumulation", lambda: kind(gradient_accumulation_steps=7))
    hear("fsdp", lambda: kind(fsdp_plugin=FullyShardedDataParallelPlugin()))
    accelerator, model = kind(), initial_model(plan)

    def made(parameters: Any = None, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, **settings}
        return kind(model.parameters() if parameters is None else parameters, **settings)

    first = next(model.parameters())
    hear("rate", lambda: accelerator.prepare(model, made(lr=2e-3)))
    hear("betas", lambda: accelerator.prepare(model, made(betas=(0.9, 0.999))))
    hear("decay", lambda: accelerator.prepare(model, made(weight_decay=0.0)))
    hear("class", lambda: accelerator.prepare(model, made(kind=torch.optim.NAdam)))
    hear("parameters", lambda: accelerator.prepare(model, made([first])))
    hear("no model", lambda: accelerator.prepare(made()))
    foreign = torch.optim.lr_scheduler.LambdaLR(made(), lambda _: 1.0)
    hear("scheduler", lambda: accelerator.prepare(model, made(), foreign))
    hear("split", lambda: accelerator.split_between_processes([1, 2]))
    engine, _ = accelerator.prepare(model, made())
    hear("clipping", lambda: accelerator.clip_grad_norm_(engine.parameters(), 3.0))
    ids = torch.zeros(5, 16, dtype=torch.long)
    hear("rows", lambda: engine(input_ids=ids, labels=ids))
    said["logits"] = str(engine(input_ids=ids[:1], labels=ids[:1]).logits)
    return said


def with_a_schedule(rank: int, plan: Plan) -> str:
    from accelerate import Accelerator

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise

    accelerator, model = parallelise(Accelerator, plan)(), initial_model(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    with pytest.raises(RunError) as error:
        accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
    return str(error.value)


def test_a_schedule_is_refused_beside_weight_decay_that_the_plan_changes() -> None:
    plan = make_plan(1, {}, training={"train_steps": 5, "optimizer": {"lr": 1e-3, "start_weight_decay": 0.01}})
    assert "a learning-rate scheduler is given, and the plan's schedule changes weight decay" in str(
        run_ranks(1, with_a_schedule, plan)
    )


def test_what_differs_from_the_plan_is_refused() -> None:
    (said,) = run_ranks(1, refused, make_plan(1, {}))
    parts = {
        "launch": "MIXED_PRECISION is fp16, the plan has no; PARALLELISM_CONFIG_TP_SIZE is 4, the plan has 1",
        "precision": "mixed_precision is 'bf16', the plan has 'no'",
        "accumulation": "gradient_accumulation_steps is 7, the plan has 1",
        "fsdp": "fsdp_plugin is given: DeepSpeed's engine holds the model",
        "rate": "lr is 0.002, the plan has 0.001",
        "betas": "betas is (0.9, 0.999), the plan has (0.9, 0.95)",
        "decay": "weight_decay is 0.0, the plan has 0.1",
        "class": "the optimizer is NAdam, the plan has adamw",
        "parameters": "the optimizer lacks 20 of the model's trained parameters",
        "no model": "prepare gets an optimizer without its model",
        "scheduler": "the learning-rate scheduler is not of the optimizer that is prepared",
        "split": "split_between_processes would give ranks that share a sequence other inputs",
        "clipping": "max_norm 3.0 and norm_type 2, the plan's gradient_clipping is 0.5",
        "rows": "the model trains on 5 rows, the plan's micro_batch_size is 4",
        "logits": "None",
    }
    assert set(said) == set(parts)
    for name, part in parts.items():
        assert part in said[name]


def sums_of_fsdp(rank: int, version: int) -> dict[str, float]:
    """What FSDP makes of two micro-batches with gradients of 1 and 2⁻⁹, which are 1 in bf16; by when it reduces."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.distributed.init_process_group("gloo")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision("bf16")
    model: Any = torch.nn.Linear(1, 2, bias=False)
    if version == 2:
        model = fully_shard(model, mp_policy=plugin.mixed_precision_policy)
    else:
        options = {"mixed_precision": plugin.mixed_precision_policy, "use_orig_params": True}
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    found = {}
    for name, waits in (("at the last", True), ("each", False)):
        model.zero_grad()
        with no_sync(model) if waits else nullcontext():
            model(torch.ones(1, 1)).sum().backward()
        (model(torch.ones(1, 1)).sum() * 2**-9).backward()
        (parameter,) = model.parameters()
        grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
        assert grad.dtype == torch.float32
        found[name] = float(grad.flatten()[0])
    return found


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """As accelerate's `no_sync` does it, in which its loop and the Trainer do all micro-batches but the last."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_sums_micro_batches_in_the_type_of_its_weights_unless_each_is_reduced(version: int) -> None:
    """What imports of accelerate's and axolotl's FSDP say."""
    for found in run_ranks(2, sums_of_fsdp, version):
        assert found == {"at the last": 1.0, "each": 1 + 2**-9}

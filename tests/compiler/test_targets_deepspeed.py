"""ds_config.json against DeepSpeed's own parser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from layout_cases import compile_tree, spec_tree

from parcompile.backends.deepspeed.write import ds_config

SPECS = {
    "bf16": spec_tree(2, 8, parallelism={"tp": 2, "cp": 4}, training={"global_batch_size": 8}),
    "fp32": spec_tree(1, 4, parallelism={"cp": 2}, training={"precision": "fp32", "gradient_clipping": 0}),
    "fp16": spec_tree(1, 2, training={"precision": "fp16", "loss_scale": 128, "optimizer": {"type": "adam"}}),
    "fp32 sums": spec_tree(1, 2, training={"gradient_accumulation_dtype": "fp32"}),
    "stage 2": spec_tree(1, 4, zero={"stage": 2}),
    "constant rate": spec_tree(1, 2, training={"lr_scheduler": {"type": "constant", "warmup_steps": 10}}),
    "linear rate": spec_tree(
        1, 2, training={"train_steps": 50, "lr_scheduler": {"type": "linear", "warmup_steps": 5, "min_lr": 1e-5}}
    ),
    "cosine rate": spec_tree(
        1, 2, training={"train_steps": 50, "lr_scheduler": {"type": "cosine", "warmup_steps": 5, "min_lr": 1e-5}}
    ),
    "further keys": spec_tree(
        1, 4, deepspeed={"steps_per_print": 10, "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000}}
    ),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def case(request, tmp_path) -> tuple[Any, dict[str, Any]]:
    plan = compile_tree(request.param, tmp_path)
    return plan, json.loads(json.dumps(ds_config(plan)))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


class Mpu:
    """What DeepSpeed asks a model-parallel unit while it reads a config: data parallelism without cp."""

    def __init__(self, data: int) -> None:
        self.data = data

    def get_data_parallel_world_size(self) -> int:
        return self.data


@pytest.fixture
def deepspeed(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config

    # Without a rank DeepSpeed takes the world for one process and asks no mpu.
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    return config


def test_deepspeed_parses_every_key_back_to_the_same_value(case, deepspeed) -> None:
    plan, written = case
    parsed = deepspeed.DeepSpeedConfig(json.loads(json.dumps(written)), mpu=Mpu(plan.spec.parallelism.dp))
    seen = {
        "train_batch_size": parsed.train_batch_size,
        "train_micro_batch_size_per_gpu": parsed.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": parsed.gradient_accumulation_steps,
        "gradient_clipping": parsed.gradient_clipping,
        "prescale_gradients": parsed.prescale_gradients,
        "gradient_predivide_factor": parsed.gradient_predivide_factor,
        "zero_allow_untested_optimizer": parsed.zero_allow_untested_optimizer,
        "steps_per_print": parsed.steps_per_print,
        "wall_clock_breakdown": parsed.wall_clock_breakdown,
        "dump_state": parsed.dump_state,
        "communication_data_type": {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}[
            str(parsed.communication_data_type)
        ],
        "seq_parallel_communication_data_type": {"torch.float32": "fp32"}[
            str(parsed.seq_parallel_communication_data_type)
        ],
        "data_types": {"grad_accum_dtype": parsed.grad_accum_dtype},
        "optimizer": {"type": parsed.optimizer_name, "params": parsed.optimizer_params},
        "scheduler": {"type": parsed.scheduler_name, "params": parsed.scheduler_params},
        "bf16": vars(parsed.bfloat16_config),
        "fp16": vars(parsed.float16_config),
        "zero_optimization": vars(parsed.zero_config),
    }
    for path, value in leaves(written):
        found: Any = seen
        for step in path:
            assert step in found, f"{'.'.join(path)} is written but not compared"
            found = found[step]
        if path == ("optimizer", "type"):
            found = {"adam": "Adam", "adamw": "AdamW"}[found]
        assert found == value, f"{'.'.join(path)}: {value} was read as {found}"


def test_the_batch_triangle_counts_dp_only(deepspeed, tmp_path) -> None:
    plan = compile_tree(SPECS["bf16"], tmp_path)
    assert (plan.spec.parallelism.dp, plan.spec.training.gradient_accumulation_steps) == (2, 4)
    deepspeed.DeepSpeedConfig(ds_config(plan), mpu=Mpu(2))
    with pytest.raises(AssertionError, match=r"8 != 1 \* 4 \* 8"):
        deepspeed.DeepSpeedConfig(ds_config(plan), mpu=Mpu(8))


def test_nothing_is_left_to_deepspeeds_defaults_or_auto(case) -> None:
    _, written = case
    assert all(value != "auto" for _, value in leaves(written))
    paths = {".".join(path) for path, _ in leaves(written)}
    assert {
        "gradient_clipping",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "optimizer.params.adam_w_mode",
        "bf16.enabled",
        "fp16.enabled",
        "data_types.grad_accum_dtype",
        "communication_data_type",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
    } <= paths

"""Configurations of torchtitan, Megatron-Bridge, NeMo Automodel and ms-swift as specs.

Their options were read in their sources. Real files judged the importers: 62 configurations of torchtitan 0.3, 235
recipes of Megatron-Bridge, 292 examples of Automodel and 302 of ms-swift were imported (2026-11).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.importers import importer
from parcompile.backends.reading import Outcome, RefusedError
from parcompile.backends.recipes import recipe
from parcompile.importing import Imported, import_document
from parcompile.lint import recognised
from parcompile.text import SourceError, read_file

CLUSTER = {("cluster", "gpus_per_node"): 8}


def imported(
    folder: Path, name: str, text: str, function: str | None = None, **answers: Any
) -> tuple[dict[str, Any], Imported]:
    """The spec of a file; `training__seed=1` answers for training.seed."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    found = recipe(str(file), function)
    if found is None:
        read, recognition = recognised(read_file(file))
        assert read.document is not None
        found = read.document, recognition.kind
    more = {tuple(path.split("__")): value for path, value in answers.items()}
    result = import_document(found[1], found[0], {**CLUSTER, **more}, folder)
    assert result.tool == importer(found[1]).tool
    return result.spec, result


def fate(result: Imported, option: str) -> tuple[Outcome, bool]:
    one = next(one for one in result.accounts if one.option == option)
    return one.outcome, one.changes


TITAN = """
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer
from torchtitan.models.llama3 import model_registry

raise SystemExit("a file that is read is not run")

STEPS = 10 * 100

def run(steps: int = STEPS):
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=2e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20, decay_ratio=0.1, decay_type="sqrt"),
        training=TrainingConfig(local_batch_size=4, seq_len=4096, steps=steps),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, pipeline_parallel_degree=2),
        activation_checkpoint=FullAC.Config(force_recompute_mm_shapes_by_fqns=["moe.router.gate"]),
    )

def long():
    config = run(steps=2 * STEPS)
    config.parallelism.context_parallel_degree = 2
    config.compile.enable_async_tensor_parallel = True
    if config.compile.enable:
        config.training.max_norm = 2.0
    patch(config)
    config["section"] = 1
    try:
        import json
    except ImportError:
        json = None
    else:
        config.debug.seed = 7
    match STEPS:
        case 1000:
            config.training.seq_len = 1
    return config
"""


def test_torchtitans_python_is_followed_and_not_run(tmp_path: Path) -> None:
    spec, result = imported(tmp_path, "mine.py", TITAN, "long", training__gradient_clipping=1.0)
    assert spec["model"] == {"preset": "llama-3.1-8b"}
    assert {axis: spec["parallelism"][axis] for axis in ("tp", "cp", "pp")} == {"tp": 2, "cp": 2, "pp": 2}
    training = spec["training"]
    assert (training["micro_batch_size"], training["gradient_accumulation_steps"]) == (1, 4)
    assert training["lr_scheduler"] == {
        "type": "wsd",
        "warmup_steps": 20,
        "min_lr": 0.0,
        "decay_steps": 200,
        "decay_type": "sqrt",
    }
    assert training["activation_checkpointing"] == "full"
    assert spec["zero"]["stage"] == 2  # torchtitan keeps weights gathered in a pipeline
    # What hangs on a value that the file does not have, and what is not followed, is said.
    assert fate(result, "training.max_norm") == (Outcome.CARRIED, False)
    for statement in ("patch()", "config['section']", "match STEPS:"):
        assert fate(result, statement) == (Outcome.LOST, True)
    for option in ("compile.enable_async_tensor_parallel", "activation_checkpoint.force_recompute_mm_shapes_by_fqns"):
        assert fate(result, option)[0] is Outcome.NO_EFFECT
    assert training["seed"] == 7


def test_a_value_behind_a_condition_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    _, result = imported(tmp_path, "mine.py", TITAN, "long")
    assert [(".".join(one.path), "if config.compile.enable" in one.why) for one in result.questions] == [
        ("training.gradient_clipping", True)
    ]


@pytest.mark.parametrize(
    ("text", "function", "said"),
    [
        (TITAN, None, "has 2 configurations: name one with --function: run, long"),
        (TITAN, "short", "has no function short"),
        ("import torchtitan\ndef run(:\n", None, "mine.py:2: this is no Python"),
        ("import torchtitan\ndef run():\n    return run()\n", None, "calls itself"),
        ("import torchtitan\ndef run():\n    return 3\n", None, "mine.py:2: run returns no configuration"),
        ("import torchtitan\n", None, "no function of it builds a configuration"),
    ],
)
def test_python_that_builds_no_configuration_is_refused(
    text: str, function: str | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=said):
        recipe(str(tmp_path / "mine.py"), function)


HEAD = "import torchtitan\nfrom torchtitan.trainer import Trainer\ndef run():\n    c = Trainer.Config(a=1)\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("c.x = c", "holds itself, or too much"),
        ("c = Trainer.Config(a=c, b=c)\n    " * 40, "holds itself, or too much"),
        ("for _ in range(9**9): c.a = 2\n    " + "c.a = 2\n    " * 10_000, "too long"),
        ("text = 'x'\n    " + "text = f'{text}{text}'\n    " * 60 + "c.activation_checkpoint = text", None),
        ("parts = [1]\n    " + "parts = [parts, parts]\n    " * 60 + "c.training = parts", None),
    ],
)
def test_python_without_an_end_is_left_soon(body: str, said: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{HEAD}    {body}\n    return c\n", encoding="utf-8")
    if said is None:
        assert recipe(str(file)) is not None
        return
    with pytest.raises(SourceError, match=said):
        recipe(str(file))


@pytest.mark.parametrize("value", [[1], "x", True])
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("AUTOMODEL", "local_batch_size: 2"),
        ("MEGATRON_SWIFT", "lr_warmup_fraction: 0.05"),
        ("MEGATRON_SWIFT", "lr: 1e-4"),
    ],
)
def test_a_value_of_another_type_is_one_clear_error(text: str, key: str, value: Any, tmp_path: Path) -> None:
    name = key.partition(":")[0]
    wrong = globals()[text].replace(key, f"{name}: {json.dumps(value)}")
    with pytest.raises(RefusedError, match=f"{name} is "):
        imported(tmp_path, "run.yaml", wrong)


TOML = """
[model]
name = "deepseek_v3"
flavor = "671B"
converters = []
[optimizer]
name = "Adam"
lr = 2e-4
beta2 = 0.99
[lr_scheduler]
warmup_steps = 2_000
lr_min = 0.1
[training]
batch_size = 4
seq_len = 4096
steps = 10_000
dtype = "bfloat16"
[parallelism]
expert_parallel_degree = 8
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "none"
early_stop = true
mod = "full"
[debug]
moe_force_load_balance = true
[float8]
filter_fqns = ["output"]
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_torchtitans_toml_is_read_with_its_earlier_names(tmp_path: Path) -> None:
    spec, result = imported(tmp_path, "deepseek.toml", TOML)
    assert (spec["model"], spec["parallelism"]) == ({"preset": "deepseek-v3"}, {"ep": 8})
    training = spec["training"]
    assert (training["optimizer"]["type"], training["optimizer"]["betas"]) == ("adam", [0.9, 0.99])
    assert training["lr_scheduler"] == {"type": "linear", "warmup_steps": 2000, "min_lr": pytest.approx(2e-5)}
    assert (training["micro_batch_size"], spec["zero"]["stage"]) == (4, 2)
    assert fate(result, "training.dtype") == (Outcome.LOST, True)
    assert fate(result, "model.converters")[0] is Outcome.NO_EFFECT
    assert fate(result, "debug.moe_force_load_balance")[0] is Outcome.LOST
    assert fate(result, "activation_checkpoint.early_stop")[0] is Outcome.NO_EFFECT
    assert fate(result, "activation_checkpoint.mod")[0] is Outcome.LOST  # torchtitan has no such key
    assert fate(result, "float8.filter_fqns")[0] is Outcome.NO_EFFECT  # no converter is named
    (tmp_path / "broken.toml").write_text("[training\n", encoding="utf-8")
    with pytest.raises(SourceError, match="this is no TOML"):
        recipe(str(tmp_path / "broken.toml"))


COMMON = """
from megatron.bridge.training.config import ConfigContainer, OptimizerConfig, SchedulerConfig, TrainingConfig

def _pretrain_common():
    optimizer, scheduler = adam(max_lr=3e-4)
    return ConfigContainer(
        model=None,
        train=TrainingConfig(train_iters=1000, global_batch_size=32, micro_batch_size=2),
        optimizer=optimizer,
        scheduler=scheduler,
        mixed_precision="bf16_mixed",
    )

def adam(max_lr, min_lr=None):
    min_lr = min_lr if min_lr is not None else 0.1 * max_lr
    return (
        OptimizerConfig(optimizer="adam", lr=max_lr, min_lr=min_lr, weight_decay=0.1, use_distributed_optimizer=True),
        SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=50,
            start_weight_decay=0.033, end_weight_decay=0.033, weight_decay_incr_style="constant",
        ),
    )
"""
RECIPE = """
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common

def llama3_8b():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.model.num_layers = 8
    cfg.ddp.grad_reduce_in_fp32 = True
    return cfg
"""


def test_a_recipe_of_megatron_bridge_is_followed_through_its_common_part(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "bridge" / "recipes"
    package.mkdir(parents=True)
    (package / "common.py").write_text(COMMON, encoding="utf-8")
    spec, result = imported(package, "llama3.py", RECIPE)
    assert result.complete, result.questions
    assert (spec["model"], spec["parallelism"]) == ({"preset": "llama-3-8b"}, {"tp": 4, "sequence_parallel": True})
    optimizer, schedule = spec["training"]["optimizer"], spec["training"]["lr_scheduler"]
    # The scheduler of Megatron-Core sets the decay of weights, whatever the optimizer says.
    assert (optimizer["lr"], optimizer["weight_decay"]) == (3e-4, 0.033)
    assert schedule == {"type": "cosine", "warmup_steps": 50, "min_lr": pytest.approx(3e-5), "warmup_start_lr": 0.0}
    assert (spec["training"]["global_batch_size"], spec["zero"]["stage"]) == (32, 1)
    assert fate(result, "model.num_layers") == (Outcome.LOST, True)  # the preset's are others


def test_what_a_function_sets_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    _, result = imported(tmp_path, "llama3.py", RECIPE)
    asked = {".".join(one.path) for one in result.questions}
    assert asked >= {"training.micro_batch_size", "training.global_batch_size", "training.optimizer", "zero.stage"}
    assert all("_pretrain_common(), whose file was not found" in one.why for one in result.questions)


AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2, max_steps: 100, ckpt_every_steps: 50}
rng: {seed: 1111}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, torch_dtype: bfloat16,
  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1, sequence_parallel: true,
  activation_checkpointing: true}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.Adam, betas: [0.9, 0.95], lr: 1.0e-5}
lr_scheduler: {lr_decay_style: cosine}
peft: {dim: 8}
"""


def test_automodels_yaml_is_read_with_the_schedule_that_it_fills_in(tmp_path: Path) -> None:
    spec, result = imported(tmp_path, "run.yaml", AUTOMODEL)
    assert spec["model"] == {"preset": "llama-3-8b"}
    assert (spec["zero"]["stage"], spec["parallelism"]) == (3, {"tp": 2, "cp": 1, "sequence_parallel": True})
    training = spec["training"]
    assert (training["micro_batch_size"], training["global_batch_size"], training["sequence_length"]) == (2, 64, 4096)
    assert training["optimizer"]["type"] == "adam"
    rates = {"min_lr": pytest.approx(1e-7), "warmup_start_lr": pytest.approx(1e-6)}
    assert training["lr_scheduler"] == {"type": "cosine", "warmup_steps": 10, **rates}
    assert fate(result, "peft.dim") == fate(result, "model.torch_dtype") == (Outcome.LOST, True)
    assert fate(result, "step_scheduler.ckpt_every_steps")[0] is Outcome.NO_EFFECT

    earlier = AUTOMODEL.replace(
        "  activation_checkpointing: true}", "}\nparallelizer: {activation_checkpointing: true}"
    )
    again, result = imported(tmp_path, "earlier.yaml", earlier)
    assert again == spec
    assert fate(result, "distributed.activation_checkpointing") == (Outcome.CARRIED, False)


SWIFT = """
# 8 * 80GiB
ranks=4
NPROC_PER_NODE=$ranks \\
swift sft \\
    --model meta-llama/Meta-Llama-3-8B --tuner_type full --dataset 'some/data#500' --torch_dtype bfloat16 \\
    --max_steps 200 --learning_rate 2e-5 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 \\
    --max_length $LENGTH --warmup_ratio 0.05 --deepspeed zero2
"""
MEGATRON_SWIFT = """
model: meta-llama/Meta-Llama-3-8B
tuner_type: lora
tensor_model_parallel_size: 2
micro_batch_size: 1
global_batch_size: 8
lr: 1e-4
lr_warmup_fraction: 0.05
train_iters: 100
max_length: 2048
bf16: true
loss_scale: ignore_empty_think
"""


def test_a_script_of_ms_swift_is_read_with_its_own_defaults(tmp_path: Path) -> None:
    answers = {("cluster", "gpus_per_node"): 4, ("training", "sequence_length"): 2048}
    file = tmp_path / "sft.sh"
    file.write_text(SWIFT, encoding="utf-8")
    found = recipe(str(file))
    assert found is not None
    asked = import_document(found[1], found[0], {}, tmp_path)
    assert [".".join(one.path) for one in asked.questions] == ["training.sequence_length"]
    result = import_document(found[1], found[0], answers, tmp_path)
    assert result.complete, result.questions
    assert (result.spec["cluster"], result.spec["zero"]) == ({"gpus_per_node": 4}, {"stage": 2})
    assert result.plan is not None
    training = result.plan.spec.training
    assert (training.optimizer.betas, training.optimizer.weight_decay) == ((0.9, 0.95), 0.1)
    assert training.lr_scheduler is not None
    assert (training.lr_scheduler.type, training.lr_scheduler.warmup_steps) == ("cosine", 10)
    assert fate(result, "tuner_type")[0] is Outcome.NO_EFFECT


def test_a_script_of_ms_swift_that_names_a_file_says_which(tmp_path: Path) -> None:
    file = tmp_path / "sft.sh"
    file.write_text("NPROC_PER_NODE=2 \\\nswift sft \\\\\n  examples/sft.yaml\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"the arguments of swift sft are in examples/sft\.yaml: import that file"):
        recipe(str(file))


def test_yaml_of_megatron_swift_is_read_in_megatrons_words(tmp_path: Path) -> None:
    spec, result = imported(tmp_path, "sft.yaml", MEGATRON_SWIFT)
    assert (spec["parallelism"], spec["zero"]) == ({"tp": 2}, {"stage": 1})
    assert spec["training"]["lr_scheduler"]["warmup_steps"] == 5
    assert (spec["training"]["sequence_length"], spec["training"]["precision"]) == (2048, "bf16")
    assert fate(result, "tuner_type") == fate(result, "--loss_scale") == (Outcome.LOST, True)
    assert json.dumps(spec)

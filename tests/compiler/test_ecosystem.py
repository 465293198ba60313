"""Files for accelerate, transformers, SkyPilot and Kubeflow, and files of trainers: read by their own code, and back.

accelerate and transformers judge what is written for them with the classes that they load it into. What axolotl and
LLaMA-Factory call their options was read in their sources; 336 example files of their repositories were imported with
every option named (2026-11).
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import parcompile
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.importers import importer
from parcompile.backends.reading import Outcome, RefusedError
from parcompile.backends.registry import losses, render
from parcompile.backends.trainers import DEFAULTS
from parcompile.importing import Imported, import_tree
from parcompile.lint import recognised
from parcompile.pipeline import check_read
from parcompile.plan import compile_plan
from parcompile.text import parse, read_file

MODEL = {("model",): {"preset": "llama-3-8b"}}
CLUSTER = {("cluster", "gpus_per_node"): 8}


def plan_of(
    parallelism: dict[str, Any] | None = None, targets: tuple[str, ...] = (), **sections: Any
) -> parcompile.Plan:
    return parcompile.compile(
        {
            "version": 1,
            "model": {"preset": "llama-3-8b"},
            "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h200"},
            "parallelism": parallelism or {},
            "training": {"sequence_length": 4096, "global_batch_size": 16, "activation_checkpointing": "full"},
            **sections,
        },
        targets=targets,
    )


def imported(file: Path, answers: dict[tuple[str, ...], Any] | None = None) -> Imported:
    found, recognition = recognised(read_file(file))
    reader = importer(recognition.kind)
    assert found.document is not None
    return import_tree(reader.tree(found.document), reader, answers or {}, file.parent)


def outcome(result: Imported) -> dict[str, Outcome]:
    return {one.option: one.outcome for one in result.accounts}


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("parallelism", "zero"),
    [({}, 1), ({}, 3), ({"cp": 4, "cp_implementation": "ulysses", "cp_layout": "contiguous"}, 1)],
    ids=["zero-1", "zero-3", "ulysses"],
)
def test_accelerate_loads_the_deepspeed_yaml_and_the_import_gives_the_plan_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: dict[str, Any], zero: int
) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    plan = plan_of(parallelism, ("accelerate-deepspeed",), zero={"stage": zero})
    files = render(plan, ("accelerate-deepspeed",))
    file = write(tmp_path / "accelerate_deepspeed.yaml", files["accelerate_deepspeed.yaml"])
    write(tmp_path / "ds_config.json", files["ds_config.json"])
    loaded = config_args.load_config_from_file(str(file))
    assert (loaded.num_processes, loaded.num_machines, loaded.distributed_type.value) == (16, 2, "DEEPSPEED")
    monkeypatch.chdir(tmp_path)
    plugin = pytest.importorskip("accelerate.utils").DeepSpeedPlugin(
        hf_ds_config=loaded.deepspeed_config["deepspeed_config_file"],
        zero3_init_flag=loaded.deepspeed_config["zero3_init_flag"],
    )
    assert plugin.zero_stage == zero
    assert plugin.deepspeed_config["train_batch_size"] == 16
    result = imported(file, {**MODEL, ("training", "sequence_length"): 4096, ("training", "optimizer", "lr"): 3e-4})
    assert result.spec["cluster"] == {"nodes": 2, "gpus_per_node": 8}
    assert result.spec.get("parallelism", {}).get("cp", 1) == parallelism.get("cp", 1)
    assert outcome(result)["deepspeed_config.deepspeed_config_file"] is Outcome.CARRIED
    assert (result.spec["zero"]["stage"], result.spec["training"]["precision"]) == (zero, "bf16")


def test_accelerate_launch_understands_every_key_of_the_sequence_parallel_section() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    plan = plan_of({"cp": 4, "cp_implementation": "ulysses"})
    tree = yaml.safe_load(render(plan, ("accelerate-deepspeed",))["accelerate_deepspeed.yaml"])
    known = {option for action in launch.launch_command_parser()._actions for option in action.option_strings}
    assert {f"--{key}" for key in tree["parallelism_config"]} <= known


@pytest.mark.parametrize("parallelism", [{"tp": 2, "cp": 2}, {"tp": 4}, {"cp": 2, "cp_implementation": "all_gather"}])
def test_accelerate_builds_the_parallelism_config_and_its_import_gives_the_axes_back(
    tmp_path: Path, parallelism: dict[str, Any]
) -> None:
    configs = pytest.importorskip("accelerate.parallelism_config")
    plan = plan_of(parallelism)
    text = render(plan, ("accelerate",))["parallelism_config.json"]
    config = configs.ParallelismConfig(**json.loads(text))
    assert config.total_size == 16
    assert (config.tp_size, config.cp_size) == (plan.spec.parallelism.tp, plan.spec.parallelism.cp)
    result = imported(write(tmp_path / "parallelism_config.json", text))
    found = result.spec["parallelism"]
    assert [found.get(axis, 1) for axis in ("tp", "cp", "dp")] == [config.tp_size, config.cp_size, config.dp_shard_size]
    assert set(outcome(result).values()) <= {Outcome.CARRIED, Outcome.NO_EFFECT}


@pytest.mark.parametrize(
    ("parallelism", "sizes"),
    [({"tp": 4}, (4, 1, 1, 4)), ({"tp": 2, "pp": 8, "dp": 1}, (2, 8, 1, 1))],
)
def test_transformers_builds_the_distributed_config_and_its_import_gives_the_axes_back(
    tmp_path: Path, parallelism: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    configs = pytest.importorskip("transformers.distributed.configuration_utils")
    text = render(plan_of(parallelism, zero={"stage": 1}), ("transformers",))["distributed_config.json"]
    assert json.loads(text).keys() <= {field.name for field in fields(configs.DistributedConfig)}
    config = configs.DistributedConfig.from_dict(json.loads(text))
    assert (config.tp_size, config.pp_size, config.ep_size, config.fsdp_size) == sizes
    result = imported(write(tmp_path / "distributed_config.json", text))
    found = result.spec["parallelism"]
    assert [found.get(axis, 1) for axis in ("tp", "pp", "ep", "dp")] == list(sizes)
    assert Outcome.LOST not in outcome(result).values()


def test_experts_are_written_for_transformers_where_it_takes_the_layout() -> None:
    configs = pytest.importorskip("transformers.distributed.configuration_utils")
    model = {"model": {"preset": "mixtral-8x7b"}}
    text = render(plan_of({"tp": 2, "ep": 4}, **model), ("transformers",))["distributed_config.json"]
    assert configs.DistributedConfig.from_dict(json.loads(text)).efsdp_size == 4
    uneven = plan_of({"tp": 8, "ep": 2}, **model)
    assert any(one.fatal and one.what == "ep 2" for one in losses(uneven, ("transformers",))["transformers"])
    with pytest.raises(ValueError, match="multiple"):
        configs.DistributedConfig(tp_size=8, fsdp_size=2, ep_size=2)


@pytest.mark.parametrize(
    ("target", "parallelism", "why"),
    [
        ("transformers", {"cp": 2}, "DistributedConfig has no cp"),
        ("transformers", {"pp": 2}, "refuses FSDP together with pipeline parallelism"),
        ("accelerate-deepspeed", {"tp": 2}, "accelerate has no tp under DeepSpeed"),
        ("accelerate-deepspeed", {"cp": 2}, "splits sequences by Ulysses alone"),
    ],
)
def test_a_layout_that_a_tool_has_not_gets_no_file(target: str, parallelism: dict[str, Any], why: str) -> None:
    files = render(plan_of(parallelism), (target,))
    report = json.loads(files["target_report.json"])["targets"][target]
    assert not report["expressible"]
    assert any(why in one["why"] for one in report["losses"])


def test_the_defaults_of_the_trainer_are_those_of_transformers() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    known = {field.name: field.default for field in fields(arguments)}
    found = {name: getattr(value, "value", value) for name, value in known.items() if name in DEFAULTS}
    assert found == dict(DEFAULTS)


def test_arguments_that_are_saved_whole_lose_nothing_that_was_left_at_its_default(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    # `disable_tqdm` follows how much transformers logs, which other tests change.
    chosen = {"max_steps": 100, "warmup_steps": 10, "label_smoothing_factor": 0.1, "disable_tqdm": False}
    arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", **chosen)
    (tmp_path / "args.json").write_text(arguments.to_json_string(), encoding="utf-8")
    answers = {"model": {"preset": "llama-3-8b"}, "cluster.gpus_per_node": 8, "training.sequence_length": 4096}
    found = parcompile.import_file(tmp_path / "args.json", answers)
    lost = {one.option: one.changes for one in found.of(Outcome.LOST)}
    # transformers itself pins no memory where it uses the CPU.
    named = ("output_dir", "use_cpu", "hub_token", "dataloader_pin_memory")
    assert lost == {**dict.fromkeys(named, False), "label_smoothing_factor": True}


def test_python_with_training_arguments_is_told_how_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('args = TrainingArguments("out")\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"args\.to_json_string\(\)"):
        parcompile.import_file(tmp_path / "train.py")


AXOLOTL = """\
base_model: meta-llama/Meta-Llama-3-8B
datasets:
  - {path: tatsu-lab/alpaca, type: alpaca}
sequence_len: 8192
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-5
optimizer: adamw_torch_fused
lr_scheduler: cosine
warmup_ratio: 0.1
max_steps: 500
weight_decay: 0.01
bf16: true
tf32: true
gradient_checkpointing: true
context_parallel_size: 2
tensor_parallel_size: 2
ring_attn_func: batch_ring
adapter:
no_such_key: 7
deepspeed: zero.json
"""
ZERO = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 0.5,
}


def test_an_axolotl_file_is_imported_with_its_deepspeed_configuration(tmp_path: Path) -> None:
    write(tmp_path / "zero.json", json.dumps(ZERO))
    result = imported(write(tmp_path / "run.yaml", AXOLOTL), CLUSTER)
    training = result.spec["training"]
    assert result.spec["model"] == {"preset": "llama-3-8b"}
    axes = {"tp": 2, "cp": 2, "cp_layout": "contiguous", "cp_implementation": "ring"}
    assert result.spec["parallelism"] == axes
    assert result.spec["zero"] == {"stage": 2}
    assert training["lr_scheduler"] == {"type": "cosine", "warmup_steps": 50}
    optimizer = {"type": "adamw", "lr": 2e-5, "weight_decay": 0.01, "no_weight_decay": "biases_and_norms"}
    assert training["optimizer"] == {**optimizer, "betas": [0.9, 0.999]}
    assert (training["train_steps"], training["micro_batch_size"], training["sequence_length"]) == (500, 2, 8192)
    assert (training["gradient_clipping"], training["activation_checkpointing"]) == (0.5, "full")
    said = outcome(result)
    assert said.keys() == {
        *(key for key in yaml.safe_load(AXOLOTL) if key != "deepspeed"),
        *("deepspeed.zero_optimization.stage", "deepspeed.zero_optimization.reduce_bucket_size"),
        *("deepspeed.bf16.enabled", "deepspeed.train_micro_batch_size_per_gpu", "deepspeed.gradient_clipping"),
    }
    assert {name for name, one in said.items() if one is Outcome.LOST} == {"datasets", "tf32", "no_such_key"}
    assert result.complete


@pytest.mark.parametrize("value", ["true", "auto", "false"])
def test_bf16_that_axolotl_sets_by_the_machine_is_what_every_accelerator_has(value: str, tmp_path: Path) -> None:
    text = AXOLOTL.replace("deepspeed: zero.json\n", "").replace("bf16: true", f"bf16: {value}")
    result = imported(write(tmp_path / "run.yaml", text), CLUSTER)
    assert result.spec["training"]["precision"] == ("fp32" if value == "false" else "bf16")
    assert outcome(result)["bf16"] is Outcome.CARRIED
    assert result.complete


def test_a_trainer_and_its_deepspeed_configuration_may_not_disagree(tmp_path: Path) -> None:
    write(tmp_path / "zero.json", json.dumps({**ZERO, "train_micro_batch_size_per_gpu": 8}))
    with pytest.raises(RefusedError, match=r"micro_batch_size 2 and its DeepSpeed configuration 8"):
        imported(write(tmp_path / "run.yaml", AXOLOTL), CLUSTER)
    (tmp_path / "zero.json").unlink()
    with pytest.raises(RefusedError, match=r"zero\.json, which is not there"):
        imported(tmp_path / "run.yaml", CLUSTER)


LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: full
template: qwen3
dataset: identity
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
lr_scheduler_type: cosine
num_train_epochs: 3.0
warmup_ratio: 0.1
bf16: true
"""


@pytest.mark.parametrize("said", ["warmup_ratio: 0.1", "warmup_steps: 0.1", "warmup_steps: 7", "warmup_steps: 0"])
def test_the_warm_up_of_a_llama_factory_file_is_that_of_transformers(tmp_path: Path, said: str) -> None:
    file = write(tmp_path / "run.yaml", LLAMA_FACTORY.replace("warmup_ratio: 0.1", said) + "max_steps: 305\n")
    schedule = imported(file, CLUSTER).spec["training"]["lr_scheduler"]
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs = arguments(warmup_steps=float(said.split()[1]), max_steps=305, use_cpu=True, report_to=[])
    assert schedule == {"type": "cosine", "warmup_steps": theirs.get_warmup_steps(305)}


def test_steps_that_a_deepspeed_schedule_leaves_to_the_data_are_asked_for_once(tmp_path: Path) -> None:
    params = {**WARMUP, "total_num_steps": "auto"}
    write(tmp_path / "ds.json", json.dumps({**HF_ZERO3, "scheduler": {"type": "WarmupDecayLR", "params": params}}))
    result = imported(write(tmp_path / "run.yaml", LLAMA_FACTORY + "deepspeed: ds.json\n"), CLUSTER)
    assert [".".join(one.path) for one in result.questions] == ["training.train_steps"]
    waiting = {name for name, one in outcome(result).items() if one is Outcome.OPEN}
    assert waiting >= {f"deepspeed.scheduler.params.{name}" for name in ("total_num_steps", "warmup_num_steps")}
    done = imported(tmp_path / "run.yaml", {**CLUSTER, ("training", "train_steps"): 305})
    written = done.spec["deepspeed"]["scheduler"]["params"]
    assert (written["total_num_steps"], written["warmup_num_steps"]) == (305, 31)


def test_what_a_llama_factory_file_leaves_to_the_data_is_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", LLAMA_FACTORY)
    result = imported(file, CLUSTER)
    assert [".".join(one.path) for one in result.questions] == ["training.train_steps"]
    assert result.questions[0].why == "the warm-up is 0.1 of all steps, whose number depends on the data"
    assert outcome(result)["warmup_ratio"] is Outcome.OPEN
    done = imported(file, {**CLUSTER, ("training", "train_steps"): 1000})
    assert done.spec["training"]["lr_scheduler"] == {"type": "cosine", "warmup_steps": 100}
    assert done.spec["training"]["sequence_length"] == 2048  # LLaMA-Factory's default
    assert done.spec["training"]["activation_checkpointing"] == "full"  # it recomputes unless it is told not to
    assert outcome(done).keys() == yaml.safe_load(LLAMA_FACTORY).keys()
    assert {name for name, one in outcome(done).items() if one is Outcome.LOST} == {
        *("template", "dataset", "num_train_epochs"),
    }


def test_arguments_of_the_trainer_ask_for_an_optimizer_that_a_spec_has_not(tmp_path: Path) -> None:
    tree = {"output_dir": "out", "per_device_train_batch_size": 4, "optim": "paged_adamw_8bit", "max_steps": 10}
    result = imported(write(tmp_path / "arguments.json", json.dumps(tree)), {**MODEL, **CLUSTER})
    assert [".".join(one.path) for one in result.questions] == ["training.optimizer.type", "training.sequence_length"]
    assert outcome(result)["optim"] is Outcome.LOST


@pytest.mark.parametrize(
    ("text", "key", "name"),
    [
        (AXOLOTL, "cut_cross_entropy", "linear_cross_entropy"),
        (AXOLOTL, "liger_fused_linear_cross_entropy", "linear_cross_entropy"),
        (LLAMA_FACTORY, "enable_liger_kernel", "linear_cross_entropy"),
        (LLAMA_FACTORY, "use_liger_kernel", "linear_cross_entropy"),
        (AXOLOTL, "tiled_mlp", "tiled_mlp"),
        (AXOLOTL, "activation_offloading", "activation_offloading"),
    ],
)
def test_a_switch_for_logits_or_mlps_in_parts_is_carried(text: str, key: str, name: str, tmp_path: Path) -> None:
    answers = CLUSTER if text is AXOLOTL else {**CLUSTER, ("training", "train_steps"): 1000}
    write(tmp_path / "zero.json", json.dumps(ZERO))
    for value in (True, False):
        said = text + f"{key}: {str(value).lower()}\n"
        result = imported(write(tmp_path / "run.yaml", said), answers)
        assert result.spec["training"].get(name, False) is value
        assert outcome(result)[key] is (Outcome.CARRIED if value else Outcome.LOST)
    if "liger_kernel" in key:
        said = text + f"{key}: true\nliger_kernel_config: {{fused_linear_cross_entropy: false}}\n"
        result = imported(write(tmp_path / "run.yaml", said), answers)
        assert "linear_cross_entropy" not in result.spec["training"]


ACCELERATE_FSDP = """\
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
use_cpu: false
machine_rank: 0
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_offload_params: true}
parallelism_config: {parallelism_config_tp_size: 4, parallelism_config_dp_shard_size: 4}
"""
ACCELERATE_MEGATRON = """\
distributed_type: MEGATRON_LM
mixed_precision: 'no'
num_processes: 8
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 4
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_recompute_activations: true
  megatron_lm_gradient_clipping: 1.0
"""


def test_sections_of_an_accelerate_file_become_axes_and_stages(tmp_path: Path) -> None:
    fsdp = imported(write(tmp_path / "fsdp.yaml", ACCELERATE_FSDP), MODEL)
    assert (fsdp.spec["cluster"], fsdp.spec["parallelism"]) == ({"nodes": 2, "gpus_per_node": 8}, {"tp": 4, "dp": 4})
    assert (fsdp.spec["zero"], fsdp.spec["training"]["precision"]) == ({"stage": 2}, "bf16")
    assert {name for name, one in outcome(fsdp).items() if one is Outcome.LOST} == {
        *("machine_rank", "fsdp_config.fsdp_offload_params"),
    }
    megatron = imported(write(tmp_path / "megatron.yaml", ACCELERATE_MEGATRON), MODEL)
    assert "gradient_accumulation_dtype" not in megatron.spec["training"]
    assert megatron.spec["parallelism"] == {"tp": 2, "pp": 2, "sequence_parallel": True}
    assert megatron.spec["training"]["activation_checkpointing"] == "selective"
    assert Outcome.LOST not in outcome(megatron).values()


@pytest.mark.parametrize(("version", "precision"), [(1, "bf16"), (2, "bf16"), (2, "fp16"), (2, "no")])
def test_the_type_in_which_fsdp_reduces_gradients_is_told(tmp_path: Path, version: int, precision: str) -> None:
    text = ACCELERATE_FSDP.replace("mixed_precision: bf16", f"mixed_precision: '{precision}'")
    file = write(tmp_path / "fsdp.yaml", text.replace("fsdp_version: 2", f"fsdp_version: {version}"))
    found = imported(file, MODEL)
    said = [one for one in found.accounts if one.option == "mixed_precision" and one.changes]
    if precision == "no":
        assert not said
        return
    assert [one.outcome for one in said] == [Outcome.CARRIED]
    sentence = f"accelerate's FSDP sums gradients of micro-batches and over ranks in {precision}, as the plan does"
    assert sentence in said[0].detail
    assert found.spec["training"]["precision"] == precision
    assert found.spec["training"]["gradient_accumulation_dtype"] == precision
    sums = ("training", "gradient_accumulation_dtype")
    assert not [one for one in imported(file, {**MODEL, sums: "fp32"}).accounts if one.changes]
    # By accelerate itself.
    plugin = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision(precision)
    assert (
        str(plugin.mixed_precision_policy.reduce_dtype)
        == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    )


@pytest.mark.parametrize(("stays", "precision"), [(False, "bf16"), (True, "bf16"), (False, "fp16")])
def test_fsdp_of_axolotl_is_a_stage_of_zero_that_sums_as_it_does(tmp_path: Path, stays: bool, precision: str) -> None:
    fsdp = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: %s, offload_params: true}\n"
    text = AXOLOTL.replace("deepspeed: zero.json\n", fsdp % str(not stays).lower())
    text = text.replace("bf16: true", f"{precision}: true")
    found = imported(write(tmp_path / "axolotl.yaml", text), MODEL)
    assert found.spec["zero"] == {"stage": 2 if stays else 3}
    training = found.spec["training"]
    assert (training["precision"], training["gradient_accumulation_dtype"]) == (precision, precision)
    (said,) = [one for one in found.accounts if one.option == precision]
    assert (
        f"sums gradients of micro-batches and over ranks in {precision}, as the plan does; in fp32 with" in said.detail
    )
    assert outcome(found)["fsdp_config.offload_params"] is Outcome.LOST
    each = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
    found = imported(write(tmp_path / "axolotl.yaml", text + each), MODEL)
    (said,) = [one for one in found.accounts if one.option == precision]
    assert f"adds micro-batches in fp32 (sync_each_batch), the plan in {precision}" in said.detail
    without = imported(write(tmp_path / "axolotl.yaml", text.replace(f"{precision}: true", "bf16: false")), MODEL)
    assert "gradient_accumulation_dtype" not in without.spec["training"]


def test_the_skypilot_task_starts_every_rank_of_the_plan(tmp_path: Path) -> None:
    tree = yaml.safe_load(render(plan_of(), ("skypilot",))["launch/skypilot.yaml"])
    assert (tree["resources"], tree["num_nodes"]) == ({"accelerators": "H200:8"}, 2)
    # A stand-in for torchrun says what it is called with on the second of two nodes.
    write(tmp_path / "torchrun", '#!/bin/sh\necho "$@"\n').chmod(0o755)
    environment = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done = subprocess.run(
        ["bash", "-c", tree["run"]],
        env={**environment, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    options = "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29500"
    assert done.stdout == f"{options} train.py --plan plan\n"


def test_kubeflows_deepspeed_runtime_starts_every_rank_by_mpirun(tmp_path: Path) -> None:
    tree = yaml.safe_load(render(plan_of(), ("kubernetes",))["launch/trainjob-deepspeed.yaml"])
    assert tree["spec"]["runtimeRef"] == {"name": "deepspeed-distributed"}
    assert tree["spec"]["trainer"]["numProcPerNode"] == 8
    hosts = write(tmp_path / "hostfile", "job-node-0-0.job slots=8\njob-node-0-1.job slots=8\n")
    # A stand-in for mpirun runs one rank as OpenMPI would, after it has said its options.
    script = '#!/bin/bash\necho "${@:1:4} $MASTER_ADDR"\nexport OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=16 '
    script += 'OMPI_COMM_WORLD_LOCAL_RANK=1\nexec "${@: -3}"\n'
    write(tmp_path / "mpirun", script).chmod(0o755)
    write(tmp_path / "python", '#!/bin/sh\necho "$RANK $WORLD_SIZE $LOCAL_RANK $@"\n').chmod(0o755)
    done = subprocess.run(
        tree["spec"]["trainer"]["command"],
        env={"OMPI_MCA_orte_default_hostfile": str(hosts), "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "-np 16 --map-by ppr:8:node job-node-0-0.job",
        "9 16 1 train.py --plan /plan",
    ]


HF_ZERO3 = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
"""The example of transformers' documentation, whose values come from TrainingArguments."""
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 7}, {"warmup_ratio": 0.1}, {"warmup_ratio": 0.03}])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_what_transformers_fills_in_for_auto_is_what_the_spec_says(
    tmp_path: Path, kind: str, warmup: dict[str, float]
) -> None:
    module = pytest.importorskip("transformers.integrations.deepspeed")
    arguments = pytest.importorskip("transformers").TrainingArguments
    ends = {"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {}
    config = {**HF_ZERO3, "scheduler": {"type": kind, "params": {**WARMUP, **ends}}}
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-5, **warmup}
    given |= {"max_grad_norm": 0.7, "adam_beta2": 0.98, "adam_epsilon": 1e-7, "weight_decay": 0.03, "max_steps": 170}

    names = {"warmup_steps": warmup.get("warmup_ratio", warmup.get("warmup_steps", 0))}
    asked = {**{name: value for name, value in given.items() if name != "warmup_ratio"}, **names}
    filled = module.HfTrainerDeepSpeedConfig(json.loads(json.dumps(config)))
    theirs = arguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], **asked)
    filled.trainer_config_process(theirs)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    filled.trainer_config_finalize(theirs, model, given["max_steps"])
    assert "auto" not in json.dumps(filled.config["scheduler"])

    write(tmp_path / "zero.json", json.dumps(config))
    run = {"model_name_or_path": "Qwen/Qwen3-8B", "lr_scheduler_type": "linear", "deepspeed": "zero.json", **given}
    answers = {**CLUSTER, ("training", "sequence_length"): 2048}
    result = imported(write(tmp_path / "run.yaml", yaml.safe_dump(run)), answers)
    assert result.complete, result.questions
    resolved = check_read(parse(json.dumps(result.spec), "spec.json", "json"), tmp_path).resolution
    assert resolved is not None
    training, optimizer = resolved.spec().training, filled.config["optimizer"]["params"]
    assert training.gradient_clipping == filled.config["gradient_clipping"]
    assert training.micro_batch_size == filled.config["train_micro_batch_size_per_gpu"]
    # DeepSpeed's optimizer gets all parameters in one group.
    every = [object()]
    assert module.deepspeed_optim_sched(None, filled, theirs, given["max_steps"], every)[0].params is every
    assert training.optimizer.no_weight_decay is None
    assert {key: optimizer[key] for key in ("lr", "eps", "weight_decay")} == {
        key: getattr(training.optimizer, key) for key in ("lr", "eps", "weight_decay")
    }
    assert list(training.optimizer.betas) == optimizer["betas"]
    written = ds_config(compile_plan(resolved.spec(), result.spec, []))["scheduler"]
    assert written["params"].items() >= filled.config["scheduler"]["params"].items()

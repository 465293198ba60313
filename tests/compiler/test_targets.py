"""What each target is written as, against its consumer's own parser or a stand-in for its program."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from jsonschema import Draft202012Validator
from layout_cases import compile_tree, spec_tree
from spec_cases import FOLDER

from parcompile import schema
from parcompile.backends.kinds import ALL, BUILT_IN, chosen
from parcompile.backends.megatron.arguments import NVIDIA, Word, parsed
from parcompile.backends.megatron.read import meaning
from parcompile.backends.megatron.write import arguments, as_list
from parcompile.backends.registry import LOCK, TARGETS, render
from parcompile.backends.statements import EXPRESSION, rows_of
from parcompile.backends.writing import write
from parcompile.model.tables.expression import compiled
from parcompile.pipeline import compile_file
from parcompile.plan import Plan, load_plan
from parcompile.user_files import shipped

FREE_PORT = Path(__file__).parents[2] / "examples" / "free_port.py"

HOSTILE = (
    "two words",
    'it\'s "quoted"',
    "$(touch pwned) `touch pwned`",
    "'; touch pwned; '",
    '\\"; touch pwned #',
    "- [not, yaml]: {really}",
    "\u2028\u2029",
)
CONTROL_CHARACTERS = ("line one\ntouch pwned\n#SBATCH --nodes=99\nkind: Pod", "\u2028\x1b[31m", "\x85")
MODELS = {
    "llama-3-8b": ({"tp": 2, "cp": 2, "sequence_parallel": True}, {}),
    "gpt2-xl": ({}, {"precision": "fp16", "loss_scale": 8, "train_steps": 3}),
    "deepseek-v3": ({"tp": 8, "ep": 8}, {"activation_checkpointing": "full"}),
    "mixtral-8x7b": ({"tp": 2, "ep": 4, "sequence_parallel": True}, {"activation_checkpointing": "selective"}),
    "qwen3-8b": (
        {"tp": 4, "pp": 2, "order": "tp-cp-ep-pp-dp"},
        {"gradient_accumulation_dtype": "fp32", "global_batch_size": 512},
    ),
    "qwen2.5-7b": (
        {"cp": 2},
        {
            "optimizer": {"type": "adam"},
            "train_steps": 100,
            "lr_scheduler": {"type": "cosine", "warmup_steps": 5, "min_lr": 1e-5},
            "eval_global_batch_size": 512,
            "eval_micro_batch_size": 2,
        },
    ),
    "llama-3.1-405b": (
        {
            "tp": 8,
            "pp": 16,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "num_virtual_stages_per_pipeline_rank": 4,
        },
        {"gradient_accumulation_dtype": "fp32", "global_batch_size": 64},
    ),
    "llama-2-7b": (
        {"tp": 8, "pp": 8, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1},
        {"gradient_accumulation_dtype": "fp32", "global_batch_size": 64, "sequence_length": 1024},
    ),
}


def model_plan(model: str, folder: Path) -> Plan:
    parallelism, training = MODELS[model]
    tree = spec_tree(64, 8, model={"preset": model}, parallelism=parallelism, training=training)
    return compile_tree(tree, folder)


@pytest.fixture
def plan(tmp_path) -> Plan:
    return compile_tree(spec_tree(2, 8, parallelism={"tp": 2, "cp": 2}), tmp_path)


def valid(name: str, text: str) -> None:
    errors = list(Draft202012Validator(json.loads(schema.text(name))).iter_errors(json.loads(text)))
    assert not errors, [f"{error.json_path}: {error.message}" for error in errors[:5]]


class TestChoice:
    def test_names_are_known_and_ordered(self) -> None:
        assert chosen(()) == ("deepspeed", "torchrun", "slurm")
        assert chosen(("slurm", "deepspeed", "slurm")) == ("deepspeed", "slurm")
        assert chosen((ALL,)) == tuple(TARGETS)
        with pytest.raises(ValueError, match="there is no target 'nemo'; there are deepspeed, torchrun"):
            chosen(("nemo",))

    def test_every_artefact_carries_the_identity_or_stands_in_the_lock_file_by_its_hash(self, plan) -> None:
        files = render(plan, (ALL,))
        lock = json.loads(files[LOCK])
        assert lock["files"] == {
            name: "sha256:" + hashlib.sha256(text.encode()).hexdigest()
            for name, text in sorted(files.items())
            if name != LOCK
        }
        for name, text in files.items():
            if name not in {
                *("ds_config.json", "launch/deepspeed_env"),
                *("parallelism_config.json", "distributed_config.json"),  # the fields of a class, and nothing else
            }:
                assert plan.spec_hash in text, name
                assert plan.compiler_version in text, name
        assert lock["backends"]["deepspeed"] == "0.19.8"

    def test_json_artefacts_are_valid_against_their_schemas(self, plan) -> None:
        files = render(plan, (ALL,))
        for name, schema_name in (
            ("plan.json", "plan"),
            ("process_groups.json", "process_groups"),
            ("target_report.json", "target_report"),
            ("megatron_args.json", "megatron_args"),
            (LOCK, "lock"),
        ):
            valid(schema_name, files[name])

    def test_targets_that_do_not_pad_a_split_sequence_get_no_files(self) -> None:
        plan, _ = compile_file(FOLDER / "positive" / "T007-local-share.json")
        report = json.loads(render(plan, ("torchtitan", "megatron"))["target_report.json"])["targets"]
        for target in ("torchtitan", "megatron"):
            assert report[target]["files"] == []
            whys = [loss["why"] for loss in report[target]["losses"] if loss["what"] == "sequence_length 8190"]
            assert len(whys) == 1
            assert whys[0].endswith("does not pad: (sequence_length 8190 / cp 2) % tp 4 = 3")

    def test_a_target_that_cannot_run_the_layout_gets_a_reason_and_no_files(self, tmp_path) -> None:
        plan = model_plan("qwen3-8b", tmp_path)
        files = render(plan, ("accelerate", "torchtitan", "megatron"))
        report = json.loads(files["target_report.json"])["targets"]
        assert report["accelerate"]["files"] == report["torchtitan"]["files"] == []
        assert report["accelerate"]["losses"][0]["what"] == "pp 2"
        assert report["torchtitan"]["losses"][0]["what"] == "order tp-pp-dp"
        assert not report["accelerate"]["expressible"]
        assert report["megatron"]["expressible"]
        assert not {"accelerate.yaml", "torchtitan_config.py"} & files.keys()


class TestMegatron:
    @pytest.mark.parametrize("model", MODELS)
    def test_its_parser_takes_names_types_and_choices(self, model, tmp_path) -> None:
        found = arguments(model_plan(model, tmp_path))
        read = parsed([Word(word, word, (), None) for word in as_list(found)], NVIDIA)
        assert read.problems == []
        assert read.unknown == {}
        assert meaning(read.values) == meaning(found)

    def test_what_matters_is_said_even_where_it_is_the_default(self, plan) -> None:
        found = arguments(plan)
        assert found["tensor_model_parallel_size"] == found["context_parallel_size"] == 2
        assert found["pipeline_model_parallel_size"] == 1
        assert (found["adam_beta2"], found["clip_grad"], found["attention_dropout"]) == (0.95, 1.0, 0.0)
        assert found["use_distributed_optimizer"] is True
        assert (found["group_query_attention"], found["num_query_groups"]) == (True, 4)

    def test_expert_and_pipeline_layouts(self, tmp_path) -> None:
        found = arguments(model_plan("deepseek-v3", tmp_path))
        assert found["expert_model_parallel_size"] == 8
        assert found["moe_layer_freq"] == "([0]*3+[1]*58)"
        assert (found["kv_lora_rank"], found["moe_shared_expert_intermediate_size"]) == (512, 2048)
        assert found["recompute_method"] == "uniform"
        other = arguments(model_plan("qwen3-8b", tmp_path))
        assert other["use_tp_pp_dp_mapping"] is True
        assert other["kv_channels"] == 128

    def test_schedule_and_evaluation_batch_are_passed_on(self, tmp_path) -> None:
        found = arguments(model_plan("qwen2.5-7b", tmp_path))
        assert (found["lr_decay_style"], found["lr_warmup_iters"], found["train_iters"]) == ("cosine", 5, 100)
        assert found["min_lr"] == found["lr_warmup_init"] == 1e-5
        assert found["eval_micro_batch_size"] == 2
        still = arguments(model_plan("llama-3-8b", tmp_path))
        assert (still["lr_decay_style"], still["min_lr"]) == ("constant", still["lr"])
        assert "lr_warmup_iters" not in still

    def test_uneven_and_virtual_stages_are_passed_on(self, tmp_path) -> None:
        found = arguments(model_plan("llama-3.1-405b", tmp_path))
        assert found["account_for_embedding_in_pipeline_split"] is found["account_for_loss_in_pipeline_split"] is True
        assert found["num_virtual_stages_per_pipeline_rank"] == 4
        assert found["microbatch_group_size_per_virtual_pipeline_stage"] == 16
        ends = arguments(model_plan("llama-2-7b", tmp_path))
        assert (ends["decoder_first_pipeline_num_layers"], ends["decoder_last_pipeline_num_layers"]) == (1, 1)
        assert not {"num_virtual_stages_per_pipeline_rank", "account_for_loss_in_pipeline_split"} & ends.keys()

    def test_list_yaml_and_shell_say_the_same(self, tmp_path) -> None:
        files = render(model_plan("mixtral-8x7b", tmp_path), ("megatron",))
        listed = json.loads(files["megatron_args.json"])["arguments"]
        from_yaml: list[str] = []
        for name, value in yaml.safe_load(files["megatron_args.yaml"])["MODEL_ARGS"].items():
            from_yaml.append(name)
            if value is not True:
                from_yaml.extend(str(one) for one in (value if isinstance(value, list) else [value]))
        assert from_yaml == listed
        script = (
            files["megatron_args.sh"] + 'printf "%s\\n" "${MEGATRON_ARGS[@]}"; echo "$CUDA_DEVICE_MAX_CONNECTIONS"\n'
        )
        shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
        assert shown == [*listed, "1"]

    @pytest.mark.parametrize("model", ["gemma-2-27b", "gpt-neox-20b"])
    def test_models_that_it_does_not_compute_are_refused(self, model, tmp_path) -> None:
        tree = spec_tree(16, 8, model={"preset": model}, parallelism={"tp": 8})
        report = json.loads(render(compile_tree(tree, tmp_path), ("megatron",))["target_report.json"])
        assert not report["targets"]["megatron"]["expressible"]


class TestParallelDims:
    def test_accelerate_reads_the_configuration(self, plan, tmp_path) -> None:
        file = tmp_path / "accelerate.yaml"
        file.write_text(render(plan, ("accelerate",))["accelerate.yaml"], encoding="utf-8")
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        sizes = {key.removeprefix("parallelism_config_"): value for key, value in tree["parallelism_config"].items()}
        product = sizes["dp_replicate_size"] * sizes["dp_shard_size"] * sizes["tp_size"] * sizes["cp_size"]
        assert product == tree["num_processes"] == plan.world_size
        config_args = pytest.importorskip("accelerate.commands.config.config_args")
        assert config_args.load_config_from_file(str(file)).parallelism_config == tree["parallelism_config"]


class TestLaunch:
    """The scripts run with stand-ins for the launchers, which write down what they were started with."""

    @pytest.fixture
    def stage(self, tmp_path) -> Path:
        programs = tmp_path / "bin"
        programs.mkdir()
        recorder = (
            f"#!{sys.executable}\nimport json, os, sys\n"
            "names = ('OMP_NUM_THREADS', 'CUDA_DEVICE_MAX_CONNECTIONS', 'DS_ENV_FILE', 'MASTER_ADDR')\n"
            "with open('called.json', 'a') as file:\n"
            "    json.dump({'program': os.path.basename(sys.argv[0]), 'arguments': sys.argv[1:],\n"
            "               'environment': {name: os.environ.get(name) for name in names}}, file)\n"
            "    file.write('\\n')\n"
        )
        for name in ("deepspeed", "torchrun"):
            (programs / name).write_text(recorder)
        (programs / "scontrol").write_text("#!/bin/sh\nprintf 'host-a\\nhost-b\\n'\n")
        # As srun does: the command once, with the place of a node.
        (programs / "srun").write_text(
            '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nSLURM_NODEID=1 exec "$@"\n'
        )
        for program in programs.iterdir():
            program.chmod(0o755)
        return tmp_path

    def run(self, stage: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(stage / "out" / "launch" / script), *arguments],
            cwd=stage,
            env={"PATH": f"{stage / 'bin'}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def called(self, stage: Path) -> dict[str, Any]:
        return json.loads((stage / "called.json").read_text())

    ARGUMENTS = ("train.py", "--note", "two words; $(touch pwned) 'x'", "--plan", "a b")

    def test_deepspeed_on_one_node(self, stage) -> None:
        plan = compile_tree(spec_tree(1, 4, parallelism={"tp": 2}, cluster={"accelerator": "cpu"}), stage)
        write(render(plan), stage / "out")
        assert self.run(stage, "deepspeed.sh", *self.ARGUMENTS, MASTER_PORT="1234").returncode == 0
        assert self.called(stage)["arguments"] == [
            *("--num_gpus", "4", "--master_port", "1234", "--no_local_rank"),
            *self.ARGUMENTS,
        ]
        assert self.called(stage)["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] is None

    HEARD = (
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.5)\n    pathlib.Path('saved').touch()\n    sys.exit(75)\n"
    )
    FIRST_ONLY_NOTED = "def note(*_):\n    signal.signal({0}, save)\n    pathlib.Path('noted').touch()\n"
    RANKS: ClassVar[dict[str, tuple[str, int, int]]] = {
        "saves": ("signal.signal({0}, save)\n", 1, 75),
        "is ended": ("signal.signal({0}, signal.SIG_DFL)\n", 1, 0),
        "goes on": (f"{FIRST_ONLY_NOTED}signal.signal({{0}}, note)\n", 2, 0),
    }
    """What a rank does at a signal, how many signals there are, and the exit code; 0: as a shell tells of a signal."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    @pytest.mark.parametrize("rank", RANKS)
    def test_a_signal_to_the_script_reaches_the_ranks_and_their_code_the_script(self, stage, rank, number) -> None:
        """As DeepSpeed's runner on one node, which ends at a signal and leaves what it started to itself."""
        does, signals, code = self.RANKS[rank]
        ranks = f"{self.HEARD}{does.format(int(number))}pathlib.Path('started').touch()\ntime.sleep(600)\n"
        program = f"#!{sys.executable}\nimport subprocess, sys\n"
        hands_on = "sys.exit(subprocess.Popen([sys.executable, '-c', {0!r}]).wait() % 256)\n"
        launcher = "import subprocess, sys\n" + hands_on.format(ranks)
        (stage / "bin" / "deepspeed").write_text(program + hands_on.format(launcher))
        with self.launched(stage, number) as running:
            self.wait_for(stage / "started")
            for _ in range(signals):
                running.send_signal(number)
                self.wait_for(stage / "noted" if signals == 2 else stage)
            assert running.wait(timeout=600) == (code or 128 + number)
        assert (stage / "saved").exists() == (rank != "is ended")

    def test_a_signal_before_there_are_ranks_ends_the_launcher(self, stage) -> None:
        program = f"#!{sys.executable}\nimport pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"
        (stage / "bin" / "deepspeed").write_text(program)
        with self.launched(stage, signal.SIGTERM) as running:
            self.wait_for(stage / "started")
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=600) == 128 + signal.SIGTERM

    def launched(self, stage, number: int) -> subprocess.Popen[bytes]:
        """The script of a plan for one node. Under nohup, or in the background of a shell, it would ignore signals."""
        plan = compile_tree(spec_tree(1, 4, parallelism={"tp": 2}, cluster={"accelerator": "cpu"}), stage)
        write(render(plan), stage / "out")
        environment = {"PATH": f"{stage / 'bin'}:{os.environ['PATH']}"}
        script = [str(stage / "out" / "launch" / "deepspeed.sh"), "train.py"]
        heeded = functools.partial(signal.signal, number, signal.SIG_DFL)
        return subprocess.Popen(script, cwd=stage, env=environment, stderr=subprocess.DEVNULL, preexec_fn=heeded)

    @staticmethod
    def wait_for(file) -> None:
        end = time.monotonic() + 300
        while not file.exists():
            assert time.monotonic() < end, file
            time.sleep(0.02)

    def test_deepspeed_on_several_nodes_hands_on_its_hostfile_and_environment(self, stage, plan) -> None:
        write(render(plan), stage / "out")
        launch = stage / "out" / "launch"
        assert self.run(stage, "deepspeed.sh", *self.ARGUMENTS).returncode == 0
        found = self.called(stage)
        assert found["arguments"][:6] == ["--hostfile", str(launch / "hostfile"), "--num_nodes", "2", "--num_gpus", "8"]
        assert found["arguments"][-5:] == list(self.ARGUMENTS)
        assert found["environment"]["DS_ENV_FILE"] == str(launch / "deepspeed_env")
        assert (launch / "deepspeed_env").read_text() == "OMP_NUM_THREADS=1\nCUDA_DEVICE_MAX_CONNECTIONS=1\n"
        (launch / "hostfile").unlink()
        refused = self.run(stage, "deepspeed.sh", *self.ARGUMENTS)
        assert refused.returncode == 2
        assert "slots=8" in refused.stderr

    def test_deepspeeds_own_parser_reads_the_hostfile(self, stage, plan, monkeypatch) -> None:
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        runner = pytest.importorskip("deepspeed.launcher.runner")
        write(render(plan), stage / "out")
        assert dict(runner.fetch_hostfile(str(stage / "out" / "launch" / "hostfile"))) == {"node-0": 8, "node-1": 8}

    def test_torchrun_needs_to_know_its_place(self, stage, plan) -> None:
        write(render(plan), stage / "out")
        refused = self.run(stage, "torchrun.sh", *self.ARGUMENTS)
        assert refused.returncode != 0
        assert "NODE_RANK: is not set: the index of this node, 0 to 1" in refused.stderr
        assert self.run(stage, "torchrun.sh", *self.ARGUMENTS, NODE_RANK="1", MASTER_ADDR="h").returncode == 0
        assert self.called(stage)["arguments"] == [
            *("--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "29500"),
            *("--nproc-per-node", "8"),
            *self.ARGUMENTS,
        ]

    def test_torchruns_own_parser_reads_the_options(self, stage, plan) -> None:
        run = pytest.importorskip("torch.distributed.run")
        write(render(plan), stage / "out")
        self.run(stage, "torchrun.sh", *self.ARGUMENTS, NODE_RANK="1", MASTER_ADDR="h")
        options = run.get_args_parser().parse_args(self.called(stage)["arguments"])
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
        assert options.training_script == "train.py"
        assert options.training_script_args == list(self.ARGUMENTS[1:])

    @pytest.mark.ranks
    def test_the_real_torchrun_starts_the_plans_ranks(self, stage) -> None:
        pytest.importorskip("torch")
        write(render(compile_tree(spec_tree(1, 2, cluster={"accelerator": "cpu"}), stage)), stage / "out")
        (stage / "bin" / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        (stage / "hello.py").write_text(
            "import os, sys, pathlib\n"
            "pathlib.Path('rank-' + os.environ['RANK']).write_text(os.environ['WORLD_SIZE'] + ' ' + sys.argv[1])\n"
        )
        port = subprocess.check_output([sys.executable, FREE_PORT], text=True).strip()
        done = self.run(stage, "torchrun.sh", "hello.py", "a b", MASTER_PORT=port)
        assert done.returncode == 0, done.stderr
        assert [(stage / f"rank-{rank}").read_text() for rank in range(2)] == ["2 a b", "2 a b"]

    def test_slurm_starts_one_torchrun_on_each_node_in_the_order_of_the_ranks(self, stage, plan) -> None:
        write(render(plan), stage / "out")
        done = self.run(stage, "slurm.sbatch", *self.ARGUMENTS, SLURM_JOB_NODELIST="host-[a-b]")
        assert done.returncode == 0, done.stderr
        found = self.called(stage)
        assert found["program"] == "torchrun"
        assert found["arguments"] == [
            *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8"),
            *("--master-addr", "host-a", "--master-port", "29500"),
            *self.ARGUMENTS,
        ]
        text = (stage / "out" / "launch" / "slurm.sbatch").read_text()
        assert "#SBATCH --nodes=2\n" in text
        assert "#SBATCH --gpus-per-node=8\n" in text

    def test_an_allocation_of_another_size_is_refused(self, stage) -> None:
        write(render(compile_tree(spec_tree(4, 8), stage)), stage / "out")
        refused = self.run(stage, "slurm.sbatch", *self.ARGUMENTS, SLURM_JOB_NODELIST="host-[a-b]")
        assert refused.returncode == 2
        assert "the plan is for 4 nodes, the allocation has 2" in refused.stderr

    @pytest.mark.parametrize("script", ["deepspeed.sh", "torchrun.sh", "slurm.sbatch"])
    def test_without_a_script_they_say_how_they_are_used(self, stage, plan, script) -> None:
        write(render(plan), stage / "out")
        refused = self.run(stage, script)
        assert refused.returncode == 2
        assert refused.stderr == f"usage: {script} SCRIPT [ARGUMENTS]\n"

    def test_kubernetes_manifests_ask_for_the_plans_machines(self, plan) -> None:
        files = render(plan, ("kubernetes",))
        job = yaml.safe_load(files["launch/pytorchjob.yaml"])
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert (job["kind"], job["spec"]["nprocPerNode"]) == ("PyTorchJob", "8")
        assert [replicas[role]["replicas"] for role in ("Master", "Worker")] == [1, 1]
        container = replicas["Worker"]["template"]["spec"]["containers"][0]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert {"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "1"} in container["env"]
        trainer = yaml.safe_load(files["launch/trainjob.yaml"])["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
        assert job["metadata"]["annotations"]["parcompile/plan-hash"] == plan.plan_hash


class TestQuoting:
    @pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
    def test_a_name_can_neither_break_out_nor_execute(self, name, tmp_path) -> None:
        plan = compile_tree(spec_tree(1, 2, name=name), tmp_path)
        files = render(plan, (ALL,))
        write(files, tmp_path / "out")
        assert load_plan(tmp_path / "out").spec.name == name
        for file, text in files.items():
            if file.endswith((".sh", ".sbatch")):
                # With nothing to start they stop at their usage; sourcing the array runs nothing at all.
                subprocess.run(["bash", str(tmp_path / "out" / file)], cwd=tmp_path, capture_output=True, check=False)
                subprocess.run(["bash", "-n", str(tmp_path / "out" / file)], check=True)
                directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
                assert [line for line in directives if "--nodes" in line] in ([], ["#SBATCH --nodes=1"])
            if file.endswith(".yaml"):
                assert len(list(yaml.safe_load_all(text))) == 1
        assert not list(tmp_path.rglob("pwned"))
        job = yaml.safe_load(files["launch/pytorchjob.yaml"])
        assert job["kind"] == "PyTorchJob"
        label = job["metadata"]["name"]
        assert label.replace("-", "").isalnum() and label.isascii() and label == label.lower()
        if name.isprintable():
            assert job["metadata"]["annotations"]["parcompile/name"] == name

    @pytest.mark.parametrize("name", CONTROL_CHARACTERS, ids=range(len(CONTROL_CHARACTERS)))
    def test_a_name_with_control_characters_is_refused(self, name, tmp_path) -> None:
        file = tmp_path / "spec.json"
        file.write_text(json.dumps(spec_tree(1, 2, name=name)), encoding="utf-8")
        plan, checked = compile_file(file)
        assert plan is None
        assert [one.code for one in checked.diagnostics if one.path == ("name",)] == ["K006"]

    def test_a_path_of_the_output_may_hold_anything(self, tmp_path) -> None:
        plan = compile_tree(spec_tree(2, 2), tmp_path)
        folder = tmp_path / "a $(touch pwned) 'b'"
        write(render(plan), folder)
        done = subprocess.run(
            [str(folder / "launch" / "deepspeed.sh"), "train.py"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOSTFILE": "missing $(touch pwned)"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "there is no missing $(touch pwned)" in done.stderr
        assert not list(tmp_path.rglob("pwned"))


def test_every_expression_of_a_stored_loss_can_be_read() -> None:
    """Of each row, also of those that no plan of these tests has; no word that stands for another is left."""
    table = shipped("parcompile.backends", "losses.json")
    taken = {row["of"] for rows in table.values() for row in rows if "of" in row} - set(BUILT_IN)
    for name in table.keys() - taken:
        for row in rows_of(table[name], {}, table):
            assert "$" not in str(row), name
            said = " ".join(row[key] for key in ("what", "why", "instead"))
            texts = [row.get("when", "True"), *(text for text, _ in EXPRESSION.findall(said))]
            assert all(compiled(text) for text in texts), name

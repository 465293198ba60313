"""Megatron-LM arguments on their own: scripts and YAML files, recognised by their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from parcompile.backends.kinds import MEGATRON, UNKNOWN
from parcompile.backends.megatron import write as megatron
from parcompile.backends.megatron.file import imported
from parcompile.lint.registry import FileRule, file_rules
from parcompile.pipeline import Checked, check_any, compile_file

SCRIPT = """\
#!/bin/bash
TP=2
export PP=16
# --tensor-model-parallel-size 8
ARGS=(
  --tensor-model-parallel-size ${TP}
  --pipeline-model-parallel-size "$PP" --num-layers 128
  --num-attention-heads=25
  --seq-length 4096 \\
  --fp16
)
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${ARGS[@]}
"""
RULES = [rule for rule in file_rules() if rule.kind == MEGATRON]


def checked(text: str, file: Path) -> Checked:
    file.write_text(text, encoding="utf-8")
    return check_any(file)


LAUNCHER = ("nnodes", "nproc_per_node")


def shell(arguments: Any) -> str:
    flags = {
        name: f"--{name if name in LAUNCHER else name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in arguments.items()
    }
    launcher = [flags.pop(name) for name in LAUNCHER if name in flags]
    return " \\\n  ".join(["torchrun", *launcher, "pretrain_gpt.py", *flags.values()]) + "\n"


def codes(one: Checked) -> set[str]:
    return {found.code for found in one.diagnostics}


def test_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    done = checked(SCRIPT, tmp_path / "train.sh")
    assert done.kind == MEGATRON
    assert done.document is not None
    assert done.document.tree == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 16,
        "num_layers": 128,
        "num_attention_heads": 25,
        "seq_length": 4096,
        "fp16": True,
        "nproc_per_node": "${GPUS}",
    }
    assert done.document.tree["nproc_per_node"].names == ("GPUS",)


@pytest.mark.parametrize("count", ["9" * 5000, "²"])
def test_a_launcher_s_count_that_is_no_number_is_left_alone(count: str, tmp_path: Path) -> None:
    """Python refuses to read the first, and calls the second a digit."""
    done = checked(SCRIPT.replace("$GPUS", count), tmp_path / "train.sh")
    assert done.document is not None
    assert "nproc_per_node" not in done.document.tree


def test_a_finding_stands_at_the_value_of_its_flag(tmp_path: Path) -> None:
    (found,) = checked(SCRIPT, tmp_path / "train.sh").diagnostics
    assert (found.code, found.position.line, found.position.column) == ("F103", 2, 4)  # TP=2
    (other,) = found.related
    assert (other.position.line, other.position.column) == (8, 25)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_wrong_example_breaks_the_rule_and_right_one_nothing(rule: FileRule, tmp_path: Path) -> None:
    for name, text in (("args.sh", shell), ("args.yaml", yaml.safe_dump)):
        wrong = checked(text(dict(rule.wrong)), tmp_path / name)
        assert wrong.kind == MEGATRON
        assert codes(wrong) == {rule.code}
        assert all(one.position is not None for one in wrong.diagnostics)
        assert codes(checked(text(dict(rule.right)), tmp_path / name)) == set()


def test_flags_may_stand_in_a_section_with_their_dashes(tmp_path: Path) -> None:
    flags = {f"--{name.replace('_', '-')}": value for name, value in RULES[2].wrong.items()}
    done = checked(yaml.safe_dump({"ENV_VARS": {"A": 1}, "MODEL_ARGS": flags}), tmp_path / "model_config.yaml")
    assert (done.kind, codes(done)) == (MEGATRON, {RULES[2].code})


@pytest.mark.parametrize("text", ["echo hello\n", "python train.py --lr 3\n", "model:\n  num_layers: 3\n"])
def test_other_files_are_no_arguments(text: str, tmp_path: Path) -> None:
    assert checked(text, tmp_path / "file.yaml").kind == UNKNOWN


@pytest.mark.parametrize("name", ["W001-tp-2-of-8", "C001-zigzag-8184", "P004-fp32-sums"])
def test_emitted_arguments_pass(name: str, tmp_path: Path) -> None:
    plan, _ = compile_file(Path(__file__).parents[1] / "specs" / "positive" / f"{name}.json", must_fit=False)
    assert plan is not None
    text = " \\\n".join(megatron.as_list(megatron.arguments(plan)))
    done = checked(f"python pretrain_gpt.py {text}\n", tmp_path / "train.sh")
    assert done.kind == MEGATRON
    assert [(one.code, one.message) for one in done.diagnostics] == []


def test_the_list_of_words_that_a_plan_writes_is_read(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "qwen3-8b-16-gpus" / "megatron_args.json"
    text = golden.read_text(encoding="utf-8")
    assert [(one.code, one.message) for one in checked(text, tmp_path / "right.json").diagnostics] == []
    wrong = checked(text.replace("--context-parallel-size", "--context-parallel-sizes"), tmp_path / "wrong.json")
    place = wrong.diagnostics[0].position
    assert [(one.code, one.severity.value) for one in wrong.diagnostics] == [("K001", "error")]
    assert place is not None
    assert text.splitlines()[place.line - 1].strip().startswith('"--context-parallel-size')


LAYOUT = "--tensor-model-parallel-size 2 --num-layers 32 --hidden-size 4096 --num-attention-heads 32"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--num-layer 32", "K001", "did you mean --num-layers?"),
        ("--normalization RMSnorm", "K004", "did you mean RMSNorm?"),
        ("--lr 0.00015x", "K003", "--lr takes a number, not '0.00015x'"),
        ("--ffn-hidden-size 1e3", "K003", "--ffn-hidden-size takes a whole number, not '1e3'"),
        ("--seq-length", "K007", "--seq-length has no value"),
        ("--bf16 1", "K007", "--bf16 takes no value: '1' has no place"),
        ("--cp-comm-type", "K007", "--cp-comm-type has no value"),
        ("--seq-length 2048 4096", "K007", "--seq-length takes one value: '4096' has no place"),
        ("--num-layers 48", "J009", "--num-layers is given 2 times with other values; the last one counts"),
        ("--fp32-allreduce --muon-momentum 0.9", "K001", "no version of Megatron-LM has --fp32-allreduce"),
        ("--fp32-allreduce", "K001", "written for Megatron-LM v"),
        ("--checkpoint-activations", "F127", "use --recompute-activations"),
    ],
)
def test_what_the_parser_does_not_take_is_named(words: str, code: str, said: str, tmp_path: Path) -> None:
    (found,) = checked(f"torchrun pretrain_gpt.py {LAYOUT} {words}\n", tmp_path / "train.sh").diagnostics
    assert found.code == code
    assert said in f"{found.message} {found.help}"


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        ("--micro-batch-size 0", "error"),
        ("--num-layers -3", "error"),
        ("--hidden-size -3", "error"),
        ("--save-interval 0", "warning"),
        ("--min-lr -0.1", "error"),
        ("--attention-dropout 1.5", "error"),
        ("--adam-beta2 9.5", "error"),
        ("--kv-channels 0", "warning"),
        ("--moe-router-topk 0", "warning"),
        ("--clip-grad -1", "warning"),
        ("--rotary-percent 25", "warning"),
    ],
)
def test_numbers_out_of_range_are_named(words: str, severity: str, tmp_path: Path) -> None:
    layout = LAYOUT if words.split()[0] not in LAYOUT else "--tensor-model-parallel-size 2 --num-attention-heads 32"
    for program, how in (("pretrain_gpt.py", severity), ("train.py", "warning")):
        found = checked(f"torchrun {program} {layout} {words}\n", tmp_path / "train.sh").diagnostics
        (told,) = [one for one in found if one.code == "K005"]
        assert told.severity.value == how
        assert words.split()[1] in told.message


def test_recompute_activations_takes_the_place_of_the_granularity(tmp_path: Path) -> None:
    for more, expected in (("", {"F123"}), ("--recompute-activations", set())):
        text = f"torchrun pretrain_gpt.py {LAYOUT} --recompute-granularity full {more}\n"
        assert codes(checked(text, tmp_path / "train.sh")) == expected


def test_torch_refuses_what_the_ranges_say_that_it_refuses() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.zeros(1))]
    for dropout in (-0.1, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            torch.nn.Dropout(dropout)
    torch.nn.Dropout(0.0), torch.nn.Dropout(1.0)
    for wrong in ({"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="Invalid"):
            torch.optim.AdamW(weights, **wrong)
    torch.optim.AdamW(weights, betas=(0.0, 0.99), eps=0.0, weight_decay=0.0)


@pytest.mark.parametrize(
    ("program", "words", "severities"),
    [
        ("pretrain_gpt.py", "--num-layer 32", {"error"}),
        ("pretrain_gpt.py", "--num-layer 32 --rollout-batch-size 4", {"warning"}),
        ("slime/train.py", "--num-layer 32", {"warning"}),
        ("slime/train.py", "--normalization RMSnorm --lr-warmup-iters 0.04", {"warning"}),
        ("pretrain_gpt.py", "--normalization RMSnorm", {"error"}),
        ("$PROGRAM", "--num-layer 32", {"warning"}),
        ("pretrain_gpt.py", "--tokenizer-type QwenTokenizer", {"warning"}),
    ],
)
def test_what_a_fork_may_take_is_no_error(program: str, words: str, severities: set[str], tmp_path: Path) -> None:
    done = checked(f"torchrun {program} {LAYOUT} {words}\n", tmp_path / "train.sh")
    assert {one.severity.value for one in done.diagnostics if one.code in ("K001", "K003", "K004")} == severities


def test_a_key_written_twice_is_a_warning_as_an_option_given_twice_is(tmp_path: Path) -> None:
    text = (
        "MODEL_ARGS:\n  --num-layers: 24\n  --tensor-model-parallel-size: 2\n  --hidden-size: 64\n  --num-layers: 48\n"
    )
    found = checked(text, tmp_path / "model_config.yaml")
    assert [(one.code, one.severity.value) for one in found.diagnostics if one.code == "J009"] == [("J009", "warning")]
    assert found.document is not None
    assert not any(one.is_error for one in found.diagnostics)


def test_options_that_the_program_adds_are_known(tmp_path: Path) -> None:
    (tmp_path / "arguments.py").write_text('parser.add_argument(\n    "--num-layer", type=int)\n')
    (tmp_path / "train.py").write_text("import arguments\n")
    (tmp_path / "scripts").mkdir()
    text = f"torchrun $ROOT/train.py {LAYOUT} --num-layer 32 --seq-lenght 4\n".replace("$ROOT", "${ROOT}")
    (found,) = checked(text, tmp_path / "scripts" / "train.sh").diagnostics
    assert (found.code, found.severity.value) == ("K001", "warning")
    assert "--seq-lenght" in found.message


def test_a_fork_with_its_own_parser_may_take_other_values(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "arguments.py").write_text("group.add_argument('--tokenizer-file', type=str)\n")
    (tmp_path / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
    words = f"{LAYOUT} --tokenizer-file t.json --tokenizer-type TokenizerFromFile"
    (found,) = checked(f"torchrun pretrain_gpt.py {words}\n", tmp_path / "train.sh").diagnostics
    assert (found.code, found.severity.value) == ("K004", "warning")


OLD_PARSER = """
group.add_argument('--micro-batch-size', type=int)
group.add_argument('--num-layers', type=int)
group.add_argument('--hidden-size', type=int)
group.add_argument('--num-attention-heads', type=int)
group.add_argument('--tensor-model-parallel-size', type=int)
group.add_argument('--optimizer', default='adam',
                   choices=['adam', 'onebitlion'], help='(any)')
group.add_argument('--position-embedding-type', choices=['learned', 'rope'])
group.add_argument('--train-iters', type=int)
group.add_argument('--log-interval', '--log_interval', type=int)
parser = deepspeed.add_config_arguments(parser)
kw_args['layernorm_epsilon'] = args.norm_epsilon
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--optimizer onebitlion", None, ""),
        ("--optimizer sgd", "K004", "--optimizer is one of adam, onebitlion in the parser of this program, not 'sgd'"),
        ("--optimizer lion2", "K004", "not 'lion2'"),
        ("--position-embedding-type yarn", "K004", "is one of learned, rope in the parser"),
        ("--use-mcore-models", "K001", "no --use-mcore-models: Megatron-LM has it since core_v"),
        ("--num-query-groups 4 --swiglu", "K001", "no --num-query-groups"),
        ("--layernorm-epsilon 1e-5", "K001", "no --layernorm-epsilon: Megatron-LM had it until"),
        ("--rotary-percent 0.5 --norm-epsilon 1e-6", "K001", "no --rotary-percent"),
        ("--train_iters 10", "K001", "no --train_iters: it tells _ from -"),
        ("--log_interval 5", None, ""),
        ("--train-iters $EMPTY", "K007", "--train-iters has no value"),
        ("--deepspeed_config a.json", None, ""),
    ],
)
def test_the_parser_beside_the_program_decides_what_it_has_and_takes(
    words: str, code: str | None, said: str, tmp_path: Path
) -> None:
    """What Megatron-LM has now and an old fork lacks, and values of either."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "arguments.py").write_text(OLD_PARSER)
    (tmp_path / "megatron" / "config.py").write_text("class Config:\n    layernorm_epsilon: float = 1e-5\n")
    other = tmp_path.parent / "megatron-other"  # another clone, side by side with this one
    other.mkdir(exist_ok=True)
    (other / "arguments.py").write_text("group.add_argument('--rotary-percent', type=float)\n")
    for is_there, severity in ((False, "warning"), (True, "error")):
        if is_there:
            (tmp_path / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
        found = checked(f"EMPTY=\ntorchrun pretrain_gpt.py {LAYOUT} {words}\n", tmp_path / "train.sh").diagnostics
        told = [one for one in found if one.code in ("K001", "K003", "K004", "K007")]
        how = severity if code != "K007" else "error"
        assert {(one.code, one.severity.value) for one in told} == ({(code, how)} if code else set())
        assert not code or said in told[0].message


def test_an_option_of_megatrons_own_program_has_hyphens(tmp_path: Path) -> None:
    text = f"torchrun pretrain_gpt.py {LAYOUT} --train_iters 10\n"
    (found,) = [one for one in checked(text, tmp_path / "train.sh").diagnostics if one.code == "K001"]
    assert (found.severity.value, found.help) == ("error", "write --train-iters")
    assert "K001" not in codes(
        checked(text.replace("pretrain_gpt", "train"), tmp_path / "train.sh")
    )  # whose parser nobody here knows


def test_a_whole_parser_beside_the_program_says_what_it_has_no_more(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "arguments.py").write_text(OLD_PARSER)
    text = f"torchrun tasks.py {LAYOUT} --DDP-impl local\n"
    for is_there, severities in ((False, ["warning"]), (True, ["error"])):
        if is_there:
            (tmp_path / "tasks.py").write_text("from megatron.training import pretrain\n")
        (found,) = checked(text, tmp_path / "train.sh").diagnostics
        assert [found.severity.value] == severities
        assert found.message == "the parser of this program has no --DDP-impl: Megatron-LM had it until 23.06"
    (tmp_path / "tasks.py").write_text("parser.add_argument('--DDP-impl')\n")
    assert {one.severity.value for one in checked(text, tmp_path / "train.sh").diagnostics} == {"info"}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def test_the_parser_of_another_clone_is_not_that_of_a_program(tmp_path: Path) -> None:
    """The script and its program stand in two folders of a fork whose package has a name of its own."""
    files = {
        "other/megatron/arguments.py": OLD_PARSER,
        "fork/speed/__init__.py": "",
        "fork/speed/arguments.py": "group.add_argument('--not-use-fast', action='store_true')\n",
        "fork/tasks/main.py": "from speed import arguments\n",
        "fork/examples/eval.sh": f"python ./tasks/main.py {LAYOUT} --not-use-fast --optimizer lion\n",
    }
    write_files(tmp_path, files)
    found = check_any(tmp_path / "fork" / "examples" / "eval.sh").diagnostics
    assert {(one.code, one.severity.value) for one in found} <= {("K004", "warning")}
    script = tmp_path / "fork" / "tasks" / "main.sh"
    script.write_text("SAVE=\npython main.py --num-layers 4 --hidden-size 64 --train-iters 3 --save $SAVE\n")
    (tmp_path / "fork" / "tasks" / "arguments.py").write_text("group.add_argument('--save')\n")
    said = {(one.code, one.severity.value) for one in check_any(script).diagnostics}
    assert said == {("K007", "warning")}


def test_an_option_that_any_file_of_the_fork_adds_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Its parser stands beside the program, which the script finds by a path that begins with a command."""
    package = tmp_path / "megatron"
    folder = tmp_path / "examples" / "data" / "gpt" / "pretrain" / "old" / "one"
    for one in (package / "inference" / "gpt", folder):
        one.mkdir(parents=True)
    words = "--num-layers --hidden-size --num-attention-heads --micro-batch-size --train-iters pp"
    (package / "arguments.py").write_text(f"add('{words}')\ngroup.add_argument('--override-lr-scheduler')\n")
    (package / "inference" / "gpt" / "more.py").write_text("add('--ammo-load')\n")
    (tmp_path / "pretrain_gpt.py").write_text("")
    script = folder / "train.sh"
    call = "python `pwd`/../../../../../../pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4"
    for more, codes_ in (
        ("--override-lr-scheduler", {("K001", "info")}),
        ("--ammo-load", {("K001", "warning")}),
        ("--zzz-load", {("K001", "error")}),
        ("--train-iters 3 -pp 2", {("K001", "error")}),
        ("--train-iters 3 --zero-stage 1.0", {("K001", "error")}),  # of Megatron-DeepSpeed, as the first one is
    ):
        done = checked(f"{call} --micro-batch-size 1 {more}\n", script)
        assert {(one.code, one.severity.value) for one in done.diagnostics if one.code == "K001"} == codes_, more


def test_packages_that_a_program_of_the_fork_imports_may_add_options(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "megatron/arguments.py": OLD_PARSER,
            "own_args/noise.py": "group.add_argument('--noise-steps')\n",
            "pretrain_noise.py": "from own_args.noise import extra\n",
            "tools/verify/it.py": "import pretrain_noise\n",
            "examples/verify.sh": f"python tools/verify/it.py {LAYOUT} --noise-steps 4\n",
        },
    )
    assert not any(one.is_error for one in check_any(tmp_path / "examples" / "verify.sh").diagnostics)


def test_what_only_one_way_through_a_script_does_is_a_warning(tmp_path: Path) -> None:
    text = f"if [ $1 = fp16 ]; then HOW=--fp16; fi\ntorchrun pretrain_gpt.py {LAYOUT} $HOW --bf16\n"
    (found,) = [one for one in checked(text, tmp_path / "train.sh").diagnostics if one.code == "F121"]
    assert (found.severity.value, found.message.endswith("where [ $1 = fp16 ]")) == ("warning", True)
    (found,) = [one for one in checked(f"HOW=--fp16\n{text}", tmp_path / "train.sh").diagnostics if one.code == "F121"]
    assert found.severity.value == "error"


def test_what_a_script_sources_from_its_own_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "moe.sh").write_text("MODEL_ARGS=(--num-experts 8 --disable-bias-linear)\n")
    text = (
        'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "${DIR}/models/moe.sh"\n'
        f"torchrun train.py {LAYOUT} --expert-model-parallel-size %s --sequence-parallel ${{MODEL_ARGS[@]}}\n"
    )
    assert not checked(text % 4, tmp_path / "train.sh").diagnostics
    assert codes(checked(text % 3, tmp_path / "train.sh")) == {"F109"}
    assert not checked((text % 3).replace("moe.sh", "lost.sh"), tmp_path / "train.sh").diagnostics
    # All but one of its arguments may stand there.
    (tmp_path / "models" / "moe.sh").write_text(f"MODEL_ARGS=({LAYOUT})\n")
    text = "source ./models/moe.sh\ntorchrun train.py ${MODEL_ARGS[@]} --seq-length oops\n"
    assert codes(checked(text, tmp_path / "train.sh")) == {"K003"}
    assert checked("source ./lost.sh\ntorchrun train.py --seq-length oops\n", tmp_path / "train.sh").kind != MEGATRON


def test_arguments_behind_an_unknown_option_are_still_open(tmp_path: Path) -> None:
    words = f"{LAYOUT} --expert-model-parallel-size 8 --sequence-parallel --colocate ${{MODEL_ARGS[@]}}"
    assert codes(checked(f"torchrun train.py {words}\n", tmp_path / "train.sh")) == {"K001"}


def test_many_unknown_options_of_another_program_are_named_together(tmp_path: Path) -> None:
    words = f"{LAYOUT} --rollout-batch-size 4 --ref-load a --colocate"
    (found,) = checked(f"torchrun train.py {words}\n", tmp_path / "train.sh").diagnostics
    assert (found.code, found.severity.value) == ("K001", "warning")
    assert found.message == "Megatron-LM has none of --rollout-batch-size, --ref-load, --colocate"


def test_sizes_that_only_fill_a_place_are_not_judged(tmp_path: Path) -> None:
    for size in ("1", "-1"):
        sizes = (
            f"--num-layers {size} --hidden-size {size} --num-attention-heads {size} --max-position-embeddings {size}"
        )
        words = f"{sizes} --group-query-attention --num-query-groups 8 --seq-length {size} --micro-batch-size 1"
        assert not checked(f"torchrun convert.py {words}\n", tmp_path / "convert.sh").diagnostics
        assert checked(f"torchrun pretrain_gpt.py {words}\n", tmp_path / "train.sh").diagnostics


SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --seq-length 64"
SPLIT = f"{SMALL} --max-position-embeddings 64 --tensor-model-parallel-size 2 --disable-bias-linear"


@pytest.mark.parametrize(
    ("program", "expected"), [("train_rl.py", {"F109"}), ("examples/inference/gpt/gpt_dynamic_inference.py", set())]
)
def test_an_inference_needs_no_sequence_parallelism(program: str, expected: set[str], tmp_path: Path) -> None:
    words = f"{SPLIT} --num-experts 8"
    assert codes(checked(f"torchrun {program} {words}\n", tmp_path / "run.sh")) == expected
    options = {"--num-experts": 8, "--tensor-model-parallel-size": 2, "--num-layers": 4, "--disable-bias-linear": True}
    recipe = {"MODE": "pretraining" if expected else "inference", "MODEL_ARGS": options}
    assert codes(checked(yaml.safe_dump(recipe), tmp_path / "model_config.yaml")) == expected


def test_a_checkpoint_may_hold_the_number_of_experts(tmp_path: Path) -> None:
    text = f"torchrun train_rl.py {SPLIT} --expert-model-parallel-size 8 --sequence-parallel"
    assert codes(checked(f"{text}\n", tmp_path / "run.sh")) == {"F109"}
    assert not checked(f"{text} --use-checkpoint-args\n", tmp_path / "run.sh").diagnostics


def test_a_program_with_options_of_its_own_has_its_own_versions(tmp_path: Path) -> None:
    words = f"{LAYOUT} --DDP-impl local --position-embedding-type rope"
    (found,) = checked(f"torchrun tasks/main.py {words}\n", tmp_path / "run.sh").diagnostics
    assert "no version of" in found.message
    (found,) = checked(f"torchrun tasks/main.py {words} --rollout-batch-size 4\n", tmp_path / "run.sh").diagnostics
    assert "--rollout-batch-size" in found.message


def test_what_a_variable_decides_is_unknown_and_never_1(tmp_path: Path) -> None:
    for words in (
        "--pipeline-model-parallel-size $PP --decoder-first-pipeline-num-layers 5",
        "--num-experts 8 --expert-model-parallel-size $EP --sequence-parallel --disable-bias-linear",
        "--overlap-param-gather $MORE",
    ):
        done = checked(f"torchrun pretrain_gpt.py {LAYOUT} {words}\n", tmp_path / "train.sh")
        assert [(one.code, one.message) for one in done.diagnostics] == []


def test_branches_are_kept_apart(tmp_path: Path) -> None:
    script = """
        case $1 in
          small) SIZE="--num-layers 30 --hidden-size 4096"; PP=4 ;;
          large) SIZE="--num-layers 32 --hidden-size 4096"; PP=4 ;;
        esac
        torchrun pretrain_gpt.py --num-attention-heads ${HEADS:-32} $SIZE --pipeline-model-parallel-size $PP
    """
    (found,) = checked(script, tmp_path / "train.sh").diagnostics
    assert (found.code, found.position.line) == ("F104", 3)
    assert "30 / 4 is not whole" in found.message


ACCOUNTS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
_PP, _CP = "pipeline_model_parallel_size", "context_parallel_size"


def _ends(first: int, last: int) -> dict[str, int]:
    return {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_layers": 62, _PP: 2, **ACCOUNTS, "num_virtual_stages_per_pipeline_rank": 2}, set()),
        ({"num_layers": 36, _PP: 4, **_ends(6, 6), "num_virtual_stages_per_pipeline_rank": 6}, set()),
        ({_PP: 2, **_ends(15, 17)}, set()),
        ({_CP: 8, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 2"}, {"F108"}),
        ({_CP: 8, "cp_comm_type": "a2a", "group_query_attention": True, "num_query_groups": 8}, {"F107"}),
        ({"use_megatron_fsdp": True, "overlap_param_gather": True, "overlap_grad_reduce": True}, set()),
        ({"fp8_param_gather": True}, {"F122"}),
        ({"num_experts": 8, "sequence_parallel": True}, {"F109"}),
        ({"num_experts": 8, "sequence_parallel": True, "expert_tensor_parallel_size": 1}, set()),
        ({"group_query_attention": True, "num_query_groups": 6}, {"F103"}),
        ({"train_iters": 100, "lr_warmup_iters": 100}, {"F126"}),
    ],
)
def test_the_layout_is_counted_as_validate_args_counts_it(options: Any, expected: set[str], tmp_path: Path) -> None:
    base = {"tensor_model_parallel_size": 2, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    assert codes(checked(shell({**base, "seq_length": 4096, **options}), tmp_path / "train.sh")) == expected


def test_embedding_stages_of_megatron_deepspeed_are_known(tmp_path: Path) -> None:
    """BLOOM: 70 layers, the embedding and the head on 12 stages of a pipeline that DeepSpeed balances."""
    words = (
        "--pipeline-model-parallel-size 12 --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --deepspeed"
    )
    text = f"torchrun pretrain_gpt.py {words} --pp-partition-method 'type:transformer|embedding' --zero-stage 0\n"
    assert codes(checked(text, tmp_path / "train.sh")) == set()


@pytest.mark.parametrize("flag", ["--inference-repeat-n 2", "--prompt-file p.txt"])
def test_an_option_that_megatrons_own_scripts_add_is_no_misspelling(flag: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("pretrain_gpt.py", f"run.py {flag}")
    assert "K001" not in codes(checked(script, tmp_path / "run.sh"))


def test_a_deterministic_run_overlaps_no_tensor_parallel_communication(tmp_path: Path) -> None:
    """As validate_args of d98e8a64 has it: "--deterministic-mode requires: tp_comm_overlap=False (got True)"."""
    flags = "--deterministic-mode --tp-comm-overlap --sequence-parallel"
    found = checked(SCRIPT.replace("--fp16", flags), tmp_path / "run.sh").diagnostics
    assert [one.message for one in found if one.code == "F121"] == [
        "deterministic_mode and tp_comm_overlap exclude each other"
    ]


SECTION = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
TRAINER = {
    "actor-v1": {"num_attention_heads": 7, "lr": "x", "megatron": {**SECTION, "override": {"num_query_groups": 5}}},
    "critic": {"megatron": {**SECTION, "num_attention_heads": 9}},
    "rollout": {**SECTION, "num_attention_heads": 11, "gpu_memory_utilization": 0.5},
    "reference": {"megatron": {**SECTION, "num_attention_heads": 13, "enabled": False}},
    "cluster": {"num_nodes": 1, "gpus_per_node": 7},
}


def test_a_value_that_a_variable_decides_hides_no_other_mistake(tmp_path: Path) -> None:
    text = f"torchrun pretrain_gpt.py {LAYOUT} --lr-decay-iters 9 --lr-warmup-iters $STEPS --lr-warmup-fraction 2\n"
    found = [one.message for one in checked(text, tmp_path / "train.sh").diagnostics if one.code == "F126"]
    assert found == ["lr_warmup_fraction 2 ≥ 1"]


def test_sections_of_another_program_are_calls_of_their_own(tmp_path: Path) -> None:
    done = checked(yaml.safe_dump(TRAINER), tmp_path / "trainer.yaml")
    assert done.document is not None
    undecided = imported(done.document)["num_attention_heads"]
    assert undecided.names == ("the file has several sections of arguments",)
    (found,) = done.diagnostics
    assert (found.code, found.message.split(";")[0]) == (
        "F103",
        "num_attention_heads 9 / tensor_model_parallel_size 2 is not whole",
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"train": {"tensor_model_parallel_size": 2}, "num_layers": 5, "micro_batch_size": 1},
        {"rollout": TRAINER["rollout"]},
        {"reference": TRAINER["reference"]},
    ],
)
def test_marks_of_other_sections_make_no_arguments(tree: Any, tmp_path: Path) -> None:
    assert checked(yaml.safe_dump(tree), tmp_path / "trainer.yaml").kind == UNKNOWN


@pytest.mark.parametrize(
    ("layers", "layout", "world"),
    [("model", "system", "system"), ("model", "model", "train"), ("language_model", "model_parallel", "world")],
    ids=["FlagScale", "Megatron-Bridge", "yaml-cfg"],
)
def test_sections_that_one_program_reads_together_are_one_call(
    layers: str, layout: str, world: str, tmp_path: Path
) -> None:
    tree: dict[str, dict[str, Any]] = {layers: {}, layout: {}, world: {}}
    tree[layers] |= {"num_layers": 12, "hidden_size": 65, "num_attention_heads": 5}
    tree[layout] |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    tree[world] |= {"world_size": 8}
    found = checked(yaml.safe_dump(tree), tmp_path / "run.yaml").diagnostics
    assert {one.code for one in found if one.severity.value == "error"} == {"F101", "F103"}


EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --sequence-parallel --seq-length 1024"


@pytest.mark.parametrize(
    ("more", "severity"),
    [
        ("", "warning"),
        ("--moe-token-dispatcher-type alltoall", "error"),
        ("--moe-grouped-gemm", "error"),
        ("--moe-flex-dispatcher-backend hybridep", "error"),  # of a version that refuses biases
    ],
)
def test_biases_of_experts_are_an_error_where_no_version_runs_them(more: str, severity: str, tmp_path: Path) -> None:
    found = checked(f"python pretrain_gpt.py {LAYOUT} {EXPERTS} {more}\n", tmp_path / "run.sh").diagnostics
    assert [one.severity.value for one in found if one.code == "F109"] == [severity]

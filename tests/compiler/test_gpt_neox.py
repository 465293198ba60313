"""gpt-neox files: gpt-neox's own verdicts, recorded, and DeepSpeed's on what gpt-neox hands on to it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.gpt_neox import fields
from parcompile.backends.kinds import GPT_NEOX
from parcompile.cli.check import command as check_command
from parcompile.diagnostics import Diagnostic, Severity
from parcompile.pipeline import check_any, check_read
from parcompile.text import parse

ROOT = Path(__file__).resolve().parents[2]
CASES = json.loads((Path(__file__).parent / "gpt_neox_verdicts.json").read_text(encoding="utf-8"))["cases"]
REFUSED_LATER = {"heads that tp does not divide"}
"""What NeoXArgs takes and megatron/model/transformer.py does not: mpu.divide(num_attention_heads, world_size)."""


def found(text: str) -> tuple[Diagnostic, ...]:
    return check_read(parse(text, "config.yml"), Path(), kind=GPT_NEOX).diagnostics


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    pytest.importorskip("deepspeed", minversion="0.19.8")
    name = "deepspeed_judge"
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / "upstream" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    with module.Judge() as one:
        yield one


def test_an_error_is_what_gpt_neox_or_deepspeed_refuses(judge: Any) -> None:
    wrong = []
    for case in CASES:
        refused = case.get("refused") or case["name"] in REFUSED_LATER
        if not refused and not isinstance(case["deepspeed"].get("zero_optimization", {}).get("stage"), list):
            refused = judge.ask(case["deepspeed"], engine=False).refused
        # A key that is near to none is a warning: gpt-neox refuses it, and a fork may have it.
        ours = [one for one in found(case["text"]) if one.is_error or (refused and one.code == "K001")]
        if bool(ours) != bool(refused):
            wrong.append((case["name"], refused, ours))
    assert wrong == []


def test_a_pipeline_engine_refuses_zero_two(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("deepspeed.runtime.pipe.engine")
    monkeypatch.setattr(engine.DeepSpeedEngine, "__init__", lambda *_, **__: None)
    for stage, refused in ((1, False), (2, True), (3, True)):
        monkeypatch.setattr(engine.PipelineEngine, "zero_optimization_stage", lambda _, stage=stage: stage)
        module = engine.PipelineModule.__new__(engine.PipelineModule)
        monkeypatch.setattr(engine.PipelineEngine, "module", module, raising=False)
        with pytest.raises((AssertionError, AttributeError)) as stopped:
            engine.PipelineEngine()
        assert ("incompatible with pipeline parallelism" in str(stopped.value)) == refused
        text = f"pipe_parallel_size: 1\nzero_optimization:\n  stage: {stage}\n"
        assert any(one.code == "F202" for one in found(text)) == refused


def test_positions_are_those_of_the_yaml() -> None:
    text = "# a file\npipe-parallel-size: 1\ndeepspeed_extra_args:\n  comms_logger:\n    verbos: true\n"
    (one,) = (one for one in found(text) if one.code == "K001")
    assert one.path == ("deepspeed_extra_args", "comms_logger", "verbos")
    assert one.position is not None
    assert (one.position.line, one.position.column) == (5, 5)


def test_a_key_is_renamed_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "neox.yml"
    file.write_text("pipe-parallel-size: 1\nmodel-parallel-size: 1\nNum-Layers: 4  # few\n", encoding="utf-8")
    assert "K001" in [one.code for one in check_any(file).diagnostics]
    with pytest.raises(SystemExit, match="0"):
        check_command.main(["--fix", str(file)])
    assert file.read_text(encoding="utf-8").splitlines()[2] == "num_layers: 4  # few"


def test_defaults_are_not_handed_on() -> None:
    assert fields()["deepspeed"].handed_on
    codes = {
        value: [one.code for one in found(f"pipe_parallel_size: 0\ndeepspeed: {value}\n")]
        for value in ("true", "false")
    }
    assert codes == {"true": ["F201"], "false": ["F201", "K001"]}


def test_a_key_that_gpt_neox_reads_itself_is_not_said_to_be_ignored() -> None:
    assert fields()["fp32_allreduce"].handed_on
    assert [one.code for one in found("pipe_parallel_size: 0\nfp32_allreduce: true\n")] == ["F201"]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ('optimizer: {type: "Adamm", params: {}}', {"F205"}),
        ('optimizer: {type: "CPU_Adam", params: {}}', set()),
        ('attention_config: [[["global", "flashh"], 6]]', {"F205"}),
        ('attention_config: [[["global", "flash"], 6]]', set()),
        ('attention_config: ["mamba", "global"]', set()),
        ("warmup: 100", {"F206"}),
        ("num_layers: -3", {"F207"}),
        ("optimizer: {type: Adam}", {"K002"}),
        ("optimizer: {params: {lr: 0.1}}", {"K002"}),
        ("fp16: {loss_scale: 0}", {"K002"}),
        ("zero_optimization: {stage: 1, reduce_bucket_size: 5.0e+8}", {"K003"}),
        ("zero_optimization: {stage: 1, reduce_bucket_size: true}", {"K003"}),
        ("warmup: 0.01", set()),
        ("train_data_paths: [a, b]\nvalid_data_paths: [a]\ntest_data_paths: [a]\ntrain_data_weights: [1.0]", {"F209"}),
        ("train_data_paths: [a]\nvalid_data_paths: [a]\ntrain_data_weights: [1.0]", {"F209"}),
        ("train_data_paths: [a]\nvalid_data_paths: [a]\ntest_data_paths: [a]\ndata_path: a", {"F209"}),
        ("train_data_paths: [a]\nvalid_data_paths: [a]\ntest_data_paths: [a]\ntrain_data_weights: [1.0]", set()),
        ('num_layers: 4\nattention_config: [[["global", "local"], 4]]', {"F207"}),
        ('num_layers: 4\nattention_config: [[["global"], 2], [["local"], "all"]]', set()),
    ],
)
def test_names_and_warm_ups_that_gpt_neox_does_not_take(text: str, codes: set[str]) -> None:
    assert {one.code for one in found(f"pipe_parallel_size: 0\n{text}\n") if one.severity is not Severity.INFO} == codes


def test_a_fork_beside_the_file_says_which_keys_there_are(tmp_path: Path) -> None:
    text = "pipe_parallel_size: 0\nmodel_parallel_size: 1\nnorm: fancynorm\nga_dataset: x\nattention_config: [halo]\n"
    text += "gd_dataset: x\ncomet_experiment: 3\nnorm_place: pre\n"
    own = tmp_path / "configs" / "one.yml"
    own.parent.mkdir()
    own.write_text(text, encoding="utf-8")

    def said() -> set[tuple[str, str, bool]]:
        return {(one.code, str(one.path[0]), one.is_error) for one in check_any(own).diagnostics if one.code != "F201"}

    # Two keys that upstream has not may be a fork's: near or not, they are warnings.
    strange = {("K001", name, False) for name in ("ga_dataset", "gd_dataset", "norm_place")}
    assert said() == strange | {("K004", "norm", True), ("F205", "attention_config", True)}
    classes = tmp_path / "megatron" / "neox_arguments"
    classes.mkdir(parents=True)
    (classes / "deepspeed_args.py").write_text("class One:\n    zero_optimization: dict = None\n", encoding="utf-8")
    keys = """ATTENTION_TYPE_CHOICES = ["global", "halo"]
class Two:
    pipe_parallel_size: int = 0
    model_parallel_size: int = 0
    norm: Literal["fancynorm"] = "fancynorm"
    ga_dataset: Optional[str] = None
    attention_config: list = None
    comet_experiment: Any = None
    norm_place: Union[int, float] = 1
"""
    (classes / "neox_args.py").write_text(keys, encoding="utf-8")
    (classes / "arguments.py").write_text("", encoding="utf-8")
    assert said() == {("K001", "gd_dataset", True), ("K003", "norm_place", True)}


def test_a_fork_beside_the_file_says_what_it_validates(tmp_path: Path) -> None:
    """As versions of 2024 do; the newest divides no heads of mamba, and takes experts in a pipeline."""
    text = "pipe_parallel_size: 1\nmoe_num_experts: 4\nhidden_size: 64\nnum_attention_heads: 12\n"
    text += 'num_layers: 2\nattention_config: [[["mamba"], 2]]\n'
    own = tmp_path / "one.yml"
    own.write_text(text, encoding="utf-8")
    assert {one.code for one in check_any(own).diagnostics} == {"F201"}
    classes = tmp_path / "megatron" / "neox_arguments"
    classes.mkdir(parents=True)
    names = ("pipe_parallel_size", "moe_num_experts", "hidden_size", "num_attention_heads", "num_layers")
    fields_ = "".join(f"    {name}: int = 0\n" for name in names)
    (classes / "deepspeed_args.py").write_text("", encoding="utf-8")
    (classes / "neox_args.py").write_text(f"class One:\n{fields_}    attention_config: list = None\n", encoding="utf-8")
    checks = "if self.hidden_size % self.num_attention_heads != 0:\n# MoE not supported with pipeline parallelism\n"
    (classes / "arguments.py").write_text(checks, encoding="utf-8")
    assert {one.code for one in check_any(own).diagnostics} == {"F201", "F203", "F208"}


@pytest.mark.parametrize(("least", "codes"), [(">= 1", {"F202"}), ("> 1 and self.moe_num_experts == 1", set())])
def test_a_fork_says_from_how_many_stages_on_there_is_a_pipeline(least: str, codes: set[str], tmp_path: Path) -> None:
    classes = tmp_path / "megatron" / "neox_arguments"
    classes.mkdir(parents=True)
    (classes / "deepspeed_args.py").write_text("class One:\n    zero_optimization: dict = None\n")
    (classes / "neox_args.py").write_text("class Two:\n    pipe_parallel_size: int = 0\n")
    (classes / "arguments.py").write_text(
        f'self.update_value(\n  "is_pipe_parallel", self.pipe_parallel_size {least})\n'
    )
    own = tmp_path / "one.yml"
    own.write_text("pipe_parallel_size: 1\nzero_optimization: {stage: 2}\n")
    assert {one.code for one in check_any(own).diagnostics} - {"F201"} == codes


def test_fields_of_a_fork_are_those_of_the_classes_that_it_joins(tmp_path: Path) -> None:
    classes = tmp_path / "megatron" / "neox_arguments"
    classes.mkdir(parents=True)
    (classes / "deepspeed_args.py").write_text("class One:\n    pipe_parallel_size: int = 0\n")
    fields_ = "class Two:\n    ports: Union[int, List[int]] = 1\nclass Teacher:\n    distil: bool = False\n"
    (classes / "neox_args.py").write_text(fields_)
    (classes / "arguments.py").write_text("BASE_CLASSES = [\n    One,\n    Two,\n]\n")
    own = tmp_path / "one.yml"
    own.write_text("pipe_parallel_size: 1\nports: [1, 2]\ndistil: true\n")
    assert {(one.code, one.path) for one in check_any(own).diagnostics if one.is_error} == {
        ("K003", ("ports",)),
        ("K001", ("distil",)),
    }


def test_what_a_fork_sets_and_refuses_itself_is_told(tmp_path: Path) -> None:
    """`save_iters` is set before types are looked at, `ntk` has a default of another type, PyYAML takes the last."""
    own = tmp_path / "one.yml"
    own.write_text("pipe_parallel_size: 1\nmodel_parallel_size: 1\nsave_iters: 1000\nmodel_parallel_size: 2\n")
    classes = tmp_path / "megatron" / "neox_arguments"
    classes.mkdir(parents=True)
    (classes / "deepspeed_args.py").write_text("class One:\n    wall_clock_breakdown: bool = False\n")
    keys = (
        "class Two:\n    pipe_parallel_size: int = 0\n    model_parallel_size: int = 1\n    save_iters: list = None\n"
    )
    (classes / "neox_args.py").write_text(f"{keys}    ntk: int = False\n    lr: float = 1\n")
    derived = "def calculate_derived(self):\n    self.update_values({'save_iters': [self.checkpoint_factor]})\n"
    (classes / "arguments.py").write_text(derived)

    def said() -> list[tuple[str, str]]:
        return [(one.code, one.severity.value) for one in check_any(own).diagnostics if one.code != "F201"]

    assert sorted(said()) == [("J009", "warning"), ("K003", "warning"), ("K003", "warning")]
    (classes / "arguments.py").write_text(derived.replace("checkpoint_factor", "save_iters"))
    (classes / "neox_args.py").write_text(f"{keys}    ntk: int = 0\n")
    assert sorted(said()) == [("J009", "warning"), ("K003", "error")]

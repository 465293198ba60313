"""Contract: an accelerator is a preset, a measured file, or a description of which the memory is enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parcompile import schema
from parcompile.backends.artefacts import gpu_resource, variables
from parcompile.backends.registry import render
from parcompile.backends.writing import write
from parcompile.cli.compile import command as compile_command
from parcompile.cli.estimate import command as estimate_command
from parcompile.cli.reference import accelerators_command
from parcompile.cli.search import command as search_command
from parcompile.cost.coefficients import default_memory
from parcompile.cost.footprint import footprint, usable_bytes
from parcompile.machines import accelerators, preset_from_tree, preset_tree
from parcompile.model.presets import presets
from parcompile.pipeline import check_file
from parcompile.plan import compile_plan, plan_from_tree, plan_tree
from parcompile.spec.values import workload_of
from parcompile.units import GIB

SPEC = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"gpus_per_node": 8},
    "parallelism": {"tp": 8},
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "gradient_accumulation_dtype": "bf16",
    },
}


def checked(folder: Path, accelerator: object) -> Any:
    cluster = {**SPEC["cluster"], "accelerator": accelerator}
    file = folder / "spec.json"
    file.write_text(json.dumps({**SPEC, "cluster": cluster}), encoding="utf-8")
    return check_file(str(file))


def compiled(folder: Path, accelerator: object) -> Any:
    found = checked(folder, accelerator)
    return compile_plan(found.resolution.spec(), found.resolution.tree, [])


def test_schemas_allow_the_presets_that_there_are() -> None:
    spec, file = schema.load("spec"), schema.load("accelerator")
    place = spec["properties"]["cluster"]["properties"]["accelerator"]
    for allowed in (
        place["else"]["else"]["enum"],
        spec["$defs"]["described_accelerator"]["properties"]["like"]["enum"],
        file["properties"]["like"]["enum"],
        schema.load("plan")["$defs"]["accelerator"]["properties"]["like"]["enum"],
    ):
        assert sorted(allowed) == sorted(accelerators())


@pytest.mark.parametrize(
    ("given", "like", "assumed"),
    [
        ({"memory_gib": 24}, "rtx-3090", {"bf16_flops_per_s", "memory_bytes_per_s", "node_link", "network_link"}),
        ({"memory_gib": 24, "bf16_tflops": 165}, "rtx-4090", {"memory_bytes_per_s", "node_link", "network_link"}),
        ({"memory_gib": 80, "bf16_tflops": 990}, "h100-sxm", {"memory_bytes_per_s", "node_link", "network_link"}),
        ({"memory_gib": 192, "like": "b200"}, "b200", {"bf16_flops_per_s", "memory_bytes_per_s"}),
    ],
)
def test_what_a_description_leaves_out_is_that_of_the_nearest_preset(
    given: dict[str, Any], like: str, assumed: set[str]
) -> None:
    machine = preset_from_tree(given)
    assert machine.like == like
    assert machine.memory_bytes == given["memory_gib"] * GIB
    assert assumed <= set(machine.assumed)
    assert machine.measured is None
    known = accelerators()[like]
    assert machine.node_link == known.node_link
    assert machine.flops_per_s == (given["bf16_tflops"] * 1e12 if "bf16_tflops" in given else known.flops_per_s)


@pytest.mark.parametrize("given", [{"memory_gib": 24}, {"memory_mib": None, "like": "cpu"}])
def test_a_description_survives_being_written(given: dict[str, Any]) -> None:
    tree = preset_tree(preset_from_tree(given))
    assert preset_tree(preset_from_tree(tree)) == tree


def test_a_plan_keeps_what_its_spec_describes(tmp_path: Path) -> None:
    plan = compiled(tmp_path, {"memory_gib": 24, "bf16_tflops": 165})
    again = plan_from_tree(json.loads(json.dumps(plan_tree(plan))))
    machine = again.spec.cluster.preset
    assert machine is not None
    assert (machine.memory_bytes, machine.flops_per_s) == (24 * GIB, 165e12)
    assert again.spec.cluster.accelerator == "rtx-4090"
    assert footprint(workload_of(again.spec)).limit_bytes == usable_bytes(24 * GIB, default_memory())


@pytest.mark.parametrize("accelerator", [{"memory_gib": 30, "bf16_tflops": 400}, "lab.json"], ids=["spec", "file"])
def test_a_plan_is_estimated_for_its_own_machine(accelerator: object, tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps({"memory_gib": 30, "bf16_tflops": 400}), encoding="utf-8")
    checked(tmp_path, accelerator)
    spec, plan = str(tmp_path / "spec.json"), str(tmp_path / "plan")
    assert CliRunner().invoke(compile_command, [spec, "-o", plan, "-q"]).exit_code == 0
    of_spec, of_plan = (CliRunner().invoke(estimate_command, [one, "--format", "json"]) for one in (spec, plan))
    assert of_spec.output == of_plan.output
    assert json.loads(of_plan.output)["memory"]["usable_bytes"] < 30 * GIB


def test_other_layouts_of_a_plan_are_those_of_its_own_machine_and_model(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps({"memory_gib": 30}), encoding="utf-8")
    plan = str(tmp_path / "plan")
    write(render(compiled(tmp_path, "lab.json"), ()), Path(plan))
    for command_, *words in ((search_command,), (estimate_command, "--sweep", "tp=4,8")):
        refused = CliRunner().invoke(command_, [plan, *words])
        assert refused.exit_code == 1
        assert "the figures of the machine in lab.json" in refused.output
    config = {**presets()["gemma-2-9b"].config}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "spec.json").write_text(
        json.dumps(
            {
                **SPEC,
                "model": {"hf_config": "config.json"},
                "cluster": {"gpus_per_node": 2, "accelerator": "h200"},
                "parallelism": {"tp": 2},
            }
        ),
        encoding="utf-8",
    )
    found = check_file(str(tmp_path / "spec.json"))
    write(render(compile_plan(found.resolution.spec(), found.resolution.tree, []), ()), tmp_path / "other")
    searched = CliRunner().invoke(search_command, [str(tmp_path / "other")])
    assert searched.exit_code == 0  # the plan holds the whole configuration, also what a spec does not write inline


def test_a_description_and_the_same_file_are_one_machine(tmp_path: Path) -> None:
    given = {"memory_gib": 24, "bf16_tflops": 165}
    (tmp_path / "lab.json").write_text(json.dumps(given), encoding="utf-8")
    written, named = (compiled(tmp_path, one).spec.cluster.preset for one in (given, "lab.json"))
    assert named.name == "lab"
    assert preset_tree(written) | {"name": "lab"} == preset_tree(named)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_gib": "x"}, ["K003"]),
        ({"memory": 24}, ["K001"]),
        ({}, ["K002"]),
        ({"memory_gib": 24, "like": "h1000"}, ["K004"]),
        ({"memory_gib": 1e-175}, ["K005"]),
        ({"memory_gib": 24, "bf16_tflops": 5e-324}, ["K005"]),
        ("rtx4090", ["K004"]),
        ("lab.json", ["H002"]),
    ],
)
def test_a_wrong_description_is_one_error(given: object, said: list[str], tmp_path: Path) -> None:
    assert [one.code for one in checked(tmp_path, given).diagnostics if one.is_error] == said


def test_a_machine_that_holds_less_than_the_framework_is_estimated(tmp_path: Path) -> None:
    checked(tmp_path, {"memory_gib": 0.003, "bf16_tflops": 1e-6})
    done = CliRunner().invoke(estimate_command, [str(tmp_path / "spec.json")])
    assert done.exit_code == 0
    assert "does not fit" in done.output.lower()


@pytest.mark.parametrize(
    "tree",
    [
        {"bf16_tflops": 3},
        {"memory_gib": 24, "memory_mib": 24576},
        {"memory_gib": 24, "bf16_tflops": 3, "bf16_flops_per_s": 3e12},
        {"memory_gib": 24, "layer_seconds": 0.1},
        {"memory_gib": 24, "memory_bytes_per_s": 5e-324},
    ],
)
def test_a_file_says_each_figure_once_and_measures_all_or_none(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(tree), encoding="utf-8")
    (error,) = (one for one in checked(tmp_path, "lab.json").diagnostics if one.is_error)
    assert error.code == "H002"


def test_assumed_figures_are_named_and_given_ones_are_not(tmp_path: Path) -> None:
    (remark,) = (one for one in checked(tmp_path, {"memory_gib": 24}).diagnostics if one.code == "H003")
    assert "bf16_flops_per_s" in remark.message
    assert "rtx-3090" in remark.message
    assert not [one for one in checked(tmp_path, "rtx-4090").diagnostics if one.code == "H003"]


@pytest.mark.parametrize("gib", [6, 24, 80, 192])
def test_what_a_device_can_use_is_most_of_it_and_never_all(gib: int) -> None:
    share = usable_bytes(gib * GIB, default_memory()) / (gib * GIB)
    assert 0.8 < share < 0.98


def test_launch_settings_follow_the_device(tmp_path: Path) -> None:
    names = {one: {v.name for v in variables(compiled(tmp_path, one))} for one in ("rtx-4090", "b200", "mi250x")}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in names["rtx-4090"]
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in names[one] for one in ("b200", "mi250x"))
    assert gpu_resource(compiled(tmp_path, "mi250x")) == "amd.com/gpu"
    assert gpu_resource(compiled(tmp_path, "gb200")) == "nvidia.com/gpu"
    assert gpu_resource(compiled(tmp_path, "cpu")) is None


def test_presets_are_listed_with_their_figures() -> None:
    listed = CliRunner().invoke(accelerators_command, []).output.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(accelerators())
    one = json.loads(CliRunner().invoke(accelerators_command, ["h20", "--format", "json"]).output)
    assert one["flops_per_s"] == 148e12
    assert "H20" in one["sources"]["bf16_flops_per_s"]
    assert "H20" in CliRunner().invoke(accelerators_command, ["h20"]).output
    assert CliRunner().invoke(accelerators_command, ["h21"]).exit_code == 2

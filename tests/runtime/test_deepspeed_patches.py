"""What the runtime changes in DeepSpeed, and what it reads there, is in one room, and is there in DeepSpeed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from ranks import run_ranks
from training_runs import make_plan, train_with_engine

from parcompile.plan import Plan
from parcompile.runtime import deepspeed_patches
from parcompile.runtime.deepspeed_patches.norm import norm_at_once
from parcompile.runtime.engine import initialization
from parcompile.runtime.errors import RunError

RUNTIME = Path(__file__).parents[2] / "runtime"
MODULES = {file.relative_to(RUNTIME).with_suffix("").as_posix(): file for file in RUNTIME.rglob("*.py")}
MODULES.pop("prove/ranks/engines/deepspeed_engine")  # it drives DeepSpeed alone, in whatever version there is

PUBLIC = {
    "deepspeed",
    "deepspeed.accelerator",
    "deepspeed.utils",  # its logger
}
NAMED_BY_LISTS = {
    "deepspeed_patches/cpu_adam",
    "deepspeed_patches/engine",
    "deepspeed_patches/norm",
    "deepspeed_patches/optimizer_state",
    "checkpoint/reading",
    "checkpoint/deepspeed_engine",
    "checkpoint/manifest",
    "checkpoint/writing",
    "engine/unsharded",
    "preflight/stand_in",
}
PRIVATE_NAMES = {
    "build_shm_op": "comm/torch.py",
    "cdb": "comm/comm.py",
    "_WORLD_GROUP": "utils/groups.py",
    "get_grad_norm_direct": "runtime/zero/stage_1_and_2.py",
    "_zero_padding": "runtime/zero/stage_1_and_2.py",
    "bit16_groups": "runtime/zero/stage_1_and_2.py",
    "bit16_groups_flat": "runtime/zero/stage_1_and_2.py",
    "round_robin_bit16_meta": "runtime/zero/stage_1_and_2.py",
    "all_grad_tensors": "runtime/zero/stage_1_and_2.py",
    "averaged_gradients": "runtime/zero/stage_1_and_2.py",
    "ipg_buckets": "runtime/zero/stage_1_and_2.py",
    "grad_accum": "runtime/zero/stage_1_and_2.py",
    "grad_position": "runtime/zero/stage_1_and_2.py",
    "norm_for_param_grads": "runtime/zero/stage3.py",
    "async_accumulate_grad_in_cpu_via_gpu": "runtime/zero/stage_1_and_2.py",
    "complete_grad_norm_calculation_for_cpu_offload": "runtime/zero/stage3.py",
    "temp_grad_buffer_for_cpu_offload": "runtime/zero/stage_1_and_2.py",
    "temp_grad_buffer_for_gpu_offload": "runtime/zero/stage_1_and_2.py",
    "grad_partitions_flat_buffer": "runtime/zero/stage3.py",
    "_wait_for_offload_copies": "runtime/zero/stage_1_and_2.py",
    "_record_offload_copy": "runtime/zero/stage_1_and_2.py",
    "cpu_offload": "runtime/zero/stage_1_and_2.py",
    "_hp_mapping": "utils/mixed_precision_linkage.py",
    "fp16_groups": "runtime/zero/stage3.py",
    "fp32_partitioned_groups_flat": "runtime/zero/stage3.py",
    "ds_tensor": "runtime/zero/partition_parameters.py",
}
"""With the file of DeepSpeed that defines each."""


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] == "deepspeed"}


def names(file: Path) -> set[str]:
    """Attributes and strings of a module."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_only_the_modules_of_the_lists_import_what_deepspeed_does_not_document() -> None:
    found = {name for name, file in MODULES.items() if imported(file) - PUBLIC}
    assert found == NAMED_BY_LISTS


def test_private_names_of_deepspeed_are_read_in_one_room() -> None:
    found = {name: names(file) & PRIVATE_NAMES.keys() for name, file in MODULES.items()}
    assert set().union(*(found.pop(name) for name in list(found) if name.startswith("deepspeed_patches/"))) == set(
        PRIVATE_NAMES
    )
    assert {name: used for name, used in found.items() if used} == {}


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_deepspeed_still_has_what_is_read(name: str) -> None:
    defining = Path(deepspeed.__file__).parent / PRIVATE_NAMES[name]
    assert re.search(rf"\b{name}\b", defining.read_text(encoding="utf-8"))
    assert re.search(rf"\b{name}\b", deepspeed_patches.__doc__ or "")


def asked(rank: int, plan: Plan) -> bool:
    train_with_engine(rank, plan, steps=1)
    return "__compatible_ops__" in vars(deepspeed.ops)


@pytest.mark.ranks
def test_a_rank_asks_no_op_whether_it_could_be_compiled() -> None:
    assert run_ranks(1, asked, make_plan(1, {})) == [False]


def test_every_name_is_looked_for_before_an_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deepspeed_patches.missing() == []
    assert set(PRIVATE_NAMES) - {"_hp_mapping"} <= {
        name for names in deepspeed_patches.NAMES.values() for name in names
    }
    monkeypatch.setattr(deepspeed_patches, "NAMES", {"utils.groups": ("_GONE",), "moved.away": ("cdb",)})
    assert deepspeed_patches.missing() == ["utils.groups._GONE", "moved.away.cdb"]
    with pytest.raises(
        RunError, match=r"no utils\.groups\._GONE, moved\.away\.cdb, on .* \"deepspeed>=0\.19\.8,<0\.20\""
    ):
        initialization.prepare(None, None, None)  # type: ignore[arg-type]


def test_the_modules_that_the_lists_name_exist() -> None:
    named = re.findall(r"`([a-z_]+\.[a-z_]+)`", deepspeed_patches.__doc__ or "")
    rooms = {name.split("/")[0] for name in MODULES}
    places = [name.replace(".", "/") for name in named if name.partition(".")[0] in rooms]
    assert len(places) > 5
    assert [place for place in places if place not in MODULES] == []


def test_the_lists_were_read_off_the_version_that_is_installed() -> None:
    (version,) = re.findall(r"Read off DeepSpeed (\d+\.\d+\.\d+)", deepspeed_patches.__doc__ or "")
    assert deepspeed.__version__.partition("+")[0] == version


def test_the_norm_pairs_gradients_with_parameters_where_a_group_ends_with_padding() -> None:
    """DeepSpeed pairs them by place and marks not all of its padding: none may push the next group's along."""
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    marked = torch.zeros(1)
    marked._zero_padding = True  # type: ignore[attr-defined]
    given: list[Any] = []

    def norm(gradients: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        given.extend(zip(gradients, parameters, strict=True))
        return torch.ones(())

    optimizer = SimpleNamespace(
        params_in_partition=[weights[:1], weights[1:]],
        averaged_gradients={0: [torch.ones(3), torch.zeros(1)], 1: [marked, torch.full((2,), 2.0)]},
        get_grad_norm_direct=norm,
        scaled_global_norm=None,
    )
    norm_at_once(optimizer)
    optimizer.scaled_global_norm()
    assert [
        (gradient.tolist(), parameter is own) for (gradient, parameter), own in zip(given, weights, strict=True)
    ] == [
        ([1.0] * 3, True),
        ([2.0] * 2, True),
    ]

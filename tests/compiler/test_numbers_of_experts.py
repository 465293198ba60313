"""What is said of plans with experts: figures of their pages, their traffic, and what differs from plans without ep."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from layout_cases import compile_tree, spec_tree

from parcompile.backends.registry import render
from parcompile.backends.writing import write
from parcompile.cli import cli
from parcompile.layout.shards import ADAM_STATE_BYTES, MASTER_BYTES
from parcompile.pipeline import check_read
from parcompile.plan import Plan, plan_tree
from parcompile.plan.diff import ChangeKind, difference
from parcompile.rules import example_spec
from parcompile.show.markdown import as_markdown
from parcompile.show.pictures import Subject
from parcompile.show.pictures.splits import lines
from parcompile.text import parse
from parcompile.units import format_bytes

MOE = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
LAYOUTS = {
    "dp": {},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 4},
    "virtual stages": {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "tp, cp": {"tp": 2, "cp": 2},
    "ep": {"ep": 8},
    "ep, tp": {"tp": 2, "ep": 4},
    "ep over tp": {"tp": 2, "ep": 4, "expert_tp": 1},
    "ep, pp": {"pp": 2, "ep": 4},
    "ep, cp, pp": {"pp": 2, "cp": 2, "ep": 4},
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[tuple[str, str], Plan]:
    found = {}
    for model, (name, layout) in itertools.product(("dense", "moe"), LAYOUTS.items()):
        if model == "dense" and "ep" in layout:
            continue
        training = {"gradient_accumulation_dtype": "fp32", "gradient_accumulation_steps": 4}
        sections = {"parallelism": layout, "training": training, **({"model": MOE} if model == "moe" else {})}
        found[model, name] = compile_tree(spec_tree(2, 8, **sections), tmp_path_factory.mktemp("plan"))
    return found


def test_every_pair_of_plans_has_a_difference(plans) -> None:
    """An axis, experts or shards may stand in one of them alone."""
    for before, after in itertools.permutations(plans.values(), 2):
        found = difference(before, after)
        assert not found.same
        assert as_markdown(before, after, found)
        assert found.to_json()["changes"]
        sent = [one for one in found.of(ChangeKind.COST) if one.what == "sent in ep per rank and step"]
        here, there = (plan.spec.parallelism.ep for plan in (before, after))
        for change in sent:
            assert (change.before is None, change.after is None) == (here == 1, there == 1)
            assert "-" not in change.texts or 1 in (here, there)
        assert (here > 1) == (there > 1) or sent


@pytest.mark.parametrize("name", ["pp", "ep over tp", "ep, cp, pp"])
def test_commands_show_a_plan(plans, name: str, tmp_path) -> None:
    write(render(plans["moe", name], ("deepspeed",)), tmp_path)
    for command in ("view", "estimate", "groups"):
        result = CliRunner().invoke(cli, [command, str(tmp_path)])
        assert result.exit_code == 0, (command, result.output, result.exception)


def test_the_state_without_zero_is_that_of_the_ranks_own_parameters(plans) -> None:
    for plan in plans.values():
        said = next((line for line in lines(Subject.of(plan)) if "optimizer state" in line), None)
        if said is None:
            continue
        numels = [row["numel"] for row in plan_tree(plan)["stages"]]
        whole = {format_bytes(numel * (MASTER_BYTES + ADAM_STATE_BYTES)) for numel in numels}
        assert re.search(r"instead of (.*)\.$", said)[1] in whole


@pytest.mark.parametrize("dense_layers", [0, 1, 4, 12])
def test_what_experts_send_between_nodes_is_that_of_a_stage_that_has_them(dense_layers: int) -> None:
    """The first stage may have none: 12 of 16 layers are dense on four stages."""
    model = {**MOE, "num_hidden_layers": 16, "first_k_dense_replace": dense_layers}
    tree = example_spec({"model": model, "cluster": {"nodes": 4}, "parallelism": {"pp": 2, "tp": 2, "ep": 8}})
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
    said = [one.message for one in checked.diagnostics if one.code == "W013"]
    assert len(said) == 1, [one.message for one in checked.diagnostics]
    assert " 0 B" not in said[0]

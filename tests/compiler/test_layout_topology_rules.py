"""The rules about where groups lie, as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from layout_cases import MIXTRAL, SMALL_MODEL, spec_tree

from parcompile.diagnostics import Diagnostic, Severity
from parcompile.pipeline import check_file


def found(folder: Path, tree: dict[str, Any]) -> dict[str, Diagnostic]:
    file = folder / "spec.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    checked = check_file(file)
    return {one.code: one for one in checked.diagnostics if one.code in {"W010", "W011", "W013"}}


def test_an_order_that_takes_tp_off_its_node_is_warned_of_with_bytes_and_a_better_order(tmp_path) -> None:
    tree = spec_tree(2, 8, model={"preset": "llama-3-8b"}, parallelism={"tp": 8, "order": "dp-tp-cp-pp"})
    tree["training"] = {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1}
    warning = found(tmp_path, tree)["W010"]
    assert warning.severity is Severity.WARNING
    assert warning.message.startswith("2 of 2 tp groups span 2 nodes: with order dp-tp")
    assert "GiB" in warning.message
    assert warning.path == ("parallelism", "order")
    order = warning.fixes[0].edits[0].value
    assert isinstance(order, str)
    assert order.startswith("tp-")
    assert re.search(r"a step takes about ([\d.]+ \w+); with order \S+ ([\d.]+ \w+)$", warning.message)
    tree["parallelism"]["order"] = order
    assert found(tmp_path, tree) == {}


def test_a_ring_that_is_larger_than_the_node_is_a_remark(tmp_path) -> None:
    remark = found(tmp_path, spec_tree(4, 8, parallelism={"tp": 4, "cp": 4}))["W011"]
    assert remark.severity is Severity.INFO
    assert "8 of 8 cp groups lie on 2 nodes" in remark.message


def test_what_fits_a_node_is_not_mentioned(tmp_path) -> None:
    assert found(tmp_path, spec_tree(4, 8, parallelism={"tp": 4, "cp": 2})) == {}
    assert found(tmp_path, spec_tree(1, 8, parallelism={"tp": 4, "order": "dp-tp"})) == {}


def test_the_rules_stay_quiet_when_another_rule_speaks(tmp_path) -> None:
    assert found(tmp_path, spec_tree(2, 8, parallelism={"tp": 3, "order": "dp-tp"})) == {}
    model = {**SMALL_MODEL, "num_hidden_layers": 3}
    assert found(tmp_path, spec_tree(2, 8, model=model, parallelism={"tp": 8, "pp": 2, "order": "dp-pp-tp"})) == {}
    # The file of the machine is not there: a layout over nodes was timed on it.
    for parallelism in ({"cp": 16}, {"tp": 4, "ep": 4}):
        tree = spec_tree(2, 8, model=MIXTRAL, parallelism=parallelism, cluster={"accelerator": "none.json"})
        assert found(tmp_path, tree) == {}


@pytest.mark.parametrize(("tp", "better"), [(8, {"ep": 8, "expert_tp": 1}), (4, None)])
def test_experts_between_nodes_get_the_ep_that_a_search_chooses(
    tmp_path: Path, tp: int, better: dict[str, int] | None
) -> None:
    tree = spec_tree(4, 8, model={"preset": "mixtral-8x7b"}, parallelism={"tp": tp, "ep": 4})
    tree["cluster"]["accelerator"] = "h100-sxm"
    tree["training"] = {"sequence_length": 8192, "global_batch_size": 512, "micro_batch_size": 1}
    tree["training"]["gradient_accumulation_dtype"] = "bf16"
    said = found(tmp_path, tree)["W013"]
    if better is None:
        assert said.severity is Severity.INFO
        assert said.help == "nothing to do: no other ep makes this layout faster"
        return
    assert said.severity is Severity.WARNING
    assert {edit.path[1]: edit.value for edit in said.fixes[0].edits} == better
    assert "(−" in said.fixes[0].title

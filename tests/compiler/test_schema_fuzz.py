"""Mutants of a good spec: no exception, and each place lies in the file."""

import contextlib
import copy
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_schema_messages import GOOD

from parcompile import schema
from parcompile.text import parse

ODD = st.sampled_from(
    [None, True, "", "8", "auto", "bf16", 0, -1, 2.5, 1e300, [], [1], {}, {"a": 1}, [[]], "x" * 500, "é"]
)


def paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return [path, *(found for key, value in entries for found in paths(value, (*path, key)))]


PATHS = [path for path in paths(GOOD) if path]


@st.composite
def mutants(draw: st.DrawFn) -> Any:
    tree: Any = copy.deepcopy(GOOD)
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4)):
        node: Any = tree
        try:
            for step in path[:-1]:
                node = node[step]
            action = draw(st.sampled_from(["set", "delete", "rename"]))
            if action == "set":
                node[path[-1]] = copy.deepcopy(draw(ODD))
            elif action == "delete":
                del node[path[-1]]
            elif isinstance(node, dict):
                key = str(path[-1])
                at = draw(st.integers(0, len(key)))
                node[key[:at] + draw(st.sampled_from(["", "x", "_", "S"])) + key[at + 1 :]] = node.pop(path[-1])
        except (KeyError, IndexError, TypeError):
            continue
    return tree


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants(), st.sampled_from([None, 2]))
def test_any_mutant_is_valid_or_has_diagnostics_in_the_file(tree: Any, indent: int | None):
    text = json.dumps(tree, indent=indent, ensure_ascii=False)
    document = parse(text, "spec.json").document
    assert document is not None
    found = schema.validate(document, "spec").diagnostics
    lines = text.split("\n")
    for one in found:
        assert one.position is not None
        assert 1 <= one.position.line <= len(lines)
        assert 1 <= one.position.column <= len(lines[one.position.line - 1])
        assert one.message
        assert len(one.message) < 400
    assert len({(one.code, one.path) for one in found}) == len(found)


DS_EXAMPLE: Any = {
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": None},
    "data_types": {"keep_in_fp32_modules": ["x"]},
}
DS_PATHS = [path for path in paths(DS_EXAMPLE) if path]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(DS_PATHS), ODD), min_size=1, max_size=3))
def test_any_mutant_of_a_deepspeed_configuration_has_messages_and_no_exception(changes: Any):
    tree = copy.deepcopy(DS_EXAMPLE)
    for path, value in changes:
        node: Any = tree
        # An earlier change may have replaced what stood on the way.
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for step in path[:-1]:
                node = node[step]
            node[path[-1]] = copy.deepcopy(value)
    for one in schema.validate(tree, "ds_config").diagnostics:
        assert one.message
        assert "not valid under any" not in one.message

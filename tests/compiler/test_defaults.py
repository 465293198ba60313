"""Defaults stand in the spec's schema: resolution has them from there, and the documents are made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layout_cases import spec_tree

from parcompile import schema
from parcompile.layout.groups import AXES
from parcompile.pipeline import check_read
from parcompile.schema import NoDefaultError, default
from parcompile.spec import Origin
from parcompile.spec.resolve import Resolution
from parcompile.text import parse

MINIMAL = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"gpus_per_node": 8},
    "training": {
        "sequence_length": 4096,
        "lr_scheduler": {"type": "constant", "warmup_steps": 1},
        "router": {"bias_update_rate": 0.001},
    },
    "zero": {"offload_optimizer": {}, "offload_param": {}},
}


def defaults(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key outside of the model that has a default, sections left out."""
    for key, entry in node.get("properties", {}).items():
        if "default" in entry and "properties" not in entry:
            yield (*path, key), entry["default"]
        yield from defaults(entry, (*path, key))


def test_what_a_spec_leaves_out_has_the_default_of_its_schema() -> None:
    # Only with cp there is something to deal out.
    found = {**Resolution(MINIMAL).spec().provenance}
    found |= {
        **Resolution({**MINIMAL, "parallelism": {"cp": 2}}).spec().provenance,
        "parallelism.cp": found["parallelism.cp"],
    }
    stated = dict(defaults(schema.load("spec")))
    assert len(stated) > 20
    # "auto", which the world decides; and what plans name of specs alone that have it.
    derived = {("parallelism", "dp")}
    switches = "activation_offloading", "linear_cross_entropy", "gather_inputs_again", "tiled_mlp"
    derived |= {("training", name) for name in switches}
    for path, value in stated.items():
        if path in derived or path[0] in ("deepspeed", "backends"):  # copied as they stand
            continue
        assert (found[".".join(path)].value, found[".".join(path)].origin) == (value, Origin.DEFAULT), path


def test_no_module_repeats_a_default_when_it_reads_a_value() -> None:
    with pytest.raises(TypeError):
        Resolution(MINIMAL).get("cluster", "nodes", default=1)  # type: ignore[call-arg]


def test_the_default_order_is_that_of_the_mesh() -> None:
    assert default("spec", ("parallelism", "order")) == "-".join(AXES)


@pytest.mark.parametrize("path", [("cluster", "gpus_per_node"), ("cluster", "gpus"), ("model",), ("model", "x")])
def test_what_has_to_be_given_or_is_unknown_has_no_default(path) -> None:
    with pytest.raises(NoDefaultError):
        default("spec", path)


def test_what_may_be_left_out_without_a_default_is_none() -> None:
    assert default("spec", ("training", "train_steps")) is None


def test_the_defaults_of_families_that_the_schema_names_are_those_of_transformers() -> None:
    configs = pytest.importorskip("transformers").CONFIG_MAPPING
    count = 0
    for key, entry in schema.load("spec")["$defs"]["model_dimensions"]["properties"].items():
        named = re.search(r"configuration in transformers \((.*)\)", entry["description"])
        assert named is not None or "default" not in entry, f"{key}: a family may have another default"
        for family, value in re.findall(r"(\w+): ([^,]+)", named[1]) if named else ():
            config = configs[family]()
            live = getattr(config, key, None)
            if key == "rope_theta":
                live = config.rope_parameters["rope_theta"]
            said = {"true": True, "false": False, "all of them": None}.get(value, value)
            assert live == (type(live)(said) if isinstance(live, (int, float)) else said), (family, key)
            count += 1
    assert count >= 12


class TestSeed:
    def codes(self, seed: int, tmp_path: Path) -> list[str]:
        tree = spec_tree(1, 1, training={"seed": seed})
        found = check_read(parse(json.dumps(tree), "spec.json", "json"), tmp_path)
        return [one.code for one in found.diagnostics if one.is_error]

    def test_is_as_large_as_every_generator_takes_it(self, tmp_path) -> None:
        largest = schema.load("spec")["properties"]["training"]["properties"]["seed"]["maximum"]
        assert self.codes(largest, tmp_path) == []
        assert self.codes(largest + 1, tmp_path) == ["K005"]

    def test_the_largest_one_is_taken_by_transformers_numpy_and_torch_and_the_next_one_is_not(self) -> None:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")
        largest = schema.load("spec")["properties"]["training"]["properties"]["seed"]["maximum"]
        transformers.set_seed(largest)
        with pytest.raises(ValueError, match=r"Seed must be between 0 and 2\*\*32 - 1"):
            transformers.set_seed(largest + 1)

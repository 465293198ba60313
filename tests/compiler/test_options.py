"""What a search switches on where nothing fits without: chunked loss, tiled MLPs, the optimizer on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import parcompile
from parcompile.cost.footprint import is_safe
from parcompile.cost.offload import node_bytes
from parcompile.searching.first import FirstSpec, first_spec
from parcompile.units import GIB

NODE = {"nodes": 1, "gpus_per_node": 8, "accelerator": "h100-sxm"}
CHUNKS = {"linear_cross_entropy", "tiled_mlp"}


def offered(model: str, length: int, **cluster: Any) -> FirstSpec:
    return first_spec("run", {"preset": model}, {**NODE, **cluster}, length, Path())


def switched(spec: dict[str, Any]) -> set[str]:
    on = {name for name in (*CHUNKS, "activation_offloading") if spec["training"].get(name)}
    return on | ({"offload_optimizer"} & set(spec.get("zero", {})))


def test_nothing_is_switched_on_where_something_fits_without() -> None:
    for model, length in (("llama-3-8b", 8192), ("llama-3-8b", 131072), ("llama-3-70b", 4096)):
        nodes = 8 if model == "llama-3-70b" else 1
        assert all(not switched(one.spec) for one in offered(model, length, nodes=nodes).offers)


def test_long_sequences_get_chunks_and_a_large_model_the_host() -> None:
    (long, *_), (large, *_) = offered("llama-3-8b", 524288).offers, offered("llama-3-70b", 4096).offers
    assert switched(long.spec) == CHUNKS
    assert switched(large.spec) == {"offload_optimizer"}
    assert "of each node's own memory" in large.reason
    for one in (long, large):
        assert parcompile.check(one.spec).valid


def test_the_longest_sequences_get_activations_on_the_host() -> None:
    best, *_ = offered("llama-3-8b", 1048576).offers
    assert switched(best.spec) == {"linear_cross_entropy", "activation_offloading"}
    assert "516.00 GiB of each node's own memory" in best.reason


def test_a_switch_that_the_spec_gives_stays() -> None:
    base = {"version": 1, "model": {"preset": "llama-3-70b"}, "cluster": NODE, "zero": {"offload_optimizer": {}}}
    tree = {**base, "training": {"sequence_length": 4096, "global_batch_size": 64}}
    assert parcompile.search(tree).best is None


@pytest.mark.parametrize(("gib", "fits"), [(None, True), (2048, True), (1100, False)])
def test_what_goes_to_the_host_fits_there(gib: int | None, fits: bool) -> None:
    found = offered("llama-3-70b", 4096, **({"host_memory_gib": gib} if gib else {}))
    assert bool(found.offers) is fits
    for one in found.offers:
        plan = parcompile.compile(one.spec)
        assert 0 < node_bytes(plan.estimate().work) <= (gib or 2048) * GIB


def test_what_is_assumed_of_a_host_is_said(tmp_path: Path) -> None:
    """235 billion parameters need 18 bytes each of the memory of 2 nodes."""
    offer, *_ = offered("qwen3-235b-a22b", 4096, nodes=2).offers
    (found,) = (one for one in parcompile.check(offer.spec).diagnostics if one.code == "H006")
    assert "1,970.53 GiB of each node's memory of 2,048.00 GiB" in found.message
    assert "2,048.00 GiB are assumed" in found.message
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({**offer.spec, "cluster": {**offer.spec["cluster"], "host_memory_gib": 4096}}))
    assert "H006" not in [one.code for one in parcompile.check(file).diagnostics]


def test_too_large_a_spec_is_told_the_switches_that_a_search_takes() -> None:
    tree: dict[str, Any] = {"version": 1, "model": {"preset": "llama-3-70b"}, "cluster": NODE}
    tree |= {"parallelism": {"tp": 8}, "training": {"sequence_length": 4096, "global_batch_size": 128}}
    (error,) = parcompile.check(tree).errors
    fix = next(fix for fix in error.fixes if "offload_optimizer" in fix.title)
    for edit in fix.edits:
        tree.setdefault(str(edit.path[0]), {})[str(edit.path[1])] = edit.value
    assert is_safe(parcompile.compile(tree).estimate().memory)

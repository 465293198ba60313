"""The spec that the rules' examples change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

BASE: Mapping[str, Any] = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"nodes": 1, "gpus_per_node": 8, "accelerator": "h200"},
    "training": {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1},
}
"""Breaks no rule."""


def example_spec(part: Mapping[str, Any]) -> dict[str, Any]:
    """`BASE` with the keys of `part` in its place.

    Sections are merged; the model is replaced, and so is a cluster that says how many GPUs a node has.
    """
    spec: dict[str, Any] = copy.deepcopy(dict(BASE))
    for key, value in part.items():
        if isinstance(value, dict) and key != "model" and "gpus_per_node" not in value:
            spec[key] = {**spec.get(key, {}), **value}
        else:
            spec[key] = copy.deepcopy(value)
    return spec

"""Writes compiler/cost/launches.json: how many kernels a layer of each model type launches, beside one of Llama.

    python .ci/generate/launches.py

One rank of a tiny model of each type runs forward and backward on the meta device, in a plan for one H100, as in a
preflight. Each operator that makes or changes a tensor is one launch; views are none. What is left without the launches
outside Llama's layers is divided by the number of layers, and by those of a layer of Llama. Two numbers stand for each
type: without recomputation of layers, and with it. Types whose layers carry a state are left out: their launches grow
with the sequence.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compiler" / "cost" / "launches.json"
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from families import tiny_config  # noqa: E402
from training_runs import make_plan  # noqa: E402

from parcompile.model.catalogue import RUNTIME_FAMILIES  # noqa: E402
from parcompile.model.shape import ModelShape  # noqa: E402
from parcompile.runtime.preflight import preflight  # noqa: E402
from parcompile.runtime.preflight.stand_in import META, MetaTracker  # noqa: E402

FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias")
"""Operators that launch nothing, beside views."""
OTHERS = "others"
"""The entry of types that are left out, and of modules that are no Hugging Face models: as many as Llama's."""
PHASE = "micro 0"
RECOMPUTATION = ("none", "full")


@contextlib.contextmanager
def _meta(_: Any) -> Iterator[Any]:
    yield META, "launches are counted"


def launches(func: Any) -> bool:
    """Whether an operator of a tensor on a GPU is a kernel."""
    schema = func._schema
    if func.namespace != "aten" or schema.name.removeprefix("aten::") in FREE:
        return False
    return not any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def counted(config: Mapping[str, Any], recompute: str, layers: int | None = None) -> tuple[int, ModelShape]:
    """Launches of a micro-batch, and the model."""
    training = {"precision": "bf16", "micro_batch_size": 1, "sequence_length": 32, "global_batch_size": 2}
    training["gradient_accumulation_dtype"] = "bf16"  # what sums of another type launch is no work of a layer
    plan = make_plan(
        1,
        {},
        model={**config, **({"num_hidden_layers": layers} if layers else {})},
        training={**training, "activation_checkpointing": recompute},
        whole_model=True,
        extra={"cluster": {"gpus_per_node": 1, "accelerator": "h100-sxm"}},
    )
    found = 0
    run = MetaTracker.run

    def counting(self: MetaTracker, func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal found
        found += self.phase == PHASE and launches(func)
        return run(self, func, args, kwargs)

    with (
        mock.patch("parcompile.runtime.preflight.device_of_plan", _meta),
        mock.patch.object(MetaTracker, "run", counting),
    ):
        preflight(plan, [0])
    assert found, config
    return found, plan.spec.model.shape


def table(families: Iterable[str] = RUNTIME_FAMILIES) -> dict[str, list[float]]:
    """By type, launches of a layer over those of Llama: without recomputation, and with it."""
    few, more = 2, 4
    llama, outside = {}, {}
    for recompute in RECOMPUTATION:
        less, larger = (counted(tiny_config("llama"), recompute, layers)[0] for layers in (few, more))
        llama[recompute] = (larger - less) / (more - few)
        outside[recompute] = less - few * llama[recompute]
    found = {OTHERS: [round(llama[word] / llama["none"], 2) for word in RECOMPUTATION]}
    for family in families:
        counts = {word: counted(tiny_config(family), word) for word in RECOMPUTATION}
        shape = counts["none"][1]
        if any(one.states for one in shape.parts):
            continue
        found[family] = [
            round((count - outside[word]) / shape.num_hidden_layers / llama["none"], 2)
            for word, (count, _) in counts.items()
        ]
    return found


if __name__ == "__main__":
    entries = [f'  "{name}": {json.dumps(values)}' for name, values in sorted(table().items())]
    FILE.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")

"""Writes compiler/cost/launches.json: how many kernels a layer of each model type launches, beside one of Llama.

    python .ci/generate/launches.py

One rank of a tiny model of each type runs forward and backward on the meta device, in a plan for one H100, as in a
preflight. Each operator that makes or changes a tensor is one launch; views are none. What is left without the launches
outside Llama's layers is divided by the number of layers, and by those of a layer of Llama. Two numbers stand for each
type: without recomputation of layers, and with it.

Where layers carry a state, each of three things has these numbers: such a layer ("states"), each chunk that its
recurrence takes one after the other ("chunk"; a token, of Mamba-1 layers), and a layer that attends or carries no state
("others"). They are told apart by a longer sequence and by more layers, and have to give what is counted of an unseen
length. Counted are the functions of transformers' own files. The runtime calls these on GPUs too, unless
flash-linear-attention or `mamba_ssm` is installed, whose kernels are few at any length. Left out is what an indexer of
qwen4_exp launches for each block of keys: here it chooses all of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compiler" / "cost" / "launches.json"
sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from families import tiny_config  # noqa: E402
from training_runs import make_plan  # noqa: E402

from parcompile.cost.step import layer_launches, layers_by_state  # noqa: E402
from parcompile.model.blocks.recurrent import Recurrent  # noqa: E402
from parcompile.model.catalogue import RUNTIME_FAMILIES  # noqa: E402
from parcompile.model.shape import ModelShape  # noqa: E402
from parcompile.runtime.preflight import preflight  # noqa: E402
from parcompile.runtime.preflight.stand_in import META, MetaTracker  # noqa: E402
from parcompile.runtime.ring_attention.sequence import positions_of_ranks  # noqa: E402
from parcompile.runtime.ring_attention.token_order import order_of_sequence  # noqa: E402

FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias")
"""Operators that launch nothing, beside views."""
OTHERS = "others"
"""The entry of modules that are no Hugging Face models: as many as Llama's."""
LENGTH = 32
CHANGES = {"bamba": {"attn_layer_indices": [1, 3]}, "qwen4_exp_text": {"indexer_budget": 4096}}
NEAR = 0.02
"""By so much a step of an unseen length may launch more or fewer kernels than follow."""
PHASE = "micro 0"
RECOMPUTATION = ("none", "full")


@contextlib.contextmanager
def _meta(_: Any) -> Iterator[Any]:
    yield META, "launches are counted"


class _CountedError(BaseException):
    """The micro-batch has ended; a preflight reports what is an `Exception`."""


def launches(func: Any) -> bool:
    """Whether an operator of a tensor on a GPU is a kernel."""
    schema = func._schema
    if func.namespace != "aten" or schema.name.removeprefix("aten::") in FREE:
        return False
    return not any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def counted(
    config: Mapping[str, Any], recompute: str, layers: int | None = None, length: int = LENGTH
) -> tuple[int, ModelShape]:
    """Launches of a micro-batch, and the model; of `layers`, the kinds of the configuration come over and over."""
    if layers:
        kinds = {key: value for key, value in config.items() if isinstance(value, list) and str in map(type, value)}
        kinds = {key: [value[layer % len(value)] for layer in range(layers)] for key, value in kinds.items()}
        config = {**config, **kinds, "num_hidden_layers": layers}
    # They are made once for a length: what a plan launches must not depend on those before it.
    order_of_sequence.cache_clear()
    positions_of_ranks.cache_clear()
    training = {"precision": "bf16", "micro_batch_size": 1, "sequence_length": length, "global_batch_size": 2}
    training["gradient_accumulation_dtype"] = "bf16"  # what sums of another type launch is no work of a layer
    plan = make_plan(
        1,
        {},
        model=dict(config),
        training={**training, "activation_checkpointing": recompute},
        whole_model=True,
        extra={"cluster": {"gpus_per_node": 1, "accelerator": "h100-sxm"}},
    )
    found = 0
    run = MetaTracker.run

    def counting(self: MetaTracker, func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal found
        if found and self.phase != PHASE:
            raise _CountedError
        found += self.phase == PHASE and launches(func)
        return run(self, func, args, kwargs)

    with (
        mock.patch("parcompile.runtime.preflight.device_of_plan", _meta),
        mock.patch.object(MetaTracker, "run", counting),
        contextlib.suppress(_CountedError),
    ):
        raise RuntimeError(preflight(plan, [0]).text())
    return found, plan.spec.model.shape


def of_states(config: Mapping[str, Any], shape: ModelShape, states: Recurrent) -> dict[str, list[float]]:
    """Launches of a layer with a state, of each chunk of its recurrence, and of another layer.

    Raises:
        ValueError: another length in twice the layers has others than follow.
    """
    layers, length = shape.num_hidden_layers, max(LENGTH, 2 * states.chunk)
    chunks, unseen = length // states.chunk, 3 * length + 1
    found: dict[str, list[float]] = {"states": [], "chunk": [], "others": []}
    for word in RECOMPUTATION:
        base, longer = (counted(config, word, layers, tokens)[0] for tokens in (length, 2 * length))
        chunk = (longer - base) / chunks / len(states.layers)
        more = [counted(config, word, number, length) for number in (layers + 1, 2 * layers)]
        kinds = np.array([layers_by_state(one) for _, one in more]) - layers_by_state(shape)
        fixed = [count - base - chunk * chunks * added[0] for (count, _), added in zip(more, kinds, strict=True)]
        of_kinds = np.linalg.lstsq(kinds, np.array(fixed), rcond=None)[0]
        for key, value in zip(found, (of_kinds[0], chunk, of_kinds[1]), strict=True):
            found[key].append(float(value))
        count, model = counted(config, word, 2 * layers, unseen)
        follow = base - layers * layer_launches(shape, found, chunks)[-1]
        follow += 2 * layers * layer_launches(model, found, -(-unseen // states.chunk))[-1]
        if abs(follow - count) > NEAR * count:
            raise ValueError(f"{shape.model_type}: {count} launches of {unseen} tokens, {follow:.0f} follow")
    return found


def table(families: Iterable[str] = RUNTIME_FAMILIES) -> dict[str, Any]:
    """By type, launches of a layer over those of Llama: without recomputation, and with it."""
    few, more = 2, 4
    llama, outside = {}, {}
    for recompute in RECOMPUTATION:
        less, larger = (counted(tiny_config("llama"), recompute, layers)[0] for layers in (few, more))
        llama[recompute] = (larger - less) / (more - few)
        outside[recompute] = less - few * llama[recompute]
    found: dict[str, Any] = {OTHERS: [round(llama[word] / llama["none"], 2) for word in RECOMPUTATION]}
    for family in families:
        config = {**tiny_config(family), **CHANGES.get(family, {})}
        counts = {word: counted(config, word) for word in RECOMPUTATION}
        shape = counts["none"][1]
        if (states := shape.part(Recurrent)) is not None:
            of_kinds = of_states(config, shape, states).items()
            found[family] = {key: [round(one / llama["none"], 3) for one in values] for key, values in of_kinds}
            continue
        found[family] = [
            round((count - outside[word]) / shape.num_hidden_layers / llama["none"], 2)
            for word, (count, _) in counts.items()
        ]
    return found


if __name__ == "__main__":
    entries = [f'  "{name}": {json.dumps(values)}' for name, values in sorted(table().items())]
    FILE.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")

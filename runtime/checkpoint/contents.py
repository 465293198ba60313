"""Which files a checkpoint has: what its plan requires, what its note lists and what lies in its folder are the same.

That is compared before a file is opened. A file that nobody asked for is never read, whatever its name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from parcompile.plan import Plan
from parcompile.plan.holding import expert_places, further_ep_ranks, model_parallel_places
from parcompile.runtime.errors import RunError
from parcompile.spec import Precision

from .deepspeed_files import experts_file, shard_file, weights_file
from .manifest import NOTE, Note
from .random_state import random_file


def tensor_files(plan: Plan) -> set[str]:
    """The files of weights and of optimizer states."""
    parallelism, bf16 = plan.spec.parallelism, plan.spec.training.precision is Precision.BF16
    places = list(enumerate(model_parallel_places(plan)))
    model_parallel_ranks = range(len(places))
    weights = {weights_file(rank) for rank in model_parallel_ranks}
    shards = {
        shard_file(shard, rank, bf16=bf16) for rank in model_parallel_ranks for shard in range(len(expert_places(plan)))
    }
    further = [further_ep_ranks(plan, tp_rank) for tp_rank in range(parallelism.tp)]
    experts = {experts_file(ep_rank, rank) for rank, place in places for ep_rank in further[place.tp]}
    return weights | experts | shards


def random_files(plan: Plan) -> set[str]:
    """The files of random states. A checkpoint of a run has all of them, a converted or an imported one has none."""
    return {random_file(rank) for rank in range(plan.world_size)}


def check_listed(plan: Plan, names: Collection[str]) -> None:
    """Refuses a list of files that is not that of a checkpoint of the plan.

    Raises:
        RunError: a file is missing, or one is more than the plan requires.
    """
    wrong = list(_differences(plan, names))
    if wrong:
        raise RunError("; ".join(wrong[:3]))


def strange_contents(note: Note) -> list[str]:
    """Where the files of plan, note and folder are not the same, one sentence each. No file is opened.

    Files of the note that are missing in the folder are left to `damages`.
    """
    found = [f"{note.folder / NOTE}: {wrong}" for wrong in _differences(note.plan, note.files)]
    try:
        with os.scandir(note.folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.name != NOTE and entry.name not in note.files:
                    found.append(f"{note.folder / entry.name} is not of this checkpoint: remove it")
                elif not entry.is_file():
                    found.append(f"{note.folder / entry.name} is not a file")
    except OSError as error:
        found.append(f"{note.folder} cannot be read: {error.strerror}")
    return found


def _differences(plan: Plan, names: Collection[str]) -> Iterator[str]:
    tensors, random = tensor_files(plan), random_files(plan)
    required = tensors | random if random.intersection(names) else tensors
    if missing := sorted(required.difference(names)):
        yield f"it does not list {_some(missing)}, which the plan requires"
    if strange := sorted(set(names) - required):
        yield f"it lists {_some(strange)}, which the plan does not require"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

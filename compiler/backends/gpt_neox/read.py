"""A spec's values out of a gpt-neox configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.backends import table
from parcompile.backends.architecture import InexpressibleError
from parcompile.backends.deepspeed.read import further
from parcompile.backends.importer import Importer, RefusedError
from parcompile.backends.reading import Draft, Source, Undecided

from .check import wrong
from .effects import fate
from .meaning import STANDS_FOR, meaning
from .model import described
from .options import defaults, options, spelling
from .write import ROWS, arguments, flat

_DEEPSPEED = "NeoXArgsDeepspeedConfig"
_MACHINES = {"num_nodes": ("cluster", "nodes"), "num_gpus": ("cluster", "gpus_per_node")}


def given(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file by their dotted names with underscores; what is "auto" is undecided.

    Raises:
        RefusedError: a value is not of its option's type.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = spelling(str(key))
        problem = wrong(name, value)
        if problem is not None:
            raise RefusedError(problem)
        found |= flat({name: value})
    return {
        name: Undecided("auto", "DeepSpeed's autotuning") if value == "auto" else value
        for name, value in found.items()
        if value is not None
    }


def read(source: Source, draft: Draft) -> None:
    """Everything of a configuration that a spec can say.

    Raises:
        RefusedError: a spec cannot say what model it is.
    """
    for name, path in _MACHINES.items():
        value = source.given.get(name)
        if isinstance(value, int) and value > 0:
            draft.carry(source, name, path)
    try:
        table.read(ROWS, source, draft)
    except InexpressibleError as error:
        raise RefusedError(f"no spec can express this model: {error}") from None
    further(source, draft, [name for name in source.unread() if _is_deepspeeds(name)])


def _is_deepspeeds(name: str) -> bool:
    facts = options().get(name.partition(".")[0])
    return facts is not None and facts[-1].group == _DEEPSPEED and name != "deepspeed"


IMPORTER = Importer(
    tool="gpt-neox",
    options=given,
    defaults=defaults,
    read=read,
    written=lambda plan: arguments(plan),
    fate=fate,
    model_options=described,
    meaning=meaning,
    stands_for=STANDS_FOR,
)

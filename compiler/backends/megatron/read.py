"""A spec's values out of Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.backends import reading as table
from parcompile.backends.architecture import InexpressibleError
from parcompile.backends.reading import Draft, Importer, RefusedError, Source, Undecided, UndecidedError
from parcompile.text.typed import WrongValueError, integer, number, shown

from .arguments import Unknown
from .effects import changes, fate
from .file import imported
from .meaning import STANDS_FOR, meaning
from .model import described
from .options import NVIDIA, line
from .verbatim import keep
from .write import ROWS, arguments

_CLUSTER = {"nnodes": ("cluster", "nodes"), "nproc_per_node": ("cluster", "gpus_per_node")}


def options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a document by their canonical names; what the file leaves to a variable is undecided.

    Raises:
        RefusedError: a value is not of its option's type.
        WrongValueError: a value is none of the parser's.
    """
    found: dict[str, Any] = {}
    known = line(NVIDIA)
    for name, value in tree.items():
        canonical, turns_on = known.by_flag.get(name, (name, True))
        found[canonical] = _value(canonical, value if turns_on or value is not True else False)
    return {name: value for name, value in found.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, Unknown):
        variables = ", ".join(value.names)
        return Undecided(str(value), f"variable {variables}" if variables else "something else")
    option = line(NVIDIA).options.get(name)
    if isinstance(value, list):
        if option is not None and option.newest.kind != "list":
            raise WrongValueError(f"--{name.replace('_', '-')}", value, "one value")
        return [_value(name, one) for one in value]
    if option is not None and isinstance(value, Mapping):
        raise WrongValueError(f"--{name.replace('_', '-')}", value, f"of type {option.newest.type}")
    if option is None or option.newest.is_flag or option.newest.type not in ("int", "float"):
        return value
    is_number = isinstance(value, (int, float) if option.newest.type == "float" else int)
    if isinstance(value, bool) or not is_number:
        raise RefusedError(f"--{name.replace('_', '-')} {shown(value)}: Megatron-LM takes {option.newest.type} here")
    return (number if isinstance(value, float) else integer)(value, f"--{name.replace('_', '-')}")


def read(source: Source, draft: Draft) -> None:
    """Everything of the arguments that a spec can say.

    Raises:
        RefusedError: a spec cannot say what model it is.
    """
    for name, path in _CLUSTER.items():
        if source.has(name):
            draft.carry(source, name, path)
    try:
        table.read(ROWS, source, draft)
    except InexpressibleError as error:
        raise RefusedError(f"this model cannot be carried into a spec: {error}") from None
    _samples(source, draft)
    keep(source, draft)


def _samples(source: Source, draft: Draft) -> None:
    """What a batch that is not given is: one micro-batch of each rank (validate_args)."""
    path = ("training", "gradient_accumulation_steps")
    if not source.has("global_batch_size") and source.has("micro_batch_size"):
        draft.set(path, 1, said=False)
    try:
        if source.value("micro_batch_size") is None:
            draft.ask(("training", "micro_batch_size"), "the file does not say --micro-batch-size")
    except UndecidedError:
        pass


IMPORTER = Importer(
    tool="Megatron-LM",
    options=options,
    defaults=lambda: line(NVIDIA).defaults,
    read=read,
    written=lambda plan: arguments(plan),
    fate=fate,
    model_options=described,
    meaning=meaning,
    stands_for=STANDS_FOR,
    tree=imported,
    changes=changes,
)

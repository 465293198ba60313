"""Keys of DeepSpeed that a file gives and a plan does not decide: they become the spec's further DeepSpeed keys."""

from __future__ import annotations

from typing import Any

from parcompile.backends.reading import Draft, Source, Undecided
from parcompile.schema import load

from . import facts
from .table import find
from .versions import newest


def read(source: Source, draft: Draft, name: str, *, left_to: str) -> None:
    """Takes a key over by its dotted name, unless it cannot go with a plan; `left_to` decides what is "auto"."""
    path = tuple(name.split("."))
    reason = facts.refusal(path)
    if path[0] not in load("ds_config")["properties"]:
        source.lose(name, "DeepSpeed has no such key")
    elif isinstance(source.given[name], Undecided):
        source.lose(name, f"left to {left_to}; the plan has a value of its own")
    elif reason is not None and _is_off(path, source.given[name]):
        source.ignore(name, "DeepSpeed does the same without it")
    elif reason is not None:
        source.lose(name, reason)
    else:
        draft.carry(source, name, ("deepspeed", *path))


def _is_off(path: tuple[str, ...], value: Any) -> bool:
    """Whether a key of ZeRO asks for nothing: by DeepSpeed's default, or as an old key that stands for none."""
    key = find(newest(), *path) if path[0] == "zero_optimization" else None
    if key is None:
        return False
    if key.deprecated is not None:
        return key.deprecated.get("changes", {}).get(str(value).lower(), value) is None
    return bool(value == key.default) and type(value) is type(key.default)

"""gpt-neox's own table of options: the fields of its dataclasses, which need neither torch nor DeepSpeed.

    python .ci/upstream/gpt_neox.py FOLDER

FOLDER holds gpt-neox's sources; the facts are written as JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

_MODULES = ("neox_args", "deepspeed_args")


def facts(folder: Path) -> list[dict[str, Any]]:
    """Every field: its name, the types and choices that it takes, its default, and the class that it stands in."""
    package = types.ModuleType("neox_arguments")
    package.__path__ = [str(folder / "megatron" / "neox_arguments")]
    sys.modules["neox_arguments"] = package
    if not hasattr(typing, "Literal"):
        raise RuntimeError("Python 3.8 or newer is needed")
    found = {}
    for module in _MODULES:
        loaded = importlib.import_module(f"neox_arguments.{module}")
        for name, value in vars(loaded).items():
            if dataclasses.is_dataclass(value) and name != "NeoXArgsTemplate":
                for field in dataclasses.fields(value):
                    found.setdefault(field.name, _fact(field, name))
    return sorted(found.values(), key=lambda one: str(one["name"]))


def _fact(field: dataclasses.Field[Any], group: str) -> dict[str, Any]:
    kinds, choices = _kinds(field.type)
    default = None if field.default is dataclasses.MISSING else field.default
    return {"name": field.name, "types": kinds, "choices": choices, "default": default, "group": group}


def _kinds(annotation: Any) -> tuple[list[str], list[Any] | None]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return sorted({type(one).__name__ for one in arguments}), list(arguments)
    if origin is typing.Union:
        parts = [_kinds(one) for one in arguments if one is not type(None)]
        choices = [choice for _, listed in parts for choice in listed or ()]
        kinds = sorted({kind for kinds, _ in parts for kind in kinds})
        # A choice among other types is no restriction to the choices.
        return kinds, choices if choices and all(listed for _, listed in parts) else None
    return [(origin or annotation).__name__ if annotation is not typing.Any else "any"], None


if __name__ == "__main__":
    json.dump(facts(Path(sys.argv[1]).resolve()), sys.stdout)

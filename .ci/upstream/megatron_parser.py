"""The argument parser of a version of Megatron-LM, imported from its sources, and what it says of its options."""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.metadata
import json
import math
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import stubs

_MODULES = ("megatron.training.arguments", "megatron.arguments", "arguments")
_MISSING: list[str] = json.loads(Path(__file__).with_name("megatron.json").read_text(encoding="utf-8"))["missing"]


class _Captured(Exception):  # noqa: N818 -- no error: the parser is what is wanted
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser(folder: Path) -> tuple[argparse.ArgumentParser, types.ModuleType]:
    """The argument parser of the sources in a folder, and the module that made it; once in a process."""
    warnings.filterwarnings("ignore")
    import numpy
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.utils.flop_counter  # noqa: F401 -- what a stub of triton would break when it is imported later

    file = folder / "megatron" / "arguments.py"
    if file.exists() and "deepspeed" in file.read_text(encoding="utf-8"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401 -- before there are stubs, which it would take for accelerators
    is_old = not (folder / "megatron" / "training" / "arguments.py").exists()
    stubs.install(_MISSING, own=("megatron", "arguments", "mpu") if is_old else None)
    if is_old:
        for name, kind in {"float": float, "int": int, "bool": bool, "object": object}.items():
            setattr(numpy, name, kind)
        stubs.install(["megatron.core.dist_checkpointing", "torchvision", "transformer_engine"])
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    sys.path.insert(0, str(folder))

    def capture(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Captured(self)

    real = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    module = _arguments_module()
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = capture
    try:
        module.parse_args()
    except _Captured as captured:
        return captured.parser, module
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args = real
    raise AssertionError("the parser was not used")


def _arguments_module() -> types.ModuleType:
    """Imports the module; what it misses on the way becomes a stub."""
    names, stubbed = list(_MODULES), set[str]()
    while names:
        try:
            return importlib.import_module(names[0])
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if names[0] == missing or names[0].startswith(f"{missing}."):
                names.pop(0)
                continue
            if missing.startswith("megatron") or not missing or missing in stubbed:
                raise
            stubbed.add(missing)
            if isinstance(error, importlib.metadata.PackageNotFoundError):
                stubs.answer_for_missing_versions()
            stubs.install([missing])
            for loaded in [name for name in sys.modules if name.partition(".")[0] in ("megatron", missing)]:
                del sys.modules[loaded]
    raise ModuleNotFoundError("megatron.arguments")


def facts(made: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Every option of a parser: its flags, destination, kind, type, choices, default and group."""
    groups = {id(action): group.title for group in made._action_groups for action in group._group_actions}
    return [
        {
            "flags": list(action.option_strings),
            "dest": action.dest,
            "kind": _kind(action),
            "type": _type(action),
            "choices": None if action.choices is None else [plain(choice) for choice in action.choices],
            "default": plain(action.default),
            "group": groups.get(id(action)) or "",
        }
        for action in made._actions
        if action.option_strings and action.dest != "help"
    ]


def _kind(action: argparse.Action) -> str:
    name = type(action).__name__
    if name in ("_StoreTrueAction", "_StoreConstAction"):
        return "on"
    if name == "_StoreFalseAction":
        return "off"
    if name == "BooleanOptionalAction":
        return "either"
    if action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 0):
        return "list"
    return "optional value" if action.nargs == "?" else "value"


def _type(action: argparse.Action) -> str:
    if action.type is None:
        return "str"
    name = getattr(action.type, "__name__", "other")
    return name if name in ("int", "float", "str", "bool") else "other"


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

"""tests/compiler/torchtitan_fields.json: the fields of torchtitan's configuration classes, and its models.

Run it where torchtitan is installed, with its output into that file. What it depends on need not be: nothing here runs
a kernel, a loader or its command line. With a written torchtitan_config.py as the argument, its `plan` is called, and
what torchtitan's classes have built is printed as JSON beside their defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

MODELS = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")


_IMPORTED = ("triton", "tensorboard", "torchdata", "tyro", "spmd_types", "torch_checkpointing", "datasets", "google")
"""What torchtitan imports at the top of modules."""


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for those of them that are not installed: it comes last on the path of finders."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_known = name.split(".")[0] in _IMPORTED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _stand_in  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _stand_in(name: str) -> Any:
    if name == "__version__":
        return "3.0.0"
    if name.startswith("__"):
        raise AttributeError(name)
    made = {"__init__": lambda _self, *_given, **_named: None}
    return type(name, (), made) if name[0].isupper() else MagicMock(name=name)


def _fields(kind: Any) -> dict[str, str | list[Any]]:
    hints = typing.get_type_hints(kind)
    found: dict[str, str | list[Any]] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        found[field.name] = list(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else str(hint)
    return found


def _models() -> dict[str, int]:
    import torch

    found = {}
    for name in MODELS:
        module = importlib.import_module(f"torchtitan.models.{name}.config_registry")
        for function in vars(module).values():
            if not isinstance(function, types.FunctionType) or function.__module__ != module.__name__:
                continue
            try:
                spec = function().model_spec
                with torch.device("meta"):
                    model = spec.model.build()
            except Exception as error:
                print(f"{name}.{function.__name__}: {error}", file=sys.stderr)
                continue
            found[f"{name}.{function.__name__}"] = sum(one.numel() for one in model.parameters())
    return found


def main() -> None:
    """Prints the fields, or what torchtitan reads in a file."""
    import torch.utils._triton as of_torch

    of_torch.has_triton = of_torch.has_triton_package = lambda *_: False
    sys.meta_path.append(_Absent())
    warnings.simplefilter("ignore")
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig

    if sys.argv[1:]:
        file = Path(sys.argv[1])
        sys.path.insert(0, str(file.parent))
        own = {
            "parallelism": ParallelismConfig(),
            "training": TrainingConfig(),
            "lr_scheduler": LRSchedulersContainer.Config(),
            "debug": DebugConfig(),
        }
        built = importlib.import_module(file.stem).plan().to_dict()
        defaults = {name: dataclasses.asdict(one) for name, one in own.items()}
        print(json.dumps({"plan": built, "defaults": defaults}, default=str))
        return
    kinds = {
        "ParallelismConfig": ParallelismConfig,
        "TrainingConfig": TrainingConfig,
        "DebugConfig": DebugConfig,
        "LRSchedulersContainer.Config": LRSchedulersContainer.Config,
    }
    tree = {
        "version": importlib.metadata.version("torchtitan"),
        "fields": {name: _fields(kind) for name, kind in kinds.items()},
        "parameters": _models(),
    }
    print(json.dumps(tree, indent=1))


if __name__ == "__main__":
    main()

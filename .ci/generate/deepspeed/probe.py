"""What one version of DeepSpeed reads from its configuration, as JSON: `PYTHONPATH=<that version> python probe.py`.

Pydantic classes are asked for their fields. What DeepSpeed takes out of plain dictionaries is found by giving it
dictionaries that write down which keys are looked up and with which default. Optimizers and schedules are constructed
with the keys of their `params`, so their signatures are the facts. Nothing is built and no device is needed: modules
that old versions want at import are stubs.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import inspect
import json
import logging
import math
import os
import pathlib
import sys
import types
import typing
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spies import UNREADABLE, Log, Spied, watch_models

SECTIONS = ("enabled",)
"""Keys that switch a section on, so that the rest of it is read."""
OPTIMIZERS = {
    "FusedAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdam": "deepspeed.ops.adam",
    "FusedLamb": "deepspeed.ops.lamb",
    "FusedLion": "deepspeed.ops.lion",
    "DeepSpeedCPULion": "deepspeed.ops.lion",
    "DeepSpeedCPUAdagrad": "deepspeed.ops.adagrad",
    "OnebitAdam": "deepspeed.runtime.fp16.onebit",
    "OnebitLamb": "deepspeed.runtime.fp16.onebit",
    "ZeroOneAdam": "deepspeed.runtime.fp16.onebit",
}


def stub_imports() -> None:
    """Stands in for what old versions import and a configuration does not need."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for name in ("intel_extension_for_pytorch", "intel_extension_for_pytorch._C", "oneccl_bindings_for_pytorch"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, module)
    # Names that newer versions of other packages have lost.
    for name, lost in (
        ("torch.distributed.elastic.agent.server.api", ("log", "_get_socket_with_port")),
        ("numpy", ("BUFSIZE",)),
    ):
        module = importlib.import_module(name)
        for one in lost:
            if not hasattr(module, one):
                setattr(module, one, unittest.mock.MagicMock(name=one))


def traced() -> Log:
    """All keys that DeepSpeedConfig looks up, and the classes that it gives sections to."""
    log = Log()
    watch_models(log)
    config = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig
    tried: set[str] = set()

    def run(entries: Mapping[str, Any]) -> None:
        # Some sections are refused as a whole; what was read before that counts.
        with contextlib.suppress(BaseException):
            config(Spied("", log, {"train_batch_size": 8, **entries}))

    run({})
    for _ in range(6):
        fresh = [path for path in log.defaults if path not in tried and path.count(".") < 5]
        if not fresh:
            break
        for path in fresh:
            tried.add(path)
            default = log.defaults[path]
            holds = default is UNREADABLE or default is None or default is False or isinstance(default, dict)
            if holds and not _inside_model(path, log):
                for inner in ({}, {"enabled": True}):
                    run(_nested(path.split("."), inner, log))
    return log


def _inside_model(path: str, log: Log) -> bool:
    steps = path.split(".")
    return any(".".join(steps[:length]) in log.models for length in range(1, len(steps)))


def _nested(steps: list[str], inner: Mapping[str, Any], log: Log) -> dict[str, Any]:
    value: Any = Spied(".".join(steps), log, inner)
    for length in range(len(steps) - 1, 0, -1):
        value = Spied(".".join(steps[:length]), log, {"enabled": True, steps[length]: value})
    return {steps[0]: value}


# -- pydantic ----------------------------------------------------------------------------------------------------------


def fields_of(model: Any) -> dict[str, dict[str, Any]]:
    """The fields of a class by name, nested classes under `fields`."""
    found = model.model_fields if hasattr(model, "model_fields") else model.__fields__
    return {name: _field(field) for name, field in found.items()}


def _field(field: Any) -> dict[str, Any]:
    new = hasattr(field, "annotation") and hasattr(field, "metadata")
    annotation = field.annotation if new else field.outer_type_
    extra = (field.json_schema_extra if new else field.field_info.extra) or {}
    facts = kind(annotation)
    if not new and field.allow_none:
        facts["null"] = True
    if new:
        for one in field.metadata:
            facts.update({name: getattr(one, name) for name in ("ge", "gt", "le", "lt") if hasattr(one, name)})
    else:
        info = field.field_info
        facts.update(
            {name: bound for name in ("ge", "gt", "le", "lt") if (bound := getattr(info, name, None)) is not None}
        )
    alias = field.alias
    default = field.get_default(call_default_factory=True) if new else field.get_default()
    facts["default"] = plain(default)
    if (alias and alias != getattr(field, "name", alias)) or (new and alias):
        facts["alias"] = alias
    if extra.get("deprecated"):
        facts["deprecated"] = {
            name: value
            for name in ("new_param", "deprecated_msg", "set_new_param")
            if (value := extra.get(name)) is not None
        }
        if "new_param_fn" in extra:
            facts["deprecated"]["changes"] = {
                json.dumps(value): plain(extra["new_param_fn"](value)) for value in (True, False)
            }
    return facts


def kind(annotation: Any) -> dict[str, Any]:
    """An annotation as {"type": …} with what belongs to it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(arguments[0])
    if origin in (typing.Union, types.UnionType):
        parts = [kind(one) for one in arguments if one is not type(None)]
        facts = parts[0] if len(parts) == 1 else {"type": "union", "of": parts}
        if type(None) in arguments:
            facts["null"] = True
        return facts
    if origin is typing.Literal:
        return {"type": "choice", "in": list(arguments)}
    if origin in (list, tuple, set) or annotation in (list, tuple, set):
        return {"type": "list", **({"of": kind(arguments[0])} if arguments and arguments[0] is not Ellipsis else {})}
    if origin is dict or annotation is dict:
        return {"type": "dict"}
    if isinstance(annotation, type):
        if hasattr(annotation, "model_fields") or hasattr(annotation, "__fields__"):
            return {"type": "section", "fields": fields_of(annotation)}
        if issubclass(annotation, enum.Enum):
            return {"type": "choice", "enum": True, "in": list(dict.fromkeys(plain(one.value) for one in annotation))}
        for name, python in (("bool", bool), ("int", int), ("float", float), ("str", str), ("path", pathlib.Path)):
            if issubclass(annotation, python):
                return {"type": name}
        if annotation is not object:
            return {"type": "class", "class": f"{annotation.__module__}.{annotation.__name__}"}
    return {"type": "any"}


def plain(value: Any) -> Any:
    """A default as JSON has it; what JSON cannot hold is named by its class."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "model_fields_set"):
        return {name: plain(getattr(value, name)) for name in value.model_fields_set}
    if hasattr(value, "__fields_set__"):
        return {name: plain(getattr(value, name)) for name in value.__fields_set__}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return {"class": f"{type(value).__module__}.{type(value).__name__}"}


# -- classes and sources -----------------------------------------------------------------------------------------------


def signature_of(target: Callable[..., Any]) -> dict[str, Any]:
    """The keyword parameters of a constructor with their defaults; those without one are `required`."""
    found: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(target).parameters.items())[1:]:
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            found["**"] = {}
        elif parameter.default is inspect.Parameter.empty:
            found[name] = {"required": True}
        else:
            found[name] = {"default": plain(parameter.default)}
    return found


def classes() -> dict[str, dict[str, Any]]:
    """The signatures of DeepSpeed's optimizers and schedules."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in OPTIMIZERS.items():
        target = getattr(_import(module), name, None)
        if target is not None:
            found[name] = signature_of(target)
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    for name in schedules.VALID_LR_SCHEDULES:
        if inspect.isclass(getattr(schedules, name, None)):
            found[name] = signature_of(getattr(schedules, name))
    return found


def names() -> dict[str, list[str]]:
    """The names that a text can have, where DeepSpeed looks it up in a registry."""
    found = {}
    experts = _import("deepspeed.module_inject.auto_ep_config")
    if experts is not None and hasattr(experts, "PRESET_MODELS"):
        found["expert_parallel.preset_model"] = sorted(experts.PRESET_MODELS)
    activations = getattr(_import("deepspeed.moe.ep_experts"), "EXPERT_ACTIVATIONS", None)
    if activations:
        found["expert_parallel.expert_activation"] = sorted(activations)
    presets = getattr(_import("deepspeed.module_inject.autotp_config"), "AutoTPPresets", None)
    if presets is not None:
        known = [name for name in vars(presets) if not name.startswith("_") and name != "get_preset"]
        found["tensor_parallel.preset_model"] = sorted(name for name in known if presets.get_preset(name) is not None)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def literals(folder: pathlib.Path) -> Iterator[str]:
    """All text constants of the sources that are shorter than a sentence."""
    for file in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and len(node.value) < 60
                and node.value.isidentifier()
            ):
                yield node.value


def main() -> None:
    stub_imports()
    with unittest.mock.patch("sys.stdout", sys.stderr):
        deepspeed = importlib.import_module("deepspeed")
        config = importlib.import_module("deepspeed.runtime.config")
        log = traced()
        facts = {
            "version": deepspeed.__version__.split("+")[0].strip(),
            "pydantic": 2
            if hasattr(importlib.import_module("deepspeed.runtime.config_utils").DeepSpeedConfigModel, "model_fields")
            else 1,
            "read": {
                path: ({} if default is UNREADABLE else {"default": plain(default)})
                for path, default in log.defaults.items()
            },
            "models": {path: fields_of(model) for path, model in log.models.items()},
            "refused": {
                **getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),
                **{
                    f"zero_optimization.{key}": text
                    for key, text in getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {}).items()
                },
            },
            "optimizers": list(config.DEEPSPEED_OPTIMIZERS),
            "classes": classes(),
            "names": names(),
            "literals": sorted(set(literals(pathlib.Path(deepspeed.__file__).parent))),
        }
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main()

"""Dictionaries and classes that write down what DeepSpeed looks up in a configuration, and with which default."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
from typing import Any

UNREADABLE = object()
"""Stands for the default of a lookup that has none."""


class Log:
    """Keys that were looked up, by path, with the default that was given for them."""

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.models: dict[str, type] = {}

    def saw(self, path: str, default: Any = UNREADABLE) -> None:
        if default is not UNREADABLE or path not in self.defaults:
            self.defaults[path] = default


class Spied(dict[str, Any]):
    """A dictionary that writes down which of its keys are looked up.

    Classes are constructed with `**`, which copies without asking: the entry PATH tells them where they stand.
    """

    PATH = "__path__"

    def __init__(self, path: str, log: Log, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        if path:
            super().__setitem__(self.PATH, path)
        self.path, self.log = path, log

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else str(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.log.saw(self._name(key), default)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.log.saw(self._name(key), *default)
        return super().pop(key, *default)

    def __getitem__(self, key: str) -> Any:
        self.log.saw(self._name(key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.log.saw(self._name(str(key)))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Spied:
        return Spied(self.path, self.log, self)

    def __deepcopy__(self, memo: object) -> Spied:
        return self.__copy__()


def watch_models(log: Log) -> type:
    """Lets the base class of all pydantic configurations write down which class was given the section of a path."""
    base = importlib.import_module("deepspeed.runtime.config_utils").DeepSpeedConfigModel
    original = base.__init__

    def init(self: Any, strict: bool = False, **data: Any) -> None:
        path = data.pop(Spied.PATH, None)
        if path is not None:
            log.models.setdefault(path, type(self))
        plain = {key: dict(value) if isinstance(value, Spied) else value for key, value in data.items()}
        for key, value in plain.items():
            if isinstance(value, dict):
                nested = value.pop(Spied.PATH, None)
                model = _model_of(type(self), key)
                if nested is not None and model is not None:
                    log.models.setdefault(nested, model)
        original(self, strict, **plain)

    base.__init__ = init
    return typing.cast("type", base)


def _model_of(owner: Any, key: str) -> type | None:
    """The class of the field `key` when it is a section of its own."""
    fields = owner.model_fields if hasattr(owner, "model_fields") else owner.__fields__
    annotation = getattr(fields.get(key), "annotation", None)
    held = isinstance(annotation, type) and (hasattr(annotation, "model_fields") or hasattr(annotation, "__fields__"))
    return annotation if held else None

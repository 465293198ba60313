"""Whole numbers and lists of a Hugging Face configuration, under the names and with the defaults of a family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import ModelConfigError
from .layers import checked, whole
from .tables import alias_of, class_default, reads


class ConfigReader:
    """A configuration, with the names and the defaults of its family."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
        self._config = config
        self._defaults = {**_class_defaults(config), **defaults}
        self._names = names

    def size(self, name: str, default: int | None = None) -> int:
        """The value of a key; where it is left out the family's default, and where it is null, too, `default`."""
        key = self._names.get(name, name) or ""
        value = self._config.get(key, self._config.get(name) if key else None)
        if value is None:
            found = default if self.is_null(key or name) else self._defaults.get(name, default)
            if found is None:
                other = self.alias(name)
                under = "" if other is None else f", and so is {other}, its other name"
                raise ModelConfigError(f"{key or name} is missing{under}", key or name)
            return int(found)
        if isinstance(value, list) and value and isinstance(value[0], int):
            value = self._of_all_layers(key, value)
        return checked(key, value)

    def _of_all_layers(self, key: str, values: list[Any]) -> Any:
        """The one number of a list with one for each layer, which some classes take."""
        if any(value != values[0] for value in values):
            raise ModelConfigError(f"{key} is {values}: layers differ in it, and a plan has one number for all", key)
        if len(values) < (layers := self.size("num_hidden_layers")):
            raise ModelConfigError(f"{key} lists {len(values)} numbers for {layers} layers", key)
        return values[0]

    def alias(self, name: str) -> str | None:
        """Another name of a key, which transformers reads and may write too."""
        return alias_of(str(self._config.get("model_type")), name)

    def aliased(self, name: str, default: int | None) -> int:
        """The value of a key that has another name, under which it may stand instead."""
        if (alias := self.alias(name)) is None or self._config.get(alias) is None:
            return self.size(name, default)
        if self._config.get(name) not in (None, self._config[alias]):
            raise self.differing(name, self._config[name], alias, self._config[alias])
        return self.size(alias)

    @staticmethod
    def differing(name: str, value: Any, alias: str, other: Any) -> ModelConfigError:
        """One value under two names of its key."""
        message = f"{name} {value} and {alias} {other} are the same key, and differ"
        return ModelConfigError(message, alias, f"keep {name} or {alias}")

    def counts(self, name: str) -> bool:
        """Whether parameters follow from a key."""
        return reads(str(self._config.get("model_type")), self._names.get(name, name) or "")

    def has(self, name: str) -> bool:
        """Whether there is a value, or the family has a default for a key that is left out."""
        return self._config[name] is not None if name in self._config else name in self._defaults

    def is_null(self, name: str) -> bool:
        """Whether the key is there without a value."""
        return name in self._config and self._config[name] is None

    def layers(self, name: str) -> tuple[int, ...]:
        """A list of layers, which may be left out."""
        found = self._config.get(name)
        return tuple(self._defaults.get(name, ()) if found is None else found)

    def number(self, name: str, default: int | None) -> int:
        """A whole number of 0 or more."""
        return whole(self._config, name, default, least=0)


def _class_defaults(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that the class of a model type has for keys that are left out."""
    name = str(config.get("model_type"))
    found = {key: class_default(name, key) for key in ("num_key_value_heads", "head_dim")}
    return {key: value for key, value in found.items() if value is not None}

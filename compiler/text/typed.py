"""Values of other tools' files, read with their types: what is of another one is an error with its name.

YAML 1.1 reads `1e-4` as text, and tools take it for a number; so do `integer` and `number`. A switch is never a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")
_MOST = 2**63 - 1
"""No tool counts further."""
_LARGEST = 3.4e38
"""What fp32 holds. Figures that are multiplied stay finite."""
_SHOWN = 60
"""Characters of a wrong value that a message shows."""


class WrongValueError(ValueError):
    """A value of the wrong type, or out of range. The message is meant for the user.

    `name` is the key, with dots between those of a path.
    """

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__(f"{name} is {shown(value)}: it has to be {wanted}")
        self.name = name


def shown(value: object) -> str:
    """A value for a message, cut short."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MOST:
        return "a number of more than 18 digits"  # Python refuses to write very long ones
    text = repr(value) if not isinstance(value, (Mapping, list)) or len(value) < _SHOWN else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def decimal(text: str) -> int | None:
    """The number that these digits write; None of anything else, and of more than 18 digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def integer(value: object, name: str, *, least: int = -_MOST) -> int:
    """A whole number, also as text or as a fraction without a rest.

    Raises:
        WrongValueError: it is something else, or less than `least`.
    """
    found: object = value
    if isinstance(value, str):
        try:
            found = int(value) if len(value) < _SHOWN else None
        except ValueError:
            found = _float_of(value)
    if isinstance(found, float) and math.isfinite(found) and found == math.floor(found):
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST:
        wanted = "a whole number" if least == -_MOST else f"a whole number of {least} or more"
        raise WrongValueError(name, value, wanted)
    return found


def number(value: object, name: str) -> float:
    """A number that fp32 holds, also as text.

    Raises:
        WrongValueError: it is something else.
    """
    found = _float_of(value)
    if found is None or not abs(found) <= _LARGEST:
        raise WrongValueError(name, value, "a number")
    return found


def _float_of(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def word(value: object, name: str) -> str:
    """A text.

    Raises:
        WrongValueError: it is something else.
    """
    if not isinstance(value, str):
        raise WrongValueError(name, value, "text")
    return value


def list_of(read: Callable[[object, str], Value], value: object, name: str) -> list[Value]:
    """A list whose entries one of the functions above reads.

    Raises:
        WrongValueError: it is something else, or one of its entries is.
    """
    if not isinstance(value, list):
        raise WrongValueError(name, value, "a list")
    return [read(one, f"{name}.{at}") for at, one in enumerate(value)]


class Reader:
    """A mapping of a file, by its keys. `name` is where it stands in the file.

    Raises:
        WrongValueError: `tree` is no mapping.
    """

    def __init__(self, tree: object, name: str = "") -> None:
        if not isinstance(tree, Mapping):
            raise WrongValueError(name or "the file", tree, "a mapping of keys and values")
        self.tree: Mapping[str, Any] = tree
        self._name = name

    def name(self, key: str) -> str:
        """Key and place."""
        return f"{self._name}.{key}" if self._name else key

    def value(self, key: str) -> Any:
        """The value of a key, whatever it is.

        Raises:
            WrongValueError: there is none.
        """
        if key not in self.tree:
            raise WrongValueError(self.name(key), None, "there")
        return self.tree[key]

    def integer(self, key: str, *, least: int = -_MOST) -> int:
        """A whole number."""
        return integer(self.value(key), self.name(key), least=least)

    def number(self, key: str) -> float:
        """A number that fp32 holds."""
        return number(self.value(key), self.name(key))

    def word(self, key: str) -> str:
        """A text."""
        return word(self.value(key), self.name(key))

    def mapping(self, key: str) -> Reader:
        """A mapping."""
        return Reader(self.value(key), self.name(key))

    def maybe(self, key: str) -> Reader | None:
        """A mapping; None where there is none, or null."""
        return None if self.tree.get(key) is None else self.mapping(key)

    def items(self) -> Iterator[tuple[str, Reader]]:
        """Keys with the mapping of each."""
        return ((key, self.mapping(key)) for key in self.tree)

    def words(self) -> dict[str, str]:
        """Keys with the text of each."""
        return {key: self.word(key) for key in self.tree}

    def list_of(self, key: str, read: Callable[[object, str], Value]) -> list[Value]:
        """A list whose entries a function reads, as `integer`."""
        return list_of(read, self.value(key), self.name(key))

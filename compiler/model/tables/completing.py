"""A configuration as its class of transformers holds it: other names of keys, defaults, and values that follow."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from .expression import TableError, evaluate, names
from .reading import Table, table_of

GIVEN = "given."
"""In what follows, before a key: its value before anything followed (`given.num_hidden_layers`)."""
OLDER_KINDS: Mapping[str, str] = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""What files call a kind of layer, where transformers has another word now: its `remap_legacy_layer_types`."""
NAMED_ANEW = ("layer_types", "layers_block_type")
"""Keys that list kinds of layers, with older words too."""
_WITH_PARAMETERS = ("xielu",)
"""Activations that have parameters."""


def complete(table: Table, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every value under its flat name (`text_config.hidden_size`).

    Raises:
        TableError: a key has a value for which the table was not derived, or one that follows cannot be computed.
    """
    return follow(table, given(table, config))


def given(table: Table, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says, and the defaults of its class; no value that follows from others.

    Raises:
        TableError: a key has a value for which the table was not derived.
    """
    if config.get("per_layer_config"):
        raise TableError("per_layer_config: layers that differ one by one are not derived", "per_layer_config")
    for key, value in config.items():
        if value in _WITH_PARAMETERS and table.defaults.get(key) != value:
            raise TableError(f"{key} is {value!r}: parameters of this activation are not derived for this type", key)
    found = {**table.defaults, **_by_own_names(table, config)}
    for key, default in table.fixed.items():
        if found.get(key) != default:
            raise TableError(f"{key} is {found[key]!r}: parameters are derived for {default!r} only", key)
    return found


def _by_own_names(table: Table, config: Mapping[str, Any], *, once: bool = False) -> dict[str, Any]:
    """What the configuration says, under the names of the class. Of two names, that which it sets last counts.

    Raises:
        TableError: two names of a key have different values, where each has to be said `once`.
    """
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, value in flat(config, table.nested).items():
        owner, dot, _ = key.rpartition(".")
        name = table.names.get(key, key.removeprefix(owner + dot))
        own, today = owner + dot + name, with_kinds_of_today(name, value)
        if once and own in found and found[own] != today:
            first, second = sorted((said[own], key), key=table.names.__contains__)
            raise TableError(f"{first} and {second} are the same key, and differ", second)
        found[own], said[own] = today, key
    return found


def with_kinds_of_today(name: str, value: Any) -> Any:
    """The value of a key; where it lists kinds of layers, by the words that transformers has for them now."""
    if name not in NAMED_ANEW or not isinstance(value, list | tuple):
        return value
    return [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in value]


def stated(table: Table, config: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    """The values of `given` that the rows of the table follow from; lists as tuples.

    Raises:
        TableError: the table does not tell the parameters of this configuration.
    """
    _by_own_names(table, config, once=True)
    values = given(table, config)
    return tuple((key, _told(key, values[key])) for key in keys_read(table) if key in values)


def _told(key: str, value: Any) -> Hashable:
    found = frozen(value)
    try:
        hash(found)
    except TypeError:
        raise TableError(f"{key} is or holds a mapping: parameters follow from numbers, texts and lists", key) from None
    return found


def frozen(value: Any) -> Hashable:
    """The value with lists as tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def thawed(values: Iterable[tuple[str, Hashable]]) -> dict[str, Any]:
    """What `stated` gave, as values of a configuration."""
    return {key: _thawed(value) for key, value in values}


def _thawed(value: Any) -> Any:
    return list(map(_thawed, value)) if isinstance(value, tuple) else value


@functools.cache
def _keys_read(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({key.removeprefix(GIVEN) for text in texts for key in names(text)}))


def keys_read(table: Table) -> tuple[str, ...]:
    """The keys that expressions of a table read, in alphabetical order."""
    rows = (text for row in table.rows for text in (row.when, *row.shape))
    return _keys_read(tuple(dict.fromkeys((*table.stacks.values(), *table.derived.values(), *table.derived, *rows))))


def reads(model_type: str, key: str) -> bool:
    """Whether parameters of a type follow from a key."""
    table = table_of(model_type)
    return table is not None and key in keys_read(table)


@functools.cache
def alias_of(model_type: str, key: str) -> str | None:
    """Another name of a key, which the class of a type reads and may write too."""
    table = table_of(model_type)
    if table is None:
        return None
    own = table.names.get(key, key)
    return next((name for name in (own, *table.names) if name != key and table.names.get(name, name) == own), None)


def follow(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the values that follow from others.

    Raises:
        TableError: one cannot be computed.
    """
    found = dict(values)
    scope = {**{GIVEN + key: value for key, value in found.items()}, **found}
    for key, text in table.derived.items():
        found[key] = scope[key] = _following(key, text, scope)
    return found


def _following(key: str, text: str, scope: Mapping[str, Any]) -> Any:
    try:
        return evaluate(text, scope)
    except TableError as error:
        raise TableError(f"{key} does not follow from this configuration: {error}", error.key or key) from None


def flat(config: Mapping[str, Any], nested: frozenset[str], prefix: str = "") -> dict[str, Any]:
    """The values of a configuration and of those inside it, under flat names; other mappings stay whole."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix + key
        if name in nested and isinstance(value, Mapping):
            found.update(flat(value, nested, f"{name}."))
        else:
            found[name] = value
    return found

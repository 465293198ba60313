"""Files that a JSON Schema of the project allows, drawn by hypothesis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Schema = Mapping[str, Any]
_SCHEMAS = Path(__file__).parents[2] / "schemas"
_MOST_KEYS = 6
"""Keys that no schema asks for, of one mapping: with all of them, some of which exclude others, none would be right."""


def strategy(node: Any, root: Schema) -> st.SearchStrategy[Any]:
    """Values that a node of a schema mostly allows: `if`, `not` and what depends on other keys are left to chance."""
    if not isinstance(node, Mapping):
        return st.sampled_from([None, 1, "x"])
    if "$ref" in node:
        found: Any = root
        for step in node["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return st.deferred(lambda: strategy(found, root))
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    for several in ("oneOf", "anyOf"):
        if several in node:
            rest = {key: value for key, value in node.items() if key != several}
            return st.one_of([strategy({**rest, **one}, root) for one in node[several] if isinstance(one, Mapping)])
    types = node.get("type", "object" if "properties" in node else ["string", "integer", "null"])
    told = [*node.get("examples", ()), *([node["default"]] if "default" in node else ())]
    if told and types == "string":
        return st.sampled_from(told)  # what is no name of anything is the business of mutants
    drawn = st.one_of([_typed(one, node, root) for one in ([types] if isinstance(types, str) else types)])
    return st.one_of(st.sampled_from(told), drawn) if told else drawn


def _typed(name: str, node: Schema, root: Schema) -> st.SearchStrategy[Any]:
    if name == "object":
        return _mapping(node, root)
    if name == "array":
        first = [strategy(one, root) for one in node.get("prefixItems", ())]
        if first:
            return st.tuples(*first).map(list)
        least = node.get("minItems", 0)
        most = min(node.get("maxItems", least + 3), least + 3)
        return st.lists(strategy(node.get("items", {}), root), min_size=least, max_size=most)
    if name in ("integer", "number"):
        least = node.get("minimum", node.get("exclusiveMinimum", -4))
        most = node.get("maximum", node.get("exclusiveMaximum", 2**40))
        if name == "number":
            return st.floats(least, most, allow_nan=False, width=64)
        small = st.integers(int(least), min(int(most), int(least) + 16))
        return st.one_of(small, st.integers(int(least), int(most)))
    if name == "string":
        least, most = node.get("minLength", 0), min(node.get("maxLength", 12), 12)
        letters = st.characters(codec="ascii", exclude_categories=["Cc"])
        if "pattern" in node:
            return st.from_regex(node["pattern"], fullmatch=True, alphabet=letters)
        return st.text(letters, min_size=least, max_size=max(least, most))
    return st.booleans() if name == "boolean" else st.none()


@st.composite
def _mapping(draw: st.DrawFn, node: Schema, root: Schema) -> dict[str, Any]:
    known = {key: value for key, value in node.get("properties", {}).items() if value is not False}
    found = {key: draw(strategy(known.get(key), root)) for key in node.get("required", ())}
    others = [key for key in known if key not in found]
    for key in draw(st.lists(st.sampled_from(others), max_size=_MOST_KEYS, unique=True)) if others else ():
        found[key] = draw(strategy(known[key], root))
    beside = node.get("additionalProperties")
    if isinstance(beside, Mapping):
        names = strategy({"type": "string", **node.get("propertyNames", {})}, root)
        found |= draw(st.dictionaries(names, strategy(beside, root), min_size=node.get("minProperties", 0), max_size=2))
    return found


def drawn(name: str, count: int, number: int) -> list[Any]:
    """Up to that many trees of a schema of the project, the same for the same `number`."""
    root = json.loads((_SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy(root, root))
    def draw(tree: Any) -> None:
        found.append(tree)

    draw()
    return found

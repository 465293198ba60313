"""docs/spec.md: every key of the spec, from its schema. `python .ci/pages/spec_page.py` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from parcompile.schema import load
from parcompile.schema.values import about, example, resolved

_START = """\
# The spec, key by key

This page is written by `python .ci/pages/spec_page.py` from the schema itself; `parcompile schema spec` prints
that, for editors. A spec is JSON or YAML. It is closed at every level: a key that is not on this page is an error.
A key without a default may be left out where *required* does not stand; what then holds is said in its line, and
`parcompile check SPEC --show-values` shows what became of every value.
"""


def reference() -> str:
    """The whole document."""
    schema = load("spec")
    shown = f"```json\n{json.dumps(example(schema), indent=2, ensure_ascii=False)}\n```\n"
    return "\n".join([_START, shown, *_section((), schema, schema)])


def _section(path: tuple[str, ...], node: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    """A table of an object's keys, then a section for each key that holds objects."""
    if path:
        yield f"{'#' * min(len(path) + 1, 4)} {'.'.join(path)}\n"
        yield f"{_sentence(node)}\n"
    inner: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
    if node.get("properties"):
        yield "| key | value | default | |\n|---|---|---|---|"
    for key, entry in node.get("properties", {}).items():
        found = resolved(entry, root)
        default = "*required*" if key in node.get("required", []) else _code(found.get("default", {}), empty="")
        said = _sentence(found).replace("|", r"\|").replace("*", r"\*").replace("\n", " ")
        yield f"| `{key}` | {_values(found, root)} | {default} | {said} |"
        inner += _objects((*path, key), found, root)
    if node.get("properties"):
        yield ""
    for where, part in inner:
        yield from _section(where, part, root)


def _objects(
    path: tuple[str, ...], node: Mapping[str, Any], root: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The objects that a key can hold, each with the name of its section."""
    if node.get("properties"):
        yield path, node
    for part in (resolved(one, root) for one in [*node.get("oneOf", []), *filter(None, [node.get("then")])]):
        if part.get("properties"):
            yield (*path[:-1], f"{path[-1]} ({str(part['title']).lower()})"), part
    further = node.get("additionalProperties")
    if isinstance(further, dict):
        yield from _objects((*path, "NAME"), resolved(further, root), root)


def _values(node: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What a key may hold, in words."""
    if "const" in node:
        return _code(node["const"])
    if "enum" in node:
        return ", ".join(map(_code, node["enum"]))
    if "oneOf" in node:
        parts = [resolved(one, root) for one in node["oneOf"]]
        return " or ".join(
            f"*{one['title'].lower()}*" if one.get("properties") else _values(one, root) for one in parts
        )
    if "else" in node:
        condition = node["if"]
        if "pattern" in condition:
            return f"{_values(node['else'], root)}, or text that matches `{condition['pattern']}`"
        return f"{_values(node['else'], root)}, or *{resolved(node['then'], root)['title'].lower()}*"
    kind = node.get("type")
    if kind == "array":
        return f"list of {_values(resolved(node['items'], root), root)}"
    if kind in ("integer", "number"):
        return f"{'whole number' if kind == 'integer' else 'number'}{_range(node)}"
    if kind is None and isinstance(node.get("default"), dict):
        return "object"  # what may stand in it another schema says
    return {"string": "text", "boolean": "`true`, `false`", "object": "object"}.get(str(kind), str(kind))


def _range(node: Mapping[str, Any]) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    below = node.get("exclusiveMaximum")
    found = [f"≥ {low}"] if low is not None else [f"> {above}"] if above is not None else []
    # Largest values only keep out what no machine can hold.
    return " " + ", ".join([*found, *([f"< {below}"] if below is not None else [])]) if found else ""


def _code(value: object, empty: str = "`{}`") -> str:
    return empty if value == {} else f"`{json.dumps(value, ensure_ascii=False)}`"


def _sentence(node: Mapping[str, Any]) -> str:
    text = about(node) or str(node.get("title", ""))
    shown = example(node)
    more = f" Example: {_code(shown)}." if isinstance(shown, (str, int, float)) and shown != node.get("default") else ""
    return f"{text}.{more}"


if __name__ == "__main__":
    sys.stdout.write(reference())

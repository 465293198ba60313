"""Text of artefacts: JSON with the same bytes on every machine, and the lines at the head of other files."""

from __future__ import annotations

import json
import re

from parcompile.plan import Plan

# JSON as it is written: the same bytes on every machine, short things on one line.

WIDTH = 120
"""Columns up to which a list or a small object stays on one line."""


def to_text(tree: object) -> str:
    """JSON with two spaces of indentation, keys in the order of the tree.

    Raises:
        ValueError: a number is not finite.
    """
    return _render(tree, 0) + "\n"


def _render(node: object, indent: int) -> str:
    if isinstance(node, dict) and node:
        parts = [f"{_scalar(str(key))}: {_render(value, indent + 2)}" for key, value in node.items()]
        return _joined(parts, "{", "}", indent, one_line=indent > 0)
    if isinstance(node, (list, tuple)) and node:
        if all(type(item) is int for item in node):
            return json.dumps(node)
        return _joined([_render(item, indent + 2) for item in node], "[", "]", indent, one_line=True)
    return _scalar(node)


def _joined(parts: list[str], start: str, stop: str, indent: int, *, one_line: bool) -> str:
    line = ", ".join(parts)
    if one_line and len(line) + indent + 2 <= WIDTH and "\n" not in line:
        return start + line + stop
    space = " " * (indent + 2)
    return f"{start}\n" + ",\n".join(space + part for part in parts) + f"\n{' ' * indent}{stop}"


def _scalar(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, which JSON can escape, has no UTF-8.
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Who wrote an artefact: the lines that stand at the head of files which are not JSON.


def header(plan: Plan, about: str, *, comment: str = "#") -> list[str]:
    """Comment lines with the plan's identity.

    The name is written as a JSON string: quotes and control characters of it are escaped, so it cannot end the comment.
    """
    name = json.dumps(plan.spec.name, ensure_ascii=True)
    lines = [
        about,
        f"plan {name}, {plan.world_size} ranks",
        f"parcompile {plan.compiler_version}, spec {plan.spec_hash}",
    ]
    return [f"{comment} {line}" for line in lines]


def slug(name: str, *, limit: int = 50) -> str:
    """The name as a DNS label: lower-case letters, digits and single hyphens, as Kubernetes and Slurm take them."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:limit].rstrip("-")
    return text or "unnamed"

"""The options of a copy of Megatron-LM, or of a fork of it, read from its sources, none of which is imported.

An option is an `add_argument` with literal flags in any Python file. Where the parser is made from dataclasses too
(`ArgumentGroupFactory`), every field of a dataclass is one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TYPES = {"int": int, "float": float}


@dataclass(frozen=True)
class Option:
    """What one `add_argument` says of a flag; `type` and `choices` are None where they take everything."""

    type: str | None = None
    choices: tuple[Any, ...] | None = None

    def takes(self, value: Any) -> bool:
        """Whether a value, as it is written, is one of the option's."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # the checker has read it: it may have been a whole number
        try:
            converted = _TYPES[self.type](str(value)) if self.type in _TYPES else str(value)
        except ValueError:
            return False
        return self.choices is None or converted in self.choices


def options(folder: Path) -> dict[str, list[Option]]:
    """The options by flag; several where several programs of the folder have the flag."""
    trees = [tree for file in sorted(folder.rglob("*.py")) if (tree := _tree(file)) is not None]
    found: dict[str, list[Option]] = {}
    is_made = any(isinstance(one, ast.ClassDef) and one.name == "ArgumentGroupFactory" for one in _nodes(trees))
    for node in _nodes(trees):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for flag, option in _added(node):
                found.setdefault(flag, []).append(option)
        elif isinstance(node, ast.Attribute) and node.attr == "add_config_arguments":
            for flag in ("--deepspeed", "--deepspeed_config", "--deepscale", "--deepscale_config"):
                found.setdefault(flag, []).append(Option())  # DeepSpeed's function adds them
        elif (
            is_made
            and isinstance(node, ast.ClassDef)
            and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        ):
            for flag in _fields(node):
                found.setdefault(flag, []).append(Option())
    return found


def refusals(known: Mapping[str, list[Option]], given: Mapping[str, Any]) -> dict[str, str]:
    """Why a parser with these options ends at flags with values (True for a flag alone), by flag."""
    found = dict[str, str]()
    for flag, value in given.items():
        having = known.get(flag)
        if having is None:
            found[flag] = f"unrecognized arguments: {flag}"
        for one in (value if isinstance(value, list) else [value]) if having is not None else ():
            if not isinstance(one, bool) and not any(option.takes(one) for option in having):
                found[flag] = f"argument {flag}: invalid value: {one!r}"
    return found


def _tree(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return None


def _nodes(trees: list[ast.Module]) -> Iterator[ast.AST]:
    for tree in trees:
        yield from ast.walk(tree)


def _added(call: ast.Call) -> Iterator[tuple[str, Option]]:
    said = {one.arg: one.value for one in call.keywords}
    try:
        choices = tuple(ast.literal_eval(said["choices"])) if "choices" in said else None
    except (ValueError, TypeError):
        choices = None
    kind = said.get("type")
    option = Option(kind.id if isinstance(kind, ast.Name) else None, choices)
    for one in call.args:
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith("--"):
            yield one.value, option
            if "BooleanOptionalAction" in ast.unparse(said.get("action", one)):
                yield f"--no-{one.value[2:]}", option


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            name = one.target.id.replace("_", "-")
            yield from (f"--{name}", f"--no-{name}", f"--disable-{name}")
            texts = (text.value for text in ast.walk(one) if isinstance(text, ast.Constant))
            yield from (text for text in texts if isinstance(text, str) and text.startswith("--"))

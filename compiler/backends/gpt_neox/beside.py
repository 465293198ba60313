"""The keys of the gpt-neox in whose folder a configuration lies: forks have keys and choices of their own.

Its classes are read and not imported.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from parcompile.text import SourceError, SourceText
from parcompile.text.python import parsed_python
from parcompile.user_files import read_bytes

from . import ANY, VERSIONS, Field

_CLASSES = Path("megatron", "neox_arguments")
_FILES = ("deepspeed_args.py", "neox_args.py", "arguments.py")
_PARENTS = 8
"""So far up from a configuration."""
_LARGEST_BYTES = 1 << 20


class Beside(NamedTuple):
    """What a fork takes: its fields by name, its kinds of attention, none where they were not found, and its checks."""

    fields: Mapping[str, Field]
    attention: tuple[str, ...]
    replaced: frozenset[str]
    """Fields that it sets before it looks at types, whatever a file says."""
    checks: str = ""
    """The text of the module that validates values."""


def beside(file: str) -> Beside | None:
    """What the gpt-neox above a file takes; None where there is none."""
    for folder in Path(file).absolute().parents[:_PARENTS]:
        with suppress(OSError, SourceError):
            texts = [read_bytes(folder / _CLASSES / name, _LARGEST_BYTES) for name in _FILES]
            return _read(tuple(texts))
    return None


@functools.lru_cache(maxsize=8)
def _read(texts: tuple[bytes, ...]) -> Beside:
    found, attention = dict[str, Field](), ()
    listed = re.search(rb"^BASE_CLASSES[^=]*=\s*[\[(]([^\])]*)", texts[-1], re.MULTILINE)
    bases = set(re.findall(r"\w+", listed[1].decode())) if listed else set[str]()  # others are another program's
    for name, text in zip(_FILES[:-1], texts, strict=False):
        tree = parsed_python(SourceText(name, text.decode("utf-8", errors="replace")))
        parts = [node for node in tree.body if not isinstance(node, ast.ClassDef) or not bases or node.name in bases]
        for one in (inner for node in parts for inner in (node.body if isinstance(node, ast.ClassDef) else [node])):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                types, choices = _described(one.annotation)
                default = one.value.value if isinstance(one.value, ast.Constant) else None
                found[one.target.id] = Field(one.target.id, (VERSIONS[-1],), types, choices, default, handed_on=False)
            elif isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "ATTENTION_TYPE_CHOICES":
                with suppress(ValueError, TypeError):
                    attention = tuple(ast.literal_eval(one.value))
    checks = texts[-1].decode("utf-8", errors="replace")
    made = frozenset[str]()
    with suppress(SourceError):
        made = replaced(parsed_python(SourceText(_FILES[-1], checks)))
    return Beside(found, attention, made, checks)


def replaced(tree: ast.Module) -> frozenset[str]:
    """The fields that `calculate_derived` sets and does not ask for."""
    function = next((one for one in ast.walk(tree) if getattr(one, "name", "") == "calculate_derived"), None)
    written, read = set[str](), set[str]()
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            read.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("self.update_value", "self.update_values"):
            names = node.args[0].keys if node.args and isinstance(node.args[0], ast.Dict) else node.args[:1]
            written |= {str(one.value) for one in names if isinstance(one, ast.Constant)}
    return frozenset(written - read)


def _described(annotation: ast.expr) -> tuple[tuple[str, ...], tuple[object, ...]]:
    """The types that an annotation names, or its choices."""
    if not isinstance(annotation, ast.Subscript):
        return _types(annotation), ()
    kind = ast.unparse(annotation.value).rpartition(".")[2]
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if kind == "Literal" and all(isinstance(one, ast.Constant) for one in inner):
        return (), tuple(one.value for one in inner)  # type: ignore[attr-defined]
    if kind in ("Union", "Optional"):
        # `validate_types` looks for the type of a value among these: `List[int]` is that of none.
        plain = [one for one in inner if not isinstance(one, ast.Subscript)] or inner
        return tuple(name for one in plain for name in _types(one)), ()
    return _types(annotation.value), ()


_TYPES = frozenset({"int", "float", "str", "bool", "dict", "list"})


def _types(annotation: ast.expr) -> tuple[str, ...]:
    """Names of types as `validate_types` compares them; ANY for those that nothing is known of."""
    if isinstance(annotation, ast.BinOp):
        return (*_types(annotation.left), *_types(annotation.right))
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return ()
    if isinstance(annotation, ast.Subscript):
        return _types(annotation.value)
    name = ast.unparse(annotation).rpartition(".")[2].lower()
    return (name if name in _TYPES else ANY,)

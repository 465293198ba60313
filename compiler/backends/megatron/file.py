"""Reads Megatron-LM arguments out of a shell script, or a YAML or JSON file, as a document of flags and values.

The document's tree is flat: `tensor_model_parallel_size` stands for `--tensor-model-parallel-size` wherever it was
written. Its text cannot be edited through it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parcompile.schema.values import as_number
from parcompile.text import Document, Place, SourceText

MEGATRON_FORMAT = "megatron"

_FLAG = re.compile(r"""(?<![\w-])--([A-Za-z][A-Za-z0-9_-]*)(?:(?:=|[ \t]+|[ \t]*\\\r?\n[ \t]*)(?!--)([^\s\\#)]+))?""")
_ASSIGNMENT = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=["']?([^\s"'$`()]+)["']?[ \t]*;?[ \t]*(?:#.*)?$""", re.M
)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.M)
_VARIABLE = re.compile(r"""^["']?\$\{?([A-Za-z_]\w*)\}?["']?$""")
_MARKS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "max_position_embeddings",
        "num_layers",
        "hidden_size",
        "use_distributed_optimizer",
    }
)
"""Arguments of which every file of this kind has several."""


def is_shell_arguments(text: str) -> bool:
    """Whether a text that is neither JSON nor YAML passes Megatron-LM's arguments."""
    # Megatron-LM writes its flags with hyphens; ms-swift has them with underscores.
    return len(_MARKS & {_name(match[1]) for match in _FLAG.finditer(text) if "_" not in match[1]}) >= 2


def is_argument_tree(tree: object) -> bool:
    """Whether a parsed file holds Megatron-LM's arguments, at any depth; a spec or a model's configuration does not."""
    found = {_name(key) for key, _, _ in _leaves(tree, ())}
    return len(_MARKS & found) >= 2 and bool(found & {"tensor_model_parallel_size", "pipeline_model_parallel_size"})


def from_shell(source: SourceText) -> Document:
    """The arguments in a script. Variables that the script sets to a plain value are filled in."""
    text = _COMMENT.sub(lambda match: " " * len(match[0]), source.text)
    variables = {match[1]: match[2] for match in _ASSIGNMENT.finditer(text)}
    tree: dict[str, Any] = {}
    children: dict[str, Place] = {}
    for match in _FLAG.finditer(text):
        name, value = _name(match[1]), match[2]
        start, end = match.span(2) if value is not None else match.span(1)
        if value is not None and (variable := _VARIABLE.match(value)):
            value = variables.get(variable[1], value)
        tree[name] = True if value is None else _value(value.strip("\"'"))
        children[name] = Place(start, end, match.start(), match.end(1), None)
    return Document(source, tree, Place(0, len(source.text), -1, -1, children), MEGATRON_FORMAT)


def from_tree(document: Document) -> Document:
    """The arguments in a YAML or JSON file."""
    tree: dict[str, Any] = {}
    children: dict[str, Place] = {}
    for key, path, value in _leaves(document.tree, ()):
        place = document.place(path)
        if place is not None:
            tree[_name(key)] = _value(value) if isinstance(value, str) else value
            children[_name(key)] = place._replace(children=None)
    root = document.root._replace(children=children)
    return replace(document, tree=tree, root=root, format=MEGATRON_FORMAT, invalid=frozenset(), duplicates=frozenset())


def _leaves(tree: object, path: tuple[str | int, ...]) -> Iterator[tuple[str, tuple[str | int, ...], object]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from _leaves(value, (*path, key))
            else:
                yield key, (*path, key), value


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = as_number(text)
    return text if number is None else number

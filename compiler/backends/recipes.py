"""Files of trainers that configure themselves in Python, TOML or their own words of a shell: how each becomes options.

Python is read as `parcompile.text.python` reads it: nothing is run.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parcompile.text import Document, Place, SourceError, SourceText, read_source
from parcompile.text.python import Configuration, Made, Open, configuration, functions, parsed_python
from parcompile.text.shell import ShellLimitError, Value, invocations
from parcompile.text.shell.state import State
from parcompile.text.shell.words import known, missing, shown
from parcompile.text.typed import decimal
from parcompile.units import first_of

from .kinds import BRIDGE, MEGATRON_SWIFT, SWIFT, TORCHTITAN
from .reading import Undecided, as_switch, leaves

_PYTHON = {TORCHTITAN: re.compile(r"\btorchtitan\b"), BRIDGE: re.compile(r"\bmegatron\.bridge\b")}
_KEPT = re.compile(
    r"default_adamw|model_registry|decoder_vocab_size|from_hf_pretrained|get_mixed_precision_config|\w+_mixed"
)
"""Functions whose names and arguments say all that an import asks of them."""


RECIPES = (TORCHTITAN, BRIDGE, SWIFT, MEGATRON_SWIFT)
"""The kinds of such files."""


def recipe(
    file: str, function: str | None = None, variables: Mapping[str, str] | None = None
) -> tuple[Document, str] | None:
    """The document of a Python or TOML file, or of a script that calls ms-swift, with its kind; None for any other.

    Args:
        file: its name.
        function: which configuration of a Python file is meant, where there are several.
        variables: those of the environment that a script would find.

    Raises:
        SourceError: it cannot be read, or the function has to be named.
    """
    suffix = Path(file).suffix
    if suffix not in (".py", ".toml", ".sh"):
        return None
    source = read_source(file)
    if suffix == ".sh":
        return _swift(source, dict(variables or {}))
    if suffix == ".toml":
        tree = _toml(source)
        return (
            (_document(source, tree), TORCHTITAN) if tree.keys() & {"parallelism", "training", "lr_scheduler"} else None
        )
    kind = next((kind for kind, mark in _PYTHON.items() if mark.search(source.text)), None)
    if kind is None:
        return None
    return _document(source, {"": configuration(source, _chosen(source, function), _KEPT)}), kind


def _document(source: SourceText, tree: Mapping[str, Any]) -> Document:
    return Document(source, tree, Place(0, len(source.text), -1, -1, None), "recipe")


def _toml(source: SourceText) -> dict[str, Any]:
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError:
        raise SourceError(
            f"{source.file}: TOML is read by Python 3.11 or newer; this is {sys.version.split()[0]}"
        ) from None
    try:
        tree: dict[str, Any] = tomllib.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{source.file}: this is no TOML: {error}") from None
    return tree


def _chosen(source: SourceText, function: str | None) -> str:
    """The function that is meant: the named one, `plan` of a file of ours, or the only one.

    Raises:
        SourceError: there is none, or there are several.
    """
    if function is not None:
        return function
    found = functions(parsed_python(source))
    if "plan" in found or len(found) == 1:
        return "plan" if "plan" in found else found[0]
    if not found and "def apply(config)" in source.text:
        return "apply"
    if not found:
        raise SourceError(f"{source.file}: no function of it builds a configuration")
    said = f"{source.file} has {len(found)} configurations: name one with --function"
    raise SourceError(f"{said}: {first_of(found, 8)}")


def flattened(tree: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Every value of a file by its dotted name, `Undecided` where the file leaves it open.

    What a function builds that is not followed leaves all of the known options below it open. What a call made stays
    beside its attributes where it says something: a `Made` with a text, or without attributes.
    """
    read = tree.get("")
    if not isinstance(read, Configuration):
        return {name: _plain(value) for name, value in leaves(tree)}
    made = {"": read.built, **{".".join(path): value for path, value in read.parts.items()}}
    found = {
        name: _plain(value)
        for name, value in made.items()
        if name and (not isinstance(value, Made) or value.said is not None or not value.fields or _is_kept(value))
    }
    for name in known:
        if name not in found and (nearest := _left(made, name)) is not None:
            found[name] = Undecided("", f"{nearest}(), whose file was not found,")
    return found | {statement: Undecided(statement, "Python, which is not run") for statement in read.unread}


def _left(made: Mapping[str, Any], name: str) -> str | None:
    """The function that is not followed and makes what is nearest around an option; None where that is known."""
    while name:
        name = name.rpartition(".")[0]
        if isinstance(one := made.get(name), Made):
            is_left = one.is_left and one.said is None and not _is_kept(one)
            return one.name if is_left else None if one.name else _left(made, name)
    return None


def _is_kept(made: Made) -> bool:
    return _KEPT.fullmatch(made.name.rpartition(".")[2]) is not None


def built(tree: Mapping[str, Any]) -> Made | None:
    """What the function of a Python file builds; None for other files."""
    read = tree.get("")
    return read.built if isinstance(read, Configuration) else None


def _plain(value: Any) -> Any:
    return Undecided(str(value), value.by) if isinstance(value, Open) else value


# Scripts that call ms-swift.

_TRAINING = frozenset({"pt", "sft", "rlhf"})
_CALL = re.compile(r"\b(swift|megatron)\s+(pt|sft|rlhf)\b")
_RANKS = {"NPROC_PER_NODE": "nproc_per_node", "NNODES": "nnodes"}


def _swift(source: SourceText, variables: dict[str, str]) -> tuple[Document, str] | None:
    """The first call of ms-swift in a script that trains."""
    if not _CALL.search(source.text):
        return None
    try:
        run = invocations(source.text, variables)
    except ShellLimitError as error:
        raise SourceError(f"{source.file}: this script is not followed to its end: {error}") from None
    for one in run.invocations:
        words = [shown(word) for word in one.words]
        for at, name in enumerate(words[:-1]):
            if name in ("swift", "megatron") and words[at + 1] in _TRAINING:
                tree = dict(_arguments(one.words[at + 2 :]))
                tree |= _ranks(source.text, run.states) | {"command": words[at + 1]}
                return _document(source, tree), SWIFT if name == "swift" else MEGATRON_SWIFT
    if named := re.search(rf"{_CALL.pattern}[\s\\\\]+([^\s-]\S*\.(?:ya?ml|json))", source.text):
        raise SourceError(f"{source.file}: the arguments of {named[1]} {named[2]} are in {named[3]}: import that file")
    return None


def _arguments(words: Iterable[Value]) -> Iterator[tuple[str, Any]]:
    name, found = "", list[Any]()
    for word in (*words, None):
        text = None if word is None else shown(word)
        if text is None or (text.startswith("--") and len(text) > 2):
            if name:
                yield name, found[0] if len(found) == 1 else found or True
            if text is None:
                return
            name, equals, value = text[2:].partition("=")
            name, found = name.replace("-", "_"), [as_switch(value)] if equals else []
        elif word is not None:
            names = ", ".join(missing(word))
            found.append(as_switch(text) if known(word) is not None else Undecided(text, f"variable {names}"))


def _ranks(text: str, states: Iterable[State]) -> dict[str, Any]:
    """Ranks that the script gives to the launcher of ms-swift as variables of the environment, or of its own."""
    ranks = {}
    for variable, name in _RANKS.items():
        if match := re.search(rf"\b{variable}=[\"']?(?:(\d+)|\$\{{?(\w+))", text):
            said = {match[1]} if match[1] else {_string(state, match[2]) for state in states}
            count = said.pop() if len(said) == 1 else None
            if count is not None and decimal(count):
                ranks[name] = int(count)
    return ranks


def _string(state: State, name: str) -> str | None:
    value = state.string(name)
    return None if value is None else known(value)

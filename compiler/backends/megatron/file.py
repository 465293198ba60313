"""Reads Megatron-LM arguments out of a shell script, or a YAML or JSON file, as documents of options and values.

The tree of such a document is flat: `tensor_model_parallel_size` stands for `--tensor-model-parallel-size` wherever it
was written. Its text cannot be edited through it. A script that goes several ways, or calls several programs, gives
one document for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parcompile.text import Document, Place, SourceError, SourceText
from parcompile.text.shell import Invocation, ShellLimitError, Value, invocations
from parcompile.text.shell.words import fields, known, missing, shown, span, unquoted
from parcompile.text.typed import decimal
from parcompile.user_files import read_bytes, shipped

from .arguments import Arguments, Unknown, Word, line, parsed, spelling

MEGATRON_FORMAT = "megatron"

_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][A-Za-z0-9_-]*)")
_SOURCES = re.compile(r"^\s*(?:source|\.)\s", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][\w.:-]*)")
_NAMES = shipped("parcompile.backends.megatron", "groups.json")
_MARKS = frozenset(_NAMES["marks"])
"""Arguments of which every file of this kind has several."""
_INFERENCE = frozenset({"gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens"})
"""Settings of vLLM and SGLang, which have Megatron-LM's names for the sizes of their layout too."""
_BRIDGE = frozenset(_NAMES["sections of Megatron-Bridge"])
"""The sections of Megatron-Bridge's `ConfigContainer`."""
_YAML_CFG = frozenset({"language_model", "model_parallel"})
"""Sections of a file for `--yaml-cfg` of Megatron-LM, which reads them and the values beside them as one run."""
LARGEST_SOURCED_BYTES = 1 << 20
PARENTS = 8
"""So far up from a script its program, and what it sources, are looked for."""
OWN_PROGRAM = "pretrain_gpt.py"
"""What the recipes of Megatron-LM's functional tests call, or one like it."""
RECIPE = "MODEL_ARGS"
"""The key of the arguments in a recipe of Megatron-LM's functional tests."""
_INFERS = re.compile("inference|generation")
"""In names of Megatron-LM's programs that do not train: `gpt_dynamic_inference.py`, `run_text_generation_server.py`."""
_LAUNCHING = ("torch.distributed.", "accelerate.")
"""Modules that start other programs."""
_LAUNCHED = {"nnodes": ("nnodes", "num_nodes"), "nproc_per_node": ("nproc_per_node", "num_gpus", "gpus_per_node")}
"""What a launcher says of the machines, under its several names."""
_MACHINES = frozenset({"world_size", *(name for names in _LAUNCHED.values() for name in names)})


@dataclass(frozen=True)
class Call(Document):
    """The arguments of one call. `arguments` holds what its flat tree cannot say."""

    arguments: Arguments = field(default_factory=lambda: Arguments(line().name))
    others: tuple[Call, ...] = ()
    """The other calls of the same script, and the other ways to it."""
    is_command_line: bool = True
    """Whether it is certain that Megatron-LM's own parser reads it."""
    program: str | None = None
    """The Python file or module that is called, as it is written; None: the file does not say."""
    trains: bool = True
    """Whether it trains, and does not infer."""


def is_shell_arguments(text: str) -> bool:
    """Whether a text that is neither JSON nor YAML passes Megatron-LM's arguments."""
    # Megatron-LM writes its flags with hyphens; ms-swift has them with underscores. Others may stand in a sourced file.
    marks = _MARKS & {spelling(match[1]) for match in _FLAG.finditer(text) if "_" not in match[1]}
    return len(marks) >= (1 if _SOURCES.search(text) else 2)


def is_argument_tree(tree: object) -> bool:
    """Whether a parsed file holds Megatron-LM's arguments; a spec or a model's configuration does not."""
    return isinstance(tree, dict) and (bool(_sections(tree)) or _is_marked(_list(tree)))


def from_shell(
    source: SourceText,
    variables: Mapping[str, str] | None = None,
    read: Callable[[str], str | None] | None = None,
) -> Call | None:
    """The calls in a script, the first of them with the others in `others`; None when there is none.

    Args:
        source: the script.
        variables: those of the environment that are known.
        read: gives the text of files that the script sources.

    Raises:
        SourceError: its values grow without end, or it takes too long.
    """
    try:
        run = invocations(source.text, dict(variables or {}), read)
    except ShellLimitError as error:
        at = "" if error.start is None else f":{source.position(error.start).line}"
        raise SourceError(f"{source.file}{at}: this script is not followed to its end: {error}") from None
    calls = [call for one in run.invocations if (call := _call(source, one)) is not None]
    if not calls:
        calls = [call for state in run.states if (call := _fragment(source, state.variables, state.arrays)) is not None]
    if not calls:
        return None
    unique: list[Call] = []
    for call in calls:
        if not any(call.tree == one.tree and call.root == one.root for one in unique):
            unique.append(call)
    return replace(unique[0], others=tuple(unique[1:]))


def sourced_text(script: Path, name: str) -> str | None:
    """The text of a file that a script sources, by its path from the script's folder, those above, or the current."""
    for folder in (script.parent, Path(), *script.absolute().parents[1:PARENTS]):
        file = folder / name
        try:
            if file.is_file():
                return read_bytes(file, LARGEST_SOURCED_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError):
            return None
    return None


def imported(document: Document) -> Mapping[str, Any]:
    """The values of a document as an import takes them: where ways through a script differ, the script decides none."""
    tree: Mapping[str, Any] = document.tree  # type: ignore[assignment]  # flat by construction
    if not isinstance(document, Call) or not document.others:
        return tree
    found, others = dict(tree), document.others
    every: list[Mapping[str, Any]] = [tree, *(other.tree for other in others)]  # type: ignore[list-item]
    conditions = dict.fromkeys(text for call in (document, *others) for text, _ in call.arguments.assumptions)
    said = f"the script goes several ways ({', '.join(conditions)})" if conditions else "the script starts several runs"
    if not document.is_command_line:
        said = "the file has several sections of arguments"
    for name in dict.fromkeys(key for one in every for key in one):
        values = [one.get(name) for one in every]
        if any(value != values[0] for value in values):
            first = next(value for value in values if value is not None)
            found[name] = Unknown(str(first), (said,))
    return found


def _call(source: SourceText, one: Invocation) -> Call | None:
    words = [_word(value) for value in one.words]
    program = next((number for number, word in enumerate(words) if word.shown.endswith(".py")), None)
    if program is None:
        modules = [number for number, word in enumerate(words[:-1]) if word.shown == "-m"]
        program = next((one for one in modules if not words[one + 1].shown.startswith(_LAUNCHING)), None)
    start = 0 if program is None else program + 1
    found = _document(source, words[:start], words[start:], one.assumptions)
    if found is None or program is None:
        return found
    called = words[program] if words[program].shown.endswith(".py") else words[program + 1]
    return replace(found, program=called.shown, trains=not _INFERS.search(called.shown))


def _fragment(source: SourceText, variables: Mapping[str, Any], arrays: set[str]) -> Call | None:
    """Arguments that a script only collects, for another one to pass on."""
    words: list[Word] = []
    for name, value in variables.items():
        values = value if name in arrays else tuple(fields(unquoted(value)))
        found = [_word(one) for one in values]
        if any(spelling(word.shown) in line().by_flag for word in found if word.shown.startswith("--")):
            words += found
    call = _document(source, [], words, ())
    if call is not None:
        call.arguments.is_open = True
    return call


def _word(value: Value) -> Word:
    text = known(value)
    many = text is None and len(value) == 1 and getattr(value[0], "can_be_words", False)
    return Word(text, shown(value), missing(value), span(value), many)


def _document(
    source: SourceText, launcher: list[Word], words: list[Word], assumptions: tuple[tuple[str, int], ...]
) -> Call | None:
    arguments = parsed(words)
    if len(_MARKS & arguments.values.keys()) < 2:
        return None
    arguments.assumptions = assumptions
    tree = {**arguments.values, **arguments.unknown}
    spans = dict(arguments.spans)
    for name, value, place in _launched(launcher):
        tree[name], spans[name] = value, (place, place)
    children = {name: _place(*both) for name, both in spans.items()}
    root = Place(0, len(source.text), -1, -1, children)
    return Call(source, tree, root, MEGATRON_FORMAT, arguments=arguments)


def _launched(words: list[Word]) -> Iterator[tuple[str, Any, Any]]:
    """Nodes and processes, as a launcher is told them."""
    for number, word in enumerate(words):
        flag, equals, inline = word.shown.partition("=")
        name = next((name for name, others in _LAUNCHED.items() if spelling(flag) in others), None)
        if name is None or not flag.startswith("--"):
            continue
        value = Word(None if word.text is None else inline, inline, word.names, word.span) if equals else None
        value = value or (words[number + 1] if number + 1 < len(words) else None)
        if value is None:
            continue
        if value.text is None:
            yield name, Unknown(value.shown, value.names), value.span
        elif (count := decimal(value.text)) is not None:
            yield name, count, value.span


def _place(key: Any, value: Any) -> Place:
    first = value or key or (0, 0)
    other = key or (-1, -1)
    return Place(first[0], first[1], other[0], other[1], None)


def from_tree(document: Document) -> Call:
    """The arguments in a YAML or JSON file: a list of words, or sections, each of which is one call."""
    tree: Any = document.tree
    if listed := [Word(text, text, (), document.span((_LIST, at))) for at, text in enumerate(_list(tree))]:
        call = _document(document.source, [], listed, ())
        if call is not None:
            return replace(call, program=OWN_PROGRAM)
    first, *others = [_section(document, path, leaves) for path, leaves in _sections(tree) or [((), _own(tree, ()))]]
    return replace(first, others=tuple(others))


Leaf = tuple[str, tuple[str | int, ...], object]


def _sections(tree: Mapping[str, Any]) -> list[tuple[tuple[str | int, ...], list[Leaf]]]:
    """What one run of Megatron-LM reads together, by its path: a section alone, unless the program reads them all."""
    path: tuple[str | int, ...] = ()
    if isinstance(tree.get(RECIPE), dict):
        tree, path = tree[RECIPE], (RECIPE,)
    elif not (_is_flagscale(tree) or _is_bridge(tree) or tree.keys() >= _YAML_CFG):
        mappings = [(path, one) for path, one in _mappings(tree, ()) if not _INFERENCE & one.keys()]
        owns = [(path, _own(one, path)) for path, one in mappings if one.get("enabled") is not False]
        return [(path, own) for path, own in owns if _is_marked([key for key, _, _ in own])]
    leaves = list(_leaves(tree, path))
    return [(path, leaves)] if _is_marked([key for key, _, _ in leaves]) else []


def _is_marked(keys: Iterable[str]) -> bool:
    found = {spelling(key) for key in keys}
    return len(_MARKS & found) >= 2 and bool(found & {"tensor_model_parallel_size", "pipeline_model_parallel_size"})


def _is_flagscale(tree: Mapping[str, Any]) -> bool:
    """Whether FlagScale reads a file: it makes one list of arguments out of all sections."""
    return {"system", "model"} <= tree.keys()


def _is_bridge(tree: Mapping[str, Any]) -> bool:
    """Whether a file is a `ConfigContainer` of Megatron-Bridge, whose sections describe one run."""
    return "model" in tree and tree.keys() <= _BRIDGE and all(isinstance(value, dict) for value in tree.values())


def _section(document: Document, path: tuple[str | int, ...], leaves: list[Leaf]) -> Call:
    is_flagscale = not path and _is_flagscale(document.tree)  # type: ignore[arg-type]  # a mapping: it has sections
    is_whole = not path and len(leaves) == len(document.tree) and _is_whole(leaves)  # type: ignore[arg-type]
    strict = path == (RECIPE,) or is_whole or any("-" in key and spelling(key) in _MARKS for key, _, _ in leaves)
    by_dest = {facts.dest: (name, facts.kind) for name, option in line().options.items() for facts in option.facts}
    words: list[Word] = []
    others: dict[str, Any] = {}
    places: dict[str, Place] = {}
    for key, where, value in leaves:
        place = document.place(where)
        if place is None:
            continue
        spelled = spelling(str(key))
        places.setdefault(spelled, place._replace(children=None))
        if spelled in _MACHINES:
            others[_canonical_machine(spelled)] = value
            places.setdefault(_canonical_machine(spelled), place._replace(children=None))
        elif spelled in line().by_flag or strict or is_flagscale:
            words += _words_of(key, value, place, literally=strict)
        elif spelled in by_dest and isinstance(value, bool) and by_dest[spelled][1] == "off":
            words += _words_of(f"--{by_dest[spelled][0]}", not value, place, literally=False)
        else:
            others[spelled] = value
    arguments = parsed(words, line().name)
    if not strict and not is_flagscale:
        # Another program reads the file: what it does not share with Megatron-LM is no mistake.
        arguments.problems.clear()
    arguments.is_open = not strict
    flat = {**others, **arguments.values, **arguments.unknown}
    children = {name: _place(*both) for name, both in arguments.spans.items()} | {
        name: places[name] for name in (*others, *arguments.unknown) if name in places
    }
    return Call(
        document.source,
        flat,
        document.root._replace(children=children),
        MEGATRON_FORMAT,
        arguments=arguments,
        is_command_line=strict or is_flagscale,
        program=OWN_PROGRAM if path == (RECIPE,) else None,
        trains=document.tree.get("MODE") != "inference",  # type: ignore[attr-defined]  # a mapping: it has sections
    )


def _canonical_machine(spelled: str) -> str:
    return next((name for name, others in _LAUNCHED.items() if spelled in others), spelled)


def _is_whole(leaves: list[Leaf]) -> bool:
    """Whether a file holds arguments of Megatron-LM alone, with one mistake at most."""
    known = sum(spelling(key) in line().by_flag or spelling(key) in _MACHINES for key, _, _ in leaves)
    return known >= max(0.9 * len(leaves), len(leaves) - 1)


def _words_of(key: str, value: Any, place: Place, *, literally: bool) -> Iterator[Word]:
    """A key and its value as words of a command line. What is false, null or empty is not given."""
    if value is None or value is False or value == "":
        return
    flag = key if str(key).startswith("--") else f"--{str(key).replace('_', '-')}"
    yield Word(flag, flag, (), (place.key_start, place.key_end))
    if value is True or (isinstance(value, str) and value.lower() == "true" and literally):
        return
    at = place.start, place.end
    for one in value if isinstance(value, list) else [value]:
        text = str(one)
        if isinstance(one, str) and (names := _VARIABLE.findall(one)):
            yield Word(None, text, tuple(names), at)
        elif isinstance(one, str) and _several(flag, one):
            yield from (Word(part, part, (), at) for part in one.strip("[]").split())
        else:
            yield Word(text, text, (), at)


def _several(flag: str, text: str) -> bool:
    """Whether the values of a list stand in one string."""
    known_flag = line().by_flag.get(spelling(flag))
    return known_flag is not None and line().options[known_flag[0]].newest.kind == "list" and " " in text.strip()


_LIST = "arguments"
"""The key of the list of words in `megatron_args.json`."""


def _list(tree: object) -> list[str]:
    words = tree.get(_LIST) if isinstance(tree, dict) else None
    return words if isinstance(words, list) and all(isinstance(one, str) for one in words) else []


def _leaves(tree: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[Leaf]:
    for where, section in _mappings(tree, path):
        yield from _own(section, where)


def _own(section: Mapping[str, Any], path: tuple[str | int, ...]) -> list[Leaf]:
    """The values of a section, without those of the sections in it."""
    return [(str(key), (*path, key), value) for key, value in section.items() if not isinstance(value, dict)]


def _mappings(tree: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """A mapping and all those in it."""
    yield path, tree
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _mappings(value, (*path, key))

"""What is wrong with the calls of a script: what Megatron-LM's parser does not take of their words, and the rules."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from os.path import normpath
from pathlib import Path
from typing import Any

from parcompile.backends.kinds import MEGATRON
from parcompile.backends.megatron.arguments import (
    NVIDIA,
    Arguments,
    Line,
    Option,
    Problem,
    Span,
    Unknown,
    converted,
    spelling,
)
from parcompile.backends.megatron.file import LARGEST_SOURCED_BYTES, OWN_PROGRAM, PARENTS, Call, from_tree
from parcompile.diagnostics import Diagnostic, Severity, closest
from parcompile.lint.registry import check_settings
from parcompile.text import Document, Result
from parcompile.user_files import read_bytes, shipped

from . import MegatronSettings


def check_file(document: Document) -> list[Diagnostic]:
    """What is wrong with the calls of a script, each time once."""
    first = document if isinstance(document, Call) else from_tree(document)

    calls = list(map(_without_placeholders, (first, *first.others)))
    found: dict[tuple[Any, ...], list[tuple[Call, Diagnostic]]] = {}
    for call in calls:
        rules = map(call.locate, check_settings(MegatronSettings(call), MEGATRON))
        for key, one in {(one.code, one.position, one.message): one for one in (*_of_words(call), *rules)}.items():
            found.setdefault(key, []).append((call, one))
    return [_in_some_ways(each, len(each) < len(calls)) for each in found.values()]


def _in_some_ways(each: list[tuple[Call, Diagnostic]], is_partial: bool) -> Diagnostic:
    """A finding of several ways through a script: a warning where only conditions lead to it that others decide."""
    one = each[0][1]
    ways = [[text for text, _ in call.arguments.assumptions] for call, _ in each]
    conditions = [text for text in ways[0] if all(text in way for way in ways)]
    if not is_partial or not one.is_error or not conditions:
        return one
    return replace(one, severity=Severity.WARNING, message=f"{one.message}, where {' and '.join(conditions)}")


_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
)


def _without_placeholders(call: Call) -> Call:
    """Without sizes of 1 and -1, which the parser asks for where a converter or an evaluation has them elsewhere."""
    tree: Any = call.tree
    name = (call.program or OWN_PROGRAM).rpartition("/")[2]
    if name in _OWN_PROGRAMS or tree.get("hidden_size") not in (1, -1):
        return call
    arguments = replace(call.arguments, values=_without_sizes(call.arguments.values), is_open=True)
    return replace(call, tree=_without_sizes(tree), arguments=arguments)


def _without_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _SIZES or value not in (1, -1)}


def as_on_a_command_line(read: Result) -> Result:
    """A key written twice becomes a warning, as an option given twice is: readers of these files take the last."""
    return replace(
        read,
        diagnostics=tuple(
            replace(one, severity=Severity.WARNING) if one.code == "J009" else one for one in read.diagnostics
        ),
    )


def _of_words(call: Call) -> Iterator[Diagnostic]:
    """What is wrong with the words of one call."""
    arguments, program = call.arguments, _Program.of(call)
    strange = [one for one in arguments.problems if one.kind == "unknown" and spelling(one.flag) not in program.options]
    are_together = not program.is_own and len(strange) >= _SEVERAL
    if are_together:
        flags = list(dict.fromkeys(one.flag for one in strange))
        more = f" and {len(flags) - _NAMED} more" if len(flags) > _NAMED else ""
        message = f"{_tool(arguments.line)} has none of {', '.join(flags[:_NAMED])}{more}"
        help_ = "check how they are spelled, unless the program that is called adds them"
        yield _placed(call, Diagnostic("K001", Severity.WARNING, message, (), help=help_), strange[0].span)
    for problem in arguments.problems:
        if problem.kind != "unknown" or (problem in strange and not are_together):
            found = _found(arguments, problem, program)
            if found is not None:
                yield _placed(call, found, problem.span)
    for name, spans in arguments.repeated.items():
        if name in arguments.values and not isinstance(arguments.values[name], Unknown):
            message = f"{arguments.flags[name]} is given {len(spans) + 1} times with other values; the last one counts"
            yield _placed(call, Diagnostic("J009", Severity.WARNING, message, (name,), help="keep one"), None)
    # A program with options of its own has its own history of them too.
    is_known = call.is_command_line and (program.is_own or not any(one.kind == "unknown" for one in arguments.problems))
    versions = [*_refused(arguments, program)] or (_versions(arguments) if is_known else ())
    yield from (_placed(call, one, None) for one in (*versions, *_out_of_range(arguments, program)))


def _placed(call: Call, found: Diagnostic, span: Span | None) -> Diagnostic:
    if span is None:
        return call.locate(found)
    source = call.source
    return replace(found, file=source.file, position=source.position(span[0]), end=source.position(span[1]))


@dataclass(frozen=True)
class _Program:
    """What reads the options of a call: Megatron-LM's own program, or one that may have more."""

    is_own: bool
    options: frozenset[str] = frozenset()
    """Those that its files add, as they are spelled."""
    words: frozenset[str] = frozenset()
    """Every word of those files; none where no parser of a whole Megatron-LM is among them."""
    is_found: bool = False
    """Whether the file of the program is among them."""
    folders: tuple[Path, ...] = ()
    """Where the program and those files stand."""

    def lacks(self, flag: str) -> bool:
        """Whether it is certain that nothing adds an option: its name is no word of the parsers, nor text elsewhere."""
        if not self.words or (not _SHORT.match(flag) and spelling(flag) in self.words):
            return False
        name = spelling(flag)
        names = {flag} if _SHORT.match(flag) else {flag, f"--{name}", f"--{name.replace('_', '-')}"}
        texts = [f"{quote}{one}".encode() for one in names for quote in "\"'"]
        if not _SHORT.match(flag):
            texts.append(f" {name}:".encode())  # the field of a dataclass of which a parser is made
        files = (file for folder in self.folders for file in folder.rglob("*.py"))
        for file in islice(files, _SEARCHED):
            with suppress(OSError):
                content = read_bytes(file, LARGEST_SOURCED_BYTES)
                if any(text in content for text in texts):
                    return False
        return True

    @classmethod
    def of(cls, call: Call) -> _Program:
        unknown = [one for one in call.arguments.problems if one.kind == "unknown"]
        name = (call.program or "").rpartition("/")[2]
        added, words, is_found, folders = _parsers_of(call)
        # Forks keep the names of programs: one option that is unknown may be a mistake, two are another program's.
        is_own = name in _OWN_PROGRAMS and len(unknown) < 2 and not any(spelling(one.flag) in added for one in unknown)
        return cls(is_own, added, words, is_found, folders)


_OWN_PROGRAMS = frozenset(
    f"{one}.py"
    for one in (
        *("train_rl", "pretrain_bert", "pretrain_gpt", "pretrain_ict", "pretrain_mamba", "pretrain_retro"),
        *("pretrain_t5", "pretrain_vlm", "pretrain_vision_classify", "pretrain_vision_dino", "pretrain_vision_inpaint"),
    )
)
"""Programs in the root of NVIDIA/Megatron-LM, core_v0.8.0 to core_v0.16.0, that take its arguments."""
_SHORT = re.compile(r"-[A-Za-z]")
_ADDED = re.compile(r"""add_argument\(\s*["'](--[A-Za-z][\w-]*)""")
_WORD = re.compile(r"[A-Za-z][\w-]+")
_UNSAID = re.compile(r"^.*(?:[`)}]|\$\w+)/")
"""What of a path variables and commands decide that nobody here knows."""
_FORKS = ("*megatron*/arg*.py", "*megatron*/*/arg*.py", "*megatron*/training/config/*.py")
_FILES = 200
"""So many files are read: those that may hold the fork's parser, and those beside the program."""
_SEARCHED = 4000
"""So many are searched before an option is said to be nowhere: NVIDIA/Megatron-LM has about 1,000 in `megatron`."""
_SEVERAL, _NAMED = 3, 8
"""From so many on, unknown options of another program are one warning, which names so many of them."""


_NO_PARSER = frozenset[str](), frozenset[str](), False, ()


def _parsers_of(call: Call) -> tuple[frozenset[str], frozenset[str], bool, tuple[Path, ...]]:
    """What the program of a call, a file beside it, or a parser under it or beside the script adds; their words."""
    arguments = call.arguments
    if call.program is None or not call.program.endswith(".py") or call.source.file is None:
        return _NO_PARSER
    if not arguments.problems and not any(_may_lack(arguments, name) for name in arguments.values):
        return _NO_PARSER
    script = Path(call.source.file).absolute()
    folders = (script.parent, *script.parents[1:PARENTS], Path.cwd())
    tail = _UNSAID.sub("", call.program)
    program = next((Path(normpath(folder / tail)) for folder in folders if (folder / tail).is_file()), None)
    found, words, is_whole, places = set[str](), set[str](), False, dict[Path, None]()
    above = list(script.parents)[:PARENTS]
    if program is not None and program.parent in above:
        above = above[: above.index(program.parent) + 1]  # what stands above the program is another project's
    beside = [folder.glob(name) for folder in above for name in _FORKS]
    if program is not None:
        beside += [one.glob("arg*.py") for one in _packages(program.parent)] + [program.parent.glob("*.py")]
    for file in islice((file for files in beside for file in sorted(files)), _FILES):
        with suppress(OSError):
            text = read_bytes(file, LARGEST_SOURCED_BYTES).decode("utf-8", errors="replace")
            found |= {spelling(flag) for flag in _ADDED.findall(text)}
            words |= {spelling(word) for word in _WORD.findall(text)}
            package = next((one for one in file.parents[:2] if one.name == "megatron"), None)
            is_whole |= file.name == "arguments.py" and package is not None
            places[package or file.parent] = None
    is_whole &= {"num_attention_heads", "micro_batch_size"} <= words
    return frozenset(found), frozenset(words if is_whole else ()), program is not None, tuple(places)


def _may_lack(arguments: Arguments, name: str) -> bool:
    """Whether the newest parser has an option of its past no more, or there are several: forks have forks."""
    versions = arguments.versions_of(name)
    return bool(versions) and (arguments.line.newest not in versions or arguments.project != NVIDIA)


def _packages(folder: Path) -> list[Path]:
    """Packages beside a program, and those in them: `megatron` and `megatron/training`."""
    with suppress(OSError):
        outer = [one for one in islice(folder.iterdir(), _FILES) if (one / "__init__.py").is_file()]
        return [*outer, *(file.parent for one in outer for file in one.glob("*/__init__.py"))]
    return []


def _found(arguments: Arguments, problem: Problem, program: _Program) -> Diagnostic | None:
    path = (problem.name,) if problem.name in arguments.values else ()
    parsers = arguments.line
    error = Severity.ERROR if program.is_own else Severity.WARNING  # forks take other values too
    if problem.kind == "unknown":
        near = closest(problem.flag, parsers.flags)
        message = f"{_tool(parsers)} has no {problem.flag}"
        if program.is_found and program.lacks(problem.flag):
            message = f"the parser of this program has no {problem.flag}"
            return Diagnostic("K001", Severity.ERROR, message, path, help=f"did you mean {near}?" if near else None)
        # A script may add options of its own: only what looks like one that is known is certain to be a mistake.
        help_ = f"did you mean {near}?" if near else "check how it is spelled, unless a wrapper of yours adds it"
        return Diagnostic("K001", error if near else Severity.WARNING, message, path, help=help_)
    assert problem.facts is not None
    if problem.kind == "surplus" and _SHORT.match(problem.value):
        severity = Severity.ERROR if program.is_found and program.lacks(problem.value) else error
        help_ = "write options with two hyphens"
        return Diagnostic("K001", severity, f"{_tool(parsers)} has no {problem.value}", path, help=help_)
    if not program.is_own and spelling(problem.flag) in program.options:
        return None  # the fork's parser decides what its values are
    if problem.kind == "type":
        if _some_version_takes(parsers.options[problem.name], problem.value):
            return None
        kind = {"int": "a whole number", "float": "a number"}.get(problem.facts.type, problem.facts.type)
        return Diagnostic("K003", error, f"{problem.flag} takes {kind}, not {problem.value!r}", path)
    if problem.kind == "choice":
        if _some_version_takes(parsers.options[problem.name], problem.value):
            return None
        choices = [str(one) for one in problem.facts.choices or ()]
        near = closest(problem.value, choices)
        message = f"{problem.flag} is one of {', '.join(choices)}, not {problem.value!r}"
        return Diagnostic("K004", error, message, path, help=f"did you mean {near}?" if near else None)
    if problem.kind == "missing":
        return Diagnostic("K007", error, f"{problem.flag} has no value", path)
    what = "takes no value" if problem.facts.is_flag else "takes one value"
    return Diagnostic("K007", error, f"{problem.flag} {what}: {problem.value!r} has no place", path)


def _out_of_range(arguments: Arguments, program: _Program) -> Iterator[Diagnostic]:
    """Numbers with which the program ends after it has started, or which have no meaning."""
    for name, entry in _RANGES.items():
        value = arguments.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for word, (is_within, said) in _BOUNDS.items():
            if word in entry and not is_within(value, entry[word]):
                message = f"{arguments.flags[name]} is {said} {entry[word]}, not {value}: {entry['because']}"
                is_error = entry.get("error", False) and program.is_own
                yield Diagnostic("K005", Severity.ERROR if is_error else Severity.WARNING, message, (name,))


_RANGES: Mapping[str, Mapping[str, Any]] = shipped(__package__, "ranges.json")
"""By option; NVIDIA/Megatron-LM 000c4ac2 (`megatron/training/arguments.py`, `megatron/core`), torch 2.13."""
_BOUNDS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "above": (operator.gt, "above"),
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def _some_version_takes(option: Option, text: str) -> bool:
    """Whether any version of the parser took a value, though the newest does not."""
    for facts in option.facts:
        try:
            value = converted(facts, text)
        except (ValueError, OverflowError):
            continue
        if facts.choices is None or value in facts.choices:
            return True
    return False


def _tool(parsers: Line) -> str:
    return "Megatron-LM" if parsers.name.startswith("NVIDIA/") else parsers.name


def _refused(arguments: Arguments, program: _Program) -> Iterator[Diagnostic]:
    """Options that Megatron-LM once had, and of which the parser near the script knows not even the name."""
    for name in arguments.values if program.words else ():
        flag = arguments.flags[name]
        if _may_lack(arguments, name) and program.lacks(flag):
            last = max(arguments.versions_of(name))
            until = f": {_tool(arguments.line)} had it until {arguments.line.versions[last]}"
            is_gone = last < arguments.line.newest
            message = f"the parser of this program has no {flag}{until if is_gone else ''}"
            severity = Severity.ERROR if program.is_found else Severity.WARNING
            yield Diagnostic("K001", severity, message, (name,), help=f"remove {flag}")


def _versions(arguments: Arguments) -> Iterator[Diagnostic]:
    """Options that the newest version has no more: fine in an old checkout, wrong beside options of a newer one."""
    parsers = arguments.line
    spans = {name: arguments.versions_of(name) for name in arguments.values}
    gone = {name: versions for name, versions in spans.items() if versions and parsers.newest not in versions}
    if not gone:
        return
    together = arguments.versions
    for name, versions in gone.items():
        flag, last = arguments.flags[name], parsers.versions[max(versions)]
        removed = parsers.versions[max(versions) + 1]
        if together:
            continue
        later = [other for other, found in spans.items() if found and min(found) > max(versions)]
        if later:
            other = later[0]
            since = parsers.versions[min(spans[other])]
            message = (
                f"no version of {_tool(parsers)} has {flag} (until {last}) and {arguments.flags[other]} (since {since})"
            )
            yield Diagnostic("K001", Severity.WARNING, message, (name,), help=f"{flag} was removed in {removed}")
    if together:
        newest = parsers.versions[max(together)]
        flags = ", ".join(arguments.flags[name] for name in gone)
        message = f"written for {_tool(parsers)} {newest} or older: later versions have no {flags}"
        yield Diagnostic("K001", Severity.INFO, message, (next(iter(gone)),))

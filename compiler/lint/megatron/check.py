"""What is wrong with the calls of a script: what Megatron-LM's parser does not take of their words, and the rules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from parcompile.backends.kinds import MEGATRON
from parcompile.backends.megatron.arguments import Arguments, Line, Option, Problem, Span, Unknown, converted
from parcompile.backends.megatron.file import OWN_PROGRAM, Call, from_tree
from parcompile.diagnostics import Diagnostic, Severity, closest
from parcompile.lint.registry import check_settings
from parcompile.text import Document
from parcompile.units import first_of
from parcompile.user_files import shipped

from . import MegatronSettings
from .program import OWN_PROGRAMS, SHORT, Program, hyphened


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
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("seq_length", "max_position_embeddings"),
)


def _without_placeholders(call: Call) -> Call:
    """Without sizes of 1 and -1, which the parser asks for where a converter or an evaluation has them elsewhere."""
    tree: Any = call.tree
    name = (call.program or OWN_PROGRAM).rpartition("/")[2]
    if name in OWN_PROGRAMS or tree.get("hidden_size") not in (1, -1):
        return call
    arguments = replace(call.arguments, values=_without_sizes(call.arguments.values), is_open=True)
    return replace(call, tree=_without_sizes(tree), arguments=arguments)


def _without_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _SIZES or value not in (1, -1)}


def _of_words(call: Call) -> Iterator[Diagnostic]:
    """What is wrong with the words of one call."""
    arguments, program = call.arguments, Program.of(call)
    strange = [one for one in arguments.problems if one.kind == "unknown" and not program.adds(one.flag)]
    shorts = [one.value for one in arguments.problems if one.kind == "surplus" and SHORT.match(one.value)]
    lacking = program.lacking([*arguments.flags.values(), *(one.flag for one in strange), *shorts])
    if program.is_found:
        strange = [one for one in strange if one.flag not in lacking]
    are_together = not program.is_own and len(strange) >= _SEVERAL
    if are_together:
        flags = list(dict.fromkeys(one.flag for one in strange))
        message = f"{_tool(arguments.line)} has none of {first_of(flags, _NAMED)}"
        help_ = "check how they are spelled, unless the program that is called adds them"
        yield _placed(call, Diagnostic("K001", Severity.WARNING, message, (), help=help_), strange[0].span)
    for problem in arguments.problems:
        if problem.kind != "unknown" or not (program.adds(problem.flag) or (problem in strange and are_together)):
            found = _found(arguments, problem, program, lacking)
            if found is not None:
                yield _placed(call, found, problem.span)
    for name, spans in arguments.repeated.items():
        if name in arguments.values and not isinstance(arguments.values[name], Unknown):
            message = f"{arguments.flags[name]} is given {len(spans) + 1} times with other values; the last one counts"
            yield _placed(call, Diagnostic("J009", Severity.WARNING, message, (name,), help="keep one"), None)
    # A program with options of its own has its own history of them too.
    is_known = call.is_command_line and (program.is_own or not any(one.kind == "unknown" for one in arguments.problems))
    if call.is_command_line and program.is_own and not program.words:
        known = arguments.line.flags
        lacking |= {one for one in arguments.flags.values() if one not in known and hyphened(one) in known}
    versions = [*_refused(arguments, program, lacking)] or (_versions(arguments) if is_known else ())
    others = (*_of_values(arguments, program), *_out_of_range(arguments, program))
    yield from (_placed(call, one, None) for one in (*versions, *others))


def _placed(call: Call, found: Diagnostic, span: Span | None) -> Diagnostic:
    if span is None:
        return call.locate(found)
    source = call.source
    return replace(found, file=source.file, position=source.position(span[0]), end=source.position(span[1]))


_ALIKE = 0.85
_SEVERAL, _NAMED = 3, 8
"""From so many on, unknown options of another program are one warning, which names so many of them."""


def _found(arguments: Arguments, problem: Problem, program: Program, lacking: frozenset[str]) -> Diagnostic | None:
    path = (problem.name,) if problem.name in arguments.values else ()
    parsers = arguments.line
    error = Severity.ERROR if program.is_own else Severity.WARNING  # forks take other values too
    if problem.kind == "unknown":
        near = closest(problem.flag, parsers.flags)
        message = f"{_tool(parsers)} has no {problem.flag}"
        if program.is_found and problem.flag in lacking:
            message = f"the parser of this program has no {problem.flag}"
            return Diagnostic("K001", Severity.ERROR, message, path, help=f"did you mean {near}?" if near else None)
        # A script may add options of its own: only what looks like one that is known is certain to be a mistake.
        help_ = f"did you mean {near}?" if near else "check how it is spelled, unless a wrapper of yours adds it"
        return Diagnostic("K001", error if near else Severity.WARNING, message, path, help=help_)
    assert problem.facts is not None
    if problem.kind == "surplus" and SHORT.match(problem.value):
        severity = Severity.ERROR if program.is_found and problem.value in lacking else error
        help_ = "write options with two hyphens"
        return Diagnostic("K001", severity, f"{_tool(parsers)} has no {problem.value}", path, help=help_)
    if problem.kind in ("type", "choice") and (
        program.adds(problem.flag)  # the fork's parser decides what its values are
        or _some_version_takes(parsers.options[problem.name], problem.value)
    ):
        return None
    if not program.is_own and program.adds(problem.flag) and problem.kind != "missing":
        return None
    if problem.kind == "type":
        kind = _KINDS.get(problem.facts.type, problem.facts.type)
        return Diagnostic("K003", error, f"{problem.flag} takes {kind}, not {problem.value!r}", path)
    if problem.kind == "choice":
        choices = [str(one) for one in problem.facts.choices or ()]
        near = closest(problem.value, choices)
        message = f"{problem.flag} is one of {', '.join(choices)}, not {problem.value!r}"
        # A fork whose parser is not at hand may have choices of its own: only what looks like one is a mistake.
        error = error if closest(problem.value, choices, least=_ALIKE) else Severity.WARNING
        return Diagnostic("K004", error, message, path, help=f"did you mean {near}?" if near else None)
    if problem.kind == "missing":
        error = Severity.WARNING if problem.facts.kind == "list" else error  # some take none for an empty list
        return Diagnostic("K007", error, f"{problem.flag} has no value", path)
    what = "takes no value" if problem.facts.is_flag else "takes one value"
    return Diagnostic("K007", error, f"{problem.flag} {what}: {problem.value!r} has no place", path)


def _out_of_range(arguments: Arguments, program: Program) -> Iterator[Diagnostic]:
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


def _refused(arguments: Arguments, program: Program, lacking: frozenset[str]) -> Iterator[Diagnostic]:
    """Options that Megatron-LM has or had, and of which the parser near the script knows not even the name."""
    severity = Severity.ERROR if program.is_found or not program.words else Severity.WARNING
    for name in arguments.values:
        flag, having = arguments.flags[name], arguments.versions_of(name)
        if flag in lacking and flag not in arguments.line.flags and hyphened(flag) in arguments.line.flags:
            message = f"the parser of this program has no {flag}: it tells _ from -"
            yield Diagnostic("K001", severity, message, (name,), help=f"write {hyphened(flag)}")
        elif flag in lacking and having:
            first, last = (arguments.line.versions[one] for one in (min(having), max(having)))
            when = f"has it since {first}" if max(having) == arguments.line.newest else f"had it until {last}"
            message = f"the parser of this program has no {flag}: {_tool(arguments.line)} {when}"
            yield Diagnostic("K001", severity, message, (name,), help=f"remove {flag}")


def _of_values(arguments: Arguments, program: Program) -> Iterator[Diagnostic]:
    """Values that the parser near the script does not take, whatever Megatron-LM's takes."""
    severity = Severity.ERROR if program.is_found else Severity.WARNING
    for name, given in arguments.values.items() if program.words else ():
        having = program.added(arguments.flags[name])
        for value in given if isinstance(given, list) else [given]:
            if (
                value is None
                or isinstance(value, bool | Unknown)
                or not having
                or any(one.takes(value) for one in having)
            ):
                continue
            choices = dict.fromkeys(str(choice) for one in having for choice in one.choices or ())
            says = f"is one of {', '.join(choices)}" if choices else f"takes {_KINDS[having[0].type or '']}"
            message = f"{arguments.flags[name]} {says} in the parser of this program, not {str(value)!r}"
            near = closest(str(value), list(choices))
            help_ = f"did you mean {near}?" if near else None
            yield Diagnostic("K004" if choices else "K003", severity, message, (name,), help=help_)


_KINDS = {"int": "a whole number", "float": "a number"}


def _versions(arguments: Arguments) -> Iterator[Diagnostic]:
    """Options that the newest version has no more: fine in an old checkout, wrong beside options of a newer one."""
    parsers = arguments.line
    spans = {name: arguments.versions_of(name) for name in arguments.values}
    gone = {name: versions for name, versions in spans.items() if versions and parsers.newest not in versions}
    if not gone:
        return
    together = arguments.versions
    for name, versions in gone.items() if not together else ():
        flag, last = arguments.flags[name], parsers.versions[max(versions)]
        removed = parsers.versions[max(versions) + 1]
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

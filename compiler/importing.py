"""From another tool's file to a spec, with an account of every option.

What an import claims is checked: when the spec is complete, it is compiled and exported again for the tool that it came
from, and an option that comes out with another value is named as lost. So is an option that the file leaves to the
tool's default, where the plan would write another value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import schema
from .backends.architecture import InexpressibleError
from .backends.importers import IMPORTERS, added_kind, importer, kinds
from .backends.kinds import SPEC
from .backends.reading import (
    Account,
    Draft,
    Importer,
    Outcome,
    Question,
    RefusedError,
    Source,
    SpecPath,
    Undecided,
    UndecidedError,
)
from .backends.recipes import RECIPES, recipe
from .diagnostics import Diagnostic, has_errors
from .entry_points import IMPORTERS as GROUP
from .entry_points import called
from .lint import recognised
from .pipeline import check_read
from .plan import Plan, compile_plan
from .text import Document, parse, read_file
from .text.typed import WrongValueError

NEEDED: tuple[SpecPath, ...] = (("model",), ("cluster", "gpus_per_node"), ("training", "sequence_length"))
"""What a spec cannot do without."""
_ORDER = ("version", "name", "model", "cluster", "parallelism", "training", "zero", "deepspeed", "backends")


class ImportConflictError(ValueError):
    """The user's answers contradict what the file says; the message is meant for the user."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The spec of another tool's file.

    `questions` are left for the user: with any of them the spec is incomplete, was not checked, and `plan` is None.
    `diagnostics` are what `parcompile check` says of a complete spec.
    """

    tool: str
    spec: dict[str, Any]
    accounts: tuple[Account, ...]
    questions: tuple[Question, ...]
    diagnostics: tuple[Diagnostic, ...]
    plan: Plan | None

    def __repr__(self) -> str:
        return f"Imported({self.tool!r}, complete={self.complete}, {len(self.questions)} questions)"

    def of(self, outcome: Outcome) -> list[Account]:
        """The options with this outcome."""
        return [one for one in self.accounts if one.outcome is outcome]

    @property
    def complete(self) -> bool:
        """Whether the spec can be compiled."""
        return not self.questions and not has_errors(self.diagnostics)


TOOLS = (
    "DeepSpeed, Megatron-LM, gpt-neox, accelerate, transformers, axolotl, LLaMA-Factory, torchtitan, ms-swift, "
    "Megatron-Bridge or NeMo Automodel"
)


def foreign(
    file: str, kind: str | None = None, function: str | None = None, variables: Mapping[str, str] | None = None
) -> tuple[str, Document]:
    """Another tool's file, with its kind.

    Args:
        file: its name; "-" is standard input.
        kind: what it is, where that need not be found out.
        function: which configuration of a Python file is meant, where there are several.
        variables: those of the environment that a script would find.

    Raises:
        SourceError: the file cannot be read, or a function of it has to be named.
        RefusedError: it is no file of another tool that can be imported.
        PluginError: a plug-in that might know it cannot be used.
    """
    found = recipe(file, function, variables) if kind in (None, *RECIPES) else None
    if found is None:
        read, recognition = recognised(read_file(file), kind, variables)
        if recognition.kind == SPEC:
            raise RefusedError(f"{file} is a spec already")
        if read.document is None or not isinstance(read.document.tree, dict):
            why = read.why_unread or "a configuration is an object of keys and values"
            if file.endswith(".py"):
                why = (
                    "it is no configuration of torchtitan or Megatron-Bridge. Of a script with TrainingArguments, "
                    "write args.to_json_string() to a file and import that"
                )
            raise RefusedError(f"{file} cannot be read: {why}")
        found = read.document, recognition.kind
    document, known = found
    tree: Any = document.tree
    if (known := known if known in kinds() else added_kind(tree) or "") in kinds():
        return known, document
    said = f"{file} is not recognised as a configuration of {TOOLS}"
    raise RefusedError(f"{said}; --kind says what it is: {', '.join(kinds())}")


def import_document(kind: str, document: Document, answers: Mapping[SpecPath, Any], folder: Path) -> Imported:
    """The spec that a file of a kind describes; arguments as for `import_tree`.

    Raises:
        ImportConflictError, RefusedError: as `import_tree`, with the file and the line.
        PluginError: the plug-in that reads the kind cannot be used, or failed.
    """
    reader = importer(kind)
    try:
        if kind in IMPORTERS:
            return import_tree(reader.tree(document), reader, answers, folder)
        return _added(kind, reader, document, answers, folder)
    except (ImportConflictError, RefusedError) as error:
        raise type(error)(f"{_place(document, str(error))}: {error}") from None


def _place(document: Document, said: str) -> str:
    """The file and, where what is said of it begins with the name of a key, its line."""
    path: tuple[str, ...] = ()
    tree: Any = document.tree
    for step in said.partition(" ")[0].split("."):
        spelt = step.lstrip("-").replace("-", "_")
        found = [one for one in tree if one.replace("-", "_") == spelt] if isinstance(tree, dict) else []
        if not found:
            break
        path, tree = (*path, found[0]), tree[found[0]]
    return f"{document.file}:{document.position(path).line}" if path else document.file


def _added(kind: str, reader: Importer, document: Document, answers: Mapping[SpecPath, Any], folder: Path) -> Imported:
    """What the importer of a plug-in makes of a file."""

    def judged() -> Imported | ImportConflictError | RefusedError:
        try:
            found = import_tree(reader.tree(document), reader, answers, folder)
        except (ImportConflictError, RefusedError) as error:
            return type(error)(str(error))
        json.dumps(found.spec, allow_nan=False)
        if not all(type(text) is str for one in found.accounts for text in (one.option, one.detail)):
            raise TypeError("its reports are texts")
        return found

    outcome = called(GROUP, kind, judged)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def import_tree(
    tree: Mapping[str, Any], importer: Importer, answers: Mapping[SpecPath, Any], folder: Path | None = None
) -> Imported:
    """The spec that a parsed file describes.

    Args:
        tree: the file, parsed.
        importer: that of the file's tool.
        answers: values that the user adds, by their place in the spec.
        folder: where the spec will stand; files that it names are looked for from there.

    Raises:
        ImportConflictError: an answer would replace what the file says.
        RefusedError: no spec can be made of the file; a value of the wrong type is named.
    """
    draft = Draft(dict(answers))
    try:
        source = Source(importer.options(tree), importer.defaults())
        described = importer.model_options(source)
        if described and ("model",) in answers:
            names = ", ".join(described[:4]) + (" …" if len(described) > 4 else "")
            raise ImportConflictError(
                f"the file describes its model ({names}); a preset or a config would replace it: leave that out"
            )
        importer.read(source, draft)
    except WrongValueError as error:
        raise RefusedError(f"{error}, as in {importer.tool}") from None
    except UndecidedError as error:
        said = f'{error.option} is "{error.value.text}", which {error.value.decided_by} decides'
        raise RefusedError(f"{said}: write its value into the file") from None
    _answer(draft, answers)
    spec = _pruned(draft)
    questions = [*draft.questions.values()]
    questions += [
        Question(path, "the file does not say it")
        for path in NEEDED
        if not any(set_path[: len(path)] == path for set_path in [*draft.values, *draft.questions])
    ]
    diagnostics: tuple[Diagnostic, ...] = ()
    plan = None
    if not questions:
        checked = check_read(parse(json.dumps(spec), "imported.json", "json"), folder or Path())
        diagnostics = checked.diagnostics
        if checked.valid and checked.resolution is not None:
            plan = compile_plan(checked.resolution.spec(), spec, list(diagnostics))
    accounts = _settled(_accounts(source, importer, plan, answers), source, {one.path for one in questions})
    return Imported(importer.tool, spec, accounts, tuple(questions), diagnostics, plan)


def _answer(draft: Draft, answers: Mapping[SpecPath, Any]) -> None:
    for path, value in answers.items():
        if path in draft.said and draft.values[path] != value:
            said = f"{'.'.join(path)} {draft.values[path]!r}"
            raise ImportConflictError(f"the file says {said}; {value!r} would replace it: leave that out")
        draft.set(path, value, said=True)


def _pruned(draft: Draft) -> dict[str, Any]:
    """The spec without the values that nobody said and that a spec has by default."""
    kept = replace(draft, values={})
    for path, value in draft.values.items():
        if path in draft.said or not same(value, spec_default(path)):
            kept.values[path] = value
    tree = {"version": 1, **kept.tree()}
    return {key: tree[key] for key in _ORDER if key in tree}


def spec_default(path: SpecPath) -> Any:
    """The value that a spec has at a path when it says nothing; None where that depends on other values."""
    try:
        return schema.default("spec", path)
    except schema.NoDefaultError:
        return None


def _accounts(
    source: Source, importer: Importer, plan: Plan | None, answers: Mapping[SpecPath, Any]
) -> Iterator[Account]:
    written = _written(importer, plan)
    comparison = _Comparison(importer, importer.meaning(source.given), importer.meaning(written), frozenset(written))
    for name, value in source.given.items():
        yield _account(name, value, source, comparison, answers)
    for name, default in source.defaults.items():
        if name in source.given or name not in written or comparison.agrees(name, default):
            continue
        if not any(same(written[name], value) for value in answers.values()):
            detail = f"{importer.tool}'s default is {_said(default)}; the plan writes {_said(written[name])}"
            yield Account(name, Outcome.LOST, detail, importer.changes(name))


def _settled(accounts: Iterator[Account], source: Source, asked: set[SpecPath]) -> tuple[Account, ...]:
    """The accounts, where nothing counts as carried of which the user is asked for all that it stands for."""
    return tuple(
        replace(one, outcome=Outcome.OPEN, detail=f"{one.detail} is asked for")
        if one.outcome is Outcome.CARRIED and (paths := source.used.get(one.option)) and paths <= asked
        else one
        for one in accounts
    )


def _written(importer: Importer, plan: Plan | None) -> Mapping[str, Any]:
    """What the tool's exporter writes; nothing for a model that the user named and the tool has no options for."""
    if plan is None:
        return {}
    try:
        return importer.written(plan)
    except InexpressibleError:
        return {}


class _Comparison(NamedTuple):
    """What a file means, beside what the same tool's exporter writes for its plan."""

    importer: Importer
    given: Mapping[str, Any]
    written: Mapping[str, Any]
    names: frozenset[str]
    """Options that the exporter has written."""

    def spellings(self, name: str) -> Sequence[str]:
        """The options that decide what this one stands for."""
        return self.importer.stands_for.get(name, (name,))

    def agrees(self, name: str, value: Any = None) -> bool:
        """Whether what an option stands for comes out as it came in; `value` stands for one that was not given."""
        return all(
            one in self.written and same(self.written[one], self.given.get(one, value)) for one in self.spellings(name)
        )

    def is_written(self, name: str) -> bool:
        """Whether the exporter says anything of it."""
        return any(one in self.names for one in self.spellings(name))

    def instead(self, name: str) -> str:
        """What the exporter writes in its place."""
        values = {one: self.written.get(one) for one in self.spellings(name)}
        text = ", ".join(_said(value) if one == name else f"{one} {_said(value)}" for one, value in values.items())
        return f"the plan writes {text}"


def _account(
    name: str, value: Any, source: Source, comparison: _Comparison, answers: Mapping[SpecPath, Any]
) -> Account:
    paths = sorted(".".join(path) for path in source.used.get(name, ()))
    where, importer = ", ".join(paths), comparison.importer
    if isinstance(value, Undecided):
        answered = any(path[: len(given)] == given for path in source.used.get(name, ()) for given in answers)
        if answered:
            return Account(name, Outcome.CARRIED, f"{where} (as you say)")
        if paths:
            return Account(name, Outcome.OPEN, f"{value.decided_by} decides {where}")
        if not value.text:
            return Account(name, Outcome.OPEN, f"left to {value.decided_by.rstrip(',')}")
        is_statement = name == value.text  # it may set anything
        return importer.fate(name, value) or Account(name, Outcome.LOST, f"left to {value.decided_by}", is_statement)
    reason = source.reasons.get(name)
    if reason is not None and (reason.changes or not (comparison.is_written(name) and comparison.agrees(name))):
        return reason
    if comparison.names and (paths or comparison.is_written(name)):
        # The plan was written again: that is the proof.
        if comparison.agrees(name) or (
            paths and not any(one in comparison.written for one in comparison.spellings(name))
        ):
            return Account(name, Outcome.CARRIED, where or "the plan writes the same")
        return Account(name, Outcome.LOST, comparison.instead(name), importer.changes(name))
    if paths:
        return Account(name, Outcome.CARRIED, where)
    return importer.fate(name, value) or Account(name, Outcome.LOST, f"not known to this importer of {importer.tool}")


def same(left: Any, right: Any) -> bool:
    """Whether two values of an option mean the same: 1 and 1.0, a tuple and a list, but not 1 and true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return math.isclose(left, right, rel_tol=1e-9)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _said(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

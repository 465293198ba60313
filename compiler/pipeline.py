"""From a file to a plan: read, validate, resolve, check, compile. Nothing is printed or written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import schema
from .backends.kinds import CHECKED, SPEC, Certainty
from .diagnostics import Diagnostic, Safety, has_errors, in_file_order
from .diagnostics import Path as DiagnosticPath
from .lint import check_sections, checker, recognised
from .rules import DEFAULT_TARGETS, EXPERTS_RULE, MEMORY_RULES, check
from .spec import Origin
from .spec.resolve import Resolution
from .text import STDIN, Document, Result, SourceText, parse, read_file
from .user_files import read_start

if TYPE_CHECKING:
    from .lint.deepspeed import UsageOptions
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that was read and checked: `document` is None when its syntax is broken, `resolution` if it is no spec.

    `text` is what was read, for quoting lines of it.
    """

    text: SourceText
    document: Document | None
    diagnostics: tuple[Diagnostic, ...]
    resolution: Resolution | None
    kind: str = SPEC
    certainty: Certainty = Certainty.CERTAIN

    @property
    def is_skipped(self) -> bool:
        """Whether the file is of a kind that has no checker."""
        return self.kind not in CHECKED

    @property
    def why_unread(self) -> str:
        """Where and why the text makes no sense, in one line; empty where it has a document."""
        return Result(self.text, self.document, self.diagnostics).why_unread

    @property
    def valid(self) -> bool:
        """Whether a plan can be made."""
        return not has_errors(self.diagnostics)


def is_plan(path: str | Path) -> bool:
    """Whether a path is that of a plan: a folder, a plan.json, or a file of another name that begins as plans do."""
    file = Path(path)
    if file.is_dir() or file.name == "plan.json":
        return True
    try:
        return file.is_file() and '"plan_version"' in read_start(file, 64)[0].decode("utf-8", "replace")
    except (OSError, ValueError):
        return False


def read_spec(path: str | Path) -> Result:
    """Reads a spec or, of a plan, the spec that it was compiled from.

    Raises:
        SourceError: the file cannot be read.
        PlanError: the plan cannot be read.
    """
    if not is_plan(path):
        return read_file(path)
    from .plan import load_plan, plan_file, written

    plan = load_plan(path)
    tree = written(plan)
    if any(found.origin is Origin.CONFIG for found in plan.spec.provenance.values()):
        # A spec cannot write every configuration inline; the plan holds the whole one.
        tree["model"] = {"hf_config": str(plan_file(path).resolve())}
    return parse(json.dumps(tree, indent=2, ensure_ascii=False), f"the spec of {path}", "json")


def require_lossless_spec(path: str | Path) -> None:
    """Sees to it that what is asked of a plan's spec can be asked: it says all that the plan does.

    Raises:
        PlanError: it does not; what a spec cannot say is named.
    """
    if not is_plan(path):
        return
    from .plan import PlanError, lacking, load_plan

    missing = lacking(load_plan(path))
    if missing is not None:
        raise PlanError(
            f"{path} is a plan, and other layouts need its spec, which would lack {missing}: give the spec that the "
            "plan was compiled from"
        )


def check_file(path: str | Path, targets: Collection[str] = DEFAULT_TARGETS) -> Checked:
    """Everything that is wrong with a spec, or with that of a plan, for these targets, in one pass.

    Raises:
        SourceError: the file cannot be read.
        PlanError: the plan cannot be read.
    """
    return check_read(read_spec(path), folder_of(path), targets, kind=SPEC)


def check_any(
    path: str | Path,
    targets: Collection[str] = DEFAULT_TARGETS,
    *,
    kind: str | None = None,
    usage: UsageOptions | None = None,
) -> Checked:
    """The same for a spec or another tool's configuration, told apart by their keys, or of a `kind` that is given.

    `usage` says by which tool and version the file is read.

    Raises:
        SourceError: the file cannot be read.
    """
    found, recognition = recognised(read_spec(path) if Path(path).is_dir() else read_file(path), kind)
    if not recognition.is_checked:
        # Of other texts nobody expects that they are JSON or YAML.
        named = str(path) == "-" or Path(path).suffix.lower() in (".json", ".yaml", ".yml")
        unread = found.diagnostics if found.document is None and named else ()
        return Checked(found.source, found.document, unread, None, recognition.kind, recognition.certainty)
    checked = check_read(found, folder_of(path), targets, kind=recognition.kind, usage=usage)
    return replace(checked, certainty=recognition.certainty)


def folder_of(path: str | Path) -> Path:
    """What paths in a file are relative to; in standard input to where the command runs."""
    return Path() if str(path) == "-" else Path(path).resolve().parent


def check_read(
    read: Result,
    folder: Path,
    targets: Collection[str] = DEFAULT_TARGETS,
    *,
    kind: str = SPEC,
    usage: UsageOptions | None = None,
) -> Checked:
    """The same for a text that was read already; paths in it are relative to `folder`."""
    document = read.document

    def in_trial(text: Document) -> list[Diagnostic]:
        return _in_spec(text, folder, targets, is_trial=True)[0]

    find: Callable[[Document], list[Diagnostic]] = in_trial
    if kind != SPEC:
        file = None if read.source.file == STDIN else folder / Path(read.source.file).name
        read, find = checker(read, kind, file, usage)
    if document is None:
        return Checked(read.source, None, read.diagnostics, None, kind)
    resolution: Resolution | None = None
    if kind == SPEC:
        found, resolution = _in_spec(document, folder, targets)
    else:
        found = find(document)
    if any(one.fixes for one in found):
        from .rules import PEAK_RULE
        from .text.fixes import tried

        found = tried(found, document, find, too_large=PEAK_RULE)
    return Checked(read.source, document, tuple(in_file_order([*read.diagnostics, *found])), resolution, kind)


def _in_spec(
    document: Document, folder: Path, targets: Collection[str], *, is_trial: bool = False
) -> tuple[list[Diagnostic], Resolution]:
    """What is wrong with a spec; of a trial of a fix nobody asks how to mend what is left."""
    validation = schema.validate(document, "spec")
    diagnostics, invalid = list(validation.diagnostics), validation.invalid_paths
    more, wrong = check_sections(document)
    diagnostics += more
    invalid |= wrong
    meant = _misspelt_sections(document, diagnostics)
    tree = document.tree
    if meant and isinstance(tree, dict):
        tree = {meant.get(key, key): value for key, value in tree.items()}
        again = schema.validate(tree, "spec")
        diagnostics = [_certain(one) if len(one.path) == 1 and one.path[0] in meant else one for one in diagnostics]
        diagnostics += [
            document.locate(_as_written(one, meant), key=one.code == "K001")
            for one in again.diagnostics
            if one.path[:1] and one.path[0] in meant.values()
        ]
        invalid = again.invalid_paths
    resolution = Resolution(tree, invalid, folder)
    resolution.is_trial = is_trial
    found = [
        document.locate(_as_written(_with_advice(diagnostic, resolution), meant))
        for diagnostic in check(resolution, targets)
    ]
    return [*diagnostics, *found], resolution


def _with_advice(one: Diagnostic, resolution: Resolution) -> Diagnostic:
    """A finding; of what is too large, and of experts between nodes, with what a search chooses."""
    if one.code not in (*MEMORY_RULES, EXPERTS_RULE) or resolution.is_trial:
        return one
    from .searching.advice import advised  # only here: most specs need none

    return advised(one, resolution)


def _misspelt_sections(document: Document, diagnostics: Sequence[Diagnostic]) -> dict[str, str]:
    """Sections under a wrong name, with the right one, where that is certain: what they hold is checked as theirs.

    It is where a section is meant that is not given, and knows half of the keys or more.
    """
    found: dict[str, str] = {}
    for one in diagnostics:
        names = [edit.rename_to for fix in one.fixes for edit in fix.edits if edit.rename_to]
        if one.code != "K001" or len(one.path) != 1 or len(names) != 1 or document.get((names[0],)) is not None:
            continue
        key, value = str(one.path[0]), document.get(one.path)
        known = schema.load("spec")["properties"].get(names[0], {}).get("properties", {})
        if isinstance(value, dict) and value and 2 * sum(name in known for name in value) >= len(value):
            found[key] = names[0]
    return found if len(set(found.values())) == len(found) else {}


def _certain(one: Diagnostic) -> Diagnostic:
    """A section under a wrong name, whose right one is certain: `--fix` gives it that."""
    return replace(one, fixes=tuple(replace(fix, safety=Safety.SAFE) for fix in one.fixes))


def _as_written(one: Diagnostic, meant: Mapping[str, str]) -> Diagnostic:
    """A finding about sections under their right names, with the names that the file gives them."""
    if not meant:
        return one
    written = {right: wrong for wrong, right in meant.items()}

    def back(path: DiagnosticPath) -> DiagnosticPath:
        return (written.get(str(path[0]), path[0]), *path[1:]) if path else path

    return one.moved(back)


def compile_file(
    path: str | Path, targets: Collection[str] = DEFAULT_TARGETS, *, must_fit: bool = True
) -> tuple[Plan | None, Checked]:
    """The plan of a spec, checked for these targets, or None when it has errors.

    Without `must_fit`, what is too large for its accelerator has a plan nevertheless: to be looked at.

    Raises:
        SourceError: the file cannot be read.
    """
    checked = check_file(path, targets)
    errors = [one for one in checked.diagnostics if one.is_error]
    if any(must_fit or one.code not in MEMORY_RULES for one in errors):
        return None, checked
    assert checked.resolution is not None
    from .plan import compile_plan

    spec = checked.resolution.spec()
    return compile_plan(spec, checked.resolution.tree, list(checked.diagnostics)), checked

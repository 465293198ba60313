"""The public Python API. `import parcompile` offers these names and loads this module when the first one is used."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .backends.importers import kinds
from .backends.kinds import UNKNOWN, chosen
from .backends.registry import render
from .backends.writing import write
from .cost.estimate import Estimate
from .diagnostics import Diagnostic, Position, Severity, closest
from .diagnostics.reporters import Style, report
from .importing import Imported, foreign, import_document
from .lint import recognised
from .model.presets import find_preset, near_presets, preset_alike, presets
from .pipeline import Checked, check_read, is_plan, read_spec, require_lossless_spec
from .plan import Plan, PlanError, compile_plan, load_plan
from .plan.diff import Difference, difference
from .rules import rule_targets
from .searching.first import FirstSpec, first_spec, sequence_length_of
from .searching.ranking import Ranked, SearchResult
from .searching.ranking import search as _search
from .searching.space import Refused, open_space
from .searching.variant import changed
from .spec.resolve import Resolution, Unavailable
from .spec.resolve.model import config_file, read_config
from .text import Result, SourceError, SourceText, parse

__all__ = [
    "CheckResult",
    "Diagnostic",
    "Difference",
    "Estimate",
    "FirstSpec",
    "Imported",
    "Plan",
    "PlanError",
    "Position",
    "Search",
    "Severity",
    "SourceError",
    "SpecError",
    "check",
    "compile",
    "diff",
    "import_file",
    "init",
    "load_plan",
    "search",
]

TextOrPath: TypeAlias = "str | Path | Mapping[str, Any]"
"""A spec: the path of its file, its text, or its tree."""

_TEXT = "<text>"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What `check` found in a spec or configuration.

    Attributes:
        diagnostics: every finding, in the order of the file.
        kind: what was checked: `spec`, `ds_config`, `megatron` or `gpt_neox`.
        source: the text that the diagnostics speak of.
    """

    diagnostics: tuple[Diagnostic, ...]
    kind: str
    source: SourceText

    @property
    def valid(self) -> bool:
        """Whether there is no error: of a spec, whether it compiles."""
        return not self.errors

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that stop the compiler."""
        return self._of(Severity.ERROR)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """The findings that name something that is probably a mistake."""
        return self._of(Severity.WARNING)

    @property
    def remarks(self) -> tuple[Diagnostic, ...]:
        """The findings that say what was inferred or has no effect."""
        return self._of(Severity.INFO)

    def __repr__(self) -> str:
        counts = (len(self.errors), len(self.warnings), len(self.remarks))
        return "CheckResult({!r}: {} errors, {} warnings, {} remarks)".format(self.kind, *counts)

    def text(self) -> str:
        """The findings as `parcompile check -v` prints them, 80 columns wide and without colour."""
        stream = io.StringIO()
        report(self.diagnostics, [self.source], "text", stream, style=Style())
        return stream.getvalue()

    def _of(self, severity: Severity) -> tuple[Diagnostic, ...]:
        return tuple(one for one in self.diagnostics if one.severity is severity)


class SpecError(ValueError):
    """A spec with errors. `result` holds its diagnostics, and the message is their text."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(result.text())
        self.result = result

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Every finding, errors and others."""
        return self.result.diagnostics


@dataclass(frozen=True, slots=True)
class Search:
    """What `search` found.

    Attributes:
        spec: the spec of the best layout, to be compiled; None when no layout fits.
        fitting: layouts that fit with a probability of 90 %, the best one first. Each has `seconds` (of a step),
            `peak_bytes`, `candidate` (what it sets in the spec) and `reason` (why it lost; None for the best).
        too_large: layouts that do not fit, by memory.
        refused: settings of the axes that a rule refuses, each with `code` and `message`.
    """

    spec: dict[str, Any] | None
    fitting: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]
    refused: tuple[Refused, ...]

    def __repr__(self) -> str:
        counts = f"{len(self.fitting)} fitting, {len(self.too_large)} too large, {len(self.refused)} refused"
        return f"Search({counts})"

    @property
    def best(self) -> Ranked | None:
        """The chosen layout; None when none fits."""
        return self.fitting[0] if self.fitting else None


def check(
    text_or_path: TextOrPath, *, targets: Sequence[str] = (), kind: str | None = None, estimate: bool = True
) -> CheckResult:
    """Check a spec, a plan's spec, or a DeepSpeed, Megatron-LM or gpt-neox configuration.

    Args:
        text_or_path: the path of a file or plan, the text of a spec (with a line break or a brace), or its tree.
        targets: check the rules of these targets too, as `--target` does.
        kind: what the text is. By default its keys tell; a text that nothing tells is checked as a spec.
        estimate: whether the estimated peak of memory has to fit.

    Returns:
        All findings. A file with mistakes raises nothing.

    Raises:
        SourceError: the file cannot be read.
        PlanError: the plan cannot be read.
        ValueError: there is no target of that name, or the file is of a kind that has no checker.
    """
    return _result(_checked(text_or_path, targets, kind, estimate=estimate))


def compile(  # noqa: A001 -- the word of the command line
    text_or_path: TextOrPath,
    output: str | Path | None = None,
    *,
    targets: Sequence[str] = (),
    estimate: bool = True,
) -> Plan:
    """Compile a spec into a plan.

    Args:
        text_or_path: the path of a spec or plan, the text of a spec, or its tree.
        output: the folder to write the plan and its launch files to. All files are written, or none.
        targets: what to write besides the plan, as `--target` does.
        estimate: whether the estimated peak of memory has to fit.

    Returns:
        The plan. `plan.groups(rank)` lists the process groups of a rank, `plan.estimate()` predicts memory and time.

    Raises:
        SpecError: the spec has errors.
        SourceError: the file cannot be read.
        PlanError: the plan cannot be read.
        ValueError: there is no target of that name.
        OSError: the folder cannot be written, or has files of another origin by the names of the plan's.
    """
    checked = _checked(text_or_path, targets, "spec", estimate=estimate)
    if not checked.valid or checked.document is None or checked.resolution is None:
        raise SpecError(_result(checked))
    path = _path(text_or_path)
    if path is not None and is_plan(path):
        # Compiled already: its identity stays.
        plan = load_plan(path)
    else:
        plan = compile_plan(checked.resolution.spec(), checked.resolution.tree, list(checked.diagnostics))
    if output is not None:
        write(render(plan, chosen(targets)), Path(output))
    return plan


def search(text_or_path: TextOrPath, *, any_target: bool = False) -> Search:
    """Find the fastest layouts that fit, of the values that a spec leaves out or calls "auto".

    Args:
        text_or_path: the path of a spec or plan, the text of a spec, or its tree.
        any_target: search also layouts that only other tools can run.

    Raises:
        SpecError: the spec has errors that no layout fixes.
        SourceError: the file cannot be read.
        PlanError: the plan cannot be read, or a spec cannot say all that it does.
        ValueError: nothing can be searched in this spec.
    """
    checked = _checked(text_or_path, (), "spec")
    if (path := _path(text_or_path)) is not None:
        require_lossless_spec(path)
    # A layout mends what rules find; syntax and schema errors stay.
    fatal = [one for one in checked.diagnostics if one.is_error and one.code[:1] in ("J", "K")]
    if fatal or checked.document is None or not isinstance(checked.document.tree, dict):
        raise SpecError(_result(checked))
    try:
        space = open_space(Resolution(checked.document.tree, (), _folder(text_or_path)), executable=not any_target)
    except Unavailable as error:
        raise SpecError(_result(checked)) from error
    found: SearchResult = _search(space)
    spec = None if found.best is None else changed(space.tree, found.best.candidate.changes)
    return Search(spec, found.fitting, found.too_large, found.refused)


def init(
    model: str | Path,
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    accelerator: str = "h100-sxm",
    sequence_length: int | None = None,
    training: Mapping[str, Any] | None = None,
) -> FirstSpec:
    """Find a first spec for a model and a cluster, as `parcompile init` does.

    Args:
        model: a preset, the name of such a model on the Hugging Face Hub, or the path of a config.json or its folder.
        nodes: machines.
        gpus_per_node: ranks on each.
        accelerator: what a rank runs on.
        sequence_length: tokens of a sequence; by default the model's positions, up to 8,192.
        training: further values of that section of the spec.

    Returns:
        The fastest, the safest and the simplest layout as `offers`, each with `word`, `spec`, `reason` and
        `warnings`; `spec` is that of the fastest. Where none fits `offers` is empty, `reason` says why, and `remedies`
        what would fit.

    Raises:
        ValueError: there is no such model, its file cannot be read, or the schema refuses a value.
    """
    section, config, name = _model(str(model))
    length = sequence_length_of(config) if sequence_length is None else sequence_length
    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "accelerator": accelerator}
    return first_spec(name, section, cluster, length, Path(), training=training)


def diff(before: TextOrPath | Plan, after: TextOrPath | Plan) -> Difference:
    """Find what changes from one plan to another.

    Args:
        before: a plan, or what `compile` takes.
        after: the same.

    Returns:
        The `changes`, each with `kind`, `what`, `before` and `after`, and whether a checkpoint of the first can be
        resumed with the second: by the `runtime`, and by `deepspeed` alone.

    Raises:
        SpecError: a spec has errors.
        SourceError: a file cannot be read.
        PlanError: a plan cannot be read.
    """
    old, new = (one if isinstance(one, Plan) else compile(one) for one in (before, after))
    return difference(old, new)


def import_file(
    path: str | Path,
    answers: Mapping[str, Any] | None = None,
    *,
    kind: str | None = None,
    function: str | None = None,
) -> Imported:
    """Convert another tool's configuration into a spec, as `parcompile import` does.

    Args:
        path: the file.
        answers: what the file does not say, by its place in the spec: `{"training.sequence_length": 4096}`.
        kind: what the file is. By default its keys tell.
        function: the configuration that is meant in a Python file with several. Nothing of the file is run.

    Returns:
        The `spec`; the `questions` that are open, each with the `path` of what is missing; `accounts` of every option
        of the file; `diagnostics` of the spec and its `plan` when no question is open.

    Raises:
        SourceError: the file cannot be read.
        ValueError: it is not recognised, no spec can be made of it, or an answer contradicts it.
    """
    if kind is not None and kind not in kinds():
        raise ValueError(f"there is no importer {kind!r}; there are {', '.join(kinds())}")
    known, document = foreign(str(path), kind, function)
    given = {tuple(place.split(".")): value for place, value in (answers or {}).items()}
    return import_document(known, document, given, Path())


def _model(model: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The section of a spec that names a model, the model's configuration, and a name for a run of it."""
    preset, path = find_preset(model), Path(model)
    if preset is None and not path.exists():
        preset = preset_alike(model)
    if preset is not None:
        return {"preset": preset.name}, dict(preset.config), preset.name
    file = config_file(path)
    if not file.exists():
        near = ", ".join(near_presets(model) or filter(None, [closest(model, list(presets()))]))
        raise ValueError(f"there is no preset and no file {model!r}{f'; near are {near}' if near else ''}")
    config = read_config(file)
    return {"hf_config": file.as_posix()}, config, str(config.get("model_type") or file.resolve().parent.name)


def _checked(given: TextOrPath, targets: Sequence[str], kind: str | None, *, estimate: bool = True) -> Checked:
    text, wanted = _read(given), rule_targets(chosen(targets), estimate=estimate)
    read, recognition = recognised(text, kind)
    if recognition.kind == UNKNOWN:
        # Nothing tells what it is: as a spec, the findings say what is missing.
        return check_read(text, _folder(given), wanted)
    if not recognition.is_checked:
        raise ValueError(f"{text.source.file} is of kind {recognition.kind}, which has no checker")
    return check_read(read, _folder(given), wanted, kind=recognition.kind)


def _result(checked: Checked) -> CheckResult:
    return CheckResult(checked.diagnostics, checked.kind, checked.text)


def _read(given: TextOrPath) -> Result:
    if isinstance(given, Mapping):
        return parse(json.dumps(given, indent=2, ensure_ascii=False), _TEXT, "json")
    path = _path(given)
    return read_spec(path) if path is not None else parse(str(given), _TEXT)


def _path(given: TextOrPath) -> Path | None:
    """The path that is given; None of a text or a tree."""
    if isinstance(given, Path):
        return given
    if isinstance(given, Mapping) or "\n" in given or "{" in given:
        return None
    return Path(given)


def _folder(given: TextOrPath) -> Path:
    path = _path(given)
    return Path() if path is None else path.resolve().parent

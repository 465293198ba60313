"""The semantic rules: what a layout must satisfy. Each has a page, and is an entry of `rules.json` or a function."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from parcompile import entry_points
from parcompile.backends.kinds import LAUNCHERS
from parcompile.diagnostics import Diagnostic, Fix, Path, Related, Safety, Severity
from parcompile.layout.groups import Axis, divisors
from parcompile.model.blocks import KNOWN
from parcompile.model.families import family_problem
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.user_files import shipped

ESTIMATE = "estimate"
"""What rules concern that judge by a prediction: who wants no estimates goes without them."""
CONCERNED = ("deepspeed", "runtime", "megatron", ESTIMATE)
"""What a rule may concern. A rule that concerns one of them fires only when the plan is meant for it."""
LAUNCHED = "launched"
"""What a plan is asked for when its targets are known: that one of them, or the runtime, can run it."""
OTHER_TOOL = "another tool"
"""Stands for each target that does not launch the runtime."""
DEFAULT_TARGETS = ("deepspeed", "runtime", ESTIMATE)

PEAK_RULE = "H004"
"""Code of the rule that judges by the estimated peak."""
MEMORY_RULES = ("H001", PEAK_RULE)
"""Codes that say that a layout does not fit: who asks for an estimate learns it there."""
EXPERTS_RULE = "W013"
"""Code of the rule that warns of experts which are exchanged between nodes."""


def rule_targets(targets: Collection[str], *, estimate: bool = True) -> tuple[str, ...]:
    """What the rules are asked for when files of these targets are wanted: every plan runs, some have rules beside."""
    others = (OTHER_TOOL,) if set(targets) - set(LAUNCHERS) else ()
    added = (one for one in CONCERNED if one in targets and one not in DEFAULT_TARGETS)
    found = (*DEFAULT_TARGETS, LAUNCHED, *others, *added)
    return found if estimate else tuple(one for one in found if one != ESTIMATE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: the equation with the user's numbers, where, and what to write instead.

    `severity` is that of the rule unless the finding has another one.
    """

    message: str
    path: Path
    help: str | None = None
    fixes: tuple[Fix, ...] = ()
    related: tuple[Related, ...] = ()
    severity: Severity | None = None

    def diagnostic(self, code: str, severity: Severity) -> Diagnostic:
        """The finding of the rule of this code and severity."""
        severity = self.severity or severity
        return Diagnostic(
            code, severity, self.message, self.path, help=self.help, fixes=self.fixes, related=self.related
        )


Check = Callable[[Resolution], Iterator[Finding]]
Example = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and its page.

    `targets` names what the rule concerns: "all" for what is true of any run, else the backends that demand it.
    `wrong` and `right` are parts of a spec: laid over `BASE`, the one breaks the rule and the other does not.
    `origin` is the distribution that a plug-in's rule comes from, and
    `title_of_origin` names it in messages. `run_by` are the targets that run what a rule of the
    runtime refuses: where files of none of them are wanted, its findings are errors.
    """

    code: str
    severity: Severity
    title: str
    explanation: str
    wrong: Example
    right: Example
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    check: Check
    origin: str = ""
    run_by: tuple[str, ...] = ()
    title_of_origin: str = ""

    def concerns(self, targets: Collection[str]) -> bool:
        """Whether the rule fires for a plan that is meant for `targets`."""
        return "all" in self.targets or any(target in targets for target in self.targets)


_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    *,
    severity: Severity = Severity.ERROR,
    targets: tuple[str, ...] = ("all",),
    run_by: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Registers the decorated function as the rule `code`, whose page stands in pages.json."""

    def register(check: Check) -> Check:
        assert code not in _RULES, f"two rules are called {code}"
        page = page_of(__package__, code)
        added = (one.rules[code] for one in KNOWN if code in one.rules)
        page["explanation"] = " ".join((page["explanation"], *added))
        _RULES[code] = Rule(code, severity, targets=targets, check=check, run_by=run_by, **page)
        return check

    return register


def page_of(package: str, code: str) -> dict[str, Any]:
    """What pages.json of a package says of a code: title, explanation, an example of wrong and of right, sources."""
    page = shipped(package, "pages.json")[code]
    return {**page, "sources": tuple(page.get("sources", ()))}


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code, and those of plug-ins behind them.

    Modules of rules have names that begin with the letter of their codes, as that of `t_tensor` does.
    """
    importlib.import_module(f"{__package__}.table")
    for module in pkgutil.iter_modules([str(FilePath(__file__).parent)]):
        if module.name[1:2] == "_":
            importlib.import_module(f"{__package__}.{module.name}")
    return (*(_RULES[code] for code in sorted(_RULES)), *_added().rules)


def finds(code: str, spec: Resolution) -> bool:
    """Whether the rule of this code finds something.

    Raises:
        Unavailable: it needs a value that is itself wrong.
    """
    return any(True for _ in _RULES[code].check(spec))


INEXPRESSIBLE = "G003"
"""Code of a layout that a target named with `check -t` cannot express."""
BROKEN_PLUGIN = "E001"
"""Code of a plug-in that a check needs and that cannot be used."""
_ADDED_CODE = re.compile(r"[A-Z]{2,8}[0-9]{3}")


class _Added(NamedTuple):
    """The rules of plug-ins, and what is wrong with plug-ins of rules."""

    rules: tuple[Rule, ...]
    problems: tuple[str, ...]


@functools.cache
def _added() -> _Added:
    found: dict[str, Rule] = {}
    problems: list[str] = []
    for name, offer in entry_points.offers(entry_points.RULES).items():
        try:
            rules = entry_points.load(entry_points.RULES, name, functools.partial(_as_rules, known=frozenset(found)))
        except entry_points.PluginError as error:
            problems.append(str(error))
            continue
        for one in rules:
            found[one.code] = replace(one, origin=offer.distribution, title_of_origin=offer.title)
    return _Added(tuple(found[code] for code in sorted(found)), tuple(problems))


def _as_rules(given: object, known: frozenset[str]) -> tuple[Rule, ...]:
    """The rules of a plug-in: a list of them, of which none has a code that is taken."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, Rule) for one in given):
        raise TypeError("it has to be a list of parcompile.plugins.Rule")
    codes = [one.code for one in given]
    for code in codes:
        if not _ADDED_CODE.fullmatch(code):
            raise ValueError(f"the code {code!r} has to be two to eight capital letters and three digits, as ACME001")
        if code in known or codes.count(code) > 1:
            raise ValueError(f"two rules are called {code}")
    return tuple(given)


def _of_plug_ins(entries: Sequence[Rule], resolution: Resolution, targets: Collection[str]) -> Iterator[Diagnostic]:
    """What rules of plug-ins find; that one fails is a finding under its code, and an error."""
    works = [functools.partial(_judged, entry, resolution) for entry in entries]
    for entry, outcome in zip(entries, entry_points.apart(works, entry_points.SECONDS), strict=True):
        if isinstance(outcome, entry_points.Failure):
            message = f"the {entry.title_of_origin} failed: {outcome.why}"
            hint = f"report it to its authors, or run with {entry_points.VARIABLE}=0 and without all plug-ins"
            outcome = [Finding(message, (), hint, severity=Severity.ERROR)]
        yield from (_diagnostic(entry, finding, targets) for finding in outcome)


MOST_FINDINGS = 1000
"""How many findings one rule of a plug-in may have."""


def _judged(entry: Rule, resolution: Resolution) -> list[Finding]:
    """The findings of a plug-in's rule.

    Raises:
        TypeError, ValueError: it yields something else, or too many.
    """
    found: list[Finding] = []
    with contextlib.suppress(Unavailable):
        for one in entry.check(resolution):
            fine = (
                type(one) is Finding
                and type(one.message) is str
                and type(one.path) is tuple
                and all(type(step) in (str, int) for step in one.path)
                and type(one.help) in (str, type(None))
                and type(one.severity) in (Severity, type(None))
                and type(one.fixes) is tuple
                and all(type(fix) is Fix for fix in one.fixes)
                and type(one.related) is tuple
                and all(type(place) is Related for place in one.related)
            )
            if not fine:
                raise TypeError(f"it yielded {type(one).__name__}, not a Finding with a message and a path of its type")
            json.dumps([edit.value for fix in one.fixes for edit in fix.edits], allow_nan=False)
            found.append(one)
            if len(found) > MOST_FINDINGS:
                raise ValueError(f"it has more than {MOST_FINDINGS:,} findings")
    return found


def check(resolution: Resolution, targets: Collection[str] = DEFAULT_TARGETS) -> list[Diagnostic]:
    """Runs every rule that concerns `targets` once. A rule that needs a value which is itself wrong stays quiet."""
    found: list[Diagnostic] = []
    concerned = [entry for entry in all_rules() if entry.concerns(targets)]
    for entry in concerned:
        if entry.origin:
            continue
        with contextlib.suppress(Unavailable):
            # What a rule has found before it asks for such a value still counts.
            found.extend(_diagnostic(entry, finding, targets) for finding in entry.check(resolution))
    found.extend(_of_plug_ins([entry for entry in concerned if entry.origin], resolution, targets))
    problems = [*_added().problems, *(one for one in (family_problem(_model_type(resolution)),) if one)]
    hint = f"fix or uninstall it, or run with {entry_points.VARIABLE}=0 and without all plug-ins"
    return found + [Diagnostic(BROKEN_PLUGIN, Severity.ERROR, f"the {problem}", help=hint) for problem in problems]


def _model_type(resolution: Resolution) -> object:
    """The model type that a spec names, where it can be read."""
    with contextlib.suppress(Unavailable, ValueError):
        return resolution.model_config.get("model_type")
    return None


def _diagnostic(entry: Rule, finding: Finding, targets: Collection[str]) -> Diagnostic:
    nobody_runs_it = LAUNCHED in targets and entry.run_by and not set(entry.run_by) & set(targets)
    elsewhere = f"; or ask for the files of {' or '.join(entry.run_by)} with --target"
    if nobody_runs_it:
        finding = replace(finding, severity=Severity.ERROR, help=finding.help and finding.help + elsewhere)
    return finding.diagnostic(entry.code, entry.severity)


BASE: Mapping[str, Any] = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"nodes": 1, "gpus_per_node": 8, "accelerator": "h200"},
    "training": {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1},
}
"""Breaks no rule."""


def example_spec(part: Mapping[str, Any]) -> dict[str, Any]:
    """`BASE` with the keys of `part` in its place.

    Sections are merged; the model is replaced, and so is a cluster that says how many GPUs a node has.
    """
    spec: dict[str, Any] = copy.deepcopy(dict(BASE))
    for key, value in part.items():
        if isinstance(value, dict) and key != "model" and "gpus_per_node" not in value:
            spec[key] = {**spec.get(key, {}), **value}
        else:
            spec[key] = copy.deepcopy(value)
    return spec


# Numbers that rules suggest.


def nearest_multiples(value: int, divisor: int) -> tuple[int, ...]:
    """The multiples of `divisor` next to `value`, the nearer one first, the lower one only when it is positive."""
    lower = value // divisor * divisor
    near = [multiple for multiple in (lower, lower + divisor) if multiple > 0]
    return tuple(sorted(near, key=lambda multiple: (abs(multiple - value), multiple)))


def nearest_divisors(wanted: int, *totals: int, count: int = 2) -> tuple[int, ...]:
    """The common divisors of `totals` that are closest to `wanted`, closest first, smaller before larger."""
    common = [number for number in divisors(min(totals)) if all(total % number == 0 for total in totals)]
    return tuple(sorted(common, key=lambda number: (abs(number - wanted), number))[:count])


def listed(numbers: Iterable[int]) -> str:
    """`96, 112`, ascending."""
    return ", ".join(str(number) for number in sorted(numbers))


# Where a spec says something, for the second place of a conflict.


def model_path(spec: Resolution, *keys: str) -> tuple[str, ...]:
    """Where the model's dimension stands: under one of `keys` when written out, else at the preset or the file."""
    given = spec.get("model")
    for key in (*keys, "preset", "hf_config"):
        if key in given:
            return ("model", key)
    return ("model",)


def axis_path(axis: Axis) -> tuple[str, str]:
    """Where the size of an axis stands."""
    return "parallelism", axis.value


def also(spec: Resolution, *paths: tuple[str, ...]) -> tuple[Related, ...]:
    """The places that are given in the spec, each with the value that stands there."""
    found = []
    for path in paths:
        if spec.given(*path):
            value = spec.get(*path)
            written = str(value).lower() if isinstance(value, bool) else value
            shown = f"{path[-1]} {written}" if isinstance(value, (int, float, str)) else path[-1]
            found.append(Related(f"{shown} is set here", path))
    return tuple(found)


def layout_change(spec: Resolution) -> Safety:
    """What another layout changes: the cost; the numbers too, when the global batch follows from the layout."""
    if spec.given("training", "global_batch_size"):
        return Safety.CHANGES_COST
    return Safety.CHANGES_NUMERICS

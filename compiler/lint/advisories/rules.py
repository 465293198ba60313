"""Versions that compute something else: a rule for each advisory that has examples, and one for all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parcompile.backends.deepspeed.table import known
from parcompile.backends.kinds import DEEPSPEED, MEGATRON
from parcompile.diagnostics import Fix, Path, Safety, Severity
from parcompile.lint.advisories import DEEPSPEED as DEEPSPEED_TOOL
from parcompile.lint.advisories import Advisory, advisories, affecting
from parcompile.lint.deepspeed import LIGHTNING, UsageOptions
from parcompile.lint.registry import Check, Settings, file_rule
from parcompile.rules import Finding

_CLIPPING: Path = ("gradient_clipping",)
_KINDS = {DEEPSPEED_TOOL: DEEPSPEED, "megatron": MEGATRON}


def _rule(one: Advisory) -> Check:
    def affected(settings: Settings) -> Iterator[Finding]:
        """Fires when the version is affected and the configuration is one of those."""
        usage = settings.usage
        if one.tool == DEEPSPEED_TOOL and not one.affects(usage.version):
            return
        if one.matches(settings.tree) and not _is_misspelt(one, settings):
            yield _finding(one, settings)

    return affected


def _is_misspelt(one: Advisory, settings: Settings) -> bool:
    """Whether a key that must be absent is there under a misspelt name, or added by the one who reads the file."""
    if one.id == "A001" and (settings.usage.filler == LIGHTNING or settings.usage.is_template):
        return True
    paths = [clause["path"].split(".") for clause in one.condition if "default" in clause or clause.get("absent")]
    return any(settings.get(*path) is None and not settings.left_out(*path) for path in paths)


def _finding(one: Advisory, settings: Settings) -> Finding:
    usage = settings.usage
    severity = Severity(one.severity)
    message = f"{one.title}: {one.effect}"
    fixes: tuple[Fix, ...] = ()
    if one.id == "A001":
        does = "clips at 1.0 since 0.19.3, older versions do not clip"
        message = f"gradient_clipping is not given: DeepSpeed {does}"
        fixes = (Fix.setting(_CLIPPING, 1.0, Safety.CHANGES_NUMERICS),)
        if usage.pinned:
            severity = Severity.INFO
    elif one.tool == DEEPSPEED_TOOL:
        message = f"DeepSpeed {usage.version}: {message}"
    return Finding(message, _place(one, settings), help=one.avoid, fixes=fixes, severity=severity)


def _place(one: Advisory, settings: Settings) -> Path:
    """The place that an advisory speaks of, or what there is of it."""
    if one.place is None:
        return ()
    steps = one.place.split(".")
    if one.id == "A001":
        return tuple(steps)
    for length in range(len(steps), 0, -1):
        if settings.get(*steps[:length]) is not None:
            return tuple(steps[:length])
    return ()


def _usage(one: Advisory) -> UsageOptions:
    """The newest version that is affected; the advisory on a changed default is about a file without a version."""
    if one.tool != DEEPSPEED_TOOL or one.id == "A001":
        return UsageOptions()
    return UsageOptions(version=next((version for version in reversed(known()) if one.affects(version)), None))


for _one in advisories():
    if _one.wrong is not None and _one.right is not None:
        _said = f"{_one.effect} Affected: {_one.versions}." + (f" Only when {_one.when}." if _one.when else "")
        _page = {
            "title": _one.title,
            "explanation": f"{_said} To avoid it: {_one.avoid}.",
            "wrong": _one.wrong,
            "right": _one.right,
            "sources": _one.sources,
        }
        file_rule(_one.id, _KINDS[_one.tool], severity=Severity(_one.severity), usage=_usage(_one), page=_page)(
            _rule(_one)
        )


@file_rule("A900", DEEPSPEED, severity=Severity.WARNING, usage=UsageOptions(version="0.18.9"))
def _others(settings: Settings) -> Iterator[Finding]:
    """Fires for each advisory without a rule of its own whose version and keys are those of the file."""
    for advisory in affecting(DEEPSPEED_TOOL, settings.usage.version):
        if advisory.wrong is None and advisory.matches(settings.tree) and not _is_misspelt(advisory, settings):
            finding = _finding(advisory, settings)
            yield replace(finding, message=f"{advisory.id}: {finding.message}")

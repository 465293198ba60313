"""The page of every code: rules of a spec, rules of other tools' files, and the J and K codes of texts and schemas."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON
from parcompile.diagnostics import Severity
from parcompile.diagnostics.file_codes import FILE_CODES
from parcompile.entry_points import VARIABLE
from parcompile.rules.registry import BROKEN_PLUGIN, INEXPRESSIBLE, Example, Rule, all_rules

from .registry import FileRule, file_rules

GROUPS = {
    "A": "Numerics advisories: versions that compute something else",
    "B": "Batch sizes and micro-batches",
    "C": "Context parallelism",
    "D": "Further DeepSpeed keys",
    "E": "Plug-ins",
    "F": "DeepSpeed, Megatron-LM and gpt-neox files on their own",
    "G": "Options of other backends",
    "H": "Memory and accelerator",
    "J": "The text of a file",
    "K": "Keys and values",
    "L": "Layers and stages",
    "M": "Mixtures of experts, latent attention",
    "P": "Precision and optimizer",
    "R": "Activation checkpointing",
    "S": "Model and sequence length",
    "T": "Tensor parallelism",
    "W": "World size and order of the axes",
    "X": "What the runtime refuses",
    "Z": "ZeRO",
}
"""What the letters of codes stand for."""


_WIDTH = 75
_TOOLS = {DEEPSPEED: "deepspeed", MEGATRON: "megatron", GPT_NEOX: "gpt-neox"}


@dataclass(frozen=True, slots=True)
class Page:
    """What there is to say about a code. `wrong` and `right` are excerpts of a file in `format`."""

    code: str
    severity: Severity
    title: str
    explanation: str
    wrong: str
    right: str
    format: str = "json"
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("all",)
    origin: str = ""
    """The distribution that the code of a plug-in comes from."""

    @property
    def group(self) -> str:
        """The heading under which the code stands."""
        return f"{self.code[:-3]}: {GROUPS.get(self.code[:-3]) or f'rules of {self.origin}'}"

    @property
    def examples(self) -> list[tuple[str, str]]:
        """The excerpts that can be shown, each under its word; what is wrong with some files is their size."""
        both = (("wrong", self.wrong), ("right", self.right))
        return [(word, text.rstrip("\n")) for word, text in both if text.strip() and len(text.split("\n", 1)[0]) < 100]


@functools.cache
def pages() -> Mapping[str, Page]:
    """Every page, by code."""
    found = [_of_rule(rule) for rule in all_rules()]
    found += [
        Page(
            one.code,
            one.severity,
            one.title,
            _with_use(one),
            json.dumps(one.wrong, indent=2),
            json.dumps(one.right, indent=2),
            "json",
            one.sources,
            (_TOOLS[one.kind],),
        )
        for one in file_rules()
    ]
    found += [
        Page(one.code, Severity.ERROR, one.title, one.explanation, one.wrong, one.right, one.format)
        for one in FILE_CODES.values()
    ]
    found += [_BROKEN, _INEXPRESSIBLE]
    return {page.code: page for page in sorted(found, key=lambda page: (bool(page.origin), page.code))}


_BROKEN = Page(
    BROKEN_PLUGIN,
    Severity.ERROR,
    "a plug-in cannot be used",
    "An installed distribution adds rules, or the family of this model, and its code cannot be imported or is not what "
    "the group of its entry point is for. The spec does not pass then: a check without somebody's rules would look as "
    f"if they held. Fix or uninstall the distribution, or set {VARIABLE}=0 to run without all plug-ins. A broken "
    "target or importer is refused when it is named, and disturbs nothing else.",
    "",
    "",
)


_INEXPRESSIBLE = Page(
    INEXPRESSIBLE,
    Severity.ERROR,
    "a target cannot express the layout",
    "`parcompile check -t TARGET` asks whether the files of a target can be written. Where the target has no word for "
    "something of the layout, `parcompile compile` writes no files for it; target_report.json says the same.",
    "",
    "",
)


def _with_use(rule: FileRule) -> str:
    """The explanation, with the options under which the examples are checked."""
    version, used_with = rule.usage.version, rule.usage.used_with
    options = [f"--deepspeed-version {version}"] if version else []
    options += [f"--used-with {used_with}"] if used_with else []
    return f"{rule.explanation} The examples are meant for {' '.join(options)}." if options else rule.explanation


def _with_tools(rule: Rule) -> str:
    """The explanation, with the tools without which what the rule finds is an error."""
    if not rule.run_by:
        return rule.explanation
    return (
        f"{rule.explanation} This is an error unless the files of {' or '.join(rule.run_by)} are asked for (--target): "
        "nobody could run such a plan."
    )


def titles() -> Mapping[str, str]:
    """The title of every code."""
    return {code: page.title for code, page in pages().items()}


def _of_rule(rule: Rule) -> Page:
    wrong, right = excerpt(rule.wrong), excerpt(rule.right)
    return Page(
        rule.code,
        rule.severity,
        rule.title,
        _with_tools(rule),
        wrong,
        right,
        "json",
        rule.sources,
        rule.targets,
        rule.origin,
    )


def excerpt(part: Example) -> str:
    """A part of a spec as JSON, one line for each of its sections that fits into one."""
    rows = []
    for key, value in part.items():
        row = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        if len(row) > _WIDTH:
            row = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, indent=2)}"
        rows.append(row)
    return ",\n".join(rows)

"""docs/api.md: the public Python API, from its docstrings. `python .ci/pages/api_page.py` writes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

import parcompile

FUNCTIONS = ("check", "compile", "search", "init", "import_file", "diff", "load_plan")
OBJECTS: dict[str, tuple[str, ...]] = {
    "Plan": ("groups", "estimate", "world_size", "plan_hash", "spec", "refusals"),
    "CheckResult": ("valid", "diagnostics", "errors", "warnings", "remarks", "kind", "text"),
    "Diagnostic": (
        *("code", "severity", "message", "path", "file", "position", "end", "help", "fixes", "related", "is_error"),
    ),
    "Search": ("spec", "best", "fitting", "too_large", "refused"),
    "FirstSpec": ("offers", "spec", "reason", "remedies"),
    "Imported": ("spec", "complete", "questions", "accounts", "diagnostics", "plan", "tool"),
    "Difference": ("changes", "same", "moved_ranks", "runtime", "deepspeed", "of", "to_json"),
    "Estimate": ("parameters", "memory", "traffic", "time", "budget", "to_json"),
}
"""Classes with the members that are part of the API."""
ERRORS = ("SpecError", "SourceError", "PlanError")

START = Path(__file__).with_name("api_start.md").read_text(encoding="utf-8")


def reference() -> str:
    """The whole page."""
    parts = [START, "## Functions\n"]
    for name in FUNCTIONS:
        function = getattr(parcompile, name)
        shown = str(inspect.signature(function)).replace("'", "")
        parts += [f"### {name}\n", f"```text\nparcompile.{name}{shown}\n```\n", _prose(function.__doc__)]
    parts.append("## Objects\n")
    for name, members in OBJECTS.items():
        parts += [
            f"### {name}\n",
            _prose(getattr(parcompile, name).__doc__),
            _members(getattr(parcompile, name), members),
        ]
    parts.append("## Errors\n")
    parts += [f"- `parcompile.{name}`: {_first(getattr(parcompile, name).__doc__)}" for name in ERRORS]
    return "\n".join(parts) + "\n"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: the parts of Google's form become lists."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring or "").splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            lines += [f"**{line[:-1]}**", ""]
        elif entry := re.fullmatch(r"    (\w+): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(re.sub(r"^    +", "  " if line.startswith("        ") else "", line))
    return "\n".join(lines) + "\n"


def _members(owner: type, members: tuple[str, ...]) -> str:
    rows = ["| member | |", "|---|---|"]
    fields = {one.name: str(one.type) for one in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
    for name in members:
        member = inspect.getattr_static(owner, name)
        if isinstance(member, property):
            rows.append(f"| `{name}` | {_first(member.__doc__)} |")
        elif inspect.isfunction(member):
            arguments = str(inspect.signature(member)).replace("(self, ", "(").replace("(self)", "()").replace("'", "")
            rows.append(
                f"| `{name}{arguments.partition(' ->')[0]}` | {_first(member.__doc__)} |".replace(" | None", "")
            )
        else:
            rows.append(f"| `{name}` | {fields[name].replace('|', 'or')} |")
    return "\n".join(rows) + "\n"


def _first(docstring: str | None) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.stdout.write(textwrap.dedent(reference()))

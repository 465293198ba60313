"""docs/api.md: the public Python API, from its docstrings. `python .ci/pages/api_page.py` writes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap

import parcompile

FUNCTIONS = ("check", "compile", "search", "init", "import_file", "diff", "load_plan")
OBJECTS: dict[str, tuple[str, ...]] = {
    "Plan": ("groups", "estimate", "world_size", "plan_hash", "spec", "refusals"),
    "CheckResult": ("valid", "diagnostics", "errors", "warnings", "remarks", "kind", "text"),
    "Diagnostic": (
        "code",
        "severity",
        "message",
        "path",
        "file",
        "position",
        "end",
        "help",
        "fixes",
        "related",
        "is_error",
    ),
    "Search": ("spec", "best", "fitting", "too_large", "refused"),
    "FirstSpec": ("offers", "spec", "reason", "remedies"),
    "Imported": ("spec", "complete", "questions", "accounts", "diagnostics", "plan", "tool"),
    "Difference": ("changes", "same", "moved_ranks", "runtime", "deepspeed", "of", "to_json"),
    "Estimate": ("parameters", "memory", "traffic", "time", "budget", "to_json"),
}
"""Classes with the members that are part of the API."""
ERRORS = ("SpecError", "SourceError", "PlanError")

START = '''\
# The Python API

`import parcompile` does from a program what the command line does. It needs neither
torch nor DeepSpeed, and it loads its parts when they are first used. The names on this page are stable from version 1.0
on: a name is removed or changed only in a new major version. Until then the changelog lists every change. Modules below
`parcompile` that are not on this page may change at any time. The runtime has its own page:
[Hugging Face models in a DeepSpeed engine](adapter.md).

This page is written by `python .ci/pages/api_page.py` from the docstrings, and a test runs its examples.

## Check

```python
import parcompile

result = parcompile.check("""
{
  "version": 1,
  "model": {"preset": "llama-3-8b"},
  "cluster": {"gpus_per_node": 8, "accelerator": "h100-sxm"},
  "parallelism": {"tp": 3},
  "training": {"sequence_length": 8192, "global_batch_size": 64}
}
""")
for one in result.errors:
    print(one.code, one.position.line, one.message)
```

```text
T001 6 num_attention_heads 32 on tp 3: 32 / 3 is not whole; nearest tp: 2, 4
T004 6 intermediate_size 14336 on tp 3: 14336 / 3 is not whole; nearest tp: 2, 4
W001 6 tp 3 · cp 1 · pp 1 = 3 does not divide the world of 1 node · 8 GPUs = 8: 8 / 3 is not whole
```

## Compile

```python
import parcompile

spec = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"},
    "parallelism": {"tp": 4, "cp": 2, "sequence_parallel": True},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
}
plan = parcompile.compile(spec, "plan")
print(plan.world_size, plan.groups(5)["cp"], plan.groups(5)["dp-cp"])

estimate = plan.estimate()
gib = estimate.memory.peak.total_bytes / 2**30
print(f"{gib:.1f} GiB, fits: {estimate.memory.fits}, {estimate.time.step.seconds:.1f} s per step")
```

```text
16 (1, 5) (1, 5, 9, 13)
25.6 GiB, fits: True, 5.3 s per step
```

`parcompile.compile(spec)` without a folder writes nothing. A spec with errors raises `SpecError`, whose `diagnostics`
are the findings.

## Search

```python
import parcompile

spec = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"},
    "parallelism": {"pp": 1},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
}
found = parcompile.search(spec)
print(found.spec["parallelism"])
print(f"{found.best.seconds:.1f} s; the next one lost because: {found.fitting[1].reason}")
parcompile.compile(found.spec, "plan")
```

```text
{'pp': 1, 'tp': 2, 'cp': 1, 'sequence_parallel': True}
4.6 s; the next one lost because: 0.8% slower, mostly because of cp, exposed (+35.9 ms)
```
'''


def reference() -> str:
    """The whole page."""
    parts = [START, "## Functions\n"]
    for name in FUNCTIONS:
        function = getattr(parcompile, name)
        parts += [f"### {name}\n", f"```text\n{_signature(name, function)}\n```\n", _prose(function.__doc__)]
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


def _signature(name: str, function: object) -> str:
    assert callable(function)
    shown = str(inspect.signature(function)).replace("'", "")
    return f"parcompile.{name}{shown}"


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

"""Writes compiler/backends/megatron/options.json: what the parsers of Megatron-LM's versions and of its forks take.

    python .ci/generate/megatron_options.py [--check]

Each parser is imported from its own sources (see upstream/megatron_lm.py) and asked for its actions; nothing is read
from text. PARCOMPILE_MIRRORS names a folder with their git repositories, `OWNER+NAME/repo` each.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import sources

OUTPUT = Path(__file__).resolve().parents[2] / "compiler" / "backends" / "megatron" / "options.json"
FOLDERS = ("megatron", "tools", "tasks")

_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LINES: dict[str, list[str]] = _KNOWN["lines"]
"""The parsers whose facts are kept, oldest first; the last version of a line is the one that files are checked for."""
ELSEWHERE: dict[str, str] = _KNOWN["elsewhere"]
"""Where scripts and forks add options of their own; their names are kept, so that they count as no misspelling."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="Compare with the file, and write nothing.")
    arguments.add_argument("--cache", type=Path, help="A folder that keeps what each parser said, for the next run.")
    options = arguments.parse_args()
    mirrors = Path(os.environ.get("PARCOMPILE_MIRRORS", "../.mirror"))
    if not mirrors.is_dir():
        print(f"PARCOMPILE_MIRRORS names no folder of git repositories ({mirrors})", file=sys.stderr)
        return 2
    text = render(generate(mirrors, options.cache))
    if options.check:
        if OUTPUT.read_text(encoding="utf-8") != text:
            print(f"{OUTPUT} is out of date: run {sys.argv[0]}", file=sys.stderr)
            return 1
        return 0
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


def generate(mirrors: Path, cache: Path | None) -> dict[str, Any]:
    """The whole table."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        wanted = [(line, version) for line, versions in LINES.items() for version in versions]
        found = dict(zip(wanted, pool.map(lambda one: parsed(mirrors, *one, cache), wanted), strict=True))
    options: dict[str, dict[str, list[list[Any]]]] = {}
    for number, (line, versions) in enumerate(LINES.items()):
        for at, version in enumerate(versions):
            for fact in found[line, version]:
                spans = options.setdefault(name_of(fact["flags"]), {}).setdefault(str(number), [])
                facts = [fact[key] for key in ("flags", "dest", "kind", "type", "choices", "default", "group")]
                if spans and spans[-1][1] == at - 1 and spans[-1][2:] == facts:
                    spans[-1][1] = at
                else:
                    spans.append([at, at, *facts])
    known = {flag for spans in options.values() for span in spans.values() for one in span for flag in one[2]}
    elsewhere: dict[str, str] = {}
    for line, revision in ELSEWHERE.items():
        for flag in sorted(set(added(mirrors, line, revision)) - known):
            elsewhere.setdefault(flag, line)
    return {
        "lines": [{"name": name, "versions": list(versions)} for name, versions in LINES.items()],
        "fields": ["since", "until", "flags", "dest", "kind", "type", "choices", "default", "group"],
        "options": dict(sorted(options.items())),
        "elsewhere": dict(sorted(elsewhere.items())),
    }


def name_of(flags: list[str]) -> str:
    """The name under which an option is known here: its first long flag, without dashes in front."""
    return next(flag for flag in flags if flag.startswith("--"))[2:].replace("-", "_")


def parsed(mirrors: Path, line: str, version: str, cache: Path | None) -> list[dict[str, Any]]:
    """The facts of one parser."""
    kept = cache / f"{line.replace('/', '+')}@{version}.json" if cache else None
    if kept and kept.exists():
        facts: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return facts
    repository = mirrors / line.replace("/", "+") / "repo"
    revision = f"refs/tags/{version}" if "." in version else version
    with tempfile.TemporaryDirectory() as folder:
        sources.extract(repository, revision, Path(folder), *FOLDERS, "arguments.py", "mpu")
        judge = Path(__file__).resolve().parents[1] / "upstream" / "megatron_lm.py"
        run = subprocess.run([sys.executable, judge, folder, "facts"], check=False, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{line} {version}: {run.stderr[-2000:]}")
    facts = json.loads(run.stdout)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(run.stdout, encoding="utf-8")
    print(f"{line} {version}: {len(facts)} options", file=sys.stderr)
    return facts


def added(mirrors: Path, line: str, revision: str) -> Iterator[str]:
    """The flags of every `add_argument` in a repository."""
    repository = mirrors / line.replace("/", "+") / "repo"
    found = sources.git(repository, "grep", "-l", "-F", "add_argument(", revision, "--", "*.py").decode()
    for name in found.splitlines():
        text = sources.git(repository, "show", name).decode("utf-8", "replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                        yield str(argument.value)


def render(table: dict[str, Any]) -> str:
    """JSON with one option a line."""

    def row(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    def block(rows: dict[str, Any]) -> str:
        return "{\n" + ",\n".join(f"  {row(key)}: {row(value)}" for key, value in rows.items()) + "\n }"

    return (
        "{\n"
        f' "lines": {row(table["lines"])},\n'
        f' "fields": {row(table["fields"])},\n'
        f' "options": {block(table["options"])},\n'
        f' "elsewhere": {block(table["elsewhere"])}\n'
        "}\n"
    )


if __name__ == "__main__":
    sys.exit(main())

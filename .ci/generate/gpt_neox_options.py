"""Writes compiler/backends/gpt_neox/options.json: the fields of gpt-neox's configuration classes in its versions.

    python .ci/generate/gpt_neox_options.py [--check]

The classes are imported from their own sources (see upstream/gpt_neox.py). PARCOMPILE_MIRRORS names a folder with git
repositories, `OWNER+NAME/repo` each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import sources

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "compiler" / "backends" / "gpt_neox" / "options.json"
VERSIONS = ("v1.0", "299b68cd", "d87e4a33", "73431a4b", "9ee4a8f6", "1ac9add8", "ea7aefd8")
"""Oldest first, from March 2023 to May 2026; the last one is the version that files are checked for."""
_FACTS = ("types", "choices", "default", "group")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="Compare with the file, and write nothing.")
    check = arguments.parse_args().check
    repository = Path(os.environ.get("PARCOMPILE_MIRRORS", "../.mirror")) / "EleutherAI+gpt-neox" / "repo"
    if not repository.is_dir():
        print(f"PARCOMPILE_MIRRORS names no folder with {repository.parent.name}/repo", file=sys.stderr)
        return 2
    text = render(generate(repository))
    if check:
        return int(OUTPUT.read_text(encoding="utf-8") != text)
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


def generate(repository: Path) -> dict[str, list[list[Any]]]:
    """The spans of versions in which an option has the same facts, oldest first, by its name."""
    options: dict[str, list[list[Any]]] = {}
    for at, version in enumerate(VERSIONS):
        for fact in facts(repository, version):
            spans = options.setdefault(fact["name"], [])
            kept = [fact[key] for key in _FACTS]
            if spans and spans[-1][1] == at - 1 and spans[-1][2:] == kept:
                spans[-1][1] = at
            else:
                spans.append([at, at, *kept])
    return dict(sorted(options.items()))


def facts(repository: Path, version: str) -> list[dict[str, Any]]:
    """The fields of one version."""
    with tempfile.TemporaryDirectory() as folder:
        sources.extract(repository, version, Path(folder), "megatron")
        judge = Path(__file__).resolve().parents[1] / "upstream" / "gpt_neox.py"
        run = subprocess.run([sys.executable, judge, folder], check=True, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(run.stdout)
    print(f"{version}: {len(found)} options", file=sys.stderr)
    return found


def render(options: dict[str, list[list[Any]]]) -> str:
    """JSON with one option a line."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(spans)}" for name, spans in options.items())
    head = f' "versions": {json.dumps(VERSIONS)},\n "fields": {json.dumps(("since", "until", *_FACTS))},\n'
    return "{\n" + head + ' "options": {\n' + rows + "\n }\n}\n"


if __name__ == "__main__":
    sys.exit(main())

"""Writes tests/compiler/gpt_neox_verdicts.json: what gpt-neox says of configurations with and without a mistake.

GPT_NEOX=CLONE python .ci/generate/gpt_neox_verdicts.py [--check]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpt_neox_fields import VERSIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import sources

OUTPUT = Path(__file__).resolve().parents[2] / "tests" / "compiler" / "gpt_neox_verdicts.json"
PROGRAM = Path(__file__).resolve().parents[1] / "upstream" / "gpt_neox.py"
BASE = "pipe_parallel_size: 0\nmodel_parallel_size: 1\n"
CASES: dict[str, str] = json.loads(Path(__file__).with_name("gpt_neox_cases.json").read_text(encoding="utf-8"))


def main() -> None:
    """Writes the file, or says whether it is up to date."""
    repository = sources.repository("GPT_NEOX")
    if repository is None:
        raise SystemExit("GPT_NEOX names no git repository")
    version, revision = list(VERSIONS.items())[-1]
    texts = {name: merged(text) for name, text in CASES.items()}
    with tempfile.TemporaryDirectory() as folder:
        sources.extract(repository, revision, Path(folder))
        asked = "".join(f"{json.dumps(text)}\n" for text in texts.values())
        run = subprocess.run([sys.executable, PROGRAM, folder], input=asked, capture_output=True, text=True, check=True)
    verdicts: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    cases = [{"name": name, "text": text, **one} for (name, text), one in zip(texts.items(), verdicts, strict=True)]
    text = json.dumps({"version": version, "cases": cases}, indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if OUTPUT.read_text(encoding="utf-8") == text else f"{OUTPUT.name} is out of date")
    OUTPUT.write_text(text, encoding="utf-8")


def merged(text: str) -> str:
    """A file that is told for gpt-neox's, with the lines of a case."""
    names = {line.split(":")[0] for line in text.splitlines()}
    return "".join(line + "\n" for line in BASE.splitlines() if line.split(":")[0] not in names) + text


if __name__ == "__main__":
    main()

"""A runnable project around a spec: its training script, data, launch scripts and CI workflow."""

import codecs
import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.user_files import MAX_BYTES, parse_json, read_start

# The files of a new project, from templates that the package holds.

TEMPLATES = {
    "README.md": "readme.md.txt",
    "train.py": "train.py.txt",
    "run.sh": "run.sh.txt",
    "submit.sh": "submit.sh.txt",
    ".github/workflows/check.yml": "check.yml.txt",
    ".gitignore": "gitignore.txt",
}
"""Files of a project and their templates."""
EXECUTABLE = ("run.sh", "submit.sh")
_FOLDER = importlib.resources.files("parcompile.project") / "templates"


def small_spec() -> str:
    """The spec of a project without a model: one that trains on two processes of a CPU, on bytes."""
    return (_FOLDER / "spec.json.txt").read_text(encoding="utf-8")


def project_files(name: str, spec: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Texts of all files by their paths in the folder of the project `name`.

    Args:
        name: of the project.
        spec: the text of its spec.
        arguments: of every run of train.py, by their names without dashes. Without `data`, an example is written.
    """
    example = {} if "data" in arguments else {"data/example.txt": "example.txt"}
    texts = {
        path: (_FOLDER / template).read_text(encoding="utf-8") for path, template in {**TEMPLATES, **example}.items()
    }
    lines = "".join(f"--{key}={value}\n" for key, value in {"data": "data", **arguments}.items())
    return {
        "spec.json": spec,
        "train.args": lines,
        **{path: text.replace("@NAME@", name) for path, text in texts.items()},
    }


# The rows of a user's data.

TURNS, PROMPTS, ANSWERS = (
    ("messages", "conversations"),
    ("prompt", "instruction"),
    ("completion", "response", "output"),
)


def is_instruction(row: Mapping[str, Any]) -> bool:
    """Whether a row has turns, or a prompt and an answer, in one of the usual forms."""

    def has(names: tuple[str, ...]) -> bool:
        return any(row.get(name) is not None for name in names)

    return has(TURNS) or (has(PROMPTS) and has(ANSWERS))


def holds_answers(data: Path) -> str | None:
    """The first line of a user's JSON lines, where it is an instruction without `input_ids`; None of all else."""
    files = [data] if data.is_file() else sorted(data.rglob("*.jsonl"))
    if not files or files[0].suffix not in (".jsonl", ".json"):
        return None
    try:
        lines = read_start(files[0], MAX_BYTES)[0].removeprefix(codecs.BOM_UTF8).split(b"\n")
        number, line = next(((number, line) for number, line in enumerate(lines, 1) if line.strip()), (0, b""))
        row = parse_json(line)
    except (OSError, ValueError):
        return None  # training says what is wrong with it
    found = isinstance(row, dict) and "input_ids" not in row and is_instruction(row)
    return f"{files[0]}:{number}" if found else None

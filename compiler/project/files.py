"""The files of a new project, from templates that the package holds."""

from __future__ import annotations

import importlib.resources

TEMPLATES = {
    "README.md": "readme.md.txt",
    "train.py": "train.py.txt",
    "data/example.txt": "example.txt",
    "run.sh": "run.sh.txt",
    "submit.sh": "submit.sh.txt",
    ".github/workflows/check.yml": "check.yml.txt",
    ".gitignore": "gitignore.txt",
}
"""Files of a project and their templates."""
EXECUTABLE = ("run.sh", "submit.sh")


def project_files(name: str, spec: str) -> dict[str, str]:
    """Texts of all files by their paths in the folder of the project `name`; `spec` is the text of its spec."""
    folder = importlib.resources.files("parcompile.project") / "templates"
    texts = {path: (folder / template).read_text(encoding="utf-8") for path, template in TEMPLATES.items()}
    return {"spec.json": spec, **{path: text.replace("@NAME@", name) for path, text in texts.items()}}

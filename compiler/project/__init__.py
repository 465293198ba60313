"""A runnable project around a spec: its training script, data, launch scripts and CI workflow."""

import importlib.resources
from collections.abc import Mapping

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

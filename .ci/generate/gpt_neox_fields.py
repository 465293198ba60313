"""Writes compiler/backends/gpt_neox/fields.json: the keys of a gpt-neox configuration, of its own dataclasses.

    GPT_NEOX=CLONE python .ci/generate/gpt_neox_fields.py [--check]

The classes of each version are imported from its sources and asked for their fields; nothing is read from text, but for
the DeepSpeed that its requirements name.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import sources

from parcompile.backends.gpt_neox.beside import replaced

OUTPUT = Path(__file__).resolve().parents[2] / "compiler" / "backends" / "gpt_neox" / "fields.json"
VERSIONS = {"1.0": "v1.0", "2.0": "6edf2418", "2026-05-20": "ea7aefd8"}
"""Revisions by the name of the version, oldest first. The tag v2.0 itself holds a module that Python cannot parse."""
DEEPSPEED = "0.16.5"
"""version.txt of the DeeperSpeed that requirements/requirements.txt of the last version names, at its commit."""
MODULES = ("deepspeed_args", "neox_args")
FROM_THE_MACHINE = frozenset({"git_hash"})
"""Fields whose default is asked of the machine."""


def classes(folder: Path) -> list[tuple[type, bool]]:
    """The dataclasses of a version, and whether their values are handed on to DeepSpeed."""
    sys.path.insert(0, str(folder / "megatron" / "neox_arguments"))
    try:
        for name in ("template", *MODULES):
            sys.modules.pop(name, None)
        modules = [importlib.import_module(name) for name in MODULES]
    finally:
        sys.path.pop(0)
    found = [one for module in modules for one in vars(module).values() if dataclasses.is_dataclass(one)]
    return [(one, one.__name__ == "NeoXArgsDeepspeedConfig") for one in found if one.__name__ != "NeoXArgsTemplate"]


def described(kind: Any) -> dict[str, Any]:
    """What validate_types() takes for a field."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return {"choices": list(typing.get_args(kind))}
    if origin in (typing.Union, types.UnionType):
        return {"types": sorted({name(one) for one in typing.get_args(kind)} - {"NoneType"})}
    return {"types": [name(kind)]}


def name(kind: Any) -> str:
    """A type by its plain name."""
    plain = typing.get_origin(kind) or kind
    return "any" if plain is Any else str(plain.__name__)


def own_lists(folder: Path) -> dict[str, list[str]]:
    """The kinds of attention of a version, and the fields that it sets whatever a file says."""
    text = (folder / "megatron" / "neox_arguments" / "arguments.py").read_text(encoding="utf-8")
    kinds = sys.modules["neox_args"].ATTENTION_TYPE_CHOICES  # of the version that was imported last
    return {"attention": list(kinds), "replaced": sorted(replaced(ast.parse(text)))}


def facts() -> dict[str, Any]:
    """Every field: the versions that have it, and what the last of them says of it."""
    repository = sources.repository("GPT_NEOX")
    if repository is None:
        raise SystemExit("GPT_NEOX names no git repository")
    fields: dict[str, dict[str, Any]] = {}
    for version, revision in VERSIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            fork = sources.extract(repository, revision, Path(folder))
            for one, handed_on in classes(fork):
                for field in dataclasses.fields(one):
                    entry = fields.setdefault(field.name, {"versions": []})
                    kept = {"versions": [*dict.fromkeys((*entry["versions"], version))], **described(field.type)}
                    if field.name not in FROM_THE_MACHINE and field.default is not dataclasses.MISSING:
                        kept["default"] = field.default
                    if handed_on:
                        kept["deepspeed"] = True
                    fields[field.name] = kept
            lists = own_lists(fork)
    return {"versions": list(VERSIONS), "deepspeed": DEEPSPEED, **lists, "fields": dict(sorted(fields.items()))}


def main() -> None:
    """Writes the file, or says whether it is up to date."""
    found = facts()
    entries = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in found.pop("fields").items())
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in found.items())
    text = f'{{\n{head} "fields": {{\n{entries}\n }}\n}}\n'
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if OUTPUT.read_text(encoding="utf-8") == text else f"{OUTPUT.name} is out of date")
    OUTPUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""What is damaged: well-formed files by kind, and the commands that read each."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzzing.schemas import drawn as from_schema

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "data" / "configs"
"""Public files by tool (`ds`, `megatron`, `neox`, `hf`), which are read where they lie when they are there."""
_LARGEST = 200_000
Words = tuple[str, ...]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Base:
    """A well-formed file. `form` is "json", "yaml", "sh" or "csv"."""

    text: str
    form: str

    @functools.cached_property
    def tree(self) -> Any:
        """What it holds; None where it is no tree."""
        try:
            if self.form == "json":
                return json.loads(self.text)
            found = yaml.load(self.text, Loader=_Loader) if self.form == "yaml" else None
            json.dumps(found)  # no dates, no sets
        except (ValueError, TypeError, yaml.YAMLError, RecursionError):
            return None
        return found if isinstance(found, (dict, list)) else None


@dataclass(frozen=True)
class Kind:
    """Files of one kind.

    Attributes:
        name: as it is chosen and reported.
        file: where the damaged file lies, in the folder of the process.
        bases: the files to damage.
        commands: in which `@` stands for that file and `%` for the folder.
        weight: how often it is chosen beside the others.
        beside: a folder whose files lie beside it.
        sealed: the tree with the hashes of what it says, where a reader refuses a tree without them at once.
    """

    name: str
    file: str
    bases: Sequence[Base]
    commands: Sequence[Words]
    weight: float = 1.0
    beside: Path | None = None
    sealed: Callable[[dict[str, Any]], object] | None = None

    def path(self, folder: Path, base: Base) -> Path:
        """Where the file lies; its suffix is that of the base where the name leaves it open."""
        return folder / self.name / self.file.replace("?", base.form)

    def line(self, folder: Path, base: Base, words: Words) -> Words:
        """A command with the names of the file and of its folder."""
        file, own = str(self.path(folder, base)), str(folder / self.name)
        return tuple(word.replace("@", file).replace("%", own) for word in words)


_HERE = Path(__file__).parent
BASES: dict[str, Any] = json.loads((_HERE / "bases.json").read_text(encoding="utf-8"))
"""Trees of well-formed files, by kind."""
SPEC = BASES["spec"]


def _json(*trees: Any) -> list[Base]:
    return [Base(json.dumps(tree, indent=1), "json") for tree in trees]


_FORMS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".csv": "csv"}


def _files(folder: Path, pattern: str) -> list[Base]:
    """Files below a folder, by name; other texts count as scripts."""
    files = sorted(folder.glob(pattern))
    return [
        Base(file.read_text(encoding="utf-8", errors="replace"), _FORMS.get(file.suffix, "sh"))
        for file in files
        if file.is_file() and file.stat().st_size <= _LARGEST
    ]


def _configs() -> list[Base]:
    """Configurations of models: those of the presets, and one of each type with the names that its family reads."""
    from parcompile.model.families import FAMILIES
    from parcompile.model.presets import presets

    sizes, more = BASES["sizes"], BASES["further_sizes"]
    trees: list[Any] = [dict(one.config) for one in presets().values()]
    for name, family in sorted(FAMILIES.items()):
        own = {family.keys.get(key, key) or key: value for key, value in sizes.items()}
        trees += [{"model_type": name, **own}, {"model_type": name, **own, **more}]
    trees.append({"model_type": "llava", "text_config": {"model_type": "llama", **sizes}, "vision_config": {}})
    return _json(*trees)


def _compiled(folder: Path) -> None:
    """`before.json` and its plan."""
    file, plan = folder / "before.json", folder / "plan"
    if not plan.is_dir():
        file.write_text(json.dumps(SPEC), encoding="utf-8")
        words = [sys.executable, "-m", "parcompile", str(file), "-o", str(plan)]
        subprocess.run(words, check=True, capture_output=True)


def _held(folder: Path, **changes: Any) -> None:
    """A spec that names the damaged file."""
    (folder / "held.json").write_text(json.dumps({**BASES["held"], **changes}), encoding="utf-8")


def _note(folder: Path) -> None:
    """A checkpoint of small files with its note."""
    checkpoint = folder / "checkpoint"
    if (checkpoint / "parcompile.json").is_file():
        return
    import torch

    from parcompile.plan import load_plan
    from parcompile.runtime.checkpoint.manifest import Note, tensor_files

    _compiled(folder)
    plan = load_plan(folder / "plan")
    checkpoint.mkdir()
    files = {}
    for name in sorted(tensor_files(plan)):
        torch.save({"x": torch.zeros(1)}, checkpoint / name)
        content = (checkpoint / name).read_bytes()
        files[name] = (len(content), hashlib.sha256(content).hexdigest())
    layout = {"tp": 2, "cp": 1, "pp": 1, "dp": 1, "ep": 1}
    note = Note(checkpoint, 3, plan, layout, files, {"r": 8, "ranks": {"q_proj": [8, 2.0]}}, [[3, 2]])
    (checkpoint / "parcompile.json").write_text(json.dumps(note.to_json()), encoding="utf-8")


def _index(folder: Path) -> None:
    """A model whose tensors lie in two files, with their index and its config.json."""
    file = folder / "model" / "model.safetensors.index.json"
    if file.is_file():
        return
    import torch
    from safetensors.torch import save_file

    from parcompile.model.derived_rows import parameter_table
    from parcompile.model.hf_config import shape_from_config

    _compiled(folder)
    file.parent.mkdir()
    (file.parent / "config.json").write_text(json.dumps(SPEC["model"]), encoding="utf-8")
    places: dict[str, str] = {}
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, (name, row) in enumerate(parameter_table(shape_from_config(SPEC["model"])).expanded()):
        parts[number % 2][name] = torch.zeros(tuple(row.shape))
    for number, part in enumerate(parts):
        save_file(part, str(file.parent / f"model-{number}.safetensors"))
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}), encoding="utf-8")


def _plan_sealed(tree: dict[str, Any]) -> None:
    from parcompile.plan import digest

    tree["plan_hash"] = digest({key: value for key, value in tree.items() if key != "plan_hash"})


def _note_sealed(tree: dict[str, Any]) -> None:
    if isinstance(tree.get("plan"), dict):
        _plan_sealed(tree["plan"])
        tree["plan_hash"] = tree["plan"]["plan_hash"]


_MACHINE = {"nodes": 1, "gpus_per_node": 8, "accelerator": "machine.json"}
_BESIDE: dict[str, Callable[[Path], None]] = {
    "plan": _compiled,
    "config": _held,
    "machine": functools.partial(_held, model={"preset": "llama-3-8b"}, cluster=_MACHINE),
    "note": _note,
    "index": _index,
}
"""What makes the files that lie beside damaged ones, in a folder that is there."""
_OF_RUNTIME = ("note", "index")
_SEALED = {"plan": _plan_sealed, "note": _note_sealed}


def _bases(said: str, folders: Mapping[str, Path], drawn: int, number: int) -> list[Base]:
    """What a line of `bases` in kinds.json stands for.

    Trees of bases.json (`json` or `both` and a name), the `configs` of models, files drawn from a `schema` (and which
    share of `drawn`), or a folder and a pattern of files (and whether only `scripts` or only `trees` of them).
    """
    how, what, only = [*said.split(), "", ""][:3]
    if how == "configs":
        return _configs()
    if how == "schema":
        return _json(*from_schema(what, max(1, round(drawn * float(only or 1))), number))
    if how in ("json", "both"):
        trees = BASES[what] if isinstance(BASES[what], list) else [BASES[what]]
        texts = [yaml.safe_dump(tree, sort_keys=False) for tree in trees if how == "both"]
        return [*(Base(text, "yaml") for text in texts), *_json(*trees)]
    found = _files(folders[how], what)
    return [one for one in found if not only or (one.form == "sh") is (only == "scripts")]


def all_kinds(
    made: Path, corpus: Path = CORPUS, *, runtime: bool = True, drawn: int = 150, number: int = 0
) -> list[Kind]:
    """Every kind of kinds.json, with its files.

    `searched` is rare: a search takes seconds, a hundred times as long as what reads the file otherwise.

    Args:
        made: where those of plans and checkpoints are made.
        corpus: public files of other tools.
        runtime: with the files of checkpoints, which need torch.
        drawn: how many files hypothesis draws from each schema.
        number: which of them.
    """
    folders, found = {"repo": ROOT, "corpus": corpus, "made": made}, []
    for row in json.loads((_HERE / "kinds.json").read_text(encoding="utf-8")):
        name, beside = row["name"], made / row["beside"] if "beside" in row else None
        if name in _OF_RUNTIME and not runtime:
            continue
        if beside is not None:
            beside.mkdir(parents=True, exist_ok=True)
            _BESIDE[row["beside"]](beside)
        bases = [base for said in row["bases"] for base in _bases(said, folders, drawn, number)]
        commands = [tuple(words.split()) for words in row["commands"]]
        found.append(Kind(name, row["file"], bases, commands, row["weight"], beside, _SEALED.get(name)))
    return found

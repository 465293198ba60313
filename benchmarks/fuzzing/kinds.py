"""What is damaged: well-formed files by kind, and the commands that read each."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
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


def _yaml(*trees: Any) -> list[Base]:
    return [Base(yaml.safe_dump(tree, sort_keys=False), "yaml") for tree in trees]


def _both(*trees: Any) -> list[Base]:
    return [*_yaml(*trees), *_json(*trees)]


_FORMS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".csv": "csv"}


def _files(folder: Path, pattern: str = "*") -> list[Base]:
    """Files of a folder, by name; other texts count as scripts."""
    files = sorted(folder.glob(pattern)) if folder.is_dir() else []
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


def _compiled(folder: Path) -> Path:
    """A folder with `before.json` and its plan, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    file, plan = folder / "before.json", folder / "plan"
    if not plan.is_dir():
        file.write_text(json.dumps(SPEC), encoding="utf-8")
        words = [sys.executable, "-m", "parcompile", str(file), "-o", str(plan)]
        subprocess.run(words, check=True, capture_output=True)
    return plan


def _held(folder: Path, changes: Any) -> Path:
    """A folder with a spec that names the damaged file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held.json").write_text(json.dumps({**BASES["held"], **changes}), encoding="utf-8")
    return folder


def _note(folder: Path) -> str:
    """The note of a checkpoint with small files, which are written into the folder."""
    checkpoint = folder / "checkpoint"
    if (checkpoint / "parcompile.json").is_file():
        return (checkpoint / "parcompile.json").read_text(encoding="utf-8")
    import torch

    from parcompile.plan import load_plan
    from parcompile.runtime.checkpoint.manifest import Note, tensor_files

    plan = load_plan(_compiled(folder))
    checkpoint.mkdir()
    files = {}
    for name in sorted(tensor_files(plan)):
        torch.save({"x": torch.zeros(1)}, checkpoint / name)
        content = (checkpoint / name).read_bytes()
        files[name] = (len(content), hashlib.sha256(content).hexdigest())
    layout = {"tp": 2, "cp": 1, "pp": 1, "dp": 1, "ep": 1}
    note = Note(checkpoint, 3, plan, layout, files, {"r": 8, "ranks": {"q_proj": [8, 2.0]}}, [[3, 2]])
    text = json.dumps(note.to_json())
    (checkpoint / "parcompile.json").write_text(text, encoding="utf-8")
    return text


def _index(folder: Path) -> str:
    """The index of a model whose tensors lie in two files, beside its config.json."""
    file = folder / "model" / "model.safetensors.index.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
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
    return file.read_text(encoding="utf-8")


def _plan_sealed(tree: dict[str, Any]) -> None:
    from parcompile.plan import digest

    tree["plan_hash"] = digest({key: value for key, value in tree.items() if key != "plan_hash"})


def _note_sealed(tree: dict[str, Any]) -> None:
    if isinstance(tree.get("plan"), dict):
        _plan_sealed(tree["plan"])
        tree["plan_hash"] = tree["plan"]["plan_hash"]


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

    def of_schema(name: str, share: float = 1.0) -> list[Base]:
        return _json(*from_schema(name, max(1, round(drawn * share)), number))

    plan = _compiled(made / "plan")
    golden = ROOT / "tests" / "golden"
    plans = [Base((plan / "plan.json").read_text(encoding="utf-8"), "json"), *_files(golden, "*/plan.json")]
    plans += of_schema("plan", 0.03)
    locks = [Base((plan / "parcompile.lock.json").read_text(encoding="utf-8"), "json"), *of_schema("lock", 0.1)]
    examples, specs = _files(ROOT / "examples", "*.json"), ROOT / "tests" / "specs"
    specs_of_tests = [*_files(specs / "positive"), *_files(specs / "negative"), *_files(golden, "*.json")]
    deepspeed = [
        *_json(BASES["deepspeed"], BASES["deepspeed_cosine"]),
        *_files(corpus / "ds"),
        *_files(golden, "*/ds_config.json"),
    ]
    deepspeed += of_schema("ds_config")
    scripts = [*_files(_HERE, "*.sh"), *_files(golden, "*/megatron_args.sh")]
    arguments = [*_files(golden, "*/megatron_args.json"), *_files(golden, "*/megatron_args.yaml")]
    for one in _files(corpus / "megatron", "**/*"):
        (scripts if one.form == "sh" else arguments).append(one)
    configs = [*_configs(), *_files(corpus / "hf")]
    accelerate = [*_both(*BASES["accelerate"]), *_files(golden, "*/accelerate*.yaml")]
    bases: dict[str, Sequence[Base]] = {
        "spec": [*_json(SPEC), *examples, *specs_of_tests, *of_schema("spec")],
        "plan": plans,
        "lock": locks,
        "config.json": configs,
        "searched": configs,
        "DeepSpeed": deepspeed,
        "Megatron-LM script": scripts,
        "Megatron-LM arguments": arguments,
        "gpt-neox": [*_both(BASES["gpt_neox"]), *_files(corpus / "neox")],
        "accelerate": accelerate,
        "parallelism configs": [
            *_json(BASES["parallelism"], BASES["distributed"]),
            *_files(golden, "*/parallelism_config.json"),
        ],
        "axolotl": _both(BASES["axolotl"]),
        "LLaMA-Factory": _both(BASES["llama_factory"]),
        "Trainer": _both(BASES["trainer"]),
        "measured runs": _files(_HERE, "*.csv"),
        "machine": [*_json(BASES["machine"]), *of_schema("accelerator", 0.3)],
    }
    machine = {"nodes": 1, "gpus_per_node": 8, "accelerator": "machine.json"}
    beside = {
        "plan": plan.parent,
        "lock": plan.parent,
        "config.json": _held(made / "config", {}),
        "machine": _held(made / "machine", {"model": {"preset": "llama-3-8b"}, "cluster": machine}),
    }
    sealed = {"plan": _plan_sealed, "note": _note_sealed}
    if runtime:
        bases |= {"note": [Base(_note(made / "note"), "json")], "index": [Base(_index(made / "index"), "json")]}
        beside |= {name: made / name for name in ("note", "index")}
    return [
        Kind(
            name,
            row["file"],
            bases[name],
            [tuple(words.split()) for words in row["commands"]],
            row["weight"],
            beside.get(name),
            sealed.get(name),
        )
        for row in json.loads((_HERE / "kinds.json").read_text(encoding="utf-8"))
        if (name := row["name"]) in bases
    ]

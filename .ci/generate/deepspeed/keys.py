"""Writes compiler/backends/deepspeed/keys.json: what each version of DeepSpeed reads from its configuration.

    python .ci/generate/deepspeed/keys.py --sources FOLDER     all versions, from unpacked source distributions
    python .ci/generate/deepspeed/keys.py                      the installed version only; the others stay as they are
    python .ci/generate/deepspeed/keys.py --check              fails when the file says something else

FOLDER holds `deepspeed-0.14.0/`, `deepspeed-0.14.1/` and so on, as `pip download --no-deps --no-binary :all:` and tar
leave them. Each version is asked by `probe.py` in a process of its own. A key has one entry, or a list of
[first version, entry] where that changed; null stands for "no such key any more".
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[2] / "compiler" / "backends" / "deepspeed" / "keys.json"
WORDS = HERE / "words.json"
MUON = ("lr", "momentum", "weight_decay", "betas", "eps", "ns_method", "muon_lr", "adam_lr", "per_head_muon")
"""What the engine takes out of the params of Muon itself, before it constructs anything."""
ENGINE = {"Adam": ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach")}
"""What it takes out of the params of Adam and AdamW."""

NAMES = {"type": "union", "of": [{"type": "list", "of": {"type": "str"}}, {"type": "str"}]}
CONVERTED = {f"zero_optimization.leaf_module.{name}": NAMES for name in ("classes", "names", "name_suffixes")}
"""Fields that a validator converts before their type counts: one name is a list of one."""

Facts = dict[str, Any]


def probed(folder: Path | None) -> Facts:
    """What one version says; the installed one without a folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder or "")}
    run = subprocess.run(
        [sys.executable, str(HERE / "probe.py")], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def flattened(probe: Facts, words: Mapping[str, Facts], others: Iterable[str] = ()) -> Facts:
    """Every key of a version by its dotted path.

    What pydantic does not know has its type from `words`. A key of `words`, or of another version, that DeepSpeed takes
    out of a plain dictionary under a condition is there when its name stands in the sources.
    """
    found: Facts = {}
    for path, fields in probe["models"].items():
        found[path] = {"type": "section", "strict": True}
        _add_fields(path, fields, found)
    typed = set(found)
    for path, facts in probe["read"].items():
        if "__path__" not in path and not _under(path, (*probe["models"], *probe["refused"])):
            found.setdefault(path, dict(facts))
    found.update({path: {"refused": True} for path in probe["refused"]})
    literals = {*probe["literals"], *_parameters(probe["classes"])}
    for path in sorted({*words, *others}, key=lambda path: (path.count("."), path)):
        parent, _, name = path.rpartition(".")
        holder = found.get(parent) if parent else {}
        if (
            path in found
            or holder is None
            or holder.get("strict")
            or "refused" in holder
            or words.get(path, {}).get("gone")
        ):
            continue
        if name in ("*", "[]") or (name in literals and (parent or path in words)):
            found[path] = {}
    for path in set(found) - typed:
        if "refused" not in found[path]:
            found[path] = {**words.get(path, {}).get("is", {}), **found[path]}
    for path in found:
        parent = found.get(path.rpartition(".")[0])
        if parent is not None and "type" not in parent and "refused" not in parent:
            parent["type"] = "section"
    for path, names in probe.get("names", {}).items():
        found[path]["names"] = names
    for path in set(found) - typed:
        facts = found[path]
        if facts.get("type") == "section":
            facts.pop("default", None)
        elif "refused" not in facts:
            facts["loose"] = True
    return found


def _parameters(classes: Mapping[str, Facts]) -> set[str]:
    """The parameters of all optimizers and schedules, of torch's too."""
    torch = of_torch()
    tables = (classes, torch["optim"], torch["lr_scheduler"])
    return {name for table in tables for parameters in table.values() for name in parameters}


def _add_fields(path: str, fields: Mapping[str, Facts], found: Facts) -> None:
    for name, given in fields.items():
        facts = dict(given)
        inner, alias = facts.pop("fields", None), facts.pop("alias", None)
        key = f"{path}.{alias or name}"
        if alias and alias != name:
            facts["field"] = name
        if inner is not None:
            facts["strict"] = True
            facts.pop("default", None)
            _add_fields(key, inner, found)
        found[key] = {**facts, **CONVERTED.get(key, {})}


def _under(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def classes_of(probe: Facts) -> Facts:
    """What optimizers and schedules take, by the name that a configuration gives."""
    literals, found = set(probe["literals"]), dict(probe["classes"])
    if "muon" in probe["optimizers"]:
        found["Muon"] = {name: {} for name in MUON if name in literals}
    found["engine"] = {name: {} for name in ENGINE["Adam"] if name in literals}
    return found


@functools.cache
def of_torch() -> Facts:
    """The constructors of the installed torch that a configuration can name."""
    import torch

    sys.path.insert(0, str(HERE))
    from probe import signature_of

    def constructors(module: Any, base: type) -> Facts:
        found = {name: one for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, base)}
        return {
            name: signature_of(one)
            for name, one in sorted(found.items())
            if not name.startswith("_") and one is not base
        }

    return {
        "version": torch.__version__.split("+")[0],
        "optim": constructors(torch.optim, torch.optim.Optimizer),
        "lr_scheduler": constructors(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
    }


def merged(versions: Mapping[str, Facts]) -> Facts:
    """One entry for each key, in all versions."""
    names = sorted(versions, key=order)
    borrow_types({name: versions[name]["keys"] for name in names})
    return {
        "versions": names,
        "pydantic": eras({name: versions[name]["pydantic"] for name in names}),
        "optimizers": eras({name: sorted(versions[name]["optimizers"]) for name in names}),
        "torch": of_torch(),
        "classes": _united({name: versions[name]["classes"] for name in names}),
        "keys": _united({name: versions[name]["keys"] for name in names}),
    }


def borrow_types(tables: Mapping[str, Facts]) -> None:
    """Gives a key without a type, in a version that took whatever stood there, the type that it had later."""
    typed: Facts = {}
    for table in tables.values():
        for path, facts in table.items():
            if "type" in facts and facts["type"] != "section":
                typed[path] = {name: facts[name] for name in ("type", "in", "of", "null") if name in facts}
    for table in tables.values():
        for path, facts in table.items():
            if facts.get("loose") and "type" not in facts:
                facts.update(typed.get(path, {}))


def _united(tables: Mapping[str, Facts]) -> Facts:
    paths = sorted({path for table in tables.values() for path in table})
    return {path: eras({name: table.get(path) for name, table in tables.items()}) for path in paths}


def eras(values: Mapping[str, Any]) -> Any:
    """The value where it never changed, else [first version, value] for each stretch in which it did not."""
    found: list[list[Any]] = []
    for name, value in values.items():
        if not found or found[-1][1] != value:
            found.append([name, value])
    while found and found[0][1] is None:
        found.pop(0)
    first = next(iter(values))
    return found[0][1] if len(found) == 1 and found[0][0] == first else found


def at(entry: Any, version: str, versions: list[str]) -> Any:
    """The value of an entry in one version."""
    if not isinstance(entry, list) or not (entry and isinstance(entry[0], list)):
        return entry
    value = None
    for first, one in entry:
        if versions.index(first) <= versions.index(version):
            value = one
    return value


def order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def as_text(tree: Facts) -> str:
    """JSON with one key in a line, so that changes can be read."""
    parts = []
    for name, value in tree.items():
        if isinstance(value, dict) and name in ("keys", "classes", "torch"):
            rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(one, sort_keys=True)}" for key, one in value.items())
            parts.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def facts_of(probe: Facts, words: Mapping[str, Facts], others: Iterable[str]) -> Facts:
    return {
        "pydantic": probe["pydantic"],
        "optimizers": probe["optimizers"],
        "classes": classes_of(probe),
        "keys": flattened(probe, words, others),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, help="unpacked source distributions")
    parser.add_argument("--probes", type=Path, help="keep what each version said here, and take it from here")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is out of date")
    arguments = parser.parse_args()
    probes = {}
    folders = sorted(arguments.sources.glob("deepspeed-*")) if arguments.sources else []
    for folder in [*folders, None]:
        probe = _kept(folder, arguments.probes)
        probes[probe["version"]] = probe
    words = json.loads(WORDS.read_text(encoding="utf-8"))
    others = {path for probe in probes.values() for path in flattened(probe, {})}
    if not folders:
        others |= set(json.loads(TARGET.read_text(encoding="utf-8"))["keys"])
    versions = {name: facts_of(probe, words, others) for name, probe in probes.items()}
    if not folders:
        old = json.loads(TARGET.read_text(encoding="utf-8"))
        wrong = [name for name, facts in versions.items() if not _agrees(old, name, facts)]
        if wrong:
            sys.exit(f"{TARGET.name} says something else than DeepSpeed {', '.join(wrong)}")
        return
    text = as_text(merged(versions))
    if arguments.check and TARGET.read_text(encoding="utf-8") != text:
        sys.exit(f"{TARGET.name} is out of date")
    if not arguments.check:
        TARGET.write_text(text, encoding="utf-8")


def _kept(folder: Path | None, store: Path | None) -> Facts:
    if folder is None or store is None:
        return probed(folder)
    file = store / f"{folder.name.removeprefix('deepspeed-')}.json"
    if not file.exists() or not file.stat().st_size:
        file.write_text(json.dumps(probed(folder)), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _agrees(old: Facts, name: str, facts: Facts) -> bool:
    versions = old["versions"]
    if name not in versions:
        return False
    same = all(
        at(old[part], name, versions) == sorted(facts[part])
        if part == "optimizers"
        else at(old[part], name, versions) == facts[part]
        for part in ("pydantic", "optimizers")
    )
    for part in ("classes", "keys"):
        known = {path: value for path, entry in old[part].items() if (value := at(entry, name, versions)) is not None}
        same = same and known == facts[part]
    return same


if __name__ == "__main__":
    main()

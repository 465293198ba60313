"""What was proved, to be read and to be run again, and a red cell as a script that imports upstream alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .engine import Engine
from .ranks.cells import FAMILIES, FEATURES, text_of, without_folders, world_size
from .ranks.comparison import CANNOT, RED, VERDICTS

VERSION = 1


@dataclass(frozen=True, slots=True)
class Proved:
    """A cell and its answer.

    Attributes:
        cell: all features.
        answer: `verdict`; `why` of a red or not runnable one; `differences` of `loss`, `norm` and `update`, relative;
            `noise`, what rounding alone does to the reference, where a difference was above its limit; `shims`, what of
            the engine is replaced; of a red one the `explanation` (`tracing.explain`) and the `script` that shows it.
        smallest: the fewest features with which it is still red.
    """

    cell: Mapping[str, Any]
    answer: Mapping[str, Any]
    smallest: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        return str(self.answer["verdict"])


@dataclass(frozen=True, slots=True)
class Certificate:
    """The cells of one engine with the versions, wheels, seed and code that made their verdicts."""

    engine: str
    versions: Mapping[str, str]
    wheels: Mapping[str, str]
    code: str
    seed: int
    cells: tuple[Proved, ...]
    features: Mapping[str, tuple[Any, ...]] = field(repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """Cells by verdict."""
        counted = Counter(proved.verdict for proved in self.cells)
        return {verdict: counted[verdict] for verdict in VERDICTS}

    @property
    def proves(self) -> bool:
        """Whether cells ran and none is red."""
        return self.counts[RED] == 0 and self.counts[CANNOT] < len(self.cells)

    def text_of(self, proved: Proved) -> str:
        """A cell by what differs from the simplest."""
        return text_of(proved.cell, self.features)

    def line(self, proved: Proved) -> str:
        """For people."""
        differences = proved.answer.get("differences")
        said = "  ".join(f"{name} {value:.1e}" for name, value in (differences or {}).items())
        why = proved.answer.get("why", "")
        text = f"{proved.verdict:<13}{self.text_of(proved)}\n             {why or said}"
        for shim in proved.answer.get("shims", ()):
            text += f"\n             shim: {shim}"
        if proved.smallest is not None:
            text += f"\n             fewest features: {text_of(proved.smallest, self.features)}"
        if (first := proved.answer.get("explanation")) and "place" in first:
            text += f"\n             first wrong: {first['place'] or 'the last parameters'}: {first['said']}"
        if "no_script" in proved.answer:
            text += f"\n             no script of upstream alone shows it: {proved.answer['no_script']}"
        return text + ("\n             a script of upstream alone shows it" if "script" in proved.answer else "")

    def summary(self) -> str:
        """The last line of a run."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        return f"{self.engine} ({versions}): {counts}"

    def to_json(self) -> dict[str, Any]:
        """As a file."""
        return {
            "version": VERSION,
            "engine": self.engine,
            "versions": dict(self.versions),
            "wheels": dict(self.wheels),
            "code": self.code,
            "seed": self.seed,
            "counts": self.counts,
            "features": {name: list(values) for name, values in self.features.items()},
            "cells": [
                {"cell": dict(ran.cell), **ran.answer, **({"smallest": dict(ran.smallest)} if ran.smallest else {})}
                for ran in self.cells
            ],
        }

    @classmethod
    def from_json(cls, tree: Any) -> Certificate:
        """As `to_json` wrote it, and its schema `certificate` takes it."""
        cells = []
        for one in tree["cells"]:
            answer = {name: value for name, value in one.items() if name not in ("cell", "smallest")}
            cells.append(Proved(one["cell"], answer, one.get("smallest")))
        features = {name: tuple(values) for name, values in tree["features"].items()}
        who = (tree["engine"], tree["versions"], tree["wheels"], tree["code"])
        return cls(*who, tree["seed"], tuple(cells), features)

    def to_junit(self) -> str:
        """For CI: red cells are failures, and what did not run is skipped."""
        counts = {"tests": len(self.cells), "failures": self.counts[RED], "skipped": self.counts[CANNOT]}
        named = {"name": f"parcompile prove {self.engine}", **{key: str(count) for key, count in counts.items()}}
        suite = ElementTree.Element("testsuite", named)
        for proved in self.cells:
            case = ElementTree.SubElement(suite, "testcase", name=self.text_of(proved), classname=self.engine)
            if proved.verdict == RED:
                ElementTree.SubElement(case, "failure", message=str(proved.answer["why"])).text = self.line(proved)
            elif proved.verdict == CANNOT:
                ElementTree.SubElement(case, "skipped", message=str(proved.answer["why"]))
        return ElementTree.tostring(suite, encoding="unicode")


_SUSPECTS = (
    *("resume", "aux_loss", "clipping", "packed", "masks", "dtype", "accumulation", "micro_batch", "tied"),
    *("offload", "sequence_parallel", "checkpointing", "stage", "ep", "dp", "pp", "cp", "tp"),
)
_APART = {"looped": {"pp", "cp"}, "whole": {"pp", "tp"}}
"""What a template calls cells that have none of these."""
_SECONDS, _LINES = 300.0, 100
_TEMPLATES = Path(__file__).with_name("templates")


def suspect(engine: Engine, cell: Mapping[str, Any]) -> str | None:
    """The feature of a red cell that is turned off: of those that it needs, the most particular one."""
    own = [name for name in engine.features if name not in (*FEATURES, *_SUSPECTS)] if _is_file(engine) else []
    every = [name for name in (*own, *_SUSPECTS) if name in engine.features]
    return next((name for name in every if cell[name] != engine.features[name][0]), None)


def _is_file(engine: Engine) -> bool:
    return engine.name.endswith(".py")


class NoScriptError(Exception):
    """No script shows the cell; it says why."""


def script_of(engine: Engine, cell: Mapping[str, Any]) -> str:
    """A program for `torchrun` with the cell's configuration, batches and comparison.

    Raises:
        NoScriptError: none is written for such a cell.
    """
    used = {name for name, values in engine.features.items() if cell[name] != values[0]} - {"family"}
    if (off := suspect(engine, cell)) is None:
        raise NoScriptError("the cell has no feature that can be turned off")
    spread = engine.name in ("transformers", "accelerate") and used & {"tp", "ep"}
    own = _TEMPLATES / f"{'adapter' if _is_file(engine) else 'distributed' if spread else engine.name}.txt"
    if not own.exists():
        raise NoScriptError(f"what {engine.name} needs to run on CPUs does not fit into {_LINES} lines")
    family, text = FAMILIES[cell["family"]], (_TEMPLATES / "one_process.txt").read_text(encoding="utf-8")
    text = text.replace("@ENGINE@", own.read_text(encoding="utf-8").strip())
    read = set(re.findall(r'(?:#\?!?|CELL(?:\[|\.get\()")(\w+)', text))
    read |= set(engine.features) - {"resume", "isolation"} if _is_file(engine) else set()
    if unread := sorted(used - read):
        raise NoScriptError(f"scripts do not have {', '.join(unread)}")
    first = engine.features[off][0]
    version = engine.versions.get(engine.name, "")
    for name, value in {
        "TITLE": f"{Path(engine.name).name} {version} beside one process: {text_of(cell, engine.features)}",
        "RANKS": str(world_size(cell)),
        "FEWER": str(world_size({**cell, off: first})),
        "OFF": off,
        "SIMPLEST": repr(first),
        "CELL": repr({name: value for name, value in cell.items() if name in read}),
        "CLASS": family["class"],
        "KEYS": repr(dict(family["keys"])),
        "FILE": Path(engine.name).name,
    }.items():
        text = text.replace(f"@{name}@", value)
    used |= {name for name, others in _APART.items() if not used & others}
    used |= {cell["masks"]} | ({"drawn"} if used & {"masks", "packed"} else set())
    lines = [line.partition("  #?") for line in text.splitlines()]
    kept = [line for line, _, tag in lines if not tag or (tag.removeprefix("!") in used) != tag.startswith("!")]
    if len(kept) > _LINES:
        raise NoScriptError(f"it would have {len(kept)} lines, {_LINES} are allowed")
    return "\n".join(kept) + "\n"


def shown(engine: Engine, cell: Mapping[str, Any]) -> dict[str, str]:
    """`script` of a red cell, or `no_script`: why there is none."""
    try:
        return {"script": _confirmed(engine, cell)}
    except NoScriptError as error:
        return {"no_script": str(error)}


def _confirmed(engine: Engine, cell: Mapping[str, Any]) -> str:
    """The script of a red cell, where it exits with 1, and with 0 without the suspected feature."""
    text = script_of(engine, cell)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cell.py").write_text(text, encoding="utf-8")
        if _is_file(engine):
            shutil.copy(engine.name, folder)
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        clean = {**kept, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [engine.python, "-m", "torch.distributed.run", "--standalone"]
        off = str(suspect(engine, cell))
        fewer = world_size({**cell, off: engine.features[off][0]})
        for further, code, ranks in (((), "differs", world_size(cell)), (("--without",), "equal", fewer)):
            try:
                done = subprocess.run(  # noqa: S603 -- the interpreter that the user names
                    [*command, f"--nproc_per_node={ranks}", "cell.py", *further],
                    cwd=folder,
                    env=clean,
                    capture_output=True,
                    timeout=_SECONDS,
                )
            except subprocess.TimeoutExpired:
                raise NoScriptError(f"it did not end in {_SECONDS:g} s") from None
            last = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
            about = f"without {off} " if further else ""
            if not last:
                said = without_folders(done.stderr.decode(errors="replace"))
                raise NoScriptError(f"{about}it stops: {said.strip()[-200:]}")
            if (verdict := json.loads(last[-1])["verdict"]) != code:
                raise NoScriptError(f"{about}it is {verdict!r}, where {code!r} was expected")
    return text

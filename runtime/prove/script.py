"""A red cell as a script that imports upstream alone; shown where it fails, and passes without a feature."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .engine import Engine
from .ranks.cells import FAMILIES, text_of, world_size

_SUSPECTS = ("resume", "aux_loss", "clipping", "packed", "masks", "dtype", "accumulation", "micro_batch", "tied", "dp")
_READ = (*_SUSPECTS, "pp", "stage", "seed")
_SECONDS, _LINES = 300.0, 100
_TEMPLATES = Path(__file__).with_name("templates")


def suspect(cell: Mapping[str, Any], features: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The feature of a red cell that is turned off: of those that it needs, the most particular one."""
    return next((name for name in _SUSPECTS if name in features and cell[name] != features[name][0]), None)


class NoScriptError(Exception):
    """No script shows the cell; it says why."""


def script_of(engine: Engine, cell: Mapping[str, Any]) -> str:
    """A program for `torchrun` with the cell's configuration, batches and comparison.

    Raises:
        NoScriptError: none is written for such a cell.
    """
    off, own = suspect(cell, engine.features), _TEMPLATES / f"{engine.name}.txt"
    used = {name for name, values in engine.features.items() if cell[name] != values[0]} - {"family"}
    if off is None:
        raise NoScriptError("the cell has no feature that can be turned off")
    if unread := sorted(used - set(_READ)):
        raise NoScriptError(f"scripts do not have {', '.join(unread)}")
    family, settings = FAMILIES[cell["family"]], {name: cell[name] for name in _READ if name in cell}
    text = (_TEMPLATES / "one_process.txt").read_text(encoding="utf-8")
    for name, value in {
        "TITLE": f"{engine.name} {engine.versions[engine.name]} beside one process: {text_of(cell, engine.features)}",
        "RANKS": str(world_size(cell)),
        "OFF": off,
        "SIMPLEST": repr(engine.features[off][0]),
        "CELL": repr(settings),
        "CLASS": family["class"],
        "KEYS": repr(dict(family["keys"])),
        "ENGINE": own.read_text(encoding="utf-8").strip(),
    }.items():
        text = text.replace(f"@{name}@", value)
    used |= {cell["masks"]} | ({"drawn"} if used & {"masks", "packed"} else set())
    lines = [line.partition("  #?") for line in text.splitlines()]
    kept = [line for line, _, tag in lines if not tag or (tag.removeprefix("!") in used) != tag.startswith("!")]
    if len(kept) > _LINES:
        raise NoScriptError(f"it would have {len(kept)} lines, {_LINES} are allowed")
    return "\n".join(kept) + "\n"


def shown(engine: Engine, cell: Mapping[str, Any]) -> dict[str, str]:
    """`script` of a red cell, or `no_script`: why there is none; neither for engines that have no scripts."""
    if not (_TEMPLATES / f"{engine.name}.txt").exists():
        return {}
    try:
        return {"script": _confirmed(engine, cell)}
    except NoScriptError as error:
        return {"no_script": str(error)}


def _confirmed(engine: Engine, cell: Mapping[str, Any]) -> str:
    """The script of a red cell, where it exits with 1, and with 0 without the suspected feature."""
    text = script_of(engine, cell)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cell.py").write_text(text, encoding="utf-8")
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        clean = {**kept, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [engine.python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size(cell)}"]
        for further, code in (((), "differs"), (("--without",), "equal")):
            try:
                done = subprocess.run(  # noqa: S603 -- the interpreter that the user names
                    [*command, "cell.py", *further], cwd=folder, env=clean, capture_output=True, timeout=_SECONDS
                )
            except subprocess.TimeoutExpired:
                raise NoScriptError(f"it did not end in {_SECONDS:g} s") from None
            last = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
            about = f"without {suspect(cell, engine.features)} " if further else ""
            if not last:
                raise NoScriptError(f"{about}it stops: {done.stderr.decode(errors='replace').strip()[-200:]}")
            if (verdict := json.loads(last[-1])["verdict"]) != code:
                raise NoScriptError(f"{about}it is {verdict!r}, where {code!r} was expected")
    return text

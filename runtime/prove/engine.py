"""An engine that answers for cells: `ranks.server` in an interpreter of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from typing_extensions import Self

BUILT_IN = ("deepspeed", "transformers", "accelerate", "megatron", "torchtitan", "parcompile")
"""Engines whose adapter is here; another is the path of a Python file."""

_Cell = Mapping[str, Any]
_RANKS = Path(__file__).parent / "ranks"
_START = """
import importlib.util, sys
folder, engine = sys.argv[1:]
start = folder + "/__init__.py"
spec = importlib.util.spec_from_file_location("prove_ranks", start, submodule_search_locations=[folder])
package = importlib.util.module_from_spec(spec)
sys.modules["prove_ranks"] = package
spec.loader.exec_module(package)
from prove_ranks.server import serve
serve(engine)
"""
_IMPORT_SECONDS, _MARGIN_SECONDS, _END_SECONDS = 180.0, 60.0, 10.0


class EngineError(RuntimeError):
    """The engine cannot be asked: it is not installed, or its process ended."""


class Engine:
    """Starts the engine's process; use it as a context manager, which ends it.

    Args:
        name: one of `BUILT_IN`, or the path of an adapter (`.py`).
        python: the interpreter that has the engine; this one by default. It needs torch and transformers.
        timeout: seconds for a cell's ranks.

    Raises:
        EngineError: there is none of this name, the interpreter cannot import it, or this is no Linux.
    """

    def __init__(self, name: str, python: str = sys.executable, timeout: float = 180.0) -> None:
        self.name, self.python, self._timeout = name, python, timeout
        if sys.platform != "linux":
            raise EngineError(f"prove runs on Linux, and this is {sys.platform}: its ranks end with what started them")
        if name not in BUILT_IN and not name.endswith(".py"):
            known = ", ".join(BUILT_IN)
            raise EngineError(f"there is no engine {name!r}; there are {known}, or an adapter's path (.py)")
        if name.endswith(".py") and not Path(name).is_file():
            raise EngineError(f"there is no adapter {name}: no file has this name")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- what engines print; closed with the process
        command = [python, "-c", _START, str(_RANKS), str(Path(name).resolve()) if name.endswith(".py") else name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- the interpreter that the user names
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"{python} cannot be started: {error.strerror}") from None
        try:
            first = self._answer(_IMPORT_SECONDS)
        except EngineError:
            self.close()
            raise
        self.code: str = first["code"]
        self.versions: Mapping[str, str] = first["versions"]
        self.wheels: Mapping[str, str] = first["wheels"]
        self.features = {feature: tuple(values) for feature, values in first["features"].items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process and all that it started."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its ranks, and removes what they wrote
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)  # ranks end with it
        self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout, self._said)):
            pipe.close()

    def draw(self, count: int, seed: int, most_ranks: int, fixed: _Cell | None = None) -> list[dict[str, Any]]:
        """Cells that the engine supports, which cover pairs of features; `fixed`: values that all of them have."""
        task = {"draw": count, "seed": seed, "most_ranks": most_ranks, "fixed": dict(fixed or {})}
        return list(self._ask(task, 60.0)["cells"])

    def run(self, cell: _Cell) -> dict[str, Any]:
        """The verdict of a cell: `verdict`, `why`, `differences`; see `ranks.comparison.judge`."""
        return self._ask({"cell": cell, "timeout": self._timeout}, 2 * self._timeout + _MARGIN_SECONDS)

    def explain(self, cell: _Cell) -> dict[str, Any]:
        """Where a cell first differs from one process: `place`, `said`, and the `collectives` in front of it."""
        return self._ask({"cell": cell, "timeout": self._timeout, "explain": True}, 2 * self._timeout + _MARGIN_SECONDS)

    def _ask(self, task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        stream: IO[bytes] | None = self._process.stdin
        assert stream is not None
        with suppress(BrokenPipeError):  # the answer of a process that ended is empty
            stream.write(json.dumps(task).encode() + b"\n")
            stream.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], seconds)[0]:
            raise EngineError(f"no answer from {self.name} within {seconds:g} s")
        line = stream.readline()
        if not line:
            self._process.wait()
            raise EngineError(f"the process of {self.name} ended: {self._last_line()}")
        try:
            answer = dict[str, Any](json.loads(line))
        except (ValueError, TypeError):
            raise EngineError(f"{self.python} is no Python interpreter: it answers {line[:40]!r}") from None
        if "error" in answer:
            raise EngineError(f"{self.name} cannot run in {self.python}: {answer['error']}")
        return answer

    def _last_line(self) -> str:
        self._said.seek(0)
        lines = [line for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:400] if lines else f"exit code {self._process.poll()}"

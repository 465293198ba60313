"""`pytest --prove-engine NAME --prove-cells 40`: the cells of `parcompile prove` as tests, for the CI of an engine.

pytest loads this in every run of an environment that has parcompile: nothing else is imported until the option is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from parcompile.runtime.prove import Engine

_ENGINE = pytest.StashKey["Engine"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `parcompile prove`, with a prefix."""
    group = parser.getgroup("prove", "engines beside one process (parcompile)")
    group.addoption("--prove-engine", metavar="NAME", help="deepspeed, transformers, ..., or an adapter's path (.py)")
    group.addoption("--prove-cells", metavar="N", help="how many cells to draw (20)")
    group.addoption("--prove-seed", metavar="N", help="by which they are drawn (0)")
    group.addoption("--prove-ranks", metavar="N", help="at most so many ranks of a cell (4)")
    group.addoption("--prove-timeout", metavar="SECONDS", help="for a cell (180)")


def _numbers(config: pytest.Config) -> Mapping[str, Any]:
    """The numbers that are given, and the defaults of others, as `parcompile prove` reads them.

    Raises:
        UsageError: one is out of its range.
    """
    from click import UsageError

    from parcompile.cli.prove import command

    given = {one: config.getoption(f"--prove-{one}") for one in ("cells", "seed", "ranks", "timeout")}
    try:
        words = [f"--{one}={value}" for one, value in given.items() if value is not None]
        return command.make_context("prove", words).params
    except UsageError as error:
        raise pytest.UsageError(error.format_message().replace("'--", "'--prove-")) from None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds a test for each cell behind those that were collected."""
    name = config.getoption("--prove-engine")
    if not name:
        return
    try:
        from parcompile.runtime.prove import Engine, EngineError
        from parcompile.runtime.prove.ranks.cells import text_of
    except ImportError as error:
        from parcompile.version import how_to_install

        raise pytest.UsageError(f"--prove-engine: {error}: {how_to_install('runtime,hf')}") from None
    numbers = _numbers(config)
    try:
        engine = Engine(name, sys.executable, numbers["timeout"])
    except EngineError as error:
        raise pytest.UsageError(f"--prove-engine: {error}") from None
    config.stash[_ENGINE] = engine
    cells = engine.draw(numbers["cells"], numbers["seed"], numbers["ranks"])
    if not cells:
        raise pytest.UsageError("--prove-ranks: the engine has no cell of so few ranks")
    for cell in cells:
        title = f"prove[{text_of(cell, engine.features)}]"
        items.append(CellItem.from_parent(session, name=title, engine=engine, cell=cell, ranks=numbers["ranks"]))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the engine's process."""
    engine = config.stash.get(_ENGINE, None)
    if engine is not None:
        engine.close()


class RedCellError(Exception):
    """The engine trains something else than one process does; the message says where and by how much."""


class CellItem(pytest.Item):
    """A cell of an engine as a test: red is a failure, and so is a run that ended with an error."""

    def __init__(self, *, engine: Engine, cell: Mapping[str, Any], ranks: int, **further: Any) -> None:
        super().__init__(**further)
        self._engine, self._cell, self._ranks = engine, cell, ranks

    def runtest(self) -> None:
        """Runs the cell.

        Raises:
            RedCellError: its verdict is red, or its ranks ended with an error.
        """
        from parcompile.runtime.prove import prove

        certificate = prove(self._engine, [self._cell], most_ranks=self._ranks)
        (proved,) = certificate.cells
        if proved.verdict == "red" or proved.answer.get("failed"):
            raise RedCellError(certificate.line(proved))
        if proved.verdict == "not runnable":
            pytest.skip(str(proved.answer["why"]))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """One message, not a traceback of the prover."""
        return str(excinfo.value) if isinstance(excinfo.value, RedCellError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where reports put it."""
        return "prove", None, self.name

"""What was proved, to be read by people and programs, and to be run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from .ranks.cells import text_of
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
    """The cells of one engine with the versions, the seed and the code that made their verdicts."""

    engine: str
    versions: Mapping[str, str]
    code: str
    seed: int
    cells: tuple[Proved, ...]
    features: Mapping[str, tuple[Any, ...]] = field(repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """Cells by verdict."""
        found = Counter(one.verdict for one in self.cells)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def proves(self) -> bool:
        """Whether cells ran and none is red."""
        return self.counts[RED] == 0 and self.counts[CANNOT] < len(self.cells)

    def text_of(self, one: Proved) -> str:
        """A cell by what differs from the simplest."""
        return text_of(one.cell, self.features)

    def line(self, one: Proved) -> str:
        """For people."""
        differences = one.answer.get("differences")
        said = "  ".join(f"{name} {value:.1e}" for name, value in (differences or {}).items())
        why = one.answer.get("why", "")
        found = f"{one.verdict:<13}{self.text_of(one)}\n             {why or said}"
        for shim in one.answer.get("shims", ()):
            found += f"\n             shim: {shim}"
        if one.smallest is not None:
            found += f"\n             fewest features: {text_of(one.smallest, self.features)}"
        if (first := one.answer.get("explanation")) and "place" in first:
            found += f"\n             first wrong: {first['place'] or 'the last parameters'}: {first['said']}"
        if "no_script" in one.answer:
            found += f"\n             no script of upstream alone shows it: {one.answer['no_script']}"
        return found + ("\n             a script of upstream alone shows it" if "script" in one.answer else "")

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
            "code": self.code,
            "seed": self.seed,
            "counts": self.counts,
            "features": {name: list(values) for name, values in self.features.items()},
            "cells": [
                {
                    "cell": dict(one.cell),
                    **one.answer,
                    **({} if one.smallest is None else {"smallest": dict(one.smallest)}),
                }
                for one in self.cells
            ],
        }

    @classmethod
    def from_json(cls, tree: Any) -> Certificate:
        """As `to_json` wrote it.

        Raises:
            ValueError: it is none.
        """
        try:
            if tree["version"] != VERSION:
                raise ValueError(f"version {tree['version']!r} is not known; this is {VERSION}")
            cells = []
            for one in tree["cells"]:
                answer = {name: value for name, value in one.items() if name not in ("cell", "smallest")}
                if answer["verdict"] not in VERDICTS:
                    raise ValueError(f"verdict {answer['verdict']!r} is not known; known are {', '.join(VERDICTS)}")
                cells.append(Proved(dict(one["cell"]), answer, one.get("smallest")))
            features = {str(name): tuple(values) for name, values in tree["features"].items()}
            return cls(tree["engine"], dict(tree["versions"]), tree["code"], int(tree["seed"]), tuple(cells), features)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is no certificate ({type(error).__name__}: {error})") from None

    def to_junit(self) -> str:
        """For CI: red cells are failures, and what did not run is skipped."""
        counts = self.counts
        suite = ElementTree.Element(
            "testsuite",
            name=f"parcompile prove {self.engine}",
            tests=str(len(self.cells)),
            failures=str(counts[RED]),
            skipped=str(counts[CANNOT]),
        )
        for one in self.cells:
            case = ElementTree.SubElement(suite, "testcase", name=self.text_of(one), classname=self.engine)
            if one.verdict == RED:
                ElementTree.SubElement(case, "failure", message=str(one.answer["why"])).text = self.line(one)
            elif one.verdict == CANNOT:
                ElementTree.SubElement(case, "skipped", message=str(one.answer["why"]))
        return ElementTree.tostring(suite, encoding="unicode")

"""Who imports whom: modules, and the rooms that they are in, without a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"compiler": "parcompile", "runtime": "parcompile.runtime", "schemas": "parcompile.schemas"}

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Names of all modules with their files."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = file
    return found


def imports_of(name: str, file: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules that a module imports anywhere: in functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}") in known else base for alias in node.names}
    return {one for one in found if one in known and one != name}


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Names that lead back to each other."""
    reached = {name: _reached(graph, name) for name in graph}
    return sorted({tuple(sorted(one for one in reached[name] if name in reached[one])) for name in graph} - {()})


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


@pytest.fixture(scope="module")
def graph() -> Graph:
    known = modules()
    return {name: imports_of(name, file, known) for name, file in known.items()}


def of_package(graph: Graph, package: str) -> Graph:
    inside = {name for name in graph if name == package or name.startswith(f"{package}.")}
    return {name: graph[name] & inside for name in inside}


def test_a_circle_is_found_and_what_leads_to_it_is_not_part_of_it() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [("b", "c")]


@pytest.mark.parametrize("package", ["parcompile", "parcompile.runtime"])
def test_no_modules_import_each_other_in_a_circle(graph: Graph, package: str) -> None:
    assert circles(of_package(graph, package)) == []


@pytest.mark.parametrize("package", ["parcompile.runtime"])
def test_no_rooms_import_each_other_in_a_circle(graph: Graph, package: str) -> None:
    depth = package.count(".") + 2
    rooms: Graph = {}
    for name, found in of_package(graph, package).items():
        if name != package:  # what the package itself gathers for users
            room = ".".join(name.split(".")[:depth])
            others = {".".join(one.split(".")[:depth]) for one in found}
            rooms.setdefault(room, set()).update(others - {room, package})
    assert circles(rooms) == []


def order_of_rooms() -> list[str]:
    """The rooms of the compiler as CONTRIBUTING orders them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    line = re.search(r"^`(units .*? cli)`$", text, re.MULTILINE)
    assert line is not None
    return line[1].split(" ‹ ")


def test_a_room_of_the_compiler_imports_only_rooms_before_it(graph: Graph) -> None:
    order = order_of_rooms()
    found: dict[str, set[str]] = {}
    for name, imported in graph.items():
        room = name.removeprefix("parcompile.").split(".")[0]
        if name == "parcompile" or room in ("runtime", "schemas", "__main__"):
            continue
        others = {one.removeprefix("parcompile.").split(".")[0] for one in imported if one != "parcompile"}
        found.setdefault(room, set()).update(others - {room, "schemas"})
    assert sorted(found) == sorted(order)
    # Commands call the runtime when they are asked to run something.
    found["cli"] -= {"runtime"}
    late = {
        room: [one for one in imported if one not in order[: order.index(room)]] for room, imported in found.items()
    }
    assert {room: sorted(imported) for room, imported in late.items() if imported} == {}


def test_kernels_of_attention_know_nothing_of_the_ring(graph: Graph) -> None:
    kernels = "parcompile.runtime.ring_attention.kernels"
    outside = {one for name, found in graph.items() if name.startswith(kernels) for one in found}
    table = "parcompile.machines.attention_kernels"  # by which the compiler warns, too
    assert sorted(one for one in outside if not one.startswith(kernels)) == [table]


MOST_MODULES = 110
"""What `parcompile check spec.json` may import of ours, from a cold start: what a spec does not need is left alone."""
COUNT = """
import sys
from parcompile.cli import main
sys.argv = ["parcompile", "check", {spec!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*(name for name in sys.modules if name.partition(".")[0] == "parcompile"))
"""


def test_a_cold_check_of_a_spec_imports_few_modules() -> None:
    spec = str(ROOT / "examples" / "byte_llama.json")
    run = subprocess.run(
        [sys.executable, "-c", COUNT.format(spec=spec)], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = run.stdout.splitlines()[-1].split()
    assert "parcompile.pipeline" in loaded
    assert len(loaded) <= MOST_MODULES, sorted(loaded)
    others = ("parcompile.plan.", "parcompile.lint.deepspeed", "parcompile.model.blocks.recurrent")
    assert not [name for name in loaded if name.startswith(others)]

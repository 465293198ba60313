"""Prints `docs/engines.md` from the certificates of `docs/certificates/`, which `parcompile prove` writes.

    parcompile prove --engine NAME --cells 20 --timeout 400 --format json > docs/certificates/NAME.json
    python .ci/engine_matrix.py > docs/engines.md

Scripts that certificates have are written to `docs/red_cells/`. A script there that somebody wrote by hand shows the
cell that its first line names. The exit code is 1 when this runtime is red.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parcompile.runtime.prove import Certificate, Proved
from parcompile.runtime.prove.engine import BUILT_IN
from parcompile.runtime.prove.ranks.cells import cell_of, text_of

START = """# Engines beside one process

Cells of [`parcompile prove`](prove.md), drawn so that each pair of features meets: the same tiny models, batches and
optimizer in an engine's own ranks and in one plain process. A command for each engine writes its certificate on two
cores, in minutes, and `--verify` runs it again:

```bash
@COMMANDS@
parcompile prove --verify docs/certificates/@FIRST@.json
```

`python .ci/engine_matrix.py > docs/engines.md` makes this page of the certificates. `--engine NAME --cell "TEXT"` runs
a cell of a table alone. Of a red cell the first wrong place is named; its script runs with `torchrun`, and imports
upstream alone. It fails, and passes without the suspected feature (`--without`). A *shim* is what an adapter replaces
so that an engine runs on CPUs: a cell with one says less about GPUs.
"""
GLANCE = """## At a glance

Each number counts the cells with a feature that are equal, or differ by rounding. **Red** names the other features
that the feature needs to be red: those that are left when nothing more can be turned off. A dash: no such cell was
drawn, or the adapter has none.
"""
DOCS = Path(__file__).parents[1] / "docs"
SIGN = {"equal": "equal", "rounding": "rounding", "red": "**red**", "not runnable": "not runnable"}
APART = ("stage",)
"""Features whose numbers are no sizes: each has a row."""
DIFFERS, ERROR = "beside one process", "ends with an error"
"""What the title of a script says that it shows."""
CELLS = 20
Shown = tuple[str, str]


def main() -> int:
    """The page on standard output, scripts of certificates in their folder."""
    proved = certificates()
    for name, one in proved.items():
        for cell in reversed(one.cells):  # of cells that shrink to the same one the first
            if script := cell.answer.get("script"):
                text = text_of({**(cell.smallest or {}), "seed": 0}, one.features)
                file = DOCS / "red_cells" / (f"{name} {text}".replace(" ", "_").replace(".", "_") + ".py")
                file.write_text(script, encoding="utf-8")
    print(page(proved), end="")
    return int(proved["parcompile"].counts["red"] > 0)


def certificates() -> dict[str, Certificate]:
    """By the engine's name, in the order of the page."""
    files = {name: DOCS / "certificates" / f"{name}.json" for name in BUILT_IN}
    read = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    return {name: Certificate.from_json(tree) for name, tree in read.items()}


def page(proved: Mapping[str, Certificate]) -> str:
    """The whole page."""
    scripts = _scripts(proved)
    commands = [
        f"parcompile prove --engine {name} --cells {CELLS} --seed {one.seed} --timeout 400 --format json > "
        f"docs/certificates/{name}.json"
        for name, one in proved.items()
    ]
    start = START.replace("@COMMANDS@", "\n".join(commands)).replace("@FIRST@", next(iter(proved)))
    head = f"| engine | versions | {' | '.join(SIGN)} |\n|---|---|---|---|---|---|"
    summary = [
        f"| {name} | {_versions(one)} | {' | '.join(map(str, one.counts.values()))} |" for name, one in proved.items()
    ]
    text = "\n".join([start, head, *summary, "", GLANCE, *_glance(proved), *_tables(proved, scripts)]).rstrip() + "\n"
    return text + _beside(text)


def _beside(text: str) -> str:
    """Scripts of cells that are not among those that were drawn, in the words of their first lines."""
    lines = []
    for file in sorted((DOCS / "red_cells").glob("*.py")):
        if f"({file.parent.name}/{file.name})" not in text:
            title, said, *_ = file.read_text(encoding="utf-8").removeprefix('"""').split("\n\n")
            lines.append(f"- {title.removesuffix('.')}. {said} [script](red_cells/{file.name})")
    return "\n".join(["", "## Found in other cells", "", *lines, ""]) if lines else ""


def _versions(one: Certificate) -> str:
    return ", ".join(f"{name} {version}" for name, version in one.versions.items() if name != "python")


def _scripts(proved: Mapping[str, Certificate]) -> dict[Shown, list[tuple[Mapping[str, Any], str]]]:
    """Features and files of the scripts in `docs/red_cells/`, by engine and what they show."""
    found = dict[Shown, list[tuple[Mapping[str, Any], str]]]()
    for file in sorted((DOCS / "red_cells").glob("*.py")):
        title = file.read_text(encoding="utf-8").partition(".\n")[0]
        engine, shows, text = re.fullmatch(r'"""(\w+) \S+ (.+): (.+)', title).groups()
        features = proved[engine].features
        few = {
            name: value for name, value in cell_of(text, features, {}).items() if value != features.get(name, [0])[0]
        }
        few.pop("seed", None)
        found.setdefault((engine, shows), []).append((few, file.name))
    return found


def _script(scripts: Any, name: str, cell: Proved) -> str | None:
    """The file that shows a cell: all features that it needs are the cell's."""
    shows = ERROR if cell.verdict == "not runnable" else DIFFERS
    own = cell.smallest or cell.cell
    fitting = (file for few, file in scripts.get((name, shows), ()) if few.items() <= own.items())
    stops = cell.verdict == "not runnable" and "Error" in cell.answer["why"]  # no time-out
    return next(fitting, None) if stops or cell.verdict == "red" else None


def _labels(one: Certificate, cell: Mapping[str, Any]) -> dict[str, str]:
    """The rows of a cell's features, sizes by their name alone; the simplest values have none but a family."""
    found = {}
    for name, values in one.features.items():
        value = cell[name]
        if name == "family" or value != values[0]:
            number = isinstance(value, (bool, int, float)) and name not in APART
            found[name] = str(value) if name == "family" else name if number else f"{name} {value}"
    return found


def _glance(proved: Mapping[str, Certificate]) -> Iterator[str]:
    right = {name: Counter[str]() for name in proved}
    stops = {name: Counter[str]() for name in proved}
    needs: dict[str, dict[str, set[str]]] = {name: {} for name in proved}
    rows: dict[str, list[str]] = {}
    for name, one in proved.items():
        for feature, values in one.features.items():
            rows.setdefault(feature, [])
            for value in values if feature == "family" else values[1:]:
                label = _labels(one, {**{key: of[0] for key, of in one.features.items()}, feature: value})[feature]
                if label not in rows[feature]:
                    rows[feature].append(label)
        for cell in one.cells:
            labels = set(_labels(one, cell.cell).values())
            if cell.verdict in ("equal", "rounding"):
                right[name].update(labels)
            elif cell.verdict == "not runnable":
                stops[name].update(labels)
            if cell.smallest:
                few = _labels(one, cell.smallest)
                if few["family"] == one.features["family"][0]:
                    few.pop("family")
                for label in few.values():
                    needs[name].setdefault(label, set()).update(set(few.values()) - {label})
    yield f"| | {' | '.join(proved)} |\n|---|{'---|' * len(proved)}"
    for label in (label for each in rows.values() for label in each):
        cells = []
        for name in proved:
            said = [str(right[name][label])] if right[name][label] else []
            if label in needs[name]:
                others = ", ".join(sorted(needs[name][label]))
                said.append(f"**red**{f' with {others}' if others else ''}")
            if stops[name][label]:
                said.append(f"{stops[name][label]} not runnable")
            cells.append("; ".join(said) or "–")
        yield f"| {label} | {' | '.join(cells)} |"
    yield ""


def _tables(proved: Mapping[str, Certificate], scripts: Mapping[tuple[str, str], str]) -> Iterator[str]:
    for name, one in proved.items():
        yield f"## {name}\n\n| cell | verdict | loss | norm | update | |\n|---|---|---|---|---|---|"
        for cell in one.cells:
            apart = cell.answer.get("differences", {})
            numbers = " | ".join(f"{apart[key]:.1e}" if key in apart else "" for key in ("loss", "norm", "update"))
            why = cell.answer.get("why") or ("shim" if cell.answer.get("shims") else "")
            if cell.smallest is not None:
                first = cell.answer["explanation"]
                why += f"; with the fewest features: {text_of(cell.smallest, one.features)}"
                why += f"; first wrong: {first.get('place') or 'the last parameters'}: {first.get('said')}"
            if file := _script(scripts, name, cell):
                why += f"; [script](red_cells/{file})"
            elif cell.verdict == "red":
                why += f"; no script of upstream alone shows it: {cell.answer.get('no_script', 'none is written')}"
            yield f"| {one.text_of(cell)} | {SIGN[cell.verdict]} | {numbers} | {why.replace('|', '/')} |"
        yield ""


if __name__ == "__main__":
    sys.exit(main())

"""Prints `docs/engines.md` from the certificates of `docs/certificates/`, which `parcompile prove` writes.

    parcompile prove --engine NAME --cells 20 --timeout 400 --format json > docs/certificates/NAME.json
    python .ci/engine_matrix.py > docs/engines.md
    python .ci/engine_matrix.py --interpreter NAME-VERSION --folder FOLDER

`docs/certificates/NAME-VERSION.json` is of another version of an engine. The last command prints the interpreter that
it ran in, and makes it where the folder has none. The picture of the page goes to `docs/pictures/engines/matrix.svg`.
Scripts that certificates have are written to `docs/red_cells/`, unless one there shows their cell: its first line names
its cells. The exit code is 1 when this runtime is red.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcompile.runtime.prove import Certificate, Proved
from parcompile.runtime.prove.engine import BUILT_IN
from parcompile.runtime.prove.ranks.cells import cell_of, text_of
from parcompile.show.pictures import SMALL, Box, Picture, Sketch, Text
from parcompile.show.pictures.svg import svg

START, GLANCE = (
    f"{part.rstrip()}\n"
    for part in re.split(r"^(?=## )", Path(__file__).with_suffix(".md").read_text(encoding="utf-8"), flags=re.M)
)
DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "pictures" / "engines" / "matrix.svg"
SIGN = {"equal": "equal", "rounding": "rounding", "red": "**red**", "not runnable": "not runnable"}
APART = ("stage",)
"""Features whose numbers are no sizes: each has a row, the simplest too."""
DIFFERS, ERROR = "beside one process", "ends with an error"
"""What the title of a script says that it shows."""
HUGGING_FACE = ["transformers==4.57.6", "accelerate==1.10.1", "huggingface_hub==0.36.0", "tokenizers==0.22.1"]
HUGGING_FACE.append("datasets==4.0.0")  # which the Trainer imports
OTHERS = {
    "transformers-4.57.6": HUGGING_FACE,
    "megatron-0.15.3": ["megatron-core==0.15.3"],
    "deepspeed-0.19.3": ["deepspeed==0.19.3"],
}
"""Packages of the interpreters of other versions, in front of those of this one."""
KINDS = ("loss", "norm", "gradient", "update")
Shown = tuple[str, str]


def main() -> int:
    """The page on standard output, scripts of certificates in their folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpreter", choices=OTHERS, help="prints that of another version")
    parser.add_argument("--folder", type=Path, default=Path("build/interpreters"), help="has interpreters")
    options = parser.parse_args()
    if options.interpreter:
        from historical_pairs import interpreter

        print(interpreter(OTHERS[options.interpreter], options.folder))
        return 0
    proved = certificates()
    for name, one in proved.items():
        for cell in reversed(one.cells):  # of cells that shrink to the same one the first
            if name in BUILT_IN and (script := cell.answer.get("script")) and not _script(_scripts(proved), name, cell):
                text = text_of({**(cell.smallest or {}), "seed": 0}, one.features)
                file = DOCS / "red_cells" / (f"{name} {text}".replace(" ", "_").replace(".", "_") + ".py")
                file.write_text(script, encoding="utf-8")
    PICTURE.write_text(svg(picture(proved)), encoding="utf-8")
    print(page(proved), end="")
    return int(proved["parcompile"].counts["red"] > 0)


def certificates() -> dict[str, Certificate]:
    """By the name of an engine, or with that of its version, in the order of the page."""
    found = [file.stem for file in sorted((DOCS / "certificates").glob("*.json"))]
    files = [stem for name in BUILT_IN for stem in (name, *(one for one in found if one.startswith(f"{name}-")))]
    read = {stem: json.loads((DOCS / "certificates" / f"{stem}.json").read_text(encoding="utf-8")) for stem in files}
    return {stem: Certificate.from_json(tree) for stem, tree in read.items()}


def page(proved: Mapping[str, Certificate]) -> str:
    """The whole page."""
    scripts = _scripts(proved)
    commands = [
        f"parcompile prove --engine {one.engine} --cells {len(one.cells)} --seed {one.seed} "
        f"--timeout 400 {_other(name)}--format json > docs/certificates/{name}.json"
        for name, one in proved.items()
    ]
    start = START.replace("@COMMANDS@", "\n".join(commands)).replace("@FIRST@", next(iter(proved)))
    head = f"| engine | versions | {' | '.join(SIGN)} |\n|---|---|---|---|---|---|"
    summary = []
    for name, one in proved.items():
        versions = ", ".join(f"{package} {version}" for package, version in one.versions.items() if package != "python")
        summary.append(f"| {name} | {versions} | {' | '.join(map(str, one.counts.values()))} |")
    seen = [f"| | {' | '.join(proved)} |\n|---|{'---|' * len(proved)}"]
    seen += [f"| {label} | {' | '.join(map(str, entries.values()))} |" for label, entries in glance(proved).items()]
    text = "\n".join([start, head, *summary, "", GLANCE, *seen, "", *_tables(proved, scripts)]).rstrip() + "\n"
    return text + _beside(text)


def _beside(text: str) -> str:
    """Scripts of cells that are not among those that were drawn, in the words of their first lines."""
    lines = []
    for file in sorted((DOCS / "red_cells").glob("*.py")):
        if f"({file.parent.name}/{file.name})" not in text:
            title, said, *_ = file.read_text(encoding="utf-8").removeprefix('"""').split("\n\n")
            lines.append(f"- {title.removesuffix('.')}. {' '.join(said.split())} [script](red_cells/{file.name})")
    return "\n".join(["", "## Found in other cells", "", *lines, ""]) if lines else ""


def _scripts(proved: Mapping[str, Certificate]) -> dict[Shown, list[tuple[Mapping[str, Any], str]]]:
    """Features and files of the scripts in `docs/red_cells/`, by certificate and what they show."""
    found = dict[Shown, list[tuple[Mapping[str, Any], str]]]()
    for file in sorted((DOCS / "red_cells").glob("*.py")):
        title = file.read_text(encoding="utf-8").partition(".\n")[0]
        engine, version, shows, texts = re.fullmatch(r'"""(\w+) (\S+) (.+?): (.+)', title).groups()
        name = f"{engine}-{version}" if f"{engine}-{version}" in proved else engine
        features = proved[name].features
        for text in texts.split("; "):
            cell = cell_of(text, features, {})
            few = {name: value for name, value in cell.items() if name != "seed" and value != features[name][0]}
            found.setdefault((name, shows), []).append((few, file.name))
    return found


def _script(scripts: Any, name: str, cell: Proved) -> str | None:
    """The file that shows a cell: all features that it needs are the cell's."""
    shows = ERROR if cell.verdict == "not runnable" else DIFFERS
    own = cell.smallest or cell.cell
    through = [name, *(["transformers"] if name == "accelerate" else [])]  # whose models accelerate is given
    fitting = (file for one in through for few, file in scripts.get((one, shows), ()) if few.items() <= own.items())
    stops = cell.verdict == "not runnable" and "Error" in cell.answer["why"]  # no time-out
    return next(fitting, None) if stops or cell.verdict == "red" else None


def _labels(one: Certificate, cell: Mapping[str, Any]) -> dict[str, str]:
    """The rows of a cell's features, sizes by their name alone; the simplest values have none but a family."""
    found = {}
    for name, values in one.features.items():
        value = cell[name]
        if name in ("family", *APART) or value != values[0]:
            number = isinstance(value, (bool, int, float)) and name not in APART
            found[name] = str(value) if name == "family" else name if number else f"{name} {value}"
    return found


@dataclass
class Entry:
    """What the cells with a feature say of an engine."""

    right: int = 0
    stops: int = 0
    red: bool = False
    needs: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        others = ", ".join(sorted(self.needs))
        said = [str(self.right)] * (self.right > 0) + [f"**red**{f' with {others}' if others else ''}"] * self.red
        return "; ".join([*said, *[f"{self.stops} not runnable"] * (self.stops > 0)]) or "–"


def glance(proved: Mapping[str, Certificate]) -> dict[str, dict[str, Entry]]:
    """By feature and engine."""
    rows: dict[str, dict[str, Entry]] = {}
    for one in proved.values():
        first = {key: of[0] for key, of in one.features.items()}
        for feature, values in one.features.items():
            for value in values if feature in ("family", *APART) else values[1:]:
                rows.setdefault(_labels(one, {**first, feature: value})[feature], {name: Entry() for name in proved})
    for name, one in proved.items():
        first = {key: of[0] for key, of in one.features.items()}
        for cell in one.cells:
            for label in _labels(one, cell.cell).values():
                entry = rows[label][name]
                entry.right += cell.verdict in ("equal", "rounding")
                entry.stops += cell.verdict == "not runnable"
            few = _labels(one, cell.smallest) if cell.smallest else {}
            few = {key: label for key, label in few.items() if cell.smallest[key] != first[key]}
            for label in few.values():
                rows[label][name].red = True
                rows[label][name].needs |= set(few.values()) - {label}
    return rows


def picture(proved: Mapping[str, Certificate]) -> Picture:
    """The same in colours and words."""
    rows, left, wide, high = glance(proved), 150.0, 96.0, 22.0
    sketch = Sketch(left + wide * len(proved))
    for column, stem in enumerate(proved):
        for line, text in enumerate(stem.split("-")):
            sketch.add(Text(left + (column + 0.5) * wide, 14 + 15 * line, text, SMALL + 1, anchor="middle"))
    sketch.y = 40
    for label, entries in rows.items():
        sketch.add(Text(0, sketch.y + 15, label, SMALL + 1))
        for column, entry in enumerate(entries.values()):
            role = "bad" if entry.red else "good" if entry.right else "warn" if entry.stops else "track"
            words = [f"{entry.right} equal"] * (entry.right > 0) + ["red"] * entry.red
            said = ", ".join(words) or ("stops" if entry.stops else "–")
            ink = f"on:{role}"
            sketch.add(Box(left + column * wide, sketch.y, wide - 2, high - 2, role, str(entry).replace("*", "")))
            sketch.add(Text(left + (column + 0.5) * wide - 1, sketch.y + 14, said, SMALL, ink, anchor="middle"))
        sketch.y += high
    counts = "; ".join(
        f"{name}: {', '.join(f'{n} {key}' for key, n in one.counts.items() if n)}" for name, one in proved.items()
    )
    return sketch.picture(
        "Features of engines beside one process",
        "How many drawn cells with a feature are equal or differ by rounding, and whether it is part of a red one.",
        counts,
    )


def _other(stem: str) -> str:
    return "" if stem in BUILT_IN else f'--no-shrink --python "$(python .ci/engine_matrix.py --interpreter {stem})" '


def _tables(proved: Mapping[str, Certificate], scripts: Mapping[tuple[str, str], str]) -> Iterator[str]:
    for name, one in proved.items():
        yield f"## {name}\n\n| cell | verdict | loss | norm | gradient | update | |\n|---|---|---|---|---|---|---|"
        for cell in one.cells:
            apart = cell.answer.get("differences", {})
            numbers = " | ".join(f"{apart[key]:.1e}" if key in apart else "" for key in KINDS)
            why = cell.answer.get("why") or ("shim" if cell.answer.get("shims") else "")
            if cell.smallest is not None:
                first = cell.answer["explanation"]
                why += f"; with the fewest features: {text_of(cell.smallest, one.features)}"
                if "said" in first:
                    why += f"; first wrong: {first.get('place') or 'the last parameters'}: {first.get('said')}"
            if file := _script(scripts, name, cell):
                why += f"; [script](red_cells/{file})"
            elif cell.verdict == "red":
                why += f"; no script of upstream alone shows it: {cell.answer.get('no_script', 'none is written')}"
            yield f"| {one.text_of(cell)} | {SIGN[cell.verdict]} | {numbers} | {why.replace('|', '/')} |"
        yield ""


if __name__ == "__main__":
    sys.exit(main())

"""Trains drawn configurations of every family on live ranks and in one process, and writes what it found as a page.

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    python .ci/configuration_matrix.py run LOG [--first 0] [--count 54] [--layout "tp 2"] [--family llama] [--noise]
    python .ci/configuration_matrix.py write LOG docs/configurations.md [--onto docs/configurations.md]
    python .ci/configuration_matrix.py export [--family llama] [--layout "tp 2"]

`run` adds one line for each draw to LOG, so that a long run can be done in pieces; without a layout it takes each in
turn. The exit code is 1 when a loss, a gradient norm or a parameter is further than 1e-5 (relative) from one process
and than what a change of the last bits of the weights explains (`tests/runtime/closeness.py`), or a configuration is
refused without the name of a key that was drawn.

`run --noise` measures for every draw what other last bits of the weights do to transformers alone; `write` makes a
table of both sides from such draws, which are in no other table.

`write --onto PAGE` adds the draws of LOG to those that PAGE counts: a run of new families keeps the others' rows.

`export` loads a drawn folder of each family in slices, trains one step, exports it and compares logits and
configuration with the same step of transformers and torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

KEPT = ("equal", "rounded")
KINDS = ("equal", "rounded", "refused", "no model", "different")
SIZES = frozenset({"hidden_size", "vocab_size", "max_position_embeddings", "model_type"})
"""Keys that every configuration of the tests sets, and none varies here."""


INTRODUCTION, NOISE, NEVER = (
    f"{part.rstrip()}\n"
    for part in re.split(r"^(?=## )", Path(__file__).with_suffix(".md").read_text(encoding="utf-8"), flags=re.M)
)

PLUMBING = {
    *("_attn_implementation", "_auto_class", "attribute_map", "base_config_key", "base_model_ep_plan"),
    *("base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "extra_config_files", "extra_files"),
    *("get_text_config", "inputs_embeds", "num_labels", "per_layer_config", "sub_configs_defaults", "text_config"),
    *("vision_config",),
}
"""What the code reads of a configuration that no `config.json` of a text model sets."""
DRAWS = 40
"""Draws of a family that are looked at for the keys that they set."""


def run(log: Path, first: int, count: int, layouts: list[str], families: tuple[str, ...], noise: bool) -> int:
    """The draws `first` to `first + count`, dealt to the layouts in stretches."""
    from configuration_runs import accepted, cases, outcomes
    from drawn_configurations import varied

    failed, share = 0, -(-count // len(layouts))
    for place, layout in enumerate(layouts):
        start = first + place * share
        draws = cases(start, min(share, first + count - start), layout, families)
        draws = list(map(accepted, draws)) if noise else draws
        found = outcomes(draws, timeout=600, noise=noise)
        with log.open("a", encoding="utf-8") as file:
            for one in found:
                failed += one.kind == "different"
                keys = sorted(varied(one.drawn))
                line = {
                    "family": one.drawn.family,
                    "layout": layout,
                    "kind": one.kind,
                    "worst": one.worst,
                    "noise": one.noise,
                    "own": one.own,
                    "keys": keys,
                }
                file.write(json.dumps(line | {"number": one.drawn.number, "text": one.text}) + "\n")
                if one.kind == "different":
                    print(f"{one.worst:.1e} {one.drawn.text}\n    {one.text}", flush=True)
        print(f"{layout}: {len(found)} draws", flush=True)
    return int(failed > 0)


def write(log: Path, page: Path, onto: Path | None) -> int:
    """The page of the log: of a draw that was trained more than once, the last time."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    latest = {(line["layout"], line["family"], line["number"]): line for line in lines}
    before = onto.read_text(encoding="utf-8") if onto else ""
    page.write_text(text(list(latest.values()), before), encoding="utf-8")
    return 0


def text(lines: list[dict[str, Any]], before: str = "") -> str:
    """The page: what was drawn, by family and by layout, and what never was; with the draws of the page `before`."""
    by_family, by_layout = defaultdict(list), defaultdict(list)
    of_noise = [line for line in lines if line.get("own") is not None]
    for line in (one for one in lines if one.get("own") is None):
        by_family[line["family"]].append(line)
        by_layout[line["layout"]].append(line)
    parts = [
        INTRODUCTION,
        *_table("layout", by_layout, before),
        "",
        *_table("family", by_family, before),
        "",
        *_both_sides(of_noise, before),
        NEVER,
        *_never_varied(by_family, before),
    ]
    return "\n".join(parts) + "\n"


def _both_sides(lines: list[dict[str, Any]], before: str) -> list[str]:
    """The section on noise; that of the page `before` without new draws."""
    if not lines:
        found = re.search(r"^## Both sides of the noise\n.*?(?=^## )", before, re.M | re.S)
        return [found.group().rstrip("\n"), ""] if found else []
    rows = [
        f"| {line['family']} | {line['layout']} | {line['number']} | {line['kind']} | {line['worst']:.1e} "
        f"| {line['own']:.1e} |"
        for line in sorted(lines, key=lambda one: (one["family"], one["layout"], one["number"]))
    ]
    beyond = sum(line["worst"] > max(1e-5, 10 * line["own"]) for line in lines)
    within = sum(line["worst"] <= line["own"] for line in lines)
    said = f"The ranks are nearer in {within} of {len(lines)} draws; {beyond} are beyond 1e-5 and ten times the noise."
    head = ["| family | layout | draw | | ranks | transformers alone |", "|---|---|---|---|---|---|"]
    return [NOISE, *head, *rows, "", said, ""]


Counts = tuple[list[int], float]
"""Draws by kind, and the largest difference of equals."""


def _table(name: str, rows: dict[str, list[dict[str, Any]]], before: str) -> list[str]:
    found = [
        f"| {name} | draws | {' | '.join(KINDS)} | largest difference of equals |",
        "|---|---|---|---|---|---|---|---|",
    ]
    counted = _counted(before, name)
    for title, lines in rows.items():
        worst = max((line["worst"] for line in lines if line["kind"] == "equal"), default=0.0)
        counts = [sum(line["kind"] == kind for line in lines) for kind in KINDS]
        old, largest = counted.get(title, ([0] * len(KINDS), 0.0))
        counted[title] = [one + other for one, other in zip(counts, old, strict=True)], max(worst, largest)
    every = [sum(column) for column in zip(*(counts for counts, _ in counted.values()), strict=True)]
    counted["all"] = every, max(worst for _, worst in counted.values())
    found += [
        f"| {title} | {sum(counts)} | {' | '.join(map(str, counts))} | {worst:.1e} |"
        for title, (counts, worst) in counted.items()
    ]
    return found


def _counted(page: str, name: str) -> dict[str, Counts]:
    """The rows of a page's table, without their sum."""
    _, _, rest = page.partition(f"| {name} | draws |")
    found: dict[str, Counts] = {}
    for line in rest.splitlines()[2:]:
        if not line.startswith("| "):
            break
        title, _, *counts, worst = (cell.strip() for cell in line.strip("|").split("|"))
        found[title] = list(map(int, counts)), float(worst)
    found.pop("all", None)
    return found


def _never_varied(by_family: dict[str, list[dict[str, Any]]], before: str) -> list[str]:
    from drawn_configurations import draw, varied
    from transformers import CONFIG_MAPPING

    from parcompile.model.catalogue import RUNTIME_FAMILIES
    from parcompile.runtime.model.configuration import read_keys

    old, known = re.search(r"Of (\d+) pairs of .* set, (\d+) are in a draw", before), _counted(before, "family")
    pairs, trained = map(int, old.groups()) if old else (0, 0)
    lacking = defaultdict(list)
    for family in RUNTIME_FAMILIES:
        names = CONFIG_MAPPING[family].attribute_map
        drawn = {key for number in range(DRAWS) for key in varied(draw(number, (family,)))}
        read = {names.get(key, key) for key in drawn} | {key for key in drawn if "." in key}
        here = {names.get(key, key) for one in by_family.get(family, []) if one["kind"] in KEPT for key in one["keys"]}
        if family not in known:
            pairs, trained = pairs + len(read), trained + len(read & here)
        for key in sorted(read_keys(CONFIG_MAPPING[family]) - read - SIZES - PLUMBING):
            lacking[key].append(family)
    every = len(RUNTIME_FAMILIES)
    rows = [
        f"| `{key}` | {'all' if len(families) == every else ', '.join(families)} |"
        for key, families in sorted(lacking.items())
    ]
    said = f"Of {pairs} pairs of a family and a key that draws set, {trained} are in a draw above that was trained."
    return ["| key | families |", "|---|---|", *rows, "", said]


def export(families: list[str], layout: str) -> int:
    """What differs, family by family."""
    from export_runs import faults

    with tempfile.TemporaryDirectory() as folder:
        found = faults(families, Path(folder), layout)
    print("\n".join([*found, f"{len(families)} families, {len(found)} faults"]))
    return int(bool(found))


def main() -> int:
    """One of the commands."""
    from drawn_configurations import LAYOUTS

    from parcompile.model.catalogue import RUNTIME_FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running, writing = commands.add_parser("run"), commands.add_parser("write")
    for command in (running, writing):
        command.add_argument("log", type=Path)
    running.add_argument("--first", type=int, default=0)
    running.add_argument("--count", type=int, default=54)
    running.add_argument("--layout", action="append", choices=list(LAYOUTS))
    running.add_argument("--family", action="append", choices=RUNTIME_FAMILIES)
    running.add_argument("--noise", action="store_true")
    writing.add_argument("page", type=Path)
    writing.add_argument("--onto", type=Path)
    exporting = commands.add_parser("export")
    exporting.add_argument("--family", action="append", choices=RUNTIME_FAMILIES)
    exporting.add_argument("--layout", default="tp 2", choices=("one rank", "tp 2"))
    given = parser.parse_args()
    if given.command == "export":
        return export(given.family or list(RUNTIME_FAMILIES), given.layout)
    if given.command == "write":
        return write(given.log, given.page, given.onto)
    families = tuple(given.family or RUNTIME_FAMILIES)
    return run(given.log, given.first, given.count, given.layout or list(LAYOUTS), families, given.noise)


if __name__ == "__main__":
    sys.exit(main())

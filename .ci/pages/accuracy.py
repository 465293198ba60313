"""How far estimates err on models that were not fitted: fits every split, judges it, writes the figures.

    python .ci/pages/accuracy.py FOLDER --fit compiler/cost/coefficients.json --page docs/accuracy.md

FOLDER holds the two measurement files. Without `--fit` the stored coefficients are judged as they are. Published points
are predicted by the installed package: install it after `--fit`, then write the page.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from published_points import LLAMA_3, Point, points
from published_runs import is_possible, read_megatron, read_nanotron

from parcompile.cost.calibration import Judgement, fit_memory, fit_time, judge
from parcompile.cost.coefficients import TIME, CoefficientSet, Fit, coefficient_sets
from parcompile.cost.measurements import Measurement
from parcompile.cost.step import step_terms, step_time, values_of

NANOTRON, MEGATRON = "nanotron_h100_1b_3b.csv", "megatron_a100_3.6b_18.4b.csv"
LARGER = "nanotron_h100_8b.csv"
"""Runs that nothing was fitted to: what is shipped is judged on them."""

_HERE = Path(__file__)
_KNOWN = json.loads(_HERE.with_suffix(".json").read_text(encoding="utf-8"))
GOALS: Mapping[str, float] = _KNOWN["goals"]
"""What is aimed at on models that were never fitted."""

FLOORS: Mapping[str, Mapping[str, float]] = _KNOWN["floors"]
"""What has been reached, rounded to the worse side: the tests hold it."""

QUIET_NODES = 32
"""Up to so many nodes the measured groups repeat; beyond, the same layout differs by factors from run to run."""


@dataclass(frozen=True, slots=True)
class Split:
    """Fit on one model, judge on another. `name` is also that of the stored set of coefficients."""

    name: str
    fitted: str
    judged: str
    file: str

    @property
    def title(self) -> str:
        """Both models."""
        return f"{self.fitted} -> {self.judged}"


SPLITS = (
    Split("nanotron-1b", "1B", "3B", NANOTRON),
    Split("nanotron-3b", "3B", "1B", NANOTRON),
    Split("nanotron-h100", "1B and 3B", "8B", LARGER),
    Split("megatron-3.6b", "3.6B", "18.4B", MEGATRON),
    Split("megatron-18.4b", "18.4B", "3.6B", MEGATRON),
)


def read(folder: Path) -> dict[str, list[Measurement]]:
    """The runs of both files; those that could not start for want of layers are left out."""
    found = {name: read_nanotron(folder / name) for name in (NANOTRON, LARGER)}
    found[MEGATRON] = read_megatron(folder / MEGATRON)
    return {name: [one for one in rows if is_possible(one)] for name, rows in found.items()}


INFINIBAND: Mapping[str, float] = {"network_link": 0.8, "network_ports": 1.0, "network_scale": 0.0}
"""Prior for networks with a rail for each rank, whose rings do not slow down with the number of nodes."""

MEGATRON_KERNELS: Mapping[str, float] = {
    "matmul": 0.78,
    "launch_seconds": 1.5e-3,
    "elementwise": 2.0,
    "overlap": 0.0,
    "narrow": 40.0,
}
"""Prior for fused kernels and gradients that are reduced after the backward pass."""


def fit_all(runs: Mapping[str, Sequence[Measurement]]) -> dict[str, CoefficientSet]:
    """A set for each split, and one of each machine for use. Megatron's runs are few: they stay near a prior."""
    nanotron, megatron = runs[NANOTRON], runs[MEGATRON]
    time = fit_time(nanotron)
    # What a machine and its kernels decide is not carried over: other network, fused kernels, no overlap.
    prior = {**{name: one.start for name, one in TIME.items()}, **INFINIBAND, **MEGATRON_KERNELS}
    found = [_set("nanotron-h100", NANOTRON, "1B and 3B", "h100-sxm", fit_memory(nanotron), time)]
    found.append(_set("megatron-a100", MEGATRON, "3.6B and 18.4B", "a100-80gb", None, fit_time(megatron, prior)))
    for split in SPLITS:
        rows = [one for one in runs[split.file] if one.model == split.fitted]
        if not rows:
            continue  # judged on a file of its own
        if split.file == NANOTRON:
            found.append(_set(split.name, NANOTRON, split.fitted, "h100-sxm", fit_memory(rows), fit_time(rows)))
        else:
            found.append(_set(split.name, MEGATRON, split.fitted, "a100-80gb", None, fit_time(rows, prior)))
    return {one.name: one for one in found}


def _set(name: str, file: str, models: str, accelerator: str, memory: Fit | None, time: Fit | None) -> CoefficientSet:
    return CoefficientSet(name, f"{file}, {models}", accelerator, memory, time)


def judge_all(runs: Mapping[str, Sequence[Measurement]], sets: Mapping[str, CoefficientSet]) -> dict[str, Judgement]:
    """Each split judged on the model that it was not fitted to."""
    return {
        split.title: judge([one for one in runs[split.file] if one.model == split.judged], sets[split.name])
        for split in SPLITS
    }


def judge_other_cut(folder: Path, sets: Mapping[str, CoefficientSet]) -> Judgement:
    """The small model judged as if its stages ended when their share of the cost is reached."""
    (split,) = (one for one in SPLITS if one.title == "3B -> 1B")
    rows = read_nanotron(folder / split.file, at_share=True)
    return judge([one for one in rows if one.model == split.judged and is_possible(one)], sets[split.name])


_HEAD = (
    "fitted -> judged",
    "memory, mean / median error",
    "90 % interval covers",
    "fits or not, right",
    "crashes predicted to fit",
    "step time, mean / median error",
    "90 % interval covers",
)


def page(judged: Mapping[str, Judgement], other_cut: Judgement) -> str:
    """docs/accuracy.md, from accuracy.md beside this file; `other_cut` is that of `judge_other_cut`."""
    rows = [_HEAD]
    for title, one in judged.items():
        memory = f"{_pc(one.memory_error)} / {_pc(one.memory_median)} of {one.memory_rows}" if one.memory_rows else "–"
        cover = _pc(one.memory_coverage) if one.memory_rows else "–"
        fits = f"{_pc(one.fits_share)} of {one.fits_rows}" if one.fits_rows else "–"
        unsafe = _pc(one.unsafe_share) if one.fits_rows else "–"
        time = f"{_pc(one.time_error)} / {_pc(one.time_median)} of {one.time_rows}"
        rows.append((title, memory, cover, fits, unsafe, time, _pc(one.time_coverage)))
    regret = [("fitted -> judged", "nodes: regret")]
    for title, one in judged.items():
        regret.append((title, ", ".join(f"{nodes}: {_pc(value)}" for (_, nodes), value in one.regret.items())))
    known = {
        "errors": _table(rows),
        "regret": _table(regret),
        "kinds": " and ".join(_pc(one.memory_error_of_kinds) for one in judged.values() if one.memory_rows),
        "other_time": f"{_pc(other_cut.time_error)} in the mean and {_pc(other_cut.time_median)} in the median",
        "other_memory": _pc(other_cut.memory_error),
        "other_coverage": _pc(other_cut.memory_coverage),
        "quiet": str(QUIET_NODES),
        **_published(),
        **_causes(),
    }
    text = _HERE.with_suffix(".md").read_text(encoding="utf-8")
    for name, value in known.items():
        text = text.replace(f"{{{name}}}", value)
    return "\n\n".join(map(_filled, text.rstrip("\n").split("\n\n"))) + "\n"


def _published() -> dict[str, str]:
    """The table of published points, and the mean error of each source."""
    rows = [("source", "point", "published", "predicted", "error", "in the 90 % interval")]
    errors: dict[str, list[float]] = {}
    for one in points():
        low, predicted, high = one.predicted()
        error = predicted / one.published - 1
        errors.setdefault(one.source, []).append(abs(error))
        shown, inside = (
            f"{error:+.1%}".replace("%", " %").replace("-", "−"),
            "yes" if low <= one.published <= high else "no",
        )
        rows.append((one.source, one.name, f"{one.published:,.4g} {one.unit}", f"{predicted:,.4g}", shown, inside))
    means = "; ".join(f"{source}: {_pc(sum(found) / len(found))}" for source, found in errors.items())
    return {"points": _table(rows), "means": means}


def _causes() -> dict[str, str]:
    """What the points of Llama 3 would be without congestion, and the last of them with faster attention."""
    llama = [one for one in points() if one.source == LLAMA_3]

    def rate(one: Point, **changed: float) -> float:
        (_, predicted, _), values, terms = one.predicted(), values_of(one.work), step_terms(one.work)
        return predicted * step_time(terms, values).seconds / step_time(terms, {**values, **changed}).seconds

    clear = [f"{rate(one, network_scale=0.0):.0f}" for one in llama]
    return {
        "clear": f"{', '.join(clear[:-1])} and {clear[-1]}",
        "attention": f"{values_of(llama[-1].work)['attention']:.2g}",
        "fused": f"{rate(llama[-1], attention=0.35):.0f}",
    }


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def _filled(part: str) -> str:
    """A paragraph, or each item of a list, in lines of one length; tables, headings and the first words as they are."""
    if part[0] in "|#" or part.startswith("Written by"):
        return part
    items = [" ".join(one.split()) for one in re.split(r"^- ", part, flags=re.MULTILINE)]
    marks = ("- ", "  ") if part.startswith("- ") else ("", "")
    return "\n".join(
        textwrap.fill(one, 118, initial_indent=marks[0], subsequent_indent=marks[1]) for one in items if one
    )


def _pc(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of this module."""
    parser = argparse.ArgumentParser(description="Judge the estimates on models that were not fitted.")
    parser.add_argument("folder", type=Path, help="folder of the measurement files")
    parser.add_argument("--fit", type=Path, help="fit anew, and write the coefficients to this file")
    parser.add_argument("--page", type=Path, help="write the page here instead of printing it")
    options = parser.parse_args(arguments)
    runs = read(options.folder)
    sets = fit_all(runs) if options.fit else coefficient_sets()
    if options.fit:
        tree = {"sets": {name: one.to_json() for name, one in sets.items()}}
        options.fit.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        # As they will be read: stored figures are rounded.
        sets = {name: CoefficientSet.from_json(name, one) for name, one in tree["sets"].items()}
    text = page(judge_all(runs, sets), judge_other_cut(options.folder, sets))
    if options.page:
        options.page.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()

"""What is exported comes back: every target and drawn specs, up to what the target names as lost.

A few specs in the suite; `python tests/compiler/test_round_trip.py 100` draws so many and prints a line for each file,
with a further number others (a seed).
A file does not say everything: what it has no word for is taken from the spec, and all that it says has to agree.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoder_cases import compiled, specs
from hypothesis import HealthCheck, Phase, given, seed, settings

from parcompile.backends.artefacts import effective_order
from parcompile.backends.kinds import BUILT_IN
from parcompile.backends.reading import Outcome
from parcompile.backends.recipes import recipe
from parcompile.backends.registry import losses, render
from parcompile.importing import Imported, import_document
from parcompile.lint import recognised
from parcompile.plan import Plan
from parcompile.text import read_file

FILES = {
    "deepspeed": ("ds_config.json",),
    "megatron": ("megatron_args.json", "megatron_args.yaml", "megatron_args.sh"),
    "torchtitan": ("torchtitan_config.py",),
    "accelerate": ("accelerate.yaml", "parallelism_config.json"),
    "accelerate-deepspeed": ("accelerate_deepspeed.yaml",),
    "transformers": ("distributed_config.json",),
    "axolotl": ("axolotl.yaml",),
    "llamafactory": ("llama_factory.yaml",),
}
LAUNCHERS = ("torchrun", "slurm", "kubernetes", "skypilot", "trl")
"""Their files start the plan, and hold no configuration that could be imported."""


def imported(file: Path) -> Imported:
    found = recipe(str(file))
    if found is None:
        read, recognition = recognised(read_file(file))
        assert read.document is not None, file
        found = read.document, recognition.kind
    return import_document(found[1], found[0], {}, file.parent)


def joined(said: dict[str, Any], tree: dict[str, Any], lost: str) -> dict[str, Any]:
    """A spec with the values of a file over it, but for those that the target names as lost."""
    found = dict(tree)
    for key, value in said.items():
        inner = found.get(key, {})
        if isinstance(value, dict) and isinstance(inner, dict) and not (key == "lr_scheduler" and key in lost):
            found[key] = joined(value, inner, lost)
        elif ("zero.stage" if key == "stage" else key) not in lost:
            found[key] = value
    return found


def values(plan: Plan) -> Iterator[tuple[str, Any]]:
    spec, shape = plan.spec, plan.spec.model.shape
    window = shape.attention.sliding_window
    if window is not None and window >= spec.training.sequence_length:
        window = None  # it hides nothing
    attention = dataclasses.replace(shape.attention, sliding_window=window)
    yield "model", dataclasses.replace(shape, model_type="", attention=attention, stated=())
    yield "zero.stage", spec.zero_stage if spec.parallelism.dp * spec.parallelism.cp > 1 else 0
    yield "parallelism.order", effective_order(spec.parallelism)
    for section in (spec.parallelism, spec.training):
        for field in dataclasses.fields(section):
            if field.name != "order":
                yield field.name, getattr(section, field.name)


def others(tree: dict[str, Any], plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """The files that are written for a plan, each with what does not come back."""
    for target, names in FILES.items():
        lost = losses(plan, (target,))[target]
        if any(one.fatal for one in lost):
            continue
        words = " ".join(f"{one.what} {one.why} {one.instead}" for one in lost)
        with tempfile.TemporaryDirectory() as folder:
            for name, text in render(plan, (target,)).items():
                if "/" not in name:
                    (Path(folder) / name).write_text(text, encoding="utf-8")
            for name in names:
                result = imported(Path(folder) / name)
                outer = tree | ({"model": {}} if "model" in result.spec else {})
                again = compiled(joined(result.spec, outer, words))
                assert again is not None, (name, result.spec)
                wrong = [
                    f"{key}: {one} came back as {other}"
                    for (key, one), (_, other) in zip(values(plan), values(again), strict=True)
                    if one != other
                ]
                yield name, wrong + [one.option for one in result.of(Outcome.LOST) if one.changes]


def drawn(count: int, number: int | None = None) -> Iterator[tuple[dict[str, Any], Plan]]:
    found: list[tuple[dict[str, Any], Plan]] = []

    @settings(
        max_examples=2 * count,
        deadline=None,
        derandomize=number is None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(specs())
    def draw(tree: dict[str, Any]) -> None:
        plan = compiled(tree) if len(found) < count else None
        if plan is not None:
            found.append((tree, plan))

    draw()
    yield from found


def test_every_target_is_imported_or_starts_a_plan() -> None:
    assert {*FILES, *LAUNCHERS} == set(BUILT_IN)


def test_what_is_exported_comes_back_from_every_file() -> None:
    count = 0
    for tree, plan in drawn(4):
        for name, wrong in others(tree, plan):
            assert not wrong, name
            count += 1
    assert count > 12


if __name__ == "__main__":
    tally: collections.Counter[str] = collections.Counter()
    for tree, plan in drawn(*map(int, sys.argv[1:3])):
        tally["specs"] += 1
        for name, wrong in others(tree, plan):
            tally[f"{name}: {'something does not come back' if wrong else 'the same'}"] += 1
            for line in wrong:
                sys.stdout.write(f"{name}: {line}\n")
    sys.stdout.writelines(f"{count:4} {line}\n" for line, count in sorted(tally.items()))

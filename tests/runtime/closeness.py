"""The one comparison of computed numbers: how far apart two results are, and how far apart they may be.

A test hands over what it found, the reference, and how the reference is computed again with other last bits:

    from closeness import assert_close, nudge

    def train(seed: int | None = None) -> dict[str, Any]:
        model = build()
        nudge(model, seed)  # weights × (1 ± 1e-7); None leaves them
        ...
        return {"losses": losses, "norms": norms, "parameters": parameters}

    assert_close(found, train(), rerun=train)

Both results are a number, a tensor, or lists and dicts of them with the same keys and lengths. `rerun` is only called
where a number uses up a ninth of the limit without it. Names in its result are those of the reference; it may hold
more.

The limit of a number is the largest of two, relative to the norm of the reference (of at least `least`):

- `limit`: what another order of sums costs where nothing magnifies it; `ROUNDING` by dtype unless the test says more;
- `TIMES` what a change of `LAST_BIT` of each weight does to the same number of the reference, the most of `SEEDS`, but
  never more than `CEILING`: a scale that is wrong by a hundredth must be seen everywhere.

Results must stay within a third (`1 / ROOM`) of the limit. Between a third and the limit the test fails as *thin*: it
would fail on a processor that rounds otherwise. Look whether the case magnifies rounding (an edge of a router, Adam's
epsilon, weights that are too large) and choose a smoother one, or say `rerun`.

`assert_apart` is the opposite: two results differ by at least three times what would pass for equal, as of a test that
shows that it can fail.

With `--margins FOLDER`, pytest writes the worst number of every comparison to files there, with the instruction set and
the number of threads; `.ci/margins.py --read FOLDER …` makes `docs/numeric_margins.md` of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LAST_BIT = 1e-7
"""Of a weight in fp32, relative."""
SEEDS = (1, 2, 3)
TIMES = 10.0
"""A run on ranks rounds every activation and gradient otherwise, a nudged one the weights alone."""
CEILING = 1e-3
ROOM = 3.0
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""The contract of the README in fp32."""
FOLDER = "TEST_MARGINS"
"""The environment variable for the folder of records: ranks inherit it."""


class Margin(NamedTuple):
    """How much of its limit one number uses."""

    what: str
    difference: float
    """Relative to the norm of the reference."""
    limit: float
    noise: float | None
    """What a change of the last bits of the weights does to the reference; None where it was not asked for."""

    @property
    def ratio(self) -> float:
        return self.difference / self.limit if self.difference == self.difference else float("inf")

    @property
    def text(self) -> str:
        noise = "" if self.noise is None else f"; other last bits of the weights move the reference by {self.noise:.1e}"
        return f"{self.what or 'the number'}: relative difference {self.difference:.2e}, limit {self.limit:.1e}{noise}"


def nudge(model: nn.Module, seed: int | None) -> None:
    """Changes each weight of a model by about its last bit in fp32, up or down; `None` changes nothing."""
    if seed is None:
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.data *= 1 + LAST_BIT * signs


class Noise:
    """What a change of the last bits of the weights does to a result of `rerun(seed)`; computed when it is asked for.

    Comparisons with the same reference can share one.
    """

    def __init__(self, rerun: Callable[[int | None], Any]) -> None:
        self._rerun = rerun

    @cached_property
    def _moved(self) -> dict[str, float]:
        """By how much, absolute: of a list of numbers the most of all."""
        reference, found = dict(_leaves(self._rerun(None))), dict[str, float]()
        for seed in SEEDS:
            for name, value in _leaves(self._rerun(seed)):
                group, distance = _list_of(name), _distance(value, reference[name])
                found[group] = max(found.get(group, 0.0), distance)
        return found

    def of(self, name: str) -> float:
        """Of a number, by its name in the result."""
        return self._moved[_list_of(name)]


def margins(
    found: Any,
    expected: Any,
    *,
    rerun: Callable[[int | None], Any] | Noise | None = None,
    limit: float | None = None,
    least: float = 0.0,
) -> list[Margin]:
    """How far apart each number is.

    Args:
        found: The result to judge.
        expected: The reference, with the same keys, lengths and shapes.
        rerun: Computes the reference again, nudged by a seed; its names are those of `expected`.
        limit: Relative difference that is allowed whatever the noise; by dtype without.
        least: A norm; what is smaller is judged as if it had this one. Of parameters the size of an update, of
            gradients a share of the largest.

    Raises:
        AssertionError: The two do not have the same keys, lengths or shapes.
    """
    noise = Noise(rerun) if callable(rerun) else rerun
    ours, theirs = dict(_leaves(found)), dict(_leaves(expected))
    assert ours.keys() == theirs.keys(), f"only in one of both: {sorted(ours.keys() ^ theirs.keys())}"
    result = []
    for name, reference in theirs.items():
        value = ours[name]
        shapes = [tuple(one.shape) if isinstance(one, Tensor) else () for one in (value, reference)]
        assert shapes[0] == shapes[1], f"{name}: {shapes[0]} ≠ {shapes[1]}"
        allowed = _rounding(reference) if limit is None else limit
        distance = _distance(value, reference)
        scale = max(_norm(reference), least)
        difference = distance / scale if scale else float("inf") if distance else 0.0
        moved = None
        if noise is not None and not difference <= allowed / ROOM**2:
            moved = noise.of(name) / scale if scale else 0.0
            allowed = max(allowed, min(TIMES * moved, CEILING))
        result.append(Margin(name, difference, allowed, moved))
    return result


def assert_close(found: Any, expected: Any, *, about: str = "", **options: Any) -> None:
    """Fails where a number is further from its reference than the limit, or within a third of it; see `margins`.

    Args:
        found: The result to judge.
        expected: The reference.
        about: Which of several results of the test; in front of the number's name.
        options: As `margins` takes them.
    """
    judge(margins(found, expected, **options), about)


def assert_within(difference: float, limit: float, about: str = "") -> None:
    """Judges a relative difference that was computed elsewhere, as on a rank; `assert_close` where it was not."""
    judge([Margin(about, float(difference), limit, None)])


def judge(found: Sequence[Margin], about: str = "") -> None:
    """Records the worst of some margins, and fails where it is a difference or thin."""
    worst = max(found, key=lambda one: one.ratio)
    worst = worst._replace(what=" ".join(filter(None, (about, worst.what))))
    record(worst)
    assert worst.ratio <= 1, f"{worst.text}: different"
    assert worst.ratio <= 1 / ROOM, (
        f"{worst.text}: a thin margin, {worst.ratio:.2f} of the limit; another processor rounds otherwise"
    )


def largest(found: Sequence[Margin], what: str) -> float:
    """The largest difference of the numbers whose names begin so, as for a table."""
    return max(one.difference for one in found if one.what.startswith(what))


def assert_apart(found: Any, other: Any, least: float) -> None:
    """Fails unless a number of `found` is at least three times `least` (relative) from that of `other`."""
    worst = max(margins(found, other, limit=least), key=lambda one: one.difference)
    assert worst.difference >= ROOM * least, f"{worst.text}: not apart"


def variant() -> str:
    """The instruction set of this process and its number of threads."""
    threads = os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()
    return f"{torch.backends.cpu.get_cpu_capability().lower()}-{threads}"


def record(margin: Margin) -> None:
    """Adds a line to this process's file of the folder of records, where there is one."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    # xdist adds the group of a test to its name.
    test = re.sub(r"@[^@\[\]]*$", "", os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    line = {"test": test, "variant": variant(), **margin._asdict()}
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{name}{' ' if name else ''}{key}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from _leaves(one, f"{name}[{place}]")
    else:
        yield name, float(value)


def _list_of(name: str) -> str:
    """The name of the list that a number is of."""
    return re.sub(r"\[\d+\]$", "", name)


def _norm(value: Tensor | float) -> float:
    return float(value.double().norm()) if isinstance(value, Tensor) else abs(value)


def _distance(one: Tensor | float, other: Tensor | float) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _norm(one.double() - other.double())
    return abs(float(one) - float(other))


def _rounding(value: Tensor | float) -> float:
    """Of numbers that tests hold as Python's: they are those of a run in fp32."""
    dtype = value.dtype if isinstance(value, Tensor) else torch.float32
    assert dtype in ROUNDING, f"say the limit of {dtype}"
    return ROUNDING[dtype]

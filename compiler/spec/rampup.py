"""How the global batch grows at the beginning of a run: `training.rampup_batch_size`.

The batch of a step follows from the samples that the steps before it took, as in Megatron-LM
(core/num_microbatches_calculator.py, `RampupBatchsizeNumMicroBatchesCalculator`): its division, whose result is a
float, is repeated here, so that both agree where that rounds.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

MOST_INCREMENTS = 10_000


@dataclass(frozen=True, slots=True)
class RampupBatchSize:
    """From `start` sequences a step in equal shares of `samples` samples, by `increment` each, to the global batch."""

    start: int
    increment: int
    samples: int

    def fits(self, full: int) -> bool:
        """Whether `start` is below the global batch size, which lies at most `MOST_INCREMENTS` increments above it."""
        increments, rest = divmod(full - self.start, self.increment) if self.increment > 0 else (0, 0)
        return self.start > 0 and self.samples > 0 and not rest and 0 < increments <= MOST_INCREMENTS

    def batch(self, consumed: int, full: int) -> int:
        """Sequences of the step before which so many samples were taken; `full` is the global batch size."""
        if consumed > self.samples:
            return full
        share = self.samples / ((full - self.start) // self.increment)
        return self.start + int(consumed / share) * self.increment

    def samples_after(self, steps: int, full: int, consumed: int = 0) -> int:
        """Samples that have been taken when so many steps have followed those that took `consumed`."""
        sizes = self.sizes(full, consumed)
        before, taken, batch = sizes[bisect.bisect_right(sizes, steps, key=lambda one: one[0]) - 1]
        return taken + (steps - before) * batch

    def steps_of(self, samples: int, full: int) -> int | None:
        """How many steps take exactly so many samples; None where a step ends beyond them."""
        steps = self.steps_until(samples, full)
        return steps if self.samples_after(steps, full) == samples else None

    def steps_until(self, samples: int, full: int) -> int:
        """After how many steps so many samples or more have been taken."""
        sizes = self.sizes(full)
        before, taken, batch = sizes[bisect.bisect_right(sizes, samples, key=lambda one: one[1]) - 1]
        return before - (taken - samples) // batch

    def sizes(self, full: int, consumed: int = 0) -> tuple[tuple[int, int, int], ...]:
        """Each batch size in its turn: the steps made and the samples taken before its first step, and its sequences.

        The last is `full`. Steps are counted behind those that took `consumed` samples.
        """
        return _sizes(self, full, consumed)


@functools.lru_cache(maxsize=64)
def _sizes(ramp: RampupBatchSize, full: int, consumed: int) -> tuple[tuple[int, int, int], ...]:
    steps, found = 0, [(0, consumed, ramp.batch(consumed, full))]
    while (batch := found[-1][2]) != full:
        # The first step of another size. A step that begins behind `samples` has the full one.
        most = (ramp.samples - consumed) // batch + 1
        turns = bisect.bisect_left(
            range(most), True, lo=1, key=lambda count: ramp.batch(consumed + count * batch, full) != batch
        )
        steps, consumed = steps + turns, consumed + turns * batch
        found.append((steps, consumed, ramp.batch(consumed, full)))
    return tuple(found)

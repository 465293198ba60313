"""Whether `parcompile init` takes what `parcompile search` finds: 40 models on clusters, at lengths of a sequence.

    python .ci/first_layouts.py            # every combination; exits with 1 where init is slower or refuses
    python .ci/first_layouts.py --only 3   # those with the fewest ranks

init looks at fewer layouts (tp on a node, no short pieces of a sequence, micro-batches up to 8). For each combination
its first offer is compared with the best of a search over everything.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcompile.cost.step import timing
from parcompile.searching.first import first_spec
from parcompile.searching.ranking import search
from parcompile.searching.space import open_space
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of

SLOWER = 1.1
"""Times the best of the search that the first offer of init may take."""
SMALL = (("llama-3.2-1b", "llama-3-8b", "qwen3-8b", "gemma-2b"), (1, 2), (4096, 32768, 131072))
LARGE = (("llama-3-70b", "mixtral-8x7b"), (4, 8, 16, 32), (4096, 131072))
"""Models, nodes of 8 H100, tokens of a sequence."""
COMBINATIONS = [one for models, nodes, lengths in (SMALL, LARGE) for one in itertools.product(models, nodes, lengths)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a step as init and as the search have it; None where nothing fits."""

    model: str
    nodes: int
    length: int
    first: float | None
    best: float | None
    processor_seconds: float

    @property
    def is_fine(self) -> bool:
        """Whether init refuses only what search refuses, and is about as fast."""
        if self.first is None or self.best is None:
            return self.first is None and self.best is None
        return self.first <= SLOWER * self.best


def compared(model: str, nodes: int, length: int) -> Outcome:
    """Init beside search."""
    began = time.process_time()
    cluster = {"nodes": nodes, "gpus_per_node": 8, "accelerator": "h100-sxm"}
    found = first_spec(model, {"preset": model}, cluster, length, Path())
    first = None
    if found.spec is not None:
        first = timing(workload_of(Resolution(found.spec, (), Path()).spec())).step.seconds
    batch = found.spec["training"]["global_batch_size"] if found.spec is not None else nodes * 8
    tree: dict[str, Any] = {
        "version": 1,
        "model": {"preset": model},
        "cluster": cluster,
        "training": {"sequence_length": length, "global_batch_size": batch, "precision": "bf16"},
    }
    best = search(open_space(Resolution(tree), executable=True)).best
    return Outcome(model, nodes, length, first, None if best is None else best.seconds, time.process_time() - began)


def outcomes(count: int | None = None) -> Iterator[Outcome]:
    """The first `count` combinations, by ranks and length; all of them without one."""
    for one in sorted(COMBINATIONS, key=lambda one: (one[1], one[2]))[:count]:
        yield compared(*one)


def main() -> None:
    """The command of this module."""
    parser = argparse.ArgumentParser(description="Compare the first offer of init with the best of search.")
    parser.add_argument("--only", type=int, help="so many combinations, those with the fewest ranks")
    fine = True
    for one in outcomes(parser.parse_args().only):
        fine = fine and one.is_fine
        shown = ["nothing fits" if seconds is None else f"{seconds:.2f} s" for seconds in (one.first, one.best)]
        mark = "" if one.is_fine else "  WRONG"
        said = f"{one.model:<14} {one.nodes:>3} x 8  {one.length:>7}  init {shown[0]:>12}  search {shown[1]:>12}{mark}"
        print(f"{said}  ({one.processor_seconds:.1f} s of processor)", flush=True)
    sys.exit(not fine)


if __name__ == "__main__":
    main()

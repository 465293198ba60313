"""Proves that model types work: each in tp 2, cp 2, tp 2 × cp 2 with sequence parallelism and pp 2 beside one process.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/models.py [FAMILY ...]
    python benchmarks/models.py --texts

Prints the largest relative difference of a loss, a gradient norm and a parameter; the exit code is the number of types
and layouts that fail. Most of it is in tests/runtime/test_families.py too.

With `--texts`: the logits of every multimodal type whose text part is trained, given text alone, beside those of a
causal language model with the weights of its text part (a sample: tests/runtime/test_text_parts.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from parcompile.model.catalogue import RUNTIME_FAMILIES, TEXT_PARTS
from parcompile.model.families import FAMILIES

PROVED = ("tp2", "cp2", "tp2 × cp2, sequence parallel", "pp2")


def prove(given: list[str]) -> int:
    """Runs each family in each layout; the number of those that fail."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))
    from closeness import largest
    from family_runs import family_plan, train_injected, train_plain
    from ranks import run_ranks
    from test_families import LAYOUTS
    from training_runs import compared

    originals = {family: cache(partial(_trained, train_plain, family_plan(family, 1, {}))) for family in given}
    failed = 0
    for layout in PROVED:
        world_size, parallelism, _ = LAYOUTS[layout]
        families = [name for name in given if not refused(name) & parallelism.keys()]
        for name in sorted(set(given) - set(families)):
            print(f"{name:20} {layout:30} refused", flush=True)
        if not families:
            continue
        plans = [family_plan(family, world_size, parallelism) for family in families]
        ranks = run_ranks(world_size, train_injected, plans, timeout=600)
        for place, family in enumerate(families):
            own = [rank[place] for rank in ranks]
            if "error" in own[0]:
                text, right = own[0]["error"], False
            else:
                found = compared(plans[place], own, originals[family])
                text = " ".join(f"{largest(found, what):.1e}" for what in ("losses", "norms", "parameters"))
                right = all(one.ratio <= 1 for one in found)
            failed += not right
            print(f"{family:20} {layout:30} {text}", flush=True)
    return failed


def _trained(train: Callable[..., dict[str, Any]], plan: Any, seed: int | None) -> dict[str, Any]:
    return train(plan, seed=seed)


def refused(name: str) -> set[str]:
    """The axes that a family, or that of a variant, does not run over."""
    from families import VARIANTS

    return set(FAMILIES[VARIANTS.get(name, (name,))[0]].refused_axes)


def prove_texts() -> int:
    """How many multimodal types compute something else than their text part."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))
    from test_text_parts import difference

    failed = 0
    for name in sorted(TEXT_PARTS):
        found = difference(name)
        failed += not found < 1e-6
        print(f"{name:24} {found:.1e}", flush=True)
    return failed


def main() -> None:
    """Proves the types that are named, or all."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--texts"]:
        sys.exit(prove_texts())
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))
    from families import VARIANTS

    sys.exit(prove(sys.argv[1:] or [*RUNTIME_FAMILIES, *VARIANTS]))


if __name__ == "__main__":
    main()

"""Trains mixtures of experts in every combination of the axes, on live ranks and in one process, as tables.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/expert_matrix.py [--first 0] [--count 100]
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/expert_matrix.py --routers [--first 0] [--count 100]
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/expert_matrix.py --resume [--first 0] [--count 100]

The first prints how far each layout is from one process, the second how far with the losses of routers, the third how
far a run is from the uninterrupted one when it goes on in another layout, for all ordered pairs of layouts. The exit
code is 1 when a loss, a gradient norm or (in the first two) a parameter is further than 1e-5 (relative) and than a
change of the last bits of the weights explains (`tests/runtime/closeness.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))


def main() -> int:
    """One row for each layout, or for each layout that runs go on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="from every layout to every other")
    parser.add_argument("--routers", action="store_true", help="with losses of routers")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    chosen = slice(options.first, options.first + options.count)
    failed = _resume(chosen) if options.resume else _train(chosen, routers=options.routers)
    print(f"\n{failed} further than their limits")
    return int(failed > 0)


def _train(chosen: slice, *, routers: bool) -> int:
    from closeness import largest
    from expert_runs import compare, families, further, subsets
    from router_runs import compare as compare_routers
    from router_runs import drawn

    print("| model | layout | loss | norm | parameters |\n|---|---|---|---|---|")
    failed = 0
    for case in (drawn() if routers else [*subsets(), *further(), *families()])[chosen]:
        found = (compare_routers if routers else compare)(case)
        failed += max(one.ratio for one in found) > 1
        numbers = " | ".join(f"{largest(found, what):.1e}" for what in ("losses", "norms", "parameters"))
        print(f"| {case.model} | {case.text} | {numbers} |", flush=True)
    return failed


def _resume(chosen: slice) -> int:
    from expert_runs import RESUMED, resumed

    names = [case.text for case in RESUMED]
    print(f"| from \\ to | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    failed = 0
    for case in RESUMED[chosen]:
        found = resumed(case)
        failed += sum(one.ratio > 1 for one in found)
        print(f"| {case.text} | {' | '.join(f'{one.difference:.1e}' for one in found)} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

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

import functools
import sys

from matrix import heads, parsed, row, table


def main() -> int:
    """One row for each layout, or for each layout that runs go on from."""
    options = parsed(
        __doc__,
        resume=(False, "from every layout to every other"),
        routers=(False, "with losses of routers"),
        first=0,
        count=100,
    )
    chosen = slice(options.first, options.first + options.count)
    return _resume(chosen) if options.resume else _train(chosen, routers=options.routers)


def _train(chosen: slice, *, routers: bool) -> int:
    from expert_runs import compare, families, further, subsets
    from router_runs import compare as compare_routers
    from router_runs import drawn

    compared = compare_routers if routers else compare
    cases = (drawn() if routers else [*subsets(), *further(), *families()])[chosen]
    runs = [(f"{case.model} | {case.text}", functools.partial(compared, case)) for case in cases]
    return table(("model", "layout", "loss", "norm", "parameters"), runs)


def _resume(chosen: slice) -> int:
    from expert_runs import RESUMED, resumed

    heads("from \\ to", *(case.text for case in RESUMED))
    failed = 0
    for case in RESUMED[chosen]:
        found = resumed(case)
        failed += sum(one.ratio > 1 for one in found)
        row(case.text, *(f"{one.difference:.1e}" for one in found))
    print(f"\n{failed} further than their limits")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Trains drawn pipelines, or ZeRO stages, on live ranks and in one process, and prints how far apart they are.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/pipeline_matrix.py [--first 0]
        [--count 100] [--ranks 8]
        [--draws pipelines|stages|offload|offload_deepspeed|offload_activations|gather|linear_loss|tiled_mlp|overlap|
                 parts]

With offload_deepspeed DeepSpeedCPUAdam steps on the host, which is compiled the first time: a minute and a half.

The exit code is 1 when a loss, a gradient norm or a parameter is further from one process than 1e-5 (relative) and than
a change of the last bits of the weights explains (`tests/runtime/closeness.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

FURTHER: dict[str, dict[str, Any]] = {
    "offload": {"on_host": True},
    "offload_deepspeed": {"on_host": True, "implementation": "deepspeed"},
    "offload_activations": {"switch": "activation_offloading"},
    "gather": {"switch": "gather_inputs_again"},
    "linear_loss": {"switch": "linear_cross_entropy"},
    "tiled_mlp": {"switch": "tiled_mlp"},
    "overlap": {"overlaps": True},
    "parts": {"in_parts": True},
}
"""What plans of the stages have beside."""


def main() -> int:
    """One row for each drawn plan."""
    from importlib import import_module

    from closeness import largest

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8, help="of the largest plan")
    parser.add_argument("--draws", choices=("pipelines", "stages", *FURTHER), default="pipelines")
    options = parser.parse_args()
    drawn = import_module("drawn_pipelines" if options.draws == "pipelines" else "drawn_stages")
    further = FURTHER.get(options.draws, {})
    print("| plan | loss | norm | parameters |\n|---|---|---|---|")
    failed = 0
    for number in range(options.first, options.first + options.count):
        plan, text = drawn.draw(number, options.ranks, **further)
        try:
            found = drawn.compare(plan)
        except Exception as error:  # a rank's, whose message says what failed
            print(f"| {text} | {str(error).strip().splitlines()[-1][:300]} |", flush=True)
            failed += 1
            continue
        failed += max(one.ratio for one in found) > 1
        numbers = " | ".join(f"{largest(found, what):.1e}" for what in ("losses", "norms", "parameters"))
        print(f"| {text} | {numbers} |", flush=True)
    print(f"\n{options.count - failed} of {options.count} within their limits")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

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

import functools
import sys
from importlib import import_module
from typing import Any

from matrix import parsed, table

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
    draws = ["pipelines", "stages", *FURTHER]
    options = parsed(__doc__, first=0, count=100, ranks=(8, "of the largest plan"), draws=("pipelines", None, draws))
    drawn = import_module("drawn_pipelines" if options.draws == "pipelines" else "drawn_stages")
    numbers = range(options.first, options.first + options.count)
    plans = [drawn.draw(number, options.ranks, **FURTHER.get(options.draws, {})) for number in numbers]
    runs = [(text, functools.partial(drawn.compare, plan)) for plan, text in plans]
    return table(("plan", "loss", "norm", "parameters"), runs)


if __name__ == "__main__":
    sys.exit(main())

"""Gradients that each tensor-parallel rank has a part of are summed once in a step, in one message.

Such are those of norms with sequence parallelism, and of small weights that ranks use on their own heads. DeepSpeed's
ZeRO-1 leaves gradients where they add up until the step ends; then they are summed, before anything is reduced. Where
DeepSpeed takes each gradient as it comes (stage 2, `overlap_comm`, accumulation in another type), backward sums each.
"""

from __future__ import annotations

from typing import Any

from parcompile.runtime.deepspeed_patches.engine import before_reduction, keeps_gradients
from parcompile.runtime.deepspeed_patches.optimizer_state import accumulated_gradient
from parcompile.runtime.groups import Mesh
from parcompile.runtime.tensor_parallel.partial import leave_partial, sum_together


def sum_once(engine: Any, mesh: Mesh) -> None:
    """Lets an engine sum partial gradients at the end of a step, if it keeps them until then."""
    group = mesh.parallel_group("tp")
    if group is None or not keeps_gradients(engine):
        return
    parameters = leave_partial(engine.module.parameters())
    if parameters:
        optimizer = engine.optimizer
        before_reduction(
            engine, lambda: sum_together([accumulated_gradient(optimizer, one) for one in parameters], group)
        )

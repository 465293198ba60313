"""Executes a compiled plan inside a DeepSpeed engine. Needs the extra `[runtime]` (torch, deepspeed).

>>> engine, optimizer, loader, scheduler = initialize(plan="out", training_data=samples)  # doctest: +SKIP
>>> for batch in loader:  # doctest: +SKIP
...     loss = engine(**batch).loss
...     engine.backward(loss)
...     engine.step()
"""

from parcompile.plan import Plan, PlanError, load_plan
from parcompile.runtime.model.pretrained import build_model

from .data import PackedPlanLoader, PlanLoader, split_batch
from .engine import decay_groups, initialize
from .engine.loop import Prompts, evaluate, evaluate_domains
from .engine.metering import StepMeter
from .errors import RunError
from .groups import Mesh, join, leave
from .inject import adapter_state, describe
from .inject.injection import load_pretrained
from .inject.own_engine import OwnRing, register_ring
from .labels import shift_labels
from .liveness import Stopped, StopSignals, report_errors
from .loss import ParallelCausalLoss, reduce_loss
from .preflight.live import live_check

__all__ = [
    "Mesh",
    "OwnRing",
    "PackedPlanLoader",
    "ParallelCausalLoss",
    "Plan",
    "PlanError",
    "PlanLoader",
    "Prompts",
    "RunError",
    "StepMeter",
    "StopSignals",
    "Stopped",
    "adapter_state",
    "build_model",
    "decay_groups",
    "describe",
    "evaluate",
    "evaluate_domains",
    "initialize",
    "join",
    "leave",
    "live_check",
    "load_plan",
    "load_pretrained",
    "reduce_loss",
    "register_ring",
    "report_errors",
    "shift_labels",
    "split_batch",
]

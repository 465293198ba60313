"""The spec: its values after resolution, and how each of them is decided."""

from .rampup import RampupBatchSize
from .values import (
    OPTIMIZER_KEYS,
    Cluster,
    LrScheduler,
    Model,
    Offload,
    Optimizer,
    Origin,
    Parallelism,
    Precision,
    Provenance,
    Router,
    Spec,
    Training,
    learning_rate,
    weight_decay_of,
)

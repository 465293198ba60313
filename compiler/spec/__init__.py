"""The spec: its values after resolution, and how each of them is decided."""

from .values import (
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
)

__all__ = [
    "Cluster",
    "LrScheduler",
    "Model",
    "Offload",
    "Optimizer",
    "Origin",
    "Parallelism",
    "Precision",
    "Provenance",
    "Router",
    "Spec",
    "Training",
    "learning_rate",
]

"""What `#SBATCH` lines say of the variables that Slurm sets."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .values import Piece, Value

_SLURM = re.compile(
    r"^#SBATCH[ \t]+(?:--(nodes|ntasks-per-node|gpus-per-node|gpus-per-task|ntasks|gres)[= \t]+|-(N|n)[ \t]*)(\S+)",
    re.M,
)
_SLURM_NAMES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def variables(text: str) -> Iterable[tuple[str, Value]]:
    """What Slurm sets by the directives at the head of a script."""
    for match in _SLURM.finditer(text):
        value = match[3]
        if value.isdigit():
            for name in _SLURM_NAMES.get(match[1] or match[2], ()):
                yield name, (Piece(value, match.start(3)),)

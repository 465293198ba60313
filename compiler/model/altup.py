"""The parameters of alternating updates and of learned residuals (Gemma 3n), which ranks use on their own tokens."""

from __future__ import annotations

from .rows import Rows
from .shape import AltUp
from .table import Parameter


def rows_of_altup(rows: Rows, altup: AltUp, hidden: int) -> None:
    """Those of a layer: what predicts and corrects its streams, and the residual of low rank."""

    def shared(name: str, *shape: int) -> None:
        rows.add(name, shape, sequence_parallel=True)

    streams = altup.num_streams
    shared("altup.correct_output_scale", hidden)
    shared("altup.correction_coefs.weight", streams, streams)
    shared("altup.prediction_coefs.weight", streams**2, streams)
    shared("altup.modality_router.weight", streams, hidden)
    shared("altup.router_norm.weight", hidden)
    shared("laurel.linear_left.weight", altup.laurel_rank, hidden)
    shared("laurel.linear_right.weight", hidden, altup.laurel_rank)
    shared("laurel.post_laurel_norm.weight", hidden)


def projections_of_altup(base: str, name: str, altup: AltUp, hidden: int) -> list[Parameter]:
    """Those that make all streams of one, or of each stream what is added up."""
    return [
        Parameter(f"{base}.{name}.{number}.weight", (hidden, hidden), sequence_parallel=True)
        for number in range(altup.num_streams - 1)
    ]

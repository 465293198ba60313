"""Where the layers that carry a state find the pieces of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import current
from parcompile.runtime.recurrent import Chain, Pieces


@dataclass(frozen=True, slots=True)
class StatePlace:
    """How the layers of a model find the pieces of a micro-batch."""

    chain: Chain | None
    layout: CpLayout
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: Mesh) -> StatePlace:
        """As the plan says."""
        group, layout = mesh.parallel_group("cp"), mesh.plan.spec.parallelism.cp_layout
        if group is None:
            return cls(None, CpLayout.CONTIGUOUS, 1, 0)
        return cls(Chain.of(layout, group), layout, mesh.size("cp"), mesh.index("cp"))

    @property
    def is_alone(self) -> bool:
        """Whether each rank has all tokens now, as for generation."""
        return current().alone

    def pieces(self, rows: int, length: int) -> Pieces:
        """Those of the micro-batch, of so many rows and local tokens."""
        packing = current().packing
        if packing is not None:
            return Pieces.of_packing(packing, self.rank)
        return Pieces.of_sequence(rows, length, current().documents, self.layout, self.size, self.rank)

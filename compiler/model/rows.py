"""Collects the rows of a parameter table in the order in which Hugging Face registers parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .family import Norm
from .table import Layers, Parameter, Split


@dataclass
class Rows:
    """Collects the rows of a table; the prefix of the layers is written once."""

    prefix: str
    layers: Layers
    transposed: bool = False
    """Weights of linears are stored as [in, out]."""
    rows: list[Parameter] = field(default_factory=list)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        split: Split | None = None,
        *,
        expert_dim: int | None = None,
        layers: Layers | None = None,
        sequence_parallel: bool = False,
        partial: bool = False,
    ) -> None:
        """One parameter; the arguments are the fields of `Parameter`."""
        self.rows.append(
            Parameter(self.prefix + name, shape, split, expert_dim, layers or self.layers, sequence_parallel, partial)
        )

    def linear(
        self,
        name: str,
        out_size: int,
        in_size: int,
        split: Split | None,
        *,
        bias: bool = False,
        layers: Layers | None = None,
        inside: bool = False,
    ) -> None:
        """A linear's weight [out, in] and its bias; the bias of a row-parallel linear (split along dim 1) is whole.

        `inside` a block of experts the first rank adds it: the gradient of the others is zero.
        """
        stored = split
        if self.transposed and split is not None:
            stored = Split(1 - split.dim, split.parts)
        self.add(
            f"{name}.weight", (in_size, out_size) if self.transposed else (out_size, in_size), stored, layers=layers
        )
        if bias:
            cut = split if split is not None and split.dim == 0 else None
            whole = cut is None
            self.add(
                f"{name}.bias",
                (out_size,),
                cut,
                layers=layers,
                sequence_parallel=whole and not inside,
                partial=whole and inside,
            )

    def of(self, layers: Layers) -> Rows:
        """The same collection, for rows of other layers."""
        return replace(self, layers=layers)

    def norm(self, name: str, width: int, holds: Norm = Norm.WEIGHT) -> None:
        """A norm of the residual stream."""
        for kind in kinds(holds):
            self.add(f"{name}.{kind}", (width,), sequence_parallel=True)


def kinds(norm: Norm) -> tuple[str, ...]:
    """The parameters of a norm."""
    return {Norm.WEIGHT: ("weight",), Norm.WEIGHT_AND_BIAS: ("weight", "bias"), Norm.NOTHING: ()}[norm]

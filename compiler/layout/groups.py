"""The process groups of a plan, by name.

| group | ranks differ in | used for |
|---|---|---|
| tp, cp, dp, pp | that axis | layers, ring, batches, stages |
| dp-cp | dp and cp | gradients and ZeRO: DeepSpeed's "sequence data parallel" group |
| tp-pp | tp and pp | one whole copy of the model: DeepSpeed's "model parallel" group |
| cp-inner, cp-outer | cp, within one level | USP: heads for tokens, and the ring across |
| kv-replica | tp, inside one kv head | gradients of kv heads that several ranks hold |
| tp-cp, tp-dp, tp-dp-cp | those axes | Megatron-Core: amax reduction, activations, embeddings |
| embedding, position-embedding | pp, first and last stage, first stage | tied embeddings, learned positions |
| expert-tp, ep, expert-dp, expert-tp-ep, expert-tp-ep-pp | those axes of the expert grid | routed experts |

The runtime creates the groups of `Groups.names`; all others are computed when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parcompile.layout.grid import Axis

from .grid import Grid
from .group_families import AxisGroups, EmbeddingGroups, GroupFamily, hierarchical_cp_families, kv_replica_family

GROUP_AXES: dict[str, tuple[Axis, ...]] = {
    Axis.TP: (Axis.TP,),
    Axis.CP: (Axis.CP,),
    Axis.DP: (Axis.DP,),
    Axis.PP: (Axis.PP,),
    "dp-cp": (Axis.CP, Axis.DP),
    "tp-pp": (Axis.TP, Axis.PP),
}
"""Every group that the runtime creates as a slice of the grid, and the axes along which its members differ."""

KV_REPLICA = "kv-replica"

CP_LEVELS = ("cp-inner", "cp-outer")
"""The groups of each level of a context-parallel group, as Megatron-Core's hierarchical ones."""

MEGATRON_AXES: dict[str, tuple[Axis, ...]] = {
    "tp-cp": (Axis.TP, Axis.CP),
    "tp-dp": (Axis.TP, Axis.DP),
    "tp-dp-cp": (Axis.TP, Axis.CP, Axis.DP),
}
"""Further slices of the dense grid that Megatron-Core makes groups of."""

EMBEDDING = "embedding"
EMBEDDING_GROUPS = {EMBEDDING: True, "position-embedding": False}
"""Groups of the ends of the pipeline, and whether the last stage belongs to them."""

EXPERT_DP = "expert-dp"
"""The ranks that hold the same experts and read other tokens."""

EXPERT_AXES: dict[str, tuple[Axis, ...]] = {
    "expert-tp": (Axis.TP,),
    Axis.EP: (Axis.EP,),
    EXPERT_DP: (Axis.DP,),
    "expert-tp-ep": (Axis.TP, Axis.EP),
    "expert-tp-ep-pp": (Axis.TP, Axis.EP, Axis.PP),
}
"""Slices of the expert grid."""


def expert_grid(dense: Grid, ep: int, expert_tp: int | None = None) -> Grid:
    """The grid on which routed experts are laid: the same ranks in the same order, without cp.

    Experts take ep (and their data parallelism) out of the ranks that tp and pp leave: expert-dp = world / (expert-tp ·
    ep · pp), as Megatron-Core's second `RankGenerator`. `expert_tp` is tp unless it is given.

    Raises:
        ValueError: the sizes do not divide the world.
    """
    tp, pp, world = dense.size((Axis.TP,)) if expert_tp is None else expert_tp, dense.size((Axis.PP,)), dense.world_size
    if world % (tp * ep * pp):
        raise ValueError(
            f"expert-tp {tp} · ep {ep} · pp {pp} = {tp * ep * pp} does not divide the world of {world} ranks"
        )
    sizes = {Axis.TP: tp, Axis.EP: ep, Axis.DP: world // (tp * ep * pp), Axis.PP: pp}
    return Grid.of(tuple(map(Axis, dense.order)), sizes)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a world.

    `kv_replicas` consecutive ranks of each tp group hold the same kv heads; `ep` ranks share the routed experts, and
    `expert_tp` ranks (those of tp, unless it is given) each of them;
    `cp_sizes` are the ranks of the inner and outer groups of cp, where attention needs such groups; with `tied`, the
    first and the last stage both hold the embedding.
    """

    grid: Grid
    kv_replicas: int = 1
    ep: int = 1
    cp_sizes: tuple[int, int] | None = None
    tied: bool = False
    expert_tp: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups that every rank of the runtime creates, in the order in which it does."""
        levels = CP_LEVELS if self.cp_sizes else ()
        tied = (EMBEDDING,) if self.tied and self.grid.size((Axis.PP,)) > 1 else ()
        experts = (Axis.EP.value, EXPERT_DP) if self.ep > 1 else ()
        return (*GROUP_AXES, *levels, *((KV_REPLICA,) if self.kv_replicas > 1 else ()), *tied, *experts)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all groups that can be asked for, those of the runtime first."""
        further = (*MEGATRON_AXES, *EMBEDDING_GROUPS, *(EXPERT_AXES if self.ep > 1 else ()))
        return (*self.names, *(name for name in further if name not in self.names))

    @property
    def expert_grid(self) -> Grid:
        """The grid of the routed experts."""
        return expert_grid(self.grid, self.ep, self.expert_tp)

    def __call__(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The groups of a rank that its runtime creates, and those of its experts: the ranks of each, by name.

        Raises:
            ValueError: the rank is not in the plan's world.
        """
        return {name: self.of_rank(name, rank) for name in self.shown_names}

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The groups that matter in a plan: those that its runtime creates, and those of its experts."""
        experts = EXPERT_AXES if self.ep > 1 else ()
        return (*self.names, *(name for name in experts if name not in self.names))

    def family(self, name: str) -> GroupFamily:
        """All groups of one name.

        Raises:
            KeyError: there is no such group.
        """
        if name == KV_REPLICA:
            return kv_replica_family(self.grid, self.kv_replicas)
        if self.cp_sizes and name in CP_LEVELS:
            return hierarchical_cp_families(self.grid, self.cp_sizes)[CP_LEVELS.index(name)]
        if name in EMBEDDING_GROUPS:
            return EmbeddingGroups(AxisGroups(self.grid, (Axis.PP,)), last=EMBEDDING_GROUPS[name])
        if name in EXPERT_AXES:
            return AxisGroups(self.expert_grid, EXPERT_AXES[name])
        return AxisGroups(self.grid, GROUP_AXES[name] if name in GROUP_AXES else MEGATRON_AXES[name])

    def of_rank(self, name: str, rank: int) -> tuple[int, ...]:
        """The members of the group `name` to which `rank` belongs, ascending; none when it is in no embedding group.

        Raises:
            KeyError: there is no such group.
        """
        return self.family(name).of_rank(rank)

    def all(self, name: str) -> Iterator[tuple[int, ...]]:
        """Every group of this name; each rank is in exactly one (in at most one embedding group)."""
        yield from self.family(name).all()

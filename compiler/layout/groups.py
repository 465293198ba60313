"""The process groups of a plan, by name.

| group | ranks differ in | used for |
|---|---|---|
| tp, cp, dp, pp | that axis | layers, ring, batches, stages |
| dp-cp | dp and cp | gradients and ZeRO: DeepSpeed's "sequence data parallel" group |
| tp-pp | tp and pp | one whole copy of the model: DeepSpeed's "model parallel" group |
| kv-replica | tp, inside one kv head | gradients of kv heads that several ranks hold |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .grid import Grid

GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp-cp": ("cp", "dp"),
    "tp-pp": ("tp", "pp"),
}
"""Every group that is a slice of the grid, and the axes along which its members differ."""

KV_REPLICA = "kv-replica"


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a world. `kv_replicas` consecutive ranks of each tp group hold the same kv heads."""

    grid: Grid
    kv_replicas: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Group names in the order in which every rank creates them."""
        return (*GROUP_AXES, KV_REPLICA) if self.kv_replicas > 1 else tuple(GROUP_AXES)

    def of_rank(self, name: str, rank: int) -> tuple[int, ...]:
        """The members of the group `name` to which `rank` belongs, ascending.

        Raises:
            KeyError: there is no such group.
        """
        if name == KV_REPLICA:
            tp_group = self.grid.group(rank, GROUP_AXES["tp"])
            start = tp_group.index(rank) // self.kv_replicas * self.kv_replicas
            return tp_group[start : start + self.kv_replicas]
        return self.grid.group(rank, GROUP_AXES[name])

    def all(self, name: str) -> Iterator[tuple[int, ...]]:
        """Every group of this name; each rank is in exactly one."""
        if name == KV_REPLICA:
            for tp_group in self.grid.groups(GROUP_AXES["tp"]):
                for start in range(0, len(tp_group), self.kv_replicas):
                    yield tp_group[start : start + self.kv_replicas]
        else:
            yield from self.grid.groups(GROUP_AXES[name])

"""How attention runs over the context-parallel ranks: as the spec names it, or as the cost model chooses."""

from __future__ import annotations

import functools

from parcompile.cost.coefficients import time_values
from parcompile.cost.context_time import attention_seconds, candidates, cheapest, costs
from parcompile.cost.workload import Workload
from parcompile.layout.context_parallel import ContextParallel, CpImplementation
from parcompile.layout.grid import Axis
from parcompile.machines.accelerator import accelerators
from parcompile.schema import default
from parcompile.spec import Origin
from parcompile.units import format_milliseconds

from .model import ModelValues
from .reader import Unavailable
from .training import TrainingValues

_NAME = ("parallelism", "cp_implementation")
_SIZES = ("parallelism", "hierarchical_cp_sizes")
AUTO = "auto"


class ContextValues(ModelValues, TrainingValues):
    """What `parallelism.cp_implementation` and its sizes say."""

    @property
    def named_implementation(self) -> str:
        """The implementation that is written, or the default; it may be "auto".

        Raises:
            Unavailable: it is invalid.
        """
        if self.is_invalid(_NAME):
            raise Unavailable("cp_implementation")
        return str(self.lookup(_NAME) if self.given(*_NAME) else default("spec", _NAME))

    @property
    def given_sizes(self) -> tuple[int, int] | None:
        """The ranks of the inner and of the outer level that are written.

        Raises:
            Unavailable: they are invalid.
        """
        if not self.given(*_SIZES):
            if self.is_invalid(_SIZES):
                raise Unavailable("hierarchical_cp_sizes")
            return None
        inner, outer = self.get(*_SIZES)
        return int(inner), int(outer)

    @functools.cached_property
    def context_parallel(self) -> ContextParallel:
        """The implementation with its sizes.

        Raises:
            Unavailable: it cannot run on these ranks, which a rule says.
        """
        found = self._context_parallel()
        origin = Origin.SPEC if self.given(*_NAME) else Origin.DEFAULT
        self.record(_NAME, found.implementation.value, origin)
        self.record(_SIZES, found.sizes and list(found.sizes), Origin.SPEC if found.sizes else Origin.DEFAULT)
        return found

    def _context_parallel(self) -> ContextParallel:
        cp, name, sizes = self.axis(Axis.CP), self.named_implementation, self.given_sizes
        if cp == 1:
            # Nobody shares a sequence: there is nothing to choose.
            self.record(_NAME, CpImplementation.RING.value, Origin.DERIVED, "cp 1")
            return ContextParallel(CpImplementation.RING, 1)
        if name == AUTO and not self.shape.attends:
            self.record(_NAME, CpImplementation.RING.value, Origin.DERIVED, "no layer attends")
            return ContextParallel(CpImplementation.RING, cp)
        if name == AUTO or (sizes is None and CpImplementation(name).has_levels):
            return self._chosen(name, sizes)
        if not CpImplementation(name).has_levels:
            return ContextParallel(CpImplementation(name), cp)
        assert sizes is not None
        if sizes[0] * sizes[1] != cp:
            raise Unavailable("hierarchical_cp_sizes")
        return ContextParallel(CpImplementation(name), cp, sizes)

    def _chosen(self, name: str, sizes: tuple[int, int] | None) -> ContextParallel:
        """What the cost model takes of all that is open."""
        work = self._workload()
        possible, refused = candidates(work)
        if name != AUTO:
            possible = [one for one in possible if one.implementation.value == name]
        if sizes is not None:
            possible = [one for one in possible if one.sizes in (None, sizes)]
        if not possible:
            raise Unavailable("cp_implementation")
        chosen = cheapest(work, possible).context
        attention = attention_seconds(work, time_values(work))
        best: dict[object, str] = {}
        for one in costs(work, possible):
            key = one.context.implementation if name == AUTO else one.context.sizes
            best.setdefault(key, f"{one.context.name} {format_milliseconds(one.seconds)}")
        listed = ", ".join(best.values())
        why = (
            f"cost model, for each layer and micro-batch beyond {format_milliseconds(attention)} of attention: "
            f"{listed}; the simplest within 2 % of the fastest"
        )
        if name == AUTO:
            impossible = dict.fromkeys(f"{kind.value} ({fault})" for kind, _, fault in refused)
            why += "".join(f"; not {one}" for one in impossible)
            self.record(_NAME, chosen.implementation.value, Origin.DERIVED, why)
        if chosen.sizes is not None and sizes is None:
            self.record(_SIZES, list(chosen.sizes), Origin.DERIVED, why)
        return chosen

    def _workload(self) -> Workload:
        """The layout as far as attention depends on it."""
        cluster = self.cluster
        if cluster.preset is None and cluster.accelerator not in accelerators():
            raise Unavailable("accelerator")
        return Workload(
            shape=self.shape,
            nodes=cluster.nodes,
            gpus_per_node=cluster.gpus_per_node,
            accelerator=cluster.accelerator,
            preset=cluster.preset,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch_size,
            micro_batches=1,
            tp=self.axis(Axis.TP),
            cp=self.axis(Axis.CP),
            ep=self.axis(Axis.EP),
            dp=self.axis(Axis.DP),
            pp=self.axis(Axis.PP),
            order=self.order,
            cp_layout=self.cp_layout.value,
            element_bytes=self.precision.bytes,
            recompute=self.activation_checkpointing,
        )

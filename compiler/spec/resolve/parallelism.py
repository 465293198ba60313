"""The cluster and the axes of parallelism."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any

from parcompile.layout.groups import AXES, Axis
from parcompile.layout.pipeline import PipelineSplit
from parcompile.layout.sequence import ContextParallel, CpLayout
from parcompile.machines import Accelerator, PresetError, is_preset_file, preset_from_tree, read_preset
from parcompile.schema import default
from parcompile.spec import Cluster, Origin, Parallelism

from .reader import MISSING, SpecReader, Unavailable, Value

_SIZED = (Axis.TP, Axis.CP, Axis.PP, Axis.DP)
"""The axes that multiply to the world, as equations list them."""


class ParallelismValues(SpecReader):
    """What the sections `cluster` and `parallelism` say."""

    sequence_parallel = Value(bool, "parallelism", "sequence_parallel")
    """Whether activations between tensor-parallel blocks are split over tp."""
    cp_layout = Value(CpLayout, "parallelism", "cp_layout")
    """How the sequence is dealt to the cp ranks."""
    make_vocab_size_divisible_by = Value(int, "parallelism", "make_vocab_size_divisible_by")
    """The divisor of the padded vocabulary, per tp rank."""
    virtual_stages = Value(int, "parallelism", "num_virtual_stages_per_pipeline_rank")
    """Stages that each pp rank holds."""

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The machines."""
        given, preset = self.get("cluster", "accelerator"), None
        name = given if isinstance(given, str) else ""
        if isinstance(given, Mapping):
            preset = self.described_accelerator(given)
            name = default("spec", ("cluster", "accelerator"))
        elif is_preset_file(name):
            # Rule H002 speaks of a file that cannot be used; the other rules need the number of ranks.
            with contextlib.suppress(PresetError):
                preset = self.accelerator_preset(name)
        return Cluster(
            nodes=int(self.get("cluster", "nodes")),
            gpus_per_node=int(self.get("cluster", "gpus_per_node")),
            accelerator=preset.like if preset else name,
            preset=preset,
        )

    def described_accelerator(self, given: Mapping[str, Any]) -> Accelerator | None:
        """The machine that the spec itself describes; None where the schema finds a value of it wrong."""
        place = ("cluster", "accelerator")
        return None if any(found[:2] == place for found in self.invalid) else preset_from_tree(given)

    def accelerator_preset(self, name: str) -> Accelerator:
        """The machine that a file beside the spec describes.

        Raises:
            PresetError: the file cannot be used.
        """
        return read_preset(self.folder / name)

    @property
    def world_size(self) -> int:
        """Ranks of the run: nodes · gpus_per_node."""
        return self.cluster.world_size

    @functools.cached_property
    def auto_axes(self) -> tuple[Axis, ...]:
        """The axes that the world size decides: those that are "auto", and dp when it is left out."""
        return tuple(axis for axis in _SIZED if self._axis_text(axis) == "auto")

    def _axis_text(self, axis: Axis) -> object:
        path = ("parallelism", axis.value)
        node = self.lookup(path)
        if node is not MISSING:
            return node
        found = default("spec", path)
        # Left out, dp takes what the world leaves, unless another axis is to.
        others = (self._axis_text(other) for other in _SIZED if other is not axis)
        return 1 if found == "auto" and "auto" in others else found

    @functools.cached_property
    def _sizes(self) -> dict[Axis, int]:
        """The sizes that were asked for so far: nearly every rule asks for one."""
        return {}

    def axis(self, axis: Axis) -> int:
        """The size of an axis.

        Raises:
            Unavailable: it is invalid, or "auto" and the world does not decide it.
        """
        if axis not in self._sizes:
            self._sizes[axis] = self._sized(axis)
        return self._sizes[axis]

    def _sized(self, axis: Axis) -> int:
        path = ("parallelism", axis.value)
        if self.is_invalid(path):
            raise Unavailable(axis)
        if axis not in self.auto_axes:
            is_given = self.lookup(path) is not MISSING
            return int(self.get(*path) if is_given else self.record(path, self._axis_text(axis), Origin.DEFAULT))
        if len(self.auto_axes) > 1:
            raise Unavailable(axis)
        others = {other: self.axis(other) for other in _SIZED if other is not axis}
        rest = math.prod(others.values())
        if self.world_size % rest:
            raise Unavailable(axis)
        equation = " · ".join(f"{other} {size}" for other, size in others.items())
        size = self.world_size // rest
        self.record(path, size, Origin.DERIVED, f"world {self.world_size} / ({equation})")
        return size

    @property
    def expert_tp(self) -> int | None:
        """Ranks that share each routed expert; None: those of tp."""
        found = self.if_given("parallelism", "expert_tp")
        return None if found is None or int(found) == self.axis(Axis.TP) else int(found)

    @property
    def order(self) -> tuple[Axis, ...]:
        """The axes, innermost first. An axis that is not named comes last: it has size 1 (rule W004)."""
        named = tuple(map(Axis, self.get("parallelism", "order").split("-")))
        return named + tuple(axis for axis in AXES if axis not in named)

    @property
    def pipeline_split(self) -> PipelineSplit:
        """How the layers are counted out to the pipeline stages."""
        first, last = (self.get("parallelism", f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
        embedding, loss = (
            bool(self.get("parallelism", f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss")
        )
        return PipelineSplit(
            self.axis(Axis.PP),
            self.virtual_stages,
            embedding=embedding,
            loss=loss,
            first=None if first is None else int(first),
            last=None if last is None else int(last),
        )

    @property
    def microbatch_group_size(self) -> int | None:
        """Micro-batches that run one after the other on a virtual stage; None without virtual stages."""
        name = "microbatch_group_size_per_virtual_pipeline_stage"
        if self.virtual_stages == 1:
            return None
        if self.given("parallelism", name):
            return int(self.get("parallelism", name))
        return int(self.record(("parallelism", name), self.axis(Axis.PP), Origin.DERIVED, f"pp {self.axis(Axis.PP)}"))

    def parallelism(self, context: ContextParallel) -> Parallelism:
        """The whole section, with the way in which attention runs over cp."""
        split = self.pipeline_split
        return Parallelism(
            **{axis.value: self.axis(axis) for axis in AXES},
            order=self.order,
            sequence_parallel=self.sequence_parallel and self.axis(Axis.TP) > 1,
            # One rank holds the whole sequence in order: there is nothing to deal.
            cp_layout=self.cp_layout if self.axis(Axis.CP) > 1 else CpLayout.CONTIGUOUS,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            cp_implementation=context.implementation,
            hierarchical_cp_sizes=context.sizes,
            account_for_embedding_in_pipeline_split=split.embedding,
            account_for_loss_in_pipeline_split=split.loss,
            num_layers_in_first_pipeline_stage=split.first,
            num_layers_in_last_pipeline_stage=split.last,
            num_virtual_stages_per_pipeline_rank=split.virtual,
            microbatch_group_size_per_virtual_pipeline_stage=self.microbatch_group_size,
            expert_tp=self.expert_tp,
        )

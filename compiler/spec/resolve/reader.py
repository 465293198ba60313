"""A spec that is read value by value: which are given or wrong, and where each came from; cluster and parallelism."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from parcompile.diagnostics import Path, format_path
from parcompile.layout.groups import AXES, FACTORS, Axis
from parcompile.layout.pipeline import PipelineSplit
from parcompile.layout.sequence import ContextParallel, CpLayout
from parcompile.machines import Accelerator, PresetError, is_preset_file, preset_from_tree, read_preset
from parcompile.schema import NoDefaultError, default, whole
from parcompile.spec import Cluster, Origin, Parallelism, Provenance

VIRTUAL, FIRST, LAST, EMBEDDING, LOSS = CUT_KEYS = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""What says how the layers are cut into stages."""
_PARALLELISM = ("expert_tp", "sequence_parallel", "order", "cp_layout", "cp_implementation", "hierarchical_cp_sizes")
_TRAINING = (
    *("micro_batch_size", "global_batch_size", "sequence_length", "activation_checkpointing", "activation_offloading"),
    *("linear_cross_entropy", "gather_inputs_again", "tiled_mlp", "gradient_accumulation_dtype"),
    "gradient_accumulation_steps",
)
SECTIONS: Mapping[str, str] = {
    **dict.fromkeys((*AXES, *_PARALLELISM, *CUT_KEYS), "parallelism"),
    **dict.fromkeys(_TRAINING, "training"),
    **dict.fromkeys(("nodes", "gpus_per_node", "accelerator"), "cluster"),
    **dict.fromkeys(("stage", "offload_optimizer", "offload_param"), "zero"),
}
"""What a search or a fix may replace, and the section of the spec in which it stands."""


def place_of(name: str) -> tuple[str, str]:
    """Where one of `SECTIONS` stands; all others are of parallelism."""
    return SECTIONS.get(name, "parallelism"), name


MISSING = object()
"""What `lookup` finds where the spec says nothing."""


class Unavailable(Exception):  # noqa: N818 -- not an error: a value that another diagnostic already speaks of
    """A value cannot be had because something it depends on is missing or wrong."""


class SpecReader:
    """Reads the tree of a spec and remembers the provenance of what was read.

    Args:
        tree: the parsed spec. Values that the schema refused are named in `invalid` and are never used.
        invalid: paths at which the schema found something wrong.
        folder: the folder of the spec: paths in the spec are relative to it.
    """

    def __init__(self, tree: object, invalid: Collection[Path] = (), folder: FilePath | None = None) -> None:
        self._tree: Mapping[str, Any] = whole(tree, "spec") if isinstance(tree, dict) else {}
        self.invalid = frozenset(invalid)
        self.folder = folder or FilePath()
        self.provenance: dict[str, Provenance] = {}
        self.read: dict[tuple[str, ...], Any] = {}
        """What `get` has read."""
        self.is_trial = False
        """Whether only a fix is tried: rules then leave out what takes long and is not needed to judge it."""

    @property
    def tree(self) -> Mapping[str, Any]:
        """All of the spec, right or wrong."""
        return self._tree

    def given(self, *path: str) -> bool:
        """Whether the spec has a usable value at this path."""
        return self.lookup(path) is not MISSING and not self.is_invalid(path)

    def get(self, *path: str) -> Any:
        """The spec's value at a path, or the default of its schema: None where it may be left out and has none.

        Raises:
            Unavailable: the value is invalid, or missing although it has to be given.
        """
        if path in self.read:
            return self.read[path]
        if self.is_invalid(path):
            raise Unavailable(format_path(path))
        value = self.lookup(path)
        if isinstance(value, list) and any(found[: len(path)] == path for found in self.invalid):
            # A list with a wrong entry is wrong as a whole.
            raise Unavailable(format_path(path))
        if value is MISSING:
            try:
                found, origin = default("spec", path), Origin.DEFAULT
            except NoDefaultError:
                raise Unavailable(format_path(path)) from None
        else:
            found, origin = value, Origin.SPEC
        self.read[path] = self.record(path, found, origin)
        return found

    def if_given(self, *path: str) -> Any:
        """The spec's value at a path; None where it has no usable one, and then nothing is recorded."""
        return self.get(*path) if self.given(*path) else None

    def lookup(self, path: tuple[str, ...]) -> object:
        """What the tree holds at a path, right or wrong; `MISSING` where it holds nothing."""
        node: object = self._tree
        for step in path:
            if not isinstance(node, dict) or step not in node:
                return MISSING
            node = node[step]
        return node

    def is_invalid(self, path: tuple[str, ...]) -> bool:
        """Whether the schema refused the value at this path or one around it."""
        return bool(self.invalid) and any(path[:length] in self.invalid for length in range(len(path) + 1))

    def record(self, path: tuple[str, ...], value: Any, origin: Origin, detail: str = "") -> Any:
        """Remembers where a value comes from, the first time it is read, and returns it."""
        name = format_path(path)
        if name not in self.provenance:
            self.provenance[name] = Provenance(value, origin, detail)
        return value


Kind = TypeVar("Kind")


class Value(Generic[Kind]):
    """An attribute that a key decides alone: what the spec has at `path`, or its default, as a `kind`."""

    def __init__(self, kind: Callable[[Any], Kind], *path: str) -> None:
        self.kind, self.path = kind, path

    def __get__(self, reader: SpecReader, owner: type) -> Kind:
        """Reads it.

        Raises:
            Unavailable: see `SpecReader.get`.
        """
        return self.kind(reader.get(*self.path))


class Switch(Value[bool]):
    """One that plans of specs which do not give it do not name."""

    def __init__(self, *path: str) -> None:
        super().__init__(bool, *path)

    def __get__(self, reader: SpecReader, owner: type) -> bool:
        """Whether it is given, and on."""
        return bool(reader.if_given(*self.path))


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
            is_wrong = any(found[:2] == ("cluster", "accelerator") for found in self.invalid)
            preset = None if is_wrong else preset_from_tree(given)
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
        return tuple(axis for axis in FACTORS if self._axis_text(axis) == "auto")

    def _axis_text(self, axis: Axis) -> object:
        path = ("parallelism", axis.value)
        node = self.lookup(path)
        if node is not MISSING:
            return node
        found = default("spec", path)
        # Left out, dp takes what the world leaves, unless another axis is to.
        others = (self._axis_text(other) for other in FACTORS if other is not axis)
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
        others = {other: self.axis(other) for other in FACTORS if other is not axis}
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

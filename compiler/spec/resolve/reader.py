"""A spec that is read value by value: which are given, which are wrong, and where each came from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from parcompile.diagnostics import Path, format_path
from parcompile.layout.groups import AXES
from parcompile.schema import NoDefaultError, default
from parcompile.spec import Origin, Provenance

CUT_KEYS = (
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
        self._tree: Mapping[str, Any] = tree if isinstance(tree, dict) else {}
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

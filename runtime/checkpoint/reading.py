"""Reads whole tensors out of a checkpoint, whatever the layout that it was saved in.

DeepSpeed keeps one file of weights for each tp rank, and of its optimizer one for each tp rank and each of the dp · cp
shards. A parameter is a run of elements in one or several shards, and its tp slices lie as the plan says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parcompile.layout.tensor import TensorLayout
from parcompile.model.table import Parameter
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.lora import matrix_layout, matrix_of, plain_name
from parcompile.runtime.tensor_parallel import merge_ranges

from .deepspeed_files import MASTER, SHARD_FILE, WEIGHTS_FILE, OptimizerShard
from .manifest import Note
from .trusted import load_trusted


class SavedRun:
    """A checkpoint, opened. Tensors are mapped from the files: only what is asked for is read.

    Parameters go by the names of the plan's model, adapters by peft's behind that of their linear.
    """

    def __init__(self, note: Note) -> None:
        self.note = note
        self._rows: dict[str, tuple[Parameter, TensorLayout]] = note.plan.tensors()
        self.parameters = dict(note.plan.parameters.expanded())

    @cached_property
    def weights(self) -> list[dict[str, Any]]:
        """The content of the weight files, by tp rank."""
        return [load_trusted(file) for _, file in self._files(WEIGHTS_FILE)]

    @cached_property
    def _stored(self) -> dict[str, str]:
        """From the names of the plan's model, and those of adapters, to those in the files."""
        return {plain_name(name): name for name in self.weights[0]["module"]}

    @property
    def adapters(self) -> list[str]:
        """The names of LoRA matrices."""
        return [name for name in self._stored if matrix_of(name) is not None]

    @cached_property
    def _shards(self) -> list[list[OptimizerShard]]:
        """By tp rank, then by shard."""
        found: dict[int, dict[int, Path]] = {}
        for (shard, tp_rank), file in self._files(SHARD_FILE):
            found.setdefault(tp_rank, {})[shard] = file
        tp, shards = self.note.plan.spec.parallelism.tp, self.note.plan.spec.parallelism.zero_shards
        for tp_rank in range(tp):
            missing = sorted(set(range(shards)) - found.get(tp_rank, {}).keys())
            if missing:
                raise RunError(
                    f"{self.note.folder} lacks the optimizer states of tp rank {tp_rank}, shard {missing[0]}"
                )
        return [[OptimizerShard(load_trusted(found[rank][shard])) for shard in range(shards)] for rank in range(tp)]

    def _files(self, pattern: re.Pattern[str]) -> Iterator[Any]:
        for name in sorted(self.note.files):
            match = pattern.fullmatch(name)
            if match:
                numbers = tuple(map(int, match.groups()))
                yield (numbers if len(numbers) > 1 else numbers[0]), self.note.folder / name

    @property
    def counters(self) -> dict[str, Any]:
        """What DeepSpeed keeps beside tensors: steps and the scheduler."""
        return self.weights[0]

    @property
    def optimizer_groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's parameter groups at the time."""
        return self._shards[0][0].settings

    @property
    def groups(self) -> list[list[str]]:
        """The names in each of the optimizer's parameter groups, in order."""
        found: list[dict[str, None]] = [{} for _ in self.optimizer_groups]
        for shard in self._shards[0]:
            for name, group in shard.groups.items():
                found[group][plain_name(name)] = None
        return [list(names) for names in found]

    @property
    def loss_scaler(self) -> Any:
        """The loss scaler at the time."""
        return self._shards[0][0].loss_scaler

    @property
    def kinds(self) -> list[str]:
        """The weights in full precision and the tensors that the optimizer keeps for each of them."""
        return [MASTER, *self._shards[0][0].moments]

    @property
    def scalars(self) -> list[dict[str, Any]]:
        """What the optimizer keeps for each of its groups besides: the number of steps."""
        return self._shards[0][0].scalars

    def whole(self, name: str, kind: str = MASTER) -> Tensor | None:
        """A parameter, or what the optimizer keeps for it, whole and without padding.

        None when the optimizer has none: the parameter was frozen, and only its weights were saved.

        Raises:
            RunError: a file is missing or does not fit the plan.
        """
        layout, real_shape = self._layout(name)
        locals_ = [self._local(name, kind, rank, layout) for rank in range(len(self._shards))]
        found = [local for local in locals_ if local is not None]
        if len(found) != len(locals_):
            return None
        if layout.ranges is None or layout.dim is None:
            return found[0]
        try:
            return merge_ranges(found, layout.dim, layout.ranges, real_shape[layout.dim])
        except ValueError as error:
            raise RunError(f"{name} in {self.note.folder}: {error}") from None

    def _layout(self, name: str) -> tuple[TensorLayout, tuple[int, ...]]:
        """How a parameter is cut, and its shape without padding."""
        matrix = matrix_of(name)
        if matrix is None:
            parameter = self.parameters[name]
            return self._rows[parameter.name][1], parameter.shape
        weight = self._rows[self.parameters[f"{matrix.linear}.weight"].name][1]
        layout = matrix_layout(matrix, weight, tuple(self.weights[0]["module"][self._stored[name]].shape))
        return layout, layout.full_shape

    def _local(self, name: str, kind: str, tp_rank: int, layout: TensorLayout) -> Tensor | None:
        stored = self._stored[name]
        pieces = [piece for shard in self._shards[tp_rank] if (piece := shard.piece(stored, kind)) is not None]
        if not pieces:
            if kind != MASTER:
                return None
            weights: Tensor = self.weights[tp_rank]["module"][stored]
            return weights.float()
        flat = torch.cat(pieces)
        if flat.numel() != layout.local_numel:
            raise RunError(
                f"{self.note.folder} holds {flat.numel()} elements of {name} for tp rank {tp_rank}, "
                f"the plan has {layout.local_numel}"
            )
        return flat.view(layout.local_shape)

"""Writes one of torch's files, says its size and hash, and keeps the random generators of a rank.

There is one file of weights for each model-parallel rank, and one of optimizer states for each model-parallel rank and
each shard (0.19.8, `_get_ckpt_name` and `_get_zero_ckpt_name` of runtime/engine.py). Where experts are dealt over ep,
there is one more for the weights of each further ep rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from parcompile.runtime.deepspeed_patches.norm import EXPERT_KEYS
from parcompile.runtime.errors import RunError, first_line

_PIECE_BYTES = 1 << 24


class StateFile:
    """A file on its way to the disk. `put` takes the content, `finish` brings it to the disk.

    Args:
        path: where it is written.
        memory: keeps the content until `finish`, which another thread may call; it grows as needed. None: the content
            goes to the disk at once.
    """

    def __init__(self, path: Path, memory: bytearray | None = None) -> None:
        self.path = path
        self._memory, self._filled = memory, 0
        self._stream: Any = None
        self._hash, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def put(self, state: Any) -> None:
        """Serialises the content as it is now."""
        options = torch.serialization
        checked = options.get_crc32_options()
        options.set_crc32_options(False)  # the note has a SHA-256 of the file
        try:
            torch.save(state, cast(IO[bytes], self))
        finally:
            options.set_crc32_options(checked)

    def write(self, data: Any) -> int:
        """For torch, whose writer ends the process when a stream raises: an error waits for `finish`."""
        view = memoryview(data).cast("B")
        if self._memory is None:
            self._write(view)
            return len(view)
        end = self._filled + len(view)
        if end > len(self._memory):
            self._memory.extend(bytes(end - len(self._memory)))
        self._memory[self._filled : end] = view
        self._filled = end
        return len(view)

    def flush(self) -> None:
        """For torch."""

    def finish(self) -> tuple[int, str]:
        """Brings the content to the disk; returns its size in bytes and its SHA-256.

        Raises:
            OSError: it could not be written.
        """
        if self._memory is not None:
            with memoryview(self._memory) as kept:
                for start in range(0, self._filled, _PIECE_BYTES):
                    self._write(kept[start : min(start + _PIECE_BYTES, self._filled)])
        if self._stream is not None:
            try:
                self._stream.flush()
                os.fsync(self._stream.fileno())
            except OSError as error:
                self._error = self._error or error
            finally:
                self.close()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))
        return self._size, self._hash.hexdigest()

    def close(self) -> None:
        """Lets the file go, also half-written."""
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError as error:
                self._error = self._error or error
        self._stream = None

    def _write(self, view: memoryview) -> None:
        if self._error is not None:
            return
        try:
            if self._stream is None:
                self._stream = self.path.open("wb", buffering=1 << 20)
            self._stream.write(view)
        except OSError as error:
            self._error = error
        self._hash.update(view)
        self._size += len(view)


def write_state(path: Path, state: Any) -> tuple[int, str]:
    """Writes a file at once; returns its size in bytes and its SHA-256.

    Raises:
        OSError: it could not be written.
    """
    with contextlib.closing(StateFile(path)) as file:
        file.put(state)
        return file.finish()


def random_file(rank: int) -> str:
    """The file of a rank's state."""
    return f"random_rank_{rank:05d}.pt"


def random_state() -> dict[str, Any]:
    """Torch's generators (of this process's device too) and Python's, as they are."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def load_random_state(folder: Path, rank: int) -> None:
    """Continues where the saved generators stopped.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / random_file(rank)
    try:
        set_random_state(torch.load(file, weights_only=True))
    except Exception as error:
        raise RunError(f"{file} cannot be read: {first_line(error)}") from None


MASTER = "fp32"
"""The kind of tensor that holds the weights in full precision."""

MOMENTUM = "momentum_buffer"
"""The kind of tensor that Muon and SGD keep, as torch calls it."""
MUON_KEY = "ns_steps"
"""A setting that groups of parameters have which Muon updates, and no other."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of the optimizer: names in order, settings, and what is kept for the group as one."""

    names: list[str]
    settings: Mapping[str, Any]
    scalars: Mapping[str, Any]
    of_experts: bool = False
    """Whether they are experts that are dealt over ep: the states are then sharded over expert-dp."""

    @property
    def moments(self) -> tuple[str, ...]:
        """The kinds of tensors that the optimizer keeps beside the weights, by the settings of its class."""
        if "betas" in self.settings and MUON_KEY not in self.settings:
            return "exp_avg", "exp_avg_sq"
        if "lr_decay" in self.settings:
            return ("sum",)
        return (MOMENTUM,) if self.settings.get("momentum") else ()


SHARD_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
"""Its groups are the shard and the model-parallel rank."""


def weights_file(mp_rank: int) -> str:
    """The file of weights of a model-parallel rank."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def experts_file(ep_rank: int, mp_rank: int) -> str:
    """The file of the experts of an ep rank behind the first, whose experts are in the file of weights. It is ours."""
    return f"ep_rank_{ep_rank:02d}_{weights_file(mp_rank)}"


def shard_file(shard: int, mp_rank: int, *, bf16: bool) -> str:
    """The file of optimizer states of a model-parallel rank's shard."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{shard}_mp_rank_{mp_rank:02d}_optim_states.pt"


class OptimizerShard:
    """One rank's optimizer states: a flat run of elements for each group of parameters."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        """`content`: of the file."""
        self._file = file
        states = content["optimizer_state_dict"]
        base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
        masters = states.get("single_partition_of_fp32_groups", states.get("fp32_flat_groups_partition"))
        assert masters is not None
        self.loss_scaler = states.get("loss_scaler")
        self.settings: list[dict[str, Any]] = base["param_groups"]
        self._flat: list[dict[str, Tensor]] = []
        self.scalars: list[dict[str, Any]] = []
        paddings = states.get("group_paddings") or [0] * len(masters)
        for group, (master, padding) in enumerate(zip(masters, paddings, strict=True)):
            state = base["state"].get(group, {})
            flat = {kind: value for kind, value in state.items() if _is_flat(value, master, padding)}
            self._flat.append({MASTER: master, **flat})
            self.scalars.append({kind: value for kind, value in state.items() if kind not in flat})
        self._places = {
            name: (group, int(place.start), int(place.numel))
            for group, places in enumerate(states["param_slice_mappings"])
            for name, place in places.items()
        }

    @property
    def moments(self) -> list[str]:
        """The kinds of tensors that the optimizer keeps beside the weights."""
        return list(dict.fromkeys(kind for flat in self._flat for kind in flat if kind != MASTER))

    def names(self, group: int) -> list[str]:
        """The parameters of a group that lie here, in order."""
        return [name for name, (number, _, _) in self._places.items() if number == group]

    def piece(self, name: str, kind: str) -> Tensor | None:
        """This shard's part of a tp rank's parameter, flat.

        Raises:
            RunError: the file does not hold it.
        """
        if name not in self._places:
            return None
        group, start, numel = self._places[name]
        if kind != MASTER and not keeps(self.settings, group, kind):
            return None
        flat = self._flat[group].get(kind)
        if flat is None or flat.numel() < start + numel:
            held = "none" if flat is None else f"{flat.numel()}"
            raise RunError(
                f"{self._file} has {name} at elements {start} to {start + numel} of group {group}, and {held} of {kind}"
            )
        return flat[start : start + numel]


def keeps(settings: Sequence[Mapping[str, Any]], group: int, kind: str) -> bool:
    """Whether a group of parameters has a state of this kind, where Muon updates some groups and AdamW the others."""
    if not any(MUON_KEY in one for one in settings):
        return True
    return (kind == MOMENTUM) is (MUON_KEY in settings[group])


def without_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters, without what names these and says that they are experts."""
    return {key: value for key, value in settings.items() if key not in ("params", *EXPERT_KEYS)}


def _is_flat(value: object, master: Tensor, padding: int) -> bool:
    """Whether a state has an element for each of the partition.

    ZeRO saves master weights without the padding, and states with it (0.19.8, `state_dict` of
    runtime/zero/stage_1_and_2.py); the bf16 optimizer saves both with it.
    """
    whole = (master.numel(),), (master.numel() + padding,)
    return isinstance(value, Tensor) and tuple(value.shape) in whole

"""Reads whole tensors out of a checkpoint of any layout, without running what is in its pickles.

DeepSpeed loads its own files with the whole of pickle, which can run any code. What they need beyond tensors is three
classes; a file that asks for anything else is not DeepSpeed's and is refused before anything loads it.

DeepSpeed keeps one file of weights for each rank of tp × pp, and of its optimizer one for each of them and each of the
dp · cp shards. A parameter lies in the files of its stage, as a run of elements in one or several shards, and its tp
slices lie as the plan says.

`verify` tells whether a checkpoint is as it was saved.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parcompile.layout.shards import TensorLayout
from parcompile.plan.holding import model_parallel_places
from parcompile.runtime.errors import RunError, everywhere, first_line
from parcompile.runtime.model.lora import matrix_of, plain_name

from .manifest import Note, damages, read_note, strange_contents
from .state_file import MASTER, SHARD_FILE, OptimizerShard, ParameterGroup, experts_file, weights_file, without_keys
from .whole_tensors import WholeTensors

_GETATTR = "builtins.getattr"


def _classes() -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def member(kind: Any, name: str) -> Any:
        """A stage by its name: so Python 3.11.0 to 3.11.3 pickle members of an enumeration, by getattr."""
        if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise ValueError(f"it asks for {name} of {kind}, which is no stage of ZeRO")
        return ZeroStageEnum[name]

    classes = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
    return {f"{one.__module__}.{one.__qualname__}": one for one in classes} | {_GETATTR: member}


def check_trusted(file: Path) -> None:
    """Refuses a file whose pickle asks for anything that DeepSpeed's does not.

    Raises:
        RunError: it does, or is no file of torch.
    """
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    except Exception as error:  # a broken pickle raises what it likes
        raise RunError(f"{file} cannot be read: {first_line(error)}") from None
    if strange := sorted(set(asked) - _classes().keys()):
        raise RunError(f"{file} asks to load {', '.join(strange)}, which no checkpoint of DeepSpeed holds: not loaded")


def load_trusted(file: Path) -> Any:
    """The content of a file, its tensors mapped rather than read; no code of it runs.

    Raises:
        RunError: it cannot be read, or holds more than data.
    """
    check_trusted(file)
    try:
        # A pair names what a pickle asks for otherwise than the function that answers.
        with torch.serialization.safe_globals([(one, name) for name, one in _classes().items()]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise RunError(f"{file} cannot be read: {first_line(error)}") from None


class SavedRun(WholeTensors):
    """A checkpoint, opened. Tensors are mapped from the files: only what is asked for is read."""

    def __init__(self, note: Note) -> None:
        super().__init__(note.plan, str(note.folder))
        self.note = note
        self._files_of = {(place.pp, place.tp): number for number, place in enumerate(model_parallel_places(note.plan))}
        self._opened: dict[str, Any] = {}
        self._shards: dict[tuple[int, int], list[OptimizerShard]] = {}
        self._names: dict[int, dict[str, str]] = {}

    def weights(self, pp_rank: int, tp_rank: int) -> dict[str, Any]:
        """The content of a rank's file of weights.

        Raises:
            RunError: it is missing, or holds no weights.
        """
        place = pp_rank, tp_rank
        name = weights_file(self._files_of[place])
        content = self._content(name, f"the weights of {_place(place)}")
        if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
            raise RunError(f"{self.note.folder / name} holds no weights of a module, as DeepSpeed writes them")
        return content

    def _content(self, name: str, what: str) -> Any:
        """Of a file, which is opened once."""
        if name not in self.note.files:
            raise RunError(f"{self.note.folder} lacks {name}, {what}")
        if name not in self._opened:
            self._opened[name] = load_trusted(self.note.folder / name)
        return self._opened[name]

    def _experts_of(self, place: tuple[int, int], ep_rank: int) -> dict[str, Tensor]:
        """Weights of the experts of a rank, beside which others may lie."""
        if ep_rank == self._expert_places[place[1]][0].ep:
            content = self.weights(*place)
        else:
            what = f"the experts of {_place(place)}, ep rank {ep_rank}"
            content = self._content(experts_file(ep_rank, self._files_of[place]), what)
        found: dict[str, Tensor] = content["module"]
        return found

    def shards(self, pp_rank: int, tp_rank: int) -> list[OptimizerShard]:
        """The optimizer states of a rank and of those that share them with it.

        Raises:
            RunError: one is missing.
        """
        place = pp_rank, tp_rank
        if place not in self._shards:
            found = {}
            for name in self.note.files:
                match = SHARD_FILE.fullmatch(name)
                if match and int(match[2]) == self._files_of[place]:
                    found[int(match[1])] = self.note.folder / name
            count = len(self._expert_places[0])
            if missing := sorted(set(range(count)) - found.keys()):
                raise RunError(f"{self.note.folder} lacks the optimizer states of {_place(place)}, shard {missing[0]}")
            files = [found[shard] for shard in range(count)]
            self._shards[place] = [OptimizerShard(file, load_trusted(file)) for file in files]
        return self._shards[place]

    def _stored(self, pp_rank: int) -> dict[str, str]:
        """From the names of the plan's model, and those of adapters, to those in the files of a stage."""
        if pp_rank not in self._names:
            self._names[pp_rank] = {plain_name(name): name for name in self.weights(pp_rank, 0)["module"]}
        return self._names[pp_rank]

    @cached_property
    def adapters(self) -> list[str]:
        """The names of LoRA matrices."""
        stages = range(len(self._stages))
        return [name for pp_rank in stages for name in self._stored(pp_rank) if matrix_of(name) is not None]

    @property
    def described_adapters(self) -> Mapping[str, Any] | None:
        """As the note has it."""
        return self.note.adapters

    def _adapter_shape(self, name: str, pp_rank: int) -> tuple[int, ...]:
        return tuple(self.weights(pp_rank, 0)["module"][self._stored(pp_rank)[name]].shape)

    @property
    def counters(self) -> dict[str, Any]:
        """What DeepSpeed keeps beside tensors: steps and the scheduler."""
        return self.weights(0, 0)

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """What the model keeps beside parameters, of all stages."""
        contents = [self.weights(pp_rank, 0) for pp_rank in range(len(self._stages))]
        return {
            plain_name(name): content["module"][name]
            for content in contents
            for name in content.get("buffer_names") or ()
        }

    @cached_property
    def groups(self) -> list[ParameterGroup]:
        """The optimizer's parameter groups, in order; what the stages hold of one group is one.

        Groups of two stages are the same when their settings are, and equally many before them have these too. Experts
        that are dealt over ep are in groups of their own, which count as parts of those that they were taken from.
        """
        found: dict[tuple[str, int], ParameterGroup] = {}
        for pp_rank in range(len(self._stages)):
            shards, seen = self.shards(pp_rank, 0), Counter[tuple[str, bool]]()
            for number, settings in enumerate(shards[0].settings):
                kept = without_keys(settings)
                text, of_experts = repr(sorted(kept.items())), "moe" in settings
                place = text, seen[text, of_experts]
                group = found.setdefault(place, ParameterGroup([], kept, shards[0].scalars[number]))
                seen[text, of_experts] += 1
                names = dict.fromkeys(plain_name(name) for shard in shards for name in shard.names(number))
                group.names.extend(name for name in names if name not in group.names)
        order = {name: place for place, name in enumerate(self.parameters)}
        for group in found.values():
            group.names.sort(key=lambda name: order.get(name, len(order)))
        return list(found.values())

    @property
    def loss_scaler(self) -> Any:
        """The loss scaler at the time."""
        return self.shards(0, 0)[0].loss_scaler

    @property
    def kinds(self) -> list[str]:
        """The weights in full precision and the tensors that the optimizer keeps for each of them."""
        return [MASTER, *self.shards(0, 0)[0].moments]

    def _local(self, name: str, kind: str, place: tuple[int, int], layout: TensorLayout, ep_rank: int) -> Tensor | None:
        pieces = self._pieces(name, kind, place, layout, ep_rank)
        return torch.cat(pieces).float().view(layout.local_shape) if pieces else None

    def _pieces(self, name: str, kind: str, place: tuple[int, int], layout: TensorLayout, ep_rank: int) -> list[Tensor]:
        """What of a tensor lies in the files of a rank of pp, tp and ep: flat runs of elements, which are not read yet.

        None where the optimizer has no such state of it.
        """
        stored = self._stored(place[0]).get(name)
        if stored is None:
            raise RunError(f"{self.note.folder} lacks {name}, which the plan has on {_place(place)}")
        shards = self.shards(*place) if layout.ep == 1 else self._of_ep_rank(place[1], self.shards(*place), ep_rank)
        pieces = [piece for shard in shards if (piece := shard.piece(stored, kind)) is not None]
        if not pieces and kind == MASTER:
            frozen = self._experts_of(place, ep_rank) if layout.ep > 1 else self.weights(*place)["module"]
            pieces = [frozen[stored].reshape(-1)]
        held = sum(piece.numel() for piece in pieces)
        if pieces and held != layout.local_numel:
            raise RunError(
                f"{self.note.folder} holds {held} elements of {name} for {_place(place)}, "
                f"the plan has {layout.local_numel}"
            )
        return pieces

    def check(self) -> None:
        """Compares what the files hold of each tensor with the plan; no tensor is read.

        Raises:
            RunError: something is missing, or has another size.
        """
        for name in (*self.parameters, *self.adapters):
            pp_rank = self._holder(name)
            layout, _ = self._layout(name, pp_rank)
            for tp_rank, ep_rank in itertools.product(range(len(self._expert_places)), range(layout.ep)):
                holder = self._tp_rank(tp_rank, ep_rank) if layout.ep > 1 else tp_rank
                for kind in self.kinds:
                    self._pieces(name, kind, (pp_rank, holder), layout, ep_rank)

    def _of_ep_rank(self, tp_rank: int, shards: list[OptimizerShard], ep_rank: int) -> list[OptimizerShard]:
        """The shards of the ranks that hold the same experts, in the order of their parts."""
        places = zip(self._expert_places[tp_rank], shards, strict=True)
        held = [(place.expert_dp, number) for number, (place, _) in enumerate(places) if place.ep == ep_rank]
        return [shards[number] for _, number in sorted(held)]


def _place(place: tuple[int, int]) -> str:
    return f"pp rank {place[0]}, tp rank {place[1]}"


def verify(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint (or the last one in a folder of them), one sentence each; empty: nothing.

    The files in the folder, in the note and of the plan are compared before any is opened. Sizes and hashes have to be
    the note's, pickled files may ask for nothing but DeepSpeed's own classes, and they have to hold every weight and
    every state of the optimizer, as large as the plan says.

    Raises:
        RunError: there is no checkpoint, or its note cannot be read.
    """
    return _wrong(read_note(Path(folder)))


def whole_note(folder: str | Path) -> Note:
    """The note of a checkpoint whose files are as they were saved.

    Raises:
        RunError: there is none, or something is wrong with it, as `verify` says.
    """
    note = read_note(Path(folder))
    refuse_damaged(note, _wrong(note))
    return note


def _wrong(note: Note) -> list[str]:
    return strange_contents(note) or wrong_files(note, sorted(note.files)) or unreadable(SavedRun(note))


def unreadable(saved: SavedRun) -> list[str]:
    """What of a checkpoint's tensors the files do not hold, though they are as they were saved."""
    try:
        saved.check()
    except RunError as error:
        return [str(error)]
    return []


def refuse_damaged(note: Note, wrong: Sequence[str]) -> None:
    """One error for what is wrong with a checkpoint, if anything is.

    Raises:
        RunError: something is.
    """
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise everywhere(f"the checkpoint {note.folder} cannot be used: {'; '.join(wrong[:3])}{more}")


def wrong_files(note: Note, names: Sequence[str]) -> list[str]:
    """What is wrong with these files of a checkpoint; its contents are those of the note."""
    found = damages(note, names)
    for name in names:
        if name.endswith(".pt") and not any(name in sentence for sentence in found):
            try:
                check_trusted(note.folder / name)
            except RunError as error:
                found.append(str(error))
    return found

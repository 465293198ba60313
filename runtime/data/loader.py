"""Walks a data set for the ranks of a plan, in rows or as packed documents.

The order of the data does not depend on the layout: step s trains on samples s·B … (s+1)·B − 1 whatever dp is, so that
any two layouts see the same batches. A run that resumes with another batch size goes on with the next sample.

Of rows each rank gets its sequences (dp) and its tokens of them (cp). Long documents are dealt to all cp ranks, short
ones stay whole on one; a sample is then as many documents as the plan's `sequence_length` has room for.

Data sets that can only be read from the beginning on, as samples with numbers.

One rank of each copy of the model reads the samples of a step, and sends them to the copy's other ranks.

The ranks of a copy differ in pp, cp and tp. The first of them reads. The micro-batches go to the first rank of each
pipeline stage, from there to the first of each cp rank, and from there over tp, through the groups that the layers have
too: all ranks take part where a step begins, when nothing else is under way. A stage gets what it looks at: tokens stay
at the first stage unless routers look experts up by them, labels go to the last one; where they are left out stands a
tensor of the same shape that takes no memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.groups import Axis
from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.groups.rendezvous import wait_for_all
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels
from parcompile.runtime.micro_batch import FIRST_SAMPLE, TOKEN_PLACES
from parcompile.runtime.ring_attention import PackedCollator, PackingCosts, batches_of_tokens
from parcompile.runtime.transport.backend import to_device

from .batches import Batch, split_batch, stack, tensors_of, without_padding

_TOKENS, _LABELS = frozenset({"input_ids"}), frozenset({"labels", "shift_labels"})

_OF_NUMPY = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.float32, torch.float64)


class StepOfSamples(NamedTuple):
    """The whole sequences of a dp rank's micro-batches in a step."""

    firsts: range
    """The numbers of their first sequences."""
    micro_batches: list[Batch]
    predicted: int
    """How many of their tokens are."""


class _LeftOut(NamedTuple):
    """Stands for a tensor whose values no receiver looks at."""

    shape: tuple[int, ...]
    value: int


class Replica:
    """The ranks of the copy of the model that this rank belongs to.

    Args:
        mesh: this rank's place.

    Raises:
        RunError: not all ranks make one.
    """

    def __init__(self, mesh: Mesh) -> None:
        wait_for_all(
            "with loader.reads_once one rank reads for others",
            "iter(loader) with reads_once",
            "set it on every rank before iter(loader)",
        )
        self._mesh = mesh
        self._hops = [axis for axis in (Axis.PP, Axis.CP, Axis.TP) if mesh.size(axis) > 1]
        self.reads = all(mesh.index(axis) == 0 for axis in self._hops)
        """Whether this rank reads for the others."""
        stages = range(mesh.size(Axis.PP))
        self._left_out = [unneeded(mesh.plan, stage) if len(stages) > 1 else frozenset[str]() for stage in stages]
        self._reader = mesh.plan.groups.grid.rank({Axis.DP: mesh.index(Axis.DP)})

    def share(self, read: Callable[[], StepOfSamples], at: Callable[[], str]) -> StepOfSamples:
        """What `read` returns on the rank that reads, on all ranks of the copy.

        Args:
            read: called on that rank alone.
            at: which sample that rank was reading, for the message of an error.

        Raises:
            RunError: `read` has raised elsewhere; on the rank that reads its own exception goes on.
        """
        sent: Any = None
        if self.reads:
            try:
                sent = read()
            except Exception as error:
                failed = f"rank {self._reader} reads for this copy of the model and failed at {at()}"
                self._send(f"{failed}: {type(error).__name__}: {error}")
                raise
        sent = self._send(sent)
        if isinstance(sent, str):
            failure = RunError(sent)
            failure.follows = True
            raise failure
        return StepOfSamples(sent.firsts, _each(_tensor, sent.micro_batches), sent.predicted)

    def _send(self, sent: StepOfSamples | str | None) -> Any:
        """Hands on what this rank has, or what it gets on the way."""
        own = self._mesh.index(Axis.PP)
        for place, axis in enumerate(self._hops):
            if any(self._mesh.index(later) for later in self._hops[place + 1 :]):
                continue  # another rank of this stage is the first, and gets it for this one
            receivers = self._left_out[1:] if axis == Axis.PP else [self._left_out[own]]
            first = self._mesh.index(axis) == 0
            box = [_without(frozenset.intersection(*receivers), sent) if first else None]
            dist.broadcast_object_list(box, group=self._mesh.group(axis), group_src=0)
            if not first:
                sent = _without(self._left_out[own], box[0])
        return sent


def unneeded(plan: Plan, stage: int) -> frozenset[str]:
    """What of a batch no rank of a pipeline stage looks at."""
    held, moe = Holding(plan, stage), plan.spec.model.shape.moe
    found: frozenset[str] = frozenset() if held.has_head else _LABELS
    looked_up = moe is not None and any(moe.looked_up(one.layers) for one in held.stages)
    return found if held.has_embedding or looked_up else found | _TOKENS


def _each(change: Callable[[str, Any], Any], given: Any, name: str = "") -> Any:
    """Lists and mappings with each value changed; `name` is that of the nearest mapping's key."""
    if isinstance(given, dict):
        return {key: _each(change, one, key) for key, one in given.items()}
    if isinstance(given, list):
        return [_each(change, one, name) for one in given]
    return change(name, given)


def _without(left_out: Collection[str], sent: Any) -> Any:
    """The same without the values of these names, as it is sent: arrays are pickled several times as fast."""

    def change(name: str, given: Any) -> Any:
        if name in left_out and not isinstance(given, _LeftOut):
            return _LeftOut(tuple(given.shape), IGNORED_LABEL if name in _LABELS else 0)
        if isinstance(given, Tensor) and given.device.type == "cpu" and given.dtype in _OF_NUMPY:
            return given.numpy()
        return given

    return sent._replace(micro_batches=_each(change, sent.micro_batches)) if isinstance(sent, StepOfSamples) else sent


def _tensor(_: str, given: Any) -> Any:
    if isinstance(given, _LeftOut):
        return torch.full((), given.value).expand(given.shape)
    return torch.from_numpy(given) if isinstance(given, np.ndarray) else given


def can_begin_anew(data: object) -> bool:
    """Whether iterating over it begins at the first sample each time, as an iterator or a generator does not."""
    return isinstance(data, Iterable) and not isinstance(data, Iterator)


def check_length(data: object, taker: str) -> None:
    """Refuses a stream where the number of samples has to be known.

    Raises:
        ValueError: the data have no length.
    """
    if not hasattr(data, "__len__"):
        raise ValueError(
            f"{taker} takes a sequence, and a {type(data).__name__} has no length; list(data.take(n)) is a sequence"
        )


class Stream:
    """Samples of an iterable by their numbers, which rise: sample n is the n-th, whatever the layout is.

    A rank passes by the samples of others, and a run that resumes those of the steps before: each costs its reading.
    At its end the stream begins anew, behind `set_epoch` where it has that (`datasets.IterableDataset`). So its samples
    have to be the same each time, but for the epoch's shuffling. Nothing but the sample itself is held in memory.

    Args:
        data: the iterable: each `iter(data)` begins at the first sample.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._epoch = self._next = 0
        self._samples: Iterator[Any] | None = None

    def __len__(self) -> int:
        """As many as numbers go: where the stream ends is known when it ends."""
        return sys.maxsize

    def __getitem__(self, number: int) -> Any:
        """The sample; those between this and the one before are passed by.

        Raises:
            ValueError: the stream has none.
        """
        if self._samples is None or number < self._next:
            self._epoch = self._next = 0
            self._samples = self._begun()
        while self._next < number:
            self._following()
        return self._following()

    def _begun(self) -> Iterator[Any]:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(self._epoch)
        return iter(self._data)

    def _following(self) -> Any:
        assert self._samples is not None
        found = next(self._samples, self)
        if found is self:
            self._epoch += 1
            self._samples = self._begun()
            found = next(self._samples, self)
        if found is self:
            raise ValueError("the data set is empty" if self._next == 0 else "the stream is empty when it begins anew")
        self._next += 1
        return found


class PlanLoader:
    """Yields this rank's micro-batches, step after step, without end: the data set is walked round and round.

    While a step trains, a thread reads the samples of the next one: no sample goes to another process, and what reads
    files or is NumPy's leaves the interpreter to the training. One thread reads at a time, and a step is all that it is
    ahead. An error of the data set is raised where the step that needs the sample begins.

    Every rank reads the whole sequences of its copy of the model, which costs least where samples are cheap. Where they
    are computed, `reads_once` lets one rank of each copy read them for the others.

    Args:
        dataset: a sequence of samples, each a mapping of tensors, arrays or lists [S] (`input_ids`, `labels`) or token
            ids [S] alone; without labels, token ids are their own. Rows of `datasets.Dataset`, in any format. Or an
            iterable of samples that begins anew with each `iter`, such as `datasets.IterableDataset`: see `Stream`.
        mesh: this rank's place.
        first_step: the step to begin with, after a resume.
    """

    def __init__(self, dataset: Sequence[Any] | Iterable[Any], mesh: Mesh, first_step: int = 0) -> None:
        samples: Any = dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            if not can_begin_anew(dataset):
                raise ValueError(
                    f"a {type(dataset).__name__} is not read: a resumed run has to see the same samples again; give a "
                    "sequence, or an iterable that begins anew with each iter(), such as datasets.IterableDataset"
                )
            samples = Stream(dataset)
        if len(samples) == 0:
            raise ValueError("the data set is empty")
        self._dataset: Sequence[Any] = samples
        self._mesh = mesh
        self.step = first_step
        self.reads_ahead = True
        """False for a data set that draws from torch's generator, and would do so between the draws of the model. One
        that did when its first samples were read is not read ahead."""
        self.reads_once = False
        """True: of the ranks of a copy of the model (tp, cp and pp) one reads, and sends the others what they look at:
        for samples that cost time. All ranks set it before `iter(loader)`. A data set that draws from torch's generator
        is refused then, since the other ranks would not draw."""
        self._begun = 0, 0
        self._reading = 0

    def resume(self, step: int, samples: int) -> None:
        """Goes on behind `step` steps, which took `samples` samples: with batches of another size, where it changed."""
        self.step, self._begun = step, (step, samples)

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches; the first of a step counts the step's tokens over dp."""
        once = self.reads_once and any(self._mesh.size(axis) > 1 for axis in ("tp", "cp", "pp"))
        replica = Replica(self._mesh) if once else None
        reads = replica is None or replica.reads
        with ThreadPoolExecutor(1, "parcompile reads ahead") as thread:
            firsts, coming = range(0), Future[StepOfSamples]()
            while True:
                if reads and firsts != self._firsts(self.step):  # the first step, or one that the user has set
                    firsts = self._firsts(self.step)
                    coming = thread.submit(self._read_and_watch, firsts, replica is not None)
                step = coming.result() if replica is None else replica.share(coming.result, self._where)
                firsts = self._firsts(self.step + 1) if self.reads_ahead else range(0)
                if reads and self.reads_ahead:
                    coming = thread.submit(self._read, firsts)
                yield from self._parts(step)
                self.step += 1

    def _parts(self, step: StepOfSamples) -> Iterator[Batch]:
        divisor = self._divisor(step)
        for first, batch in zip(step.firsts, step.micro_batches, strict=True):
            yield {**self._part(batch), "num_items_in_batch": divisor, FIRST_SAMPLE: first}

    def _firsts(self, step: int) -> range:
        """The numbers of the first sequences of this dp rank's micro-batches in a step.

        Raises:
            ValueError: the step is one before those with which a run went on whose batch grows.
        """
        training, (begun, samples), dp = self._mesh.plan.spec.training, self._begun, self._mesh.size("dp")
        if step < begun and training.rampup_batch_size is not None:
            raise ValueError(f"loader.step {step}: the run went on behind step {begun}, and its batch grows")
        before, size = training.samples_after(step - begun, samples), training.micro_batch_size
        return range(before + self._mesh.index("dp") * size, before + training.batch(before), size * dp)

    def _read_and_watch(self, firsts: range, for_others: bool) -> StepOfSamples:
        """Reads while the training waits: whoever draws from torch's generator meanwhile is the data set."""
        state = torch.random.get_rng_state()
        found = self._read(firsts)
        if not torch.equal(state, torch.random.get_rng_state()):
            self.reads_ahead = False
            if for_others:
                raise ValueError(
                    "the data set draws from torch's generator, and with reads_once it does so on one rank of a copy "
                    "of the model alone: the others would draw other dropout. Let it draw from a torch.Generator of "
                    "its own, or leave reads_once False"
                )
        return found

    def _read(self, firsts: range) -> StepOfSamples:
        micro_batches = [self._whole(first) for first in firsts]
        predicted = sum(int((batch["shift_labels"] != IGNORED_LABEL).sum()) for batch in micro_batches)
        return StepOfSamples(firsts, micro_batches, predicted)

    def _sample(self, data: Sequence[Any], number: int) -> Any:
        """A sample of the data as it is given.

        Raises:
            ValueError: there is none, though the data are longer.
        """
        self._reading = number
        try:
            return data[number]
        except StopIteration:
            raise ValueError(f"the data set ends before sample {number}, and its length is {len(data)}") from None

    def _where(self) -> str:
        return f"sample {self._reading}"

    def _numbers(self, first: int) -> list[int]:
        """Of the samples of a micro-batch in the data set."""
        size = self._mesh.plan.spec.training.micro_batch_size
        return [index % len(self._dataset) for index in range(first, first + size)]

    def _part(self, batch: Batch) -> Batch:
        """This rank's tokens of it."""
        return split_batch(batch, self._mesh)

    def _whole(self, first: int) -> Batch:
        """The whole sequences of the micro-batch that begins with this one."""
        numbers = self._numbers(first)
        batch = stack([self._sample(self._dataset, number) for number in numbers], numbers)
        if "labels" in batch:
            batch["shift_labels"] = shift_labels(batch.pop("labels"), batch.get("position_ids"))
        if "attention_mask" in batch:
            batch["shift_labels"] = without_padding(batch["shift_labels"], batch["attention_mask"])
        return batch

    def _divisor(self, step: StepOfSamples) -> Tensor:
        """Predicted tokens of the global batch / (micro-batches · dp); see `parcompile.runtime.loss`."""
        count = to_device(torch.tensor(float(step.predicted)), self._mesh.device)
        dp = self._mesh.size("dp")
        if dp > 1:
            dist.all_reduce(count, group=self._mesh.group("dp"))
        return count.clamp(min=1) / (len(step.micro_batches) * dp)


class PackedPlanLoader(PlanLoader):
    """Yields this rank's micro-batches of documents, step after step, without end, for the engine or the model.

    Every micro-batch is packed for itself: its attention is even on all cp ranks, whatever the lengths are. Ranks are
    padded to be equally long, so that they may hold a few tokens more than the plan says.

    Args:
        documents: a sequence of documents, each token ids [n], or a mapping of tensors, arrays or lists [n, …] with
            `input_ids` and perhaps `labels`; n is at most the plan's sequence length.
        mesh: this rank's place.
        first_step: the step to begin with, after a resume.
        padding_id: the token that fills up.
        lengths: of the documents, where they are known; else every document is read once.

    Raises:
        ValueError: there are no documents, or one is empty or longer than the plan's sequences.
    """

    def __init__(
        self,
        documents: Sequence[Any],
        mesh: Mesh,
        first_step: int = 0,
        *,
        padding_id: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> None:
        check_length(documents, "PackedPlanLoader")
        spec = mesh.plan.spec
        room = spec.training.sequence_length
        if lengths is None:
            lengths = [len(tensors_of(documents[number], number)["input_ids"]) for number in range(len(documents))]
        for number, length in enumerate(lengths):
            if not 0 < length <= room:
                raise ValueError(f"document {number} has {length} tokens: expected 1 to sequence_length {room}")
        packs = list(batches_of_tokens(range(len(lengths)), room, length_of=lambda number: lengths[number]))
        super().__init__(packs, mesh, first_step)
        self._documents = documents
        self._collate = PackedCollator(
            mesh.size("cp"),
            mesh.index("cp"),
            padding_id,
            layout=spec.parallelism.cp_layout,
            costs=PackingCosts.of_hidden_size(spec.model.shape.hidden_size),
        )

    def _whole(self, first: int) -> Batch:
        documents = []
        packs = [self._dataset[number] for number in self._numbers(first)]
        for sample, numbers in enumerate(packs, first):
            start = 0
            for document in map(self._document, numbers):
                positions = torch.arange(start, start + len(document["input_ids"]))
                places = torch.stack([torch.full_like(positions, sample), positions], 1)
                documents.append({**document, TOKEN_PLACES: places})
                start += len(positions)
        # The first token of a document is predicted by none.
        predicted = [document["labels"][1:] for document in documents]
        return {"documents": documents, "shift_labels": torch.cat(predicted)}

    def _document(self, number: int) -> dict[str, Tensor]:
        document = tensors_of(self._sample(self._documents, number), number)
        mask = document.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise ValueError(f"document {number} is padded (its attention_mask has zeros): give it without padding")
        return document

    def _part(self, batch: Batch) -> Batch:
        packed = self._collate(batch["documents"])
        device = self._mesh.device
        return {name: to_device(part, device) if isinstance(part, Tensor) else part for name, part in packed.items()}

"""What a run does on its way to its numbers: laid beside one process, the first difference explains a red cell."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

LIMITS = {"fp32": 1e-4, "bf16": 0.1, "fp64": 1e-8}
"""Relative differences of single tensors that rounding does not explain."""

OUTPUT, OF_OUTPUT, GRADIENT = "the output", "the gradient of the output", "the gradient"

_COLLECTIVES = (
    *("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather", "all_to_all_single"),
    *("reduce", "broadcast", "send", "recv"),
)
_SHOWN = 6
"""So many collectives are named: the last ones in front of the first difference."""

Data = Mapping[str, Any]


class States:
    """How many steps the state of each tensor that is stepped counts, in front of each of its steps."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, Tensor], list[float]] = {}  # an optimizer may step others, on its tensors
        register_optimizer_step_pre_hook(self._before)

    def _before(self, optimizer: Any, *_: Any) -> None:
        for tensor in (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None):
            self._counts.setdefault((optimizer, tensor), []).append(_counted(optimizer.state.get(tensor, {})))

    def fault(self, before: int, steps: int) -> str | None:
        """What is wrong in front of the last `steps`, where `before` were taken."""
        firsts = [counts[-steps:][0] for counts in self._counts.values()] or [before]
        if min(firsts) >= 0 and max(firsts) == before:
            return None
        said = "has moments" if min(firsts) < 0 else f"counts {max(firsts):g} step(s)"
        return f"{said} in front of step {before + 1}"


class Trace:
    """Of one process: each module's first output and its gradient in each micro-batch, and what its optimizer is given.

    Attributes:
        calls: of each micro-batch its `ids` and tensors, by what they are and the module's or parameter's name.
        steps: of each step of an optimizer the `collectives` in front of it, the norm of its gradients, gradients
            (before) and values (after) of parameters that are the model's own.
        collectives: each in words.
        fronts: how many collectives were in front of each micro-batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[dict[Any, Tensor]] = []
        self.steps: list[dict[str, Any]] = []
        self.collectives: list[str] = []
        self.fronts: list[int] = []
        self._model, self._deep = model, 0
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        for name in _COLLECTIVES:
            setattr(dist, name, self._logged(name, getattr(dist, name)))

    def watch(self, model: nn.Module) -> None:
        """The modules and parameters that compute."""

        def begin(_: nn.Module, given: Any, named: Any) -> None:
            ids = named.get("input_ids", given[0] if given else None)
            self.fronts.append(len(self.collectives))
            self.calls.append({} if ids is None else {"ids": ids.detach().clone()})

        model.register_forward_pre_hook(begin, with_kwargs=True)
        for name, module in model.named_modules():
            module.register_forward_hook(self._output(name or "the model"))
        for name, parameter in model.named_parameters():
            parameter.register_hook(self._keeper((GRADIENT, name)))  # type: ignore[no-untyped-call]

    def data(self) -> Data:
        """To be saved."""
        return {name: getattr(self, name) for name in ("calls", "steps", "collectives", "fronts")}

    def _keeper(self, key: tuple[str, str]) -> Callable[[Tensor], None]:
        def keep(tensor: Tensor) -> None:
            if self.calls:
                self.calls[-1].setdefault(key, tensor.detach().clone())

        return keep

    def _output(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if not self.calls or tensor is None or (OUTPUT, name) in self.calls[-1]:
                return  # recomputed, or used again
            self.calls[-1][OUTPUT, name] = tensor.detach().clone()
            if tensor.requires_grad:
                tensor.register_hook(self._keeper((OF_OUTPUT, name)))  # type: ignore[no-untyped-call]

        return hook

    def _named(self, optimizer: Any, of: Callable[[Any], Any]) -> dict[str, Tensor]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        own = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names]
        return {names[id(parameter)]: full(value).clone() for parameter in own if (value := of(parameter)) is not None}

    def _before(self, optimizer: Any, *_: Any) -> None:
        gradients = self._named(optimizer, lambda parameter: parameter.grad)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        every = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(full(gradient).double().norm()) ** 2 for gradient in every))
        front = len(self.collectives)
        if self._deep:  # an optimizer that steps others: theirs is the state
            self.steps.pop()
        self._deep += 1
        self.steps.append({"collectives": front, "norm": norm, "gradients": gradients})

    def _after(self, optimizer: Any, *_: Any) -> None:
        self._deep -= 1
        self.steps[-1]["after"] = self._named(optimizer, lambda parameter: parameter.detach())

    def _logged(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            tensor = _first_tensor([*given, *named.values()])
            group = named.get("group") or next((value for value in given if isinstance(value, dist.ProcessGroup)), None)
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
            before = "" if tensor is None else f" of {list(tensor.shape)} {_digest(tensor)}"
            result = collective(*given, **named)
            after = "" if tensor is None or named.get("async_op") else f" -> {_digest(tensor)}"
            self.collectives.append(f"{name} over ranks {ranks}{before}{after}")
            return result

        return call


def _counted(state: Mapping[str, Any]) -> float:
    """Steps that a tensor's state counts; -1 where it counts none and has moments."""
    steps = float(state.get("step", 0.0))
    filled = any(isinstance(value, Tensor) and bool(value.any()) for value in state.values())
    return steps if steps or not filled else -1.0


def explain(
    cell: Mapping[str, Any], ranks: Sequence[Data], told: Data, expected: Data, reference: Data
) -> dict[str, Any]:
    """The first difference between the ranks' traces and that of one process, whose result is `expected`."""
    for rank, where, said, front in _differences(cell, ranks, told, expected, reference):
        return {"place": where, "said": said, "collectives": ranks[rank]["collectives"][:front][-_SHOWN:]}
    return {"place": "", "said": "nothing that is watched differs in front of the last parameters", "collectives": []}


def _differences(
    cell: Mapping[str, Any], ranks: Sequence[Data], told: Data, expected: Data, reference: Data
) -> Iterator[tuple[int, str, str, int]]:
    """Rank, place, sentence, and how many collectives came before; in the order in which they arise."""
    limit, count = LIMITS[cell["dtype"]], len(told["loss"])
    begun, ended = len(expected["loss"]) - count, [rank["steps"][-count:] for rank in ranks]
    pieces = {_digest(piece["ids"]): piece for piece in reference["calls"]}
    whole = all(cell.get(axis, 1) == 1 for axis in ("tp", "cp", "pp", "ep"))
    weight: float | None = None
    for step in range(count):
        for micro in range(cell["accumulation"]):
            number = step * cell["accumulation"] + micro
            for rank, trace in enumerate(ranks):
                if number >= len(trace["calls"]):
                    continue
                call, at = trace["calls"][number], f"micro-batch {micro + 1} of step {begun + step + 1} on rank {rank}"
                front = trace["fronts"][number]
                piece = pieces.get(_digest(call["ids"])) if "ids" in call else None
                if piece is None:
                    if whole and "ids" in call:
                        yield rank, f"the rows of {at}", "they are those of no micro-batch of one process", front
                    continue
                for key, actual, right in _pairs(call, piece, (OUTPUT,)):
                    if not (off := _distance(actual, right)) <= limit:
                        yield rank, f"{key[0]} of {key[1]}, {at}", f"relative error {off:.1e}", front
                for key, actual, right in _pairs(call, piece, (OF_OUTPUT, GRADIENT)):
                    times = _times(actual, right)
                    weight = times if weight is None else weight
                    if not abs(times - weight) <= limit * abs(weight) or not _distance(actual, times * right) <= limit:
                        said = f"it is {times / (weight or 1):.4g} times that of one process, counted from the first"
                        off = _distance(actual, times * right)
                        said += f"; and in another direction, relative error {off:.1e}" if not off <= limit else ""
                        yield rank, f"{key[0]} of {key[1]}, {at}", said, front
        norm = _apart("norm", told, expected, step, limit)
        for rank, steps in enumerate(ended):
            if step < len(steps):
                own = steps[step]
                for where, said in _of_step(own, reference["steps"][begun + step], ranks if whole else (), step, limit):
                    yield rank, f"{where}, step {begun + step + 1} on rank {rank}", f"{said}{norm}", own["collectives"]
        for name, apart in (("norm", norm), ("loss", _apart("loss", told, expected, step, limit))):
            if apart:
                yield 0, f"the {name} that is told of step {begun + step + 1}", apart.removeprefix("; "), 0


def _apart(name: str, told: Data, expected: Data, step: int, limit: float) -> str:
    """How far what an engine tells of a step is from that of one process, in words; nothing where it is not."""
    actual, right = told[name][step], expected[name][step - len(told[name])]
    if actual is None or abs(actual - right) <= limit * abs(right):
        return ""
    return f"; the {name} that is told is {actual:.6g}, that of one process {right:.6g}"


def _of_step(own: Data, right: Data, ranks: Sequence[Data], step: int, limit: float) -> Iterator[tuple[str, str]]:
    """What an optimizer is given, and what it makes of it."""
    both = [name for name in right["gradients"] if name in own["gradients"]]
    both = [name for name in both if own["gradients"][name].shape == right["gradients"][name].shape]
    wrong = [name for name in both if not _distance(own["gradients"][name], right["gradients"][name]) <= limit]
    times = {name: _times(own["gradients"][name], right["gradients"][name]) for name in wrong}
    if wrong:
        all_alike = len(wrong) == len(both) and max(times.values()) - min(times.values()) <= limit * max(times.values())
        where = "the gradient of every parameter" if all_alike else f"the gradient of {wrong[0]}"
        much = f"it is {times[wrong[0]]:.4g} times that of one process, after reduction and clipping"
        yield where, much if all_alike else f"{much}; {len(wrong)} of {len(both)} parameters differ"
    norms = [rank["steps"][step]["norm"] for rank in ranks if step < len(rank["steps"])]
    total = math.sqrt(sum(norm**2 for norm in norms))
    if (
        norms
        and not both
        and not any(abs(norm - right["norm"]) <= limit * right["norm"] for norm in (own["norm"], total))
    ):
        said = f"{total:.6g} over the shards of all ranks, one process has {right['norm']:.6g}"
        yield "the norm of the gradients that the optimizer is given", said
    for name in both:
        if name in own.get("after", {}) and not _distance(own["after"][name], right["after"][name]) <= limit:
            yield (
                f"the updated value of {name}",
                f"relative error {_distance(own['after'][name], right['after'][name]):.1e}",
            )


def _pairs(call: Data, piece: Data, kinds: Sequence[str]) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """In the order of one process; what has another shape is split over ranks."""
    for key, right in piece.items():
        if key[0] in kinds and key in call and call[key].shape == right.shape:
            yield key, call[key].double(), right.double()


def _distance(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right.double()).norm()) / max(float(right.double().norm()), 1e-12)


def _times(actual: Tensor, right: Tensor) -> float:
    right = right.double()
    return float((actual.double() * right).sum() / (right * right).sum().clamp(min=1e-30))


def _first_tensor(output: Any) -> Tensor | None:
    leaves = tree_leaves(getattr(output, "logits", output))
    return next((one for one in leaves if isinstance(one, Tensor)), None)


def full(tensor: Any) -> Tensor:
    """Of all ranks, where it is a shard of torch's; every rank calls it."""
    detached: Tensor = tensor.detach()
    return detached.full_tensor() if hasattr(detached, "full_tensor") else detached


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().double().contiguous().numpy().tobytes()).hexdigest()[:8]

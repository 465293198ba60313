"""The optimizers of a plan: torch's classes, and Muon, which needs matrices whole of which ranks hold parts.

Each matrix is put together on one rank, orthogonalised there, and sent back.

ZeRO steps with flat shards of fp32 weights, clipped gradients and states, whatever its stage. Momentum is computed
there, element by element, and is saved as the moments of Adam are. What is orthogonalised is made whole: pieces go to
the owner's place in the group of the shards, slices from there to the owner's place on tp (`layout.shards`), and back
on the same way. Nothing but the update travels.

The arithmetic is that of torch 2.13 (torch/optim/_muon.py): momentum and update by `lerp`, five steps of Newton-Schulz
in bf16 with its coefficients, decoupled weight decay. `ns_dtype` fp32 iterates in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import EXPERT_DP
from parcompile.layout.shards import Owner, is_decayed, newton_schulz_work, pieces, rounds, takes_muon
from parcompile.runtime.deepspeed_patches.optimizer_state import (
    PlaceInShard,
    local_shape,
    master_shards,
    parameter_groups,
    place_in_shard,
)
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.expert_parallel import is_dealt
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import matrix_of, plain_name
from parcompile.runtime.model.slices import Slices
from parcompile.runtime.tensor_parallel.partial import take_ranges
from parcompile.spec import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, as in torch/optim/_muon.py."""
_SMALLEST_NORM = 1e-7
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def newton_schulz(matrices_EMN: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Each of the matrices `[E, M, N]` orthogonalised by itself, in `dtype`: `_zeropower_via_newtonschulz` of torch."""
    a, b, c = COEFFICIENTS
    upright = matrices_EMN.shape[1] > matrices_EMN.shape[2]
    found = matrices_EMN.mT if upright else matrices_EMN
    found = found.to(dtype)
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if upright else found


def rate_factor(adjust_lr: str, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by: `_adjust_lr` of torch/optim/_muon.py."""
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def apart_by_decay(
    parameters: Sequence[nn.Parameter], model: nn.Module, mesh: Mesh, optimizer: Optimizer
) -> list[dict[str, Any]]:
    """Parameters as the group that is decayed, and the group that is not."""
    slices, left_out = Slices(mesh), optimizer.no_weight_decay

    def decays(name: str) -> bool:
        plain = plain_name(name)
        return not slices.has(plain) or is_decayed(slices.of(plain).parameter, left_out)

    return _apart(parameters, model, decays, {"weight_decay": optimizer.weight_decay}, {"weight_decay": 0.0})


def apart_by_muon(given: Sequence[Any], model: nn.Module, mesh: Mesh, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups of matrices that take Muon and groups of others; settings are kept."""
    slices = Slices(mesh)

    def taken(name: str) -> bool:
        plain = plain_name(name)
        return matrix_of(name) is None and slices.has(plain) and takes_muon(slices.of(plain).parameter)

    return _apart(given, model, taken, muon_settings(optimizer), {})


def _apart(
    given: Sequence[Any], model: nn.Module, chosen: Callable[[str], bool], own: dict[str, Any], others: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each group in two, those that are chosen by their names first, with further settings of both."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = []
    for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
        parameters = list(group["params"])
        for is_own, settings in ((True, own), (False, others)):
            if held := [one for one in parameters if chosen(names.get(one, "")) is is_own]:
                found.append({**group, **settings, "params": held})
    return found


def muon_settings(optimizer: Optimizer) -> dict[str, Any]:
    """What a group of matrices has beside the settings of AdamW."""
    return {key: getattr(optimizer, key) for key in ("momentum", "nesterov", "ns_steps", "ns_dtype", "adjust_lr")}


def fresh_optimizer(parameters: Any, optimizer: Optimizer, *, on_host: bool = False) -> torch.optim.Optimizer:
    """Torch's class with the plan's values, or that of this module which takes its place under ZeRO."""
    rate: Any = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.is_muon:
        return MatrixAdamW(parameters, optimizer)
    if optimizer.type == "sgd":
        momentum: Any = {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
        return torch.optim.SGD(parameters, **rate, **momentum)
    if optimizer.type == "adagrad":
        return ShardAdagrad(parameters, torch.optim.Adagrad([torch.zeros(1)], **rate, eps=optimizer.eps), on_host)
    make = torch.optim.AdamW if optimizer.type == "adamw" else torch.optim.Adam
    return make(parameters, **rate, betas=optimizer.betas, eps=optimizer.eps)


class ShardAdagrad(torch.optim.Optimizer):
    """The arithmetic of torch's Adagrad, whose sums begin at the first step, when ZeRO has put shards in the groups.

    An instance of torch's own ZeRO replaces by one of a single group, which schedules do not reach
    (`initialize_optimizer_states`, DeepSpeed's runtime/zero/stage_1_and_2.py and stage3.py).
    """

    def __init__(self, parameters: Any, like: torch.optim.Adagrad, on_host: bool) -> None:
        # On the host one kernel, which torch brings compiled, instead of several passes through memory.
        super().__init__(parameters, {**like.defaults, "fused": on_host or None})

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        for one in group["params"]:
            if one.grad is not None and not self.state[one]:
                total = torch.full_like(one, group["initial_accumulator_value"])
                self.state[one] = {"step": torch.tensor(0.0), "sum": total}
        return cast(Any, torch.optim.Adagrad)._init_group(self, group, *lists)

    step = torch.optim.Adagrad.step


class MatrixAdamW(torch.optim.AdamW):
    """Muon for the groups with a `momentum`, torch's AdamW for all others.

    Its parameters are flat shards by the time it steps; `join_shards` tells it what lies in them.
    """

    def __init__(self, groups: Any, optimizer: Optimizer) -> None:
        super().__init__(
            groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
        )
        self.shards: dict[int, MatricesOfShard] = {}
        """By the identity of a flat shard."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's optimizers do; AdamW would look for the steps of Adam in every state."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 -- torch's
        """Updates the weights of the groups that are there: ZeRO steps group by group."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for flat in group["params"] if "momentum" in group else ():
                if flat.grad is not None:
                    self._step_matrices(flat, group)

    def _step_matrices(self, flat: Tensor, group: dict[str, Any]) -> None:
        state = self.state[flat]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(flat)
        momentum: Tensor = state["momentum_buffer"]
        assert flat.grad is not None
        update = flat.grad
        momentum.lerp_(update, 1 - group["momentum"])
        # In the place of the gradient, which is done with.
        update.lerp_(momentum, group["momentum"]) if group["nesterov"] else update.copy_(momentum)
        self.shards[id(flat)].orthogonalise(update, group)
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        flat.add_(update, alpha=-group["lr"])


def keep_steps_beside_shards(optimizer: torch.optim.Optimizer) -> None:
    """Moves the count of steps of a fused Adam to where its parameter is: one that was loaded may lie on the host.

    The kernel reads it there; torch's other ways read it on the host.
    """

    def move(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"] if group.get("fused") else ():
                state = optimizer.state.get(one, {})
                if isinstance(step := state.get("step"), Tensor) and step.device != one.device:
                    state["step"] = step.to(one.device)

    optimizer.register_step_pre_hook(move)


def join_shards(engine: Any, mesh: Mesh) -> None:
    """Tells Muon which matrices lie in the shards of an engine, and keeps what a fused Adam counts beside its shards.

    Raises:
        RunError: DeepSpeed has replaced an Adagrad that a script brings.
    """
    optimizer = getattr(engine.optimizer, "optimizer", None)
    if isinstance(optimizer, torch.optim.Adam):
        keep_steps_beside_shards(optimizer)
    if isinstance(optimizer, torch.optim.Adagrad) and optimizer is not engine.basic_optimizer:
        raise everywhere(
            "DeepSpeed replaces a torch.optim.Adagrad by one whose rate no schedule moves: give initialize no "
            'optimizer, and write "adagrad" as training.optimizer.type of the spec'
        )
    if not isinstance(optimizer, MatrixAdamW):
        return
    names = {parameter: plain_name(name) for name, parameter in engine.module.named_parameters()}
    slices = Slices(mesh)
    for flat, parameters in zip(master_shards(engine.optimizer), parameter_groups(engine.optimizer), strict=True):
        if parameters and slices.has(names[parameters[0]]) and takes_muon(slices.of(names[parameters[0]]).parameter):
            optimizer.shards[id(flat)] = MatricesOfShard([(one, names[one]) for one in parameters], mesh, slices)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix, or a stack of them, of which this rank holds a part."""

    local_shape: tuple[int, ...]
    pieces: list[tuple[int, int]]
    """By shard, the elements of what a tp rank has."""
    place: PlaceInShard | None
    """What lies in this rank's shard, and where."""
    dim: int | None
    """The dim that tp cuts; None: it does not."""
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    size: int
    """Of that dim, whole."""


class MatricesOfShard:
    """The matrices of a group of parameters, whose elements lie in the shards of the ranks of a group.

    Args:
        parameters: of the group, in order, with their names in the whole model.
        mesh: the live ranks.
        slices: the plan's rows for this rank.

    Raises:
        RunError: they lie otherwise in the shard than by DeepSpeed's rule.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, str]], mesh: Mesh, slices: Slices) -> None:
        self._group = mesh.group(EXPERT_DP if is_dealt(parameters[0][0]) else "dp-cp")
        self._tp = mesh.group("tp")
        self._shards, self._shard = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._whole_shards = mesh.plan.spec.zero_stage == 0
        shapes = [local_shape(parameter) for parameter, _ in parameters]
        held = pieces(
            [math.prod(shape) for shape in shapes],
            self._shards,
            of_each=mesh.plan.spec.shards_weights,
            whole=self._whole_shards,
        )
        self._matrices = []
        for (parameter, name), shape, of_ranks in zip(parameters, shapes, held, strict=True):
            piece, place = slices.of(name), place_in_shard(parameter)
            start, stop = of_ranks[self._shard]
            if (place.of_parameter if place is not None else slice(0, 0)) != slice(start, stop) and stop > start:
                raise RunError(f"{name} does not lie in its shard of ZeRO as DeepSpeed's rule says: {place}")
            cut = piece.is_cut and piece.layout.ranges is not None and piece.dim is not None
            ranges = piece.layout.ranges or ()
            size = piece.layout.full_shape[piece.dim] if cut and piece.dim is not None else 0
            matrix = _Matrix(shape, of_ranks, place, piece.dim if cut else None, ranges if cut else (), size)
            self._matrices.append(matrix)
        self.rounds = rounds(
            [newton_schulz_work(one.local_shape) for one in self._matrices],
            [one.dim is not None for one in self._matrices],
            self._shards,
            dist.get_world_size(self._tp),
        )

    def orthogonalise(self, update: Tensor, settings: dict[str, Any]) -> None:
        """Puts orthogonalised matrices, times the factors of their rates, in the place of what a flat shard holds.

        All ranks of the group and of tp call it.
        """
        for turn in self.rounds:
            self._turn(turn, update, settings)

    def _turn(self, turn: list[Owner], update: Tensor, settings: dict[str, Any]) -> None:
        mine = [owner for owner in turn if owner.shard == self._shard]
        locals_ = self._collect(turn, mine, update)
        is_cut = turn[0].tp is not None
        if not is_cut:
            done = [
                self._orthogonal(one.view(self._of(owner).local_shape), settings)
                for owner, one in zip(mine, locals_, strict=True)
            ]
        else:
            done = self._over_tp(mine, locals_, settings) if mine else []
        self._return(turn, mine, [one.reshape(-1) for one in done], update)

    def _of(self, owner: Owner) -> _Matrix:
        return self._matrices[owner.matrix]

    def _collect(self, turn: list[Owner], mine: list[Owner], update: Tensor) -> list[Tensor]:
        """Of the matrices whose owner has this rank's place in the group, what this rank's place on tp has: flat."""
        if self._whole_shards or self._shards == 1:
            return [self._mine(owner, update) for owner in mine]
        leaving = [[self._mine(one, update) for one in turn if one.shard == rank] for rank in range(self._shards)]
        coming = [[_length(self._of(one).pieces[rank]) for one in mine] for rank in range(self._shards)]
        got = _exchange(leaving, coming, update, self._group)
        return [torch.cat([got[rank][number] for rank in range(self._shards)]) for number in range(len(mine))]

    def _return(self, turn: list[Owner], mine: list[Owner], done: list[Tensor], update: Tensor) -> None:
        """The way back: every rank gets the elements of its shard."""
        if self._shards == 1:
            for owner, one in zip(mine, done, strict=True):
                self._mine(owner, update).copy_(one)
            return
        leaving = [
            [one[slice(*self._of(owner).pieces[rank])] for owner, one in zip(mine, done, strict=True)]
            for rank in range(self._shards)
        ]
        owned = [[owner for owner in turn if owner.shard == rank] for rank in range(self._shards)]
        coming = [[_length(self._of(owner).pieces[self._shard]) for owner in of_rank] for of_rank in owned]
        for of_rank, got in zip(owned, _exchange(leaving, coming, update, self._group), strict=True):
            for owner, one in zip(of_rank, got, strict=True):
                self._mine(owner, update).copy_(one)

    def _mine(self, owner: Owner, update: Tensor) -> Tensor:
        """The elements of a matrix in this rank's shard."""
        place = self._of(owner).place
        return update[:0] if place is None else update[place.of_shard]

    def _over_tp(self, mine: list[Owner], locals_: list[Tensor], settings: dict[str, Any]) -> list[Tensor]:
        """Slices go to the owners' places on tp, and come back orthogonalised."""
        ranks, rank = dist.get_world_size(self._tp), dist.get_rank(self._tp)
        own = [owner for owner in mine if owner.tp == rank]
        sizes = [
            [one.numel() for owner, one in zip(mine, locals_, strict=True) if owner.tp == to] for to in range(ranks)
        ]
        leaving = [[one for owner, one in zip(mine, locals_, strict=True) if owner.tp == to] for to in range(ranks)]
        coming = [[math.prod(self._of(owner).local_shape) for owner in own] for _ in range(ranks)]
        got = _exchange(leaving, coming, locals_[0], self._tp)
        back: list[list[Tensor]] = [[] for _ in range(ranks)]
        for number, owner in enumerate(own):
            matrix = self._of(owner)
            assert matrix.dim is not None
            whole = _whole(matrix, [got[one][number].view(matrix.local_shape) for one in range(ranks)])
            whole = self._orthogonal(whole, settings)
            for to in range(ranks):
                back[to].append(take_ranges(whole, matrix.dim, matrix.ranges[to]).view(-1))
        done = [one for of_rank in _exchange(back, sizes, locals_[0], self._tp) for one in of_rank]
        order = sorted(range(len(mine)), key=lambda one: mine[one].tp or 0)
        return [done[order.index(number)] for number in range(len(mine))]

    @staticmethod
    def _orthogonal(whole: Tensor, settings: dict[str, Any]) -> Tensor:
        rows, columns = whole.shape[-2:]
        stack = whole.view(-1, rows, columns)
        found = newton_schulz(stack, settings["ns_steps"], _DTYPES[settings["ns_dtype"]]).to(whole.dtype)
        return found.mul_(rate_factor(settings["adjust_lr"], rows, columns)).reshape(whole.shape)


def _length(piece: tuple[int, int]) -> int:
    return piece[1] - piece[0]


def _whole(matrix: _Matrix, slices: Sequence[Tensor]) -> Tensor:
    """A matrix from the slices of the tp ranks; what several of them hold is the same."""
    assert matrix.dim is not None
    shape = list(matrix.local_shape)
    shape[matrix.dim] = matrix.size
    whole = slices[0].new_empty(shape)
    for one, ranges in zip(slices, matrix.ranges, strict=True):
        offset = 0
        for start, stop in ranges:
            whole.narrow(matrix.dim, start, stop - start).copy_(one.narrow(matrix.dim, offset, stop - start))
            offset += stop - start
    return whole


def _exchange(
    leaving: Sequence[Sequence[Tensor]], coming: Sequence[Sequence[int]], like: Tensor, group: dist.ProcessGroup
) -> list[tuple[Tensor, ...]]:
    """To each rank of a group the flat tensors of its entry; returns those that come, of the sizes in each entry."""
    sent = [one for of_rank in leaving for one in of_rank]
    given = torch.cat(sent) if sent else like.new_empty(0)
    sizes = [sum(of_rank) for of_rank in coming]
    got = like.new_empty(sum(sizes))
    dist.all_to_all_single(got, given, sizes, [sum(one.numel() for one in of_rank) for of_rank in leaving], group=group)
    return [
        tuple(torch.split(one, list(of_rank))) for one, of_rank in zip(torch.split(got, sizes), coming, strict=True)
    ]

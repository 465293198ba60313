"""Every place where the runtime changes DeepSpeed, or relies on names of it that are not documented.

Read off DeepSpeed 0.19.8, the version that the tests run with. Whoever moves to another version goes through these
lists.

Changed:

- `ops.__compatible_ops__` (ops/__init__.py): the CPU accelerator would compile an operator at start-up.
  `forbid_jit_builds`
- `comm.comm.cdb`, `utils.groups.mpu`, `utils.groups._WORLD_GROUP` and the tables of expert groups (module globals):
  they outlive the process groups that they are of. `forget_groups`
- The tables of expert groups in utils/groups.py, which DeepSpeed's own MoE layers fill: the plan's groups are put into
  them. `register_expert_groups`
- A module of the class `deepspeed.moe.layer.MoE` in a model, by which the engine knows that parameters may be experts
  (`has_moe_layers`, runtime/engine.py): there is one while the engine is made. `with_expert_layers`
- `has_moe_layers` of an engine is False while it saves and loads: DeepSpeed would write each expert to a file of its
  own naming (`_save_moe_checkpoint`). `use_checkpoint_engine`
- `optimizer.scaled_global_norm` (runtime/zero/stage_1_and_2.py) and `optimizer.get_grads_for_norm`
  (runtime/bf16_optimizer.py): ZeRO computes one norm for each group of parameters over tp and pp, of which a stage
  without experts has fewer; the bf16 optimizer leaves experts out of the sum over tp. `norm_at_once`
- `deepspeed.initialize`, while Hugging Face's Trainer runs: accelerate passes no mpu. `initialize_with`
- `_do_optimizer_sanity_check` and `_configure_fp16_optimizer` of `DeepSpeedEngine` (runtime/engine.py) while an engine
  of ZeRO stage 0 is made: its optimizer is one of ours, on the base class `ZeROOptimizer` (runtime/base_optimizer.py),
  with loss scalers of DeepSpeed; then `clip_fp32_gradients` and `zero_grad` of the engine, which know nothing of it.
  The engine sums what `get_grads_for_reduction` gives. `with_optimizer`, `engine.unsharded`
- `state_dict` of that optimizer while the engine saves, which would put it into the file of weights.
  `use_checkpoint_engine`
- `optimizer.get_grad_norm_direct` (runtime/zero/stage_1_and_2.py): it counts a parameter wholly or not at all, and of a
  weight that ranks share in part only some rows count. Padding among the gradients is known by `_zero_padding`.
  `count_in_norm`
- The `step` of an engine is wrapped to time optimizer steps. `profiling.recorder`
- `allreduce_gradients` of an engine, which reduces at the end of a step: partial gradients are summed over tp first.
  `before_reduction`
- `global_steps`, `global_samples` and `skipped_steps` of an engine, and its optimizer's `loss_scaler`, are set when
  a checkpoint of another layout is loaded. `checkpoint.adapting`
- `enable_backward_allreduce` and `micro_steps` of an engine: the stages of a pipeline reduce gradients once, after all
  backward passes of a step, which is one micro-step to the engine. `reduce_at_end`
- The `forward`, `backward` and `step` of an engine in pipeline stages refuse to be called by users. `pipeline.loop`
- The accelerator gives way to one without memory. `preflight.stand_in`
- `checkpoint_engine` of an engine (runtime/checkpoint_engine/checkpoint_engine.py): all that `save_checkpoint` and
  `load_checkpoint` write and open goes through it, in runtime/engine.py and runtime/state_dict_factory.py; DeepSpeed's
  own unpickles any code. `_copy_recovery_script` writes beside it, and is left out. `use_checkpoint_engine`,
  `checkpoint.deepspeed_engine`

Read:

- Groups of parameters, their flat tensors and shards: `bit16_groups`, `bit16_groups_flat` and
  `single_partition_of_fp32_groups` (runtime/zero/stage_1_and_2.py), `bf16_groups`, `bf16_groups_flat` and
  `fp32_groups_flat_partition` (runtime/bf16_optimizer.py). Checkpoints of another layout are written into them, and
  preflight counts their bytes. `parameter_groups`, `flat_weights`, `master_shards`
- `parameter._hp_mapping` (utils/mixed_precision_linkage.py): which elements of a parameter lie in this rank's shard.
  `place_in_shard`
- `parameter.grad_accum`, `fp32_groups_gradients_flat`, `all_grad_tensors` and `averaged_gradients` (of stage 2),
  `ipg_buckets`, `round_robin_bit16_meta`: preflight counts the bytes of gradients and buckets. `kept_gradients`,
  `reduce_buckets`, `shape_tensors`

- `partition_gradients`, `overlap_comm` and `use_grad_accum_attribute` (runtime/zero/stage_1_and_2.py): where any is
  true, hooks take each gradient as it comes. `keeps_gradients`
- `parameter._hp_grad` (runtime/bf16_optimizer.py) and `use_grad_accum_attribute` (runtime/zero/stage_1_and_2.py):
  where gradients add up, to which those of another stage are added. `accumulated_gradient`

Agreed on with DeepSpeed by name, in the module that the name belongs to:

- `parameter.tensor_model_parallel` (`is_model_parallel_parameter`, runtime/utils.py): whether a parameter counts in the
  gradient norm of tensor-parallel ranks other than the first. `tensor_parallel.marking`
- `parameter.allreduce` and `parameter.group_name` (`is_moe_param`, moe/utils.py): experts that other ranks do not hold,
  and the groups that share them. Groups of parameters say so with "moe" and "name". `mark_expert`
- `parameter.ds_pipe_replicated` (runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py): a weight that another stage
  counts in the gradient norm. `count_on_another_stage`
- The methods of an mpu (utils/groups.py, runtime/engine.py). `groups.mpu`
- Names, keys and pickled classes of checkpoint files: they are read and written without an engine.
  `checkpoint.deepspeed_files`, `checkpoint.writing`, `checkpoint.trusted`
- `universal_checkpoint_info` with its affine maps (checkpoint/affine_ir_spec.md): how a parameter is cut, for
  `ds_to_universal`. `checkpoint.universal`
- The environment variable `LOCAL_RANK` (runtime/engine.py): the engine asks for it without a launcher too.
  `groups.rendezvous`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn


def forbid_jit_builds() -> None:
    """Keeps DeepSpeed from compiling its shared-memory op at start-up: a minute, or an error without a compiler."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_groups() -> None:
    """Lets DeepSpeed begin anew in this process, with other process groups."""
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups.mpu = None
    groups._WORLD_GROUP = None
    for table in _expert_tables():
        table.clear()


def _expert_tables() -> tuple[dict[str, Any], ...]:
    """Of ep and of expert-dp: the groups by name, and their ranks."""
    from deepspeed.utils import groups

    return (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    )


def register_expert_groups(ep: dist.ProcessGroup, expert_dp: dist.ProcessGroup) -> None:
    """Puts this rank's groups of experts where DeepSpeed looks for them."""
    name, ranks = _expert_name(dist.get_world_size(ep)), dist.get_process_group_ranks
    for table, entry in zip(_expert_tables(), (ep, ranks(ep), expert_dp, ranks(expert_dp)), strict=True):
        table[name] = entry


def _expert_name(ep: int) -> str:
    """DeepSpeed reads the size out of the name."""
    return f"ep_size_{ep}"


def mark_expert(parameter: nn.Parameter, ep: int, tp: int = 1) -> None:
    """Makes a parameter one that only the expert-dp ranks share; the experts of a layer are over `ep` ranks.

    `tp` ranks of each tensor-parallel group are among these, with other experts each.
    """
    parameter.parcompile_tp_in_ep = tp  # type: ignore[attr-defined]
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = _expert_name(ep)  # type: ignore[attr-defined]


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is marked so."""
    return getattr(parameter, "allreduce", True) is False


def expert_group_name(parameter: nn.Parameter) -> str | None:
    """The name of the groups of an expert; None: the parameter is none."""
    name: str | None = getattr(parameter, "group_name", None) if is_expert(parameter) else None
    return name


EXPERT_KEYS = ("moe", "name")
"""What groups of parameters have when they are of experts."""


def expert_settings(settings: Mapping[str, Any], ep: int) -> dict[str, Any]:
    """The settings of a group of parameters for its experts, which are a group of their own."""
    return {**settings, "moe": True, "name": _expert_name(ep)}


@contextlib.contextmanager
def with_expert_layers(model: nn.Module) -> Iterator[None]:
    """Within it DeepSpeed finds in a model that its parameters may be experts."""
    from deepspeed.moe.layer import MoE

    class Marker(MoE):  # type: ignore[misc]
        """Holds nothing and computes nothing."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 0

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """The groups are there already."""

    model.add_module("parcompile_expert_layers", Marker())
    try:
        yield
    finally:
        del model.parcompile_expert_layers


def norm_at_once(optimizer: Any) -> None:
    """Makes the gradient norm one sum over all groups of parameters, so that all ranks send the same messages."""
    if hasattr(optimizer, "get_grads_for_norm"):
        _norm_of_bf16(optimizer)
        return
    if not hasattr(optimizer, "scaled_global_norm"):
        return  # that of stage 0 is
    from deepspeed.runtime.utils import combine_grad_norm_groups

    def norm(norm_type: int = 2) -> Any:
        gradients, parameters = [], []
        for group, held in enumerate(optimizer.params_in_partition):
            gradients += optimizer.averaged_gradients[group]
            parameters += held
        return combine_grad_norm_groups([optimizer.get_grad_norm_direct(gradients, parameters)], norm_type=norm_type)

    optimizer.scaled_global_norm = norm


def _norm_of_bf16(optimizer: Any) -> None:
    """A rank of tp and pp counts the experts of all its ep ranks, and everything else once."""
    from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank

    of_norm, first = optimizer.get_grads_for_norm, bwc_tensor_model_parallel_rank(mpu=optimizer.mpu) == 0

    def pairs() -> Iterator[tuple[nn.Parameter, Tensor]]:
        for group, sums, present in zip(
            optimizer.bf16_groups, optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True
        ):
            for parameter, gradient, is_there in zip(group, sums, present, strict=True):
                yield parameter, gradient if is_there else torch.zeros_like(gradient)

    def gradients(for_clipping: bool = False) -> Any:
        if for_clipping:
            return of_norm(for_clipping=True)
        return [squared_norm(pairs(), flat_weights(optimizer)[0].device, first=first).sqrt()], {}

    optimizer.get_grads_for_norm = gradients


def squared_norm(gradients: Iterable[tuple[nn.Parameter, Tensor]], device: torch.device, *, first: bool) -> Tensor:
    """This rank's part, over tp and pp, of the square of the gradient norm; of experts, that of all its ep ranks.

    Args:
        gradients: of parameters, summed over the ranks that share them.
        device: of the result, a scalar.
        first: whether this is the first rank of tp, on which parameters count that all of them hold.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    square, of_experts = torch.zeros(2, device=device).unbind()
    groups: set[str] = set()
    for parameter, gradient in gradients:
        name = expert_group_name(parameter)
        groups |= set() if name is None else {name}
        if (first or is_model_parallel_parameter(parameter)) and not getattr(parameter, "ds_pipe_replicated", False):
            total = square if name is None else of_experts
            # The sum over tp counts once more what the sum over ep has from other ranks of tp already.
            times = getattr(parameter, "parcompile_tp_in_ep", 1)
            total += torch.linalg.vector_norm(gradient, dtype=torch.float32).square() / times
    for name in sorted(groups):
        dist.all_reduce(of_experts, group=_expert_tables()[0][name])
    return square + of_experts


@contextlib.contextmanager
def with_optimizer(make: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Within it engines of ZeRO stage 0 have the optimizer that `make` gives for an engine and what updates weights."""
    from deepspeed.runtime.constants import FP16
    from deepspeed.runtime.engine import DeepSpeedEngine

    def configure(engine: Any, optimizer: Any, _: object) -> Any:
        made = make(engine, optimizer)
        engine.clip_fp32_gradients, engine.zero_grad = lambda: None, made.zero_grad
        return made

    with (
        mock.patch.object(DeepSpeedEngine, "_do_optimizer_sanity_check", lambda *_: FP16),
        mock.patch.object(DeepSpeedEngine, "_configure_fp16_optimizer", configure),
    ):
        yield


@contextlib.contextmanager
def initialize_with(
    mpu: Any, take_over: Callable[[Any], None], given: Callable[..., AbstractContextManager[dict[str, Any]]]
) -> Iterator[None]:
    """Within it, whoever calls `deepspeed.initialize` gets an engine with this mpu, which `take_over` has seen.

    `given` makes of the arguments of a call those that DeepSpeed gets, as a context around it.
    """
    import deepspeed

    make = deepspeed.initialize

    def initialize(*args: Any, **options: Any) -> Any:
        with given(**options) as options:
            made = make(*args, **options, mpu=mpu)
        take_over(made[0])
        return made

    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


@contextlib.contextmanager
def use_checkpoint_engine(engine: Any, checkpoint_engine: Any) -> Iterator[None]:
    """Within it, an engine writes and opens files of checkpoints through this checkpoint engine alone."""
    with contextlib.ExitStack() as entered:
        if not engine.zero_optimization():
            entered.enter_context(mock.patch.object(engine.optimizer, "state_dict", lambda: None))
        entered.enter_context(mock.patch.object(engine, "has_moe_layers", False))
        entered.enter_context(mock.patch.object(engine, "checkpoint_engine", checkpoint_engine))
        entered.enter_context(mock.patch.object(engine, "_copy_recovery_script", lambda _: None))
        yield


def count_in_norm(optimizer: Any, counted: Callable[[nn.Parameter, Tensor], Tensor]) -> bool:
    """Lets each gradient of this rank's shard pass `counted`, with its parameter, on its way into the gradient norm.

    Returns whether the optimizer computes its norm so that this can be done: those of ZeRO stages 0 to 2 do.
    """
    if hasattr(optimizer, "counted"):
        optimizer.counted = counted
        return True
    norm = getattr(optimizer, "get_grad_norm_direct", None)
    if norm is None:
        return False

    def norm_of(gradients: Sequence[Tensor], trained: Sequence[nn.Parameter], *args: Any, **options: Any) -> Any:
        parameters = iter(trained)
        # Padding of the shard stands among the gradients and belongs to no parameter.
        owners = (None if getattr(one, "_zero_padding", False) else next(parameters, None) for one in gradients)
        pairs = zip(gradients, owners, strict=True)
        return norm([one if owner is None else counted(owner, one) for one, owner in pairs], trained, *args, **options)

    optimizer.get_grad_norm_direct = norm_of
    return True


@contextlib.contextmanager
def reduce_at_end(engine: Any) -> Iterator[None]:
    """Within it backward passes add up gradients on this rank; at its end they are reduced, and the engine may step."""
    if getattr(engine.optimizer, "overlap_comm", False):
        # Its hooks would reduce each gradient as it comes; this is DeepSpeed's own way of keeping them.
        with engine.coalesce_grad_reduction():
            yield
        engine.set_gradient_accumulation_boundary(True)
    else:
        engine.enable_backward_allreduce = False
        engine.set_gradient_accumulation_boundary(False)
        yield
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()
    engine.micro_steps += engine.gradient_accumulation_steps() - 1


def keeps_gradients(engine: Any) -> bool:
    """Whether the gradients of micro-batches add up in `grad`, untouched until the end of a step: ZeRO-1 by itself."""
    optimizer = engine.optimizer
    taken = ("partition_gradients", "overlap_comm", "use_grad_accum_attribute")
    is_plain = hasattr(optimizer, "single_partition_of_fp32_groups")
    return (
        engine.zero_optimization_stage() == 1 and is_plain and not any(getattr(optimizer, one, False) for one in taken)
    )


def before_reduction(engine: Any, function: Callable[[], None]) -> None:
    """Calls `function` at the end of each step, before the engine reduces gradients over dp and cp."""
    reduce = engine.allreduce_gradients

    def allreduce_gradients(*args: Any, **options: Any) -> None:
        if engine.is_gradient_accumulation_boundary():
            function()
        reduce(*args, **options)

    engine.allreduce_gradients = allreduce_gradients


def accumulated_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """Where the gradients of micro-batches add up; zeros are put there if there were none."""
    found: Tensor | None = getattr(parameter, _SUM, getattr(parameter, "_hp_grad", None))
    if found is not None:
        return found
    name = "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"
    found = getattr(parameter, name, None)
    if found is None:
        found = torch.zeros_like(parameter)
        setattr(parameter, name, found)
    return found


_SUM = "parcompile_sum"


def sum_in(parameter: nn.Parameter, place: Tensor) -> None:
    """Says where the gradients of micro-batches add up, in another type than the parameter's."""
    setattr(parameter, _SUM, place)


def summed_gradient(parameter: nn.Parameter) -> Tensor:
    """That place."""
    found: Tensor = getattr(parameter, _SUM)
    return found


def count_on_another_stage(parameter: nn.Parameter) -> None:
    """Leaves a parameter out of this rank's part of the gradient norm."""
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """The parameters of each group of an optimizer, those of other ranks' shards included."""
    return [list(group) for group in _first_of(optimizer, "trained", "bit16_groups", "bf16_groups")]


def master_shards(optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 shard of each group."""
    return list(_first_of(optimizer, "masters", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"))


def flat_weights(optimizer: Any) -> list[Tensor]:
    """The flat tensor of each group in which its parameters lie."""
    return list(_first_of(optimizer, "weights", "bit16_groups_flat", "bf16_groups_flat"))


def _first_of(optimizer: Any, *names: str) -> Any:
    """What the optimizer of stage 0 has under the first name, ZeRO's under the second, the bf16 one under the third."""
    return next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))


class PlaceInShard(NamedTuple):
    """Which elements of a flat parameter lie in this rank's shard, and where there."""

    of_parameter: slice
    of_shard: slice


_WHOLE = "parcompile_offset"


def lies_whole(parameter: nn.Parameter, offset: int) -> None:
    """Says that all of a parameter lies in this rank's only shard, from the element `offset` on."""
    setattr(parameter, _WHOLE, offset)


def place_in_shard(parameter: nn.Parameter) -> PlaceInShard | None:
    """Where a parameter lies in this rank's shard; None: not at all."""
    offset: int | None = getattr(parameter, _WHOLE, None)
    if offset is not None:
        return PlaceInShard(slice(0, parameter.numel()), slice(offset, offset + parameter.numel()))
    mapping: Any = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    pieces = mapping.lp_fragment_address, mapping.hp_fragment_address
    return PlaceInShard(*(slice(piece.start, piece.start + piece.numel) for piece in pieces))


def kept_gradients(engine: Any) -> list[Tensor]:
    """Gradients that are kept between micro-batches: of the parameters, and the sums that DeepSpeed holds beside."""
    kept = [
        getattr(parameter, name, None) for parameter in engine.parameters() for name in ("grad", "grad_accum", _SUM)
    ]
    kept += getattr(engine.optimizer, "fp32_groups_gradients_flat", ())
    for name in ("all_grad_tensors", "averaged_gradients"):
        for sums in getattr(engine.optimizer, name, {}).values():
            kept += [sums] if isinstance(sums, Tensor) else sums or []
    return [one for one in kept if one is not None]


def reduce_buckets(optimizer: Any) -> list[Tensor]:
    """What gradients are copied to before they are reduced: from the first gradient on, at stage 2 in backward only."""
    return [buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values() for buffer in bucket.buffer]


def shape_tensors(optimizer: Any) -> list[Tensor]:
    """Meta tensors in which DeepSpeed keeps the shapes of parameters."""
    return [one for group in getattr(optimizer, "round_robin_bit16_meta", ()) for one in group]

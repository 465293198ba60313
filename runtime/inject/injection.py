"""Injection: replaces, in place, what tensor and context parallelism change in a Hugging Face causal language model.

The compiled plan says which slice of each parameter this rank holds; the model's own `base_model_tp_plan` has to agree.
What neither knows is refused.

Injected models that never exist whole: each rank reads or draws its own slices of the weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.model.families import FAMILIES
from parcompile.model.hf_config import ModelConfigError
from parcompile.model.layer_parts import ATTENTION, MLP
from parcompile.plan import Plan
from parcompile.progress import tracked
from parcompile.runtime.checkpoint.saved_models import let_save
from parcompile.runtime.drawing import draw_by_place, draws
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh, join
from parcompile.runtime.loss import ParallelCausalLoss
from parcompile.runtime.model.configuration import check_folder, check_model
from parcompile.runtime.model.lora import matrix_of, plain_name, without_peft
from parcompile.runtime.model.pretrained import (
    InitialWeights,
    PretrainedFolder,
    persistent_of,
    with_numbers,
    without_memory,
)
from parcompile.runtime.model.shrinking import shrunk
from parcompile.runtime.model.slices import Slice, Slices
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.pipeline import ChunkForward, Elsewhere, hold_stage
from parcompile.runtime.router_losses import RouterLosses, losses_of
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, RowParallelLinear, is_sharded
from parcompile.runtime.tensor_parallel.partial import slice_parameter, sum_in_backward
from parcompile.spec.values import workload_of

from .adapters import Adapters, add_adapter
from .agreement import check_agreement, check_masks, masked_layers
from .attention import use_ring_attention
from .calls import answer_calls, let_generate, look_up_whole, name_arguments, refuse_changes, take_inputs
from .deferred_logits import defer_logits
from .heads import (
    LastTokenHead,
    SpreadRMSNorm,
    column_slice,
    cut_vocabulary,
    localise_heads,
    mark,
    sum_repeated_gradient,
)
from .interface import put_on_interface
from .mechanisms import (
    Phase,
    Placed,
    change,
    entered_parts,
    entered_whole,
    is_grouped,
    is_inside,
    keep_groups,
    spread_norm,
)
from .positions import share_positions
from .regions import Region, recompute_by_call, region_of
from .ring_place import RingPlace
from .tiles import tile_mlps
from .user_module import inject_user_module, prepare_user_module

_CONV1D = "Conv1D"
"""transformers' linear that stores its weight as [in, out]."""


def inject(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Turns a whole model into this rank's part of it, in place, and returns it.

    Weights are sliced from the model's own: whoever starts from the same whole weights starts the same run, whatever
    the layout. A model on the meta device gets its slices later (`load_pretrained`).

    Raises:
        RunError: the model is not the plan's, or has something that cannot be injected; the message names the keys of
            the configuration or the module.
    """
    if getattr(model, "parcompile_mesh", None) is not None:
        raise everywhere("the model was injected already: inject a fresh one")
    if mesh.plan.spec.model.shape.user_module is not None:
        if not hasattr(model, "loss_function"):
            prepare_user_module(model, mesh)
        inject_user_module(model, mesh)
        register_gradient_sums(model, mesh)
    else:
        check_model(without_peft(model), mesh)
        _Injection(without_peft(model), mesh).run()
    base = without_peft(model)
    if base is not model:
        tuner: Any = model.base_model
        tuner.forward = base.__call__  # peft before 0.21 calls base.forward, which passes hooks over
    refuse_changes(base, mesh)
    for one in (model, base):
        one.parcompile_mesh = mesh  # type: ignore[assignment]
    recompute_by_call(base)
    let_save(model, mesh)
    return model


class _Injection:
    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh, self.spec = model, mesh, mesh.plan.spec
        self.slices, self.family = Slices(mesh), FAMILIES[self.spec.model.shape.model_type]
        group, self.region = mesh.parallel_group("tp"), None
        if group is not None:
            self.region = region_of(mesh, group)
        self.placed = Placed(model, mesh, self.family, self.slices, self.region)

    def run(self) -> None:
        adapters = Adapters(self.model, self.slices)
        self.slices.compare(self.model)
        self._take_attention()
        self._hold_stage()
        if self.region is not None:
            self._cut(self.region)
        self._cut_ends()
        adapters.put_back(self.slices, self.region, self.mesh)
        self._compute()

    def _take_attention(self) -> None:
        # Training keeps no keys and values: it would hold memory, and a stage's cache has no place for later layers.
        self.model.config.use_cache = False  # type: ignore[union-attr]
        change(self.placed, Phase.WHOLE)
        replaced, shape = put_on_interface(self.model, self.family), self.spec.model.shape
        # Where no rank runs, the compiler's rule X004 has to do.
        if shape.attends and self.mesh.device.type != "meta" and not replaced:
            check_masks(self.model, self.placed.stack, self.spec.training.sequence_length, masked_layers(shape))

    def _hold_stage(self) -> None:
        if self.mesh.size("pp") > 1:
            hold_stage(self.model, self.mesh.plan, self.mesh.index("pp"))
        name_arguments(self.model)
        let_generate(self.model, self.mesh)
        answer_calls(self.model, self.model.get_submodule(self.family.base), self.mesh)
        take_inputs(self.model, self.mesh)
        use_ring_attention(self.model, RingPlace.of(self.mesh))
        change(self.placed, Phase.STAGE)
        if self.region is not None:
            check_agreement(self.model, self.slices, entered_whole(self.placed))
        change(self.placed, Phase.REGION)

    def _cut(self, region: Region) -> None:
        self._layers(region)
        for table in filter(None, (self.family.positions, self.family.fixed_positions)):
            share_positions(self.model, self.family.base, table, region)

    def _cut_ends(self) -> None:
        # Last, since the head is a linear like the others.
        cut_vocabulary(self.model, self.mesh, self.region)
        if self.region is not None and self.region.sequence_parallel:
            look_up_whole(self.model.get_input_embeddings(), self.region.group)  # type: ignore[operator]
        change(self.placed, Phase.CUT)
        if self.region is not None and not any(parameter.is_meta for parameter in self.model.parameters()):
            register_gradient_sums(self.model, self.mesh)

    def _compute(self) -> None:
        if self.spec.training.tiled_mlp:
            tile_mlps(self.placed)
        if labels := self.spec.model.shape.head.labels:
            self._classify(labels)
        else:
            self._predict()
        if draws(self.model):
            path = self.placed.stack
            layers = [f"{path}.{name}" for name, _ in self.model.get_submodule(path).named_children()]
            draw_by_place(self.model, self.mesh, [self.family.base, *layers])
        if self.mesh.size("pp") > 1:
            self.model.forward = ChunkForward(self.model, self.mesh.plan, self.mesh.index("pp"))

    def _predict(self) -> None:
        """The loss of words."""
        deferred, words = self.spec.training.linear_cross_entropy, self.spec.model.shape.vocab_size
        loss: Any = ParallelCausalLoss(self.mesh, words, defers_logits=deferred)
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        if deferred and not isinstance(head, Elsewhere):
            defer_logits(head, words)
        if (losses := losses_of(self.model, self.mesh.plan)) is not None:
            loss = RouterLosses(loss, self.model, self.mesh, losses)
        self.model.loss_function = loss

    def _classify(self, labels: int) -> None:
        """Labels of whole sequences, whose loss is a trainer's."""
        if self.mesh.size("pp") > 1 or losses_of(self.model, self.mesh.plan) is not None:
            raise everywhere(
                f"a classifier (num_labels {labels}) has no pipeline stages and no losses of routers: set pp to 1, and "
                "leave training.router out of the spec and output_router_logits out of the configuration"
            )
        self.model.score = LastTokenHead(self.model.score, self.model.config, self.mesh)  # type: ignore[arg-type]

    def _layers(self, region: Region) -> None:
        """Cuts every parameter that the plan cuts, except experts and vocabulary."""
        blocks: dict[str, list[ColumnParallelLinear]] = {}
        together, path = {id(module) for module in entered_whole(self.placed)}, self.placed.stack
        whole = [name for name, module in self.model.named_modules() if id(module) in together]
        taking, again = [*whole, *entered_parts(self.placed)], self._gathering_again()
        for name, parameter in list(self.model.named_parameters()):
            piece = self.slices.of(name)
            split = piece.parameter.split
            if piece.ranges is None or split is None or split.pads_vocabulary or is_sharded(parameter):
                continue
            owner_name, _, kind = name.rpartition(".")
            parent_name, _, child = owner_name.rpartition(".")
            owner, parent = self.model.get_submodule(owner_name), self.model.get_submodule(parent_name)
            if isinstance(owner, ColumnParallelLinear | RowParallelLinear):
                continue  # the bias of a linear that its weight has replaced
            if is_inside(owner_name, whole):
                setattr(owner, kind, _sliced(parameter, piece))
            elif is_grouped(owner):
                owner.weight = _sliced(parameter, piece)
                keep_groups(parent, owner, self.mesh.size("tp"))
            elif isinstance(owner, nn.Linear) or type(owner).__name__ == _CONV1D:
                layer = self._parallel(owner, piece, region, keeps=not parent_name.endswith(again))
                setattr(parent, child, layer)
                # A linear of the layer itself, which stands in no block, takes its input in alone.
                if isinstance(layer, ColumnParallelLinear) and parent_name.rpartition(".")[0] != path:
                    block = next((name for name in taking if parent_name.startswith(f"{name}.")), parent_name)
                    blocks.setdefault(block, []).append(layer)
            elif parameter.dim() == 1 and kind == "weight":
                setattr(parent, child, self._spread_norm(owner, parameter, piece, region.group))
            else:
                setattr(owner, kind, _sliced(parameter, piece))
        shape, tp = self.spec.model.shape, self.mesh.size("tp")
        for parent_name, layers in blocks.items():
            parent = self.model.get_submodule(parent_name)
            region.enter_layers(parent, layers)
            item = shape.stack.layers_per_module > 1 and parent_name.rpartition(".")[2].isdigit()
            attention = parent_name.rpartition(".")[0] if item else parent_name
            if attention.endswith(f".{self.family.attention}") and parent_name not in whole:
                own, pairs = shape, 2 if shape.heads.paired else 1
                if shape.kinds:
                    own = shape.of_layer(int(parent_name.removeprefix(f"{path}.").partition(".")[0]))
                kv_heads = pairs * max(1, own.num_key_value_heads // pairs // tp)
                localise_heads(parent, own.num_attention_heads // tp, kv_heads)

    def _gathering_again(self) -> tuple[str, ...]:
        """How names of blocks end whose input does not stay gathered for backward, as the estimate has it."""
        work, parts = workload_of(self.spec), {ATTENTION: self.family.attention, MLP: self.family.mlp}
        work = replace(work, recompute=work.recompute_of(self.mesh.index("pp")))
        return tuple(f".{name}" for part, name in parts.items() if work.gathers_again(part))

    def _parallel(
        self, linear: Any, piece: Slice, region: Region, *, keeps: bool
    ) -> ColumnParallelLinear | RowParallelLinear:
        transposed = not isinstance(linear, nn.Linear)
        if piece.dim == int(transposed):
            take = ColumnParallelLinear.from_conv1d if transposed else ColumnParallelLinear.from_linear
            return column_slice(take, linear, piece, keep_gathered=keeps, **region.options)
        cut = RowParallelLinear.from_conv1d if transposed else RowParallelLinear.from_linear
        return cut(linear, ranges=piece.ranges, input_is_parallel=True, pad_sequence=True, **region.options)

    def _spread_norm(self, norm: nn.Module, weight: nn.Parameter, piece: Slice, group: dist.ProcessGroup) -> nn.Module:
        own = _sliced(weight, piece)
        if (found := spread_norm(self.placed, norm, own, weight.numel())) is not None:
            return found
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(epsilon, float) or "RMSNorm" not in type(norm).__name__:
            raise everywhere(
                f"a {type(norm).__name__} over all heads cannot be sharded: only RMSNorm is injected there"
            )
        return SpreadRMSNorm(own, epsilon, weight.numel(), group, piece.replica_group)


def register_gradient_sums(model: nn.Module, mesh: Mesh) -> None:
    """Adds up over tp what every rank holds but uses on its own heads, features or tokens: it has part of its gradient.

    `inject` does it by itself, except for a model on the meta device: its parameters are still to be replaced.
    """
    group = mesh.parallel_group("tp")
    if group is None:
        return
    slices, sequence_parallel = Slices(mesh), mesh.plan.spec.parallelism.sequence_parallel
    for name, parameter in model.named_parameters():
        if matrix_of(name) is not None:
            continue  # `Adapters` sees to those
        piece = slices.of(plain_name(name))
        owner = model.get_submodule(name.rpartition(".")[0])
        # A row-parallel linear adds up the gradient of its bias itself.
        of_tokens = sequence_parallel and piece.parameter.sequence_parallel
        if slices.folds_experts and piece.experts is not None:
            continue  # no other rank of tp has these experts
        if piece.parameter.partial or (of_tokens and not isinstance(owner, RowParallelLinear)):
            sum_in_backward(parameter, group)
        elif piece.replica_group is not None and getattr(owner, "replica_group", None) is None:
            sum_repeated_gradient(parameter, piece)


def _sliced(parameter: nn.Parameter, piece: Slice) -> nn.Parameter:
    """This rank's part, marked as such."""
    assert piece.ranges is not None
    assert piece.dim is not None
    local = slice_parameter(parameter, piece.dim, piece.ranges)
    mark(local, piece)
    return local


def load_pretrained(folder: str | Path, plan: Plan, adapter: Any = None, *, differs: Collection[str] = ()) -> nn.Module:
    """The plan's model with the weights of a Hugging Face folder, injected: each rank reads its own slices only.

    The model is built without memory for its parameters, cut, and then filled from the safetensors, one slice at a time
    and in the plan's precision: no rank ever holds more than its share and one tensor. Joins the other ranks; hand the
    model to `initialize`.

    Args:
        folder: config.json and safetensors.
        plan: the plan.
        adapter: a `LoraConfig` of peft for adapters that are drawn from the plan's seed, or the folder of saved ones.
        differs: keys of config.json that the plan changes on purpose, such as `max_position_embeddings` and
            `rope_parameters` for a longer context. All others have to be the plan's.

    Raises:
        RunError: the folder does not hold the plan's model; what is missing, misshapen or too much is named, and every
            key of config.json that would change numbers.
    """
    mesh, source = join(plan), PretrainedFolder(folder)
    check_folder(folder, plan, differs)
    dtype = TORCH_DTYPES[plan.spec.training.precision]
    model = without_memory(plan, dtype)
    buffers = persistent_of(model)
    source.check(plan, buffers)
    if adapter is not None:
        model = add_adapter(model, adapter, plan.spec.training.seed)
    inject(model, mesh)
    for name, buffer in buffers.items():
        if name in source:
            buffer.copy_(source.whole(name))

    def stored(name: str, piece: Slice, shape: torch.Size) -> Tensor:
        # A copy: what is read is a window on the file, and of a row-parallel weight one with holes.
        read = source.take(name, piece, shape)
        return read.to(dtype, copy=True, memory_format=torch.contiguous_format)

    _fill(model, mesh, stored)
    return model


def draws_all(plan: Plan) -> bool:
    """Whether transformers' rules draw the first weights of all parameters: told by a small model of the same kind."""
    try:
        small = shrunk(plan)
    except ModelConfigError:
        return False
    return InitialWeights(without_memory(small), plan.spec.training.seed).draws_all()


def initial_model(plan: Plan, mesh: Mesh) -> nn.Module:
    """The plan's model with its first weights, injected: those of `build_model`, of which each rank keeps its slices.

    A rank draws the layers that it has a part of, one after the other, and holds one of them whole at a time.

    Raises:
        RunError: as for `build_model`, and where transformers' rules draw no first weights of a parameter.
    """
    weights = InitialWeights(without_memory(plan), plan.spec.training.seed)
    model, dtype = without_memory(plan), TORCH_DTYPES[plan.spec.training.precision]
    inject(model, mesh)

    def drawn(name: str, piece: Slice, _: torch.Size) -> Tensor:
        mine = piece.cut(weights.whole(name)).to(dtype, memory_format=torch.contiguous_format)
        # A window on the whole would keep all of it.
        return mine if mine.untyped_storage().nbytes() == mine.nbytes else mine.clone()

    _fill(model, mesh, drawn, weights.part_of)
    return model


def random_model(plan: Plan) -> nn.Module:
    """The plan's model with weights drawn anew, injected: each rank draws its own slices only, on its device.

    For trials of any size: no rank ever holds the whole model. Matrices are normal, norms one and biases zero; what
    several ranks hold is the same on them. Joins the other ranks; hand the model to `initialize`.

    Raises:
        RunError: as for `build_model`.
    """
    mesh, dtype = join(plan), TORCH_DTYPES[plan.spec.training.precision]
    model = without_memory(plan, dtype)
    inject(model, mesh)
    deviation = float(plan.spec.model.hf_config.get("initializer_range") or 0.02)
    generator = torch.Generator(mesh.device)

    def drawn(name: str, piece: Slice, shape: torch.Size) -> Tensor:
        data = torch.empty(shape, dtype=dtype, device=mesh.device)
        if len(shape) < 2:
            return data.fill_(0.0 if name.endswith("bias") else 1.0)
        place = f"{piece.ranges}" if piece.experts is None else f"{piece.ranges} of experts {piece.experts}"
        generator.manual_seed(zlib.crc32(f"{plan.spec.training.seed} {name} {place}".encode()))
        return data.normal_(std=deviation, generator=generator)

    _fill(model, mesh, drawn)
    return model


def _fill(
    model: nn.Module,
    mesh: Mesh,
    data_of: Callable[[str, Slice, torch.Size], Tensor],
    part_of: Callable[[str], str] = lambda _: "",
) -> None:
    """Gives memory to the parameters of an injected model, one after the other, those of a part together."""
    slices, filled = Slices(mesh), {}
    parameters = sorted(model.named_parameters(remove_duplicate=False), key=lambda one: part_of(plain_name(one[0])))
    for name, empty in tracked(parameters, "loading weights"):
        if not empty.is_meta:
            continue
        if empty not in filled:
            plain = plain_name(name)
            filled[empty] = with_numbers(empty, data_of(plain, slices.of(plain), empty.shape))
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, filled[empty])
    register_gradient_sums(model, mesh)

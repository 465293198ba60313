"""Modules that are no Hugging Face models, injected by the rules of the spec, and their attention.

The module is called as `module(input_ids)`, with what else of a batch its `forward` has parameters for (`position_ids`
above all), and returns logits [B, S, V], or an object that has them as `logits`. The loss is computed from them here.
Its attention modules call `torch.nn.functional.scaled_dot_product_attention` with `is_causal=True`.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parcompile.model.user_module import LAYER, UserModule
from parcompile.runtime import micro_batch
from parcompile.runtime.drawing import draw_by_place, draws, record_widths
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.loss import ParallelCausalLoss
from parcompile.runtime.micro_batch import current
from parcompile.runtime.model.slices import Slice, Slices
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from .attention import RING
from .calls import take_inputs
from .heads import column_slice, localise_heads
from .regions import Region, region_of
from .ring_place import RingPlace


class _Ring(TorchFunctionMode):
    """Sends torch's attention around the ring."""

    def __init__(self, name: str, place: RingPlace, is_cut: bool) -> None:
        super().__init__()
        self.name, self.place, self.calls = name, place, 0
        self.is_cut = is_cut
        """Whether this rank computes some of the heads only."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 -- the ring shares heads anyway
    ) -> Tensor:
        if attn_mask is not None or not is_causal:
            raise everywhere(f"{self.name} attends with a mask of its own: only is_causal=True is split over cp")
        if query.dim() != 4:
            raise everywhere(f"{self.name} attends with {query.dim()}-dim queries, not [B, H, S, D]")
        place = self.place
        number = zlib.crc32(f"{self.name}#{self.calls}".encode()) >> 1
        first_head = query.shape[1] * place.tp_index if self.is_cut else 0
        drop = place.dropping(dropout_p, self.name, number, first_head)
        return place.attend(query, key, value, scale=scale, **drop)


def run_around_ring(name: str, attention: nn.Module, place: RingPlace) -> None:
    """Makes what the module attends run over the ranks that share its sequences; a call raises where it cannot.

    Raises:
        RunError: in a call, when the module masks or drops by itself, or does not call torch's attention.
    """
    forward = attention.forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        is_cut = any(isinstance(one, ColumnParallelLinear) for one in attention.modules())
        with _Ring(name, place, is_cut) as ring:
            output = forward(*args, **kwargs)
        if not ring.calls and (place.group is not None or current().documents or current().packing):
            raise everywhere(
                f"{name} does not call torch.nn.functional.scaled_dot_product_attention: what it computes instead "
                "would see this rank's tokens only"
            )
        return output

    attention.forward = attend


_HOOKS = "parcompile_hooks"


@dataclass(slots=True)
class ModuleOutput:
    """What a user module returns in training: this rank's loss (None without labels) and its logits."""

    loss: Tensor | None
    logits: Tensor


class _ForwardHooks:
    """Forward hooks of the module: they take what the loss needs from its arguments, and compute the loss."""

    def __init__(self, module: nn.Module, place: RingPlace) -> None:
        self.place = place
        self.labels: dict[str, Any] = {}
        parameters = inspect.signature(module.forward).parameters.values()
        self._known = {one.name for one in parameters}
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        if place.group is not None and not (self._takes_all or "position_ids" in self._known):
            raise everywhere(
                f"{type(module).__name__}.forward has no parameter position_ids: with cp "
                f"{dist.get_world_size(place.group)} a rank's tokens are not those of positions 0, 1, 2 …"
            )

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = micro_batch.begin(args, kwargs)
        names = ("labels", "shift_labels", "num_items_in_batch")
        self.labels = {name: kwargs.pop(name) for name in names if kwargs.get(name) is not None}
        first = (kwargs.pop("input_ids"),) if "input_ids" in kwargs else ()
        kwargs.pop("use_cache", None)
        return (*first, *args), {
            name: value for name, value in kwargs.items() if self._takes_all or name in self._known
        }

    def end(self, module: Any, _: Any, output: Any) -> ModuleOutput:
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise everywhere(
                f"{type(module).__name__} returned {type(output).__name__}: a user module returns logits [B, S, V], or "
                "an object that has them as .logits"
            )
        return ModuleOutput(module.loss_function(logits, **self.labels) if self.labels else None, logits)


def prepare_user_module(module: nn.Module, mesh: Mesh) -> None:
    """Makes the module callable as Hugging Face's are: with labels, and a result that has a loss.

    Raises:
        RunError: the module is not the plan's.
    """
    Slices(mesh).compare(module)
    _same_order(module, mesh)
    rules = mesh.plan.spec.model.shape.user_module
    assert rules is not None
    for name in _attentions(rules, mesh):
        _submodule(module, name)
    hooks = _ForwardHooks(module, RingPlace.of(mesh))
    setattr(module, _HOOKS, hooks)
    setattr(module, RING, hooks.place)
    module.register_forward_pre_hook(hooks.begin, with_kwargs=True)
    module.register_forward_hook(hooks.end)
    module.register_forward_hook(lambda *_: micro_batch.end(), always_call=True)
    module.loss_function = _plain_loss  # type: ignore[assignment]


def _plain_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def inject_user_module(module: nn.Module, mesh: Mesh) -> None:
    """Turns a prepared module into this rank's part of it, in place.

    Raises:
        RunError: a rule does not fit what it names.
    """
    rules, group = mesh.plan.spec.model.shape.user_module, mesh.parallel_group("tp")
    assert rules is not None
    slices = Slices(mesh)
    if draws(module):
        layers = rules.prefix.rstrip(".")
        names = ["", *(f"{layers}.{name}" for name, _ in module.get_submodule(layers).named_children())]
        widths = draw_by_place(module, mesh, names)
        if group is not None:
            record_widths(module, widths, mesh.plan.spec.training.sequence_length)
    take_inputs(module, mesh, first=True)
    sequence_parallel = mesh.plan.spec.parallelism.sequence_parallel
    region = None if group is None else region_of(mesh, group)
    for name in _attentions(rules, mesh):
        attention = _submodule(module, name)
        run_around_ring(name, attention, getattr(module, _HOOKS).place)
        if sequence_parallel and region is not None:
            # Attention looks at the whole sequence before it projects anything: heads are counted off by its length.
            region.enter_block(attention)
    vocabulary_is_cut = _cut(module, rules, slices, region, mesh)
    shape, tp = mesh.plan.spec.model.shape, mesh.size("tp")
    module.loss_function = ParallelCausalLoss(mesh, shape.vocab_size, logits_are_cut=vocabulary_is_cut)  # type: ignore[assignment]
    for name in _attentions(rules, mesh):
        attention = _submodule(module, name)
        if any(isinstance(child, ColumnParallelLinear) for child in attention.modules()):
            localise_heads(attention, shape.num_attention_heads // tp, max(1, shape.num_key_value_heads // tp))


def _same_order(module: nn.Module, mesh: Mesh) -> None:
    planned = [name for name, _ in mesh.plan.parameters.expanded()]
    for name, (found, _) in zip(planned, module.named_parameters(), strict=True):
        if name != found:
            raise everywhere(
                f"the module registers {found} where model.parameters has {name}: list the parameters in the module's "
                "order (parcompile.runtime.describe does)"
            )


def _attentions(rules: UserModule, mesh: Mesh) -> Iterator[str]:
    for name in rules.attentions:
        layers = range(mesh.plan.spec.model.shape.num_hidden_layers)
        yield from (name.replace(LAYER, str(layer)) for layer in layers) if LAYER in name else (name,)


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise everywhere(f"the rules name the attention {name}, which the module does not have") from None


def _cut(module: nn.Module, rules: UserModule, slices: Slices, region: Region | None, mesh: Mesh) -> bool:
    """Replaces every linear and table that has a rule; whether the logits come out cut along the vocabulary."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    rows = {name: parameter.name for name, parameter in mesh.plan.parameters.expanded()}
    sequence_parallel, logits_are_cut = mesh.plan.spec.parallelism.sequence_parallel, False
    cut: dict[nn.Parameter, nn.Parameter] = {}
    tables, inside = [], tuple(f"{name}." for name in _attentions(rules, mesh))
    for owner_name, owner in list(module.named_modules(remove_duplicate=False)):
        for kind, parameter in list(owner.named_parameters(recurse=False)):
            name = names[parameter]
            rule = rules.rule_of(rows[name].replace("{layer}", LAYER))
            if rule is None or rule.kind == "partial" or (kind == "bias" and isinstance(owner, nn.Linear)):
                continue
            piece = slices.of(name)
            new = _parallel(owner_name, owner, rule.kind, piece, {} if region is None else region.options)
            if isinstance(new, ColumnParallelLinear) and region is not None and sequence_parallel:
                new.input_is_ready = owner_name.startswith(inside)  # attention has gathered the sequence
                region.enter_layer(new)
            if parameter in cut:
                new.weight = cut[parameter]  # tied
            cut[parameter] = new.weight
            module.set_submodule(owner_name, new)
            if rule.kind == "vocab":
                tables.append(new)
                logits_are_cut |= isinstance(new, ColumnParallelLinear)
    if sequence_parallel and not (logits_are_cut and any(isinstance(one, VocabParallelEmbedding) for one in tables)):
        raise everywhere('sequence_parallel begins at the embedding and ends at the head: both need the rule "vocab"')
    return logits_are_cut


def _parallel(name: str, owner: nn.Module, kind: str, piece: Slice, options: dict[str, Any]) -> Any:
    if kind == "vocab" and isinstance(owner, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(
            owner, padded_num_embeddings=piece.padded_size, pad_sequence=True, **options
        )
    if not isinstance(owner, nn.Linear):
        raise everywhere(f'{name} is a {type(owner).__name__}: the rule "{kind}" is for nn.Linear')
    if kind == "vocab":
        return ColumnParallelLinear.from_linear(owner, padded_out_features=piece.padded_size, **options)
    if kind == "row":
        return RowParallelLinear.from_linear(owner, ranges=piece.ranges, pad_sequence=True, **options)
    return column_slice(ColumnParallelLinear.from_linear, owner, piece, **options)


def describe(module: nn.Module) -> dict[str, Any]:
    """`num_hidden_layers` and `parameters` of a spec's section `model`, from the module itself.

    Raises:
        RunError: the module has no layers, or layers that differ.
    """
    rows: dict[str, tuple[int, ...]] = {}
    layers: dict[str, set[str]] = {}
    for name, parameter in module.named_parameters():
        match = re.search(r"\.(\d+)\.", name)
        row = name if match is None else f"{name[: match.start()]}.{LAYER}.{name[match.end() :]}"
        if match is not None:
            layers.setdefault(match[1], set()).add(row)
        if rows.setdefault(row, tuple(parameter.shape)) != tuple(parameter.shape):
            raise RunError(f"{name} is {list(parameter.shape)}, in another layer it is {list(rows[row])}")
    if not layers or any(found != layers["0"] for found in layers.values()):
        raise RunError("the module has no layers layers.0, layers.1, … that hold the same parameters")
    return {"num_hidden_layers": len(layers), "parameters": {name: list(shape) for name, shape in rows.items()}}

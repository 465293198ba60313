"""A model reduced to what the stages of this rank hold, with tied embeddings and parts of second ones.

The parts of a second embedding that the layers of a stage get: computed on the first stage, and handed on.

Shapes: B rows, s tokens of a rank, L layers of the model, P features of a layer's part.

Runs a chunk of a Hugging Face model: the consecutive layers of one (virtual) stage, with the ends that it has.

The model's own forward does the work, so that scales, rotary embeddings, soft-caps and the loss are its own. A chunk
that is not the first begins with the hidden states that it received: they take the place of what reaches its first
layer, whatever the model does to its embedding before. A chunk that is not the last ends with what its last layer
gives.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parcompile.layout.groups import EMBEDDING
from parcompile.layout.pipeline import Stage
from parcompile.model.families import FAMILIES
from parcompile.model.family import Family
from parcompile.model.shape import ModelShape
from parcompile.plan import Plan
from parcompile.plan.holding import Holding, layer_numbers, module_numbers
from parcompile.runtime.deepspeed_patches.norm import count_on_another_stage
from parcompile.runtime.deepspeed_patches.optimizer_state import accumulated_gradient
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import plain_name, without_peft
from parcompile.runtime.transport import Like, start_all_reduce


class LayerParts:
    """Within it a base model's layers, those of a stage alone, get their own parts.

    Args:
        base: the base model, whose configuration speaks of the stage's layers only.
        layers: the numbers of these layers in the whole model.
        received: the parts of all layers [B, s, L, P]; None on the first stage, which computes them.
    """

    def __init__(self, base: Any, layers: range, received: Tensor | None) -> None:
        self._base, self._layers, self._parts = base, layers, received
        self._whole, self._compute = base.config, base.project_per_layer_inputs

    def __enter__(self) -> None:
        seen = vars(self._base)
        self._looked_up = seen.get("get_per_layer_inputs")
        seen["project_per_layer_inputs"] = self._project
        if self._parts is not None:
            seen["get_per_layer_inputs"] = lambda *_, **__: None

    def __exit__(self, *_: object) -> None:
        seen = vars(self._base)
        del seen["project_per_layer_inputs"]
        seen["get_per_layer_inputs"] = self._looked_up

    def _project(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._parts is None:
            seen = vars(self._base)
            local, seen["config"] = seen["config"], self._whole
            try:
                self._parts = self._compute(*args, **kwargs)
            finally:
                seen["config"] = local
        # A stage without layers passes its hidden states through something that looks at no part.
        start = min(self._layers.start, self._parts.shape[2] - 1)
        return self._parts[:, :, start : max(self._layers.stop, start + 1)]

    def hand_on(self) -> Tensor:
        """The parts of all layers, for the next stage."""
        assert self._parts is not None, "the base model has asked for them"
        return self._parts


# A tied embedding: the first stage looks tokens up in it, the last computes logits with it.


class TiedEmbedding:
    """The weight, where this rank shares it with another stage.

    Its gradient is summed over both once in a step, and counts once in the gradient norm: on the first stage.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._group = mesh.parallel_group(EMBEDDING)
        self._weight: nn.Parameter | None = None
        if self._group is None:
            return
        name = mesh.plan.parameters.before[0].name
        self._weight = next(one for found, one in model.named_parameters() if plain_name(found) == name)
        if not Holding(mesh.plan, mesh.index("pp")).has_embedding:
            count_on_another_stage(self._weight)

    def sum_gradient(self, optimizer: Any) -> None:
        """Adds up what both stages have."""
        if self._weight is None or not self._weight.requires_grad:
            return
        assert self._group is not None
        gradient = accumulated_gradient(optimizer, self._weight)
        with torch.no_grad():
            gradient.copy_(start_all_reduce(gradient, self._group).wait())


class Elsewhere(nn.Module):
    """Stands where the whole model has a module that another stage holds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses: nothing on this stage may need it.

        Raises:
            RunError: always.
        """
        raise RunError(f"{self.name} is on another stage of the pipeline: call engine.train_batch(iterator)")

    def extra_repr(self) -> str:
        """Which module."""
        return self.name


class NoPositions(nn.Module):
    """Stands for a learned table of positions on stages that another one precedes: nothing is to be added."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Zero."""
        return torch.zeros(())


class Skipped(nn.Identity):
    """Stands for a module behind the layers that another stage holds: base models call it, and nobody looks at it."""


def hold_stage(model: nn.Module, plan: Plan, pp_rank: int) -> None:
    """Takes out of a whole Hugging Face model, in place, what the pp rank does not hold.

    What stays keeps its name, so that slices, files and checkpoints find it. A tied embedding stays on the last stage
    too, as the head's weight.
    """
    held, family = Holding(plan, pp_rank), FAMILIES[plan.spec.model.shape.model_type]
    path = plan.parameters.layer[0].name.partition(".{layer}")[0]
    layers: Any = model.get_submodule(path)
    kept = nn.ModuleList()
    for number in module_numbers(layer_numbers(held.stages), plan.parameters.layers_per_module):
        kept.add_module(str(number), layers[number])
    model.set_submodule(path, kept)
    for name in sorted({one.name.rpartition(".")[0] for one in plan.parameters.before}):
        if all(one.name not in held for one in plan.parameters.before if one.name.startswith(f"{name}.")):
            model.set_submodule(name, _instead(name, family, plan.spec.model.shape))
    if held.has_head:
        return
    causal: Any = model
    causal.set_output_embeddings(Elsewhere("the head"))
    for name in sorted({one.name.rpartition(".")[0] for one in plan.parameters.after}):
        inside = name.startswith(f"{family.base}.")
        model.set_submodule(name, Skipped() if inside else Elsewhere(name))


def _instead(name: str, family: Family, shape: ModelShape) -> nn.Module:
    """What stands for a module before the layers on stages that another one precedes."""
    if name == f"{family.base}.{family.positions}":
        return NoPositions()
    # What makes several residual streams of one: those that were received take their place.
    makes_streams = name.startswith(tuple(f"{family.base}.{one}" for part in shape.parts for one in part.inputs))
    skipped = makes_streams or name == f"{family.base}.{family.embedding_norm}"
    return Skipped() if skipped else Elsewhere(name)


_FOR_BASE = ("input_ids", "inputs_embeds", "position_ids")
"""What of a batch the layers want; labels and the like belong to the loss."""


class ChunkForward:
    """Takes the place of a causal language model's `forward` on a rank of a pipeline.

    Args:
        model: reduced to this rank's stages by `hold_stage`.
        plan: the plan.
        pp_rank: the place in the pipeline.
    """

    def __init__(self, model: nn.Module, plan: Plan, pp_rank: int) -> None:
        self._model, self._forward = model, model.forward
        family = FAMILIES[plan.spec.model.shape.model_type]
        self._base: Any = model.get_submodule(family.base)
        behind = [one.name for one in plan.parameters.after if one.name.startswith(f"{family.base}.")]
        self._norm = behind[0].removeprefix(f"{family.base}.").partition(".")[0] if behind else ""
        self._shape = plan.spec.model.shape
        self._has_fp32_residual = plan.spec.model.shape.residual.fp32
        self._has_parts = plan.spec.model.shape.layer_inputs is not None
        self._name = plan.parameters.layer[0].name.partition(".{layer}")[0].rpartition(".")[2]
        self._layers_per_module = plan.parameters.layers_per_module
        self._stages: Sequence[Stage] = Holding(plan, pp_rank).stages
        self._held: Any = getattr(self._base, self._name)

    def __call__(self, *, chunk: int | None = None, received: tuple[Tensor, ...] = (), **batch: Any) -> Any:
        """The model's output with the loss at the end of the pipeline, else what goes to the next stage.

        Args:
            chunk: which of this rank's virtual stages.
            received: what the stage before has sent; nothing at the beginning of the pipeline.
            batch: as the whole model takes it.
        """
        if chunk is None:
            raise everywhere(
                "a model in pipeline stages is not called by itself: loss = engine.train_batch(iterator) runs the "
                "micro-batches of a step through all stages, engine.eval_batch(iterator) does so without training"
            )
        stage = self._stages[chunk]
        batch.pop("use_cache", None)  # no stage has keys of all layers, and training asks for none
        balance: Any = getattr(self._model, "loss_function", None)
        hand_on = getattr(balance, "hand_on", None)
        parts = LayerParts(self._base, stage.layers, received[-1] if received else None) if self._has_parts else None
        if received:
            # Base models make all streams of one, which nobody looks at here.
            batch = {**batch, "inputs_embeds": _one_stream(received[0], self._shape).detach()}
            del batch["input_ids"]
        if hand_on is not None:
            balance.begin(received[1] if received else None)
        ends: list[Tensor] = []
        with self._only(stage, received, ends), parts or contextlib.nullcontext():
            if stage.has_head:
                return self._forward(**batch)
            self._base(**{name: batch[name] for name in _FOR_BASE if name in batch})
        (hidden,) = ends
        if self._has_fp32_residual:
            hidden = hidden.float()  # a stage without layers hands on what the embedding gives
        further = () if parts is None else (parts.hand_on(),)
        return (hidden, *further) if hand_on is None else (hidden, hand_on(), *further)

    @contextlib.contextmanager
    def _only(self, stage: Stage, received: tuple[Tensor, ...], ends: list[Tensor]) -> Iterator[None]:
        """Within it the base model has the chunk's layers alone, and a configuration that speaks of no others."""
        numbers = module_numbers(stage.layers, self._layers_per_module)
        layers: list[Any] = [self._held.get_submodule(str(number)) for number in numbers] or [_pass_on]
        if received:
            layers[0] = _Entered(layers[0], received[0])
        seen, config = vars(self._base), self._base.config
        shadows: dict[str, Any] = {self._name: layers}
        if not stage.has_head:
            layers[-1] = _Left(layers[-1], ends)
            if self._norm:
                shadows[self._norm] = _Before(getattr(self._base, self._norm), ends)
        seen.update(shadows, config=_config_of(config, stage.layers, len(layers)))
        try:
            yield
        finally:
            seen["config"] = config
            for name in shadows:
                del seen[name]


class _Entered:
    """A layer that takes what was received for its hidden states."""

    def __init__(self, layer: Any, received: Tensor) -> None:
        self._layer, self._received = layer, received

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 -- takes its place
        return self._layer(self._received, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Left:
    """A layer whose output leaves the chunk."""

    def __init__(self, layer: Any, ends: list[Tensor]) -> None:
        self._layer, self._ends = layer, ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._layer(*args, **kwargs)
        hidden = output if isinstance(output, Tensor) else output[0]
        self._ends.append(hidden)
        # What the base model does after its layers is not for this chunk.
        ignored = hidden.detach()
        return ignored if isinstance(output, Tensor) else (ignored, *output[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Before:
    """The last norm in a chunk that another follows: a norm before the layers, where a model has one there too."""

    def __init__(self, norm: Any, ends: list[Tensor]) -> None:
        self._norm, self._ends = norm, ends

    def __call__(self, hidden_states: Tensor) -> Any:
        return hidden_states if self._ends else self._norm(hidden_states)


def _pass_on(hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
    """Stands for the layers of a stage that has none."""
    return (hidden_states, None) if "prev_topk_indices" in kwargs else hidden_states


def _config_of(config: Any, layers: range, count: int) -> Any:
    """The configuration of a model with these layers only, as far as a base model walks through them by it."""
    total = config.num_hidden_layers
    local = copy.copy(config)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == total:
            # A stage without layers walks through one that only passes on.
            vars(local)[name] = value[layers.start : layers.stop] or value[:1]
    vars(local)["num_hidden_layers"] = count
    return local


def _streams_dim(shape: ModelShape) -> int | None:
    """Where hidden states have their streams: [N, B, s, H] of Gemma 3n, [B, s, N, H] of others; None: of [B, s, H].

    Those of Qwen4-Exp lie side by side, [B, s, N H].
    """
    for one in shape.parts:
        if one.streams_dim is not None:
            return one.streams_dim
    return 2 if shape.residual.streams and not shape.residual.mixture_rank else None


def _one_stream(hidden: Tensor, shape: ModelShape) -> Tensor:
    """The first of the streams that a stage received: [B, s, H]."""
    if shape.residual.mixture_rank:
        return hidden[..., : shape.hidden_size]
    return hidden if (dim := _streams_dim(shape)) is None else hidden.select(dim, 0)


def handed(model: nn.Module, mesh: Mesh, batch: Mapping[str, Any], dtype: torch.dtype) -> list[Like]:
    """Shapes and types of what goes from stage to stage for a micro-batch: hidden states [B, s, H] in `dtype`.

    Where a model keeps its hidden states in fp32 they are handed on as such. Under sequence parallelism s is the rank's
    share of the sequence. Of a model with several residual streams all go. Losses of routers add what they have so far,
    a second embedding the parts of all layers.
    """
    spec = mesh.plan.spec
    rows, length = batch["input_ids"].shape
    share = mesh.size("tp") if spec.parallelism.sequence_parallel else 1
    shape = rows, -(-length // share), spec.model.shape.hidden_size
    hidden: tuple[int, ...] = shape
    if (dim := _streams_dim(spec.model.shape)) is not None:
        hidden = *shape[:dim], spec.model.shape.residual_streams, *shape[dim:]
    elif spec.model.shape.residual.mixture_rank:
        hidden = *shape[:2], spec.model.shape.residual_streams * spec.model.shape.hidden_size
    found: list[Like] = [(hidden, torch.float32 if spec.model.shape.residual.fp32 else dtype)]
    if (size := getattr(without_peft(model).loss_function, "handed_size", None)) is not None:
        found.append(((size,), torch.float32))
    if (inputs := spec.model.shape.layer_inputs) is not None:
        found.append(((*shape[:2], spec.model.shape.num_hidden_layers, inputs.width), dtype))
    return found

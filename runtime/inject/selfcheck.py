"""Before training: does the injected model compute what the original did?

One forward and backward of the original is recorded on every rank, then repeated by the injected model on its split.
Outputs are compared module by module in the order in which they come, then the gradients. Of the two sequences one is a
single document and the other two, where transformers' own masks tell documents apart; both are long enough to cross
windows and whatever else begins within a sequence. Where that would take a long one, or a large model, a small model of
the same configuration is compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import EXPERT_DP
from parcompile.model.derived_rows import CLASSIFIER
from parcompile.progress import progress
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.expert_parallel import draw_tables, is_dealt
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.mechanisms.experts import EXPERT_NORM
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels
from parcompile.runtime.micro_batch import DOCUMENTS
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.model.pretrained import build_model
from parcompile.runtime.model.shrinking import borders, shrunk
from parcompile.runtime.model.slices import Slices, slice_of
from parcompile.runtime.pipeline import Skipped, forward_and_backward
from parcompile.runtime.ring_attention import document_borders, split_sequence
from parcompile.runtime.router_losses import without_router_losses
from parcompile.runtime.transport.backend import gather_objects

from .adapters import by_stack
from .agreement import EXPERTS, entries, separates_documents
from .heads import KEY_COUNTS, QUERY_COUNTS
from .injection import inject
from .mechanisms.shared_blocks import share_blocks
from .positions import embeddings_by_length, scaled_by_place
from .regions import recompute_as_planned

_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_non_persistent_buffers_set"}
"""What torch keeps about a module: its parameters, modules and hooks. Buffers are looked at by themselves."""


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it `model` may run forward and backward; then it is as before, and so is what is drawn at random next.

    Buffers, gradients, and what its modules keep beside them (cached lengths, counts, whether they train) are put back.

    Args:
        model: the model.
        device: where it runs.
    """
    modules = list(model.modules())
    buffers = [{name: (one, _copied(one)) for name, one in module._buffers.items()} for module in modules]
    others = [
        {name: (one, _copied(one)) for name, one in vars(module).items() if name not in _OF_TORCH} for module in modules
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = [device] if device.type not in ("cpu", "meta") else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, of_torch, own in zip(modules, buffers, others, strict=True):
            _put_back(module._buffers, of_torch, set())
            _put_back(vars(module), own, _OF_TORCH)


def _copied(value: Any) -> Any:
    """A copy of what may be written to; None for what is only replaced."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else None


@torch.no_grad()
def _put_back(now: dict[str, Any], before: dict[str, tuple[Any, Any]], other: Set[str]) -> None:
    for name in now.keys() - before.keys() - other:
        del now[name]
    for name, (value, content) in before.items():
        now[name] = value
        if content is None:
            continue
        if isinstance(value, Tensor):
            value.copy_(content)
        elif isinstance(value, list):
            value[:] = content
        else:
            value.clear()
            value.update(content)


SHORT, LONG = 16, 256
"""Tokens of a check's sequences: at least, and at most."""

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
# Sums in another order, on another kernel, differ by about 1e-6 in float32; a wrong slice by about 1.
_HALF_TOLERANCE = 5e-2


OF_EXPERTS = f".experts.{EXPERT_NORM}"
"""Where a norm of what each expert gives stands, in a block of experts."""


@dataclass(frozen=True, slots=True)
class _Record:
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class SelfCheck:
    """Records the original model now; `compare` runs the injected one."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        places = _borders(model, mesh)
        self.crosses_all = not places or places[-1] < LONG
        """Whether the sequences reach everything that begins within one of the plan's."""
        self._length = _length(mesh, [place for place in places if place < LONG])
        shape = mesh.plan.spec.model.shape
        generator = torch.Generator().manual_seed(mesh.plan.spec.training.seed)
        self._ids = torch.randint(0, shape.vocab_size, (2, self._length), generator=generator)
        self._positions = torch.arange(self._length).repeat(2, 1)
        # Off the middle, where no rank's tokens begin.
        border = self._length // 2 - 1
        path = mesh.plan.parameters.layer[0].name.partition(".{layer}")[0]
        # Compared by the names of modules, which all uses of a block have in common once it is injected.
        share_blocks(without_peft(model), path, shape)
        # Where transformers' masks do not tell documents apart, the original computes something else with two.
        # It passes a state from one to the next, or compresses keys of both; the masks of stacks are not looked at.
        plain = all(one.told_apart for one in shape.parts) and shape.heads.low_rank is None and shape.stack.runs is None
        # Documents of one row would have other rotary embeddings, or temperatures, than each has on its own.
        plain = plain and not any(embeddings_by_length(model)) and not scaled_by_place(model)
        same = shape.user_module is None and plain
        if same and border > 1 and separates_documents(without_peft(model), path):
            self._positions[1, border:] -= border
        self._labels = self._ids.masked_fill(self._positions == 0, IGNORED_LABEL)
        # Parts of a sum over the tensor-parallel ranks, inside blocks of experts, equal nothing of the original.
        self._hidden = tuple(
            f"{name.rpartition('.')[0]}."
            for name, style in entries(model).items()
            # Experts of the layer itself, without a block, give the whole sum.
            if style == EXPERTS and not name.rpartition(".")[0].rpartition(".")[2].isdigit()
        )
        self._hidden += tuple(
            f"{name.removesuffix(OF_EXPERTS)}."
            for name, _ in model.named_modules()
            if mesh.size("tp") > 1 and name.endswith(OF_EXPERTS)
        )
        if shape.head.labels:  # of each token there, of the last one here; its gradient is compared
            self._hidden += (CLASSIFIER.partition(".")[0],)
        self._expected = self._run(model, self._ids, self._positions, {"labels": self._labels})

    def compare(self, model: nn.Module) -> None:
        """Runs the injected model on this rank's part. A collective call.

        Raises:
            RunError: on every rank alike; it names the first module whose output differs, or the first parameter whose
            gradient does.
        """
        mesh = self._mesh
        local = [self._on_rank(one) for one in (self._ids, self._positions, shift_labels(self._labels))]
        ids, positions, labels = (one.to(mesh.device) for one in local)
        split = {"labels": labels, "shift_labels": labels, **self._documents()}
        try:
            found = self._run(model, ids, positions, split)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, RunError) or mesh.plan.spec.model.shape.user_module is None:
                raise
            raise everywhere(
                f"the injected module cannot be called: {error}; an attention module keeps its head counts under the "
                f"name {' or '.join(QUERY_COUNTS)} (and {' or '.join(KEY_COUNTS)}), or takes them from its projections"
            ) from error
        self._add_up(model, found.gradients)
        everyones = gather_objects(self._first_difference(model, found))
        if different := [one for one in everyones if one is not None]:
            _, sentence = min(different)
            raise everywhere(f"the injected model does not compute what the original did: {sentence}")

    def _add_up(self, model: nn.Module, gradients: dict[str, Tensor]) -> None:
        """Over the ranks that have parts of a gradient. Every dp rank runs the same tokens, and experts see all."""
        mesh, parameters = self._mesh, dict(model.named_parameters())
        for name, gradient in gradients.items():
            if is_dealt(parameters[name]):
                dist.all_reduce(gradient, group=mesh.group(EXPERT_DP))
                gradient /= mesh.size("dp")
            elif f"{OF_EXPERTS}." in name:  # of the rows that came to this rank
                dist.all_reduce(gradient, group=mesh.group("dp-cp"))
                gradient /= mesh.size("dp")
            elif (ring := mesh.parallel_group("cp")) is not None:
                dist.all_reduce(gradient, group=ring)

    def _run(self, model: nn.Module, ids: Tensor, positions: Tensor, further: dict[str, Tensor]) -> _Record:
        outputs: dict[str, Tensor] = {}
        batch = {"input_ids": ids, "position_ids": positions, "use_cache": False, **further}
        with ExitStack() as within:
            within.enter_context(progress("comparing the injected model with the original"))
            within.enter_context(unchanged(model, ids.device))
            if self._mesh.plan.spec.training.router is not None:
                within.enter_context(without_router_losses(model))
            model.eval()
            with _recording(model, outputs):
                if self._mesh.plan.spec.model.shape.head.labels:
                    _backward_of_labels(model, batch)
                elif "shift_labels" in further and self._mesh.size("pp") > 1:
                    forward_and_backward(model, self._mesh, batch)
                else:
                    model(**batch).loss.backward()
            raw = {
                name: parameter.grad.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        return _Record(outputs, by_stack(model, raw))

    def _first_difference(self, model: nn.Module, found: _Record) -> tuple[int, str] | None:
        place, plan = 0, self._mesh.plan
        # Stages call what lies around their layers too, some of it with nothing that means anything there.
        compared = plan.parameters.layer[0].name.partition("{layer}")[0] if self._mesh.size("pp") > 1 else ""
        for name, output in found.outputs.items():
            place += 1
            expected = self._expected.outputs.get(name)
            if expected is None or name.startswith(self._hidden) or not name.startswith(compared):
                continue
            local = self._part(expected, output.shape)
            if local is not None and (error := _error(output, local)) is not None:
                return place, f"the output of {name or type(model).__name__} differs (relative error {error:.1e})"
        slices = Slices(self._mesh)
        largest = max(float(gradient.norm()) for gradient in self._expected.gradients.values())
        for name, gradient in found.gradients.items():
            place += 1
            whole = self._expected.gradients[name]
            whole = slice_of(slices, name, tuple(whole.shape)).cut(whole)
            # What is rounding noise beside the other gradients is noise here too.
            if float(whole.norm()) > 1e-5 * largest and (error := _error(gradient, whole)) is not None:
                return place, f"the gradient of {name} differs (relative error {error:.1e})"
        return None

    def _documents(self) -> dict[str, Any]:
        documents = document_borders(self._positions)
        return {DOCUMENTS: documents if any(len(row) > 2 for row in documents) else None}

    def _on_rank(self, tensor: Tensor) -> Tensor:
        mesh = self._mesh
        layout = mesh.plan.spec.parallelism.cp_layout
        return split_sequence(tensor, 1, layout, mesh.size("cp"), mesh.index("cp"))

    def _part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """What of the original's output this rank computes; None where the shapes do not tell."""
        if whole.dim() < 2 or whole.shape[1] != self._length or whole.dim() != len(shape):
            return None
        local = self._on_rank(whole)
        tp, rank = self._mesh.size("tp"), self._mesh.index("tp")
        if local.shape[1] == tp * shape[1]:
            local = local.chunk(tp, dim=1)[rank]
        return local if local.shape == shape else None


def check_small_copy(mesh: Mesh) -> None:
    """Compares a small model of the plan's configuration: the same layout, and every kind of layer. A collective call.

    Its weights are drawn, norms and biases too; the random state of the caller is left as it was.

    Raises:
        RunError: on every rank alike, as `SelfCheck.compare`.
    """
    small = replace(mesh, plan=shrunk(mesh.plan))
    model = build_model(small.plan)
    generator = torch.Generator().manual_seed(small.plan.spec.training.seed)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    if (moe := small.plan.spec.model.shape.moe) is not None:
        draw_tables(model, moe.num_experts, generator)
    check = SelfCheck(model, small)
    inject(model, small)
    recompute_as_planned(model, small.plan, small.rank)
    model.to(mesh.device)
    try:
        check.compare(model)
    except RunError as error:
        shape = small.plan.spec.model.shape
        heads = f"{shape.num_attention_heads} heads, " if shape.attends else ""
        raise everywhere(
            f"{error} (found in a small model of the same configuration: {shape.num_hidden_layers} layers, "
            f"{heads}{small.plan.spec.training.sequence_length} tokens)"
        ) from error


def _borders(model: nn.Module, mesh: Mesh) -> list[int]:
    if mesh.plan.spec.model.shape.user_module is not None:
        return []  # nobody says what is within it
    return borders(mesh.plan, model.config)


def _length(mesh: Mesh, places: Sequence[int]) -> int:
    """A sequence that can be dealt to the ranks and goes on behind those places; no longer than the plan's."""
    unit = 2 * mesh.size("cp") * mesh.size("tp")
    wanted = max([SHORT, *(2 * place for place in places)])
    return min(max(unit, -(-wanted // unit) * unit), mesh.plan.spec.training.sequence_length)


def _error(found: Tensor, expected: Tensor) -> float | None:
    """The relative difference, where it is more than rounding."""
    tolerance = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
    found, expected = found.detach().to("cpu", torch.float64), expected.to("cpu", torch.float64)
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return None if error <= tolerance else error


def _backward_of_labels(model: nn.Module, batch: dict[str, Any]) -> None:
    """From a loss of what a classifier gives for the last tokens, none of which is padding."""
    unlabelled = {name: one for name, one in batch.items() if name not in ("labels", "shift_labels")}
    config: Any = without_peft(model).config
    with mock.patch.object(config.get_text_config(), "pad_token_id", -1):
        model(**unlabelled).logits.square().sum().backward()


@contextmanager
def _recording(model: nn.Module, outputs: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the output of each module, the first time it is called, in the order in which they finish."""
    names = {module: name for name, module in model.named_modules() if not isinstance(module, Skipped)}

    def record(module: nn.Module, _: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs.setdefault(names[module], first.detach().clone())

    with contextlib.ExitStack() as entered:
        for module in names:
            entered.enter_context(module.register_forward_hook(record))
        yield

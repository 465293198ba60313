"""The model and the batches of a cell, and its steps in one plain process of transformers and torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .cells import FAMILIES, Cell, batch_size, planned
from .tracing import Trace

SIZES: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Keys of each model's configuration beside those of its family."""
STEPS, SEQUENCE, VOCABULARY = 3, 32, SIZES["vocab_size"]
IGNORED = -100
AUX_COEFFICIENT = 0.1
LAST_BIT: Mapping[str, float] = {"fp32": 1e-7, "fp64": 1e-7, "bf16": 2**-8}
"""By how much the weights with which a nudged reference computes differ, relative."""

ADAMW: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.01}
"""The eps is large: with a small one a gradient that is wrong by a factor is the same update."""

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
"""Of the weights that are stepped; bf16 computes with a copy of them."""

Batch = dict[str, Tensor]


def configuration(cell: Cell) -> Any:
    """Of a model of two layers, or two for each `vpp`, whose sizes every layout divides."""
    import transformers

    if own := planned(cell):
        kind = {"tie_word_embeddings": cell["tied"], "use_cache": False, **_balanced(cell)}
        return transformers.AutoConfig.for_model(**{**own["model"], **kind})
    layers = {"num_hidden_layers": 2 * cell.get("vpp", 1), "tie_word_embeddings": cell["tied"]}
    family = FAMILIES[cell["family"]]
    return getattr(transformers, family["class"])(**SIZES, **layers, **family["keys"] | _balanced(cell))


def _balanced(cell: Cell) -> dict[str, Any]:
    return {"output_router_logits": True, "router_aux_loss_coef": AUX_COEFFICIENT} if cell.get("aux_loss") else {}


def sequence_length(cell: Cell) -> int:
    """Tokens of a sample."""
    return int(planned(cell).get("length", SEQUENCE))


def families() -> tuple[str, ...]:
    """Those that the installed transformers has."""
    import transformers

    return tuple(name for name, family in FAMILIES.items() if hasattr(transformers, family["class"]))


def import_models() -> None:
    """Imports what every cell needs, once, in front of all forks; it computes nothing."""
    import torch._dynamo  # what an optimizer imports at its first step
    import transformers

    with torch.device("meta"):
        for family in families():
            transformers.AutoModelForCausalLM.from_config(configuration({"family": family, "tied": False}))


def model_of(cell: Cell, nudge: int | None = None) -> nn.Module:
    """The drawn model; `nudge`: a seed by which each weight moves by `LAST_BIT`, up or down: in bf16 the copy's do."""
    import transformers

    torch.manual_seed(cell["seed"])
    kernel = {} if planned(cell) else {"attn_implementation": "sdpa"}
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(configuration(cell), **kernel)
    model = model.to(torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() < 2:  # norms off the values at which a missing factor does not show
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    if cell["dtype"] == "bf16":  # engines round the weights that they are given, and step from these
        model = model.to(torch.bfloat16)
    model = model.to(DTYPES[cell["dtype"]])
    if cell["dtype"] != "bf16":
        _nudge(model, cell, nudge)
    return model.train()


def _nudge(model: nn.Module, cell: Cell, seed: int | None) -> None:
    if seed is None:
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.data *= 1 + LAST_BIT[cell["dtype"]] * signs


def batches(cell: Cell) -> Iterator[Batch]:
    """For each step `input_ids`, `labels` (not shifted) and `position_ids`, each [samples, S]."""
    generator = torch.Generator().manual_seed(cell["seed"] + 7)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples, length = batch_size(cell), sequence_length(cell)
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
        labels, positions = ids.clone(), torch.arange(length).repeat(samples, 1)
        if cell["masks"] != "none":
            for row in range(samples):
                labels[row, : drawn(1, length - 2) if row % 2 else 2] = IGNORED
        if cell["masks"] == "empty":
            labels[-1] = IGNORED
        if cell["packed"]:
            for row in range(samples):
                border = drawn(5, length - 5)
                positions[row, border:] -= border
                labels[row, border] = IGNORED  # the first token of a document is nobody's next
                if cell.get("isolation"):
                    labels[row, :border] = IGNORED
                if cell.get("perturbed"):  # of the second run
                    ids[row, :border] = (ids[row, :border] + 1) % VOCABULARY
        yield {"input_ids": ids, "labels": labels, "position_ids": positions}


def counted(batch: Batch) -> int:
    """Labels of a batch that count, behind the first place, which nothing predicts; at least 1."""
    return max(1, int((batch["labels"][:, 1:] != IGNORED).sum()))


def rows(cell: Cell) -> list[Batch]:
    """The samples of all steps, in order, without positions where none are packed."""
    return [
        {name: tensor[row] for name, tensor in batch.items() if name != "position_ids" or cell["packed"]}
        for batch in batches(cell)
        for row in range(batch_size(cell))
    ]


def micro_batches(cell: Cell, batch: Batch, dp_rank: int) -> Iterator[Batch]:
    """What a data-parallel rank is given in a step, in order: dealt to the ranks within each accumulation step."""
    size = cell["micro_batch"]
    for micro in range(cell["accumulation"]):
        first = (micro * cell["dp"] + dp_rank) * size
        yield {name: tensor[first : first + size] for name, tensor in batch.items()}


def inputs(cell: Cell, batch: Batch) -> Batch:
    """What the model is called with."""
    return {name: batch[name] for name in ("input_ids", *(("position_ids",) if cell["packed"] else ()))}


def balance(cell: Cell, outputs: Any) -> Tensor | float:
    """What the experts of a micro-batch add to the mean of all micro-batches; 0 where the cell has no such loss."""
    return AUX_COEFFICIENT * outputs.aux_loss if cell.get("aux_loss") else 0.0


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of cross entropies over all labels that count; labels are not shifted yet."""
    predicted = logits[:, :-1].flatten(0, 1)
    predicted = predicted.float() if predicted.dtype == torch.bfloat16 else predicted
    return nn.functional.cross_entropy(predicted, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def optimizer_of(parameters: Any) -> torch.optim.AdamW:
    """That of all engines."""
    return torch.optim.AdamW(parameters, **ADAMW)


def _pieces(cell: Cell, batch: Batch, whole: bool) -> list[Batch]:
    """Single rows, or the micro-batches of all ranks where what is trained, or watched, depends on them."""
    if cell.get("aux_loss") or whole:
        return [micro for rank in range(cell["dp"]) for micro in micro_batches(cell, batch, rank)]
    return [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(batch_size(cell))]


def reference(cell: Cell, nudge: int | None = None, watched: bool = False) -> dict[str, Any]:
    """`loss` and `norm` (before clipping) of steps; parameters at the `start`, after the `first` step, and after all.

    The loss of a step is the mean over all tokens of its samples that count. In bf16 a copy of the weights computes.
    A balancing loss is the mean of those of the micro-batches that the ranks have. A watched run has a `trace`.
    """
    model, low = model_of(cell, nudge), cell["dtype"] == "bf16"
    optimizer = optimizer_of(model.parameters())
    seen = [_copied(model)]
    losses, norms, trace = [], [], Trace(model) if watched else None
    for step, batch in enumerate(batches(cell)):
        total, computing = 0.0, model
        if low:
            computing = model_of(cell)
            computing.load_state_dict(model.state_dict())
            _nudge(computing, cell, nudge)
            computing = computing.to(torch.bfloat16)
        if trace is not None and (low or step == 0):
            trace.watch(computing)
        pieces = _pieces(cell, batch, watched)
        for piece in pieces:
            outputs = computing(**inputs(cell, piece))
            loss = token_sum(outputs.logits, piece["labels"]) / counted(batch) + balance(cell, outputs) / len(pieces)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if low:
            for master, copy in zip(model.parameters(), computing.parameters(), strict=True):
                master.grad = None if copy.grad is None else copy.grad.to(master.dtype)
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), cell["clipping"] or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(_copied(model))
    result = {"loss": losses, "norm": norms, "start": seen[0], "first": seen[1], "params": seen[-1]}
    return result if trace is None else {**result, "trace": trace.data()}


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

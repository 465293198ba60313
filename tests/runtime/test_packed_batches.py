"""Packed documents and padded sequences train as each text on its own would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from closeness import assert_close, judge, nudge
from family_runs import drawn_model, family_plan
from ranks import run_ranks
from torch import Tensor
from training_runs import compared, initial_model, make_plan, plain_optimizer
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from parcompile.plan import Plan
from parcompile.runtime.inject.positions import embeddings_by_length
from parcompile.runtime.labels import shift_labels

LENGTHS = ((5, 8, 3), (16,))
"""Documents of the two rows of the batch."""


def packed(plan: Plan) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def texts_of_rows(plan: Plan) -> list[Tensor]:
    """The documents of `packed`."""
    return [
        text for row, lengths in zip(packed(plan)["input_ids"], LENGTHS, strict=True) for text in row.split(lengths)
    ]


def padded(plan: Plan) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(16) < torch.tensor([[11], [16]])).long()
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def injected(rank: int, plan: Plan, batch: dict[str, Tensor]) -> dict[str, Any]:
    from parcompile.runtime import join, reduce_loss, split_batch
    from parcompile.runtime.inject import inject

    mesh = join(plan)
    model = inject(initial_model(plan), mesh)
    loss = model(**split_batch(batch, mesh)).loss
    loss.backward()
    gradient = model.model.norm.weight.grad
    torch.distributed.all_reduce(gradient)
    return {"loss": reduce_loss(loss, mesh), "gradient": gradient}


def loss_of_texts(model: torch.nn.Module, texts: list[Tensor]) -> Tensor:
    total = torch.stack(
        [
            torch.nn.functional.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum")
            for text in texts
        ]
    )
    return total.sum() / sum(len(text) - 1 for text in texts)


def texts_alone(plan: Plan, texts: list[Tensor]) -> tuple[float, Tensor]:
    model = initial_model(plan)
    loss = loss_of_texts(model, texts)
    loss.backward()
    gradient = model.model.norm.weight.grad
    assert gradient is not None
    return float(loss.detach()), gradient


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_batch_trains_as_its_texts_alone(kind: str) -> None:
    plan = make_plan(2, {"cp": 2}, training={"global_batch_size": 2})
    batch = packed(plan) if kind == "packed" else padded(plan)
    ids = batch["input_ids"]
    texts = [*ids[0].split(LENGTHS[0]), ids[1]] if kind == "packed" else [ids[0, :11], ids[1]]
    loss, gradient = texts_alone(plan, texts)
    for found in run_ranks(2, injected, plan, batch):
        assert_close(found, {"loss": loss, "gradient": gradient})


def test_the_last_token_of_a_document_predicts_nothing() -> None:
    labels, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    assert shift_labels(labels, positions).tolist() == [[6, -100, 8, -100]]


DOCUMENTS = [torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (16, 3, 12, 1, 7, 5, 2, 9)]
"""Samples of at most 16 tokens: [16], [3, 12, 1], [7, 5, 2], [9], and from the beginning."""
TEXTS_OF_STEPS = ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3))


def train_on_packs(rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime import PackedPlanLoader, initialize

    engine, *_ = initialize(plan=plan, model=initial_model(plan))
    found: dict[str, Any] = {"rank": rank, "losses": [], "norms": [], "dealt": set()}

    def read() -> Iterator[dict[str, Any]]:
        for batch in PackedPlanLoader(DOCUMENTS, engine.mesh):
            packing = batch["packing"]
            found["dealt"] |= {bool(packing.dealt), not packing.dealt or len(packing.dealt) == len(packing.lengths)}
            yield batch

    batches = read()
    for _ in TEXTS_OF_STEPS:
        found["losses"].append(float(engine.train_batch(batches)))
        found["norms"].append(float(engine.get_global_grad_norm()))
    found["parameters"] = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallelism", "training"),
    [
        (
            {"tp": 2, "cp": 2, "sequence_parallel": True, "cp_layout": "striped"},
            {"micro_batch_size": 1, "activation_checkpointing": "full"},
        ),
        ({"cp": 4, "cp_implementation": "usp", "hierarchical_cp_sizes": [2, 2]}, {"micro_batch_size": 2}),
        ({"cp": 2, "dp": 2}, {"micro_batch_size": 1, "activation_checkpointing": "attention+mlp"}),
        ({"pp": 2, "cp": 2}, {"micro_batch_size": 1, "activation_checkpointing": "full"}),
    ],
    ids=["tp2 cp2 striped, recomputed", "usp", "cp2 dp2, in parts", "pp2 cp2, recomputed"],
)
def test_the_engine_trains_on_packs_as_one_process_on_each_text(
    parallelism: dict[str, Any], training: dict[str, Any]
) -> None:
    plan = make_plan(4, parallelism, training={"global_batch_size": 2, **training})
    ranks = run_ranks(4, train_on_packs, plan)
    for found in ranks:
        # Some documents are dealt, others stay whole, in the same batch.
        assert found["dealt"] >= {True, False}
    judge(compared(plan, ranks, lambda seed: train_on_texts(plan, seed)))


def train_on_texts(plan: Plan, seed: int | None) -> dict[str, Any]:
    model = initial_model(plan)
    nudge(model, seed)
    optimizer = plain_optimizer(model, plan)
    losses, norms = [], []
    for numbers in TEXTS_OF_STEPS:
        optimizer.zero_grad()
        loss = loss_of_texts(model, [DOCUMENTS[number] for number in numbers])
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), plan.spec.training.gradient_clipping)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "parameters": dict(model.named_parameters())}


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 50.0, "original_max_position_embeddings": 6, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}
SHORT = {"max_position_embeddings": 6}
PLAIN = {"rope_type": "default", "rope_theta": 50.0}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {**SHORT, "rope_parameters": DYNAMIC}),
    "dynamic, complex": ("deepseek_v2", {**SHORT, "rope_parameters": DYNAMIC}),
    "dynamic, of one kind of layers": (
        "gemma3_text",
        {**SHORT, "rope_parameters": {"sliding_attention": PLAIN, "full_attention": DYNAMIC}},
    ),
    "longrope": ("phi3", {"max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "a scale": ("phimoe", {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.7, "factor": 4.0}}),
    "temperatures": ("llama4_text", {"floor_scale": 3, "attn_scale": 0.5, "no_rope_layers": [0, 0]}),
    "temperatures of positions": (
        "ministral3",
        {"rope_parameters": {**PLAIN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 3}},
    ),
}
"""Configurations whose numbers depend on how long a document is, or on the place of a token in it."""


def texts_by_themselves(plan: Plan, texts: list[Tensor]) -> tuple[float, Tensor]:
    """As `texts_alone`, none of which knows how long the one before it was."""
    model, before = drawn_model(plan), drawn_model(plan)
    losses = []
    for text in texts:
        for name, module in before.named_modules():
            if hasattr(module, "original_max_seq_len"):
                model.set_submodule(name, copy.deepcopy(module))
        logits = model(input_ids=text[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, text[1:], reduction="sum"))
    loss = torch.stack(losses).sum() / sum(len(text) - 1 for text in texts)
    loss.backward()
    return float(loss.detach()), model.get_input_embeddings().weight.grad.clone()


def by_length(rank: int, plans: list[Plan]) -> list[list[tuple[float, Tensor]]]:
    """Of each plan the losses and the gradients of its embedding: in a row, then packed."""
    from parcompile.runtime import PackedPlanLoader, join, leave, reduce_loss, split_batch
    from parcompile.runtime.inject import inject

    found = []
    for plan in plans:
        mesh = join(plan)
        model = inject(drawn_model(plan), mesh)
        packs = next(iter(PackedPlanLoader(texts_of_rows(plan), mesh)))
        each = []
        for batch in (split_batch(packed(plan), mesh), packs):
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            gradient = model.get_input_embeddings().weight.grad
            torch.distributed.all_reduce(gradient, group=mesh.group("cp"))
            each.append((reduce_loss(loss, mesh), gradient.clone()))
        found.append(each)
        leave()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_document_has_the_numbers_of_its_own_length_and_places(ranks: int) -> None:
    plans = [family_plan(family, ranks, {"cp": ranks}, **changes) for family, changes in BY_LENGTH.values()]
    found = run_ranks(ranks, by_length, plans)[0]
    far = {}
    for name, plan, each in zip(BY_LENGTH, plans, found, strict=True):
        loss, gradient = texts_by_themselves(plan, texts_of_rows(plan))
        for way, (own, of_embedding) in zip(("rows", "packs"), each, strict=True):
            distance = float((of_embedding[: len(gradient)] - gradient).norm() / gradient.norm())
            far[name, way] = max(abs(own / loss - 1), distance)
    # Rounding alone gives up to 2e-7; the frequencies of another length 1e-2.
    assert max(far.values()) < 1e-5, far


@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
def test_every_kind_of_rotary_embedding_that_depends_on_length_is_known(kind: str) -> None:
    """A kind that a release of transformers adds is looked at here."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=6)
    further = {"factor": 4.0, "original_max_position_embeddings": 6, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.rope_parameters = {"rope_type": kind, "rope_theta": 50.0, **further, **FACTORS}
    embedding = LlamaRotaryEmbedding(config)
    short, long = torch.arange(5)[None], torch.arange(16)[None]
    alone = embedding(torch.zeros(1), short)[0]
    beside = embedding(torch.zeros(1), long)[0][:, :5]
    assert (embedding in list(embeddings_by_length(embedding))) is not torch.equal(alone, beside)


def test_documents_that_have_no_place_are_named() -> None:
    from parcompile.runtime import PackedPlanLoader

    plan = make_plan(1, {})
    mesh: Any = SimpleNamespace(plan=plan, size=lambda _: 1, index=lambda _: 0)
    with pytest.raises(ValueError, match="document 1 has 17 tokens: expected 1 to sequence_length 16"):
        PackedPlanLoader([torch.arange(5), torch.arange(17)], mesh)
    with pytest.raises(ValueError, match="the data set is empty"):
        PackedPlanLoader([], mesh)

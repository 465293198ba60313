"""Contract: what a model draws at random in training is the same in every layout, and random.

Dropout of embeddings, residuals and hidden states, jitter of routers, sampled experts and dropout of adapters: losses,
gradient norms and parameters of a layout agree with those of one rank within 1e-5, as without dropout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_apart, assert_close
from families import OWN_KEYS, tiny_config
from family_runs import clip, drawn_model, family_plan, named, of_plan, optimizer_of
from ranks import run_ranks
from torch import Tensor, nn
from training_runs import make_plan, train_with_engine, whole_parameters

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.plan import Plan
from parcompile.runtime.model.text_head import causal_model

DRAWING: dict[str, dict[str, Any]] = {
    "phi": {"resid_pdrop": 0.25, "embd_pdrop": 0.25},
    "phi3": {"resid_pdrop": 0.25},
    "persimmon": {"hidden_dropout": 0.25},
    "stablelm": {"hidden_dropout": 0.25},
    "gpt_neox": {"hidden_dropout": 0.25, "attention_dropout": 0.25},
    "starcoder2": {"residual_dropout": 0.25, "embedding_dropout": 0.25},
    "seed_oss": {"residual_dropout": 0.25, "attention_dropout": 0.25},
    "mixtral": {"router_jitter_noise": 0.2},
    "minimax_m2": {"router_jitter_noise": 0.2},
    "phimoe": {"router_jitter_noise": 0.05, "input_jitter_noise": 0.2},
}


def assert_equal_runs(plan: Plan, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """`expected`: of one rank, which holds every parameter whole, padding included."""
    assert "error" not in ranks[0], ranks[0]["error"]
    whole = whole_parameters(plan, ranks)
    real = {name: expected["parameters"][name][tuple(map(slice, value.shape))] for name, value in whole.items()}
    assert_close(
        {"losses": ranks[0]["losses"], "norms": ranks[0]["norms"], "parameters": whole},
        {"losses": expected["losses"], "norms": expected["norms"], "parameters": real},
    )


def train_drawing(rank: int, plans: list[Plan]) -> list[dict[str, Any]]:
    """Two steps of each plan's model in training mode; the samples are numbered from 6."""
    from parcompile.runtime import join, split_batch
    from parcompile.runtime.inject import inject
    from parcompile.runtime.loss import loss_of_step

    mesh, found = join(plans[0]), []
    for plan in plans:
        mesh = of_plan(mesh, plan)
        model = inject(drawn_model(plan), mesh).train()
        optimizer, losses, norms = optimizer_of(model), [], []
        ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(7))
        for step in range(2):
            batch = split_batch({"input_ids": ids, "labels": ids}, mesh)
            loss = model(**batch, first_sample=6 + 2 * step).loss
            optimizer.zero_grad()
            loss.backward()
            norms.append(clip(model, mesh))
            optimizer.step()
            losses.append(float(loss_of_step([loss.detach()], 1, mesh)))
        found.append({"rank": rank, "losses": losses, "norms": norms, "parameters": named(model)})
    return found


@pytest.mark.ranks
def test_families_draw_alike_with_tensor_context_and_sequence_parallelism() -> None:
    layout = {"tp": 2, "cp": 2, "sequence_parallel": True}
    alone = [family_plan(family, 1, {}, **changes) for family, changes in DRAWING.items()]
    cut = [family_plan(family, 4, layout, **changes) for family, changes in DRAWING.items()]
    quiet = [family_plan(family, 1, {}, **dict.fromkeys(changes, 0.0)) for family, changes in DRAWING.items()]
    (expected,), ranks = run_ranks(1, train_drawing, alone), run_ranks(4, train_drawing, cut, timeout=280)
    (without,) = run_ranks(1, train_drawing, quiet)
    for number, plan in enumerate(cut):
        assert_equal_runs(plan, [rank[number] for rank in ranks], expected[number])
        assert_apart(expected[number]["losses"], without[number]["losses"], 3e-5)


@pytest.mark.ranks
def test_stages_data_parallelism_and_recomputation_draw_alike() -> None:
    model = tiny_config("starcoder2", residual_dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2)
    layouts: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (1, {}, {}),
        (1, {}, {"activation_checkpointing": "full", "micro_batch_size": 1}),
        (2, {"tp": 2}, {"micro_batch_size": 2}),
        (2, {"cp": 2}, {"activation_checkpointing": "full"}),
        (2, {"dp": 2}, {"micro_batch_size": 1}),
        (2, {"pp": 2}, {"micro_batch_size": 1, "activation_checkpointing": "full"}),
    ]
    expected: dict[str, Any] = {}
    for world, axes, training in layouts:
        plan = make_plan(world, axes, model=model, whole_model=True, training=training)
        ranks = run_ranks(world, train_with_engine, plan, False, 2)
        expected = expected or ranks[0]
        assert_equal_runs(plan, ranks, expected)


def train_adapter(rank: int, plan: Plan) -> dict[str, Any]:
    """Two steps of LoRA with dropout beside linears that are cut along their outputs, and along their inputs."""
    from peft import LoraConfig, get_peft_model

    from parcompile.runtime import adapter_state, initialize

    torch.manual_seed(5)
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_dropout=0.3, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    from training_runs import initial_model, samples

    model = get_peft_model(initial_model(plan), config)
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    batches = iter(loader)
    steps = [(float(engine.train_batch(batches)), float(engine.get_global_grad_norm())) for _ in range(2)]
    losses, norms = map(list, zip(*steps, strict=True))
    return {"losses": losses, "norms": norms, "adapters": adapter_state(engine.module, engine.mesh)}


@pytest.mark.ranks
def test_adapters_drop_alike() -> None:
    plans = [make_plan(1, {}), make_plan(4, {"tp": 2, "cp": 2, "sequence_parallel": True})]
    expected, found = (run_ranks(plan.world_size, train_adapter, plan)[0] for plan in plans)
    assert_close(found, expected)


def packed_losses(rank: int, plan: Plan) -> list[float]:
    """Two steps on packed documents, which each cp deals out otherwise."""
    from training_runs import initial_model

    from parcompile.runtime import PackedPlanLoader, initialize

    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 61, (n,), generator=generator) for n in (5, 11, 3, 7, 16, 9, 4, 4, 8, 2, 13, 3) * 2]
    engine, *_ = initialize(plan=plan, model=initial_model(plan))
    batches = iter(PackedPlanLoader(documents, engine.mesh))
    return [float(engine.train_batch(batches)) for _ in range(2)]


@pytest.mark.ranks
def test_packed_documents_drop_alike() -> None:
    model = tiny_config("phi3", resid_pdrop=0.3, sliding_window=None)
    alone, *others = [
        run_ranks(world, packed_losses, make_plan(world, axes, model=model, whole_model=True))[0]
        for world, axes in ((1, {}), (2, {"cp": 2}), (2, {"dp": 2}))
    ]
    for losses in others:
        assert_close(losses, alone)


@pytest.mark.parametrize("family", RUNTIME_FAMILIES)
def test_every_key_of_a_family_that_makes_it_draw_is_noticed(family: str) -> None:
    from transformers import AutoConfig

    from parcompile.runtime.drawing import draws

    def build(**changes: Any) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = causal_model(AutoConfig.for_model(**tiny_config(family, **changes)))
        return model

    config: Any = build().config
    keys = [
        key
        for key, value in config.to_dict().items()
        if any(word in key for word in ("drop", "jitter", "noise")) and isinstance(value, int | float)
    ]
    # Attention dropout is the ring's; a classifier is no part of a language model; five models do not read a key.
    unread = {
        "phi3": "embd_pdrop",
        "minimax_m3_vl_text": "router_jitter_noise",
        "llama4_text": "router_jitter_noise",
        "nemotron_h": "hidden_dropout",
        "minimax": "router_jitter_noise",  # which its family refuses
        "deepseek_v4": "router_jitter_noise",  # likewise
    }
    ignored = {"attention_dropout", "classifier_dropout", unread.get(family)}
    if family in OWN_KEYS:  # other names of the same, and layers that a refusal keeps from being dropped
        ignored |= {"attn_pdrop", "attention_probs_dropout_prob", "summary_first_dropout", "layerdrop"}
    if family == "mpt":  # it reads attn_config.attn_pdrop alone
        ignored |= {"resid_pdrop", "emb_pdrop"}
    own = [key for key in keys if key not in ignored]
    # Phi-MoE samples its experts in training; others name a draw of layers, which is off, in their code, and Gemma 3n a
    # normal distribution, of which it takes a quantile.
    named = ("phimoe", "opt", "biogpt", "xglm", "gemma3n_text")
    assert draws(build(**dict.fromkeys(keys, 0.0))) == (family in named)
    for key in own:
        assert draws(build(**{**dict.fromkeys(keys, 0.0), key: 0.1})), key
    assert family in OWN_KEYS or set(DRAWING.get(family, ())) - {"attention_dropout"} == set(own)


def _masks(seed: int, name: str, first_sample: int) -> Tensor:
    """Which elements of [3, 8, 4096] a dropout of 0.3 drops."""
    from parcompile.layout.sequence import CpLayout
    from parcompile.runtime import micro_batch
    from parcompile.runtime.drawing import _wrap
    from parcompile.runtime.drawing.draws import Place

    module = nn.Dropout(0.3)
    _wrap(module, name, Place(seed, CpLayout.CONTIGUOUS, 1, 0, 1, 0, False), {})
    micro_batch.begin((), {"input_ids": torch.zeros(3, 8, dtype=torch.int64), "first_sample": first_sample})
    kept: Tensor = module(torch.ones(3, 8, 4096))
    micro_batch.end()
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}
    return kept == 0


def test_masks_are_even_and_unrelated() -> None:
    masks = [_masks(1, "a", 0), _masks(2, "a", 0), _masks(1, "b", 0), _masks(1, "a", 3)]
    masks += [masks[0].roll(1, dim) for dim in range(3)]
    for dim in range(3):  # of every row, every token, every feature: 5 standard deviations
        others = tuple(one for one in range(3) if one != dim)
        share = masks[0].float().mean(others)
        assert float((share - 0.3).abs().max()) < 5 * (0.21 / (masks[0].numel() / share.numel())) ** 0.5
    for index, one in enumerate(masks):
        for other in masks[:index]:
            assert abs(float((one & other).float().mean()) - 0.09) < 5 * (0.09 * 0.91 / one.numel()) ** 0.5
    assert torch.equal(_masks(1, "a", 2)[1:], _masks(1, "a", 3)[:2])


def test_numbers_follow_their_distributions() -> None:
    from parcompile.layout.sequence import CpLayout
    from parcompile.runtime import micro_batch
    from parcompile.runtime.drawing import _wrap
    from parcompile.runtime.drawing.draws import Place

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [
                torch.rand_like(x),
                torch.empty_like(x).uniform_(-1.0, 3.0),
                torch.empty_like(x).exponential_(2.0),
                torch.randn_like(x),
                torch.empty_like(x).normal_(1.0, 2.0),
                torch.empty_like(x).bernoulli_(0.2),
            ]

    module = Draws()
    _wrap(module, "a", Place(1, CpLayout.CONTIGUOUS, 1, 0, 1, 0, False), {})
    micro_batch.begin((), {"input_ids": torch.zeros(4, 50, dtype=torch.int64), "first_sample": 0})
    found = module(torch.empty(4, 50, 1000))
    micro_batch.end()
    moments = [(0.5, 1 / 12), (1.0, 16 / 12), (0.5, 0.25), (0.0, 1.0), (1.0, 4.0), (0.2, 0.16)]
    for numbers, (mean, variance) in zip(found, moments, strict=True):
        assert abs(float(numbers.mean()) - mean) < 5 * (variance / numbers.numel()) ** 0.5
        assert abs(float(numbers.var()) / variance - 1) < 0.03
    correlations = torch.corrcoef(torch.stack([one.flatten() for one in found]))
    assert float((correlations - torch.eye(6)).abs().max()) < 5 / 200_000**0.5

"""The mask that transformers builds is the window that the ring is told, layer by layer, or the model is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES
from family_runs import batch_of, drawn_model, family_plan
from ranks import run_ranks

from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.inject.agreement import check_masks, masked_layers, separates_documents
from parcompile.runtime.inject.interface import REPLACED
from parcompile.runtime.model.pretrained import instantiate, parameters_without_memory

RUN = tuple(family for family in FAMILIES if family not in REPLACED)
WINDOW = {"sliding_window": 5, "max_window_layers": 1}
LENGTH = 16


def window_of(family: str) -> dict[str, Any]:
    """A window in every way that the family knows."""
    key = FAMILIES[family].window_key
    return WINDOW | ({key: True} if key else {})


def windowed(family: str, ranks: int = 1) -> Plan:
    """A plan whose model has a window, past the compiler's own check."""
    plan = family_plan(family, ranks, {"cp": ranks})
    config = {**plan.spec.model.hf_config, **window_of(family)}
    return replace(plan, spec=replace(plan.spec, model=replace(plan.spec.model, hf_config=config)))


def layers_of(plan: Plan) -> str:
    return plan.parameters.layer[0].name.partition(".{layer}")[0]


@pytest.mark.parametrize("family", RUN)
def test_masks_of_a_family_are_its_attention_s_windows_or_refused(family: str) -> None:
    plan = windowed(family)
    with parameters_without_memory():
        model = instantiate(plan, torch.float32)
    lacking = FAMILIES[family].window_only_in
    if not lacking:
        check_masks(model, layers_of(plan), LENGTH, masked_layers(plan.spec.model.shape))
        return
    sides = {
        "mask": "the mask is a window of 5 tokens, the attention is told no window",
        "attention": "the mask is no window, the attention is told a window of 5 tokens",
    }
    with pytest.raises(RunError, match=sides[lacking]):
        check_masks(model, layers_of(plan), LENGTH)
    check_masks(model, layers_of(plan), WINDOW["sliding_window"])


@pytest.mark.parametrize("family", [family for family in RUN if FAMILIES[family].window_only_in])
def test_the_compiler_refuses_those_windows_before_a_run(family: str) -> None:
    with pytest.raises(AssertionError, match=rf"X004.*sliding_window 5 < sequence_length {LENGTH}: .*{family}"):
        family_plan(family, 1, {}, **window_of(family))
    assert not family_plan(family, 1, {}, **{**window_of(family), "sliding_window": LENGTH}).refusals


def test_chunks_of_a_mask_are_told_to_the_attention() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_local_experts=2,
        vocab_size=61,
        attention_chunk_size=8,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = Llama4ForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    check_masks(model, "model.layers", 8)
    check_masks(model, "model.layers", LENGTH)
    model.model.layers[0].self_attn.layer_idx = 3  # which has no chunks
    with pytest.raises(RunError, match="layers 0: the mask is chunks of 8 tokens, the attention is told no window"):
        check_masks(model, "model.layers", LENGTH)


def test_attention_in_both_directions_is_refused() -> None:
    plan = family_plan("llama", 1, {})
    model: Any = drawn_model(plan)
    model.config.is_causal = False
    with pytest.raises(
        RunError, match="layers 0, 1: the mask is open to later tokens, the attention is told no window"
    ):
        check_masks(model, layers_of(plan), LENGTH)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "mixtral"])
def test_a_model_that_was_looked_at_computes_as_before(family: str) -> None:
    plan = family_plan(family, 1, {})
    model: Any = drawn_model(plan).eval()
    before, implementation = model(**batch_of(plan)).loss, model.config._attn_implementation
    check_masks(model, layers_of(plan), LENGTH)
    assert torch.equal(model(**batch_of(plan)).loss, before)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in vars(module) for module in model.modules())


def inject_windowed(rank: int, plans: list[Plan]) -> list[str]:
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject

    mesh, said = join(plans[0]), []
    for plan in plans:
        with parameters_without_memory():
            model = instantiate(plan, torch.float32)
        try:
            inject(model, replace(mesh, plan=plan))
        except RunError as error:
            said.append(f"{error.everywhere} {error}")
    return said


@pytest.mark.ranks
def test_every_rank_refuses_before_anything_is_cut() -> None:
    first, second = run_ranks(2, inject_windowed, [windowed(one, 2) for one in ("qwen2_moe", "phimoe", "olmoe")])
    assert first == second
    assert len(first) == 3
    assert all(one.startswith("True transformers masks ") for one in first)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", True), ("gemma3_text", True), ("gpt_oss", False), ("afmoe", False)]
)
def test_whether_masks_keep_packed_documents_apart_is_seen(family: str, expected: bool) -> None:
    """As the logits of a document show that stands behind another."""
    plan = family_plan(family, 1, {})
    model: Any = drawn_model(plan).eval()
    assert separates_documents(model, layers_of(plan)) is expected
    ids = torch.randint(0, 61, (1, 8), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 4:]
        alone = model(input_ids=ids[:, 4:], use_cache=False).logits
    assert torch.allclose(packed, alone, atol=1e-4) is expected

"""`generate` after training gives what the whole model gives in one process, or says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_runs import drawn_model, family_plan, of_plan, train_on
from ranks import run_ranks
from training_runs import whole_parameters

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp2 x cp2, sequence parallel": (
        {"tp": 2, "cp": 2, "sequence_parallel": True},
        ("gemma3_text", "mixtral", "granitemoehybrid", "jamba", "minimax", "lfm2", "falcon_mamba", "mamba2"),
    ),
    "tp2": (
        {"tp": 2},
        ("llama", "deepseek_v3", "phi3", "cohere2", "gpt_neox", "glm_moe_dsa, shared choice", "glm5_next_text"),
    ),
}
"""Windows in some layers and in all, tied and scaled embeddings, experts, latent and fused attention, chosen keys,
scaled logits; states that padding must not change: with a bias behind it, too."""

TOKENS = 12
PROMPTS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(5))
MASK = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]])
"""The second prompt is shorter."""


def texts(model: Any) -> dict[str, torch.Tensor]:
    """What a model says, in the ways that people ask."""
    common: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    padded = {"attention_mask": MASK, "do_sample": False}
    return {
        "greedy": model.generate(PROMPTS, do_sample=False, **common),
        "padded": model.generate(PROMPTS, **padded, **common),
        "without keeping keys": model.generate(PROMPTS, **padded, use_cache=False, **common),
        "beams": model.generate(PROMPTS, do_sample=False, num_beams=3, **common),
        "by hand": by_hand(model),
    }


@torch.no_grad()
def by_hand(model: Any) -> torch.Tensor:
    """Greedy decoding as people write it, with logits of the last tokens alone."""
    was_training, text, kept = model.training, PROMPTS, {}
    model.eval()
    new = PROMPTS
    for _ in range(TOKENS):
        # transformers multiplies a state's only token by the mask of all: those models are decoded without.
        mask = {} if "cache_params" in kept else {"attention_mask": torch.ones_like(text)}
        output = model(new, use_cache=True, logits_to_keep=1, **mask, **kept)
        kept = {name: output[name] for name in ("past_key_values", "cache_params") if output.get(name) is not None}
        new = output.logits[:, -1:].argmax(-1)
        text = torch.cat([text, new], 1)
    model.train(was_training)
    return text


def train_and_generate(rank: int, plans: list[Plan]) -> list[dict[str, Any]]:
    from parcompile.runtime import RunError, join

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        model, trained = train_on(plan, of_plan(mesh, plan))
        said: dict[str, Any] = {"rank": rank, "parameters": trained["parameters"], "training": model.training}
        torch.manual_seed(rank)
        try:
            said["texts"] = texts(model)
            said["sampled"] = model.generate(PROMPTS, do_sample=True, max_new_tokens=TOKENS, pad_token_id=0)
        except RunError as error:
            said["error"] = str(error)
        said["still training"] = model.training
        found.append(said)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_says_what_one_process_says(layout: str) -> None:
    parallelism, families = LAYOUTS[layout]
    size = parallelism["tp"] * parallelism.get("cp", 1)
    plans = [family_plan(family, size, parallelism) for family in families]
    ranks = run_ranks(size, train_and_generate, plans, timeout=400)
    for place, plan in enumerate(plans):
        here = [rank[place] for rank in ranks]
        alone: Any = drawn_model(plan)
        alone.load_state_dict(whole_parameters(plan, here), strict=False)
        expected = texts(alone.eval())
        for found in here:
            assert "error" not in found, found["error"]
            for kind, text in expected.items():
                assert torch.equal(found["texts"][kind], text), (plan.spec.name, kind)
            assert found["training"] and found["still training"]
        for found in here[:: plan.spec.parallelism.tp]:  # the first of each tp group, which is the innermost axis
            partner = here[found["rank"] + 1]
            assert torch.equal(found["sampled"], partner["sampled"])


def test_stages_say_how_to_generate_instead() -> None:
    for (found,) in run_ranks(2, train_and_generate, [family_plan("llama", 2, {"pp": 2})]):
        assert "generate() under pp 2: each stage has a part of the layers" in found["error"]
        assert "parcompile checkpoint export DIR --hf OUT" in found["error"]

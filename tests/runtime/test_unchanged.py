"""A check before training leaves nothing behind: training goes on as without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_runs import drawn_model, family_plan
from torch import Tensor, nn

from parcompile.runtime.groups import Mesh, create_groups
from parcompile.runtime.inject import inject
from parcompile.runtime.inject.mechanisms.shared_blocks import share_blocks
from parcompile.runtime.inject.selfcheck import SelfCheck, unchanged
from parcompile.runtime.ring_attention.kernels import Band, cpu_tiles

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a forward and backward pass may change, and the next numbers that are drawn."""
    found: dict[str, Any] = {"drawn next": torch.get_rng_state()}
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            content = copy.copy(value) if isinstance(value, set) else value
            content = value.detach().clone() if isinstance(value, Tensor) else content
            plain = isinstance(content, Tensor | bool | int | float | set)
            found[f"{path}.{name}"] = content if plain else str(content)
        found[f"{path} itself"] = sorted(vars(module)), sorted(module._buffers), len(module._forward_hooks)
    for name, parameter in model.named_parameters():
        found[name], found[f"grad of {name}"] = parameter.detach().clone(), parameter.grad
    found["config"] = str(getattr(model, "config", None))
    return found


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            return type(one) is type(other) and one.shape == other.shape and bool(torch.equal(one, other))
        return bool(one == other)

    return [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]


def mesh_of(family: str, **changes: Any) -> Mesh:
    return create_groups(family_plan(family, 1, {}, **changes), 0, CPU)


def changed(mesh: Mesh) -> list[str]:
    """What a check has changed: of the original, then of the injected model."""
    model, shape = drawn_model(mesh.plan), mesh.plan.spec.model.shape
    # Blocks that stand in several layers become one, as injection wants them.
    share_blocks(model, mesh.plan.parameters.layer[0].name.partition(".{layer}")[0], shape)
    before = state(model)
    check = SelfCheck(model, mesh)
    found = differing(before, state(model))
    model = inject(model, mesh)
    before = state(model)
    check.compare(model)
    return found + differing(before, state(model))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}
LENGTHS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 6}
KEEPING = {
    "dynamic frequencies": ("llama", {"max_position_embeddings": 6, "rope_parameters": DYNAMIC}),
    "frequencies of a long text": (
        "phi3",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "longrope", "rope_theta": 50.0, **LENGTHS}},
    ),
    **{
        family: (family, {})
        for family in (
            *(
                "gpt_oss",
                "deepseek_v3",
                "deepseek_v4",
                "phimoe",
                "llama4_text",
                "longcat_flash",
                "glm_moe_dsa",
                "hy_v4",
            ),
            *(
                "qwen3_next",
                "kimi_linear",
                "bailing_hybrid",
                "minimax",
                "mamba",
                "mamba2",
                "jamba",
                "zamba2",
                "lfm2_moe",
            ),
            *("gemma3_text", "gemma3n_text", "gemma4_text", "nanochat", "mpt", "gptj", "modernbert-decoder"),
        )
    },
}
"""Families whose modules keep something of their own: frequencies, counts, biases, states, tables, caches."""


def test_a_check_changes_nothing() -> None:
    found = {name: changed(mesh_of(family, **changes)) for name, (family, changes) in KEEPING.items()}
    assert {name: changes for name, changes in found.items() if changes} == {}


def test_what_a_run_leaves_is_put_back_whatever_it_is() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("table", torch.zeros(2), persistent=False)
            self.longest, self.seen, self.kept = 4, [1], torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.register_buffer("table", torch.ones(8), persistent=False)
            self.register_buffer("new", torch.ones(8), persistent=False)
            self.longest, self.late = 9, torch.ones(1)
            self.seen.append(len(self.seen))
            self.kept.add_(1.0)
            return (x * self.weight * torch.rand(2)).sum()

    model = Keeps()
    model.weight.grad = torch.full((2,), 5.0)
    before = state(model)
    count, seen = model.count, model.seen
    with unchanged(model, CPU):
        model.eval()
        model(torch.ones(2)).backward()
        assert differing(before, state(model))
    assert differing(before, state(model)) == []
    assert (model.count, model.seen) == (count, seen)
    assert model.count is count
    assert model.seen is seen


def test_masks_that_are_kept_have_values_though_preflight_asked_first() -> None:
    """Preflight calls what training calls, on tensors without values and in the same process."""
    with torch.device("meta"):
        cpu_tiles._mask(6, 6, 0, Band(None, 0), torch.float32, False)
    assert not cpu_tiles._mask(6, 6, 0, Band(None, 0), torch.float32, False).is_meta

"""Contract: ring attention in engines of one's own (DDP, FSDP2, ZeRO-3) trains as one process of transformers.

Two AdamW steps in fp32: one of packed documents, one of padded rows, of a length that the ring does not divide. The
engines average gradients over all ranks; losses, gradient norms and parameters are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from families import tiny_config
from ranks import run_ranks
from torch import Tensor

FAMILIES = ("llama", "qwen3", "mistral")
"""The last one has a window of 5 tokens."""
ROWS, LENGTH, CLIPPING, RATE = 4, 22, 0.5, 1e-3


def tiny_model(family: str, **keys: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**tiny_config(family), "use_cache": False, **keys}
    config = AutoConfig.for_model(given.pop("model_type", family), **given)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


def batches() -> list[dict[str, Tensor]]:
    """Whole sequences; the first token of a document has no label."""
    generator = torch.Generator().manual_seed(5)
    packed, padded = torch.randint(3, 61, (2, ROWS, LENGTH), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(9 + row), torch.arange(LENGTH - 9 - row)]) for row in range(ROWS)])
    mask = (torch.arange(LENGTH) < torch.tensor([22, 13, 17, 20])[:, None]).long()
    labels = packed.masked_fill(positions == 0, -100)
    labels[1, :5] = -100
    return [
        {"input_ids": packed, "labels": labels, "position_ids": positions},
        {"input_ids": padded, "labels": padded.masked_fill(mask == 0, -100), "attention_mask": mask},
    ]


def train_plain(family: str, seed: int | None) -> dict[str, Any]:
    """transformers' own attention on the whole batch, in one process."""
    model = tiny_model(family)
    nudge(model, seed)
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), RATE), [], []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


class InTorch:
    """DDP or FSDP2."""

    def __init__(self, model: Any, *, shards: bool) -> None:
        if shards:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        else:
            model.gradient_checkpointing_enable()
            self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.whole, self.optimizer = model, torch.optim.AdamW(self.model.parameters(), RATE)

    def step(self, batch: dict[str, Any]) -> tuple[Tensor, float]:
        loss = self.model(**batch).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def parameters(self) -> dict[str, Tensor]:
        pairs = ((name, one.detach()) for name, one in self.whole.named_parameters())
        return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in pairs}


class InDeepSpeed:
    """ZeRO-3."""

    def __init__(self, model: Any) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": CLIPPING,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batch: dict[str, Any]) -> tuple[Tensor, float]:
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss, float(self.engine.get_global_grad_norm())

    def parameters(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(one) for name, one in self.engine.module.named_parameters()}


ENGINES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "DDP": (4, lambda model: InTorch(model, shards=False)),
    "FSDP2": (2, lambda model: InTorch(model, shards=True)),
    "ZeRO-3": (2, InDeepSpeed),
}
"""Ranks, of which two share sequences: with four there are two rings, and layers are recomputed."""


def train_on_ranks(rank: int, engine: str) -> dict[str, Any]:
    import deepspeed
    import torch.distributed as dist

    from parcompile.runtime import register_ring
    from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds

    forbid_jit_builds()
    deepspeed.init_distributed("gloo")
    pairs = [[first, first + 1] for first in range(0, dist.get_world_size(), 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    ring, found = register_ring(groups[rank // 2]), {}
    for family in FAMILIES:
        model = tiny_model(family)
        model.set_attn_implementation("parcompile_ring")
        ring.check(model)
        run, losses, norms = ENGINES[engine][1](model), [], []
        for batch in batches():
            own = {name: one.chunk(len(pairs))[rank // 2] for name, one in batch.items()}
            loss, norm = run.step(ring.split(own))
            losses.append(ring.whole_loss(loss))
            norms.append(norm)
        found[family] = {"losses": losses, "norms": norms, "parameters": run.parameters()}
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_of_ones_own_trains_over_the_ring(engine: str) -> None:
    ranks = run_ranks(ENGINES[engine][0], train_on_ranks, engine)
    for family in FAMILIES:

        def plain(seed: int | None, family: str = family) -> dict[str, Any]:
            return train_plain(family, seed)

        for rank in ranks:
            assert_close(rank[family], plain(None), about=family, rerun=plain)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({}, "this qwen3_next: some layers are no attention"),
    "bloom": ({}, "this bloom: its attention is not behind transformers' attention interface"),
    "llama": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "this llama: its rotary embeddings follow the length of the text",
    ),
    "mixtral": ({"output_router_logits": True}, "this mixtral: output_router_logits balances experts"),
}


@pytest.fixture
def ring() -> Any:
    from parcompile.runtime import register_ring

    return register_ring(None)


def checked(ring: Any, family: str = "llama", **keys: Any) -> Any:
    model = tiny_model(family, **keys)
    model.set_attn_implementation("parcompile_ring")
    ring.check(model)
    return model


@pytest.mark.parametrize("family", REFUSED)
def test_what_the_ring_does_not_give_is_refused_by_name(ring: Any, family: str) -> None:
    from parcompile.runtime import RunError

    keys, said = REFUSED[family]
    with pytest.raises(RunError, match=said):
        checked(ring, family, **keys)


def test_a_model_that_attends_elsewhere_and_a_batch_that_was_not_split_are_refused(ring: Any) -> None:
    from parcompile.runtime import RunError

    packed, padded = batches()
    with pytest.raises(RunError, match="call check"):
        ring.split(packed)
    with pytest.raises(RunError, match="attends by 'sdpa', each rank to its own tokens"):
        ring.check(tiny_model("llama"))
    model = checked(ring)
    for batch, said in ((packed, "without `documents`"), (padded, "with an attention_mask")):
        with pytest.raises(RunError, match=said):
            model(**batch)
    prompt = ring.split({"input_ids": packed["input_ids"], "labels": packed["labels"]})
    kept = model(**prompt, use_cache=True).past_key_values
    with pytest.raises(RunError, match="keeps no keys"):
        model(**prompt, use_cache=True, past_key_values=kept)


def test_a_step_of_several_batches_counts_its_tokens_once(ring: Any) -> None:
    """Each loss is divided by the tokens of the step, and by what the engine divides it by."""
    plain, given = tiny_model("llama"), batches()
    counts = [int((one["labels"][:, 1:] != -100).sum()) for one in given]
    expected = sum(plain(**one).loss.item() * count for one, count in zip(given, counts, strict=True)) / sum(counts)
    model = checked(ring)
    losses = [model(**ring.split(one, tokens=sum(counts), divided_by=2)).loss.item() / 2 for one in given]
    assert_close(sum(losses), expected)

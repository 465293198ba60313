"""Contract: what transformers' own tests of models ask, an injected model answers as one process, or refuses by name.

Every family at tp 2, with and without sequence parallelism. Weights are drawn in fp32; an answer may differ by 1e-4 of
its largest number, which is more than rounding does to these models and far less than any mistake does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_runs import drawn_model, family_plan, of_plan
from ranks import run_ranks
from torch import Tensor
from training_runs import whole_parameters

from parcompile.plan import Plan

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

FAMILIES = (
    *("llama", "gemma2", "gemma3_text", "phi3", "gpt2", "bloom", "cohere2"),
    *("deepseek_v3", "mixtral", "qwen3_moe", "falcon_mamba", "jamba"),
)
"""Windows in some layers and in all, tied heads, fused projections, learned positions, biases by distance, one norm for
two blocks, latent attention, experts, states, layers of several kinds."""
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp2": ({"tp": 2}, FAMILIES),
    "tp2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, FAMILIES),
    "cp2": ({"cp": 2}, ("llama",)),
}
CLOSE = 1e-4
IDS = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(7))
RIGHT = (torch.arange(16) < torch.tensor([16, 9])[:, None]).long()
DOCUMENTS = (0, 7, 16)
POSITIONS = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
LABELS = IDS.masked_fill(POSITIONS == 0, -100)
NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


class Asked:
    """A model whose answers are put together from those of all ranks; without a mesh it is transformers' own."""

    def __init__(self, model: Any, mesh: Any = None) -> None:
        self.model, self.mesh = model, mesh
        self.base = model.base_model

    def __call__(self, **given: Any) -> Any:
        output = self.model(**given)
        if self.mesh is not None and not isinstance(output, tuple):
            output.logits = self.whole(output.logits)
        return output

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all words."""
        from parcompile.runtime.collectives import gather_from_group

        if self.mesh is None:
            return logits
        return gather_from_group(logits, -1, self.mesh.parallel_group("tp"))[..., :61]

    def trained(self, call: Callable[[], Tensor]) -> dict[str, Any]:
        """A loss and its gradients, those of this rank's parameters."""
        self.model.zero_grad()
        loss = call()
        loss.backward()
        gradients = {
            name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
            for name, one in self.model.named_parameters()
        }
        self.model.zero_grad()
        return {"loss": loss.detach().clone(), "gradients": gradients}

    def of_documents(self, call: Callable[..., Tensor]) -> Tensor:
        """What a call gives for packed documents: in one process for one after the other."""
        if self.mesh is not None:
            return call(input_ids=IDS, position_ids=POSITIONS)
        return torch.cat([call(input_ids=IDS[:, a:b]) for a, b in itertools.pairwise(DOCUMENTS)], 1)

    def packed_loss(self) -> Tensor:
        if self.mesh is not None:
            loss: Tensor = self.model(input_ids=IDS, position_ids=POSITIONS, labels=LABELS).loss
            return loss
        logits = self.of_documents(lambda **given: self.model(**given).logits)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())

    def base_loss(self) -> Tensor:
        hidden = self.of_documents(lambda **given: self.base(**given).last_hidden_state)
        return (hidden * torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)).mean()

    def recomputed(self, enable: str, call: Callable[[], Tensor]) -> dict[str, Any]:
        # One process computes once: what is recomputed has to be the same.
        if self.mesh is not None:
            getattr(self.model, enable)()
            assert any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        try:
            return self.trained(call)
        finally:
            if self.mesh is not None:
                self.model.activation_checkpointing_disable()


def hidden_by_config(asked: Asked) -> Any:
    asked.model.config.output_hidden_states = True
    try:
        return asked(input_ids=IDS).hidden_states
    finally:
        asked.model.config.output_hidden_states = False


def embedded(asked: Asked) -> Any:
    """Embeddings that a caller looks up by himself, and their gradient."""
    rows = asked.model.get_input_embeddings()(IDS).detach().requires_grad_()
    output = asked(inputs_embeds=rows, labels=IDS)
    output.loss.backward()
    asked.model.zero_grad()
    return rows, output.loss, output.logits, rows.grad


def sampled(asked: Asked) -> Any:
    """As `generate` of a plan draws: by a number that the ranks agree on."""
    torch.manual_seed(5)
    if asked.mesh is None:
        torch.manual_seed(int(torch.randint(2**62, (1,))))
    return asked.model.generate(IDS[:, :7], do_sample=True, **NEW)


def with_scores(asked: Asked) -> Any:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    found = asked.model.generate(IDS[:, :7], do_sample=False, **more, **NEW)
    return found.sequences, found.scores, found.hidden_states


def without_dict(asked: Asked) -> Any:
    loss, logits, *_ = asked(input_ids=IDS, labels=IDS, return_dict=False)
    _, *kept = asked(input_ids=IDS, use_cache=True, return_dict=False)
    assert isinstance(kept, list)
    return loss, asked.whole(logits), asked(input_ids=IDS, use_cache=True, return_dict=False)[0]


def by_base(asked: Asked) -> Any:
    base = asked.base
    padded = base(input_ids=IDS, attention_mask=RIGHT).last_hidden_state
    return {
        "whole": base(IDS).last_hidden_state,
        "padded": padded[RIGHT.bool()],
        "packed": asked.of_documents(lambda **given: base(**given).last_hidden_state),
        "tuple": base(IDS, return_dict=False)[0],
        "hidden": base(IDS, output_hidden_states=True).hidden_states,
        "embedded": base(inputs_embeds=asked.model.get_input_embeddings()(IDS)).last_hidden_state,
    }


def tied(asked: Asked) -> Any:
    def are_tied() -> Tensor:
        ends = asked.model.get_input_embeddings(), asked.model.get_output_embeddings()
        return torch.tensor(ends[0].weight is ends[1].weight)

    before = are_tied()
    asked.model.tie_weights()
    return before, are_tied()


QUESTIONS: dict[str, Callable[[Asked], Any]] = {
    "forward": lambda asked: asked(input_ids=IDS).logits,
    "padding on the right": lambda asked: asked(input_ids=IDS, attention_mask=RIGHT).logits[RIGHT.bool()],
    "packed documents": lambda asked: asked.of_documents(lambda **given: asked(**given).logits),
    "hidden states": lambda asked: asked(input_ids=IDS, output_hidden_states=True).hidden_states,
    "one hidden state": lambda asked: asked(input_ids=IDS, output_hidden_states=[1]).hidden_states,
    "hidden states by the configuration": hidden_by_config,
    "inputs_embeds": embedded,
    "logits_to_keep": lambda asked: [
        asked(input_ids=IDS, logits_to_keep=kept).logits for kept in (1, 3, torch.tensor([0, 5]))
    ],
    "return_dict=False": without_dict,
    "base model": by_base,
    "tied weights": tied,
    "greedy": lambda asked: asked.model.generate(IDS[:, :7], do_sample=False, **NEW),
    "padded on the left": lambda asked: asked.model.generate(IDS, attention_mask=RIGHT.flip(1), do_sample=False, **NEW),
    "beams": lambda asked: asked.model.generate(IDS[:, :7], do_sample=False, num_beams=3, **NEW),
    "sampled": sampled,
    "scores and hidden states": with_scores,
    "from embeddings": lambda asked: asked.model.generate(
        inputs_embeds=asked.model.get_input_embeddings()(IDS[:, :7]), do_sample=False, **NEW
    ),
}
"""What tensors are asked for."""


def loss_of(asked: Asked) -> Tensor:
    found: Tensor = asked.model(input_ids=IDS, labels=IDS).loss
    return found


TRAINED: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "loss": lambda asked: asked.trained(lambda: loss_of(asked)),
    "packed loss": lambda asked: asked.trained(asked.packed_loss),
    "base model": lambda asked: asked.trained(asked.base_loss),
    "recomputed": lambda asked: asked.recomputed("gradient_checkpointing_enable", lambda: loss_of(asked)),
    "packed, recomputed": lambda asked: asked.recomputed("gradient_checkpointing_enable", asked.packed_loss),
    "packed, recomputed, by the new name": lambda asked: asked.recomputed(
        "activation_checkpointing_enable", asked.packed_loss
    ),
    "base model, recomputed": lambda asked: asked.recomputed("gradient_checkpointing_enable", asked.base_loss),
}
"""Whose gradients are asked for."""


def answers(asked: Asked) -> dict[str, Any]:
    """To every question, or what was raised."""
    found: dict[str, Any] = {}
    for name, question in {**QUESTIONS, **{f"trained: {name}": one for name, one in TRAINED.items()}}.items():
        asked.model.train("trained" in name or name == "inputs_embeds")
        try:
            with torch.set_grad_enabled("trained" in name or name == "inputs_embeds"):
                found[name] = question(asked)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def ask(rank: int, plans: list[Plan], folder: str) -> list[dict[str, Any]]:
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        own = of_plan(mesh, plan)
        asked = Asked(inject(drawn_model(plan), own), own)
        found.append({"rank": rank, **answers(asked)})
        asked.model.save_pretrained(f"{folder}/{plan.spec.name}")
    return found

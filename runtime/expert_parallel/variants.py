"""Routers and experts that differ from most: hashed, identities, scaled inputs, shared and grouped ones.

One grouped product for modules of experts that transformers has compute in another way.

Routers that look the experts of a token up by its number (the first layers of DeepSeek-V4).

Models hand them the numbers of tokens from the embedding on. A stage of a pipeline begins with hidden states: its
routers get the numbers from the micro-batch, which every stage has.

Experts that give back what they take (LongCat-Flash, arXiv 2509.01322, section 2.2.1), beside experts that compute.

transformers visits experts one after the other, those that give back too. Here those that compute do so in one grouped
product, and what is given back is weighted once for each token. Tensor-parallel ranks have the same tokens, and their
outputs are parts of a sum: the first rank gives back.

Experts of which the router's scores scale what they take, not what they give (Llama 4).

transformers multiplies each token by its score for every expert, zero for those that were not chosen, and has all
experts compute all tokens in one product: a token costs as much as if it had chosen every expert. An expert gives zero
for a token of zeros, so that a token has to visit those alone that it has chosen. Blocks are called with the same names
and give the same numbers, and what they give to expert parallelism is what other types give to it.

Source: `Llama4TextMoe` and `Llama4TextExperts` of transformers 5.23.

The shared expert of a layer, computed while rows travel to the routed experts.

Blocks of transformers call their routed experts first and the shared one behind them, mostly with the same hidden
states. It is computed as soon as the rows have left, and handed out when the block asks for it. In backward autograd
takes what was recorded last first: the gradients of rows leave, then the shared expert runs backward, then they are
waited for. Blocks that call the shared expert first, or with something else, compute it as they are written.

Shapes: A tokens, E experts, k experts of a token, R rows, H hidden size, F width of an expert.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.model.families import FAMILIES
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import current
from parcompile.runtime.transport import group_rank

_ALIGNMENT = 16
"""Bytes that the rows of torch's grouped product are a multiple of."""


def can_be_grouped(module: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether torch's grouped product takes the weights of a module of experts, as they are or in another type.

    It wants rows of a multiple of 16 bytes, in the weights and in what they give.
    """
    stacks = [one for one in module.parameters(recurse=False) if one.dim() == 3]
    return not any(size * (dtype or one.dtype).itemsize % _ALIGNMENT for one in stacks for size in one.shape[1:])


def loop_where_narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Lets experts multiply one after the other where their slices are too narrow for torch's grouped product.

    Args:
        model: of Hugging Face, with this rank's slices of the experts.
        dtype: in which they train.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is None:
            continue
        if not all(can_be_grouped(module, one) for one in (None, dtype)):
            own: Any = copy.copy(config)
            own._experts_implementation = "eager"
            module.config = own


def grouped(
    module: Any,
    hidden_AH: Tensor,
    chosen_Ak: Tensor,
    weights_Ak: Tensor,
    *,
    transposed: bool = False,
    beyond: bool = False,
) -> Tensor:
    """[A, H]: of each token the sum of what its experts give, by their weights.

    Args:
        module: `gate_up_proj` and `down_proj` of `num_experts` experts.
        hidden_AH: the tokens.
        chosen_Ak: the experts of each.
        weights_Ak: their weights.
        transposed: the weights are stored as [E, H, 2 F] and [E, F, H], not as [E, 2 F, H] and [E, H, F].
        beyond: there may be choices of `num_experts` and beyond, which give nothing.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    def gated(both: Tensor) -> Tensor:
        gate, value = both.chunk(2, dim=-1)
        product: Tensor = module.act_fn(gate) * value
        return product

    experts = SimpleNamespace(
        num_experts=module.num_experts,
        gate_up_proj=module.gate_up_proj[: module.num_experts],
        down_proj=module.down_proj,
        act_fn=module.act_fn,
        _apply_gate=gated,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=transposed,
        is_concatenated=True,
        _is_expert_parallel=beyond,
    )
    found: Tensor = grouped_mm_experts_forward(experts, hidden_AH, chosen_Ak, weights_Ak)
    return found


TABLE = "tid2eid"
"""What transformers calls the experts of each token, [vocabulary, k]."""


def hand_tokens(model: nn.Module, mesh: Mesh) -> None:
    """Hands the numbers of tokens to these routers of the layers that this rank holds."""
    moe, family = mesh.plan.spec.model.shape.moe, FAMILIES.get(mesh.plan.spec.model.shape.model_type)
    if moe is None or not moe.hashed or family is None or family.experts is None:
        return
    path, experts = mesh.plan.parameters.layer[0].name.partition(".{layer}")[0], family.experts
    for number, layer in model.get_submodule(path).named_children():
        if int(number) in moe.hashed:
            router: Any = layer.get_submodule(f"{experts.block}.gate")
            router.register_forward_pre_hook(_with_tokens)


def _with_tokens(router: Any, args: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    hidden, tokens = args[0], current().tokens
    if tokens is None:
        raise everywhere(
            f"a {type(router).__name__} looks experts up by the numbers of tokens: call the model with input_ids"
        )
    return hidden, tokens


def warn_of_empty_tables(model: nn.Module) -> None:
    """Says so where the tables of experts are those that a class begins with: every token visits the first expert."""
    if any(not table.is_meta and not bool(table.any()) for table in _tables(model)):
        warnings.warn(
            f"{TABLE} is all zeros, as transformers begins it: every token visits expert 0 in these layers. Load "
            "weights that have it, or fill it before the model is injected",
            stacklevel=2,
        )


def draw_tables(model: nn.Module, experts: int, generator: torch.Generator) -> None:
    """Draws these tables anew: each token visits other experts."""
    for table in _tables(model):
        drawn = torch.rand(len(table), experts, generator=generator).argsort(1)
        table.copy_(drawn[:, : table.shape[1]])


def _tables(model: nn.Module) -> Iterator[Tensor]:
    return (buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == TABLE)


def pass_on(model: nn.Module, mesh: Mesh) -> None:
    """Lets modules of experts, some of which give back what they take, compute as this module does."""
    moe = mesh.plan.spec.model.shape.moe
    if moe is None or not hasattr(model, "config"):
        return
    gives_back = group_rank(mesh.parallel_group(Axis.TP)) == 0
    for module in model.modules():
        if hasattr(module, "identity_expert"):
            PassedOn(module, moe.num_experts, moe.num_identities, gives_back=gives_back)


class PassedOn:
    """Takes the place of the `forward` of a module of experts.

    Args:
        module: the experts of transformers. `num_experts` becomes the number of those on this rank that compute.
        experts: how many compute, over all ranks.
        count: how many give back what they take.
        gives_back: whether this rank does that for them.
    """

    def __init__(self, module: nn.Module, experts: int, count: int, *, gives_back: bool) -> None:
        experts_: Any = module
        self.count, self._gives_back, self._module, self._experts = count, gives_back, experts_, experts
        experts_.num_experts = experts
        experts_.identity_expert = _Nothing()
        experts_.forward = self

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """As the experts of transformers: of each token the sum of what its experts give, by their weights."""
        done_AH = self.computed(hidden_AH, chosen_Ak, weights_Ak)
        if not self._gives_back or not self.count:
            return done_AH
        share_A1 = weights_Ak.masked_fill(chosen_Ak < self._experts, 0.0).sum(-1, keepdim=True)
        return done_AH + (hidden_AH * share_A1).to(hidden_AH.dtype)

    def computed(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """The part of that sum of the experts that compute."""
        module = self._module
        if can_be_grouped(module):
            return grouped(module, hidden_AH, chosen_Ak, weights_Ak, beyond=True)
        own: Any = type(module).forward
        return own(module, hidden_AH, chosen_Ak, weights_Ak)  # type: ignore[no-any-return]


class _Nothing(nn.Module):
    """Stands for what gives back, where transformers' own loop runs."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(hidden)


def visit_chosen(model: nn.Module) -> None:
    """Lets tokens visit the experts alone that they have chosen."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            ScaledExperts(module.get_submodule("experts"))
            Block(module)


class Block:
    """Takes the place of the `forward` of a router with its experts and the shared one."""

    def __init__(self, module: nn.Module) -> None:
        block: Any = module
        self._block = block
        block.forward = self

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [.., H] give [A, H], and the router's logits [A, E]."""
        block = self._block
        hidden_AH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_AE, logits_AE = block.router(hidden_AH)
        # By the logits: large ones have the same score.
        chosen_Ak = logits_AE.topk(block.top_k, dim=1).indices
        routed_AH = block.experts(hidden_AH, chosen_Ak, scores_AE.gather(1, chosen_Ak))
        return block.shared_expert(hidden_AH) + routed_AH, logits_AE


class ScaledExperts:
    """Takes the place of the `forward` of a module of experts."""

    def __init__(self, module: nn.Module) -> None:
        experts: Any = module
        self._module = experts
        experts.forward = self

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, scales_Ak: Tensor) -> Tensor:
        """[A, H]: of each token the sum of what its experts give for it, scaled for each."""
        rows_RH = (hidden_AH.unsqueeze(1) * scales_Ak.unsqueeze(2)).flatten(0, 1)
        return self.computed(rows_RH, chosen_Ak.reshape(-1, 1)).view(*chosen_Ak.shape, -1).sum(1)

    def computed(self, rows_RH: Tensor, chosen_R1: Tensor) -> Tensor:
        """[R, H]: what the expert of each row gives for it."""
        module = self._module
        if can_be_grouped(module):
            return grouped(module, rows_RH, chosen_R1, torch.ones_like(rows_RH[:, :1]), transposed=True)
        # As transformers has it: all experts, with zeros for those that were not chosen.
        is_chosen_ER1 = F.one_hot(chosen_R1[:, 0], module.num_experts).to(rows_RH.dtype).t().unsqueeze(-1)
        own: Any = type(module).forward
        done: Tensor = own(module, (rows_RH * is_chosen_ER1).flatten(0, 1))
        return done.view(module.num_experts, *rows_RH.shape).sum(0)


class SharedExpert:
    """Takes the place of the `forward` of a shared expert, which sees each token by itself."""

    def __init__(self, module: nn.Module) -> None:
        shared: Any = module
        self._compute: Callable[..., Tensor] = shared.forward
        self._ahead: tuple[Tensor, Tensor] | None = None
        self._was_called = False
        shared.forward = self

    def compute(self, hidden_AH: Tensor) -> None:
        """Computes what the block is going to ask for, unless it has been computed, or was something else before."""
        if not self._was_called:
            self._ahead = hidden_AH, self._compute(hidden_AH)
        self._was_called = False

    def forget(self) -> None:
        """Lets go of what was computed: the block does not ask for it."""
        self._ahead, self._was_called = None, False

    def __call__(self, hidden: Tensor) -> Tensor:
        """The result for these hidden states [.., H]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and _is_view(ahead[0], hidden):
            return ahead[1].view(*hidden.shape[:-1], ahead[1].shape[-1])
        self._was_called = True
        return self._compute(hidden)


def _is_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    same_place = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return (
        same_place
        and one.storage_offset() == other.storage_offset()
        and one.numel() == other.numel()
        and one.shape[-1] == other.shape[-1]
        and one.is_contiguous()
        and other.is_contiguous()
    )

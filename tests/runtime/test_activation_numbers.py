"""What activations of transformers keep and make is counted, and compared with what the estimate takes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parcompile.model import family as activation

PIECES = {"gelu", "silu", "gelu_pytorch_tanh"}
"""Functions that torch computes in one piece."""
CLASSES = {"bloom_gelu", "xielu"}
"""Those of a class, or with parameters."""


@pytest.mark.parametrize("name", [*sorted(set(activation._ACTIVATIONS) - CLASSES | PIECES)])
def test_an_activation_keeps_as_many_numbers_as_the_estimate_says(name: str) -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.randn(64, 64, requires_grad=True) * 1.0
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = activations.ACT2FN[name](x)
    kept[y.untyped_storage()._cdata] = y  # the projection behind it keeps its result
    counted = sum(one.untyped_storage().nbytes() for one in kept.values()) / x.nbytes
    assert counted == 2 + activation.activation_numbers("llama", {"hidden_act": name})[0]


class Live(TorchDispatchMode):
    """Follows the live bytes of what operators make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in (one for one in tree_leaves(found) if isinstance(one, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return found


class Product(torch.autograd.Function):
    """Keeps the result of an activation, as the projection behind it does, and lets go of it in backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


@pytest.mark.parametrize("name", sorted({*activation._ACTIVATIONS} | PIECES))
def test_an_activation_makes_as_many_numbers_in_backward_as_the_estimate_says(name: str) -> None:
    activations, bloom = (
        pytest.importorskip("transformers.activations"),
        pytest.importorskip("transformers.models.bloom"),
    )
    function = bloom.modeling_bloom.BloomGelu().train() if name == "bloom_gelu" else activations.ACT2FN[name].to("meta")
    with Live() as live:
        x = torch.empty(1000, 1000, dtype=torch.bfloat16, device="meta", requires_grad=True)
        result = Product.apply(function(x * 1.0))
        before, live.peak = sum(live.live.values()), 0
        result.backward(torch.ones_like(result))
    counted = (live.peak - before) / x.nbytes
    assert counted == pytest.approx(activation.activation_numbers("llama", {"hidden_act": name})[1], abs=0.01)


def test_types_take_the_function_of_their_class() -> None:
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    for model_type in activation._OF_CLASS:
        default = mapping[model_type]().to_dict()
        stated = activation.activation_numbers(model_type, {key: default.get(key) for key in activation._KEYS})
        assert stated == activation.activation_numbers(model_type, {})
    from transformers.models.openai.modeling_openai import ACT_FNS

    assert type(ACT_FNS["gelu"]).__name__ == "NewGELUActivation"

"""What activations of transformers keep is counted with autograd's hooks, and compared with what the estimate takes."""

from __future__ import annotations

import pytest
import torch

from parcompile.model import family as activation

PIECES = ("gelu", "silu", "gelu_pytorch_tanh", "relu2")
"""Functions that keep two numbers in all."""


@pytest.mark.parametrize("name", [*activation._KEPT, *PIECES])
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
    assert counted == 2 + activation.kept_numbers("llama", {"hidden_act": name})


def test_types_take_the_function_of_their_class() -> None:
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    for model_type in activation._OF_CLASS:
        default = mapping[model_type]().to_dict()
        stated = activation.kept_numbers(model_type, {key: default.get(key) for key in activation._KEYS})
        assert stated == activation.kept_numbers(model_type, {})
    from transformers.models.openai.modeling_openai import ACT_FNS

    assert type(ACT_FNS["gelu"]).__name__ == "NewGELUActivation"

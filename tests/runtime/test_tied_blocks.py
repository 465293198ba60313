"""Contract: layers that share a block have one module of it, and whoever unties them is told."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from family_runs import drawn_model, family_plan

from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.runtime.errors import RunError
from parcompile.runtime.inject.mechanisms.shared_blocks import share_blocks


def drawn(choose: random.Random) -> dict[str, Any]:
    count, adapters, groups = choose.choice([2, 5, 8]), choose.random() < 0.5, choose.choice([1, 2])
    kinds = [choose.choice(["mamba", "hybrid", "linear_attention"]) for _ in range(count)]
    kinds[choose.randrange(count)] = "hybrid"
    heads, mamba_heads = choose.choice([2, 4]), groups * choose.choice([1, 2])
    return {
        "model_type": "zamba2",
        "vocab_size": 31,
        "max_position_embeddings": 64,
        "hidden_size": 2 * mamba_heads * heads,
        "num_hidden_layers": count,
        "layers_block_type": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if adapters else choose.choice([1, 2, None]),
        "n_mamba_heads": mamba_heads,
        "mamba_ngroups": groups,
        "mamba_d_state": choose.choice([3, 5]),
        "mamba_d_conv": choose.choice([2, 4]),
        "mamba_expand": choose.choice([1, 2]),
        "intermediate_size": choose.choice([None, 11]),
        "num_mem_blocks": choose.choice([1, 2, 3]),
        "adapter_rank": choose.choice([1, 7]),
        "use_shared_attention_adapter": adapters,
        **{key: choose.random() < 0.5 for key in ("add_bias_linear", "use_conv_bias", "use_mem_rope")},
    }


@pytest.mark.parametrize("seed", range(12))
def test_names_order_and_shapes_are_those_of_the_model(seed: int) -> None:
    from transformers import AutoModelForCausalLM, Zamba2Config

    config = drawn(random.Random(seed))
    of_class = Zamba2Config(**{key: value for key, value in config.items() if key != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(of_class)
    live = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    # What transformers writes of it is read alike.
    for one in (config, of_class.to_dict()):
        table = parameter_table(shape_from_config(one))
        assert [(name, parameter.shape) for name, parameter in table.expanded()] == live


def test_all_uses_of_a_block_have_the_module_of_the_first() -> None:
    plan = family_plan("zamba2", 1, {})
    model = drawn_model(plan)
    names = [name for name, _ in model.named_parameters()]
    share_blocks(model, "model.layers", plan.spec.model.shape)
    blocks = [model.get_submodule(f"model.layers.{layer}.shared_transformer") for layer in (1, 2, 4)]
    assert blocks[0] is blocks[2]
    assert blocks[0] is not blocks[1]
    assert [name for name, _ in model.named_parameters()] == names


def test_a_use_with_parameters_of_its_own_is_refused() -> None:
    plan = family_plan("zamba2", 1, {})
    model = drawn_model(plan)
    attention = model.get_submodule("model.layers.4.shared_transformer.self_attn")
    attention.q_proj = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(RunError, match=r"layers\.4\.shared_transformer\.self_attn\.q_proj\.weight is not tied to"):
        share_blocks(model, "model.layers", plan.spec.model.shape)


def test_a_small_copy_uses_each_block_and_the_first_twice() -> None:
    from dataclasses import replace

    from parcompile.runtime.model.shrinking import shrunk

    kinds = ["mamba", "mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid", "mamba"]
    changes = {"layers_block_type": kinds, "num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256}
    stored = {"attention_hidden_size": 256, "attention_head_dim": 64, "hybrid_layer_ids": [2, 4, 5, 6]}
    plan = family_plan("zamba2", 2, {"tp": 2}, **changes, **stored)
    plan = replace(plan, spec=replace(plan.spec, training=replace(plan.spec.training, sequence_length=1024)))
    shared = shrunk(plan).spec.model.shape.stack.shared_blocks
    assert shared is not None
    assert (len(shared.layers), shared.count) == (3, 2)

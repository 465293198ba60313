"""The peers of the benchmark of routed experts, on a block of Mixtral: DeepSpeed's MoE layer and AutoEP, the plan for
expert parallelism of transformers, Megatron-Core's token dispatcher.

Each gets the block with all of its experts and keeps those of its rank. All but DeepSpeed's MoE layer have the router
and the weights of the block, and compute what it computes.

Megatron-Core 0.16.1 takes part when it can be imported: `pip install --no-deps --target FOLDER megatron-core==0.16.1`,
and FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engines import start_deepspeed


class Expert(nn.Module):
    """The same MLP for DeepSpeed's MoE layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * width, bias=False), nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


def of_deepspeed(block: Any) -> nn.Module:
    """DeepSpeed's MoE layer with weights of its own: as many places for each expert as the fullest one needs."""
    start_deepspeed()
    from deepspeed.moe.layer import MoE

    hidden, width = block.experts.hidden_dim, block.experts.intermediate_dim
    layer = MoE(
        hidden,
        Expert(hidden, width),
        block.experts.num_experts,
        ep_size=dist.get_world_size(),
        k=block.top_k,
        drop_tokens=False,
    )
    layer.set_deepspeed_parallelism()
    return layer


def of_autoep(block: Any) -> nn.Module:
    """The layer that DeepSpeed's AutoEP puts in the place of the block in a model of one layer.

    What its engine does to a model beside that fails: transformers' table of recorded outputs takes no default.
    """
    start_deepspeed()
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from transformers import MixtralForCausalLM

    ranks = dist.get_world_size()
    model = MixtralForCausalLM(block.experts.config)
    model.model.layers[0].mlp = block
    config = parse_autoep_config({"enabled": True, "autoep_size": ranks, "preset_model": "mixtral"})
    (found,) = AutoEP(model, config).ep_parser()
    layer = AutoEPMoELayer(found, block, ranks, dist.get_rank(), config)
    layer.set_deepspeed_parallelism()
    return layer


def of_transformers(block: Any, tp: int = 1) -> nn.Module:
    """The block on the plan that Mixtral has for ep, over all ranks, of which every `tp` have the same tokens."""
    from transformers import MixtralConfig
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.utils import initialize_distributed_mesh

    ranks = dist.get_world_size()
    config = DistributedConfig(tp_size=tp, fsdp_size=ranks // tp, ep_size=ranks, tp_plan={})
    _, meshes = initialize_distributed_mesh(config)
    plan = {name.removeprefix("layers.*.mlp."): style for name, style in MixtralConfig.base_model_ep_plan.items()}
    whole = {name: parameter.detach().clone() for name, parameter in block.experts.named_parameters()}
    apply_expert_parallelism(block, meshes.get_mesh("ep"), meshes.get_mesh("tp"), plan, config.ep_implementation)
    for name, parameter in block.experts.named_parameters():  # a model's loader fills the shards
        parameter.to_local().data.copy_(whole[name].chunk(ranks)[dist.get_rank()])
    return block


class Megatron(nn.Module):
    """The router and the rank's experts of a block, around Megatron-Core's MoEAlltoAllTokenDispatcher.

    The dispatcher makes a CUDA stream, waits for it, makes its buffers on "the current CUDA device" and has the numbers
    of rows from there as arrays. Here its streams do nothing, its device is the CPU, and the numbers are arrays too.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        warnings.filterwarnings("ignore", module="megatron")
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        _let_the_cpu_stand_in_for_cuda()
        token_dispatcher.maybe_move_tensor_to_cpu = _moved
        ranks, experts = dist.get_world_size(), block.experts.num_experts
        self._experts, local = experts, experts // ranks
        keep_local(block, dist.group.WORLD)
        block.experts.num_experts = local
        self.block = block
        config = TransformerConfig(
            num_layers=1,
            hidden_size=block.experts.hidden_dim,
            num_attention_heads=1,
            num_moe_experts=experts,
            moe_router_topk=block.top_k,
            moe_token_dispatcher_type="alltoall",
            expert_model_parallel_size=ranks,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        groups: Any = types.SimpleNamespace(ep=dist.group.WORLD, expt_tp=None, tp_ep=dist.group.WORLD)
        first = dist.get_rank() * local
        mine = list(range(first, first + local))
        self._dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher(local, mine, config, groups)

    def forward(self, x: Tensor) -> Tensor:
        dispatcher, block = self._dispatcher, self.block
        _, weights_Tk, chosen_Tk = block.gate(x)
        empty_TE = weights_Tk.new_zeros(len(weights_Tk), self._experts)
        weights_TE = empty_TE.scatter(1, chosen_Tk, weights_Tk)
        chosen_TE = empty_TE.bool().scatter(1, chosen_Tk, True)
        rows, weights = dispatcher.dispatch_preprocess(x, chosen_TE, weights_TE)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        expert_of_row = torch.arange(len(counts)).repeat_interleave(counts)
        done = block.experts(rows, expert_of_row[:, None], weights[:, None])
        back = dispatcher.token_combine(dispatcher.combine_preprocess(done))
        return dispatcher.combine_postprocess(back)


class _NoStream:
    """A CUDA stream and its events, on which nothing is ever late."""

    def wait_stream(self, _: _NoStream) -> None:
        return None

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        return None


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """As Megatron-Core's `maybe_move_tensor_to_cpu` of a tensor on CUDA."""
    del record_stream  # what a stream of the device would have to wait for
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _let_the_cpu_stand_in_for_cuda() -> None:
    """For the rest of this process, as backward asks for the device too."""
    the_only_one = _NoStream()
    stand_ins = {
        "Stream": _NoStream,
        "current_stream": lambda: the_only_one,
        "stream": lambda _: contextlib.nullcontext(),
        "current_device": lambda: "cpu",
    }
    for name, it in stand_ins.items():
        setattr(torch.cuda, name, it)


def keep_local(block: Any, group: dist.ProcessGroup) -> None:
    """Leaves a block this rank's equal run of its experts."""
    share = block.experts.num_experts // dist.get_world_size(group)
    for name, parameter in list(block.experts.named_parameters()):
        local = parameter.detach()[dist.get_rank(group) * share :][:share].clone()
        setattr(block.experts, name, nn.Parameter(local))

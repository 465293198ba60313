"""The optional peers of the tensor-parallel benchmark: Megatron-Core's layers and DeepSpeed's AutoTP layers, on gloo.

Each takes part when it can be imported. Both are used as their own models use them: Megatron-Core with q, k and v (gate
and up) fused into one layer, its activations sequence first; AutoTP layer by layer. Norms of Megatron-Core's sequence
parallelism have partial gradients, which its `finalize_model_grads` sums in one all-reduce: they are marked for the
benchmark's step to do the same.

Megatron-Core 0.16.1 needs `pip install --no-deps megatron-core==0.16.1` and no TransformerEngine.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .engines import start_deepspeed


def absent() -> dict[str, str]:
    """Peers that cannot take part, with the reason."""
    packages = {"Megatron-Core": "megatron", "AutoTP": "deepspeed"}
    return {name: f"no {it} here" for name, it in packages.items() if importlib.util.find_spec(it) is None}


def parts_of(block: Any) -> list[tuple[Any, tuple[str, ...], str]]:
    """Of a block, each module with the names of its column layers and of its row layer."""
    return [(block.attention, ("q", "k", "v"), "o"), (block.mlp, ("gate", "up"), "down")]


def with_megatron(block: nn.Module, sequence_parallel: bool) -> nn.Module:
    """`block` on Megatron-Core's column and row layers."""
    warnings.filterwarnings("ignore", module="megatron")
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    # Its buffers are made on "the current CUDA device"; on this machine that is the CPU.
    torch.cuda.current_device = lambda: "cpu"
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    dtype, rank, ranks = next(block.parameters()).dtype, dist.get_rank(), dist.get_world_size()
    config = ModelParallelConfig(
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    options = {"config": config, "init_method": lambda _: None, "bias": False, "skip_bias_add": False}
    for module, columns, row in parts_of(block):
        layers = [getattr(module, name) for name in columns]
        parts = [layer.weight.detach().chunk(ranks)[rank] for layer in layers]
        sizes = [len(part) for part in parts]
        fused = ColumnParallelLinear(layers[0].in_features, sum(sizes) * ranks, gather_output=False, **options)
        full = getattr(module, row)
        out = RowParallelLinear(full.in_features, full.out_features, input_is_parallel=True, **options)
        with torch.no_grad():
            fused.weight.copy_(torch.cat(parts))
            out.weight.copy_(full.weight.chunk(ranks, 1)[rank])
        for name in columns:
            delattr(module, name)
        module.fused = fused
        # One sequence: changing between [1, S, H] and Megatron's [S, 1, H] copies nothing.
        module.project = lambda x, fused=fused, sizes=sizes: _turned(fused, x).split(sizes, -1)
        setattr(module, row, _SequenceFirst(out))
    if sequence_parallel:
        block.attention_norm.weight.sequence_parallel = block.mlp_norm.weight.sequence_parallel = True
    return block


class _SequenceFirst(nn.Module):
    def __init__(self, row: nn.Module) -> None:
        super().__init__()
        self.row = row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _turned(self.row, x)


def _turned(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x.transpose(0, 1))[0].transpose(0, 1)


def with_autotp(block: nn.Module) -> nn.Module:
    """`block` on DeepSpeed's AutoTP layers in their training mode."""
    start_deepspeed()
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    set_autotp_mode(training=True)
    group = dist.group.WORLD
    for module, columns, row in parts_of(block):
        for name in columns:
            setattr(module, name, LinearLayer(getattr(module, name), group))
        setattr(module, row, LinearAllreduce(getattr(module, row), group))
    return block

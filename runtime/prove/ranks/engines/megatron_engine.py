"""Megatron-Core alone: its layers, schedules, data parallelism and optimizers, behind names of CUDA on CPUs."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.torch_norm as torch_norm
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..cells import FAMILIES, Cell, has_experts, has_window, refusal
from ..reference import ADAMW, IGNORED, SEQUENCE, VOCABULARY, Batch, counted, micro_batches
from . import cuda_names, gathered

PACKAGES = ("megatron-core", "transformers", "torch")
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(name for name in FAMILIES if not has_window({"family": name})),  # windows take TransformerEngine
    "dtype": ("fp32", "bf16"),
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "pp": (1, 2),
    "vpp": (1, 2),
    "ep": (1, 2),
    "distributed_optimizer": (False, True),
}
_NAMES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Of Megatron's configuration those of transformers' (`sizes`) and of cells (`layout`), what every cell has (`kind`),
and of parameters of a `layer` those of transformers."""
_NORM = "torch's norm marks its weights under sequence parallelism, as those of Apex and TransformerEngine do"
_GEMM = "a name that routers look for is there without TransformerEngine"


def supports(cell: Cell) -> str | None:
    """None where the engine has such a run, else why it has not."""
    experts, tp, sequence = has_experts(cell), cell["tp"] > 1, cell["sequence_parallel"]
    turns = cell["pp"] > 1 and cell["accumulation"] % cell["pp"] == 0
    shards = cell["resume"] and cell["distributed_optimizer"]
    return refusal(
        (shards, "Megatron-Core 0.16.1 cannot load shards of the state of torch's AdamW: KeyError: 'step'"),
        (cell["vpp"] > 1 and not turns, "chunks of a stage take turns over as many micro-batches as there are stages"),
        (sequence and not tp, "sequence parallelism splits over ranks of tp"),
        (cell["ep"] > 1 and not experts, "ep takes experts"),
        (cell["ep"] > cell["dp"], "ep spreads experts over ranks of dp"),
        (experts and tp and not sequence, "Megatron takes experts and tp with sequence parallelism alone"),
        (experts and tp and cell["ep"] == 1, "this adapter holds experts whole: beside tp it deals them over ep"),
    )


def shims(cell: Cell) -> tuple[str, ...]:
    """What of the engine is replaced in a cell."""
    return (cuda_names.SHIM, *((_NORM,) if cell["sequence_parallel"] else ()), *((_GEMM,) if has_experts(cell) else ()))


def save(engine: _Run, folder: Path, cell: Cell) -> None:  # noqa: ARG001
    """What `load` goes on from."""
    states = {"model": [chunk.state_dict() for chunk in engine.chunks], "optimizer": engine.optimizer.state_dict()}
    torch.save(states, folder / f"{dist.get_rank()}.pt")


def load(model: nn.Module, folder: Path, cell: Cell) -> _Run:
    """The run that was saved."""
    run = _Run(model, cell)
    states = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    for chunk, state in zip(run.chunks, states["model"], strict=True):
        chunk.load_state_dict(state)
    run.optimizer.load_state_dict(states["optimizer"])
    return run


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG001
    """Whole parameters by the names of transformers."""
    # In bf16 the weights that are stepped; a distributed optimizer has shards of them, and the model their copy.
    own = [
        (places, (value if engine.sharded else getattr(value, "main_param", value)).detach().view(places.shape))
        for places, value in engine.placed()
    ]
    whole = torch.full((engine.count,), math.nan, dtype=own[0][1].dtype)
    for places, value in itertools.chain(*gathered(own)):
        whole[places] = value
    return engine.named(whole)


class _Run:
    """Model, data parallelism and optimizer of a cell on this rank.

    Attributes:
        chunks: of this rank, one where its pipeline has no virtual stages.
        count: numbers in the whole model.
    """

    def __init__(self, model: nn.Module, cell: Cell) -> None:
        dist.init_process_group("gloo")
        cuda_names.install()
        torch_norm.WrappedTorchNorm.__new__ = _norm_of(torch_norm.WrappedTorchNorm.__new__)
        moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cell["tp"],
            pipeline_model_parallel_size=cell["pp"],
            virtual_pipeline_model_parallel_size=cell["vpp"] if cell["vpp"] > 1 else None,
            expert_model_parallel_size=cell["ep"],
            expert_tensor_parallel_size=1,
        )
        model_parallel_cuda_manual_seed(1)
        self.low = cell["dtype"] == "bf16"
        dtype, config = torch.bfloat16 if self.low else torch.float32, cast(Any, model).config
        self.config = _config(model, cell, dtype)
        self.chunks: list[Any] = [_model(self.config, config, cell, at).to(dtype) for at in range(cell["vpp"])]
        self.layers = config.num_hidden_layers // cell["pp"] // cell["vpp"]
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.count = sum(map(math.prod, self.shapes.values()))
        self.places = _renamed(self.named(torch.arange(self.count)), config)
        whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for places, parameter in self.placed():
            parameter.data.copy_(whole[places])
        self.sharded = sharded = cell["distributed_optimizer"]
        data_parallel = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=self.low)
        self.chunks = [
            DistributedDataParallel(self.config, data_parallel, Float16Module(self.config, one) if self.low else one)
            for one in self.chunks
        ]
        own: dict[str, Any] = {name: ADAMW[name] for name in ("lr", "weight_decay")}
        own |= {"adam_beta1": ADAMW["betas"][0], "adam_beta2": ADAMW["betas"][1], "adam_eps": ADAMW["eps"]}
        own |= {"min_lr": ADAMW["lr"], "clip_grad": cell["clipping"], "use_distributed_optimizer": sharded}
        own |= {"params_dtype": dtype, "bf16": self.low}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **own), self.chunks)
        for group in self.optimizer.param_groups:  # what a scheduler sets; one process decays all weights
            group |= {name: ADAMW[name] for name in ("lr", "weight_decay")}
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def named(self, whole: Tensor) -> dict[str, Tensor]:
        """All numbers of the whole model as parameters of transformers."""
        parts = torch.split(whole, [math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def placed(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """This rank's parameters, and where each of their numbers stands among those of the whole model."""
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), self.config.pipeline_model_parallel_size
        expert = parallel_state.get_expert_model_parallel_rank() * self.config.experts_of_rank
        every = [(at, *item) for at, chunk in enumerate(self.chunks) for item in chunk.named_parameters()]
        for at, name, parameter in every:
            first = (at * stages + stage) * self.layers
            name = re.sub(r"^(module\.)+", "", name)
            name = re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + first}.", name)  # noqa: B023
            name = re.sub(r"local_experts\.(\d+)\.", lambda match: f"local_experts.{int(match[1]) + expert}.", name)
            yield _part(self.places[name], name), parameter


build = _Run


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:
    """By the schedule of the layout."""
    micro = list(micro_batches(cell, batch, parallel_state.get_data_parallel_rank()))
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()
    shown = get_forward_backward_func()(
        forward_step_func=partial(_forward, cell),
        data_iterator=[iter(micro) for _ in engine.chunks],
        model=engine.chunks,
        num_microbatches=len(micro),
        seq_length=SEQUENCE,
        micro_batch_size=cell["micro_batch"],
        forward_only=False,
    )
    _, norm, _ = engine.optimizer.step()
    total = torch.tensor(sum(float(micro_batch["sum"]) for micro_batch in shown), dtype=torch.float64)
    if not parallel_state.is_pipeline_last_stage():
        total.zero_()
    dist.all_reduce(total)
    return float(total) / cell["tp"] / counted(batch), None if not cell["clipping"] else float(norm)


def _forward(cell: Cell, micro: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    batch = next(micro)
    labels = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    counts = labels != IGNORED
    hidden = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    if cell["packed"]:
        document = (batch["position_ids"] == 0).cumsum(1)
        hidden = hidden | (document[:, None, :, None] != document[:, None, None, :])

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (output * counts).sum()
        return total, counts.sum().to(torch.int), {"sum": total.detach()}

    return model(batch["input_ids"], batch["position_ids"], hidden, labels=labels.clamp(min=0)), loss


def _config(whole: Any, cell: Cell, dtype: torch.dtype) -> Any:
    model = whole.config
    experts = dict[str, Any]()
    if has_experts(cell):
        experts = {"num_moe_experts": model.num_local_experts, "moe_router_topk": model.num_experts_per_tok}
        experts["moe_ffn_hidden_size"] = getattr(model, "moe_intermediate_size", model.intermediate_size)
        experts |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
        experts["expert_tensor_parallel_size"] = 1
    sizes = {own: getattr(model, name) for own, name in _NAMES["sizes"].items()}
    layout = {own: cell[name] for own, name in _NAMES["layout"].items()}
    layout["virtual_pipeline_model_parallel_size"] = cell["vpp"] if cell["vpp"] > 1 else None
    # Megatron's rule for chunks on two stages, each of which is before the other.
    layout |= {"overlap_p2p_comm": cell["vpp"] > 1, "batch_p2p_comm": cell["vpp"] == 1}
    numbers = {"pipeline_dtype": dtype, "params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    kind = {**_NAMES["kind"], "activation_func": nn.functional.silu}
    kind["qk_layernorm"] = any("q_norm" in name for name, _ in whole.named_parameters())
    config: Any = TransformerConfig(**sizes, **layout, **numbers, **kind, **experts)
    config.experts_of_rank = experts.get("num_moe_experts", 0) // cell["ep"]
    return config


def _model(config: Any, model: Any, cell: Cell, chunk: int) -> nn.Module:
    place = {"ignore_virtual": False, "vp_stage": chunk} if cell["vpp"] > 1 else {}
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    built: nn.Module = GPTModel(
        config,
        layer,
        VOCABULARY,
        model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=chunk if cell["vpp"] > 1 else None,
        share_embeddings_and_output_weights=cell["tied"],
        position_embedding_type="rope",
        rotary_base=model.rope_parameters["rope_theta"],
    )
    return built


def _norm_of(new: Any) -> Any:
    def norm(cls: Any, config: Any, *given: Any, **named: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module = new(cls, plain, *given, **named)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    return norm


def _part(whole: Tensor, name: str) -> Tensor:
    """What a rank of tp has of a parameter; experts are whole."""
    rank = int(parallel_state.get_tensor_model_parallel_rank())
    ranks = int(parallel_state.get_tensor_model_parallel_world_size())
    if "local_experts" in name:
        return whole
    if "linear_fc1" in name:  # the gate and what it gates are each split
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    if re.search(r"word_embeddings|output_layer|linear_qkv", name):
        return whole.chunk(ranks)[rank]
    return whole.chunk(ranks, 1)[rank] if re.search(r"linear_proj|linear_fc2", name) else whole


def _renamed(given: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """What parameters of transformers have, by the names of Megatron's."""
    embedding = given["model.embed_tokens.weight"]
    renamed = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": given["model.norm.weight"],
        "output_layer.weight": embedding if config.tie_word_embeddings else given["lm_head.weight"],
    }
    for number in range(config.num_hidden_layers):
        own, other = f"decoder.layers.{number}.", f"model.layers.{number}."
        renamed |= {own + name: given[other + same] for name, same in _NAMES["layer"].items() if other + same in given}
        rows = [given[f"{other}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        by_group = [weight.view(config.num_key_value_heads, -1, weight.shape[1]) for weight in rows]
        renamed[own + "self_attention.linear_qkv.weight"] = torch.cat(by_group, 1).flatten(0, 1)
        if other + "mlp.experts.gate_up_proj" in given:
            for layer, same in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                for expert, weight in enumerate(given[f"{other}mlp.experts.{same}"]):
                    renamed[f"{own}mlp.experts.local_experts.{expert}.{layer}.weight"] = weight
        else:
            gates = [given[f"{other}mlp.{gate}_proj.weight"] for gate in ("gate", "up")]
            renamed[own + "mlp.linear_fc1.weight"] = torch.cat(gates)
    return renamed

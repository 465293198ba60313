"""Megatron-Core alone: its layers, schedules, data parallelism and optimizers, behind names of CUDA on CPUs."""

from __future__ import annotations

import copy
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

from ..cells import FAMILIES, Cell, has_experts, has_window
from ..reference import IGNORED, SEQUENCE, VOCABULARY, Batch, counted, micro_batches
from . import cuda_names

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
_NORM = "torch's norm marks its weights under sequence parallelism, as those of Apex and TransformerEngine do"
_GEMM = "a name that routers look for is there without TransformerEngine"


def supports(cell: Cell) -> str | None:
    """None where the engine has such a run, else why it has not."""
    if cell["resume"] and cell["distributed_optimizer"]:
        return "Megatron-Core 0.16.1 cannot load shards of the state of torch's AdamW: KeyError: 'step'"
    if cell["vpp"] > 1 and (cell["pp"] == 1 or cell["accumulation"] % cell["pp"]):
        return "a stage takes turns between its chunks over as many micro-batches as there are stages"
    if cell["sequence_parallel"] and cell["tp"] == 1:
        return "sequence parallelism splits over ranks of tp"
    if cell["ep"] > 1 and not has_experts(cell):
        return "ep takes experts"
    if cell["ep"] > cell["dp"]:
        return "ep spreads experts over ranks of dp"
    if has_experts(cell) and cell["tp"] > 1 and not cell["sequence_parallel"]:
        return "Megatron takes experts and tp with sequence parallelism alone"
    if has_experts(cell) and cell["tp"] > 1 and cell["ep"] == 1:
        return "this adapter holds experts whole: beside tp it deals them over ep"
    return None


def shims(cell: Cell) -> tuple[str, ...]:
    """What of the engine is replaced in a cell."""
    return (cuda_names.SHIM, *((_NORM,) if cell["sequence_parallel"] else ()), *((_GEMM,) if has_experts(cell) else ()))


def build(model: nn.Module, cell: Cell) -> _Run:
    """Model, data parallelism and optimizer of a cell on this rank."""
    return _Run(model, cell)


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:
    """One optimizer step on a global batch: its loss, and the norm of its gradients before clipping."""
    return engine.step(batch, cell)


def save(engine: _Run, folder: Path, cell: Cell) -> None:  # noqa: ARG001
    """What `load` goes on from."""
    states = {"model": [chunk.state_dict() for chunk in engine.chunks], "optimizer": engine.optimizer.state_dict()}
    torch.save(states, folder / f"{dist.get_rank()}.pt")
    if engine.sharded:
        engine.optimizer.save_parameter_state(str(folder / f"shards-{_shards()}.pt"))


def load(model: nn.Module, folder: Path, cell: Cell) -> _Run:
    """The run that was saved."""
    run = build(model, cell)
    states = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    for chunk, state in zip(run.chunks, states["model"], strict=True):
        chunk.load_state_dict(state)
    run.optimizer.load_state_dict(states["optimizer"])
    if run.sharded:
        with torch.no_grad():
            run.optimizer.load_parameter_state(str(folder / f"shards-{_shards()}.pt"))
    return run


def _shards() -> str:
    ranks = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_pipeline_model_parallel_rank
    return "-".join(str(rank()) for rank in ranks)


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG001
    """Whole parameters by the names of transformers."""
    # In bf16 the weights that are stepped; a distributed optimizer has shards of them, and the model their copy.
    own = {
        name: (dim, engine.tp_rank, (value if engine.sharded else getattr(value, "main_param", value)).detach().clone())
        for name, dim, value in engine.placed()
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    parts: dict[str, dict[int, Tensor]] = {}
    for name, (dim, rank, value) in (item for each in everyones for item in each.items()):
        parts.setdefault(name, {})[rank if dim is not None else 0] = value
        engine.dims[name] = dim
    whole = {
        name: _joined([each[rank] for rank in sorted(each)], name, engine.dims[name]) for name, each in parts.items()
    }
    return engine.names.to_transformers(whole)


class _Run:
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
        self.tp, self.tp_rank = cell["tp"], parallel_state.get_tensor_model_parallel_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.names, self.dims = _Names(cast(Any, model).config), dict[str, int | None]()
        self.low = cell["dtype"] == "bf16"
        dtype = torch.bfloat16 if self.low else torch.float32
        self.config = _config(model, cell, dtype)
        own = [_model(self.config, cast(Any, model).config, cell, at).to(dtype) for at in range(cell["vpp"])]
        self.layers = cast(Any, model).config.num_hidden_layers // cell["pp"] // cell["vpp"]
        self.chunks: list[Any] = own
        whole = self.names.to_megatron(dict(model.named_parameters()))
        for name, dim, parameter in self.placed():
            parameter.data.copy_(_part(whole[name], name, dim, self.tp_rank, self.tp))
        self.sharded = sharded = cell["distributed_optimizer"]
        data_parallel = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=self.low)
        self.chunks = [
            DistributedDataParallel(self.config, data_parallel, Float16Module(self.config, one) if self.low else one)
            for one in own
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-2,
                weight_decay=0.01,
                adam_beta1=0.9,
                adam_beta2=0.95,
                adam_eps=1e-3,
                clip_grad=cell["clipping"],
                use_distributed_optimizer=sharded,
                params_dtype=dtype,
                bf16=self.low,
            ),
            self.chunks,
        )
        for group in self.optimizer.param_groups:  # what a scheduler sets; one process decays all weights
            group["lr"], group["weight_decay"] = 1e-2, 0.01
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def placed(self) -> Iterator[tuple[str, int | None, nn.Parameter]]:
        """This rank's parameters: the name in the whole model, along which dimension tp splits it."""
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), self.config.pipeline_model_parallel_size
        expert = parallel_state.get_expert_model_parallel_rank() * self.config.experts_of_rank
        every = [(at, *item) for at, chunk in enumerate(self.chunks) for item in chunk.named_parameters()]
        for at, name, parameter in every:
            first = (at * stages + stage) * self.layers
            name = re.sub(r"^(module\.)+", "", name)
            name = re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + first}.", name)  # noqa: B023
            name = re.sub(r"local_experts\.(\d+)\.", lambda match: f"local_experts.{int(match[1]) + expert}.", name)
            yield name, _dim(name), parameter

    def step(self, batch: Batch, cell: Cell) -> tuple[float, float | None]:
        micro = list(micro_batches(cell, batch, self.dp_rank))
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        shown = get_forward_backward_func()(
            forward_step_func=partial(_forward, cell),
            data_iterator=[iter(micro) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro),
            seq_length=SEQUENCE,
            micro_batch_size=cell["micro_batch"],
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        total = torch.tensor(sum(float(micro_batch["sum"]) for micro_batch in shown), dtype=torch.float64)
        if not parallel_state.is_pipeline_last_stage():
            total.zero_()
        dist.all_reduce(total)
        return float(total) / self.tp / counted(batch), None if not cell["clipping"] else float(norm)


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
    experts = {}
    if has_experts(cell):
        experts = {
            "num_moe_experts": model.num_local_experts,
            "moe_router_topk": model.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(model, "moe_intermediate_size", model.intermediate_size),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_tensor_parallel_size": 1,
        }
    config: Any = TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate_size,
        layernorm_epsilon=model.rms_norm_eps,
        use_cpu_initialization=True,
        tensor_model_parallel_size=cell["tp"],
        sequence_parallel=cell["sequence_parallel"],
        pipeline_model_parallel_size=cell["pp"],
        virtual_pipeline_model_parallel_size=cell["vpp"] if cell["vpp"] > 1 else None,
        overlap_p2p_comm=cell["vpp"] > 1,  # Megatron's rule for chunks on two stages, each of which is before the other
        batch_p2p_comm=cell["vpp"] == 1,
        expert_model_parallel_size=cell["ep"],
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=any("q_norm" in name for name, _ in whole.named_parameters()),
        calculate_per_token_loss=True,
        attention_softmax_in_fp32=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **experts,
    )
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


def _dim(name: str) -> int | None:
    """Along which tp splits a parameter; experts are whole."""
    if "local_experts" in name:
        return None
    if re.search(r"word_embeddings|output_layer|linear_qkv|linear_fc1", name):
        return 0
    return 1 if re.search(r"linear_proj|linear_fc2", name) else None


def _part(whole: Tensor, name: str, dim: int | None, rank: int, ranks: int) -> Tensor:
    if dim is None or ranks == 1:
        return whole
    if "linear_fc1" in name:  # the gate and what it gates are each split
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(ranks, dim)[rank]


def _joined(parts: list[Tensor], name: str, dim: int | None) -> Tensor:
    if dim is None:
        return parts[0]
    if "linear_fc1" in name:
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
    return torch.cat(parts, dim)


class _Names:
    """Parameters of Megatron's GPT model and of transformers' models, whole."""

    _SAME: Mapping[str, str] = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }

    def __init__(self, config: Any) -> None:
        self._layers, self._groups, self._width = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self._tied = config.tie_word_embeddings
        self._ends = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
        self._ends["decoder.final_layernorm.weight"] = "model.norm.weight"
        self._ends["output_layer.weight"] = self._ends[next(iter(self._ends))] if self._tied else "lm_head.weight"

    def to_megatron(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name: given[other] for name, other in self._ends.items()}
        for number in range(self._layers):
            own, other = f"decoder.layers.{number}.", f"model.layers.{number}."
            renamed |= {own + name: given[other + same] for name, same in self._SAME.items() if other + same in given}
            rows = [given[f"{other}self_attn.{letter}_proj.weight"] for letter in "qkv"]
            by_group = [weight.view(self._groups, -1, weight.shape[1]) for weight in rows]
            renamed[own + "self_attention.linear_qkv.weight"] = torch.cat(by_group, 1).flatten(0, 1)
            if other + "mlp.experts.gate_up_proj" in given:
                both = zip(
                    given[other + "mlp.experts.gate_up_proj"], given[other + "mlp.experts.down_proj"], strict=True
                )
                for expert, (first, second) in enumerate(both):
                    renamed[f"{own}mlp.experts.local_experts.{expert}.linear_fc1.weight"] = first
                    renamed[f"{own}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = second
            else:
                gates = [given[f"{other}mlp.{gate}_proj.weight"] for gate in ("gate", "up")]
                renamed[own + "mlp.linear_fc1.weight"] = torch.cat(gates)
        return renamed

    def to_transformers(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        renamed = {
            other: given[name]
            for name, other in self._ends.items()
            if name in given and not (self._tied and name == "output_layer.weight")
        }
        for number in range(self._layers):
            own, other = f"decoder.layers.{number}.", f"model.layers.{number}."
            renamed |= {other + same: given[own + name] for name, same in self._SAME.items() if own + name in given}
            rows = given[own + "self_attention.linear_qkv.weight"]
            rows = rows.view(self._groups, -1, rows.shape[1])
            sizes = [rows.shape[1] - 2 * self._width, self._width, self._width]
            for letter, part in zip("qkv", torch.split(rows, sizes, 1), strict=True):
                renamed[f"{other}self_attn.{letter}_proj.weight"] = part.flatten(0, 1)
            experts = [name for name in given if name.startswith(own + "mlp.experts.") and "linear_fc1" in name]
            if experts:
                for layer, same in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                    names = [
                        f"{own}mlp.experts.local_experts.{expert}.{layer}.weight" for expert in range(len(experts))
                    ]
                    renamed[f"{other}mlp.experts.{same}"] = torch.stack([given[name] for name in names])
            else:
                gate, up = given[own + "mlp.linear_fc1.weight"].chunk(2)
                renamed |= {f"{other}mlp.gate_proj.weight": gate, f"{other}mlp.up_proj.weight": up}
        return renamed

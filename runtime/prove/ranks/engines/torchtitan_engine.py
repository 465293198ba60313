# ruff: noqa: E402 -- names are replaced in front of the modules that copy them
"""torchtitan's own Trainer on CPU ranks: FSDP2, replicas of its shards, tensor, sequence and expert parallelism.

Its pipelines call `step(arg_mbs=...)` of torch's schedules, which torch 2.13 has not; its context parallelism takes
blocks of 128 tokens of flex attention, and cells have 32; its default `spmd_types` annotates parameters in a way that
`fully_shard` of torch 2.13 does not read.
"""

from __future__ import annotations

import importlib
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torchtitan.tools.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from ..cells import FAMILIES, Cell, has_experts
from ..reference import ADAMW, IGNORED, STEPS, Batch, batches, configuration, micro_batches, sequence_length
from ..tracing import full

CPU = SimpleNamespace(
    **dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"), lambda *_: None),
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1),
    memory_stats=lambda *_: {},
)
torchtitan.tools.utils.device_type = "cpu"  # other modules copy these two names when they are imported
torchtitan.tools.utils.device_module = CPU

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import RMSNorm, attention, rope
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.trainer import Trainer


def _dense(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """Flex attention, which has no backward pass on CPUs: the same mask, as a tensor. q, k, v: [B, heads, S, D]."""
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


attention.FlexAttention._compiled_flex_attn = _dense
attention._compiled_create_block_mask = create_block_mask


def _unrounded(self: Any, *given: Any, forward: Any = GroupedExperts.forward) -> Any:
    """Experts in fp32: torchtitan casts to bf16, in which the last bits decide which of them a token goes to."""
    with patch.object(Tensor, "bfloat16", lambda tensor: tensor):
        return forward(self, *given)


GroupedExperts.forward = _unrounded

PACKAGES = ("torchtitan", "torch", "transformers")
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(name for name, family in FAMILIES.items() if "torchtitan" in family),
    "dtype": ("fp32", "bf16"),
    "replicas": (1, 2),
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "ep": (1, 2),
    "checkpointing": ("none", "full"),
    "spmd": ("partial_dtensor", "full_dtensor"),
}
"""`replicas`: so many groups of data-parallel ranks have all shards each (HSDP). `spmd`: `parallelism.spmd_backend`."""


def supports(cell: Cell) -> str | None:
    """None where the engine has such a run, else why it has not."""
    if cell["dp"] % cell["replicas"]:
        return "the replicas divide the data-parallel ranks"
    if cell["sequence_parallel"] and cell["tp"] == 1:
        return "sequence parallelism goes with tp"
    if cell["ep"] > 1 and not has_experts(cell):
        return "ep takes experts"
    if cell["dp"] // cell["replicas"] * cell["tp"] % cell["ep"]:
        return "ep spreads experts over the ranks of one replica"
    return None


def shims(cell: Cell) -> tuple[str, ...]:
    """What of the engine is replaced in a cell."""
    return (
        "torchtitan's device is the CPU, and its flex attention is scaled_dot_product_attention with the same mask",
        *(["FSDP2 reduces by sums, since gloo has no premultiplied ones"] if cell["dp"] > 1 else []),
        *(["experts multiply in fp32, where torchtitan casts to bf16"] if has_experts(cell) else []),
    )


class _Loader(BaseDataLoader):  # type: ignore[misc]
    """The micro-batches of this data-parallel rank, in order; labels are shifted, as torchtitan has them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        cell: Any

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self._cell, self._rank, self._next = config.cell, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        every = [micro for batch in batches(self._cell) for micro in micro_batches(self._cell, batch, self._rank)]
        for micro in every[self._next :]:
            self._next += 1
            end = torch.full((len(micro["labels"]), 1), IGNORED)
            labels = torch.cat([micro["labels"][:, 1:], end], 1)
            yield {"input": micro["input_ids"], "positions": micro["position_ids"].int()}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


class _Bytes(BaseTokenizer):  # type: ignore[misc]
    """Text as its bytes: the Trainer wants a tokenizer, and the loader gives it ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:  # noqa: ARG002
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


def _model_spec(cell: Cell) -> Any:
    """The smallest model of the family that torchtitan registers, with the sizes of the cell."""
    config, names = configuration(cell), FAMILIES[cell["family"]]["torchtitan"]
    source = importlib.import_module(f"torchtitan.models.{names['model']}")
    spec, dim = source.model_registry("debugmodel"), config.hidden_size
    layers = getattr(source, names["layers"])(
        n_layers=config.num_hidden_layers,
        dim=dim,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        attn_backend="flex",
        rope=getattr(rope, names["rope"]).Config(
            dim=config.head_dim,
            max_seq_len=config.max_position_embeddings,
            theta=config.rope_parameters["rope_theta"],
        ),
        **{name: getattr(config, key) for name, key in names["own"].items()},
        **({"moe_comm_backend": "standard"} if has_experts(cell) else {}),
    )
    for layer in layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None  # one process has no bias that moves with the load
    vocabulary, whole = config.vocab_size, spec.model
    spec.model = replace(
        whole,
        dim=dim,
        vocab_size=vocabulary,
        enable_weight_tying=cell["tied"],
        tok_embeddings=replace(whole.tok_embeddings, num_embeddings=vocabulary, embedding_dim=dim),
        norm=replace(whole.norm, normalized_shape=dim),
        lm_head=replace(whole.lm_head, in_features=dim, out_features=vocabulary),
        layers=layers,
    )
    for _, norm, *_ in spec.model.traverse(RMSNorm.Config):
        norm.eps = config.rms_norm_eps
    return spec


class _Run:
    """The trainer of a cell on this rank, with the weights of the model."""

    def __init__(self, model: nn.Module, cell: Cell) -> None:
        self.spec = _model_spec(cell)
        self.trainer = Trainer(
            Trainer.Config(
                model_spec=self.spec,
                dump_folder=tempfile.gettempdir(),
                tokenizer=_Bytes.Config(),
                dataloader=_Loader.Config(cell=cell),
                loss=CrossEntropyLoss.Config(global_vocab_size=self.spec.model.vocab_size),
                metrics=MetricsProcessor.Config(log_freq=1),
                optimizer=OptimizersContainer.Config(
                    param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=dict(ADAMW))],
                    implementation="foreach",
                ),
                lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
                training=TrainingConfig(
                    local_batch_size=cell["micro_batch"],
                    global_batch_size=cell["dp"] * cell["micro_batch"] * cell["accumulation"],
                    seq_len=sequence_length(cell),
                    max_norm=cell["clipping"] or math.inf,
                    steps=STEPS,
                    disable_cuda_graphs=True,
                    mixed_precision_param="bfloat16" if cell["dtype"] == "bf16" else "float32",
                ),
                parallelism=ParallelismConfig(
                    spmd_backend=cell["spmd"],
                    data_parallel_replicate_degree=cell["replicas"],
                    data_parallel_shard_degree=cell["dp"] // cell["replicas"],
                    tensor_parallel_degree=cell["tp"],
                    enable_sequence_parallel=cell["sequence_parallel"],
                    expert_parallel_degree=cell["ep"],
                ),
                checkpoint=CheckpointManager.Config(enable=cell["resume"], interval=1, last_save_model_only=False),
                activation_checkpoint=FullAC.Config() if cell["checkpointing"] == "full" else None,
            )
        )
        self.names = self.spec.state_dict_adapter(self.spec.model, None)
        weights = self.names.from_hf({name: one.clone() for name, one in _apart(model.state_dict()).items()})
        (self.model,) = self.trainer.model_parts
        self.model.load_state_dict({name: _as(own, weights[name]) for name, own in self.model.state_dict().items()})
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        self.trainer.metrics_processor.log = self._log
        self.micro_batches = self.trainer.batch_generator(self.trainer.dataloader)
        self.told: tuple[float, float] = (math.nan, math.nan)

    def _log(self, step: int, loss: float, most: float, norm: float, **_: Any) -> None:  # noqa: ARG002
        self.told = (loss, norm)


def _as(own: Any, whole: Tensor) -> Tensor:
    """The same values, spread as a tensor of the engine is."""
    return distribute_tensor(whole, own.device_mesh, own.placements) if isinstance(own, DTensor) else whole


build = _Run


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:  # noqa: ARG001 -- the loader has it
    """One optimizer step on the next micro-batches: what the Trainer logs as its loss, and as the norm of gradients."""
    engine.trainer.step += 1
    engine.trainer.train_step(engine.micro_batches)
    return engine.told


def save(engine: _Run, folder: Any, cell: Cell) -> None:  # noqa: ARG001 -- to its `dump_folder`
    """What `load` goes on from, by torchtitan's own checkpoints."""
    engine.trainer.checkpointer.save(engine.trainer.step)


def load(model: nn.Module, folder: Any, cell: Cell) -> _Run:  # noqa: ARG001
    """What was saved, in front of the last step's micro-batches."""
    run = _Run(model, cell)
    if not run.trainer.checkpointer.load() or run.trainer.step != STEPS - 1:
        raise RuntimeError(f"the checkpoint is of step {run.trainer.step}")
    return run


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG001
    """Whole parameters by the names of transformers."""
    own = {name: full(value).clone() for name, value in engine.model.state_dict().items()}
    return _stacked(engine.names.to_hf(own))


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of transformers by the names of its checkpoints, which have each expert by itself."""
    found = dict[str, Tensor]()
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        for number, one in enumerate(tensor if layer.endswith(".mlp.experts") else ()):
            parts = zip(("gate", "up"), one.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", one)]
            found |= {f"{layer}.{number}.{part}_proj.weight": value for part, value in parts}
        if not layer.endswith(".mlp.experts"):
            found[name] = tensor
    return found


def _stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `_apart` takes apart, together again; experts come in their order."""
    found, experts = dict[str, Tensor](), dict[tuple[str, str], list[Tensor]]()
    for name, tensor in state.items():
        if match := re.fullmatch(r"(.+\.mlp\.experts)\.\d+\.(\w+)_proj\.weight", name):
            experts.setdefault((match[1], match[2]), []).append(tensor)
        else:
            found[name] = tensor
    for layer in {layer for layer, _ in experts}:
        gate, up, down = (torch.stack(experts[layer, kind]) for kind in ("gate", "up", "down"))
        found |= {f"{layer}.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.down_proj": down}
    return found

"""DeepSpeed alone: ZeRO 0-3 and its optimizer on the host, AutoTP, Ulysses, PipelineEngine, AutoEP, its MoE layer."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cells import AUX_LOSS, Cell, OtherEngineError, has_experts, has_window, refusal
from ..reference import IGNORED, SEQUENCE, Batch, balance, counted, inputs, micro_batches, optimizer_of, token_sum
from . import gathered

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param

PACKAGES = ("deepspeed", "transformers", "torch")
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "tp": (1, 2),
    "cp": (1, 2),
    "pp": (1, 2),
    "experts": ("own", "autoep", "moe"),
    "offload": (False, True),
    **AUX_LOSS,
    "config": ("",),
}
"""`experts`: those of transformers on every rank; over two ranks by AutoEP; or in `deepspeed.moe.layer.MoE`, which
computes the same with top-2 gating, no token dropped and the same weights. `offload`: of the optimizer, to the host."""
_AUTOEP = "transformers' table of recorded outputs is asked for a default, which it does not take"
_EP = 2


def supports(cell: Cell) -> str | None:
    """None where the engine has such a run, else why it has not."""
    tp, cp, pp = (cell[axis] > 1 for axis in ("tp", "cp", "pp"))
    stage, dtype, moe, several = cell["stage"], cell["dtype"], has_experts(cell), tp + cp + pp > 1
    spread, special = cell["experts"] != "own", moe or has_window(cell) or cell["packed"]
    no_autoep = importlib.util.find_spec("deepspeed.module_inject.auto_ep") is None
    to_host = stage > 0 and dtype != "fp64" and not (tp or cp or pp)
    further = cell["aux_loss"] or cell["resume"] or cp
    return refusal(
        (several, "this adapter builds one of tp, cp and pp at a time"),
        (pp and stage > 1, "PipelineEngine takes ZeRO 0 and 1"),
        (pp and special, "this adapter's stages hand on hidden states alone: no experts, windows or packed documents"),
        (dtype == "bf16" and (tp or pp), "this adapter reads masters in fp32 under ZeRO alone"),
        (tp and stage == 3, "AutoTP takes ZeRO 0 to 2"),
        (tp and moe, "AutoTP has no plan for stacked experts"),
        (cp and special, "this adapter runs Ulysses on whole documents and full attention"),
        (dtype == "fp64" and stage == 3, "ZeRO 3 partitions in fp32"),
        (cell["offload"] and not to_host, "state in fp32 goes to the host under ZeRO 1 to 3 of whole layers"),
        (spread and (not moe or cell["dp"] < _EP), f"experts are spread over {_EP} ranks of dp"),
        (cell["experts"] == "autoep" and no_autoep, "this version of DeepSpeed has no AutoEP, and reads over its keys"),
        (spread and further, "this adapter spreads experts without a balancing loss, resume and Ulysses"),
        (cell["experts"] == "moe" and stage == 3, "MoE takes ZeRO 0 to 2"),
    )


def shims(cell: Cell) -> tuple[str, ...]:
    """What of the engine is replaced in a cell."""
    return (_AUTOEP,) if cell["experts"] == "autoep" else ()


def build(model: nn.Module, cell: Cell) -> _Run:
    """Engine of a cell on this rank."""
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # none: asking of each whether it could be compiled takes long
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    return _Pipeline(model, cell) if cell["pp"] > 1 else _Run(model, cell)


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:
    """By the engine's own kind."""
    loss = engine.step(batch, cell)
    norm = engine.engine.get_global_grad_norm()
    return loss, None if norm is None else float(norm)


def save(engine: _Run, folder: Path, cell: Cell) -> None:  # noqa: ARG001
    """What `load` goes on from."""
    engine.engine.save_checkpoint(str(folder))


def load(model: nn.Module, folder: Path, cell: Cell) -> _Run:
    """The engine that was saved.

    Raises:
        RuntimeError: DeepSpeed did not find it.
    """
    run = build(model, cell)
    if run.engine.load_checkpoint(str(folder))[0] is None:
        raise RuntimeError("load_checkpoint found no checkpoint")
    return run


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:
    """Whole parameters by the names of transformers."""
    return engine.parameters(cell)


def settings_of(cell: Cell) -> dict[str, Any]:
    """The configuration file of a cell, on top of that which the user gave."""
    settings: dict[str, Any] = json.loads(cell["config"]) if cell["config"] else {}
    settings |= {
        "train_micro_batch_size_per_gpu": cell["micro_batch"],
        "gradient_accumulation_steps": cell["accumulation"],
        "gradient_clipping": cell["clipping"],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    zero = {"stage3_param_persistence_threshold": 0, **settings.get("zero_optimization", {}), "stage": cell["stage"]}
    settings["zero_optimization"] = zero
    if cell["dtype"] == "bf16":
        settings["bf16"] = {**settings.get("bf16", {}), "enabled": True}
    if cell["tp"] > 1:
        settings["tensor_parallel"] = {"autotp_size": cell["tp"]}
    if cell["cp"] > 1:
        settings["sequence_parallel_size"] = cell["cp"]
    if cell["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell["experts"] == "autoep":
        experts = {"autoep_size": _EP, "preset_model": cell["family"], "use_grouped_mm": False}
        settings["expert_parallel"] = {"enabled": True, **experts}
    return settings


def _spread(model: nn.Module, cell: Cell) -> dict[str, Any]:
    """Layers of DeepSpeed in place of those of transformers, and how their optimizer is built."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as groups_of

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return optimizer_of(groups_of({"params": list(parameters), "name": "all"}))

    if cell["experts"] == "autoep":
        from transformers.utils import output_capturing

        registry: Any = output_capturing._CanRecordRegistry
        found = registry.get
        registry.get = lambda self, key, default=None: default if (one := found(self, key)) is None else one
        return {"model_parameters": model.parameters(), "optimizer": optimizer}
    for layer in cast(Any, model).model.layers:
        layer.mlp = _Routed(layer.mlp, cast(Any, model).config)
    return {"optimizer": optimizer(model.parameters())}


class _Routed(nn.Module):
    """A layer of transformers' experts as one of `deepspeed.moe`."""

    def __init__(self, whole: Any, config: Any) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        number, gate_up = len(whole.experts.gate_up_proj), whole.experts.gate_up_proj.detach()
        expert = _Expert(gate_up[0], whole.experts.down_proj[0])
        options = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(config.hidden_size, expert, number, _EP, k=config.num_experts_per_tok, **options)
        layer, first = self.moe.deepspeed_moe, dist.get_rank() % _EP * (number // _EP)
        layer.gate.wg.weight.data.copy_(whole.gate.weight)
        for place, own in enumerate(layer.experts.deepspeed_experts):
            own.gate_up.data.copy_(gate_up[first + place])
            own.down.data.copy_(whole.experts.down_proj[first + place])

    def forward(self, hidden: Tensor) -> Any:
        return self.moe(hidden)[0]


class _Expert(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = nn.functional.linear(hidden, self.gate_up).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down)


def _joined(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts of both ranks by the names of transformers."""
    parts, whole = dict[str, list[Tensor]](), dict[str, Tensor]()
    for rank in gathered(dict(own))[:_EP]:
        for name, value in rank.items():
            if "deepspeed_experts" in name:
                layer, kind = name.partition(".moe.")[0], name.rpartition(".")[2]
                parts.setdefault(f"{layer}.experts.{kind}_proj", []).append(value[None])
            elif ".experts.w" in name:
                parts.setdefault(name, []).append(value)
            else:
                whole[re.sub(r"\.(moe\.deepspeed_moe\.gate\.wg|router\.gate)\.", ".gate.", name)] = value
    joined = {name: torch.cat(values) for name, values in parts.items()}
    for name in [name for name in joined if name.endswith(".w1")]:
        up, down = joined.pop(name[:-1] + "3"), joined.pop(name[:-1] + "2")
        joined |= {f"{name[:-2]}gate_up_proj": torch.cat([joined.pop(name), up], 1), f"{name[:-2]}down_proj": down}
    return {**whole, **joined}


class _Run:
    """An engine whose ranks each see whole layers: ZeRO, AutoTP, Ulysses."""

    def __init__(self, model: nn.Module, cell: Cell) -> None:
        further: dict[str, Any] = {}
        if cell["cp"] > 1:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            further["mpu"] = UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model,
                core_attn_implementation="sdpa",
                sequence_parallel_size=cell["cp"],
                micro_batch_size=cell["micro_batch"],
                seq_length=SEQUENCE,
                seq_length_is_variable=True,
            )
        if cell["experts"] == "own":
            further["optimizer"] = optimizer_of(model.parameters())
        else:
            further |= _spread(model, cell)
        self.engine, *_ = deepspeed.initialize(model=model, config=settings_of(cell), **further)
        self._refuse_other(cell)
        self.dp_rank, self.part = divmod(dist.get_rank(), cell["tp"] * cell["cp"])

    def _refuse_other(self, cell: Cell) -> None:
        """That DeepSpeed took what its file asks for.

        Raises:
            OtherEngineError: it did not.
        """
        optimizer: Any = self.engine.optimizer
        on_host = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
        layers = sum(type(layer).__name__ == "AutoEPMoELayer" for layer in self.engine.modules())
        if cell["offload"] and not on_host:
            raise OtherEngineError(f"DeepSpeed keeps the state of {type(optimizer).__name__} on the accelerator")
        if cell["experts"] == "autoep" and not layers:
            raise OtherEngineError("DeepSpeed built no layer of AutoEP")

    def step(self, batch: Batch, cell: Cell) -> float:
        """The loss of one optimizer step."""
        # The engine averages over data-parallel ranks and micro-batches; the loss is the mean over the batch's tokens.
        times = cell["dp"] * cell["accumulation"] / counted(batch)
        total = 0.0
        for micro in micro_batches(cell, batch, self.dp_rank):
            balancing: Tensor | float = 0.0
            if cell["cp"] > 1:
                summed = self._sum_of_part(micro, cell["cp"])
            else:
                outputs = self.engine(**inputs(cell, micro))
                summed, balancing = token_sum(outputs.logits, micro["labels"]), balance(cell, outputs)
            self.engine.backward(summed * times + balancing)
            self.engine.step()
            total += float(summed.detach()) / counted(batch) + float(balancing) / (cell["dp"] * cell["accumulation"])
        everyones = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(everyones)
        return float(everyones) / int(cell["tp"])

    def _sum_of_part(self, batch: Batch, cp: int) -> Tensor:
        """Over this rank's share of each sequence."""
        size = batch["input_ids"].shape[1] // cp
        own = slice(self.part * size, (self.part + 1) * size)
        shifted = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:][:, own]
        logits = self.engine(input_ids=batch["input_ids"][:, own], position_ids=batch["position_ids"][:, own]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), reduction="sum")

    def parameters(self, cell: Cell) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        if cell["tp"] > 1:
            from deepspeed.module_inject.layers import DS_IS_REPLACED_MODULE, GatherReplacedLayerParams

            for path, module in self.engine.module.named_modules():
                own = dict(module.named_parameters(recurse=False))
                split = [parameter for parameter in own.values() if getattr(parameter, DS_IS_REPLACED_MODULE, False)]
                gathering = GatherReplacedLayerParams(split, module, True) if split else nullcontext()
                with gathering:
                    whole |= {f"{path}.{name}": parameter.detach().clone() for name, parameter in own.items()}
            return whole
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=cell["stage"] == 3):
                master = safe_get_full_fp32_param(parameter) if cell["dtype"] == "bf16" else None  # None at stage 0
                whole[name] = (parameter if master is None else master).detach().clone()
        return whole if cell["experts"] == "own" else _joined(whole)


class _Pipeline(_Run):
    """DeepSpeed's PipelineEngine over the layers of the model."""

    def __init__(self, model: nn.Module, cell: Cell) -> None:
        from deepspeed.pipe import PipelineModule, TiedLayerSpec

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._counted = 1
        whole, ends = cast(Any, model).model, [cast(Any, model).model.embed_tokens, cast(Any, model).lm_head]
        if cell["tied"]:
            spec = partial(TiedLayerSpec, "embedding", _Embedding, ends[0].weight, tied_weight_attr="weight")
            ends = [spec(), spec(forward_fn=_project)]
        inner = [_Layer(layer, whole.rotary_emb) for layer in whole.layers]
        times = cell["dp"] * cell["accumulation"]
        net = PipelineModule(
            [ends[0], *inner, whole.norm, ends[1]],
            num_stages=cell["pp"],
            loss_fn=lambda logits, labels: token_sum(logits, labels) / self._counted * times,
            partition_method="uniform",
        )
        self.engine, *_ = deepspeed.initialize(
            model=net, optimizer=optimizer_of(list(net.parameters())), config=settings_of(cell)
        )
        self._own = {names[id(parameter)]: parameter for parameter in net.parameters()}
        self.dp_rank = self.engine.grid.get_data_parallel_rank()

    def step(self, batch: Batch, cell: Cell) -> float:
        self._counted = counted(batch)
        given = ((micro["input_ids"], micro["labels"]) for micro in micro_batches(cell, batch, self.dp_rank))
        return float(self.engine.train_batch(given))

    def parameters(self, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG002
        own = {name: parameter.detach().clone() for name, parameter in self._own.items()}
        return {name: parameter for rank in gathered(own) for name, parameter in rank.items()}


class _Embedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


def _project(embedding: _Embedding, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, embedding.weight)


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: Tensor) -> Any:
        places = torch.arange(hidden.shape[1])[None]
        output = self.layer(
            hidden, position_embeddings=self.rotary(hidden, places), position_ids=places, attention_mask=None
        )
        return output[0] if isinstance(output, tuple) else output

"""Training runs that tests compare: plans under the engine, and the same training in one plain process."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from closeness import Margin, Noise, margins, nudge
from torch import Tensor

from parcompile.plan import Plan, compile_plan
from parcompile.plan.holding import Holding
from parcompile.rules import check
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.spec import learning_rate, weight_decay_of
from parcompile.spec.resolve import Resolution

STEPS = 5

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def dp_of(world_size: int, parallelism: dict[str, Any]) -> int:
    """What is left for dp."""
    sizes = [parallelism.get(axis, 1) for axis in ("tp", "cp", "pp")]
    return world_size // math.prod(sizes)


def make_plan(
    world_size: int,
    parallelism: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    whole_model: bool = False,
    extra: dict[str, Any] | None = None,
) -> Plan:
    """The plan of a tiny byte-sized model; the vocabulary (61) needs padding at every tp.

    `model` changes dimensions of it, or is the `whole_model`; `extra` are further sections of the spec.
    """
    chosen = training or {}
    size = (
        {}
        if "micro_batch_size" in chosen
        else {"micro_batch_size": chosen.get("global_batch_size", 4) // dp_of(world_size, parallelism)}
    )
    tree = {
        "version": 1,
        "name": "tiny",
        "model": {**({} if whole_model else MODEL), **(model or {})},
        "cluster": {"gpus_per_node": world_size, "accelerator": "cpu"},
        "parallelism": {"make_vocab_size_divisible_by": 8, **parallelism},
        "training": {
            "sequence_length": 16,
            "global_batch_size": 4,
            "precision": "fp32",
            "gradient_clipping": 0.5,
            # Adam turns a gradient that is rounding noise into a full step: a small rate keeps that noise small.
            "optimizer": {"lr": 1e-3},
            **size,
            **chosen,
        },
        **(extra or {}),
    }
    resolution = Resolution(tree)
    diagnostics = check(resolution)
    assert not [found for found in diagnostics if found.is_error], diagnostics
    return compile_plan(resolution.spec(), tree, diagnostics)


def samples(plan: Plan, *, masked: bool = False) -> list[dict[str, Tensor]]:
    """Whole sequences for `STEPS` steps.

    Masked ones leave out most labels of the first half, and a different number in each sample.
    """
    generator = torch.Generator().manual_seed(7)
    length, count = plan.spec.training.sequence_length, STEPS * plan.spec.training.global_batch_size
    found = []
    for index in range(count):
        ids = torch.randint(0, plan.spec.model.shape.vocab_size, (length,), generator=generator)
        labels = ids.clone()
        if masked:
            labels[: length // 2 - 1] = -100
            labels[length - 1 - index % 5 :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def initial_model(plan: Plan) -> torch.nn.Module:
    """The plan's model; what starts at zero is drawn too (biases, norms of gemma): a relative comparison of zeros says
    nothing."""
    from parcompile.runtime import build_model

    model = build_model(plan)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") or not parameter.any():
            parameter.data.normal_(std=0.2, generator=generator)
    fill_tables(model, plan, generator)
    return model


def fill_tables(model: torch.nn.Module, plan: Plan, generator: torch.Generator) -> None:
    """Draws the experts of each token that routers look up, which are zeros until weights are loaded."""
    from parcompile.runtime.expert_parallel import draw_tables

    if plan.spec.model.shape.moe is not None:
        draw_tables(model, plan.spec.model.shape.moe.num_experts, generator)


def train_with_engine(
    rank: int,
    plan: Plan,
    masked: bool = False,
    steps: int = STEPS,
    z_loss: float = 0.0,
    built: Callable[[Plan], torch.nn.Module] = initial_model,
    drawn: Callable[[Plan], list[dict[str, Tensor]]] | None = None,
) -> dict[str, Any]:
    """Losses, gradient norms and this rank's parameters after training the model that is `built` under the engine."""
    from parcompile.runtime import initialize
    from parcompile.runtime.loss import ParallelCausalLoss

    data = samples(plan, masked=masked) if drawn is None else drawn(plan)
    engine, _, loader, _ = initialize(plan=plan, model=built(plan), training_data=data)
    if z_loss:
        vocab_size = plan.spec.model.shape.vocab_size
        engine.module.loss_function = ParallelCausalLoss(engine.mesh, vocab_size, z_loss=z_loss)
    losses, norms = [], []
    batches = iter(loader)
    for _ in range(steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    return {"rank": rank, "losses": losses, "norms": norms, "parameters": whole_weights(engine.module)}


def whole_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of what this rank of tp and ep has, gathered at ZeRO stage 3."""
    from parcompile.runtime.deepspeed_patches.optimizer_state import gathered

    found = {}
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            found[name] = parameter.detach().clone()
    return found


def static_bytes(rank: int, plan: Plan) -> dict[str, int]:
    """What a live engine holds after a step, and behind the first of its micro-batches: gradients, and the bucket."""
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    weights = list(engine.module.parameters())
    (bucket,) = engine.optimizer.ipg_buckets.values()
    buckets: list[int] = []
    hook = weights[0].register_post_accumulate_grad_hook(lambda _: buckets.append(_bytes(bucket.buffer)))
    batches = iter(loader)
    gradients = []
    for _ in range(plan.spec.training.gradient_accumulation_steps):
        engine.backward(engine(**next(batches)).loss)
        gradients.append(_bytes(weight.grad for weight in weights if weight.grad is not None))
        engine.step()
    hook.remove()
    parameters = sum(weight.numel() for weight in weights)
    return {**_shard(engine), "gradient_bytes": gradients[0], "bucket_bytes": max(buckets), "parameters": parameters}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _shard(engine: Any) -> dict[str, int]:
    """Elements of this rank's optimizer shard, as the live engine holds it."""
    masters = engine.optimizer.single_partition_of_fp32_groups
    states = engine.optimizer.optimizer.state
    moments = sum(value.numel() for state in states.values() for value in state.values() if value.dim() > 0)
    flat = sum(tensor.numel() for tensor in engine.optimizer.bit16_groups_flat)
    return {
        "shard_numel": sum(tensor.numel() for tensor in masters),
        "master_bytes": _bytes(masters),
        "moments": moments,
        "flat_numel": flat,
        "flat_bytes": _bytes(engine.optimizer.bit16_groups_flat),
    }


def plain_optimizer(model: torch.nn.Module, plan: Plan, *, of_trainer: bool = False) -> torch.optim.Optimizer:
    """torch's own, as the plan says; with the parameters that transformers' Trainer decays, or those of the plan."""
    chosen = plan.spec.training.optimizer
    rate = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    parameters = _groups(model, "biases_and_norms" if of_trainer else chosen.no_weight_decay)
    if chosen.type == "sgd":
        momentum: Any = {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
        return torch.optim.SGD(parameters, **rate, **momentum)
    if chosen.type == "adagrad":
        return torch.optim.Adagrad(parameters, **rate, eps=chosen.eps)
    if chosen.is_muon:
        return PlainMuon(model, plan, parameters)
    make = torch.optim.Adam if chosen.type == "adam" else torch.optim.AdamW
    return make(parameters, **rate, betas=chosen.betas, eps=chosen.eps)


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """What a plan says, as TrainingArguments of one process."""
    spec = plan.spec.training
    return {
        "per_device_train_batch_size": spec.micro_batch_size * plan.spec.parallelism.dp,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        "learning_rate": spec.optimizer.lr,
        "adam_beta2": spec.optimizer.betas[1],
        "adam_epsilon": spec.optimizer.eps,
        "weight_decay": spec.optimizer.weight_decay,
        "max_grad_norm": spec.gradient_clipping,
        "seed": spec.seed,
    }


def _groups(model: torch.nn.Module, left_out: str | None) -> list[dict[str, Any]]:
    """All parameters in one group; or those that transformers' Trainer or Megatron-LM decays, and the others."""
    from transformers import Trainer

    if left_out is None:
        return [{"params": list(model.parameters())}]
    of_names = dict(model.named_parameters())
    names: Any = [name for name, one in of_names.items() if one.dim() > 1 and not name.endswith("bias")]
    if left_out == "biases_and_norms":
        names = Trainer.get_decay_parameter_names(None, model)
    return [
        {"params": [one for name, one in of_names.items() if name in names]},
        {"params": [one for name, one in of_names.items() if name not in names], "weight_decay": 0.0},
    ]


NOT_HIDDEN = re.compile(r"router|\bgate\.|expert_gate\.|norm|embed")


class PlainMuon(torch.optim.AdamW):
    """torch.optim.Muon for each matrix of the layers, and for each expert of a stack; torch.optim.AdamW for the rest.

    With `ns_dtype` fp32 torch's own iteration runs in fp32: the one line of it that says bf16 is another.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan, groups: list[dict[str, Any]] | None = None) -> None:
        groups = _groups(model, None) if groups is None else groups
        chosen = plan.spec.training.optimizer
        rate = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
        layers = {name: one for name, one in model.named_parameters() if re.search(r"\.\d+\.", name)}
        self.matrices = [
            one
            for name, one in layers.items()
            if (one.dim() == 2 and name.endswith(".weight") and not NOT_HIDDEN.search(name))
            or (one.dim() == 3 and "experts" in name)
        ]
        taken = {id(one) for one in self.matrices}
        others = [{**group, "params": [one for one in group["params"] if id(one) not in taken]} for group in groups]
        super().__init__(others, **rate, betas=chosen.betas, eps=chosen.eps)
        # Views of the experts of a stack; of a matrix, one of it.
        self.views = [(one, list(one.detach().view(-1, *one.shape[-2:]))) for one in self.matrices]
        self.muon = torch.optim.Muon(
            [view for _, views in self.views for view in views],
            **rate,
            momentum=chosen.momentum,
            nesterov=chosen.nesterov,
            ns_steps=chosen.ns_steps,
            adjust_lr_fn=chosen.adjust_lr,
        )
        self.iteration = torch.optim._muon._zeropower_via_newtonschulz
        if chosen.ns_dtype == "fp32":
            source = inspect.getsource(self.iteration)
            assert source.count("grad.bfloat16()") == 1
            space = dict(vars(torch.optim._muon))
            exec(source.replace("grad.bfloat16()", "grad.clone()"), space)
            self.iteration = space["_zeropower_via_newtonschulz"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for one in self.matrices:
            one.grad = None

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for one, views in self.views:
            assert one.grad is not None
            for view, gradient in zip(views, one.grad.view(-1, *one.shape[-2:]), strict=True):
                view.grad = gradient
        with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", self.iteration):
            for group in self.muon.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            self.muon.step()


def train_in_one_process(
    plan: Plan,
    *,
    masked: bool = False,
    steps: int = STEPS,
    z_loss: float = 0.0,
    built: Callable[[Plan], torch.nn.Module] = initial_model,
    seed: int | None = None,
    of_trainer: bool = False,
    batches: Sequence[slice] | None = None,
) -> dict[str, Any]:
    """The same training with transformers and torch alone: no DeepSpeed, no layers of ours.

    Of weights that `seed` nudges, for the noise of a comparison; on these `batches`, where they are said.
    """
    training = plan.spec.training
    model = built(plan)
    nudge(model, seed)
    optimizer = plain_optimizer(model, plan, of_trainer=of_trainer)
    data = samples(plan, masked=masked)
    losses, norms = [], []
    size = training.global_batch_size
    for step, place in enumerate(batches or [slice(step * size, (step + 1) * size) for step in range(steps)]):
        batch = data[place]
        ids = torch.stack([sample["input_ids"] for sample in batch])
        labels = torch.stack([sample["labels"] for sample in batch])
        output = model(input_ids=ids, labels=labels)
        loss = output.loss
        if z_loss:
            log_sums = output.logits[:, :-1][labels[:, 1:] != IGNORED_LABEL].float().logsumexp(-1)
            loss = loss + z_loss * log_sums.square().mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step + 1)
        if training.optimizer.start_weight_decay is not None:
            for group in (*optimizer.param_groups, *getattr(optimizer, "muon", optimizer).param_groups):
                group["weight_decay"] = weight_decay_of(training, step + 1) if group["weight_decay"] else 0.0
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping or math.inf)))
        optimizer.step()
        losses.append(float(loss.detach()))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def compared(
    plan: Plan, ranks: Sequence[dict[str, Any]], rerun: Callable[[int | None], dict[str, Any]]
) -> list[Margin]:
    """Margins of losses and norms of every rank, and of the parameters of all together, beside one process."""
    expected, noise = rerun(None), Noise(rerun)
    found = margins({"parameters": whole_parameters(plan, ranks)}, {"parameters": expected["parameters"]}, rerun=noise)
    for rank in ranks:
        found += margins(*({key: one[key] for key in ("losses", "norms")} for one in (rank, expected)), rerun=noise)
    return found


def whole_parameters(plan: Plan, ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The whole model from every rank's part, put together by the plan; replicas have to be equal to the bit."""
    rows = plan.tensors()
    whole: dict[str, Tensor] = {}
    held = [Holding(plan, pp_rank) for pp_rank in range(plan.spec.parallelism.pp)]
    for result in ranks:
        names = held[plan.groups.grid.coordinates(result["rank"])["pp"]].names
        assert list(result["parameters"]) == names, "a rank holds other parameters than its stage's"
    for name, parameter in plan.parameters.expanded():
        layout = rows[parameter][1]
        dtype = next(one["parameters"][name].dtype for one in ranks if name in one["parameters"])
        full = torch.full(layout.full_shape, float("nan"), dtype=dtype)
        for result in ranks:
            if name not in result["parameters"]:
                continue
            local = result["parameters"][name]
            assert tuple(local.shape) == layout.local_shape, name
            tp_rank = plan.groups.grid.coordinates(result["rank"])["tp"]
            dim, stretches = layout.dim or 0, [(full, local)]
            if layout.ep > 1:
                experts = layout.experts(plan.groups.of_rank("ep", result["rank"]).index(result["rank"]))
                assert experts is not None
                held = local.split([stop - start for start, stop in experts], layout.expert_dim)
                dealt = [full.narrow(layout.expert_dim, start, stop - start) for start, stop in experts]
                stretches = list(zip(dealt, held, strict=True))
            for target, source in stretches:
                offset = 0
                pieces = [(0, target.shape[0])] if layout.ranges is None else layout.ranges[tp_rank]
                for start, stop in pieces:
                    place = target.narrow(dim, start, stop - start)
                    piece = source.narrow(dim, offset, stop - start)
                    assert torch.equal(place, piece) or bool(place.isnan().all()), f"replicas of {name} differ"
                    place.copy_(piece)
                    offset += stop - start
        assert not full.isnan().any(), f"{name} is not covered"
        whole[name] = full[tuple(slice(size) for size in parameter.shape)]
    return whole

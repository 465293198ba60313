"""The time of a step: computation, launches, what communication does not hide, the pipeline's bubble, the optimizer.

A layer takes the larger of its work (matrix products, attention and elementwise kernels, each at its share of the
hardware's peak, plus the collectives that it waits for) and of the time in which its kernels can be launched. A stage
is its layers, the head and the addition of gradients to their sums. A step is m · (slowest stage) + (all other stages
once) / v, then gradients, then the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parcompile.layout.groups import Axis
from parcompile.layout.shards import MASTER_BYTES
from parcompile.machines import find_accelerator
from parcompile.model.derived_rows import dense_mlps, parameter_table
from parcompile.model.layer_parts import ATTENTION, MLP, NORMS
from parcompile.model.shape import ModelShape
from parcompile.user_files import shipped

from .activations import LayerBytes, layer_bytes, score_bytes
from .coefficients import Fit, default_time, time_values
from .collectives import hidden_bytes, matrix_bytes, matrix_flops, needs_mlp_output
from .context_time import ContextCost, context_cost, state_seconds, window_seconds
from .flops import (
    attention_flops_per_token,
    forward_flops_per_token,
    mixed_matmul_parameters,
    model_flops_per_token,
)
from .memory import gathers_anew
from .offload import copy_seconds, host_seconds
from .recurrent import chunks_in_turn
from .workload import FRAMEWORKS, Workload

SOFTMAX_BYTES = 52
"""Read and written for each logit by the loss, kernel by kernel: to fp32 (2 + 4), largest (4), less it (8), exponential
(8), sum (4), share (8); backward times the gradient (8), back to 16 bits (4 + 2)."""
LEAST_EXPOSED = 0.1
"""The share of gradient traffic that is never hidden: the last bucket starts when the backward pass has ended."""


TRANSFER_OF_TIME = 1.1
"""By so much intervals are widened on both sides for models that are up to three times smaller or larger than those
that were fitted, where they then cover about 90 %; once more for each further factor of three."""


class StepTerms(NamedTuple):
    """What the coefficients multiply, in seconds at the hardware's peak; layer terms are for one micro-batch."""

    work: Workload
    matmul: float
    attention: float
    elementwise: float
    tp_bytes: float
    ep_bytes: float
    head_matmul: float
    head_elementwise: float
    stage_layers: tuple[int, ...]
    stage_heads: tuple[bool, ...]
    exchange_bytes: float
    gradient_bytes: float
    hidden_share: float
    """Of these, what may travel under a backward or forward pass."""
    optimizer: float
    """Gradient, master weight and state of each element read, and all but the gradient written."""
    orthogonal: float
    """Newton-Schulz iterations of Muon, of the stage that takes longest."""
    matrix_bytes: Mapping[str, float]
    """That a rank sends of matrices for them, by group."""
    sums: tuple[float, ...]
    """Of each stage: adding the gradients of a micro-batch to their sums."""
    node_bytes_per_s: float
    network_bytes_per_s: float
    tp_calls: int
    node_latency_seconds: float
    network_latency_seconds: float
    of_stages: tuple[StepTerms, ...] = ()
    """Where stages recompute different things, the terms of a layer of each."""


class _LayerTime(NamedTuple):
    """One layer and micro-batch in seconds; `whole` is the larger of all its parts and of its launches."""

    work: float
    attention: float
    tensor: float
    context: float
    hidden_context: float
    expert: float
    whole: float
    copies: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Low, likely and high seconds that it waits for copies of activations to the host and back, beside `whole`."""

    @property
    def busy(self) -> float:
        return self.work + self.attention + self.tensor + self.context + self.expert


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's parts in seconds. `stages` are the busy seconds of each stage for one micro-batch.

    What `hidden_context` and `hidden_gradients` take runs behind computation: it is no part of the step.
    """

    compute: float
    launch: float
    tensor: float
    context: float
    expert: float
    bubble: float
    exchange: float
    gradients: float
    optimizer: float
    stages: tuple[float, ...]
    hidden_context: float = 0.0
    hidden_gradients: float = 0.0
    host: float = 0.0
    """Copies to the host and back, and the optimizer there; `optimizer` is 0 then."""
    activations: float = 0.0
    """Copies of activations to the host and back that nothing hides."""
    activation_interval: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """The whole step: the sum of `parts`, in their order."""
        waits = self.compute + self.launch + self.tensor + self.context + self.expert + self.bubble
        return waits + self.exchange + self.gradients + self.optimizer + self.host + self.activations

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by component."""
        return {
            "computation": self.compute,
            "kernel launches": self.launch,
            "tp, exposed": self.tensor,
            "cp, exposed": self.context,
            "ep, exposed": self.expert,
            "pipeline bubble and imbalance": self.bubble,
            "stage exchange": self.exchange,
            "gradients, exposed": self.gradients,
            "optimizer": self.optimizer,
            **({"optimizer on the host": self.host} if self.host else {}),
            **({"activations to the host, exposed": self.activations} if self.activations else {}),
        }


@dataclass(frozen=True, slots=True)
class Timing:
    """A predicted step with its interval and what follows from it. `utilisation` is by `flops.CONVENTION`."""

    step: StepTime
    interval_seconds: tuple[float, float]
    tokens_per_second_per_gpu: float
    utilisation: float
    fitted_sizes: tuple[int, int] | None = None
    """Parameters of the smallest and of the largest model that the coefficients were fitted to, where they say it."""


def step_terms(work: Workload) -> StepTerms:
    """The terms of a layout.

    Raises:
        ValueError: the layout cannot be cut, or the accelerator is unknown.
    """
    if isinstance(work.recompute, str):
        return _uniform_terms(work)
    found = {word: _uniform_terms(replace(work, recompute=word)) for word in set(work.recompute)}
    of_stages = tuple(found[word] for word in work.recompute)
    return of_stages[0]._replace(work=work, of_stages=of_stages)


def _uniform_terms(work: Workload) -> StepTerms:
    """The terms of a layout whose stages all recompute the same."""
    machine = work.machine
    peak = machine.matmul_flops_per_s(work.element_bytes)
    # The busiest rank of ep is what the others wait for.
    shape, tokens, stages = work.busiest_shape, work.local_tokens, work.stages
    framework = FRAMEWORKS[work.framework]
    again = 4 / 3 if work.recomputes_layers else 1.0
    attention_again = 4 / 3 if framework.recomputes_attention(str(work.recompute)) else 1.0
    moe = shape.moe is not None
    kept = layer_bytes(
        shape, tp=work.tp, sequence_parallel=work.sequence_parallel, element_bytes=work.element_bytes, moe=moe
    )
    sparse, per_token = _sparse_share(shape), _layer_parameters(shape)
    # Each tile is computed again in backward: in place of the recomputation of its layer, unless that needs it too.
    tiled = len(dense_mlps(shape)) / shape.num_hidden_layers if work.mlp_tiles > 1 else 0.0
    of_attention = 1.0 if ATTENTION in work.parts_again else 0.0
    of_mlp = 1 - tiled if MLP in work.parts_again else 0.0
    alone = _parameters_of_parts(shape, of_attention, of_mlp)
    flops = 6 * (per_token * again + alone / 3) * tokens
    more = tiled * (1.0 if needs_mlp_output(shape) or not work.recomputes_layers else 0.0)
    flops += 2 * more * (3 if shape.mlp.gated else 2) * shape.hidden_size * shape.intermediate_size * tokens
    attending = len(shape.attention_layers) / shape.num_hidden_layers
    attention = 3 * attending * attention_flops_per_token(shape, work.attended_length) * tokens * attention_again
    attention *= _plain_factor(work)
    # transformers' recurrence is computed again with its layer.
    for one in shape.parts:
        share = one.share(shape.num_hidden_layers)
        attention += 3 * share * one.flops_per_token(carried=work.cp > 1) * tokens * again
    # Every tp rank computes all of it, forward only.
    attention += work.tp * forward_flops_per_token(shape, work.sequence_length) * tokens
    passed = again * _passed(shape, kept) + (more + of_mlp) / 3 * kept.mlp
    passed += (of_attention * kept.attention + (NORMS in work.parts_again) * kept.stream) / 3
    if framework.stores_scores:
        passed += attention_again * score_bytes(shape, tp=work.tp, sequence_length=work.sequence_length)
    activation = tokens * shape.hidden_size * work.element_bytes
    collectives = 6 if work.recomputes_layers else 4
    crossings = collectives * shape.blocks_per_layer // 2 + of_attention + of_mlp
    if shape.stack.shared_blocks is not None:
        # An MLP, and an attention that takes more features in than it gives: the mean of all layers.
        inside = 1 + (1 + shape.attention_inputs / shape.hidden_size) / 2
        crossings += round(inside * collectives / 2 * attending)
    logits = work.head_columns * tokens
    share = (work.shards - 1) / work.shards
    numels = [numel for numel, _ in work.stage_numels]
    numel, dealt = max(work.stage_numels)
    dense, expert_shards = numel - dealt, work.expert_shards
    # An all-reduce sends twice what a reduce-scatter does; DeepSpeed has it at stages 1 and 2 too.
    whole = work.zero_stage == 0 or (work.framework == "deepspeed" and work.zero_stage <= 2)
    reduced = work.gradient_reductions * work.message_bytes * (1 + whole)
    gathers = float(work.element_bytes * work.micro_batches if work.zero_stage >= 3 else 0)
    if work.shards_weights:  # for forward and backward; none behind the optimizer
        reread = 1.0 if work.recomputes_layers else alone / per_token
        gathers *= 2 + reread * gathers_anew(work, work.stages[0])
    elif work.zero_stage:
        gathers += work.element_bytes
    routed = shape.routed(range(shape.num_hidden_layers)) / shape.num_hidden_layers if shape.stack.blocks else sparse
    rows = (
        (collectives + 2 * of_mlp) * routed * (shape.moe.computed_per_token if shape.moe else 0) * activation / work.tp
    )
    # An all-gather more is half of a block's exchange.
    regathered = work.blocks_gathered_again / 2
    tp_bytes = (crossings + more + regathered) * 2 * (work.tp - 1) / work.tp
    tp_bytes *= work.split_tokens * shape.hidden_size * work.element_bytes
    calls = crossings - tiled * collectives / 2 + (tiled * collectives / 2 + more) * work.mlp_tiles
    tp_calls = round((calls + regathered) * (2 if work.sequence_parallel else 1))
    if work.ep > 1 and work.expert_slices > 1:
        # Ranks with slices of the same experts gather the rows that came for these, and scatter the results.
        tp_bytes += (work.expert_slices - 1) * rows
        tp_calls += collectives + round(2 * of_mlp)
    orthogonal, longest = 0.0, stages[0]
    if work.muon:
        orthogonal, longest = max(((matrix_flops(work, one), one) for one in stages), key=lambda one: one[0])
    return StepTerms(
        work=work,
        matmul=flops / work.tp / peak,
        attention=attention / work.tp / peak,
        elementwise=3 * tokens * passed / machine.memory_bytes_per_s,
        tp_bytes=tp_bytes,
        ep_bytes=rows * (work.ep - 1) / work.ep,
        head_matmul=6 * logits * shape.hidden_size / peak,
        head_elementwise=SOFTMAX_BYTES * logits / machine.memory_bytes_per_s,
        stage_layers=tuple(len(stage.layers) for stage in stages),
        stage_heads=tuple(stage.has_head for stage in stages),
        exchange_bytes=hidden_bytes(work),
        gradient_bytes=(reduced + gathers) * (dense * share + dealt * (expert_shards - 1) / expert_shards),
        hidden_share=reduced / (reduced + gathers) if work.framework == "deepspeed" else 1.0,
        optimizer=(3 * MASTER_BYTES + 2 * work.state_bytes)
        * (dense / work.shards + dealt / expert_shards if work.zero_stage else numel)
        / machine.memory_bytes_per_s,
        orthogonal=orthogonal / machine.matmul_flops_per_s(work.ns_bytes),
        matrix_bytes=matrix_bytes(work, longest) if orthogonal else {},
        sums=tuple((work.element_bytes + 2 * work.gradient_bytes) * one / machine.memory_bytes_per_s for one in numels),
        node_bytes_per_s=machine.node_link.bytes_per_s,
        network_bytes_per_s=machine.network_link.bytes_per_s,
        tp_calls=tp_calls,
        node_latency_seconds=machine.node_link.latency_seconds,
        network_latency_seconds=machine.network_link.latency_seconds,
    )


def _plain_factor(work: Workload) -> float:
    if work.accelerator == "cpu":
        return 1.0
    from .attention_kernels import attention_factor  # only here: a check of a spec for CPUs does not need it

    return attention_factor(work)


def plain_slowdown(work: Workload) -> float:
    """How much longer a step takes than it would with a fused kernel in every layer that attends."""
    terms, values, factor = step_terms(work), time_values(work), _plain_factor(work)

    def fused(one: StepTerms) -> StepTerms:
        return one._replace(attention=one.attention / factor, of_stages=tuple(map(fused, one.of_stages)))

    return step_time(terms, values).seconds / step_time(fused(terms), values).seconds


def _sparse_share(shape: ModelShape) -> float:
    """Of the layers, those with experts where dense ones stand between them."""
    mixed = shape.moe is not None and shape.moe.layers is not None and shape.stack.blocks is None
    return shape.routed(range(shape.num_hidden_layers)) / shape.num_hidden_layers if mixed else 1.0


def _layer_parameters(shape: ModelShape) -> float:
    """The parameters of a layer that multiply each token; of dense layers and those with experts the mean."""
    sparse = _sparse_share(shape)
    found = sparse * mixed_matmul_parameters(shape, moe=shape.moe is not None)
    return found + (1 - sparse) * mixed_matmul_parameters(shape) if sparse < 1 else found


def _parameters_of_parts(shape: ModelShape, of_attention: float, of_mlp: float) -> float:
    """Of these, those of attention and of the MLP, or the experts in its place, in so large a share of the layers."""
    projections = 3 if shape.mlp.gated else 2
    mlp = float(projections * shape.hidden_size * shape.intermediate_size)
    if shape.moe is not None:
        mlp += _sparse_share(shape) * (shape.moe.matmul_parameters(shape.hidden_size, projections) - mlp)
    return of_attention * (_layer_parameters(shape) - mlp) + of_mlp * mlp


def forward_share(work: Workload) -> float:
    """The share of a pass that is forward: a third, and less where backward computes again."""
    if not isinstance(work.recompute, str) or not (work.recomputes_layers or work.parts_again):
        return 1 / 3
    parts, shape = work.parts_again, work.shape
    again = _parameters_of_parts(shape, ATTENTION in parts, MLP in parts) / _layer_parameters(shape) if parts else 1.0
    return 1 / (3 + again)


def _passed(shape: ModelShape, kept: LayerBytes) -> float:
    """Bytes of a token that the kernels of a layer pass on; of layers that are one block each, the mean."""
    if shape.stack.blocks is None:
        return kept.total - kept.gathered
    attending = len(shape.attention_layers) / shape.num_hidden_layers
    wide = (len(shape.stack.blocks.mlp) + len(shape.stack.blocks.experts)) / shape.num_hidden_layers
    return kept.stream + attending * kept.attention + wide * kept.mlp


def bandwidth(terms: StepTerms, stride: int, ranks: int, values: Mapping[str, float]) -> float:
    """Bytes per second that a rank of a collective reaches; a group uses the network ports of all its ranks on a node.

    Never more than the hardware has: the node link, and the ports together.
    """
    per_node, inside = terms.work.gpus_per_node, terms.node_bytes_per_s * values["node_link"]
    if stride * ranks <= per_node:
        return inside
    ports = max(1, per_node // stride)
    nodes = stride * ranks / per_node
    speed = terms.network_bytes_per_s * values["network_link"] * ports ** values["network_ports"]
    return min(inside, float(speed / max(nodes / 2, 1.0) ** values["network_scale"]))


def step_time(
    terms: StepTerms, values: Mapping[str, float], shared: ContextCost | None = None, work: Workload | None = None
) -> StepTime:
    """The step by its parts; `shared` is what context parallelism costs, where that is known already.

    `work` is another execution of the layout that `terms` are of: its order of axes, its context parallelism.
    """
    work = work or terms.work
    if terms.of_stages:
        known = {one.work.recompute: one for one in terms.of_stages}
        by_word = {word: _layer_time(one, replace(work, recompute=word), values, None) for word, one in known.items()}
        of_stages = tuple(by_word[one.work.recompute] for one in terms.of_stages)
    else:
        of_stages = (_layer_time(terms, work, values, shared),) * len(terms.stage_layers)
    narrow = _narrow(work, values)
    head = terms.head_matmul * narrow + terms.head_elementwise
    stages = tuple(
        count * (layer.whole + layer.copies[1]) + has_head * head + sums
        for layer, count, has_head, sums in zip(
            of_stages, terms.stage_layers, terms.stage_heads, terms.sums, strict=True
        )
    )
    slowest = max(stages)
    index = stages.index(slowest)
    layer, layers = of_stages[index], terms.stage_layers[index]
    # A forward pass before the step is a third of a pass, and a fourth where layers are computed twice.
    ahead = forward_share(work) if work.counts_ahead else 0.0
    passes = work.micro_batches * (1 + ahead)
    bubble = (sum(stages) - slowest) / work.virtual_stages * (1 + ahead)
    exchange = 0.0
    if work.pp > 1:
        far = work.nodes > 1 and work.stride(Axis.PP) * work.pp > work.gpus_per_node
        speed = (
            terms.network_bytes_per_s * values["network_link"] if far else terms.node_bytes_per_s * values["node_link"]
        )
        send = terms.exchange_bytes / speed + values["send_seconds"]
        exchange = _exposed_sends(work, send, slowest)
    gradients, hidden = _gradients(terms, work, values, slowest)
    return StepTime(
        compute=passes
        * (layers * (layer.work + layer.attention) + terms.stage_heads[index] * head + terms.sums[index]),
        launch=passes * layers * (layer.whole - layer.busy),
        tensor=passes * layers * layer.tensor,
        context=passes * layers * layer.context,
        expert=passes * layers * layer.expert,
        bubble=bubble,
        exchange=exchange,
        gradients=gradients,
        optimizer=0.0 if work.on_host else terms.optimizer + _orthogonalising(terms, work, values),
        stages=stages,
        host=host[1] if (host := host_seconds(terms.work)) else 0.0,
        activations=passes * layers * layer.copies[1],
        activation_interval=(passes * layers * layer.copies[0], passes * layers * layer.copies[2]),
        hidden_context=passes * layers * layer.hidden_context,
        hidden_gradients=hidden,
    )


def _narrow(work: Workload, values: Mapping[str, float]) -> float:
    """By how much matrix products take longer than at the peak: with narrow slices of weights, and with few rows."""
    narrow = (1 + values["narrow"] * work.tp / work.shape.hidden_size) / values["matmul"]
    return narrow * (1 + values["few_rows"] / work.split_tokens)


def _layer_time(
    terms: StepTerms, work: Workload, values: Mapping[str, float], shared: ContextCost | None
) -> _LayerTime:
    work_layer = terms.matmul * _narrow(work, values) + values["elementwise"] * terms.elementwise
    attention = terms.attention / values["attention"]
    tensor = 0.0
    if work.tp > 1:
        tensor = terms.tp_bytes / bandwidth(terms, work.stride(Axis.TP), work.tp, values)
        far = work.stride(Axis.TP) * work.tp > work.gpus_per_node
        tensor += terms.tp_calls * (terms.network_latency_seconds if far else terms.node_latency_seconds)
    shared = shared or context_cost(work, work.context, values)
    attending = len(work.shape.attention_layers) / work.shape.num_hidden_layers
    context = attending * shared.seconds + state_seconds(work, values) + window_seconds(work, values)
    expert = terms.ep_bytes / bandwidth(terms, work.expert_stride(Axis.EP), work.ep, values) if work.ep > 1 else 0.0
    whole = max(work_layer + attention + tensor + context + expert, _launch(work, values))
    found = _LayerTime(work_layer, attention, tensor, context, attending * shared.hidden, expert, whole)
    return found._replace(copies=copy_seconds(work, whole)) if work.moves_activations else found


def _exposed_sends(work: Workload, send: float, slowest: float) -> float:
    """Seconds that passes wait for hidden states and their gradients, which take `send` each.

    Each of a stage's passes sends once in both directions for every chunk. Where sends overlap, the next pass hides all
    that it takes as long as; nothing hides those that fill and drain the pipeline.
    """
    steady, fill = work.micro_batches * 2 * work.virtual_stages, (work.pp - 1) * 2 * work.virtual_stages
    framework = FRAMEWORKS[work.framework]
    overlaps = framework.overlaps_exchange and (framework.name == "deepspeed" or work.virtual_stages > 1)
    if not overlaps:
        return (steady + fill) * send
    # A forward pass is the shorter one: a third of both.
    return fill * send + steady * max(0.0, send - slowest / work.virtual_stages / 3)


_LAUNCHES = {ATTENTION: 0.4, MLP: 0.15, NORMS: 0.45}
"""The parts' shares of the launches that a Llama layer makes in forward, by its operations: 14, 5 and 16."""


def layers_by_state(shape: ModelShape) -> tuple[int, int]:
    """How many layers carry a state, and how many attend or carry none."""
    carrying = {layer for one in shape.parts if one.states for layer in one.layers}
    others = set(range(shape.num_hidden_layers)) - carrying | set(shape.attention_layers)
    return len(carrying), len(others)


def layer_launches(shape: ModelShape, counted: Mapping[str, Sequence[float]], chunks: int) -> list[float]:
    """Launches of a layer, the mean, where some carry a state: for each column of what was counted.

    Args:
        shape: of the model.
        counted: "states" of a layer that carries a state, beside "chunk" of each chunk; "others" of another layer.
        chunks: what a layer's recurrence takes one after the other.
    """
    carrying, others = layers_by_state(shape)
    columns = zip(counted["states"], counted["chunk"], counted["others"], strict=True)
    return [
        (carrying * (state + chunks * chunk) + others * other) / shape.num_hidden_layers
        for state, chunk, other in columns
    ]


def _relative_launches(work: Workload) -> float:
    """Launches of a layer over those of one of Llama; of a type that was not counted, as many as Llama's."""
    known = shipped("parcompile.cost", "launches.json")
    counted = known.get(work.shape.model_type, known["others"])
    if isinstance(counted, dict):
        counted = layer_launches(work.shape, counted, chunks_in_turn(work))
    once, twice = counted
    again = 1.0 if work.recomputes_layers else sum(_LAUNCHES[part] for part in work.parts_again)
    return float(once + again * (twice - once))


def _launch(work: Workload, values: Mapping[str, float]) -> float:
    seconds = values["launch_seconds"]
    if work.framework == "deepspeed":
        seconds *= _relative_launches(work)
    far = work.nodes > 1 and work.stride(Axis.PP) * work.pp > work.gpus_per_node
    if work.framework == "nanotron" and work.pp > 1 and far:
        seconds += values["launch_tp_pp_seconds"] * (work.tp - 1)
    if work.tp > work.gpus_per_node:
        seconds += values["launch_tp_far_seconds"] * work.tp
    return seconds


def _gradients(terms: StepTerms, work: Workload, values: Mapping[str, float], slowest: float) -> tuple[float, float]:
    """Seconds of the gradients' traffic that a step waits for, and those that run behind the backward pass."""
    if work.shards == 1:
        return 0.0, 0.0
    stride = min(work.stride(axis) for axis in (Axis.DP, Axis.CP) if work.size(axis) > 1)
    seconds = terms.gradient_bytes / bandwidth(terms, stride, work.shards, values)
    overlapping = work.overlaps_gradients
    # Otherwise DeepSpeed's engine reduces when the last backward pass is over.
    if (work.zero_stage == 0 and work.framework != "deepspeed") or overlapping:
        # Reduced during a backward pass, which is two thirds of a micro-batch; gathered in the first forward pass, but
        # by DeepSpeed behind the optimizer.
        deepspeed = work.framework == "deepspeed"
        share = 2 / 3 if work.zero_stage == 0 or deepspeed else 1.0
        most = (work.gradient_reductions if deepspeed else 1.0) if overlapping else values["overlap"]
        hidden = min(terms.hidden_share * seconds - LEAST_EXPOSED * seconds, most * slowest * share)
        return seconds - hidden, hidden
    return seconds, 0.0


def _orthogonalising(terms: StepTerms, work: Workload, values: Mapping[str, float]) -> float:
    """Seconds in which matrices go to their owners, are orthogonalised and come back: nothing hides them."""
    seconds = terms.orthogonal / values["matmul"]
    for group, size in terms.matrix_bytes.items():
        if group == Axis.TP:
            seconds += size / bandwidth(terms, work.stride(Axis.TP), work.tp, values)
        else:
            stride = min(work.stride(axis) for axis in (Axis.DP, Axis.CP) if work.size(axis) > 1)
            seconds += size / bandwidth(terms, stride, work.shards, values)
    return seconds


def step_seconds(terms: StepTerms, values: Mapping[str, float]) -> float:
    """The whole step: what a fit compares with a measurement."""
    return step_time(terms, values).seconds


def timing(work: Workload, fit: Fit | None = None) -> Timing:
    """The predicted step of a layout.

    Raises:
        ValueError: the layout cannot be cut, or the accelerator is unknown.
    """
    return timing_of(work, step_time(step_terms(work), values_of(work, fit)), fit)


def _clear_seconds(
    work: Workload, step: StepTime, terms: StepTerms | None = None, shared: ContextCost | None = None
) -> float:
    """The step on a network that more nodes do not slow down: how far they do is known of one cluster only."""
    if work.nodes <= 2 or work.framework == "nanotron":
        return step.seconds
    values = {**values_of(work), "network_scale": 0.0}
    return min(step.seconds, step_time(terms or step_terms(work), values, shared, work).seconds)


def values_of(work: Workload, fit: Fit | None = None) -> Mapping[str, float]:
    """The coefficients of time: one's own were fitted to this machine's rates, those of the package to peaks."""
    return fit.values if fit else time_values(work)


def timing_of(
    work: Workload,
    step: StepTime,
    fit: Fit | None = None,
    terms: StepTerms | None = None,
    shared: ContextCost | None = None,
) -> Timing:
    """What follows from a predicted step; `terms` and `shared` are what it came from, where they are at hand."""
    fitted = fit or default_time(work.accelerator)
    low, _, high = fitted.spread["all"]
    farther = TRANSFER_OF_TIME ** max(0.0, fitted.factors_beyond(parameter_table(work.shape).numel) - 1)
    clear = step.seconds if fit else _clear_seconds(work, step, terms, shared)
    rate = work.tokens_per_step / step.seconds / work.world_size
    least, _, most = host_seconds(work) or (0.0, 0.0, 0.0)
    (fast, slow), waits = step.activation_interval, step.host + step.activations
    return Timing(
        step=step,
        interval_seconds=(
            (clear - waits) * low / farther + least + fast,
            (step.seconds - waits) * high * farther + most + slow,
        ),
        tokens_per_second_per_gpu=rate,
        utilisation=utilisation(work, rate),
        fitted_sizes=fitted.sizes,
    )


def utilisation(work: Workload, rate: float) -> float:
    """MFU by `flops.CONVENTION` at so many tokens per second of a rank.

    It is that of the hardware's peak, which was not measured; nobody publishes it for a rank on a CPU.
    """
    machine = work.machine
    known = machine if machine.measured is None or work.accelerator == "cpu" else find_accelerator(work.accelerator)
    return rate * model_flops_per_token(work.shape, work.attended_length) / known.matmul_flops_per_s(work.element_bytes)

"""What a rank of each stage sends in a step, message by message, in its stage and to other stages.

Ring collectives: of n bytes over N ranks an all-reduce sends 2 (N − 1) / N · n, an all-gather or reduce-scatter half of
that. Symbols: A the bytes of one activation [b, S/c, h], with sequence parallelism continued to a multiple of t, T its
tokens, L the layers of the stage.

| group | forward | backward |
|---|---|---|
| tp | all-reduce of A behind attention, MLP and embedding | the same in front of attention, MLP and head |
| tp, sequence parallel | reduce-scatter in their place, all-gather in front | the two exchanged |
| tp | all-gather of three fp32 numbers for each token (loss) | all-reduce of gradients that each rank has in part |
| kv-replica | – | all-reduce of the gradients of replicated kv heads |
| cp | what each implementation exchanges in a layer: `context` | |
| cp | tokens of windows, and the keys that stand for them: `window_keys` | |
| ep | all-to-all of the rows of tokens on their way to their experts, of as many back, and of how many they are | two |
| tp, with ep | all-gather of the rows that came over ep, reduce-scatter of their results, each as an all-to-all | two |
| dp-cp | – | once a step: all-reduce of gradients, all-gather of weights |
| expert-dp | – | the same, of experts that are dealt over ep |

What each tp rank has in part is summed once a step where ZeRO-1 keeps gradients, else in every micro-batch.
DeepSpeed's ZeRO-1 reduces gradients with all-reduce, twice the bytes of a reduce-scatter, in the type of the weights;
with cp in fp32 (`seq_parallel_communication_data_type`). Full recomputation repeats the forward of tp and ep, not the
ring's: attention is kept. Rows on their way to experts are counted as if each were chosen equally often. Loss, overflow
and norm add messages of a few bytes, which are left out.

Sources: arXiv 1909.08053, section 3; arXiv 2205.05198, section 4; arXiv 2310.01889; DeepSpeed 0.19.8,
runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py. `tests/runtime/test_preflight.py` compares with live ranks.

What a rank of each stage sends to other stages in a step, as the runtime's schedule has it: exact.

| group | message | times |
|---|---|---|
| pp | hidden states [b, S/c, h], all streams; with sequence parallelism a share; to the next | micro-batches · chunks |
| pp | their gradients to the stage before | the same |
| pp | beside each of both, losses of routers so far, and sums of all experts where layers are one | the same |
| embedding | all-reduce of the gradient of a tied embedding, between the first and the last stage | once a step |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from parcompile.layout.groups import EMBEDDING, EXPERT_DP, KV_REPLICA, Axis
from parcompile.layout.pipeline import RECEIVES_AHEAD, Stage
from parcompile.layout.shards import (
    COUNT_BYTES,
    MASTER_BYTES,
    Owner,
    balanced_rows,
    newton_schulz_work,
    padded_numel,
    pieces,
    repeated_ranges,
    rounds,
    shared_tokens,
    takes_muon,
)
from parcompile.model import Parameter, within
from parcompile.model.blocks import Exchange
from parcompile.model.derived_rows import dense_mlps, parameter_table
from parcompile.model.families import family_of
from parcompile.model.family import Experts
from parcompile.model.layer_parts import ATTENTION, MLP, WEIGHTED_RESIDUALS, modules_of
from parcompile.model.shape import ModelShape
from parcompile.model.user_module import LAYER, UserModule

from .activations import BLOCKS
from .blocks import exchanges, gathered_over_cp, local, sent_over_cp, uses, window_exchanges
from .context_exchanges import context_exchanges
from .memory import gathered_numels, gathers_anew
from .parameters import trained_tensors
from .workload import FRAMEWORKS, RankPlace, Workload

# What a rank of each stage sends in a step, message by message, as the runtime and DeepSpeed's ZeRO-1 do it: exact.

LOSS_NUMBERS = 3
"""fp32 numbers of a token that the loss exchanges: the largest logit, the sum of exponentials, the label's logit."""


_BEHIND_MLP = {
    *("post_feedforward_layernorm", "post_mlp_layernorm", "post_feedforward_norm", "post_moe_norm"),
    *("post_norm2", "post_ffn_norm"),
}
"""Norms of what the MLP of a layer gives."""


def norms_mlp_output(shape: ModelShape) -> bool:
    """Whether a norm takes what the MLP of a layer gives."""
    return bool(_BEHIND_MLP.intersection(shape.norms.names))


CONTROL_BYTES = 16
"""Messages up to this size steer a run (overflow, norms, counts of tokens); estimates leave them out."""


class Sent(NamedTuple):
    """Messages of one kind in a step, and the bytes that one rank puts on the wire with them."""

    messages: int
    wire_bytes: float


Collectives = dict[tuple[str, str], Sent]
"""By group and kind."""
_Send = Callable[[str, str, float, float, int], None]


def collectives(
    work: Workload, stage: Stage, cp_rank: int | None = None, place: RankPlace | None = None
) -> Collectives:
    """Everything that a rank of `stage` sends in a step over tp, kv-replica, cp, ep, dp-cp and expert-dp.

    States of layers go from rank to rank, and so do tokens of windows: the ends of the chain send less. They
    are those of `cp_rank`, by default of the busiest. What a rank sends of matrices for Muon depends on its `place`, by
    default the first, which is an owner whenever one is.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    found: Collectives = {}
    work = work.of_stage(stage)

    def send(group: str, kind: str, messages: float, whole_bytes: float, ranks: int) -> None:
        """So many messages of so many bytes each, over so many ranks."""
        factor = (2.0 if kind == "all-reduce" else 1.0) * (ranks - 1) / ranks
        if not messages:
            return
        before = found.get((group, kind), Sent(0, 0.0))
        found[group, kind] = Sent(before.messages + int(messages), before.wire_bytes + messages * factor * whole_bytes)

    if work.tp > 1:
        _tensor(work, stage, send)
    untrained = 0 if work.shape.stack.runs is None else work.shape.stack.runs.untrained * work.micro_batches
    passes = work.shape.attending(stage.layers) * work.micro_batches - untrained
    for both, forward in zip(context_exchanges(work), context_exchanges(work, trained=False), strict=True):
        kind = "all-to-all" if both.operation.startswith("all-to-all") else "send"
        messages = passes * both.messages + untrained * forward.messages
        found[both.group, kind] = Sent(messages, passes * both.wire_bytes + untrained * forward.wire_bytes)
    messages, size = gathered_over_cp(work, stage.layers)
    if messages:
        found[Axis.CP, "all-gather"] = Sent(messages, size)
    messages, size = sent_over_cp(work, stage.layers, cp_rank)
    if messages:
        before = found.get((Axis.CP, "send"), Sent(0, 0.0))
        found[Axis.CP, "send"] = Sent(before.messages + messages, before.wire_bytes + size)
    for window in window_exchanges(work, stage.layers, cp_rank):
        found[Axis.CP, window.operation] = Sent(window.messages, window.wire_bytes)
    if work.router_scope or work.router_z_loss:
        _router_counts(work, stage, send)
    if work.ep > 1:
        found.update(_experts(work, stage))
    matrices = _matrix_messages(work, stage, place or RankPlace()) if work.muon else {}
    for group, (messages, size) in matrices.items():
        before = found.get((group, "all-to-all"), Sent(0, 0.0))
        found[group, "all-to-all"] = Sent(before.messages + messages, before.wire_bytes + size)
    if work.shards_weights:
        _shards_of_weights(work, stage, send)
        return found
    groups = work.parameter_groups(stage, work.stage_parameters(stage)).values()
    if work.shards > 1:
        _gradients(work, [others for _, others in groups], "dp-cp", work.shards, send)
    if work.expert_shards > 1:
        _gradients(work, [dealt for dealt, _ in groups if dealt], EXPERT_DP, work.expert_shards, send)
    return found


def _router_counts(work: Workload, stage: Stage, send: _Send) -> None:
    """How often each expert was chosen: of a micro-batch's sequences over cp, of a step over dp · cp.

    The passes that count the choices of a step before it trains are left out.
    """
    moe, scope = work.shape.moe, work.router_scope
    routers = 0 if moe is None else routed_layers(work.shape, stage) - moe.looked_up(stage.layers)
    if moe is None or not routers:
        return
    chunks = work.virtual_stages * work.micro_batches
    of_layer = float(_FP32_BYTES * moe.num_choices)
    if work.cp > 1 and (work.router_z_loss or scope in ("sequence", "micro_batch_per_layer")):
        send(Axis.CP, "all-reduce", chunks, of_layer * routers * work.micro_batch / work.virtual_stages, work.cp)
    if work.cp > 1 and scope == "micro_batch" and stage.has_head:
        send(Axis.CP, "all-reduce", work.micro_batches, of_layer, work.cp)
    if work.shards > 1 and scope == "global_batch" and work.micro_batches == 1:
        send("dp-cp", "all-reduce", chunks, of_layer * routers, work.shards)


def _experts(work: Workload, stage: Stage) -> Collectives:
    """Tensor-parallel ranks send a share of the tokens each, and gather the rows that come for their slices."""
    moe = work.shape.moe
    passes = routed_layers(work.shape, stage) * work.micro_batches
    if moe is None or not passes:
        return {}
    # What goes to experts that give back what they take stays.
    rows = int(sent_rows(work, moe.num_experts_per_token) * moe.num_experts / moe.num_choices)
    row_bytes = work.shape.expert_features * work.element_bytes
    again = 2 if work.recomputes(MLP) else 1
    # The numbers of rows, which are known where experts have a capacity.
    counted = again if work.capacity_rows is None else 0
    counts = COUNT_BYTES * moe.num_experts * work.expert_slices * (work.ep - 1) / work.ep
    there_and_back = 2 * again + 2
    travelling = (work.ep - 1) * balanced_rows(rows, work.ep) * row_bytes
    size = passes * (there_and_back * travelling + counted * counts)
    found = {(Axis.EP.value, "all-to-all"): Sent(passes * (there_and_back + counted), size)}
    if work.expert_slices > 1:
        gathered = passes * there_and_back * (work.expert_slices - 1) * rows * row_bytes
        found[Axis.TP, "all-to-all"] = Sent(passes * there_and_back, gathered)
    return found


def sent_rows(work: Workload, choices: int) -> int:
    """Rows that the rank with most tokens sends in a layer of experts; each token has so many choices."""
    if work.shape.moe is not None and (rows := work.capacity_rows) is not None:
        return rows * work.shape.moe.num_experts
    start, stop = shared_tokens(work.local_tokens, work.tp, 0)
    return (stop - start) * choices


def _tensor(work: Workload, stage: Stage, send: _Send) -> None:
    tp, times, layers = work.tp, work.micro_batches, len(stage.layers)
    activation = work.split_tokens * work.shape.hidden_size * work.element_bytes
    experts = family_of(work.shape.model_type).experts
    # An MLP beside a mixture of experts takes the hidden states in by itself, and stands behind it.
    routed = routed_layers(work.shape, stage)
    beside = routed if experts is not None and experts.adds_mlp else 0
    # A shared block adds an attention, which takes more features in than it gives, and an MLP.
    wide, runs = uses(work.shape, stage.layers), 2 if work.recomputes_layers else 1
    entered = work.split_tokens * work.shape.attention_inputs * work.element_bytes
    blocks = work.shape.blocks_per_layer * layers + beside + wide
    forward = blocks + wide + stage.has_embedding
    # What gradients do not pass is neither computed again nor left backward.
    passed = blocks - (
        0 if work.shape.stack.runs is None else work.shape.blocks_per_layer * work.shape.stack.runs.untrained
    )
    again = passed + wide if work.recomputes_layers else 0
    backward = passed + stage.has_head
    tiles, tiled = work.mlp_tiles, len(within(dense_mlps(work.shape), stage.layers)) if work.mlp_tiles > 1 else 0
    # A tiled MLP is never computed again on its own.
    again += layers * (ATTENTION in work.parts_again) + (layers - tiled) * (MLP in work.parts_again)
    for operation in ("all-gather", "reduce-scatter") if work.sequence_parallel else ("all-reduce",):
        # Each tile is computed again in backward, in place of the recomputation of its layer unless that needs it.
        passes = 4 if work.recomputes_layers and needs_mlp_output(work.shape) else 3
        send(Axis.TP, operation, tiles * tiled * passes * times, activation / tiles, tp)
        send(Axis.TP, operation, -tiled * (1 + runs) * times, activation, tp)
    # Nothing behind the sum of the experts' outputs is needed again, so that recomputation stops before it. A norm is,
    # and so is what a mixture of streams multiplies it by: where these are computed again too.
    normed = experts is not None and experts.is_normed
    behind = work.recomputes_layers and (norms_mlp_output(work.shape) or work.shape.residual.streams)
    unrepeated = routed - beside if work.recomputes(MLP) and not normed and not behind else 0
    if work.sequence_parallel:
        # Entering and leaving a region: gathered and reduced in forward, the other way round in backward.
        both = 2 * passed + (blocks - passed) + wide + stage.has_embedding + again
        kept_no_longer = layers * work.gathers_again(ATTENTION)
        if work.gathers_again(MLP):
            kept_no_longer += len(within(dense_mlps(work.shape), stage.layers))
        send(Axis.TP, "all-gather", (both - wide * (runs - 1) + kept_no_longer) * times, activation, tp)
        send(Axis.TP, "reduce-scatter", (both - unrepeated) * times, activation, tp)
        send(Axis.TP, "all-gather", wide * runs * times, entered, tp)
        send(Axis.TP, "reduce-scatter", wide * times, entered, tp)
        # The head does not keep its gathered input, but gathers it again in backward; in chunks it needs it once.
        chunks = work.loss_chunks if stage.has_head else 0
        send(Axis.TP, "all-gather", chunks * times * (1 if work.linear_loss else 2), activation / max(1, chunks), tp)
        send(Axis.TP, "reduce-scatter", chunks * times, activation / max(1, chunks), tp)
    else:
        send(Axis.TP, "all-reduce", (forward + again - unrepeated + backward) * times, activation, tp)
        send(Axis.TP, "all-reduce", wide * times, entered, tp)
    if work.shape.layer_inputs is not None and stage.has_embedding:
        # The rows of a second embedding, whose table is cut by vocabulary as the first one's.
        rows = work.shape.num_hidden_layers * work.shape.layer_inputs.width * work.split_tokens * work.element_bytes
        for operation in ("reduce-scatter", "all-gather") if work.sequence_parallel else ("all-reduce",):
            send(Axis.TP, operation, times, rows, tp)
    for one, passes in (*_of_experts(work, experts, routed * times), *exchanges(work, stage.layers, Axis.TP)):
        if one.kind:
            send(Axis.TP, one.kind, passes * (2 if work.recomputes(MLP) else 1), one.size, tp)
        if one.back:
            send(Axis.TP, one.back, passes, one.size, tp)
    if work.shape.user_module is not None:
        _user_module_columns(work, work.shape.user_module, layers * times, activation, send)
    if stage.has_head:
        chunks, tokens = work.loss_chunks, work.split_tokens if work.linear_loss else work.local_tokens
        send(Axis.TP, "all-gather", chunks * times, tp * LOSS_NUMBERS * 4 * tokens / chunks, tp)
    partial = 0.0
    for parameter in parameter_table(work.shape):
        count = held_count(parameter, work, stage)
        layout = work.layout(parameter)
        size = layout.local_numel * work.element_bytes
        if parameter.expert_dim is not None and work.ep > 1 and work.expert_slices == 1:
            continue  # ranks of tp hold other experts, and the gradient of theirs is whole
        if parameter.partial or (work.sequence_parallel and parameter.sequence_parallel):
            if work.sums_partial_gradients_once:
                partial += count * layout.local_numel * work.gradient_bytes
            elif size > CONTROL_BYTES:
                send(Axis.TP, "all-reduce", count * times, size, tp)
        elif layout.ranges is not None and layout.replicas > 1:
            assert layout.dim is not None
            repeated = sum(stop - start for start, stop in repeated_ranges(parameter, layout))
            share = repeated * size // layout.local_shape[layout.dim]
            # Keys of a head that a few ranks share; what all heads of a Mamba-2 layer share, every rank has.
            over = KV_REPLICA if work.shape.attends and layout.replicas == work.shape.kv_replicas(tp) else Axis.TP
            send(over, "all-reduce", count * times, share, layout.replicas)
    if partial:
        send(Axis.TP, "all-reduce", 1, partial, tp)
    # A norm over the features of all ranks sums its squares, and their gradient.
    split = [one for one in parameter_table(work.shape).layer if one.split is not None and _sums(one, work.shape)]
    sums = sum(held_count(one, work, stage) for one in split) * times * (3 if work.recomputes(ATTENTION) else 2)
    send(Axis.TP, "all-reduce", sums, 4 * work.local_tokens, tp)


def needs_mlp_output(shape: ModelShape) -> bool:
    """Whether backward needs what a dense MLP gives: something behind it does more than add it."""
    behind = norms_mlp_output(shape) or shape.residual.streams or shape.layer_inputs is not None
    return bool(behind) or shape.model_type in WEIGHTED_RESIDUALS or bool(shape.norms.gate)


def _of_experts(work: Workload, experts: Experts | None, passes: int) -> Iterator[tuple[Exchange, int]]:
    """What routers and experts send over tp, and how often in a step, forward."""
    moe = work.shape.moe
    if moe is None or experts is None:
        return
    rows = work.split_tokens * moe.num_experts_per_token
    if work.ep > 1:
        sliced = work.expert_slices > 1
        rows = sent_rows(work, moe.num_experts_per_token) * work.expert_slices if sliced else 0
    yield from ((one, passes) for one in experts.exchanges(moe, local(work), rows))


def _sums(parameter: Parameter, shape: ModelShape) -> bool:
    own = parameter.name.partition(".{layer}.")[2]
    is_norm = len(parameter.shape) == 1 and own.endswith("norm.weight")
    return is_norm and not any(one.sums_norm(own) for one in shape.parts)


def _user_module_columns(work: Workload, module: UserModule, passes: int, activation: float, send: _Send) -> None:
    """What column-parallel linears in a layer of a user module send beyond one exchange for each block.

    Each further one sums its input's gradient by itself. With sequence parallelism attention gathers its input once,
    while those outside it gather theirs again in backward.
    """
    weights = [name for name, size in module.parameters if LAYER in name and len(size) == 2]
    columns = [name for name in weights if (rule := module.rule_of(name)) is not None and rule.kind == "column"]
    if work.sequence_parallel:
        outside = [name for name in columns if not name.startswith(tuple(f"{one}." for one in module.attentions))]
        send(Axis.TP, "all-gather", len(outside) * passes, activation, work.tp)
    else:
        send(Axis.TP, "all-reduce", max(0, len(columns) - BLOCKS) * passes, activation, work.tp)


def routed_layers(shape: ModelShape, stage: Stage) -> int:
    """Layers of a stage that have experts."""
    return shape.routed(stage.layers)


def held_count(parameter: Parameter, work: Workload, stage: Stage) -> int:
    """How many tensors of a row of the parameter table a stage holds."""
    if parameter.layers is not None:
        return len(within(parameter.layers, stage.layers))
    table = parameter_table(work.shape)
    if parameter in table.before:
        tied = work.shape.tie_word_embeddings and parameter == table.before[0]
        return int(stage.has_embedding or (tied and stage.has_head))
    return int(stage.has_head)


def _gradients(work: Workload, numels: Sequence[int], group: str, ranks: int, send: _Send) -> None:
    """Gradients and weights over the ranks that share the optimizer states of groups of so many parameters."""
    numel = sum(numels)
    if not numel:
        return
    width = work.message_bytes
    if work.zero_stage == 0:
        send(group, "all-reduce", 1, numel * width, ranks)
        return
    # DeepSpeed reduces whole buckets at stages 1 and 2, and from stage 2 on it does so behind every micro-batch.
    deepspeed = work.framework == "deepspeed"
    reduction = "all-reduce" if deepspeed and work.zero_stage <= 2 else "reduce-scatter"
    send(group, reduction, work.gradient_reductions, numel * width, ranks)
    gathers = 1 if work.zero_stage < 3 else 1 + work.micro_batches
    for one in numels:
        send(group, "all-gather", gathers, (padded_numel(one, ranks) if deepspeed else one) * work.element_bytes, ranks)


def _shards_of_weights(work: Workload, stage: Stage, send: _Send) -> None:
    """At ZeRO stage 3: weights around each module that uses them, small ones once in a step; gradients of each pass.

    They are gathered for forward and for backward, but for what stays in between; an embedding, which backward comes to
    last, does not. A head that is tied gathers it as well. Gradients go in the type of the messages.
    """
    table, tied = parameter_table(work.shape), work.shape.tie_word_embeddings
    _, others, _ = gathered_numels(work, stage)
    stays, anew = min(1.0, work.live_numel / others) if others else 0.0, gathers_anew(work, stage)
    # A tiled MLP stops where it would be computed again.
    parts = work.parts_again - ({MLP} if work.mlp_tiles > 1 and work.shape.moe is None else set())
    again = tuple(f"{name}." for part in parts for name in modules_of(work.shape, part))
    for parameter, count in trained_tensors(table, stage, tied=tied):
        layout = work.layout(parameter)
        group, ranks = (EXPERT_DP, work.expert_shards) if layout.ep > 1 else ("dp-cp", work.shards)
        if ranks == 1:
            continue
        numel = -(-layout.local_numel // ranks) * ranks
        name = parameter.name.partition(".{layer}.")[2]
        passes = 2 - (stays if parameter not in table.before or tied else 0.0)
        passes *= 2 if tied and parameter is table.before[0] else 1
        passes += anew and parameter.layers is not None and (work.recomputes_layers or name.startswith(again))
        gathers = 1.0 if layout.local_numel <= work.small_numel else work.micro_batches * passes
        send(group, "all-gather", count * gathers, numel * work.element_bytes, ranks)
        send(group, "reduce-scatter", count * work.micro_batches, numel * work.message_bytes, ranks)


# What Muon sends and takes at the end of a step: matrices on their way to their owners, and back.


class _Held(NamedTuple):
    """A matrix, or a stack of them, as a rank of tp has it, and as it is orthogonalised."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    is_cut: bool
    is_dealt: bool


def _matrix_messages(work: Workload, stage: Stage, place: RankPlace) -> dict[str, tuple[int, float]]:
    """Messages and bytes of a rank of a stage in a step, by group; see `runtime/optimizers.py`."""
    own = {"dp-cp": place.shard, EXPERT_DP: place.expert_shard}
    found: dict[str, tuple[int, float]] = {}

    def send(group: str, elements: int) -> None:
        messages, size = found.get(group, (0, 0.0))
        found[group] = messages + 1, size + MASTER_BYTES * elements

    for group, ranks, held, turns in _turns(work, stage):
        numels = [math.prod(one.shape) for one in held]
        parts = pieces(numels, ranks, of_each=work.shards_weights, whole=not work.zero_stage, only=[own[group]])
        sizes = [stop - start for ((start, stop),) in parts]
        for turn in turns:
            mine = [owner for owner in turn if owner.shard == own[group]]
            if ranks > 1 and work.zero_stage:
                send(group, sum(sizes[owner.matrix] for owner in turn if owner not in mine))
            if turn[0].tp is not None and mine:
                send(Axis.TP, sum(numels[owner.matrix] for owner in mine if owner.tp != place.tp))
                send(Axis.TP, sum((work.tp - 1) * numels[owner.matrix] for owner in mine if owner.tp == place.tp))
            if ranks > 1:
                back = (
                    (numels[one.matrix] - sizes[one.matrix]) if work.zero_stage else (ranks - 1) * numels[one.matrix]
                    for one in mine
                )
                send(group, sum(back))
    return found


def matrix_flops(work: Workload, stage: Stage) -> float:
    """Operations of orthogonalising Muon's matrices of a stage, of the ranks that others wait for: one in each turn."""
    return sum(
        max(newton_schulz_work(held[owner.matrix].whole, work.ns_steps) for owner in turn)
        for *_, held, turns in _turns(work, stage)
        for turn in turns
    )


def matrix_bytes(work: Workload, stage: Stage) -> dict[str, float]:
    """Bytes that the first rank of a stage sends of matrices in a step, by group."""
    return {group: size for group, (_, size) in _matrix_messages(work, stage, RankPlace()).items()}


def _turns(work: Workload, stage: Stage) -> Iterator[tuple[str, int, list[_Held], list[list[Owner]]]]:
    """By group of shards its ranks, the matrices in them, and who orthogonalises which in each turn."""
    every = list(_held(work, stage))
    for group, ranks in (("dp-cp", work.shards), (EXPERT_DP, work.expert_shards)):
        held = [one for one in every if one.is_dealt is (group == EXPERT_DP)]
        works = [newton_schulz_work(one.shape) for one in held]
        yield group, ranks, held, rounds(works, [one.is_cut for one in held], ranks, work.tp)


def _held(work: Workload, stage: Stage) -> Iterator[_Held]:
    """The matrices of a stage, in the order in which the model registers them."""
    table = parameter_table(work.shape)
    together = table.layers_per_module
    for first in range(0, table.num_layers, together):
        for parameter in table.layer:
            if not takes_muon(parameter):
                continue
            layout = work.layout(parameter)
            cut = layout.ranges is not None and len(layout.ranges) > 1
            whole = list(layout.local_shape)
            if cut and layout.dim is not None:
                whole[layout.dim] = layout.full_shape[layout.dim]
            for layer in within(parameter.layers, range(first, first + together)):
                if layer in stage.layers:
                    yield _Held(layout.local_shape, tuple(whole), cut, layout.ep > 1)


# What a rank of each stage sends to other stages in a step, as the runtime's schedule has it: exact.

_FP32_BYTES = 4


def _handed_router_bytes(work: Workload) -> int:
    """The loss so far, and of a loss over all layers what each expert was given and how often it was chosen."""
    if work.shape.moe is None or not (work.router_scope or work.router_z_loss):
        return 0
    return _FP32_BYTES * (1 + 2 * work.shape.moe.num_choices * (work.router_scope == "micro_batch"))


def stage_exchanges(work: Workload, stage: int) -> Collectives:
    """Everything that a rank of a pp rank sends to other stages in a step, by group and kind."""
    found: Collectives = {}
    if work.pp == 1:
        return found
    sends = sum(work.schedule.sends(stage))
    size = hidden_bytes(work)
    routers = _handed_router_bytes(work)
    messages = 1 + bool(routers) + (work.shape.layer_inputs is not None)
    found[Axis.PP, "send"] = Sent(sends * messages, float(sends * (size + routers)))
    if work.shape.tie_word_embeddings and stage in (0, work.pp - 1):
        found[EMBEDDING, "all-reduce"] = Sent(1, float(_embedding_gradient_bytes(work)))
    return found


def busiest_stage(work: Workload) -> int:
    """A stage that sends most: one between two others, where there is one."""
    return 1 if work.pp > 2 else 0


def buffer_bytes(work: Workload, stage: int) -> float:
    """Hidden states and gradients on their way, beside the activations that a stage keeps.

    A receive is posted ahead. Towards the next stage an output is under way and a gradient in use; towards the one
    before, a gradient is under way.
    """
    first, last = (stage == end and work.virtual_stages == 1 for end in (0, work.pp - 1))
    messages = RECEIVES_AHEAD + (0 if last else 2) + (0 if first else 1)
    return messages * hidden_bytes(work) if work.pp > 1 else 0.0


def hidden_bytes(work: Workload) -> float:
    """Hidden states of a micro-batch as one rank hands them on, with the layers' parts of a second embedding."""
    inputs = work.shape.layer_inputs
    further = 0 if inputs is None else work.shape.num_hidden_layers * inputs.width
    streams = work.shape.residual_streams * work.shape.hidden_size * stream_bytes(work)
    whole = work.split_tokens * (streams + further * work.element_bytes)
    return whole / (work.tp if work.sequence_parallel or FRAMEWORKS[work.framework].scatters_exchange else 1)


def stream_bytes(work: Workload) -> int:
    """Of a feature of the hidden states between the layers."""
    return max(work.element_bytes, _FP32_BYTES) if work.shape.residual.fp32 else work.element_bytes


def _embedding_gradient_bytes(work: Workload) -> int:
    """What one of two ranks sends to add up the gradients of both: all of its own."""
    numel = work.padded_vocabulary // work.tp * work.shape.hidden_size
    return numel * work.gradient_bytes

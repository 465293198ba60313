"""What layers and the two ends of a model take in a pass, beyond what they keep for each token."""

from __future__ import annotations

from dataclasses import replace

from parcompile.layout.pipeline import Stage
from parcompile.layout.sequence import CpImplementation
from parcompile.layout.shards import LOSS_CHUNK_ELEMENTS, MOST_PIECES, PIECE_BYTES, loss_chunk_tokens
from parcompile.model.blocks.experts import MoeShape
from parcompile.model.catalogue import SCALED_INPUTS, WEIGHTED_IN_TYPE
from parcompile.model.family import types_with
from parcompile.model.layer_parts import ATTENTION, MLP, NORMS, tiled_norms
from parcompile.model.shape import mean_over_layers

from . import kept
from .activations import BLOCKS, ROW_COPIES
from .blocks import MEANS, added_bytes, has_mixture, head_bytes, table_gradient_bytes
from .collectives import hidden_bytes, norms_mlp_output, routed_layers, stream_bytes
from .context_exchanges import SUM_BYTES, passes_of, runs_on_gpu, sizes_of
from .kept import LayerBytes
from .recurrent import chooses_keys
from .workload import Workload

# What the two ends of a forward take: the head with its loss, and the embedding.

FP32_LOGITS = types_with("fp32_logits")
"""Model types whose head gives logits in fp32, of which it lets go of those in the type of the weights."""


def router_bytes(work: Workload, stage: Stage) -> float:
    """What the losses of routers keep of a micro-batch for backward: its scores in fp32, and its logits for z_loss.

    Every rank of tp has them for all tokens.
    """
    losses = bool(work.router_scope) + work.router_z_loss
    choices = 0 if work.shape.moe is None else work.shape.moe.num_choices
    return 4.0 * losses * choices * work.local_tokens * routed_layers(work.shape, stage)


def ends_bytes(
    work: Workload,
    stage: Stage,
    logits: float,
    *,
    recomputed_layer: float,
    in_flight: float,
    absent: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> float:
    """What the two ends of a forward add in the runtime: the head's inputs, and the first gradients of backward.

    Logits with their gradient; what the head's backward holds (the gradients of logits, weight and input; under
    sequence parallelism the gathered input and its gradient, one of several or padded rows laid out anew, both in
    pieces and between CPUs); the gradients in front of the last norm (of an RMSNorm of transformers three in fp32, and
    two in the type of the weights where that is another; of one kernel what goes in and comes out); what is in flight
    in the last MLP, or with full recomputation a layer: these do not stand in memory together, the largest counts. The
    gradient of a tied head waits for that of the embedding. Logits and layers are counted elsewhere, so what is
    returned may be negative. What is `absent` of what is held, while the loss goes backward, behind it, and behind the
    head, goes off.
    """
    at_loss, behind, later = absent
    width, hidden = work.element_bytes, work.split_tokens * work.shape.hidden_size
    share = work.tp if work.sequence_parallel else 1
    weight = width * work.shape.hidden_size * work.head_columns
    waiting = waiting_gradient_bytes(work, stage)
    chunk = loss_chunk_bytes(work, logits)
    counted, loss = counted_logits(work, logits), 2 * _logit_bytes(work) * logits + chunk
    head = 0.0
    copied = 4 * (norm_bytes(work) > 0)
    normed = stage.has_head * hidden * (_of_last_norm(work) + 2 * width) / share
    if stage.has_head and work.linear_loss:
        # The gradients of weight and input wait for backward; there the weight's is cast while the other is there.
        of_weight = 4 * weight / width
        head = hidden / share * width + of_weight + max(chunk, weight if width < 4 else 0.0)
    elif stage.has_head:
        anew = (work.micro_batch > 1) + (work.split_tokens > work.local_tokens)
        anew = anew if runs_on_gpu(work) else 2
        inputs = hidden * (2 + anew + 1 / share) if share > 1 else hidden
        # What a cap multiplies is kept beside the logits.
        loss += _logit_bytes(work) * logits * work.shape.caps.logits
        head = max(loss, width * (logits + inputs) + weight)
    head = normed + max(head - at_loss, weight * stage.has_head - behind)
    mixture = mixture_in_flight(work, stage) + waiting - later
    if work.recomputes_layers:
        head = max(head, mixture) + head_bytes(work, stage)
        return max(recomputed_layer + waiting - later, head) - recomputed_layer - counted
    in_fp32 = (2 * width if width < 4 and not _is_centred(work) else 0) + 3 * 4
    first = hidden * (in_fp32 if computes_norms(work) else 2 * copied + 2 * width) / share
    return max(head, mixture, max((normed + first) * stage.has_head, in_flight) + waiting - later) - counted


def mixture_in_flight(work: Workload, stage: Stage) -> float:
    """What is in flight while the mixture behind the last layer goes backward: of all streams four tensors in fp32.

    A mixture of low rank has let go of what it projects.
    """
    if not has_mixture(work, stage):
        return 0.0
    copied = work.element_bytes < 4
    if work.shape.residual.mixture_rank:
        return _of_streams(work) * (14 if copied else 22)
    return _of_streams(work) * (16 + (0 if copied else 8 / work.shape.residual.streams))


def streams_in_flight(work: Workload) -> float:
    """What is in flight when a layer has added its result to residual streams, and all of the layer is there.

    These are the gradients of all streams and of what is summed up, in fp32 where no mixture takes steps, and that of
    the result; of a mixture of low rank the streams that it reads, and their gradient.
    """
    residual, width = work.shape.residual, work.element_bytes
    if not residual.streams or work.shape.model_type in MEANS:
        return 0.0
    hidden = _of_streams(work) / residual.streams
    if residual.mixture_rank:
        return 3 * width * _of_streams(work) + 2 * width * hidden
    if residual.square_mixtures:
        return 4 * width * _of_streams(work) + width * hidden
    return (3 * 4 + width * (width < 4)) * _of_streams(work) + 4 * hidden


def _of_streams(work: Workload) -> float:
    """Elements of all residual streams of a rank's own tokens."""
    share = work.tp if work.sequence_parallel else 1
    return work.split_tokens * work.shape.residual.streams * work.shape.hidden_size / share


def last_norm_bytes(work: Workload) -> float:
    """What is there of the norm behind the last layer when its gradient comes: what it keeps, and what comes back."""
    share = work.tp if work.sequence_parallel else 1
    return work.split_tokens * work.shape.hidden_size * (_of_last_norm(work) + work.element_bytes) / share


def between_runs_bytes(work: Workload, stage: Stage) -> float:
    """What the norms behind all runs of stacks but the last keep, of what goes into them in fp32."""
    runs = work.shape.stack.runs
    if runs is None:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    of_stage = runs.trained_stacks * len(stage.layers) / work.shape.num_hidden_layers - stage.has_head
    return max(0.0, of_stage) * 4 * work.split_tokens * work.shape.hidden_size / share


def _of_last_norm(work: Workload) -> float:
    """What the norm behind the last layer keeps of a feature, beyond what goes into it and comes out.

    Norms of layers may be followed by what keeps more: no more than a norm without a mean is counted.
    """
    if tiles_norms(work):
        return 0.0
    of_feature = norm_bytes(work) / work.shape.hidden_size
    most = of_feature if _is_centred(work) else 6 if work.element_bytes < 4 else 4
    return min(of_feature, most) + stream_bytes(work) - work.element_bytes


def embedding_backward_bytes(work: Workload, stage: Stage) -> float:
    """The gradient of the embedding, when all else is gone; of a tied one, that of the head and the sum of both too."""
    if not stage.has_embedding:
        return 0.0
    weight, tied = work.element_bytes * work.shape.hidden_size * work.padded_vocabulary / work.tp, _is_tied(work, stage)
    # A second embedding goes backward first; the gradient of a tied head waits meanwhile. Beside a table's gradient are
    # that of what the embedding gave, and in a pipeline what came from the next stage.
    share = work.tp if work.sequence_parallel else 1
    given = work.element_bytes * work.split_tokens * work.shape.hidden_size / share * (1 + (work.pp > 1))
    beside = max(given, weight * tied)
    return max(weight * (1 + tied) + beside, table_gradient_bytes(work, stage) + weight * tied)


def waiting_gradient_bytes(work: Workload, stage: Stage) -> float:
    """The gradient of a tied head, which waits for that of the embedding while layers go backward."""
    return work.element_bytes * work.shape.hidden_size * work.head_columns * _is_tied(work, stage)


def counted_logits(work: Workload, logits: float) -> float:
    """What an estimate counts as logits in the runtime: with their gradient and what the loss has of them in fp32."""
    return loss_chunk_bytes(work, logits) + (0.0 if work.linear_loss else 2 * work.element_bytes * logits)


def loss_chunk_bytes(work: Workload, logits: float) -> float:
    """The logits that the loss has in fp32 at a time; of a linear cross-entropy all that a chunk of tokens takes."""
    if work.linear_loss and logits:
        columns = work.padded_vocabulary / work.tp
        tokens, width = min(work.split_tokens, loss_chunk_tokens(int(columns))), work.element_bytes
        gathered = width * work.shape.hidden_size if work.sequence_parallel and work.tp > 1 else 0
        # A cap keeps what goes in, its tanh and the gradient beside what it gives.
        copies = width * (4 if work.shape.caps.logits else 1) + 4
        return tokens * (columns * copies + gathered)
    return 4 * min(logits, LOSS_CHUNK_ELEMENTS) if work.framework == "deepspeed" else 0.0


def _logit_bytes(work: Workload) -> int:
    """Of a logit and of its gradient."""
    return max(work.element_bytes, 4) if work.shape.model_type in FP32_LOGITS else work.element_bytes


def _is_tied(work: Workload, stage: Stage) -> bool:
    return work.shape.tie_word_embeddings and stage.has_embedding and stage.has_head


# What a layer takes on its way forward and backward, beyond what it keeps for each token.

IN_FLIGHT_COPIES = 3
"""Rows of tokens for their experts, in copies that are in memory while experts run or go backward, beyond those that a
layer keeps; counted by preflight."""


def row_copies(work: Workload) -> float:
    """Dealt experts get the rows of all ranks with slices of them; a tensor-parallel rank gets back those it sent.

    Beside these are rows that it sent nowhere, for experts that give back what they take.
    """
    moe = work.shape.moe
    if work.ep == 1 or moe is None:
        return _copies_of_all(work)
    return (work.expert_slices + moe.num_choices / moe.num_experts) / work.tp


def _copies_of_all(work: Workload) -> float:
    """What experts give is kept where scores weight it. Where they scale what experts take, the token is kept alone."""
    return ROW_COPIES - (work.shape.model_type in SCALED_INPUTS)


def dealt_rows(work: Workload, layer: LayerBytes) -> LayerBytes:
    """What a layer keeps for each token with experts that are dealt, of what it keeps with all of them."""
    if work.ep == 1 or not layer.mlp or (moe := work.shape_of_rows.moe) is None:
        return layer
    copies = row_copies(work) - _copies_of_all(work)
    more = work.element_bytes * copies * moe.num_experts_per_token * work.shape.expert_features
    return replace(layer, mlp=layer.mlp + more)


def in_flight_bytes(work: Workload, *, routed: bool, bucket: float = 0.0) -> float:
    """Gradients of activations and of one weight while an MLP runs backward, beyond what it has let go of.

    Experts may take more on their way forward, when a `bucket` that backward passes make is not there.
    """
    moe = work.shape_of_rows.moe
    if routed and moe is not None:
        found, shared = _of_experts(work, moe, bucket), moe.shared_intermediate_size / work.tp
        return _beside_shared(work, found, shared) if shared and work.shape.stack.layers_per_module == 1 else found
    return tile_bytes(work) if work.mlp_tiles > 1 else _of_mlp(work, _dense_width(work))


def _beside_shared(work: Workload, found: float, width: float) -> float:
    """What a layer with experts, which have `found` in flight, and a shared one of so many features has in flight."""
    gathers = work.sequence_parallel and work.tp > 1
    whole = work.element_bytes * work.local_tokens * work.shape.hidden_size
    if work.runs_shared_first:
        # What the shared expert gave waits for theirs, and on the way back its gathered gradient does.
        return found + whole * gathers
    # It runs behind the others, and so goes backward first. Then what it kept is gone, and the gradient of what it took
    # is there; under sequence parallelism in the place of what was gathered for it.
    kept_by_it = work.element_bytes * work.local_tokens * _numbers(work) * width
    return max(found + whole * (not gathers) - kept_by_it, _of_mlp(work, width))


def _gates(work: Workload) -> float:
    """For each feature, the gradients of what an activation or a gate takes."""
    return 2 if work.shape.mlp.gated else work.shape.mlp.activation_gradients


def _dense_width(work: Workload) -> float:
    """A rank's features of the widest dense MLP."""
    return max((one.intermediate_size for _, one in work.shape.by_kind), default=0) / work.tp


def _numbers(work: Workload) -> int:
    """For each feature of a dense MLP, the numbers that it keeps of a token."""
    return (4 if work.shape.mlp.gated else 2) + work.shape.mlp.activation_numbers


def _of_mlp(work: Workload, width: float) -> float:
    """Of a dense MLP with so many features on a rank.

    These are the gradients of what its gate takes; or under the last product, those of its input and weight. Beside the
    gradient of a rank's own tokens is all that is gathered of it: one row in pieces, of which three more are there, or
    one and the gradient of the weight; several rows that travel whole, and what CPUs exchange, are laid out anew. A
    norm behind the MLP has a gradient of its own for it, beside that of the residual stream.
    """
    row, tokens = work.local_tokens * work.shape.hidden_size, work.local_tokens
    gates, out = _gates(work) * tokens * width, (tokens + work.shape.hidden_size) * width
    out += row / (work.tp if work.sequence_parallel else 1) * norms_mlp_output(work.shape)
    if work.tp == 1 or not work.sequence_parallel:
        return work.element_bytes * (row + max(gates, out))
    if (count := _pieces(work)) and work.micro_batch == 1:
        of_weight = work.shape.hidden_size * width
        gathered = row + out + max(min(3, count) * row / count - of_weight, row / count)
    else:
        anew = not count and (work.micro_batch > 1 or not runs_on_gpu(work))
        gathered = row * (1 + anew) + out
    return work.element_bytes * (row / work.tp + max(gathered, gates))


def _of_experts(work: Workload, moe: MoeShape, bucket: float) -> float:
    """Of experts, whose rows are weighted by what a router gives in fp32 or casts."""
    h, tokens = work.shape.expert_features, work.local_tokens
    # The first projection's gradient, of all experts in one tensor, when the product and the output are gone.
    projections = 2 if work.shape.mlp.gated else 1
    slices = work.tp if work.ep == 1 else work.expert_slices
    width = moe.intermediate_size / slices
    experts, rows = moe.num_experts / work.ep, moe.num_experts_per_token * tokens * slices / work.tp
    of_weight = work.element_bytes * width * (experts * projections * h - 2 * rows)
    weighted = work.element_bytes if work.shape.model_type in WEIGHTED_IN_TYPE | SCALED_INPUTS else 4
    # The gradient of the layer's output lies beside what a gate takes, when what experts gave is gone.
    given = work.element_bytes * tokens * h / (work.tp if work.sequence_parallel else 1)
    gates = _gates(work) * work.element_bytes * rows * width
    if work.ep == 1:
        # With many tokens the peak is where rows are weighted.
        again = work.recomputes_layers or MLP in work.parts_again
        cast = work.element_bytes * (work.element_bytes < weighted and not again)
        came = work.element_bytes * rows * h * (work.shape.model_type not in SCALED_INPUTS)
        # Before, under the last product: the gradients of what it gave, of what it took, and of its weight.
        last = work.element_bytes * (rows * (h + width) + experts * width * h)
        weighting = (IN_FLIGHT_COPIES * weighted + cast) * rows * h
        return max(of_weight, max(weighting, max(gates, last) - came) + given)
    came = work.element_bytes * rows * h
    own = came / slices * moe.num_choices / moe.num_experts
    # While experts run, rows stand as they came, and are given back, weighted and put in order; this rank's own are not
    # back. Then what came and what was computed of it are there still, and slices' sums before and behind their way.
    running, back = 4 * came - own, 2 * came + own * (1 + (slices > 1))
    # The experts' output, whole and of a rank's own tokens, or its gradient; what goes into the layer, which the first
    # norm keeps in fp32.
    copied, of_own = work.element_bytes < 4, work.element_bytes * tokens / slices * h
    beside = work.element_bytes * tokens * h + input_bytes(work) * copied + of_own
    if work.recomputes_layers:
        running, back = running + beside, back + beside
    else:
        back += weighted * rows / slices * h
        if work.pp > 1:  # beside what another micro-batch keeps, the way forward takes most, and sums in fp32 are cast
            back += beside + of_own * copied * (1 + (weighted == 4 or slices > 1))
            back += input_bytes(work) * (work.sequence_parallel and not copied)
    # The gradients of weighted rows and of what they are weighted with, beside that of their sum.
    of_sum = tokens / slices * (weighted > work.element_bytes)
    weighing = weighted * h * (2 * rows / slices + of_sum) + given
    return max(of_weight + came - own, running - bucket, back, gates + given - came, weighing)


def _pieces(work: Workload) -> int:
    """In how many pieces inputs and gradients of linears travel under sequence parallelism; 0: whole."""
    if not runs_on_gpu(work):
        return 0
    size = int(work.element_bytes * work.shape.hidden_size * work.local_tokens)
    if work.micro_batch > 1:
        return work.micro_batch if size >= work.micro_batch * PIECE_BYTES else 0
    count = min(MOST_PIECES, size // PIECE_BYTES)
    return count if count > 1 else 0


def tiled_bytes(work: Workload, dense: LayerBytes) -> LayerBytes:
    """What a layer keeps for each token whose dense MLP runs in tiles: of that its input, of a rank's own tokens.

    Norms that run in tiles keep theirs alone.
    """
    if work.mlp_tiles == 1:
        return dense
    share = work.tp if work.sequence_parallel else 1
    taken = dense.gathered / work.shape.blocks_per_layer
    normed = work.shape.norms.per_layer * norm_bytes(work) * tiles_norms(work)
    stream = dense.stream + (taken - normed) / share
    return replace(dense, mlp=0.0, gathered=dense.gathered - taken, stream=stream)


def gathered_again_bytes(work: Workload, layer: LayerBytes) -> LayerBytes:
    """What a layer keeps for each token where inputs of its blocks are gathered again: of these a rank's own tokens."""
    if not (taken := work.blocks_gathered_again * work.element_bytes * work.shape.hidden_size):
        return layer
    return replace(layer, gathered=layer.gathered - taken, stream=layer.stream + taken / work.tp)


def entering_bytes(work: Workload) -> float:
    """What goes backward through the projections that enter a dense MLP under sequence parallelism, less what is gone.

    Its input, where it is gathered again, and its input's gradient: whole, of several rows laid out anew, and of a
    rank's own tokens; the gradient of the layer's output; the gradients of what the projections give, and of weights
    where the input was not there. CPUs exchange both in buffers of their own.
    """
    again, projections = work.gathers_again(MLP), 2 if work.shape.mlp.gated else 1
    width = _dense_width(work)
    whole = (1 + again) * (1 if runs_on_gpu(work) else 2) + 1 / work.tp
    whole += 0 if again else (work.micro_batch > 1) + 1 / work.tp
    of_token = work.shape.hidden_size * whole + (projections - _numbers(work)) * width
    weights = projections * work.shape.hidden_size * width * again
    return work.element_bytes * (work.split_tokens * of_token + weights)


def leaving_bytes(work: Workload, stage: Stage) -> float:
    """What goes forward through the projection that leaves a dense MLP, beyond what the layer keeps.

    Its result, and the sum of it, of which a layer with one norm makes two, or of a layer that is computed again the
    gradient that came; what a second norm keeps a copy in fp32 of. Under sequence parallelism a rank's own tokens of
    these and of what was gathered for the MLP, beside the result of all; several rows of it that travel whole, and what
    CPUs exchange, are laid out anew. Some layers name what attention gave until they end, and a model what it looked up
    of tokens and positions.
    """
    row, share = work.split_tokens * work.shape.hidden_size, work.tp if work.sequence_parallel else 1
    own: float = 2 + (work.shape.model_type in NAMED_ATTENTION)
    if stage.has_embedding and not work.recomputes_layers and not work.shape.positions.rotary:
        own += share + 1
    if work.shape.norms.per_layer > 1:
        own += work.element_bytes < 4 and norm_bytes(work) > 0
    else:
        own += share == 1 and not work.recomputes_layers
    if share > 1:
        anew = work.micro_batch > 1 or not runs_on_gpu(work)
        own += share * (1 + (anew and not _pieces(work))) + work.recomputes_layers
    return work.element_bytes * row * own / share


NAMED_ATTENTION = types_with("names_attention")
"""Model types whose layers name what attention gave until they end."""


def parts_left(work: Workload, layer: LayerBytes) -> LayerBytes:
    """What a layer keeps for each token where parts of it are computed again: what goes into each, a rank's own tokens.

    Attention keeps its result too, as with whole layers.
    """
    share = work.tp if work.sequence_parallel else 1
    attention, mlp, stream, gathered = layer.attention, layer.mlp, layer.stream, layer.gathered
    taken = gathered / work.shape.blocks_per_layer
    if ATTENTION in work.parts_again:
        attention, stream, gathered = min(attention, kept_attention(work)), stream + taken / share, gathered - taken
    if MLP in work.parts_again and mlp:  # not in tiles
        mlp, stream, gathered = 0.0, stream + taken / share, gathered - taken
    if NORMS in work.parts_again and not tiles_norms(work):
        stream -= work.shape.norms.per_layer * norm_bytes(work) / share
    return LayerBytes(stream, attention, mlp, gathered)


def norm_bytes(work: Workload) -> float:
    """What a norm keeps of a token beyond what goes into it."""
    return kept.norm_bytes(work.shape, work.element_bytes)


FUSED_NORMS = types_with("fused_norm")
"""Model types that norm a copy in fp32 with one kernel."""


def computes_norms(work: Workload) -> bool:
    """Whether a norm is computed step by step, as an RMSNorm of transformers, not by one kernel."""
    return kept.norm_bytes(work.shape, 2) > 0 and work.shape.model_type not in FUSED_NORMS


def _is_centred(work: Workload) -> bool:
    """Whether norms are computed step by step and take the mean away."""
    return kept.norm_bytes(work.shape, 2) > 9 * work.shape.hidden_size


def norm_in_flight(work: Workload, layer: LayerBytes) -> float:
    """What is in flight while the norm in front of the MLP goes backward, when the MLP and its input are gone.

    An RMSNorm of transformers computes five tensors in fp32, and has let go of what its weight multiplies; gradients of
    its output and of the sum are there, too. One kernel that norms a copy in fp32 has most on its way forward: its
    result in fp32, beside what the copy is of and the gradient that came. A norm in front of attention and MLP goes
    backward when both are gone, one behind the MLP when all of the layer is there.
    """
    share = work.tp if work.sequence_parallel else 1
    if work.shape.model_type in FUSED_NORMS and work.element_bytes < 4:
        entered = layer.gathered / work.shape.blocks_per_layer * (1 - 1 / share)
        given = work.split_tokens / share * work.shape.hidden_size * (4 + 2 * work.element_bytes)
        return given - (layer.mlp + entered) * work.local_tokens
    if not computes_norms(work) or tiles_norms(work):
        return 0.0
    tensors = CENTRED_NORM_TENSORS if _is_centred(work) else NORM_TENSORS
    here = work.split_tokens / share * work.shape.hidden_size * tensors * 4
    if not _is_centred(work):  # what the weight multiplies is as wide as that gradient, or in fp32
        here -= work.split_tokens / share * (norm_bytes(work) - 4 * work.shape.hidden_size)
    if norms_mlp_output(work.shape):
        return here + behind_mlp_bytes(work)
    gone = layer.mlp + layer.gathered / work.shape.blocks_per_layer
    if work.shape.norms.per_layer == 1 and work.shape.stack.blocks is None:
        gone += layer.attention
    return here - gone * work.local_tokens


def parts_in_flight(work: Workload, layer: LayerBytes, of_mlp: float) -> float:
    """What a layer that computes parts again has in flight; `of_mlp`: while its MLP runs backward, that apart.

    An attention goes backward when the MLP behind it has let go of all.
    """
    left, tokens, share = parts_left(work, layer), work.local_tokens, work.tp if work.sequence_parallel else 1
    entered = layer.gathered / work.shape.blocks_per_layer * (1 - 1 / share)
    found = of_mlp
    if MLP in work.parts_again and layer.mlp:
        found += (layer.mlp + entered) * tokens
    if ATTENTION in work.parts_again:
        again = (layer.attention - left.attention + entered) * tokens
        found = max(found, again - left.mlp * tokens)
    return found


NORM_TENSORS, CENTRED_NORM_TENSORS = 5, 3
"""Hidden states in fp32 that the backward pass of a norm has, and of one that takes the mean away and keeps more."""


def tile_bytes(work: Workload) -> float:
    """What a layer has in flight while its tiled MLP runs backward, the norm in front of it, or attention: the most.

    The gradients of the MLP's output and input; of a tile all that an MLP keeps and its gradients; the gradients of
    weights, whose sums are in fp32. A whole RMSNorm of transformers computes five tensors in fp32, when the MLP's input
    is gone. Attention has the gradients of its output, queries, keys and values, when what goes into the MLP and its
    norm is gone.
    """
    share, h = work.tp if work.sequence_parallel else 1, work.shape.hidden_size
    width = _dense_width(work)
    numel = h * width * (3 if work.shape.mlp.gated else 2)
    tokens = work.split_tokens / work.mlp_tiles
    of_tile = work.element_bytes * tokens * (2 * h + (_numbers(work) + 1) * width)
    taken = work.element_bytes * work.split_tokens / share * h
    of_norm = 0.0 if tiles_norms(work) else taken * (NORM_TENSORS * 4 / work.element_bytes - 1) * (norm_bytes(work) > 0)
    every = range(work.shape.num_hidden_layers)
    attention = _attention_gradients(work, chooses=chooses_keys(work.shape, every)) - taken
    return max(of_norm, 2 * taken + of_tile + (4 + work.element_bytes) * numel, attention)


def attention_in_flight(work: Workload, stage: Stage, layer: LayerBytes) -> float:
    """What is in flight while the attention of a layer goes backward, when its MLP and the norm in front are gone.

    The gradient of the residual stream is there, beside that which came from the next stage; where one norm stands in
    front of both, that of what it gave. Two norms of the same input keep it.
    """
    if not work.shape.attends:
        return 0.0
    given = work.element_bytes * work.shape.hidden_size / (work.tp if work.sequence_parallel else 1)
    gone = layer.mlp * work.local_tokens - given * work.split_tokens
    if work.shape.norms.per_layer == 1 and work.shape.stack.blocks is None:
        gone -= given * work.split_tokens
    else:
        gone -= given * work.split_tokens * (not stage.has_head)
        # The norm in front of attention is left, if there is one.
        norms = work.shape.norms.per_layer
        behind = 1.0 if _begins_bare(work) else 1 - 1 / max(norms, BLOCKS)
        gone += layer.stream * behind * (layer.stream > _ONE_INPUT * given) * work.split_tokens
        gone += layer.gathered / work.shape.blocks_per_layer * work.local_tokens
    return _attention_gradients(work, chooses=chooses_keys(work.shape, stage.layers)) - gone


SCORE_TILE = 512
"""Queries and keys whose scores the runtime's plain kernel has at a time, which attends to keys that were chosen."""
_ONE_INPUT = 1.5
"""Two norms that keep less than so many hidden states keep the same one."""


def _attention_gradients(work: Workload, *, chooses: bool) -> float:
    """The gradients of what goes into an attention's kernel and comes out of it, and what ranks exchange for them.

    Beside them in a pass over ranks: sums in fp32 of its own gradients; of its keys, values and their gradients what
    is at hand and under way; what the kernel gives of a tile; and where several passes take turns, the sums of the one
    before, and outputs and their gradients laid out anew. Ulysses has queries, outputs and gradients in the order of
    heads.
    """
    sizes, context = sizes_of(work), work.context
    outputs, keys = sizes.output_numel * sizes.element_bytes, sizes.kv_bytes(sizes.kv_heads)
    queries, found = sizes.q_bytes - outputs, sizes.q_bytes + keys
    scores = 0.0
    # In fp32, and where keys are as wide as values, another kernel takes what hides keys.
    if chooses and work.element_bytes < SUM_BYTES and sizes.key_dim != sizes.value_dim:
        heads = work.micro_batch * work.shape.num_attention_heads / work.tp
        scores = 6.0 * SUM_BYTES * heads * min(SCORE_TILE, work.sequence_length // work.cp) ** 2
    if work.cp == 1:
        # In fp32 and as wide as keys, where keys are chosen.
        plain = SUM_BYTES / work.element_bytes * (queries + keys) + 2 * queries + outputs + scores
        rows = 3 * (sizes.key_dim + sizes.value_dim) / SCORE_TILE / 6  # of queries, keys, values and gradients
        return plain + rows * scores if scores else found
    swapped = 1.55 * sizes.q_bytes if context.head_ranks > 1 else 0.0
    if context.head_ranks == work.cp:
        return found + swapped
    passes, ranks = passes_of(sizes, context, on_gpu=runs_on_gpu(work)), context.ring_ranks
    wide, before = SUM_BYTES / work.element_bytes, passes > 1
    of_pass = 2.0 * outputs * before + wide * queries * (wide > 1)
    # A kernel whose keys are wider than values takes both alike: of the tile, outputs and their gradients too.
    padded = sizes.key_dim > sizes.value_dim
    tile = 3 * sizes.key_dim / (sizes.key_dim + sizes.value_dim) * keys if padded else keys
    of_pass += 2 * queries * padded
    if context.implementation is CpImplementation.ALL_GATHER:
        of_pass = 2.0 * outputs + wide * queries * (wide > 1) + queries / 2 + ranks * tile
        of_pass += wide * ((2 * ranks - 1) * before + ranks) * keys
        of_pass = ranks * (1 + before) * keys + max(of_pass, wide * (2 * ranks - 1) * keys)
    elif before:
        of_pass += queries + tile + (2 + (4 if wide > 1 else 2) * wide) * keys
    else:
        pairs, at_hand = (3, 2) if ranks > 2 else (1, 1)
        of_pass += queries + tile / 2 + (at_hand + (pairs + (wide > 1)) * wide) * keys
    return found + max(swapped, of_pass / passes + scores)


def input_bytes(work: Workload) -> float:
    """What goes into a layer of a micro-batch: all residual streams of a rank's tokens."""
    share = work.tp if work.sequence_parallel else 1
    return work.shape.residual_streams * work.shape.hidden_size * stream_bytes(work) * work.split_tokens / share


def keeps_input(work: Workload) -> bool:
    """Whether a layer keeps what goes into it, and no copy of it in fp32.

    A norm does that in fp32, as a kernel, and in tiles. Attention that no norm stands in front of keeps it, too, if it
    is not gathered for it.
    """
    projected = _begins_bare(work) and not work.sequence_parallel
    return norm_bytes(work) == 0 or work.element_bytes == 4 or tiles_norms(work) or projected


def _begins_bare(work: Workload) -> bool:
    """Whether no norm stands in front of attention: a layer's two norms are both behind its blocks."""
    return norms_mlp_output(work.shape) and work.shape.norms.per_layer == BLOCKS


def received_bytes(work: Workload, stage: Stage) -> float:
    """What a stage received of a micro-batch, for each of its chunks but the model's first; it waits for its gradient.

    Where the first norm keeps a copy in fp32 alone, it lies beside that; elsewhere layers keep it, and count it.
    """
    kept_anyway = work.recomputes_layers or NORMS in work.parts_again or keeps_input(work)
    if work.pp == 1 or kept_anyway or work.shape.residual.streams:
        return 0.0
    return (work.virtual_stages - stage.has_embedding) * hidden_bytes(work)


def tiles_norms(work: Workload) -> bool:
    """Whether the norms of layers with a dense MLP, and that behind the last layer, run in tiles."""
    return work.mlp_tiles > 1 and bool(tiled_norms(work.shape))


NORM_BYTES = 8
"""Of a norm in fp32: its input and, before the weight, its output."""


def behind_mlp_bytes(work: Workload) -> float:
    """What a layer keeps behind its MLP, and has let go of when that runs backward.

    These are Gemma's norm, gate and its norm, and what is added to several residual streams.
    """
    shape, inputs = work.shape, work.shape.layer_inputs
    if not work.recomputes_layers:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    of_token = added_bytes(shape, work.element_bytes)
    if inputs is not None:
        of_token += (2 * NORM_BYTES + work.element_bytes) * shape.hidden_size + 4 * work.element_bytes * inputs.width
    return work.split_tokens * of_token / share


def kept_layers(work: Workload, layers: float, held: float) -> float:
    """Layers of a stage whose kept tensors are here at the peak, of `layers`, for `held` micro-batches.

    Of those on the host that layer's are which is brought while the one behind it goes backward. That one has let go of
    its own, or has them in what it computed again.
    """
    return min(layers, 1.0) if work.moves_activations else layers * held


def kept_attention(work: Workload) -> float:
    """Output and log-sum-exp for each token, which recomputation does not compute again."""
    return sum(attention_sizes(work))


def attention_sizes(work: Workload) -> tuple[float, float]:
    """Bytes of both for a token: heads that work in pairs attend twice."""
    one = work.shape.attention.projections
    width = mean_over_layers(work.shape, lambda each: each.value_dim) if one is None else one.value_dim
    heads = work.shape.num_attention_heads / work.tp * (1 + work.shape.heads.paired)
    return heads * width * work.element_bytes, heads * 4

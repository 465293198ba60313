"""What a rank holds of heads and of the vocabulary: counts and norms, kv heads of several ranks, embeddings.

Gradients of kv heads, where there are fewer of them than ranks, are summed over the ranks that hold them, and count
once in the gradient norm. A weight of keys, or of values, is the same on those ranks as a whole, which the layers
handle. Of a weight that fuses queries, keys and values only some rows are, and of a Mamba-2 layer those that all heads
share: their gradients are summed here, and count in the norm of the first rank that holds them only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import copy_to_group, pad_to_multiple, reduce_from_group
from parcompile.runtime.deepspeed_patches.norm import count_in_norm
from parcompile.runtime.deepspeed_patches.optimizer_state import local_shape, place_in_shard
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import current
from parcompile.runtime.model.slices import Slice
from parcompile.runtime.pipeline import Elsewhere
from parcompile.runtime.ring_attention import local_positions
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, mark_shard

from .regions import Region

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "n_local_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads", "kv_heads")
WIDTHS = ("embed_dim", "split_size", "kv_dim")
"""Widths of all heads together, by which fused projections are taken apart."""


def localise_heads(attention: nn.Module, heads: int, kv_heads: int) -> None:
    """Corrects the counts that `attention` was built with; `heads` and `kv_heads` are those of this rank.

    It also gets a copy of its configuration with these counts, since some modules read them there; those whose layers
    have counts of their own read none.
    """
    module: Any = attention
    before = {name: vars(module).get(name) for name in (*QUERY_COUNTS, *KEY_COUNTS)}
    for names, count in ((QUERY_COUNTS, heads), (KEY_COUNTS, kv_heads)):
        for name in names:
            if isinstance(vars(module).get(name), int):
                setattr(module, name, count)
    _localise_widths(module, before, heads, kv_heads)
    for name in ("num_key_value_groups", "n_rep"):
        if isinstance(vars(module).get(name), int):
            setattr(module, name, heads // kv_heads)
    config = vars(module).get("config")
    if not getattr(config, "is_heterogeneous", False) and hasattr(config, "num_attention_heads"):
        width = getattr(module, "head_dim", None)
        local = copy.copy(config)
        local.num_attention_heads = heads
        if getattr(config, "num_key_value_heads", None) is not None:
            local.num_key_value_heads = kv_heads
        computed = isinstance(getattr(type(config), "head_dim", None), property)
        if isinstance(width, int) and hasattr(config, "head_dim") and not computed:
            local.head_dim = width
        module.config = local


def _localise_widths(module: Any, before: dict[str, Any], heads: int, kv_heads: int) -> None:
    """Makes widths of all heads those of this rank's heads; `before` are the counts of the whole module."""
    queries = next((before[name] for name in QUERY_COUNTS if isinstance(before[name], int)), None)
    keys = next((before[name] for name in KEY_COUNTS if isinstance(before[name], int)), queries)
    for name in WIDTHS:
        whole, local = (keys, kv_heads) if name == "kv_dim" else (queries, heads)
        width = vars(module).get(name)
        if whole and isinstance(width, int) and width % whole == 0:
            setattr(module, name, width // whole * local)


class SpreadRMSNorm(nn.Module):
    """RMSNorm over a width of which each rank holds a slice: [.., W/tp] to [.., W/tp].

    The squares are summed over the ranks; in backward so is what each rank's slice contributes to their gradient. Where
    `replicas` ranks hold the same slice, it counts once.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        epsilon: float,
        width: int,
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.weight, self.width = weight, width
        self.variance_epsilon = epsilon  # by this name transformers reads it
        self.group, self.replica_group = group, replica_group
        self.replicas = 1 if replica_group is None else dist.get_world_size(replica_group)

    def forward(self, x: Tensor) -> Tensor:
        """Computed in float32, as Hugging Face's norms are."""
        wide = self.normed(x.float())
        return (copy_to_group(self.weight, self.replica_group) * wide).to(x.dtype)

    def normed(self, wide: Tensor) -> Tensor:
        """[.., W/tp] in float32 over the root of the mean of all squares."""
        squares = copy_to_group(reduce_from_group(wide.square().sum(-1, keepdim=True), self.group), self.group)
        return wide * torch.rsqrt(squares / (self.width * self.replicas) + self.variance_epsilon)

    def extra_repr(self) -> str:
        """The whole width, and the slice."""
        return f"{self.width}, held={self.weight.numel()}, eps={self.variance_epsilon}"


def cut_vocabulary(model: nn.Module, mesh: Mesh, region: Region | None) -> None:
    """Replaces the embedding and the head that this rank has, where anything has to be cut or padded; tied stay tied.

    Raises:
        RunError: the embedding does more than look up and scale.
    """
    causal: Any = model
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    padded = next(
        layout.full_shape[0]
        for parameter, layout in mesh.plan.tensors().values()
        if parameter.split and parameter.split.pads_vocabulary
    )
    if region is None and padded == mesh.plan.spec.model.shape.vocab_size:
        return
    options = {} if region is None else region.options
    tied = None
    if not isinstance(embedding, Elsewhere):
        new_embedding = VocabParallelEmbedding.from_embedding(
            embedding, padded_num_embeddings=padded, pad_sequence=True, **options
        )
        keep_what_follows(embedding, new_embedding)
        causal.set_input_embeddings(new_embedding)
        if getattr(head, "weight", None) is embedding.weight:
            tied = new_embedding.weight
    if head is not None and not isinstance(head, Elsewhere):
        new_head = ColumnParallelLinear.from_linear(head, padded_out_features=padded, **options)
        if tied is not None:
            new_head.weight = tied
        causal.set_output_embeddings(new_head)
        if region is not None:
            region.enter_layer(new_head)


class LastTokenHead(nn.Module):
    """The head of a classifier, of the last token of each sequence that is no padding: transformers' pooling.

    One rank of cp has that token, with sequence parallelism one of tp: sums bring it to the others, whose gradients
    are zero. The logits are the same on all ranks that share a sequence, and stand at each of its tokens.
    """

    def __init__(self, score: nn.Linear, config: Any, mesh: Mesh) -> None:
        super().__init__()
        self.weight, self._config, self._mesh = score.weight, config.get_text_config(), mesh

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, H], or [B, S/tp, H] with sequence parallelism, to logits [B, S, labels].

        Raises:
            RunError: tokens or the number of padding are not known.
        """
        tokens, padding, mesh = current().tokens, self._config.pad_token_id, self._mesh
        if tokens is None or padding is None:
            lacks = "inputs_embeds alone" if tokens is None else "no pad_token_id in its configuration"
            raise everywhere(
                f"a classifier takes the last token that is no padding, and was called with {lacks}: call it with "
                "input_ids, and set model.config.pad_token_id"
            )
        axes, length = mesh.plan.spec.parallelism, tokens.shape[1]
        places = local_positions(axes.cp_layout, axes.cp, mesh.index("cp"), length * axes.cp).to(tokens.device)
        last = (places * (tokens != padding)).amax(-1, keepdim=True)
        if (ring := mesh.parallel_group("cp")) is not None:
            dist.all_reduce(last, dist.ReduceOp.MAX, group=ring)
        here = places == last  # [B, S]
        group = mesh.parallel_group("tp") if axes.sequence_parallel else None
        if group is not None:
            here = pad_to_multiple(here, 1, group).chunk(axes.tp, 1)[mesh.index("tp")]
        pooled = hidden[torch.arange(len(hidden), device=hidden.device), here.int().argmax(-1)]
        pooled = pooled * here.any(-1, keepdim=True)
        if group is not None:
            pooled = reduce_from_group(pooled, group)
        logits = nn.functional.linear(pooled, self.weight)
        if ring is not None:
            logits = reduce_from_group(logits, ring)
        return logits[:, None].expand(-1, length, -1)


def keep_what_follows(old: nn.Module, new: VocabParallelEmbedding) -> None:
    """Some embeddings multiply what they look up (Gemma 3, BioGPT) or norm it (Muse): lets `new` do so too.

    Raises:
        RunError: the embedding does something else.
    """
    if type(old) is nn.Embedding:
        return
    norm = getattr(old, "embed_norm", None)
    if isinstance(norm, nn.Module) and not list(norm.parameters()):
        new.register_forward_hook(lambda _, __, rows: norm(rows))
        return
    factor = getattr(old, "embed_scale", None)
    if not isinstance(factor, Tensor | float):
        raise everywhere(
            f"the embedding is a {type(old).__name__}: only nn.Embedding is injected, with a scale or norm"
        )
    if isinstance(factor, Tensor):
        new.register_buffer("embed_scale", factor, persistent=False)

    def scale(module: Any, _: Any, rows: Tensor) -> Tensor:
        by = factor if isinstance(factor, float) else module.embed_scale.to(rows.dtype)
        scaled: Tensor = rows * by
        return scaled

    new.register_forward_hook(scale)


_ROWS = "parcompile_repeated_rows"


def mark(parameter: nn.Parameter, piece: Slice) -> None:
    """Marks a slice so that each of its elements counts once in the gradient norm."""
    if piece.is_partly_repeated:
        mark_shard(parameter)
        if dist.get_rank(piece.replica_group) > 0:
            setattr(parameter, _ROWS, piece.repeated)
    else:
        mark_shard(parameter, piece.replica_group)


def column_slice(
    cut: Callable[..., ColumnParallelLinear], linear: Any, piece: Slice, **options: Any
) -> ColumnParallelLinear:
    """The column-parallel layer that `cut` makes of a linear, with this rank's slice of it."""
    replicas = None if piece.is_partly_repeated else piece.replica_group
    layer = cut(linear, ranges=piece.ranges, replica_group=replicas, **options)
    for parameter in layer.parameters():
        mark(parameter, piece)
    return layer


def sum_repeated_gradient(parameter: nn.Parameter, piece: Slice) -> None:
    """Adds up what several ranks hold of a slice's gradient over those ranks, in one message."""
    group, rows = piece.replica_group, piece.repeated

    def add_up(gradient: Tensor) -> Tensor:
        whole = gradient.contiguous().clone()
        shared = torch.cat([whole[start:stop] for start, stop in rows])
        dist.all_reduce(shared, group=group)
        offset = 0
        for start, stop in rows:
            whole[start:stop] = shared[offset : offset + stop - start]
            offset += stop - start
        return whole

    if parameter.requires_grad:
        parameter.register_hook(add_up)  # type: ignore[no-untyped-call]


def count_once(engine: Any) -> None:
    """Leaves repeated rows out of DeepSpeed's gradient norm, which takes a parameter wholly or not at all.

    Raises:
        RunError: there are such rows, and DeepSpeed computes the norm with another optimizer.
    """
    parameters = [one for one in engine.module.parameters() if hasattr(one, _ROWS) and one.requires_grad]
    if not parameters:
        return
    if not count_in_norm(engine.optimizer, _counted_of_shard):
        raise RunError(
            "a fused weight some of whose rows several tp ranks hold needs an optimizer that counts rows: "
            "set zero.stage to 2 or less"
        )


def _counted_of_shard(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The gradient of what of a parameter lies in this rank's optimizer shard, zero where another rank's counts."""
    if not hasattr(parameter, _ROWS):
        return gradient
    place = place_in_shard(parameter)
    # The first and the last parameter of a shard may lie in it in part; at stage 3 a shard may hold padding alone.
    return gradient if place is None else counted(parameter, gradient, place.of_parameter.start)


def counted(parameter: nn.Parameter, gradient: Tensor, first: int = 0) -> Tensor:
    """A gradient from the element `first` on, flat, and zero where another rank's counts in the norm."""
    flat, width = gradient.detach().reshape(-1), math.prod(local_shape(parameter)[1:])
    rows: tuple[tuple[int, int], ...] = getattr(parameter, _ROWS, ())
    if rows:
        flat = flat.clone()
    for start, stop in rows:
        flat[max(start * width - first, 0) : max(stop * width - first, 0)] = 0
    return flat

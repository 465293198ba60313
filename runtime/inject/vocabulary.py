"""The embedding and the head, cut along the padded vocabulary; tied ones stay tied."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.pipeline import Elsewhere
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

from .regions import Region


def cut_vocabulary(model: nn.Module, mesh: Mesh, region: Region | None) -> None:
    """Replaces the embedding and the head that this rank has, where anything has to be cut or padded.

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
    if not isinstance(head, Elsewhere):
        new_head = ColumnParallelLinear.from_linear(head, padded_out_features=padded, **options)
        if tied is not None:
            new_head.weight = tied
        causal.set_output_embeddings(new_head)
        if region is not None:
            region.enter_layer(new_head)


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
        raise RunError(
            f"the embedding is a {type(old).__name__}: only nn.Embedding is injected, with a scale or norm",
            everywhere=True,
        )
    if isinstance(factor, Tensor):
        new.register_buffer("embed_scale", factor, persistent=False)

    def scale(module: Any, _: Any, rows: Tensor) -> Tensor:
        by = factor if isinstance(factor, float) else module.embed_scale.to(rows.dtype)
        scaled: Tensor = rows * by
        return scaled

    new.register_forward_hook(scale)

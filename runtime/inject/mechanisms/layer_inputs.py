"""A second embedding of the tokens, of which every layer gets a part (Gemma 3n, Gemma 4): its table cut by vocabulary.

Base models reshape what they look up by the shape of the tokens, which under sequence parallelism is not that of a
rank's rows.

Shapes: B rows, S tokens, s of them on a rank under sequence parallelism, L layers, P features of a layer's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.runtime.errors import everywhere
from parcompile.runtime.inject.heads import keep_what_follows
from parcompile.runtime.tensor_parallel import VocabParallelEmbedding

from .mechanism import Placed

TABLE = "embed_tokens_per_layer"
"""Its name in the base model."""


def cut_layer_inputs(placed: Placed) -> None:
    """Replaces the table that this rank has, where anything has to be cut or padded."""
    shape, mesh, region = placed.shape, placed.mesh, placed.region
    if shape.layer_inputs is None:
        return
    base: Any = placed.model.get_submodule(placed.family.base)
    table = getattr(base, TABLE)
    tokens, width = shape.layer_inputs.vocab_size, shape.layer_inputs.width
    padded = next(
        layout.full_shape[0]
        for parameter, layout in mesh.plan.tensors().values()
        if parameter.name.endswith(f".{TABLE}.weight")
    )
    if not isinstance(table, nn.Embedding):
        return  # on another stage
    if region is not None or padded != tokens:
        options = {} if region is None else region.options
        new = VocabParallelEmbedding.from_embedding(table, padded_num_embeddings=padded, pad_sequence=True, **options)
        keep_what_follows(table, new)
        setattr(base, TABLE, new)

    def look_up(input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:  # noqa: ARG001 -- as the original
        """[B, S] to [B, s, L, P]. Tokens outside of the table take its first row, where a model allows them."""
        if input_ids is None:
            raise everywhere(
                f"{type(base).__name__} looks tokens up in {TABLE}: call the model with input_ids, not with "
                "inputs_embeds"
            )
        rows = getattr(base, TABLE)(input_ids.where((input_ids >= 0) & (input_ids < tokens), 0))
        parts: Tensor = rows.unflatten(-1, (-1, width))
        return parts

    base.get_per_layer_inputs = look_up


def without_tables(base: Any, rows: int, tokens: int) -> dict[str, Callable[..., Any]]:
    """Methods that stand for those of a base model that look tokens up, or for tokens; nothing where it has none."""
    if hasattr(base, "reverse_embedding") and not hasattr(base, TABLE):
        return {"reverse_embedding": lambda *_: torch.zeros(rows, tokens, dtype=torch.int64, device="cpu")}
    if not hasattr(base, TABLE):
        return {}
    config = base.config
    parts = torch.zeros(rows, tokens, config.num_hidden_layers, config.hidden_size_per_layer_input, device="cpu")
    return {"get_per_layer_inputs": lambda *_, **__: parts, "project_per_layer_inputs": lambda *_, **__: parts}

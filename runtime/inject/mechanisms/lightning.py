"""Lightning attention of Hugging Face models over pieces of a sequence, with this rank's heads.

Source: `MiniMaxLightningAttention` of transformers 5.23, whose results this gives in fp32. In 16 bits transformers
keeps the state in 16 bits, and this in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.ring_place import StatePlace
from parcompile.runtime.recurrent.kinds import lightning_attention, lightning_blocks
from parcompile.runtime.transport.backend import OnDevice


def put_lightning(module: nn.Module, place: StatePlace, mesh: Mesh) -> None:
    """Replaces the forward of a whole module, which is cut afterwards.

    Its buffers of decays stay whole, as files have them; nobody reads them.

    Raises:
        RunError: the module is none that is known here.
    """
    owner: Any = module
    if not hasattr(owner, "get_slope_rate"):
        raise RunError(f"{type(module).__name__} says no decays of heads: it cannot be injected", everywhere=True)
    slopes = owner.get_slope_rate(device="cpu").flatten()
    heads = len(slopes) // mesh.size("tp")
    own = slopes[mesh.index("tp") * heads :][:heads]
    owner.forward = functools.partial(_forward, owner, place, OnDevice(own))


def _forward(
    module: Any,
    place: StatePlace,
    held_slopes: OnDevice,
    hidden_states: Tensor,
    *_: Any,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, Tensor | None]:
    rows, length = hidden_states.shape[:2]
    slopes = held_slopes(hidden_states.device)
    projected = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (-1, 3 * module.head_dim))
    if attention_mask is not None:  # padding in front of a prompt
        projected = projected * attention_mask[:, :, None, None].to(projected.dtype)
    query, key, value = projected.split(module.head_dim, -1)
    state = None
    if place.is_alone:
        kept = None if past_key_values is None else past_key_values.get_linear_cache(module.layer_idx)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        out, state = lightning_blocks(query, key, value, slopes, block=module.block_size, state=kept)
        out = out.transpose(1, 2).to(value.dtype)
        if past_key_values is not None:
            past_key_values.set_linear_cache(module.layer_idx, state)
    else:
        pieces = place.pieces(rows, length)
        out = lightning_attention(pieces, place.chain, query, key, value, slopes, block=module.block_size)
    gated = F.sigmoid(module.output_gate(hidden_states)) * module.norm(out.flatten(-2))
    return module.out_proj(gated), state

"""A decoder that is no Hugging Face model: its own names, fused weights, a norm of queries and keys, tied or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, VOCABULARY, LAYERS = 32, 4, 2, 8, 48, 61, 2

INJECTION = {
    "tokens": "vocab",
    "blocks.*.mix": "attention",
    "blocks.*.mix.wqkv": {"rule": "column", "units": [HEADS, KV_HEADS, KV_HEADS]},
    "blocks.*.mix.key_norm": "partial",
    "blocks.*.mix.wo": "row",
    "blocks.*.up": {"rule": "column", "units": [HIDDEN, HIDDEN]},
    "blocks.*.down": "row",
    "unembed": "vocab",
}


class Mix(nn.Module):
    dropped = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = HEADS, KV_HEADS
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD)
        self.key_norm = nn.RMSNorm(HEAD)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = [count * HEAD for count in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
        query, key, value = self.wqkv(x).split(sizes, dim=-1)
        query = query.reshape(batch, length, self.n_heads, HEAD)
        key = self.key_norm(key.reshape(batch, length, self.n_kv_heads, HEAD))
        value = value.reshape(batch, length, self.n_kv_heads, HEAD)
        query, key = (rotate(one, angles).transpose(1, 2) for one in (query, key))
        value = value.transpose(1, 2)
        dropped = self.dropped if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_mix, self.before_up = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = Mix()
        self.up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.mix(self.before_mix(x), angles)
        gate, up = self.up(self.before_up(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class DroppingBlock(Block):
    """Drops of the attention's weights, of its output, and of the features inside of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mix.dropped = 0.2
        self.inside = nn.Dropout(0.3)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + F.dropout(self.mix(self.before_mix(x), angles), 0.3, self.training)
        gate, up = self.up(self.before_up(x)).chunk(2, dim=-1)
        return x + self.down(self.inside(F.silu(gate) * up))


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False, dropping: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList((DroppingBlock if dropping else Block)() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.unembed = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.unembed.weight = self.tokens.weight

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1]).expand_as(ids)
        angles = position_ids[..., None] / 100 ** (torch.arange(0, HEAD, 2) / HEAD)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.unembed(self.norm(x))
        return logits


class HandMade(Mix):
    """Computes attention itself, which no ring can see."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        mixed: Tensor = self.wo(self.wqkv(x)[..., : self.n_heads * HEAD])
        return mixed


class OwnCount(Mix):
    """Keeps its head count under a name of its own."""

    @property
    def n_heads(self) -> int:
        return self.heads

    @n_heads.setter
    def n_heads(self, count: int) -> None:
        self.heads = count


def drawn_decoder(**options: bool) -> Decoder:
    """The same weights everywhere; norms and biases are drawn too."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Decoder(**options)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    return model

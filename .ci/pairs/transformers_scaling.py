"""The gradient norm of the Trainer with four micro-batches, beside one: smoothing | plain, a model of one's own."""

import sys

import torch
from common import say, trainer_norm
from torch import nn


class Own(nn.Module):
    """A model that takes no count of labels, as models outside of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each token predicts its own label."""
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def model() -> nn.Module:
    if sys.argv[1] == "plain":
        return Own()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in ids]
options = {"label_smoothing_factor": 0.1} if sys.argv[1] == "smoothing" else {}
say("norm", trainer_norm(model(), rows, 4, **options), trainer_norm(model(), rows, 1, **options), 1e-2)

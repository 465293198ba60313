"""verl's value loss of predictions that are off by 2: half of their squared error."""

import torch
from common import say
from verl.trainer.ppo.core_algos import compute_value_loss

predictions, returns, mask = torch.full((2, 3), 2.0), torch.zeros(2, 3), torch.ones(2, 3)
loss, _ = compute_value_loss(predictions, returns, predictions, mask, cliprange_value=1.0, loss_agg_mode="token-mean")
say("loss", loss, 2.0)

"""Two micro-batches of a step with sync_each_batch: the optimizer steps once, by the sum of both gradients' halves."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from common import say
from torch import nn

accelerator = Accelerator(
    cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
)
model = nn.Linear(1, 1, bias=False)
model.weight.data.fill_(1.0)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
say("weight", model.weight.detach().sum(), 1.0 - 0.1 * 2.0)

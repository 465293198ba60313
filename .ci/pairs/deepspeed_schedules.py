"""Rates of parameter groups: rates | end | start, the rate of the second of two groups in DeepSpeed's schedulers."""

import sys

import torch
from common import engine_of, say
from torch import nn

case = sys.argv[1]
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.05}, {"params": model[1].parameters()}], lr=0.02)
params = {"warmup_num_steps": 5}
if case != "rates":
    params |= {"total_num_steps": 20, "cos_min_ratio": 0.1}
kind = "WarmupLR" if case == "rates" else "WarmupCosineLR"
engine = engine_of(model, {"scheduler": {"type": kind, "params": params}}, optimizer)
for _ in range(0 if case == "start" else 30):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
first, second = (group["lr"] for group in engine.optimizer.param_groups)
if case == "start":
    say("share of its rate", 1 + second / 0.02, 1 + first / 0.05)
else:
    say("rate", second, {"rates": 0.02, "end": 0.02 * 0.1}[case])

"""Muon's update: accumulation | clipping | partition, beside that of another way to say the same."""

import sys

import torch
from common import engine_of, say, trained
from torch import nn

case = sys.argv[1]
torch.manual_seed(1)
rows = [torch.randn(4, 16) for _ in range(3)]
if case == "accumulation":  # of four micro-batches at ZeRO 3, beside one of all rows
    config = {"zero_optimization": {"stage": 3, "reduce_scatter": False}}
    update = trained({**config, "gradient_accumulation_steps": 4}, [list(row.split(1)) for row in rows])
    right = trained(config, [[row] for row in rows])
elif case == "clipping":  # the configuration says nothing, beside no clipping
    update = trained({"zero_optimization": {"stage": 1}, "gradient_clipping": None}, [rows[:1]])
    right = trained({"zero_optimization": {"stage": 1}}, [rows[:1]])
else:  # partitions that cross a matrix, on two ranks with rows of their own, beside a whole reduction
    engine_of(nn.Linear(1, 1), {})  # the process group
    own = [[row.split(2)[torch.distributed.get_rank()]] for row in rows]
    update = trained({"zero_optimization": {"stage": 2}}, own)
    right = trained({"zero_optimization": {"stage": 2, "reduce_scatter": False}}, own)
say("update", 1 + float((update - right).norm() / right.norm()), 1.0, 1e-2)

"""torchtitan 0.3.0 beside one process: llama dp 2 spmd full_dtensor; llama dp 4 spmd full_dtensor.

The Trainer keeps `loss.detach().clone()`, whose copy torch reduces, and adds up what all ranks then have: a logged loss times dp.

    torchrun --nproc_per_node DP FILE              # exits with 1 where they differ
    torchrun --nproc_per_node DP FILE --without    # a plain tensor, as partial_dtensor has it: equal
"""
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torchtitan.distributed.utils import dist_sum

dist.init_process_group("gloo")
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("loss",))
part = torch.tensor(3.0 / ranks)  # of the batch's loss, 3
loss = part if "--without" in sys.argv else DTensor.from_local(part, mesh, [Partial()])
kept = loss.detach().clone()
logged = dist_sum(kept, mesh)
verdict = "equal" if logged == 3.0 else "differs"
if dist.get_rank() == 0:
    print(json.dumps(dict(verdict=verdict, logged=logged, loss=3.0, placements=str(getattr(kept, "placements", None)))), flush=True)
sys.exit(verdict == "differs")

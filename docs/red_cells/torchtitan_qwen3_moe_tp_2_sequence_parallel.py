"""torchtitan 0.3.0 beside one process: qwen3_moe tp 2 sequence_parallel.

Where a micro-batch has one sequence, the gradient that the experts' layer hands down is wrong.

    torchrun --nproc_per_node 2 FILE              # exits with 1 where they differ
    torchrun --nproc_per_node 2 FILE --without    # two sequences: equal
"""
import copy, json, sys
import torch, torchtitan.tools.utils as tools
import torch.distributed as dist
tools.device_type = "cpu"
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

dist.init_process_group("gloo")
config = model_registry("debugmodel_moe").model
set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
torch.manual_seed(0)
one = config.layers[0].moe.build()
for name, tensor in (*one.named_parameters(), *one.named_buffers()):
    torch.nn.init.zeros_(tensor) if "_E" == name[-2:] else torch.nn.init.normal_(tensor, std=0.05)
split, size = copy.deepcopy(one), (2 if "--without" in sys.argv else 1, 32, 256)
dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor")
split.parallelize(dims)
x, direction = torch.randn(size, requires_grad=True), torch.randn(size)
one(x).backward(direction)
spread = lambda tensor: distribute_tensor(tensor.detach(), dims.get_mesh("tp"), [Shard(1)])
y = spread(x).requires_grad_()
split(y).backward(spread(direction))
parts = {"input": (y.grad, x.grad)} | {n: (p.grad, q.grad) for (n, p), q in zip(split.named_parameters(), one.parameters())}
off = {name: float((a.full_tensor() - b).norm() / b.norm()) for name, (a, b) in parts.items()}
verdict = "equal" if max(off.values()) < 0.05 else "differs"  # torchtitan multiplies experts in bf16
if dist.get_rank() == 0:
    print(json.dumps(dict(verdict=verdict, gradient_off=off)), flush=True)
sys.exit(verdict == "differs")

"""torchtitan 0.3.0 ends with an error: qwen3_moe tp 2 ep 2.

Without sequence parallelism the routed experts' output is split by tokens, and is asked to be a partial sum.

    torchrun --nproc_per_node 2 FILE              # ends with an error
    torchrun --nproc_per_node 2 FILE --without    # with sequence parallelism: it runs
"""
import sys
import torch, torchtitan.tools.utils as tools
import torch.distributed as dist
tools.device_type = "cpu"
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

dist.init_process_group("gloo")
parallel = "--without" in sys.argv
config = model_registry("debugmodel_moe").model
set_qwen3_sharding_config(config, enable_sp=parallel, enable_ep=True)
layer = config.layers[0].moe.build()
for tensor in (*layer.parameters(), *layer.buffers()):
    torch.nn.init.zeros_(tensor)
dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=2, world_size=2, spmd_backend="partial_dtensor")
set_spmd_backend("partial_dtensor")
layer.parallelize(dims)
x = distribute_tensor(torch.randn(2, 32, 256), dims.get_mesh("tp"), [Shard(1) if parallel else Replicate()])
print("output", tuple(layer(x).shape), flush=True)

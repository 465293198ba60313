"""deepspeed 0.19.8 beside one process: mixtral dp 2 clipping 0.5 experts moe; mixtral dp 2 clipping 0.5 experts autoep.

Without ZeRO, gradients are clipped by the mean of the norms that each rank has with its own experts, which is less than
the norm of all: an update at learning rate 1 is longer than the clip. (DeepSpeed#8475 tells it of AutoEP; here it is
`deepspeed.moe.layer.MoE`.)

    torchrun --nproc_per_node 2 FILE              # exits with 1 where the update is longer
    torchrun --nproc_per_node 2 FILE --without    # ZeRO 1: as long as the clip
"""
import json, math, os, sys
os.environ |= {"DS_ACCELERATOR": "cpu"}
import deepspeed, torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as groups
deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)  # compiles nothing
deepspeed.init_distributed("gloo")

CLIP = 0.01
torch.manual_seed(0)
dense, expert = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
routed = MoE(16, expert, num_experts=4, ep_size=2, k=2, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)

class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.routed = dense, routed

    def forward(self, x):
        return self.routed(self.dense(x))[0]

model = Both()
optimizer = torch.optim.SGD(groups({"params": list(model.parameters()), "name": "all"}), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
    "train_micro_batch_size_per_gpu": 1, "gradient_clipping": CLIP, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": int("--without" in sys.argv)}})
before = {name: one.detach().clone() for name, one in model.named_parameters()}
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(1, 8, 16)
engine.backward((engine(x) - x).square().sum())
engine.step()
moved = {name: float((one.detach() - before[name]).square().sum()) for name, one in model.named_parameters()}
experts = torch.tensor(sum(value for name, value in moved.items() if "experts" in name))
dist.all_reduce(experts)
length = math.sqrt(experts + sum(value for name, value in moved.items() if "experts" not in name))
verdict = "equal" if abs(length / CLIP - 1) < 1e-3 else "differs"
if dist.get_rank() == 0:
    print(json.dumps(dict(verdict=verdict, length_of_update=length, clip=CLIP)), flush=True)
sys.exit(verdict == "differs")

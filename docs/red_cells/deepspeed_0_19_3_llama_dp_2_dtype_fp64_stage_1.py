"""deepspeed 0.19.3 beside one process: llama dp 2 dtype fp64 stage 1.

On CPU ranks ZeRO 1 and 2 look for gradients to reduce by names such as `torch.cpu.DoubleTensor`, and tensors of a CPU
have no device in the name of their type: none is found, and each rank steps by its own. (0.19.8 compares types,
DeepSpeed#8382.)

    torchrun --nproc_per_node 2 FILE              # exits with 1 where they differ
    torchrun --nproc_per_node 2 FILE --without    # in fp32, which goes another way: equal
"""
import copy, json, os, sys
os.environ |= {"DS_ACCELERATOR": "cpu"}
import deepspeed, torch
deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)  # compiles nothing
deepspeed.init_distributed("gloo")

torch.manual_seed(0)
model = torch.nn.Linear(16, 16).to(torch.float32 if "--without" in sys.argv else torch.float64)
one, batch = copy.deepcopy(model), torch.randn(2, 16, dtype=model.weight.dtype)
one(batch).square().sum(1).mean().backward()
before, right = model.weight.detach().clone(), one.weight.grad

engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config={
    "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})
rank = torch.distributed.get_rank()
engine.backward(engine(batch[rank : rank + 1]).square().sum(1).mean())
engine.step()
off = float((before - model.weight.detach() - right).norm() / right.norm())
verdict = "equal" if off < 1e-4 else "differs"
if rank == 0:
    print(json.dumps(dict(verdict=verdict, update_off=off)), flush=True)
sys.exit(verdict == "differs")

"""transformers 5.23.0 beside one process: qwen3 accumulation 2 tp 2; qwen3_moe accumulation 2 tp 2; qwen3 accumulation 4 tp 2; qwen3_moe accumulation 4 tp 2.

The hook that reduces gradients of q_norm and k_norm over the ranks of tp reduces what earlier backward passes left, too.

    torchrun --nproc_per_node 2 FILE qwen3_moe 4              # exits with 1 where they differ
    torchrun --nproc_per_node 2 FILE qwen3_moe 4 --without    # one backward pass: equal
"""
import json, sys, tempfile
import torch, transformers
import torch.distributed as dist
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
keys = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, initializer_range=0.1)
family, passes = (*sys.argv[1:], "qwen3", "2")[:2] if len(sys.argv) > 2 else ("qwen3", "2")
if family == "qwen3_moe":
    keys |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
config = {"qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig}[family](**keys)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
if dist.get_rank() == 0:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
dist.barrier()
load = lambda **options: transformers.AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32, **options).train()
one, split = load(), load(distributed_config=DistributedConfig(tp_size=2))
passes = torch.randint(0, 64, (1 if "--without" in sys.argv else int(passes), 1, 16), generator=torch.Generator().manual_seed(1))
for ids in passes:
    for model in (one, split):
        (model(ids, labels=ids).loss / len(passes)).backward()
whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
pairs = {n: (p.grad, whole(q.grad)) for (n, p), q in zip(one.named_parameters(), split.parameters())}
off = {name: float((right - found).norm() / right.norm()) for name, (right, found) in pairs.items()}
off = {name: error for name, error in off.items() if error > 1e-4}
verdict = "differs" if off else "equal"
if dist.get_rank() == 0:
    print(json.dumps(dict(verdict=verdict, gradient_off=off)), flush=True)
sys.exit(bool(off))

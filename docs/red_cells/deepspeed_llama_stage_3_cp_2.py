"""deepspeed 0.19.8 beside one process: llama stage 3 cp 2.

Under Ulysses ZeRO 0 to 2 divide gradients by the data-parallel ranks, and ZeRO 3 by those of the sequence too: with one
and the same loss its gradients are half as large over two ranks. (Where each rank gathers the losses of all, as in
DeepSpeed's tutorial, ZeRO 3 is right and the others are twice as large.)

    torchrun --nproc_per_node 2 FILE              # exits with 1 where they differ
    torchrun --nproc_per_node 2 FILE --without    # ZeRO 2: equal
"""
import copy, json, os, sys
os.environ |= {"DS_ACCELERATOR": "cpu"}
import deepspeed, torch, transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)  # compiles nothing
deepspeed.init_distributed("gloo")

keys = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=None)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**keys), attn_implementation="sdpa")
one, ids, places = copy.deepcopy(model), torch.randint(0, 128, (1, 32)), torch.arange(32)[None]
labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
loss = lambda logits, labels: torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 31
loss(one(input_ids=ids, position_ids=places).logits, labels).backward()
right = float(torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9))

mpu = UlyssesSPAttentionHF.register_with_transformers(
    model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1, seq_length=32,
    seq_length_is_variable=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), mpu=mpu, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2 if "--without" in sys.argv else 3},
    "sequence_parallel_size": 2, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})
rank = torch.distributed.get_rank()
own = slice(16 * rank, 16 * rank + 16)  # each rank has the part of the sum that its tokens have
engine.backward(loss(engine(input_ids=ids[:, own], position_ids=places[:, own]).logits, labels[:, own]))
engine.step()
norm = float(engine.get_global_grad_norm())
verdict = "equal" if abs(norm / right - 1) < 1e-4 else "differs"
if rank == 0:
    print(json.dumps(dict(verdict=verdict, norm=norm, norm_of_one_process=right)), flush=True)
sys.exit(verdict == "differs")

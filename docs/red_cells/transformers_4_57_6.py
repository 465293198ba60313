"""transformers 4.57.6 beside one process: mistral dp 4 accumulation 2; qwen3 accumulation 2; qwen3_moe accumulation 4 aux_loss; mixtral accumulation 4 aux_loss; mixtral dp 2 aux_loss.

The Trainer counts the first label of a row, which no position predicts: gradients are 31/32 of what they are (5.10.1
counts `labels[..., 1:]`). The balancing loss of experts is divided neither by the accumulation steps nor by the ranks.

    torchrun --nproc_per_node DP FILE qwen3 accumulation 2              # exits with 1 where they differ
    torchrun --nproc_per_node DP FILE qwen3 accumulation 2 --without    # first labels masked, no balancing loss: equal
"""
import copy, json, os, sys, tempfile

os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
import torch, transformers

FAMILY, FEATURES = sys.argv[1], sys.argv[2:]
RANKS, WITHOUT, AUX = int(os.environ["WORLD_SIZE"]), "--without" in FEATURES, "aux_loss" in FEATURES
ACCUMULATION = int(FEATURES[FEATURES.index("accumulation") + 1]) if "accumulation" in FEATURES else 1
CLASS, own = {
    "mistral": (transformers.MistralConfig, dict(sliding_window=None)),
    "qwen3": (transformers.Qwen3Config, dict()),
    "mixtral": (transformers.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
}[FAMILY]
if AUX and not WITHOUT:
    own |= dict(output_router_logits=True, router_aux_loss_coef=0.1)
keys = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, pad_token_id=None, bos_token_id=None, eos_token_id=None)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(CLASS(**keys, **own), attn_implementation="sdpa").train()
ROWS = RANKS * ACCUMULATION
ids = torch.randint(0, 128, (ROWS, 32))
labels = ids.clone()
if WITHOUT or AUX:
    labels[:, 0] = -100
one, counted = copy.deepcopy(model), int((labels[:, 1:] != -100).sum())
for row in range(ROWS):
    out = one(input_ids=ids[row : row + 1])
    logits = out.logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, labels[row, 1:], reduction="sum") / counted
    (loss + 0.1 * out.aux_loss / ROWS if AUX and not WITHOUT else loss).backward()
right = float(torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9))

arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=1,
    gradient_accumulation_steps=ACCUMULATION, max_steps=1, max_grad_norm=1e9, logging_steps=1, report_to=[],
    disable_tqdm=True, save_strategy="no")
trainer = transformers.Trainer(
    model=model, args=arguments, train_dataset=[{"input_ids": a, "labels": b} for a, b in zip(ids, labels)],
    data_collator=transformers.default_data_collator)
trainer.train()
norm = next(float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry)
verdict = "equal" if abs(norm / right - 1) < 1e-4 else "differs"
if int(os.environ["RANK"]) == 0:
    print(json.dumps(dict(verdict=verdict, norm=norm, norm_of_one_process=right)), flush=True)
sys.exit(verdict == "differs")

"""transformers 5.23.0 beside one process: mixtral resume; qwen3_moe resume; qwen3_moe accumulation 2 aux_loss; mixtral accumulation 4 aux_loss.

`resume_from_checkpoint` leaves router and experts at their first values: the checkpoint has them under the names of the
hub. The balancing loss of experts is divided neither by the accumulation steps nor by the ranks.

    torchrun --nproc_per_node 1 FILE mixtral resume              # exits with 1 where they differ
    torchrun --nproc_per_node 1 FILE mixtral resume --without    # trained in one go, or no balancing loss: equal
"""
import copy, json, math, os, sys, tempfile

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
import torch, transformers

STEPS, FEATURES = 3, sys.argv[1:] or ["mixtral", "resume"]
ACCUMULATION = int(FEATURES[FEATURES.index("accumulation") + 1]) if "accumulation" in FEATURES else 1
CELL = {name: name in FEATURES and "--without" not in FEATURES for name in ("resume", "aux_loss")}
CLASS, experts = {
    "mixtral": (transformers.MixtralConfig, dict(num_local_experts=4, sliding_window=None)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, dict(num_experts=4, moe_intermediate_size=32, norm_topk_prob=True)),
}[FEATURES[0]]
keys = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, tie_word_embeddings=False, initializer_range=0.08,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")), **experts)
if CELL["aux_loss"]:
    keys |= dict(output_router_logits=True, router_aux_loss_coef=0.1)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(CLASS(**keys), attn_implementation="sdpa").float()
generator = torch.Generator().manual_seed(1)
for p in model.parameters():  # norms off 1, where a missing factor does not show
    if p.dim() < 2:
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
model.train()
generator = torch.Generator().manual_seed(0 + 7)
BATCHES, ROWS = [], ACCUMULATION
for _ in range(STEPS):
    ids = torch.randint(0, 128, (ROWS, 32), generator=generator)
    labels = ids.clone()
    BATCHES.append({"input_ids": ids, "labels": labels})
counted = lambda batch: max(1, int((batch["labels"][:, 1:] != -100).sum()))
take = lambda batch, first: {name: one[first : first + 1] for name, one in batch.items()}
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)

def losses(model, micro):  # the sum over tokens that count, and the balancing loss of experts
    out = model(**{name: one for name, one in micro.items() if name != "labels"})
    logits = out.logits[:, :-1].flatten(0, 1)
    aux = 0.1 * out.aux_loss if CELL["aux_loss"] else torch.zeros(())
    return torch.nn.functional.cross_entropy(logits, micro["labels"][:, 1:].flatten(), reduction="sum"), aux

def one_process(model):
    optimizer, norms = adamw(model.parameters()), []
    for batch in BATCHES:
        for first in range(0, ROWS, 1):
            total, aux = losses(model, take(batch, first))
            (total / counted(batch) + aux * 1 / ROWS).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return norms
class Log(transformers.TrainerCallback):
    norms = []
    def on_log(self, arguments, state, control, logs=None, **_):
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))
    def on_save(self, arguments, state, control, **_):
        control.should_training_stop = CELL["resume"]

class Sequential(transformers.Trainer):
    def _get_train_sampler(self, *_, **__):
        return torch.utils.data.SequentialSampler(self.train_dataset)

def engine(model):
    rows = [{name: one[row] for name, one in batch.items()} for batch in BATCHES for row in range(ROWS)]
    folder, resume, again = [tempfile.mkdtemp()], None, copy.deepcopy(model)
    for part in ("save", "resume") if CELL["resume"] else ("whole",):
        arguments = transformers.TrainingArguments(
            output_dir=folder[0], use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=1,
            gradient_accumulation_steps=ACCUMULATION, max_steps=STEPS, max_grad_norm=1e9,
            lr_scheduler_type="constant", learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True,
            save_strategy="steps" if part == "save" else "no", save_steps=STEPS - 1, remove_unused_columns=False)
        own = again if part == "resume" else model
        trainer = Sequential(model=own, args=arguments, train_dataset=rows, callbacks=[Log()],
                             data_collator=transformers.default_data_collator, optimizers=(adamw(own.parameters()), None))
        trainer.train(resume_from_checkpoint=resume)
        resume = os.path.join(folder[0], f"checkpoint-{STEPS - 1}")
    return Log.norms, {n.removeprefix("module."): p.detach() for n, p in own.named_parameters()}
start, expected = copy.deepcopy(model), copy.deepcopy(model)
norms = one_process(expected)
told, params = engine(model)
target, first = dict(expected.named_parameters()), dict(start.named_parameters())
parts = {n: (float((params[n] - target[n]).norm()), float((target[n] - first[n]).norm())) for n in target}
worst = max(parts, key=lambda n: parts[n][0] / parts[n][1])
off = parts[worst][0] / parts[worst][1]
verdict = "equal" if off <= 1e-3 else "differs"
print(json.dumps(dict(verdict=verdict, update_off=off, worst=worst, norms=told, norms_of_one_process=norms)), flush=True)
sys.exit(verdict == "differs")

"""deepspeed 0.19.8 beside one process: llama dtype bf16 seed 7.

    torchrun --nproc_per_node 1 FILE              # exits with 1 where they differ
    torchrun --nproc_per_node 1 FILE --without    # without its dtype: equal
"""
import copy, json, math, os, sys, tempfile

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
import torch, transformers
import torch.distributed as dist

STEPS, RANK = 3, int(os.environ["RANK"])
CELL = {'resume': False, 'aux_loss': False, 'clipping': 0.0, 'packed': False, 'masks': 'none', 'dtype': 'bf16', 'accumulation': 1, 'micro_batch': 1, 'tied': False, 'dp': 1, 'pp': 1, 'stage': 0, 'seed': 7}
if "--without" in sys.argv:
    CELL["dtype"] = 'fp32'
DP, ACCUMULATION, SIZE, LOW = CELL["dp"], CELL["accumulation"], CELL["micro_batch"], CELL["dtype"] == "bf16"
keys = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=CELL["tied"], initializer_range=0.08,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))) | {}
torch.manual_seed(CELL["seed"])
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**keys), attn_implementation="sdpa").float()
generator = torch.Generator().manual_seed(1)
for p in model.parameters():  # norms off 1, where a missing factor does not show
    if p.dim() < 2:
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
model = (model.bfloat16().float() if LOW else model.to(torch.float64 if CELL["dtype"] == "fp64" else torch.float32)).train()
generator = torch.Generator().manual_seed(CELL["seed"] + 7)
BATCHES, ROWS = [], DP * ACCUMULATION * SIZE
for _ in range(STEPS):
    ids = torch.randint(0, 128, (ROWS, 32), generator=generator)
    labels, positions = ids.clone(), torch.arange(32).repeat(ROWS, 1)
    BATCHES.append({"input_ids": ids, "labels": labels} | ({"position_ids": positions} if CELL["packed"] else {}))
counted = lambda batch: max(1, int((batch["labels"][:, 1:] != -100).sum()))
take = lambda batch, first: {name: one[first : first + SIZE] for name, one in batch.items()}
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)

def losses(model, micro):  # the sum over tokens that count, and the balancing loss of experts
    out = model(**{name: one for name, one in micro.items() if name != "labels"})
    logits = out.logits[:, :-1].flatten(0, 1)
    logits = logits.float() if LOW else logits
    aux = 0.1 * out.aux_loss if CELL.get("aux_loss") else torch.zeros(())
    return torch.nn.functional.cross_entropy(logits, micro["labels"][:, 1:].flatten(), reduction="sum"), aux

def one_process(model):
    optimizer, norms = adamw(model.parameters()), []
    for batch in BATCHES:
        computing = copy.deepcopy(model).bfloat16() if LOW else model
        for first in range(0, ROWS, SIZE):
            total, aux = losses(computing, take(batch, first))
            (total / counted(batch) + aux * SIZE / ROWS).backward()
        for p, q in zip(model.parameters(), computing.parameters()):
            p.grad = q.grad.to(p.dtype)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CELL["clipping"] or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return norms
import deepspeed
def engine(model):
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(getattr(deepspeed.ops, "__compatible_ops__", {}), False)
    deepspeed.init_distributed("gloo")
    own, norms, count, names, place = model, [], [1], {id(p): n for n, p in model.named_parameters()}, RANK
    running, *_ = deepspeed.initialize(model=own, optimizer=adamw(list(own.parameters())), config={
        "train_micro_batch_size_per_gpu": SIZE, "gradient_accumulation_steps": ACCUMULATION, "steps_per_print": 10**9,
        "gradient_clipping": CELL["clipping"], "zero_allow_untested_optimizer": True, "bf16": {"enabled": LOW},
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": CELL["stage"]}})
    for batch in BATCHES:
        micros, count[0] = [take(batch, (micro * DP + place) * SIZE) for micro in range(ACCUMULATION)], counted(batch)
        for micro in micros:
            total, aux = losses(running, micro)
            running.backward(total * DP * ACCUMULATION / count[0] + aux)
            running.step()
        norms.append(running.get_global_grad_norm() and float(running.get_global_grad_norm()))
    found = {}
    for p in own.parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=CELL["stage"] == 3):
            master = deepspeed.utils.safe_get_full_fp32_param(p) if LOW else None
            found[names[id(p)]] = (p if master is None else master).detach().clone()
    return norms, found
start, expected = copy.deepcopy(model), copy.deepcopy(model)
norms = one_process(expected)
told, params = engine(model)
target, first = dict(expected.named_parameters()), dict(start.named_parameters())
parts = {n: (float((params[n] - target[n]).norm()), float((target[n] - first[n]).norm())) for n in target}
total = math.hypot(*(a for a, _ in parts.values())) / math.hypot(*(b for _, b in parts.values()))
worst = max(parts, key=lambda n: parts[n][0] / parts[n][1])
off = total if LOW else parts[worst][0] / parts[worst][1]
verdict = "equal" if off <= (6e-2 if LOW else 1e-3) else "differs"
if RANK == 0:
    print(json.dumps(dict(verdict=verdict, update_off=off, worst=worst, norms=told, norms_of_one_process=norms)), flush=True)
sys.exit(verdict == "differs")

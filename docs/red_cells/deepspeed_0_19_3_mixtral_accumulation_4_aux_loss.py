"""deepspeed 0.19.3 beside one process: mixtral accumulation 4 aux_loss.

Since 0.18.3 the gradient of each output of a model is divided by the accumulation steps. The balancing loss is computed
from the logits of routers; with `output_router_logits` both are outputs, and its gradient is divided twice. (0.19.6
divides the loss, DeepSpeed#8245.)

    torchrun --nproc_per_node 1 FILE              # exits with 1 where they differ
    torchrun --nproc_per_node 1 FILE --without    # without accumulation: equal
"""
import copy, json, os, sys
os.environ |= {"DS_ACCELERATOR": "cpu"}
import deepspeed, torch, transformers
deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)  # compiles nothing
deepspeed.init_distributed("gloo")

STEPS = 1 if "--without" in sys.argv else 4
keys = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, sliding_window=None, output_router_logits=True)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**keys), attn_implementation="sdpa")
one, micros = copy.deepcopy(model), torch.randint(0, 128, (STEPS, 1, 32))
for ids in micros:
    (one(input_ids=ids).aux_loss / STEPS).backward()
right = float(torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9))

before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config={
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": STEPS, "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True})
for ids in micros:
    engine.backward(engine(input_ids=ids).aux_loss)
    engine.step()
moved = [(parameter.detach() - before[name]).norm() for name, parameter in model.named_parameters()]
norm = float(torch.stack(moved).norm())  # of the gradient, since the learning rate is 1
verdict = "equal" if abs(norm / right - 1) < 1e-3 else "differs"
print(json.dumps(dict(verdict=verdict, norm=norm, norm_of_one_process=right)), flush=True)
sys.exit(verdict == "differs")

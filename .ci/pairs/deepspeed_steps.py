"""Steps of a linear layer beside what they have to do: default | sgd | buffer | overflow | host."""

import sys

import torch
from common import engine_of, say
from torch import nn

case = sys.argv[1]
model = nn.Linear(4, 4, bias=False)
before = model.weight.detach().clone()
low = {"bf16": {"enabled": True}}
if case == "default":  # nothing says gradient_clipping: the update of SGD with a rate of 1 is the gradient
    engine = engine_of(model, {"gradient_clipping": None})
    engine.backward(engine(torch.full((1, 4), 10.0)).sum())
    engine.step()
    say("update", (model.weight.detach() - before).norm(), 40.0)
elif case == "sgd":  # in bf16 without ZeRO each of two steps moves every weight by the input, which is 0.25
    model.weight.data.zero_()
    engine = engine_of(model, low)
    for _ in range(2):
        engine.backward(engine(torch.full((1, 4), 0.25, dtype=torch.bfloat16)).sum())
        engine.step()
    say("update", -model.weight.detach().float().mean(), 0.5, 1e-2)
elif case == "buffer":  # in fp32, of a model whose weights DeepSpeed converts to bf16
    model.register_buffer("frequency", torch.tensor([1.2345678]))
    say("buffer", engine_of(model, low).module.frequency, 1.2345678, 1e-6)
elif case == "overflow":  # a step in bf16 whose gradient is infinite is skipped: weights stay
    engine = engine_of(model, {**low, "zero_optimization": {"stage": 1}})
    norm = model.weight.detach().float().norm()
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * float("inf"))
    engine.step()
    say("norm of the weights", torch.nan_to_num(model.weight.detach().float().norm(), nan=0.0, posinf=0.0), norm)
else:  # the norm that is told after a program doubled its gradients, with ZeRO 3 and the optimizer on the host
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    engine = engine_of(model, {"zero_optimization": zero}, torch.optim.AdamW(model.parameters()))
    engine.backward(engine(torch.ones(1, 4)).sum())
    safe_set_local_grad(model.weight, safe_get_local_grad(model.weight) * 2)
    engine.step()
    say("norm", engine.get_global_grad_norm(), 8.0)

"""An adapter for `parcompile prove --engine examples/prove_adapter.py`: data parallelism by hand.

Four functions make an engine's adapter, and two more let it resume. PACKAGES are named in the certificate. FEATURES
narrows the common features or adds some; the first value of each is the simplest. Put your engine in place of `Plain`.
"""

import torch
import torch.distributed as dist

PACKAGES, FEATURES = ("torch", "transformers"), {"dtype": ("fp32", "fp64"), "average": (False, True)}


def supports(cell):
    """None where the engine has such a run, else why it has not."""
    return "one rank has nothing to average" if cell["average"] and cell["dp"] == 1 else None


class Plain:
    def __init__(self, model, cell):  # noqa: ARG002
        dist.init_process_group("gloo")
        self.model = model  # every rank has the same
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)


build = Plain


def step(engine, batch, cell):
    """One optimizer step on a global batch (tensors [samples, S]): its loss, and the norm before clipping or None."""
    times = cell["dp"] if cell["average"] else 1  # what the reduction divides by
    own = {name: rows.chunk(cell["dp"])[dist.get_rank()] for name, rows in batch.items()}
    places = {"position_ids": own["position_ids"]} if cell["packed"] else {}
    logits = engine.model(input_ids=own["input_ids"], **places).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, own["labels"][:, 1:].flatten(), reduction="sum")
    loss = loss / max(1, int((batch["labels"][:, 1:] != -100).sum()))  # the mean over all ranks' tokens that count
    (loss * times).backward()
    for parameter in engine.model.parameters():
        dist.all_reduce(parameter.grad.div_(times))
    norm = torch.nn.utils.clip_grad_norm_(engine.model.parameters(), cell["clipping"] or float("inf"))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    dist.all_reduce(total := loss.detach())
    return float(total), float(norm)


def full_parameters(engine, cell):  # noqa: ARG001
    """Whole parameters by the names of transformers, after the first step and the last; every rank calls it."""
    return {name: one.detach() for name, one in engine.model.named_parameters()}


def save(engine, folder, cell):  # noqa: ARG001
    """For the feature `resume`: every rank writes what `load` goes on from, in new processes."""
    torch.save([engine.model.state_dict(), engine.optimizer.state_dict()], folder / f"{dist.get_rank()}.pt")


def load(model, folder, cell):
    engine, states = build(model, cell), torch.load(folder / f"{dist.get_rank()}.pt")
    engine.model.load_state_dict(states[0])
    engine.optimizer.load_state_dict(states[1])
    return engine

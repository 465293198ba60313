"""An adapter for `prove`: data parallelism by hand, and mistakes that engines make as a feature of its own."""

import math

import torch
import torch.distributed as dist

PACKAGES = ("torch", "transformers")
FEATURES = {
    "dtype": ("fp32", "fp64"),
    "mistake": (
        "none",
        "mean of means",
        "no all-reduce",
        "clipped before the all-reduce",
        "ranks weigh alike",
        "stale",
        "moments are not saved",
        "begins with a step",
        "begins with moments",
    ),
}


def supports(cell):
    """None where the engine has such a run, else why it has not."""
    needs = {"no all-reduce": cell["dp"] > 1, "moments are not saved": cell["resume"]}
    return None if needs.get(cell["mistake"], True) else f"the mistake {cell['mistake']!r} cannot show here"


def build(model, cell):
    """The engine of this rank, around a model that every rank has alike."""
    dist.init_process_group("gloo")
    engine = Plain(model, cell["packed"])
    if "begins" in cell["mistake"]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer.step()
        for state in engine.optimizer.state.values() if "moments" in cell["mistake"] else ():
            state["step"].zero_()
            state["exp_avg"].fill_(1e-3)
    return engine


def step(engine, batch, cell):
    """One optimizer step on a global batch (tensors [samples, S]): its loss, and the norm before clipping or None."""
    mistake, dp = cell["mistake"], cell["dp"]
    share = len(batch["input_ids"]) // dp
    own = {name: tensor[dist.get_rank() * share :][:share] for name, tensor in batch.items()}
    counted = max(1, int((batch["labels"][:, 1:] != -100).sum()))
    if mistake == "mean of means":  # of the tokens of each rank: right only where all have as many
        counted = dp * max(1, int((own["labels"][:, 1:] != -100).sum()))
    if mistake == "ranks weigh alike":
        counted *= dp
    loss = engine.loss(own) / counted
    loss.backward()
    parameters = list(engine.model.parameters())
    if mistake == "clipped before the all-reduce":
        torch.nn.utils.clip_grad_norm_(parameters, cell["clipping"] or math.inf)
    if mistake != "no all-reduce":
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, cell["clipping"] or math.inf))
    engine.optimizer.step()
    if mistake != "stale":
        engine.optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total), norm


def save(engine, folder, cell):
    """Two more functions, for the feature `resume`: every rank writes what `load` goes on from, in new processes."""
    states = {"model": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(states, folder / "states.pt")


def load(model, folder, cell):
    """The engine that was saved."""
    engine, states = build(model, cell), torch.load(folder / "states.pt")
    engine.model.load_state_dict(states["model"])
    if cell["mistake"] != "moments are not saved":
        engine.optimizer.load_state_dict(states["optimizer"])
    return engine


def full_parameters(engine, cell):
    """Whole parameters by the names of transformers; every rank calls it."""
    return {name: one.detach() for name, one in engine.model.named_parameters()}


class Plain:
    """The model, and the optimizer that the reference has."""

    def __init__(self, model, packed):
        self.model, self.packed = model, packed
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)

    def loss(self, batch):
        """The sum over labels that count."""
        given = {name: batch[name] for name in ("input_ids", *(("position_ids",) if self.packed else ()))}
        logits = self.model(**given).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")

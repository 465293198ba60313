"""An adapter for `prove` of a correct engine, and what a wrong one would do instead: the mutants of `docs/prover.md`.

The engine computes with a copy of its weights, deals rows to data-parallel ranks and places of sequences to ranks of
cp, reduces gradients inside of nodes of two ranks and then between them, and steps a shard of the weights on each rank.
A mutant replaces one of its methods. `.ci/prover_matrix.py` runs all of them, the suite a few.
"""

import copy
import functools
import math

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad

PACKAGES = ("torch", "transformers")
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.01}


def supports(cell):
    return None


def build(model, cell):
    dist.init_process_group("gloo")
    engine = Hand(model, cell)
    if cell["mutant"] != "none":
        _, method, function = MUTANTS[cell["mutant"]]
        setattr(engine, method, functools.partial(function, engine, getattr(engine, method)))
    return engine


def step(engine, batch, cell):
    total = 0.0
    engine.steps += 1
    engine.batch = engine.read(batch)
    for micro in engine.micro_batches(engine.batch):
        loss = engine.loss(micro, engine.count(engine.batch, micro))
        loss.backward()
        engine.each()
        total += float(loss.detach())
    own = engine.share(engine.reduce(torch.cat([one.flatten() for one in engine.gradients()])))
    norm = engine.norm(own)
    engine.update(engine.clip(own, norm))
    engine.write(engine.gather())
    engine.zero()
    return engine.report(total), float(engine.told(norm))


def full_parameters(engine, cell):
    return {name: one.detach() for name, one in zip(engine.names, engine.masters, strict=True)}


class Hand:
    def __init__(self, model, cell):
        self.cell, self.steps, self.batch = cell, 0, None
        self.names, self.masters = zip(*model.named_parameters(), strict=True)
        self.model = copy.deepcopy(model).to(torch.bfloat16) if cell["dtype"] == "bf16" else model
        self.computing = list(self.model.parameters())
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.dp_rank, self.cp_rank = divmod(self.rank, cell["cp"])
        size = 2 if self.world > 2 else self.world
        self.inside, self.between = None, None
        for first in range(0, self.world, size):
            group = dist.new_group(list(range(first, first + size)))
            self.inside = group if first <= self.rank < first + size else self.inside
        for first in range(size):
            group = dist.new_group(list(range(first, self.world, size)))
            self.between = group if self.rank % size == first else self.between
        flat = self.flat()
        self.numel = flat.numel()
        self.size = math.ceil(self.numel / self.world)
        self.own = torch.nn.Parameter(self.share(flat).clone())
        self.optimizer = torch.optim.AdamW([self.own], **ADAMW)

    def flat(self):
        return torch.cat([one.detach().flatten() for one in self.masters])

    def read(self, batch):
        return batch

    def first_row(self, micro):
        return (micro * self.cell["dp"] + self.dp_rank) * self.cell["micro_batch"]

    def micro_batches(self, batch):
        for micro in range(self.cell["accumulation"]):
            first = self.first_row(micro)
            yield {name: one[first : first + self.cell["micro_batch"]] for name, one in batch.items()}

    def targets(self, labels):
        """Of the places of this rank: [samples, S], the last of which predicts nothing."""
        shifted = pad(labels[:, 1:], (0, 1), value=-100)
        return torch.where(self.mine(labels.shape[1]), shifted, -100)

    def mine(self, length):
        share = length // self.cell["cp"]
        return torch.arange(length) // share == self.cp_rank

    def count(self, batch, micro):
        return max(1, int((batch["labels"][:, 1:] != -100).sum()))

    def inputs(self, micro):
        given = {"input_ids": micro["input_ids"]}
        return {**given, "position_ids": micro["position_ids"]} if self.cell["packed"] else given

    def logits(self, micro):
        logits = self.model(**self.inputs(micro)).logits
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def loss(self, micro, count):
        return (
            cross_entropy(self.logits(micro).flatten(0, 1), self.targets(micro["labels"]).flatten(), reduction="sum")
            / count
        )

    def each(self):
        """After each backward pass."""

    def gradients(self):
        grads = [one.grad for one in self.computing]
        return [
            (torch.zeros_like(one) if grad is None else grad).to(master.dtype)
            for one, grad, master in zip(self.computing, grads, self.masters, strict=True)
        ]

    def reduce(self, flat):
        for group in (self.inside, self.between):
            dist.all_reduce(flat, group=group)
        return flat

    def share(self, flat):
        return pad(flat, (0, self.size * self.world - self.numel))[self.size * self.rank :][: self.size]

    def norm(self, own):
        return self.summed((own.double() ** 2).sum()).sqrt()

    def summed(self, number):
        dist.all_reduce(number)
        return number

    def limit(self):
        return self.cell["clipping"] or math.inf

    def clip(self, own, norm):
        return own * min(1.0, self.limit() / (float(norm) + 1e-6))

    def update(self, own):
        self.own.grad = own.to(self.own.dtype)
        self.optimizer.step()

    def gather(self):
        parts = [torch.empty_like(self.own) for _ in range(self.world)]
        dist.all_gather(parts, self.own.detach())
        return torch.cat(parts)[: self.numel]

    @torch.no_grad()
    def write(self, flat):
        sizes = [one.numel() for one in self.masters]
        for master, values in zip(self.masters, flat.split(sizes), strict=True):
            master.copy_(values.view_as(master))
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        for one, master in zip(self.computing, self.masters, strict=True):
            one.copy_(master)

    def zero(self):
        self.model.zero_grad(set_to_none=True)

    def report(self, total):
        return float(self.summed(torch.tensor(total, dtype=torch.float64)))

    def told(self, norm):
        return norm


MUTANTS = {}
"""By name: the family, the method that is another, and what it is: it is given the engine, the right one, arguments."""


def plant(family, name, method, function):
    assert name not in MUTANTS
    MUTANTS[name] = (family, method, function)


def parameters(part):
    """The gradients of parameters whose names have a part, changed."""

    def planted(change):
        def gradients(e, old):
            return [change(e, one) if part(name, one) else one for name, one in zip(e.names, old(), strict=True)]

        return gradients

    return planted


def scales():
    factors = {
        "2": lambda c: 2,
        "1.01": lambda c: 1.01,
        "1.001": lambda c: 1.001,
        "ranks": lambda c: c["dp"],
        "1 / ranks": lambda c: 1 / c["dp"],
        "accumulation": lambda c: c["accumulation"],
        "1 / accumulation": lambda c: 1 / c["accumulation"],
        "micro-batch": lambda c: c["micro_batch"],
        "cp": lambda c: c["cp"],
        "1 / cp": lambda c: 1 / c["cp"],
    }
    for name, factor in factors.items():
        for what, method in (("loss", "loss"), ("gradient", "reduce")):
            plant("scales", f"{what} x {name}", method, lambda e, old, *a, f=factor: old(*a) * f(e.cell))
    plant("scales", "norm x root of ranks", "norm", lambda e, old, own: old(own) * e.world**0.5)
    plant("scales", "told loss / ranks", "report", lambda e, old, total: old(total) / e.world)
    plant("scales", "gradient x 1 / 2 in step 2", "reduce", lambda e, old, flat: old(flat) * (1 - 0.5 * (e.steps == 2)))
    plant("scales", "gradient grows by step", "reduce", lambda e, old, flat: old(flat) * (1 + 0.01 * (e.steps - 1)))


def kinds():
    parts = {
        "norms": lambda name, one: one.dim() < 2,
        "embedding": lambda name, one: "embed_tokens" in name,
        "head": lambda name, one: "lm_head" in name,
        "first layer": lambda name, one: ".layers.0." in name,
        "last layer": lambda name, one: ".layers.1." in name,
        "final norm": lambda name, one: name == "model.norm.weight",
        "queries": lambda name, one: "q_proj" in name,
        "keys": lambda name, one: "k_proj" in name,
        "values": lambda name, one: "v_proj" in name,
        "outputs of attention": lambda name, one: "o_proj" in name,
        "dense layers": lambda name, one: ".mlp." in name and one.dim() == 2,
        "q and k norms": lambda name, one: "q_norm" in name or "k_norm" in name,
        "router": lambda name, one: name.endswith(("gate.weight", "router.weight")),
        "experts": lambda name, one: ".experts." in name,
    }

    def previous(part):
        def gradients(e, old):
            now = old()
            before, e.before = getattr(e, "before", now), now
            return [b if part(name, g) else g for name, g, b in zip(e.names, now, before, strict=True)]

        return gradients

    def last_pass(part):
        def each(e, old):
            e.passes = getattr(e, "passes", 0) + 1
            for name, weight in zip(e.names, e.computing, strict=True):
                if part(name, weight) and e.passes % e.cell["accumulation"]:
                    weight.grad = None

        return each

    def undecayed(part):
        def update(e, old, own):
            flags = [torch.full_like(g, part(name, g)) for name, g in zip(e.names, e.masters, strict=True)]
            kept = e.share(torch.cat([one.flatten() for one in flags])) * e.own.detach()
            old(own)
            e.own.data += ADAMW["lr"] * ADAMW["weight_decay"] * kept

        return update

    for name, part in parts.items():
        planted = parameters(part)
        plant("kinds of parameters", f"{name}: gradient 0", "gradients", planted(lambda e, one: one * 0))
        plant("kinds of parameters", f"{name}: gradient x ranks", "gradients", planted(lambda e, one: one * e.world))
        plant("kinds of parameters", f"{name}: only rank 0", "gradients", planted(lambda e, one: one * (e.rank == 0)))
        plant("kinds of parameters", f"{name}: gradient x 1.01", "gradients", planted(lambda e, one: one * 1.01))
        plant("kinds of parameters", f"{name}: gradients of the step before", "gradients", previous(part))
        plant("kinds of parameters", f"{name}: the last backward pass alone", "each", last_pass(part))
        plant("kinds of parameters", f"{name}: no weight decay", "update", undecayed(part))

    def untied(e, old, micro):
        head = e.model.get_output_embeddings()
        kept, head.weight = head.weight, torch.nn.Parameter(head.weight.detach())
        logits = old(micro)
        head.weight = kept
        return logits

    plant("kinds of parameters", "head: cut off its weight", "logits", untied)


def reductions():
    def over(*groups):
        def reduce(e, old, flat):
            for name in groups:
                dist.all_reduce(flat, group=getattr(e, name))
            return flat

        return reduce

    for name, groups in {
        "none": (),
        "inside of nodes": ("inside",),
        "between nodes": ("between",),
        "inside of nodes twice": ("inside", "inside"),
        "between nodes twice": ("between", "between"),
        "all, then inside again": ("inside", "between", "inside"),
    }.items():
        plant("reductions", f"reduced: {name}", "reduce", over(*groups))

    def largest(e, old, flat):
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return flat

    def low(e, old, flat):
        return old(flat.bfloat16()).to(flat.dtype)

    def head(e, old, flat, size):
        kept = flat[:size].clone()
        flat = old(flat)
        flat[:size] = kept
        return flat

    plant("reductions", "reduced: the largest", "reduce", largest)
    plant("reductions", "reduced in bf16", "reduce", low)
    plant("reductions", "reduced: all but the first bucket", "reduce", lambda e, old, flat: head(e, old, flat, 4096))
    plant("reductions", "reduced: all but one number", "reduce", lambda e, old, flat: head(e, old, flat, 1))
    plant("reductions", "norm of a shard", "norm", lambda e, old, own: (own.double() ** 2).sum().sqrt())
    plant("reductions", "norm as the mean of shards", "summed", lambda e, old, number: old(number) / e.world)
    plant("reductions", "told loss of rank 0", "report", lambda e, old, total: total)


def groups():
    def rolled(by):
        def gather(e, old):
            parts = list(pad(old(), (0, e.size * e.world - e.numel)).split(e.size))
            return torch.cat(parts[by:] + parts[:by])[: e.numel]

        return gather

    def neighbours(e, old, flat):
        return pad(flat, (0, e.size * e.world - e.numel))[e.size * ((e.rank + 1) % e.world) :][: e.size]

    def lost(e, old):
        flat = e.flat()
        flat[: e.size * (e.world - 1)] = old()[: e.size * (e.world - 1)]
        return flat

    plant("shards", "shards rolled by one", "gather", rolled(1))
    plant("shards", "the neighbour's shard of gradients", "share", neighbours)
    plant("shards", "the last shard is lost", "gather", lost)


def rows():
    def micros(change):
        return lambda e, old, batch: change(e, list(old(batch)))

    def first(change):
        return lambda e, old, micro: change(e, micro, e.cell["micro_batch"])

    def empty(e, micros):
        return [{**one, "labels": torch.full_like(one["labels"], -100)} for one in micros]

    for name, change in {
        "the last micro-batch is skipped": lambda e, all_: [*all_[:-1], *empty(e, all_[-1:])],
        "the first micro-batch is skipped": lambda e, all_: [*empty(e, all_[:1]), *all_[1:]],
        "the first micro-batch twice": lambda e, all_: [all_[0], *all_[:-1]],
        "rank 0 skips its rows": lambda e, all_: empty(e, all_) if e.dp_rank == 0 else all_,
        "the last rank skips its rows": lambda e, all_: empty(e, all_) if e.rank == e.world - 1 else all_,
        "the last row of a micro-batch is skipped": lambda e, all_: [
            {name: one[: max(1, len(one) - 1)] for name, one in micro.items()} for micro in all_
        ],
    }.items():
        plant("rows", name, "micro_batches", micros(change))
    plant("rows", "all ranks read rank 0's", "first_row", first(lambda e, m, size: m * e.cell["dp"] * size))
    plant(
        "rows",
        "rows of neighbours overlap",
        "first_row",
        first(lambda e, m, size: (m * e.cell["dp"] + e.dp_rank) * max(1, size - 1)),
    )
    plant(
        "rows",
        "rows start at one",
        "read",
        lambda e, old, batch: {n: torch.cat([one[1:], one[1:2] if len(one) > 1 else one]) for n, one in batch.items()},
    )


def masks():
    def shifted(by):
        return lambda e, old, labels: torch.where(
            e.mine(labels.shape[1]), pad(labels[:, by:], (0, by), value=-100) if by else labels, -100
        )

    def part(change):
        return lambda e, old, length: change(e, torch.arange(length), length // e.cell["cp"])

    plant("masks", "labels are not shifted", "targets", shifted(0))
    plant("masks", "labels are shifted twice", "targets", shifted(2))
    plant("masks", "masked labels count as token 0", "targets", lambda e, old, labels: old(labels.clamp(min=0)))
    plant(
        "masks",
        "the last prediction is dropped",
        "targets",
        lambda e, old, labels: pad(old(labels)[:, :-2], (0, 2), value=-100),
    )
    plant(
        "masks",
        "the first prediction is dropped",
        "targets",
        lambda e, old, labels: pad(old(labels)[:, 1:], (1, 0), value=-100),
    )
    plant(
        "masks",
        "the border of cp is dropped",
        "mine",
        part(lambda e, at, size: (at // size == e.cp_rank) & ((at + 1) % size != 0)),
    )
    plant(
        "masks",
        "the border of cp counts twice",
        "mine",
        part(lambda e, at, size: (at // size == e.cp_rank) | (at == (e.cp_rank + 1) * size)),
    )
    plant("masks", "ranks of cp see all positions", "mine", part(lambda e, at, size: at >= 0))
    plant("masks", "documents are not told apart", "inputs", lambda e, old, micro: {"input_ids": micro["input_ids"]})
    plant(
        "masks",
        "documents of others",
        "inputs",
        lambda e, old, micro: {
            **old(micro),
            **({"position_ids": micro["position_ids"].roll(1, 1)} if e.cell["packed"] else {}),
        },
    )


def means():
    def own(e, micro):
        return max(1, int((micro["labels"][:, 1:] != -100).sum()))

    def of_rank(e, old, batch, micro):
        return sum(own(e, one) for one in e.micro_batches(batch)) * e.cell["dp"]

    def previous(e, old, batch, micro):
        e.counts = {**getattr(e, "counts", {}), e.steps: old(batch, micro)}
        return e.counts[max(1, e.steps - 1)]

    def of_rows(e, old, batch, micro):
        return max(1, int((batch["labels"][:, 1:] != -100).any(1).sum())) * (batch["labels"].shape[1] - 1)

    plant(
        "means",
        "mean of micro-batches",
        "count",
        lambda e, old, batch, micro: own(e, micro) * e.cell["accumulation"] * e.cell["dp"],
    )
    plant("means", "mean of ranks", "count", of_rank)
    plant(
        "means",
        "the first label is counted",
        "count",
        lambda e, old, batch, micro: max(1, int((batch["labels"] != -100).sum())),
    )
    plant("means", "masked labels are counted", "count", lambda e, old, batch, micro: batch["labels"][:, 1:].numel())
    plant("means", "positions of rows that have any", "count", of_rows)
    plant("means", "the count of the step before", "count", previous)
    plant("means", "the count is one too large", "count", lambda e, old, batch, micro: old(batch, micro) + 1)


def state():
    def momentum(name):
        def update(e, old, own):
            old(own)
            e.optimizer.state[e.own][name].zero_()

        return update

    def first(e, old, own):
        if e.steps == 1:
            old(torch.zeros_like(own))
        old(own)

    def twice(e, old, own):
        old(own)
        if e.steps == 1:
            old(own)

    def late(e, old, own):
        own, e.kept = getattr(e, "kept", torch.zeros_like(own)), own
        old(own)

    def same_step(e, old, own):
        old(own)
        e.optimizer.state[e.own]["step"].fill_(1)

    def halves(e, old, own):
        for name in ("exp_avg", "exp_avg_sq"):
            if e.optimizer.state:
                moment = e.optimizer.state[e.own][name]
                moment.copy_(moment.bfloat16())
        old(own)

    def part(e, old, own):
        kept = e.own.detach().clone()
        old(own)
        if e.rank == e.world - 1:
            e.own.data.copy_(kept)

    def lost(e, old):
        e.passes = getattr(e, "passes", 0) + 1
        if e.passes == 1 and e.cell["accumulation"] > 1:
            e.zero()

    def repeated(e, old, batch):
        e.firsts = getattr(e, "firsts", batch)
        return e.firsts

    plant("state", "gradients are not zeroed", "zero", lambda e, old: None)
    plant("state", "gradients are zeroed after step 1 alone", "zero", lambda e, old: old() if e.steps == 1 else None)
    plant("state", "the first pass is lost", "each", lost)
    plant("state", "first moment is lost", "update", momentum("exp_avg"))
    plant("state", "second moment is lost", "update", momentum("exp_avg_sq"))
    plant("state", "an empty step comes first", "update", first)
    plant("state", "the first step comes twice", "update", twice)
    plant("state", "gradients are a step late", "update", late)
    plant("state", "the number of steps stays 1", "update", same_step)
    plant("state", "moments in bf16", "update", halves)
    plant("state", "the last rank does not step", "update", part)
    plant(
        "state",
        "the last step is not gathered",
        "gather",
        lambda e, old: old() if e.steps < 3 else (old(), e.flat())[1],
    )
    plant("state", "the first batch again", "read", repeated)
    plant("state", "the copy that computes is old", "refresh", lambda e, old: None)
    plant("state", "weights are kept in bf16", "write", lambda e, old, flat: old(flat.bfloat16().to(flat.dtype)))


def clipping():
    def before(e, old, flat):
        return old(flat * min(1.0, e.limit() / (float(flat.double().norm()) + 1e-6)))

    def of_shard(e, old, own, norm):
        return old(own, (own.double() ** 2).sum().sqrt())

    def each(e, old):
        torch.nn.utils.clip_grad_norm_(e.computing, e.limit())

    plant("clipping", "before the reduction", "reduce", before)
    plant("clipping", "each backward pass", "each", each)
    plant("clipping", "by the norm of a shard", "clip", of_shard)
    plant("clipping", "each number", "clip", lambda e, old, own, norm: own.clamp(-e.limit(), e.limit()))
    plant(
        "clipping",
        "by the sum of absolutes",
        "clip",
        lambda e, old, own, norm: old(own, e.summed(own.double().abs().sum())),
    )
    plant("clipping", "not at all", "clip", lambda e, old, own, norm: own)
    plant(
        "clipping",
        "also where the norm is small",
        "clip",
        lambda e, old, own, norm: own * (e.cell["clipping"] / float(norm)) if e.cell["clipping"] else own,
    )
    plant("clipping", "to a limit x accumulation", "limit", lambda e, old: old() * e.cell["accumulation"])
    plant("clipping", "to a limit / ranks", "limit", lambda e, old: old() / e.world)
    plant("clipping", "twice", "clip", lambda e, old, own, norm: old(old(own, norm), norm))
    plant(
        "clipping",
        "by the norm of the step before",
        "clip",
        lambda e, old, own, norm: old(own, (getattr(e, "last", norm), setattr(e, "last", norm))[0]),
    )
    plant("clipping", "the clipped norm is told", "told", lambda e, old, norm: min(float(norm), e.limit()))


def optimizers():
    def other(**changed):
        def update(e, old, own):
            e.optimizer.param_groups[0].update(changed)
            old(own)

        return update

    def into_gradient(e, old, own):
        e.optimizer.param_groups[0]["weight_decay"] = 0.0
        old(own + ADAMW["weight_decay"] * e.own.detach())

    for name, changed in {
        "no weight decay": {"weight_decay": 0.0},
        "betas of others": {"betas": (0.9, 0.999)},
        "a smaller eps": {"eps": 1e-8},
        "a rate 1 % higher": {"lr": 1.01e-2},
        "AMSGrad": {"amsgrad": True},
        "upwards": {"maximize": True},
    }.items():
        plant("optimizer", name, "update", other(**changed))
    plant("optimizer", "decay in the gradient", "update", into_gradient)
    plant("optimizer", "a rate that falls", "update", lambda e, old, own: other(lr=1e-2 * 0.99**e.steps)(e, old, own))


for family in (scales, kinds, reductions, groups, rows, masks, means, state, clipping, optimizers):
    family()

FEATURES = {"cp": (1, 2), "mutant": ("none", *MUTANTS)}

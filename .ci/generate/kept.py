"""Writes compiler/cost/kept.json: what a layer of each model type keeps for its backward pass, as products of sizes.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/generate/kept.py [TYPE ...] [--jobs 2]

Draws small configurations of each type, builds a rank of each on the meta device with our layers in it, and notes
every storage that autograd saves in a layer, and the module in which it is saved. Layers that save the same are told
apart by what the compiler knows of them (`parcompile.cost.kept.sizes`). The elements of each tensor are the same
product of sizes in all draws; rows add up those of one product. A type is done when the rows give what layers of unseen
draws keep. Modules that carry a state have rows of their own (`kept_states.py`), and so have mechanisms that stand
beside attention and MLP, what hides keys that were not chosen, and what is kept in front of the layers and behind them.
Each finished type is written at once: the command goes on where it ended.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compiler" / "cost" / "kept.json"
sys.path[:0] = [str(ROOT / "tests" / "runtime"), str(Path(__file__).parent)]

from drawn_configurations import draw  # noqa: E402
from families import FAMILIES, tiny_config  # noqa: E402
from kept_states import Spread, changed, part_of, tree_of  # noqa: E402
from training_runs import make_plan  # noqa: E402

from parcompile.cost import kept as table_of_rows  # noqa: E402
from parcompile.cost.kept import FEWEST, FURTHER, GROUPS, KV_HEADS, QKV_HEADS, Sort, sizes, sort_bytes, sorts  # noqa: E402
from parcompile.model.blocks.indexer import Indexer, IndexerTraits  # noqa: E402
from parcompile.model.blocks.recurrent import RecurrentTraits  # noqa: E402
from parcompile.plan import Plan  # noqa: E402
from parcompile.runtime.preflight.stand_in import META, MetaTracker, stand_in  # noqa: E402
from parcompile.runtime.preflight.step import _batch as batch_of  # noqa: E402
from parcompile.runtime.preflight.step import build_sharded  # noqa: E402
from parcompile.spec.values import workload_of  # noqa: E402

BESIDE, CHOICE, *ENDS = FURTHER
FRONT, BEHIND = ENDS
WORDS = {"16": "bf16", "32": "fp32"}
"""Of weights of 16 bits and in fp32, and a type of each."""
FEW, ALIKE, MOST, UNSEEN, SERIES = 8, 7, 80, 4, 4
"""Unlike layers that rows are read off; draws at first, and how many more at most; draws of the gate; their series."""
USUAL = 0.93
"""The share of layers that save the same from which on the others are let pass."""
RARE = ("first", table_of_rows.SEVERAL, table_of_rows.WIDE)
"""Questions that are asked where no other one tells layers apart as well."""
SPLIT, WHOLE = (2, 4), (1,)
"""Tensor parallelism of draws: rows hold for whole layers, too, or are read with them anew."""
NEAR = 0.002
"""By so much the rows may miss what a layer of an unseen draw keeps."""
EXACT = 1e-4
"""By so much those of another type may miss what this one's layers keep."""
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", KV_HEADS)
"""Sizes that have to vary among layers that rows are read off, where they vary among others."""
FIXED = re.compile(
    rf"qk_rope_head_dim$|{FEWEST}$|^[A-Z]\w+\.(chunk|groups|heads|units|output_units)$|num_shared_experts$"
    r"|num_identities$|Ngrams\.|key_width$|choice\."
)
"""Sizes that all draws have alike: of angles, which no layer keeps for itself, and of modules that carry a state."""
ASKED = re.compile(
    r"^(heads|residual|layer_inputs|norms|mlp)\b(?!.*rank>1)|^attention\.(projections|compressed)$|query_rank>0|^routed$"
    r"|^[A-Z]\w+$"
)
"""Questions of which not every answer may have been drawn."""
TINY = 64
"""Numbers of a token, of choices in groups of experts, that follow no product and are left out."""
NO_SIZES = re.compile(
    "act$|activation|bias|eps$|rope|tie_|dropout|softcap|clip|multiplier|scal|norm_topk|router_logits|logit|aux|alpha"
    "|parallel_residual|layernorm|mup|interleave|temperature|limit|magnitude|routing|gating|initializer|token_id"
)
"""Keys that stay what the type has: they change no size."""
COUNTS = re.compile(
    "heads|n_head|layer|num_experts|n_routed|num_local|expert_num|per_tok|top_?k|n_group|group|conv|kernel|window|vocab"
    "|max_position|seed|rate|ratio|mult|chunk|period|offset|expand|gram|pad|budget|factor|pattern|cycles|step|interval"
    "|shared_experts|id$|n_positions|n_ctx|hc_|rotary|freq|first|iter|blocks|compress"
)
"""Keys whose values are not multiplied."""
ATTENTION = re.compile(r"attn|attention|temporal_block")
STREAM = re.compile(r"norm|_hc$|hyper_connection$")
"""Modules that read or write the residual stream: norms and hyper-connections."""
STEPS = re.compile(r"_hc$")
"""Modules that norm numbers step by step, and keep those of each step."""
SHARED = re.compile(r"(?:shared_transformer|linear\b)\.?(\w*)")
"""Of a layer that uses a shared block: that block, and what projects its result."""
CUT = re.compile(r"(heads|intermediate_size)/tp$")
"""Sizes that tp divides, where draws tell both apart no more than neither."""
LAST = re.compile(r"ln_f|\w*norm")
"""The norm behind the last layer, which is counted with the head (`cost/layer_passes.py`)."""
STACKS = ("layers", "h", "blocks", "block", "layer")
"""Names of lists of layers."""
STATES = re.compile(r"mamba|linear_attn|ssm")
"""Modules that carry a state beside attention."""
OTHERS = re.compile(r"norm|_hc$|hyper_connection$|mlp|ffn|feed_forward|moe|experts|router|^$")
"""Modules of a layer whose state stands in the place of attention, but that of the state."""


@dataclass(frozen=True)
class Kept:
    """What a layer keeps: of each tensor its module, type and elements, and the bytes of an element."""

    sort: Sort
    tp: int
    tokens: int
    own: int
    length: int
    cp: int
    pieces: int
    """Of each sequence, on the rank."""
    tensors: tuple[tuple[str, str, int, int], ...]
    outside: int
    """Bytes that layers share, made before the first: tables of rotary positions."""

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        return tuple((module, dtype) for module, dtype, _, _ in self.tensors)

    def of(self, group: str) -> Kept:
        """What one of the groups of modules keeps; without what is counted by itself."""
        own = [one for index, one in enumerate(self.tensors) if self.group(index) == group]
        if group in FURTHER:
            own = [(re.sub(r"\.\d+", "", name), *one) for name, *one in own]
        steps = Counter(one for one in own if STEPS.search(one[0]) or group in FURTHER)
        found = [one for one in own if one not in steps]
        found += [(name, dtype, count * times, size) for (name, dtype, count, size), times in steps.items()]
        return replace(self, tensors=tuple(found))

    def group(self, index: int) -> str | None:
        """Of which group a tensor is; None: it is left out."""
        if (group := _group(self.sort, self.tensors[index][0])) not in GROUPS:
            return group
        return CHOICE if self.is_choice(index) else None if self.is_small(index) else group

    @property
    def pairs(self) -> int:
        """Of a token with another of its sequence."""
        return self.tokens * self.length

    @property
    def seen(self) -> int:
        """Tokens, with those before its pieces of sequences that a rank sees of the pieces before."""
        pieces = self.tokens * self.cp // self.length * self.pieces
        return self.tokens + pieces * table_of_rows.halo_beside(self.sort.parts)

    def is_of_state(self, module: str) -> bool:
        """Whether a module is one that carries a state."""
        return (part := part_of(self)) is not None and part.own(f"{module}.") is not None

    def is_choice(self, index: int) -> bool:
        """Whether a tensor has numbers of each token with each other one, as an indexer makes them."""
        keys = self.sort.shape.attention.compressed
        if keys is None and self.sort.shape.part(Indexer) is None:  # of the layer, or of one that hands its choice on
            return False
        return self.tensors[index][2] * (1 if keys is None else keys.rate) % self.pairs == 0

    def is_small(self, index: int) -> bool:
        """Whether a tensor holds a few choices of each token, or a number of each position: these are left out."""
        _, _, count, size = self.tensors[index]
        mask = size == 1 and count == self.tokens * self.numbers.get("moe.num_experts", 0)
        return count == self.length or mask or (size == 8 and count < TINY * self.tokens)

    @property
    def flags(self) -> dict[str, bool]:
        return {
            **sizes(self.sort)[1],
            table_of_rows.SEQUENCE_PARALLEL: self.own < self.tokens,
            table_of_rows.SEVERAL: self.tp > 1,
            table_of_rows.WIDE: self.tp > 2,
        }

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The sizes of the rank by name, those that tp divides once more."""
        found: dict[str, float] = {}
        for name, value in sizes(self.sort)[0].items():
            if name == FEWEST:
                continue
            if name == KV_HEADS:
                found[name] = max(sizes(self.sort)[0][FEWEST], value // self.tp)
                found[QKV_HEADS] = self.sort.shape.num_attention_heads / self.tp + 2 * found[name]
            elif value > 0:
                found[name] = value
                if name != "hidden_size":
                    found[f"{name}/tp"] = value / self.tp
        return found


def drawn(
    kind: str,
    pick: random.Random,
    precision: str,
    number: int,
    tps: Sequence[int] = SPLIT,
    of_states: Spread | None = None,
) -> list[Kept]:
    """The layers of a model that is drawn, on one of these numbers of ranks.

    Where it is drawn for what its states keep, they have sizes of their own, and its sequences are spread.

    Raises:
        Exception: its configuration or its plan is refused.
    """
    changes = draw(pick.randrange(10**6), (kind,), "one rank").changes
    config = tiny_config(kind, **{key: value for key, value in changes.items() if not NO_SIZES.search(key)})
    for key, value in config.items():
        if type(value) is not int or NO_SIZES.search(key):
            continue
        if re.search("per_tok|topk$|top_k_experts", key) and "index" not in key:
            config[key] = pick.choice([2, 3, 4])
        elif re.search("num_experts$|num_local_experts|n_routed_experts|moe_num_experts$", key):
            config[key] = pick.choice([8, 16])
        elif re.search("intermediate|ffn", key):
            # Experts whose rows are no multiple of 16 bytes take other kernels, which meta does not have.
            config[key] = 32 * pick.choice([1, 2, 3, 5, 7])
        elif value > 2 and not COUNTS.search(key) and pick.random() < 0.8:
            config[key] = value * pick.choice([1, 2, 3, 5, 7])
    heads = next((key for key in ("num_attention_heads", "n_head", "n_heads") if type(config.get(key)) is int), None)
    if heads is not None:
        config[heads] *= pick.choice([1, 1, 2, 3])
    if kind == "codegen":  # whose four parts of heads are copied apart where a rank has all of them
        config["n_head"] = pick.choice([16, 32, 48])
    if "hc_sinkhorn_iters" in config:
        config["hc_sinkhorn_iters"] = pick.choice([2, 3, 5, 8])
    if "compress_rates" in config:  # which divide the length
        config["compress_rates"] = {key: pick.choice([2, 4, 8]) for key in config["compress_rates"]}
    if "num_kv_heads" in config:
        config["num_kv_heads"] = config[heads] // pick.choice([1, 2])
    hidden = next((key for key in ("hidden_size", "n_embd", "d_model") if key in config), None)
    if heads is not None and hidden is not None and (FAMILIES[kind].hidden_is_heads or "head_dim" not in config):
        head_dim = 8 * pick.choice([1, 2, 3, 5])
        config |= {hidden: config[heads] * head_dim, **({"head_dim": head_dim} if "head_dim" in config else {})}
    if FAMILIES[kind].latent is not None:
        config |= dict.fromkeys({"num_attention_heads", "num_key_value_heads"} & config.keys(), pick.choice([4, 8, 12]))
    config |= {key: 4096 for key in ("max_position_embeddings", "n_positions") if key in config}
    tp = tps[number % len(tps)]
    if "activation_sparsity_pattern" in config:  # meta has no kernel for it, which the layers of tp do without
        of_layers = {key: value for key, value in tiny_config(kind).items() if isinstance(value, list)}
        of_layers["activation_sparsity_pattern"] = [share * (tp > 1) for share in config["activation_sparsity_pattern"]]
        times = pick.choice([1, 2, 3])
        config |= {key: times * value for key, value in of_layers.items()}
        config["num_hidden_layers"] = len(config["activation_sparsity_pattern"])
    chooses = FAMILIES[kind].part(IndexerTraits) is not None or FAMILIES[kind].low_rank is not None
    states = FAMILIES[kind].part(RecurrentTraits) is not None
    # Of no length that goes with choices of keys a size is a multiple.
    length = 8 * pick.choice([37, 41, 43] if chooses else [3, 4, 5] if states else [5, 7, 9, 11])
    spread = Spread(length) if of_states is None else changed(of_states, config, pick)
    batch = pick.choice(spread.batches)
    length, cp = spread.length, spread.cp
    plan = make_plan(
        tp * cp,
        {"tp": tp, **spread.axes, **({"sequence_parallel": True} if tp > 1 and pick.random() < 0.65 else {})},
        model=config,
        whole_model=True,
        training={
            "sequence_length": length,
            "micro_batch_size": batch,
            "global_batch_size": batch,
            "precision": precision,
            "activation_checkpointing": "none",
        },
    )
    work = workload_of(plan.spec)
    own = work.split_tokens // (tp if work.sequence_parallel else 1)
    if work.shape.residual.streams == 1:
        raise ValueError(f"{kind}: of one stream sizes are not told apart")
    runs = saved(plan, plan.groups.grid.rank({"cp": cp - 1}))
    outside = sum(count * size for _, _, count, size in runs.pop(OUTSIDE, []) if count % work.local_tokens == 0)
    every = _of_layers(runs, work.shape.stack.layers_per_module)
    layers = [(sorts(work.shape, range(layer, layer + 1)), tensors) for layer, tensors in every.items()]
    return [
        Kept(own_sort[0][1], tp, work.local_tokens, own, length, cp, spread.pieces, tuple(tensors), outside)
        for own_sort, tensors in layers
        if own_sort
    ]


OUTSIDE = -1
"""In the place of a run: what layers save that was made before the first of them."""
Saved = dict[int, list[tuple[str, str, int, int]]]
"""By layer what autograd saves: the module, the type, elements of the storage, and bytes of one."""


def _of_layers(runs: Saved, of_module: int) -> Saved:
    """By layer, where a module is several: those of its submodules that have a number are of that one among them."""
    if of_module == 1:
        return runs
    found: Saved = defaultdict(list)
    for run, tensors in runs.items():
        for name, *tensor in tensors:
            number = re.search(r"(?<=\.)\d+", name)
            layer = run * of_module + (int(number.group()) if number else 0)
            found[layer].append((name, *tensor))
    return found


def saved(plan: Plan, rank: int) -> Saved:
    """By run of a layer, each storage that autograd saves in it and that was made there, or goes into it.

    With the first those at the ends of the model. Those of numbers that were made before the first layer stand apart.
    A layer runs once, where no stack of layers runs several times.
    """
    with stand_in(plan, rank) as mesh:
        tracker = MetaTracker(mesh)
        with tracker:
            model, _ = build_sharded(mesh, tracker)
            layers = [f"{name}.{number}" for name, own in _stacks(model) for number in range(len(own))]
            alive: list[Any] = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]
            seen = {one._cdata for one in alive}
            before: dict[int, Any] = {}
            first: set[int] = set()
            inside: list[tuple[int | None, str]] = []
            runs = itertools.count()
            found: Saved = defaultdict(list)
            ends: dict[int, tuple[str, str, int, int]] = {}
            bases = {one.rpartition(".")[0].rpartition(".")[0] for one in layers}

            def enter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
                owner = next((one for one in layers if name == one or name.startswith(f"{one}.")), None)
                if name == owner:
                    given = [*args[:1], kwargs.get("hidden_states")]
                    before.clear()
                    before.update(
                        {key: one() for key, (one, _) in tracker._storages.items()}
                    )  # no other gets their place
                    for one in given:
                        if isinstance(one, Tensor):
                            before.pop(_storage(one), None)
                    if not first:
                        first.update(before)
                if owner is not None:  # a module that layers share has the name of the first
                    layer = inside[-1][0] if inside and inside[-1][0] is not None else next(runs)
                    inside.append((layer, name.removeprefix(owner).removeprefix(".")))
                else:
                    inside.append((None, name))

            def leave() -> None:
                inside.pop()

            def pack(tensor: Tensor) -> Tensor:
                storage, size = _storage(tensor), tensor.element_size()
                count, (layer, name) = tensor.untyped_storage().nbytes() // size, inside[-1]
                dtype = str(tensor.dtype).removeprefix("torch.")
                dtype = f"part of {dtype}" if tensor.numel() < count else dtype
                if layer is None:
                    parent, _, own = name.rpartition(".")
                    of_end = name in bases or (parent and not (parent in bases and LAST.match(own)))
                    if tensor.is_floating_point() and (of_end or not first):
                        alive.append(tensor.untyped_storage())
                        ends.setdefault(storage, (f"{BEHIND if first else FRONT}:{name}", dtype, count, size))
                elif storage not in seen:
                    if storage not in before:
                        found[layer].append((name, dtype, count, size))
                    elif storage in first and (tensor.is_floating_point() or tensor.is_complex()):
                        found[OUTSIDE].append(("", "", count, size))
                    else:
                        return tensor
                    seen.add(storage)
                    alive.append(tensor.untyped_storage())
                return tensor

            for name, module in model.named_modules():
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: enter(name, args, kwargs), with_kwargs=True
                )
                module.register_forward_hook(lambda *_: leave(), always_call=True)
            batch = batch_of(mesh)
            with META, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(**batch)
        gc.collect()
    for storage, one in ends.items():
        if storage not in seen:
            found[0].append(one)
    return found


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The lists of layers of a model: none of them lies in another one."""
    found: list[str] = []
    for name, module in model.named_modules():
        named = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in STACKS
        if named and not any(name.startswith(f"{one}.") for one in found):
            found.append(name)
            yield name, module


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def leaves(layers: Sequence[Kept]) -> tuple[Any, list[list[Kept]]]:
    """Questions that tell apart layers that do not save the same, as `[question, yes, no]`, and the layers of each end.

    Where no question does, those that are most are meant.
    """
    signatures = Counter(one.signature for one in layers)
    if max(signatures.values()) < USUAL * len(layers):
        asked = {question for one in layers for question in one.flags}
        best, least = None, _mixed(layers)
        for question in sorted(asked, key=lambda one: (one in RARE, one not in ("routed", "attends"), len(one), one)):
            halves = (
                [one for one in layers if one.flags.get(question)],
                [one for one in layers if not one.flags.get(question)],
            )
            if all(halves) and (mixed := sum(map(_mixed, halves))) < least - 1e-9:
                best, least = (question, halves), mixed
        if best is not None:
            question, halves = best
            (yes, first), (no, second) = map(leaves, halves)
            return [question, yes, _shifted(no, len(first))], first + second
    usual = signatures.most_common(1)[0][0]
    return 0, [[one for one in layers if one.signature == usual]]


def _shifted(tree: Any, by: int) -> Any:
    return tree + by if isinstance(tree, int) else [tree[0], _shifted(tree[1], by), _shifted(tree[2], by)]


def _mixed(layers: Sequence[Kept]) -> float:
    """Gini's impurity of what layers save, times their number."""
    counts = Counter(one.signature for one in layers).values()
    return len(layers) - sum(count * count for count in counts) / len(layers)


class Products:
    """Products of up to three sizes, told apart by how they vary over some layers."""

    def __init__(self, layers: Sequence[Kept]) -> None:
        self.numbers = [one.numbers for one in layers]
        names = set.intersection(*map(set, self.numbers))
        by_course: dict[tuple[float, ...], str] = {}
        for name in sorted(names, key=lambda one: (not CUT.search(one), one.count("+"), one.count("."), len(one), one)):
            course = _course([one[name] for one in self.numbers])
            if any(course):
                by_course.setdefault(course, name)
        self.courses = {name: np.array(course) for course, name in by_course.items()}
        self.pairs: dict[tuple[float, ...], tuple[str, ...]] = {_rounded(np.zeros(len(layers))): ()}
        pairs = list(combinations_with_replacement(self.courses, 2))
        if len({one.tp for one in layers}) == 1:  # heads of a rank make hidden states, too: heads are meant
            self._add(pair for pair in pairs if any(CUT.search(name) for name in pair))
        self._add((name,) for name in self.courses)
        self._add(pairs)

    def _add(self, products: Iterable[tuple[str, ...]]) -> None:
        for names in products:
            self.pairs.setdefault(_rounded(sum(self.courses[name] for name in names)), names)

    def find(self, values: Sequence[float]) -> tuple[float, tuple[str, ...]] | None:
        """The product that follows these values, and what it is multiplied by."""
        course = np.array(_course(values))
        names = self.pairs.get(_rounded(course))
        if names is None:
            further = ((name, self.pairs.get(_rounded(course - own))) for name, own in self.courses.items())
            names = next(((name, *pair) for name, pair in further if pair is not None), None)
        if names is None:
            return None
        return values[0] / float(np.prod([self.numbers[0][name] for name in names])), tuple(sorted(names))


def _course(values: Sequence[float]) -> tuple[float, ...]:
    logs = np.log(np.array(values, dtype=float))
    return tuple(np.round(logs - logs[0], 7))


def _rounded(course: Any) -> tuple[float, ...]:
    return tuple(np.round(course, 4) + 0.0)


def rows_of(layers: Sequence[Kept], group: str) -> tuple[dict[str, Any], list[str]]:
    """The rows of layers that save the same, by what they are of; and what follows no product."""
    products, missed = Products(layers), []
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for index, (module, dtype) in enumerate(layers[0].signature):
        counts, size = [one.tensors[index][2] for one in layers], layers[0].tensors[index][3]
        for basis in ("tokens", "own", "layer") if group in GROUPS[1:] else ("own", "tokens", "seen", "pairs", "layer"):
            each = [count / getattr(one, basis, 1) for count, one in zip(counts, layers, strict=True)]
            if (product := products.find(each)) is not None:
                rows[basis]["·".join(product[1])] += product[0] * size
                break
        else:
            missed.append(f"{module} {dtype} {[round(one, 2) for one in each[:4]]}")
    found: dict[str, Any] = {
        basis: {name: round(one, 4) for name, one in sorted(own.items())} for basis, own in sorted(rows.items())
    }
    if group == "mlp" and (numbers := layers[0].sort.shape.mlp.activation_numbers):
        found["activation_numbers"] = numbers
    return found, missed


def counted(layer: Kept, element_bytes: int) -> float:
    """What the compiler's table says that a layer keeps, in bytes."""
    of_token = sort_bytes(layer.sort, layer.tp, layer.own < layer.tokens, element_bytes)
    return of_token.total * layer.tokens + of_token.layer


def _group(sort: Sort, module: str) -> str | None:
    """Of which group a module of a layer or of an end is; None: it carries a state (`kept_states.py`)."""
    if (end := module.partition(":")[0]) in ENDS:
        return end
    if module == "ple" or module.startswith("ple."):  # n-grams
        return BESIDE
    if (shared := SHARED.match(module)) is not None:
        of_use = re.search("adapter|q_proj$|gate_up_proj$", module)  # adapters, and what goes into both
        return BESIDE if of_use else {"self_attn": "attention", "feed_forward": "mlp"}.get(shared.group(1), BESIDE)
    module = re.sub(r"^mamba_decoder\.?", "", module)
    top = module.partition(".")[0]
    replaced = any(one.replaces_attention for one in sort.parts)
    if (replaced and not OTHERS.search(top)) or (not replaced and STATES.search(module)):
        return None
    if not top or STREAM.search(top):
        return "stream"
    attention = ATTENTION.search(top) or (sort.shape.stack.blocks is not None and sort.attends)
    return "attention" if attention else "mlp"


class Read(NamedTuple):
    """A type, what was read of it, and what is wrong with that."""

    kind: str
    found: dict[str, Any]
    wrong: list[str]


def read(kind: str, groups: Sequence[str] = (*GROUPS, *FURTHER)) -> Read:
    """The rows of a type, of the first series of draws whose rows give what unseen ones of it keep."""
    for series in range(SERIES):
        if not (found := _read(kind, series, groups)).wrong:
            break
    return found


def _read(kind: str, series: int, groups: Sequence[str]) -> Read:
    """Of the first series those of a type that was read before, if layers of this one keep the same; else learned."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    others = [one for name, one in stored().items() if name != kind and not series]
    for word, precision in WORDS.items():
        seed = f"{kind} {precision} {series}"
        draws = _draws(seed, kind, precision, wrong, SPLIT + WHOLE * (series > 1))
        layers = [one for _ in range(ALIKE) for one in next(draws, [])]
        while layers and len({one.tp for one in layers}) == 1 and (more := next(draws, [])):
            layers += more
        if not layers:
            continue
        wrong += [f"{word}: never varied: {fixed}" for fixed in _never_varied(layers)]
        found[word] = {
            group: next(
                (
                    one[word][group]
                    for one in others
                    if group in one[word]
                    and all(abs(off(one[word], each, [group])) < EXACT for each in of_group(layers, group))
                ),
                None,
            )
            for group in groups
        }
        if None in found[word].values():
            _learn(found[word], layers, draws, word, wrong)
        whole = _draws(f"{seed} whole", kind, precision, wrong, WHOLE)
        unseen = [one for some in (draws, whole) for _ in range(UNSEEN) for one in next(some, [])]
        judged = [one for one in (GROUPS, *((one,) for one in FURTHER)) if one[0] in groups]
        of_ends = [one for one in unseen if one.sort.first]
        offs = [off(found[word], one, own) for own in judged for one in (of_ends if own[0] in ENDS else unseen)]
        if any(abs(one) > NEAR for one in offs):
            wrong.append(f"{word}: off by {[f'{one:+.2%}' for one in sorted(offs, key=abs)[-3:]]} of {len(offs)}")
        found["always"] = answered_alike(layers, found.get("always"))
    return Read(kind, found, list(dict.fromkeys(wrong)))


TABLED = re.compile(r"^head_dim$|qk_rope_head_dim$")
"""Sizes that tables of rotary positions may have."""


def tables_of(layers: Sequence[Kept]) -> dict[str, float]:
    """Bytes of each token in tables of rotary positions, as a multiple of a size; empty: there are none."""
    of_token = [one.outside / one.tokens for one in layers]
    for name in sorted({name for one in layers for name in one.numbers if TABLED.search(name)}, key=len, reverse=True):
        ratios = {round(size / one.numbers.get(name, math.inf), 6) for size, one in zip(of_token, layers, strict=True)}
        if len(ratios) == 1 and (ratio := ratios.pop()):
            return {name: ratio}
    return {}


def read_tables(kind: str) -> tuple[str, dict[str, dict[str, float]], str]:
    """Those of a type by the bits of the weights, and what is wrong."""
    found, wrong = {}, ""
    for word, precision in WORDS.items():
        draws = _draws(f"{kind} {precision} tables", kind, precision, [], SPLIT)
        layers = [own[0] for own in itertools.islice(filter(None, draws), FEW // 2)]
        if layers and (row := tables_of(layers)):
            found[word] = row
        elif any(one.outside for one in layers):
            wrong = f"tables of {[round(one.outside / one.tokens, 3) for one in layers]} bytes follow no size"
    return kind, found, wrong


def read_states(kind: str) -> Read:
    """The rows of a type's modules that carry a state by the bits of the weights, and what is wrong."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    traits = FAMILIES[kind].part(RecurrentTraits)
    name = "" if traits is None else traits.kind.__name__
    others = [one for other, one in stored().items() if other != kind]
    for word, precision in WORDS.items() if name else ():

        def layers(spread: Spread, precision: str = precision) -> Iterator[Kept]:
            seed = f"{kind} {precision} {spread}"
            for own in _draws(seed, kind, precision, wrong, (*WHOLE, *SPLIT), spread):
                yield from [one for one in own if part_of(one) is not None][:1]

        known = [one[word][name]["tree"] for one in others if name in one[word]]
        if (tree := tree_of(layers, known, wrong, word)) is not None:
            found[word] = {name: {"tree": tree, "rows": []}}
    return Read(kind, found, wrong)


def _draws(
    seed: str, kind: str, precision: str, wrong: list[str], tps: Sequence[int], of_states: Spread | None = None
) -> Iterator[list[Kept]]:
    """The layers of one draw after the other; why there are none, where all are refused."""
    pick, refused = random.Random(seed), 0
    gc.freeze()  # modules of torch need not be looked through after each draw
    for number in range((6 if of_states is None else 60) * MOST):
        try:
            yield drawn(kind, pick, precision, number, tps, of_states)
        except Exception as error:
            refused += 1
            if refused == number + 1 == 3 * MOST:
                wrong.append(f"{precision}: {type(error).__name__}: {error}"[:160])
                return


def _learn(found: dict[str, Any], layers: list[Kept], draws: Iterator[list[Kept]], word: str, wrong: list[str]) -> None:
    """Fills in the groups that are None."""
    unknown = [group for group, one in found.items() if one is None]
    for number in range(MOST):
        held = {group: of_group(layers, group) for group in unknown} if number % 5 == 0 else {}
        if held and min(_unlike(own, of) for of in held.values() for own in leaves(of)[1]) >= FEW:
            break
        layers += next(draws, [])
    for group in unknown:
        kept_here = of_group(layers, group)
        tree, every = leaves(kept_here)
        rows = []
        for own in every:
            read_rows, missed = rows_of(own, group)
            rows.append(read_rows)
            wrong += [f"{word} ({len(own)} layers): {one}" for one in missed]
            if _unlike(own, kept_here) < FEW and own[0].tensors:
                wrong.append(f"{word}: {group} of {_unlike(own, kept_here)} draws only")
        found[group] = {"tree": tree, "rows": rows}


def of_group(layers: Sequence[Kept], group: str) -> list[Kept]:
    """What a group of modules keeps of these layers; an end of those that are the first of their model."""
    return [one.of(group) for one in layers if one.sort.first or group not in ENDS]


def _unlike(layers: Sequence[Kept], every: Sequence[Kept]) -> int:
    """How many of these layers have sizes of their own; too few, where all have a size alike that varies elsewhere.

    Those that keep nothing need none.
    """
    if not layers[0].tensors:
        return FEW
    found, tps = len({(one.sort, one.tp, one.tokens) for one in layers}), {one.tp for one in layers}
    if _varied(every) - _varied(layers):
        return min(found, FEW - 1)
    return found if tps == set(WHOLE) or len(tps) > 1 else found // 2  # what tp divides has to be seen


def _varied(layers: Sequence[Kept]) -> set[str]:
    values: dict[str, set[float]] = defaultdict(set)
    for one in layers:
        for name in SIZES:
            values[name].add(sizes(one.sort)[0].get(name, 0))
    return {name for name, own in values.items() if len(own) > 1}


def answered_alike(layers: Sequence[Kept], before: Mapping[str, bool] | None = None) -> dict[str, bool]:
    """The answers that all layers give to questions which another configuration of the type may answer otherwise."""
    answers: dict[str, set[bool]] = defaultdict(set)
    asked = {question for one in layers for question in one.flags if ASKED.search(question)}
    for one in layers:
        for question in asked:
            answers[question].add(one.flags.get(question, False))
    found = {question: values.pop() for question, values in sorted(answers.items()) if len(values) == 1}
    return {question: answer for question, answer in found.items() if before is None or before.get(question) == answer}


def _never_varied(layers: Sequence[Kept]) -> list[str]:
    every: dict[str, set[float]] = defaultdict(set)
    for one in layers:
        for name, value in sizes(one.sort)[0].items():
            every[name].add(value)
    fixed = (name for name, values in every.items() if len(values) == 1 and max(values) > 1 and "+" not in name)
    return [name for name in fixed if not FIXED.search(name)]


def off(trees: Mapping[str, Any], layer: Kept, groups: Sequence[str] = GROUPS) -> float:
    """By how much rows miss what groups of modules of a layer keep."""
    counted, kept = 0.0, 0
    for group in groups:
        leaf = trees[group]["tree"]
        while not isinstance(leaf, int):
            leaf = leaf[1] if layer.flags.get(leaf[0]) else leaf[2]
        rows = trees[group]["rows"][leaf]
        for basis in rows.keys() - {"activation_numbers"}:
            for name, size in rows[basis].items():
                names = [one for one in name.split("·") if one]
                counted += getattr(layer, basis, 1) * size * math.prod(layer.numbers.get(one, 0) for one in names)
        kept += sum(count * size for _, _, count, size in layer.of(group).tensors)
    return counted / max(1, kept) - 1 if kept or counted else 0.0


def main() -> int:
    """Reads the types, and writes those without a mistake; the exit code is 1 where one has a mistake."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="by default those that the file does not have")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tables", action="store_true", help="only tables of rotary positions, of types that it has")
    parser.add_argument("--only", nargs="+", choices=(*GROUPS, *FURTHER), help="only these, of types that it has")
    parser.add_argument("--states", action="store_true", help="only modules that carry a state, of types that it has")
    given = parser.parse_args()
    logging.set_verbosity_error()
    types, wrong = stored(), False
    wanted = given.types or [kind for kind in FAMILIES if kind not in types]
    if given.tables:
        with ProcessPoolExecutor(given.jobs) as pool:
            for kind, found, said in pool.map(read_tables, given.types or sorted(types)):
                print(f"{kind}: {said or found}"[:300], flush=True)
                types[kind]["tables"] = found
        FILE.write_text(table(types), encoding="utf-8")
        return 0
    if given.states or given.only:
        reading = read_states if given.states else partial(read, groups=given.only)
        with ProcessPoolExecutor(given.jobs) as pool:
            for done in as_completed(pool.submit(reading, kind) for kind in given.types or sorted(types)):
                wrong = _told(types, *done.result()) or wrong
        return int(wrong)
    with ProcessPoolExecutor(given.jobs) as pool:
        for done in as_completed(pool.submit(read, kind) for kind in wanted):
            one = done.result()
            print(f"{one.kind}: {'; '.join(one.wrong) or 'exact'}"[:900], flush=True)
            wrong = wrong or bool(one.wrong)
            if not one.wrong:
                _, tables, _ = read_tables(one.kind)
                types[one.kind] = {**one.found, "tables": tables}
                FILE.write_text(table(types), encoding="utf-8")
                wrong = _told(types, *read_states(one.kind)) or wrong
    return int(wrong)


def _told(types: dict[str, Any], kind: str, found: dict[str, Any], wrong: list[str]) -> bool:
    """Writes what was read of some groups of a type, if nothing is wrong with it; whether something is."""
    if found or wrong:
        print(f"{kind}, {', '.join(next(iter(found.values()), ()))}: {'; '.join(wrong) or 'exact'}"[:900], flush=True)
    if not wrong:
        for word in found.keys() & WORDS:
            types[kind][word].update(found[word])
        FILE.write_text(table(types), encoding="utf-8")
    return bool(wrong)


def stored() -> dict[str, Any]:
    """What the file has of each type; nothing, where it is of other versions."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    if known["versions"] != VERSIONS:
        return {}
    found: dict[str, Any] = {}
    for kind, words in known["types"].items():
        found[kind] = {"always": dict(known["answers"][words["always"]]), "tables": words.get("tables", {})}
        for word in WORDS:
            found[kind][word] = {
                group: {"tree": tree, "rows": known["rows"]}
                if group in (*GROUPS, *FURTHER)
                else {"tree": _with_rows(tree, known["rows"]), "rows": []}
                for group, tree in words[word].items()
            }
    return found


def _with_rows(tree: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """The tree of a module that carries a state, with rows in the place of their numbers."""
    return rows[tree] if isinstance(tree, int) else [tree[0], *(_with_rows(one, rows) for one in tree[1:])]


def table(types: Mapping[str, Any]) -> str:
    """The file: each set of rows, and of answers, once."""
    parts: dict[str, dict[str, int]] = {"answers": {}, "rows": {}}

    def number(part: str, one: Mapping[str, Any]) -> int:
        return parts[part].setdefault(json.dumps(one, ensure_ascii=False), len(parts[part]))

    def numbered(tree: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
        if isinstance(tree, int):
            return number("rows", rows[tree])
        if isinstance(tree, dict):
            return number("rows", tree)
        return [tree[0], *(numbered(one, rows) for one in tree[1:])]

    lines = []
    for kind, words in sorted(types.items()):
        trees: dict[str, Any] = {"always": number("answers", words["always"])}
        for word in WORDS:
            trees[word] = {group: numbered(one["tree"], one["rows"]) for group, one in words[word].items()}
        trees["tables"] = words["tables"]
        lines.append(f"    {json.dumps(kind)}: {json.dumps(trees)}")
    text = f'{{\n  "versions": {json.dumps(VERSIONS)},\n  "types": {{\n' + ",\n".join(lines) + "\n  }"
    for name, own in parts.items():
        text += f',\n  "{name}": [\n' + ",\n".join(f"    {one}" for one in own) + "\n  ]"
    return text + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())

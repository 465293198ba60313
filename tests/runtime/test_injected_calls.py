"""Contract: what transformers' own tests of models ask, an injected model answers as one process, or refuses by name.

Every family at tp 2, with and without sequence parallelism. Weights are drawn in fp32; an answer may differ by 1e-4 of
its largest number, which is more than rounding does to these models and far less than any mistake does.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_runs import drawn_model, family_plan, of_plan
from ranks import run_ranks
from torch import Tensor
from training_runs import whole_parameters

from parcompile.plan import Plan

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

FAMILIES = (
    *("llama", "gemma2", "gemma3_text", "phi3", "gpt2", "bloom", "cohere2"),
    *("deepseek_v3", "mixtral", "qwen3_moe", "falcon_mamba", "jamba"),
)
"""Windows in some layers and in all, tied heads, fused projections, learned positions, biases by distance, one norm for
two blocks, latent attention, experts, states, layers of several kinds."""
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "tp2": ({"tp": 2}, FAMILIES, ()),
    "tp2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, FAMILIES, ()),
    # Ranks of cp draw each for itself, and none has the last tokens of a whole sequence.
    "cp2": ({"cp": 2}, ("llama", "falcon_mamba"), ("`generate`: sampled", "`logits_to_keep`")),
}
"""Each with its families and the questions that are left out."""
CLOSE = 1e-4
IDS = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(7))
RIGHT = (torch.arange(16) < torch.tensor([16, 9])[:, None]).long()
DOCUMENTS = (0, 7, 16)
POSITIONS = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1)
LABELS = IDS.masked_fill(POSITIONS == 0, -100)
NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}


class Asked:
    """A model whose answers are put together from those of all ranks; without a mesh it is transformers' own."""

    def __init__(self, model: Any, mesh: Any = None) -> None:
        self.model, self.mesh = model, mesh

    def __call__(self, **given: Any) -> Any:
        output = self.model(**given)
        output.logits = self.logits(output.logits)
        output.hidden_states = self.tokens(output.hidden_states)
        return output

    def base(self, *args: Any, **given: Any) -> Any:
        output = self.model.base_model(*args, **given)
        for name in ("last_hidden_state", "hidden_states") if not isinstance(output, tuple) else ():
            setattr(output, name, self.tokens(getattr(output, name)))
        return output

    def logits(self, logits: Tensor) -> Tensor:
        """Those of all words and tokens."""
        from parcompile.runtime.collectives import gather_from_group

        if self.mesh is None:
            return logits
        return self.tokens(gather_from_group(logits, -1, self.mesh.parallel_group("tp"))[..., :61])

    def tokens(self, values: Any) -> Any:
        """Those of whole sequences."""
        from parcompile.runtime.loss import whole_sequences

        if self.mesh is None or values is None:
            return values
        if isinstance(values, tuple):
            return tuple(map(self.tokens, values))
        return whole_sequences(values, self.mesh)

    def summed(self, gradient: Tensor | None, like: Tensor) -> Tensor:
        """As the engine adds gradients up."""
        found = torch.zeros_like(like) if gradient is None else gradient.clone()
        if self.mesh is not None:
            torch.distributed.all_reduce(found, group=self.mesh.group("dp-cp"))
        return found

    def trained(self, call: Callable[[], Tensor]) -> dict[str, Any]:
        """A loss and its gradients, those of this rank's parameters."""
        self.model.zero_grad()
        loss = call()
        loss.backward()
        gradients = {name: self.summed(one.grad, one.detach()) for name, one in self.model.named_parameters()}
        self.model.zero_grad()
        return {"loss": loss.detach().clone(), "gradients": gradients}

    def of_documents(self, call: Callable[..., Tensor]) -> Tensor:
        """What a call gives for packed documents: in one process for one after the other."""
        if self.mesh is not None:
            return call(input_ids=IDS, position_ids=POSITIONS)
        return torch.cat([call(input_ids=IDS[:, a:b]) for a, b in itertools.pairwise(DOCUMENTS)], 1)

    def packed_loss(self) -> Tensor:
        if self.mesh is not None:
            loss: Tensor = self.model(input_ids=IDS, position_ids=POSITIONS, labels=LABELS).loss
            return loss
        logits = self.of_documents(lambda **given: self.model(**given).logits)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())

    def base_loss(self) -> Tensor:
        hidden = self.of_documents(lambda **given: self.base(**given).last_hidden_state)
        return (hidden * torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)).mean()

    def recomputed(self, enable: str, call: Callable[[], Tensor]) -> dict[str, Any]:
        # One process computes once: what is recomputed has to be the same.
        if self.mesh is not None:
            getattr(self.model, enable)()
            assert any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        try:
            return self.trained(call)
        finally:
            if self.mesh is not None:
                self.model.activation_checkpointing_disable()


def hidden_by_config(asked: Asked) -> Any:
    asked.model.config.output_hidden_states = True
    try:
        return asked(input_ids=IDS).hidden_states
    finally:
        asked.model.config.output_hidden_states = False


def embedded(asked: Asked) -> Any:
    """Embeddings that a caller looks up by himself, and their gradient."""
    rows = asked.model.get_input_embeddings()(IDS).detach().requires_grad_()
    output = asked(inputs_embeds=rows, labels=IDS, position_ids=torch.arange(16)[None])
    output.loss.backward()
    asked.model.zero_grad()
    return rows, output.loss, output.logits, asked.summed(rows.grad, rows.detach())


def sampled(asked: Asked) -> Any:
    """As `generate` of a plan draws: by a number that the ranks agree on."""
    torch.manual_seed(5)
    if asked.mesh is None:
        torch.manual_seed(int(torch.randint(2**62, (1,))))
    return asked.model.generate(IDS[:, :7], do_sample=True, **NEW)


def with_scores(asked: Asked) -> Any:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    found = asked.model.generate(IDS[:, :7], do_sample=False, **more, **NEW)
    return found.sequences, found.scores, found.hidden_states


def without_dict(asked: Asked) -> Any:
    trained = asked.model(input_ids=IDS, labels=IDS, return_dict=False)
    decoded = asked.model(input_ids=IDS, use_cache=True, return_dict=False)
    assert isinstance(trained, tuple)
    assert isinstance(decoded, tuple)
    return trained[0], asked.logits(trained[1]), decoded[0]


def by_base(asked: Asked) -> Any:
    base = asked.base
    padded = base(input_ids=IDS, attention_mask=RIGHT).last_hidden_state
    return {
        "whole": base(IDS).last_hidden_state,
        "padded": padded[RIGHT.bool()],
        "packed": asked.of_documents(lambda **given: base(**given).last_hidden_state),
        "tuple": asked.tokens(base(IDS, return_dict=False)[0]),
        "hidden": base(IDS, output_hidden_states=True).hidden_states,
        "embedded": base(inputs_embeds=asked.model.get_input_embeddings()(IDS)).last_hidden_state,
    }


def tied(asked: Asked) -> Any:
    def are_tied() -> Tensor:
        ends = asked.model.get_input_embeddings(), asked.model.get_output_embeddings()
        return torch.tensor(ends[0].weight is ends[1].weight)

    before = are_tied()
    asked.model.tie_weights()
    return before, are_tied()


QUESTIONS: dict[str, Callable[[Asked], Any]] = {
    "`input_ids`": lambda asked: asked(input_ids=IDS).logits,
    "padding on the right, packed documents: mask": lambda asked: asked(input_ids=IDS, attention_mask=RIGHT).logits[
        RIGHT.bool()
    ],
    "padding on the right, packed documents: positions": lambda asked: asked.of_documents(
        lambda **given: asked(**given).logits
    ),
    "`output_hidden_states`": lambda asked: asked(input_ids=IDS, output_hidden_states=True).hidden_states,
    "`output_hidden_states`: one": lambda asked: asked(input_ids=IDS, output_hidden_states=[1]).hidden_states,
    "`output_hidden_states`: by the configuration": hidden_by_config,
    "`inputs_embeds`": embedded,
    "`logits_to_keep`": lambda asked: [
        asked(input_ids=IDS, logits_to_keep=kept).logits for kept in (1, 3, torch.tensor([0, 5]))
    ],
    "`return_dict=False`": without_dict,
    "`model.base_model(…)`": by_base,
    "`tie_weights()`": tied,
    "`generate`: greedy": lambda asked: asked.model.generate(IDS[:, :7], do_sample=False, **NEW),
    "`generate`: padded on the left": lambda asked: asked.model.generate(
        IDS, attention_mask=RIGHT.flip(1), do_sample=False, use_cache=True, **NEW
    ),
    "`generate`: beams": lambda asked: asked.model.generate(IDS[:, :7], do_sample=False, num_beams=3, **NEW),
    "`generate`: sampled": sampled,
    "`generate`: scores": with_scores,
    "`generate`: embeddings": lambda asked: asked.model.generate(
        inputs_embeds=asked.model.get_input_embeddings()(IDS[:, :7]), do_sample=False, **NEW
    ),
}
"""What tensors are asked for, by the row of the table in docs/generating.md."""


def loss_of(asked: Asked) -> Tensor:
    found: Tensor = asked.model(input_ids=IDS, labels=IDS).loss
    return found


_RECOMPUTED = "`gradient_checkpointing_enable()`, `activation_checkpointing_enable()`"
TRAINED: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "`labels`": lambda asked: asked.trained(lambda: loss_of(asked)),
    "`labels`: packed": lambda asked: asked.trained(asked.packed_loss),
    "`model.base_model(…)`: gradients": lambda asked: asked.trained(asked.base_loss),
    _RECOMPUTED: lambda asked: asked.recomputed("gradient_checkpointing_enable", lambda: loss_of(asked)),
    f"{_RECOMPUTED}: packed": lambda asked: asked.recomputed("gradient_checkpointing_enable", asked.packed_loss),
    f"{_RECOMPUTED}: new name": lambda asked: asked.recomputed("activation_checkpointing_enable", asked.packed_loss),
    f"{_RECOMPUTED}: base": lambda asked: asked.recomputed("gradient_checkpointing_enable", asked.base_loss),
}
"""Whose gradients are asked for."""


def with_config(asked: Asked, name: str, value: Any) -> None:
    before = getattr(asked.model.config, name)
    setattr(asked.model.config, name, value)
    try:
        asked.model(input_ids=IDS, labels=IDS)
    finally:
        setattr(asked.model.config, name, before)


def with_fixed_cache(asked: Asked) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=asked.model.config, max_cache_len=24)
    asked.model(input_ids=IDS, past_key_values=cache)


_ATTENTIONS = "output_attentions: no kernel of an injected model keeps"
_IMPLEMENTATION = "an injected model attends by 'parcompile.*', around the ring"
_FIXED = "a cache that grows, not with one of fixed length"
_BASE = "the base model of an injected model was called with use_cache or past_key_values: decode with the whole model"
_PADDED = "row 1 of the attention_mask has padding before or between tokens"
REFUSED: dict[str, tuple[str, Callable[[Asked], Any]]] = {
    "`output_attentions`": (_ATTENTIONS, lambda asked: asked.model(input_ids=IDS, output_attentions=True)),
    "`output_attentions`: by the configuration": (
        _ATTENTIONS,
        lambda asked: with_config(asked, "_output_attentions", True),
    ),
    "`output_attentions`: of the base model": (_ATTENTIONS, lambda asked: asked.base(IDS, output_attentions=True)),
    "`output_attentions`: generated": (
        _ATTENTIONS,
        lambda asked: asked.model.generate(
            IDS, do_sample=False, output_attentions=True, return_dict_in_generate=True, **NEW
        ),
    ),
    "`set_attn_implementation`": (_IMPLEMENTATION, lambda asked: asked.model.set_attn_implementation("eager")),
    "`set_attn_implementation`: of the base model": (
        _IMPLEMENTATION,
        lambda asked: asked.model.base_model.set_attn_implementation("parcompile_ring"),
    ),
    "`set_attn_implementation`: by the configuration": (
        _IMPLEMENTATION,
        lambda asked: with_config(asked, "_attn_implementation", "sdpa"),
    ),
    "`past_key_values`, `use_cache=True` of the base model": (_BASE, lambda asked: asked.base(IDS, use_cache=True)),
    "`generate_batch`, `init_continuous_batching`": (
        r"generate_batch\(\) on an injected model: continuous batching has an attention of its own",
        lambda asked: asked.model.generate_batch([[1, 2]]),
    ),
    "`generate_batch`, `init_continuous_batching`: by hand": (
        r"init_continuous_batching\(\) on an injected model",
        lambda asked: asked.model.init_continuous_batching(),
    ),
    "padding on the left, without `generate` or `use_cache=True`": (
        _PADDED,
        lambda asked: asked.model(input_ids=IDS, attention_mask=RIGHT.flip(1)),
    ),
    "padding on the left, without `generate` or `use_cache=True`: of the base model": (
        _PADDED,
        lambda asked: asked.base(IDS, attention_mask=RIGHT.flip(1)),
    ),
    "`resize_token_embeddings`": (
        "resize_token_embeddings to 80 tokens",
        lambda asked: asked.model.resize_token_embeddings(80),
    ),
    "`set_input_embeddings`, `set_output_embeddings`": (
        r"set_input_embeddings\(\) on an injected model: words are dealt to the ranks",
        lambda asked: asked.model.set_input_embeddings(torch.nn.Embedding(61, 32)),
    ),
    "`set_input_embeddings`, `set_output_embeddings`: the head": (
        r"set_output_embeddings\(\) on an injected model: words are dealt to the ranks",
        lambda asked: asked.model.set_output_embeddings(torch.nn.Linear(32, 61)),
    ),
    "`activation_checkpointing_enable(offload=True)`": (
        r"activation_checkpointing_enable\(offload=True\) on an injected model",
        lambda asked: asked.model.activation_checkpointing_enable(offload=True),
    ),
    "`copy.deepcopy`, `torch.save`": ("cannot be copied or pickled", lambda asked: copy.deepcopy(asked.model)),
}
"""What is said of each, and how it is asked for."""


def balances(family: str) -> bool:
    """Others have no loss of routers."""
    return family in ("mixtral", "qwen3_moe", "jamba")


def attends(family: str) -> bool:
    """States alone have no length."""
    return family != "falcon_mamba"


SOMETIMES: dict[str, tuple[str, Callable[[Asked], Any], Callable[[str, str], bool]]] = {
    "`cache_implementation='static'`, a `StaticCache`": (_FIXED, with_fixed_cache, lambda _, family: attends(family)),
    "`cache_implementation='static'`, a `StaticCache`: generated": (
        _FIXED,
        lambda asked: asked.model.generate(
            IDS, do_sample=False, use_cache=True, cache_implementation="static", disable_compile=True, **NEW
        ),
        lambda _, family: attends(family),
    ),
    "`output_router_logits`": (
        "the balancing loss of the class knows nothing of other ranks",
        lambda asked: asked.model(input_ids=IDS, labels=IDS, output_router_logits=True),
        lambda _, family: balances(family),
    ),
    "`output_router_logits`: by the configuration": (
        "the balancing loss of the class knows nothing of other ranks",
        lambda asked: with_config(asked, "output_router_logits", True),
        lambda _, family: balances(family),
    ),
    "`state_dict()`": (
        r"state_dict\(\) of this model would hold the slices",
        lambda asked: asked.model.state_dict(),
        lambda layout, _: layout != "cp2",
    ),
    "`logits_to_keep` under cp": (
        "logits_to_keep 1 under cp 2",
        lambda asked: asked.model(input_ids=IDS, logits_to_keep=1),
        lambda layout, _: layout == "cp2",
    ),
}
"""The same, with the layouts and families that refuse it."""


def answers(asked: Asked) -> dict[str, Any]:
    """To every question, or what was raised."""
    found: dict[str, Any] = {}
    for name, question in {**QUESTIONS, **TRAINED}.items():
        trains = name in TRAINED or question is embedded
        asked.model.train(trains)
        try:
            with torch.set_grad_enabled(trains):
                found[name] = question(asked)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def ask(rank: int, plans: list[Plan], folder: str) -> list[dict[str, Any]]:
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        own = of_plan(mesh, plan)
        asked = Asked(inject(drawn_model(plan), own), own)
        said = answers(asked)
        asked.model.save_pretrained(f"{folder}/{plan.spec.name}")
        asks = {name: one[1] for name, one in {**REFUSED, **SOMETIMES}.items()}
        found.append({"rank": rank, "answers": said, "refused": {name: refusal(asked, asks[name]) for name in asks}})
    return found


def refusal(asked: Asked, call: Callable[[Asked], Any]) -> str:
    """What a model says of what it refuses."""
    from parcompile.runtime import RunError

    try:
        with torch.no_grad():
            call(asked)
    except RunError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def asked_on_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, list[list[dict[str, Any]]]]]:
    """What the ranks of a layout say, each family in turn, and where they saved the models."""

    @functools.cache
    def run(layout: str) -> tuple[Path, list[list[dict[str, Any]]]]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, run_ranks(2, ask, [plan_of(layout, one) for one in LAYOUTS[layout][1]], str(folder))

    return run


@functools.cache
def in_one_process(family: str) -> dict[str, Any]:
    return answers(Asked(drawn_model(plan_of("tp2", family))))


@functools.cache
def plan_of(layout: str, family: str) -> Plan:
    return family_plan(family, 2, LAYOUTS[layout][0])


def differs(found: Any, expected: Any) -> str | None:
    """How an answer differs from that of one process."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor) and found.shape == expected.shape:
        if not expected.is_floating_point():
            return None if torch.equal(found, expected) else "other numbers"
        known = expected.isfinite()  # generate marks words that it leaves out
        far = (found - expected)[known].abs().max() / expected[known].abs().max().clamp(min=1e-20)
        return None if torch.equal(known, found.isfinite()) and far < CLOSE else f"{float(far):.1e} apart"
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        parts = {name: differs(found[name], expected[name]) for name in expected}
        return "; ".join(f"{name}: {said}" for name, said in parts.items() if said) or None
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(found) == len(expected):
        return next(filter(None, map(differs, found, expected)), None)
    if expected is None and found is None:
        return None
    shapes = [getattr(one, "shape", one) for one in (found, expected)]
    return f"{shapes[0]}, not {shapes[1]}"


CASES = [(layout, family) for layout, (_, families, _) in LAYOUTS.items() for family in families]


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_an_injected_model_answers_what_one_process_answers(layout: str, family: str, asked_on_ranks: Any) -> None:
    plan, (_, families, left_out) = plan_of(layout, family), LAYOUTS[layout]
    ranks = [rank[families.index(family)] for rank in asked_on_ranks(layout)[1]]
    wrong = {}
    for name, expected in in_one_process(family).items():
        assert not isinstance(expected, str), (name, expected)
        if name in left_out:
            continue
        for rank in ranks:
            found = rank["answers"][name]
            if isinstance(found, dict) and "gradients" in found:
                parts = [{"rank": one["rank"], "parameters": one["answers"][name]["gradients"]} for one in ranks]
                found = {**found, "gradients": whole_parameters(plan, parts)}
            if said := differs(found, expected):
                wrong[name] = said
    assert not wrong


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_what_an_injected_model_saves_is_the_whole_model(layout: str, family: str, asked_on_ranks: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = asked_on_ranks(layout)[0] / family
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = dict(drawn_model(plan_of(layout, family)).named_parameters())
    after = dict(loaded.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    ends = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    assert (ends[0].weight is ends[1].weight) == bool(in_one_process(family)["`tie_weights()`"][0])


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_what_no_rank_can_answer_is_refused_by_name(layout: str, family: str, asked_on_ranks: Any) -> None:
    families = LAYOUTS[layout][1]
    messages = {name: one[0] for name, one in REFUSED.items()}
    messages |= {name: message for name, (message, _, holds) in SOMETIMES.items() if holds(layout, family)}
    for rank in asked_on_ranks(layout)[1]:
        said = rank[families.index(family)]["refused"]
        assert not {name: said[name] for name, message in messages.items() if not re.search(message, said[name])}


def test_the_table_of_the_docs_has_a_row_for_each_question_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "generating.md").read_text(encoding="utf-8")
    rows = [
        line.strip("| ").split(" | ", 1) for line in text.partition("## Other calls")[2].splitlines() if "|" in line
    ]
    rows = rows[2:]
    refused = {name for name, answer in rows if answer.startswith("refused")}
    assert {name for name, _ in rows} - refused == row_names(QUESTIONS, TRAINED) | {"`save_pretrained`"}
    assert refused == row_names(REFUSED, SOMETIMES)


def row_names(*tables: dict[str, Any]) -> set[str]:
    return {name.partition(": ")[0] for table in tables for name in table}

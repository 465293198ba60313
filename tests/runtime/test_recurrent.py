"""Contract: layers that carry a state compute over ranks what one rank computes document by document.

The functions are transformers' own, in fp32; 1e-5 relative is some twenty times their rounding.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
from closeness import assert_close, assert_within, nudge
from families import tiny_config
from family_runs import config_plan, drawn_model, family_plan
from ranks import run_ranks
from torch import Tensor

from parcompile.cost.recurrent import kept_bytes
from parcompile.layout.sequence import CpLayout
from parcompile.runtime.recurrent import Chain, Pieces, Segment, convolve, gated_delta_rule, selective_scan, state_space
from parcompile.runtime.ring_attention import sequence as packings
from parcompile.runtime.ring_attention import split_sequence
from parcompile.spec.values import Precision, workload_of

RANKS, LENGTH = 2, 24
TOLERANCE = 1e-5
DOCUMENTS: dict[str, list[list[int]] | None] = {
    "one document": None,
    "borders in the middle of pieces, other ones in each row": [[0, 5, 24], [0, 13, 19, 24]],
    "a border between two pieces": [[0, 6, 24], [0, 12, 24]],
}


def inputs(length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    found = {name: torch.randn(2, length, 2, 6, generator=generator) for name in ("query", "key")}
    found["value"] = torch.randn(2, length, 4, 5, generator=generator)
    # A slow decay: what is far away still matters.
    found["g"] = -0.05 * torch.rand(2, length, 4, generator=generator)
    found["beta"] = torch.rand(2, length, 4, generator=generator)
    found["channels"] = torch.randn(2, 7, length, generator=generator)
    found["x"] = torch.randn(2, length, 4, 5, generator=generator)
    found["dt"] = torch.randn(2, length, 4, generator=generator)
    found |= {name: torch.randn(2, length, 2, 6, generator=generator) for name in ("B", "C")}
    # Of Mamba-1: channels come before tokens.
    found |= {name: torch.randn(2, 5, length, generator=generator) for name in ("u", "steps")}
    found |= {name: torch.randn(2, 3, length, generator=generator) for name in ("writes", "reads")}
    return found


def weight() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(6))


def compute(given: dict[str, Tensor], pieces: Pieces, chain: Chain | None) -> tuple[Tensor, ...]:
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

    options = {"g": given["g"], "beta": given["beta"], "use_qk_l2norm_in_kernel": True}
    names = ("query", "key", "value")
    rule = gated_delta_rule(
        torch_chunk_gated_delta_rule, pieces, chain, *(given[name] for name in names), in_fp32=True, **options
    )

    def convolution(x: Tensor) -> Tensor:
        return causal_conv1d_fn(x, weight(), None, activation="silu")

    decays = torch.tensor([-0.02, -0.05, -0.1, -2.0])
    mamba = state_space(
        mamba2_chunk_scan,
        pieces,
        chain,
        given["x"],
        given["dt"],
        decays,
        given["B"],
        given["C"],
        chunk_size=4,
        D=torch.tensor([0.5, 1.0, 1.5, 2.0]),
        dt_bias=torch.tensor([-1.0, 0.0, 1.0, 2.0]),
        dt_softplus=True,
        dt_limit=(0.1, 2.0),
    )
    selective = selective_scan(
        mamba_selective_scan,
        pieces,
        chain,
        *(given[name] for name in ("u", "steps")),
        -torch.tensor([0.02, 0.3, 2.0]) * torch.tensor([1.0, 0.1, 0.5, 2.0, 0.3])[:, None],
        *(given[name] for name in ("writes", "reads")),
        D=torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5]),
        delta_bias=torch.tensor([-1.0, 0.0, 1.0, 2.0, -2.0]),
        delta_softplus=True,
    )
    return rule, convolve(convolution, pieces, chain, given["channels"], 4), mamba, selective


def with_gradients(given: dict[str, Tensor], pieces: Pieces, chain: Chain | None) -> dict[str, Tensor]:
    """Outputs, and gradients of the sum of their squares."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    outs = compute(leaves, pieces, chain)
    sum(out.square().sum() for out in outs).backward()
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    names = ("rule", "convolution", "state space", "selective")
    return {**{name: out.detach() for name, out in zip(names, outs, strict=True)}, **found}


def document_by_document(borders: list[list[int]] | None) -> dict[str, Tensor]:
    """Row by row, each document as if it were alone."""
    rows = []
    for row in range(2):
        parts = []
        for start, stop in itertools.pairwise(borders[row] if borders else [0, LENGTH]):
            alone = {
                name: one[row : row + 1].narrow(along(name), start, stop - start) for name, one in inputs().items()
            }
            parts.append(with_gradients(alone, Pieces((), (Segment((0, 1), 0, stop - start, 0),)), None))
        rows.append({name: torch.cat([part[name] for part in parts], along(name)) for name in parts[0]})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def along(name: str) -> int:
    return 2 if name in ("channels", "convolution", "u", "steps", "writes", "reads", "selective") else 1


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - one).norm() / one.norm()) for name, one in expected.items()}


def on_rank(rank: int) -> dict[str, dict[str, float]]:
    """Of each layout and packing, how far this rank's part is from that of document by document."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {}
    for layout, (case, borders) in itertools.product((CpLayout.ZIGZAG, CpLayout.CONTIGUOUS), DOCUMENTS.items()):
        chain = Chain.of(layout, dist.group.WORLD)  # type: ignore[arg-type]
        local = {name: split_sequence(one, along(name), layout, RANKS, rank) for name, one in inputs().items()}
        pieces = Pieces.of_sequence(2, LENGTH // RANKS, borders, layout, RANKS, rank)
        whole = document_by_document(borders)
        expected = {name: split_sequence(one, along(name), layout, RANKS, rank) for name, one in whole.items()}
        found[f"{layout.value}, {case}"] = errors(with_gradients(local, pieces, chain), expected)
    found["packed"] = packed(rank)
    dist.destroy_process_group()
    return found


def packed(rank: int) -> dict[str, float]:
    """Two documents that are dealt out to both ranks, and two short ones whole on a rank each."""
    import torch.distributed as dist

    lengths = (12, 3, 16, 3)
    # The cheapest packing deals none of such short documents.
    packing = packings._pack(lengths, RANKS, CpLayout.ZIGZAG, [2, 0, 1, 3], 2)
    starts = dict(enumerate(itertools.accumulate(lengths[:-1], initial=0)))
    order = [
        split_sequence(torch.arange(lengths[number])[None], 1, "zigzag", RANKS, rank)[0] + starts[number]
        for number in packing.dealt
    ]
    order += [torch.arange(lengths[number]) + starts[number] for number in packing.whole[rank]]
    index = torch.cat(order)
    given = {name: one[:1] for name, one in inputs(sum(lengths)).items()}
    local = {name: one.index_select(along(name), index) for name, one in given.items()}
    parts = []
    for number, length in enumerate(lengths):
        alone = {name: one.narrow(along(name), starts[number], length) for name, one in given.items()}
        parts.append(with_gradients(alone, Pieces((), (Segment((0, 1), 0, length, 0),)), None))
    whole = {name: torch.cat([part[name] for part in parts], along(name)) for name in parts[0]}
    expected = {name: one.index_select(along(name), index) for name, one in whole.items()}
    chain = Chain.of(CpLayout.ZIGZAG, dist.group.WORLD)  # type: ignore[arg-type]
    return errors(with_gradients(local, Pieces.of_packing(packing, rank), chain), expected)


@pytest.mark.ranks
def test_states_and_halos_over_two_ranks_are_those_of_each_document_alone() -> None:
    for rank in run_ranks(RANKS, on_rank, timeout=120):
        for case, found in rank.items():
            assert len(found) == 18, case
            assert_within(max(found.values()), TOLERANCE, case)


def trained(rank: int, plans: list[Any]) -> list[dict[str, Tensor]]:
    """Gradients of a model over the ranks, with recomputation, on packed documents of two rows."""
    import torch.distributed as dist
    from family_runs import of_plan

    from parcompile.runtime import join
    from parcompile.runtime.inject import inject
    from parcompile.runtime.inject.regions import recompute_as_planned

    mesh, found = join(plans[0]), []
    for plan in plans:
        model = inject(drawn_model(plan), of_plan(mesh, plan))
        recompute_as_planned(model, plan, rank)
        ids, positions, labels = documents_of_model()
        local = [split_sequence(one, 1, "zigzag", RANKS, rank) for one in (ids, positions, labels)]
        batch = dict(zip(("input_ids", "position_ids", "labels"), local, strict=True))
        model(**batch, shift_labels=local[2], documents=BORDERS).loss.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad
        found.append(gradients)
    return found


BORDERS = [[0, 5, 16], [0, 11, 16]]


def documents_of_model() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    positions, labels = torch.empty_like(ids), torch.full_like(ids, -100)
    for row, borders in enumerate(BORDERS):
        for start, stop in itertools.pairwise(borders):
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, start : stop - 1] = ids[row, start + 1 : stop]
    return ids, positions, labels


@pytest.mark.ranks
def test_packed_documents_reset_the_state_of_whole_models_which_recompute() -> None:
    families = ("qwen3_5_text", "lfm2", "bamba", "jamba", "minimax", "falcon_mamba", "mamba2")
    plans = [recomputing(family, RANKS) for family in families]
    ranks = run_ranks(RANKS, trained, plans, timeout=120)
    for place, family in enumerate(families):
        alone = functools.partial(documents_alone, family)
        expected = alone(None)
        for rank in ranks:
            found = {name: one[: len(expected[name])] for name, one in rank[place].items()}  # without padded rows
            assert_close(found, expected, rerun=alone, about=family)


def documents_alone(family: str, seed: int | None) -> dict[str, Tensor]:
    """Gradients of one process that computes each document by itself; the last bits of the weights by a seed."""
    ids, _, labels = documents_of_model()
    model = drawn_model(family_plan(family, 1, {}))
    nudge(model, seed)
    count = int((labels != -100).sum())
    for row, borders in enumerate(BORDERS):
        for start, stop in itertools.pairwise(borders):
            alone = ids[row : row + 1, start:stop]
            logits = model(input_ids=alone, use_cache=False).logits[0, :-1]
            (torch.nn.functional.cross_entropy(logits, alone[0, 1:], reduction="sum") / count).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def recomputing(family: str, cp: int) -> Any:
    from dataclasses import replace

    plan = config_plan(family, tiny_config(family), cp, {"cp": cp})
    training = replace(plan.spec.training, activation_checkpointing="full")
    return replace(plan, spec=replace(plan.spec, training=training))


@pytest.mark.parametrize(
    "family", ["granitemoehybrid", "falcon_h1", "jamba", "nemotron_h", "zamba2", "mamba", "mamba2"]
)
def test_preflight_counts_the_messages_that_the_estimate_names(family: str) -> None:
    """Blocks side by side, one block for each layer, an MLP beside experts, what groups share, and shared blocks."""
    from parcompile.runtime.preflight import preflight

    report = preflight(family_plan(family, 2, {"tp": 2, "sequence_parallel": True}), [0])
    assert any(one.subject == "sent over tp" for one in report.findings)
    assert [one for one in report.differing if one.subject.startswith("sent")] == []


@pytest.mark.parametrize(("precision", "dtype"), [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16)])
def test_the_estimate_counts_what_transformers_keeps_of_a_mamba_1_layer(
    precision: Precision, dtype: torch.dtype
) -> None:
    """Storages that autograd saves, each once, without weights and the layer's input."""
    from dataclasses import replace

    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    plan = family_plan("jamba", 1, {})
    training = replace(plan.spec.training, precision=precision, micro_batch_size=1, sequence_length=128)
    spec = replace(plan.spec, training=training)
    config = {key: value for key, value in tiny_config("jamba").items() if key != "model_type"}
    mixer = JambaMambaMixer(JambaConfig(**config), 0).to(dtype)
    hidden = torch.randn(1, 128, 32, dtype=dtype, requires_grad=True)
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixer(hidden)
    others = {one.untyped_storage().data_ptr() for one in (hidden, *mixer.parameters())}
    kept = sum(one.untyped_storage().nbytes() for place, one in storages.items() if place not in others)
    # What does not grow with the tokens is not counted.
    assert kept_bytes(workload_of(spec)) == pytest.approx(kept, rel=0.02)


def test_a_piece_begins_with_the_state_of_its_document_only() -> None:
    pieces = Pieces.of_sequence(1, 8, [[0, 6, 16]], CpLayout.ZIGZAG, 2, 0)
    ((first, last),) = ([*strand.slots] for strand in pieces.strands)
    assert first == (Segment((0, 1), 0, 4, 0),)
    # Positions 12 to 15 are in a document that began at 6.
    assert last == (Segment((0, 1), 4, 8, 6),)
    others = Pieces.of_sequence(1, 8, [[0, 6, 16]], CpLayout.ZIGZAG, 2, 1)
    ((middle, behind),) = ([*strand.slots] for strand in others.strands)
    assert middle == (Segment((0, 1), 0, 2, 4), Segment((0, 1), 2, 4, 0))
    assert behind == (Segment((0, 1), 4, 8, 2),)


def test_a_layout_without_stretches_has_no_chain() -> None:
    with pytest.raises(ValueError, match="a state cannot pass through a striped layout"):
        Chain.of(CpLayout.STRIPED, None)  # type: ignore[arg-type]


def test_transformers_own_models_in_the_same_process_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that stand in front of transformers' are for injected layers only."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    from parcompile.runtime.inject.mechanisms.recurrent import _put_in_front

    plan = family_plan("qwen3_5_text", 1, {})
    # Another test of this process may have put ours in front before.
    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", inspect.unwrap(file.torch_chunk_gated_delta_rule))
    model, ids = drawn_model(plan), documents_of_model()[0]
    before, rule = model(input_ids=ids).logits, file.torch_chunk_gated_delta_rule
    _put_in_front(file.Qwen3_5GatedDeltaNet)
    assert file.torch_chunk_gated_delta_rule is not rule
    again = file.torch_chunk_gated_delta_rule
    _put_in_front(file.Qwen3_5GatedDeltaNet)
    assert file.torch_chunk_gated_delta_rule is again
    assert torch.equal(model(input_ids=ids).logits, before)


def test_parameters_are_cast_and_buffers_kept_as_deepspeed_does_for_modules_that_transformers_keeps_in_fp32() -> None:
    from deepspeed.runtime.keep_in_fp32 import buffers_to_keep_in_fp32, keep_in_fp32_pattern

    from parcompile.runtime import build_model
    from parcompile.runtime.engine.initialization import _place

    model = build_model(family_plan("bailing_hybrid", 1, {}))
    assert {"A_log", "dt_bias", "conv1d"} <= set(model._keep_in_fp32_modules_strict)
    _place(model, torch.device("cpu"), torch.bfloat16)
    kept = buffers_to_keep_in_fp32(model, keep_in_fp32_pattern(model, None, torch.bfloat16))
    assert kept and all(buffer.dtype is torch.float32 for buffer in kept)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

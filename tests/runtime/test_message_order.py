"""No order of messages waits for itself on NCCL, however c10d lays sends and receives into streams.

The runtime's own code posts what is played here, for every rank of a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import tiny_config
from message_order import EVERYTHING, RECEIVES, Message, Program, Recorder, fake_rank, stuck
from torch import Tensor
from training_runs import make_plan

from parcompile.layout.pipeline import Lane, Schedule
from parcompile.layout.sequence import CpLayout
from parcompile.plan import Plan
from parcompile.runtime.groups import create_lanes
from parcompile.runtime.pipeline import Batch, Outputs, PipelinedLoop, Step, Work
from parcompile.runtime.preflight.stand_in import META, MetaTracker, stand_in
from parcompile.runtime.preflight.step import _batch, _engine, build_sharded
from parcompile.runtime.recurrent.pieces import Chain
from parcompile.runtime.transport import Lanes

CPU = torch.device("cpu")


def schedules(pp: int) -> Iterator[Schedule]:
    """Of every kind that rule B006 lets pass, with few micro-batches and with many."""
    for micro_batches in sorted({1, 2, pp - 1, pp, 2 * pp + 1}):
        yield Schedule(pp, micro_batches)
    for virtual in (2, 3, 4) if pp < 5 else (2, 4) if pp < 16 else (2,):
        for group in (pp, pp + 1, 2 * pp) if pp < 5 else (pp, pp + 3):
            for micro_batches in (group, 2 * group, 2 * group + pp) if pp < 8 else (group + pp,):
                if not 0 < micro_batches % group < pp:
                    yield Schedule(pp, micro_batches, virtual, group)


def work(schedule: Schedule, rank: int, program: Program) -> Work:
    """Chunks that hand on two tensors of one number. While a pass is launched, the host may have to wait for messages.

    Interleaved schedules hold sends back for several passes: they ask that NCCL's buffers take what is sent.
    """
    waits = EVERYTHING if schedule.virtual == 1 else RECEIVES

    def forward(chunk: int, received: Outputs, batch: Batch) -> Tensor | Outputs:
        program.append((waits, None))
        one, two = received or (torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True))
        if chunk * schedule.pp + rank == schedule.last_stage:
            return (one * two).sum()
        return one * 2, two + one

    def backward(loss: Tensor) -> None:
        program.append((waits, None))
        torch.autograd.backward(loss)

    return Work(forward, backward, lambda _: [((1,), torch.float32)] * 2)


@functools.cache
def pipeline_programs(pp: int) -> dict[Schedule, dict[int, Program]]:
    """A training step, then an evaluation, of every schedule on every rank."""
    found: dict[Schedule, dict[int, Program]] = {schedule: {} for schedule in schedules(pp)}
    for rank in range(pp):
        for ring in (False, True):
            with fake_rank(rank, pp):
                groups = create_lanes(Schedule(pp, pp, 2 if ring else 1), range(pp), rank)
                for schedule, programs in found.items():
                    if (schedule.virtual > 1) is ring:
                        programs[rank] = one_program(schedule, rank, groups)
    return found


def one_program(schedule: Schedule, rank: int, groups: dict[Lane, Any]) -> Program:
    recorder = Recorder()
    with recorder.unbatched():
        lanes = Lanes(schedule, groups, rank, CPU)
        for passes in (schedule.passes(rank), schedule.forward_passes()):
            with torch.set_grad_enabled(not all(one.forward for one in passes)):
                batches: Iterator[Batch] = iter([{}] * schedule.micro_batches)
                Step(schedule, rank, work(schedule, rank, recorder.program), lanes, batches).run(passes)
    return recorder.program


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8, 16])
def test_no_pipeline_waits_for_itself(pp: int) -> None:
    for schedule, programs in pipeline_programs(pp).items():
        for eager in (True, False):
            assert not stuck(programs, eager=eager), (schedule, eager)


@pytest.mark.parametrize("pp", [3, 4])
def test_lanes_of_several_pairs_on_one_communicator_would(pp: int) -> None:
    """Why each pair of ranks has its own, and that the simulation finds a fault that is there."""

    def shared(message: Message | None) -> Message | None:
        if message is None:
            return None
        (way, peer), (rank, _) = message.ends[0], message.ranks
        sender, receiver = (rank, peer) if way == "send" else (peer, rank)
        return replace(message, group="hidden states" if receiver == (sender + 1) % pp else "gradients")

    found = {
        schedule: {
            rank: [(number, shared(message)) for number, message in program] for rank, program in programs.items()
        }
        for schedule, programs in pipeline_programs(pp).items()
    }
    usual = [one for one in found if one.virtual > 1 and one.micro_batches % pp == 0]
    assert all(stuck(found[one], eager=True) for one in usual)
    assert not any(stuck(programs, eager=False) for programs in found.values())


@pytest.mark.parametrize("layout", [CpLayout.CONTIGUOUS, CpLayout.ZIGZAG])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_states_go_through_a_chain_without_waiting_for_themselves(ranks: int, layout: CpLayout) -> None:
    programs = {}
    for rank in range(ranks):
        with fake_rank(rank, ranks), Recorder() as recorder, recorder.batches():
            chain = Chain.of(layout, torch.distributed.group.WORLD)  # type: ignore[arg-type]
            state = torch.zeros(2)
            for reverse in (False, True):
                chain.shift([state] * len(chain.mine), reverse=reverse)
                chain.pass_through(state, lambda _, at_hand: at_hand, reverse=reverse)
        programs[rank] = recorder.program
    for eager in (True, False):
        assert not stuck(programs, eager=eager)


class Tracked(MetaTracker):  # type: ignore[misc]
    """A step without memory whose messages are recorded."""

    def __init__(self, mesh: Any, recorder: Recorder) -> None:
        super().__init__(mesh)
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        return self.recorder.record(func, args, found) if func.namespace == "c10d" else found


def step_program(plan: Plan, rank: int) -> Program:
    """One step of a rank as on GPUs, DeepSpeed's messages included."""
    recorder = Recorder()
    with stand_in(plan, rank) as mesh, Tracked(mesh, recorder) as tracker, recorder.batches():
        model, _ = build_sharded(mesh, tracker)
        engine, _, _ = _engine(model, mesh, tracker)
        batches = [_batch(mesh) for _ in range(plan.spec.training.gradient_accumulation_steps)]
        if mesh.size("pp") > 1:
            loop = PipelinedLoop(engine, mesh)
            with loop.together(), META:
                loop.train(iter(batches))
        else:
            for batch in batches:
                with META:
                    loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
    return recorder.program


STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    # name: model, parallelism, ranks, zero
    "pp3 of two virtual stages, tied, dp2, ZeRO 1": (
        tiny_config("llama", num_hidden_layers=6, tie_word_embeddings=True),
        {"pp": 3, "num_virtual_stages_per_pipeline_rank": 2},
        6,
        {"stage": 1},
    ),
    "pp2 of two virtual stages, tied, cp2, tp2, ZeRO 0": (
        tiny_config("llama", num_hidden_layers=4, tie_word_embeddings=True),
        {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2, "cp": 2, "tp": 2, "sequence_parallel": True},
        8,
        {"stage": 0},
    ),
    "states of a hybrid over cp4, experts over ep2": (
        tiny_config("qwen3_next"),
        {"cp": 4, "ep": 2},
        4,
        {"stage": 1},
    ),
    "experts over ep2, pp2, ZeRO 1": (tiny_config("mixtral"), {"pp": 2, "ep": 2}, 4, {"stage": 1}),
    "ulysses over cp2, ZeRO 2": (tiny_config("llama"), {"cp": 2, "cp_implementation": "ulysses"}, 4, {"stage": 2}),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_waits_for_itself(name: str) -> None:
    """Ring, states, experts, tied embeddings and DeepSpeed's sums, together with the pipeline."""
    model, parallelism, ranks, zero = STEPS[name]
    training = {"sequence_length": 32, "micro_batch_size": 1, "global_batch_size": 6, "precision": "bf16"}
    extra = {"cluster": {"gpus_per_node": ranks, "accelerator": "h100-sxm"}, "zero": zero}
    plan = make_plan(ranks, parallelism, model=model, whole_model=True, training=training, extra=extra)
    programs = {rank: step_program(plan, rank) for rank in range(ranks)}
    for eager in (True, False):
        assert not stuck(programs, eager=eager)
    kinds = {message.kind for program in programs.values() for _, message in program if message is not None}
    assert ("alone" in kinds) is bool(parallelism.get("pp") or "hybrid" in name), kinds

"""A schedule runs every pass once, in an order that never waits for itself, and holds no more than it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from layout_cases import compile_tree, spec_tree

from parcompile.layout.pipeline import Lane, Schedule
from parcompile.plan import plan_tree


def schedules() -> list[Schedule]:
    """Small ones of every kind that rule B006 lets pass."""
    plain = [Schedule(pp, micro) for pp in (1, 2, 3, 4, 6) for micro in (1, 2, 3, 5, 8, 12)]
    interleaved = [
        Schedule(pp, micro, virtual, group)
        for pp in (2, 3, 4)
        for virtual in (2, 3)
        for micro in range(pp, 11)
        for group in range(pp, micro + 1)
        if not 0 < micro % group < pp
    ]
    return plain + interleaved


def test_every_pass_runs_once_and_backward_after_its_forward() -> None:
    for schedule in schedules():
        for rank in range(schedule.pp):
            passes = schedule.passes(rank)
            assert Counter(passes).most_common(1)[0][1] == 1
            assert len(passes) == 2 * schedule.micro_batches * schedule.virtual
            for place, one in enumerate(passes):
                assert one.forward or one._replace(forward=True) in passes[:place]


def test_no_more_is_held_than_the_schedule_says() -> None:
    for schedule in schedules():
        for rank in range(schedule.pp):
            held = most = 0
            for one in schedule.passes(rank):
                held += 1 if one.forward else -1
                most = max(most, held)
            assert (held, most) == (0, schedule.in_flight(rank))


def test_a_plain_pipeline_holds_as_many_micro_batches_as_stages_follow() -> None:
    """arXiv 2104.04473, section 2.2.1."""
    assert [Schedule(4, 8).in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [Schedule(4, 2).in_flight(rank) for rank in range(4)] == [2, 2, 2, 1]
    assert [one.label(1) for one in Schedule(4, 3).passes(2)] == ["F0", "F1", "B0", "F2", "B1", "B2"]


def test_the_plan_lists_what_each_rank_computes(tmp_path: Path) -> None:
    tree = spec_tree(gpus_per_node=2, parallelism={"pp": 2}, training={"global_batch_size": 3})
    first, last = (stage["schedule"] for stage in plan_tree(compile_tree(tree, tmp_path))["stages"])
    assert first["passes"] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert last["passes"] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert (first["in_flight"], last["in_flight"]) == (2, 1)
    assert first["sends"] == {"hidden_states": 3, "gradients": 0}
    assert last["sends"] == {"hidden_states": 0, "gradients": 3}


def test_sends_are_counted() -> None:
    for schedule in schedules():
        for rank in range(schedule.pp):
            sent = [one for one in schedule.passes(rank) if schedule.target(rank, one) is not None]
            ahead = sum(one.forward for one in sent)
            assert schedule.sends(rank) == (ahead, len(sent) - ahead)


def test_what_is_sent_is_what_the_receiver_asks_for_in_that_order() -> None:
    for schedule in schedules():
        pp = schedule.pp
        lanes: dict[Lane, tuple[list[Any], list[Any]]] = {}
        for rank in range(pp):
            for one in schedule.passes(rank):
                stage = one.chunk * pp + rank
                if (to := schedule.target(rank, one)) is not None:
                    lane = Lane(rank, to, one.forward)
                    goes_to = stage + 1 if one.forward else stage - 1
                    lanes.setdefault(lane, ([], []))[0].append((one.micro_batch, goes_to))
                if (source := schedule.source(rank, one)) is not None:
                    lane = Lane(source, rank, one.forward)
                    lanes.setdefault(lane, ([], []))[1].append((one.micro_batch, stage))
        assert all(sent == asked for sent, asked in lanes.values())
        planned = schedule.lanes()
        assert set(lanes) == {lane for each in planned for lane in each}
        for each in planned:
            ends = [end for lane in each for end in (lane.sender, lane.receiver)]
            assert len(ends) == len(set(ends)), "a rank has one lane of a round at most"

"""Geometry of the ring: the tiles that ranks compute are the schedule's, and cover exactly what the masks leave."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parcompile.layout.sequence import CpLayout, Mask, blocks_between
from parcompile.runtime.ring_attention import document_borders, local_positions, padding_borders
from parcompile.runtime.ring_attention.kernels import CAUSAL, FULL, Band, Tile
from parcompile.runtime.ring_attention.route import Masking, RingStep, plan_gather, plan_route
from parcompile.runtime.ring_attention.sequence import documents_of_rows

LAYOUTS = list(CpLayout)


def is_simple(tile: Tile) -> bool:
    """Every query sees every key, or it is a causal square: what every kernel can compute."""
    rows, columns = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
    return tile.band == FULL or (tile.band == CAUSAL and rows == columns)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_compilers_schedule_is_the_one_that_runs(layout: CpLayout, causal: bool, size: int) -> None:
    chunk = 5
    for rank in range(size):
        route = plan_route(layout, size, rank, chunk * layout.chunks_per_rank, Masking(causal))
        assert len(route) == size
        for number, step in enumerate(route):
            blocks = blocks_between(layout, size, rank, (rank - number) % size, causal=causal)
            assert step.tiles == tuple(
                Tile(
                    slice(block.q_start * chunk, block.q_stop * chunk),
                    slice(block.kv_start * chunk, block.kv_stop * chunk),
                    {Mask.FULL: FULL, Mask.CAUSAL: CAUSAL, Mask.STRICT: Band(None, -1)}[block.mask],
                ).trimmed()
                for block in blocks
            )
            hop = step.keys_hop
            assert (hop and hop.send_to) == ((rank + 1) % size if number < size - 1 else None)
            assert (hop and hop.receive_from) == ((rank - 1) % size if number < size - 1 else None)


def _seen(tile: Tile) -> torch.Tensor:
    distance = torch.arange(tile.keys.stop - tile.keys.start) - torch.arange(
        tile.queries.stop - tile.queries.start
    ).unsqueeze(-1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if tile.band.lower is not None:
        seen &= distance >= tile.band.lower
    if tile.band.upper is not None:
        seen &= distance <= tile.band.upper
    return seen


def _borders(lengths: list[int], unit: int = 1) -> tuple[int, ...]:
    return tuple(itertools.accumulate((length * unit for length in lengths), initial=0))


@st.composite
def _rings(draw: st.DrawFn) -> tuple[CpLayout, int, int, Masking]:
    layout, size = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 5))
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, 40))
    per_document = draw(st.booleans())
    if per_document:
        borders = _borders(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)), layout.chunks_per_rank * size)
        return layout, size, borders[-1] // size, Masking(causal, window, borders, per_document=True)
    local = draw(st.integers(1, 8)) * layout.chunks_per_rank
    cuts = draw(st.none() | st.lists(st.integers(0, local * size), max_size=6))
    documents = None if cuts is None else (0, *sorted(cuts), local * size)
    return layout, size, local, Masking(causal, window, documents)


@settings(max_examples=300, deadline=None)
@given(_rings())
def test_tiles_cover_what_the_masks_leave_exactly_once(ring: tuple[CpLayout, int, int, Masking]) -> None:
    layout, size, local, masking = ring
    dealt = masking.documents if masking.per_document else None
    positions = [local_positions(layout, size, rank, local * size, dealt) for rank in range(size)]
    computed = torch.zeros(local * size, local * size, dtype=torch.int64)
    for rank in range(size):
        source = rank
        for step in plan_route(layout, size, rank, local, masking):
            for tile in step.tiles:
                seen = _seen(tile)
                assert seen.any(1).all(), f"{tile} has a query without a key"
                assert seen.any(0).all(), f"{tile} has a key without a query"
                assert is_simple(tile) or masking.has_bands(layout)
                computed[positions[rank][tile.queries].unsqueeze(-1), positions[source][tile.keys]] += seen
            if step.keys_hop is not None:
                source = (source + step.keys_hop.receive_from - rank) % size
    assert torch.equal(computed, _wanted(local * size, masking))


def _wanted(length: int, masking: Masking) -> torch.Tensor:
    position = torch.arange(length)
    distance = position - position.unsqueeze(-1)
    wanted = torch.ones_like(distance, dtype=torch.bool)
    if masking.causal:
        wanted &= distance <= 0
    if masking.window is not None:
        wanted &= distance.abs() < masking.window
    if masking.documents is not None:
        document = torch.bucketize(position, torch.tensor(masking.documents), right=True)
        wanted &= document == document.unsqueeze(-1)
    return wanted.long()


@settings(max_examples=200, deadline=None)
@given(_rings())
def test_gathered_tiles_cover_the_same_and_are_fewer(ring: tuple[CpLayout, int, int, Masking]) -> None:
    layout, size, local, masking = ring
    dealt = masking.documents if masking.per_document else None
    positions = [local_positions(layout, size, rank, local * size, dealt) for rank in range(size)]
    computed = torch.zeros(local * size, local * size, dtype=torch.int64)
    for rank in range(size):
        gathering = plan_gather(layout, size, rank, local, masking)
        parts = [rank, *(hop.receive_from for hop in gathering.hops)]
        keys = torch.cat([positions[parts[piece.part]][piece.keys] for piece in gathering.pieces])
        for tile in gathering.tiles:
            computed[positions[rank][tile.queries].unsqueeze(-1), keys[tile.keys]] += _seen(tile)
            assert is_simple(tile) or masking.has_bands(layout)
        if masking.window is None and masking.documents is None and layout is not CpLayout.STRIPED:
            # What is before a chunk is one rectangle; then its diagonal.
            assert len(gathering.tiles) <= 2 * layout.chunks_per_rank
    assert torch.equal(computed, _wanted(local * size, masking))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.none() | st.integers(-40, 40),
    st.none() | st.integers(-40, 40),
    st.integers(1, 12),
)
def test_cut_tiles_cover_the_tile_exactly_once(
    rows: int, columns: int, lower: int | None, upper: int | None, most_rows: int
) -> None:
    tile = Tile(slice(3, 3 + rows), slice(7, 7 + columns), Band(lower, upper))
    computed = torch.zeros(3 + rows, 7 + columns, dtype=torch.int64)
    for part in tile.cut(most_rows):
        assert part.queries.stop - part.queries.start <= most_rows
        computed[part.queries, part.keys] += _seen(part)
    assert torch.equal(computed[3:, 7:], _seen(tile).long())
    assert not computed[:3].any()
    assert not computed[:, :7].any()


def test_a_causal_square_is_cut_into_what_every_kernel_computes() -> None:
    parts = Tile(slice(0, 2500), slice(0, 2500), CAUSAL).cut(1024)
    assert all(is_simple(part) for part in parts)
    assert [(part.queries.start, part.keys.start, part.keys.stop) for part in parts] == [
        (0, 0, 1024),
        (1024, 0, 1024),
        (1024, 1024, 2048),
        (2048, 0, 2048),
        (2048, 2048, 2500),
    ]


@pytest.mark.parametrize(
    ("layout", "window", "sources_behind"),
    [
        # A window reaches into the chunk before: the one of the rank before, in the second half of the one after.
        ("zigzag", 10, [0, 1, 7]),
        ("zigzag", 12, [0, 1, 2, 6, 7]),
        ("contiguous", 20, [0, 1]),
        ("contiguous", 22, [0, 1, 2]),
        ("contiguous", 160, [0, 1, 2, 3, 4, 5, 6, 7]),
        # The ranks before hold the tokens before; the first stripe's are with the last ranks.
        ("striped", 3, [0, 1, 2]),
    ],
)
def test_steps_outside_the_window_are_neither_computed_nor_sent(
    layout: str, window: int, sources_behind: list[int]
) -> None:
    for rank in range(8):
        route = plan_route(CpLayout(layout), 8, rank, 20, Masking(window=window))
        behind = list(
            itertools.accumulate((rank - step.keys_hop.receive_from) % 8 for step in route if step.keys_hop is not None)
        )
        assert [0, *behind] == sources_behind


@pytest.mark.parametrize("masking", [Masking(), Masking(window=10), Masking(False)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "inner"), [(5, None), (6, 3), (6, 2)])
def test_every_message_has_a_receiver_and_gradients_come_home(
    layout: CpLayout, masking: Masking, size: int, inner: int | None
) -> None:
    routes = [plan_route(layout, size, rank, 20, masking, inner) for rank in range(size)]

    def hops(step: RingStep) -> list[tuple[int, int]]:
        return [(hop.send_to, hop.receive_from) for hop in (step.keys_hop, step.gradients_hop) if hop is not None]

    for steps in zip(*routes, strict=True):
        for rank, step in enumerate(steps):
            for index, (send_to, _) in enumerate(hops(step)):
                assert hops(steps[send_to])[index][1] == rank
    for owner in range(size):
        keys_at = gradients_at = owner
        for index in range(len(routes[owner])):
            step = routes[keys_at][index]
            if step.gradients_hop is not None:
                assert gradients_at in (owner, keys_at)
                gradients_at = step.gradients_hop.send_to
            if step.keys_hop is not None:
                keys_at = step.keys_hop.send_to
        assert gradients_at == owner
        assert sum(step.gradients_hop is not None for step in routes[owner]) == len(routes[owner]) - 1


def test_a_double_ring_crosses_nodes_with_all_ranks_at_once() -> None:
    """12 ranks in nodes of 4: 3 hops inside, then one to the node after; a single ring would cross in every step."""
    routes = [plan_route(CpLayout.ZIGZAG, 12, rank, 20, Masking(), 4) for rank in range(12)]
    for index in range(11):
        crossing = [rank // 4 != routes[rank][index].keys_hop.send_to // 4 for rank in range(12)]
        assert crossing == [index in (3, 7)] * 12
    with pytest.raises(ValueError, match="inner rings of 5 ranks do not divide a ring of 12 ranks"):
        plan_route(CpLayout.ZIGZAG, 12, 0, 20, Masking(), 5)


def test_documents_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"from 0 to the length of the sequence = 8 local tokens · 2 ranks = 16, got \[0, 9\]"
    ):
        plan_route(CpLayout.ZIGZAG, 2, 0, 8, Masking(documents=(0, 9)))
    with pytest.raises(ValueError, match="the document at 8 has 6 tokens, which is no multiple of 2 · 2 ranks = 4"):
        plan_route(CpLayout.ZIGZAG, 2, 0, 7, Masking(documents=(0, 8, 14), per_document=True))
    with pytest.raises(ValueError, match="given for 1 rows, the batch has 2"):
        list(documents_of_rows([[0, 4]], 2))
    with pytest.raises(ValueError, match="window 0 must be at least 1"):
        plan_route(CpLayout.ZIGZAG, 2, 0, 8, Masking(window=0))


def test_borders_of_documents_come_from_positions_and_paddings() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])
    assert document_borders(positions) == [[0, 3, 5, 6], [0, 6]]
    assert padding_borders(torch.tensor([4, 6]), 6) == [[0, 4, 6], [0, 6, 6]]
    rows = list(documents_of_rows([[0, 6], [0, 6], [0, 2, 6]], 3))
    assert rows == [(slice(0, 2), (0, 6)), (slice(2, 3), (0, 2, 6))]
    assert list(documents_of_rows(torch.tensor([0, 2, 6]), 3)) == [(slice(0, 3), (0, 2, 6))]

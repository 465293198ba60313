"""Figures of the seeds for weights, sequences, rings and what they cost; and the layouts behind them."""

import functools
import itertools
from fractions import Fraction

import numpy as np
import pytest
from layout_cases import SMALL_MODEL, ring_schedule

from parcompile.layout.sequence import (
    ContextParallel,
    CpImplementation,
    CpLayout,
    KeySource,
    Mask,
    source_blocks,
    token_ranges,
    work,
)
from parcompile.layout.shards import SplitError, part_ranges, tensor_layout
from parcompile.model import Parameter, Part, Split
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config


def layouts(heads: int, kv_heads: int, width: int, tp: int, hidden: int = 1024) -> dict[str, tuple[int, ...]]:
    """Local shapes of one layer's projections."""
    config = SMALL_MODEL | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
    }
    table = parameter_table(shape_from_config(config))
    return {parameter.name.split(".")[-2]: tensor_layout(parameter, tp).local_shape for parameter in table.layer}


class TestWeights:
    @pytest.mark.parametrize(
        ("tp", "heads", "kv_heads", "q_size", "kv_size", "width"),
        [(2, 8, 2, 512, 128, 2048), (4, 4, 1, 256, 64, 1024)],
    )
    def test_local_sizes_of_a_350m_model(self, tp, heads, kv_heads, q_size, kv_size, width) -> None:
        local = layouts(16, 4, 4096, tp)
        assert local["q_proj"] == (q_size, 1024)
        assert local["k_proj"] == local["v_proj"] == (kv_size, 1024)
        assert local["o_proj"] == (1024, q_size)
        assert local["gate_proj"] == local["up_proj"] == (width, 1024)
        assert local["down_proj"] == (1024, width)
        assert (q_size // 64, kv_size // 64) == (heads, kv_heads)
        assert Fraction(local["q_proj"][0], 1024) == Fraction(1, tp)

    def test_three_ranks_cannot_share_sixteen_heads(self) -> None:
        with pytest.raises(SplitError, match="16 units on tp 3: neither 16 % 3 nor 3 % 16 is 0"):
            layouts(16, 4, 4096, 3)

    def test_a_square_weight_is_cut_into_contiguous_halves(self) -> None:
        for split, dim in ((Split(0, (Part(1024, 1024),)), 0), (Split(1, (Part(1024, 1024),)), 1)):
            layout = tensor_layout(Parameter("w", (1024, 1024), split), 2)
            assert layout.dim == dim
            assert layout.ranges == (((0, 512),), ((512, 1024),))
            assert layout.local_numel == 524_288

    @pytest.mark.parametrize(
        ("shape", "dim", "expected"),
        [((2, 4), 1, ([1, 2, 5, 6], [3, 4, 7, 8])), ((4, 2), 0, ([1, 2, 3, 4], [5, 6, 7, 8]))],
    )
    def test_slices_hold_the_elements_of_the_seeds(self, shape, dim, expected) -> None:
        full = np.arange(1, 9).reshape(shape)
        split = Split(dim, (Part(4, 4),))
        layout = tensor_layout(Parameter("w", shape, split), 2)
        for rank, values in enumerate(expected):
            ((start, stop),) = layout.ranges[rank]
            assert full.take(range(start, stop), axis=dim).ravel().tolist() == values

    @pytest.mark.parametrize(("width", "valid"), [(11008, True), (11007, False)])
    def test_a_7b_model_on_two_devices(self, width, valid) -> None:
        if not valid:
            with pytest.raises(SplitError, match="11007 units on tp 2"):
                layouts(32, 8, width, 2, hidden=4096)
            return
        local = layouts(32, 8, width, 2, hidden=4096)
        assert (local["q_proj"][0] // 128, local["k_proj"][0] // 128, local["gate_proj"][0]) == (16, 4, 5504)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(31, 8), (32, 7)])
    def test_odd_heads_on_two_devices_are_refused(self, heads, kv_heads) -> None:
        with pytest.raises(SplitError, match="on tp 2"):
            layouts(heads, kv_heads, 11008, 2, hidden=heads * 128)

    def test_kv_heads_are_replicated_when_tp_exceeds_them(self) -> None:
        ranges = [part_ranges(Part(256, 4), 8, rank) for rank in range(8)]
        assert ranges == [(0, 64), (0, 64), (64, 128), (64, 128), (128, 192), (128, 192), (192, 256), (192, 256)]

    @pytest.mark.parametrize("tp", [1, 2, 4, 8])
    def test_slices_cover_every_parameter_once_or_as_often_as_it_is_replicated(self, tp) -> None:
        for parameter in parameter_table(shape_from_config(SMALL_MODEL)):
            layout = tensor_layout(parameter, tp)
            if layout.ranges is None:
                assert layout.replicas == tp
                continue
            held = np.zeros(layout.full_shape[layout.dim], dtype=int)
            for pieces in layout.ranges:
                for start, stop in pieces:
                    held[start:stop] += 1
            assert (held == layout.replicas).all(), parameter.name


class TestSequence:
    @pytest.mark.parametrize(
        ("rank", "cp", "length", "start", "stop", "saved", "exchanges"),
        [(0, 2, 2048, 0, 1024, 0.5, 1), (2, 4, 8192, 4096, 6144, 0.75, 3)],
    )
    def test_contiguous_chunks_are_those_of_the_seeds(self, rank, cp, length, start, stop, saved, exchanges) -> None:
        assert token_ranges(CpLayout.CONTIGUOUS, cp, rank, length) == (range(start, stop),)
        assert 1 - (stop - start) / length == saved
        assert len(ring_schedule(CpLayout.CONTIGUOUS, cp, rank)) - 1 == exchanges

    def test_a_sequence_that_does_not_divide_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(ValueError, match="sequence_length 1000 is not a multiple of 3"):
            token_ranges(CpLayout.CONTIGUOUS, 3, 0, 1000)
        with pytest.raises(ValueError, match=r"1000 is not a multiple of 16 \(zigzag layout: 2 · cp 8 chunks\)"):
            token_ranges(CpLayout.ZIGZAG, 8, 0, 1000)

    @pytest.mark.parametrize(("layout", "cp"), [*itertools.product(CpLayout, [1, 2, 3, 4, 8])])
    def test_every_token_is_held_once(self, layout, cp) -> None:
        length = 48 * cp
        held = sorted(
            token for rank in range(cp) for piece in token_ranges(layout, cp, rank, length) for token in piece
        )
        assert held == list(range(length))


class TestRing:
    def test_the_schedule_of_the_seeds(self) -> None:
        steps = ring_schedule(CpLayout.CONTIGUOUS, 4, 0)
        assert [step.source for step in steps] == [0, 3, 2, 1]
        assert {(step.send_to, step.receive_from) for step in steps[:-1]} == {(1, 3)}
        assert (steps[-1].send_to, steps[-1].receive_from) == (None, None)
        two = ring_schedule(CpLayout.CONTIGUOUS, 2, 0)
        assert (two[0].send_to, two[0].receive_from, two[1].source) == (1, 1, 1)

    @pytest.mark.parametrize("rank", range(4))
    def test_each_rank_sees_all_keys(self, rank) -> None:
        assert {step.source for step in ring_schedule(CpLayout.ZIGZAG, 4, rank)} == {0, 1, 2, 3}

    def test_masks_of_rank_2_of_4(self) -> None:
        """The seed's step i is step i + 1 here: step 0 is the diagonal, which the seed never computes."""
        steps = ring_schedule(CpLayout.CONTIGUOUS, 4, 2)
        assert [block.mask for block in steps[0].blocks] == [Mask.CAUSAL]
        assert [block.mask for block in steps[1].blocks] == [Mask.FULL]
        assert steps[3].blocks == ()

    @pytest.mark.parametrize(("layout", "cp", "causal"), [*itertools.product(CpLayout, [1, 2, 3, 4, 6], [True, False])])
    def test_the_blocks_are_exactly_the_causal_triangle(self, layout, cp, causal) -> None:
        """Painted token by token at their positions, all blocks of all ranks give the lower triangle once."""
        size = 3
        length = layout.chunks_per_rank * cp * size
        held = [[token for piece in token_ranges(layout, cp, rank, length) for token in piece] for rank in range(cp)]
        painted = np.zeros((length, length), dtype=int)
        for rank in range(cp):
            for step in ring_schedule(layout, cp, rank, causal=causal):
                for block in step.blocks:
                    rows = held[rank][block.q_start * size : block.q_stop * size]
                    columns = held[step.source][block.kv_start * size : block.kv_stop * size]
                    for (i, q), (j, k) in itertools.product(enumerate(rows), enumerate(columns)):
                        sees = {Mask.FULL: True, Mask.CAUSAL: j <= i, Mask.STRICT: j < i}[block.mask]
                        painted[q, k] += sees
        expected = np.tril(np.ones_like(painted)) if causal else np.ones_like(painted)
        assert (painted == expected).all()

    @pytest.mark.parametrize(("layout", "cp"), [*itertools.product(CpLayout, [1, 2, 3, 4])])
    def test_the_tokens_of_each_layout_by_their_definition(self, layout, cp) -> None:
        length = 4 * cp
        owner = {
            CpLayout.CONTIGUOUS: lambda token: token // (length // cp),
            CpLayout.STRIPED: lambda token: token % cp,
            CpLayout.ZIGZAG: lambda token: min(token // 2, 2 * cp - 1 - token // 2),
        }[layout]
        for rank in range(cp):
            held = [token for piece in token_ranges(layout, cp, rank, length) for token in piece]
            assert held == [token for token in range(length) if owner(token) == rank]

    @pytest.mark.parametrize(("layout", "cp"), [*itertools.product(CpLayout, [1, 2, 3, 4, 8])])
    def test_what_a_rank_computes_depends_only_on_how_the_source_stands_to_it(self, layout, cp) -> None:
        blocks = source_blocks(layout, cp)
        for rank in range(cp):
            for step in ring_schedule(layout, cp, rank):
                assert step.blocks == blocks[KeySource.of(rank, step.source)]

    def test_zigzag_is_balanced_and_contiguous_is_not(self) -> None:
        ring = functools.partial(ContextParallel, CpImplementation.RING)
        assert all(ring(cp).balance(CpLayout.ZIGZAG) == 1 for cp in (1, 2, 4, 8))
        for cp, busy in ((2, Fraction(75, 100)), (4, Fraction(625, 1000)), (8, Fraction(5625, 10000))):
            # The seed's figure counts the diagonal chunk as a whole one: (cp + 1) / (2 · cp).
            assert Fraction(cp + 1, 2 * cp) == busy
            assert ring(cp).balance(CpLayout.CONTIGUOUS) == Fraction(cp, 2 * cp - 1)

    @pytest.mark.parametrize("layout", CpLayout)
    def test_all_work_is_half_the_square(self, layout) -> None:
        assert sum(work(layout, 6, rank) for rank in range(6)) == Fraction(1, 2)

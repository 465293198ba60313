import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parcompile.layout.optimizer import even_shard, padded_numel, padded_shard
from parcompile.layout.ownership import Sizes, balanced, contiguous, round_robin

SHARDS = [(100, 4), (10, 3), (1_000_003, 7), (1_000_000, 4), (5, 8), (0, 2)]


def even(numel: int, shards: int) -> list[tuple[int, int]]:
    return [(shard.start, shard.stop) for shard in (even_shard(numel, shards, rank) for rank in range(shards))]


def test_the_even_rule_of_the_seeds() -> None:
    assert even(100, 4) == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert even(10, 3) == [(0, 4), (4, 7), (7, 10)]


@pytest.mark.parametrize(("numel", "shards"), SHARDS)
def test_even_shards_cover_exactly_and_differ_by_one(numel, shards) -> None:
    ranges = even(numel, shards)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_quarter_of_a_million_saves_three_quarters() -> None:
    shard = even_shard(1_000_000, 4, 0)
    assert 1 - shard.numel / 1_000_000 == 0.75
    # The seed counts the two moments alone: 8 MB become 2 MB.
    assert shard.numel * 8 == 2_000_000


@pytest.mark.parametrize(("numel", "shards"), SHARDS)
def test_deepspeeds_shards_are_equal_and_padded_at_the_end(numel, shards) -> None:
    total = padded_numel(numel, shards)
    assert total % (2 * shards) == 0
    assert 0 <= total - numel < 2 * shards
    found = [padded_shard(numel, shards, rank) for rank in range(shards)]
    assert [(shard.start, shard.stop) for shard in found] == [
        (rank * total // shards, (rank + 1) * total // shards) for rank in range(shards)
    ]
    assert sum(shard.padding for shard in found) == total - numel
    assert sum(shard.numel - shard.padding for shard in found) == numel


@pytest.mark.parametrize("rule", [even_shard, padded_shard])
@pytest.mark.parametrize(("shards", "rank"), [(4, 4), (4, -1), (0, 0)])
def test_a_rank_that_is_not_a_shard_is_refused(rule, shards, rank) -> None:
    with pytest.raises(ValueError, match="needs 0 ≤ rank < shards"):
        rule(100, shards, rank)


class TestOwnership:
    def test_round_robin_of_the_seeds(self) -> None:
        owners = round_robin(24, 4)
        assert owners.owners == (0, 1, 2, 3) * 6

    def test_contiguous_of_the_seeds(self) -> None:
        owners = contiguous(24, 4)
        assert owners.owners == (0,) * 6 + (1,) * 6 + (2,) * 6 + (3,) * 6
        assert contiguous(10, 3).owners == (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)

    def test_embedding_and_head_on_rank_0_are_warned_of_with_the_figure(self) -> None:
        """The 350M model of the seeds: vocabulary 32,768 × 1024, 24 layers, 4 ranks."""
        layer = 2 * 1024**2 + 2 * 256 * 1024 + 3 * 4096 * 1024 + 2 * 1024
        sizes = Sizes((layer,) * 24, 32_768 * 1024, 32_768 * 1024 + 1024)
        for owners in (round_robin(24, 4), contiguous(24, 4)):
            rank, share, fair = owners.imbalance(sizes)
            assert (rank, fair) == (0, 0.25)
            assert share == pytest.approx(0.37, abs=0.005)
            assert owners.warning(sizes) == (
                f"{owners.rule}: rank 0 owns 36.6% of the optimizer state, not 25.0%: "
                "it owns the embedding and the head beside its layers"
            )
        even = balanced(sizes, 4)
        assert even.imbalance(sizes)[1] < 0.27
        assert even.warning(sizes) is None
        assert sum(even.load(sizes).values()) == sizes.total

    def test_more_ranks_than_layers_leave_ranks_without_any(self) -> None:
        sizes = Sizes((5, 5), 3, 3)
        for owners in (round_robin(2, 8), contiguous(2, 8), balanced(sizes, 8)):
            assert sum(owners.load(sizes).values()) == 16
            assert all(0 <= rank < 8 for rank in (*owners.owners, owners.embedding, owners.head))

    @given(
        st.lists(st.integers(1, 1000), min_size=1, max_size=40),
        st.integers(0, 4000),
        st.integers(0, 4000),
        st.integers(1, 16),
    )
    def test_balanced_is_within_four_thirds_of_the_best_possible(self, layers, embedding, head, ranks) -> None:
        sizes = Sizes(tuple(layers), embedding, head)
        load = balanced(sizes, ranks).load(sizes)
        assert sum(load.values()) == sizes.total
        assert len(balanced(sizes, ranks).owners) == len(layers)
        # Graham: at most the mean plus the piece that was placed last on the fullest rank.
        assert max(load.values()) <= sizes.total / ranks + max(*layers, embedding, head)

    def test_no_ranks_own_nothing(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            round_robin(4, 0)

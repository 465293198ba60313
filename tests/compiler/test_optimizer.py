import itertools

import pytest

from parcompile.layout.shards import even_shard, padded_numel, padded_shard

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

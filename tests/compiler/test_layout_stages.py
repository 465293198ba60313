import pytest

from parcompile.layout.pipeline import PipelineSplit, even_stages, rank_stages, stages_from_counts


def test_even_stages_hold_equal_layers() -> None:
    first, *_, last = even_stages(24, 4)
    assert first.layers == range(6)
    assert (first.has_embedding, first.has_head) == (True, False)
    assert last.layers == range(18, 24)
    assert (last.has_embedding, last.has_head) == (False, True)


def test_thirty_layers_on_four_stages_are_refused_and_not_dropped() -> None:
    with pytest.raises(ValueError, match="30 layers on 4 stages: 30 / 4 is not whole"):
        even_stages(30, 4)


def test_126_layers_fit_16_stages_when_embedding_and_loss_take_slots() -> None:
    counts = PipelineSplit(16, embedding=True, loss=True).counts(126)
    assert counts == (7, *(8,) * 14, 7)
    with pytest.raises(ValueError, match="126 layers on 16 stages: 126 / 16 is not whole"):
        PipelineSplit(16).counts(126)
    with pytest.raises(ValueError, match=r"\(126 layers \+ 1 for the embedding\) on 16 stages: 127 / 16 is not whole"):
        PipelineSplit(16, embedding=True).counts(126)


def test_first_and_last_stage_may_differ() -> None:
    assert PipelineSplit(4, first=4, last=6).counts(30) == (4, 10, 10, 6)
    assert PipelineSplit(4, last=3).counts(30) == (9, 9, 9, 3)
    with pytest.raises(ValueError, match=r"\(30 layers − 4 given\) on 3 other stages: 26 / 3 is not whole"):
        PipelineSplit(4, first=4).counts(30)
    with pytest.raises(ValueError, match="cannot count as layers as well"):
        PipelineSplit(4, first=4, embedding=True).counts(30)
    with pytest.raises(ValueError, match="pp 1 has one stage"):
        PipelineSplit(1, first=4, last=26).counts(30)


def test_virtual_stages_go_around_the_ranks() -> None:
    ranks = rank_stages(16, PipelineSplit(4, virtual=2))
    assert [[stage.layers for stage in stages] for stages in ranks] == [
        [range(2), range(8, 10)],
        [range(2, 4), range(10, 12)],
        [range(4, 6), range(12, 14)],
        [range(6, 8), range(14, 16)],
    ]
    assert [stage.has_embedding for stages in ranks for stage in stages].count(True) == 1
    assert ranks[3][1].has_head
    assert not ranks[3][0].has_head
    with pytest.raises(ValueError, match="5 layers of stage 0 in 2 virtual stages: 5 / 2 is not whole"):
        PipelineSplit(4, virtual=2, first=5).counts(29)


@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_no_layer_is_ever_dropped(pp, virtual) -> None:
    for layers in range(1, 40):
        for embedding, loss in ((False, False), (True, False), (True, True)):
            try:
                counts = PipelineSplit(pp, virtual, embedding=embedding, loss=loss).counts(layers)
            except ValueError:
                assert (layers + embedding + loss) % (pp * virtual) or layers < pp * virtual
                continue
            stages = stages_from_counts(counts)
            assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
            assert len(stages) == pp * virtual

"""Data as tokenizers, `datasets` and arrays give it trains as tensors do; what is no sample is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from ranks import run_ranks
from torch import Tensor
from training_runs import initial_model, make_plan

from parcompile.plan import Plan
from parcompile.runtime import PackedPlanLoader, PlanLoader, evaluate
from parcompile.runtime.data.batches import tensors_of
from parcompile.runtime.data.loader import Stream

LENGTH = 16


def rows() -> list[list[int]]:
    return torch.randint(0, 61, (4, LENGTH), generator=torch.Generator().manual_seed(3)).tolist()


def forms() -> dict[str, Any]:
    """The same four samples, none of which has labels."""
    masked = [{"input_ids": row, "attention_mask": [1] * LENGTH} for row in rows()]
    found: dict[str, Any] = {
        "tensors": [torch.tensor(row) for row in rows()],
        "lists": rows(),
        "arrays of 16 bits": np.array(rows(), dtype=np.uint16),
        "mappings of lists": masked,
        "mappings of arrays": [{"input_ids": np.array(row)} for row in rows()],
    }
    try:
        import datasets
    except ImportError:
        return found
    columns = datasets.Dataset.from_list(masked)
    found["datasets, lists"] = columns
    found["datasets, torch"] = columns.with_format("torch")
    found["datasets, torch, ids alone"] = columns.remove_columns("attention_mask").with_format("torch")
    found["datasets, numpy"] = columns.with_format("numpy")
    return found


def losses_of_forms(rank: int, plan: Plan) -> dict[str, list[float]]:
    from parcompile.runtime import evaluate, initialize

    engine, *_ = initialize(plan=plan, model=initial_model(plan))
    found = {}
    for name, data in forms().items():
        batches = [next(iter(PlanLoader(data, engine.mesh))), next(iter(PackedPlanLoader(data, engine.mesh)))]
        with torch.no_grad():
            found[name] = [float(engine(**batch).loss) for batch in batches] + [evaluate(engine, data)]
    return found


@pytest.mark.ranks
def test_every_form_of_a_sample_gives_the_loss_of_tensors() -> None:
    found = run_ranks(1, losses_of_forms, make_plan(1, {}))[0]
    assert len(found) >= 5
    assert len(set(map(tuple, found.values()))) == 1
    assert_close(found["tensors"], [found["tensors"][0]] * 3)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "once"}, "sample 7 has text, but no input_ids: tokenize it first"),
        ({"input_ids": [1, 2], "text": "once"}, r"sample 7: text holds str, .*remove_columns\('text'\)"),
        ({"input_ids": [1, 2], "labels": None}, "sample 7: labels holds NoneType"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.int64)}, r"sample 7: input_ids have shape \[1, 2\]; .* one row"),
        ({"input_ids": [1, 2], "labels": [1]}, r"sample 7: labels have shape \[1\], input_ids \[2\]"),
        ([0.5, 1.5], "sample 7: input_ids are torch.float32, not whole numbers"),
    ],
)
def test_what_is_no_sample_is_named(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensors_of(sample, 7)


def test_samples_that_differ_in_a_batch_are_named() -> None:
    from parcompile.runtime.data import stack

    with pytest.raises(ValueError, match=r"sample 5: input_ids have shape \[2\], those of sample 4 .* have \[3\]"):
        stack([[1, 2, 3], [1, 2]], [4, 5])
    with pytest.raises(ValueError, match="sample 1 has attention_mask, input_ids, labels, sample 0 of the same batch"):
        stack([[1, 2], {"input_ids": [1, 2], "attention_mask": [1, 1]}])


def test_labels_of_a_sample_are_kept() -> None:
    found = tensors_of({"input_ids": [1, 2], "labels": [-100, 2]})
    assert isinstance(found["labels"], Tensor) and found["labels"].tolist() == [-100, 2]


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(ValueError, match="a list_iterator is not read: a resumed run has to see the same samples"):
        PlanLoader(iter(rows()), None)  # type: ignore[arg-type]


def test_shards_are_streamed_and_shuffled_anew_in_each_epoch(tmp_path: Path) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    for shard in range(2):
        table = pytest.importorskip("pyarrow").table({"input_ids": [[shard, row] for row in range(6)]})
        parquet.write_table(table, tmp_path / f"{shard}.parquet")

    def streamed() -> Stream:
        files = [str(tmp_path / f"{shard}.parquet") for shard in range(2)]
        found = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=tmp_path / "cache"
        )
        return Stream(found.shuffle(seed=1, buffer_size=5))

    whole, part = streamed(), streamed()
    found = [tuple(whole[number]["input_ids"]) for number in range(24)]
    first, second = found[:12], found[12:]
    assert sorted(first) == sorted(second) == [(shard, row) for shard in range(2) for row in range(6)]
    assert first != second
    taken = range(1, 24, 3)
    assert [tuple(part[number]["input_ids"]) for number in taken] == [found[number] for number in taken]
    assert tuple(part[2]["input_ids"]) == found[2]  # behind what was read: it begins anew, with the first epoch


@pytest.mark.parametrize("taker", ["PackedPlanLoader", "evaluate"])
def test_a_stream_is_refused_where_its_length_is_asked_for(taker: str) -> None:
    stream: Any = pytest.importorskip("datasets").IterableDataset.from_generator(rows)
    with pytest.raises(ValueError, match=f"{taker} takes a sequence, and a IterableDataset has no length"):
        if taker == "evaluate":
            evaluate(None, stream)
        else:
            PackedPlanLoader(stream, None)  # type: ignore[arg-type]


def test_a_stream_without_samples_is_refused_when_it_is_read() -> None:
    class Empty:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ValueError, match="the data set is empty"):
        Stream(Empty())[0]

"""`parcompile data`: a step's samples are those that the loader takes, and their documents hold those tokens."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from test_training_files import CHAT, MARKED, megatron, tokenizer
from training_runs import make_plan

from parcompile.cli import cli
from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.data import PlanLoader
from parcompile.runtime.data.megatron_files import MegatronTokens, write_megatron
from parcompile.runtime.data.rows_of_files import rows, tokens_and_labels
from parcompile.runtime.data.sequences import Mixture
from parcompile.runtime.data.training_files import documents_of, ledger, read_training_data, samples_before
from parcompile.runtime.run_log import RunLog

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def plan_of(size: int = 8, ranks: int = 2, **more: Any) -> Plan:
    return make_plan(
        ranks,
        {"tp": 1},
        model={"vocab_size": 256},
        training={"global_batch_size": size, "micro_batch_size": 2, "sequence_length": 32, **more},
    )


def numbers_of(data: Any, plan: Plan, dp_rank: int, step: int, samples: int) -> list[list[int]]:
    """The sequences that the loader takes, by micro-batch."""
    mesh = SimpleNamespace(plan=plan, size=lambda _: plan.spec.parallelism.dp, index=lambda _: dp_rank)
    loader = PlanLoader(data, cast("Any", mesh))
    loader.resume(step - 1, samples)
    return [loader._numbers(first) for first in loader._firsts(step - 1)]


def text_file(folder: Path) -> str:
    for name, letters in (("a", "ab"), ("b", "cdefg")):
        (folder / f"{name}.txt").write_text("".join(letters[n % len(letters)] * 7 for n in range(60)), "utf-8")
    (folder / "c.txt").write_text("", "utf-8")
    return str(folder)


def lines_of_text(folder: Path) -> str:
    lines = [json.dumps({"text": chr(97 + n) * (3 * n)}) for n in range(20)]
    (folder / "lines.jsonl").write_text("\n\n".join(lines), "utf-8")
    return str(folder / "lines.jsonl")


def chats(folder: Path) -> str:
    lines = [json.dumps({"messages": [CHAT[0], {**CHAT[1], "content": "x" * (n % 40)}]}) for n in range(30)]
    (folder / "chats.jsonl").write_text("\n".join(lines), "utf-8")
    return str(folder / "chats.jsonl")


def tokens_of(document: str, file: str, words: Any) -> list[int]:
    if file.endswith(".idx"):
        read, number = MegatronTokens(Path(file)), int(document.rpartition(" ")[2])
        return cast("list[int]", np.split(read.tokens, read.starts[1:])[number].tolist())
    row = next(row for where, row in rows(Path(file)) if where == document)
    if "messages" in row:
        return tokens_and_labels(row, words, document)[0]
    return [*words(row["text"])["input_ids"], words.eos_token_id]


@pytest.mark.parametrize(
    "made", [text_file, lines_of_text, chats, lambda folder: str(megatron(folder, [40, 3, 30, 90, 1, 36]))]
)
def test_the_ledger_names_the_tokens_that_the_loader_takes(tmp_path: Path, made: Callable[[Path], str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    tokenizer(MARKED).save_pretrained(tmp_path / "words")
    plan, path, words = plan_of(), made(folder), tokenizer(MARKED)
    data = read_training_data(path, plan, tmp_path / "words")
    for step in (1, 2, 9):  # data of fewer than 72 sequences begin anew
        found = ledger(step, plan, data, samples_before(step, plan))["samples"]
        for dp_rank in range(2):
            taken = numbers_of(data, plan, dp_rank, step, (step - 1) * 8)
            for micro, expected in enumerate(taken):
                mine = [one for one in found if (one["dp_rank"], one["micro_batch"]) == (dp_rank, micro)]
                assert [one["sequence"] for one in mine] == expected
        assert [one["sample"] for one in found] == list(range(8 * step - 8, 8 * step))
        for one in found:
            assert one["epoch"] == one["sample"] // len(data) + 1
            said: list[int] = []
            for document in one["documents"]:
                first, end = document["tokens"]
                assert first < end
                said += tokens_of(document["document"], document["file"], words)[first:end]
            sample = data[one["sequence"]]
            real = sample["attention_mask"].bool() if "attention_mask" in sample else slice(None)
            assert sample["input_ids"][real].tolist() == said


def test_the_ledger_survives_a_resume_with_another_batch_size(tmp_path: Path) -> None:
    plans = [plan_of(), plan_of(4, 1), plan_of(16)]
    for plan, first in zip(plans, (0, 5, 7), strict=True):
        RunLog(tmp_path, first, plan=plan)
    data = read_training_data(lines_of_text(tmp_path), plans[0])
    for plan, step, before in ((plans[0], 5, 32), (plans[1], 6, 40), (plans[1], 7, 44), (plans[2], 8, 48)):
        assert samples_before(step, plan, tmp_path) == before
        found = ledger(step, plan, data, before)["samples"]
        dp_rank = plan.spec.parallelism.dp - 1
        mine = [one["sequence"] for one in found if one["dp_rank"] == dp_rank]
        assert mine == [one for taken in numbers_of(data, plan, dp_rank, step, before) for one in taken]
    with pytest.raises(RunError, match=f"step 6 ran under plan {plans[1].plan_hash[:12]}"):
        samples_before(6, plans[0], tmp_path)
    for text, said in (
        ("{}", "does not name plans with after_step and global_batch_size"),
        ('{"plans": [{"after_step": 3, "plan": "x", "global_batch_size": 8}]}', "does not begin with the first step"),
    ):
        (tmp_path / "run.json").write_text(text, "utf-8")
        with pytest.raises(RunError, match=said):
            samples_before(6, plans[0], tmp_path)
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        samples_before(6, plans[0], tmp_path / "none")


def test_the_ledger_has_the_samples_of_a_batch_that_grows(tmp_path: Path) -> None:
    """4, 4, 8, 12 and 16 samples a step; 3 steps of them, 2 of 8, and then as the ramp has it behind 32 samples."""
    ramp = {"rampup_batch_size": {"start": 4, "increment": 4, "samples": 24}}
    grows, plain, longer = plan_of(16, **ramp), plan_of(), plan_of(32, rampup_batch_size=RAMP_TO_32)
    assert [samples_before(step, grows) for step in range(1, 8)] == [0, 4, 8, 16, 28, 44, 60]
    for plan, first in ((grows, 0), (plain, 3), (longer, 5)):
        RunLog(tmp_path, first, plan=plan)
    data = read_training_data(lines_of_text(tmp_path), grows)
    said = [(grows, 3, 8, 8), (plain, 4, 16, 8), (longer, 6, 32, 8), (longer, 8, 52, 16), (longer, 12, 132, 32)]
    for plan, step, before, size in said:
        assert samples_before(step, plan, tmp_path) == before
        found = ledger(step, plan, data, before)["samples"]
        assert [one["sample"] for one in found] == list(range(before, before + size))
        for dp_rank in range(2):
            mine = [one["sequence"] for one in found if one["dp_rank"] == dp_rank]
            assert mine == [one for taken in numbers_of(data, plan, dp_rank, step, before) for one in taken]
    loader = PlanLoader(data, cast("Any", SimpleNamespace(plan=grows, size=lambda _: 2, index=lambda _: 0)))
    loader.resume(3, 16)
    loader.step = 2
    with pytest.raises(ValueError, match=r"loader\.step 2: the run went on behind step 3, and its batch grows"):
        next(iter(loader))
    file = tmp_path / "run.json"
    file.write_text(file.read_text("utf-8").replace('"increment": 4', '"increment": 5'), "utf-8")
    with pytest.raises(RunError, match="it is damaged"):
        samples_before(6, longer, tmp_path)


RAMP_TO_32 = {"start": 4, "increment": 4, "samples": 120}
"""Seven increments, one after each 17.1 samples."""
BLENDED = {
    (0.3, 0.7): "101101101101110110110111",
    (0.2, 0.5, 0.3): "120121012101212101210121",
    (3, 1, 2, 7.5): "302313303230330323130323",
}
"""Of `helpers_cpp.build_blending_indices` of megatron-core 0.16.1, for shares of these weights."""


@pytest.mark.parametrize("weights", BLENDED)
def test_a_mixture_takes_data_sets_in_the_order_of_megatron(weights: tuple[float, ...]) -> None:
    parts: Any = [type("Sized", (), {"summary": "", "__len__": lambda _: 1000})()] * len(weights)
    found = Mixture(["x"] * len(weights), parts, weights)
    assert "".join(str(found.source(number)[0]) for number in range(24)) == BLENDED[weights]
    taken = [found.source(number) for number in range(1200)]
    for source in range(len(weights)):
        own = [number for one, number in taken if one == source]
        assert own == [number % 1000 for number in range(len(own))]


def test_samples_of_a_mixture_are_those_of_its_data_sets(tmp_path: Path) -> None:
    tokenizer(MARKED).save_pretrained(tmp_path / "words")
    plan, paths = plan_of(), [lines_of_text(tmp_path), chats(tmp_path)]
    parts = [read_training_data(path, plan, tmp_path / "words") for path in paths]
    data = read_training_data(["1", paths[0], "3", paths[1]], plan, tmp_path / "words")
    assert len(data) == max(4 * len(parts[0]), -(-4 * len(parts[1]) // 3))
    found = ledger(2, plan, data, 8)["samples"]
    assert {one["data_set"] for one in found} == {0, 1}
    for one in found:
        sample, plain = data[one["sequence"]], parts[one["data_set"]][one["sequence_in_set"]]
        assert sample.keys() == {"input_ids", "labels", "position_ids", "attention_mask"}  # a batch may hold both
        assert all(sample[name].tolist() == value.tolist() for name, value in plain.items())
        assert one["documents"][0]["file"] == paths[one["data_set"]]
    for given, said in (
        (["1e308", "a.txt", "1e308", "a.txt"], "the weights add up to more than a number holds"),
        (["1e-320", "a.txt", "1", "a.txt"], "less than a billionth of all, 1: leave its data set out"),
        (["a.txt", "b.txt"], "'a.txt' is where a weight belongs, and is not a number above 0"),
        (["0", "a.txt"], "'0' is where a weight belongs"),
        (["0.5", "a.txt", "0.5"], "the weight 0.5 has no data behind it"),
    ):
        with pytest.raises(RunError, match=said):
            read_training_data(given, plan)


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_written_files_have_the_layout_of_megatron(tmp_path: Path, vocab_size: int) -> None:
    documents = [[vocab_size - 1, 0, 7], [5], [1, 2]]
    said = write_megatron(((str(n), ids) for n, ids in enumerate(documents)), tmp_path / "a", vocab_size)
    size, code, kind = (2, 8, np.uint16) if vocab_size < 65500 else (4, 4, np.int32)
    assert said == f"6 tokens of 3 documents, {size} bytes each"
    assert (tmp_path / "a.bin").read_bytes() == np.array([vocab_size - 1, 0, 7, 5, 1, 2], kind).tobytes()
    parts = [np.array([3, 1, 2], np.int32), np.array([0, 3 * size, 4 * size]), np.arange(4)]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == head + b"".join(part.tobytes() for part in parts)
    assert MegatronTokens(tmp_path / "a.idx").starts.tolist() == [0, 3, 4]
    if code == 4:  # DeepSpeed's reader of such files calls uint16 otherwise
        pytest.importorskip("deepspeed")
        from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

        read = MMapIndexedDataset(str(tmp_path / "a"), skip_warmup=True)
        assert [read[number].tolist() for number in range(3)] == documents
        assert read.doc_idx.tolist() == [0, 1, 2, 3]


def test_written_text_is_read_as_the_text_was(tmp_path: Path) -> None:
    plan = plan_of()
    path = lines_of_text(tmp_path)
    write_megatron(documents_of(path), tmp_path / "tokens", 256)
    one, other = (read_training_data(source, plan) for source in (path, tmp_path / "tokens"))
    assert [one[n]["input_ids"].tolist() for n in range(len(one))] == [
        other[n]["input_ids"].tolist() for n in range(len(other))
    ]
    before = sorted(tmp_path.iterdir())
    chats(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n', "utf-8")
    for name, prefix, said in (
        (path, "tokens", r"tokens\.bin exists already: name another prefix"),
        ("chats.jsonl", "new", r"name the tokenizer"),
        ("empty.jsonl", "new", "the data hold no token"),
        ("tokens", "new", "is Megatron's already"),
        (path, "none/new", "none/new.bin.new cannot be written: No such file"),
    ):
        with pytest.raises(RunError, match=said):
            write_megatron(documents_of(tmp_path / name), tmp_path / prefix, 256)
    with pytest.raises(RunError, match=r"lines.jsonl:5 has the token 99, and the model's vocabulary 99"):
        write_megatron(documents_of(path), tmp_path / "new", 99)
    for name in ("chats.jsonl", "empty.jsonl"):
        (tmp_path / name).unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        for line, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
            if line.startswith("cd "):
                monkeypatch.chdir(tmp_path / line[3:])
                continue
            cli.main(line.split()[1:], standalone_mode=False)
            printed = capsys.readouterr().out
            assert printed.startswith(shown), line

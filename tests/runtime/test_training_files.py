"""Files of training data become the sequences that they say, with prompts masked."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parcompile.runtime import RunError
from parcompile.runtime.data.rows_of_files import tokens_and_labels
from parcompile.runtime.data.training_files import read_training_data
from parcompile.runtime.run_log import RunLog

TEMPLATE = (
    "{% for one in messages %}{{ one.role[0] }}: {{ one.content }};{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
MARKED = (
    "{% for one in messages %}{{ one.role[0] }}: {% if one.role == 'assistant' %}{% generation %}{{ one.content }};"
    "{% endgeneration %}{% else %}{{ one.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
CHAT = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two"},
]


def write_model(folder: Path) -> None:
    """A small llama and its tokenizer, of bytes, with a chat template."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256, max_position_embeddings=128)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(TEMPLATE).save_pretrained(folder)


def tokenizer(template: str | None) -> Any:
    import tokenizers
    import transformers

    vocabulary = {chr(number): number for number in range(256)}
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])), eos_token=chr(0)
    )
    found.chat_template = template
    return found


def plan(length: int = 32, vocab_size: int = 256) -> Any:
    training = SimpleNamespace(sequence_length=length, seed=1)
    shape = SimpleNamespace(vocab_size=vocab_size)
    return SimpleNamespace(spec=SimpleNamespace(training=training, model=SimpleNamespace(shape=shape)))


def predicted(ids: list[int], labels: list[int]) -> str:
    return "".join(chr(one) if kept != -100 else "_" for one, kept in zip(ids, labels, strict=True))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_only_answers_of_a_chat_are_predicted(template: str) -> None:
    ids, labels = tokens_and_labels({"messages": CHAT}, tokenizer(template), "row 1")
    assert "".join(map(chr, ids)) == "u: 1?;a: one;u: 2?;a: two;"
    assert predicted(ids, labels) == "_________one;_________two;"


@pytest.mark.parametrize(
    ("row", "seen"),
    [
        ({"prompt": "1?", "completion": "one"}, "__one\0"),
        ({"instruction": "1?", "input": "", "output": "one"}, "__one\0"),
        ({"conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "one"}]}, "__one\0"),
    ],
)
def test_prompts_and_answers_need_no_template(row: dict[str, Any], seen: str) -> None:
    assert predicted(*tokens_and_labels(row, tokenizer(None), "row 1")) == seen


def test_conversations_share_a_sequence_and_padding_counts_nothing(tmp_path: Path) -> None:
    tokenizer(TEMPLATE).save_pretrained(tmp_path / "words")
    rows = [{"messages": CHAT[:2]}, {"messages": CHAT[2:]}, {"messages": [CHAT[0], {**CHAT[1], "content": "x" * 90}]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = read_training_data(tmp_path / "chats.jsonl", plan(), tmp_path / "words")
    assert "3 conversations" in data.summary
    assert data.summary.endswith("1 are longer and end there")
    (two,) = [one for one in (data[0], data[1]) if int(one["attention_mask"].sum()) == 26]
    assert two["position_ids"].tolist() == [*range(13), *range(13), *range(6)]
    assert (two["labels"] != -100).sum() == 8
    assert (two["labels"][two["attention_mask"] == 0] == -100).all()


def test_text_is_one_stream_of_windows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 62, encoding="utf-8")
    data = read_training_data(tmp_path, plan())
    assert len(data) == 2
    assert sorted(data[0]["input_ids"].tolist() + data[1]["input_ids"].tolist()) == [10, 10, *[120] * 62]
    short = read_training_data(tmp_path / "a.txt", plan(80))
    assert (short[0]["labels"] != -100).sum() == 64
    assert short.summary == "64 tokens, 1 sequences of 80, of which 16 are padding"


def test_rows_of_parquet_and_of_saved_data_sets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="parquet and saved data sets were NOT read: pip install datasets")
    rows = datasets.Dataset.from_dict({"text": ["x" * 30, "y" * 30]})
    rows.to_parquet(tmp_path / "text.parquet")
    rows.save_to_disk(tmp_path / "saved")
    for source in ("text.parquet", "saved"):
        assert read_training_data(tmp_path / source, plan()).summary == "64 tokens, 2 sequences of 32"


def megatron(folder: Path, lengths: list[int]) -> Path:
    """As Megatron-LM's IndexedDatasetBuilder writes them (megatron/core/datasets/indexed_dataset.py)."""
    (folder / "text.bin").write_bytes(np.arange(sum(lengths), dtype=np.uint16).tobytes())
    starts = 2 * np.cumsum([0, *lengths[:-1]])
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1)
    parts = (np.array(lengths, np.int32), starts.astype(np.int64), np.arange(len(lengths) + 1, dtype=np.int64))
    (folder / "text.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    return folder / "text"


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_tokens_of_megatron_are_read_where_they_are(tmp_path: Path, ending: str) -> None:
    data = read_training_data(f"{megatron(tmp_path, [40, 30])}{ending}", plan())
    assert len(data) == 2
    assert sorted(data[0]["input_ids"].tolist() + data[1]["input_ids"].tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": ', "a.jsonl:2 is not JSON"),
        ("a.jsonl", '{"body": "x"}', "a.jsonl:1 has body: expected text, messages, prompt and completion"),
        ("a.jsonl", '{"messages": []}', "a.jsonl:1 is a conversation: name the tokenizer"),
        ("a.jsonl", '{"text": "é"}', "has the token 195, and the model's vocabulary 128"),
        ("a.csv", "x", "a.csv: training data ends in .txt, .jsonl, .parquet, .idx, .json or .bin"),
        ("a.idx", "x", "a.bin is missing"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RunError) as refused:
        read_training_data(tmp_path / name, plan(vocab_size=128))
    assert said in str(refused.value)


def test_no_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no training data"):
        read_training_data(tmp_path / "none", plan())
    with pytest.raises(RunError, match="holds none of them"):
        read_training_data(tmp_path, plan())


def test_a_resumed_log_drops_steps_behind_its_checkpoint(tmp_path: Path) -> None:
    for first in (0, 2):
        with RunLog(tmp_path, first) as log:
            for step in range(first + 1, 4):
                log.add(step, loss=float("nan") if step == 3 else 4.0 - step)
    assert [row["step"] for row in log.rows()] == [1, 2, 3]
    assert "Training loss" in (tmp_path / "loss.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"text": "u: 1?;a: one;"}, "1 have text too, which is not read"),
        ({"prompt": "1?", "text": "x"}, "1 have text too, which is not read"),
    ],
)
def test_of_a_row_with_text_and_messages_the_messages_are_read(tmp_path: Path, beside: Any, said: str) -> None:
    tokenizer(TEMPLATE).save_pretrained(tmp_path / "words")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT, **beside}), encoding="utf-8")
    data = read_training_data(tmp_path / "a.jsonl", plan(), tmp_path / "words")
    assert data.summary.endswith(said)
    assert predicted(data[0]["input_ids"].tolist(), data[0]["labels"].tolist())[:26] == "_________one;_________two;"


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
def test_padding_of_ready_rows_is_not_trained_on(tmp_path: Path, mask: list[int]) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, -100, 8, 9], "attention_mask": mask}
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    sample = read_training_data(tmp_path / "a.jsonl", plan(8))[0]
    kept = [index for index, one in enumerate(mask) if one]
    assert sample["input_ids"].tolist()[:3] == [row["input_ids"][index] for index in kept]
    assert sample["labels"].tolist() == [*(row["labels"][index] for index in kept), *[-100] * 5]
    assert sample["attention_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": "abc"}, 'a.jsonl:2: input_ids is "abc": expected a list of whole numbers'),
        ({"input_ids": [1, 2.5]}, "a.jsonl:2: input_ids is [1, 2.5]: expected a list of whole numbers"),
        ({"input_ids": [1, -2]}, "a.jsonl:2: input_ids holds -2: expected token ids, from 0 on"),
        ({"input_ids": [1, 2**40]}, "a.jsonl:2: input_ids holds 1099511627776: expected token ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "a.jsonl:2: labels has 1 numbers, input_ids 2"),
        ({"input_ids": [1, 2], "labels": 3}, "a.jsonl:2: labels is 3: expected a list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "a.jsonl:2: labels holds -1: expected token ids, and -100 where"),
        ({"input_ids": [1, 2], "labels": [1, 500]}, "has the token 500, and the model's vocabulary 256"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "a.jsonl:2: attention_mask has 1 numbers, input_ids 2"),
        ({"input_ids": [1, 2], "attention_mask": [1, 7]}, "a.jsonl:2: attention_mask holds 7: expected 0 and 1"),
        ({"input_ids": [1] * 3, "attention_mask": [1, 0, 1]}, "a.jsonl:2: attention_mask hides tokens between others"),
        ({"text": 3}, "a.jsonl:2: text is 3: expected a text"),
        ({"messages": ["hi"]}, 'a.jsonl:2: messages[0] is "hi": expected {"role": "user"'),
        ({"messages": "hi"}, 'a.jsonl:2: messages is "hi": expected a list of messages'),
        ({"conversations": [{"from": "human"}]}, 'a.jsonl:2: conversations[0] is {"from": "human"}: expected'),
        ({"messages": [{"role": "user"}]}, 'a.jsonl:2: messages[0] is {"role": "user"}: expected'),
        (
            {"messages": [CHAT[1], {"role": "broken", "content": ""}]},
            "a.jsonl:2: the tokenizer's chat template does not",
        ),
        ({"prompt": 1, "completion": "x"}, "a.jsonl:2: prompt is 1: expected a text"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_key(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    template = (
        TEMPLATE + "{% for m in messages if m.role == 'broken' %}{{ raise_exception('no such role') }}{% endfor %}"
    )
    tokenizer(template).save_pretrained(tmp_path / "words")
    text = f"\n{json.dumps(row)}\n"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(RunError) as refused:
        read_training_data(tmp_path / "a.jsonl", plan(), tmp_path / "words")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"fine\ncaf\xe9\n", "a.txt:2 is not UTF-8: byte 4 of the line is 0xe9"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', "a.jsonl:2 is not UTF-8"),
        ("a.json", b'[{"text": "x"},\n {"text": ]', "a.json:2 is not JSON: Expecting value at column 11"),
        ("a.jsonl", b"\n", "a.jsonl holds no row"),
        ("a.txt", b"", "a.txt holds no row, or only empty texts"),
        ("a.json", b'[{"text": "x"}, 3]', "a.json row 1 is no JSON object: 3"),
        ("a.jsonl", b"[" * 99999, "a.jsonl:1 is not JSON that can be read"),
        ("a.parquet", b"PAR1", "a.parquet is no parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="a broken parquet file was NOT read: pip install pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError) as refused:
        read_training_data(tmp_path / name, plan())
    assert said in str(refused.value)


def test_marks_of_byte_order_and_lists_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "' + b"x" * 30 + b'"}\n')
    (tmp_path / "b.json").write_text('\n [{"text": "%s"}]' % ("y" * 30), encoding="utf-8")
    for name in ("a.jsonl", "b.json"):
        assert read_training_data(tmp_path / name, plan()).summary == "32 tokens, 1 sequences of 32"


@pytest.mark.parametrize(
    ("lengths", "ending", "size", "said"),
    [
        ([], ".bin", None, "text.bin holds no token"),
        ([4, 4], ".bin", 0, "text.bin holds 0 bytes"),
        (
            [4, 4],
            ".bin",
            15,
            "text.bin holds 15 bytes; .*text.idx lists 8 tokens of 2 bytes: one of them is incomplete",
        ),
        ([4, 4], ".idx", 40, "text.idx is incomplete: it begins as the index of 2 sequences"),
    ],
)
def test_megatrons_files_that_were_cut_off_are_named(
    tmp_path: Path, lengths: list[int], ending: str, size: int | None, said: str
) -> None:
    file = megatron(tmp_path, lengths)
    if size is not None:
        os.truncate(file.with_suffix(ending), size)
    with pytest.raises(RunError, match=said):
        read_training_data(file, plan())


def test_what_is_missing_is_named_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no training data .*none\.jsonl: no file or folder has this name"):
        read_training_data(tmp_path / "none.jsonl", plan())
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"there is no folder .*none with a tokenizer"):
        read_training_data(tmp_path / "a.txt", plan(), tmp_path / "none")
    with pytest.raises(RunError, match=r"empty holds no tokenizer that transformers reads"):
        read_training_data(tmp_path / "a.txt", plan(), tmp_path / "empty")


def test_a_log_that_a_killed_run_left_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    with RunLog(tmp_path, 2) as log:
        log.add(3, loss=0.5)
    assert [row["loss"] for row in log.rows()] == [2.0, 1.0, 0.5]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl:2 is no row of metrics"):
        RunLog(tmp_path, 2)


def test_a_log_whose_folder_is_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: File exists; name another folder"):
        RunLog(tmp_path / "file")


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: its files are not read back")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with RunLog(tmp_path, first, tensorboard=True) as log:
            for step in steps:
                log.add(step, loss=4.0 / step + first)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("loss")] == [
        (row["step"], pytest.approx(row["loss"])) for row in log.rows()
    ]
    assert [row["step"] for row in log.rows()] == [1, 2, 3, 4]


def test_wandb_gets_the_metrics_and_a_resumed_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: no offline run is written")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, steps in ((0, (1, 2, 3)), (2, (3, 4)), (0, (1,))):
        with RunLog(tmp_path, first, wandb="project", config={"plan": "abc"}) as log:
            for step in steps:
                log.add(step, loss=4.0 / step)
    files = sorted((tmp_path / "wandb").glob("*run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    names = [file.stem for file in files]
    assert len(names) == 3
    assert names[0] == names[1] != names[2]  # resumed, and begun anew in the same folder
    assert b"loss" in files[0].read_bytes()


@pytest.mark.parametrize(("package", "options"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "p"})])
def test_a_log_that_needs_a_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, options: dict[str, Any]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package or name == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RunError, match=f"needs it: pip install {package}"):
        RunLog(tmp_path, **options)

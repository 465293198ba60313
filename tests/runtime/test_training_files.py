"""Files of training data become the sequences that they say, with prompts masked."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parcompile.runtime import RunError
from parcompile.runtime.data.conversations import tokens_and_labels
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
        ("a.csv", "x", "a.csv: training data ends in .txt, .jsonl, .parquet, .idx or .bin"),
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

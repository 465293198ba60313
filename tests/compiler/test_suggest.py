import pytest

from parcompile.diagnostics import closest

AXES = ["tp", "cp", "pp", "dp", "ep", "order", "sequence_parallel", "cp_layout"]
PRESETS = ["llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen2.5-7b", "qwen3-8b", "gpt2-xl"]


@pytest.mark.parametrize(
    ("word", "candidates", "expected"),
    [
        ("adamww", ["adamw", "adam"], "adamw"),
        ("lama-3-8b", PRESETS, "llama-3-8b"),
        ("llama3-8b", PRESETS, "llama-3-8b"),
        ("Llama_3_8B", PRESETS, "llama-3-8b"),
        ("qwen-3-8b", PRESETS, "qwen3-8b"),
        ("zero_optimisation", ["zero_optimization", "optimizer"], "zero_optimization"),
        ("gradient_cliping", ["gradient_clipping", "gradient_accumulation_steps"], "gradient_clipping"),
        ("sequenceParallel", AXES, "sequence_parallel"),
        ("ordre", AXES, "order"),
        ("TP", AXES, "tp"),
        ("foo", AXES, None),
        ("zero", ["version", "cluster"], None),
        ("", AXES, None),
        ("x" * 10_000, AXES, None),
        ("anything", [], None),
    ],
)
def test_the_nearest_name_is_found_or_none(word: str, candidates: list[str], expected: str | None):
    assert closest(word, candidates) == expected


def test_a_swap_of_neighbours_is_one_change():
    assert closest("micor", ["micro", "minor_version"]) == "micro"


def test_the_word_itself_is_no_suggestion():
    assert closest("adamw", ["adamw"]) is None

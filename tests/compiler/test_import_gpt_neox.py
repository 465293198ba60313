"""gpt-neox files become the training that gpt-neox runs, and every key of them is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from parcompile.backends.architecture import InexpressibleError
from parcompile.backends.gpt_neox import Field, fields
from parcompile.backends.gpt_neox.model import OPTIONS, mlp_width
from parcompile.backends.gpt_neox.read import IMPORTER
from parcompile.backends.reading import Outcome, RefusedError
from parcompile.importing import Imported, import_tree

ANSWERS = {("cluster", "gpus_per_node"): 8, ("cluster", "nodes"): 12, ("model", "vocab_size"): 50257}
NEOX_20B: dict[str, Any] = {
    "pipe-parallel-size": 4,
    "model-parallel-size": 2,
    "num-layers": 44,
    "hidden-size": 6144,
    "num-attention-heads": 64,
    "seq-length": 2048,
    "max-position-embeddings": 2048,
    "norm": "layernorm",
    "pos-emb": "rotary",
    "rotary-pct": 0.25,
    "no-weight-tying": True,
    "gpt-j-residual": True,
    "output-layer-parallelism": "column",
    "init_method": "small_init",
    "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1.0e-8}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1260000000},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 32,
    "gradient_clipping": 1.0,
    "weight-decay": 0.01,
    "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
    "train-iters": 150000,
    "lr-decay-style": "cosine",
    "warmup": 0.01,
    "min_lr": 0.97e-5,
    "data-path": "data/pile",
    "checkpoint-activations": True,
}
"""The published 20B.yml of gpt-neox, without its logs and half of its buckets."""
LLAMA_2_7B: dict[str, Any] = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 1,
    "num_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 32768,
    "mlp_multiple_of": 256,
    "num_attention_heads": 32,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "pos_emb": "rotary",
    "rotary_pct": 1,
    "no_weight_tying": True,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1.0e-5,
    "activation": "swiglu",
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "make_vocab_size_divisible_by": 1,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "precision": "bfloat16",
}
"""The sizes of the published llama2/7B.yml, with its MLP without biases."""


def imported(tree: dict[str, Any]) -> Imported:
    return import_tree(tree, IMPORTER, ANSWERS)


def numel(found: Imported) -> int:
    assert found.plan is not None, [one.message for one in found.diagnostics]
    return found.plan.parameters.numel


def of_the_parts(tree: dict[str, Any], vocabulary: int, width: int, *, biased: bool) -> int:
    """Parameters as gpt-neox builds them (transformer.py), counted by hand."""
    hidden, layers = tree.get("hidden_size") or tree["hidden-size"], tree.get("num_layers") or tree["num-layers"]
    gated = tree.get("activation") == "swiglu"
    mlp = hidden * width * (3 if gated else 2)
    norms = 2 * hidden * (2 if biased else 1)
    biases = (3 * hidden + hidden + width + hidden) if biased else 0
    return layers * (4 * hidden * hidden + mlp + norms + biases) + 2 * vocabulary * hidden + norms // 2


def test_every_key_of_the_newest_version_is_read_or_has_its_effect_named() -> None:
    current = [field for field in fields().values() if field.is_current]
    assert len(current) > 250
    # Of each key a value that is no default, beside a whole file: all come back with what became of them.
    others = {
        field.name: field.choices[-1] if field.choices else _other(field)
        for field in current
        if not field.handed_on and field.name not in OPTIONS
    }
    found = import_tree({**LLAMA_2_7B, **others}, IMPORTER, {})
    unknown = [one.option for one in found.accounts if one.detail.startswith("not known")]
    assert not unknown
    assert {one.option for one in found.accounts} == set(IMPORTER.options({**LLAMA_2_7B, **others}))


def _other(field: Field) -> Any:
    """A value of the field's type that is not its default."""
    kind = field.types[0] if field.types else "str"
    return {"bool": not field.default, "int": 3, "float": 0.25, "list": ["x"], "dict": {"x": 1}}.get(kind, "x")


def test_the_published_20b_is_the_same_model_and_training() -> None:
    found = imported(NEOX_20B)
    assert found.complete
    assert numel(found) == of_the_parts(NEOX_20B, 50257, 4 * 6144, biased=True)
    spec = found.plan.spec  # type: ignore[union-attr]
    assert (spec.parallelism.tp, spec.parallelism.pp, spec.parallelism.dp) == (2, 4, 12)
    optimizer = spec.training.optimizer
    assert (optimizer.weight_decay, optimizer.no_weight_decay) == (0.01, "biases_and_norms")
    assert spec.training.precision.value == "fp16"
    lost = {one.option: one.detail for one in found.of(Outcome.LOST)}
    schedule = spec.training.lr_scheduler
    assert (schedule.type, schedule.warmup_start_lr, schedule.min_lr) == ("cosine", 0.0, 9.7e-06)
    assert lost["init_method"].startswith("a spec draws all weights from a normal distribution")
    accounted = {one.option for one in found.accounts}
    assert accounted == set(IMPORTER.options(NEOX_20B))


def test_the_width_of_a_gated_mlp_is_what_gpt_neox_makes_of_it() -> None:
    found = import_tree(LLAMA_2_7B, IMPORTER, {**ANSWERS, ("model", "vocab_size"): 32000})
    assert found.spec["model"]["intermediate_size"] == 11008
    assert numel(found) == of_the_parts(LLAMA_2_7B, 32000, 11008, biased=False) == 6_738_415_616


@pytest.mark.parametrize(
    ("given", "multiple", "gated", "width"),
    [(32768, 256, True, 11008), (40960, 256, True, 13824), (43008, 1, True, 14336), (3072, 1, False, 3072)],
)
def test_widths(given: int, multiple: int, gated: bool, width: int) -> None:
    assert mlp_width(given, multiple, gated=gated) == width


def test_a_width_at_which_gpt_neox_itself_stops_is_refused() -> None:
    with pytest.raises(InexpressibleError, match="9558 and 4778 wide"):
        mlp_width(14336, 1, gated=True)


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({"precision": "bfloat16"}, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"precision": "fp16"}, "fp16"),
        ({}, "fp32"),
    ],
)
def test_precision(given: dict[str, Any], precision: str) -> None:
    tree = {name: value for name, value in LLAMA_2_7B.items() if name != "precision"} | given
    assert imported(tree).plan.spec.training.precision.value == precision  # type: ignore[union-attr]


def test_an_optimizer_that_a_spec_has_not_is_asked_for() -> None:
    found = imported({**LLAMA_2_7B, "optimizer": {"type": "Lamb", "params": {"lr": 0.011}}})
    assert [question.path for question in found.questions] == [("training", "optimizer")]
    assert {one.option for one in found.of(Outcome.LOST)} >= {"optimizer.type", "optimizer.params.lr"}


@pytest.mark.parametrize("kind", ["Adam", "CPU_Adam", "cpu_torch_adam"])
def test_adam_on_the_host_is_deepspeeds(kind: str) -> None:
    tree = NEOX_20B | {"optimizer": NEOX_20B["optimizer"] | {"type": kind}}
    spec = imported(tree | {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}).spec
    assert spec["zero"]["offload_optimizer"] == {"device": "cpu", "implementation": "deepspeed"}
    assert spec["training"]["optimizer"]["type"] == "adamw"
    asked = {one.path for one in imported(tree).questions}  # on the accelerator DeepSpeed's stops
    assert (("training", "optimizer") in asked) == (kind != "Adam")


def test_the_defaults_are_those_of_gpt_neox() -> None:
    training = imported(LLAMA_2_7B).plan.spec.training  # type: ignore[union-attr]
    assert training.optimizer.betas == (0.9, 0.999)
    assert (training.optimizer.lr, training.optimizer.eps, training.optimizer.weight_decay) == (0.001, 1e-8, 0.1)
    assert (training.gradient_clipping, training.seed) == (1.0, 1234)


def test_a_schedule_that_a_spec_can_say_is_carried() -> None:
    found = imported({**LLAMA_2_7B, "train_iters": 1000, "lr_decay_style": "cosine", "warmup": 0.05})
    assert found.spec["training"]["lr_scheduler"] == {"type": "cosine", "warmup_steps": 50}
    assert found.complete


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_config": [[["mamba"], 32]]}, "attention_config mamba"),
        ({"moe_num_experts": 8}, "moe_num_experts 8"),
        ({"pos_emb": "alibi"}, "pos_emb alibi"),
        ({"norm": "scalenorm"}, "norm scalenorm"),
        ({"activation": "mish"}, "activation mish"),
        ({"use_mup": True}, "use_mup"),
        ({"use_qk_layernorm": True}, "use_qk_layernorm"),
        ({"mlp_type": "gated"}, "mlp_type gated"),
    ],
)
def test_a_model_that_no_spec_can_say_is_refused_with_the_key(given: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        imported({**LLAMA_2_7B, **given})


def test_a_window_counts_with_flash_attention_only() -> None:
    window = {"sliding_window_width": 1023}
    found = imported({**LLAMA_2_7B, **window, "attention_config": [[["flash"], 32]]})
    assert found.spec["model"]["sliding_window"] == 1024
    found = imported({**LLAMA_2_7B, **window})
    assert "sliding_window" not in found.spec["model"]
    assert [one.option for one in found.of(Outcome.NO_EFFECT) if "flash" in one.detail] == ["sliding_window_width"]

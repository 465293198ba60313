"""DeepSpeed configurations as specs: what is exported comes back, and DeepSpeed's own defaults are kept."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parcompile.backends import deepspeed
from parcompile.backends.deepspeed.read import IMPORTER
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.reading import Outcome
from parcompile.importing import ImportConflictError, Imported, import_tree
from parcompile.pipeline import check_read
from parcompile.plan import Plan, compile_plan, plan_from_tree, plan_tree
from parcompile.spec import Offload
from parcompile.text import parse

ANSWERS: dict[tuple[str, ...], Any] = {
    ("model",): {"preset": "gpt2"},
    ("cluster", "gpus_per_node"): 4,
    ("parallelism", "tp"): 2,
    ("training", "sequence_length"): 1024,
}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def compiled(tree: dict[str, Any]) -> Plan | None:
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
    if not checked.valid or checked.resolution is None:
        return None
    return compile_plan(checked.resolution.spec(), tree, list(checked.diagnostics))


def imported(tree: dict[str, Any], **answers: Any) -> Imported:
    """The import with the usual answers; `training_lr=1` answers for training.lr."""
    more = {tuple(name.split("_", 1)): value for name, value in answers.items()}
    return import_tree(tree, IMPORTER, {**ANSWERS, **more})


def values(result: Imported, section: str) -> dict[str, Any]:
    return dict(result.spec.get(section, {}))


RATES = st.floats(1e-7, 1e-2).map(lambda value: float(f"{value:.3g}"))


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """A training section that compiles for two data-parallel ranks, all of it or hardly any."""
    micro, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    highest = draw(RATES)
    found: dict[str, Any] = {
        "sequence_length": 1024,
        "global_batch_size": micro * steps * 2,
        "precision": precision,
        "optimizer": draw(
            st.fixed_dictionaries(
                {"lr": st.just(highest)},
                optional={
                    "type": st.sampled_from(["adam", "adamw"]),
                    "betas": st.tuples(st.floats(0.5, 0.95), st.floats(0.9, 0.9999)).map(list),
                    "eps": st.sampled_from([1e-8, 1e-5]),
                    "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
                },
            )
        ),
        **draw(st.fixed_dictionaries({}, optional={"gradient_clipping": st.sampled_from([0.0, 0.5, 1.0])})),
    }
    if draw(st.booleans()):
        found["micro_batch_size"] = micro
    if precision == "fp16":
        found["loss_scale"] = draw(st.sampled_from([0, 128]))
    if draw(st.booleans()):
        found["train_steps"] = 100
        kind = draw(st.sampled_from(["constant", "linear", "cosine"]))
        floor = draw(st.sampled_from([0.0, highest / 8]))
        found["lr_scheduler"] = {"type": kind, "warmup_steps": draw(st.integers(2, 50)), "min_lr": floor}
    return found


@settings(max_examples=60, deadline=None)
@given(
    trainings(),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([{}, {"zero_optimization": {"overlap_comm": True}}, {"steps_per_print": 5}]),
)
def test_what_is_exported_comes_back(training: dict[str, Any], stage: int, further: dict[str, Any]) -> None:
    """Everything that a DeepSpeed configuration can express: batch, precision, optimizer, schedule, ZeRO, its own."""
    tree = {
        "version": 1,
        "model": {"preset": "gpt2"},
        "cluster": {"gpus_per_node": 4},
        "parallelism": {"tp": 2},
        "training": training,
        "zero": {"stage": stage},
        "deepspeed": further,
    }
    plan = compiled(tree)
    assert plan is not None
    result = imported(ds_config(plan))
    assert result.plan is not None, (result.questions, [one.message for one in result.diagnostics])
    assert result.of(Outcome.LOST) == []
    again, before = result.plan.spec, plan.spec
    assert again.zero_stage == before.zero_stage
    kept = {name: getattr(before.training, name) for name in before.training.__dataclass_fields__}
    if before.training.lr_scheduler is None or before.training.lr_scheduler.type == "constant":
        kept["train_steps"] = None  # only a schedule that ends says when
    if not stage:
        kept["gradient_accumulation_dtype"] = before.training.precision  # DeepSpeed has no other sums there
    for name, value in kept.items():
        assert getattr(again.training, name) == value or name == "lr_scheduler"
    if before.training.lr_scheduler is not None:
        assert again.training.lr_scheduler is not None
        assert again.training.lr_scheduler.type == before.training.lr_scheduler.type
        assert again.training.lr_scheduler.warmup_steps == before.training.lr_scheduler.warmup_steps
        assert again.training.lr_scheduler.min_lr == pytest.approx(before.training.lr_scheduler.min_lr, rel=1e-12)
    assert ds_config(result.plan)["zero_optimization"] == ds_config(plan)["zero_optimization"]


@pytest.mark.parametrize(
    ("params", "decay"),
    [({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.2}, 0.2)],
)
def test_defaults_of_the_optimizer_are_deepspeeds_own(params: dict[str, Any], decay: float) -> None:
    """A spec's own defaults are others (0.95 and 0.1), so those of DeepSpeed are written out."""
    tree = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}}}
    result = imported(tree)
    assert result.plan is not None
    optimizer = result.plan.spec.training.optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.999), 1e-8, decay)


@pytest.mark.parametrize("said", [None, "fp32", "bf16"])
def test_who_sums_in_fp32_hears_that_deepspeed_reduces_in_bf16(said: str | None) -> None:
    """`DeepSpeedEngine.communication_data_type` is the type of the weights where nobody says it."""
    sums = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 2}}
    result = imported({"train_batch_size": 8, "optimizer": ADAM, **sums, "communication_data_type": said})
    changed = {one.option: one.detail for one in result.accounts if one.changes}
    heard = "DeepSpeed reduces in bf16" in changed.get("data_types.grad_accum_dtype", "")
    assert heard == (said is None)
    if said is None:  # what DeepSpeed itself says
        from deepspeed.runtime.engine import DeepSpeedEngine

        given = SimpleNamespace(communication_data_type=None)
        engine = SimpleNamespace(_config=given, fp16_enabled=lambda: False, bfloat16_enabled=lambda: True)
        assert str(DeepSpeedEngine.communication_data_type.fget(engine)) == "torch.bfloat16"
    assert result.plan is None or result.plan.spec.training.gradient_accumulation_dtype.value == "fp32"


def test_our_table_of_defaults_is_that_of_the_classes() -> None:
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime import config, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for kind, known in (
        (FusedAdam, deepspeed.ADAM),
        (torch.optim.Adam, deepspeed.ADAM),
        (torch.optim.AdamW, deepspeed.TORCH_ADAMW),
    ):
        found = inspect.signature(kind).parameters
        assert {name: found[name].default for name in known} == {**known, "betas": tuple(known["betas"])}
    for name, known in deepspeed.SCHEDULERS.items():
        found = inspect.signature(getattr(lr_schedules, name)).parameters
        assert {key: found[key].default for key in known} == known
    assert config.get_gradient_clipping({}) == deepspeed.DEFAULTS["gradient_clipping"]
    assert DeepSpeedZeroConfig().stage == deepspeed.DEFAULTS["zero_optimization.stage"]
    assert DeepSpeedFP16Config().loss_scale == deepspeed.DEFAULTS["fp16.loss_scale"]


def test_an_undecided_precision_is_asked_for() -> None:
    tree = {
        "train_batch_size": 8,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": ADAM,
    }
    asked = imported(tree)
    assert [one.path for one in asked.questions] == [("training", "precision")]
    assert "precision" not in values(asked, "training")
    answered = imported(tree, training_precision="bf16")
    assert answered.complete
    assert values(answered, "training")["precision"] == "bf16"
    # fp16's own keys say nothing of a run in bf16.
    assert [one.option for one in answered.of(Outcome.NO_EFFECT)] == ["fp16.loss_scale"]


def test_without_a_precision_weights_are_fp32() -> None:
    assert values(imported({"train_batch_size": 8, "optimizer": ADAM}), "training")["precision"] == "fp32"


def test_the_whole_batch_alone_is_one_pass() -> None:
    """DeepSpeed takes gradient_accumulation_steps 1 then; a spec would take one sequence at a time."""
    result = imported({"train_batch_size": 8, "optimizer": ADAM})
    assert result.plan is not None
    training = result.plan.spec.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps) == (4, 1)


@pytest.mark.parametrize("kind", ["Lamb", "OneBitAdam", "Lion"])
def test_another_optimizer_is_not_turned_into_adamw(kind: str) -> None:
    result = imported({"train_batch_size": 8, "optimizer": {"type": kind, "params": {"lr": 1e-3}}})
    assert [one.path for one in result.questions] == [("training", "optimizer")]
    assert "optimizer" not in values(result, "training")
    assert {one.option for one in result.of(Outcome.LOST)} == {"optimizer.type", "optimizer.params.lr"}


def test_a_schedule_that_a_spec_cannot_say_stays_deepspeeds() -> None:
    """A logarithmic warm-up, a one-cycle schedule: DeepSpeed's scheduler section is carried as it is."""
    for scheduler in (
        {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}},
    ):
        result = imported({"train_batch_size": 8, "optimizer": ADAM, "scheduler": scheduler})
        assert result.plan is not None
        assert ds_config(result.plan)["scheduler"] == scheduler
        assert result.of(Outcome.LOST) == []


def test_the_schedule_decides_the_rate() -> None:
    params = {"warmup_max_lr": 5e-4, "warmup_num_steps": 10, "warmup_type": "linear"}
    result = imported({"train_batch_size": 8, "optimizer": ADAM, "scheduler": {"type": "WarmupLR", "params": params}})
    assert result.plan is not None
    assert result.plan.spec.training.optimizer.lr == 5e-4
    assert [one.option for one in result.of(Outcome.LOST)] == ["optimizer.params.lr"]


def test_what_breaks_a_plan_is_lost_with_its_reason() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme"}, "overlap_comm": True}
    result = imported({"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": zero, "surprise": 1})
    lost = {one.option: one.detail for one in result.of(Outcome.LOST)}
    assert set(lost) == {"zero_optimization.offload_optimizer.device", "surprise"}
    assert lost["surprise"] == "DeepSpeed has no such key"
    assert result.spec["deepspeed"] == {"zero_optimization": {"overlap_comm": True}}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("given", "pinned"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, True),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 1.0}}, False),
        ({"cpu_offload": True}, True),
    ],
)
def test_an_optimizer_on_the_host_is_carried(stage: int, given: dict[str, Any], pinned: bool) -> None:
    result = imported({"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": {"stage": stage, **given}})
    assert result.of(Outcome.LOST) == []
    assert result.plan is not None
    assert result.plan.spec.offload_optimizer == Offload("cpu", pinned, "deepspeed")
    written = ds_config(result.plan)
    assert written["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": pinned}
    assert written["zero_force_ds_cpu_optimizer"] is True
    assert written["optimizer"]["params"]["torch_adam"] is False
    assert plan_from_tree(plan_tree(result.plan)).spec == result.plan.spec


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad", None])
@pytest.mark.parametrize("torch_adam", [True, False, None])
@pytest.mark.parametrize("forced", [True, False, None])
def test_the_optimizer_on_the_host_is_that_which_deepspeed_would_make(
    kind: str | None, torch_adam: bool | None, forced: bool | None
) -> None:
    """A script's own, which is torch's AdamW here, goes through accelerate."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.config import get_zero_force_ds_cpu_optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

    params = {"lr": 1e-3, **({} if torch_adam is None or kind not in ("Adam", "AdamW") else {"torch_adam": torch_adam})}
    tree: dict[str, Any] = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        **({} if forced is None else {"zero_force_ds_cpu_optimizer": forced}),
        **({} if kind is None else {"optimizer": {"type": kind, "params": params}}),
    }
    engine = SimpleNamespace(zero_use_cpu_optimizer=lambda: True, zenflow=False, bf16_optimizer_states=lambda: False)
    if kind in ("Adam", "AdamW"):
        made, _ = DeepSpeedEngine.get_optimizer_configuration(engine, dict(params), adam_w_mode=True)
        native = made is DeepSpeedCPUAdam
    else:
        native = kind is None and get_zero_force_ds_cpu_optimizer(tree)
    result = imported(tree)
    offload = result.spec["zero"]["offload_optimizer"]
    assert offload.get("implementation", "torch") == ("deepspeed" if native else "torch")
    assert {one.option for one in result.of(Outcome.LOST)} <= {"optimizer.type"}  # DeepSpeed's Adam is an AdamW
    if kind is not None:
        assert result.plan is not None
        again = imported(ds_config(result.plan))
        assert again.of(Outcome.LOST) == []
        assert again.plan is not None
        assert again.plan.spec.offload_optimizer == result.plan.spec.offload_optimizer


def test_without_zero_nothing_is_on_the_host_and_a_part_of_the_states_is_lost() -> None:
    host = {"device": "cpu", "pin_memory": True}
    result = imported({"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": {"offload_optimizer": host}})
    assert [one.detail for one in result.of(Outcome.NO_EFFECT)] == ["DeepSpeed reads it from stage 1 on"] * 2
    zero = {"stage": 3, "offload_optimizer": {**host, "ratio": 0.5}}
    result = imported({"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": zero})
    assert [one.option for one in result.of(Outcome.LOST)] == ["zero_optimization.offload_optimizer.ratio"]


def test_what_is_switched_off_is_not_lost() -> None:
    zero = {"stage": 1, "cpu_offload": False, "offload_optimizer": {"device": "none"}, "elastic_checkpoint": False}
    result = imported({"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": zero})
    assert [one.option for one in result.of(Outcome.LOST)] == []
    assert {one.option for one in result.of(Outcome.NO_EFFECT)} == {
        "zero_optimization.cpu_offload",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.elastic_checkpoint",
    }


@pytest.mark.parametrize(
    ("section", "switch"),
    [
        *((section, "enabled") for section in ("autotuning", "data_efficiency", "hybrid_engine")),
        ("compile", "deepcompile"),
    ],
)
def test_sections_that_break_a_plan_are_carried_where_they_are_off(section: str, switch: str) -> None:
    """Autotuning ended a run behind its fifth step, with exit code 0."""
    common = {"train_batch_size": 8, "optimizer": ADAM}
    for enabled in (True, 1):  # DeepSpeed takes any number for a switch
        result = imported({**common, section: {switch: enabled}})
        assert [one.option for one in result.of(Outcome.LOST)] == [f"{section}.{switch}"]
        assert section not in result.spec.get("deepspeed", {})
    assert imported({**common, section: {switch: False}}).of(Outcome.LOST) == []


def test_text_switches_a_section_as_its_reader_in_deepspeed_has_it() -> None:
    """pydantic reads "false" as false, a plain dictionary as any other text."""
    from deepspeed.runtime.config import get_hybrid_engine_config

    common = {"train_batch_size": 8, "optimizer": ADAM}
    for text in ("false", "off", "NO", "true", "1"):
        is_on = get_hybrid_engine_config({"hybrid_engine": {"enabled": text}}).enabled
        assert bool(imported({**common, "hybrid_engine": {"enabled": text}}).of(Outcome.LOST)) == is_on
        assert imported({**common, "autotuning": {"enabled": text}}).of(Outcome.LOST)


@pytest.mark.parametrize("lost", ["checkpoint.writer.type", "weight_quantization.enabled"])
def test_keys_that_do_nothing_in_a_plan_are_lost(lost: str) -> None:
    """DeepSpeed's writers ended a run in a KeyError where torchrun had started it."""
    section, _, rest = lost.partition(".")
    part, _, key = rest.rpartition(".")
    result = imported({"train_batch_size": 8, "optimizer": ADAM, section: {part: {key: 1}} if part else {key: True}})
    assert [one.option for one in result.of(Outcome.LOST)] == [lost]
    assert section not in result.spec.get("deepspeed", {})


def test_an_answer_does_not_replace_what_the_file_says() -> None:
    with pytest.raises(ImportConflictError, match=r"global_batch_size 8; 16 would replace it: leave that out"):
        imported({"train_batch_size": 8}, training_global_batch_size=16)

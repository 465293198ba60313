"""Contract: DeepSpeedCPUAdam on the host trains as one process, and its checkpoints go on under torch's Adam.

It is not compiled here: where it is not in torch's cache of extensions, what would run it is skipped.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from closeness import judge
from drawn_stages import compare, draw
from families import tiny_config
from ranks import run_ranks
from test_live_preflight import facts_of, of_verdict, outcome
from test_sharded_weights import plan_of, train_and_go_on
from training_runs import samples, whole_weights

from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.deepspeed_patches import cpu_adam
from parcompile.runtime.preflight import preflight
from parcompile.runtime.preflight.live.agreement import compare_cpu_adam

COMPILED = "TEST_COMPILED_EXTENSIONS"
"""As in tests/conftest.py."""
SP = {"tp": 2, "sequence_parallel": True}
MOE: dict[str, Any] = {"model": tiny_config("mixtral"), "whole_model": True}
NATIVE: dict[str, Any] = {"on_host": True, "implementation": "deepspeed"}
TORCH: dict[str, Any] = {"on_host": True}
ADAM = {"optimizer": {"type": "adam", "lr": 1e-3, "eps": 1e-4}}


@contextmanager
def compiled_before() -> Iterator[None]:
    """Lets processes find what was compiled outside of the suite."""
    with mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=os.environ[COMPILED]):
        if not os.environ[COMPILED]:
            del os.environ["TORCH_EXTENSIONS_DIR"]
        yield


with compiled_before():
    IS_BUILT = cpu_adam.is_built()
built = pytest.mark.skipif(
    not IS_BUILT,
    reason="DeepSpeedCPUAdam is not compiled here, which takes minutes: python .ci/pipeline_matrix.py "
    "--draws offload_deepspeed --count 1 does it",
)


@built
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (plan_of(4, SP, 2, **NATIVE), plan_of(2, {"cp": 2}, 1, **TORCH)),
        (plan_of(2, {"cp": 2}, 3, **TORCH), plan_of(2, {"tp": 2}, 1, **NATIVE)),
        (plan_of(2, {"ep": 2}, 1, **NATIVE, **MOE), plan_of(2, {"ep": 2, "cp": 2}, 3, **NATIVE, **MOE)),
        (plan_of(2, {}, 2, **TORCH, training=ADAM), plan_of(2, {}, 2, **NATIVE, training=ADAM)),
    ],
    ids=[
        "stage 2, then torch's at stage 1",
        "torch's at stage 3, then stage 1",
        "experts at stage 1, then at stage 3",
        "torch's Adam, then the same layout",
    ],
)
def test_deepspeeds_adam_trains_as_one_process_and_goes_on_as_torchs(first: Plan, second: Plan, tmp_path: Path) -> None:
    with compiled_before():
        train_and_go_on(first, second, tmp_path)


def steps_of(_rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, training_data=samples(plan), self_check=False)
    batches, found = iter(loader), list[float]()
    for _ in range(3):
        found += [float(engine.train_batch(batches)), float(engine.get_global_grad_norm())]
    weights = torch.cat([one.flatten().float() for one in whole_weights(engine.module).values()])
    return {"adam": type(engine.optimizer.optimizer).__name__, "found": found, "weights": weights}


@built
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_in_bf16_it_is_as_torchs(stage: int) -> None:
    """Masters in fp32 differ by roundings, which move single weights by one step of bf16: 2^-8."""
    training = {"precision": "bf16", "micro_batch_size": 1}
    plans = [plan_of(4, {"tp": 2}, stage, training=training, **one) for one in (NATIVE, TORCH)]
    with compiled_before():
        (own, *_), (torchs, *_) = (run_ranks(4, steps_of, plan) for plan in plans)
    assert (own["adam"], torchs["adam"]) == ("DeepSpeedCPUAdam", "AdamW")
    assert own["found"] == pytest.approx(torchs["found"], rel=1e-3)
    assert torch.allclose(own["weights"], torchs["weights"], rtol=2**-7, atol=1e-6)
    assert (own["weights"] == torchs["weights"]).float().mean() > 0.99


@built
def test_each_adam_takes_states_of_the_other_and_keeps_its_own_settings() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    start, gradients = torch.randn(1000), torch.randn(4, 1000)

    def made(native: bool) -> torch.optim.Optimizer:
        weights = [torch.nn.Parameter(start.clone())]
        adam = DeepSpeedCPUAdam(weights) if native else torch.optim.AdamW(weights, weight_decay=0.0, fused=True)
        cpu_adam.load_either_form(SimpleNamespace(optimizer=adam))
        return adam

    def step(adam: torch.optim.Optimizer, gradient: torch.Tensor) -> torch.Tensor:
        (weight,) = adam.param_groups[0]["params"]
        weight.grad = gradient.clone()
        adam.step()
        return weight.detach().clone()

    with compiled_before():
        for first, second in ((True, False), (False, True)):
            one, other = made(first), made(second)
            settings = {key: value for key, value in other.param_groups[0].items() if key != "params"}
            for gradient in gradients[:2]:
                at = step(one, gradient)
            one.param_groups[0]["lr"] = 2e-3
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            (weight,) = other.param_groups[0]["params"]
            weight.data.copy_(at)
            found = {key: value for key, value in other.param_groups[0].items() if key != "params"}
            assert found == {**settings, "lr": 2e-3}
            for gradient in gradients[2:]:
                assert torch.allclose(step(other, gradient), step(one, gradient), rtol=1e-6, atol=1e-7)


@built
@pytest.mark.ranks
@pytest.mark.parametrize("number", [5, 26])
def test_drawn_plans_train_as_one_process(number: int) -> None:
    with compiled_before():
        judge(compare(draw(number, 4, on_host=True, implementation="deepspeed")[0]))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_preflight_counts_the_same_bytes_without_a_build(stage: int) -> None:
    training = {"precision": "bf16", "sequence_length": 512, "micro_batch_size": 1}
    plan = plan_of(4, {"tp": 2, "cp": 2, "sequence_parallel": True}, stage, training=training, **NATIVE)
    with mock.patch.object(cpu_adam, "load_extension", side_effect=AssertionError):
        report = preflight(plan, ranks=[3])
    assert report.agrees, report.text()


def without_tools(rank: int, plan: Plan, folder: str) -> str:
    """What a rank hears where rank 1's host has no ninja and no compiler."""
    from parcompile.runtime import initialize

    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    if rank:
        os.environ.update(PATH="", CXX="missing-c++")
    with pytest.raises(RunError) as raised:
        initialize(plan=plan, training_data=samples(plan))
    return str(raised.value)


@pytest.mark.ranks
def test_a_host_without_a_compiler_is_named_before_anything_is_built(tmp_path: Path) -> None:
    first, second = run_ranks(2, without_tools, plan_of(2, {}, 1, **NATIVE), str(tmp_path))
    assert first == second
    assert first.startswith("rank 1: DeepSpeedCPUAdam cannot be compiled on ")
    assert first.endswith("there is no ninja and no compiler missing-c++ (CXX names another)")


def asked_before(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    """The live preflight, where rank 1's host has no ninja and no compiler."""
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    if rank:
        os.environ.update(PATH="", CXX="missing-c++")
    return outcome(rank, plan)


@pytest.mark.ranks
def test_the_live_preflight_names_a_host_without_a_compiler(tmp_path: Path) -> None:
    first, _ = run_ranks(2, asked_before, plan_of(2, {}, 1, **NATIVE), str(tmp_path))
    assert not first["passed"]
    wrong = of_verdict(first["tree"], "differs")
    assert set(wrong) == {"DeepSpeedCPUAdam"}
    assert wrong["DeepSpeedCPUAdam"]["ranks"] == [1]
    assert wrong["DeepSpeedCPUAdam"]["detail"].endswith(
        "there is no ninja and no compiler missing-c++ (CXX names another)"
    )


def test_the_live_preflight_says_whether_it_is_compiled() -> None:
    plan = plan_of(2, {}, 1, **NATIVE)
    there, not_all = (facts_of(plan, cpu_adam={0: True, 1: second}) for second in (True, False))
    found = [one.found for arrived in (there, not_all) for one in compare_cpu_adam(arrived)]
    assert found == ["compiled", "not yet on 1 host(s): a minute or more"]
    assert not list(compare_cpu_adam(facts_of(plan)))


def test_a_lock_that_was_left_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for it without end."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    old = time.time() - cpu_adam.LOCK_SECONDS - 1
    os.utime(lock, (old, old))
    with pytest.raises(RunError, match=f"{lock} was left by a build that did not end: delete it"):
        cpu_adam.load_extension()


def test_who_waits_for_a_lock_is_told_whether_somebody_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    with lock.open("w"):
        cpu_adam.say_that_it_is_built()
        assert "this takes a minute or more" in capsys.readouterr().err
    cpu_adam.say_that_it_is_built()
    assert f"no process of this host builds it: unless another host does, delete {lock}" in capsys.readouterr().err

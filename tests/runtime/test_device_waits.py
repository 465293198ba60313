"""A training step never makes the host wait for the device. Counted without a GPU: tensors are on the meta device.

The step is the one that preflight runs: the injected model, the loss, DeepSpeed's engine and optimizer. What DeepSpeed
itself waits for is listed, so that a change of it is seen.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from device_waits import DeviceCounter
from training_runs import make_plan

from parcompile.runtime import transport
from parcompile.runtime.preflight import compare_messages
from parcompile.runtime.preflight.findings import Verdict
from parcompile.runtime.preflight.stand_in import META, MetaTracker, stand_in
from parcompile.runtime.preflight.step import build_sharded, run_step
from parcompile.runtime.transport.backend import to_device


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.long().bincount(),
        lambda x: x.cpu(),
    ],
)
def test_the_counter_sees_every_kind_of_waiting(wait: Any) -> None:
    # There is no value to wait for.
    with DeviceCounter() as device, contextlib.suppress(RuntimeError, NotImplementedError):
        wait(torch.empty(3, device=META))
    assert device.waits


def test_the_counter_sees_no_waiting_where_there_is_none() -> None:
    with DeviceCounter() as device:
        x = torch.empty(3, 4, device=META)
        (x[1:] @ x.mT).masked_fill(x[1:] @ x.mT > 0, 1.0).sum()
    assert device.waits == []
    assert device.launches["aten.mm"] == 2


@pytest.mark.parametrize(
    ("ranks", "parallelism", "model"),
    [
        (8, {"tp": 2, "cp": 2, "sequence_parallel": True}, {}),
        (4, {"tp": 2, "pp": 2}, {"tie_word_embeddings": True}),
    ],
)
def test_forward_loss_and_backward_never_wait(ranks: int, parallelism: dict[str, Any], model: dict[str, Any]) -> None:
    plan = make_plan(ranks, parallelism, model=model, training={"precision": "bf16", "micro_batch_size": 1})
    with stand_in(plan, 1) as mesh, MetaTracker(mesh) as tracker:
        built, _ = build_sharded(mesh, tracker)
        with DeviceCounter() as device:
            run_step(built, mesh, tracker)
    assert device.launches
    # Once a step, not for each micro-batch: whether gradients overflowed, and twice whether their norm is finite.
    places = [wait.rpartition("/")[2].partition(":")[0] for wait in device.waits if "/deepspeed/" in wait]
    assert places == ["stage_1_and_2.py", "utils.py", "utils.py"]
    assert [wait for wait in device.waits if "/deepspeed/" not in wait] == []


@pytest.mark.parametrize("rows", [1, 2])
def test_tensor_parallel_pieces_never_wait_and_count_as_planned(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"precision": "bf16", "micro_batch_size": rows, "sequence_length": 64}
    cluster = {"gpus_per_node": 2, "accelerator": "h100-sxm"}
    parallelism = {"tp": 2, "sequence_parallel": True}
    plan = make_plan(2, parallelism, training=training, extra={"cluster": cluster})
    launches = []
    for least in (transport.PIECE_BYTES, 1):
        monkeypatch.setattr(transport, "PIECE_BYTES", least)
        with stand_in(plan, 1) as mesh, MetaTracker(mesh) as tracker:
            built, _ = build_sharded(mesh, tracker)
            with DeviceCounter() as device:
                step = run_step(built, mesh, tracker)
            assert [one for one in compare_messages(mesh, step) if one.verdict is not Verdict.AGREES] == []
        assert [wait for wait in device.waits if "/deepspeed/" not in wait] == []
        launches.append(device.launches)
    for name in ("c10d._allgather_base_", "c10d._reduce_scatter_base_"):
        assert launches[1][name] > launches[0][name]


def test_batches_go_through_pinned_memory_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    moved: list[tuple[str, bool]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking: moved.append((device.type, non_blocking)) or self
    )
    tensor = torch.ones(3)
    for device in ("cuda", "cpu"):
        assert to_device(tensor, torch.device(device)) is tensor
    assert len(pinned) == 1
    assert moved == [("cuda", True), ("cpu", True)]


def test_what_is_pinned_shares_no_memory_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to pin an expanded tensor, such as the positions of several rows."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    moved = to_device(torch.arange(4).expand(3, -1), torch.device("cuda"))
    assert moved is pinned[0]
    assert moved.is_contiguous()
    assert moved.tolist() == [[0, 1, 2, 3]] * 3

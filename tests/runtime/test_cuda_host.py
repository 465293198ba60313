"""Plans for GPUs run on `cuda` without a GPU: what is sent, waited for and computed by which kernel; and where not."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from training_runs import make_plan

from parcompile.runtime.preflight import cuda_host, preflight
from parcompile.runtime.preflight.cuda_host import NoCudaHostError, card_of, torch_cuda_of
from parcompile.runtime.preflight.stand_in import META, device_of_plan
from parcompile.runtime.preflight.waits import KNOWN_WAITS
from parcompile.runtime.ring_attention.kernels.selection import select_kernel

SAMPLE = ("llama", "mixtral", "gemma2", "deepseek_v3", "qwen3_next")
"""A dense model, experts, a soft-cap, latent attention, and layers that carry a state."""


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda_host.built_library.cache_clear()
    yield
    cuda_host.built_library.cache_clear()


def gpu_plan(**training: Any) -> Any:
    chosen = {"precision": "bf16", "micro_batch_size": 1, **training}
    return make_plan(2, {"tp": 2}, training=chosen, extra={"cluster": {"gpus_per_node": 2, "accelerator": "h100-sxm"}})


def skip_where_there_is_none() -> None:
    """A torch with CUDA of its own cannot have it, and without a compiler it is not built."""
    try:
        cuda_host.check_torch()
        cuda_host.find_compiler()
    except NoCudaHostError as error:
        pytest.skip(str(error))


def sampled() -> list[dict[str, Any]]:
    """What a fresh process finds, in which no backward pass has run."""
    skip_where_there_is_none()
    return _sampled()


@functools.cache
def _sampled() -> list[dict[str, Any]]:
    script = Path(__file__).with_name("cuda_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), *SAMPLE, "sharded", "planted"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_steps_of_small_models_send_what_is_planned_and_wait_for_nothing_new() -> None:
    runs = [one for one in sampled() if one["family"] != "planted"]
    assert {one["family"] for one in runs} == {*SAMPLE, "sharded"}
    wrong = {f"{one['family']}, {one['layout']}": one["differs"] + one["waits"] for one in runs}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_each_attention_layer_names_its_kernel_and_why_it_is_no_fused_one() -> None:
    kernels = {one["family"]: " ".join(one["kernels"]) for one in sampled()}
    assert kernels["llama"] == "cuda-cudnn"
    assert "plain: cuda-cudnn has no soft-capping" in kernels["gemma2"]
    assert kernels["deepseek_v3"] == "cuda-flash, padded to 16"  # packed


def test_what_is_planted_in_a_step_is_named() -> None:
    found = {one["layout"]: one for one in sampled() if one["family"] == "planted"}
    assert "a value is read at" in found[".item()"]["waits"][0]
    assert "a copy to the device at" in found["a copy from pages that may move"]["waits"][0]
    assert found["a copy from pinned pages"]["waits"] == found["a copy from pinned pages"]["differs"] == []
    assert "cuda:0 and cpu" in found["tensors of two devices"]["differs"][0]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda m: m.setenv("CXX", "no-such-compiler"), "there is no C++ compiler: CXX is 'no-such-compiler'"),
        (lambda m: m.setenv("PATH", ""), "there is no C++ compiler: none of c++, g++, clang++"),
        (lambda m: m.setattr(torch, "__version__", "2.6.1+cpu"), "torch 2.6.1+cpu is another release than 2.13"),
        (lambda m: m.setattr(torch.version, "cuda", "12.8"), "is built with CUDA or ROCm 12.8"),
        (lambda m: m.setenv("CXX", "false"), "does not build it: without a message"),
    ],
    ids=["CXX", "no compiler", "another torch", "torch with CUDA", "a compiler that fails"],
)
def test_where_there_is_no_cuda_the_report_says_why_in_one_sentence(
    prepare: Any, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    prepare(monkeypatch)
    with device_of_plan(gpu_plan()) as (device, why_not):
        assert device == META
        assert reason in why_not
        assert why_not.count("\n") == 0


def test_a_process_in_which_a_backward_pass_has_run_takes_meta_and_says_so() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
    skip_where_there_is_none()
    report = preflight(gpu_plan(), [0])
    assert report.agrees, report.text()
    assert report.notes[0] == "device: meta, not cuda: a backward pass has run in this process before: start a new one"


def test_passes_of_heads_are_as_many_as_a_gpu_makes() -> None:
    """Few heads at a time are enough for a message of CPUs, but do not fill a GPU."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    training = {"precision": "bf16", "micro_batch_size": 1, "sequence_length": 32768}
    extra = {"cluster": {"gpus_per_node": 4, "accelerator": "h100-sxm"}}
    report = preflight(make_plan(4, {"cp": 4}, model=sizes, training=training, extra=extra), [0])
    sent = {one.subject: (one.planned, one.found) for one in report.findings if one.subject.startswith("sent over")}
    del sent["sent over dp-cp"]  # as many messages as there are buckets: bytes are compared
    assert {name: found for name, (planned, found) in sent.items() if planned != found} == {}
    # 4 micro-batches, 3 hops, 3 messages at each: keys and values, these again in backward, and their gradients.
    assert report.counts[0]["cp", "send"].messages == 4 * 3 * 3


def test_a_plan_for_cpus_or_for_other_gpus_takes_meta() -> None:
    with device_of_plan(make_plan(2, {"tp": 2})) as found:
        assert found == (META, "")
    assert card_of("mi300x") is None


def test_the_library_is_built_once_for_a_torch_and_a_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        cuda_host.check_torch()
        cuda_host.find_compiler()
    except NoCudaHostError as error:
        pytest.skip(str(error))
    built = cuda_host.built_library()
    assert built.parent == tmp_path / "parcompile"
    assert torch.__version__ in built.name
    cuda_host.built_library.cache_clear()
    monkeypatch.setenv("PATH", "")  # what is there needs no compiler
    assert cuda_host.built_library() == built
    assert list(built.parent.iterdir()) == [built]


@pytest.mark.parametrize(("accelerator", "capability"), [("h100-sxm", (9, 0)), ("a100-80gb", (8, 0))])
def test_torch_cuda_answers_for_the_card_of_the_plan(
    accelerator: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    card, heard = card_of(accelerator), []
    assert card is not None
    with torch_cuda_of(card, heard.append):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == capability
        assert torch.cuda.get_device_properties(0).total_memory == card.memory_bytes
        torch.cuda.synchronize()
        torch.cuda.Event().synchronize()
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        dense, latent = ("cuda-cudnn",) * 2 if capability >= (9, 0) else ("cuda-flash", "cuda-flash, padded to 192")
        for dtype, key, value, packed, name in (
            (torch.bfloat16, 64, 64, False, dense),
            (torch.bfloat16, 64, 64, True, "cuda-flash"),
            (torch.bfloat16, 192, 128, False, latent),
            (torch.bfloat16, 192, 128, True, "cuda-flash, padded to 192"),
            (torch.bfloat16, 320, 320, False, "plain"),
            (torch.float32, 64, 64, False, "cuda-efficient"),
            (torch.bfloat16, 60, 60, False, f"{dense}, padded to 64"),
            (torch.float64, 64, 64, False, "plain"),
        ):
            query, heads = (
                cast(Any, SimpleNamespace(shape=(1, 2, 8, dim), dtype=dtype, device=torch.device("cuda", 0)))
                for dim in (key, value)
            )
            assert select_kernel(query, heads, packed=packed).name == name
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
        query.dtype = torch.bfloat16
        assert select_kernel(query, query).name == "cuda-flash"
    assert heard == ["torch.cuda.synchronize", "Event.synchronize"]
    assert not torch.cuda.is_available()


def test_the_page_lists_the_waits_that_are_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text(encoding="utf-8")
    for wait in KNOWN_WAITS:
        assert f"| {wait.where} | {wait.how_often} | {wait.why} |" in page


ONE_KERNEL = """
import os
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from parcompile.runtime.preflight.cuda_host import cuda_without_gpu

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func.overloadpacket)
        return func(*args, **(kwargs or {}))

with cuda_without_gpu(), FakeTensorMode():
    output = torch.nn.functional.silu(torch.empty(4, device="cuda", requires_grad=True))
    given = torch.empty(4, device="cuda")
    with Seen():
        output.backward(given)
    sys.stdout.flush()
os._exit(0)  # at the end of Python, torch's thread of a device may still hold what the backward pass has left
"""


def test_an_operator_of_one_kernel_is_not_taken_apart() -> None:
    """Tensors between its parts, which no GPU has, would be the peak of layers with many tokens."""
    skip_where_there_is_none()
    done = subprocess.run([sys.executable, "-c", ONE_KERNEL], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "aten.silu_backward" in done.stdout.split()
    assert "aten.sigmoid" not in done.stdout.split()

"""Each rank reads its slices of a Hugging Face folder; the run is that of the whole model."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from family_runs import batch_of, drawn_model, family_plan, named
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from training_runs import whole_parameters

from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.checkpoint.adapting import import_pretrained
from parcompile.runtime.model.pretrained import PretrainedFolder

FAMILIES = (
    *("llama", "phi3", "gemma3_text", "olmo2", "apertus", "phi", "qwen2"),
    # stored under other names, or expert by expert
    *("gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "granitemoe"),
    "gpt_oss",  # sinks, and experts with biases
    "zamba2",  # blocks that layers share
    *("mamba, 48 channels", "mamba2"),  # no attention
    # stored under names of the published code, joined or in parts; some have parameters that nothing trains
    *("hrm_text", "axk2", "lfm3", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "hy_v4"),
    "deepseek_v4",  # under shorter names
    "qwen4_exp_text",  # tables of n-grams in pieces
)


def stored(plan: Plan, folder: Path, shard_size: str = "20KB") -> Path:
    drawn_model(plan).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load(rank: int, plans: list[Plan], folder: str) -> list[dict[str, Any]]:
    """The loaded parameters, and loss and gradients of one batch."""
    from dataclasses import replace

    from parcompile.runtime import join, reduce_loss, split_batch
    from parcompile.runtime.inject import injection

    mesh = join(plans[0])
    found = []
    for plan in plans:
        here = replace(mesh, plan=plan)
        injection.join = lambda _, here=here: here  # one world for all plans
        loaded = injection.load_pretrained(Path(folder) / plan.spec.name, plan)
        # As drawn_model: Phi-MoE draws its experts at random in training.
        loaded.train(plan.spec.model.shape.model_type != "phimoe")
        loss = loaded(**split_batch(batch_of(plan), here)).loss
        loss.backward()
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in loaded.named_parameters()}
        found.append({"rank": rank, "loss": reduce_loss(loss, here), "parameters": named(loaded), **gradients})
    return found


@pytest.mark.ranks
def test_slices_read_from_files_are_the_weights_and_train_as_they_do(tmp_path: Path) -> None:
    plans = [family_plan(family, 2, {"tp": 2}) for family in FAMILIES]
    for plan in plans:
        stored(plan, tmp_path / plan.spec.name)
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    ranks = run_ranks(2, load, plans, str(tmp_path))
    for place, plan in enumerate(plans):
        whole, loss = trained_alone(plan)
        here = [rank[place] for rank in ranks]
        assert_close(here[0]["loss"], float(loss), about=plan.spec.name)
        loaded = whole_parameters(plan, here)
        gradients = [
            {
                "rank": rank["rank"],
                "parameters": {
                    name: _filled(rank[f"gradient of {name}"], parameter)
                    for name, parameter in rank["parameters"].items()
                },
            }
            for rank in here
        ]
        merged = whole_parameters(plan, gradients)
        for name, parameter in whole.named_parameters():
            assert torch.equal(loaded[name], parameter), name
        expected = gradients_of(whole)
        # A gradient that is next to nothing beside the others is their rounding.
        least = 1e-2 * max(float(one.norm()) for one in expected.values())
        rerun = lambda seed, plan=plan: gradients_of(trained_alone(plan, seed)[0])  # noqa: E731
        assert_close(merged, expected, rerun=rerun, least=least, about=plan.spec.name)


def trained_alone(plan: Plan, seed: int | None = None) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model behind one backward pass, and its loss."""
    model = drawn_model(plan)
    nudge(model, seed)
    loss = model(**batch_of(plan)).loss
    loss.backward()
    return model, loss.detach()


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: _filled(one.grad, one) for name, one in model.named_parameters()}


def _filled(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Zeros where nothing trains the parameter."""
    return torch.zeros_like(parameter) if gradient is None else gradient


class PeakMemory:
    """The most memory of this process that is no file's, above what it had at the beginning."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak_bytes = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, self._now())

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def load_and_measure(rank: int, plan: Plan, folder: str) -> int:
    from parcompile.runtime import join, load_pretrained

    join(plan)
    import transformers.models.llama.modeling_llama  # noqa: F401 -- its memory is not the weights'

    with PeakMemory() as peak:
        model = load_pretrained(folder, plan)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    return peak.above_bytes


def draw_and_measure(rank: int, plan: Plan) -> int:
    from parcompile.runtime import join
    from parcompile.runtime.inject.injection import draws_all, initial_model

    mesh = join(plan)
    assert draws_all(plan)  # the memory of the code is not the weights'
    with PeakMemory() as peak:
        model = initial_model(plan, mesh)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    return peak.above_bytes


def export_and_measure(rank: int, folder: str, output: str) -> int:
    from parcompile.runtime.checkpoint import export

    with PeakMemory() as peak:
        export(folder, output, shard_bytes=4_000_000)
    return peak.above_bytes


@pytest.mark.ranks
def test_loading_and_drawing_take_a_rank_its_share_and_exporting_takes_a_file(tmp_path: Path) -> None:
    size = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024, "num_hidden_layers": 16}
    plan = family_plan("llama", 2, {"tp": 2}, **size)
    stored(plan, tmp_path / "hf", "10MB")
    whole = 4 * plan.parameters.numel
    for peak in run_ranks(2, load_and_measure, plan, str(tmp_path / "hf")):
        assert 0.45 * whole < peak < 0.6 * whole
    wide = family_plan("llama", 2, {"pp": 2}, **{**size, "hidden_size": 512, "intermediate_size": 2048})
    whole_wide = 4 * wide.parameters.numel  # the memory of the code, up to 20 MB, is little beside it
    for peak in run_ranks(2, draw_and_measure, wide):
        assert 0.4 * whole_wide < peak < 0.8 * whole_wide  # and a layer of 16
    import_pretrained(tmp_path / "hf", plan, tmp_path / "start")
    (peak,) = run_ranks(1, export_and_measure, str(tmp_path / "start"), str(tmp_path / "exported"))
    assert peak < 0.25 * whole


class TestFolders:
    @pytest.fixture
    def plan(self) -> Plan:
        return family_plan("llama", 1, {})

    def test_a_missing_tensor_is_named(self, plan: Plan, tmp_path: Path) -> None:
        stored(plan, tmp_path)
        index = tmp_path / "model.safetensors.index.json"
        tree = json.loads(index.read_text())
        del tree["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(tree))
        with pytest.raises(RunError, match=r"lacks model.norm.weight \[32\]"):
            PretrainedFolder(tmp_path).check(plan)

    def test_a_misshapen_tensor_is_named(self, plan: Plan, tmp_path: Path) -> None:
        stored(family_plan("llama", 1, {}, intermediate_size=64), tmp_path)
        with pytest.raises(RunError, match=r"gate_proj.weight is \[64, 32\] in .* and \[48, 32\] in the plan"):
            PretrainedFolder(tmp_path).check(plan)

    def test_an_extra_tensor_is_named(self, plan: Plan, tmp_path: Path) -> None:
        stored(family_plan("qwen2", 1, {}), tmp_path)
        with pytest.raises(RunError, match=r"has model.layers.0.self_attn.k_proj.bias, which the plan does not know"):
            PretrainedFolder(tmp_path).check(plan)

    def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(self, tmp_path: Path) -> None:
        plan = family_plan("qwen3_next", 1, {})
        stored(plan, tmp_path)
        save_file({"mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "further.safetensors", {"format": "pt"})
        index = tmp_path / "model.safetensors.index.json"
        tree = json.loads(index.read_text())
        tree["weight_map"]["mtp.fc.weight"] = "further.safetensors"
        index.write_text(json.dumps(tree))
        with pytest.warns(UserWarning, match=r"1 tensors of .*, mtp.fc.weight among them, are not loaded"):
            PretrainedFolder(tmp_path).check(plan)

    def test_a_damaged_file_and_an_empty_folder_are_named(self, plan: Plan, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="has neither"):
            PretrainedFolder(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
        with pytest.raises(RunError, match=r"model.safetensors cannot be read"):
            PretrainedFolder(tmp_path)

    def test_a_file_that_may_not_be_read_is_not_called_missing(
        self, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        stored(plan, tmp_path, "1GB")
        monkeypatch.setattr(os, "open", refuse)  # root may read all files
        with pytest.raises(RunError, match=r"model.safetensors cannot be read: Permission denied$"):
            PretrainedFolder(tmp_path)


def test_a_folder_of_quantized_weights_says_how_to_get_whole_ones(tmp_path: Path) -> None:
    plan = family_plan("gpt_oss", 1, {})
    stored(plan, tmp_path, "1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    packed = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{packed}_blocks"] = tensors.pop(packed).to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        RunError, match=r"lacks .*gate_up_proj .* are quantized \(.*gate_up_proj_blocks\).*dequantize=True"
    ):
        PretrainedFolder(tmp_path).check(plan)

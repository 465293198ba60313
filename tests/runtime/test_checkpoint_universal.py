"""Contract: DeepSpeed's readers make of a checkpoint what we read out of it, and a plain engine trains on with that.

Where they cannot, the script beside the checkpoint says what can.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from closeness import assert_close
from family_runs import drawn_model, family_plan
from ranks import run_ranks
from test_checkpoint_faults import listed
from test_padded_shards import DENSE, MIXTURE, engine_of
from training_runs import initial_model, make_plan, plain_optimizer, samples

from parcompile.plan import Plan
from parcompile.runtime.checkpoint import SavedRun, read_note
from parcompile.runtime.checkpoint.adapting import convert, import_pretrained

pytestmark = pytest.mark.ranks

CASES = {
    "kv heads on several ranks, a padded vocabulary": ("llama", 4, {"tp": 4}),
    "two shards of each rank": ("llama", 4, {"tp": 2, "cp": 2}),
    "fused projections": ("phi3", 2, {"tp": 2}),
}


def checkpoint(plan: Plan, one_rank: Plan, tmp_path: Path) -> Path:
    """In the layout of a plan, with moments that are drawn."""
    drawn_model(one_rank).save_pretrained(tmp_path / "hf")
    start = import_pretrained(tmp_path / "hf", one_rank, tmp_path / "start")
    shard = start / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(shard, weights_only=False)
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind].uniform_()
    torch.save(content, shard)
    listed(start, shard.name)
    return convert(start, plan, tmp_path / "cut")


def made_universal(place: Path, output: Path) -> Path:
    """By DeepSpeed's command, which as a process takes 8 seconds to begin."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(
        Namespace(input_folder=str(place), output_folder=str(output), inject_missing_state=False, **options)
    )
    return output


def plan_of(axes: dict[str, int], stage: int = 1, model: dict[str, Any] | None = None, **training: Any) -> Plan:
    whole = {"make_vocab_size_divisible_by": 1, **axes}
    sizes = {**(model or {}), "vocab_size": 61}
    return make_plan(2, whole, model=sizes, training=training, extra={"zero": {"stage": stage}})


TIED = {"tie_word_embeddings": True}
WHOLE = {
    "tied": plan_of({"dp": 2}, model=TIED),
    "ZeRO-2": plan_of({"dp": 2}, 2),
    "cp": plan_of({"cp": 2}),
    "padded shards": plan_of({"dp": 2}, model={**DENSE, "hidden_size": 33}),
    "bf16": plan_of({"dp": 2}, precision="bf16", gradient_accumulation_dtype="bf16"),
    "sums in fp32": plan_of({"dp": 2}, precision="bf16"),
}
"""Every file of weights holds the whole model."""
SLICED = {
    "tensor parallel": plan_of({"tp": 2, "make_vocab_size_divisible_by": 8}, model=TIED),
    "stages": plan_of({"pp": 2}, micro_batch_size=2),
    "experts": plan_of({"dp": 2, "ep": 2}, model=MIXTURE),
    "padded vocabulary": plan_of({"dp": 2, "make_vocab_size_divisible_by": 8}),
    "ZeRO-0": plan_of({"dp": 2}, 0),
}
LAYOUTS = {**WHOLE, **SLICED}
UNIVERSAL = {"tied": 2, "cp": 1, "tensor parallel": 1, "padded vocabulary": 2}
"""And the ZeRO stage of the plain engine that goes on."""


class Live(NamedTuple):
    """Runs of all layouts behind their first step, and loss and norm of each one's second."""

    folder: Path
    second_step: dict[str, dict[str, float]]


def train_and_save(rank: int, folder: str) -> dict[str, dict[str, float]]:
    from parcompile.runtime.checkpoint import save

    found = {}
    for name, plan in LAYOUTS.items():
        engine, batches = engine_of(rank, plan, only_norm=False)
        engine.train_batch(batches)
        save(engine, Path(folder) / name, 1)
        if name in UNIVERSAL:
            loss = float(engine.train_batch(batches))
            found[name] = {"loss": loss, "norm": float(engine.get_global_grad_norm())}
    return found


def train_on_plainly(rank: int, folder: str) -> dict[str, dict[str, float]]:
    """The second step of every universal checkpoint with transformers, torch and DeepSpeed alone, over dp 2."""
    import deepspeed
    import torch.distributed as dist

    from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds

    forbid_jit_builds()
    found = {}
    for name, stage in UNIVERSAL.items():
        plan = LAYOUTS[name]
        model = initial_model(plan)
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": plan.spec.training.gradient_clipping,
            "checkpoint": {"load_universal": True},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=plain_optimizer(model, plan), config=settings)
        engine.load_checkpoint(str(Path(folder) / name), tag="universal")
        rows = samples(plan)[4 + 2 * rank : 6 + 2 * rank]
        loss = engine(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        found[name] = {"loss": float(mean), "norm": float(engine.get_global_grad_norm())}
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    folder = tmp_path_factory.mktemp("live")
    return Live(folder, run_ranks(2, train_and_save, str(folder))[0])


@pytest.mark.parametrize("case", CASES)
def test_ds_to_universal_writes_whole_tensors(case: str, tmp_path: Path) -> None:
    family, ranks, parallelism = CASES[case]
    place = checkpoint(family_plan(family, ranks, parallelism), family_plan(family, 1, {}), tmp_path)
    universal = made_universal(place, tmp_path / "universal")
    saved = SavedRun(read_note(place))
    for name in saved.parameters:
        for kind in saved.kinds:
            found = torch.load(universal / "zero" / name / f"{kind}.pt", weights_only=True)["param"]
            assert torch.equal(found, saved.whole(name, kind)), (name, kind)


def run_script(checkpoints: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkpoints / "zero_to_fp32.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=checkpoints)


def test_the_script_reads_and_refuses_each_checkpoint_beside_it(live: Live) -> None:
    """A folder of runs in several layouts has one script."""
    folder = live.folder / "every layout"
    folder.mkdir()
    for name in LAYOUTS:
        shutil.copytree(live.folder / name / "step-1", folder / name)
    shutil.copy(live.folder / "tied" / "zero_to_fp32.py", folder)
    for name in SLICED:
        done = run_script(folder, ".", "out", "--max_shard_size", "1GB", "-t", name)
        command = f"parcompile checkpoint export {folder / name} --hf OUTPUT"
        assert done.stderr == f"DeepSpeed cannot read the weights of {name}: run {command}\n"
        assert done.returncode == 1
    done = run_script(folder, ".", "out", "--tag", "tied")
    assert done.returncode == 0, done.stderr[-2000:]
    assert_whole(torch.load(folder / "out" / "pytorch_model.bin"), folder / "tied")


def assert_whole(found: dict[str, torch.Tensor], place: Path) -> None:
    saved = SavedRun(read_note(place))
    tied = {"lm_head.weight"} if saved.plan.spec.model.shape.tie_word_embeddings else set()
    assert found.keys() == {*saved.parameters, *tied}
    for name in saved.parameters:
        assert torch.equal(found[name], saved.whole(name, "fp32")), name


@pytest.mark.parametrize("name", WHOLE)
def test_deepspeed_reads_whole_weights(name: str, live: Live, tmp_path: Path) -> None:
    from deepspeed.utils import zero_to_fp32

    place = live.folder / name
    assert_whole(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(place)), place)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(place), str(tmp_path))
    assert_whole(torch.load(tmp_path / "pytorch_model.bin"), place)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(initial_model(LAYOUTS[name]), str(place))
    assert_whole(model.state_dict(), place)
    there = convert(place, LAYOUTS[name], tmp_path / "converted")
    assert_whole(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(there.parent)), there)


@pytest.mark.parametrize("name", ["tensor parallel", "stages", "experts"])
def test_deepspeed_gives_no_part_of_a_model_for_the_whole(name: str, live: Live) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with pytest.raises(ValueError, match=r"Expected 1 of|is not a model state checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(str(live.folder / name))


def test_a_plain_engine_trains_on(live: Live) -> None:
    """Behind the first step, by DeepSpeed alone, on other ZeRO stages and numbers of shards."""
    for name in UNIVERSAL:
        made_universal(live.folder / name / "step-1", live.folder / name / "universal")
    for found in run_ranks(2, train_on_plainly, str(live.folder)):
        for name in UNIVERSAL:
            assert_close(found[name], live.second_step[name], about=name)

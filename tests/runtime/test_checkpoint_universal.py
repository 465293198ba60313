"""Contract: DeepSpeed's converter makes of a checkpoint what we read out of it; our script says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_runs import drawn_model, family_plan
from test_checkpoint_faults import listed

from parcompile.plan import Plan
from parcompile.runtime.checkpoint import SavedRun, read_note
from parcompile.runtime.checkpoint.converting import convert, import_pretrained

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


@pytest.mark.parametrize("case", CASES)
def test_ds_to_universal_writes_whole_tensors(case: str, tmp_path: Path) -> None:
    family, ranks, parallelism = CASES[case]
    place = checkpoint(family_plan(family, ranks, parallelism), family_plan(family, 1, {}), tmp_path)
    universal = tmp_path / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    command += ["--num_merge_workers", "1", "--input_folder", str(place), "--output_folder", str(universal)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = SavedRun(read_note(place))
    for name in saved.parameters:
        for kind in saved.kinds:
            found = torch.load(universal / "zero" / name / f"{kind}.pt", weights_only=True)["param"]
            assert torch.equal(found, saved.whole(name, kind)), (name, kind)


def test_the_script_beside_a_checkpoint_says_what_joins_its_slices(tmp_path: Path) -> None:
    place = checkpoint(family_plan("llama", 2, {"tp": 2}), family_plan("llama", 1, {}), tmp_path)
    for one in (place, tmp_path / "start" / "step-0"):
        script = one.parent / "zero_to_fp32.py"
        done = subprocess.run(
            [sys.executable, str(script), str(one), "out"], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 1
        assert done.stderr == f"run: parcompile checkpoint export {one.parent} --hf OUTPUT\n"

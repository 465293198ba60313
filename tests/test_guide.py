"""Every command that `docs/guide.md` shows runs, in its order, and succeeds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"

DS_CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}


def test_the_guide_runs(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    shown = re.findall(r"^\$ parcompile (.*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) >= 15
    for line in shown:
        command = [sys.executable, "-m", "parcompile", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, line

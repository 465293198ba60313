"""The project that `parcompile new` writes trains, saves and resumes, with the commands of its README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

pytestmark = pytest.mark.ranks


def test_a_new_project_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the project trains: it needs the extra [runtime]")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def shell(line: str, folder: Path) -> str:
        settings = {**environment, "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            line, shell=True, cwd=folder, env=settings, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    shell("parcompile new project", tmp_path)
    project = tmp_path / "project"
    # One process and no tp: what two ranks compute together is proved elsewhere, and this takes half the time.
    spec = json.loads((project / "spec.json").read_text(encoding="utf-8"))
    spec["cluster"]["gpus_per_node"] = 1
    spec["parallelism"] = {}
    (project / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    shown = re.findall(r"^\$ (.*)$", (project / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown[1:] == ["./run.sh --steps 20", "./run.sh --steps 40 --resume"]
    shell(shown[0], project)
    first, second = shell(shown[1], project), shell(shown[2], project)
    losses = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", first + second)]
    assert [step for step, _ in losses] == list(range(1, 41))
    assert losses[-1][1] < 0.8 * losses[0][1]
    # The second run begins where the first one ended, not with new weights.
    assert losses[20][1] < 0.9 * losses[0][1]
    assert (project / "checkpoints" / "latest").read_text(encoding="utf-8").strip().endswith("40")

"""Save and resume. DeepSpeed writes the files; a note beside them says what they belong to.

A checkpoint can be resumed by a plan with the same model, precision, tp and number of optimizer shards (dp · cp):
DeepSpeed keeps one file per tp rank and per shard.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parcompile.plan import Plan

from ..errors import RunError

NOTE = "parcompile.json"
"""The note's name, inside the folder of a checkpoint."""


def layout(plan: Plan) -> dict[str, Any]:
    """What two plans have to share for one to resume the other's checkpoint."""
    parallelism, training = plan.spec.parallelism, plan.spec.training
    return {
        "model": dict(plan.spec.model.hf_config),
        "make_vocab_size_divisible_by": parallelism.make_vocab_size_divisible_by,
        "tp": parallelism.tp,
        "pp": parallelism.pp,
        "optimizer shards (dp · cp)": parallelism.zero_shards,
        "zero stage": plan.spec.zero_stage,
        "precision": training.precision.value,
        "gradient accumulation": training.gradient_accumulation_dtype.value,
        "optimizer": training.optimizer.type,
    }


def save(engine: Any, folder: str | Path, step: int) -> Path:
    """Writes the checkpoint `step-N`: weights, optimizer shards, scheduler, and how many steps were made.

    Every rank calls it. DeepSpeed's `latest` is set last, and the note is written before it: what `latest` names is
    complete.
    """
    mesh, tag = engine.mesh, f"step-{step}"
    place = Path(folder) / tag
    engine.save_checkpoint(str(folder), tag=tag, client_state={"step": step}, save_latest=False)
    dist.barrier()
    if mesh.rank == 0:
        note = {"step": step, "plan_hash": mesh.plan.plan_hash, "layout": layout(mesh.plan)}
        _replace(place / NOTE, json.dumps(note, indent=2) + "\n")
        _replace(Path(folder) / "latest", tag)
    dist.barrier()
    return place


def load(engine: Any, folder: str | Path) -> int:
    """Restores the last checkpoint in `folder` and returns the number of steps it had made.

    Raises:
        RunError: there is no checkpoint, it is damaged, or it was saved in another layout (which values differ is
        said).
    """
    note = _note(Path(folder))
    ours = layout(engine.mesh.plan)
    different = [
        f"{name} {note['layout'].get(name)} → {value}"
        for name, value in ours.items()
        if note["layout"].get(name) != value
    ]
    if different:
        raise RunError(
            f"the checkpoint in {folder} was saved in another layout ({'; '.join(different)}): "
            "resume it with the plan that saved it",
            everywhere=True,
        )
    path, state = engine.load_checkpoint(str(folder), tag=f"step-{note['step']}")
    if path is None or state.get("step") != note["step"]:
        raise RunError(
            f"the checkpoint step-{note['step']} in {folder} could not be read by DeepSpeed", everywhere=True
        )
    return int(note["step"])


def _note(folder: Path) -> dict[str, Any]:
    try:
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
        note = json.loads((folder / tag / NOTE).read_text(encoding="utf-8"))
        return {"step": int(note["step"]), "layout": dict(note["layout"])}
    except OSError as error:
        raise RunError(
            f"there is no checkpoint to resume in {folder}: {error.strerror} ({error.filename})", everywhere=True
        ) from None
    except (ValueError, KeyError, TypeError):
        raise RunError(f"the note of the checkpoint in {folder} is damaged", everywhere=True) from None


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)

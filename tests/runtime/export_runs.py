"""A folder of odd but legal values, loaded in slices, trained one step, exported and read again by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from closeness import assert_close
from configuration_runs import planned
from drawn_configurations import LAYOUTS, draw
from family_runs import batch_of, drawn_model, of_plan
from ranks import run_ranks
from torch import nn
from training_runs import plain_optimizer

from parcompile.plan import Plan
from parcompile.runtime.model.text_head import model_class

_NOTES = {"architectures", "dtype", "_name_or_path", "transformers_version", "use_cache"}
_DRAWS = 30
"""At most so many draws are refused before one is taken."""


def plan_of(family: str, layout: str, number: int = 0) -> Plan:
    """A plan of the family's drawn configuration; the next draw where a rule or transformers refuses one."""
    said = ""
    for drawn in (draw(one, (family,), layout) for one in range(number, number + _DRAWS)):
        kept = replace(drawn, changes={key: one for key, one in drawn.changes.items() if "bidirectional" not in key})
        try:
            plan = planned(kept)
            drawn_model(plan)
        except Exception as error:
            said = str(error)
            continue
        return plan
    raise AssertionError(f"{family}: none of {_DRAWS} draws is planned and built; the last: {said}")


def stored(plan: Plan, folder: Path) -> None:
    """The plan's model as transformers saves it, with its buffers drawn too."""
    model: Any = drawn_model(plan)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(generator=torch.Generator().manual_seed(5))
    model.save_pretrained(folder)


def export_trained(rank: int, plans: list[Plan], folder: str) -> list[str]:
    """Each plan's folder after one step in `FOLDER/trained/NAME`; what went wrong, in words.

    What the model's own `save_pretrained` writes at that time is in `FOLDER/saved/NAME`.
    """
    from parcompile.runtime import initialize, join, load_pretrained
    from parcompile.runtime.checkpoint import export, save
    from parcompile.runtime.engine import initialization
    from parcompile.runtime.groups import create_groups
    from parcompile.runtime.inject import injection

    joined, said = join(plans[0]), []
    for plan in plans:
        mesh = of_plan(create_groups(plan, rank, joined.device), plan)
        injection.join = initialization.join = lambda _, mesh=mesh: mesh  # one world for all plans
        name = plan.spec.name
        try:
            model = load_pretrained(Path(folder) / "given" / name, plan)
            batch = batch_of(plan)
            samples = [{key: value[row] for key, value in batch.items()} for row in range(2)]
            engine, _, loader, _ = initialize(
                plan=plan, model=model, training_data=samples, self_check=False, measurements=False
            )
            if name == "phimoe":
                engine.module.eval()  # in training it draws its experts at random
            engine.train_batch(iter(loader))
            save(engine, Path(folder) / "run" / name, 1)
            engine.module.save_pretrained(Path(folder) / "saved" / name)
            if rank == 0:
                export(Path(folder) / "run" / name, Path(folder) / "trained" / name)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def read(folder: Path) -> Any:
    """The model of a folder, by the class that the runtime takes."""
    from transformers import AutoConfig

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)


def trained_plainly(plan: Plan, folder: Path) -> nn.Module:
    """The folder's model after the same step with transformers and torch alone."""
    model: nn.Module = read(folder)
    model.train(plan.spec.name != "phimoe")
    optimizer = plain_optimizer(model, plan)
    model(**batch_of(plan)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), plan.spec.training.gradient_clipping)
    optimizer.step()
    return model


def different_files(one: Path, other: Path) -> list[str]:
    """What of two Hugging Face folders is not the same to the bit; generation_config.json does not count."""
    first, second = (stored_tensors(folder) for folder in (one, other))
    found = [f"tensors: {sorted(first.keys() ^ second.keys())[:3]}"] if first.keys() != second.keys() else []
    for name in first.keys() & second.keys():
        if first[name].dtype is not second[name].dtype or not torch.equal(first[name], second[name]):
            found.append(f"{name} differs")
    if (one / "config.json").read_text() != (other / "config.json").read_text():
        found.append("config.json differs")
    return found


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder; an index has to name those, and no others."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    index = folder / "model.safetensors.index.json"
    assert not index.exists() or json.loads(index.read_text())["weight_map"].keys() == found.keys()
    return found


def faults(families: Sequence[str], folder: Path, layout: str) -> list[str]:
    """What differs between the exported models and those of one process; empty: nothing."""
    plans, found = [plan_of(family, layout) for family in families], []
    for plan in plans:
        stored(plan, folder / "given" / plan.spec.name)
    ranks = run_ranks(LAYOUTS[layout][0], export_trained, plans, str(folder), timeout=280)
    for plan, *said in zip(plans, *ranks, strict=True):
        name = plan.spec.name
        if any(said):
            found.append(f"{name}: {said}")
            continue
        expected = trained_plainly(plan, folder / "given" / name).eval()
        found += [f"{name}: {one}" for one in different_files(folder / "trained" / name, folder / "saved" / name)]
        back = read(folder / "saved" / name).eval()
        values = [{key: one for key, one in m.config.to_dict().items() if key not in _NOTES} for m in (expected, back)]
        for key in sorted(values[0].keys() | values[1].keys()):
            if values[0].get(key) != values[1].get(key):
                found.append(f"{name}: {key} is {values[1].get(key)!r}, was {values[0].get(key)!r}")
        ids = batch_of(plan)["input_ids"]
        with torch.no_grad():
            one, other = (model(input_ids=ids, use_cache=False).logits for model in (expected, back))
        try:
            assert_close(other, one, about=f"{name} logits")
        except AssertionError as error:
            found.append(str(error))
        before = read(folder / "given" / name).eval()
        with torch.no_grad():
            moved = float((before(input_ids=ids, use_cache=False).logits - one).norm() / one.norm())
        if not moved > 1e-4:
            found.append(f"{name}: a step moves the logits by {moved:.1e} only, so that nothing was compared")
    return found

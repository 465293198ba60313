"""Contract: `save_pretrained` and `save_16bit_model` of a model in any layout write what `export` writes.

What would write the slices of one rank as the model is refused in one sentence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import adapted
from closeness import assert_close
from expert_runs import Case
from export_runs import different_files, of_plan, stored_tensors
from ranks import run_ranks
from test_expert_adapters import OF_ALL
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.checkpoint import export, export_adapter

pytestmark = pytest.mark.ranks

TIED = {"tie_word_embeddings": True}
HALF = {"precision": "bf16", "micro_batch_size": 2}


def plans() -> dict[str, Plan]:
    """Each axis, with a padded vocabulary, replicated kv heads, a tied head, experts and adapters."""
    return {
        "tp4, bf16": make_plan(4, {"tp": 4}, training={"precision": "bf16"}),
        "tp2 × pp2, tied": make_plan(4, {"tp": 2, "pp": 2}, model=TIED, training={"micro_batch_size": 2}),
        "pp2 × cp2, bf16": make_plan(4, {"pp": 2, "cp": 2}, training=HALF),
        "cp2 × dp2": make_plan(4, {"cp": 2, "dp": 2}),
        "tp2 × dp2 × ep2": Case("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2}).plan(),
        "tp2 × dp2 × ep4, experts whole": Case("deepseek_v3", {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1}).plan(),
        "pp2 × dp2 × ep2, ZeRO-0": Case("mixtral", {"pp": 2, "dp": 2, "ep": 2}, zero=0).plan(),
        "adapters": Case("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2}).plan(),
    }


def save_all(rank: int, folder: str) -> dict[str, str]:
    """Each model after a step, as a checkpoint and by the two calls; the errors."""
    from parcompile.runtime import initialize, join
    from parcompile.runtime.checkpoint import save
    from parcompile.runtime.engine import initialization
    from parcompile.runtime.groups import create_groups

    joined, said = join(plans()["tp4, bf16"]), {}
    for name, plan in plans().items():
        mesh = of_plan(create_groups(plan, rank, joined.device), plan)
        initialization.join = lambda _, mesh=mesh: mesh
        place = Path(folder) / name
        try:
            model = adapted(plan, OF_ALL) if name == "adapters" else initial_model(plan)
            engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan), self_check=False)
            engine.train_batch(iter(loader))
            save(engine, place / "run", 1)
            engine.module.save_pretrained(place / "saved")
            engine.module.save_pretrained(place / "parts", max_shard_size="10KB")
            engine.module.save_pretrained(place / "parts", max_shard_size="20KB")
            engine.save_16bit_model(place / "binary")
            engine.save_16bit_model(
                place / "named", "weights.safetensors", exclude_frozen_parameters=name != "adapters"
            )
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for said in run_ranks(4, save_all, str(folder), timeout=280):
        assert said == {}
    return folder


@pytest.mark.parametrize("name", plans())
def test_they_write_the_whole_model(name: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    place = folder / name
    export(place / "run", tmp_path / "exported")
    whole = stored_tensors(tmp_path / "exported")
    for weights in (torch.load(place / "binary" / "pytorch_model.bin"), stored_tensors(place / "named")):
        assert weights.keys() == whole.keys()
        for key, value in weights.items():
            assert value.dtype is whole[key].dtype
            assert torch.equal(value, whole[key]), key
    if name == "adapters":
        export_adapter(place / "run", tmp_path / "adapters")
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert (place / "saved" / file).read_bytes() == (tmp_path / "adapters" / file).read_bytes()
        return
    assert different_files(tmp_path / "exported", place / "saved") == []
    # Fewer parts than before leave none of those behind.
    assert different_files(tmp_path / "exported", place / "parts") == []
    assert len(list((place / "parts").glob("*.safetensors"))) > 1
    assert not (place / "parts" / "unfinished").exists()
    model, *others = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval()
        for one in (tmp_path / "exported", place / "saved", place / "parts", place / "binary")
    )
    expected, ids = model.state_dict(), torch.stack([one["input_ids"] for one in samples(plans()[name])])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        for other in others:
            found = other.state_dict()
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], value), key
            # What no state_dict has, such as buffers that are not saved, shows in the logits.
            assert_close(other(input_ids=ids, use_cache=False).logits, logits, about=name)


def refused(rank: int, plan: Plan, folder: str) -> dict[str, str]:
    from accelerate import Accelerator

    from parcompile.runtime import initialize

    engine, _, _, _ = initialize(plan=plan, model=initial_model(plan))
    model, slices = engine.module, engine.module_state_dict()
    (Path(folder) / "file").touch()
    assert slices["model.layers.0.self_attn.o_proj.weight"].shape == (32, 16)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "accelerate": lambda: Accelerator(cpu=True).save_model(model, f"{folder}/accelerate"),
        "slices": lambda: model.save_pretrained(f"{folder}/slices", is_main_process=rank == 0, state_dict=slices),
        "no folder": lambda: model.save_pretrained(f"{folder}/file/below"),
        "push": lambda: model.save_pretrained(f"{folder}/push", push_to_hub=True),
        "size": lambda: model.save_pretrained(f"{folder}/push", max_shard_size="much"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ""
        except RunError as error:
            found[name] = str(error)
    return found


def test_what_would_save_slices_is_refused(tmp_path: Path) -> None:
    plan = make_plan(2, {"tp": 2})
    for found in run_ranks(2, refused, plan, str(tmp_path)):
        for name in ("state_dict", "accelerate"):
            assert "model.save_pretrained(folder), called on every rank, writes the whole model" in found[name]
        assert "embed_tokens.weight [32, 32] of [61, 32]" in found["slices"]
        assert "file/below" in found["no folder"]
        assert "does not take push_to_hub" in found["push"]
        assert "max_shard_size is 'much'" in found["size"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]


def save_on_one(rank: int, plan: Plan, folder: str) -> str:
    """Rank 1 goes on to the next thing that the ranks do together."""
    import torch.distributed as dist

    from parcompile.runtime import initialize

    engine, _, _, _ = initialize(plan=plan, model=initial_model(plan))
    os.environ["PARCOMPILE_HANDSHAKE_TIMEOUT"] = "3"
    said = ""
    if rank == 0:
        try:
            engine.module.save_pretrained(folder)
        except RunError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_call_of_one_rank_is_refused_where_it_needs_the_others(tmp_path: Path) -> None:
    said = run_ranks(2, save_on_one, make_plan(2, {"tp": 2}), str(tmp_path / "slices"))[0]
    assert "rank 1 has not called it within 3 s: call it on every rank, not under `if rank == 0`" in said
    assert not (tmp_path / "slices").exists()
    # Where rank 0 has all of the model it needs nobody.
    assert run_ranks(2, save_on_one, make_plan(2, {"cp": 2}), str(tmp_path / "whole"))[0] == ""
    assert (tmp_path / "whole" / "model.safetensors").is_file()

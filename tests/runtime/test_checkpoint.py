"""Contract: a run goes on from its last whole checkpoint, in the same layout to the bit, in another within rounding."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner, Result
from closeness import assert_close
from ranks import RankError, run_ranks
from training_runs import initial_model, make_plan, samples, train_in_one_process

from parcompile.backends.artefacts import to_text
from parcompile.cli import cli
from parcompile.plan import Plan, plan_tree
from parcompile.runtime import RunError
from parcompile.runtime.checkpoint import SavedRun, export, read_note, save, verify
from parcompile.runtime.checkpoint.adapting import import_pretrained

pytestmark = pytest.mark.ranks

STEPS = 4


def layout(name: str, precision: str = "fp32") -> Plan:
    """Two kv heads, so that tp 4 replicates them; the vocabulary of 61 is padded differently at every tp."""
    sizes = {"tp2 × dp2": (4, {"tp": 2, "dp": 2}), "cp2 × dp2": (4, {"cp": 2, "dp": 2}), "tp4": (4, {"tp": 4})}
    where, _, stage = name.partition(", ZeRO-")
    world_size, parallelism = sizes.get(where, (1, {}))
    # A key for checkpoints of `ds_to_universal`: those of a run are read all the same.
    extra = {"zero": {"stage": int(stage or 1)}, "deepspeed": {"checkpoint": {"load_universal": True}}}
    return make_plan(world_size, parallelism, training={"precision": precision}, extra=extra)


def train(rank: int, plan: Plan, resume: str | None, until: int, saves: dict[int, str] | None = None) -> dict[str, Any]:
    """Losses and norms of the steps after the checkpoint, and a random number drawn at the end."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    torch.manual_seed(100 + rank)
    done = 0
    if resume:
        try:
            done = load(engine, resume)
        except RunError as error:
            return {"error": str(error), "everywhere": error.everywhere}
    loader.step = done
    batches, losses, norms = iter(loader), [], []
    for step in range(done + 1, until + 1):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        torch.rand(3)
        if saves and step in saves:
            save(engine, saves[step], step)
    parameters = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    return {"losses": losses, "norms": norms, "random": float(torch.rand(1)), "parameters": parameters}


def run(name: str, resume: Path | None, until: int = STEPS, saves: dict[int, Path] | None = None) -> list[Any]:
    plan = layout(name)
    texts = {step: str(folder) for step, folder in (saves or {}).items()}
    return run_ranks(plan.world_size, train, plan, str(resume) if resume else None, until, texts)


def assert_goes_on(found: dict[str, Any], expected: dict[str, Any], steps: int, plan: Plan | None = None) -> None:
    """Its `steps` are the last of `expected`, within what last bits do to one process that trains the same."""
    known = plan or layout("one rank")
    assert_close(
        {key: found[key] for key in ("losses", "norms")},
        {key: expected[key][-steps:] for key in ("losses", "norms")},
        rerun=lambda seed: {
            key: value[-steps:]
            for key, value in train_in_one_process(known, steps=len(expected["losses"]), seed=seed).items()
            if key in ("losses", "norms")
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    """tp 2 × dp 2, saved after two of four steps and at the end."""
    return run("tp2 × dp2", None, saves={2: folder / "a", STEPS: folder / "end"})


def test_the_same_layout_goes_on_to_the_bit(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    for found, expected in zip(run("tp2 × dp2", folder / "a"), uninterrupted, strict=True):
        assert found["losses"] == expected["losses"][2:]
        assert found["norms"] == expected["norms"][2:]
        assert found["random"] == expected["random"]
        for name, value in expected["parameters"].items():
            assert torch.equal(found["parameters"][name], value), name


@pytest.mark.parametrize(
    "name", ["cp2 × dp2", "tp4", "one rank", "cp2 × dp2, ZeRO-2", "tp2 × dp2, ZeRO-2", "tp2 × dp2, ZeRO-0"]
)
def test_another_layout_goes_on_and_back(name: str, folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    there = run(name, folder / "a", until=3, saves={3: folder / name})
    assert_goes_on(there[0], {key: uninterrupted[0][key][:3] for key in ("losses", "norms")}, 1)
    assert_goes_on(run("tp2 × dp2", folder / name)[0], uninterrupted[0], 1)


def test_a_run_goes_on_with_the_next_sample_in_another_batch_size_and_layout(tmp_path: Path) -> None:
    """2 steps of 2 samples on one rank, 2 of 4 on two, and one of 2 in the same layout: its data end after sample 9."""
    small, large = {"global_batch_size": 2}, {"global_batch_size": 4}
    plans = [make_plan(1, {}, training=small), make_plan(2, {}, training=large), make_plan(2, {}, training=small)]
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    resume = None
    for plan, until in zip(plans, (2, 4, 5), strict=True):
        saved = str(tmp_path / str(until))
        rank = run_ranks(plan.world_size, train, plan, resume, until, {until: saved})[0]
        found = {key: [*values, *rank[key]] for key, values in found.items()}
        resume = saved
    batches = [slice(0, 2), slice(2, 4), slice(4, 8), slice(8, 12), slice(2, 4)]

    def expected(seed: int | None = None) -> dict[str, Any]:
        return train_in_one_process(plans[1], batches=batches, seed=seed)

    names = {name: value[: len(rank["parameters"][name])] for name, value in expected()["parameters"].items()}
    parameters = {name: rank["parameters"][name][: len(value)] for name, value in names.items()}
    assert_close({**found, "parameters": parameters}, expected(), rerun=expected)


def test_weights_in_half_precision_start_from_the_full_precision_ones(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    plan = layout("one rank", "bf16")
    found = run_ranks(1, train, plan, str(folder / "a"), 3)[0]
    assert abs(found["losses"][0] - uninterrupted[0]["losses"][2]) < 0.02


def train_with_bf16_optimizer(rank: int, plan: Plan, *rest: Any) -> dict[str, Any]:
    """As `train`, under the optimizer that DeepSpeed chooses itself for fp32 sums of bf16 gradients at stage 1."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    from parcompile.runtime.engine import initialization

    as_before = {"without_bf16_optimizer": contextlib.nullcontext, "sum_once": lambda *_: None}
    groups = property(lambda optimizer: optimizer.bf16_groups)
    with patch.multiple(initialization, **as_before), patch.object(BF16_Optimizer, "bit16_groups", groups, create=True):
        return train(rank, plan, *rest)


@pytest.mark.parametrize("name", ["cp2 × dp2", "tp2 × dp2", "tp2 × dp2, ZeRO-2"])
def test_a_checkpoint_of_bf16_optimizer_goes_on(name: str, tmp_path: Path) -> None:
    """Earlier releases left bf16 weights with fp32 sums at stage 1 to DeepSpeed's `BF16_Optimizer`."""
    saved = str(tmp_path / "old")
    old = run_ranks(4, train_with_bf16_optimizer, layout("cp2 × dp2", "bf16"), None, STEPS, {2: saved})[0]
    files = [file.name for file in Path(saved).rglob("*optim_states.pt")]
    assert files and all(file.startswith("bf16_zero") for file in files)
    found = run_ranks(4, train, layout(name, "bf16"), saved, STEPS)[0]
    for kind in ("losses", "norms"):
        assert found[kind] == pytest.approx(old[kind][2:], rel=0.02), kind
    norms = [name for name in old["parameters"] if "norm" in name]  # whole on each rank
    off = torch.stack([(found["parameters"][one] - old["parameters"][one]).float().abs().mean() for one in norms])
    assert off.mean() < 1e-4  # 2.7e-4 with other moments


def test_an_exported_model_has_the_logits_of_the_run(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    whole, parts = folder / "exported", folder / "exported in parts"
    files = export(folder / "end", whole)
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert len(export(folder / "end", parts, shard_bytes=20_000)) > 3
    model, again = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in (whole, parts))
    live = {name: value for name, value in uninterrupted[0]["parameters"].items() if "norm" in name}
    saved = SavedRun(read_note(folder / "end"))
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, saved.whole(name)), name
        assert name not in live or torch.equal(one, live[name])
    with safe_open(whole / "model.safetensors", "pt") as stored:
        assert stored.get_slice("lm_head.weight").get_shape() == [61, 32]
    ids = samples(saved.note.plan)[0]["input_ids"][None]
    plain = initial_model(saved.note.plan)
    plain.load_state_dict({name: saved.whole(name) for name in saved.parameters})
    assert torch.equal(plain.eval()(ids).logits, model(ids).logits)


def test_a_new_checkpoint_replaces_unfinished_ones_and_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "unfinished-step-1").mkdir()
    (tmp_path / "unfinished-step-1" / "half").write_text("x")
    run_ranks(1, save_thrice, layout("one rank"), str(tmp_path))
    assert sorted(found.name for found in tmp_path.iterdir() if found.is_dir()) == ["step-2", "step-3"]
    assert (tmp_path / "latest").read_text() == "step-3"
    assert verify(tmp_path) == []


def save_thrice(rank: int, plan: Plan, folder: str) -> None:
    from parcompile.runtime import initialize

    engine, _, _, _ = initialize(plan=plan)
    for step in (1, 2, 3):
        save(engine, folder, step, keep=2)


def resume_with_and_without_scheduler(rank: int, plan: Plan, folder: str) -> dict[tuple[bool, bool], str]:
    """What is said where the run that saved had a scheduler and the one that resumes has one, in all four cases."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load

    def engine_of(schedules: bool) -> Any:
        schedule = (lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer)) if schedules else None
        return initialize(plan=plan, model=initial_model(plan), lr_scheduler=schedule)[0]

    found = {}
    for was in (True, False):
        save(engine_of(was), f"{folder}/{was}", 1)
        for now in (True, False):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                load(engine_of(now), f"{folder}/{was}")
            lines = said.getvalue().splitlines()
            found[was, now] = "".join(line for line in lines if line.startswith("parcompile: warning"))
    return found


def test_a_scheduler_is_not_lost_without_a_word(tmp_path: Path) -> None:
    (found,) = run_ranks(1, resume_with_and_without_scheduler, layout("one rank"), str(tmp_path))
    assert found[True, True] == found[False, False] == ""
    assert "has the state of an LR scheduler, and this run has none" in found[True, False]
    assert "has no state of an LR scheduler: that of this run begins at its first step" in found[False, True]


def die_while_saving(rank: int, plan: Plan, folder: str) -> None:
    """Rank 1 is killed when its files are written and the checkpoint is not complete yet."""
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    save(engine, folder, 0)
    loss = engine(**next(iter(loader))).loss
    engine.backward(loss)
    engine.step()
    write = engine.save_checkpoint

    def write_and_die(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        engine.save_checkpoint = write_and_die
    save(engine, folder, 1)


def test_a_rank_killed_while_saving_leaves_the_last_checkpoint_in_use(tmp_path: Path) -> None:
    plan = make_plan(2, {"cp": 2})
    with pytest.raises(RankError, match="exit code -9"):  # and not that they took too long
        run_ranks(2, die_while_saving, plan, str(tmp_path))
    assert (tmp_path / "unfinished-step-1").is_dir()
    assert verify(tmp_path) == []
    assert read_note(tmp_path).step == 0


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def written(plan: Plan, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    return folder


def test_inspect_says_what_a_checkpoint_is_of(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    found = json.loads(invoke("inspect", folder / "a", "--format", "json").stdout)
    assert {key: found[key] for key in ("step", "tp", "dp", "optimizer_shards", "model_type")} == {
        "step": 2,
        "tp": 2,
        "dp": 2,
        "optimizer_shards": 2,
        "model_type": "llama",
    }
    assert found["parameters"] == layout("one rank").parameters.numel
    assert "optimizer shards  2" in invoke("inspect", folder / "a").stdout


def assert_same_to_the_bit(one: Path, other: Path) -> None:
    """Weights and optimizer states in fp32, steps and settings of two checkpoints."""
    first, second = SavedRun(read_note(one)), SavedRun(read_note(other))
    assert first.kinds == second.kinds == ["fp32", "exp_avg", "exp_avg_sq"]
    assert first.groups == second.groups
    for name in first.parameters:
        for kind in first.kinds:
            found, expected = first.whole(name, kind), second.whole(name, kind)
            assert (found is None) == (expected is None), name
            assert found is None or (expected is not None and torch.equal(found, expected)), name


def test_a_converted_checkpoint_is_loaded_by_deepspeed_as_its_own(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    target = written(layout("tp4"), folder / "tp4")
    done = invoke("convert", folder / "a", "--to", target, "-o", folder / "converted")
    assert done.exit_code == 0, done.output
    assert invoke("verify", folder / "converted").exit_code == 0
    assert_same_to_the_bit(folder / "converted", folder / "a")
    assert_goes_on(run("tp4", folder / "converted")[0], uninterrupted[0], STEPS - 2)


def test_an_exported_model_can_be_imported_as_the_start_of_a_run(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    assert invoke("export", folder / "a", "--hf", folder / "hf").exit_code == 0
    plan = layout("tp2 × dp2")
    done = invoke("import", "--hf", folder / "hf", "--plan", written(plan, folder / "plan"), "-o", folder / "start")
    assert done.exit_code == 0, done.output
    one, other = SavedRun(read_note(folder / "start")), SavedRun(read_note(folder / "a"))
    for name in one.parameters:
        assert torch.equal(one.whole(name), other.whole(name)), name
    assert one.note.step == 0
    half = import_pretrained(folder / "hf", layout("one rank", "fp16"), folder / "start in fp16")
    assert SavedRun(read_note(half)).loss_scaler.cur_scale == 2**16


def test_mistakes_are_one_message(folder: Path, uninterrupted: list[dict[str, Any]], tmp_path: Path) -> None:
    missing = invoke("verify", tmp_path)
    assert missing.exit_code != 0
    assert "there is no checkpoint in" in missing.output
    again = invoke("export", folder / "a", "--hf", folder / "a")
    assert again.exit_code != 0
    assert "is not empty" in again.output


class TestDamage:
    @pytest.fixture
    def copy(self, folder: Path, uninterrupted: list[dict[str, Any]], tmp_path: Path) -> Path:
        return Path(shutil.copytree(folder / "a", tmp_path / "copy"))

    def optimizer_file(self, copy: Path) -> Path:
        return sorted((copy / "step-2").glob("*optim_states.pt"))[0]

    def test_a_changed_byte_is_found_and_resuming_refused(self, copy: Path) -> None:
        file = self.optimizer_file(copy)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        assert verify(copy) == [f"{file} is damaged: its SHA-256 is not the one it was saved with"]
        (found,) = run("one rank", copy)
        assert found["everywhere"]
        assert f"{file} is damaged" in found["error"]

    def test_a_short_file_and_a_missing_one_are_named(self, copy: Path) -> None:
        file = self.optimizer_file(copy)
        file.write_bytes(file.read_bytes()[:-1])
        (copy / "step-2" / "mp_rank_01_model_states.pt").unlink()
        missing, short = verify(copy)
        assert "mp_rank_01_model_states.pt cannot be read: No such file" in missing
        assert "bytes, it was saved with" in short

    def test_a_pickle_that_would_run_code_is_not_loaded(self, copy: Path) -> None:
        file = self.optimizer_file(copy)
        torch.save({"optimizer_state_dict": Harmful()}, file)
        note = copy / "step-2" / "parcompile.json"
        tree = json.loads(note.read_text())
        from parcompile.runtime.checkpoint.manifest import digest_of

        size, digest = digest_of(file)
        tree["files"][file.name] = {"bytes": size, "sha256": digest}
        note.write_text(json.dumps(tree))
        (sentence,) = verify(copy)
        assert "asks to load posix.system" in sentence
        with pytest.raises(RunError, match="asks to load"):
            SavedRun(read_note(copy)).whole("model.norm.weight")

    def test_a_damaged_note_and_a_wrong_latest_are_named(self, copy: Path) -> None:
        (copy / "step-2" / "parcompile.json").write_text("{")
        with pytest.raises(RunError, match=r"the note of the checkpoint in .* is damaged"):
            read_note(copy)
        (copy / "latest").write_text("../elsewhere")
        with pytest.raises(RunError, match="names no checkpoint beside it"):
            read_note(copy)
        (copy / "latest").write_text("step-9")
        with pytest.raises(RunError, match=r"names step-9, but .* is missing"):
            read_note(copy)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("true",)


class AsOlderPythons:
    """Pickles a member of an enumeration as Python 3.11.0 to 3.11.3 do, or asks for something else in the same way."""

    def __init__(self, kind: Any, name: str) -> None:
        self.asked = kind, name

    def __reduce__(self) -> Any:
        return getattr, self.asked


def test_a_stage_that_an_older_python_has_saved_is_read_and_nothing_else_by_its_way(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    from parcompile.runtime.checkpoint.reading import load_trusted

    file = tmp_path / "states.pt"
    torch.save({"zero_stage": AsOlderPythons(ZeroStageEnum, "optimizer_states")}, file)
    assert load_trusted(file) == {"zero_stage": ZeroStageEnum.optimizer_states}
    for kind, name in ((ZeroStageEnum, "mro"), (torch.Tensor, "numpy")):
        torch.save({"zero_stage": AsOlderPythons(kind, name)}, file)
        with pytest.raises(RunError, match=r"states\.pt (cannot be read|asks to load)"):
            load_trusted(file)

"""Muon orthogonalises whole matrices in every layout; SGD and Adagrad are torch's: all equal one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, judge, largest
from families import FAMILIES, VARIANTS, tiny_config
from optimizer_runs import CELLS, Cell, compare
from optimizer_runs import plan_of as plan_of_cell
from ranks import RankError, run_ranks
from test_checkpoint import assert_goes_on, train
from test_sharded_weights import plan_of
from torch.utils.flop_counter import FlopCounterMode
from training_runs import PlainMuon, compared, initial_model, make_plan, train_in_one_process, train_with_engine
from transformers import Trainer

from parcompile.cost.coefficients import time_values
from parcompile.cost.collectives import matrix_flops
from parcompile.cost.step import timing
from parcompile.layout.shards import is_decayed, newton_schulz_work, pieces, rounds
from parcompile.plan import Plan, plan_tree
from parcompile.runtime.checkpoint.adapting import convert, import_pretrained
from parcompile.runtime.checkpoint.exporting import export
from parcompile.runtime.checkpoint.manifest import read_note
from parcompile.runtime.checkpoint.reading import SavedRun, verify
from parcompile.runtime.checkpoint.state_file import OptimizerShard
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.pretrained import instantiate
from parcompile.runtime.optimizers import newton_schulz, rate_factor
from parcompile.runtime.preflight import preflight
from parcompile.spec.values import workload_of

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (8, 8), (1, 6)])
def test_one_matrix_is_orthogonalised_as_torch_does(shape: tuple[int, int]) -> None:
    """To the bit in bf16: the same products of the same numbers."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torchs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(newton_schulz(matrix[None], 5, torch.bfloat16)[0], torchs)
    for name in ("original", "match_rms_adamw"):
        assert rate_factor(name, *shape) == torch.optim._muon._adjust_lr(1.0, name, torch.Size(shape))


def test_a_stack_is_orthogonalised_matrix_by_matrix() -> None:
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2))
    each = torch.stack([newton_schulz(one[None], 5, torch.float32)[0] for one in stack])
    assert_close(newton_schulz(stack, 5, torch.float32), each)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_deepspeeds_update_of_a_matrix_is_that_of_adjust_lr_original(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum, Nesterov's, the "standard" iteration and the factor of the rate, all in fp32."""
    from deepspeed.runtime.zero.muon import original_muon

    monkeypatch.setattr(original_muon, "ns_compute_dtype", lambda _method: torch.float32)
    generator = torch.Generator().manual_seed(1)
    momentum, own = torch.zeros(shape), torch.zeros(shape)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            gradient = torch.randn(shape, generator=generator)
            update = original_muon.muon_update(gradient.clone(), momentum, beta=0.95, ns_method="standard")
            own.lerp_(gradient, 0.05)
            expected = newton_schulz(gradient.lerp(own, 0.95)[None], 5, torch.float32)[0]
            assert_close(update, expected * rate_factor("original", *shape))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_estimate_counts_the_operations_of_the_iteration(family: str) -> None:
    """Of one rank all of them; of several, in each turn what the one with the largest matrix computes."""
    given = {"training": {"optimizer": {"type": "muon", "ns_steps": 3}}, "model": tiny_config(family)}
    plan = make_plan(1, {}, whole_model=True, **given)
    work = workload_of(plan.spec)
    matrices = PlainMuon(initial_model(plan), plan).matrices
    with FlopCounterMode(display=False) as counter:
        for one in matrices:
            newton_schulz(one.detach().view(-1, *one.shape[-2:]), 3, torch.float32)
    assert matrix_flops(work, work.stages[0]) == counter.get_total_flops()
    shared = workload_of(make_plan(4, {"tp": 2}, whole_model=True, **given).spec)
    least = counter.get_total_flops() / 4
    assert least <= matrix_flops(shared, shared.stages[0]) <= least + max(newton_schulz_work(m.shape) for m in matrices)


def test_a_step_takes_the_time_of_the_iteration_and_of_its_messages() -> None:
    muon, plain = (
        workload_of(make_plan(4, {"tp": 2}, training={"optimizer": {"type": kind}}).spec) for kind in ("muon", "adamw")
    )
    computed = matrix_flops(muon, muon.stages[0]) / muon.machine.matmul_flops_per_s(2) / time_values(muon)["matmul"]
    further = timing(muon).step.optimizer - timing(plain).step.optimizer
    assert computed < further
    assert timing(muon.having(ns_steps=10)).step.optimizer - timing(muon).step.optimizer == pytest.approx(computed)
    assert timing(muon.having(dp=1, nodes=1, gpus_per_node=2)).step.optimizer > timing(muon).step.optimizer


def test_every_matrix_has_one_owner_and_a_rank_one_matrix_at_a_time() -> None:
    work, cut = [3.0, 1.0, 2.0, 5.0, 4.0, 1.0, 1.0], [True, True, True, False, False, True, True]
    turns = rounds(work, cut, shards=2, tp=2)
    assert sorted(owner.matrix for turn in turns for owner in turn) == list(range(7))
    for turn in turns:
        assert len({(owner.shard, owner.tp) for owner in turn}) == len(turn)
        assert len({owner.tp is None for owner in turn}) == 1
    assert [owner.matrix for owner in turns[0]] == [0, 2, 1, 5]


@pytest.mark.parametrize("of_each", [False, True])
def test_the_pieces_of_a_matrix_are_all_of_it(of_each: bool) -> None:
    for numel, held in zip([5, 12, 7], pieces([5, 12, 7], 4, of_each=of_each), strict=True):
        assert [index for start, stop in held for index in range(start, stop)] == list(range(numel))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_layouts_equal_one_process(cell: Cell) -> None:
    judge(compare(cell))


def test_the_iteration_in_bf16_is_torchs_within_its_rounding() -> None:
    """Two ranks sum gradients in another order, and bf16 keeps eight bits of the result: 3e-4 after three steps."""
    assert 1e-6 < largest(compare(replace(CELLS[0], bf16=True)), "") < 2e-3


def test_what_takes_muon_is_what_the_reference_takes() -> None:
    families = ("llama", "gpt2", "phi3", "qwen3_next", "deepseek_v3", "cohere", "granitemoe", "gemma4_text, experts")
    for family in families:
        plan = make_plan(1, {}, model=tiny_config(family), whole_model=True, training={"optimizer": {"type": "muon"}})
        model = initial_model(plan)
        taken = {id(one) for one in PlainMuon(model, plan).matrices}
        expected = {name for name, one in model.named_parameters() if id(one) in taken}
        rows = {row["name"]: row["optimizer"] for row in tensors(plan)}
        planned = {name for name, row in plan.parameters.expanded() if rows[row.name] == "muon"}
        assert planned == expected, family


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_what_is_not_decayed_is_what_trainer_and_megatron_leave_out(family: str) -> None:
    plan = make_plan(1, {}, model=tiny_config(family), whole_model=True)
    with torch.device("meta"):
        model = instantiate(plan, torch.float32)
    trainers: Any = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    for name, row in plan.parameters.expanded():
        assert is_decayed(row, "biases_and_norms") is (name in trainers), name
        one = model.get_parameter(name)
        # Megatron-LM keeps each expert as a module of its own.
        vector = one.dim() - (row.expert_dim is not None and "experts." in name and one.dim() > 1) <= 1
        assert is_decayed(row, "vectors") is not (vector or name.endswith("bias")), name


def tensors(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plan_tree(plan)["tensors"]
    return found


SUMMED = {"precision": "bf16", "gradient_accumulation_dtype": "fp32"}
PREFLIGHT = {
    "tp2 dp2": (4, {"tp": 2}, {}, 1),
    "tp2 dp2, ZeRO-0": (4, {"tp": 2}, {}, 0),
    "tp2 dp2, ZeRO-2": (4, {"tp": 2}, {}, 2),
    "pp2 dp2": (4, {"pp": 2}, {}, 1),
    "tp2 ep2": (4, {"tp": 2, "ep": 2}, {"model": "mixtral"}, 1),
    "ep4 folded": (4, {"tp": 2, "ep": 4, "expert_tp": 1}, {"model": "mixtral"}, 1),
    "dp4 in bf16, summed in fp32": (4, {}, SUMMED, 1),
    "sgd": (2, {}, {"optimizer": {"type": "sgd", "momentum": 0.9}}, 1),
    **{
        f"{name}, ZeRO-{stage}, {left_out}": (4, axes, {**given, "optimizer": {"no_weight_decay": left_out}}, stage)
        for name, axes, given, left_out, stages in (
            ("dp4", {}, {"model": "llama"}, "vectors", (0, 1, 2)),
            ("tp2 cp2 in bf16, summed in fp32", {"tp": 2, "cp": 2}, SUMMED, "biases_and_norms", (1,)),
            ("tp2 ep2", {"tp": 2, "ep": 2}, {"model": "gpt_oss"}, "biases_and_norms", (1, 2)),
        )
        for stage in stages
    },
    "muon, vectors": (4, {"pp": 2}, {"model": "gpt2", "optimizer": {"type": "muon", "no_weight_decay": "vectors"}}, 1),
    "sgd without momentum": (2, {}, {"optimizer": {"type": "sgd"}}, 1),
    "adagrad": (2, {}, {"optimizer": {"type": "adagrad"}}, 1),
    "adagrad, ZeRO-0": (2, {}, {"optimizer": {"type": "adagrad"}}, 0),
}


@pytest.mark.parametrize("name", PREFLIGHT)
def test_preflight_counts_the_memory_and_the_messages_of_the_plan(name: str) -> None:
    world, parallelism, given, stage = PREFLIGHT[name]
    family = given.get("model")
    training = {"global_batch_size": 8, "micro_batch_size": 1, "optimizer": {"type": "muon"}}
    training |= {key: value for key, value in given.items() if key != "model"}
    # Each of the groups is padded, which all parameters together are not.
    odd = {"hidden_size": 36, "head_dim": 8, "num_hidden_layers": 1, "intermediate_size": 71}
    model = tiny_config(str(family), **(odd if family == "llama" else {})) if family else None
    plan = make_plan(
        world, parallelism, training=training, model=model, whole_model=bool(family), extra={"zero": {"stage": stage}}
    )
    report = preflight(plan, range(world))
    assert report.agrees, report.text()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [{"type": "sgd", "momentum": 0.9}, {"type": "sgd"}, {"type": "adagrad"}], ids=str)
def test_preflight_counts_another_optimizer_on_the_host(optimizer: dict[str, Any], stage: int) -> None:
    training = {"micro_batch_size": 1, "sequence_length": 512, "optimizer": optimizer}
    report = preflight(plan_of(2, {}, stage, on_host=True, training=training), ranks=[0])
    assert report.agrees, report.text()


SAVED = {
    "tp2 dp2": (4, {"tp": 2}, 1),
    "tp4": (4, {"tp": 4}, 1),
    "cp2 dp2, ZeRO-2": (4, {"cp": 2}, 2),
    "tp2 dp2, ZeRO-0": (4, {"tp": 2}, 0),
    "dp2, ZeRO-3": (2, {}, 3),
    "one rank": (1, {}, 1),
}


def saved_plan(name: str, kind: str = "muon", left_out: str | None = None) -> Plan:
    world, parallelism, stage = SAVED[name]
    own = {"muon": {"eps": 1e-3, "ns_dtype": "fp32"}, "sgd": {"momentum": 0.9}, "adamw": {"eps": 1e-3}}
    groups = {} if left_out is None else {"no_weight_decay": left_out}
    training = {"optimizer": {"type": kind, "lr": 0.01, **own[kind], **groups}}
    return make_plan(world, parallelism, training=training, extra={"zero": {"stage": stage}})


def go_on(plan: Plan, resume: Path | None, until: int, saves: dict[int, Path] | None = None) -> list[dict[str, Any]]:
    texts = {step: str(folder) for step, folder in (saves or {}).items()}
    found: list[dict[str, Any]] = run_ranks(plan.world_size, train, plan, resume and str(resume), until, texts)
    return found


@pytest.mark.parametrize(
    ("kind", "left_out"), [("muon", None), ("sgd", None), ("adamw", "biases_and_norms"), ("muon", "vectors")]
)
def test_a_run_goes_on_in_any_layout(kind: str, left_out: str | None, tmp_path: Path) -> None:
    plans = {name: saved_plan(name, kind, left_out) for name in SAVED}
    whole = go_on(plans["tp2 dp2"], None, 4, {2: tmp_path / "a"})
    same = go_on(plans["tp2 dp2"], tmp_path / "a", 4)
    for found, expected in zip(same, whole, strict=True):
        assert found["losses"] == expected["losses"][2:]
        assert all(torch.equal(found["parameters"][name], one) for name, one in expected["parameters"].items())
    for name in list(SAVED)[1:]:
        there = go_on(plans[name], tmp_path / "a", 3, {3: tmp_path / name})
        assert_goes_on(there[0], {key: whole[0][key][:3] for key in ("losses", "norms")}, 1, plans["one rank"])
        back = go_on(plans["tp2 dp2"], tmp_path / name, 4)
        assert_goes_on(back[0], whole[0], 1, plans["one rank"])


def rates(_rank: int, plan: Plan, folder: str) -> list[tuple[int, float]]:
    """Of each group of parameters the number of them, and its weight decay, after a resume."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load
    from parcompile.runtime.deepspeed_patches.optimizer_state import parameter_groups

    engine, optimizer, _, _ = initialize(plan=plan, model=initial_model(plan))
    load(engine, folder)
    sizes = map(len, parameter_groups(optimizer))
    return [(size, group["weight_decay"]) for size, group in zip(sizes, optimizer.param_groups, strict=True)]


def test_groups_of_weight_decay_are_those_of_the_plan_behind_a_resume_of_others(tmp_path: Path) -> None:
    plain, planned = (saved_plan("one rank", "adamw", one) for one in (None, "vectors"))
    for plan, folder in ((plain, "all"), (planned, "apart")):
        go_on(plan, None, 1, {1: tmp_path / folder})
    for folder in ("all", "apart"):
        assert run_ranks(1, rates, plain, str(tmp_path / folder))[0] == [(21, 0.1)]
        assert run_ranks(1, rates, planned, str(tmp_path / folder))[0] == [(16, 0.1), (5, 0.0)]
    convert(tmp_path / "all", planned, tmp_path / "converted")
    assert run_ranks(1, rates, planned, str(tmp_path / "converted"))[0] == [(16, 0.1), (5, 0.0)]
    export(tmp_path / "all", tmp_path / "hf")
    import_pretrained(tmp_path / "hf", planned, tmp_path / "start")
    assert run_ranks(1, rates, planned, str(tmp_path / "start"))[0] == [(16, 0.1), (5, 0.0)]
    assert [len(group.names) for group in SavedRun(read_note(tmp_path / "start")).groups] == [16, 5]


def partly_frozen(plan: Plan) -> torch.nn.Module:
    """The last stage trains nothing that weight decay leaves out."""
    model = initial_model(plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not re.search(r"layers\.1\..*norm|model\.norm", name)
    return model


def test_stages_have_other_groups_of_weight_decay() -> None:
    """Their norm is one sum over all groups, which every stage takes part in."""
    training = {"optimizer": {"lr": 0.01, "eps": 1e-3, "no_weight_decay": "vectors"}}
    plan = make_plan(2, {"pp": 2}, training=training)
    ranks = run_ranks(2, train_with_engine, plan, True, 3, 0.0, partly_frozen)

    def plain(seed: int | None) -> dict[str, Any]:
        return train_in_one_process(plan, masked=True, steps=3, built=partly_frozen, seed=seed)

    judge(compared(plan, ranks, plain))


@pytest.mark.parametrize(("kind", "axes"), [("adamw", {"tp": 2, "cp": 2}), ("muon", {"tp": 2}), ("muon", {"pp": 2})])
def test_weight_decay_rises_in_other_layouts_as_in_one_process(kind: str, axes: dict[str, int]) -> None:
    decay = {"start_weight_decay": 0.5, "weight_decay": 5.0, "weight_decay_style": "cosine"}
    settings = {"type": kind, "eps": 1e-3, **({"ns_dtype": "fp32"} if kind == "muon" else {}), **decay}
    plan = make_plan(4, axes, training={"micro_batch_size": 1, "train_steps": 4, "optimizer": settings})
    ranks = run_ranks(4, train_with_engine, plan, False, 4)
    judge(compared(plan, ranks, lambda seed: train_in_one_process(plan, steps=4, seed=seed)))


def test_a_checkpoint_holds_momentum_alone_of_matrices_and_converts_and_exports(tmp_path: Path) -> None:
    plan, target = saved_plan("tp2 dp2"), saved_plan("tp4")
    whole = go_on(plan, None, 4, {2: tmp_path / "a"})
    saved = SavedRun(read_note(tmp_path / "a"))
    matrix, table = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
    assert {kind for kind in saved.kinds if saved.whole(matrix, kind) is not None} == {"fp32", "momentum_buffer"}
    assert {kind for kind in saved.kinds if saved.whole(table, kind) is not None} == {"fp32", "exp_avg", "exp_avg_sq"}
    assert verify(tmp_path / "a") == []
    convert(tmp_path / "a", target, tmp_path / "converted")
    assert_goes_on(go_on(target, tmp_path / "converted", 4)[0], whole[0], 2, saved_plan("one rank"))
    export(tmp_path / "a", tmp_path / "hf")
    started = import_pretrained(tmp_path / "hf", target, tmp_path / "start")
    assert torch.equal(SavedRun(read_note(started)).whole(matrix, "fp32"), saved.whole(matrix, "fp32"))
    assert not SavedRun(read_note(started)).whole(matrix, "momentum_buffer").any()
    assert len(go_on(target, tmp_path / "start", 1)) == 4


def test_a_checkpoint_without_its_momentum_is_damaged(tmp_path: Path) -> None:
    plan = saved_plan("one rank")
    go_on(plan, None, 1, {1: tmp_path})
    file = next(tmp_path.glob("step-1/*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("momentum_buffer")
    shard = OptimizerShard(file, content)
    with pytest.raises(RunError, match="none of momentum_buffer"):
        shard.piece("model.layers.0.self_attn.q_proj.weight", "momentum_buffer")


def with_adagrad_of_a_script(_rank: int, plan: Plan) -> None:
    from parcompile.runtime import initialize

    model = initial_model(plan)
    initialize(plan=plan, model=model, optimizer=lambda given: torch.optim.Adagrad(given, lr=0.1), self_check=False)


def test_an_adagrad_that_deepspeed_would_replace_is_refused() -> None:
    with pytest.raises(RankError, match=r"DeepSpeed replaces a torch\.optim\.Adagrad by one whose"):
        run_ranks(2, with_adagrad_of_a_script, plan_of_cell(Cell("dp2", optimizer="sgd")))

"""Bare DeepSpeed configurations: recognised by their keys, and checked for what DeepSpeed silently accepts."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.kinds import DEEPSPEED
from parcompile.lint.advisories import advisories, records
from parcompile.lint.deepspeed import UsageOptions
from parcompile.lint.registry import FileRule, file_rules
from parcompile.pipeline import Checked, check_any

BASE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}

NOTHING = UsageOptions()
RULES = [rule for rule in file_rules() if rule.kind == DEEPSPEED]


def checked(tree: object, folder: Path, usage: UsageOptions = NOTHING) -> Checked:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(tree, indent=2), encoding="utf-8")
    return check_any(file, kind=DEEPSPEED, usage=usage)


def found(tree: object, folder: Path, usage: UsageOptions = NOTHING) -> list[tuple[str, str]]:
    return [(one.code, ".".join(map(str, one.path))) for one in checked(tree, folder, usage).diagnostics]


def test_a_deepspeed_config_is_recognised(tmp_path: Path) -> None:
    assert checked(BASE, tmp_path).kind == DEEPSPEED
    assert found(BASE, tmp_path) == []


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in BASE.items() if name != key}


@pytest.mark.parametrize(
    ("tree", "code", "path"),
    [
        ({**without("zero_optimization"), "zero_optimisation": {"stage": 1}}, "K001", "zero_optimisation"),
        ({**without("gradient_clipping"), "gradient_cliping": 1.0}, "K001", "gradient_cliping"),
        ({**BASE, "optimizer": {"type": "AdamWW"}}, "K004", "optimizer.type"),
        (
            {**BASE, "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
            "F005",
            "zero_optimization.offload_param",
        ),
        (without("gradient_clipping"), "A001", "gradient_clipping"),
        ({**BASE, "wall_clock_breakdown": 3.5}, "K003", "wall_clock_breakdown"),
    ],
    ids=[
        "typo-of-zero",
        "typo-of-clipping",
        "unknown-optimizer",
        "offload-at-stage-1",
        "clipping-default",
        "switch-with-a-fraction",
    ],
)
def test_silent_failures_are_caught_once(tree: object, code: str, path: str, tmp_path: Path) -> None:
    assert found(tree, tmp_path) == [(code, path)]


def test_auto_is_left_to_transformers_where_it_fills_it(tmp_path: Path) -> None:
    tree = {**BASE, "train_batch_size": "auto", "zero_optimization": {"stage": 2, "round_robin_gradients": "auto"}}
    assert ("F002", "train_batch_size") in found(tree, tmp_path)
    assert ("F001", "zero_optimization.round_robin_gradients") in found(tree, tmp_path)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_wrong_example_breaks_the_rule_and_right_one_nothing(rule: FileRule, tmp_path: Path) -> None:
    wrong, right = ({code for code, _ in found(dict(tree), tmp_path, rule.usage)} for tree in (rule.wrong, rule.right))
    assert rule.code in wrong
    assert rule.code not in right
    # What an old version computes wrongly is often several things.
    allowed = {one.code for one in RULES if one.code[0] == "A"} if rule.code[0] == "A" else {rule.code}
    assert wrong <= allowed
    assert right <= allowed


def test_advisories_are_records_with_versions_sources_and_predicates() -> None:
    assert len(records()) >= 120
    assert len({advisory.tool for advisory in advisories()}) >= 8
    assert len({record["id"] for record in records()}) == len(records())
    for record, advisory in zip(records(), advisories(), strict=True):
        assert record["id"] == advisory.id
        assert {package["package"]["ecosystem"] for package in record["affected"]} <= {"PyPI", "GitHub"}
        assert advisory.sources, advisory.id
        assert all(source.startswith("https://github.com/") for source in advisory.sources), advisory.id
        for first, fixed in advisory.affected:
            assert first is None or advisory.affects(first), advisory.id
            assert fixed is None or not advisory.affects(fixed), advisory.id
        assert advisory.severity == "info" or not advisory.matches({}), advisory.id  # nobody is warned of an empty file
        if advisory.executed is not None:
            assert advisory.cell is not None
            assert [advisory.affects(version) for version in advisory.executed] in ([True, False], [True]), advisory.id
            unpublished = advisory.tool == "megatron"  # releases behind 0.16.1 are not on PyPI
            open_ = all(fixed is None for _, fixed in advisory.affected)
            assert len(advisory.executed) == 2 or open_ or unpublished, advisory.id


def test_executed_advisories_are_those_that_were_measured() -> None:
    """A record says that its cell ran where the results of the command have it: red, then equal."""
    root = Path(__file__).parents[2]
    pairs, results = (
        json.loads((root / ".ci" / "pairs" / f"{name}.json").read_text("utf-8")) for name in ("pairs", "results")
    )
    executed = {entry.id: entry for entry in advisories() if entry.executed is not None}
    assert set(executed) == set(results) == set(pairs)
    assert len(results) >= 40
    assert len([name for name, measured in results.items() if len(measured) == 2]) >= 30
    page = (root / "docs" / "historical_pairs.md").read_text("utf-8")
    for name, measured in results.items():
        assert tuple(one["version"] for one in measured) == executed[name].executed
        assert [one["verdict"] for one in measured] == ["red", "equal"][: len(measured)], name
        for packages, version in zip(pairs[name], executed[name].executed or (), strict=True):
            package, _, installed = packages[0].partition("==")
            assert package.removesuffix("-core") == executed[name].tool
            assert installed == version
        script = (executed[name].cell or {}).get("script")
        assert script is None or (root / ".ci" / "pairs" / script.split()[0]).exists(), name
        assert f"| {name} | {executed[name].tool} | {executed[name].title} |" in page, name


def test_an_advisory_without_a_rule_of_its_own_is_named_for_its_versions_alone(tmp_path: Path) -> None:
    tree = {**BASE, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "bf16": {"enabled": False}}
    for clipping, version, named in ((None, "0.19.8", True), (0.0, "0.19.8", False), (None, "0.19.2", False)):
        given = {name: value for name, value in tree.items() if name != "gradient_clipping"}
        given |= {} if clipping is None else {"gradient_clipping": clipping}
        messages = [one.message for one in checked(given, tmp_path, UsageOptions(version=version)).diagnostics]
        assert any(message.startswith("A046: ") for message in messages) is named, messages


def test_every_fix_of_a_file_rule_works(tmp_path: Path) -> None:
    fixed = {
        rule.code for rule in RULES if any(one.fixes for one in checked(rule.wrong, tmp_path, rule.usage).diagnostics)
    }
    assert fixed >= {"A001", "F003", "F004", "F005", "F007", "F008", "F009", "F010"}


def test_emitted_configurations_pass(tmp_path: Path) -> None:
    from parcompile.backends.deepspeed.write import ds_config
    from parcompile.pipeline import compile_file

    spec = Path(__file__).parents[1] / "specs" / "positive" / "W001-tp-2-of-8.json"
    plan, _ = compile_file(spec)
    assert plan is not None
    assert [one for one in found(ds_config(plan), tmp_path) if one[0] != "F003"] == []


TEMPLATES = Path(str(distribution("deepspeed").locate_file("deepspeed/autotuning/config_templates")))


@pytest.mark.parametrize("stage", range(4))
def test_templates_of_the_autotuner_need_no_batch(stage: int, tmp_path: Path) -> None:
    template = TEMPLATES / f"template_zero{stage}.json"
    assert {one.code for one in check_any(template).diagnostics} <= {"F005"}
    copied = tmp_path / template.name  # a file of that name elsewhere is nobody's template
    copied.write_bytes(template.read_bytes())
    assert {"K002", "A001"} <= {one.code for one in check_any(copied).diagnostics}


def test_the_trainer_fills_what_accelerate_launch_hands_it(tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text("deepspeed_config:\n  deepspeed_config_file: ds_config.json\n", "utf-8")
    betas = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    assert found({**BASE, "optimizer": betas}, tmp_path) == [("F002", "optimizer.params.lr")]
    assert ("F001", "optimizer.params.betas") in found(
        {**BASE, "optimizer": betas}, tmp_path, UsageOptions(used_with="accelerate")
    )


@pytest.mark.parametrize(
    ("tree", "path", "said"),
    [
        ({"optimizer": {"type": "torch.optim.AdamW", "params": {}}}, "optimizer.type", 'write "AdamW"'),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", "Conv1d"]}},
            "torch_autocast.lower_precision_safe_modules.1",
            'write "torch.nn.Conv1d", say',
        ),
    ],
)
def test_classes_are_named_as_deepspeed_looks_them_up(tree: Any, path: str, said: str, tmp_path: Path) -> None:
    (one,) = checked({**BASE, **tree}, tmp_path).diagnostics
    assert (one.code, ".".join(map(str, one.path)), one.help) == ("K004", path, said)

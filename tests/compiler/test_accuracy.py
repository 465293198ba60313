"""Estimates against measurements of models that were not fitted, and against published points."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from accuracy import (
    FLOORS,
    GOALS,
    MEGATRON,
    NANOTRON,
    QUIET_NODES,
    SPLITS,
    judge_all,
    page,
    read,
)
from published import gpt_step_flops
from published_runs import gpt_shape

from parcompile.cost.calibration import Judgement
from parcompile.cost.coefficients import MEMORY, TIME, coefficient_sets
from parcompile.cost.measurements import Measurement
from parcompile.cost.step import timing
from parcompile.cost.workload import Workload

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(os.environ.get("PARCOMPILE_MEASUREMENTS", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="module")
def runs() -> Mapping[str, Sequence[Measurement]]:
    missing = [name for name in (NANOTRON, MEGATRON) if not (FOLDER / name).is_file()]
    if missing:
        pytest.skip(f"accuracy was NOT checked: {FOLDER} lacks {', '.join(missing)} (set PARCOMPILE_MEASUREMENTS)")
    return read(FOLDER)


@pytest.fixture(scope="module")
def judged(runs: Mapping[str, Sequence[Measurement]]) -> dict[str, Judgement]:
    return judge_all(runs, coefficient_sets())


@pytest.mark.parametrize("title", [split.title for split in SPLITS])
def test_errors_on_the_other_model_stay_below_what_was_reached(judged: dict[str, Judgement], title: str) -> None:
    found, floor = judged[title], FLOORS[title]
    assert found.time_error <= floor["time"]
    assert found.time_coverage >= floor["time coverage"]
    if "memory" in floor:
        assert found.memory_error <= floor["memory"]
        assert found.memory_coverage >= floor["memory coverage"]
        assert found.fits_share >= floor["fits"]


def test_the_choice_for_a_larger_model_loses_little_of_the_best_measured_throughput(
    judged: dict[str, Judgement],
) -> None:
    found = judged["1B -> 3B"].regret
    assert len(found) == 7
    assert all(value <= GOALS["regret"] for (_, nodes), value in found.items() if nodes <= QUIET_NODES)


def test_no_split_is_judged_on_what_it_was_fitted_to(runs: Mapping[str, Sequence[Measurement]]) -> None:
    for split in SPLITS:
        stored = coefficient_sets()[split.name]
        assert stored.provenance == f"{split.file}, {split.fitted}"
        assert split.fitted != split.judged
        assert stored.time is not None
        assert stored.time.rows == sum(
            one.step_seconds is not None for one in runs[split.file] if one.model == split.fitted
        )


def test_the_page_shows_these_figures(judged: dict[str, Judgement]) -> None:
    written = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert written == page(judged), "run python .ci/pages/accuracy.py FOLDER --page docs/accuracy.md"


def test_every_stored_coefficient_is_within_its_physical_bounds() -> None:
    for found in coefficient_sets().values():
        for fit, table in ((found.memory, MEMORY), (found.time, TIME)):
            if fit is None:
                continue
            assert set(fit.values) == set(table)
            for name, value in fit.values.items():
                assert table[name].low - 1e-9 <= value <= table[name].high + 1e-9, (found.name, name)


TABLE_1 = [
    # layers, hidden, heads, tp, pp, GPUs, batch, TFLOP/s of a GPU: arXiv 2104.04473, table 1
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (30, 3072, 32, 2, 1, 64, 512, 138),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
]


def megatron(layers: int, hidden: int, heads: int, tp: int, pp: int, gpus: int, batch: int, **more: object) -> Workload:
    dp = gpus // (tp * pp)
    settings: dict[str, object] = {"recompute": "full", "micro_batch": 1, **more}
    return Workload(
        shape=gpt_shape(layers, hidden, heads),
        nodes=max(1, gpus // 8),
        gpus_per_node=8,
        accelerator="a100-80gb",
        sequence_length=2048,
        micro_batches=batch // dp,
        tp=tp,
        dp=dp,
        pp=pp,
        zero_stage=0,
        framework="megatron-2021",
        **settings,  # type: ignore[arg-type]
    )


def test_rates_of_megatron_up_to_a_trillion_parameters_are_near_the_published_ones() -> None:
    errors = []
    for layers, hidden, heads, tp, pp, gpus, batch, published in TABLE_1:
        work = megatron(layers, hidden, heads, tp, pp, gpus, batch)
        flops = gpt_step_flops(b=batch, s=2048, layers=layers, h=hidden, v=51200, recompute=True)
        errors.append(abs(flops / timing(work).step.seconds / gpus / 1e12 / published - 1))
    assert max(errors) <= 0.14
    assert sum(errors) / len(errors) <= 0.075


@pytest.mark.parametrize(
    ("work", "gpus", "batch", "virtual", "full", "selective", "tolerance"),
    [
        ((48, 6144, 64, 8, 1), 8, 4, 1, 1.42, 1.10, 0.05),
        ((96, 12288, 96, 8, 8), 64, 64, 3, 18.13, 13.75, 0.12),
        ((105, 20480, 128, 8, 35), 280, 280, 3, 49.05, 37.83, 0.25),
        ((128, 25600, 160, 8, 64), 512, 512, 1, 94.42, 71.49, 0.18),
    ],
)
def test_steps_of_korthikanti_are_near_the_published_ones_and_save_as_much(
    work: tuple[int, int, int, int, int],
    gpus: int,
    batch: int,
    virtual: int,
    full: float,
    selective: float,
    tolerance: float,
) -> None:
    """arXiv 2205.05198, table 5. Its kernels of 2022 are faster than those of 2021 that were fitted to."""
    micro = {"micro_batch": 4} if gpus == 8 else {}
    slow = timing(megatron(*work, gpus, batch // micro.get("micro_batch", 1), virtual_stages=virtual, **micro))
    fast = timing(
        megatron(
            *work,
            gpus,
            batch // micro.get("micro_batch", 1),
            virtual_stages=virtual,
            recompute="selective",
            sequence_parallel=True,
            **micro,
        )
    )
    assert slow.step.seconds == pytest.approx(full, rel=tolerance)
    assert fast.step.seconds / slow.step.seconds == pytest.approx(selective / full, abs=0.04)

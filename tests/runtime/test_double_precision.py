"""Contract: in fp64 a layout and one process agree to 1e-12 in gradient norms and parameters.

What 1e-5 in fp32 only suggests: a sum in another order, and nothing else, is different. transformers and DeepSpeed's
optimizers go to fp32 by name, so that the models train here without an engine, and with casts to fp32 left out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import ROUNDING, judge
from configuration_runs import train_all
from family_runs import family_plan, train_plain
from ranks import run_ranks
from torch import Tensor
from torch.overrides import TorchFunctionMode
from training_runs import compared

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

FAMILIES = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss")
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}, FAMILIES),
    "cp 2": (2, {"cp": 2}, FAMILIES),
    "pp 2": (2, {"pp": 2}, FAMILIES),
    "dp 2 x ep 2": (2, {"dp": 2, "ep": 2}, ("qwen3_moe", "deepseek_v3", "gpt_oss")),
}


class KeepsDoubles(TorchFunctionMode):
    """Leaves a tensor of fp64 as it is where code asks for fp32 by name, as norms, softmax and losses do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.dtype == torch.float64:
            if func is Tensor.float:
                return given
            if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):  # torch has none for fp64
                offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
                return torch.ops.transformers.grouped_mm_fallback(given, args[1], offs)
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def train_in_doubles(rank: int, plans: list[Plan]) -> list[dict[str, Any]]:
    with KeepsDoubles():
        return train_all(rank, plans, torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_process_in_fp64(layout: str) -> None:
    size, parallelism, families = LAYOUTS[layout]
    plans = [family_plan(family, size, parallelism) for family in families]
    ranks = run_ranks(size, train_in_doubles, plans, timeout=240)
    for place, plan in enumerate(plans):
        here = [rank[place] for rank in ranks]
        assert "error" not in here[0], here[0]["error"]
        alone = family_plan(families[place], 1, {})
        with KeepsDoubles():
            found = compared(plan, here, lambda _, alone=alone: train_plain(alone, 3, torch.float64))
        judge([one._replace(limit=_limit(one.what)) for one in found], families[place])


def _limit(what: str) -> float:
    """Losses travel between ranks in fp32."""
    return 3e-7 if what.startswith("losses") else ROUNDING[torch.float64]


def test_parameters_are_compared_in_fp64() -> None:
    with KeepsDoubles():
        trained = train_plain(family_plan("llama", 1, {}), 1, torch.float64)
    assert {one.dtype for one in trained["parameters"].values()} == {torch.float64}
    assert ROUNDING[torch.float64] == 1e-12

"""The files of a checkpoint as DeepSpeed's ZeRO and bf16 optimizers write them: their names, and what is in a shard.

There is one file of weights for each model-parallel rank, and one of optimizer states for each model-parallel rank and
each shard (0.19.8, `_get_ckpt_name` and `_get_zero_ckpt_name` of runtime/engine.py). Where experts are dealt over ep,
there is one more for the weights of each further ep rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from parcompile.runtime.deepspeed_patches.norm import EXPERT_KEYS
from parcompile.runtime.errors import RunError

MASTER = "fp32"
"""The kind of tensor that holds the weights in full precision."""

SHARD_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
"""Its groups are the shard and the model-parallel rank."""


def weights_file(mp_rank: int) -> str:
    """The file of weights of a model-parallel rank."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def experts_file(ep_rank: int, mp_rank: int) -> str:
    """The file of the experts of an ep rank behind the first, whose experts are in the file of weights. It is ours."""
    return f"ep_rank_{ep_rank:02d}_{weights_file(mp_rank)}"


def shard_file(shard: int, mp_rank: int, *, bf16: bool) -> str:
    """The file of optimizer states of a model-parallel rank's shard."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{shard}_mp_rank_{mp_rank:02d}_optim_states.pt"


class OptimizerShard:
    """One rank's optimizer states: a flat run of elements for each group of parameters."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        """`content`: of the file."""
        self._file = file
        states = content["optimizer_state_dict"]
        base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
        masters = states.get("single_partition_of_fp32_groups", states.get("fp32_flat_groups_partition"))
        assert masters is not None
        self.loss_scaler = states.get("loss_scaler")
        self.settings: list[dict[str, Any]] = base["param_groups"]
        self._flat: list[dict[str, Tensor]] = []
        self.scalars: list[dict[str, Any]] = []
        paddings = states.get("group_paddings") or [0] * len(masters)
        for group, (master, padding) in enumerate(zip(masters, paddings, strict=True)):
            state = base["state"].get(group, {})
            flat = {kind: value for kind, value in state.items() if _is_flat(value, master, padding)}
            self._flat.append({MASTER: master, **flat})
            self.scalars.append({kind: value for kind, value in state.items() if kind not in flat})
        self._places = {
            name: (group, int(place.start), int(place.numel))
            for group, places in enumerate(states["param_slice_mappings"])
            for name, place in places.items()
        }

    @property
    def moments(self) -> list[str]:
        """The kinds of tensors that the optimizer keeps beside the weights."""
        return [kind for kind in self._flat[0] if kind != MASTER]

    def names(self, group: int) -> list[str]:
        """The parameters of a group that lie here, in order."""
        return [name for name, (number, _, _) in self._places.items() if number == group]

    def piece(self, name: str, kind: str) -> Tensor | None:
        """This shard's part of a tp rank's parameter, flat.

        Raises:
            RunError: the file does not hold it.
        """
        if name not in self._places:
            return None
        group, start, numel = self._places[name]
        flat = self._flat[group].get(kind)
        if flat is None or flat.numel() < start + numel:
            held = "none" if flat is None else f"{flat.numel()}"
            raise RunError(
                f"{self._file} has {name} at elements {start} to {start + numel} of group {group}, and {held} of {kind}"
            )
        return flat[start : start + numel]


def without_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters, without what names these and says that they are experts."""
    return {key: value for key, value in settings.items() if key not in ("params", *EXPERT_KEYS)}


def _is_flat(value: object, master: Tensor, padding: int) -> bool:
    """Whether a state has an element for each of the partition.

    ZeRO saves master weights without the padding, and states with it (0.19.8, `state_dict` of
    runtime/zero/stage_1_and_2.py); the bf16 optimizer saves both with it.
    """
    whole = (master.numel(),), (master.numel() + padding,)
    return isinstance(value, Tensor) and tuple(value.shape) in whole

"""distributed_config.json: the arguments of transformers' `DistributedConfig`, for `from_pretrained`.

Source: transformers 5.23, `distributed/configuration_utils.py`; its meshes are (pp, dp_replicate, fsdp, tp) and
(pp, dp_replicate, efsdp, ep), outermost axis first.
"""

from __future__ import annotations

from typing import Any

from parcompile.backends.artefacts import Loss, order_loss
from parcompile.layout.sequence import CpLayout
from parcompile.plan import Plan

VERSION = "5.23.0"
"""Version of transformers whose configuration class was read."""
_ORDERS = (("tp", "cp", "dp", "pp"),)


def files(plan: Plan) -> dict[str, Any]:
    """distributed_config.json: `DistributedConfig.from_dict` takes it."""
    parallelism = plan.spec.parallelism
    shards = plan.spec.zero_stage == 3
    return {
        "distributed_config.json": {
            "tp_size": parallelism.tp,
            "pp_size": parallelism.pp,
            "ep_size": parallelism.ep,
            "fsdp_size": parallelism.dp,
            "dp_replicate_size": 1,
            **({"ep_implementation": "all_to_all"} if parallelism.ep > 1 else {}),
            **({} if shards else {"fsdp_mixed_precision": False}),
        }
    }


def losses(plan: Plan) -> list[Loss]:
    """What transformers does not do as the plan says."""
    spec, parallelism = plan.spec, plan.spec.parallelism
    tp, dp, ep, pp = parallelism.tp, parallelism.dp, parallelism.ep, parallelism.pp
    found: list[Loss] = []
    if parallelism.cp > 1:
        found.append(Loss(f"cp {parallelism.cp}", "DistributedConfig has no cp", "compile with cp 1", fatal=True))
    if pp > 1 and dp > 1:
        why = "transformers 5.23 refuses FSDP together with pipeline parallelism"
        found.append(Loss(f"pp {pp} with dp {dp}", why, "compile with pp 1, or with dp 1", fatal=True))
    if ep > 1 and (ep % tp or (dp * tp) % ep):
        found.append(
            Loss(
                f"ep {ep}",
                f"ep has to be a multiple of tp {tp} and divide dp {dp} · tp {tp} = {dp * tp}",
                "compile with such an ep",
                fatal=True,
            )
        )
    found += order_loss(parallelism, "transformers", _ORDERS)
    if parallelism.sequence_parallel:
        found.append(Loss("sequence_parallel", "transformers reserves the key and does nothing with it", "none"))
    if spec.zero_stage in (0, 1, 2) and dp > 1:
        found.append(
            Loss(
                f"zero.stage {spec.zero_stage}",
                "FSDP2 shards weights as well, which is stage 3",
                "less memory, more communication; the numbers of a step are the same up to the order of sums",
            )
        )
    if parallelism.cp_layout is not CpLayout.ZIGZAG and parallelism.cp > 1:
        found.append(Loss(f"cp_layout {parallelism.cp_layout.value}", "there is no cp", "none"))
    found.append(Loss("batch, optimizer, precision and recomputation", "they are the script's", "see plan.json"))
    return found

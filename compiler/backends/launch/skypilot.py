"""launch/skypilot.yaml: a SkyPilot task, with torchrun on every node.

Source: SkyPilot's task format (docs/source/reference/yaml-spec.rst): `resources`, `num_nodes`, `envs`, `setup`, `run`,
and the variables SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS and SKYPILOT_NUM_NODES of a run.
"""

from __future__ import annotations

from typing import Any

import yaml

from parcompile.backends.artefacts import Loss, header, slug
from parcompile.backends.environment import gpu_resource, variables
from parcompile.plan import Plan

_NAMES = {
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-sxm": "H100",
    "h100-pcie": "H100",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
    "mi300x": "MI300X",
    "l40s": "L40S",
    "a10": "A10G",
    "rtx-a6000": "RTXA6000",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
}
_RUN = """\
set -euo pipefail
if [ "$SKYPILOT_NUM_NODES" -ne {nodes} ]; then
  echo "skypilot.yaml: the plan is for {nodes} nodes, the task has $SKYPILOT_NUM_NODES" >&2
  exit 2
fi
exec torchrun --nnodes {nodes} --node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node {ranks} \\
  --master-addr "$(head -n1 <<< "$SKYPILOT_NODE_IPS")" --master-port "${{MASTER_PORT:-29500}}" \\
  train.py --plan plan
"""


class _Text(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Text.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def files(plan: Plan) -> dict[str, str]:
    """launch/skypilot.yaml, to be launched from the folder that holds train.py and the plan as `plan`."""
    cluster = plan.spec.cluster
    resources: dict[str, Any] = {}
    if gpu_resource(plan):
        resources = {"accelerators": f"{_accelerator(plan)}:{cluster.gpus_per_node}"}
    tree: dict[str, Any] = {
        "name": slug(plan.spec.name),
        **({"resources": resources} if resources else {}),
        "num_nodes": cluster.nodes,
        "workdir": ".",
        "envs": {**{one.name: one.value for one in variables(plan)}, "PARCOMPILE": "parcompile[runtime,hf]"},
        "setup": 'pip install "$PARCOMPILE"\n',
        "run": _RUN.format(nodes=cluster.nodes, ranks=cluster.gpus_per_node),
    }
    lines = header(plan, "sky launch plan/launch/skypilot.yaml, from the folder with train.py and the plan as plan/.")
    return {
        "launch/skypilot.yaml": "\n".join(lines) + "\n" + yaml.dump(tree, Dumper=_Text, sort_keys=False),
    }


def losses(plan: Plan) -> list[Loss]:
    """What SkyPilot has to be told besides."""
    found = [Loss("the package", "parcompile is on no package index", "set PARCOMPILE to the address of a clone")]
    name = plan.spec.cluster.accelerator
    if gpu_resource(plan) and name not in _NAMES:
        found.append(
            Loss(f"accelerator {name}", "parcompile does not know SkyPilot's name for it", "write it into resources")
        )
    return found


def _accelerator(plan: Plan) -> str:
    name = plan.spec.cluster.accelerator
    return _NAMES.get(name, name.upper())

"""Launch files: the same training script under DeepSpeed's launcher, torchrun and Slurm.

Every script takes the training script and its arguments: `launch/torchrun.sh train.py --plan .`. Nothing of the spec
but numbers and the comment with its name reaches a shell.

Kubeflow manifests (PyTorchJob of operator v1, TrainJobs of trainer v2), and a SkyPilot task with torchrun.

torch-distributed starts torchrun. deepspeed-distributed starts the command on its first node, beside a list of hosts
for mpirun (Kubeflow Trainer at 2026-08-21, `manifests/base/runtimes`, `pkg/runtime/framework/plugins/mpi`).

The operator tells torchrun the nodes and their addresses through PET_* variables. The image is called `trainer`, for
kustomize or sed to replace; a PyTorchJob finds plan.json in a ConfigMap.

Source: SkyPilot's task format (docs/source/reference/yaml-spec.rst): `resources`, `num_nodes`, `envs`, `setup`, `run`,
and the variables SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS and SKYPILOT_NUM_NODES of a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from parcompile.backends.artefacts import Loss, file_tree, gpu_resource, header, slug, variables, yaml_file
from parcompile.plan import Plan


def kubernetes_files(plan: Plan) -> dict[str, str]:
    """launch/pytorchjob.yaml, launch/trainjob.yaml and launch/trainjob-deepspeed.yaml."""
    name = slug(plan.spec.name)
    about = {
        "pytorchjob": f"kubectl create configmap {name}-plan --from-file=plan.json, then apply this with your image.",
        "trainjob": "Needs Kubeflow Trainer's runtime torch-distributed, and plan.json in the image at /plan.",
        "trainjob-deepspeed": "Needs Kubeflow Trainer's runtime deepspeed-distributed (OpenMPI), and plan.json in the "
        "image at /plan.",
    }
    facts = {
        "environment": lambda _spec: [{"name": one.name, "value": one.value} for one in variables(plan)],
        "resources": lambda _spec: _resources(plan),
        "mpi": lambda _spec: _mpi(plan),
    }
    return {f"launch/{kind}.yaml": yaml_file(plan, about[kind], file_tree(kind, plan, facts)) for kind in about}


def _resources(plan: Plan) -> dict[str, Any]:
    resource = gpu_resource(plan)
    return {"limits": {resource: plan.spec.cluster.gpus_per_node}} if resource else {}


def _mpi(plan: Plan) -> str:
    """Starts the ranks by mpirun, on the hosts that the operator lists, and tells each its place as torchrun would."""
    ranks = plan.spec.cluster.gpus_per_node
    handed = " ".join(f"-x {name}" for name in ("MASTER_ADDR", "MASTER_PORT", *(one.name for one in variables(plan))))
    return (
        "set -euo pipefail\n"
        'export MASTER_ADDR="$(head -n1 "$OMPI_MCA_orte_default_hostfile" | cut -d" " -f1)"\n'
        'export MASTER_PORT="${MASTER_PORT:-29500}"\n'
        f"exec mpirun -np {plan.world_size} --map-by ppr:{ranks}:node {handed} bash -c '\n"
        '  export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"\n'
        '  export LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK"\n'
        "  exec python train.py --plan /plan'\n"
    )


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


def skypilot_files(plan: Plan) -> dict[str, str]:
    """launch/skypilot.yaml, to be launched from the folder that holds train.py and the plan as `plan`."""
    cluster = plan.spec.cluster
    name = _NAMES.get(cluster.accelerator, cluster.accelerator.upper())
    facts = {
        "accelerators": lambda _spec: f"{name}:{cluster.gpus_per_node}" if gpu_resource(plan) else None,
        "variables": lambda _spec: {one.name: one.value for one in variables(plan)},
        "run": lambda _spec: _RUN.format(nodes=cluster.nodes, ranks=cluster.gpus_per_node),
    }
    about = "sky launch plan/launch/skypilot.yaml, from the folder with train.py and the plan as plan/."
    return {"launch/skypilot.yaml": yaml_file(plan, about, file_tree("skypilot", plan, facts), _Text)}


def skypilot_losses(plan: Plan) -> Iterator[Loss]:
    """What SkyPilot has to be told besides."""
    yield Loss("the package", "parcompile is on no package index", "set PARCOMPILE to the address of a clone")
    name = plan.spec.cluster.accelerator
    if gpu_resource(plan) and name not in _NAMES:
        yield Loss(f"accelerator {name}", "parcompile does not know SkyPilot's name for it", "write it into resources")


HOSTFILE_NODES = 1024
"""Up to this number of nodes a hostfile is written; its names are to be replaced by real ones."""

_PORT = 'master_port="${MASTER_PORT:-29500}"'


def hostfile(plan: Plan) -> dict[str, str]:
    """launch/hostfile: DeepSpeed's list of nodes, in the order of the plan's ranks."""
    cluster = plan.spec.cluster
    if cluster.nodes > HOSTFILE_NODES:
        return {}
    names = ["localhost"] if cluster.nodes == 1 else [f"node-{index}" for index in range(cluster.nodes)]
    lines = header(plan, "Write your host names: the first line has ranks 0 and following.")
    lines += [f"{name} slots={cluster.gpus_per_node}" for name in names]
    return {"launch/hostfile": "\n".join(lines) + "\n"}


def deepspeed_script(plan: Plan) -> dict[str, str]:
    """launch/deepspeed.sh, its hostfile, and the environment that it hands to other nodes."""
    cluster = plan.spec.cluster
    lines = _start(plan, "Starts a script under DeepSpeed's launcher.", "deepspeed.sh")
    options = f'--num_gpus {cluster.gpus_per_node} --master_port "$master_port" --no_local_rank'
    found: dict[str, str] = {}
    if cluster.nodes == 1:
        lines += [_PORT, *_signalled(f'deepspeed {options} "$@"')]
    else:
        # The launcher hands no other variables to remote nodes than those of this file.
        found["launch/deepspeed_env"] = "".join(f"{one.name}={one.value}\n" for one in variables(plan))
        lines += [
            'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
            'export DS_ENV_FILE="$here/deepspeed_env"',
            'hostfile="${HOSTFILE:-$here/hostfile}"',
            'if [ ! -f "$hostfile" ]; then',
            f'  echo "deepspeed.sh: there is no $hostfile: one line per node, NAME slots={cluster.gpus_per_node}" >&2',
            "  exit 2",
            "fi",
            _PORT,
            f'exec deepspeed --hostfile "$hostfile" --num_nodes {cluster.nodes} {options} "$@"',
        ]
    return {**hostfile(plan), **found, "launch/deepspeed.sh": "\n".join(lines) + "\n"}


def _signalled(command: str) -> list[str]:
    """A command whose processes all get the signals that the script gets, and have ten minutes to end before it.

    On one node DeepSpeed's runner handles no signal: SIGTERM ends it alone, and its launcher and ranks go on.
    """
    return [
        "# signals go to every process of the launcher, which DeepSpeed's runner would leave running",
        "set -m",
        f"{command} &",
        "job=$! signalled=",
        *(f"trap 'signalled=1; kill -s {one} -- \"-$job\"' {one}" for one in ("HUP", "INT", "TERM")),
        "code=0",
        'wait "$job" || code=$?',
        "for ((waited = 0; waited < 3000; waited++)); do",
        '  [ -n "$signalled" ] && kill -0 -- "-$job" 2>/dev/null && sleep 0.2 || break',
        "done",
        'exit "$code"',
    ]


def torchrun_script(plan: Plan) -> dict[str, str]:
    """launch/torchrun.sh: once on every node."""
    cluster = plan.spec.cluster
    lines = _start(plan, "Starts a script under torchrun; run it once on every node.", "torchrun.sh")
    lines.append(_PORT)
    if cluster.nodes == 1:
        where = '--nnodes 1 --master-addr 127.0.0.1 --master-port "$master_port"'
    else:
        lines += [
            f': "${{NODE_RANK:?is not set: the index of this node, 0 to {cluster.nodes - 1}}}"',
            ': "${MASTER_ADDR:?is not set: the address of node 0}"',
        ]
        where = (
            f'--nnodes {cluster.nodes} --node-rank "$NODE_RANK" '
            '--master-addr "$MASTER_ADDR" --master-port "$master_port"'
        )
    lines.append(f'exec torchrun {where} --nproc-per-node {cluster.gpus_per_node} "$@"')
    return {"launch/torchrun.sh": "\n".join(lines) + "\n"}


def slurm_script(plan: Plan) -> dict[str, str]:
    """launch/slurm.sbatch: one torchrun on every node of an allocation."""
    cluster = plan.spec.cluster
    options = [
        f"--job-name={slug(plan.spec.name)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if gpu_resource(plan) else []),
        "--exclusive",
        "--output=%x-%j.out",
    ]
    start, *rest = _start(
        plan, "sbatch launch/slurm.sbatch SCRIPT [ARGUMENTS]; add your account and time.", "slurm.sbatch"
    )
    lines = [start, *(f"#SBATCH {option}" for option in options), *rest]
    lines += [
        # Ranks are numbered node by node, as the plan's are.
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'if [ "${{#hosts[@]}}" -ne {cluster.nodes} ]; then',
        f'  echo "slurm.sbatch: the plan is for {cluster.nodes} nodes, the allocation has ${{#hosts[@]}}" >&2',
        "  exit 2",
        "fi",
        'export MASTER_ADDR="${hosts[0]}"',
        'export MASTER_PORT="${MASTER_PORT:-29500}"',
        "srun --kill-on-bad-exit=1 --distribution=block bash -c '",
        f'  exec torchrun --nnodes {cluster.nodes} --node-rank "$SLURM_NODEID" \\',
        f'    --nproc-per-node {cluster.gpus_per_node} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"',
        '\' torchrun "$@"',
    ]
    return {"launch/slurm.sbatch": "\n".join(lines) + "\n"}


def _start(plan: Plan, about: str, name: str) -> list[str]:
    """What all scripts begin with: identity, strict mode, usage, environment."""
    lines = [
        "#!/usr/bin/env bash",
        *header(plan, about),
        "set -euo pipefail",
        'if [ "$#" -eq 0 ]; then',
        f'  echo "usage: {name} SCRIPT [ARGUMENTS]" >&2',
        "  exit 2",
        "fi",
    ]
    for one in variables(plan):
        lines += [f"# {one.why}", f"export {one.name}={shlex.quote(one.value)}"]
    return lines

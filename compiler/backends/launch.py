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

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from parcompile.backends.artefacts import (
    Loss,
    file_tree,
    from_template,
    gpu_resource,
    header,
    slug,
    variables,
    yaml_file,
)
from parcompile.plan import Plan
from parcompile.user_files import shipped


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
    names = ("MASTER_ADDR", "MASTER_PORT", *(one.name for one in variables(plan)))
    first = 'head -n1 "$OMPI_MCA_orte_default_hostfile" | cut -d" " -f1'
    return from_template("mpirun.sh", plan, FIRST_HOST=first, HANDED_ON=" ".join(f"-x {name}" for name in names))


_NAMES: Mapping[str, str] = shipped("parcompile.backends", "skypilot.json")
"""SkyPilot's names of accelerators."""


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
        "run": lambda _spec: from_template("skypilot.sh", plan),
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


def hostfile(plan: Plan) -> dict[str, str]:
    """launch/hostfile: DeepSpeed's list of nodes, in the order of the plan's ranks."""
    cluster = plan.spec.cluster
    if cluster.nodes > HOSTFILE_NODES:
        return {}
    names = ["localhost"] if cluster.nodes == 1 else [f"node-{index}" for index in range(cluster.nodes)]
    about = header(plan, "Write your host names: the first line has ranks 0 and following.")
    return {"launch/hostfile": "\n".join([about, *(f"{name} slots={cluster.gpus_per_node}" for name in names)]) + "\n"}


def deepspeed_script(plan: Plan) -> dict[str, str]:
    """launch/deepspeed.sh, its hostfile, and the environment that it hands to other nodes.

    On one node DeepSpeed's runner handles no signal: SIGTERM would end it alone, and its launcher and ranks go on. So
    the script hands its signals to all of them, which have ten minutes to end before it.
    """
    found, body = hostfile(plan), "deepspeed.sh"
    if plan.spec.cluster.nodes > 1:
        # The launcher hands no other variables to remote nodes than those of this file.
        found["launch/deepspeed_env"] = "".join(f"{one.name}={one.value}\n" for one in variables(plan))
        body = "deepspeed_nodes.sh"
    script = _script("deepspeed.sh", plan, "Starts a script under DeepSpeed's launcher.", body)
    return {**found, "launch/deepspeed.sh": script}


def torchrun_script(plan: Plan) -> dict[str, str]:
    """launch/torchrun.sh: once on every node."""
    nodes, about = plan.spec.cluster.nodes, "Starts a script under torchrun; run it once on every node."
    body = "torchrun.sh" if nodes == 1 else "torchrun_nodes.sh"
    return {"launch/torchrun.sh": _script("torchrun.sh", plan, about, body, LAST=nodes - 1)}


def slurm_script(plan: Plan) -> dict[str, str]:
    """launch/slurm.sbatch: one torchrun on every node of an allocation, whose ranks are numbered as the plan's are."""
    cluster = plan.spec.cluster
    options = [
        f"--job-name={slug(plan.spec.name)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if gpu_resource(plan) else []),
        "--exclusive",
        "--output=%x-%j.out",
    ]
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    about = "sbatch launch/slurm.sbatch SCRIPT [ARGUMENTS]; add your account and time."
    return {"launch/slurm.sbatch": _script("slurm.sbatch", plan, about, "slurm.sbatch", directives)}


def _script(name: str, plan: Plan, about: str, body: str, directives: str = "", **more: object) -> str:
    """A script: identity, strict mode, usage and environment, and then the template `body`."""
    start = from_template("start.sh", plan, about, NAME=name, DIRECTIVES=directives)
    return start + from_template(body, plan, about, **more)

"""Kubeflow manifests: a PyTorchJob (training operator v1), and TrainJobs (trainer v2) on two of its runtimes.

torch-distributed starts torchrun. deepspeed-distributed starts the command on its first node, beside a list of hosts
for mpirun (Kubeflow Trainer at 2026-08-21, `manifests/base/runtimes`, `pkg/runtime/framework/plugins/mpi`).

The operator tells torchrun the nodes and their addresses through PET_* variables. The image is called `trainer`, for
kustomize or sed to replace; a PyTorchJob finds plan.json in a ConfigMap.
"""

from __future__ import annotations

from typing import Any

import yaml

from parcompile.backends.artefacts import header, slug
from parcompile.backends.environment import gpu_resource, variables
from parcompile.plan import Plan

IMAGE = "trainer"
_COMMAND = ["torchrun", "train.py", "--plan", "/plan"]


def files(plan: Plan) -> dict[str, str]:
    """launch/pytorchjob.yaml, launch/trainjob.yaml and launch/trainjob-deepspeed.yaml."""
    name = slug(plan.spec.name)
    about = {
        "pytorchjob": f"kubectl create configmap {name}-plan --from-file=plan.json, then apply this with your image.",
        "trainjob": "Needs Kubeflow Trainer's runtime torch-distributed, and plan.json in the image at /plan.",
        "trainjob-deepspeed": "Needs Kubeflow Trainer's runtime deepspeed-distributed (OpenMPI), and plan.json in the "
        "image at /plan.",
    }
    trees = {
        "pytorchjob": _pytorch_job(plan, name),
        "trainjob": _train_job(plan, name, "torch-distributed", list(_COMMAND)),
        "trainjob-deepspeed": _train_job(plan, name, "deepspeed-distributed", ["bash", "-c", _mpi(plan)]),
    }
    return {
        f"launch/{kind}.yaml": "\n".join(header(plan, about[kind])) + "\n" + yaml.safe_dump(tree, sort_keys=False)
        for kind, tree in trees.items()
    }


def _metadata(plan: Plan, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "annotations": {
            "parcompile/name": plan.spec.name,
            "parcompile/version": plan.compiler_version,
            "parcompile/spec-hash": plan.spec_hash,
            "parcompile/plan-hash": plan.plan_hash,
        },
    }


def _environment(plan: Plan) -> list[dict[str, str]]:
    return [{"name": one.name, "value": one.value} for one in variables(plan)]


def _resources(plan: Plan) -> dict[str, Any]:
    resource = gpu_resource(plan)
    return {"limits": {resource: plan.spec.cluster.gpus_per_node}} if resource else {}


def _pytorch_job(plan: Plan, name: str) -> dict[str, Any]:
    nodes = plan.spec.cluster.nodes

    def replicas(count: int) -> dict[str, Any]:
        container = {
            "name": "pytorch",
            "image": IMAGE,
            "command": list(_COMMAND),
            "env": _environment(plan),
            "resources": _resources(plan),
            "volumeMounts": [
                {"name": "plan", "mountPath": "/plan", "readOnly": True},
                {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 -- where NCCL looks for it
            ],
        }
        volumes = [
            {"name": "plan", "configMap": {"name": f"{name}-plan"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ]
        return {
            "replicas": count,
            "restartPolicy": "Never",
            "template": {"spec": {"containers": [container], "volumes": volumes}},
        }

    roles = {"Master": replicas(1)}
    if nodes > 1:
        roles["Worker"] = replicas(nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(plan, name),
        "spec": {"nprocPerNode": str(plan.spec.cluster.gpus_per_node), "pytorchReplicaSpecs": roles},
    }


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


def _train_job(plan: Plan, name: str, runtime: str, command: list[str]) -> dict[str, Any]:
    cluster = plan.spec.cluster
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(plan, name),
        "spec": {
            "runtimeRef": {"name": runtime},
            "trainer": {
                "image": IMAGE,
                "command": command,
                "numNodes": cluster.nodes,
                "numProcPerNode": cluster.gpus_per_node,
                "env": _environment(plan),
                "resourcesPerNode": _resources(plan),
            },
        },
    }

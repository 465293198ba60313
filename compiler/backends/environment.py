"""Environment variables that a plan needs, and why."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.machines.accelerator import find_accelerator
from parcompile.plan import Plan


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable and the reason for it."""

    name: str
    value: str
    why: str


def variables(plan: Plan) -> tuple[Variable, ...]:
    """What every rank of the plan needs in its environment, in a fixed order."""
    parallelism, accelerator = plan.spec.parallelism, plan.spec.cluster.accelerator
    found = [Variable("OMP_NUM_THREADS", "1", "several ranks share the cores of a node")]
    if accelerator == "cpu":
        found.append(Variable("DS_ACCELERATOR", "cpu", "DeepSpeed does not look for an accelerator"))
    if find_accelerator(accelerator).starts_kernels_in_turn and (parallelism.tp > 1 or parallelism.cp > 1):
        found.append(
            Variable(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                "kernels start in the order of their issue, so that tp and cp communication overlaps with computation "
                "(Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)",
            )
        )
    return tuple(found)


def gpu_resource(plan: Plan) -> str | None:
    """The Kubernetes resource that stands for one accelerator; None on CPUs."""
    accelerator = plan.spec.cluster.accelerator
    if accelerator == "cpu":
        return None
    return f"{find_accelerator(accelerator).vendor}.com/gpu"

"""Text of artefacts with the same bytes on every machine, variables of ranks, and what a target cannot express."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.machines import find_accelerator
from parcompile.plan import Plan
from parcompile.spec import Parallelism, Spec

# JSON as it is written: the same bytes on every machine, short things on one line.

WIDTH = 120
"""Columns up to which a list or a small object stays on one line."""


def to_text(tree: object) -> str:
    """JSON with two spaces of indentation, keys in the order of the tree.

    Raises:
        ValueError: a number is not finite.
    """
    return _render(tree, 0) + "\n"


def _render(node: object, indent: int) -> str:
    if isinstance(node, dict) and node:
        parts = [f"{_scalar(str(key))}: {_render(value, indent + 2)}" for key, value in node.items()]
        return _joined(parts, "{", "}", indent, one_line=indent > 0)
    if isinstance(node, (list, tuple)) and node:
        if all(type(item) is int for item in node):
            return json.dumps(node)
        return _joined([_render(item, indent + 2) for item in node], "[", "]", indent, one_line=True)
    return _scalar(node)


def _joined(parts: list[str], start: str, stop: str, indent: int, *, one_line: bool) -> str:
    line = ", ".join(parts)
    if one_line and len(line) + indent + 2 <= WIDTH and "\n" not in line:
        return start + line + stop
    space = " " * (indent + 2)
    return f"{start}\n" + ",\n".join(space + part for part in parts) + f"\n{' ' * indent}{stop}"


def _scalar(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, which JSON can escape, has no UTF-8.
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Who wrote an artefact: the lines that stand at the head of files which are not JSON.


def header(plan: Plan, about: str) -> list[str]:
    """Comment lines with the plan's identity.

    The name is written as a JSON string: quotes and control characters of it are escaped, so it cannot end the comment.
    """
    name = json.dumps(plan.spec.name, ensure_ascii=True)
    lines = [
        about,
        f"plan {name}, {plan.world_size} ranks",
        f"parcompile {plan.compiler_version}, spec {plan.spec_hash}",
    ]
    return [f"# {line}" for line in lines]


def slug(name: str) -> str:
    """The name as a DNS label: lower-case letters, digits and single hyphens, as Kubernetes and Slurm take them."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].rstrip("-")
    return text or "unnamed"


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the target does differently. With a `fatal` one it cannot run the layout, and gets no files."""

    what: str
    why: str
    instead: str
    fatal: bool = False


def effective_order(parallelism: Parallelism) -> tuple[str, ...]:
    """The axes larger than 1, innermost first: the others stand nowhere."""
    sizes = {"tp": parallelism.tp, "cp": parallelism.cp, "dp": parallelism.dp, "pp": parallelism.pp}
    return tuple(axis for axis in parallelism.order if sizes.get(axis, 1) > 1)


def sequence_loss(spec: Spec, target: str) -> Iterator[Loss]:
    """A fatal loss when sequence parallelism would need padding, which only our runtime adds."""
    parallelism, length = spec.parallelism, spec.training.sequence_length
    local, tp = length // parallelism.cp, parallelism.tp
    if parallelism.sequence_parallel and local % tp:
        why = f"{target} does not pad: (sequence_length {length} / cp {parallelism.cp}) % tp {tp} = {local % tp}"
        instead = f"a multiple of {parallelism.cp * tp}, or sequence_parallel false"
        yield Loss(f"sequence_length {length}", why, instead, fatal=True)


def rampup_losses(spec: Spec, why: str, instead: str, *, fatal: bool = False) -> Iterator[Loss]:
    """A loss where the batch grows, which a target is not told for `why`."""
    if (ramp := spec.training.rampup_batch_size) is not None:
        yield Loss(f"rampup_batch_size {ramp.start} {ramp.increment} {ramp.samples}", why, instead, fatal=fatal)


def decay_schedule_losses(spec: Spec, why: str, instead: str, *, fatal: bool = False) -> Iterator[Loss]:
    """A loss where weight decay changes from step to step, which a target is not told for `why`."""
    if (start := spec.training.optimizer.start_weight_decay) is not None:
        yield Loss(f"start_weight_decay {start:g}", why, instead, fatal=fatal)


def memory_losses(spec: Spec, optimizer_stays: str | None, *, gathers_again: bool = False) -> Iterator[Loss]:
    """Losses of a target that keeps activations on the accelerator, and has no parts of the loss and of MLPs.

    `optimizer_stays` says why it keeps the optimizer, and weights, there, too; None: it does not. A target that
    `gathers_again` does so with the inputs of all blocks, whatever a plan says.
    """
    if spec.offload_optimizer is not None and optimizer_stays is not None:
        instead = "master weights and optimizer state stay on the accelerator: the numbers of a step are the same"
        yield Loss("zero.offload_optimizer", optimizer_stays, instead)
    if spec.offload_param is not None and optimizer_stays is not None:
        instead = "weights stay on the accelerator: the numbers of a step are the same"
        yield Loss("zero.offload_param", "the target is not told to", instead)
    kept = "what recomputed layers keep stays on the accelerator"
    parts = {"activation_offloading": kept, "linear_cross_entropy": "logits are whole", "tiled_mlp": "MLPs are whole"}
    if not gathers_again:
        parts["gather_inputs_again"] = "gathered inputs are kept"
    for key, takes in parts.items():
        if getattr(spec.training, key):
            why = "the target is not told to" if takes is kept else "the target's files have no such key"
            instead = f"{takes}, which takes more memory: the numbers of a step are the same"
            yield Loss(f"training.{key}", why, instead)


def order_loss(parallelism: Parallelism, target: str, known: Sequence[tuple[str, ...]]) -> Iterator[Loss]:
    """A fatal loss when the order of the axes is none of the target's."""
    here = effective_order(parallelism)
    if not any(here == tuple(axis for axis in order if axis in here) for order in known):
        allowed = " or ".join("-".join(order) for order in known)
        why = f"{target} lays ranks out as {allowed} (innermost first): its groups would be other ranks"
        yield Loss(f"order {'-'.join(here)}", why, f"compile with order {'-'.join(known[0])}", fatal=True)


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

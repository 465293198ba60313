"""What a rank holds fits into its accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.cost.memory import static_memory
from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.diagnostics.suggest import closest
from parcompile.layout.grid import Axis
from parcompile.machines.accelerator import accelerators
from parcompile.machines.preset import PresetError, is_preset_file
from parcompile.spec.resolve import Resolution
from parcompile.units import format_bytes

from .h_fit import as_fix, changes, exceeds_device, workload
from .places import also, model_path
from .registry import Finding, rule


@rule(
    "H001",
    "weights, gradients and optimizer do not fit",
    """What is held for the whole run (weights, gradients, fp32 master weights, optimizer state, the reduce bucket)
    has to be smaller than the accelerator's memory; activations come on top (H004). Counted for ZeRO stage 0 and 1,
    where it is exact. The fixes are the smallest changes that fit with activations, as estimated.""",
    wrong={"model": {"preset": "llama-3-70b"}},
    right={
        "model": {"preset": "llama-3-70b"},
        "cluster": {"nodes": 8},
        "parallelism": {"tp": 8},
        "training": {"activation_checkpointing": "full"},
    },
    sources=("DeepSpeed runtime/zero/stage_1_and_2.py",),
)
def static_memory_fits(spec: Resolution) -> Iterator[Finding]:
    """Fires when the static bytes of the fullest rank exceed the device's memory."""
    work = workload(spec)
    if not exceeds_device(work):
        return
    memory, device = static_memory(work), work.machine.memory_bytes or 0
    parts = {
        "weights": memory.weight_bytes,
        "gradients": memory.gradient_bytes,
        "fp32 master weights": memory.master_bytes,
        "optimizer state": memory.optimizer_bytes,
        "reduce bucket": memory.bucket_bytes,
    }
    largest = max(parts, key=lambda name: parts[name])
    terms = " + ".join(f"{name} {format_bytes(size, memory.total_bytes)}" for name, size in parts.items())
    shards = spec.axis(Axis.DP) * spec.axis(Axis.CP)
    yield Finding(
        f"{terms} = {format_bytes(memory.total_bytes)} > {format_bytes(device)} of {work.machine.name}, without "
        f"activations; the largest part is {largest}",
        model_path(spec, "hidden_size"),
        help=f"raise tp (now {spec.axis(Axis.TP)}) or pp (now {spec.axis(Axis.PP)}): both shrink everything; at ZeRO "
        f"stage 1 a larger dp · cp (now {shards}) shrinks the fp32 master weights and the optimizer state",
        fixes=tuple(as_fix(spec, one) for one in changes(spec, work)),
        related=also(spec, ("cluster", "accelerator"), ("parallelism", "tp"), ("parallelism", "pp"), ("zero", "stage")),
    )


@rule(
    "H003",
    "figures of the accelerator are assumed",
    """An accelerator that is described by its memory, or in a file that holds less than `parcompile profile` measures,
    takes what is missing from the built-in preset that is nearest. Memory is estimated as given; times are only as good
    as that likeness.""",
    wrong={"cluster": {"accelerator": {"memory_gib": 141}}},
    right={"cluster": {"accelerator": "h200"}},
    severity=Severity.INFO,
)
def assumed_figures_are_named(spec: Resolution) -> Iterator[Finding]:
    """Says which figures, and of which preset they are."""
    machine = spec.cluster.preset
    if machine is not None and machine.assumed:
        yield Finding(
            f"{', '.join(machine.assumed)} of {machine.name} are not given: those of {machine.like} are assumed",
            ("cluster", "accelerator"),
            help="measure the machine with `parcompile profile -o machine.json`, or name the nearest preset with like: "
            "`parcompile accelerators` lists them",
        )


@rule(
    "H002",
    "the accelerator's file cannot be used",
    """cluster.accelerator is the name of a preset, or a .json file (relative to the spec) of the form that
    `parcompile profile` writes: the schema `accelerator`. The message names the first place in that file that is
    wrong.""",
    wrong={"cluster": {"accelerator": "missing.json"}},
    right={"cluster": {"accelerator": "h200"}},
)
def accelerator_file_can_be_used(spec: Resolution) -> Iterator[Finding]:
    """Fires on files that are missing or are no presets."""
    name = spec.get("cluster", "accelerator")
    if not isinstance(name, str) or not is_preset_file(name):
        return
    try:
        spec.accelerator_preset(name)
    except PresetError as error:
        place, stem = ("cluster", "accelerator"), name.removesuffix(".json")
        near = closest(stem, list(accelerators()))
        known = next((one for one in accelerators() if len(stem) > 2 and one.startswith(stem)), near)
        fix = Fix(f"use the preset {known}", Safety.CHANGES_COST, (Edit(place, known),))
        yield Finding(
            f"accelerator {name}: {error}",
            place,
            help=f"write the file with `parcompile profile -o {name}`, or name one of `parcompile accelerators`",
            fixes=(fix,) if known else (),
        )

"""What a rank holds fits into its accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.cost.memory import static_memory
from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.diagnostics.suggest import closest
from parcompile.layout.grid import Axis
from parcompile.layout.tensor import SplitError
from parcompile.machines.accelerator import accelerators
from parcompile.machines.preset import PresetError, is_preset_file
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.workload import workload_of
from parcompile.units import format_bytes

from .places import also, model_path
from .registry import Finding, rule


@rule(
    "H001",
    "weights, gradients and optimizer do not fit",
    """What is held for the whole run (weights, gradients, fp32 master weights, optimizer state, the reduce bucket)
    has to be smaller than the accelerator's memory; activations come on top. Counted for ZeRO stage 0 and 1, where it
    is exact.""",
    wrong={"model": {"preset": "llama-3-70b"}},
    right={"model": {"preset": "llama-3-70b"}, "parallelism": {"tp": 8}, "cluster": {"nodes": 8}},
    sources=("DeepSpeed runtime/zero/stage_1_and_2.py",),
)
def static_memory_fits(spec: Resolution) -> Iterator[Finding]:
    """Fires when the static bytes of the fullest rank exceed the device's memory."""
    machine, stage = spec.cluster.preset or accelerators().get(spec.cluster.accelerator), spec.zero_stage
    device = None if machine is None else machine.memory_bytes
    if machine is None or device is None or stage > 1 or spec.shape.num_attention_heads % spec.axis(Axis.TP):
        return
    try:
        memory = static_memory(workload_of(spec.spec()))
    except (SplitError, ValueError):
        # The layout cannot be cut as written, which other rules say.
        raise Unavailable("memory") from None
    parts = {
        "weights": memory.weight_bytes,
        "gradients": memory.gradient_bytes,
        "fp32 master weights": memory.master_bytes,
        "optimizer state": memory.optimizer_bytes,
        "reduce bucket": memory.bucket_bytes,
    }
    if memory.total_bytes <= device:
        return
    largest = max(parts, key=lambda name: parts[name])
    terms = " + ".join(f"{name} {format_bytes(size, memory.total_bytes)}" for name, size in parts.items())
    shards = spec.axis(Axis.DP) * spec.axis(Axis.CP)
    yield Finding(
        f"{terms} = {format_bytes(memory.total_bytes)} > {format_bytes(device)} of {machine.name}, without "
        f"activations; the largest part is {largest}",
        model_path(spec, "hidden_size"),
        help=f"raise tp (now {spec.axis(Axis.TP)}) or pp (now {spec.axis(Axis.PP)}): both shrink everything; at ZeRO "
        f"stage 1 a larger dp · cp (now {shards}) shrinks the fp32 master weights and the optimizer state",
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

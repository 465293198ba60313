"""Layers that are one module stay on one stage."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix
from parcompile.layout.grid import Axis
from parcompile.layout.stages import stages_from_counts
from parcompile.spec.resolve import Resolution

from .arithmetic import divisors, listed
from .examples import PAIRED
from .places import layout_change
from .registry import Finding, rule

_PP = ("parallelism", "pp")


@rule(
    "L010",
    "a stage ends inside a module of two layers",
    """In LongCat-Flash two layers are one module, whose experts stand beside both: their sum joins behind the second
    one. Stages hand hidden states on, and no such sum. Layers are counted as transformers counts them in
    num_hidden_layers, two for each of num_layers: every stage has an even number of them.""",
    wrong={
        "model": {**PAIRED},
        "parallelism": {"pp": 8},
        "training": {"sequence_length": 4096, "gradient_accumulation_dtype": "fp32"},
    },
    right={
        "model": {**PAIRED},
        "parallelism": {"pp": 4},
        "training": {"sequence_length": 4096, "gradient_accumulation_dtype": "fp32"},
    },
    sources=("transformers models/longcat_flash/modeling_longcat_flash.py: LongcatFlashDecoderLayer",),
)
def modules_stay_whole(spec: Resolution) -> Iterator[Finding]:
    """Fires for stages whose number of layers is no multiple of those in a module."""
    layers, together = spec.shape.num_hidden_layers, spec.shape.layers_per_module
    if together == 1:
        return
    try:
        stages = stages_from_counts(spec.pipeline_split.counts(layers))
    except ValueError:
        return  # another rule says so
    cut = [stage.layers.start for stage in stages if stage.layers.start % together]
    if cut:
        sizes = [pp for pp in divisors(layers // together) if pp <= spec.axis(Axis.PP)]
        yield Finding(
            f"pp {spec.axis(Axis.PP)}: stages begin with layers {listed(cut)} of {layers}, of which {together} are one "
            "module",
            _PP,
            help=f"give each stage a multiple of {together} layers; pp can be {listed(sizes)}",
            fixes=tuple(Fix(f"set pp to {pp}", layout_change(spec), (Edit(_PP, pp),)) for pp in sizes),
        )

"""How a trainer calls the arguments that it hands to transformers' `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from parcompile.backends.reading import Undecided, is_among

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "max_steps": -1,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": None,
        "seed": 42,
    }
)
"""Arguments of `TrainingArguments` that a spec has a place for, with their defaults."""

DATA = "data are given to the runtime by your program"
SAVING = "saving, logging and evaluation are chosen in your program"
MODEL = "the model is loaded by your program, which gives it to the runtime"
SPEED = "it changes how fast a step runs, not its numbers"
TF32 = "set torch.backends.cuda.matmul.allow_tf32 in your program: it changes the products of fp32"
ADAPTER = "adapters are put on the model by your program (docs/lora.md)"
METHOD = "a spec describes causal language modelling; other losses belong to your program"
QUANTISED = "the runtime trains weights of 16 or 32 bits"
CHANGING = frozenset({TF32, ADAPTER, METHOD, QUANTISED})
"""Reasons that stand for another training."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A trainer.

    Attributes:
        name: as people call it.
        names: its own name for each argument that it renames, by that of transformers.
        defaults: its defaults where they are not those of transformers, by the name in transformers.
        model: its option that names the model.
        length: its option for the tokens of a sequence.
        settled: what there is to say of options that a spec has no place for.
        parallel: its options for the axes, by the axis.
    """

    name: str
    model: str
    length: str
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def own(self, argument: str) -> str:
        """Its name for an argument of transformers."""
        return self.names.get(argument, argument)

    def all_defaults(self) -> dict[str, Any]:
        """The default of every option that is read, by the tool's own names."""
        return {self.own(name): value for name, value in {**DEFAULTS, **self.defaults}.items()}

    def reason(self, option: str) -> str | None:
        """Why an option has no place in a spec, where that is known."""
        return next((why for why, names in self.settled.items() if is_among(option.split(".")[0], names)), None)


def options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted names, each as the file gives it; a nested DeepSpeed configuration keeps its "auto"."""

    def leaves(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, Mapping) and value:
                yield from leaves(value, (*path, str(key)))
            elif value == "auto" and path[:1] != ("deepspeed",):
                yield ".".join((*path, str(key))), Undecided("auto", "the machine that it runs on")
            else:
                yield ".".join((*path, str(key))), value

    return dict(leaves(tree, ()))

"""Files that launch a plan under axolotl, LLaMA-Factory and trl.

Under axolotl and trl the runtime trains, so that every layout without pipeline stages is carried; LLaMA-Factory trains
by DeepSpeed alone. A plan has neither weights nor data: names stand in their places.
"""

from __future__ import annotations

from typing import Any

from parcompile.backends import launch
from parcompile.backends.artefacts import file_tree, from_template, to_text, tree_of, yaml_file
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.statements import Facts
from parcompile.plan import Plan
from parcompile.spec import Spec

from . import Tool, stored_tool

AXOLOTL_VERSION, LLAMA_FACTORY_VERSION, TRL_VERSION = "0.19.0", "0.9.5", "1.16.0"
"""Versions whose arguments were read."""
AXOLOTL, LLAMA_FACTORY = stored_tool("axolotl"), stored_tool("LLaMA-Factory")
_SCHEDULES = {"constant": "constant_with_warmup", **{name: name for name in ("linear", "cosine", "inverse_sqrt")}}


def decided(plan: Plan, tool: Tool) -> dict[str, Any]:
    """The options of a trainer that a plan decides, by the tool's names: those of the tool's own words for it."""
    found = tree_of("trainer_arguments", plan.spec, FACTS)
    return {tool.length: plan.spec.training.sequence_length, **{tool.own(name): found[name] for name in found}}


def _says_schedule(spec: Spec) -> bool:
    """Whether transformers has the schedule of the plan; its own falls to 0 at the last step."""
    schedule, steps = spec.training.lr_scheduler, spec.training.train_steps
    if schedule is None:
        return True
    begins = schedule.warmup_steps > 0 or schedule.type != "inverse_sqrt"
    ends = (steps is not None and schedule.end(steps) == steps) or schedule.type not in ("linear", "cosine")
    return begins and ends and schedule.type in _SCHEDULES and schedule.min_lr == schedule.warmup_start_lr == 0


def _schedule(spec: Spec) -> str:
    schedule = spec.training.lr_scheduler
    return "constant" if schedule is None else _SCHEDULES[schedule.type]


# axolotl


def axolotl_layout(plan: Plan) -> dict[str, Any]:
    """Axolotl's words for the axes and the ring; what it has none for is the plan's all the same."""
    return dict(tree_of("axolotl_layout", plan.spec))


def axolotl_files(plan: Plan) -> dict[str, Any]:
    """axolotl.yaml, whose plug-in trains by the plan, and what starts its ranks."""
    facts = {"decided": lambda _spec: {**axolotl_layout(plan), **decided(plan, AXOLOTL)}}
    about = "For `bash launch/torchrun.sh -m axolotl.cli.train axolotl.yaml`: the plug-in trains by the plan beside it."
    return {"axolotl.yaml": yaml_file(plan, about, file_tree("axolotl", plan, facts)), **launch.torchrun_script(plan)}


# LLaMA-Factory

_OF_TRAINER = ("optimizer", "scheduler", "train_batch_size")


def llama_factory_files(plan: Plan) -> dict[str, Any]:
    """llama_factory.yaml, and the DeepSpeed file that it names: optimizer and schedule are the YAML's."""
    config = {name: value for name, value in ds_config(plan).items() if name not in _OF_TRAINER}
    tree = file_tree("llama_factory", plan, {"decided": lambda _spec: decided(plan, LLAMA_FACTORY)})
    about = "For `FORCE_TORCHRUN=1 llamafactory-cli train llama_factory.yaml`, beside llama_factory_ds_config.json."
    return {"llama_factory.yaml": yaml_file(plan, about, tree), "llama_factory_ds_config.json": to_text(config)}


# trl


def trl_files(plan: Plan) -> dict[str, Any]:
    """trl_sft.py, a script of trl with the line that makes it train by the plan, and what starts its ranks."""
    said = ", ".join(f"{name}={value!r}" for name, value in tree_of("trl", plan.spec).items())
    script = from_template("trl_sft.py", plan, "Written for trl " + TRL_VERSION, ARGUMENTS=said)
    return {"trl_sft.py": script, **launch.torchrun_script(plan)}


FACTS: Facts = {"says_schedule": _says_schedule, "schedule": _schedule}
"""What losses of trainers read beside a spec."""

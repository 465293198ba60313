"""A spec's values out of Megatron-LM's arguments: what they mean, and options that are carried as they stand.

Several spellings of one thing become one, as in Megatron-LM's validate_args. Options for which a spec has no word are
written to `backends.megatron`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parcompile.backends import reading as table
from parcompile.backends.architecture import InexpressibleError
from parcompile.backends.reading import (
    CARRIED_VERBATIM,
    Draft,
    Importer,
    Outcome,
    RefusedError,
    Source,
    Undecided,
    UndecidedError,
)
from parcompile.diagnostics import closest
from parcompile.text.typed import WrongValueError, integer, number, shown
from parcompile.user_files import shipped

from .arguments import NVIDIA, Unknown, line
from .file import imported
from .model import default_ffn, described
from .training import SCHEDULE_OPTIONS
from .write import CARRIED, ROWS, arguments, changes, effect, fate

STANDS_FOR: Mapping[str, Sequence[str]] = shipped(__package__, "groups.json")["stands_for"]
"""Options that are another spelling, and those that they set."""


def meaning(given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every option of the newest version after all that follows from the given ones.

    What hangs on a value that the file does not decide is left as it was given.
    """
    found = {**line().defaults, **given}

    def known(*names: str) -> bool:
        return not any(isinstance(found.get(name), Undecided) or found.get(name) is None for name in names)

    if found.get("recompute_activations") is True:
        found["recompute_granularity"] = "selective"
    if isinstance(modules := found.get("recompute_modules"), list):
        found["recompute_modules"] = sorted(modules)
    if found.get("use_rotary_position_embeddings") is True:
        found["position_embedding_type"] = "rope"
    for name in ("num_layers", "seq_length"):
        if found.get(f"encoder_{name}") and found.get(name) is None:
            found[name] = found[f"encoder_{name}"]
    _model(found, known)
    _layout(found, known)
    _length(found, known)
    if found.get("bf16") is True and found.get("grad_reduce_in_bf16") is not True:
        found["accumulate_allreduce_grads_in_fp32"] = True
    for name in ("global", "micro"):
        if found.get(f"eval_{name}_batch_size") is None:
            found[f"eval_{name}_batch_size"] = found.get(f"{name}_batch_size")
    return found


def _model(found: dict[str, Any], known: Any) -> None:
    if found["ffn_hidden_size"] is None and known("hidden_size", "swiglu"):
        found["ffn_hidden_size"] = default_ffn(_whole(found, "hidden_size"), swiglu=found["swiglu"] is True)
    if found["kv_channels"] is None and known("hidden_size", "num_attention_heads"):
        found["kv_channels"] = _whole(found, "hidden_size") // max(1, _whole(found, "num_attention_heads"))
    if found["group_query_attention"] is False:
        found["num_query_groups"] = found["num_attention_heads"]
    found["num_experts"] = found["num_experts"] or None
    if found["num_experts"] is not None and found["moe_ffn_hidden_size"] is None:
        found["moe_ffn_hidden_size"] = found["ffn_hidden_size"]
    if found["disable_bias_linear"] is False:
        found["add_qkv_bias"] = True
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = found[name]
        found[name] = value[0] if isinstance(value, list) and len(value) == 1 else value
    limit = "moe_expert_capacity_factor"
    if known(limit) and number(found[limit], limit) > 0:
        found["moe_pad_expert_input_to_capacity"] = True  # fixed sizes change no number
    if found["moe_router_topk_scaling_factor"] is None:
        found["moe_router_topk_scaling_factor"] = 1.0


def _whole(found: Mapping[str, Any], name: str) -> int:
    return integer(found[name], name)


def _layout(found: dict[str, Any], known: Any) -> None:
    if found["expert_tensor_parallel_size"] is None:
        found["expert_tensor_parallel_size"] = found["tensor_model_parallel_size"]
    if found["tensor_model_parallel_size"] == 1:
        found["sequence_parallel"] = False
    if isinstance(found["cp_comm_type"], str):
        found["cp_comm_type"] = [found["cp_comm_type"]]
    each = "num_layers_per_virtual_pipeline_stage"
    if known(each, "num_layers", "pipeline_model_parallel_size") and found.get(each):
        ends = (found[f"account_for_{part}_in_pipeline_split"] is True for part in ("embedding", "loss"))
        layers = _whole(found, "num_layers") + sum(ends)
        stages = _whole(found, "pipeline_model_parallel_size") * _whole(found, each)
        found["num_virtual_stages_per_pipeline_rank"] = layers // stages if stages and layers % stages == 0 else None
    if found["num_virtual_stages_per_pipeline_rank"] == 1:
        found["num_virtual_stages_per_pipeline_rank"] = None
    if found.get("use_megatron_fsdp") is True or found.get("use_custom_fsdp") is True:
        found["use_distributed_optimizer"] = True


def _length(found: dict[str, Any], known: Any) -> None:
    for length in ("train", "lr_decay", "lr_warmup"):
        samples, iters = f"{length}_samples", f"{length}_iters"
        if known(samples, "global_batch_size") and found[samples] and not found[iters]:
            found[iters] = found[samples] / found["global_batch_size"]
    if found["lr_decay_iters"] is None:
        found["lr_decay_iters"] = found["train_iters"]
    if known("lr_warmup_fraction", "lr_decay_iters"):
        found["lr_warmup_iters"] = found["lr_warmup_fraction"] * found["lr_decay_iters"]


BALANCING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
REPLACEABLE = frozenset((*BALANCING, *SCHEDULE_OPTIONS))
"""Options that the table writes where a spec says nothing of them, or where it has no word for theirs."""
_SECTION = ("backends", "megatron")


def refusal(name: str, value: Any, *, has_schedule: bool, balances: bool = False) -> str | None:
    """Why an option cannot stand in `backends.megatron`; None where it can.

    Args:
        name: with underscores, without dashes.
        value: as the spec gives it.
        has_schedule: whether the spec has a schedule of its own.
        balances: whether it has a loss that balances experts.
    """
    known = line(NVIDIA)
    option = known.options.get(name)
    if option is None or not known.has(name):
        near = closest(name, [one for one in known.options if known.has(one)])
        return f"Megatron-LM has no option {name}" + (f"; did you mean {near}?" if near else "")
    if has_schedule and name in SCHEDULE_OPTIONS:
        return f"training.lr_scheduler decides {name}"
    if balances and name in BALANCING:
        return f"training.router decides {name}"
    if name in CARRIED and name not in REPLACEABLE:
        return f"the spec decides {name}: set the value there"
    facts = option.newest
    if facts.is_flag != isinstance(value, bool) or (value is False and facts.kind != "either"):
        takes = "a flag: write true" if facts.is_flag else f"followed by a value of type {facts.type}"
        return f"{name} is {takes}"
    if isinstance(value, list) != (facts.kind == "list") and facts.kind in ("list", "value"):
        return f"{name} takes {'several values: write a list' if facts.kind == 'list' else 'one value'}"
    return None


def keep(source: Source, draft: Draft) -> None:
    """Carries what the table left over into `backends.megatron`, where it is an option of training."""
    lost = {name for name, one in source.reasons.items() if one.outcome is Outcome.LOST}
    kept = [name for name in source.given if _is_left(name, source, lost)]
    if "moe_aux_loss_coeff" in kept and BALANCING[0] not in kept:
        kept.append(BALANCING[0])  # where the plan names none, it writes that there is none
    for name in kept:
        draft.set((*_SECTION, name), source.given.get(name, source.defaults.get(name)), said=True)
        if source.has(name):
            source.reasons.pop(name, None)
            source.used[name] = {(*_SECTION, name)}


def _is_left(name: str, source: Source, lost: set[str]) -> bool:
    value = source.given[name]
    if (
        name not in line(NVIDIA).options
        or isinstance(value, Undecided)
        or refusal(name, value, has_schedule=False) is not None
    ):
        return False
    if name in REPLACEABLE:
        return name in lost or (name == BALANCING[0] and "moe_aux_loss_coeff" in lost)
    option = line(NVIDIA).options[name]
    is_default = value == option.default and type(value) is type(option.default)
    return name not in source.used and not is_default and effect(name) in CARRIED_VERBATIM


_CLUSTER = {"nnodes": ("cluster", "nodes"), "nproc_per_node": ("cluster", "gpus_per_node")}


def options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a document by their canonical names; what the file leaves to a variable is undecided.

    Raises:
        RefusedError: a value is not of its option's type.
        WrongValueError: a value is none of the parser's.
    """
    found: dict[str, Any] = {}
    known = line(NVIDIA)
    for name, value in tree.items():
        canonical, turns_on = known.by_flag.get(name, (name, True))
        found[canonical] = _value(canonical, value if turns_on or value is not True else False)
    return {name: value for name, value in found.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, Unknown):
        variables = ", ".join(value.names)
        return Undecided(str(value), f"variable {variables}" if variables else "something else")
    option = line(NVIDIA).options.get(name)
    if isinstance(value, list):
        if option is not None and option.newest.kind != "list":
            raise WrongValueError(f"--{name.replace('_', '-')}", value, "one value")
        return [_value(name, one) for one in value]
    if option is not None and isinstance(value, Mapping):
        raise WrongValueError(f"--{name.replace('_', '-')}", value, f"of type {option.newest.type}")
    if option is None or option.newest.is_flag or option.newest.type not in ("int", "float"):
        return value
    is_number = isinstance(value, (int, float) if option.newest.type == "float" else int)
    if isinstance(value, bool) or not is_number:
        raise RefusedError(f"--{name.replace('_', '-')} {shown(value)}: Megatron-LM takes {option.newest.type} here")
    return (number if isinstance(value, float) else integer)(value, f"--{name.replace('_', '-')}")


def read(source: Source, draft: Draft) -> None:
    """Everything of the arguments that a spec can say.

    Raises:
        RefusedError: a spec cannot say what model it is.
    """
    for name, path in _CLUSTER.items():
        if source.has(name):
            draft.carry(source, name, path)
    try:
        table.read(ROWS, source, draft)
    except InexpressibleError as error:
        raise RefusedError(f"this model cannot be carried into a spec: {error}") from None
    _samples(source, draft)
    keep(source, draft)


def _samples(source: Source, draft: Draft) -> None:
    """What a batch that is not given is: one micro-batch of each rank (validate_args)."""
    path = ("training", "gradient_accumulation_steps")
    if not source.has("global_batch_size") and source.has("micro_batch_size"):
        draft.set(path, 1, said=False)
    try:
        if source.value("micro_batch_size") is None:
            draft.ask(("training", "micro_batch_size"), "the file does not say --micro-batch-size")
    except UndecidedError:
        pass


IMPORTER = Importer(
    tool="Megatron-LM",
    options=options,
    defaults=lambda: line(NVIDIA).defaults,
    read=read,
    written=lambda plan: arguments(plan),
    fate=fate,
    model_options=described,
    meaning=meaning,
    stands_for=STANDS_FOR,
    tree=imported,
    changes=changes,
)

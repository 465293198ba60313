"""A spec out of another tool's configuration: DeepSpeed's, Megatron-LM's arguments, gpt-neox's.

Every key of the source is accounted for: it is carried into the spec, or it is lost, with the reason. What the spec
needs and the source does not say is named as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .import_names import DECIDED, NAMES, Path
from .kinds import MEGATRON

NEEDED: tuple[Path, ...] = (("model",), ("cluster", "gpus_per_node"), ("training", "sequence_length"))
"""What a spec cannot do without."""

DIMENSIONS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""Those that a written-out model cannot do without."""


@dataclass
class Imported:
    """A spec with an account of every key of its source."""

    spec: dict[str, Any]
    carried: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    missing: list[Path] = field(default_factory=list)


def import_tree(tree: Mapping[str, Any], kind: str, given: Mapping[Path, Any]) -> Imported:
    """The spec that a configuration of `kind` describes; `given` are values that the user adds, by path."""
    result = Imported({"version": 1})
    flat = dict(_flattened(tree, ()))
    for path, value in given.items():
        _set(result.spec, path, value)
    if kind == MEGATRON or "model_parallel_size" in flat or "pipe_parallel_size" in flat:
        _family(flat, result, whole=("model",) not in given)
    for name in list(flat):
        target = NAMES.get(name)
        if target and flat[name] != "auto" and not (target[0] == "model" and ("model",) in given):
            _carry(result, flat, name, target, flat[name])
    _precision(flat, result)
    # The "adam" of Megatron-LM, of gpt-neox and of DeepSpeed (adam_w_mode) decays weights as AdamW does.
    decoupled = _take(flat, result, "training.optimizer.type", "optimizer.params.adam_w_mode") is not False
    _optimizer(flat, result, decoupled=decoupled)
    _choices(flat, result)
    _context(flat, result)
    _virtual_stages(flat, result)
    _schedule(flat, result)
    if kind == MEGATRON:
        distributed = _take(flat, result, "zero.stage", "use_distributed_optimizer")
        _set(result.spec, ("zero", "stage"), 1 if distributed else 0)
        _take(flat, result, "training.gradient_accumulation_dtype", "accumulate_allreduce_grads_in_fp32")
        if result.spec["training"]["precision"] == "bf16":
            # Megatron-LM sums bf16 gradients in fp32, with or without the flag.
            _set(result.spec, ("training", "gradient_accumulation_dtype"), "fp32")
    _rest(flat, result, tree, deepspeed=kind != MEGATRON)
    result.missing = [path for path in NEEDED if _get(result.spec, path) is None]
    if "model_type" in result.spec.get("model", {}):
        result.missing += [("model", name) for name in DIMENSIONS if name not in result.spec["model"]]
    order = ("version", "name", "model", "cluster", "parallelism", "training", "zero", "deepspeed")
    result.spec = {key: result.spec[key] for key in order if key in result.spec}
    return result


def _flattened(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = (*path, key.lstrip("-").replace("-", "_"))
        if isinstance(value, dict) and value:
            yield from _flattened(value, name)
        else:
            yield ".".join(name), value


def _carry(result: Imported, flat: dict[str, Any], name: str, target: Path, value: Any) -> None:
    """Takes a key out of the source and into the spec."""
    flat.pop(name, None)
    if target in (("parallelism", "pp"), ("parallelism", "tp")):
        value = value or 1  # gpt-neox writes 0 for no pipeline
    if _get(result.spec, target) is None:
        _set(result.spec, target, value)
    result.carried[name] = ".".join(target)


def _take(flat: dict[str, Any], result: Imported, target: str, *names: str) -> Any:
    """The value of the first of these keys that is there; all of them are accounted for as carried to `target`."""
    found = None
    for name in names:
        if name in flat and flat[name] != "auto":
            value = flat.pop(name)
            found = value if found is None else found
            result.carried[name] = target
    return found


def _family(flat: dict[str, Any], result: Imported, *, whole: bool) -> None:
    """The model type that the architecture's flags describe."""
    target = "model.model_type" if whole else "model (replaced by the preset)"

    def take(*names: str) -> Any:
        return _take(flat, result, target, *names)

    activation = take("swiglu", "activation")
    gated = activation is True or activation == "swiglu"
    rms = str(take("normalization", "norm")).lower() == "rmsnorm"
    rotary = take("position_embedding_type", "pos_emb") in ("rope", "rotary")
    untied = bool(take("untie_embeddings_and_output_weights", "no_weight_tying"))
    bias, norm = take("add_qkv_bias"), take("qk_layernorm")
    take("disable_bias_linear", "use_bias_in_norms", "group_query_attention", "rotary_percent")
    if not whole:
        return
    if gated and rms and rotary:
        family = "qwen3" if norm else "qwen2" if bias else "llama"
    else:
        family = "gpt_neox" if rotary else "gpt2"
    _set(result.spec, ("model", "model_type"), family)
    _set(result.spec, ("model", "tie_word_embeddings"), not untied)


def _precision(flat: dict[str, Any], result: Imported) -> None:
    on = None
    for name, value in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        if _take(flat, result, "training.precision", name, f"{name}.enabled") is True:
            on = value
    _set(result.spec, ("training", "precision"), on or "fp32")


def _optimizer(flat: dict[str, Any], result: Imported, *, decoupled: bool) -> None:
    first = _take(flat, result, "training.optimizer.betas", "adam_beta1")
    second = _take(flat, result, "training.optimizer.betas", "adam_beta2")
    if first is not None or second is not None:
        betas = [0.9 if first is None else first, 0.999 if second is None else second]
        _set(result.spec, ("training", "optimizer", "betas"), betas)
    for name in ("optimizer", "optimizer.type"):
        kind = flat.get(name)
        if isinstance(kind, str) and kind.lower() in ("adam", "adamw"):
            _take(flat, result, "training.optimizer.type", name)
            _set(result.spec, ("training", "optimizer", "type"), "adamw" if decoupled else kind.lower())


def _choices(flat: dict[str, Any], result: Imported) -> None:
    target = ("training", "activation_checkpointing")
    kind = _take(flat, result, ".".join(target), "recompute_granularity", "checkpoint_activations")
    if kind in ("full", "selective", True):
        _set(result.spec, target, "full" if kind is True else kind)
    if _take(flat, result, "parallelism.order", "use_tp_pp_dp_mapping") is True:
        _set(result.spec, ("parallelism", "order"), "tp-cp-ep-pp-dp")


def _context(flat: dict[str, Any], result: Imported) -> None:
    """Megatron-LM's implementation of context parallelism, when it is one for all layers."""
    kind, sizes = flat.get("cp_comm_type"), flat.get("hierarchical_context_parallel_sizes")
    if isinstance(kind, list) and len(kind) == 1:
        kind = kind[0]
    names = {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses", "a2a+p2p": "usp"}
    has_levels = kind == "a2a+p2p" and isinstance(sizes, list) and len(sizes) == 2
    if kind not in names or (kind == "a2a+p2p") != has_levels:
        return
    _carry(result, flat, "cp_comm_type", ("parallelism", "cp_implementation"), names[kind])
    if has_levels:
        target = ("parallelism", "hierarchical_cp_sizes")
        _carry(result, flat, "hierarchical_context_parallel_sizes", target, sizes)


def _virtual_stages(flat: dict[str, Any], result: Imported) -> None:
    """Layers of a virtual stage, as the number of virtual stages on a rank."""
    name = "num_layers_per_virtual_pipeline_stage"
    layers, parallelism = _get(result.spec, ("model", "num_hidden_layers")), result.spec.get("parallelism", {})
    each, pp = flat.get(name), parallelism.get("pp", 1)
    if isinstance(layers, int) and isinstance(each, int) and isinstance(pp, int) and each > 0:
        layers += sum(bool(parallelism.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
        if layers % (pp * each) == 0:
            target = ("parallelism", "num_virtual_stages_per_pipeline_rank")
            _carry(result, flat, name, target, layers // (pp * each))


def _schedule(flat: dict[str, Any], result: Imported) -> None:
    """Megatron-LM's schedule, when a spec can say it."""
    style, warmup = flat.get("lr_decay_style"), flat.get("lr_warmup_iters")
    if style not in ("constant", "linear", "cosine") or not isinstance(warmup, int) or warmup < 2:
        return
    target = ("training", "lr_scheduler")
    for name, key in (("lr_decay_style", "type"), ("lr_warmup_iters", "warmup_steps"), ("min_lr", "min_lr")):
        if name in flat:
            _carry(result, flat, name, (*target, key), flat[name])
    if flat.get("lr_warmup_init") == _get(result.spec, (*target, "min_lr")):
        _take(flat, result, ".".join((*target, "min_lr")), "lr_warmup_init")


def _rest(flat: dict[str, Any], result: Imported, tree: Mapping[str, Any], *, deepspeed: bool) -> None:
    """What is left is lost, unless it is a further DeepSpeed key that the plan takes."""
    from parcompile.schema import load

    from .deepspeed.facts import refusal

    known = load("ds_config")["properties"] if deepspeed else {}
    for name, value in flat.items():
        path = tuple(name.split("."))
        if value == "auto":
            result.lost[name] = '"auto" has no value'
        elif path[0] in known and _get(tree, path) is not None and refusal(path) is None:
            _set(result.spec, ("deepspeed", *path), value)
            result.carried[name] = f"deepspeed.{name}"
        elif path[0] in known:
            result.lost[name] = _dropped(path)
        else:
            result.lost[name] = DECIDED.get(name, "a spec has no such key")


def _dropped(path: Path) -> str:
    """Why a DeepSpeed key is left out of the spec."""
    from .deepspeed.facts import refusal

    return f"dropped: {refusal(path) or 'it has no value'}"


def _set(tree: dict[str, Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def _get(tree: Any, path: Path) -> Any:
    for step in path:
        if not isinstance(tree, Mapping) or step not in tree:
            return None
        tree = tree[step]
    return tree

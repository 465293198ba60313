"""A gpt-neox configuration on its own. Its options are checked by name, type and choice in backends/gpt_neox/check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parcompile.backends.gpt_neox.options import spelling
from parcompile.diagnostics import Related, Severity

from .arithmetic import divisors, listed, nearest_multiples
from .file_registry import GPT_NEOX, Settings, file_rule
from .registry import Finding

_BASE = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 2,
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 6.0e-4}},
}
_SOURCES = ("gpt-neox megatron/neox_arguments/arguments.py",)
_TP, _PP = "model_parallel_size", "pipe_parallel_size"


class _Options:
    """The top-level options of a file by their names with underscores; the file may write hyphens."""

    def __init__(self, settings: Settings) -> None:
        self._keys = {spelling(str(key)): str(key) for key in settings.tree}
        self._settings = settings

    def get(self, name: str) -> Any:
        """The value; None where it is left out or "auto"."""
        return self._settings.get(self._keys.get(name, name))

    def number(self, name: str) -> float | None:
        """The same when it is a number."""
        return self._settings.number(self._keys.get(name, name))

    def size(self, name: str, default: int = 1) -> int:
        """A whole number of 1 or more, else the default."""
        value = self.number(name)
        return int(value) if value is not None and value >= 1 and value == int(value) else default

    def section(self, name: str) -> Mapping[str, Any]:
        """The same when it is a mapping, else an empty one."""
        return self._settings.section(self._keys.get(name, name))

    def path(self, *names: str) -> tuple[str, ...]:
        """Where it stands."""
        return (self._keys.get(names[0], names[0]), *names[1:])

    def also(self, *names: str) -> tuple[Related, ...]:
        """Where these stand, as far as they are given."""
        return tuple(
            Related(f"{name} {self.get(name)} is set here", self.path(name)) for name in names if name in self._keys
        )


@file_rule(
    "F201",
    GPT_NEOX,
    "heads or widths do not divide",
    """gpt-neox cuts attention heads, key/value heads and the hidden size over model_parallel_size; heads divide the
    hidden size, and key/value heads divide the heads.""",
    wrong={**_BASE, "model_parallel_size": 8},
    right={**_BASE, "model_parallel_size": 4},
    sources=(*_SOURCES, "gpt-neox megatron/model/transformer.py"),
)
def heads_divide(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    found = _Options(settings)
    tp = found.size(_TP)
    for name in ("num_attention_heads", "hidden_size", "num_kv_heads"):
        total = found.size(name, 0)
        if total % tp:
            fits = listed(divisors(total)[:12])
            message = f"{name} {total} / {_TP} {tp} is not whole; {_TP} can be {fits}"
            yield Finding(message, found.path(_TP), related=found.also(name))
    for total_name, part_name in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_kv_heads")):
        total, part = found.size(total_name, 0), found.size(part_name)
        if total % part and "mamba" not in str(found.get("attention_config")):
            message = f"{total_name} {total} / {part_name} {part} is not whole"
            yield Finding(message, found.path(part_name), related=found.also(total_name))


@file_rule(
    "F202",
    GPT_NEOX,
    "stages are uneven",
    """DeepSpeed balances layers over pipe_parallel_size stages. Where they do not divide, a stage has a layer more than
    another, and the others wait for it in each step.""",
    wrong={**_BASE, "pipe_parallel_size": 5},
    right={**_BASE, "pipe_parallel_size": 4},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/pipe/module.py",),
)
def stages_are_even(settings: Settings) -> Iterator[Finding]:
    """Fires where the layers do not divide."""
    found = _Options(settings)
    layers, pp = found.size("num_layers", 0), found.size(_PP)
    if layers % pp:
        message = f"num_layers {layers} / {_PP} {pp} is not whole: {layers % pp} of {pp} stages have a layer more"
        yield Finding(message, found.path(_PP), related=found.also("num_layers"))


@file_rule(
    "F203",
    GPT_NEOX,
    "two precisions",
    """precision, and DeepSpeed's fp16 and bf16 sections that are enabled, have to name one precision.""",
    wrong={**_BASE, "precision": "bfloat16", "fp16": {"enabled": True}},
    right={**_BASE, "precision": "fp16", "fp16": {"enabled": True}},
    sources=_SOURCES,
)
def precisions_agree(settings: Settings) -> Iterator[Finding]:
    """Fires for a section that is on beside another precision."""
    found = _Options(settings)
    said = str(found.get("precision") or "").lower()
    on = [name for name in ("fp16", "bf16") if found.section(name).get("enabled") is True]
    for name in on:
        if said and said != {"fp16": "fp16", "bf16": "bfloat16"}[name]:
            yield Finding(
                f"precision {said} with {name}.enabled", found.path(name, "enabled"), related=found.also("precision")
            )
    if len(on) == 2 and not said:
        yield Finding("fp16.enabled with bf16.enabled", found.path("bf16", "enabled"))


@file_rule(
    "F204",
    GPT_NEOX,
    "a limit lies on the wrong side",
    """seq_length is no more than max_position_embeddings, min_lr no more than the optimizer's lr, the warm-up (a part
    of the steps) ends before the run, and num_layers is a multiple of num_unique_layers.""",
    wrong={**_BASE, "seq_length": 4096, "max_position_embeddings": 2048},
    right={**_BASE, "seq_length": 2048, "max_position_embeddings": 2048},
    sources=_SOURCES,
)
def limits_hold(settings: Settings) -> Iterator[Finding]:
    """Fires for each of them."""
    found = _Options(settings)
    length, most = found.number("seq_length"), found.number("max_position_embeddings")
    if length is not None and most is not None and length > most:
        message = f"seq_length {length:g} > max_position_embeddings {most:g}"
        yield Finding(message, found.path("seq_length"), related=found.also("max_position_embeddings"))
    least, rate = found.number("min_lr"), settings.number(*found.path("optimizer", "params", "lr"))
    if least is not None and rate is not None and least > rate:
        yield Finding(f"min_lr {least:g} > optimizer.params.lr {rate:g}", found.path("min_lr"))
    warmup = found.number("warmup")
    if warmup is not None and warmup > 1:
        message = f"warmup {warmup:g} > 1: it is the part of the steps in which the rate rises"
        yield Finding(message, found.path("warmup"))
    layers, unique = found.size("num_layers", 0), found.size("num_unique_layers")
    if layers % unique:
        message = f"num_layers {layers} / num_unique_layers {unique} is not whole"
        yield Finding(message, found.path("num_unique_layers"), related=found.also("num_layers"))


@file_rule(
    "F205",
    GPT_NEOX,
    "the batch does not add up",
    """train_batch_size is train_micro_batch_size_per_gpu · gradient_accumulation_steps · dp; the steps are 1 where they
    are left out.""",
    wrong={**_BASE, "train_batch_size": 30},
    right={**_BASE, "train_batch_size": 32},
    sources=_SOURCES,
)
def batch_adds_up(settings: Settings) -> Iterator[Finding]:
    """Fires when the product of the two that are known does not divide the total."""
    found = _Options(settings)
    total, micro = found.size("train_batch_size", 0), found.size("train_micro_batch_size_per_gpu")
    steps = found.size("gradient_accumulation_steps")
    if total % (micro * steps):
        near = listed(nearest_multiples(total, micro * steps))
        yield Finding(
            f"train_batch_size {total} / (micro {micro} · steps {steps}) is not whole; nearest: {near}",
            found.path("train_batch_size"),
            related=found.also("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        )


@file_rule(
    "F206",
    GPT_NEOX,
    "options that do not go together",
    """Experts run with ZeRO stages 0 and 1; weight_decay stands at the top, and beside it in optimizer.params the
    optimizer gets it twice and fails; save needs checkpoint_factor or extra_save_iters; fp16_lm_cross_entropy needs
    fp16.""",
    wrong={**_BASE, "moe_num_experts": 8, "zero_optimization": {"stage": 2}},
    right={**_BASE, "moe_num_experts": 8, "zero_optimization": {"stage": 1}},
    sources=(*_SOURCES, "gpt-neox megatron/training.py"),
)
def options_go_together(settings: Settings) -> Iterator[Finding]:
    """Fires for each pair."""
    found = _Options(settings)
    stage = found.section("zero_optimization").get("stage")
    if found.size("moe_num_experts") > 1 and isinstance(stage, int) and stage > 1:
        yield Finding(
            f"moe_num_experts {found.get('moe_num_experts')} with zero_optimization.stage {stage}",
            found.path("zero_optimization", "stage"),
            related=found.also("moe_num_experts"),
        )
    optimizer = found.section("optimizer")
    params = optimizer.get("params")
    if isinstance(params, dict) and "weight_decay" in params and str(optimizer.get("type")).lower() != "onebitadam":
        message = "optimizer.params.weight_decay: gpt-neox passes its own weight_decay to the optimizer as well"
        yield Finding(message, found.path("optimizer", "params", "weight_decay"), help="write it at the top")
    # Files are combined: one without layers or steps leaves the rest to another one.
    is_whole = found.get("num_layers") is not None and found.get("train_iters") is not None
    if is_whole and found.get("save") and not found.get("checkpoint_factor") and not found.get("extra_save_iters"):
        yield Finding("save without checkpoint_factor or extra_save_iters", found.path("save"))
    if found.get("fp16_lm_cross_entropy") is True and not _is_fp16(found):
        yield Finding("fp16_lm_cross_entropy without fp16", found.path("fp16_lm_cross_entropy"))


def _is_fp16(found: _Options) -> bool:
    said = found.get("precision")
    return said == "fp16" if said else found.section("fp16").get("enabled") is True

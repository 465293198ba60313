"""A gpt-neox configuration on its own: how its values have to fit together. Names and types are checked before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parcompile.backends.gpt_neox.fields import fields
from parcompile.backends.kinds import GPT_NEOX, NEOX_KEYS
from parcompile.diagnostics import Related, Severity
from parcompile.diagnostics.diagnostic import closest
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules.registry import Finding
from parcompile.user_files import shipped

_TP, _PP, _HEADS, _KV = "model_parallel_size", "pipe_parallel_size", "num_attention_heads", "num_kv_heads"
_SOURCE = "gpt-neox megatron/neox_arguments/arguments.py"


@file_rule(
    "F201",
    GPT_NEOX,
    "a gpt-neox configuration is checked in part",
    """The names and types of all keys of a gpt-neox file are checked, and the keys for DeepSpeed are checked as a
    DeepSpeed configuration. The rules between gpt-neox's own values are checked only in part. gpt-neox combines
    several files, so a missing key is not reported.""",
    wrong={"pipe_parallel_size": 1, "model_parallel_size": 2, "train_micro_batch_size_per_gpu": 4},
    right={"train_micro_batch_size_per_gpu": 4},
    severity=Severity.INFO,
)
def keys_of_its_own(settings: Settings) -> Iterator[Finding]:
    """Says it, at the key by which the file is told."""
    told = next((key for key in settings.tree if key in NEOX_KEYS), "")
    if told:
        yield Finding(
            "this is a gpt-neox configuration: its keys are checked, and how its values fit together is in part",
            (told,),
            help="`parcompile import` turns it into a spec, which is checked whole",
        )


@file_rule(
    "F202",
    GPT_NEOX,
    "ZeRO 2 or 3 in a pipeline",
    """With pipe_parallel_size 1 or more gpt-neox runs DeepSpeed's pipeline engine, which refuses ZeRO stages 2 and 3:
    they would reduce the gradients of a micro-batch before the last one. pipe_parallel_size 0 runs without it.""",
    wrong={"pipe_parallel_size": 1, "zero_optimization": {"stage": 2}},
    right={"pipe_parallel_size": 0, "zero_optimization": {"stage": 2}},
    sources=("DeepSpeed runtime/pipe/engine.py", "gpt-neox megatron/training.py"),
)
def a_pipeline_goes_with_stage_one(settings: Settings) -> Iterator[Finding]:
    """Fires when both stand in the file."""
    stages, zero = settings.number(_PP), settings.number("zero_optimization", "stage")
    if stages is not None and zero is not None and stages >= 1 and zero in (2, 3):
        yield Finding(
            f"ZeRO stage {zero:.0f} with pipe_parallel_size {stages:.0f}: DeepSpeed's pipeline engine refuses it",
            ("zero_optimization", "stage"),
            help="write stage 1, or pipe_parallel_size 0",
            related=(Related(f"{_PP} {stages:.0f} is set here", (_PP,)),),
        )


@file_rule(
    "F203",
    GPT_NEOX,
    "heads that cannot be divided",
    """Each tensor-parallel rank holds as many attention heads as the others, and as many key/value heads where there
    are fewer of these; a query head belongs to one key/value head, and the heads share hidden_size.""",
    wrong={"num_attention_heads": 12, "model_parallel_size": 8},
    right={"num_attention_heads": 16, "model_parallel_size": 8},
    sources=(_SOURCE, "gpt-neox megatron/model/transformer.py"),
)
def heads_are_divided(settings: Settings) -> Iterator[Finding]:
    """Fires for each pair of which one does not divide the other."""
    kinds = settings.get("attention_config")
    if isinstance(kinds, list) and not {"mamba", "rwkv"}.isdisjoint(str(kinds).replace("'", " ").split()):
        return
    pairs = [(_HEADS, _TP), (_HEADS, _KV), ("hidden_size", _HEADS)]
    kv, heads = settings.number(_KV), settings.number(_HEADS)
    if kv is not None and heads is not None and kv < heads:
        pairs.append((_KV, _TP))
    for whole, part in pairs:
        amount, parts = settings.number(whole), settings.number(part)
        if amount is not None and parts is not None and parts > 0 and amount % parts:
            yield Finding(
                f"{whole} {amount:.0f} / {part} {parts:.0f} is not whole",
                (whole,),
                help=f"write a multiple of {parts:.0f}, or another {part}",
                related=(Related(f"{part} {parts:.0f} is set here", (part,)),),
            )


@file_rule(
    "F204",
    GPT_NEOX,
    "a limit that is exceeded",
    """seq_length has to be at most max_position_embeddings, and min_lr at most the learning rate of the optimizer:
    gpt-neox stops otherwise.""",
    wrong={"seq_length": 4096, "max_position_embeddings": 2048},
    right={"seq_length": 2048, "max_position_embeddings": 2048},
    sources=(_SOURCE,),
)
def limits_are_kept(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the two."""
    for name, *limit in (("seq_length", "max_position_embeddings"), ("min_lr", "optimizer", "params", "lr")):
        value, most = settings.number(name), settings.number(*limit)
        if value is not None and most is not None and value > most:
            yield Finding(
                f"{name} {value:g} is above {'.'.join(limit)} {most:g}",
                (name,),
                help=f"write at most {most:g}",
                related=(Related(f"{limit[-1]} {most:g} is set here", tuple(limit)),),
            )


_ATTENTION: Sequence[str] = shipped(__package__, "attention.json")
"""ATTENTION_TYPE_CHOICES of gpt-neox's neox_args.py; older versions have fewer."""


@file_rule(
    "F205",
    GPT_NEOX,
    "a name that gpt-neox does not know",
    """gpt-neox constructs optimizers by the name in optimizer.type, and layers by those in attention_config. With
    another name it stops before training.""",
    wrong={"pipe_parallel_size": 1, "optimizer": {"type": "AdamX"}},
    right={"pipe_parallel_size": 1, "optimizer": {"type": "Adam"}},
    sources=("gpt-neox megatron/training.py", "gpt-neox megatron/neox_arguments/neox_args.py"),
)
def names_are_known(settings: Settings) -> Iterator[Finding]:
    """Fires for an optimizer, and for each kind of attention."""
    optimizers = [str(one) for one in fields()["optimizer_type"].choices]
    kind = settings.get("optimizer", "type")
    if isinstance(kind, str) and kind.lower() not in optimizers:
        yield _unknown_name("optimizer", kind, optimizers, ("optimizer", "type"))
    config = settings.get("attention_config")
    for number, entry in enumerate(config if isinstance(config, list) else ()):
        own = entry[0] if isinstance(entry, list) and entry and isinstance(entry[0], list) else [entry]
        for name in own:
            if isinstance(name, str) and name not in _ATTENTION:
                yield _unknown_name("kind of attention", name, _ATTENTION, ("attention_config", number))


def _unknown_name(what: str, name: str, known: Sequence[str], path: tuple[str | int, ...]) -> Finding:
    near = closest(name, known)
    help_ = f"did you mean {near}?" if near else f"write one of {', '.join(known)}"
    return Finding(f"gpt-neox has no {what} {name!r}", path, help=help_)


@file_rule(
    "F206",
    GPT_NEOX,
    "a warm-up that never ends",
    """warmup is the share of all steps during which the learning rate rises, not their number: with 1 or more, it rises
    until the run ends.""",
    wrong={"pipe_parallel_size": 1, "warmup": 100},
    right={"pipe_parallel_size": 1, "warmup": 0.01},
    severity=Severity.WARNING,
    sources=("gpt-neox megatron/training.py: warmup * lr_decay_iters",),
)
def warm_up_is_a_share(settings: Settings) -> Iterator[Finding]:
    """Fires from 1 on."""
    share, steps = settings.number("warmup"), settings.number("lr_decay_iters") or settings.number("train_iters")
    if share is not None and share >= 1:
        times = f", here {share:g} × {steps:.0f} steps" if steps else ""
        better = f"{share / steps:g}" if steps and share < steps else "0.01"
        yield Finding(f"warmup {share:g} is a share of all steps{times}", ("warmup",), help=f"write {better}")

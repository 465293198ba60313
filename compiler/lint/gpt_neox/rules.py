"""A gpt-neox configuration on its own: how its values have to fit together. Names and types are checked before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from parcompile.backends.gpt_neox import attention_kinds, fields, replaced_fields
from parcompile.backends.gpt_neox.beside import Beside
from parcompile.backends.kinds import GPT_NEOX, NEOX_KEYS
from parcompile.diagnostics import Path, Related, Severity, closest
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding


class NeoxSettings(Settings):
    """The values of a gpt-neox configuration; `fork` is what the gpt-neox of the file takes, where it is at hand."""

    def __init__(self, tree: object, invalid: frozenset[Path], fork: Beside | None = None) -> None:
        super().__init__(tree, invalid)
        self.fork = fork or Beside(fields(), (), replaced_fields())


def _fork(settings: Settings) -> Beside:
    return settings.fork if isinstance(settings, NeoxSettings) else NeoxSettings({}, frozenset()).fork


_TP, _PP, _HEADS, _KV = "model_parallel_size", "pipe_parallel_size", "num_attention_heads", "num_kv_heads"


@file_rule("F201", GPT_NEOX, severity=Severity.INFO)
def keys_of_its_own(settings: Settings) -> Iterator[Finding]:
    """Says it, at the key by which the file is told."""
    told = next((key for key in settings.tree if key in NEOX_KEYS), "")
    if told:
        yield Finding(
            "this is a gpt-neox configuration: its keys are checked, and how its values fit together is in part",
            (told,),
            help="`parcompile import` turns it into a spec, which is checked whole",
        )


_PIPELINE = re.compile(r"\"is_pipe_parallel\",\s*self\.pipe_parallel_size >(=?) (\d)")


@file_rule("F202", GPT_NEOX)
def a_pipeline_goes_with_stage_one(settings: Settings) -> Iterator[Finding]:
    """Fires when both stand in the file; to some versions a pipeline of one stage is none."""
    stages, zero = settings.number(_PP), settings.number("zero_optimization", "stage")
    said = _PIPELINE.search(_fork(settings).checks)
    least = int(said[2]) + (not said[1]) if said else 1
    if stages is not None and zero is not None and stages >= least and zero in (2, 3):
        yield Finding(
            f"ZeRO stage {zero:.0f} with pipe_parallel_size {stages:.0f}: DeepSpeed's pipeline engine refuses it",
            ("zero_optimization", "stage"),
            help="write stage 1, or pipe_parallel_size 0",
            related=(Related(f"{_PP} {stages:.0f} is set here", (_PP,)),),
        )


@file_rule("F203", GPT_NEOX)
def heads_are_divided(settings: Settings) -> Iterator[Finding]:
    """Fires for each pair of which one does not divide the other."""
    kinds = settings.get("attention_config")
    lacks_heads = isinstance(kinds, list) and not {"mamba", "rwkv"}.isdisjoint(str(kinds).replace("'", " ").split())
    if lacks_heads and not _asks_all_for_whole_heads(settings):
        return
    pairs = [("hidden_size", _HEADS)] if lacks_heads else [(_HEADS, _TP), (_HEADS, _KV), ("hidden_size", _HEADS)]
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


def _asks_all_for_whole_heads(settings: Settings) -> bool:
    """Whether the gpt-neox of the file divides hidden_size also where mamba has no heads, as before 2025."""
    checks = _fork(settings).checks
    return "num_attention_heads != 0" in checks and "num_attention_heads != 0 and not" not in checks


@file_rule("F204", GPT_NEOX)
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


@file_rule("F205", GPT_NEOX)
def names_are_known(settings: Settings) -> Iterator[Finding]:
    """Fires for an optimizer, and for each kind of attention."""
    fork = _fork(settings)
    optimizers = [str(one) for one in fork.fields["optimizer_type"].choices] if "optimizer_type" in fork.fields else []
    kind = settings.get("optimizer", "type")
    if isinstance(kind, str) and optimizers and kind.lower() not in optimizers:
        yield _unknown_name("optimizer", kind, optimizers, ("optimizer", "type"))
    config = settings.get("attention_config")
    for number, entry in enumerate(config if isinstance(config, list) else ()):
        own = entry[0] if isinstance(entry, list) and entry and isinstance(entry[0], list) else [entry]
        for name in own:
            known = fork.attention or attention_kinds()
            if isinstance(name, str) and name not in known:
                yield _unknown_name("kind of attention", name, known, ("attention_config", number))


def _unknown_name(what: str, name: str, known: Sequence[str], path: tuple[str | int, ...]) -> Finding:
    near = closest(name, known)
    help_ = f"did you mean {near}?" if near else f"write one of {', '.join(known)}"
    return Finding(f"gpt-neox has no {what} {name!r}", path, help=help_)


@file_rule("F206", GPT_NEOX, severity=Severity.WARNING)
def warm_up_is_a_share(settings: Settings) -> Iterator[Finding]:
    """Fires from 1 on."""
    share, steps = settings.number("warmup"), settings.number("lr_decay_iters") or settings.number("train_iters")
    if share is not None and share >= 1:
        times = f", here {share:g} × {steps:.0f} steps" if steps else ""
        better = f"{share / steps:g}" if steps and share < steps else "0.01"
        yield Finding(f"warmup {share:g} is a share of all steps{times}", ("warmup",), help=f"write {better}")


@file_rule("F207", GPT_NEOX)
def every_layer_has_an_attention(settings: Settings) -> Iterator[Finding]:
    """Fires where both numbers are known."""
    layers, config = settings.number("num_layers"), settings.get("attention_config")
    if layers is not None and layers < 0:
        yield Finding(f"num_layers {layers:.0f} is below 0", ("num_layers",), help="write how many layers there are")
        return
    if layers is None or not isinstance(config, list):
        return
    count = 0
    for entry in config if any(not isinstance(one, str) for one in config) else [[config, 1]]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and type(entry[1]) is int):
            return  # "all" fills what is left
        count += len(entry[0]) * entry[1]
    if count != layers:
        yield Finding(
            f"attention_config has kinds for {count} layers, num_layers is {layers:.0f}",
            ("attention_config",),
            help=f"write {layers:.0f} in all",
            related=(Related(f"num_layers {layers:.0f} is set here", ("num_layers",)),),
        )


@file_rule("F208", GPT_NEOX)
def experts_go_with_the_layout(settings: Settings) -> Iterator[Finding]:
    """Fires for ZeRO 2 and 3 in the newest version, and for a pipeline where the gpt-neox of the file asks for none."""
    experts, checks = settings.number("moe_num_experts"), _fork(settings).checks
    if experts is None or experts <= 1:
        return
    here = (Related(f"moe_num_experts {experts:.0f} is set here", ("moe_num_experts",)),)
    zero, stages = settings.number("zero_optimization", "stage"), settings.number(_PP)
    if zero in (2, 3) and (not checks or zero == 3 or "zero stages 2 and 3" in checks):
        path = ("zero_optimization", "stage")
        yield Finding(f"experts with ZeRO stage {zero:.0f}", path, help="write stage 1", related=here)
    if stages is not None and stages >= 1 and "MoE not supported with pipeline parallelism" in checks:
        yield Finding(f"experts with {_PP} {stages:.0f}", (_PP,), help="write 0", related=here)


_SPLITS = ("train", "valid", "test")


@file_rule("F209", GPT_NEOX)
def data_has_paths_and_weights(settings: Settings) -> Iterator[Finding]:
    """Fires for what the file has; what it leaves to another file of the run is a warning."""
    checks = _fork(settings).checks
    if checks and "has_separate_path" not in checks:
        return
    paths = {one: found for one in _SPLITS if isinstance(found := settings.get(f"{one}_data_paths"), list)}
    for split, own in paths.items():
        weights = settings.get(f"{split}_data_weights")
        if isinstance(weights, list) and len(weights) != len(own):
            message = f"{split}_data_paths has {len(own)} files, {split}_data_weights {len(weights)} numbers"
            here = (Related(f"{split}_data_paths is set here", (f"{split}_data_paths",)),)
            yield Finding(message, (f"{split}_data_weights",), help="write a number for each file", related=here)
    lacking = [f"{one}_data_paths" for one in _SPLITS if one not in paths]
    if paths and lacking and not any(settings.get(one) for one in lacking):
        message = f"{next(iter(paths))}_data_paths without {' and '.join(lacking)}: gpt-neox wants all three or none"
        help_ = "write them, unless another file of the run does"
        yield Finding(message, (f"{next(iter(paths))}_data_paths",), help=help_, severity=Severity.WARNING)
    if not lacking and settings.get("data_path") is not None:
        message = "data_path beside train_data_paths, valid_data_paths and test_data_paths: gpt-neox takes either"
        yield Finding(message, ("data_path",), help="remove one of both")

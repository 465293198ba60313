"""A spec out of accelerate's YAML, of its `ParallelismConfig`, or of transformers' `DistributedConfig`, as JSON.

Sources: accelerate 1.15 (`commands/config/config_args.py`, `parallelism_config.py`, `utils/dataclasses.py`) and
transformers 5.23 (`distributed/configuration_utils.py`).
"""

from __future__ import annotations

import math

from parcompile.backends import reading
from parcompile.backends.deepspeed.read import read_offload
from parcompile.backends.kinds import ACCELERATE
from parcompile.backends.reading import Draft, Importer, RefusedError, Source, SpecPath, as_switch, carried
from parcompile.backends.trainers import options
from parcompile.backends.trainers.read import read_deepspeed, reduced_by_fsdp, sum_as_deepspeed, with_deepspeed
from parcompile.text.typed import integer, number
from parcompile.user_files import shipped

_STAGES = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0, "HYBRID_SHARD": 3, "4": 3}
_PARALLELISM = "parallelism_config."
_OF_ACCELERATE = "parallelism_config_"
_WITHOUT_EFFECT = {
    "enable_sequence_parallel": "transformers 5.23 does nothing with it",
    "enable_expert_parallel": "ep_size says it",
}
_REPLICATED = "the runtime shards over all of dp, not within groups of it"
_DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
_OF_THE_SCRIPT: dict[SpecPath, str] = {
    ("training", "micro_batch_size"): "the training script's data loader has it",
    reading.OPTIMIZER: "the training script brings its own",
}
"""What accelerate's file never says."""


def read(source: Source, draft: Draft) -> None:
    """Everything of the file that a spec can say."""
    _machines(source, draft)
    kind = str(source.given.get("distributed_type", "NO"))
    inner = read_deepspeed(source, draft)
    if inner is None:
        _precision(source, draft, said_elsewhere=source.has(_DEEPSPEED_FILE))
    else:
        _joined(source, draft, inner)
    if inner is not None or (kind == "DEEPSPEED" and not source.has(_DEEPSPEED_FILE)):
        sum_as_deepspeed(draft, inner)
    sections = {"DEEPSPEED": _deepspeed, "FSDP": _fsdp, "MEGATRON_LM": _megatron}
    if kind in sections:
        sections[kind](source, draft)
    if kind in (*sections, "NO", "MULTI_GPU", "MULTI_CPU"):
        source.ignore("distributed_type", "the sections of the file say what it stands for")
    else:
        source.lose("distributed_type", "a spec is for GPUs of CUDA, and for CPUs")
    _parallelism(source, draft, _PARALLELISM + _OF_ACCELERATE)
    for path, why in _OF_THE_SCRIPT.items():
        if not any(known[: len(path)] == path for known in draft.values):
            draft.ask(path, why)
    _settle(source, "file")
    source.ignore([name for name in source.unread() if source.given[name] in (None, {})], "empty")


def _settle(source: Source, section: str, prefix: str = "") -> None:
    """Says why options that nothing reads are lost; some are without effect where they are off."""
    reasons = shipped(__package__, "reasons.json")[section]
    source.settle(reasons["lost"], reasons["if_on"], prefix)


def _machines(source: Source, draft: Draft) -> None:
    nodes = draft.carry(source, "num_machines", ("cluster", "nodes"), integer) or 1
    count = source.value("num_processes", ("cluster", "gpus_per_node"))
    if isinstance(count, int) and count > 0:
        if count % nodes:
            raise RefusedError(f"num_processes {count} / num_machines {nodes} = {count / nodes:g} is not whole")
        draft.set(("cluster", "gpus_per_node"), count // nodes, said=True)
    if source.given.get("use_cpu") is True:
        draft.carry(source, "use_cpu", ("cluster", "accelerator"), lambda _value, _name: "cpu")
    else:
        source.ignore("use_cpu", "off")


def _joined(source: Source, draft: Draft, inner: Draft) -> None:
    """What the DeepSpeed configuration says that the file names: accelerate takes the type of the weights from it.

    Raises:
        RefusedError: the file says another type, which accelerate refuses beside such a configuration.
    """
    name = "mixed_precision"
    value = str(source.given.get(name, "no"))
    decided = inner.values.get(reading.PRECISION)
    said = source.given.get("deepspeed.bf16.enabled") == "auto" or source.given.get("deepspeed.fp16.enabled") == "auto"
    if source.has(name) and (said or decided is None):
        inner.questions.pop(reading.PRECISION, None)
        _precision(source, draft, said_elsewhere=False)
    elif source.has(name) and value in ("bf16", "fp16") and value != decided:
        raise RefusedError(f"mixed_precision {value} contradicts {decided} of its DeepSpeed configuration")
    elif source.has(name):
        source.ignore(name, "the DeepSpeed configuration decides the type of the weights")
    elif said:
        draft.ask(reading.PRECISION, "the DeepSpeed configuration calls it auto, and the file has no mixed_precision")
    draft.take(source, (), {path: value for path, value in inner.values.items() if path in inner.said})
    if not said and not source.has(name) and decided is not None:
        draft.set(reading.PRECISION, decided, said=True)
    for path, question in inner.questions.items():
        draft.questions.setdefault(path, question)
    source.used[_DEEPSPEED_FILE] = {reading.STAGE}


def _precision(source: Source, draft: Draft, *, said_elsewhere: bool) -> None:
    name, path = "mixed_precision", reading.PRECISION
    if not source.has(name):
        file = source.given.get(_DEEPSPEED_FILE)
        draft.ask(path, f"{file} says it: import that file too" if said_elsewhere else "the file does not say it")
        return
    value = source.given[name]
    if value in ("bf16", "fp16"):
        draft.carry(source, name, path)
    elif value in ("no", False, None):  # YAML 1.1 reads no as false
        draft.set(path, "fp32", said=False)
        source.used[name] = {path}
    else:
        source.lose(name, "the runtime trains in fp32, bf16 and fp16")


def _deepspeed(source: Source, draft: Draft) -> None:
    prefix = "deepspeed_config."
    draft.carry(source, prefix + "zero_stage", reading.STAGE, integer)
    if not source.has(prefix + "zero_stage") and not source.has(prefix + "deepspeed_config_file"):
        draft.set(reading.STAGE, 2, said=True)  # DeepSpeedPlugin's default
    draft.carry(source, prefix + "gradient_accumulation_steps", ("training", "gradient_accumulation_steps"), integer)
    draft.carry(source, prefix + "gradient_clipping", ("training", "gradient_clipping"), number)
    file = _DEEPSPEED_FILE
    if source.has(file) and not source.under("deepspeed"):
        source.lose(file, "import that file by itself: it holds ZeRO's stage, the batch and the optimizer")
        for path in (reading.STAGE, reading.OPTIMIZER):
            draft.ask(path, f"{source.given[file]} says it: import that file too")
    for part in ("optimizer", "param"):
        read_offload(source, draft, part, f"{prefix}offload_{part}_device")
    _settle(source, "deepspeed", prefix)


def _fsdp(source: Source, draft: Draft) -> None:
    prefix = "fsdp_config."
    strategy = source.given.get(prefix + "fsdp_sharding_strategy")
    reshard = source.given.get(prefix + "fsdp_reshard_after_forward")
    is_second = str(source.given.get(prefix + "fsdp_version", 1)) == "2"
    if is_second or isinstance(reshard, bool):
        stage = 2 if reshard is False else 3
    else:
        stage = _STAGES.get(str(reshard if reshard is not None else strategy or "FULL_SHARD"), 3)
    read = (prefix + key for key in ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward"))
    draft.take(source, read, {reading.STAGE: stage})
    if str(strategy).startswith("HYBRID"):
        source.lose(prefix + "fsdp_sharding_strategy", "the runtime shards over all of dp, not within nodes")
    if (precision := source.given.get("mixed_precision")) in ("bf16", "fp16"):
        reduced_by_fsdp(source, draft, "mixed_precision", precision)
        source.used["mixed_precision"] = {reading.PRECISION}
    recompute, path = prefix + "fsdp_activation_checkpointing", reading.RECOMPUTE
    if source.given.get(recompute) is True:
        draft.take(source, [recompute], {path: "full"})
    else:
        source.ignore(recompute, "off")
    _settle(source, "fsdp", prefix)


def _megatron(source: Source, draft: Draft) -> None:
    prefix = "megatron_lm_config.megatron_lm_"
    for row in carried("accelerate.megatron"):
        draft.carry(source, prefix + row.option, row.path, lambda value, _name: as_switch(value))
    if as_switch(source.given.get(prefix + "recompute_activations")) is True:
        path = reading.RECOMPUTE
        draft.carry(source, prefix + "recompute_activations", path, lambda _value, _name: "selective")
    else:
        source.ignore(prefix + "recompute_activations", "off")
    sharded = prefix + "use_distributed_optimizer"
    draft.take(source, [sharded], {reading.STAGE: 1 if as_switch(source.given.get(sharded)) is True else 0})


def _parallelism(source: Source, draft: Draft, prefix: str) -> None:
    """`ParallelismConfig`, whose fields have a prefix in the YAML and none in Python."""

    def size(field: str) -> int | None:
        value = source.given.get(prefix + field)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    draft.carry(source, prefix + "tp_size", ("parallelism", "tp"), integer)
    cp, sp = size("cp_size") or 1, size("sp_size") or 1
    if cp > 1 and sp > 1:
        raise RefusedError(f"cp_size {cp} and sp_size {sp}: accelerate refuses both above 1")
    source.use((prefix + "cp_size", prefix + "sp_size"), ("parallelism", "cp"))
    settings = [prefix + key for key in ("cp_comm_strategy", "cp_backend", "sp_backend")]
    if cp * sp > 1:
        strategy = source.given.get(prefix + "cp_comm_strategy", "allgather")
        kind = "ulysses" if sp > 1 else "all_gather" if strategy == "allgather" else "ring"
        draft.set(("parallelism", "cp"), cp * sp, said=True)
        draft.take(source, settings, {("parallelism", "cp_implementation"): kind})
    source.ignore([name for name in settings if name not in source.used], "cp and sp are 1")
    shard, replicate = size("dp_shard_size"), size("dp_replicate_size")
    if shard is not None or replicate is not None:
        names = (prefix + "dp_shard_size", prefix + "dp_replicate_size")
        draft.take(source, names, {reading.DP: (shard or 1) * (replicate or 1)})
    if (replicate or 1) > 1 and (shard or 1) > 1:
        source.lose(prefix + "dp_replicate_size", _REPLICATED)
    if source.given.get(prefix + "sp_seq_length_is_variable") is False:
        draft.carry(source, prefix + "sp_seq_length", ("training", "sequence_length"), integer)
        source.ignore(prefix + "sp_seq_length_is_variable", "off")
    source.settle({"a setting of DeepSpeed's Ulysses; the runtime has its own": ("sp_*",)}, {}, prefix)


def _read_distributed(source: Source, draft: Draft) -> None:
    """`DistributedConfig` of transformers."""
    for key, axis in (("tp_size", "tp"), ("pp_size", "pp"), ("ep_size", "ep")):
        if source.given.get(key) is None:
            source.ignore(key, "null: as if it was left out")
        else:
            draft.carry(source, key, ("parallelism", axis), integer)
    shards, replicas = (source.given.get(key) for key in ("fsdp_size", "dp_replicate_size"))
    if known := [one for one in (shards, replicas) if isinstance(one, int)]:
        source.use(["dp_replicate_size"], reading.DP)
        stage = 3 if isinstance(shards, int) and shards > 1 else 0
        draft.take(source, ["fsdp_size"], {reading.DP: math.prod(known), reading.STAGE: stage})
        if isinstance(replicas, int) and replicas > 1:
            source.lose("dp_replicate_size", _REPLICATED)
    for name in list(source.unread()):
        if source.given[name] in (None, False):
            source.ignore(name, "off")
        elif name in _WITHOUT_EFFECT:
            source.ignore(name, _WITHOUT_EFFECT[name])
    _settle(source, "distributed")


IMPORTER = Importer(
    tool="accelerate",
    options=options,
    defaults=dict,
    read=read,
    tree=lambda document: with_deepspeed(document, ACCELERATE),
)
PARALLELISM_IMPORTER = Importer(
    tool="accelerate's ParallelismConfig",
    options=options,
    defaults=dict,
    read=lambda source, draft: _parallelism(source, draft, ""),
)
DISTRIBUTED_IMPORTER = Importer(
    tool="transformers' DistributedConfig",
    options=options,
    defaults=dict,
    read=_read_distributed,
)

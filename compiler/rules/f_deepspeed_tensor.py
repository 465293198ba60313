"""A DeepSpeed configuration on its own: DeepSpeed's own tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.table import find
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity
from parcompile.diagnostics.suggest import closest

from .f_deepspeed_batch import ranks
from .f_deepspeed_stages import BATCH, ZERO
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_SECTION = "tensor_parallel"
_SIZE: Path = (_SECTION, "autotp_size")


def autotp_size(settings: Settings) -> int:
    """Ranks over which AutoTP shards the model; 1 when it does not."""
    size = settings.number(_SECTION, "autotp_size")
    return int(size) if size else 1


def _inner(settings: Settings) -> str:
    """The name under which the file has the section of `tp_size`."""
    return "tensor_parallel" if "tensor_parallel" in settings.section(_SECTION) else "tp"


@file_rule(
    "F030",
    DEEPSPEED,
    "tensor parallelism that shards nothing",
    """AutoTP shards a model by tensor_parallel.autotp_size. tensor_parallel.tp.tp_size alone shards nothing in
    training, and beside autotp_size it must be equal. A preset that does not exist is ignored.""",
    wrong={**BATCH, _SECTION: {"autotp_size": 2, "tp": {"tp_size": 4}}, ZERO: {"stage": 1}},
    right={**BATCH, _SECTION: {"autotp_size": 2}, ZERO: {"stage": 1}},
    sources=("DeepSpeed runtime/engine.py, runtime/tensor_parallel/config.py; DeepSpeed#7389",),
)
def tensor_parallelism_shards(settings: Settings) -> Iterator[Finding]:
    """Fires for the size that does nothing, for two different ones, and for an unknown preset."""
    given, inner = settings.number(*_SIZE), _inner(settings)
    path: Path = (_SECTION, inner, "tp_size")
    other = settings.number(*map(str, path))
    if other is not None and other != 1 and not given:
        yield Finding(
            f"{_SECTION}.{inner}.tp_size {other:g} alone shards nothing: DeepSpeed trains with autotp_size",
            path,
            help=f'write "autotp_size": {other:g} in {_SECTION}',
            fixes=(Fix(f"set autotp_size to {other:g}", Safety.CHANGES_COST, (Edit(_SIZE, int(other)),)),),
            severity=Severity.WARNING,
        )
    elif other is not None and given and other not in (1, given):
        fix = Fix(f"set tp_size to {given:g}", Safety.SAFE, (Edit(path, int(given)),))
        message = f"tp_size {other:g} ≠ autotp_size {given:g}: DeepSpeed refuses the combination"
        yield Finding(message, path, help="remove tp_size", fixes=(fix,), related=(Related("the size", _SIZE),))
    preset = settings.get(_SECTION, "preset_model")
    key = find(settings.around.version, _SECTION, "preset_model")
    names = key.facts.get("names", ()) if key is not None else ()
    if isinstance(preset, str) and names and preset.lower() not in names:
        near = closest(preset, names)
        advice = f"did you mean {near}?" if near else f"write one of {', '.join(names)}"
        message = f'AutoTP has no preset "{preset}" and takes none then'
        yield Finding(message, (_SECTION, "preset_model"), help=advice, severity=Severity.WARNING)


@file_rule(
    "F031",
    DEEPSPEED,
    "AutoTP and a sequence mesh over the same ranks",
    """AutoTP takes neighbouring ranks for tensor parallelism, a mesh of sequence_parallel_size and data_parallel_size
    takes neighbouring ranks for a sequence. DeepSpeed has no layout for both, and does not refuse them.""",
    wrong={
        **BATCH,
        _SECTION: {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "data_parallel_size": 4,
        ZERO: {"stage": 1},
    },
    right={**BATCH, _SECTION: {"autotp_size": 2}, ZERO: {"stage": 1}},
    severity=Severity.WARNING,
    sources=("DeepSpeed __init__.py, runtime/engine.py, utils/groups.py",),
)
def autotp_is_alone(settings: Settings) -> Iterator[Finding]:
    """Fires for both at once."""
    size, sequence = autotp_size(settings), settings.number("sequence_parallel_size")
    if size > 1 and sequence is not None and sequence > 1:
        message = f"autotp_size {size} with sequence_parallel_size {sequence:g}: both take the same neighbouring ranks"
        related = (Related("AutoTP", _SIZE),)
        yield Finding(message, ("sequence_parallel_size",), help="remove one of the two", related=related)


@file_rule(
    "F032",
    DEEPSPEED,
    "sequence parallelism that only divides the batch",
    """sequence_parallel_size alone divides the number of ranks in the equation of the batch, and makes no groups: the
    program that starts DeepSpeed has to pass them (the mpu of Ulysses). With data_parallel_size beside it DeepSpeed
    makes a mesh of both, whose product is the number of all ranks.""",
    wrong={"train_batch_size": 8, "sequence_parallel_size": 2, "gradient_clipping": 1.0},
    right={"train_batch_size": 8, "sequence_parallel_size": 2, "data_parallel_size": 4, "gradient_clipping": 1.0},
    severity=Severity.INFO,
    sources=("DeepSpeed runtime/config.py, __init__.py; DeepSpeed#6868",),
)
def sequence_parallelism_has_groups(settings: Settings) -> Iterator[Finding]:
    """Says that the groups have to come from elsewhere."""
    sequence, data = (settings.number(name) for name in ("sequence_parallel_size", "data_parallel_size"))
    path: Path = ("sequence_parallel_size",)
    if sequence is not None and sequence > 1 and data is None:
        message = f"sequence_parallel_size {sequence:g} alone makes no groups: it only divides the ranks of the batch"
        yield Finding(message, path, help="pass the mpu of Ulysses to deepspeed.initialize, or add data_parallel_size")
    found = ranks(settings)
    if sequence is not None and data is not None and found is not None and found != data:
        message = f"the batch sizes leave {found} data-parallel ranks, data_parallel_size is {data:g}"
        yield Finding(message, ("data_parallel_size",), help=f"write {found}", severity=Severity.WARNING)

"""A DeepSpeed configuration on its own: what is left to somebody else, and what those refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parcompile.backends.deepspeed import fillers
from parcompile.backends.deepspeed.fillers import ACCELERATE, BARE, LIGHTNING, TITLES, TRANSFORMERS, autos
from parcompile.backends.deepspeed.surroundings import GUESSED, Asked
from parcompile.backends.deepspeed.table import Key, find
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, format_path

from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_ZERO = "zero_optimization"
_STEPS = "gradient_accumulation_steps"


def _dotted(path: Path, version: str) -> str:
    """The path as the documentation has it, whatever name of a key the file uses."""
    key = find(version, *path)
    return key.path if key is not None else ".".join(map(str, path))


def _fills(filler: str, path: Path, settings: Settings) -> bool:
    return _dotted(path, settings.around.version) in fillers.filled(filler)


@file_rule(
    "F001",
    DEEPSPEED,
    '"auto" that nobody replaces',
    """DeepSpeed has no "auto". transformers and accelerate replace it in some keys before DeepSpeed starts, and refuse
    a file with an "auto" that they cannot replace. DeepSpeed itself drops an "auto" from its own classes, so that the
    default counts: "stage": "auto" runs at stage 0. In the keys that it takes from plain dictionaries the text arrives
    as it stands. --used-with says who replaces it.""",
    wrong={
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        _ZERO: {"stage": 2, "allgather_bucket_size": "auto"},
    },
    right={
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        _ZERO: {"stage": 2},
    },
    sources=(
        "accelerate utils/dataclasses.py; transformers integrations/deepspeed.py; DeepSpeed#1270; accelerate#3152",
    ),
    asked=Asked(used_with=TRANSFORMERS),
)
def auto_is_not_a_value(settings: Settings) -> Iterator[Finding]:
    """Fires for each "auto" at a place that the filler does not fill, and at which it is not a value of its own."""
    around = settings.around
    for path in autos(settings.tree):
        key = find(around.version, *path)
        if key is None or _is_value(key) or key.refused:
            continue  # K001 speaks of an unknown key
        name = format_path(path)
        if around.filler in (TRANSFORMERS, ACCELERATE):
            if not _fills(around.filler, path, settings) and not _fills(TRANSFORMERS, path, settings):
                said = TITLES[around.filler]
                yield Finding(f'{said} refuses "auto" in {name}: it has no value for this key', path, help=_advice(key))
            elif not _fills(around.filler, path, settings):
                message = f'accelerate alone does not replace "auto" in {name}, only the Trainer of transformers does'
                yield Finding(message, path, help=_advice(key))
        elif key.loose:
            yield Finding(f'{_nobody(settings)} "auto" in {name}: DeepSpeed gets the text', path, help=_advice(key))
        elif path[-1] == "stage":
            message = f'{_nobody(settings)} "auto" in {name}: it runs at stage 0, where nothing is sharded'
            yield Finding(message, path, help="write 1, 2 or 3")


def _is_value(key: Key) -> bool:
    """Whether DeepSpeed itself gives "auto" a meaning at a key."""
    return key.default == "auto" or "auto" in str(key.facts.get("in", ""))


def _advice(key: Key) -> str:
    default = key.default
    known = default is not None and not isinstance(default, (dict, list))
    return (
        f"write a value, or remove the key: the default is {default}" if known else "write a value, or remove the key"
    )


def _nobody(settings: Settings) -> str:
    filler = settings.around.filler or BARE
    return f"with {TITLES[filler]} nobody replaces"


@file_rule(
    "F002",
    DEEPSPEED,
    'who replaces "auto"',
    """Where nothing beside the file shows how it is used, an "auto" in it means that the Trainer of transformers or
    accelerate will replace it: the file is read so, and this remark says it once. With deepspeed.initialize alone each
    "auto" in one of DeepSpeed's own classes becomes the default.""",
    wrong={"train_micro_batch_size_per_gpu": "auto", _ZERO: {"stage": 1}, "gradient_clipping": "auto"},
    right={"train_micro_batch_size_per_gpu": 1, _ZERO: {"stage": 1}, "gradient_clipping": 1.0},
    severity=Severity.INFO,
    sources=("transformers integrations/deepspeed.py",),
)
def auto_is_left_to_somebody(settings: Settings) -> Iterator[Finding]:
    """One line for a file with "auto" whose filler was guessed, or whose "auto" falls back to defaults."""
    around = settings.around
    paths = [path for path in autos(settings.tree) if (key := find(around.version, *path)) and not _is_value(key)]
    if not paths:
        return
    if around.filler in (TRANSFORMERS, ACCELERATE):
        if around.filler_from == GUESSED:
            count = f'{len(paths)} times "auto"' if len(paths) > 1 else '"auto"'
            message = f"{count}: the file is taken to be for {TITLES[around.filler]}, which replaces it"
            yield Finding(message, paths[0], help="name the tool that reads the file with --used-with")
        return
    defaults = [
        path for path in paths if (key := find(around.version, *path)) and not key.loose and path[-1] != "stage"
    ]
    if defaults:
        names = ", ".join(format_path(path) for path in defaults[:3]) + (" …" if len(defaults) > 3 else "")
        message = f'with {TITLES[around.filler or BARE]} "auto" becomes DeepSpeed\'s default in {names}'
        related = tuple(Related("and here", path) for path in defaults[1:])
        yield Finding(message, defaults[0], help="write values", related=related, severity=Severity.WARNING)


@file_rule(
    "F011",
    DEEPSPEED,
    "the tool that reads the file refuses it",
    """accelerate, and the Trainer of transformers through it, refuse a file without zero_optimization. Lightning
    refuses one that sets gradient_accumulation_steps, which its Trainer sets itself.""",
    wrong={"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0},
    right={"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, _ZERO: {"stage": 0}},
    sources=("accelerate utils/dataclasses.py; lightning strategies/deepspeed.py",),
    asked=Asked(used_with=ACCELERATE),
)
def the_reader_takes_the_file(settings: Settings) -> Iterator[Finding]:
    """Fires for a missing section under accelerate, and for steps under Lightning; a warning where they are guessed."""
    filler = settings.around.filler
    if filler in (TRANSFORMERS, ACCELERATE) and settings.left_out(_ZERO):
        path: Path = (_ZERO,)
        fix = Fix("add zero_optimization at stage 0", Safety.SAFE, (Edit(path, {"stage": 0}),))
        message = f"zero_optimization is missing: {TITLES[filler]} refuses the file"
        guessed = settings.around.filler_from == GUESSED
        advice = 'add "zero_optimization": {"stage": 0}'
        yield Finding(message, path, help=advice, fixes=(fix,), severity=Severity.WARNING if guessed else None)
    if filler == LIGHTNING and _STEPS in settings.tree:
        fix = Fix(f"remove {_STEPS}", Safety.SAFE, (Edit((_STEPS,), remove=True),))
        message = f"{_STEPS} is set by Lightning's Trainer, which refuses it in the file"
        yield Finding(message, (_STEPS,), help="set accumulate_grad_batches of the Trainer", fixes=(fix,))


def has_filler(settings: Settings) -> bool:
    """Whether somebody fills "auto" before DeepSpeed sees the file."""
    return settings.around.filler in (TRANSFORMERS, ACCELERATE)


def auto_or(value: Any) -> Any:
    """None for "auto", else the value."""
    return None if value == "auto" else value

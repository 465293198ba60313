"""A DeepSpeed configuration on its own: what is kept off the accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.constructors import ADAM
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity

from .f_deepspeed_stages import BATCH, ZERO, stage_of
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_PARTS = ("offload_param", "offload_optimizer")
_ONLY_NVME = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)
_DEFAULT_OFF = (None, False)
_ADAM = {"type": "AdamW", "params": {"lr": 0.0001}}


def _device(settings: Settings, part: str) -> str | None:
    """Where a part is kept; None when it is "auto" or wrong."""
    if settings.get(ZERO, part) is None or settings.left_out(ZERO, part, "device"):
        return "none"
    found = settings.get(ZERO, part, "device")
    return found if isinstance(found, str) else None


@file_rule(
    "F012",
    DEEPSPEED,
    "NVMe without a path",
    """What is kept on NVMe needs nvme_path, a folder on the drive.""",
    wrong={**BATCH, ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}},
    right={**BATCH, ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}},
    sources=("DeepSpeed runtime/zero/partition_parameters.py, runtime/swap_tensor",),
)
def nvme_has_a_path(settings: Settings) -> Iterator[Finding]:
    """Fires for each part on NVMe without a path, where the stage reads it."""
    stage = stage_of(settings)
    for part in _PARTS:
        if _device(settings, part) == "nvme" and settings.get(ZERO, part, "nvme_path") is None and stage == 3:
            path: Path = (ZERO, part, "device")
            yield Finding(f'{part} to "nvme" needs nvme_path', path, help='add "nvme_path": "/local_nvme", say')
    if _device(settings, "offload_optimizer") == "nvme" and stage in (1, 2):
        message = f"the optimizer goes to NVMe at stage 3 only: at stage {stage} it is kept on the host"
        yield Finding(message, (ZERO, "offload_optimizer", "device"), help='write "cpu"', severity=Severity.WARNING)


@file_rule(
    "F017",
    DEEPSPEED,
    "an offload key has no effect on this device",
    """nvme_path, the buffers, max_in_cpu, pipeline_read, pipeline_write and fast_init are for NVMe; with device cpu
    DeepSpeed never looks at them, and with device none at no key of the section.""",
    wrong={**BATCH, ZERO: {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/local_nvme"}}},
    right={**BATCH, ZERO: {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/zero/offload_config.py, runtime/swap_tensor",),
)
def offload_keys_have_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires once for each section: a warning with device cpu, a remark with none."""
    for part in _PARTS:
        device, section = _device(settings, part), settings.section(ZERO, part)
        if device == "cpu":
            idle = [key for key in _ONLY_NVME if key in section and section[key] not in _DEFAULT_OFF]
            does = 'has no effect with device "cpu": it is for "nvme"'
        elif device == "none":
            idle = [key for key in section if key != "device" and section[key] not in (*_DEFAULT_OFF, "none")]
            does = 'has no effect with device "none"'
        else:
            continue
        if idle:
            names = ", ".join(idle)
            if len(idle) > 1:
                does = does.replace("has", "have", 1).replace("it is", "they are")
            yield Finding(
                f"{part}: {names} {does}",
                (ZERO, part, idle[0]),
                help='remove it, or set device to "nvme"' if device == "cpu" else 'remove it, or set device to "cpu"',
                fixes=(
                    Fix(f"remove {names}", Safety.SAFE, tuple(Edit((ZERO, part, key), remove=True) for key in idle)),
                ),
                related=tuple(Related("and here", (ZERO, part, key)) for key in idle[1:]),
                severity=Severity.INFO if device == "none" else None,
            )


@file_rule(
    "F018",
    DEEPSPEED,
    "a part of the optimizer on the host needs stage 3",
    """A ratio below 1 keeps a part of the optimizer on the host, and super_offload steps it there while the
    accelerator goes on: both are for ZeRO stage 3 with the optimizer on the host, and a ratio for DeepSpeed's
    Adam.""",
    wrong={**BATCH, "optimizer": _ADAM, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
    right={**BATCH, "optimizer": _ADAM, ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
    sources=("DeepSpeed runtime/zero/config.py, runtime/zero/stage3.py, runtime/superoffload",),
)
def partial_offload_has_its_stage(settings: Settings) -> Iterator[Finding]:
    """Fires for a ratio below 1 and for super_offload elsewhere."""
    stage, device = stage_of(settings), _device(settings, "offload_optimizer")
    ratio = settings.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and stage is not None and stage < 3:
        message = f"offload_optimizer.ratio {ratio:g} at stage {stage}: DeepSpeed refuses it below stage 3"
        yield Finding(message, (ZERO, "offload_optimizer", "ratio"), help="set stage to 3, or ratio to 1")
    kind = settings.get("optimizer", "type")
    is_other = isinstance(kind, str) and kind.lower() not in ADAM
    if ratio is not None and ratio < 1 and stage == 3 and is_other and device != "none":
        message = f"offload_optimizer.ratio {ratio:g} with {kind}: DeepSpeed splits Adam only"
        yield Finding(message, (ZERO, "offload_optimizer", "ratio"), help="use AdamW, or set ratio to 1")
    path: Path = (ZERO, "offload_optimizer", "super_offload")
    if settings.get(*map(str, path)) is not True:
        return
    if stage is not None and stage < 3:
        message = f"super_offload has no effect at stage {stage}: it is for stage 3"
        yield Finding(message, path, help="set stage to 3, or remove it", severity=Severity.WARNING)
    elif device not in (None, "cpu"):
        message = f'super_offload with device "{device}": the optimizer must be on the host'
        yield Finding(message, path, help='set device to "cpu"')
    if is_other and stage == 3:
        message = f"super_offload steps with Adam on the host, not with {kind}"
        yield Finding(message, path, help="use AdamW, or remove it")

"""A DeepSpeed configuration on its own: batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Related, Safety

from .arithmetic import listed, nearest_multiples
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def ranks(settings: Settings) -> int | None:
    """The data-parallel ranks that the three batch sizes leave, None when they do not tell."""
    total, micro, steps = (settings.number(name) for name in (TOTAL, MICRO, STEPS))
    if not total or not micro or not steps or total % (micro * steps):
        return None
    return int(total // (micro * steps))


@file_rule(
    "F003",
    DEEPSPEED,
    "the batch sizes do not multiply up",
    """train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · data-parallel ranks, without
    remainder. Where one is left out, DeepSpeed rounds down, finds that the product is another one, and stops.""",
    wrong={TOTAL: 100, MICRO: 8, STEPS: 4, "gradient_clipping": 1.0},
    right={TOTAL: 96, MICRO: 8, STEPS: 4, "gradient_clipping": 1.0},
    sources=("DeepSpeed runtime/config.py; DeepSpeed#6914",),
)
def batches_multiply(settings: Settings) -> Iterator[Finding]:
    """Fires when no number of ranks gives the batch."""
    for name in (TOTAL, MICRO, STEPS):
        size = settings.number(name)
        if size is not None and size <= 0:
            yield Finding(
                f"{name} {size:g}: DeepSpeed stops at a batch without samples", (name,), help="write 1 or more"
            )
    total, factors = settings.number(TOTAL), {name: settings.number(name) for name in (MICRO, STEPS)}
    given = {name: int(value) for name, value in factors.items() if value and value > 0}
    if not total or total < 0 or not given:
        return
    divisor = given.get(MICRO, 1) * given.get(STEPS, 1)
    if int(total) % divisor:
        terms = " · ".join(f"{name} {value}" for name, value in given.items())
        near = nearest_multiples(int(total), divisor)
        yield Finding(
            f"{TOTAL} {int(total)} / ({terms}) is not whole; nearest: {listed(near)}",
            (TOTAL,),
            help=f"write a multiple of {divisor}",
            fixes=tuple(
                Fix(f"set {TOTAL} to {value}", Safety.CHANGES_NUMERICS, (Edit((TOTAL,), value),)) for value in near
            ),
            related=tuple(Related(f"{name} is set here", (name,)) for name in given),
        )

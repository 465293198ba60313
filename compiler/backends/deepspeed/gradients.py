"""How DeepSpeed averages gradients, and when it refuses to or does not; rules of specs and of files ask here.

Read in runtime/zero/stage_1_and_2.py and stage3.py, and run: with a factor f each rank divides by f before the
reduction and by (ranks / f) after it. Stage 1 with reduce_scatter divides by the ranks at once, whatever f is.
"""

from __future__ import annotations


def refused_scaling(stage: int, *, reduce_scatter: bool, prescale: bool, predivide: float) -> str | None:
    """Why DeepSpeed does not start; None when it does."""
    if stage < 2 or not reduce_scatter:
        return None
    if predivide != 1:
        return f"gradient_predivide_factor {predivide:g} needs reduce_scatter false at stage {stage}"
    return f"prescale_gradients needs reduce_scatter false at stage {stage}" if prescale else None


def wrong_scale(
    stage: int, *, reduce_scatter: bool, prescale: bool, predivide: float, ranks: int, cp: int = 1
) -> str | None:
    """By how much gradients come out wrong on `ranks` ranks (dp · cp); None when they are right."""
    if prescale or predivide == 1 or predivide != ranks:
        return None
    if stage == 3 and not reduce_scatter:
        return f"{predivide:g} times too small: a factor equal to the number of ranks is not multiplied back at stage 3"
    if cp > 1 and stage in (1, 2) and not reduce_scatter:
        return f"{cp} times too small: with a factor equal to dp · cp = {ranks}, the sum over cp is left out"
    return None

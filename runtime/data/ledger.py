"""Which samples a step of a run has, and of which documents they are: `parcompile data`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.doctor.metrics import RUN
from parcompile.plan import Plan
from parcompile.spec import RampupBatchSize
from parcompile.user_files import parse_json, read_text

from .rows_of_files import unusable
from .training_files import Mixture, SequencesOfFiles


def samples_before(step: int, plan: Plan, run: Path | None = None) -> int:
    """How many samples the steps before `step` (from 1 on) took.

    Args:
        step: of the run, as its output counts them.
        plan: that the step ran under.
        run: the folder with the run's run.json, which names the batch size of all its steps; None: that of the plan.

    Raises:
        RunError: run.json cannot be read, or says that the step ran under another plan.
    """
    if run is None:
        return plan.spec.training.samples_after(step - 1)
    file = run / RUN
    try:
        said = [
            (int(one["after_step"]), str(one["plan"]), int(one["global_batch_size"]), _ramp(one))
            for one in parse_json(read_text(file))["plans"]
        ]
    except OSError as error:
        raise unusable(
            f"{file} cannot be read: {error.strerror}; --run names the folder that a run wrote it to"
        ) from None
    except (ValueError, TypeError, KeyError):
        raise unusable(
            f"{file} does not name plans with after_step and global_batch_size: it is damaged, or of an earlier version"
        ) from None
    if not said or said[0][0]:
        raise unusable(f"{file} does not begin with the first step: what came before step {step} is not known")
    begun = [one for one in said if one[0] < step]
    if begun[-1][1] != plan.plan_hash:
        raise unusable(
            f"step {step} ran under plan {begun[-1][1][:12]} ({file}), and this is plan {plan.plan_hash[:12]}: name "
            "the one that ran"
        )
    ends = [*(after for after, *_ in begun[1:]), step - 1]
    taken = 0
    for (after, _, batch, ramp), end in zip(begun, ends, strict=True):
        taken = taken + (end - after) * batch if ramp is None else ramp.samples_after(end - after, batch, taken)
    return taken


def _ramp(ran: Mapping[str, Any]) -> RampupBatchSize | None:
    """How the batch of a plan of run.json grew.

    Raises:
        TypeError, ValueError, KeyError: it is damaged.
    """
    if (given := ran.get("rampup_batch_size")) is None:
        return None
    found = RampupBatchSize(*(int(given[key]) for key in ("start", "increment", "samples")))
    if not found.fits(int(ran["global_batch_size"])):
        raise ValueError(given)
    return found


def ledger(step: int, plan: Plan, data: SequencesOfFiles, before: int) -> dict[str, Any]:
    """The samples of a step as JSON, in the order of their numbers; `before` of them were taken by earlier steps.

    A sample is sequence `sequence` of the data, walked for the time `epoch` (from 1 on). The rank `dp_rank` of dp takes
    it in its micro-batch `micro_batch`. Of a document it has the tokens from the first number to below the second.
    """
    training, dp = plan.spec.training, plan.spec.parallelism.dp
    numbers = range(before, before + training.batch(before))
    parts = data.parts([number % len(data) for number in numbers])
    rows: list[Mapping[str, Any]] = []
    for place, (number, documents) in enumerate(zip(numbers, parts, strict=True)):
        turn, index = place // training.micro_batch_size, number % len(data)
        row = {"sample": number, "epoch": number // len(data) + 1, "sequence": index}
        if isinstance(data, Mixture):
            row |= dict(zip(("data_set", "sequence_in_set"), data.source(index), strict=True))
        row |= {"dp_rank": turn % dp, "micro_batch": turn // dp}
        said = [{"file": one.file, "document": one.document, "tokens": [one.first, one.end]} for one in documents]
        rows.append({**row, "documents": said})
    return {"format": 1, "step": step, "plan": plan.plan_hash, "sequences": len(data), "samples": rows}


def text(found: Mapping[str, Any]) -> str:
    """The ledger as a table, a line for each document of each sample."""
    samples = found["samples"]
    lines = [("sample", "epoch", "dp", "micro-batch", "tokens", "of document")]
    for one in samples:
        head = tuple(str(one[name]) for name in ("sample", "epoch", "dp_rank", "micro_batch"))
        for document in one["documents"]:
            first, end = document["tokens"]
            lines.append((*head, f"{first:,}-{end - 1:,}", document["document"]))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    rows = ("  ".join([*map(str.rjust, line, widths), line[5]]) for line in lines)
    first, last = samples[0]["sample"], samples[-1]["sample"]
    begin = f"step {found['step']}: samples {first:,} to {last:,}; an epoch has {found['sequences']:,}"
    return "\n".join([begin, *rows])

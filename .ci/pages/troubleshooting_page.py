"""docs/troubleshooting.md: from what a user sees to a code and what to do.

`python .ci/pages/troubleshooting_page.py` writes it: each rule is run on its own wrong example, so that the messages
are those that the checker prints.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.diagnostics import Diagnostic, Severity
from parcompile.lint.deepspeed import usage_context
from parcompile.lint.registry import FILE_CODES, GROUPS, Page, Settings, check_settings, file_rules, pages
from parcompile.rules import CONCERNED, check, example_spec
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.text import parse

_SHORT = 100
"""Characters up to which a right example stands in a cell."""

_START = """\
# Troubleshooting

From the message that you see, to its code, to what to do. This page is written by
`python .ci/pages/troubleshooting_page.py`: each rule is run on its wrong example, so the messages are the checker's
own, with that example's numbers. The whole page of a code is in [rules](rules.md), and in `parcompile explain CODE`.

First of all: `parcompile check SPEC` before every submission; exit code 0 means that a plan can be made.
"""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a run says, and what to do. `sign` is a part of the message that never changes."""

    sign: str
    meaning: str
    advice: str


RUN: tuple[Trouble, ...] = (
    Trouble(
        "ranks, this job has",
        "The launcher started another number of ranks than the plan is for.",
        "Start as many as the message says, or set nodes and gpus_per_node in the spec and compile it again.",
    ),
    Trouble(
        "the runtime does not execute this plan",
        "The plan has what this runtime refuses; the code stands behind it.",
        "`parcompile explain CODE`; or launch the plan's files for another backend (`--target`).",
    ),
    Trouble(
        "the model would compute other numbers than the plan's",
        "Keys of the model's configuration differ from the plan's; the message has both values of each.",
        "Name the model's own `config.json` as `hf_config` under `model` in the spec, and compile it again.",
    ),
    Trouble(
        "otherwise than its attention is told",
        "transformers has the sliding window in its mask or in its attention only, or masks in chunks.",
        "Take the window out of the configuration, or train sequences that it covers.",
    ),
    Trouble(
        "the plan was changed after it was compiled",
        "plan.json does not hash to what it says.",
        "Change the spec, not the plan, and compile it again.",
    ),
    Trouble(
        "the plan was compiled by parcompile",
        "Compiler and runtime are of different versions.",
        "Install the same version on all machines, or compile the plan again.",
    ),
    Trouble(
        "did not report within",
        "A rank did not start, or cannot be reached; the others waited as long as PARCOMPILE_HANDSHAKE_TIMEOUT says "
        "(120 s).",
        "Look at the log of the rank that is named, on its node; raise the time where ranks start slowly.",
    ),
    Trouble(
        "cannot reach the other ranks through",
        "The address or port of the rendezvous is wrong, taken or behind a firewall.",
        "Check MASTER_ADDR and MASTER_PORT, and that nodes reach each other there.",
    ),
    Trouble(
        "its process has ended or is stopped",
        "A rank fell silent during the live check: it was killed, or it is stopped.",
        "Look at what it wrote last, and at its node's log: killed for memory, errors of the device.",
    ),
    Trouble(
        "what rank 0 writes to",
        "The folder of checkpoints is another one on the node that is named.",
        "Name one with `--checkpoints` that all nodes share.",
    ),
    Trouble(
        "of what the estimate counts on",
        "A link or matrix products reach less than half of what the accelerator's preset leads one to expect.",
        "Look for a slow node in the report's list; when all are alike, measure a preset with `parcompile profile`.",
    ),
    Trouble(
        "ended without a message",
        "The process of a rank is gone and wrote nothing: mostly the system killed it, for memory or at the end of its "
        "time. The line says its host, process, step and phase.",
        "Look at `dmesg` and the scheduler's log of that host; go on from the last checkpoint.",
    ),
    Trouble(
        "has given no sign of life for",
        "A rank is stopped, or its host hangs or is cut off. PARCOMPILE_SILENT_TIMEOUT says how long that may last "
        "(120 s).",
        "Look at that host; go on from the last checkpoint on others.",
    ),
    Trouble(
        "has answered nothing for",
        "The process that keeps the launcher's store, rank 0 or torchrun's agent, is stopped, or cannot be reached. "
        "PARCOMPILE_SILENT_TIMEOUT says how long that may last (120 s).",
        "Look at the host that the line names; go on from the last checkpoint.",
    ),
    Trouble(
        "Is the port of",
        "The store at MASTER_ADDR and MASTER_PORT is another job's, which goes on; this rank has left nothing there.",
        "Start with another `--master_port`.",
    ),
    Trouble(
        "the gradient norm is not a finite number",
        "A loss or a gradient overflowed, or a sample is broken. The line says on which ranks losses are not finite.",
        "Go on from the checkpoint that the line names with a smaller learning rate, or without the samples of that "
        "step; `initialize(stop_on_nonfinite=N)` allows N - 1 such steps in a row.",
    ),
    Trouble(
        "are not finite numbers",
        "A weight is infinite or no number: a checkpoint of it is not written, and `latest` stays.",
        "Go on from the last checkpoint, as above.",
    ),
    Trouble(
        "has not answered as a rendezvous store",
        "Another program listens on the port of the rendezvous.",
        "Choose a free port with `--master_port`.",
    ),
    Trouble(
        "lost its connection to a rank that ended",
        "Another rank failed first.",
        "Its message is the one that counts: search all logs for `parcompile: error`, then for tracebacks.",
    ),
    Trouble(
        "the injected model does not compute what the original did",
        "The self-check compared one forward and backward pass of your model before and after injection.",
        "The model's code differs from what its family is known for: see [Hugging Face models](adapter.md).",
    ),
    Trouble(
        "model_parameters are not the injected model's",
        "The list of parameters was made before injection, which replaces them.",
        "Give a function: `initialize(model_parameters=lambda model: [...])`.",
    ),
    Trouble(
        "measurements are not written",
        "The file beside the plan cannot be written, or holds something else. Training goes on.",
        "Name another file with `initialize(measurements=...)`, or False.",
    ),
)
"""What no rule can know before the run. A test finds each sign in the source."""

_MEMORY = """\
## The run ends out of memory

`parcompile estimate SPEC` shows the largest component of the fullest rank.

| largest | do |
|---|---|
| activations | activation_checkpointing full, a smaller micro_batch_size, a larger cp, sequence_parallel with tp |
| logits | a larger tp (the vocabulary is split over it), a smaller micro_batch_size |
| weights, gradients | a larger tp |
| master weights, optimizer state | ZeRO stage 1, more ranks in dp · cp |

`parcompile search SPEC` compares all layouts that the spec leaves open. When the estimate said that it fits, keep the
row that the run left in `measurements.csv` and [calibrate](estimates.md#your-own-runs).
"""


def reference() -> str:
    """The whole document."""
    found = _messages()
    parts = [_START, _runs(), _MEMORY]
    letters = sorted({code[0] for code in pages()})
    parts += [_table(letter, [(code, one) for code, one in found.items() if code[0] == letter]) for letter in letters]
    return "\n".join(parts)


def _runs() -> str:
    rows = ["## A run says", "", "| you see | which means | do |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| … {one.sign} … | {one.meaning} | {one.advice} |" for one in RUN), ""])


def _table(letter: str, rows: Sequence[tuple[str, Diagnostic | None]]) -> str:
    lines = [f"## {letter}: {GROUPS[letter]}", "", "| you see | code | do |", "|---|---|---|"]
    for code, one in rows:
        page = pages()[code]
        seen, advice = page.title, _advice(page)
        if one is not None:
            choices = " or ".join(fix.title for fix in one.fixes)
            seen, advice = one.message, one.help or choices or advice
        lines.append(f"| {_cell(seen)} | [{code}](rules.md#{code.lower()}) | {_cell(advice)} |")
    return "\n".join([*lines, ""])


def _advice(page: Page) -> str:
    """What to do where the message itself does not say it."""
    if page.severity is Severity.INFO:
        return "nothing to do; this reports a decision"
    right = " ".join(page.right.split())
    return f"for example `{right}`" if 2 < len(right) <= _SHORT else "see the page of the code"


def _messages() -> dict[str, Diagnostic | None]:
    """For every code what its wrong example is told; None where an excerpt cannot be checked alone."""
    found: dict[str, Diagnostic | None] = dict.fromkeys(pages())
    for code, one in _all_found():
        if one.code == code and found[code] is None:
            found[code] = one
    return found


def _all_found() -> Iterator[tuple[str, Diagnostic]]:
    from parcompile.rules import all_rules

    for rule in all_rules():
        with contextlib.suppress(Unavailable):
            yield from ((rule.code, one) for one in check(Resolution(example_spec(rule.wrong)), CONCERNED))
    for entry in file_rules():
        around = usage_context(entry.wrong, None, entry.usage)
        settings = Settings(entry.wrong, frozenset(), around)
        yield from ((entry.code, one) for one in check_settings(settings, entry.kind))
    for page in FILE_CODES.values():
        if page.code.startswith("J"):
            read = parse(page.wrong, f"example.{page.format}")
            yield from ((page.code, one) for one in read.diagnostics)


def _cell(text: str) -> str:
    return text.replace("\\", r"\\").replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(reference())

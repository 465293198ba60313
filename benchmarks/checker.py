"""How right `parcompile check` is about DeepSpeed configurations, with the installed DeepSpeed as the judge.

    python benchmarks/checker.py FOLDER ...

The folders hold configurations that others wrote. Each goes through DeepSpeed's own reader, through the one who fills
"auto" when there is one, through DeepSpeedConfig and `deepspeed.initialize` of a small model. An error is right when
that refuses the file, or never looks at the key. A warning is right when it can be shown: an unknown key that is not
looked up, a deprecated one that DeepSpeed speaks of, a key that is missing. Warnings that nothing here can show are
counted apart. Planted mistakes and drawn values are judged by `tests/compiler/test_deepspeed_judge.py`.

    python benchmarks/checker.py --megatron SOURCES [--megatron SOURCES ...] [FOLDER ...]
    python benchmarks/checker.py --neox SOURCES FOLDER ...

The same for scripts and YAML with Megatron-LM's arguments, judged by the options that the sources of Megatron-LM or of
a fork add to their parser (without a folder, the files in the first sources are judged; further sources are those that
the first ones import), and for files of gpt-neox, judged by `NeoXArgs.from_ymls` of its sources. Of Megatron-LM's
arguments only errors about options, types and choices are judged (K001, K003, K004): what the rules say of values is
judged where the rules are tested.

With `--mutants N` so many copies of files of DeepSpeed or gpt-neox are judged instead, each with a drawn mistake.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci" / "upstream"))

from deepspeed_judge import Judge, Verdict  # noqa: E402
from megatron_static import Option, options, refusals  # noqa: E402

from parcompile.backends.kinds import DEEPSPEED, GPT_NEOX, MEGATRON  # noqa: E402
from parcompile.backends.megatron.arguments import Unknown  # noqa: E402
from parcompile.backends.megatron.file import Call  # noqa: E402
from parcompile.cli.check import command as check_command  # noqa: E402
from parcompile.diagnostics import Diagnostic, Severity  # noqa: E402
from parcompile.lint.deepspeed import LIGHTNING, UsageOptions, usage_context  # noqa: E402
from parcompile.pipeline import Checked, check_any  # noqa: E402

NEWEST = UsageOptions(version="99")
"""The judge is the newest version, whatever a file beside the configuration requires."""
ABSENT = "ModuleNotFoundError"


@dataclass
class Tally:
    """What became of the files."""

    files: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: int = 0
    found: int = 0
    warned: int = 0
    errors: int = 0
    false_errors: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    right_warnings: int = 0
    wrong_warnings: list[str] = field(default_factory=list)
    unjudged: collections.Counter[str] = field(default_factory=collections.Counter)
    infos: int = 0
    rewritten: int = 0
    rewritten_wrongly: list[str] = field(default_factory=list)


def written(folders: Sequence[Path], *ends: str) -> list[Path]:
    """Files whose names end so."""
    return [one for folder in folders for one in sorted(folder.rglob("*")) if one.suffix in ends and one.is_file()]


def of_kind(folders: Sequence[Path], kind: str) -> list[Path]:
    """Scripts, JSON and YAML that are of a kind."""
    return [one for one in written(folders, ".sh", ".yaml", ".yml", ".json") if check_any(one).kind == kind]


def judge_file(tally: Tally, file: Path, judge: Judge) -> None:
    checked = check_any(file, usage=NEWEST)
    tally.files += 1
    tally.kinds[checked.kind] += 1
    if checked.kind != DEEPSPEED:
        return
    filler = usage_context(checked.document.tree if checked.document else None, file, UsageOptions()).filler
    if filler is None and checked.document is None and '"auto"' in checked.text.text:
        filler = "transformers"
    filler = filler if filler in ("transformers", "accelerate", LIGHTNING) else "bare"
    if filler == LIGHTNING:
        tally.unjudged["files that Lightning fills"] += 1
        return
    verdict = judge.ask(checked.text.text, filler=filler)
    if verdict.refused and ABSENT in verdict.refused:
        verdict = judge.ask(checked.text.text, filler=filler, engine=False)
    errors = [one for one in checked.diagnostics if one.is_error]
    tally.errors += len(errors)
    if verdict.refused:
        tally.refused += 1
        tally.found += bool(errors)
        if not errors:
            tally.warned += any(one.severity is Severity.WARNING for one in checked.diagnostics)
            tally.missed.append(f"{file.name}: {verdict.by}: {verdict.refused[:160]}")
    else:
        wrong = [one for one in errors if not is_unread(one, verdict)]
        tally.false_errors += [f"{file.name}: {one.code} {one.message}" for one in wrong]
    for one in checked.diagnostics:
        if one.severity is Severity.INFO:
            tally.infos += 1
        elif one.severity is Severity.WARNING:
            judge_warning(tally, file, one, verdict, checked)
    fix(tally, file, checked, verdict, judge, filler)


def is_unread(one: Diagnostic, verdict: Verdict) -> bool:
    names = [str(step) for step in one.path]
    return any(".".join(names[:length]) in verdict.unread for length in range(1, len(names) + 1))


def judge_warning(tally: Tally, file: Path, one: Diagnostic, verdict: Verdict, checked: Checked) -> None:
    name = str(one.path[-1]) if one.path else ""
    if verdict.by in ("reader", "filler", "config"):
        tally.unjudged[f"{one.code} in a file that is refused before"] += 1
    elif one.code == "A001":
        assert checked.document is not None
        shown = isinstance(checked.document.tree, dict) and "gradient_clipping" not in checked.document.tree
        note(tally, file, one, shown=shown)
    elif one.code == "K001" and len(one.path) == 1:
        note(tally, file, one, shown=name in verdict.unread)
    elif one.code == "F010":
        note(tally, file, one, shown=any(name in message for message in verdict.warnings))
    else:
        tally.unjudged[one.code] += 1


def note(tally: Tally, file: Path, one: Diagnostic, *, shown: bool) -> None:
    if shown:
        tally.right_warnings += 1
    else:
        tally.wrong_warnings.append(f"{file.name}: {one.code} {one.message}")


def fix(tally: Tally, file: Path, checked: Checked, verdict: Verdict, judge: Judge, filler: str) -> None:
    """What `--fix` makes of the file is taken when the file was taken."""
    if not any(one.fixes for one in checked.diagnostics):
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_text(checked.text.text, encoding="utf-8")
        silent = io.StringIO()
        used = ["--used-with", filler] if filler != "bare" else []
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent), contextlib.suppress(SystemExit):
            check_command.main(["--fix", "--deepspeed-version", "99", *used, str(copy)])
        after = copy.read_text(encoding="utf-8")
    if after == checked.text.text:
        return
    tally.rewritten += 1
    again = judge.ask(after, filler=filler, engine=not (verdict.refused and ABSENT in verdict.refused))
    if again.refused and not verdict.refused and ABSENT not in again.refused:
        tally.rewritten_wrongly.append(f"{file.name}: {again.refused[:160]}")


def mutants(files: Sequence[Path], count: int, folder: Path) -> list[Path]:
    """Copies of files without an error, each with a key misspelt or left out, or a value of another type or number."""
    draw, made = random.Random(1), list[Path]()
    read = [one for one in map(check_any, files) if one.kind in (DEEPSPEED, GPT_NEOX) and one.document]
    bases = [one.document for one in read if one.document and not any(found.is_error for found in one.diagnostics)]
    while bases and len(made) < count:
        base = draw.choice(bases)
        tree = json.loads(json.dumps(base.tree))
        holder, key = draw.choice(list(_entries(tree)))
        value, how = holder.pop(key), draw.choice(("misspelt", "left out", "twice", "abc", -3, True, 2.5))
        at = draw.randrange(max(len(key) - 1, 1))
        if how == "misspelt":
            holder[key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :]] = value
        elif how != "left out":
            holder[key] = [value, value] if how == "twice" else how
        made.append(folder / f"{len(made)}{Path(base.file).suffix}")
        made[-1].write_text(json.dumps(tree, indent=1), encoding="utf-8")
    return made


def _entries(tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in tree.items():
        yield tree, key
        yield from _entries(value) if isinstance(value, dict) else ()


def pace(files: Sequence[Path]) -> float:
    """Files checked in a second of processor time, each once."""
    start = time.process_time()
    for file in files:
        check_any(file)
    return len(files) / (time.process_time() - start)


def of_megatron(sources: Sequence[Path], files: Sequence[Path]) -> Tally:
    """Arguments of Megatron-LM, judged by the options of these sources together."""
    known: dict[str, list[Option]] = {}
    for folder in sources:
        for flag, having in options(folder).items():
            known.setdefault(flag, []).extend(having)
    tally = Tally()
    for file in files:
        checked = check_any(file)
        tally.files += 1
        tally.kinds[checked.kind] += 1
        calls = [checked.document, *checked.document.others] if isinstance(checked.document, Call) else []
        closed = [call for call in calls if call.is_command_line and not call.arguments.is_open]
        if closed:
            why = {flag: one for call in closed for flag, one in refusals(known, given(call)).items()}
            judge_errors(tally, file, checked, why, ("K001", "K003", "K004"))
    return tally


def given(call: Call) -> dict[str, Any]:
    """The flags of a call with their values: what a variable decides is taken by any option."""
    said = call.arguments
    flags = {said.flags[name]: value for name, value in said.values.items()}
    flags |= {one.flag: True if one.kind == "unknown" else one.value for one in said.problems}
    return {flag: True if isinstance(value, Unknown) else value for flag, value in flags.items()}


def of_neox(sources: Path, files: Sequence[Path]) -> Tally:
    """Files of gpt-neox, judged by its own reader."""
    tally, found = Tally(), {file: check_any(file) for file in files}
    tally.files, tally.kinds = len(found), collections.Counter(one.kind for one in found.values())
    own = {file: one for file, one in found.items() if one.kind == GPT_NEOX}
    asked = "".join(f"{json.dumps(one.text.text)}\n" for one in own.values())
    command = [sys.executable, str(ROOT / ".ci" / "upstream" / "gpt_neox.py"), str(sources)]
    said = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    for (file, checked), verdict in zip(own.items(), map(json.loads, said), strict=True):
        why = verdict.get("refused")
        words = set(_WORD.findall(why)) if why else set()
        keys = {str(step).replace("-", "_") for one in checked.diagnostics for step in one.path} & words
        field = why.split()[-1] if why else ""  # the field whose own default is of another type, say
        keys |= {field} if field and any(is_named(field, one) for one in checked.diagnostics) else set()
        judge_errors(tally, file, checked, dict.fromkeys(keys or ["the file"], why) if why else {}, None)
    return tally


_WORD = re.compile(r"\w+")


def judge_errors(
    tally: Tally, file: Path, checked: Checked, why: Mapping[str, str], codes: Sequence[str] | None
) -> None:
    """The errors of a file, those of some codes where they are named, beside why upstream refuses it, by name.

    A refusal is found, or warned of, by what names one of the names. Of one that names nothing any error finds it, and
    no warning. gpt-neox ends at the first: what further errors of such a file say is not judged.
    """
    judged = [one for one in checked.diagnostics if codes is None or one.code in codes]
    errors = [one for one in judged if one.is_error]
    tally.errors += len(errors)
    told = [one for one in judged if any(is_named(name, one) for name in why)]
    wrong = [one for one in errors if one not in told] if codes is not None or not why else []
    tally.false_errors += [f"{file}: {one.code} {one.message}" for one in wrong]
    if not why:
        return
    tally.refused += 1
    if any(one.is_error for one in told) or (errors and "the file" in why):
        tally.found += 1
    elif any(one.severity is Severity.WARNING for one in told):
        tally.warned += 1
        tally.missed.append(f"{file}: warned of: {next(iter(why.values()))[:160]}")
    else:
        tally.missed.append(f"{file}: silent: {'; '.join(why.values())[:320]}")


def is_named(name: str, one: Diagnostic) -> bool:
    steps = {str(step).replace("-", "_") for step in one.path}
    return name in steps or re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", one.message) is not None


def report(tally: Tally) -> None:
    accused = len({line.partition(": ")[0] for line in tally.false_errors})
    figures = common(tally)
    figures["files that are accused"] = share(accused, tally.files)
    show(figures, {"false error": tally.false_errors, "refusal without an error": tally.missed})


def common(tally: Tally) -> dict[str, object]:
    """What is told of every kind of file."""
    return {
        "files": tally.files,
        "recognised": ", ".join(f"{kind} {n}" for kind, n in tally.kinds.most_common()),
        "errors that are right": share(tally.errors - len(tally.false_errors), tally.errors),
        "refusals that are found": share(tally.found, tally.refused),
        "or warned of": share(tally.found + tally.warned, tally.refused),
    }


def show(figures: Mapping[str, object], lists: Mapping[str, Sequence[str]]) -> None:
    for name, figure in figures.items():
        print(f"{name:28} {figure}")
    for title, lines in lists.items():
        for line in lines:
            print(f"{title}: {line}")


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})" if whole else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--megatron", action="append", type=Path, metavar="SOURCES", help="of Megatron-LM or a fork")
    parser.add_argument("--neox", type=Path, metavar="SOURCES", help="of gpt-neox")
    parser.add_argument("--mutants", type=int, default=0, metavar="N", help="judge so many copies with a mistake (0)")
    chosen = parser.parse_args()
    if chosen.megatron is not None:
        report(of_megatron(chosen.megatron, of_kind(chosen.folders or chosen.megatron[:1], MEGATRON)))
        return
    files = of_kind(chosen.folders, GPT_NEOX) if chosen.neox else written(chosen.folders, ".json")
    with tempfile.TemporaryDirectory() as folder:
        files = mutants(files, chosen.mutants, Path(folder)) if chosen.mutants else files
        if chosen.neox is not None:
            report(of_neox(chosen.neox, files))
        else:
            of_deepspeed(files)


def of_deepspeed(files: Sequence[Path]) -> None:
    tally = Tally()
    with Judge() as judge:
        for file in files:
            judge_file(tally, file, judge)
    judged = tally.right_warnings + len(tally.wrong_warnings)
    figures = common(tally) | {
        "warnings that are right": share(tally.right_warnings, judged),
        "warnings that nothing shows": dict(tally.unjudged),
        "remarks": tally.infos,
        "files that --fix changes": f"{tally.rewritten}, wrongly: {len(tally.rewritten_wrongly)}",
    }
    if files:  # in nine rounds, each in a process of its own, which has kept nothing of the files
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
            rates = fresh.map(pace, [files] * 9, chunksize=1)
        said = f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}), one core"
        figures["files per second"] = said
    lists = {"false error": tally.false_errors, "refusal without an error": tally.missed}
    show(figures, {**lists, "false warning": tally.wrong_warnings, "wrong fix": tally.rewritten_wrongly})


if __name__ == "__main__":
    main()

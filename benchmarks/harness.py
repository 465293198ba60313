"""What benchmarks share: options, medians with quartiles, tables, plans of specs, commands that are ended in time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
"""Of a command whose ranks are CPU processes of one thread."""


def parsed(doc: str | None, *named: tuple[str, dict[str, Any]], **options: Any) -> argparse.Namespace:
    """The options of a command, whose help begins with its docstring; `named`: its arguments, as argparse takes them.

    Each keyword is an option: its default, or its default, what it means and the values that it may have. A list takes
    several of them, a type stands for an option without a default, and False for one without a value.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, how in named:
        parser.add_argument(name, **how)
    for name, given in options.items():
        default, said, choices = (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
        more: dict[str, Any] = {"default": default, "type": type(default), "choices": choices}
        if isinstance(default, list):
            more |= {"nargs": "*", "type": type(default[0]) if default else str}
        elif isinstance(default, type):
            more |= {"default": None, "type": default}
        elif default is False:
            more = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", help=said, **more)
    return parser.parse_args()


JSON = Path, "write every single measurement to this file"
"""The option `json`."""


def write_json(file: Path | None, found: Any) -> None:
    """Writes what was measured, where the option asks for it."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Of one or more values."""
    each = values if len(values) > 1 else [*values, *values]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median with the quartiles, each in a format."""
    low, middle, high = quartiles(values)
    return f"{middle:{form}} ({low:{form}} … {high:{form}})"


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of neighbours: the one over the other of each round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def row(*cells: object) -> None:
    """Prints a row of a table in Markdown."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def heads(*columns: str) -> None:
    """Prints the first two lines of a table."""
    row(*columns)
    print("|" + "---|" * len(columns), flush=True)


def resident_bytes(*, peak: bool = False) -> int:
    """Of this process, now or at most since `forget_peak`."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """The peak of `resident_bytes` begins anew, where the system can do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def seconds_in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call in each round in this process, after a round that warms up; `before` each something else."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            before()
            start = clock()
            call()
            if number:
                found[name].append(clock() - start)
    return found


def rotated(names: Sequence[str], number: int) -> Sequence[str]:
    """In another order each round, so that nobody always comes behind the same."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Refuses methods whose losses are not those of the first one."""
    expected = next(iter(losses.values()))
    for name, own in losses.items():
        error = max(abs(one / other - 1) for one, other in zip(own, expected, strict=True))
        assert error < 1e-3, f"{name} trains something else: losses {own}, not {expected}"


def llama(hidden: int, intermediate: int, layers: int, vocabulary: int, positions: int, **more: Any) -> dict[str, Any]:
    """The configuration of a small Llama with 8 heads on 4 of keys, where `more` does not say otherwise."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    ends = {"vocab_size": vocabulary, "max_position_embeddings": positions}
    return {"model_type": "llama", **sizes, **heads, **ends, **more}


@contextlib.contextmanager
def drawn_model(config: Mapping[str, Any]) -> Iterator[str]:
    """The folder of a Llama that is drawn, for ranks of this process; they have one thread each."""
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**config)).save_pretrained(folder)
        yield folder


def cpu_spec(
    model: Mapping[str, Any], ranks: int, parallelism: Mapping[str, Any], name: str = "benchmark", **training: Any
) -> dict[str, Any]:
    """The spec of a small model on ranks of this machine, in fp32."""
    return {
        "version": 1,
        "name": name,
        "model": {**model},
        "cluster": {"nodes": 1, "gpus_per_node": ranks, "accelerator": "cpu"},
        "parallelism": {**parallelism},
        "training": {"precision": "fp32", **training},
    }


def plan_of(tree: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Any:
    """The plan of a spec; `config` is that of a model, which lies beside it as config.json."""
    from parcompile.pipeline import compile_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(tree), encoding="utf-8")
        if config is not None:
            file.with_name("config.json").write_text(json.dumps(config), encoding="utf-8")
        plan, checked = compile_file(file)
    assert plan is not None, checked.diagnostics
    return plan


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run_for(
    words: Sequence[str],
    seconds: float | None,
    output: IO[Any] | int = subprocess.DEVNULL,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> int | None:
    """The exit code of a command, which has a session of its own; None where it took longer than that.

    Whatever it leaves running is killed.
    """
    process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""Megatron-LM's own argument parser and checks, on a machine without GPUs.

`judge FOLDER` as a program reads one JSON request a line and answers with one verdict a line: `Judge` talks to it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import io
import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream.megatron_parser import facts, parser, plain

VARIABLE = "PARCOMPILE_MEGATRON"
"""Names a git directory of NVIDIA/Megatron-LM, or a folder of its sources."""

_ENVIRONMENT = {"NVTE_CPU_OFFLOAD_V1": "1", "CUDA_GRAPHS_USE_NODE_PRIORITY": "1"}
"""Variables that a job sets for features of its machines: what only they decide is no fault of the arguments."""


class _RefusedError(Exception):
    pass


def _refuse(_self: argparse.ArgumentParser, message: str) -> None:
    raise _RefusedError(message)


class Bench:
    """The parser and the checks of one version, in this process."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.parser, self.module = parser(folder)
        self.parser.error = types.MethodType(_refuse, self.parser)
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.is_available = lambda: False
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
            major=9, minor=0, total_memory=80 << 30, name="H100"
        )
        torch.cuda.current_device = lambda: 0
        torch.cuda.device_count = lambda: 8
        for name, loaded in list(sys.modules.items()):
            if name.startswith("megatron"):
                for check in ("is_te_min_version", "is_flashinfer_min_version"):
                    if hasattr(loaded, check):
                        setattr(loaded, check, lambda *_, **__: True)
                for kernel in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
                    if hasattr(loaded, kernel):
                        setattr(loaded, kernel, lambda *_, **__: None)

    def verdict(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What becomes of `arguments`. Without a `world_size` one world that is accepted is enough."""
        try:
            parsed, unknown = self.parser.parse_known_args(list(request["arguments"]))
        except _RefusedError as error:
            return {"accepted": False, "stage": "parse", "message": str(error)}
        if unknown and not request.get("unknown"):
            return {"accepted": False, "stage": "parse", "message": f"unrecognized arguments: {' '.join(unknown)}"}
        first: dict[str, Any] | None = None
        for world in _worlds(parsed, request.get("world_size")):
            for connections in ("1", "8"):
                found = self._checked(copy.deepcopy(parsed), world, connections)
                if found["accepted"]:
                    return found
                if first is None or "CUDA_DEVICE_MAX_CONNECTIONS" in first["message"]:
                    first = found
        assert first is not None
        return first

    def _checked(self, parsed: argparse.Namespace, world: int, connections: str) -> dict[str, Any]:
        os.environ.update(_ENVIRONMENT, CUDA_DEVICE_MAX_CONNECTIONS=connections)
        parsed._is_global_batch_size_explicitly_specified = parsed.global_batch_size is not None
        parsed.rank, parsed.world_size = 0, world
        said = io.StringIO()
        stage = "validate"
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                checked = self.module.validate_args(parsed)
                stage = "configure"
                if not getattr(checked, "is_hybrid_model", False):
                    self._configure(checked)
        except (FileNotFoundError, ModuleNotFoundError) as error:
            return {"accepted": True, "stage": stage, "message": f"not decided: {error}", "world_size": world}
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            return {"accepted": False, "stage": stage, "message": text, "world_size": world}
        settings = {name: plain(value) for name, value in vars(checked).items()}
        notes = [line for line in said.getvalue().splitlines() if "arn" in line or "deprecat" in line]
        return {"accepted": True, "stage": "", "message": "", "world_size": world, "notes": notes, "settings": settings}

    def count(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the model that the arguments describe, as Megatron-Core builds it on the meta device.

        The vocabulary is not padded, and the layers are those of its local implementation, which has the same weights.
        """
        import torch

        parsed, _ = self.parser.parse_known_args(list(request["arguments"]))
        for name, value in _WHOLE.items():
            if hasattr(parsed, name):
                setattr(parsed, name, value)
        parsed._is_global_batch_size_explicitly_specified, parsed.rank, parsed.world_size = True, 0, 1
        parsed.padded_vocab_size = parsed.vocab_size
        _alone()
        torch.cuda.current_device = lambda: torch.device("meta")
        with contextlib.redirect_stdout(io.StringIO()), torch.device("meta"):
            model = importlib.import_module("gpt_builders").gpt_builder(self.module.validate_args(parsed), True, True)
        return {"parameters": sum(one.numel() for one in model.parameters())}

    def _configure(self, checked: argparse.Namespace) -> None:
        """The model's configuration, whose checks refuse what the arguments alone do not."""
        for name in ("megatron.training.argument_utils", self.module.__name__):
            with contextlib.suppress(ModuleNotFoundError):
                made = getattr(importlib.import_module(name), "core_transformer_config_from_args", None)
                if made is not None:
                    made(checked)
                    return


_WHOLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("megatron.json").read_text(encoding="utf-8"))["whole"]
"""Settings of a model that stands on one rank whole, without kernels of a GPU."""


def _alone() -> None:
    """Process groups of one process, and norms of torch in place of Apex's."""
    import torch

    if torch.distributed.is_initialized():
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(1, 1)
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    for name, loaded in list(sys.modules.items()):
        for attribute in ("LayerNormImpl", "LNImpl"):
            if name.startswith("megatron.core") and hasattr(loaded, attribute):
                setattr(loaded, attribute, norm)


def _worlds(parsed: argparse.Namespace, given: int | None) -> Sequence[int]:
    if given:
        return [given]
    sizes = [
        getattr(parsed, f"{axis}_size", None) or 1
        for axis in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    ]
    least = math.prod(sizes)
    experts = (getattr(parsed, "expert_model_parallel_size", None) or 1) * (
        getattr(parsed, "expert_tensor_parallel_size", None) or sizes[0]
    )
    whole = math.lcm(least, experts * sizes[1])
    found = [least, whole, *(least * more for more in (2, 4, 8)), math.lcm(8, least)]
    return list(dict.fromkeys(found))


class Judge:
    """The checks of one version in a process of their own. Use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Judge:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait(timeout=60)

    def verdict(
        self, arguments: Sequence[str], world_size: int | None = None, *, unknown: bool = False
    ) -> dict[str, Any]:
        """What the parser and the checks say; with `unknown`, options that the parser has not are left out."""
        return self._ask({"arguments": list(arguments), "world_size": world_size, "unknown": unknown})

    def parameters(self, arguments: Sequence[str]) -> int:
        """Parameters of the model that the arguments describe.

        Raises:
            RuntimeError: Megatron-LM does not build it; the message is its own.
        """
        found = self._ask({"arguments": list(arguments), "count": True})
        if "error" in found:
            raise RuntimeError(found["error"])
        return int(found["parameters"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the judge died")
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    if sys.argv[2:] == ["facts"]:
        made, _ = parser(folder)
        json.dump(facts(made), answers)
        answers.flush()
        os._exit(0)
    bench = Bench(folder)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = bench.count(request) if request.get("count") else bench.verdict(request)
        except (Exception, SystemExit) as error:
            answer = {"accepted": False, "stage": "run", "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""DeepSpeed's own verdict on configurations, on a machine without accelerators.

`Judge` starts this file as a program, which reads one JSON request a line and answers with one verdict a line. A
configuration goes the way of a job: the text through DeepSpeed's reader, "auto" through the one who fills it,
DeepSpeedConfig for world sizes that fit its batch, and `deepspeed.initialize` of a small model on rank 0 of a world
whose other ranks are pretended (torch's "fake" process group). Kernels are not built: their modules are mocks, so
optimizers are constructed with their real signatures and never step.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORLD = 8
STEPS = 1000
"""Length of the run that a filler is told."""


@dataclass(frozen=True)
class Verdict:
    """What became of a configuration. `by` names who refused it: "reader", "filler", "config" or "engine"."""

    refused: str | None = None
    by: str | None = None
    warnings: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """Keys that nobody looked up, those of a section behind its name and a point."""

    @property
    def accepted(self) -> bool:
        """Whether a job would start."""
        return self.refused is None


class Judge:
    """A process that knows DeepSpeed. To be used as a context."""

    def __init__(self, python: str = sys.executable, path: Path | None = None) -> None:
        self._command = [python, str(Path(__file__).resolve())]
        self._environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        if path is not None:
            self._environment["PYTHONPATH"] = str(path)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Judge:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ask(self, config: Mapping[str, Any] | str, *, filler: str = "bare", engine: bool = True) -> Verdict:
        """The verdict on a configuration or its text, with "auto" left to `filler`; without `engine`, before one."""
        assert self._process is not None, "use the judge as a context"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        text = config if isinstance(config, str) else json.dumps(config)
        print(json.dumps({"text": text, "filler": filler, "engine": engine}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Verdict(answer["refused"], answer["by"], tuple(answer["warnings"]), tuple(answer["unread"]))


class _Refused(Exception):  # noqa: N818 -- a verdict
    def __init__(self, by: str, error: BaseException) -> None:
        super().__init__(_said(error))
        self.by = by


def _said(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = place.filename.split("site-packages/")[-1]
    return f"{type(error).__name__}: {str(error)[:600]} ({file}:{place.lineno})"


class _Watched(dict[str, Any]):
    """The configuration or a section of it, which remembers what is looked up."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(
            {key: _Watched(one) if isinstance(one, dict) else copy.copy(one) for key, one in entries.items()}
        )
        self.seen: set[str] = set()

    def unread(self) -> Iterator[str]:
        """What nobody looked up."""
        for key, value in self.items():
            if key not in self.seen:
                yield key
            elif isinstance(value, _Watched):
                yield from (f"{key}.{one}" for one in value.unread())

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Watched:
        found = _Watched(self)
        found.seen = self.seen
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        found = _Watched({})
        found.update((key, copy.deepcopy(value, memo)) for key, value in self.items())
        found.seen = self.seen
        return found


class _Program:
    """The side that has DeepSpeed loaded."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore")
        os.environ.update(
            RANK="0",
            WORLD_SIZE=str(WORLD),
            LOCAL_RANK="0",
            LOCAL_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
        from unittest.mock import MagicMock

        import deepspeed
        import torch
        import torch.distributed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import op_builder
        from deepspeed.ops.op_builder.cpu import no_impl
        from torch.testing._internal.distributed.fake_pg import FakeStore

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        for builder in (op_builder.builder.OpBuilder, no_impl.NotImplementedBuilder):
            builder.load = lambda *_arguments, **_options: MagicMock()
        accelerator = type(get_accelerator())
        # The files are written for accelerators: those have both types, and what only CUDA has.
        accelerator.is_fp16_supported = accelerator.is_bf16_supported = lambda _self: True
        cuda = type("Cuda", (), {"device_name": lambda _self, _index=None: "cuda"})
        for name in ("deepspeed.runtime.swap_tensor.aio_config", "deepspeed.runtime.superoffload.superoffload_stage3"):
            module = importlib.import_module(name)
            vars(module)["get_accelerator"] = cuda
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        deepspeed.init_distributed("gloo")
        self.messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        self.logger = deepspeed.utils.logger
        self.logger.handlers, self.logger.propagate = [handler], False
        self.logger.setLevel(logging.WARNING)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.messages.clear()
        unread: list[str] = []
        try:
            tree = _step("reader", self.read, request["text"], request["filler"])
            tree = _step("filler", self.fill, tree, request["filler"])
            watched = _Watched(tree)
            _step("config", self.configure, watched)
            unread = list(watched.unread())
            if request["engine"]:
                _step("engine", self.start, tree)
        except _Refused as refused:
            return {"refused": str(refused), "by": refused.by, "warnings": self.messages[:20], "unread": unread}
        return {"refused": None, "by": None, "warnings": self.messages[:20], "unread": unread}

    def read(self, text: str, filler: str) -> dict[str, Any]:
        import hjson
        from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

        if filler in ("transformers", "accelerate"):
            tree = json.loads(text)
        else:
            tree = json.loads(json.dumps(hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)))
        if not isinstance(tree, dict):
            raise TypeError("the configuration is no object")
        return tree

    def fill(self, tree: dict[str, Any], filler: str) -> dict[str, Any]:
        if filler == "bare":
            return tree
        import hugging_face

        return hugging_face.filled(tree, filler, world=WORLD, steps=STEPS)

    def configure(self, tree: _Watched) -> None:
        """DeepSpeedConfig, in the first world of a few whose size its batch allows."""
        from deepspeed.runtime.config import DeepSpeedConfig

        total, micro = tree.get("train_batch_size"), tree.get("train_micro_batch_size_per_gpu")
        steps = tree.get("gradient_accumulation_steps", 1)
        worlds = [WORLD, 1, 2, 4, 16, 32, 64]
        if all(type(one) is int for one in (total, micro, steps)) and micro * steps and not total % (micro * steps):
            worlds.insert(0, total // (micro * steps))
        first: BaseException | None = None
        for world in worlds:
            mpu = type("Mpu", (), {"get_data_parallel_world_size": lambda _self, world=world: world})()
            kept = list(self.messages)
            try:
                DeepSpeedConfig(tree.__deepcopy__({}), mpu=mpu)
            except BaseException as error:
                self.messages[:] = kept
                first = first or error
            else:
                return
        assert first is not None
        raise first

    def start(self, tree: dict[str, Any]) -> None:
        """`deepspeed.initialize`; the batch was judged before, and one sequence a rank fits every world."""
        import deepspeed
        import stubs
        import torch

        stubs.install([name for name in ("wandb", "comet_ml") if importlib.util.find_spec(name) is None])  # trackers
        config = {key: value for key, value in copy.deepcopy(tree).items() if key not in _BATCH}
        config["train_micro_batch_size_per_gpu"] = 1
        if "sequence_parallel_size" in config and "data_parallel_size" not in config:
            config.pop("sequence_parallel_size")
        zero = config.get("zero_optimization")
        if isinstance(zero, dict) and isinstance(zero.get("stage"), int):
            # Buckets are allocated; what is said of small ones holds for large ones.
            for name in ("reduce_bucket_size", "allgather_bucket_size"):
                size = zero.get(name, _BUCKET)
                if isinstance(size, (int, float)) and not isinstance(size, bool) and size % 2 == 0:
                    zero[name] = min(size, _BUCKET)
        with _alone():
            model = _model(config)
            optimizer, given = None, isinstance(config.get("optimizer"), dict) and "type" in config["optimizer"]
            if not given and type(model).__name__.startswith("Mixtral"):
                # Groups of experts' parameters are DeepSpeed's to make, for an optimizer that it makes too.
                config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
            elif not given:
                optimizer = torch.optim.AdamW(model.parameters())
                config["zero_force_ds_cpu_optimizer"] = False
            deepspeed.initialize(
                model=model,
                model_parameters=None if optimizer else list(model.parameters()),
                optimizer=optimizer,
                config=config,
            )


def _model(config: Mapping[str, Any]) -> Any:
    """A small model of the family that the configuration's own parallelism is for, else two layers."""
    import torch

    def on(section: str, key: str) -> Any:
        found = config.get(section)
        return found.get(key) if isinstance(found, dict) else None

    if on("expert_parallel", "enabled"):
        from transformers import MixtralConfig, MixtralForCausalLM
        from transformers.utils import output_capturing

        # DeepSpeed 0.19.8 asks transformers 5.23's registry by name and with a default, which it no longer takes.
        output_capturing._CanRecordRegistry.get = _get

        return MixtralForCausalLM(MixtralConfig(**_DIMENSIONS, num_local_experts=8, num_experts_per_tok=2))
    if on("tensor_parallel", "autotp_size"):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**_DIMENSIONS))
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def _get(registry: dict[str, Any], key: Any, default: Any = None) -> Any:
    found = dict.get(registry, key if isinstance(key, str) else str(type(key)))
    return found if found is not None else {} if default is None else default


_DIMENSIONS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


_BUCKET = 10_000
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """DeepSpeed keeps groups in module variables: each engine starts with its own."""
    from deepspeed.utils import groups

    before = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(groups).items()
        if not name.startswith("__") and not callable(value)
    }
    try:
        yield
    finally:
        vars(groups).update(before)


def _step(by: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:
        raise _Refused(by, error) from error


def main() -> None:
    """Answers requests until there are none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    program = _Program()
    for line in sys.stdin:
        print(json.dumps(program.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

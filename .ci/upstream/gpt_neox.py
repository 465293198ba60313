"""gpt-neox's own verdict on a configuration, from its sources at a version and without an accelerator.

`python gpt_neox.py FOLDER` reads one JSON request a line, the text of a YAML file, and answers with one verdict a line:
why `NeoXArgs.from_ymls` refuses it, or the configuration that it hands on to DeepSpeed. What a file leaves to others of
the same job is filled in. Kernels, trackers and tokenizers are stubs: nothing is built from the arguments.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

import packaging.version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from upstream import stubs

STUBS = ("deepspeed", "megatron.logging", "megatron.tokenizer", "flash_attn", "wandb", "best_download", "shortuuid")
REST = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 64,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 10,
    "lr_decay_iters": 10,
    "checkpoint_factor": 10,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 0},
    "pipe_parallel_size": 0,
    "model_parallel_size": 1,
}
"""What one file may leave to another."""


def verdict(neox: Any, text: str) -> dict[str, Any]:
    """{"refused": why} or {"deepspeed": configuration}."""
    import torch
    import yaml

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yml"
        file.write_text(text, encoding="utf-8")
        try:
            given = {key.replace("-", "_"): value for key, value in yaml.safe_load(text).items()}
            rest = {key: value for key, value in REST.items() if key not in given and hasattr(neox, key)}
            if not hasattr(neox, "checkpoint_factor") and "save_interval" not in given:
                rest["save_interval"] = 10  # its older name
            sizes = [given.get(key, 1) for key in ("pipe_parallel_size", "model_parallel_size")]
            world = 1
            for size in sizes:
                world *= size if isinstance(size, int) and size > 1 else 1
            batch = given.get("train_batch_size")
            if isinstance(batch, int):
                world *= max(1, batch // given.get("gradient_accumulation_steps", 1) // micro(given))
            number = "global_num_gpus" if hasattr(neox, "global_num_gpus") else "num_gpus"
            if hasattr(neox, number):
                rest[number] = world
            os.environ.update(SLURM_NTASKS=str(world), WORLD_SIZE=str(world))  # where some forks have it from
            with contextlib.redirect_stdout(io.StringIO()):
                made = neox.from_ymls([str(file)], overwrite_values=rest)
            numbers = {name: made.optimizer["params"].get(name) for name in ("lr", "eps", "betas")}
            # The optimizer is made of them: torch ends at a text.
            torch.optim.Adam([torch.zeros(1)], **{name: one for name, one in numbers.items() if one is not None})
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error} {' '.join(_SAID)} {field_of(error)}"[:1000]}
        finally:
            _SAID.clear()
        return {"deepspeed": made.deepspeed_config}


_SAID: list[str] = []
"""What gpt-neox logs of a value before it ends."""


def field_of(error: BaseException) -> str:
    """The key that was looked at when the check of types itself ended."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((str(names["field_name"]) for names in reversed(frames) if "field_name" in names), "")


def micro(given: dict[str, Any]) -> int:
    """The micro-batch that a file gives, as far as it is one."""
    found = given.get("train_micro_batch_size_per_gpu", 1)
    return found if isinstance(found, int) and found > 0 else 1


def imported() -> Any:
    """The class, with stubs of what a fork imports and this machine lacks."""
    for _ in range(20):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return importlib.import_module("megatron.neox_arguments.arguments").NeoXArgs
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "megatron":
                raise
            stubs.install([error.name.partition(".")[0]])
            for name in [one for one in sys.modules if one.partition(".")[0] == "megatron"]:
                del sys.modules[name]
    raise SystemExit("the fork imports more than 20 modules that this machine lacks")


def main() -> None:
    """Answers requests until there are no more."""
    import torch

    folder = Path(sys.argv[1])
    torch.optim.Adam([torch.zeros(1)])  # it imports what the stubs would stand in for
    stubs.install(STUBS)
    stubs.answer_for_missing_versions()
    # setuptools brings this module no more.
    sys.modules["pkg_resources"] = types.SimpleNamespace(packaging=packaging)  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    __import__("shortuuid").uuid = lambda: "a name"  # a value of a key, whose type is checked
    NeoXArgs = imported()
    NeoXArgs.enable_logging = lambda _self: None
    os.environ.update({f"SLURM_{one}": "0" for one in ("LOCALID", "PROCID", "NODEID")})
    logging.error = lambda message, *_rest: _SAID.append(str(message))  # type: ignore[assignment]
    logging.disable()
    for line in sys.stdin:
        print(json.dumps(verdict(NeoXArgs, json.loads(line)), default=str), flush=True)


if __name__ == "__main__":
    main()

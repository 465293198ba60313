"""DeepSpeedCPUAdam of DeepSpeed 0.19.8: its extension, which each host compiles, and states that torch's Adam reads.

torch compiles it (`torch.utils.cpp_extension.load`) in a folder of TORCH_EXTENSIONS_DIR, with a file that locks it: who
finds that file waits until it is gone, for ever where its process was ended.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from parcompile.backends.deepspeed import SAME_NUMBERS
from parcompile.runtime.errors import RunError
from parcompile.runtime.liveness.monitor import say

_NAME = "cpu_adam"
LOCK_SECONDS = 1200.0
"""After how long a lock is one that was left behind, of whatever host: a build takes one core about 90 seconds."""


def _folder() -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(_NAME, verbose=False))


def _is_installed() -> bool:
    """Whether DeepSpeed was installed with it (DS_BUILD_CPU_ADAM=1)."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(_NAME) and accelerator_name == get_accelerator()._name)


def is_built() -> bool:
    """Whether this host has it compiled."""
    return _is_installed() or ((_folder() / f"{_NAME}.so").exists() and not (_folder() / "lock").exists())


def what_is_missing() -> str:
    """Why this host cannot compile or load it; empty where it can."""
    from torch.utils import cpp_extension

    if _is_installed():
        return ""
    try:
        built = is_built()
    except OSError as error:
        return f"its folder cannot be written: {error}"
    lacking = [] if shutil.which("ninja") else ["ninja"]
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if not built and shutil.which(compiler.split()[0]) is None:
        lacking.append(f"compiler {compiler} (CXX names another)")
    if not built and not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking.append("Python.h")
    return f"there is no {' and no '.join(lacking)}" if lacking else ""


def load_extension() -> None:
    """Compiles it where that was not done, and loads it.

    Raises:
        RunError: it cannot be compiled, or a lock lies there from a build that was ended.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        if lock := _lock_that_stays():
            why = f"{lock} was left by a build that did not end: delete it"
        else:
            CPUAdamBuilder().load(verbose=False)
            return
    except (RuntimeError, ImportError, OSError) as error:
        why = f"it cannot be compiled: {' '.join(str(error).split())[:400]}"
    raise RunError(f"DeepSpeedCPUAdam: {why}")


def _lock_that_stays() -> Path | None:
    """Waits until nobody compiles it; returns a lock that nobody is going to remove."""
    lock = _folder() / "lock"
    while lock.exists():
        if time.time() - lock.stat().st_mtime > LOCK_SECONDS:
            return lock
        time.sleep(0.5)
    return None


def say_that_it_is_built() -> None:
    """On standard error, where training waits for it."""
    lock = _folder() / "lock"
    doing, then = "compiles", "this takes a minute or more"
    if lock.exists():
        doing = "waits for the build of"
        if not _is_open_here(lock):
            then = f"no process of this host builds it: unless another host does, delete {lock}"
    say(f"{os.uname().nodename} {doing} DeepSpeedCPUAdam in {_folder()}: {then}")


def _is_open_here(file: Path) -> bool:
    """Whether a process that this one may look at has a file open; torch's lock is, by whoever builds."""
    for one in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if one.readlink() == file:
                return True
    return False


def in_own_settings(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """What of the settings of a saved group an optimizer has, without those that choose a kernel."""
    return {key: value for key, value in saved.items() if key in group and key not in SAME_NUMBERS}


def load_either_form(optimizer: Any) -> None:
    """Lets an optimizer of DeepSpeed go on with states of torch's Adam and of DeepSpeed's, and with its own settings.

    `load_state_dict` of torch's classes takes settings that they do not have, and leaves out those that were not saved.
    """
    adam = optimizer.optimizer
    load = adam.load_state_dict

    def load_state(saved: dict[str, Any]) -> None:
        both = zip(adam.param_groups, saved["param_groups"], strict=True)
        groups = [{**own, **in_own_settings(own, one)} for own, one in both]
        load({**saved, "param_groups": groups})

    adam.load_state_dict = load_state

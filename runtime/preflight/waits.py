"""Operators and copies for which the host stops until the device has caught up, and where a program asks for them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parcompile.user_files import shipped

WAITING = {
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.equal",
    "aten.nonzero",
    "aten.bincount",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.repeat_interleave.Tensor",
}
"""Operators whose result, or its shape, the host has to know: it waits until the device has computed it."""


def operator_name(func: Any) -> str:
    """As in `WAITING`, without an overload."""
    return str(func._schema.name).replace("::", ".")


def asks_for_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host has to know a value of the device's."""
    name = operator_name(func)
    if f"{name}.{func._overloadname}" in WAITING:
        return kwargs.get("output_size") is None
    if name in ("aten.masked_fill", "aten.masked_fill_"):  # torch reads the value that is put in on the host
        return isinstance(args[2], Tensor) and args[2].device.type == "cuda"
    return name in WAITING or (name.startswith("aten.index") and _by_mask(args))


def _by_mask(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        for argument in args[1:2]
        if isinstance(argument, list | tuple)
        for index in argument
    )


def place() -> str:
    """The innermost line of the program that is neither torch's nor a follower's: `folder/file.py:line code`."""
    frames = reversed(traceback.extract_stack())
    found = next((one for one in frames if not any(part in one.filename for part in _PASSED_THROUGH)), None)
    return "torch" if found is None else f"{found.filename}:{found.lineno} {found.line}"


_PASSED_THROUGH = (
    "/site-packages/torch/",
    "device_waits.py",
    "/preflight/",
    "contextlib.py",
    "/unittest/mock.py",
    "/drawing/mode.py",
)


# Waits that are known, each with its reason: docs/cuda.md lists the same.


@dataclass(frozen=True, slots=True)
class KnownWait:
    """A place at which the host waits, and why it stays."""

    file: str
    """How the path of the file ends,"""
    line: str
    """and what stands in the line."""
    where: str
    how_often: str
    why: str


KNOWN_WAITS = tuple(KnownWait(**stored) for stored in shipped("parcompile.runtime.preflight", "waits.json"))


def known(wait: str) -> KnownWait | None:
    """The entry of a wait, as `place` names it; None where it is new."""
    path, _, line = wait.rpartition(" at ")[2].partition(":")
    return next((one for one in KNOWN_WAITS if path.endswith(one.file) and one.line in line), None)

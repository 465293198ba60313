"""Settings for the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# CI draws the same examples each time: what it finds, anyone can find again. Elsewhere new ones are drawn.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


COMPILED = "TEST_COMPILED_EXTENSIONS"
"""Where extensions of torch are that were compiled before: TORCH_EXTENSIONS_DIR, or nothing for torch's own place."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where tests write how near to its limit every comparison of numbers came: see `tests/runtime/closeness.py`.

    And which model types they train in every layout, where a run of the suite takes each in some.
    """
    parser.addoption("--margins", metavar="FOLDER", help="write the margins of numeric comparisons to this folder")
    parser.addoption(
        "--family",
        action="append",
        metavar="TYPE",
        help="train this model type, or variant, in every layout of test_families.py; `all` are all of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """By the environment, which processes that tests start get too.

    Without a GPU nothing is compiled at run time: a build that was killed leaves a lock for which all later ones wait
    without end, so whoever begins one fails at once.
    """
    if config.option.markexpr != "gpu":
        os.environ.setdefault(COMPILED, os.environ.get("TORCH_EXTENSIONS_DIR", ""))
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{os.devnull}/nothing is compiled at run time"
    os.environ["TEST_FAMILIES"] = "\n".join(config.getoption("--family") or ())
    folder = config.getoption("--margins")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.environ["TEST_MARGINS"] = str(Path(folder).absolute())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deals the tests of a file of `runtime/`, and those that start ranks, to one worker of pytest-xdist: they share.

    pytest-xdist 3.8 reads these marks in the same hook, so they come first; with pytest 9.2 it has no effect on them.
    Else the workers take such files in turn, and single tests of the compiler when none are left: neither waits long.
    Tests for a GPU say why they did not run.
    """
    for item in items:
        if item.get_closest_marker("ranks") or "runtime" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not of_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a GPU: torch {torch.__version__} sees none (make gpu)"
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))

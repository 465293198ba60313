"""A DeepSpeed configuration: what each version refuses or ignores, and how its values fit together.

Where a configuration will be used: who reads its text, the version of DeepSpeed, and who fills "auto".

Who replaces "auto" in a DeepSpeed configuration, and where: DeepSpeed itself does not.

fillers.json was written by `.ci/generate/deepspeed/fillers.py`, which put "auto" into one key after another and ran
the code of transformers and accelerate.

Both can be given. What is not given is looked for near the file: requirements and lock files name versions, and a
script or a configuration that names the file shows by which flag it is handed on.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from parcompile.backends.deepspeed.table import UnknownVersionError, known, nearest, newest, order
from parcompile.backends.kinds import FILLERS
from parcompile.diagnostics import Diagnostic, Severity
from parcompile.diagnostics import Path as KeyPath
from parcompile.user_files import read_start, shipped

TRANSFORMERS, ACCELERATE, LIGHTNING, BARE = FILLERS
TITLES = {
    TRANSFORMERS: "the Trainer of transformers",
    ACCELERATE: "accelerate",
    LIGHTNING: "Lightning",
    BARE: "deepspeed.initialize alone",
}
"""Fillers by name, as messages call them."""


_FILLERS: Mapping[str, Mapping[str, Any]] = shipped(__package__, "fillers.json")


def filled(filler: str) -> frozenset[str]:
    """The dotted paths at which a filler replaces "auto"."""
    return frozenset(_FILLERS.get(filler, {}).get("fills", ()))


def version(filler: str) -> str | None:
    """The version of a filler whose code was asked."""
    return _FILLERS.get(filler, {}).get("version")


def autos(tree: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all values that are "auto"."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, (dict, list, str)):
                yield from autos(value, (*path, key))
    elif tree == "auto":
        yield path


# Where a configuration will be used: the version of DeepSpeed, and who fills "auto" before DeepSpeed sees it.

GUESSED = '"auto" in it'
"""Who names the filler where only the file itself speaks for it."""
_LEVELS = 6
"""Folders upwards that are searched for a requirement, at most to the top of the repository."""
_LARGEST = 400_000
_FILES = 60
_REQUIREMENTS = (
    *("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "requirements.lock", "requirements*.txt"),
    *("requirements/*.txt", "pyproject.toml", "setup.cfg", "setup.py", "environment*.y*ml", "constraints*.txt"),
)
_LOCKED = re.compile(
    r'(?:name\s*=\s*"deepspeed"\s*\n\s*version\s*=\s*"|"deepspeed"\s*:\s*\{[^}]*?"version"\s*:\s*"==)([0-9.]+)"'
)
_NAMED = re.compile(r"""^[\s"'-]*deepspeed(?:\[[^\]]*\])?\s*((?:[=<>!~]=?=?\s*[\w.*+]+\s*,?\s*)*)""", re.M | re.I)
_BOUND = re.compile(r"([=<>!~]=?)=?\s*([0-9][\w.*]*)")
_HANDED_ON = (
    (ACCELERATE, re.compile(r"deepspeed_config_file\s*[:=]\s*\S*NAME")),
    (BARE, re.compile(r"--deepspeed_config[\s=\"',\\]*\S*NAME")),
    (TRANSFORMERS, re.compile(r"--deepspeed[\s=\"',\\]+\S*NAME")),
    (TRANSFORMERS, re.compile(r"^\s*deepspeed\s*[:=]\s*\S*NAME", re.M)),
    (LIGHTNING, re.compile(r"DeepSpeedStrategy\([^)]*NAME")),
    (BARE, re.compile(r"deepspeed\.initialize\([^)]*NAME")),
)
_TEMPLATE = re.compile(r"/autotuning/config_templates/template_zero[0-3]\.json$")
"""Where DeepSpeed's autotuner reads its templates, one for each stage."""


class UsageContext(NamedTuple):
    """A known version and a filler of "auto"; `…_from` says who named it, None when nobody did."""

    version: str
    version_from: str | None = None
    filler: str | None = None
    filler_from: str | None = None
    is_template: bool = False
    """Whether the autotuner lays the configuration over the user's own, which has what is missing here."""

    @property
    def pinned(self) -> bool:
        """Whether somebody chose the version."""
        return self.version_from is not None

    @property
    def strict_json(self) -> str | None:
        """Who reads the file as plain JSON before DeepSpeed, if anybody does."""
        return None if self.filler in (None, BARE) else self.filler


class UsageOptions(NamedTuple):
    """What a user says of the surroundings of all files."""

    version: str | None = None
    used_with: str | None = None


def usage_context(tree: object, file: Path | None, usage: UsageOptions) -> UsageContext:
    """Where the configuration `tree` in `file` (None for standard input) will be used.

    Raises:
        UnknownVersionError: the version that was asked for is none.
    """
    version, version_from = newest(), None
    if usage.version is not None:
        version, version_from = nearest(usage.version), "--deepspeed-version"
    elif file is not None and (found := required(file.parent)) is not None:
        version, version_from = found
    filler, filler_from = usage.used_with, "--used-with" if usage.used_with else None
    if filler is None and file is not None:
        filler, filler_from = handed_on(file)
    if filler is None and any(True for _ in autos(tree)):
        filler, filler_from = TRANSFORMERS, GUESSED
    elif filler == ACCELERATE and filler_from != "--used-with" and _is_for_the_trainer(tree):
        filler, filler_from = TRANSFORMERS, GUESSED  # under `accelerate launch` the Trainer fills them
    is_template = file is not None and _TEMPLATE.search(file.absolute().as_posix()) is not None
    return UsageContext(version, version_from, filler, filler_from, is_template)


def _is_for_the_trainer(tree: object) -> bool:
    """Whether accelerate leaves an "auto" as it is that the Trainer replaces."""
    given = {".".join(map(str, path)) for path in autos(tree)}
    return bool(given & (filled(TRANSFORMERS) - filled(ACCELERATE)))


@functools.lru_cache(maxsize=4096)
def required(folder: Path) -> tuple[str, str] | None:
    """The version that the nearest requirement allows at most, and the file that says so."""
    for holder in _upwards(folder):
        for pattern in _REQUIREMENTS:
            for file in sorted(holder.glob(pattern)):
                found = _in_requirements(_text(file))
                if found is not None:
                    return found, file.name
    return None


def _upwards(folder: Path) -> Iterator[Path]:
    for level, holder in enumerate((folder, *folder.parents)):
        if level == _LEVELS:
            return
        yield holder
        if (holder / ".git").exists():
            return


@functools.lru_cache(maxsize=256)
def _text(file: Path) -> str:
    try:
        return read_start(file, _LARGEST)[0].decode("utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return ""


def _in_requirements(text: str) -> str | None:
    if (locked := _LOCKED.search(text)) is not None:
        with contextlib.suppress(UnknownVersionError):
            return nearest(locked[1])
        return None
    for named in _NAMED.finditer(text):
        bounds = _BOUND.findall(named[1])
        allowed = [version for version in known() if all(_allows(version, *bound) for bound in bounds)]
        if bounds and allowed:
            return allowed[-1]
    return None


def _allows(version: str, sign: str, bound: str) -> bool:
    given, limit = order(version), order(bound.replace(".*", ""))
    parts = bound.replace(".*", "").split(".")[:3]
    same = given[: len(parts)] == limit[: len(parts)]
    if sign in ("==", "="):
        return same
    if sign == "~=":
        return given >= limit and given[: len(parts) - 1] == limit[: len(parts) - 1]
    return {"!=": not same, "<": given < limit, "<=": given <= limit, ">": given > limit, ">=": given >= limit}.get(
        sign, True
    )


def handed_on(file: Path) -> tuple[str | None, str | None]:
    """Who is given the file, by a script or a configuration beside or above it that names it."""
    for holder in (file.parent, file.parent.parent):
        for name, text in _neighbours(holder):
            if file.name not in text:
                continue
            for filler, pattern in _HANDED_ON:
                if re.search(pattern.pattern.replace("NAME", re.escape(file.name)), text, pattern.flags):
                    return filler, name
    return None, None


@functools.lru_cache(maxsize=256)
def _neighbours(folder: Path) -> tuple[tuple[str, str], ...]:
    """Scripts and configurations in a folder that speak of DeepSpeed, with their text."""
    found = []
    try:
        files = [file for file in sorted(folder.iterdir()) if file.suffix in (".sh", ".py", ".yaml", ".yml", ".bash")]
    except OSError:
        return ()
    for file in files[:_FILES]:
        text = _text(file)
        if "deepspeed" in text.lower():
            found.append((file.name, text))
    return tuple(found)


# Who can read the text of a configuration: DeepSpeed reads Hjson, all others plain JSON.
# In Hjson there may be comments, a comma before a closing bracket, single quotes, keys without quotes, and line breaks
# where commas are missing. The Trainer of transformers, accelerate and Lightning read the file before DeepSpeed does.

_TAKEN = ("J013", "J014", "J015")
_ALSO_TAKEN = {"J016": ("the key ", "text without quotes"), "J004": ("a comma is missing here",)}
"""Of these those whose message begins so: keys and text without quotes, commas that Hjson can do without."""


def text_diagnostics(diagnostics: Iterable[Diagnostic], usage: UsageContext) -> tuple[Diagnostic, ...]:
    """What is wrong with the text for those who read it here: nothing that all of them take."""
    found = []
    for one in diagnostics:
        if not _is_hjson(one):
            found.append(one)
        elif usage.strict_json is not None:
            reader = TITLES[usage.strict_json]
            found.append(replace(one, message=f"{one.message}: {reader} cannot read it, DeepSpeed itself can"))
        elif usage.filler is None:
            message = f"{one.message}: DeepSpeed itself reads it, transformers, accelerate and Lightning do not"
            found.append(replace(one, message=message, severity=Severity.WARNING))
    return tuple(found)


def _is_hjson(one: Diagnostic) -> bool:
    return one.code in _TAKEN or (one.code in _ALSO_TAKEN and one.message.startswith(_ALSO_TAKEN[one.code]))

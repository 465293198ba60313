"""What reads the options of a call: Megatron-LM's own program, or one of a fork whose parser lies near the script.

The files of a fork are read and not imported.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from os.path import normpath
from pathlib import Path
from typing import Any, NamedTuple

from parcompile.backends.megatron.arguments import spelling
from parcompile.backends.megatron.file import LARGEST_SOURCED_BYTES, PARENTS, Call
from parcompile.user_files import read_bytes

OWN_PROGRAMS = frozenset(
    f"{one}.py"
    for one in (
        *("train_rl", "pretrain_bert", "pretrain_gpt", "pretrain_ict", "pretrain_mamba", "pretrain_retro"),
        *("pretrain_t5", "pretrain_vlm", "pretrain_vision_classify", "pretrain_vision_dino", "pretrain_vision_inpaint"),
    )
)
"""Programs in the root of NVIDIA/Megatron-LM, core_v0.8.0 to core_v0.16.0, that take its arguments."""
SHORT = re.compile(r"-[A-Za-z]")
_ADDED = re.compile(r"""add_argument\(\s*["'](--[A-Za-z][\w-]*)""")
_IMPORTED = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
_WORD = re.compile(r"""(?<!\w)(?<!\w\[["'])[A-Za-z][\w-]+""")
"""A word, but for the key of a mapping (`config['layernorm_epsilon']`), which adds nothing."""
_UNSAID = re.compile(r"^.*(?:[`)}]|\$\w+)/")
"""What of a path variables and commands decide that nobody here knows."""
_FORKS = ("*megatron*/arg*.py", "*megatron*/*/arg*.py", "*megatron*/training/config/*.py")
_FILES = 200
"""So many files are read: those that may hold the fork's parser, and those beside the program."""
_SEARCHED = 4000
"""So many are searched before an option is said to be nowhere: NVIDIA/Megatron-LM has about 1,000 in `megatron`."""
_TYPES = {"int": int, "float": float}
_BY_DEEPSPEED = ("deepspeed", "deepspeed_config", "deepscale", "deepscale_config")
"""Options that `deepspeed.add_config_arguments` adds."""


class Added(NamedTuple):
    """What one `add_argument` says of the values of an option; None: they may be anything."""

    type: str | None = None
    choices: tuple[Any, ...] | None = None

    def takes(self, value: object) -> bool:
        """Whether a value is one of the option's."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # both may have been written as a whole number
        try:
            converted = _TYPES[self.type](str(value)) if self.type in _TYPES else str(value)
        except ValueError:
            return False
        return self.choices is None or converted in self.choices


@dataclass(frozen=True)
class Program:
    """Megatron-LM's own program, or one that may have more options, with what is near it."""

    is_own: bool
    files: tuple[_File, ...] = ()
    """Those that may add options."""
    words: frozenset[str] = frozenset()
    """Every word of those files; none where no parser of a whole Megatron-LM is among them."""
    is_found: bool = False
    """Whether the file of the program is among them."""
    folders: tuple[Path, ...] = ()
    """Where the program and those files stand."""

    def adds(self, flag: str) -> bool:
        """Whether one of its files adds an option."""
        return any(spelling(flag) in one.added for one in self.files)

    def added(self, flag: str) -> list[Added]:
        """What its files say of the values of an option that they add."""
        name = spelling(flag)
        return [_described(one.text, at) for one in self.files for at in one.added.get(name, ())]

    def lacking(self, flags: Collection[str]) -> frozenset[str]:
        """The options that certainly nothing adds: their names are no words of the parsers, nor text elsewhere."""
        if not self.words:
            return frozenset()
        is_made = "ArgumentGroupFactory" in self.words  # of dataclasses
        if "add_config_arguments" in self.words:
            flags = [one for one in flags if spelling(one) not in _BY_DEEPSPEED]
        left = {one: _texts(one, is_made) for one in flags if SHORT.match(one) or spelling(one) not in self.words}
        left |= {one: _quoted(one) for one in flags if self._has_hyphens(one)}
        files = (file for folder in self.folders for file in folder.rglob("*.py"))
        for file in islice(files, _SEARCHED) if left else ():
            with suppress(OSError):
                content = read_bytes(file, LARGEST_SOURCED_BYTES)
                left = {flag: texts for flag, texts in left.items() if not any(one in content for one in texts)}
            if not left:
                break
        return frozenset(left)

    def _has_hyphens(self, flag: str) -> bool:
        """Whether its files add `--a-b` for an option that is written `--a_b`, which argparse tells apart."""
        name = spelling(flag)
        texts = [one.text[at : at + len(flag) + 40] for one in self.files for at in one.added.get(name, ())]
        return hyphened(flag) != flag and any(hyphened(flag) in one for one in texts)

    @classmethod
    def of(cls, call: Call) -> Program:
        """The program of a call."""
        unknown = [one for one in call.arguments.problems if one.kind == "unknown"]
        name = (call.program or "").rpartition("/")[2]
        found = _near(call)
        # Forks keep the names of programs: one option that is unknown may be a mistake, two are another program's.
        is_own = name in OWN_PROGRAMS and len(unknown) < 2 and not any(found.adds(one.flag) for one in unknown)
        return cls(is_own, found.files, found.words, found.is_found, found.folders)


@dataclass(frozen=True, eq=False)
class _File:
    text: str
    added: Mapping[str, tuple[int, ...]]
    """Where it adds options, by their names."""
    words: frozenset[str]


def _near(call: Call) -> Program:
    """The files of a call's program, those beside it, and parsers under it or beside the script."""
    if call.program is None or not call.program.endswith(".py") or call.source.file is None:
        return Program(is_own=False)
    script = Path(call.source.file).absolute()
    places = (script.parent, *script.parents[1:PARENTS], Path.cwd())
    tail = _UNSAID.sub("", call.program)
    program = next((Path(normpath(folder / tail)) for folder in places if (folder / tail).is_file()), None)
    above = list(script.parents)[:PARENTS]
    common = next((one for one in above if program is not None and program.is_relative_to(one)), None)
    if common is not None:
        above = above[: above.index(common) + 1]  # what stands above both is another project's
    beside: list[Iterable[Path]] = list(_forks(above))
    if program is not None:
        folders_ = {program.parent, common or program.parent}
        beside += [file.glob("arg*.py") for one in folders_ for file in _packages(one)] + [program.parent.glob("*.py")]
    read, is_whole, folders = list[_File](), False, dict[Path, None]()
    for file in islice((file for files in beside for file in sorted(files)), _FILES):
        with suppress(OSError):
            stamp = file.stat()
            read.append(_read(file, (stamp.st_mtime_ns, stamp.st_size)))
            package = next((one for one in file.parents[:2] if one.name == "megatron"), None)
            is_whole |= file.name == "arguments.py" and package is not None
            folders[package or file.parent] = None
    for file in islice(common.glob("*.py"), _FILES) if common is not None else ():
        with suppress(OSError):  # packages of the project that its programs import may add options too
            text = read_bytes(file, LARGEST_SOURCED_BYTES).decode("utf-8", errors="replace")
            folders |= {folder: None for name in _IMPORTED.findall(text) if (folder := file.parent / name).is_dir()}
    words = frozenset[str]().union(*(one.words for one in read)) if is_whole else frozenset[str]()
    is_whole &= {"num_attention_heads", "micro_batch_size"} <= words
    return Program(
        is_own=False,
        files=tuple(read),
        words=words if is_whole else frozenset(),
        is_found=program is not None,
        folders=tuple(folders),
    )


def _forks(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """Parsers in these folders, up to the first that has one of a whole Megatron-LM: others above are other clones."""
    for folder in folders:
        found = [file for name in _FORKS for file in folder.glob(name)]
        yield found
        if any(file.name == "arguments.py" and "megatron" in file.parts[-3:-1] for file in found):
            return


@functools.lru_cache(maxsize=_FILES)
def _read(file: Path, _: tuple[int, int]) -> _File:
    """A file as it was at a time of change and with a size: other scripts of the same clone read it too."""
    text = read_bytes(file, LARGEST_SOURCED_BYTES).decode("utf-8", errors="replace")
    added = dict[str, list[int]]()
    for one in _ADDED.finditer(text):
        added.setdefault(spelling(one[1]), []).append(one.start())
    return _File(text, {name: tuple(at) for name, at in added.items()}, frozenset(map(spelling, _WORD.findall(text))))


def _described(text: str, at: int) -> Added:
    """The `add_argument` at a place of a file, up to the bracket that closes it."""
    for end in islice(re.compile(r"\)").finditer(text, at), 40):
        with suppress(SyntaxError, ValueError):
            call = ast.parse(text[at : end.end()], mode="eval").body
            assert isinstance(call, ast.Call)
            return _of_call(call)
    return Added()


def _of_call(call: ast.Call) -> Added:
    said = {one.arg: one.value for one in call.keywords}
    choices = None
    with suppress(ValueError, TypeError):
        choices = tuple(ast.literal_eval(said["choices"])) if "choices" in said else None
    kind = said.get("type")
    name = kind.id if isinstance(kind, ast.Name) else None
    return Added(name, choices if name in (None, "str", *_TYPES) else None)


def hyphened(flag: str) -> str:
    """An option as nearly all of them are written."""
    return f"--{spelling(flag).replace('_', '-')}"


def _quoted(flag: str) -> list[bytes]:
    return [f"{quote}{flag}".encode() for quote in "\"'"]


def _texts(flag: str, is_made: bool) -> list[bytes]:
    """An option as a file may have it: in quotes, or as the field of a dataclass of which the parser is made."""
    if SHORT.match(flag):
        return _quoted(flag)
    name = spelling(flag)
    fields = [f" {name}:".encode()] if is_made else []
    return [*(text for one in {flag, f"--{name}", hyphened(flag)} for text in _quoted(one)), *fields]


def _packages(folder: Path) -> list[Path]:
    """Packages beside a program, and those in them: `megatron` and `megatron/training`."""
    with suppress(OSError):
        outer = [one for one in islice(folder.iterdir(), _FILES) if (one / "__init__.py").is_file()]
        return [*outer, *(file.parent for one in outer for file in one.glob("*/__init__.py"))]
    return []

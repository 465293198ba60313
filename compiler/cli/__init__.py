"""The `parcompile` command: its subcommands, and `parcompile SPEC` as the short form of `parcompile compile SPEC`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import click

from parcompile.entry_points import PluginError, end
from parcompile.version import __version__, how_to_install

_ALLOCATIONS = 100_000
"""After so many more objects garbage is looked for: modules and tables, which stay, load without a look at them."""
_USUAL = gc.get_threshold()
"""What Python has, for what runs models."""
_TOGETHER = {
    "accelerators": "reference",
    "advisories": "reference",
    "calibrate": "profile",
    "data": "checkpoint",
    "diff": "showing",
    "doctor": "view",
    "explain": "reference",
    "groups": "showing",
    "local": "preflight",
    "models": "reference",
    "new": "init",
    "plan": "init",
    "report": "view",
    "schema": "reference",
}
"""Subcommands that stand in a module with others, imported when one is called; each is the function NAME_command."""
_ALONE = (
    *("check", "checkpoint", "compile", "estimate", "import", "init", "preflight", "profile", "prove"),
    *("search", "view"),
)
"""Each is the function `command` of the module of its name."""
_COMMANDS = tuple(sorted((*_TOGETHER, *_ALONE)))

OK, SPEC_HAS_ERRORS, USAGE, INTERRUPTED, READER_LEFT = 0, 1, 2, 130, 141
"""Exit codes; the last two are those of a shell for a command that SIGINT or SIGPIPE ends."""


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text to standard output or error. JSON stays the same JSON: what is not printable becomes its escape."""
    from parcompile.diagnostics.reporters import printable, writable  # not for --version alone

    click.echo(writable(sys.stderr if err else sys.stdout, printable(text)), err=err, nl=nl)


@contextlib.contextmanager
def told(*kinds: type[Exception], by: Callable[[str], click.ClickException] = click.ClickException) -> Iterator[None]:
    """Errors of these kinds end the command, which says what they say."""
    try:
        yield
    except kinds as error:
        raise by(str(error)) from None


@contextlib.contextmanager
def needing(extras: str) -> Iterator[None]:
    """Imports of the runtime, only where a command uses it: the compiler itself works without torch.

    Garbage is looked for as Python does from then on.
    """
    try:
        yield
        gc.set_threshold(*_USUAL)  # cycles may hold the memory of a device
    except ImportError as error:
        raise click.ClickException(f"this needs the runtime ({error}): {how_to_install(extras)}") from None


@contextlib.contextmanager
def writing(path: Path, what: str = "written", *, below: bool = False) -> Iterator[None]:
    """What cannot be written, or read, ends the command; `below`: of a folder the file of the error is named."""
    try:
        yield
    except OSError as error:
        where = (below and error.filename) or path
        raise click.ClickException(f"{where} cannot be {what}: {error.strerror}") from None


def save(file: Path, content: str | bytes, *read: str | Path | None) -> None:
    """Writes a file whole, but none that the command has `read`; where that cannot be done, the command ends."""
    from parcompile.atomic import write_file  # not for --version alone

    for one in (Path(one, name) for one in read if one is not None for name in ("", "plan.json")):
        if one.exists() and file.exists() and one.samefile(file):
            raise click.ClickException(f"{file} is what this command reads, and would be lost: name another file")
    with writing(file):
        write_file(file, content)


class _Commands(click.Group):
    """Loads subcommands on demand; what is not one is a spec to compile."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        name = "import_" if cmd_name == "import" else cmd_name  # a word of the language is no name for a module
        module = importlib.import_module(f"parcompile.cli.{_TOGETHER.get(name, name)}")
        command = getattr(module, f"{name}_command" if name in _TOGETHER else "command")
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # The deepspeed launcher puts this before what the user wrote; ranks read it from the environment.
        args = args[1:] if args and args[0].startswith("--local_rank=") else args
        if args and (args[0] not in (*_COMMANDS, "--help", "-h", "--version") or _is_folder_of_plan(args)):
            _refuse_misspelt(args[0])
            args = ["compile", *args]
        return super().parse_args(ctx, args)


def _is_folder_of_plan(args: list[str]) -> bool:
    """Whether `plan` is the folder of a plan, as most are called, and not the command, which names a cluster."""
    named = any(re.match(r"(\d+x)?\d+x[A-Za-z]", one) for one in args[1:]) or {"-h", "--help"} & set(args)
    return args[0] == "plan" and not named and Path("plan").exists()


_OF_CHECKPOINT = ("convert", "export", "inspect", "verify")
"""Words of `parcompile checkpoint`, which are looked for without it."""


def _refuse_misspelt(word: str) -> None:
    """A word that is no file but nearly a command is a misspelt command.

    Raises:
        UsageError: names the command.
    """
    if word.startswith("-") or not word.replace("-", "").isalpha() or Path(word).exists():
        return
    from parcompile.diagnostics import closest

    near = f"checkpoint {word}" if word in _OF_CHECKPOINT else closest(word, _COMMANDS)
    if near is not None:
        raise click.UsageError(f"there is no command or file {word!r}; did you mean `parcompile {near}`?")


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`parcompile SPEC -o DIR` is short for `parcompile compile SPEC -o DIR`. "
    "Commands that read a plan take a spec too, and the reverse. Exit codes: 0 all is well; 1 a spec has errors, or "
    "what a command compares or looks for is wrong; 2 the command line is wrong, or a file cannot be read or written; "
    "130 after Ctrl-C; 141 where the reader of the output has left, as `head` does.",
)
@click.version_option(__version__, message="parcompile %(version)s")
def cli() -> None:
    """Check a parallel training spec and compile it into a plan.

    The plan lists every decided value, its memory and time, and the files that launch it.
    """


def main() -> NoReturn:
    """Runs the command, and ends the process with its exit code."""
    gc.set_threshold(_ALLOCATIONS)
    end(run())


def run() -> int:
    """Does what `sys.argv` says. Exit codes: 0 fine, 1 the spec has errors, 2 usage or a file that cannot be read.

    130 after Ctrl-C, 141 where what reads its output has left, as `head` does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may hold bytes that are no text
    out = sys.stdout
    try:
        # Commands return nothing; what comes back is the code of a command that asked to exit.
        code = int(cli.main(standalone_mode=False, prog_name="parcompile") or OK)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        say(said.getvalue(), err=True, nl=False)
        code = USAGE
    except PluginError as error:
        say(f"Error: [E001] the {error}", err=True)
        code = USAGE
    except (click.Abort, KeyboardInterrupt):
        say("parcompile: interrupted", err=True)
        code = INTERRUPTED
    except SystemExit:
        if sys.stdout is out:  # completion of a shell, or the code of a user
            raise
        code = READER_LEFT  # click replaces it where a pipe is broken, and its 1 would mean errors of a spec
    except OSError as error:
        where = error.filename or "standard output"
        say(f"Error: {where} cannot be written: {error.strerror}", err=True)
        code = USAGE
    return _flushed(code)


def _flushed(code: int) -> int:
    """The exit code once everything is written; that of a failure when standard output cannot take it (a full disk)."""
    if sys.stdout is None:  # closed by who started it
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        left = isinstance(error, BrokenPipeError)
        if code != USAGE and not left:
            say(f"Error: standard output cannot be written: {error.strerror}", err=True)
        # What is still buffered would fail once more when the interpreter closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT if left else USAGE
    return code

"""What other installed distributions add to the compiler, found by their entry points.

A name is known without importing anything. The object behind it is loaded when it is needed, and what is wrong with it
is one message that names the distribution.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from .user_files import read_bytes

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

RULES, TARGETS, IMPORTERS, FAMILIES = (
    "parcompile.rules",
    "parcompile.targets",
    "parcompile.importers",
    "parcompile.families",
)
"""The groups of entry points."""
VARIABLE = "PARCOMPILE_PLUGINS"
"""The environment variable that leaves all plug-ins out when it is 0."""
SECONDS = 10.0
"""How long one call of a plug-in may take."""
IMPORT_SECONDS = 60.0
"""How long its import may take, with all that it imports itself."""
MOST_BYTES = 64 * 2**20
"""What one call may return."""
MOST_MEMORY = 4 * 2**30
"""What a call or an import may take beside what this process has, on Linux, where a process can be forked."""
_WATCHED = ("builtins", "click", "hashlib", "io", "json", "os", "parcompile", "pathlib", "posixpath", "re")
"""Packages whose functions and methods an import may not replace: every command works with them."""
_NOUNS = {RULES: "rules", TARGETS: "target", IMPORTERS: "importer", FAMILIES: "family"}

Loaded = TypeVar("Loaded")

_LEFT: dict[str, set[threading.Thread]] = {}
"""The threads that each import of a plug-in has left in this process."""


class PluginError(ValueError):
    """A plug-in that cannot be used. The message is meant for users."""


class Offer(NamedTuple):
    """An entry point of a distribution; `rivals` are other distributions that offer the same name."""

    group: str
    name: str
    distribution: str
    point: EntryPoint
    rivals: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"{_NOUNS[self.group]} {self.name!r} of {self.distribution} ({self.point.value})"


@functools.cache
def _may_offer() -> bool:
    """Whether an installed distribution may offer something: where none does, the module that reads all is not needed.

    What is not sure counts as yes: finders of others, archives on the path, files that cannot be read.
    """
    if [one for one in sys.meta_path if hasattr(one, "find_distributions")] != [PathFinder]:
        return True
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208 -- of many
        except (FileNotFoundError, PermissionError):
            continue
        except (OSError, ValueError):
            return True
        for name in names:
            if name.lower().endswith(("dist-info", "egg-info")):
                try:
                    content = read_bytes(os.path.join(folder, name, "entry_points.txt"))  # noqa: PTH118 -- of many
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    return True
                if any(group.encode() in content for group in _NOUNS):
                    return True
    return False


@functools.cache
def _installed() -> Any:
    """Every entry point, of a type that differs between Pythons: files of all distributions are read for them."""
    from importlib.metadata import entry_points  # what has no plug-ins to look for does without it

    return entry_points()


@functools.cache
def offers(group: str) -> Mapping[str, Offer]:
    """What is installed for a group, by name."""
    if os.environ.get(VARIABLE) == "0" or not _may_offer():
        return MappingProxyType({})
    found: dict[str, list[EntryPoint]] = {}
    for point in _installed().select(group=group):
        found.setdefault(point.name, []).append(point)
    return MappingProxyType({name: _offer(group, name, points) for name, points in sorted(found.items())})


def _offer(group: str, name: str, points: list[EntryPoint]) -> Offer:
    titles = list(dict.fromkeys(f"{one.dist.name} {one.dist.version}" if one.dist else "?" for one in points))
    return Offer(group, name, titles[0], points[0], tuple(titles[1:]))


def load(group: str, name: str, judge: Callable[[object], Loaded]) -> Loaded:
    """The object behind an entry point.

    Args:
        group: the group.
        name: one of `offers(group)`.
        judge: returns the object as what it has to be, or raises TypeError or ValueError.

    Raises:
        PluginError: it cannot be loaded, or it is not what the group is for.
    """
    offer = offers(group)[name]
    if offer.rivals:
        raise PluginError(f"{offer.title} is offered by {' and '.join(offer.rivals)} too: uninstall one of them")

    def tried() -> None:
        _loaded(offer)

    # An import that ends its process, or never ends, is found out by a process that may be lost.
    (outcome,) = apart([tried], IMPORT_SECONDS)
    before = set(threading.enumerate())
    try:
        with _aside():
            found = None if isinstance(outcome, Failure) else _loaded(offer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the code of others may fail in any way
        outcome = Failure(said(error))
    _LEFT[offer.point.value] = set(threading.enumerate()) - before
    if isinstance(outcome, Failure):
        raise PluginError(f"{offer.title} cannot be loaded: {outcome.why}")
    try:
        return judge(found)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{offer.title} cannot be used: {error}") from error


def _loaded(offer: Offer) -> object:
    """The object behind an entry point, whose import replaces nothing that commands work with.

    Raises:
        RuntimeError: it did; what it replaced is as it was.
    """
    before = _held()
    found = offer.point.load()
    replaced = [one for one, (owner, value) in before.items() if vars(owner).get(one[1]) is not value]
    for one in replaced:
        with contextlib.suppress(Exception):
            setattr(before[one][0], one[1], before[one][1])
    if replaced:
        named = ", ".join(".".join(one) for one in sorted(replaced)[:3])
        raise RuntimeError(f"its import replaces {named}, which every command works with")
    return found


def _held() -> dict[tuple[str, str], tuple[ModuleType | type, object]]:
    """The functions of modules in `_WATCHED` and of their classes, by the names of both."""
    modules = [(name, one) for name, one in sys.modules.items() if name.partition(".")[0] in _WATCHED]
    owners: list[tuple[str, ModuleType | type]] = [(name, one) for name, one in modules if one is not None]
    for name, module in modules:
        classes = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name)
        owners += [(f"{name}.{one.__name__}", one) for one in classes]
    return {
        (name, key): (owner, value) for name, owner in owners for key, value in vars(owner).items() if callable(value)
    }


def end(code: int) -> NoReturn:
    """Ends the process. What imports of plug-ins have left, threads and work for its end, may fail or never be done."""
    if _LEFT:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # the interpreter would go through every object to find garbage in a memory that ends with it
    sys.exit(code)


def called(group: str, name: str, work: Callable[[], Loaded]) -> Loaded:
    """What a work of a plug-in returns, which is pickled, done in a process of its own.

    Raises:
        PluginError: it failed, ended its process or took too long.
    """
    (found,) = apart([work], SECONDS)
    if isinstance(found, Failure):
        raise PluginError(f"{offers(group)[name].title} failed: {found.why}")
    return found


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Standard output, which may be one JSON document, goes to standard error, whatever writes to it."""
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError):
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def said(error: BaseException) -> str:
    """An exception of a plug-in on one line."""
    try:
        text = str(error)
    except Exception:  # its own __str__ may fail too
        text = "an exception that cannot be shown"
    return " ".join(f"{type(error).__name__}: {text}".split())


class Failure(NamedTuple):
    """Why work of a plug-in gave nothing."""

    why: str


def apart(works: Sequence[Callable[[], Loaded]], seconds: float) -> list[Loaded | Failure]:
    """What each work returns, done in a process of its own, so that none can end, block or print into this one.

    Where a process cannot be forked, or has threads that no plug-in began, which a fork may leave without their locks,
    each is done in a thread here, and one that takes too long stays behind in it.

    Args:
        works: return what can be pickled.
        seconds: how long one may take.
    """
    others = set(threading.enumerate()).difference({threading.current_thread()}, *_LEFT.values())
    if not hasattr(os, "fork") or others:
        with _aside():
            return [_in_thread(work, seconds) for work in works]
    found: list[Loaded | Failure] = []
    while len(found) < len(works):
        found += _in_child(works[len(found) :], seconds)
    return found


def _outcome(work: Callable[[], Loaded]) -> Loaded | Failure:
    try:
        return work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the code of others may fail in any way
        return Failure(said(error))


def _in_thread(work: Callable[[], Loaded], seconds: float) -> Loaded | Failure:
    found: list[Loaded | Failure] = []
    thread = threading.Thread(target=lambda: found.append(_outcome(work)), name="parcompile plug-in", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else Failure(_too_long(seconds))


def _too_long(seconds: float) -> str:
    return f"it took longer than {seconds:g} s"


def _in_child(works: Sequence[Callable[[], Loaded]], seconds: float) -> list[Loaded | Failure]:
    """The outcomes up to the first work that ends its process or takes too long."""
    import pickle  # what has no plug-ins does without
    import signal

    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are those of plug-ins
        child = os.fork()
    if child == 0:
        _serve(works, writing)
    os.close(writing)
    found: list[Loaded | Failure] = []
    try:
        while len(found) < len(works):
            try:
                size = int.from_bytes(_received(reading, 8, time.monotonic() + seconds), "big")
                found.append(pickle.loads(_received(reading, size, time.monotonic() + seconds)))  # noqa: S301 -- ours
            except TimeoutError:  # noqa: PERF203 -- each work has its own
                found.append(Failure(_too_long(seconds)))
                break
            except EOFError:
                found.append(Failure("it ended its process"))
                break
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource  # Windows has none
        from pathlib import Path

        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = held + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _serve(works: Sequence[Callable[[], object]], writing: int) -> NoReturn:
    import pickle

    try:
        os.dup2(2, 1)
        _bound_memory()
        for work in works:
            outcome = _outcome(work)
            try:
                content = pickle.dumps(outcome)
                pickle.loads(content)  # noqa: S301 -- what fails, or ends a process, when it is read does so here
            except Exception as error:
                content = pickle.dumps(Failure(said(error)))
            if len(content) > MOST_BYTES:
                content = pickle.dumps(Failure(f"it returned {len(content):,} bytes; at most {MOST_BYTES:,} are taken"))
            with os.fdopen(os.dup(writing), "wb") as stream:
                stream.write(len(content).to_bytes(8, "big") + content)
    finally:
        os._exit(0)


def _received(handle: int, size: int, end: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(handle, size - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)

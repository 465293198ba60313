"""Shell scripts, read for the commands that they would run. Nothing is executed.

A script is followed from its first line to its last. Where a condition is not known it goes both ways, and each way is
kept apart from then on. What only the environment, a file or another program knows stays a hole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from . import state as slurm
from .conditions import UNKNOWN, assumed, judged, matches, test
from .parse import AndOr, Block, Case, For, Function, Group, If, Node, Simple, While, parse
from .state import State, assign, declare, distinct, forget, let
from .syntax import MAX_LENGTH, ShellLimitError, Work
from .words import Array, Hole, Piece, Value, fields, joined, known, shown, unquoted

# Commands that stand in the words of other commands: of `eval`, of `bash -c`, of launchers.

_ENDS = frozenset({"|", "|&", "||", "&&", "&", ";"})
_REDIRECTION = re.compile(r"\d*(?:&>>|&>|>>|>&|<&|>\||<>|>|<(?![<(]))")
_SHELLS = re.compile(r"(?:.*/)?(?:ba|z|da)?sh$")


def flattened(words: tuple[Value, ...]) -> tuple[Value, ...]:
    """The words of a command, with those of text that a shell would read again: `eval`, `bash -c "…"`."""
    if words and known(words[0]) == "eval":
        return tuple(_first_command(tuple(fields(unquoted(joined(words[1:]))))))
    found: list[Value] = []
    for number, word in enumerate(words):
        text = shown(word)
        has_spaces = any(one.isspace() for one in text)
        is_long = number > 0 and " --" in f" {text}" and any(one.isspace() for one in text.strip())
        if has_spaces and _is_script(words, number):
            found += _first_command(tuple(fields(unquoted(word))))
        elif is_long and re.search(r"\.py(\s|$)", text):  # a command of its own, as launchers take it
            found += fields(unquoted(word))
        else:
            found.append(word)
    return tuple(found)


def _is_script(words: tuple[Value, ...], number: int) -> bool:
    """Whether a word is the script of a shell: it stands behind `bash -c`."""
    is_named = number > 1 and shown(words[number - 1]) in ("-c", "-lc", "-ic")
    return is_named and any(_SHELLS.match(shown(one)) for one in words[: number - 1])


def _first_command(words: tuple[Value, ...]) -> Iterator[Value]:
    """The words of a text up to the end of its first command, without redirections."""
    is_target = False
    for word in words:
        text = shown(word)
        if text in _ENDS:
            return
        if is_target:
            is_target = False
        elif match := _REDIRECTION.match(text):
            is_target = match.end() == len(text)
        else:
            yield word


def inner_script(words: tuple[Value, ...]) -> Value | None:
    """The script of `bash -c 'script'`, when variables in it are left for the inner shell."""
    scripts = (word for number, word in enumerate(words) if _is_script(words, number))
    return next((word for word in scripts if "$" in (known(word) or "")), None)


# Follows a script from its first line to its last, and notes every command that it would run.

MAX_STATES = 24
"""Ways through a script that are kept apart."""
MAX_INVOCATIONS = 64
MAX_STEPS = 20_000
MAX_CALLS = 8

Read = Callable[[str], str | None]
"""Gives the text of a file that a script sources, or None when it cannot be read."""

_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_BUILT_IN = frozenset(
    {"eval", "source", ".", "read", "mapfile", "readarray", "unset", "getopts", "let", "exit", "return"}
)
_QUIET = frozenset({"echo", "printf", "cat", "cd", "mkdir", "ls", "rm", "cp", "mv", "sleep", "wait", "trap", "module"})


@dataclass(frozen=True, slots=True)
class Invocation:
    """A command with its words. `assumptions` are the conditions that were taken to hold, with where they stand."""

    words: tuple[Value, ...]
    start: int
    assumptions: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """What a script would run, and its variables at the end of each way through it."""

    invocations: tuple[Invocation, ...]
    states: tuple[State, ...]


def invocations(text: str, given: dict[str, str] | None = None, read: Read | None = None) -> Run:
    """The commands of a script.

    Args:
        text: the script.
        given: variables of the environment that are known.
        read: gives the text of files that the script sources.

    Raises:
        ShellLimitError: its values grow too long, or it takes too many steps.
    """
    if len(text) > MAX_LENGTH:
        raise ShellLimitError(f"it has more than {MAX_LENGTH:,} characters")
    start = State(work=Work())
    for name, value in slurm.variables(text):
        start.set(name, value)
    for name, plain in (given or {}).items():
        start.set(name, (Piece(plain, None),))
    follower = _Follower(text, read or (lambda _name: None))
    states = follower.block(parse(text), [start])
    return Run(tuple(dict.fromkeys(follower.found)), tuple(states))


@dataclass
class _Follower:
    text: str
    read: Read
    found: list[Invocation] = field(default_factory=list)
    functions: dict[str, Block] = field(default_factory=dict)
    sourced: int = 0
    """Files above this one: what they hold has no place in the script."""
    calls: int = 0
    steps: int = 0

    def block(self, nodes: Block, states: list[State]) -> list[State]:
        """The states after statements."""
        for node in nodes:
            self.steps += len(states)
            if not states:
                return states
            if self.steps > MAX_STEPS:
                raise ShellLimitError(f"it runs more than {MAX_STEPS:,} statements: write the arguments out")
            try:
                states = distinct(self.node(node, states), MAX_STATES)
            except ShellLimitError as error:
                if error.start is None and not self.sourced and isinstance(node, Simple):
                    raise ShellLimitError(str(error), node.start) from None
                raise
        return states

    def node(self, node: Node, states: list[State]) -> list[State]:
        if isinstance(node, Simple):
            return [after for state in states for after in self.simple(node, state)]
        if isinstance(node, If):
            return self._if(node, states)
        if isinstance(node, Case):
            return self._case(node, states)
        if isinstance(node, For):
            return self._for(node, states)
        if isinstance(node, While):
            return self._while(node, states)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
            return states
        if isinstance(node, AndOr):
            return self._and_or(node, states)
        assert isinstance(node, Group)
        if not node.own:
            return self.block(node.body, states)
        self.block(node.body, [state.copy() for state in states])
        return states

    def _and_or(self, node: AndOr, states: list[State]) -> list[State]:
        """`test && command`: the command runs where the test holds, or may hold."""
        after = []
        for state in states:
            verdict = judged((node.left,), state)
            if verdict is None:
                after += (
                    self.node(node.right, self.node(node.left, [state]))
                    if node.operator == "&&"
                    else self.node(node.left, [state])
                )
                continue
            runs = node.operator == "&&"
            if verdict.holds is None:
                other = state.copy()
                assumed(state, verdict, holds=runs)
                assumed(other, verdict, holds=not runs)
                after += [*self.node(node.right, [state]), other]
            elif verdict.holds is runs:
                after += self.node(node.right, [state])
            else:
                after.append(state)
        return after

    def _if(self, node: If, states: list[State]) -> list[State]:
        after: list[State] = []
        waiting = states
        for branch in node.branches:
            undecided: list[State] = []
            for state in waiting:
                verdict = judged(branch.condition, state)
                if verdict is None:
                    self.block(branch.condition, [state.copy()])
                    verdict = UNKNOWN
                if verdict.holds is None:
                    other = state.copy()
                    assumed(state, verdict, holds=True)
                    state.assumptions = (*state.assumptions, self._said(branch.condition))
                    undecided.append(other)
                if verdict.holds is not False:
                    after += self.block(branch.body, [state])
                else:
                    undecided.append(state)
            waiting = undecided
            if not waiting:
                return after
        return [*after, *self.block(node.otherwise, waiting)]

    def _said(self, condition: Block) -> tuple[str, int]:
        """The first line of a condition, and where it stands."""
        first = condition[0] if condition else None
        start = first.start if isinstance(first, Simple) else 0
        return (self.text[start:].partition("\n")[0].partition(";")[0].strip(), start) if not self.sourced else ("", 0)

    def _case(self, node: Case, states: list[State]) -> list[State]:
        after: list[State] = []
        for state in states:
            current: State | None = state
            for choice in node.choices:
                assert current is not None
                verdict = matches(node.word, choice.patterns, current)
                if verdict.holds is False:
                    continue
                if verdict.holds is True:
                    after += self.block(choice.body, [current])
                    current = None
                    break
                taken = current.copy()
                assumed(taken, verdict, holds=True)
                after += self.block(choice.body, [taken])
            if current is not None:
                after.append(current)
        return after

    def _for(self, node: For, states: list[State]) -> list[State]:
        if node.words is None:
            return self.block(node.body, states)
        after = []
        for state in states:
            values = [one for word in node.words for one in braces(tuple(state.expand(word)))]
            current, before = [state], list[Mapping[str, object]]()
            for value in values[:MAX_ITERATIONS]:
                for one in current:
                    one.set(node.name, value)
                before = [dict(one.variables) for one in current]
                current = self.block(node.body, current)
            if len(values) > MAX_ITERATIONS:
                for one in current:
                    for name in [
                        name for name, last in one.variables.items() if any(last != of.get(name) for of in before)
                    ]:
                        forget("for", name, one)  # what still changes has another value behind the last turn
                    forget("for", node.name, one)
            after += current
        return after

    def _while(self, node: While, states: list[State]) -> list[State]:
        """A loop over the script's own arguments, or over lines that are read, does not run; another one runs once."""
        said = " ".join(self._words_of(node.condition))
        if re.search(r"\$#|\$\{#|\$\d|\$\{\d|\bread\b|\bgetopts?\b|\bshift\b", said):
            return states
        return self.block(node.body, states)

    def _words_of(self, block: Block) -> Iterable[str]:
        for node in block:
            if isinstance(node, Simple):
                end = self.text.find("\n", node.start)
                yield self.text[node.start : end if end > 0 else len(self.text)]
            elif isinstance(node, AndOr):
                yield from self._words_of((node.left, node.right))
            elif isinstance(node, Group):
                yield from self._words_of(node.body)

    def simple(self, node: Simple, state: State) -> list[State]:
        if not node.words:
            for one in node.assignments:
                assign(state, one)
            return [state]
        words = state.words(node.words)
        name = known(words[0]) if words else None
        if name in _DECLARE:
            for word in node.words[1:]:
                declare(state, word)
            return [state]
        if name in ("exit", "return", "exec") and len(words) <= 2 and name != "exec":
            state.ended = name == "exit" or bool(self.calls)
            return [state]
        if name in self.functions and self.calls < MAX_CALLS:
            return self._call(self.functions[name], words[1:], state)
        if name in ("source", ".") and len(words) > 1:
            return self._source(words[1], state)
        if name in ("read", "mapfile", "readarray", "unset", "getopts"):
            for value in words[1:]:
                forget(name, known(value) or "", state)
            return [state]
        if name in ("let", "(("):
            let(known(words[1]) if len(words) > 1 else None, state)
            return [state]
        if name == "eval" and self.calls < MAX_CALLS:
            return self._eval(node, words, state)
        if name not in _QUIET and test(node, state) is None:
            script = inner_script(words)
            if script is not None and self.calls < MAX_CALLS:
                self._follow(script, state.copy())
                return [state]
            self._note(node, flattened(words), state)
        return [state]

    def _eval(self, node: Simple, words: tuple[Value, ...], state: State) -> list[State]:
        """`eval`: what this shell reads again, with assignments that stay."""
        script = joined(words[1:])
        text = known(script)
        if text is None:
            for name in _ASSIGNED.findall(shown(script)):
                forget("eval", name, state)
        elif "$" in text or not self._is_program(text):
            return self._follow(script, state)
        self._note(node, flattened(words), state)
        return [state]

    def _is_program(self, text: str) -> bool:
        """Whether a text is one command, of another program: its words are told apart without losing their places."""
        nodes, first = parse(text), text.split(maxsplit=1)[:1]
        return (
            len(nodes) == 1
            and isinstance(nodes[0], Simple)
            and not nodes[0].assignments
            and not {*first} & {*_DECLARE, *_BUILT_IN, *self.functions}
        )

    def _follow(self, script: Value, state: State) -> list[State]:
        """What a shell makes of a state that is given a script."""
        text, start = known(script) or "", script[0].start if script else None
        self.calls += 1
        if start is not None and not self.sourced and self.text[start : start + len(text)] == text:
            after = self.block(parse(self.text[: start + len(text)], start), [state])
        else:
            after = self._inner(f"{self.text}\n{text}", len(self.text) + 1, state)
        self.calls -= 1
        return after

    def _inner(self, text: str, start: int, state: State) -> list[State]:
        """The states behind a text, of which what stands from `start` on has no place in the script."""
        inner = _Follower(text, self.read, [], self.functions, self.sourced + 1, self.calls, self.steps)
        before = dict(state.variables)
        after = inner.block(parse(text, start), [state])
        self.steps = inner.steps
        for one in after:
            without_places(one, before, start)
        self.found += [
            Invocation(tuple(placeless(word, start) for word in one.words), 0, one.assumptions)
            for one in inner.found[: MAX_INVOCATIONS - len(self.found)]
        ]
        return after

    def _note(self, node: Simple, words: tuple[Value, ...], state: State) -> None:
        if len(self.found) < MAX_INVOCATIONS and any(shown(one).startswith("--") for one in words):
            self.found.append(Invocation(words, 0 if self.sourced else node.start, state.assumptions))

    def _call(self, body: Block, arguments: Array, state: State) -> list[State]:
        outer, state.arguments = state.arguments, arguments
        self.calls += 1
        after = self.block(body, [state])
        self.calls -= 1
        # A state that returned goes on after the call.
        for one in after or [state]:
            one.arguments = outer
            one.ended = False
        return after or [state]

    def _source(self, file: Value, state: State) -> list[State]:
        text = None if self.sourced >= MAX_CALLS else self.read(_path(file))
        return [state] if text is None else self._inner(text, 0, state)


def _path(file: Value) -> str:
    """A file as its path is known: what stands behind folders that are not known, as `${SCRIPT_DIR}/models/a.sh`."""
    last = max((number for number, part in enumerate(file) if isinstance(part, Hole)), default=-1)
    text = "".join(part.text for part in file[last + 1 :])
    return text if last < 0 else text.lstrip("/") if text.startswith("/") else ""


_ASSIGNED = re.compile(r"(?:^|[;&|\n])\s*(?:export\s+)?([A-Za-z_]\w*)\+?=")


MAX_ITERATIONS = 64
"""Numbers of a range, and turns of a loop, that are followed."""


def braces(values: tuple[Value, ...]) -> Iterable[Value]:
    """`{1..4}` and `{a,b}` as a whole word."""
    for value in values:
        text = known(value) or ""
        numbers = re.fullmatch(r"\{(-?\d+)\.\.(-?\d+)\}", text)
        listed = re.fullmatch(r"\{([^{}\s]+,[^{}\s]*)\}", text)
        start = value[0].start if value else None
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            step = 1 if last >= first else -1
            last = min(last, first + MAX_ITERATIONS) if step == 1 else max(last, first - MAX_ITERATIONS)
            yield from ((Piece(str(one), start),) for one in range(first, last + step, step))
        elif listed:
            yield from ((Piece(one, start),) for one in listed[1].split(","))
        else:
            yield value


# Values without their places in the script: those that stand in another file.


def placeless(value: Value, start: int = 0) -> Value:
    """A value without the places of pieces and holes that stand from `start` on."""
    return tuple(
        part
        if part.start is None or part.start < start
        else Hole(part.text, part.names, None, None, part.can_be_words)
        if isinstance(part, Hole)
        else Piece(part.text, None, part.splits, part.is_quoted)
        for part in value
    )


def without_places(state: State, before: Mapping[str, object], start: int = 0) -> None:
    """Takes away places from `start` on, of variables that were given another value since. Texts stay."""
    for name, value in state.variables.items():
        if before.get(name) is value:
            continue
        if name in state.arrays:
            state.variables[name] = tuple(placeless(one, start) for one in value)  # type: ignore[arg-type]
        else:
            state.variables[name] = placeless(value, start)  # type: ignore[arg-type]

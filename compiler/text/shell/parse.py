"""Parses shell scripts: the part of bash that scripts which start programs are written in.

What cannot be parsed is skipped up to the next line, so that the rest of a script is still read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .syntax import Literal, ShellLimitError, ShellSyntaxError, Word, WordPart, WordReader

# What a script consists of.


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value` or `name=(…)`."""

    name: str
    value: Word | tuple[Word, ...]
    is_array: bool = False
    append: bool = False
    index: str | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words. Assignments before it hold for it alone; without words they stay."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    start: int


@dataclass(frozen=True, slots=True)
class AndOr:
    """`left && right` or `left || right`."""

    left: Node
    operator: str
    right: Node


@dataclass(frozen=True, slots=True)
class Branch:
    """A condition and what runs when it holds."""

    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class If:
    """`if … elif … else … fi`."""

    branches: tuple[Branch, ...]
    otherwise: Block


@dataclass(frozen=True, slots=True)
class Choice:
    """The patterns of a case and what runs when one of them matches."""

    patterns: tuple[Word, ...]
    body: Block


@dataclass(frozen=True, slots=True)
class Case:
    """`case word in … esac`."""

    word: Word
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for name in words; do … done`; `words` is None for the C-like form and for one without `in`."""

    name: str
    words: tuple[Word, ...] | None
    body: Block


@dataclass(frozen=True, slots=True)
class While:
    """`while` and `until`."""

    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class Group:
    """`{ … }` or `( … )`; `own` variables stay inside."""

    body: Block
    own: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function, which runs when it is called."""

    name: str
    body: Block


Node = Simple | AndOr | If | Case | For | While | Group | Function
Block = tuple[Node, ...]


# The parser.

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(
    r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\(\)\s*(?=[{(])|function[ \t]+([A-Za-z_][\w-]*)\s*(?=\{)"
)
_KEYWORD = re.compile(r"(if|then|elif|else|fi|case|esac|for|while|until|do|done|in|select)(?![^\s;&|()<>])")
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac"})
MAX_DEPTH = 60
MAX_SEARCHED = 3_000_000
"""Characters that are gone through for ends of quotes and brackets which are not there."""


def parse(text: str, start: int = 0) -> Block:
    """The statements of a script, or of its part from `start` on.

    Raises:
        ShellLimitError: it has too many quotes and brackets without an end.
    """
    return _Parser(text, start).script()


class _Parser(WordReader):
    depth = 0

    def script(self) -> Block:
        found: list[Node] = []
        searched = 0
        while True:
            self.separators()
            if self.at >= len(self.text):
                return tuple(found)
            start = self.began = self.at
            try:
                found.append(self._statement())
            except (ShellSyntaxError, RecursionError) as error:
                searched += error.searched if isinstance(error, ShellSyntaxError) else 0
                if searched > MAX_SEARCHED:
                    message = "its quotes and brackets do not close, in this line and in many before"
                    raise ShellLimitError(message, start) from None
                self.depth, self.heredocs = 0, []
                following = self.text.find("\n", max(start, self.at))
                self.at = len(self.text) if following < 0 else following + 1

    def _keyword(self) -> str | None:
        match = _KEYWORD.match(self.text, self.at)
        return match[1] if match else None

    def _expect(self, word: str) -> None:
        self.separators()
        if self._keyword() != word:
            raise ShellSyntaxError(word)
        self.at += len(word)

    def _block(self, *closers: str) -> Block:
        found: list[Node] = []
        while True:
            self.separators()
            if self.at >= len(self.text):
                raise ShellSyntaxError("end")
            if self._keyword() in closers or any(self.peek(one) for one in closers if not one.isalpha()):
                return tuple(found)
            if self._keyword() in _CLOSERS or self.peek(";;"):
                raise ShellSyntaxError("closer")
            found.append(self._statement())

    def _statement(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ShellSyntaxError("depth")
        left = self._pipeline()
        while True:
            self.blank()
            operator = next((one for one in ("&&", "||") if self.peek(one)), None)
            if operator is None:
                self.depth -= 1
                return left
            self.at += 2
            self.separators_of_lines()
            left = AndOr(left, operator, self._pipeline())

    def _pipeline(self) -> Node:
        self.blank()
        while self.peek("! "):
            self.at += 2
            self.blank()
        found = self._command()
        parts = [found]
        while True:
            self.blank()
            if not self.peek("|") or self.peek("||"):
                return found if len(parts) == 1 else Group(tuple(parts), own=False)
            self.at += 2 if self.peek("|&") else 1
            self.separators_of_lines()
            parts.append(self._command())

    def _command(self) -> Node:
        keyword = self._keyword()
        found: Node
        if keyword in ("if", "case", "for", "select", "while", "until"):
            self.at += len(keyword)
            found = {
                "if": self._if,
                "case": self._case,
                "for": self._for,
                "select": self._for,
                "while": self._while,
                "until": self._while,
            }[keyword]()
        elif match := _FUNCTION.match(self.text, self.at):
            self.at = match.end()
            found = Function(match[1] or match[2], (self._command(),))
        elif self.peek("(("):
            return self._arithmetic_command()
        elif self.peek("(") or re.compile(r"\{\s").match(self.text, self.at):
            own = self.peek("(")
            self.at += 1
            body = self._block(")" if own else "}")
            self.at += 1
            found = Group(body, own)
        else:
            return self._simple()
        self.redirects()
        return found

    def _arithmetic_command(self) -> Node:
        start = self.at
        end = self.text.find("))", self.at)
        if end < 0:
            raise ShellSyntaxError("))")
        self.at = end + 2
        expression = Literal(self.text[start + 2 : end], start + 2, quoted=True)
        return Simple((), ((Literal("((", start, quoted=False),), (expression,)), start)

    def _if(self) -> Node:
        branches: list[Branch] = []
        otherwise: Block = ()
        condition = self._block("then")
        while True:
            self._expect("then")
            branches.append(Branch(condition, self._block("elif", "else", "fi")))
            keyword = self._keyword()
            self.at += len(keyword or "")
            if keyword == "elif":
                condition = self._block("then")
                continue
            if keyword == "else":
                otherwise = self._block("fi")
                self._expect("fi")
            return If(tuple(branches), otherwise)

    def _case(self) -> Node:
        self.blank()
        word = self.word()
        self._expect("in")
        choices: list[Choice] = []
        while True:
            self.separators()
            while self.peek(";;"):
                self.at += 2
                self.separators()
            if self._keyword() == "esac":
                self.at += 4
                return Case(word, tuple(choices))
            if self.peek("("):
                self.at += 1
            patterns: list[Word] = []
            while True:
                self.blank()
                patterns.append(self.word())
                self.blank()
                if self.peek("|"):
                    self.at += 1
                elif self.peek(")"):
                    self.at += 1
                    break
                else:
                    raise ShellSyntaxError(")")
            choices.append(Choice(tuple(patterns), self._block(";;", "esac")))

    def _for(self) -> Node:
        self.blank()
        if self.peek("(("):
            self.at = self.text.find("))", self.at) + 2
            name, words = "", None
        else:
            match = _NAME.match(self.text, self.at)
            if not match:
                raise ShellSyntaxError("name")
            name, words = match[0], None
            self.at = match.end()
            self.separators_of_lines()
            if self._keyword() == "in":
                self.at += 2
                words = tuple(self._words())
        self._expect("do")
        body = self._block("done")
        self._expect("done")
        return For(name, words, body)

    def _while(self) -> Node:
        condition = self._block("do")
        self._expect("do")
        body = self._block("done")
        self._expect("done")
        return While(condition, body)

    def _simple(self) -> Node:
        self.blank()
        start = self.at
        assignments: list[Assignment] = []
        while match := _ASSIGNMENT.match(self.text, self.at):
            assignments.append(self._assignment(match))
            self.redirects()
        words = self._words()
        if not words and not assignments:
            raise ShellSyntaxError("command")
        return Simple(tuple(assignments), tuple(words), start)

    def _assignment(self, match: re.Match[str]) -> Assignment:
        self.at = match.end()
        name, index, append = match[1], match[2], bool(match[3])
        if not self.peek("("):
            return Assignment(name, self.word(), append=append, index=index)
        self.at += 1
        words: list[Word] = []
        while True:
            self.separators_of_lines()
            if self.at >= len(self.text):
                raise ShellSyntaxError(")")
            if self.peek(")"):
                self.at += 1
                return Assignment(name, tuple(words), is_array=True, append=append)
            word = self.word()
            if not word:
                raise ShellSyntaxError("word")
            words.append(word)

    def _words(self) -> list[Word]:
        words: list[Word] = []
        in_test = False
        while True:
            self.redirects() if not in_test else self.blank()
            if self.at >= len(self.text):
                return words
            match = _ASSIGNMENT.match(self.text, self.at) if words and not in_test else None
            if match and self.text.startswith("(", match.end()):
                # declare NAME=(…): the array is a word of its own kind.
                words.append(self._declared(match))
                continue
            if in_test and self.text[self.at] in "&|<>()\n":
                operator = next((one for one in ("&&", "||") if self.peek(one)), self.text[self.at])
                if operator != "\n":
                    words.append((Literal(operator, self.at, quoted=False),))
                self.at += len(operator)
                continue
            if self.text[self.at] in "\n;&|()":
                return words
            word = self.word()
            if not word:
                raise ShellSyntaxError("word")
            words.append(word)
            if len(words) == 1 and _text(word) == "[[":
                in_test = True
            elif in_test and _text(word) == "]]":
                in_test = False

    def _declared(self, match: re.Match[str]) -> Word:
        start = self.at
        found = self._assignment(match)
        parts: list[WordPart] = [Literal(f"{found.name}=(", start, quoted=False)]
        for one in found.value:
            assert isinstance(one, tuple)
            parts += [*one, Literal("\0", start, quoted=True)]
        return tuple(parts)


def _text(word: Word) -> str:
    return word[0].text if len(word) == 1 and isinstance(word[0], Literal) else ""

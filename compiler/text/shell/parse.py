"""Parses shell scripts: the part of bash that scripts which start programs are written in.

What cannot be parsed is skipped up to the next line, so that the rest of a script is still read.
"""

from __future__ import annotations

import re

from .syntax import (
    AndOr,
    Arithmetic,
    Assignment,
    Block,
    Branch,
    Case,
    Choice,
    For,
    Function,
    Group,
    If,
    Literal,
    Node,
    Parameter,
    Simple,
    Substitution,
    While,
    Word,
    WordPart,
)

_PLAIN = re.compile(r"""[^\s\\'"$`;&|<>()#]+|#""")
_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(
    r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\(\)\s*(?=[{(])|function[ \t]+([A-Za-z_][\w-]*)\s*(?=\{)"
)
_IN_QUOTES = re.compile(r"""[^"\\$`]+""")
_HEREDOC = re.compile(r"""<<(-?)[ \t]*(?:'([^'\n]+)'|"([^"\n]+)"|\\?([\w.-]+))""")
_REDIRECT = re.compile(r"\d*(?:&>>|&>|>>|>&|<&|<<<|>\||<>|>|<)")
_KEYWORD = re.compile(r"(if|then|elif|else|fi|case|esac|for|while|until|do|done|in|select)(?![^\s;&|()<>])")
_OPERATORS = (
    ":-",
    ":=",
    ":+",
    ":?",
    "-",
    "=",
    "+",
    "?",
    "%%",
    "%",
    "##",
    "#",
    "//",
    "/",
    ":",
    "^^",
    "^",
    ",,",
    ",",
    "@",
)
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac"})
MAX_DEPTH = 60


class _SyntaxError(Exception):
    pass


def parse(text: str, start: int = 0) -> Block:
    """The statements of a script, or of its part from `start` on."""
    return _Parser(text, start).script()


class _Parser:
    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at
        self.depth = 0
        self.heredocs: list[tuple[str, bool]] = []

    def script(self) -> Block:
        found: list[Node] = []
        while True:
            self._separators()
            if self.at >= len(self.text):
                return tuple(found)
            start = self.at
            try:
                found.append(self._statement())
            except (_SyntaxError, RecursionError):
                self.depth, self.heredocs = 0, []
                following = self.text.find("\n", max(start, self.at))
                self.at = len(self.text) if following < 0 else following + 1

    def _peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def _blank(self) -> None:
        while True:
            match = _BLANK.match(self.text, self.at)
            if match:
                self.at = match.end()
            if self.at < len(self.text) and self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
                return
            if not match:
                return

    def _separators(self) -> None:
        while True:
            self._blank()
            if self.at < len(self.text) and self.text[self.at] in ";&\n":
                if self.text[self.at] == "\n":
                    self._newline()
                elif self._peek(";;"):
                    return
                else:
                    self.at += 1
            else:
                return

    def _newline(self) -> None:
        self.at += 1
        for delimiter, indented in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row = self.text[self.at : end].rstrip("\r")
                self.at = min(len(self.text), end + 1)
                if (row.lstrip("\t") if indented else row) == delimiter:
                    break
        self.heredocs.clear()

    def _keyword(self) -> str | None:
        match = _KEYWORD.match(self.text, self.at)
        return match[1] if match else None

    def _expect(self, word: str) -> None:
        self._separators()
        if self._keyword() != word:
            raise _SyntaxError(word)
        self.at += len(word)

    def _block(self, *closers: str) -> Block:
        found: list[Node] = []
        while True:
            self._separators()
            if self.at >= len(self.text):
                raise _SyntaxError("end")
            if self._keyword() in closers or any(self._peek(one) for one in closers if not one.isalpha()):
                return tuple(found)
            if self._keyword() in _CLOSERS or self._peek(";;"):
                raise _SyntaxError("closer")
            found.append(self._statement())

    def _statement(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _SyntaxError("depth")
        left = self._pipeline()
        while True:
            self._blank()
            operator = next((one for one in ("&&", "||") if self._peek(one)), None)
            if operator is None:
                self.depth -= 1
                return left
            self.at += 2
            self._separators_of_lines()
            left = AndOr(left, operator, self._pipeline())

    def _separators_of_lines(self) -> None:
        self._blank()
        while self._peek("\n"):
            self._newline()
            self._blank()

    def _pipeline(self) -> Node:
        self._blank()
        while self._peek("! "):
            self.at += 2
            self._blank()
        found = self._command()
        parts = [found]
        while True:
            self._blank()
            if not self._peek("|") or self._peek("||"):
                return found if len(parts) == 1 else Group(tuple(parts), own=False)
            self.at += 2 if self._peek("|&") else 1
            self._separators_of_lines()
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
        elif self._peek("(("):
            return self._arithmetic_command()
        elif self._peek("(") or re.compile(r"\{\s").match(self.text, self.at):
            own = self._peek("(")
            self.at += 1
            body = self._block(")" if own else "}")
            self.at += 1
            found = Group(body, own)
        else:
            return self._simple()
        self._redirects()
        return found

    def _redirects(self) -> None:
        while True:
            self._blank()
            if (match := _HEREDOC.match(self.text, self.at)) and not self._peek("<<<"):
                self.heredocs.append((match[2] or match[3] or match[4], bool(match[1])))
                self.at = match.end()
                continue
            match = _REDIRECT.match(self.text, self.at)
            if not match:
                return
            self.at = match.end()
            self._blank()
            if not self._peek("("):
                self._word()
            else:
                self._balanced("(", ")")

    def _arithmetic_command(self) -> Node:
        start = self.at
        end = self.text.find("))", self.at)
        if end < 0:
            raise _SyntaxError("))")
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
        self._blank()
        word = self._word()
        self._expect("in")
        choices: list[Choice] = []
        while True:
            self._separators()
            while self._peek(";;"):
                self.at += 2
                self._separators()
            if self._keyword() == "esac":
                self.at += 4
                return Case(word, tuple(choices))
            if self._peek("("):
                self.at += 1
            patterns: list[Word] = []
            while True:
                self._blank()
                patterns.append(self._word())
                self._blank()
                if self._peek("|"):
                    self.at += 1
                elif self._peek(")"):
                    self.at += 1
                    break
                else:
                    raise _SyntaxError(")")
            choices.append(Choice(tuple(patterns), self._block(";;", "esac")))

    def _for(self) -> Node:
        self._blank()
        if self._peek("(("):
            self.at = self.text.find("))", self.at) + 2
            name, words = "", None
        else:
            match = _NAME.match(self.text, self.at)
            if not match:
                raise _SyntaxError("name")
            name, words = match[0], None
            self.at = match.end()
            self._separators_of_lines()
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
        self._blank()
        start = self.at
        assignments: list[Assignment] = []
        while match := _ASSIGNMENT.match(self.text, self.at):
            assignments.append(self._assignment(match))
            self._redirects()
        words = self._words()
        if not words and not assignments:
            raise _SyntaxError("command")
        return Simple(tuple(assignments), tuple(words), start)

    def _assignment(self, match: re.Match[str]) -> Assignment:
        self.at = match.end()
        name, index, append = match[1], match[2], bool(match[3])
        if not self._peek("("):
            return Assignment(name, self._word(), append=append, index=index)
        self.at += 1
        words: list[Word] = []
        while True:
            self._separators_of_lines()
            if self.at >= len(self.text):
                raise _SyntaxError(")")
            if self._peek(")"):
                self.at += 1
                return Assignment(name, tuple(words), is_array=True, append=append)
            word = self._word()
            if not word:
                raise _SyntaxError("word")
            words.append(word)

    def _words(self) -> list[Word]:
        words: list[Word] = []
        in_test = False
        while True:
            self._redirects() if not in_test else self._blank()
            if self.at >= len(self.text):
                return words
            if words and not in_test and (match := _ASSIGNMENT.match(self.text, self.at)) and self._peek_array(match):
                # declare NAME=(…): the array is a word of its own kind.
                words.append(self._declared(match))
                continue
            if in_test and self.text[self.at] in "&|<>()\n":
                operator = next((one for one in ("&&", "||") if self._peek(one)), self.text[self.at])
                if operator != "\n":
                    words.append((Literal(operator, self.at, quoted=False),))
                self.at += len(operator)
                continue
            if self.text[self.at] in "\n;&|()":
                return words
            word = self._word()
            if not word:
                raise _SyntaxError("word")
            words.append(word)
            if len(words) == 1 and _text(word) == "[[":
                in_test = True
            elif in_test and _text(word) == "]]":
                in_test = False

    def _peek_array(self, match: re.Match[str]) -> bool:
        return self.text.startswith("(", match.end())

    def _declared(self, match: re.Match[str]) -> Word:
        start = self.at
        found = self._assignment(match)
        parts: list[WordPart] = [Literal(f"{found.name}=(", start, quoted=False)]
        for one in found.value:
            assert isinstance(one, tuple)
            parts += [*one, Literal("\0", start, quoted=True)]
        return tuple(parts)

    def _word(self) -> Word:
        parts: list[WordPart] = []
        text = self.text
        while self.at < len(text):
            here = text[self.at]
            if match := _PLAIN.match(text, self.at):
                if match[0] == "#" and not parts:
                    break
                parts.append(Literal(match[0], self.at, quoted=False))
                self.at = match.end()
            elif here == "\\":
                if text.startswith("\r\n", self.at + 1) or text.startswith("\n", self.at + 1):
                    self.at += 3 if text.startswith("\r", self.at + 1) else 2
                    continue
                parts.append(Literal(text[self.at + 1 : self.at + 2], self.at + 1, quoted=True))
                self.at += 2
            elif here == "'":
                end = text.find("'", self.at + 1)
                if end < 0:
                    raise _SyntaxError("'")
                parts.append(Literal(text[self.at + 1 : end], self.at + 1, quoted=True))
                self.at = end + 1
            elif here == '"':
                self.at += 1
                parts += self._in_double_quotes()
            elif here == "$":
                parts.append(self._dollar(quoted=False))
            elif here == "`":
                parts.append(self._backquotes(quoted=False))
            elif here in "<>" and text.startswith("(", self.at + 1):
                start = self.at
                self.at += 1
                self._balanced("(", ")")
                parts.append(Substitution(text[start : self.at], start, self.at, quoted=False))
            else:
                break
        return tuple(parts)

    def _in_double_quotes(self) -> list[WordPart]:
        parts: list[WordPart] = []
        text = self.text
        while self.at < len(text):
            here = text[self.at]
            if here == '"':
                self.at += 1
                return parts or [Literal("", self.at - 1, quoted=True)]
            if match := _IN_QUOTES.match(text, self.at):
                parts.append(Literal(match[0], self.at, quoted=True))
                self.at = match.end()
            elif here == "\\":
                following = text[self.at + 1 : self.at + 2]
                if following == "\n" or text.startswith("\r\n", self.at + 1):
                    self.at += 2 if following == "\n" else 3
                elif following in '"$`\\':
                    parts.append(Literal(following, self.at + 1, quoted=True))
                    self.at += 2
                else:
                    parts.append(Literal("\\" + following, self.at, quoted=True))
                    self.at += 2
            elif here == "$":
                parts.append(self._dollar(quoted=True))
            else:
                parts.append(self._backquotes(quoted=True))
        raise _SyntaxError('"')

    def _dollar(self, *, quoted: bool) -> WordPart:
        start, text = self.at, self.text
        if text.startswith("$((", start):
            end = self._end_of_arithmetic(start + 3)
            self.at = end + 2
            return Arithmetic(text[start + 3 : end], start, self.at, quoted)
        if text.startswith("$(", start):
            self.at += 1
            self._balanced("(", ")")
            return Substitution(text[start : self.at], start, self.at, quoted)
        if text.startswith("${", start):
            self.at += 2
            return self._braces(start, quoted=quoted)
        if text.startswith("$'", start) and not quoted:
            end = text.find("'", start + 2)
            if end < 0:
                raise _SyntaxError("'")
            self.at = end + 1
            return Literal(text[start + 2 : end], start + 2, quoted=True)
        match = _NAME.match(text, start + 1)
        if match:
            self.at = match.end()
            return Parameter(match[0], start, self.at, quoted)
        if text[start + 1 : start + 2] and text[start + 1] in "@*#?$!-0123456789":
            self.at += 2
            return Parameter(text[start + 1], start, self.at, quoted)
        self.at += 1
        return Literal("$", start, quoted)

    def _end_of_arithmetic(self, start: int) -> int:
        depth, at = 0, start
        while at < len(self.text):
            here = self.text[at]
            if here == "(":
                depth += 1
            elif here == ")":
                if depth == 0 and self.text.startswith("))", at):
                    return at
                depth -= 1
            at += 1
        raise _SyntaxError("))")

    def _braces(self, start: int, *, quoted: bool) -> WordPart:
        text = self.text
        match = re.compile(r"[#!]?(\w+|[@*])").match(text, self.at)
        if not match:
            self._to_closing_brace()
            return Substitution(text[start : self.at], start, self.at, quoted)
        prefix, name = match[0][: -len(match[1])], match[1]
        self.at = match.end()
        index: str | None = None
        if self._peek("["):
            end = text.find("]", self.at)
            if end < 0:
                raise _SyntaxError("]")
            index = text[self.at + 1 : end]
            self.at = end + 1
        if prefix:
            self._to_closing_brace()
            return Substitution(text[start : self.at], start, self.at, quoted)
        if self._peek("}"):
            self.at += 1
            return Parameter(name, start, self.at, quoted, index)
        operator = next((one for one in _OPERATORS if self._peek(one)), None)
        if operator is None:
            self._to_closing_brace()
            return Substitution(text[start : self.at], start, self.at, quoted)
        self.at += len(operator)
        argument = self._argument(quoted=quoted)
        return Parameter(name, start, self.at, quoted, index, operator, argument)

    def _argument(self, *, quoted: bool) -> Word:
        """The word after the operator of `${…}`, up to its closing brace."""
        parts: list[WordPart] = []
        text = self.text
        while self.at < len(text):
            here = text[self.at]
            if here == "}":
                self.at += 1
                return tuple(parts)
            if here == "$":
                parts.append(self._dollar(quoted=quoted))
            elif here == '"':
                self.at += 1
                parts += self._in_double_quotes()
            elif here == "'" and not quoted:
                end = text.find("'", self.at + 1)
                if end < 0:
                    raise _SyntaxError("'")
                parts.append(Literal(text[self.at + 1 : end], self.at + 1, quoted=True))
                self.at = end + 1
            elif here == "`":
                parts.append(self._backquotes(quoted=quoted))
            elif here == "\\":
                parts.append(Literal(text[self.at + 1 : self.at + 2], self.at + 1, quoted=True))
                self.at += 2
            else:
                match = re.compile(r"""[^}$"'`\\]+|'""").match(text, self.at)
                assert match is not None
                parts.append(Literal(match[0], self.at, quoted))
                self.at = match.end()
        raise _SyntaxError("}")

    def _to_closing_brace(self) -> None:
        depth = 1
        while self.at < len(self.text):
            here = self.text[self.at]
            self.at += 1
            depth += (here == "{") - (here == "}")
            if depth == 0:
                return
        raise _SyntaxError("}")

    def _backquotes(self, *, quoted: bool) -> WordPart:
        start = self.at
        end = self.text.find("`", start + 1)
        while end > 0 and self.text[end - 1] == "\\":
            end = self.text.find("`", end + 1)
        if end < 0:
            raise _SyntaxError("`")
        self.at = end + 1
        return Substitution(self.text[start : self.at], start, self.at, quoted)

    def _balanced(self, opening: str, closing: str) -> None:
        """Goes past the bracket that closes the one here, over quotes and comments."""
        depth = 0
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\\":
                self.at += 2
                continue
            if here in "'\"":
                end = self.at + 1
                while end < len(self.text) and self.text[end] != here:
                    end += 2 if here == '"' and self.text[end] == "\\" else 1
                self.at = end + 1
                continue
            self.at += 1
            depth += (here == opening) - (here == closing)
            if depth == 0:
                return
        raise _SyntaxError(closing)


def _text(word: Word) -> str:
    return word[0].text if len(word) == 1 and isinstance(word[0], Literal) else ""

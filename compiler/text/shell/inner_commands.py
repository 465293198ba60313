"""Commands that stand in the words of other commands: of `eval`, of `bash -c`, of launchers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .values import Value, fields, joined, known, shown, unquoted

_ENDS = frozenset({"|", "|&", "||", "&&", "&", ";"})
_REDIRECTION = re.compile(r"\d*(?:&>>|&>|>>|>&|<&|>\||<>|>|<(?![<(]))")
_SHELLS = re.compile(r"(?:.*/)?(?:ba|z|da)?sh$")


def flattened(words: tuple[Value, ...]) -> tuple[Value, ...]:
    """The words of a command, with those of text that a shell would read again: `eval`, `bash -c "…"`."""
    if words and known(words[0]) == "eval":
        return tuple(_first_command(tuple(fields(unquoted(joined(words[1:]))))))
    found: list[Value] = []
    follows = False
    for number, word in enumerate(words):
        text = shown(word)
        is_script = follows and any(one.isspace() for one in text)
        is_long = number > 0 and "--" in text and any(one.isspace() for one in text.strip()) and " --" in f" {text}"
        if is_script:
            found += _first_command(tuple(fields(unquoted(word))))
        elif is_long and _is_command(text):
            found += fields(unquoted(word))
        else:
            found.append(word)
        follows = text in ("-c", "-lc", "-ic") and any(_SHELLS.match(shown(one)) for one in words[:number])
    return tuple(found)


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
    """The script of `bash -c 'script'` or `eval 'script'`, when variables in it are left for the inner shell."""
    if words and known(words[0]) == "eval":
        whole = joined(words[1:])
        return whole if "$" in (known(whole) or "") else None
    for number, word in enumerate(words):
        text = known(word)
        after_shell = number >= 2 and shown(words[number - 1]) in ("-c", "-lc", "-ic")
        of_shell = after_shell and any(_SHELLS.match(shown(one)) for one in words[: number - 1])
        if text is not None and "$" in text and of_shell:
            return word
    return None


def _is_command(text: str) -> bool:
    """Whether a long word is a command of its own, as launchers take it: it names a Python program."""
    return bool(re.search(r"\.py(\s|$)", text))

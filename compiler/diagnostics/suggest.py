"""Did you mean …? The nearest of a few names."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most probably misspells, None when none is near enough to be worth a guess.

    Nearness is the number of letters to change, insert, delete or swap with a neighbour (optimal string alignment);
    case and `-`, `_`, `.` and spaces do not count. About one change in three letters is still a misspelling.
    """
    target = _bare(word)
    if not target or len(word) > 80:
        return None
    best: str | None = None
    best_score = (1 << 30, 1 << 30)
    for candidate in candidates:
        name = _bare(candidate)
        limit = max(1, (max(len(target), len(name)) + 1) // 3) if min(len(target), len(name)) > 2 else 1
        if target != name and (len(target) < 2 or len(name) < 2):
            continue
        distance = _distance(target, name, limit)
        if distance > limit:
            continue
        score = (distance, abs(len(candidate) - len(word)))
        if candidate != word and score < best_score:
            best, best_score = candidate, score
    return best


def _bare(word: str) -> str:
    return word.lower().translate({ord(character): None for character in "-_. "})


def _distance(left: str, right: str, limit: int) -> int:
    """Changes that turn `left` into `right`; more than `limit` when there are more than that."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    before: list[int] = []
    previous = list(range(len(right) + 1))
    for row, letter in enumerate(left, 1):
        current = [row]
        for column, other in enumerate(right, 1):
            cost = min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (letter != other))
            if row > 1 and column > 1 and letter == right[column - 2] and left[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        if min(current) > limit:
            return limit + 1
        before, previous = previous, current
    return previous[-1]

"""Unquoted YAML scalars to values, as YAML 1.2's core schema reads them, and `2_000` as every Python program does.

What YAML 1.1 (and so most Python programs) reads otherwise is reported where it changes a number: `010` is 8 there.
"""

from __future__ import annotations

import math
import re

from .literals import read_number, shown

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_BASED = re.compile(r"0[ox][0-9a-fA-F]+")
_GROUPED = re.compile(r"[-+]?[0-9]+(?:_+[0-9]+)+(?:\.[0-9_]*)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def tag_of(value: object) -> str:
    """The YAML tag of a scalar's value."""
    name = {bool: "bool", int: "int", float: "float", type(None): "null"}.get(type(value), "str")
    return f"tag:yaml.org,2002:{name}"


def plain_value(text: str) -> tuple[object, tuple[str, str, str] | None]:
    """The value of an unquoted scalar, and (code, message, advice) when it cannot be taken as it is."""
    first = text[:1]
    if (first == "" or first in "~nN") and _NULL.fullmatch(text):
        return None, None
    if first in ("t", "T", "f", "F"):
        return (text.lower() == "true", None) if _BOOLEAN.fullmatch(text) else (text, None)
    if first == "" or first not in "+-.0123456789":
        return text, None
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits[0] == "0":
            plain = text.lstrip("+").replace(digits, digits.lstrip("0") or "0")
            message = f"{shown(text)} starts with 0: YAML 1.1 reads it to the base 8, YAML 1.2 to the base 10"
            return 0, ("J012", message, f"write {shown(plain)}, or 0o{shown(digits.lstrip('0') or '0')} for the base 8")
        return _number(text, is_integer=True)
    if _FLOAT.fullmatch(text):
        return _number(text, is_integer=False)
    if _BASED.fullmatch(text):
        try:
            return _number(str(int(text, 0)) if len(text) < 40 else "1" + "0" * 40, is_integer=True)
        except ValueError:
            return text, None
    if _GROUPED.fullmatch(text):
        return plain_value(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return 0, ("J010", f"{text} is not a number that can be used here", "write a finite number")
    return text, None


def _number(text: str, *, is_integer: bool) -> tuple[int | float, tuple[str, str, str] | None]:
    value, reason = read_number(text.lstrip("+"), is_integer=is_integer)
    assert isinstance(value, int) or math.isfinite(value)
    return value, None if reason is None else ("J011", *reason)

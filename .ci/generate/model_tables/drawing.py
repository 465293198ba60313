"""Draws configurations: which keys they give, and values that tell one key from another.

Sizes are either whole (heads divide them, as most classes demand) or primes, which tell `a // b * b` from `a`.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from building import INERT, LAYERS, ModelType
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

PRIMES = tuple(n for n in range(101, 1500) if all(n % d for d in range(2, 39)))
SMALL_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29)


def _periods(layers: int, pick: random.Random) -> dict[str, Any]:
    """Layers of each kind: offsets below their periods, and periods below the number of layers."""
    found: dict[str, Any] = {"mamba_dt_rank": pick.choice(["auto", "auto", *SMALL_PRIMES])}
    found["num_experts"] = pick.choice([1, 1, 4, 6, 8])
    for kind in ("attn", "expert"):
        period = pick.randint(2, max(2, layers))
        found |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": pick.randrange(period)}
    return found


FOLLOWING: Mapping[str, Callable[[int, random.Random], dict[str, Any]]] = {
    "gpt_neo": lambda layers, _: {"attention_types": [[["global"], layers]]},
    "jamba": _periods,
}
"""Values that have to follow the number of layers or each other, where a class takes no others."""
SHARED = re.compile(r"shared_layers$")
"""How many of the last layers take something from one before them: fewer than there are."""
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


class Draws:
    """Draws of a model type."""

    def __init__(self, kind: ModelType, seed: str) -> None:
        self.kind, self.random = kind, random.Random(seed)
        self.keys = {key: value for key, value in kind.defaults.items() if not INERT.search(key.rpartition(".")[2])}
        self.layer_keys = [key for key, value in self.keys.items() if LAYERS.search(key) and type(value) is int]
        self.required: dict[str, Any] = {}
        """Values without which nothing is built."""
        self.refused: set[str] = set()
        """Keys whose other values are never built when they alone change."""
        self.whole: set[str] = set()
        """Keys that no prime may stand for."""
        self.words: dict[str, list[str]] = {}
        source = kind.source()
        for key, value in self.keys.items():
            last = key.rpartition(".")[2]
            if last in KINDS or (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
                named = {word for word in ALLOWED_LAYER_TYPES if f'"{word}"' in source} if last in KINDS else set()
                if last == "mlp_layer_types":
                    named &= {"dense", "sparse"}
                elif last == "layer_types":
                    named -= {"dense", "sparse"}
                self.words[key] = sorted(named | set(value or ()))
        self.made: dict[str, list[int]] = {}
        """Lists of numbers that a class has where none are given."""
        self.letters_named = set(re.findall(r'["\'].["\']: *["\'](\w\w+)', source))
        self.letters: dict[str, str] = {}
        """The letters of keys that name the kind of each layer by one."""
        self._undeclared(source)
        self._made()
        self.optional = {key for key, value in self.keys.items() if type(value) is int and _is_asked(key, source)}
        """Sizes that the code asks for: 0 turns off what they are the size of."""
        self.texts = {key: found for key in self.keys if len(found := self._texts(key, source)) > 1}
        """The words that a key which is no list may hold."""

    def _made(self) -> None:
        """Numbers that a class computes and does not declare: a file holds them when the class has written it."""
        with contextlib.suppress(Exception):
            for key, value in self.kind.configuration({})[1].full.items():
                if self.keys.get(key, value) is None and isinstance(value, list) and value:
                    if all(isinstance(one, str) for one in value):
                        named = self.letters_named if key.rpartition(".")[2].endswith("_types") else set()
                        self.words[key] = sorted({*self.words.get(key, ()), *value, *named})
                    elif all(type(one) is int for one in value):
                        self.made[key] = value
                if type(value) is int and key not in self.kind.defaults and not INERT.search(key.rpartition(".")[2]):
                    self.keys[key], self.kind.hints[key] = None, "int"

    def _undeclared(self, source: str) -> None:
        """Keys that the code reads with `getattr`, or takes from `kwargs`, and its configuration does not declare."""
        for prefix, text in self.kind.configuration_sources().items():
            self._taken(prefix, text)
        for name, default in re.findall(r'getattr\((?:self\.)?config, "(\w+)", *(\w+)\)', source):
            if name in self.keys or INERT.search(name) or name in self.kind.names or name in self.kind.defaults:
                continue
            if default in ("True", "False"):
                self.keys[name], self.kind.hints[name] = default == "True", "bool"
                self.kind.defaults[name] = default == "True"
            elif default == "None" and re.search("dim|size|num_|rank|head", name):
                self.keys[name], self.kind.hints[name] = None, "int"  # null may differ from nothing

    def _taken(self, prefix: str, source: str) -> None:
        """Keys that the code of a configuration class takes from `kwargs`."""
        letters = "".join(re.findall(r'["\'](.)["\']: *["\']\w\w', source))
        found = re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"(?:,\s*([^()\n]*?))?\s*\)', source)
        for start, behind in re.findall(r'kwargs\.(?:pop|get)\(f"(\w+)\{\w+\}"(.{0,800}?)\}\.items', source, re.DOTALL):
            found += [(start + last, default) for last, default in re.findall(r'"(\w+)": (\d+)', behind)]
        for last, default in found:
            name = prefix + last
            if name in self.keys or INERT.search(last) or name in self.kind.defaults or name in self.kind.names:
                continue
            if default.isdigit():
                self.keys[name], self.kind.defaults[name], self.kind.hints[name] = int(default), int(default), "int"
            elif default in ("True", "False"):
                self.keys[name] = self.kind.defaults[name] = default == "True"
                self.kind.hints[name] = "bool"
            elif "pattern" in last and letters:
                self.keys[name], self.kind.hints[name], self.letters[name] = None, "str", letters
            elif re.search("^use_|bias$", last):
                self.keys[name], self.kind.hints[name] = None, "bool"
            elif re.search("dim|size|num_|rank|head|groups|conv$|expand", last):
                self.keys[name], self.kind.hints[name] = None, "int"

    def _texts(self, key: str, source: str) -> list[Any]:
        """Words that a class declares or that its code compares a key with."""
        hint, last, default = self.kind.hints.get(key, ""), key.rpartition(".")[2], self.keys[key]
        if ("str" not in hint and "Literal" not in hint) or "list" in hint:
            return []
        if re.search(r"(^|_)act(ivation)?(_|$)|hidden_act|activation", last):
            return list(dict.fromkeys([default, "silu", "gelu", "relu"]))
        found = re.findall(r"['\"]([\w-]+)['\"]", hint) if "Literal" in hint else []
        found += re.findall(rf'\b{last}\b *(?:==|!=) *"([\w-]+)"', source)
        found += [default] if default is not None else []
        if "bool" in hint and found:
            found += [True, False, "another"]
        return list(dict.fromkeys(found))

    def one(
        self,
        share: float | None = None,
        only: str | None = None,
        *,
        odd: bool | None = None,
        besides: str | None = None,
        deepest: int = 6,
    ) -> dict[str, Any]:
        """Flat values of the keys that a configuration gives.

        `only` leaves out all but the layers and this key; `besides` gives this key whatever is drawn, and no other a
        prime. No stack is deeper than `deepest` layers.
        """
        pick = self.random
        share = pick.choice([0.15, 0.4, 0.7]) if share is None else share
        odd = pick.random() < 0.4 if odd is None else odd
        given: dict[str, Any] = {}
        for key in self.layer_keys:
            given[key] = pick.randint(2, pick.choice([3, deepest]))
        main = next((given[key] for key in self.layer_keys if "." not in key), None)
        layers = main or next(iter(given.values()), None) or pick.randint(2, deepest)
        heads: dict[str, tuple[int, int]] = {}
        for key, default in self.keys.items():
            forced = bool(SHARED.search(key)) and (default or 0) >= layers
            if key in given or (only is not None and key != only and not forced):
                continue
            chance = share * (0.15 if key in self.refused else 1.0)
            if isinstance(default, bool) and share > 0.3 and key not in self.refused:
                chance = max(chance, 0.5) if only is None else 1.0
            if only is None and key != besides and not forced and pick.random() > chance:
                continue
            owner = key.rpartition(".")[0]
            of = next((given[one] for one in self.layer_keys if one.rpartition(".")[0] == owner), layers)
            group = heads.setdefault(owner, (pick.choice([1, 2, 3, 5]), pick.choice([1, 2, 4])))
            found = self._value(key, default, of, group, odd and key not in self.whole and besides in (None, key))
            if found is not _NOTHING:
                given[key] = found
        sizes = [key for key, value in given.items() if type(value) is int and value > 64]
        if len(sizes) > 1 and only is None and pick.random() < 0.25:
            one, other = pick.sample(sizes, 2)
            given[one] = given[other]
        if self.kind.name in FOLLOWING:
            given |= FOLLOWING[self.kind.name](layers, pick)
        return {**self.required, **given}

    def _value(self, key: str, default: Any, layers: int, group: tuple[int, int], odd: bool) -> Any:
        pick, hint, last = self.random, self.kind.hints.get(key, ""), key.rpartition(".")[2]
        if key in self.letters:
            return "".join(pick.choice(self.letters[key]) for _ in range(layers))
        if key in self.texts:
            return pick.choice(self.texts[key])
        if isinstance(default, bool):
            return not default if "None" not in hint else pick.choice([not default, None])
        if key in self.words:
            return [pick.choice(self.words[key]) for _ in range(layers)] if self.words[key] else _NOTHING
        if isinstance(default, list) or (default is None and "list" in hint):
            return self._list(key, default, layers, hint)
        if default is None and "float" in hint and "int" not in hint:
            return pick.choice([0.5, 2.0])
        if default is None and "int" not in hint:
            return pick.random() < 0.5 if "bool" in hint else _NOTHING
        if isinstance(default, float):
            return (
                round(default * pick.choice([0.5, 2, 3]), 4)
                if re.search("expand|factor|ratio|mult", last)
                else _NOTHING
            )
        if isinstance(default, str):
            return _NOTHING
        if re.search(r"list\[int\]|list\b(?!\[)", hint) and re.search("size|dim", last) and pick.random() < 0.4:
            return [self._number(last, default, layers, group, odd) for _ in range(layers)]
        if ("None" in hint and pick.random() < 0.35) or (last == "q_lora_rank" and pick.random() < 0.2):
            return None
        if key in self.optional and pick.random() < 0.25:
            return 0
        return self._number(last, default, layers, group, odd)

    def _list(self, key: str, default: Any, layers: int, hint: str) -> Any:
        pick, last = self.random, key.rpartition(".")[2]
        if default is None and "float" in hint:
            return [pick.choice([0.5, 2.0]) for _ in range(layers)]
        if default is None and "int" in hint and "head" in last:
            return [pick.choice([2, 4, 8]) for _ in range(layers)]
        if re.search("mlp_only|_layers$|layers_ids|layer_ids|indices", last):
            return sorted(pick.sample(range(layers), pick.randint(0, layers)))
        if key in self.made:
            return [max(1, one + pick.choice([-1, 0, 1])) for one in self.made[key]]
        if default and all(type(one) is int for one in default):
            return [pick.choice(sorted({*default, default[0] * 2})) for _ in range(layers)]
        return _NOTHING

    def _number(self, last: str, default: int | None, layers: int, group: tuple[int, int], odd: bool) -> int:
        pick, (kv_heads, times) = self.random, group
        if re.search(r"head_dim|head_size|rope_dim|rotary_dim|dim_head|d_kv|_d_state|qk_nope|v_head", last):
            return pick.choice(SMALL_PRIMES) * 2 if odd else 2 * pick.choice([4, 8, 10, 12, 14, 16, 22, 26])
        if re.search(r"(key_value|kv).*head|n_head_kv|num_kv", last) and not re.search("dim|shared", last):
            return kv_heads
        if "head" in last and not re.search("dim|size|rank", last):
            return kv_heads * times
        if re.search("expert", last) and not re.search("size|dim|per_tok|shared|layer|inter", last):
            return pick.choice([4, 6, 8, 12])
        if re.search("per_tok|topk|top_k", last):
            return pick.choice([1, 2, 3])
        if "group" in last:
            return pick.choice([1, 2, 4])
        if SHARED.search(last):
            return pick.randint(0, layers - 1)
        if re.search("layer|interval|period|offset|step|freq|every|first_k|dense_replace|pattern", last):
            return pick.randint(0 if (default or 0) < 2 else 1, layers + 1)
        if "vocab" in last and (default or 0) > 1000:  # above the numbers of special tokens
            return (default or 0) + (pick.choice(PRIMES) if odd else 64 * pick.randint(1, 40))
        if "multiple" in last:
            return pick.choice([8, 16, 48, 64, 128, 256])
        if default is None or default >= 16:
            if odd:
                return pick.choice(PRIMES)
            # Every number of heads that is drawn, and those that classes have as defaults, divide the large ones.
            return (
                pick.choice([8, 16, 24]) * pick.choice([1, 2, 3, 5])
                if (default or 256) <= 200
                else 960 * pick.randint(1, 30)
            )
        return max(0, default + pick.choice([-1, 1, 2, 3]))


def _is_asked(key: str, source: str) -> bool:
    last = key.rpartition(".")[2]
    if not re.search("size|dim|rank|shared", last):
        return False
    return bool(
        re.search(rf"\bif (?:not )?(?:self\.)?(?:config\.)?{last}(?: > 0| != 0)?(?:$|:| and | or | else )", source)
    )


_NOTHING = object()

"""Draws configurations: which keys they give, and values that tell one key from another.

Sizes are either whole (heads divide them, as most classes demand) or primes, which tell `a // b * b` from `a`.
"""

from __future__ import annotations

import random
import re
from typing import Any

from building import ModelType
from following import FOLLOWING, SMALL_PRIMES
from keys import Keys

from parcompile.model.tables.completing import NAMED_ANEW, OLDER_KINDS

PRIMES = tuple(n for n in range(101, 1500) if all(n % d for d in range(2, 39)))

SHARED = re.compile(r"shared_layers$")
"""How many of the last layers take something from one before them: fewer than there are."""


class Draws(Keys):
    """Draws of a model type."""

    def __init__(self, kind: ModelType, seed: str) -> None:
        super().__init__(kind)
        self.random = random.Random(seed)
        inner = {f"{key}.": cls.model_type for key, cls in kind.nested.items() if key.count(".") == 0}
        self.holders = {"": kind.name, **inner}
        """The types of the configuration and of those inside it, by what stands before their keys."""
        self.required: dict[str, Any] = {}
        """Values without which nothing is built."""
        self.refused: set[str] = set()
        """Keys whose other values are never built when they alone change."""
        self.whole: set[str] = set()
        """Keys that no prime may stand for."""

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
        for prefix, name in self.holders.items():
            if name in FOLLOWING:
                own = {key.removeprefix(prefix): given.pop(key) for key in list(given) if key.startswith(prefix)}
                own |= FOLLOWING[name](own, own.get("num_hidden_layers", layers), pick)
                given |= {prefix + key: value for key, value in own.items()}
        found, own = {**self.required, **given}, self.kind.canonical
        # A key that is drawn by two names is given by that of the class.
        return {key: value for key, value in found.items() if own(key) == key or own(key) not in found}

    def _value(self, key: str, default: Any, layers: int, group: tuple[int, int], odd: bool) -> Any:
        pick, hint, last = self.random, self.kind.hints.get(key, ""), key.rpartition(".")[2]
        if key in self.letters:
            return "".join(pick.choice(self.letters[key]) for _ in range(layers))
        if key in self.texts:
            return pick.choice(self.texts[key])
        if isinstance(default, bool):
            return not default if "None" not in hint else pick.choice([not default, None])
        if key in self.words:
            return self._kinds(key, layers) if self.words[key] else _NOTHING
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

    def _kinds(self, key: str, layers: int) -> list[str]:
        """A word for each layer; now and then those of files that are older than transformers' words."""
        pick, words = self.random, self.words[key]
        older = {new: old for old, new in OLDER_KINDS.items() if new in words} if pick.random() < 0.1 else {}
        found = [pick.choice(words) for _ in range(layers)]
        return [older.get(one, one) for one in found] if key.rpartition(".")[2] in NAMED_ANEW else found

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


_NOTHING = object()

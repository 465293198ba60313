"""The weights that a model begins with: drawn from a seed, part by part, so that they need never exist all at once.

A part is a decoder layer, or all that lies outside of layers. Each has random numbers of its own, from the seed and its
name. So any rank draws the same weights, whichever parts it needs.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

from parcompile.plan import Plan
from parcompile.runtime.errors import RunError

SMALL_NUMEL = 20_000_000
"""Models up to this many parameters are built whole, and the self-check compares them with the injected ones."""


def is_small(plan: Plan) -> bool:
    """Whether a plan's model is one of those."""
    return plan.parameters.numel <= SMALL_NUMEL


class UndrawnError(RunError):
    """Transformers' rules for the first weights of a type leave a parameter out."""


class InitialWeights:
    """The first weights of a transformers model, in fp32 on the CPU, as transformers' rules for its type draw them.

    Args:
        model: one whose parameters are on the meta device; they stay there.
        seed: of all random numbers.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        self._firsts = dict[nn.Parameter, str]()
        """The first name of each."""
        self._names = {
            name: self._firsts.setdefault(one, name) for name, one in model.named_parameters(remove_duplicate=False)
        }
        self._drawn = dict[str, Tensor]()
        self._tied = set[nn.Parameter]()

    def whole(self, name: str) -> Tensor:
        """A parameter by any of its names. Those of the last part that was asked for are kept.

        Raises:
            UndrawnError: transformers' rules leave a parameter of its part out.
        """
        first = self._names[name]
        if first not in self._drawn:
            self._drawn = {}
            self._drawn = self.draw(self.part_of(first))
        return self._drawn[first]

    def draws_all(self) -> bool:
        """Whether transformers' rules leave no parameter out."""
        try:
            return all(self.draw(part) for part in self.parts())
        except UndrawnError:
            return False

    def parts(self) -> list[str]:
        """The names of all parts."""
        return list(dict.fromkeys(map(self.part_of, self._firsts.values())))

    def part_of(self, name: str) -> str:
        """The part in which a module or a parameter lies; empty for what lies outside of layers."""
        name = self._names.get(name, name)
        for one in self._lists:
            if name.startswith(f"{one}."):
                return f"{one}.{name[len(one) + 1 :].partition('.')[0]}"
        return ""

    def draw(self, part: str) -> dict[str, Tensor]:
        """All parameters of a part, by their first names in the model.

        Raises:
            UndrawnError: transformers' rules leave one out.
        """
        with torch.random.fork_rng(devices=[]), self._with_memory(part) as drawn, torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{self._seed} {part}".encode()))
            self._apply(self._model, "", self._model, part)
        if left := [name for name, one in drawn.items() if one.isnan().any()]:
            raise UndrawnError(
                f"transformers draws no first weights for {left[0]} of {type(self._model).__name__}: build the model "
                "yourself and give it as model=",
                everywhere=True,
            )
        return drawn

    def fill(self) -> None:
        """Gives the model its weights.

        Raises:
            UndrawnError: as `draw`.
        """
        drawn = {name: one for part in self.parts() for name, one in self.draw(part).items()}
        for empty, places in self._places(self._firsts).items():
            filled = with_numbers(empty, drawn[self._firsts[empty]])
            for module, key in places:
                setattr(module, key, filled)

    def _apply(self, module: nn.Module, name: str, owner: nn.Module, part: str) -> None:
        """Children first, as transformers does; a model within a model has rules of its own."""
        owner = module if hasattr(module, "_init_weights") else owner
        for key, child in module.named_children():
            self._apply(child, f"{name}.{key}" if name else key, owner, part)
        if self.part_of(f"{name}.") == part:
            owner._init_weights(module)  # type: ignore[operator]
            for one in module.parameters(recurse=False):
                if one in self._tied:
                    vars(one)["_is_hf_initialized"] = True  # its first place decides

    def _places(self, wanted: Container[nn.Parameter]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        """Where these parameters are in the model."""
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._model.modules():
            for key, one in module.named_parameters(recurse=False):
                if one in wanted:
                    found.setdefault(one, []).append((module, key))
        return found

    @contextlib.contextmanager
    def _with_memory(self, part: str) -> Iterator[dict[str, Tensor]]:
        """Within it the parameters of a part are on the CPU, and hold no numbers."""
        places = self._places({one for one, name in self._firsts.items() if self.part_of(name) == part})
        filled = {empty: with_numbers(empty, torch.full(empty.shape, float("nan"))) for empty in places}
        self._tied = {filled[empty] for empty, known in places.items() if len(known) > 1}
        for empty, known in places.items():
            for module, key in known:
                setattr(module, key, filled[empty])
        try:
            yield {self._firsts[empty]: one.data for empty, one in filled.items()}
        finally:
            for empty, known in places.items():
                for module, key in known:
                    setattr(module, key, empty)


def with_numbers(empty: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with numbers in place of one without."""
    filled = nn.Parameter(data, requires_grad=empty.requires_grad)
    vars(filled).update(vars(empty))
    return filled

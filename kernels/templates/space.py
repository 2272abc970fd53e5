"""The values that the parameters of a template may take: what tuning searches. Free of TVM."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Params = Mapping[str, int]


@dataclass(frozen=True)
class Space:
    """A grid of parameters, some of it excluded.

    Attributes:
        choices: name -> values in rising order; names not here stay at their defaults.
        defaults: the values that an untuned kernel has; they need not lie on the grid.
        accepts: whether a whole assignment is worth compiling.
        starts: tried before random ones: they were the best of some shape on some processor.
    """

    choices: Mapping[str, tuple[int, ...]]
    defaults: Params
    accepts: Callable[[Params], bool]
    starts: tuple[Params, ...] = ()

    def __post_init__(self) -> None:
        if set(self.choices) != set(self.defaults):
            raise ValueError(f"{sorted(self.choices)} have defaults for {sorted(self.defaults)}")

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Every accepted assignment, in a fixed order."""
        for values in itertools.product(*self.choices.values()):
            params = dict(zip(self.choices, values, strict=True))
            if self.accepts(params):
                yield params

    def fits(self, params: Params) -> bool:
        """Whether ``params`` name all parameters of this space and are accepted by it.

        The values may lie off the grid.
        """
        return set(params) == set(self.choices) and self.accepts(params)

    def sample(self, rng: random.Random, tries: int = 1000) -> dict[str, int] | None:
        """A random accepted assignment; ``None`` if none was met."""
        for _ in range(tries):
            params = {name: rng.choice(values) for name, values in self.choices.items()}
            if self.accepts(params):
                return params
        return None

    def mutate(self, params: Params, rng: random.Random, tries: int = 100) -> dict[str, int] | None:
        """``params`` with one or two of its values moved one step along the grid."""
        movable = [name for name, values in self.choices.items() if len(values) > 1]
        for _ in range(tries):
            changed = dict(params)
            for name in rng.sample(movable, min(len(movable), rng.choice((1, 1, 2)))):
                changed[name] = _step(self.choices[name], changed[name], rng)
            if changed != dict(params) and self.accepts(changed):
                return changed
        return None


def _step(values: tuple[int, ...], value: int, rng: random.Random) -> int:
    """The next larger or smaller of ``values``."""
    below = [item for item in values if item < value]
    above = [item for item in values if item > value]
    nearest = ([below[-1]] if below else []) + ([above[0]] if above else [])
    return rng.choice(nearest) if nearest else value

"""What a replacement method is, and how its parameters are written.

A method is one file: name, paper, formula, parameters, which sites it declines and why, and the
operator variant it lowers to. Parameters are integers, written ``window:size=128,sinks=4``, or
``window:128`` for the first one.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Protocol, Self, TypeVar

from subquad.kernels.operator import OperatorVariant
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection, UsageError

LARGEST_PARAMETER = 2**31 - 1


def parameter(meaning: str, *, minimum: int, default: int | None = None) -> Any:
    """A dataclass field for one integer parameter; without a default it must be given."""
    metadata = {"meaning": meaning, "minimum": minimum}
    if default is None:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Parameters:
    """Parameters of a method; subclasses add fields made by :func:`parameter`.

    Raises:
        UsageError: a value is no integer or outside its range.
    """

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec, getattr(self, spec.name))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"size=128,sinks=4"`` or ``"128,sinks=4"``; the first may go without its name."""
        specs = {spec.name: spec for spec in fields(cls)}
        given: dict[str, int] = {}
        for index, part in enumerate(text.split(",") if text else []):
            name, equals, number = part.partition("=")
            if not equals and index == 0 and specs:
                name, number = next(iter(specs)), part
            name, number = name.strip(), number.strip()
            if name not in specs:
                raise UsageError(f"unknown parameter {part.strip()!r}; {_known(specs)}")
            if name in given:
                raise UsageError(f"parameter {name!r} is given twice")
            given[name] = _integer(name, number)
        for name, spec in specs.items():
            if name not in given and spec.default is MISSING:
                raise UsageError(f"parameter {name!r} is missing: {spec.metadata['meaning']}")
        return cls(**given)

    def describe(self) -> str:
        """The text :meth:`parse` reads back."""
        return ",".join(f"{spec.name}={getattr(self, spec.name)}" for spec in fields(self))

    def to_json(self) -> dict[str, int]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"parameter {name!r} must be an integer, got {text!r}") from None


def _check(spec: Field[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"parameter {spec.name!r} must be an integer, got {value!r}")
    minimum = spec.metadata["minimum"]
    if not minimum <= value <= LARGEST_PARAMETER:
        raise UsageError(
            f"parameter {spec.name!r} must be between {minimum} and {LARGEST_PARAMETER}, "
            f"got {value}"
        )


def _known(specs: dict[str, Field[Any]]) -> str:
    if not specs:
        return "this method takes none"
    return "known: " + ", ".join(
        f"{name} ({spec.metadata['meaning']})" for name, spec in specs.items()
    )


P = TypeVar("P", bound=Parameters, contravariant=True)


class Method(Protocol[P]):
    """One way to compute an attention site.

    Attributes:
        name: as written on the command line.
        paper: source of the formula.
        parameters: class of its parameters.
        causal_granularity: changing a token moves no output more than this many tokens before it,
            rounded down to such blocks; 1 = exact causality per token.
    """

    @property
    def name(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def parameters(self) -> type[Parameters]: ...

    @property
    def causal_granularity(self) -> int: ...

    def supports(self, site: AttentionSite, params: P) -> Rejection | None:
        """Why this site must keep what it has; ``None``: the method applies."""

    def lower(self, site: AttentionSite, params: P) -> OperatorVariant:
        """The operator variant for a site that :meth:`supports` accepts."""

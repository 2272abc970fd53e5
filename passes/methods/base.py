"""What a replacement method is, and how its parameters are written.

A method is one file: name, paper, formula, parameters, which sites it declines and why, and the
operator variant it lowers to, with the constant tensors and helper nodes that this one reads.
Parameters are written ``window:size=128,sinks=4``, or ``window:128`` for the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.operator import OperatorVariant
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection, UsageError

LARGEST_PARAMETER = 2**31 - 1

WHOLE = 0
"""Piece granularity of a method whose prefill cannot be cut."""

Value = int | float | str | tuple[float, ...] | tuple[int, ...]
"""What a parameter may be."""


def parameter(meaning: str, *, minimum: int, default: int | None = None) -> Any:
    """A dataclass field for one integer parameter; without a default it must be given."""
    return _field({"meaning": meaning, "kind": int, "range": (minimum, LARGEST_PARAMETER)}, default)


def number(meaning: str, *, low: float, high: float, default: float | None = None) -> Any:
    """A dataclass field for one real parameter from ``low`` to ``high``."""
    return _field({"meaning": meaning, "kind": float, "range": (low, high)}, default)


def numbers(meaning: str, *, low: float, high: float, default: float | None = None) -> Any:
    """A dataclass field for one real parameter, or a tuple of one for every query head.

    Written ``0.97``, or ``0.9/0.95/0.9``.
    """
    metadata = {"meaning": meaning, "kind": float, "range": (low, high), "per_head": True}
    return _field(metadata, default)


def integers(meaning: str, *, low: int, high: int, default: int | None = None) -> Any:
    """A dataclass field for one integer, or a tuple of one for every query head.

    Written ``1``, or ``1/0/1``.
    """
    metadata = {"meaning": meaning, "kind": int, "range": (low, high), "per_head": True}
    return _field(metadata, default)


def choice(meaning: str, *options: str, default: str | None = None) -> Any:
    """A dataclass field for one of some words."""
    return _field({"meaning": meaning, "kind": str, "options": options}, default)


def _field(metadata: Mapping[str, Any], default: Value | None) -> Any:
    if default is None:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Parameters:
    """Parameters of a method; subclasses add fields by :func:`parameter` and its like.

    Raises:
        UsageError: a value is of the wrong kind or outside its range.
    """

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec, getattr(self, spec.name))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"size=128,sinks=4"`` or ``"128,sinks=4"``; the first may go without its name."""
        specs = {spec.name: spec for spec in fields(cls)}
        given: dict[str, Value] = {}
        for index, part in enumerate(text.split(",") if text else []):
            name, equals, word = part.partition("=")
            if not equals and index == 0 and specs:
                name, word = next(iter(specs)), part
            name, word = name.strip(), word.strip()
            if name not in specs:
                raise UsageError(f"unknown parameter {part.strip()!r}; {_known(specs)}")
            if name in given:
                raise UsageError(f"parameter {name!r} is given twice")
            given[name] = _read(specs[name], word)
        for name, spec in specs.items():
            if name not in given and spec.default is MISSING:
                raise UsageError(f"parameter {name!r} is missing: {spec.metadata['meaning']}")
        return cls(**given)

    def describe(self) -> str:
        """The text :meth:`parse` reads back."""
        return ",".join(f"{spec.name}={_text(getattr(self, spec.name))}" for spec in fields(self))

    def to_json(self) -> dict[str, Value]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}


def _read(spec: Field[Any], text: str) -> Value:
    kind = spec.metadata["kind"]
    try:
        if spec.metadata.get("per_head") and "/" in text:
            return tuple(kind(word) for word in text.split("/"))
        value: Value = kind(text)
    except ValueError:
        raise _wrong(spec, repr(text)) from None
    return value


def _text(value: Value) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(spec: Field[Any], value: object) -> None:
    kind = spec.metadata["kind"]
    if isinstance(value, tuple) and value and spec.metadata.get("per_head"):
        for one in value:
            _check(spec, one)
        return
    # An integer is a real number too; truth values are neither.
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or isinstance(value, bool):
        raise _wrong(spec, repr(value))
    if kind is str:
        if value not in spec.metadata["options"]:
            raise _wrong(spec, repr(value))
        return
    low, high = spec.metadata["range"]
    if not low <= value <= high:
        raise UsageError(f"parameter {spec.name!r} must be between {low} and {high}, got {value}")


def _wrong(spec: Field[Any], got: str) -> UsageError:
    kind = spec.metadata["kind"]
    wanted = {int: "an integer", float: "a number"}.get(kind)
    if wanted is None:
        wanted = "one of " + ", ".join(spec.metadata["options"])
    return UsageError(f"parameter {spec.name!r} must be {wanted}, got {got}")


def _known(specs: dict[str, Field[Any]]) -> str:
    if not specs:
        return "this method takes none"
    return "known: " + ", ".join(
        f"{name} ({spec.metadata['meaning']})" for name, spec in specs.items()
    )


P = TypeVar("P", bound=Parameters, contravariant=True)


@dataclass(frozen=True)
class Wanted:
    """What a plan is for.

    Attributes:
        lengths: tokens per row.
        strict_causal: only methods that are causal to the token.
    """

    lengths: tuple[int, ...]
    strict_causal: bool = False


class Method(Protocol[P]):
    """One way to compute an attention site.

    Attributes:
        name: as written on the command line.
        paper: source of the formula.
        parameters: class of its parameters.
        learns: whether it has tensors that ought to be fitted to activations.
    """

    @property
    def name(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def parameters(self) -> type[Parameters]: ...

    @property
    def learns(self) -> bool: ...

    def causal_granularity(self, params: P) -> int:
        """How exact causality is, in tokens; 1: exact.

        Positions are cut into blocks of this many. Changing a token moves no output in a block
        before its own; with 1, no output before it.
        """

    def piece_granularity(self, params: P) -> int:
        """Where a prefill may be cut: pieces that start at multiples of so many positions make the
        whole. 1: anywhere, so that single steps equal one prefill; ``WHOLE``: nowhere."""

    def supports(self, site: AttentionSite, params: P) -> Rejection | None:
        """Why this site must keep what it has; ``None``: the method applies."""

    def lower(self, site: AttentionSite, params: P) -> OperatorVariant:
        """The operator variant for a site that :meth:`supports` accepts."""

    def prepare(self, site: AttentionSite, params: P) -> tuple[OperatorVariant, ...]:
        """Nodes before the attention, in order.

        Each may read what the attention may, and outputs of those before it; an input takes the
        output of its own name.
        """

    def tensors(self, site: AttentionSite, params: P) -> Mapping[str, NDArray[np.generic]]:
        """Constants, by the name of the input they are; initializers ``<site>.<input>``."""

    def calibrate(self, site: AttentionSite, params: P, samples: Sequence[Sample]) -> Fitted | None:
        """Values for some of the tensors, from inputs of the exact attention.

        ``None``: the method has none to fit. Same inputs, same values.
        """

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[Any] | Rejection:
        """Parameters worth measuring, cheapest and least exact first.

        The planner stops at the first whose error is negligible.
        """

    def mixed(self, per_head: Sequence[Any | None]) -> Any | None:
        """Parameters that give each query head its own of ``per_head``, some of ``candidates``.

        A head's own may be ``None``: it stays exact. ``None``: they cannot be mixed so.
        """


class OneNode:
    """Base of methods that are exact in causality and pieces, and one node without tensors.

    Others override what differs.
    """

    learns: bool = False

    def causal_granularity(self, params: Any) -> int:
        return 1

    def piece_granularity(self, params: Any) -> int:
        return 1

    def prepare(self, site: AttentionSite, params: Any) -> tuple[OperatorVariant, ...]:
        return ()

    def tensors(self, site: AttentionSite, params: Any) -> Mapping[str, NDArray[np.generic]]:
        return {}

    def calibrate(
        self, site: AttentionSite, params: Any, samples: Sequence[Sample]
    ) -> Fitted | None:
        return None

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[Any] | Rejection:
        return Rejection("names no candidates; it is used by --force only")

    def mixed(self, per_head: Sequence[Any | None]) -> Any | None:
        return None

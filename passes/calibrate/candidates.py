"""What was measured: one replacement of one attention, and everything about one attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.passes.calibrate.fitted import Fitted
from subquad.passes.calibrate.statistics import SiteStatistics


@dataclass(frozen=True)
class Candidate:
    """One replacement of one site.

    Attributes:
        text: the method with its parameters.
        errors: length -> relative error in the residual stream, of the worst kind of document.
        densities: length -> share of the visible key blocks that a selector keeps; 1 without one.
        price: sum over the lengths.
        recall_error: relative error where rows ask for what stands far before, worst row; ``None``:
            no row did.
        fitted: tensors of a method that is calibrated; kept apart from the JSON form.
    """

    text: str
    errors: Mapping[int, float]
    densities: Mapping[int, float]
    price: float
    recall_error: float | None = None
    fitted: Fitted | None = field(default=None, compare=False)

    @property
    def error(self) -> float:
        """Worst length."""
        return max(self.errors.values())

    def to_json(self) -> dict[str, Any]:
        raw = {
            "method": self.text,
            "errors": {str(length): error for length, error in self.errors.items()},
            "densities": {str(length): value for length, value in self.densities.items()},
            "price": self.price,
            "recall_error": self.recall_error,
        }
        return raw | ({} if self.fitted is None else {"fitted": self.fitted.facts()})

    @staticmethod
    def from_json(raw: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> Candidate:
        fitted = raw.get("fitted")
        if fitted is not None:
            fitted = Fitted(tensors, tuple(fitted["before"]), tuple(fitted["after"]))
        return Candidate(
            raw["method"],
            {int(length): error for length, error in raw["errors"].items()},
            {int(length): value for length, value in raw["densities"].items()},
            raw["price"],
            raw["recall_error"],
            fitted,
        )


@dataclass(frozen=True)
class SiteMeasurement:
    """Everything measured at one site.

    Attributes:
        name, index: of the site.
        exact_price: of the attention as it is, over all lengths.
        sensitivity: damage per squared error; ``None`` if there was nothing to follow.
        error_in: where errors are measured: ``residual stream``, ``projection`` or ``heads``.
        statistics: of its heads.
        candidates: in the order of their methods.
        declined: method -> why it has no candidate here.
    """

    name: str
    index: int
    exact_price: float
    sensitivity: float | None
    error_in: str
    statistics: SiteStatistics
    candidates: tuple[Candidate, ...]
    declined: Mapping[str, str]

    def damage(self, candidate: Candidate | None) -> float:
        """Predicted damage of one candidate; exact attention does none."""
        if candidate is None:
            return 0.0
        return (self.sensitivity or 0.0) * candidate.error**2

    def harm(self, candidate: Candidate | None) -> float:
        """What the search weighs against savings: damage, and the same of the recall error.

        A mean over all tokens does not see what few of them need from far away.
        """
        if candidate is None:
            return 0.0
        recalled = (self.sensitivity or 0.0) * (candidate.recall_error or 0.0) ** 2
        return self.damage(candidate) + recalled

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "index": self.index,
            "exact_price": self.exact_price,
            "sensitivity": self.sensitivity,
            "error_in": self.error_in,
            "statistics": self.statistics.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "declined": dict(self.declined),
        }

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Of all fitted candidates, ``<number of the candidate>/<input>``."""
        return {
            f"{number}/{name}": array
            for number, candidate in enumerate(self.candidates)
            if candidate.fitted is not None
            for name, array in candidate.fitted.tensors.items()
        }

    @staticmethod
    def from_json(
        raw: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]
    ) -> SiteMeasurement:
        """What ``to_json`` and ``tensors`` gave."""
        parts: list[dict[str, NDArray[np.float32]]] = [{} for _ in raw["candidates"]]
        for key, array in tensors.items():
            number, _, name = key.partition("/")
            parts[int(number)][name] = array
        candidates = zip(raw["candidates"], parts, strict=True)
        return SiteMeasurement(
            name=raw["name"],
            index=raw["index"],
            exact_price=raw["exact_price"],
            sensitivity=raw["sensitivity"],
            error_in=raw["error_in"],
            statistics=SiteStatistics.from_json(raw["statistics"]),
            candidates=tuple(Candidate.from_json(item, part) for item, part in candidates),
            declined=raw["declined"],
        )

"""The compiled candidates of one search, wherever they are then measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from subquad.kernels.host.build import (
    KERNEL_SECONDS,
    Candidate,
    build_candidates,
    class_name,
    compilers_at_once,
    fields_of,
)
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.space import Params
from subquad.kernels.tuning.search import GIVE_UP, Values, values_of
from subquad.kernels.tuning.workload import Workload
from subquad.runtime.errors import Rejection

MEASURE_SECONDS = 120.0
"""A measurement that takes longer has hung, or tells nothing for its price."""


@dataclass
class CandidateBench:
    """What every ``search.Bench`` has.

    Attributes:
        variant: whose kernel is tuned.
        workload: the sizes of the timed calls.
        target: instruction set, one that the measuring machine has.
        templates: operator -> ``module:attribute``.
        threads: of a session.
        seed: of the inputs.
        hosted: whether libraries hold our ONNX Runtime host, or the bare kernel.
        compilers: candidates compiled at once; nothing is timed meanwhile.
    """

    variant: OperatorVariant
    workload: Workload
    target: CpuTarget
    templates: Mapping[str, str]
    threads: int = 1
    seed: int = 0
    hosted: bool = True
    compilers: int = field(default_factory=compilers_at_once)
    _built: dict[Values, Candidate] = field(default_factory=dict)

    def prepare(self, candidates: Sequence[Params], seconds: float) -> list[str]:
        """Compile; why not, or an empty text, for each."""
        results = build_candidates(
            self.variant,
            self.target,
            candidates,
            templates=self.templates,
            hosted=self.hosted,
            kernel_seconds=min(KERNEL_SECONDS, max(0.0, seconds)),
            seconds=seconds,
            workers=self.compilers,
        )
        for params, result in zip(candidates, results, strict=True):
            if isinstance(result, Candidate):
                self._built[values_of(params)] = result
        return [result.reason if isinstance(result, Rejection) else "" for result in results]

    def task(
        self, candidate: Params, best: Params, default: Params, rounds: int, seconds: float
    ) -> dict[str, Any]:
        """What the measuring process is asked, as JSON."""
        libraries = {"default": self._library(default), "candidate": self._library(candidate)}
        if values_of(best) != values_of(default):
            libraries["best"] = self._library(best)
        return {
            "variant": class_name(self.variant),
            "fields": fields_of(self.variant),
            "libraries": libraries,
            "workload": asdict(self.workload),
            "rounds": rounds,
            "give_up": GIVE_UP,
            "seconds": min(seconds, MEASURE_SECONDS),
            "threads": self.threads,
            "seed": self.seed,
        }

    def _library(self, params: Params) -> str:
        return str(self._built[values_of(params)].library)

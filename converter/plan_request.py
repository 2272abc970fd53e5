"""What a plan is asked for, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.passes.calibrate.data import CALIBRATION_TOKENS, HELDOUT_TOKENS
from subquad.passes.plan_file import PlanFile
from subquad.passes.prices import Objective


@dataclass(frozen=True)
class PlanRequest:
    """What a user asks of a plan.

    Attributes:
        budget: texts such as ``ppl=1%``, ``kl=0.02`` or ``metric=module:function,drop=0.5``.
        minimize: what is saved.
        lengths: tokens per row, those that matter to the user.
        batch: rows at which prices are taken.
        data: files or folders; none = made-up inputs.
        seed: of everything random.
        strict_causal: exclude methods that are causal only between blocks of tokens.
        methods: names of the methods to try; empty = all that there are.
        refit: whether output projections are refitted; see ``passes/calibrate/refit.py``.
        threads: for one operator.
        kernels: whether candidates and plans run with compiled kernels while they are measured.
        artifact_kernels: whether the artifact will have kernels, which then are what is priced.
        decodes: exclude methods that do not serve single steps behind a cache.
        calibration_tokens, heldout_tokens: how many of each to run, per length.
    """

    budget: tuple[str, ...]
    minimize: Objective = "flops"
    lengths: tuple[int, ...] = (2048,)
    batch: int = 1
    data: tuple[Path, ...] = ()
    seed: int = 0
    strict_causal: bool = False
    methods: tuple[str, ...] = ()
    refit: bool = True
    threads: int | None = None
    kernels: bool = False
    artifact_kernels: bool = False
    decodes: bool = False
    calibration_tokens: int = CALIBRATION_TOKENS
    heldout_tokens: int = HELDOUT_TOKENS


@dataclass(frozen=True)
class PlanningReport:
    """A plan and how it came about.

    Attributes:
        plan: the file.
        statistics: site -> statistics of its heads.
        data: one sentence; ``synthetic``: whether inputs were made up.
        seconds, peak_rss_bytes: of the planning.
    """

    plan: PlanFile
    statistics: Mapping[str, Any]
    data: str
    synthetic: bool
    seconds: Mapping[str, float]
    peak_rss_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "statistics": dict(self.statistics),
            "data": self.data,
            "synthetic": self.synthetic,
            "seconds": dict(self.seconds),
            "peak_rss_bytes": self.peak_rss_bytes,
        }

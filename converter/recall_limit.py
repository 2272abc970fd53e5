"""A limit on recall for plans: rows to ask, the exact model's answers, and whom to ask at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from subquad.converter.budget_texts import Runner
from subquad.converter.work_folder import WorkFolder, key_of
from subquad.passes.calibrate.measure import RecallSample
from subquad.passes.calibrate.score import Score
from subquad.passes.planner import CLEARLY, PlanBudget
from subquad.runtime.artifact import check_inputs
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import spelling_tokenizer, token_feeds, token_ids
from subquad.runtime.recall_budget import (
    RecallKept,
    RecallTest,
    hits,
    refuse_recall,
    rows_of_texts,
)
from subquad.runtime.samples import Batch

MEASURED_ROWS = 1
"""Rows of every length on which candidates are measured; each asks for some hundred tokens."""


def recall_test(
    manifest: Manifest,
    folder: Path,
    heldout: Sequence[Batch],
    exact: Runner,
    work: WorkFolder,
    *,
    seed: int,
    known_by: Mapping[str, Any],
) -> RecallTest:
    """Hide facts in held-out texts and ask the exact model, or remember what it said.

    Args:
        manifest, folder: of the exact artifact.
        heldout: texts.
        exact: runs the exact model.
        work: keeps its answers.
        seed: draws the facts.
        known_by: what the answers depend on besides.

    Raises:
        UsageError: the model cannot be asked, or knows too little itself.
    """
    refuse_recall(manifest)
    rows = rows_of_texts(_texts(manifest, heldout), spelling_tokenizer(folder), seed)
    name = f"recall/{key_of({**known_by, 'seed': seed})}.json"
    known = work.load(name)
    if known is None:
        known = {"exact": hits(manifest, rows, exact)}
        work.save(name, known)
    return RecallTest(manifest, rows, tuple(tuple(row) for row in known["exact"]))


def recall_samples(
    manifest: Manifest, folder: Path, calibration: Sequence[Batch], *, seed: int
) -> list[RecallSample]:
    """Facts hidden in a calibration text of each length, for the errors of candidates."""
    texts = _texts(manifest, calibration)
    rows = rows_of_texts(texts, spelling_tokenizer(folder), seed, count=MEASURED_ROWS)
    return [
        RecallSample(
            check_inputs(manifest.inputs, token_feeds(manifest, row.ids[None])),
            # The token before predicts.
            tuple(place - 1 for asked in row.asked for place in range(asked.start, asked.stop)),
        )
        for row in rows
    ]


def _texts(manifest: Manifest, batches: Sequence[Batch]) -> dict[tuple[int, str], list[Any]]:
    texts: dict[tuple[int, str], list[Any]] = {}
    for batch in batches:
        ids = token_ids(manifest, batch.feeds)
        texts.setdefault((batch.length, batch.group), []).extend(ids)
    return texts


@dataclass(frozen=True)
class RecallJudge:
    """Adds recall to the scores of plans.

    Attributes:
        budget: of the plan.
        test: ``None``: the budget has no limit on recall.
    """

    budget: PlanBudget
    test: RecallTest | None

    def exact(self, score: Score) -> Score:
        """``score`` of the exact model, which keeps its own recall."""
        return score if self.test is None else _with(score, RecallKept(1.0, 0.0, {}))

    def judge(self, score: Score, run: Runner) -> Score:
        """``score`` with the recall of ``run``, unless another limit is missed anyway."""
        if self.test is None or self.budget.rest.misses(score):
            return score
        return _with(score, self.test.kept(run, self._is_clear))

    def _is_clear(self, found: RecallKept) -> bool:
        """Whether the limit is missed by more than chance explains, on the rows so far."""
        limit = self.budget.recall
        return limit is not None and found.kept + CLEARLY * found.error < limit


def _with(score: Score, found: RecallKept) -> Score:
    return replace(
        score,
        metrics={**score.metrics, "recall": found.kept},
        errors={**score.errors, "recall": found.error},
    )

"""The recall that a budget limits, on models whose memory is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from copier import copier
from subquad.runtime.budget import Budget
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import LEAST_RECALL, Run
from subquad.runtime.recall_budget import (
    RECALL_ROWS,
    RecallKept,
    RecallTest,
    _ratio,
    hits,
    refuse_recall,
    rows_of_texts,
)
from subquad.runtime.recall_rows import CUE, PASSAGE, RecallRow
from subquad.runtime.validate import validate
from tiny_artifact import VOCABULARY

ASKED = PASSAGE - CUE
ANYWHERE = 10_000


@pytest.fixture(scope="module")
def manifest(decoder: Path) -> Manifest:
    return Manifest.read(decoder)


def texts(*lengths: int, rows: int = RECALL_ROWS) -> dict[tuple[int, str], list[NDArray[np.int64]]]:
    rng = np.random.default_rng(0)
    return {(n, ""): [rng.integers(0, VOCABULARY, n) for _ in range(rows)] for n in lengths}


def nothing(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    logits = np.zeros((*feeds["input_ids"].shape, VOCABULARY), np.float32)
    return {"logits": logits}


def reading(reach: int) -> Run:
    """With passages of few kinds of tokens, more context than one or two is needed."""
    return copier(reach, VOCABULARY, context=4)


def made(manifest: Manifest, exact: Run, *lengths: int) -> tuple[RecallTest, list[RecallRow]]:
    rows = rows_of_texts(texts(*lengths), None, seed=0)
    return RecallTest(manifest, rows, hits(manifest, rows, exact)), list(rows)


def test_the_exact_model_keeps_its_own_recall(manifest: Manifest) -> None:
    test, _ = made(manifest, reading(ANYWHERE), 700)
    assert test.kept(reading(ANYWHERE)) == RecallKept(1.0, 0.0, {700: 1.0})
    assert test.notes == ()


def test_a_short_reach_loses_what_is_further(manifest: Manifest) -> None:
    """Counted by hand: facts within reach over all facts."""
    test, rows = made(manifest, reading(ANYWHERE), 700)
    exact, near = (hits(manifest, rows, reading(reach)) for reach in (ANYWHERE, 400))
    assert np.mean([np.array(row) for row in exact]) > 0.9 * ASKED
    found = test.kept(reading(400))
    assert found.kept == pytest.approx(np.sum([*map(sum, near)]) / np.sum([*map(sum, exact)]))
    share = np.mean([asked.distance < 400 for row in rows for asked in row.asked])
    assert found.kept == pytest.approx(share, abs=0.1)
    assert 0 < found.error < 0.2


def test_what_the_exact_model_does_not_know_does_not_count(manifest: Manifest) -> None:
    """Reach 400 of 700: the far half of the facts is no loss to a model that forgets it too."""
    test, _ = made(manifest, reading(400), 700)
    assert test.kept(reading(400)).kept == 1.0
    assert test.kept(reading(ANYWHERE)).kept >= 1.0
    assert test.kept(reading(150)).kept < 0.9


def test_the_worst_length_decides_and_lengths_that_say_nothing_are_named(
    manifest: Manifest,
) -> None:
    test, rows = made(manifest, reading(ANYWHERE), 60, 300, 700)
    assert [len(row.ids) for row in rows] == sorted([len(row.ids) for row in rows], reverse=True)
    found = test.kept(reading(250))
    assert found.lengths[700] < found.lengths[300] and found.kept == found.lengths[700]

    def short_sighted(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        return (nothing if feeds["input_ids"].shape[1] == 700 else reading(ANYWHERE))(feeds)

    test, _ = made(manifest, short_sighted, 300, 700)
    assert "lengths [700]" in test.notes[0]
    assert set(test.kept(reading(ANYWHERE)).lengths) == {300}


def test_a_budget_that_cannot_be_judged_is_refused(manifest: Manifest) -> None:
    with pytest.raises(UsageError, match=r"cannot be judged at the lengths 700.*at most \d+% of"):
        made(manifest, nothing, 700)
    with pytest.raises(UsageError, match="too short to hide"):
        made(manifest, reading(ANYWHERE), 20)
    assert 0 < LEAST_RECALL < 1


def test_no_more_is_asked_than_decides(manifest: Manifest) -> None:
    test, _ = made(manifest, reading(ANYWHERE), 700)
    runs = []

    def counted(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        runs.append(feeds)
        return nothing(feeds)

    assert test.kept(counted, lambda found: found.kept < 0.5).kept < 0.5
    assert len(runs) == 1
    test.kept(counted, lambda found: False)
    assert len(runs) == 1 + RECALL_ROWS


def test_kinds_of_documents_take_turns() -> None:
    ids = {name: np.full((1, 400), number) for number, name in enumerate("abcde", 1)}
    rows = rows_of_texts({(400, name): list(rows) for name, rows in ids.items()}, None, 0)
    assert [int(row.ids[0]) for row in rows] == [1, 2, 3, 4, 5]
    (few,) = (rows_of_texts(texts(400, rows=1), None, 0),)
    assert len(few) == RECALL_ROWS
    assert len({row.ids.tobytes() for row in few}) == RECALL_ROWS, "other facts each time"


def test_standard_error_is_that_of_drawing_other_facts() -> None:
    rng = np.random.default_rng(0)
    exact = rng.integers(8, 17, 400).astype(float)
    pairs = np.stack([exact, np.minimum(exact, rng.integers(0, 17, 400))], axis=1)
    draws = rng.integers(0, 400, (2000, 400))
    drawn = pairs[draws].sum(axis=1)
    kept, error = _ratio(pairs)
    assert kept == pytest.approx(pairs[:, 1].sum() / pairs[:, 0].sum())
    # 2000 draws: a standard deviation known to 1.6 %
    assert error == pytest.approx((drawn[:, 1] / drawn[:, 0]).std(), rel=0.08)


def test_models_without_tokens_to_predict_are_refused(encoder: Path) -> None:
    with pytest.raises(UsageError, match="Budget recall: not a causal language model"):
        refuse_recall(Manifest.read(encoder))
    with pytest.raises(UsageError, match="Budget recall: not a causal language model"):
        validate(encoder, budget=Budget.parse(["recall=95%"]))


def test_validate_does_not_judge_by_a_model_that_recalls_nothing(decoder: Path) -> None:
    with pytest.raises(UsageError, match="cannot be judged"):
        validate(decoder, budget=Budget.parse(["recall=95%"]), lengths=[64], metamorphic=False)

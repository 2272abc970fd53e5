"""The probes on models whose memory is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from copier import copier as known_memory
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import (
    LEAST_RECALL,
    Run,
    greedy,
    probe_reason,
    recall,
    recall_facts,
    recall_kept,
    spelling_tokenizer,
)
from subquad.runtime.recall_rows import CUE, DISTANCES, KINDS, PASSAGE, can_spell, recall_row
from tiny_artifact import VOCABULARY

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.fixture(scope="module")
def manifest(decoder: Path) -> Manifest:
    return Manifest.read(decoder)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = spelling_tokenizer(DEMO)
    assert found is not None
    return found


def copier(reach: int, vocabulary: int = VOCABULARY, context: int = 3) -> Run:
    return known_memory(reach, vocabulary, context)


def text(length: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length)


def test_facts_are_stated_before_they_are_asked_for(tokenizer: Any) -> None:
    ids = np.random.default_rng(1).integers(0, 1024, 2048)
    row = recall_row(ids, np.random.default_rng(2), tokenizer)
    assert row is not None and len(row.ids) == 2048
    assert len(row.asked) == len(KINDS) * DISTANCES
    end = max(asked.stop for asked in row.asked)
    assert end == 2048, "questions are at the end"
    for asked in row.asked:
        answer = row.ids[asked.start : asked.stop]
        before = row.ids[: asked.start]
        stated = row.ids[: asked.stop - asked.distance]
        assert len(stated) < len(before) and asked.distance > 0
        windows = np.lib.stride_tricks.sliding_window_view(stated, len(answer))
        assert (windows == answer).all(axis=1).sum() == 1, f"{asked.kind} is stated once"
    copies = [asked for asked in row.asked if asked.kind == "copy"]
    assert all(asked.stop - asked.start == PASSAGE - CUE for asked in copies)
    spelled = tokenizer.decode(row.ids[-700:].tolist())
    assert "The pass key of Paris is" in spelled


def test_distances_are_spread_and_beyond_a_window() -> None:
    ids = text(3000)
    for beyond in (0, 1500):
        row = recall_row(ids, np.random.default_rng(0), None, beyond=beyond)
        assert row is not None
        first = min(asked.start for asked in row.asked) - CUE
        ends = sorted(asked.stop - asked.distance for asked in row.asked)
        assert ends[0] == PASSAGE and ends[-1] == first - beyond
        gaps = np.diff(ends)
        assert gaps.max() - gaps.min() <= 1


def test_fewer_facts_where_there_is_little_room() -> None:
    row = recall_row(text(96), np.random.default_rng(0), None, beyond=50)
    assert row is not None and len(row.asked) == 2
    assert recall_row(text(2 * PASSAGE - 1), np.random.default_rng(0), None) is None
    same = recall_row(text(96), np.random.default_rng(0), None, beyond=50)
    assert same is not None and np.array_equal(row.ids, same.ids)


def test_recall_shows_how_far_a_model_looks_back(manifest: Manifest) -> None:
    points = recall(manifest, copier(10**6), copier(400), [text(900), text(900, 1), text(30)])
    assert len(points) == DISTANCES and {point.length for point in points} == {900}
    assert [point.distance for point in points] == sorted(p.distance for p in points)[::-1]
    assert all(point.tokens == 2 * (PASSAGE - CUE) for point in points)
    for point in points:
        # Passages of few different tokens: a wrong one may repeat by chance.
        assert point.exact > 0.9 and point.exact_probability > 0.9
        if point.distance > 400 + PASSAGE * DISTANCES:
            assert point.model < 0.2 and point.model_probability < 0.2
        elif point.distance < 400 - PASSAGE * DISTANCES:
            assert point.model == point.exact
    kept = recall_kept(points)
    assert kept is not None and 0.1 < kept < 0.8


def test_a_point_that_the_exact_model_misses_does_not_count(manifest: Manifest) -> None:
    points = recall(manifest, copier(1), copier(10**6), [text(900)])
    assert all(point.exact < LEAST_RECALL and not point.counts for point in points)
    facts = recall_facts(points)
    assert facts["recall_kept"] is None
    assert facts["recall_kinds"]["copy"]["kept"] is None
    assert "exact model itself" in facts["recall_kinds"]["copy"]["says_nothing"]
    # One that reaches half as far: only the near points count.
    points = recall(manifest, copier(400), copier(400), [text(900)])
    counted = [point for point in points if point.counts]
    assert 0 < len(counted) < len(points) and recall_kept(points) == 1.0


def test_all_kinds_are_found_by_a_model_that_copies(manifest: Manifest, tokenizer: Any) -> None:
    ids = np.random.default_rng(1).integers(0, 1024, 2048)
    known = copier(10**6, 1024)
    points = recall(manifest, known, copier(600, 1024), [ids], tokenizer)
    assert [point.kind for point in points] == [k for k in KINDS for _ in range(DISTANCES)]
    facts = recall_facts(points)
    assert list(facts["recall_kinds"]) == list(KINDS)
    for kind in KINDS:
        mine = [point for point in points if point.kind == kind]
        # Three tokens of context do not tell all places apart.
        assert np.mean([point.exact for point in mine]) > 0.7, kind
        assert facts["recall_kinds"][kind]["kept"] < 0.6, kind
    assert facts["recall"][0]["counts"] is True


def test_a_tokenizer_without_digits_spells_no_facts(decoder: Path) -> None:
    class Words:
        def spell(self, text: str) -> list[int]:
            return [0 for _ in text.split()]

    assert not can_spell(Words())  # type: ignore[arg-type]
    assert spelling_tokenizer(decoder) is None, "it has no tokenizer"


def counter(wrong_from: int | None) -> Run:
    """The next token is one more; from some position on it is two more."""

    def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        ids = feeds["input_ids"]
        step = np.ones(ids.shape[1], np.int64)
        if wrong_from is not None:
            step[wrong_from:] = 2
        return {"logits": np.eye(VOCABULARY, dtype=np.float32)[(ids + step) % VOCABULARY]}

    return run


def test_greedy_finds_the_first_divergence(manifest: Manifest) -> None:
    prompt = np.arange(5)
    same = greedy(manifest, counter(None), counter(None), prompt, 10)
    assert (same.agreement, same.first_divergence) == (1.0, None)
    # Position 7 chooses token 8, which is the fourth that is generated.
    other = greedy(manifest, counter(None), counter(7), prompt, 10)
    assert (other.agreement, other.first_divergence) == (0.3, 3)


def test_encoders_are_not_probed(encoder: Path, manifest: Manifest) -> None:
    assert probe_reason(manifest) is None
    assert probe_reason(Manifest.read(encoder)) is not None

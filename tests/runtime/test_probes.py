"""The probes on models whose memory is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import Run, greedy, probe_reason, recall, recall_kept
from tiny_artifact import VOCABULARY


def copier(reach: int) -> Run:
    """Predicts what followed the last occurrence of the last three tokens, up to ``reach`` back."""

    def run(feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        assert feeds["attention_mask"].all()
        ids = feeds["input_ids"]
        logits = np.zeros((*ids.shape, VOCABULARY), np.float32)
        for row in range(len(ids)):
            for i in range(3, ids.shape[1]):
                for j in range(i - 1, max(2, i - reach), -1):
                    if (ids[row, j - 2 : j + 1] == ids[row, i - 2 : i + 1]).all():
                        logits[row, i, ids[row, j + 1]] = 1
                        break
        return {"logits": logits}

    return run


@pytest.fixture(scope="module")
def manifest(decoder: Path) -> Manifest:
    return Manifest.read(decoder)


def test_recall_shows_how_far_a_model_looks_back(manifest: Manifest) -> None:
    points = recall(manifest, copier(10**6), copier(60), [150, 30], rows=1)
    assert [point.length for point in points] == [150] * 3, "30 is too short"
    far, middle, near = points
    assert far.distance > middle.distance > near.distance
    assert far.distance == 150 - 24
    assert near.exact == near.model == 1.0
    assert far.exact == 1.0 and far.model < 0.3
    kept = recall_kept(points)
    assert kept is not None and 0.3 < kept < 0.6
    assert recall_kept(recall(manifest, copier(1), copier(1), [150], rows=1)) is None


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

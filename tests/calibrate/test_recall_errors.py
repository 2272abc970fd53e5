"""Errors of candidates where rows ask for what stands far before."""

from __future__ import annotations

import numpy as np
import pytest

from exact_folder import VOCABULARY, ExactFolder
from subquad.passes.calibrate.candidates import Candidate, SiteMeasurement
from subquad.passes.calibrate.engine import Engine
from subquad.passes.calibrate.measure import Question, RecallSample, measure_sites
from subquad.passes.prices import counted_flops
from subquad.runtime.samples import Batch

LENGTH = 320


def measured(exact: ExactFolder, *positions: tuple[int, ...]) -> list[SiteMeasurement]:
    """Windows on one text, with one row for each of ``positions``."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, LENGTH))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    found: dict[int, SiteMeasurement] = {}
    measure_sites(
        Engine(exact.split(), exact.path, threads=1),
        Question(exact.manifest, (LENGTH,), 1, counted_flops(), methods=("window",)),
        [Batch(LENGTH, "none", feeds)],
        [Batch(LENGTH, "none", feeds)],
        recall=[RecallSample(feeds, at) for at in positions],
        known={},
        done=lambda rank, site: found.update({rank: site}),
    )
    return list(found.values())


def windows(site: SiteMeasurement) -> list[tuple[int, Candidate]]:
    sizes = [int(c.text.partition("size=")[2].partition(",")[0]) for c in site.candidates]
    return list(zip(sizes, site.candidates, strict=True))


def test_without_rows_there_is_no_error(exact: ExactFolder) -> None:
    (first, *_) = measured(exact)
    assert first.candidates
    assert all(candidate.recall_error is None for candidate in first.candidates)
    assert all(first.harm(c) == first.damage(c) for c in first.candidates)


def test_of_every_token_it_is_the_error_of_the_text(exact: ExactFolder) -> None:
    for site in measured(exact, tuple(range(LENGTH))):
        for candidate in site.candidates:
            assert candidate.recall_error == pytest.approx(candidate.error, rel=1e-6)


def test_only_the_tokens_that_answer_count(exact: ExactFolder) -> None:
    """Early ones see everything within a window, late ones do not."""
    for site in measured(exact, (10, 20, 30)):
        inside = [c for size, c in windows(site) if size > 30]
        rounding = 1e-6
        assert inside and all((c.recall_error or 0) < rounding < c.error for c in inside)
    for site in measured(exact, (LENGTH - 1, LENGTH - 2)):
        for size, candidate in windows(site):
            assert (candidate.recall_error or 0) > 1e-3
            assert site.harm(candidate) > site.damage(candidate) > 0
            if size == 256:  # which hides nothing from most tokens of the text
                assert (candidate.recall_error or 0) > 2 * candidate.error


def test_the_worst_row_counts(exact: ExactFolder) -> None:
    early, late = (10, 20, 30), (LENGTH - 1, LENGTH - 2)
    for both, alone in zip(measured(exact, early, late), measured(exact, late), strict=True):
        assert [c.recall_error for c in both.candidates] == [
            c.recall_error for c in alone.candidates
        ]


def test_measurements_are_written_and_read(exact: ExactFolder) -> None:
    for site in measured(exact, (LENGTH - 1,)):
        assert SiteMeasurement.from_json(site.to_json(), site.tensors()) == site

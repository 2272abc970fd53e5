"""Which token comes next."""

from __future__ import annotations

import numpy as np
import pytest

from subquad.runtime.errors import UsageError
from subquad.runtime.sampling import Sampler, Sampling, kept_tokens

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3]))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert Sampler(Sampling(), 2).choose(np.array([[1.0, 3, 3], [2, 1, 0]])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sampling", "tokens", "probabilities"),
    [
        (Sampling(1.0), [1, 3, 2, 0], [0.4, 0.3, 0.2, 0.1]),
        (Sampling(1.0, top_k=2), [1, 3], [4 / 7, 3 / 7]),
        (Sampling(1.0, top_p=0.5), [1, 3], [4 / 7, 3 / 7]),
        (Sampling(1.0, top_p=0.4), [1], [1.0]),
        (Sampling(1.0, top_p=1e-9), [1], [1.0]),
        (Sampling(0.5), [1, 3, 2, 0], np.array([16, 9, 4, 1]) / 30),
        # Of the three that remain, two have 0.7 / 0.9.
        (Sampling(1.0, top_k=3, top_p=0.75), [1, 3], [4 / 7, 3 / 7]),
    ],
)
def test_kept_tokens(sampling: Sampling, tokens: list[int], probabilities: list[float]) -> None:
    got_tokens, got = kept_tokens(LOGITS, sampling)
    assert got_tokens.tolist() == tokens
    np.testing.assert_allclose(got, probabilities, rtol=1e-12)


def test_frequencies_are_the_probabilities() -> None:
    sampler = Sampler(Sampling(1.0, seed=1), 1)
    drawn = [int(sampler.choose(LOGITS[None])[0]) for _ in range(4000)]
    # Four standard deviations of a share of 4000 draws are 0.03.
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, np.exp(LOGITS), atol=0.03)


def test_rows_draw_by_themselves() -> None:
    def draws(logits: list[np.ndarray]) -> np.ndarray:
        sampler = Sampler(Sampling(1.0, seed=3), len(logits))
        return np.array([sampler.choose(np.stack(logits)) for _ in range(50)])

    alike = draws([LOGITS, LOGITS])
    assert (alike[:, 0] != alike[:, 1]).any()
    # What another row draws from changes nothing.
    np.testing.assert_array_equal(draws([LOGITS[::-1], LOGITS])[:, 1], alike[:, 1])


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}]
    + [{"top_p": 1.5}, {"seed": -1}],
)
def test_bad_values(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]

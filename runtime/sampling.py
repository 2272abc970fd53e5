"""The next token from logits: the likeliest, or drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits; 0 = always the likeliest token.
        top_k: draw among so many likeliest tokens; 0 = all.
        top_p: draw among the likeliest tokens that together have at least this probability.
        seed: of the draws. Each row has its own, so it does not depend on the other rows.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 or more, got {self.temperature}.")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 or more, got {self.top_k}.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.seed < 0:
            raise UsageError(f"seed must be 0 or more, got {self.seed}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Sampler:
    """Chooses a token for each row."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self._sampling = sampling
        self._generators = [np.random.default_rng([sampling.seed, row]) for row in range(rows)]

    def choose(self, logits: NDArray[np.floating]) -> NDArray[np.int64]:
        """``[rows, vocabulary]`` -> ``[rows]``."""
        if self._sampling.is_greedy:
            return np.asarray(logits.argmax(axis=-1), np.int64)
        chosen = [
            self._draw(row, generator)
            for row, generator in zip(logits, self._generators, strict=True)
        ]
        return np.array(chosen, np.int64)

    def _draw(self, logits: NDArray[np.floating], generator: np.random.Generator) -> int:
        tokens, probabilities = kept_tokens(logits, self._sampling)
        sums = np.cumsum(probabilities)
        place = np.searchsorted(sums, generator.random() * sums[-1], side="right")
        return int(tokens[min(int(place), len(tokens) - 1)])


def kept_tokens(
    logits: NDArray[np.floating], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that may be drawn, likeliest first, and their probabilities among themselves."""
    scores = np.asarray(logits, np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    weights /= weights.sum()
    # The token that reaches the sum is the last one kept.
    before = np.cumsum(weights) - weights
    kept = before < sampling.top_p
    return order[kept], weights[kept] / weights[kept].sum()

"""Accuracy budgets: ``kl=0.01,ppl=1%,cosine=0.999``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from subquad.runtime.errors import UsageError

EXACT_LIMIT = 1e-4
"""Relative L2 error up to which two fp32 graphs count as the same.

Replacing a graph by an exact equivalent re-associates its sums. One sum of n terms then moves by
about sqrt(n) * 6e-8; after a dozen layers 1e-6 to 1e-5 are usual, and a wrong scale or mask is
orders of magnitude above the limit.
"""

METRICS: Mapping[str, str] = {
    "kl": "mean KL(reference || model) of the logits, in nats; worst length",
    "ppl": "rise of the perplexity on the data (0.01 or 1%); worst length",
    "top1": "share of positions with the same most likely token; worst length, at least",
    "cosine": "mean cosine of output vectors; worst output and length, at least",
    "rel": "relative L2 error of an output; worst output and length",
    "recall": "hidden facts that are found, over those the reference finds; worst length, at least",
}

AT_LEAST = frozenset({"top1", "cosine", "recall"})


@dataclass(frozen=True)
class Budget:
    """Limits by metric name; see ``METRICS``."""

    limits: Mapping[str, float]

    @staticmethod
    def parse(texts: Sequence[str]) -> Budget | None:
        """Read ``name=value`` pairs, comma-separated or repeated; none -> ``None``.

        Raises:
            UsageError: unknown metric, one given twice, no number, or a share above 1.
        """
        limits: dict[str, float] = {}
        for pair in ",".join(texts).split(","):
            if not pair.strip():
                continue
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in METRICS:
                known = ", ".join(METRICS)
                raise UsageError(f"Unknown budget {pair.strip()!r}; use name=value of {known}.")
            if name in limits:
                raise UsageError(f"Budget {name} is given twice; give one limit on it.")
            limits[name] = _number(name, value)
        return Budget(limits) if limits else None

    def without(self, name: str) -> Budget:
        """The other limits, maybe none."""
        return Budget({key: limit for key, limit in self.limits.items() if key != name})

    def violations(self, measured: Mapping[str, float | None]) -> list[str]:
        """One sentence for each limit that is missed.

        Raises:
            UsageError: a limit for something this model and data do not have.
        """
        sentences = []
        for name, limit in self.limits.items():
            value = measured.get(name)
            if value is None:
                raise UsageError(
                    f"Budget {name}: cannot be measured here. kl and top1 need logits; ppl also "
                    "needs a causal language model and sequences of at least 2 tokens."
                )
            met = value >= limit if name in AT_LEAST else value <= limit
            # Written so that NaN misses the limit.
            if not met:
                word = "below" if name in AT_LEAST else "above"
                sentences.append(f"{name} is {value:.4g}, {word} the budget of {limit:.4g}")
        return sentences


def _number(name: str, text: str) -> float:
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError as error:
        raise UsageError(f"Budget {name}={text}: not a number.") from error
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"Budget {name}={text}: must be 0 or more.")
    value = value / 100 if percent else value
    if name in AT_LEAST and value > 1:
        raise UsageError(f"Budget {name}={text}: must be a share of at most 1. Write 95% or 0.95.")
    return value

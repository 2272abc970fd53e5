"""How much of the exact model's recall another model keeps: what ``recall=95%`` limits.

The facts and questions are those of the probes (``recall_rows.py``), but the rows are the same for
every model, so that the exact one answers once. What it does not know itself does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import LEAST_RECALL, Run, answers, probe_reason
from subquad.runtime.recall_rows import RecallRow, recall_row
from subquad.runtime.text import Tokenizer

RECALL_ROWS = 4
"""Rows of every length, at least one of every kind of document."""

Hits = tuple[tuple[int, ...], ...]
"""Of every row and every fact that it asks for: tokens of the answer that were found."""


@dataclass(frozen=True)
class RecallKept:
    """Answers of a model over those of the exact one, facts that count together.

    Attributes:
        kept: ratio at the worst length; 1 = as many.
        error: its standard error; facts are the observations.
        lengths: the ratio at every length.
    """

    kept: float
    error: float
    lengths: Mapping[int, float]


def refuse_recall(manifest: Manifest) -> None:
    """Refuse a limit on recall for models that nothing can be asked.

    Raises:
        UsageError: with the reason.
    """
    reason = probe_reason(manifest)
    if reason is not None:
        raise UsageError(f"Budget recall: {reason.reason}. Use another limit, such as kl or rel.")


def rows_of_texts(
    texts: Mapping[tuple[int, str], Sequence[NDArray[np.int64]]],
    tokenizer: Tokenizer | None,
    seed: int,
    *,
    count: int | None = None,
) -> tuple[RecallRow, ...]:
    """Rows to ask, longest first; there, far facts are lost first.

    Args:
        texts: by length and kind of document, rows of token ids. Kinds take turns; too few rows
            are used again, with other facts.
        tokenizer: spells facts; ``None`` = passages of tokens only.
        seed: draws the facts.
        count: rows of every length; default: ``RECALL_ROWS``, at least one of every kind.
    """
    found = []
    for length in sorted({length for length, _ in texts}, reverse=True):
        kinds = [rows for (of, _), rows in texts.items() if of == length and len(rows)]
        for number in range(count or max(RECALL_ROWS, len(kinds))):
            rows = kinds[number % len(kinds)]
            text = np.asarray(rows[number // len(kinds) % len(rows)], np.int64)
            rng = np.random.default_rng([seed, 11, length, number])
            row = recall_row(text, rng, tokenizer)
            if row is not None:
                found.append(row)
    return tuple(found)


class RecallTest:
    """Rows with questions, and what the exact model answers.

    Args:
        manifest: of the exact model and of all that are compared with it.
        rows: see ``rows_of_texts``.
        exact: answers of the exact model; see ``hits``.

    Raises:
        UsageError: the exact model itself knows too little, so nothing could be judged.
    """

    def __init__(self, manifest: Manifest, rows: Sequence[RecallRow], exact: Hits) -> None:
        self._manifest = manifest
        self._rows = tuple(rows)
        self._exact = exact
        shares = self._shares()
        self._counted = {place for place, share in shares.items() if share >= LEAST_RECALL}
        if not self._counted:
            lengths = ", ".join(str(n) for n in sorted({place[0] for place in shares})) or "given"
            why = (
                f"the exact model itself finds at most {max(shares.values()):.0%} of the answers "
                f"over any distance (at least {LEAST_RECALL:.0%} are needed)"
                if shares
                else "the rows are too short to hide anything in them"
            )
            raise UsageError(
                f"Budget recall: cannot be judged at the lengths {lengths}: {why}. Use other "
                "lengths or texts on which the model does recall, or another limit."
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Lengths at which nothing counts."""
        left = {len(row.ids) for row in self._rows} - {length for length, *_ in self._counted}
        if not left:
            return ()
        return (
            f"recall is not judged at lengths {sorted(left)}: the exact model finds less than "
            f"{LEAST_RECALL:.0%} of the answers",
        )

    def kept(self, run: Run, enough: Callable[[RecallKept], bool] | None = None) -> RecallKept:
        """Ask a model.

        Args:
            run: the model.
            enough: whether the result of the rows so far decides; the others are then left out.
        """
        found: list[tuple[int, ...]] = []
        for row in self._rows:
            found += hits(self._manifest, [row], run)
            result = self._compare(found)
            if enough is not None and result is not None and enough(result):
                break
        result = self._compare(found)
        assert result is not None  # some place counts, and its answers are not all wrong
        return result

    def _shares(self) -> dict[tuple[int, str, int], float]:
        """Of the answers' tokens that the exact model finds, by length, kind of fact and place."""
        tokens: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
        for row, of_row in zip(self._rows, self._exact, strict=True):
            for asked, found in zip(row.asked, of_row, strict=True):
                place = (len(row.ids), asked.kind, asked.place)
                tokens.setdefault(place, []).append((found, asked.stop - asked.start))
        return {
            place: sum(found for found, _ in pairs) / sum(count for _, count in pairs)
            for place, pairs in tokens.items()
        }

    def _compare(self, found: Sequence[Sequence[int]]) -> RecallKept | None:
        """Of the first rows; ``None``: nothing of them counts."""
        by_length: dict[int, list[tuple[int, int]]] = {}
        for row, exact, model in zip(self._rows, self._exact, found, strict=False):
            for asked, wanted, got in zip(row.asked, exact, model, strict=True):
                if (len(row.ids), asked.kind, asked.place) in self._counted:
                    by_length.setdefault(len(row.ids), []).append((wanted, got))
        ratios = {
            length: _ratio(np.array(pairs, np.float64))
            for length, pairs in by_length.items()
            if any(wanted for wanted, _ in pairs)
        }
        if not ratios:
            return None
        kept, error = min(ratios.values(), key=lambda ratio: ratio[0] - ratio[1])
        return RecallKept(kept, error, {length: ratio for length, (ratio, _) in ratios.items()})


def hits(manifest: Manifest, rows: Sequence[RecallRow], run: Run) -> Hits:
    """What a model answers, one row at a time."""
    dtype = next(spec.dtype for spec in manifest.inputs if spec.role == "token_ids")
    return tuple(
        tuple(int(found[0].sum()) for found in answers(manifest, run, row, np.dtype(dtype)))
        for row in rows
    )


def _ratio(pairs: NDArray[np.float64]) -> tuple[float, float]:
    """Sum of the second column over that of the first, and the standard error of that ratio.

    Cochran, 1977, "Sampling techniques", eq. 2.46 without correction for finite populations.
    """
    exact, model = pairs.T
    kept = float(model.sum() / exact.sum())
    if len(pairs) < 2:
        return kept, 0.0
    residuals = model - kept * exact
    variance = float(np.square(residuals).sum()) * len(pairs) / (len(pairs) - 1)
    return kept, math.sqrt(variance) / float(exact.sum())

"""Inputs that carry what came before, and what they are at the start.

A model with a cache takes inputs of the role ``past`` and returns, for each, an output that is the
input of the next call. Before the first token they are empty: those with an axis ``past`` have no
entries on it, states of a fixed size are zeros. Tokens so far and new ones together are the
dimension ``past + length``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from subquad.runtime.manifest import InputSpec, Manifest

PAST = "past"
"""The dimension that counts tokens before this call."""

TOTAL = "past + length"
"""The dimension that counts those and the new ones."""


def at_start(dim: int | str) -> int | str:
    """What a dimension is before the first token: ``past + length`` is ``length``."""
    if not isinstance(dim, str):
        return dim
    terms = [term for term in dim.split(" + ") if term != PAST]
    if len(terms) == 1 and terms[0].isdecimal():
        return int(terms[0])
    return " + ".join(terms) if terms else 0


def empty_past(specs: Sequence[InputSpec], rows: int) -> dict[str, NDArray[Any]]:
    """The inputs of role ``past`` before the first token, for ``rows`` rows."""
    return {
        spec.name: np.zeros(
            [rows if axis == 0 else _size(dim) for axis, dim in enumerate(spec.shape)], spec.dtype
        )
        for spec in specs
        if spec.role == "past"
    }


def with_past(
    specs: Sequence[InputSpec], feeds: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """``feeds`` for a model of these inputs: its own empty past where it is given none.

    Entries of another model's past are left out.
    """
    names = {spec.name for spec in specs}
    given = {name: array for name, array in feeds.items() if name in names}
    return empty_past(specs, rows_of(feeds)) | given


def rows_of(feeds: Mapping[str, NDArray[Any]]) -> int:
    """Rows of the batch: the first axis of the first array that has one."""
    return next((len(array) for array in feeds.values() if np.ndim(array)), 1)


def carried(manifest: Manifest) -> dict[str, str]:
    """Input of role ``past`` -> the output that it is in the next call."""
    return {spec.past: spec.name for spec in manifest.outputs if spec.past}


def _size(dim: int | str) -> int:
    fixed = at_start(dim)
    # Only the batch and the past vary in what is carried.
    assert isinstance(fixed, int), dim
    return fixed

"""Whether a sequence in pieces gives what it gives as a whole.

Holds for any pieces: a prefill cut anywhere, single steps, rows with padding in front or with
holes. Unlike what must not matter at all (``metamorphic``), this holds up to rounding, since short
pieces take other branches of the operators.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.artifact import Artifact
from subquad.runtime.decoding import Decoding
from subquad.runtime.manifest import Manifest
from subquad.runtime.metrics import relative_change
from subquad.runtime.pair import reads_encoder
from subquad.runtime.samples import Batch


def piecewise_change(
    artifact: Artifact, batch: Batch, whole: Mapping[str, NDArray[np.floating]]
) -> tuple[str, float] | None:
    """How far logits of pieces are from those of the whole, relative, over real tokens.

    Args:
        artifact: with a cache.
        batch: what ran as a whole.
        whole: outputs of that run.

    Returns:
        The output and its change; ``None``: nothing to cut.
    """
    manifest = artifact.manifest
    ids = _of_role(manifest, batch, "token_ids")
    if ids is None or ids.ndim != 2 or ids.shape[1] < 2:
        return None
    mask = _of_role(manifest, batch, "padding_mask")
    real = np.ones(ids.shape, np.bool_) if mask is None else mask != 0
    fixed = {name: array for name, array in batch.feeds.items() if reads_encoder(name)}
    decoding = Decoding(artifact, len(ids), fixed)
    cuts = cuts_of(ids.shape[1])
    pieces = [
        decoding.advance(ids[:, start:end], real[:, start:end])
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    name = next(spec.name for spec in manifest.outputs if spec.is_logits)
    return name, relative_change(whole[name][real], np.concatenate(pieces, axis=1)[real])


def cuts_of(length: int) -> list[int]:
    """A chunk, two single steps, a chunk, a last step: as far as the length allows."""
    middle = length // 2
    return sorted({0, middle, middle + 1, min(middle + 2, length), length - 1, length})


def _of_role(manifest: Manifest, batch: Batch, role: str) -> NDArray[np.integer] | None:
    found = (spec.name for spec in manifest.inputs if spec.role == role)
    return next((batch.feeds[name] for name in found if not reads_encoder(name)), None)

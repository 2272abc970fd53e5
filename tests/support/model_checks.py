"""What tests on converted real models share: paddings, hidden values, the metamorphic check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from subquad.runtime.manifest import MODEL_NAME, Manifest
from subquad.runtime.session import open_session

Feeds = Mapping[str, NDArray[Any]]

PADDINGS = ("none", "right", "left", "holes", "one token")


def padding_mask(length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """One row for each of ``PADDINGS``: ``[5, length]``, 1 = real token, at least one a row."""
    mask = np.ones((len(PADDINGS), length), np.int64)
    real = int(rng.integers(1, length + 1))
    mask[1, real:] = 0
    mask[2, : length - real] = 0
    mask[3] = rng.integers(0, 2, length)
    mask[3, rng.integers(length)] = 1
    mask[4] = 0
    mask[4, rng.integers(length)] = 1
    return mask


def feeds_for(
    manifest: Manifest, ids: NDArray[np.int64], mask: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Inputs of a text model by their roles; segment ids are zero."""
    by_role = {"token_ids": ids, "padding_mask": mask, "ids": np.zeros_like(ids)}
    return {spec.name: by_role[spec.role].astype(spec.dtype) for spec in manifest.inputs}


class HiddenValues:
    """``model.onnx`` of an artifact with every site's output as an additional output."""

    def __init__(self, artifact: Path) -> None:
        self.manifest = Manifest.read(artifact)
        self.sites = [record.site["name"] for record in self.manifest.sites]
        self._values = [record.site["output"] for record in self.manifest.sites]
        model = onnx.load(artifact / MODEL_NAME, load_external_data=False)
        known = {output.name for output in model.graph.output}
        self._results = [output.name for output in model.graph.output]
        # Without a type: ONNX Runtime infers it.
        model.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in self._values if name not in known
        )
        self._session = open_session(model.SerializeToString(), folder=artifact)

    def run(self, feeds: Feeds) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Model outputs by name, and outputs of sites ``[B, H, query_len, value_dim]`` by site."""
        got = self._session.run([*self._results, *self._values], dict(feeds))
        count = len(self._results)
        return (
            dict(zip(self._results, got[:count], strict=True)),
            dict(zip(self.sites, got[count:], strict=True)),
        )


def assert_unmoved(
    before: Mapping[str, NDArray[Any]],
    after: Mapping[str, NDArray[Any]],
    may_not_see: Mapping[str, NDArray[np.bool_]],
) -> None:
    """Values at positions that may not see the change are equal to the bit.

    Args:
        before, after: by site, ``[B, H, query_len, value_dim]``.
        may_not_see: by site, ``[B, query_len]``.
    """
    for name, blind in may_not_see.items():
        old, new = (array.swapaxes(1, 2) for array in (before[name], after[name]))
        assert blind.any(), f"{name}: the check would be empty"
        differing = (old != new).any(axis=(2, 3))
        assert not differing[blind].any(), (
            f"{name}: changed at (row, position) {np.argwhere(differing & blind)[:5].tolist()}, "
            "which may not see the changed token"
        )


def assert_moved(
    before: Mapping[str, NDArray[Any]],
    after: Mapping[str, NDArray[Any]],
    sees: NDArray[np.bool_],
) -> None:
    """At every site something at positions ``[B, query_len]`` that see the change is different.

    Shows that ``assert_unmoved`` on the same change has power.
    """
    for name, old in before.items():
        differing = (old != after[name]).any(axis=(1, 3))
        assert differing[sees].any(), f"{name}: the changed token moved nothing that sees it"


def perplexity(logits: NDArray[np.floating], ids: Sequence[int] | NDArray[np.integer]) -> float:
    """Of ``ids`` under next-token ``logits`` ``[length, vocabulary]``, summed in float64."""
    targets = np.asarray(ids)[1:]
    scores = logits[:-1].astype(np.float64)
    top = scores.max(axis=1)
    normaliser = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    chosen = np.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
    return float(np.exp((normaliser - chosen).mean()))

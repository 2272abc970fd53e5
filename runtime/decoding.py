"""Pieces of sequences through an artifact with a cache: any pieces, the results of the whole.

What the model carries from call to call stays in ONNX Runtime's memory; only tokens go in and
logits come out.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.artifact import Artifact, check_inputs
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import InputSpec, Manifest
from subquad.runtime.past import PAST, carried, empty_past
from subquad.runtime.session import onnxruntime, run_ort_values


class Decoding:
    """Rows of tokens, and what the model keeps of them.

    Args:
        artifact: a causal language model with a cache.
        rows: of the batch.
        fixed: inputs that are the same in every call, such as what an encoder made.

    Raises:
        UsageError: the artifact is no such model.
    """

    def __init__(
        self, artifact: Artifact, rows: int, fixed: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        manifest = artifact.manifest
        self._fixed = dict(fixed or {})
        reason = decoding_reason(manifest, self._fixed)
        if reason:
            raise UsageError(reason)
        self._artifact = artifact
        self._carried = carried(manifest)
        self._logits = next(spec.name for spec in manifest.outputs if spec.is_logits)
        self._inputs = [spec for spec in manifest.inputs if spec.role != "past"]
        self._masked = any(
            spec.role == "padding_mask" for spec in self._inputs if spec.name not in self._fixed
        )
        value = onnxruntime().OrtValue.ortvalue_from_numpy
        self._past = {name: value(x) for name, x in empty_past(manifest.inputs, rows).items()}
        self.real = np.ones((rows, 0), np.bool_)
        """``[rows, tokens so far]``: false = padding."""

    @property
    def is_masked(self) -> bool:
        """Whether rows may hold padding."""
        return self._masked

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return int(self.real.shape[1])

    def advance(
        self, ids: NDArray[np.integer], real: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float32]:
        """Feed the next tokens.

        Args:
            ids: ``[rows, count]``, at least one.
            real: same shape, false = padding; all real by default.

        Returns:
            Logits ``[rows, count, vocabulary]``.

        Raises:
            UsageError: wrong shape or tokens, or padding for a model without a mask.
            SubquadError: ONNX Runtime failed.
        """
        real = np.ones(ids.shape, np.bool_) if real is None else real
        if ids.ndim != 2 or ids.shape[0] != self.real.shape[0] or real.shape != ids.shape:
            raise UsageError(
                f"Tokens must be [{self.real.shape[0]}, count], got {list(ids.shape)} with a mask "
                f"of {list(real.shape)}."
            )
        if not self._masked and not real.all():
            raise UsageError(
                "The model has no padding mask input, so rows of different length cannot share a "
                "run. Pass one row."
            )
        whole = np.concatenate([self.real, real], axis=1)
        feeds = self._fixed | {
            spec.name: self._feed(spec, ids, whole)
            for spec in self._inputs
            if spec.name not in self._fixed
        }
        checked = check_inputs(self._inputs, feeds)
        value = onnxruntime().OrtValue.ortvalue_from_numpy
        given = {name: value(array) for name, array in checked.items()} | self._past
        names = [self._logits, *self._carried.values()]
        logits, *kept = run_ort_values(self._artifact.session, given, names)
        # Only now: a run that failed or was interrupted leaves everything as it was.
        self._past = dict(zip(self._carried, kept, strict=True))
        self.real = whole
        result: NDArray[np.float32] = logits.numpy()
        return result

    def reorder(self, rows: Sequence[int] | NDArray[np.integer]) -> None:
        """Go on with these rows, in this order; a row may be taken more than once."""
        index = np.asarray(rows)
        value = onnxruntime().OrtValue.ortvalue_from_numpy
        self._past = {
            name: value(np.ascontiguousarray(kept.numpy()[index]))
            for name, kept in self._past.items()
        }
        self.real = self.real[index]
        self._fixed = {name: array[index] for name, array in self._fixed.items()}

    def nbytes(self) -> int:
        """Size of what is kept for the next call."""
        return sum(kept.numpy().nbytes for kept in self._past.values())

    def _feed(
        self, spec: InputSpec, ids: NDArray[np.integer], whole: NDArray[np.bool_]
    ) -> NDArray[Any]:
        if spec.role == "token_ids":
            return np.asarray(ids, spec.dtype)
        if spec.role == "padding_mask":
            return whole.astype(spec.dtype)
        positions = np.maximum(np.cumsum(whole, axis=1) - 1, 0)
        return np.asarray(positions[:, -ids.shape[1] :], spec.dtype)


def decoding_reason(manifest: Manifest, fixed: Container[str] = ()) -> str:
    """Why an artifact cannot be decoded step by step; "" = it can.

    Args:
        fixed: names of inputs that are given for all steps.
    """
    if not any(spec.is_logits for spec in manifest.outputs):
        return "The artifact has no logits over a vocabulary: it is no language model."
    pasts = [spec for spec in manifest.inputs if spec.role == "past"]
    if not pasts:
        return (
            "The artifact has no cache, so every token would cost a run over all tokens. Convert "
            "it with --cache."
        )
    known = set(carried(manifest))
    for spec in manifest.inputs:
        if spec.role == "past" and spec.name not in known:
            return f"No output carries on input {spec.name!r}."
        if spec.name in fixed:
            continue
        if spec.role == "values" or (spec.role == "ids" and "position" not in spec.name):
            return f"Input {spec.name!r} cannot be made from tokens."
    return ""


def keeps_all(manifest: Manifest) -> bool:
    """Whether what is kept grows with every token."""
    return any(PAST in spec.shape for spec in manifest.inputs if spec.role == "past")

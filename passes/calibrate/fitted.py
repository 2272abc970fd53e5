"""Tensors of a replacement that were fitted to one attention's activations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sample = Mapping[str, NDArray[Any]]
"""Inputs of an attention's node by role (``query``, ``key_mask``, ...), for one batch."""


@dataclass(frozen=True)
class Fitted:
    """What a calibration gives.

    Attributes:
        tensors: operator input -> values, instead of those that the method starts with.
        before, after: per query head, the squared error of its output relative to the exact
            head's, on inputs that were not fitted on: with the tensors as they start, and now.
    """

    tensors: Mapping[str, NDArray[np.float32]]
    before: tuple[float, ...] = field(default=())
    after: tuple[float, ...] = field(default=())

    @cached_property
    def digest(self) -> str:
        """Of the tensors."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            array = self.tensors[name]
            digest.update(f"{name}{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """For plans and reports."""
        return {"digest": self.digest, "before": list(self.before), "after": list(self.after)}

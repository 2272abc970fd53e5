"""The result of tracing: one IR for every kind of source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from subquad.runtime.manifest import InputSpec, OutputSpec


@dataclass
class TracedModel:
    """A source as an onnx_ir model, weights still lazy.

    Attributes:
        model: opset 24, named dynamic dimensions (``batch``, ``length``), no functions.
        reference: the unconverted graph; for torch sources a copy of ``model`` as traced, for an
            ``.onnx`` the source itself at its own opset. Shares tensors with ``model``.
        kind: what the source was.
        source_name: as the user gave it (no absolute path is stored in the artifact).
        source_hash: sha256 over the source's files, or over graph and weights for Python objects.
        inputs, outputs: the signature, with roles found by following each input through the graph.
        companions: tokenizer and config files to copy into the artifact.
        sample_inputs, sample_outputs: what a torch source computed on one small input, by name;
            empty for an ``.onnx``, which is its own reference.
        max_length: longest sequence the source accepts, where known.
    """

    model: ir.Model
    reference: ir.Model
    kind: Literal["huggingface", "module", "onnx"]
    source_name: str
    source_hash: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    companions: tuple[Path, ...] = field(default=())
    max_length: int | None = None
    sample_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sample_outputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)

"""sha256 of what was converted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from subquad.converter.emit import tensor_chunks

_CHUNK = 8 * 1024 * 1024


def hash_files(files: Mapping[str, Path]) -> str:
    """Over names and contents, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0")
        digest.update(files[name].stat().st_size.to_bytes(8, "little"))
        with open(files[name], "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def hash_model(model: ir.Model) -> str:
    """Over the serialised graph and every initializer; for sources that are no files."""
    digest = hashlib.sha256()
    graph_only = model.clone()
    graph_only.graph.initializers.clear()
    digest.update(ir.to_proto(graph_only).SerializeToString(deterministic=True))
    for name, value in model.graph.initializers.items():
        digest.update(name.encode() + b"\0")
        if value.const_value is not None:
            for chunk in tensor_chunks(value.const_value):
                digest.update(chunk)
    return digest.hexdigest()

"""The entry of the converter: any source -> ``TracedModel``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from subquad.converter.traced import TracedModel
from subquad.runtime.errors import UsageError

if TYPE_CHECKING:
    import torch

    from subquad.converter.module import ModuleSource


_WEIGHT_FILES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"})


def trace(
    source: str | Path | torch.nn.Module | ModuleSource, *, cache: bool = False
) -> TracedModel:
    """Read or trace ``source``.

    Args:
        source: a Hugging Face folder, an ``.onnx`` file, ``"package.module:factory"``
            or ``"file.py:factory"``, an ``nn.Module`` or a ``ModuleSource``.
        cache: a decoder takes and returns the keys and values of earlier tokens; for Hugging Face
            folders.

    Raises:
        UsageError: no such source, example inputs are missing, or a cache of another source.
        UnsupportedModelError: it cannot be read or traced; the message says why.
    """
    if cache and not (isinstance(source, (str, Path)) and Path(source).is_dir()):
        what = source if isinstance(source, (str, Path)) else type(source).__name__
        raise UsageError(
            f"--cache needs a Hugging Face folder, got {what}. An .onnx file or a module has a "
            "cache if its own inputs and outputs are one."
        )
    if not isinstance(source, (str, Path)):
        from subquad.converter.module import trace_module

        return trace_module(source)
    path = Path(source)
    if path.is_dir():
        from subquad.converter.huggingface import trace_huggingface

        return trace_huggingface(path, cache=cache)
    if path.suffix.lower() in _WEIGHT_FILES and path.is_file():
        raise UsageError(
            f"{path} holds weights only. Pass the folder with its config.json; pickled weights "
            "must be saved as safetensors first."
        )
    if path.suffix.lower() == ".onnx" or path.is_file():
        from subquad.converter.onnx_source import trace_onnx

        return trace_onnx(path)
    if isinstance(source, str) and ":" in source:
        from subquad.converter.module import trace_factory

        return trace_factory(source)
    raise UsageError(
        f"{source} does not exist. Expected a Hugging Face folder, an .onnx file, or "
        "'package.module:factory'."
    )

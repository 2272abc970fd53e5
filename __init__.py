"""subquad: compile trained transformers to sub-quadratic attention, by proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subquad.converter.pipeline import convert
    from subquad.runtime.artifact import load

__version__ = "0.1.0"
__all__ = ["__version__", "convert", "load"]


def __getattr__(name: str) -> object:
    # Lazy: running an artifact must not import torch, and `subquad --help` must be fast.
    if name == "load":
        from subquad.runtime.artifact import load

        return load
    if name == "convert":
        from subquad.converter.pipeline import convert

        return convert
    raise AttributeError(f"module 'subquad' has no attribute {name!r}")

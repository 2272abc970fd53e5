"""Compiled kernels serve prompts and steps: of exact attention, of windows and of linear layers."""

from __future__ import annotations

from pathlib import Path

import pytest

import subquad
import tiny_decoders
from subquad.converter.pipeline import convert
from subquad.runtime.validate import validate

pytest.importorskip("tvm")
pytestmark = pytest.mark.slow


def test_kernels_serve_prompts_and_steps(tmp_path: Path) -> None:
    """Layer 0 has a window of its own, layer 1 becomes linear."""
    tiny_decoders.save(tiny_decoders.gemma3, tmp_path / "source")
    report = convert(
        tmp_path / "source",
        tmp_path / "artifact",
        cache=True,
        force=("elu@1",),
        kernels="cpu",
        require_kernels=True,
    )
    prepared = [record["prepared"] for record in report.sites]
    assert all(len(names) == 2 for names in prepared)  # HybridState and HybridDecode
    execution = subquad.load(tmp_path / "artifact", kernels="require").execution
    assert all(site.runs_as.startswith("kernel") for site in execution.sites)
    result = validate(tmp_path / "artifact", lengths=(1, 2, 19), kernels="require")
    assert result.metamorphic is not None and not result.metamorphic.violations
    assert result.metamorphic.checks["pieces"] == 8


def test_exact_steps_by_kernel(tmp_path: Path) -> None:
    tiny_decoders.save(tiny_decoders.llama, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "artifact", cache=True, kernels="cpu")
    result = validate(tmp_path / "artifact", lengths=(2, 19, 70), kernels="require")
    assert result.verdict == "pass", result.reasons

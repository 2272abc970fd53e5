"""The exact artifact below a plan: what it is made for, it has."""

from __future__ import annotations

from pathlib import Path

import pytest

import exact_folder
from subquad.converter.base_artifact import base_artifact
from subquad.converter.work_folder import WorkFolder
from subquad.runtime.kernel_tools import missing_kernel_tools


def test_kernels_are_compiled_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exact_folder.save_decoder(tmp_path / "deep.onnx")
    work = WorkFolder(tmp_path / "work")
    monkeypatch.setenv("SUBQUAD_KERNELS", "cpu")
    folder, manifest = base_artifact(source, work, kernels="none")
    assert not manifest.kernels and not list(folder.rglob("*.so"))
    assert base_artifact(source, work, kernels="none")[0] == folder
    if not missing_kernel_tools():
        with_kernels, manifest = base_artifact(source, work)
        assert with_kernels != folder and manifest.kernels

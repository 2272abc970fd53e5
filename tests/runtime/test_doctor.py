from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from subquad.runtime import doctor
from subquad.runtime.doctor import examine
from subquad.runtime.errors import TargetUnavailableError, UsageError


def test_everything_is_reported_and_serialisable() -> None:
    report = examine()
    names = [check.name for check in report.checks]
    assert len(set(names)) == len(names)
    assert set(names) >= {
        "python",
        "processor",
        "memory",
        "cpu provider",
        "compiler",
        "nvcc",
        "tvm",
        "cpu kernels",
        "cuda kernels",
    }
    assert set(names) >= {"cpu", "gpu", "text", "convert", "one runtime"}
    json.dumps(report.to_json(), allow_nan=False)
    assert all(check.ok or check.advice for check in report.checks)


def test_requirements() -> None:
    report = examine()
    assert report.missing(["python", "cpu provider"]) == []
    with pytest.raises(UsageError, match="Unknown requirement 'gcc'"):
        report.missing(["gcc"])


def test_a_missing_requirement_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (sentence,) = examine().missing(["compiler"])
    assert sentence.startswith("compiler is required: not found. Only needed to build")


def test_kernels_that_cannot_be_compiled_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    (sentence,) = examine().missing(["cpu kernels"])
    assert "kernels are built on Linux x86-64 only, this is linux riscv64" in sentence
    assert "attentions run as ONNX functions" in sentence


def test_two_runtimes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "versions", lambda names: dict.fromkeys(names, "1.32.0"))
    (check,) = (check for check in examine().checks if check.name == "one runtime")
    assert check.problem and not check.ok and "last one installed wins" in check.advice


def test_no_runtime_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise TargetUnavailableError("ONNX Runtime is not installed.")

    monkeypatch.setattr(doctor, "onnxruntime", absent)
    assert examine().missing(["cpu provider"])


def test_a_listed_provider_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    def refuse(model: bytes, *, folder: Path, provider: str) -> None:
        raise TargetUnavailableError("did not start")

    have = ["CUDAExecutionProvider", "AzureExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: have)
    monkeypatch.setattr(doctor, "open_session", refuse)
    checks = {check.name: check for check in examine().checks}
    assert checks["cuda"].problem and checks["cuda"].found == "built in, does not start"
    assert "AzureExecutionProvider" not in checks


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_a_compiler_that_fails_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = (check for check in examine().checks if check.name == "compiler")
    assert check.problem and "c++ fails" in check.found

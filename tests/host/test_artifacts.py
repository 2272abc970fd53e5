"""Artifacts with kernels: converted, checked, loaded, moved, and damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import subquad
import tiny_artifact
from kernel_nodes import TEMPLATES, TINY
from subquad.cli import cli
from subquad.converter import pipeline
from subquad.converter.conversion_report import ConversionReport
from subquad.converter.pipeline import convert
from subquad.kernels.host.build import LIBRARY_NAME, KernelBuild
from subquad.runtime import kernel_library
from subquad.runtime.bench import bench
from subquad.runtime.errors import IntegrityError, TargetUnavailableError, UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.validate import validate
from tiny_onnx import save_tiny_decoder

LIBRARY = f"kernels/x86-64-v3/{LIBRARY_NAME}"
SOFTCAP = "slow kernels know no softcap, got 2.5"

Report = tuple[Path, ConversionReport]


@pytest.fixture(scope="module")
def converted(built: KernelBuild, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two attentions, one with a kernel; read only."""
    folder = tmp_path_factory.mktemp("converted")
    source = save_tiny_decoder(folder / "tiny.onnx", capped=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(cache))
        report = convert(source, folder / "out", kernels="cpu", templates=TEMPLATES)
    return folder / "out", report


@pytest.fixture
def copied(converted: Report, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(converted[0], tmp_path / "copied"))


def feeds() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    mask = np.ones((3, 17), np.int64)
    mask[1, :5] = 0
    mask[2, 9:] = 0
    return {"input_ids": rng.integers(0, 31, (3, 17)), "attention_mask": mask}


def nodes(folder: Path) -> list[str]:
    """Operators and overloads of all attention nodes; their functions must be there."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    functions = {(f.name, f.overload) for f in model.functions}
    found = [n for n in model.graph.node if n.domain == "ai.subquad"]
    assert {(n.op_type, n.overload) for n in found} == functions
    return sorted(f"{n.op_type}:{n.overload}" for n in found)


def test_sites_without_kernel_become_reference(converted: Report) -> None:
    folder, report = converted
    by_kernel = {record["kernel"]: record for record in report.sites}
    served, other = by_kernel["slow_kernels"], by_kernel[""]
    assert served["operator"] == f"Attention:{TINY.overload}"
    assert served["reason"] == ""
    assert other["operator"].startswith("AttentionReference:")
    assert other["reason"] == f"no kernel: {SOFTCAP}"
    assert nodes(folder) == sorted([served["operator"], other["operator"]])


def test_manifest_lists_the_library(converted: Report) -> None:
    folder, report = converted
    manifest = Manifest.read(folder)
    (library,) = [item for item in manifest.kernels if item.target == "x86-64-v3"]
    assert library.path == LIBRARY
    assert "avx2" in library.flags
    assert LIBRARY in manifest.files
    assert report.check["execution"]["sites"][0]["runs_as"].startswith("kernel slow_kernels (x86")


def test_kernels_and_functions_agree(converted: Report) -> None:
    folder, _ = converted
    artifact = subquad.load(folder)
    off = subquad.load(folder, kernels="off")
    runs_as = sorted(site.runs_as for site in artifact.execution.sites)
    assert runs_as[0] == "function body"
    assert runs_as[1].startswith("kernel slow_kernels (x86-64-v")
    assert {site.runs_as for site in off.execution.sites} == {"function body"}
    assert "kernels are switched off" in {site.reason for site in off.execution.sites}
    got, want = artifact.run(feeds()), off.run(feeds())
    assert not np.array_equal(got["logits"], want["logits"])
    # Rows of padding may hold anything finite; the others are float32 sums of some 100 terms.
    real = feeds()["attention_mask"] == 1
    np.testing.assert_allclose(got["logits"][real], want["logits"][real], rtol=1e-4, atol=1e-4)


def test_any_runtime_runs_the_model_without_the_library(converted: Report) -> None:
    folder, _ = converted
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    want = subquad.load(folder, kernels="off").run(feeds())["logits"]
    np.testing.assert_array_equal(session.run(["logits"], feeds())[0], want)


def test_artifact_can_be_moved(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = copied.rename(copied.with_name("moved artifact"))
    monkeypatch.chdir(moved.parent)
    artifact = subquad.load("moved artifact", threads=2)
    assert any(site.runs_as.startswith("kernel") for site in artifact.execution.sites)
    assert np.isfinite(artifact.run(feeds())["logits"]).all()


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_validate_and_bench(converted: Report, kernels: Any) -> None:
    folder, _ = converted
    result = validate(folder, lengths=(5,), kernels=kernels)
    assert result.verdict == "pass", result.reasons
    kinds = {site["runs_as"].partition(" ")[0] for site in result.execution["sites"]}
    assert kinds == ({"function", "kernel"} if kernels == "auto" else {"function"})
    timed = bench(folder, lengths=(8,), rounds=1, checked=False, memory=False, kernels=kernels)
    assert timed.cases[0].artifact_seconds > 0


def test_require_names_the_attention_without_kernel(converted: Report) -> None:
    folder, _ = converted
    with pytest.raises(TargetUnavailableError, match=f"1 of 2 attentions .*{SOFTCAP}"):
        subquad.load(folder, kernels="require")
    with pytest.raises(UsageError, match="kernels must be one of auto, off, require"):
        subquad.load(folder, kernels="all")  # type: ignore[arg-type]


def test_require_on_an_artifact_without_kernels(tmp_path: Path) -> None:
    folder = tiny_artifact.build(tmp_path / "plain")
    result = CliRunner().invoke(cli, ["validate", str(folder), "--kernels", "require"])
    assert result.exit_code == 6
    assert "the artifact has no kernel library" in result.output


def test_processor_that_lacks_something(converted: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = converted
    monkeypatch.setattr(kernel_library, "cpu_flags", lambda: frozenset({"avx", "f16c"}))
    artifact = subquad.load(folder)
    reasons = {site.reason for site in artifact.execution.sites}
    assert "this processor lacks avx2 bmi1 bmi2 fma, which the kernels use" in reasons
    with pytest.raises(TargetUnavailableError, match="required, but this processor lacks"):
        subquad.load(folder, kernels="require")


def test_other_platform(converted: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = converted
    monkeypatch.setattr(kernel_library, "this_platform", lambda: "darwin-arm64")
    reasons = {site.reason for site in subquad.load(folder).execution.sites}
    assert "kernels were built for linux-x86_64, this is darwin-arm64" in reasons


def test_best_library_wins(converted: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = converted
    manifest = Manifest.read(folder)
    (basic,) = [item for item in manifest.kernels if item.target == "x86-64-v3"]
    better = dataclasses.replace(basic, target="better", flags=(*basic.flags, "made_up"))
    manifest = dataclasses.replace(manifest, kernels=(better, basic))
    for flags, target in ((basic.flags, "x86-64-v3"), (better.flags, "better")):
        monkeypatch.setattr(kernel_library, "cpu_flags", lambda flags=flags: frozenset(flags))
        choice = kernel_library.choose_kernels(folder, manifest, "auto")
        assert choice.library is not None and choice.library.target == target


def test_changed_library_is_refused(copied: Path) -> None:
    library = copied / LIBRARY
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    with pytest.raises(IntegrityError, match=LIBRARY_NAME):
        subquad.load(copied)


def test_library_that_does_not_load_is_an_error(copied: Path) -> None:
    # Also the one for AVX-512, where this machine has it.
    for library in Manifest.read(copied).kernels:
        (copied / library.path).write_bytes(b"no library")
    tiny_artifact.write_manifest(copied, Manifest.read(copied))
    with pytest.raises(TargetUnavailableError, match=f"cannot load {LIBRARY_NAME}: .*kernels off"):
        subquad.load(copied)
    subquad.load(copied, kernels="off")


def test_library_must_be_a_file_of_the_manifest(copied: Path) -> None:
    raw = json.loads((copied / "manifest.json").read_text())
    # Also the one for AVX-512, where this machine has it.
    for library in Manifest.read(copied).kernels:
        del raw["files"][library.path]
    (copied / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(IntegrityError, match="no file of the manifest"):
        subquad.load(copied)


def test_malformed_kernels_in_the_manifest(copied: Path) -> None:
    tiny_artifact.edit_manifest(copied, kernels=[{"target": "x", "platform": "y", "flags": []}])
    with pytest.raises(IntegrityError, match="'path' is missing"):
        subquad.load(copied)


def test_without_compiler_the_artifact_is_pure_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny_decoder(tmp_path / "tiny.onnx", capped=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    report = convert(source, tmp_path / "out", kernels="cpu", templates=TEMPLATES)
    assert all(record["kernel"] == "" for record in report.sites)
    assert all("no C++ compiler was found" in record["reason"] for record in report.sites)
    assert all(name.startswith("Attention:") for name in nodes(tmp_path / "out"))
    assert not (tmp_path / "out" / "kernels").exists()
    assert Manifest.read(tmp_path / "out").kernels == ()
    failed = CliRunner().invoke(
        cli, ["convert", str(source), str(tmp_path / "second"), "--require-kernels"]
    )
    assert failed.exit_code == 6
    assert "kernels are required, but 2 of 2 attentions have none" in failed.output
    assert not (tmp_path / "second").exists()


def test_require_kernels_refuses_before_anything_is_written(
    converted: Report, tmp_path: Path
) -> None:
    source = save_tiny_decoder(tmp_path / "tiny.onnx", capped=True)
    with pytest.raises(TargetUnavailableError, match=f"1 of 2 attentions have none; .*{SOFTCAP}"):
        convert(source, tmp_path / "out", require_kernels=True, templates=TEMPLATES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("environment", ["cpu", ""])
def test_kernels_are_built_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    asked: list[bool] = []

    def build(*arguments: Any, **options: Any) -> KernelBuild:
        asked.append(True)
        return KernelBuild()

    monkeypatch.setattr(pipeline, "build_kernels", build)
    source = save_tiny_decoder(tmp_path / "tiny.onnx")
    # Empty: as if it was not set.
    monkeypatch.setenv("SUBQUAD_KERNELS", environment)
    report = convert(source, tmp_path / "out").to_json()
    assert asked and report["kernels"]["asked"] == "cpu"


def test_kernels_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any, **options: Any) -> KernelBuild:
        raise AssertionError("kernels were built")

    monkeypatch.setattr(pipeline, "build_kernels", build)
    source = save_tiny_decoder(tmp_path / "tiny.onnx")
    for name, options in (("out", {}), ("other", {"kernels": "none"})):
        report = convert(source, tmp_path / name, **options)  # type: ignore[arg-type]
        assert [(record["kernel"], record["reason"]) for record in report.sites] == [("", "")]
        assert report.to_json()["kernels"] == {
            "asked": "none",
            "targets": [],
            "attentions": 0,
            "missing": "",
        }


def test_an_unknown_kind_of_kernels_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="kernels must be none or cpu, got 'tpu'"):
        convert("x.onnx", tmp_path / "out", kernels="tpu")  # type: ignore[arg-type]
    monkeypatch.setenv("SUBQUAD_KERNELS", "off")
    with pytest.raises(UsageError, match="SUBQUAD_KERNELS must be none or cpu, got 'off'"):
        convert("x.onnx", tmp_path / "out")


def test_the_command_says_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny_decoder(tmp_path / "tiny.onnx", capped=True)
    command = ["convert", str(source), "--overwrite"]
    done = CliRunner().invoke(cli, [*command, str(tmp_path / "out"), "--kernels", "none"])
    assert "kernels: none, as asked for; attentions run as ONNX functions" in done.output
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("SUBQUAD_KERNELS")
    done = CliRunner().invoke(cli, [*command, str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "kernels: none, attentions run as ONNX functions: no C++ compiler was" in done.output
    (line,) = [line for line in done.output.splitlines() if "no kernel: " in line]
    assert " and 1 more: " in line

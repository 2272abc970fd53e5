"""Reports come after the artifact: nothing that fails there can lose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exact_folder
import subquad
from subquad.converter import reports
from subquad.converter.pipeline import convert
from subquad.converter.plan_request import PlanRequest
from subquad.converter.planning import convert_with_budget
from subquad.converter.reports import PAGE_NAME, REPORT_NAME
from subquad.runtime.errors import OutputError

REQUEST = PlanRequest(
    ("kl=1.5",), lengths=(96,), threads=1, calibration_tokens=480, heldout_tokens=480
)


class Broken(Exception):
    pass


def broken(*arguments: Any) -> Any:
    raise Broken


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact_folder.save_decoder(tmp_path_factory.mktemp("source") / "deep.onnx", layers=1)


def runs(folder: Path) -> bool:
    ids = np.arange(12)[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return bool(np.isfinite(subquad.load(folder).run(feeds)["logits"]).all())


def test_a_page_that_cannot_be_made_leaves_the_artifact(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "html_report", broken)
    with pytest.raises(Broken):
        convert(source, tmp_path / "out")
    assert runs(tmp_path / "out")
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text("utf-8"))["sites"]
    assert not (tmp_path / "out" / PAGE_NAME).exists()


def test_a_page_of_a_plan_that_cannot_be_made_leaves_the_artifact(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def page(report: Any) -> str:
        return broken() if "planning" in report else "exact artifact to plan on"

    monkeypatch.setattr(reports, "html_report", page)
    with pytest.raises(Broken):
        convert_with_budget(source, tmp_path / "out", REQUEST)
    assert runs(tmp_path / "out") and not (tmp_path / "out" / PAGE_NAME).exists()
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text("utf-8"))["verified"]


def test_a_probe_that_fails_leaves_the_artifact_and_its_report(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def greedy(*arguments: Any) -> Any:
        asked.append("greedy")
        raise Broken

    monkeypatch.setattr("subquad.converter.planning.greedy", greedy)
    with pytest.raises(Broken):
        convert_with_budget(source, tmp_path / "out", REQUEST)
    assert asked == ["greedy"]
    assert runs(tmp_path / "out")
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text("utf-8"))
    assert report["verified"] and "probes" not in report
    assert "held out" in (tmp_path / "out" / PAGE_NAME).read_text("utf-8")


def test_a_report_that_cannot_be_written_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("subquad.runtime.whole_file.os.fsync", full)
    with pytest.raises(OutputError, match=r"is complete, but .*report\.json .* No space left"):
        reports.write_reports(tmp_path, _Nothing())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [], "what was written so far is removed"


class _Nothing:
    def to_json(self) -> dict[str, Any]:
        return {}

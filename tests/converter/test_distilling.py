"""Distillation inside a conversion: the artifact that ships has the accuracy that was reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

import exact_folder
from subquad.converter.branching import FIT_TOKENS, spread
from subquad.converter.conversion_report import ConversionReport
from subquad.converter.distilling import DistilRequest, convert_and_distil
from subquad.converter.pipeline import Selection
from subquad.passes.repair.distil import DistilSettings
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import MODEL_NAME, REFERENCE_NAME
from subquad.runtime.samples import Batch

SETTINGS = DistilSettings(rank=4, steps=40, learning_rate=0.02, checks=4)
REQUEST = DistilRequest(
    SETTINGS, lengths=(24,), calibration_tokens=960, heldout_tokens=480, threads=1
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact_folder.save_decoder(tmp_path_factory.mktemp("source") / "deep.onnx", layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distilled")


@pytest.fixture(scope="module")
def report(source: Path, folder: Path) -> ConversionReport:
    selection = Selection.of(["window:size=2,sinks=0@0"])
    return convert_and_distil(source, folder / "out", selection, REQUEST, work=folder / "work")


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path))


def divergence(folder: Path, ids: NDArray[np.int64]) -> float:
    """Mean KL of the artifact from its own reference, in nats per token."""
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    outputs = [
        session(folder / name).run(["logits"], feeds)[0].astype(np.float64)
        for name in (REFERENCE_NAME, MODEL_NAME)
    ]
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in outputs)
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def test_artifact_is_closer_to_its_reference(report: ConversionReport, folder: Path) -> None:
    result = report.facts["distillation"]
    assert result["loss_after"] < 0.9 * result["loss_before"]
    assert result["best_step"] > 0 and result["synthetic"]
    # Only what stands around the replaced attention.
    assert sorted(result["changed"]) == ["wk0", "wo0", "wq0", "wv0"]
    ids = np.random.default_rng(3).integers(0, exact_folder.VOCABULARY, (8, 24))
    # Fresh random tokens: the mean of 192 of them is within some percent of that of the held-out.
    assert divergence(folder / "out", ids) == pytest.approx(result["loss_after"], rel=0.3)


def test_reference_keeps_the_weights_of_the_source(
    report: ConversionReport, folder: Path, source: Path
) -> None:
    ids = np.arange(10, dtype=np.int64)[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    want = session(source).run(["logits"], feeds)[0]
    got = session(folder / "out" / REFERENCE_NAME).run(["logits"], feeds)[0]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_forced_methods_are_fitted_and_their_branches_reported(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    request = dataclasses.replace(REQUEST, settings=None)
    selection = Selection.of(["lolcats:size=4@0"])
    report = convert_and_distil(source, tmp_path / "out", selection, request, work=folder / "work")
    facts = report.to_json()
    (fit,) = facts["calibration"]
    assert fit["method"].startswith("lolcats:size=4") and len(fit["after"]) == 4
    assert np.mean(fit["after"]) < np.mean(fit["before"])
    (seen,) = facts["branches"]
    assert seen["name"] == fit["name"] and seen["window_off"]["damage"] > 0
    assert "distillation" not in facts
    assert all("not calibrated" not in site["reason"] for site in facts["sites"])


def test_a_plan_with_data_is_refitted(source: Path, folder: Path, tmp_path: Path) -> None:
    """Linear attention everywhere: an error large enough that weights make up for some."""
    request = dataclasses.replace(REQUEST, settings=None, refit=True, calibration_tokens=4800)
    ids = np.random.default_rng(3).integers(0, exact_folder.VOCABULARY, (40, 24))
    left = {}
    for name, wanted in (("bare", False), ("refitted", True)):
        report = convert_and_distil(
            source,
            tmp_path / name,
            Selection.of(["elu"]),
            dataclasses.replace(request, refit=wanted),
            work=folder / "work",
        )
        left[name] = divergence(tmp_path / name, ids)
        assert ("refit" in report.facts) == wanted
    facts = report.facts["refit"]
    assert facts["applied"] and any(site["applied"] for site in facts["sites"])
    assert left["refitted"] < 0.95 * left["bare"]
    # Fresh random tokens, 960 of them.
    assert left["refitted"] == pytest.approx(facts["measured"]["metrics"]["kl"], rel=0.3)


def test_nothing_replaced_nothing_trained(source: Path, folder: Path, tmp_path: Path) -> None:
    report = convert_and_distil(
        source, tmp_path / "out", Selection.of(), REQUEST, work=folder / "work"
    )
    assert report.facts["distillation"] is None


@pytest.mark.parametrize("text", ["speed=3", "rank=many", "steps=0"])
def test_bad_settings(text: str) -> None:
    with pytest.raises(UsageError):
        DistilSettings.parse(text)


def test_settings_are_read() -> None:
    assert DistilSettings.parse("rank=4, steps=10", seed=3) == DistilSettings(4, 10, seed=3)


def test_methods_are_fitted_to_some_of_many_inputs() -> None:
    """Evenly from all of them, and of each length as many tokens as there may be."""

    def batches(length: int, count: int) -> list[Batch]:
        return [Batch(length, "none", {"ids": np.full((4, length), n)}) for n in range(count)]

    short, long = batches(64, 3), batches(1024, 101)
    chosen = spread([*short, *long])
    assert chosen[:3] == short
    numbers = [int(batch.feeds["ids"][0, 0]) for batch in chosen[3:]]
    assert FIT_TOKENS / 2 < 4 * 1024 * len(numbers) <= FIT_TOKENS
    assert len(set(np.diff(numbers))) == 1 and numbers[0] == 0 and numbers[-1] > 90

"""`subquad plan` and `convert --budget` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import exact_folder

Run = Callable[..., Result]

SIZES = (
    *("--lengths", "96", "--threads", "1"),
    *("--calibration-tokens", "480", "--heldout-tokens", "960"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    exact_folder.save_decoder(folder / "deep.onnx")
    return folder


def test_plan_writes_a_file_that_convert_takes(run: Run, folder: Path, tmp_path: Path) -> None:
    work, source = folder / "work", folder / "deep.onnx"
    result = run(
        *("plan", source, "--budget", "kl=1.5", "--plan", folder / "plan.json", "--work", work),
        *SIZES,
    )
    assert result.exit_code == 0, result.stderr
    assert "SYNTHETIC" in result.stderr
    raw = json.loads((folder / "plan.json").read_text("utf-8"))
    assert len(raw["sites"]) == 3
    words = " ".join(result.stdout.split())
    assert "held out:" in words and "budget kl=1.5" in words and "no costs were measured" in words

    # Edited by hand: one attention is exact again.
    raw["sites"][1]["method"] = "dense"
    (folder / "plan.json").write_text(json.dumps(raw), "utf-8")
    result = run("convert", source, tmp_path / "out", "--plan", folder / "plan.json", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["sites"][1]["method"] == "dense"
    assert {record["method"] for record in report["sites"]} == {"dense", "window"}

    # The same again from the work folder, as JSON and without a file.
    again = run("plan", source, "--budget", "kl=1.5", "--work", work, "--json", *SIZES)
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["plan"]["runs"] >= 2


@pytest.mark.slow
def test_inspect_shows_where_heads_look(run: Run, folder: Path, tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    ids = rng.integers(0, exact_folder.VOCABULARY, (4, 90))
    np.savez(tmp_path / "rows.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    result = run("inspect", folder / "deep.onnx", "--data", tmp_path / "rows.npz")
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "entropy" in words and "attention.2" in words and "4 rows of arrays" in words
    refused = run("inspect", tmp_path, "--data", tmp_path / "none.npz")
    assert refused.exit_code != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "m.onnx"), "needs a budget"),
        (("plan", "m.onnx", "--budget", "speed=3"), "Unknown budget"),
        (("plan", "m.onnx", "--budget", "kl=1"), "m.onnx does not exist"),
        (("plan", "m.onnx", "--budget", "kl=1", "--plan", "no/such/plan.json"), "no directory"),
        (("plan", "m.onnx", "--budget", "kl=1", "--plan", "."), "no regular file"),
        (("plan", "m.onnx", "--budget", "kl=1", "--minimize", "fun"), "--minimize"),
        (("convert", "m.onnx", "out", "--force", "elu", "--data", "t"), "--data has no effect"),
        (("convert", "m.onnx", "out", "--lengths", "64"), "--lengths has no effect"),
        (
            ("convert", "m.onnx", "out", "--plan", "p", "--methods", "elu"),
            "--methods has no effect",
        ),
        (("convert", "m.onnx", "out", "--budget", "kl=1", "--force", "elu"), "neither with"),
        (("convert", "m.onnx", "out", "--budget", "kl=1", "--plan", "p.json"), "neither with"),
        (("convert", "m.onnx", "out", "--plan", "p.json", "--data", "t", "--cache"), "--no-refit"),
        (("convert", "m.onnx", "out", "--plan", "p.json"), "cannot be read"),
        (("convert", "m.onnx", "out", "--plan", "p.json", "--force", "elu"), "drop --force"),
    ],
)
def test_usage(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.stderr
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()

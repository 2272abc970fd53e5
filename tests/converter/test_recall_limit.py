"""A limit on recall: a plan that perplexity takes and recall refuses."""

from __future__ import annotations

import dataclasses
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import exact_folder
from subquad.converter import recall_limit
from subquad.converter.budget_texts import parse_budget
from subquad.converter.planning import PlanRequest, convert_with_budget, plan_source
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
LENGTH = 512


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse.py", "tarfile.py"):
        (folder / f"{name}.txt").write_text((library / name).read_text("utf-8"), "utf-8")
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work") / "work"


@pytest.fixture(scope="module")
def loose(texts: Path) -> PlanRequest:
    """Windows everywhere keep this perplexity."""
    return PlanRequest(
        budget=("ppl=30%",),
        lengths=(LENGTH,),
        data=(texts,),
        methods=("window",),
        threads=1,
        refit=False,
        calibration_tokens=1024,
        heldout_tokens=2048,
    )


def test_windows_that_perplexity_takes_are_refused_by_recall(
    loose: PlanRequest, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = plan_source(DEMO_MODEL, loose, work=work).plan.to_json()
    assert any(site["method"].startswith("window") for site in taken["sites"])
    assert "recall" not in taken["measured"]["metrics"]
    print(json.dumps(taken["measured"]), [s["method"] for s in taken["sites"]])

    both = dataclasses.replace(loose, budget=("ppl=30%", "recall=95%"))
    found = plan_source(DEMO_MODEL, both, work=work).plan.to_json()
    print(json.dumps(found["measured"]), [s["method"] for s in found["sites"]])
    print(json.dumps(found["front"]))

"""NanoGuard: a hand-written ``nn.Module`` that nobody adapted to any exporter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import subquad
import third_party
from subquad.converter.pipeline import convert

pytestmark = pytest.mark.models

FACTORY = Path(__file__).with_name("nanoguard_factory.py")


def test_all_four_attentions_are_raised_and_outputs_agree(tmp_path: Path) -> None:
    report = convert(f"{FACTORY}:build", tmp_path / "artifact", force=("dense",))
    assert [record["method"] for record in report.sites] == ["dense"] * 4
    artifact = subquad.load(tmp_path / "artifact")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8192, (3, 130))
    mask = np.ones_like(ids)
    mask[1, 100:] = 0
    (got,) = artifact.run({"input_ids": ids, "attention_mask": mask}).values()
    with torch.no_grad():
        want = third_party.nanoguard()(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    assert np.abs(got - want).max() <= 1e-5 * max(1.0, float(np.abs(want).max()))

"""Models that exist as ``.onnx`` only: every attention is raised, outputs stay the source's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import subquad
import third_party
from model_checks import padding_mask
from subquad.converter.pipeline import convert

pytestmark = pytest.mark.models

Feeds = dict[str, NDArray[Any]]


def run_source(path: Path, feeds: Feeds) -> Feeds:
    """The untouched file in plain ONNX Runtime."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def pictures(rng: np.random.Generator) -> Feeds:
    # Smooth blobs, normalised like photos.
    y, x = np.mgrid[0:224, 0:224] / 224
    image = np.stack([np.sin(a * x + b * y) for a, b in rng.uniform(-9, 9, (3, 2))])
    return {"input_image": (2 * image[None]).astype(np.float32)}


def sentences(rng: np.random.Generator) -> Feeds:
    mask = padding_mask(75, rng)
    ids = rng.integers(0, 30522, mask.shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize(
    ("path", "inputs", "sites"),
    [
        pytest.param(third_party.vit_onnx, pictures, 12, id="vit"),
        pytest.param(third_party.minilm_l3_onnx, sentences, 3, id="minilm-l3"),
    ],
)
def test_every_attention_is_raised_and_outputs_agree(
    tmp_path: Path,
    path: Callable[[], Path],
    inputs: Callable[[np.random.Generator], Feeds],
    sites: int,
) -> None:
    report = convert(path(), tmp_path / "artifact", force=("dense",))
    assert [record["method"] for record in report.sites] == ["dense"] * sites
    feeds = inputs(np.random.default_rng(0))
    artifact = subquad.load(tmp_path / "artifact")
    feeds = {spec.name: feeds[spec.name] for spec in artifact.manifest.inputs}
    want, got = run_source(path(), feeds), artifact.run(feeds)
    assert list(got) == list(want)
    for name, expected in want.items():
        # float32 on both sides, sums in another order through up to 12 layers
        error = float(np.abs(got[name] - expected).max() / max(1.0, np.abs(expected).max()))
        print(f"{path.__name__}: {len(report.sites)} sites, {name} differs by {error:.1e}")
        assert error <= 1e-5, name

"""Whisper tiny.en writes through its artifacts what it writes in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

import third_party
from subquad.converter.pipeline import convert
from subquad.runtime.generate import generate
from subquad.runtime.validate import validate

pytestmark = [pytest.mark.models, pytest.mark.slow]

LAYERS = 4
NEW = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper") / "pair"
    report = convert(third_party.whisper_tiny_en(), folder, cache=True, require_sites="all")
    # Self-attention of both, cross-attention of the decoder.
    assert len(report.sites) == 3 * LAYERS
    return folder


def _features() -> NDArray[np.float32]:
    """Of two made-up sounds: a chord that swells, and noise with a beat."""
    time = np.arange(16000 * 4) / 16000
    chord = sum(np.sin(2 * np.pi * f * time) for f in (220, 277, 330)) * time / 12
    noise = np.random.default_rng(0).standard_normal(time.size) * (np.sin(6 * time) > 0) / 3
    extractor = WhisperFeatureExtractor(feature_size=80)
    made = extractor([chord, noise], sampling_rate=16000, return_tensors="np")
    return np.asarray(made.input_features, np.float32)


def test_greedy_tokens_are_those_of_torch(pair: Path, tmp_path: Path) -> None:
    features = _features()
    np.savez(tmp_path / "features.npz", input_features=features)
    got = generate(pair, arrays=tmp_path / "features.npz", max_new_tokens=NEW)
    model = WhisperForConditionalGeneration.from_pretrained(third_party.whisper_tiny_en())
    for row, continuation in enumerate(got.rows):
        ids = [50257, 50362]
        for step in range(NEW):
            with torch.no_grad():
                logits = model(
                    torch.from_numpy(features[row : row + 1]),
                    decoder_input_ids=torch.tensor([ids]),
                ).logits[0, -1]
            if step == 0:
                logits[[220, 50256]] = -torch.inf
            ids.append(int(logits.argmax()))
            if ids[-1] == 50256:
                break
        print(continuation.text)
        assert continuation.ids == tuple(ids[2:])


def test_the_decoder_in_pieces(pair: Path) -> None:
    result = validate(pair / "decoder", lengths=(1, 9), paddings=("none",))
    assert result.verdict == "pass", result.reasons
    assert result.metamorphic is not None and result.metamorphic.checks["pieces"] == 1

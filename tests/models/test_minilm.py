"""all-MiniLM-L6-v2: a bidirectional encoder with padding, converted from its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModel

import subquad
import third_party
from model_checks import (
    PADDINGS,
    HiddenValues,
    assert_moved,
    assert_unmoved,
    feeds_for,
    padding_mask,
)
from subquad.converter.pipeline import convert

pytestmark = pytest.mark.models

VOCABULARY = 30522


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, float]:
    """The artifact, the report, and the processor seconds of this process and its children."""
    output = tmp_path_factory.mktemp("minilm") / "artifact"
    before = sum(os.times()[:4])
    report = convert(third_party.minilm_l6(), output, force=("dense",))
    return output, report, sum(os.times()[:4]) - before


@pytest.fixture(scope="module")
def artifact(conversion: tuple[Path, Any, float]) -> Any:
    return subquad.load(conversion[0])


@pytest.fixture(scope="module")
def source() -> Any:
    return AutoModel.from_pretrained(third_party.minilm_l6()).eval()


def test_conversion_raises_all_within_a_minute(conversion: tuple[Path, Any, float]) -> None:
    _, report, processor_seconds = conversion
    assert len(report.sites) == 6
    assert {record["method"] for record in report.sites} == {"dense"}
    wall_seconds = sum(report.seconds.values())
    print(f"MiniLM conversion: {wall_seconds:.0f} s, {processor_seconds:.0f} s of processor time")
    # Processor time, which does not depend on what else the machine does.
    assert processor_seconds <= 60


@pytest.mark.parametrize("length", [1, 7, 64, 65, 128, 512])
def test_dense_equals_the_source_under_any_padding(artifact: Any, source: Any, length: int) -> None:
    rng = np.random.default_rng(length)
    mask = padding_mask(length, rng)
    ids = rng.integers(0, VOCABULARY, mask.shape)
    got = artifact.run(feeds_for(artifact.manifest, ids, mask))["last_hidden_state"]
    with torch.no_grad():
        want = source(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)
        ).last_hidden_state.numpy()
    errors = {name: np.abs(got[row] - want[row]).max() for row, name in enumerate(PADDINGS)}
    print(f"{length} tokens, largest difference from torch: {max(errors.values()):.1e}")
    # float32 on both sides, six layers, values up to about 2
    assert max(errors.values()) <= 1e-5, errors


def test_lee_correlation_is_the_source_s(artifact: Any) -> None:
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(384)
    corpus = third_party.lee()

    def embed(text: str) -> NDArray[np.float32]:
        ids = np.array([tokenizer.encode(text).ids])
        feeds = feeds_for(artifact.manifest, ids, np.ones_like(ids))
        hidden = artifact.run(feeds)["last_hidden_state"][0]
        return np.asarray(hidden.mean(axis=0))

    pearson = corpus.pearson(np.stack([embed(text) for text in corpus.documents]))
    print(f"Lee Pearson r = {pearson:.4f}")
    assert pearson == pytest.approx(0.656, abs=0.002)


@pytest.mark.parametrize("padding", ["right", "left", "holes"])
def test_masked_token_moves_nothing_at_any_site(
    conversion: tuple[Path, Any, float], padding: str
) -> None:
    hidden = HiddenValues(conversion[0])
    rng = np.random.default_rng(0)
    mask = padding_mask(96, rng)[[PADDINGS.index(padding)]]
    ids = rng.integers(0, VOCABULARY, mask.shape)
    changed = ids.copy()
    changed[mask == 0] = (changed[mask == 0] + 1) % VOCABULARY
    outputs, before = hidden.run(feeds_for(hidden.manifest, ids, mask))
    outputs_after, after = hidden.run(feeds_for(hidden.manifest, changed, mask))
    real = mask == 1
    assert len(before) == 6
    assert_unmoved(before, after, dict.fromkeys(before, real))
    _, seen_before = hidden.run(feeds_for(hidden.manifest, ids, np.ones_like(mask)))
    _, seen_after = hidden.run(feeds_for(hidden.manifest, changed, np.ones_like(mask)))
    assert_moved(seen_before, seen_after, real)
    state, state_after = outputs["last_hidden_state"], outputs_after["last_hidden_state"]
    assert np.array_equal(state[real], state_after[real])


def test_windows_confine_a_change_at_every_site(tmp_path: Path) -> None:
    """A token moves only what lies within its reach, which grows by one window per layer."""
    size, changed_at, length = 8, 100, 200
    report = convert(third_party.minilm_l6(), tmp_path / "artifact", force=(f"window:{size}",))
    assert {record["method"] for record in report.sites} == {"window"}
    hidden = HiddenValues(tmp_path / "artifact")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, length))
    changed = ids.copy()
    changed[0, changed_at] = (ids[0, changed_at] + 1) % VOCABULARY
    _, before = hidden.run(feeds_for(hidden.manifest, ids, np.ones_like(ids)))
    _, after = hidden.run(feeds_for(hidden.manifest, changed, np.ones_like(ids)))
    distance = np.abs(np.arange(length) - changed_at)[None]
    assert_unmoved(
        before, after, {site: distance > size * (layer + 1) for layer, site in enumerate(before)}
    )
    assert_moved(before, after, distance == size)

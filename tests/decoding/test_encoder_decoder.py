"""Encoder-decoders: what runs once and what runs per token write what torch writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import tiny_decoders
from subquad.converter.pipeline import convert
from subquad.runtime.errors import UsageError
from subquad.runtime.generate import generate
from subquad.runtime.pair import is_pair
from subquad.runtime.validate import validate

NEW = 9
START = 3


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=tiny_decoders.VOCABULARY,
        num_mel_bins=6,
        d_model=36,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_source_positions=21,
        max_target_positions=40,
        **_TOKENS,
    )
    return transformers.WhisperForConditionalGeneration(config)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=tiny_decoders.VOCABULARY,
        d_model=36,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=64,
        forced_eos_token_id=None,
        **_TOKENS,
    )
    return transformers.BartForConditionalGeneration(config)


_TOKENS: dict[str, Any] = {
    "decoder_start_token_id": START,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _inputs(family: str) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    if family == "whisper":
        return {"input_features": rng.standard_normal((2, 6, 42)).astype(np.float32)}
    mask = np.ones((2, 13), np.int64)
    mask[1, 8:] = 0
    return {
        "input_ids": rng.integers(1, tiny_decoders.VOCABULARY, (2, 13)),
        "attention_mask": mask,
    }


def _greedy(model: Any, inputs: dict[str, NDArray[Any]]) -> list[tuple[int, ...]]:
    """By torch, one whole pass per token."""
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    ids = torch.full((2, 1), START)
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(**given, decoder_input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    return [tuple(row) for row in ids[:, 1:].tolist()]


def _check(tmp_path: Path, family: str, sites: int) -> None:
    model = tiny_decoders.save({"whisper": whisper, "bart": bart}[family], tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "pair", cache=True)
    assert is_pair(tmp_path / "pair") and len(report.sites) == sites
    inputs = _inputs(family)
    np.savez(tmp_path / "inputs.npz", **inputs)  # type: ignore[arg-type]
    got = generate(tmp_path / "pair", arrays=tmp_path / "inputs.npz", max_new_tokens=NEW)
    assert [row.ids for row in got.rows] == _greedy(model, inputs)
    with pytest.raises(UsageError, match="either --input"):
        generate(tmp_path / "pair")
    with pytest.raises(UsageError, match="stays exact so far"):
        convert(tmp_path / "source", tmp_path / "other", cache=True, force=("window:4",))
    # An older pair may be overwritten, as an older artifact may.
    convert(tmp_path / "source", tmp_path / "pair", cache=True, overwrite=True)
    result = validate(tmp_path / "pair" / "decoder", lengths=(1, 7))
    assert result.verdict == "pass", result.reasons
    assert result.metamorphic is not None and result.metamorphic.checks["pieces"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sites"), [("whisper", 6), ("bart", 6)])
def test_pairs(tmp_path: Path, family: str, sites: int) -> None:
    _check(tmp_path, family, sites)

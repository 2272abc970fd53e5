"""The encoder of Whisper tiny.en, real speech, and what the whole model hears in it.

    subquad convert tests/support/whisper_encoder.py:encoder out

30 seconds of sound are always 1500 positions: 4 layers of bidirectional attention without a mask, 6
heads of 64. Radford et al., 2022, https://arxiv.org/abs/2212.04356.
"""

from __future__ import annotations

import wave
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

import third_party

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration

LENGTH = 1500
LONGEST_TEXT = 200
_RATE = 16000
_PIECE = 30 * _RATE

_START = (50257, 50362)
"""Start of a transcript, without times."""
_END = 50256


@cache
def model() -> WhisperForConditionalGeneration:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(third_party.whisper_tiny_en()).eval()


def encoder() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[str, dict[int, str]]]:
    """Module, example inputs and dynamic axes, as ``convert`` takes a factory."""
    example = torch.from_numpy(features("two_cities"))
    return _Hidden(model().model.encoder).eval(), (example,), {"input_features": {0: "batch"}}


class _Hidden(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_features).last_hidden_state
        return hidden


def recordings() -> list[str]:
    """Names of the recordings: two passages that are read aloud, a short one, and signals."""
    return sorted(path.stem for path in third_party.fetch("speech").glob("*.wav"))


def features(name: str, step: int = 30) -> NDArray[np.float32]:
    """Log-mel features ``[pieces, 80, 3000]`` of a recording.

    Args:
        name: of the recording.
        step: seconds from piece to piece; each is 30 s of it, the last filled up with silence.
    """
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=80)
    sound = _sound(third_party.fetch("speech") / f"{name}.wav")
    pieces = [sound[start : start + _PIECE] for start in range(0, len(sound), step * _RATE)]
    found = [
        extractor(piece, sampling_rate=_RATE, return_tensors="np").input_features[0]
        for piece in pieces
    ]
    return np.stack(found).astype(np.float32)


def transcribe(hidden: NDArray[np.float32]) -> str:
    """What the decoder of the source writes, the likeliest token each time.

    Args:
        hidden: of the encoder, for one piece: ``[1500, 384]``.
    """
    from tokenizers import Tokenizer
    from transformers.modeling_outputs import BaseModelOutput

    ids = list(_START)
    heard = BaseModelOutput(last_hidden_state=torch.from_numpy(hidden[None]))
    past = None
    with torch.no_grad():
        while len(ids) < LONGEST_TEXT:
            given = torch.tensor([ids if past is None else ids[-1:]])
            result = model()(encoder_outputs=heard, decoder_input_ids=given, cache=past)
            past, logits = result.past_key_values, result.logits[0, -1]
            if len(ids) == len(_START):
                logits[[220, _END]] = -torch.inf  # as in the generation settings of the source
            ids.append(int(logits.argmax()))
            if ids[-1] == _END:
                break
    tokenizer = Tokenizer.from_file(str(third_party.whisper_tiny_en() / "tokenizer.json"))
    return str(tokenizer.decode(ids)).strip()


def _sound(path: Path) -> NDArray[np.float32]:
    with wave.open(str(path)) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        sound = raw.reshape(-1, file.getnchannels()).mean(axis=1) / 32768
        rate = file.getframerate()
    wanted = np.arange(0, len(sound) / rate, 1 / _RATE)
    return np.asarray(np.interp(wanted, np.arange(len(sound)) / rate, sound), np.float32)

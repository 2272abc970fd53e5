"""The encoder of Whisper tiny.en, from a wheel that has it in CTranslate2's form, and real speech.

    subquad convert tests/support/whisper_encoder.py:encoder out

30 seconds of sound are always 1500 positions: 4 layers of bidirectional attention without a mask, 6
heads of 64. Radford et al., 2022, https://arxiv.org/abs/2212.04356.
"""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import third_party

LENGTH = 1500
_RATE = 16000
_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def encoder() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[str, dict[int, str]]]:
    """Module, example inputs and dynamic axes, as ``convert`` takes a factory."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    weights = dict(_read((third_party.fetch("whisper-ct2") / "model.bin").read_bytes()))
    size = weights["encoder/layer_norm/gamma"].shape[0]
    layers = sum(name.endswith("ffn/linear_0/weight") for name in weights if "encoder" in name)
    config = WhisperConfig(
        d_model=size,
        encoder_layers=layers,
        encoder_attention_heads=size // 64,
        encoder_ffn_dim=4 * size,
        num_mel_bins=weights["encoder/conv1/weight"].shape[1],
    )
    inner = WhisperEncoder(config)
    inner.load_state_dict(dict(_renamed(weights, layers)))
    module = _Hidden(inner).eval()
    example = torch.from_numpy(features()[:2])
    return module, (example,), {"input_features": {0: "batch"}}


class _Hidden(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_features).last_hidden_state
        return hidden


def features() -> NDArray[np.float32]:
    """Log-mel features of the recordings in pieces of 30 s, the rest silence: ``[n, 80, 3000]``."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=80)
    folder = third_party.fetch("speech")
    pieces = []
    for path in sorted(folder.glob("*.wav")):
        sound = _sound(path)
        for start in range(0, len(sound), 15 * _RATE):
            piece = sound[start : start + 30 * _RATE]
            if len(piece) >= 3 * _RATE:
                pieces.append(piece)
    found = [
        extractor(piece, sampling_rate=_RATE, return_tensors="np").input_features[0]
        for piece in pieces
    ]
    return np.stack(found).astype(np.float32)


def _sound(path: Path) -> NDArray[np.float32]:
    with wave.open(str(path)) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        sound = raw.reshape(-1, file.getnchannels()).mean(axis=1) / 32768
        rate = file.getframerate()
    wanted = np.arange(0, len(sound) / rate, 1 / _RATE)
    return np.asarray(np.interp(wanted, np.arange(len(sound)) / rate, sound), np.float32)


def _read(blob: bytes) -> Iterator[tuple[str, NDArray[Any]]]:
    """Variables of a CTranslate2 model file."""
    offset = 0

    def number(form: str) -> int:
        nonlocal offset
        (value,) = struct.unpack_from("<" + form, blob, offset)
        offset += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal offset
        length = number("H")
        offset += length
        return blob[offset - length : offset].rstrip(b"\0").decode()

    number("I"), text(), number("I")  # version, kind, revision
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = np.dtype(_DTYPES[number("B")])
        size = number("I")
        yield name, np.frombuffer(blob, dtype, size // dtype.itemsize, offset).reshape(shape)
        offset += size


def _renamed(weights: dict[str, NDArray[Any]], layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoder's, by the names of transformers."""

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(weights[name], np.float32))

    for name in ("conv1", "conv2"):
        yield f"{name}.weight", tensor(f"encoder/{name}/weight")
        yield f"{name}.bias", tensor(f"encoder/{name}/bias")
    yield "embed_positions.weight", tensor("encoder/position_encodings/encodings")
    norms = {"layer_norm": "encoder/layer_norm"}
    linears = {}
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"encoder/layer_{i}"
        norms[f"{ours}.self_attn_layer_norm"] = f"{theirs}/self_attention/layer_norm"
        norms[f"{ours}.final_layer_norm"] = f"{theirs}/ffn/layer_norm"
        linears[f"{ours}.self_attn.out_proj"] = f"{theirs}/self_attention/linear_1"
        linears[f"{ours}.fc1"] = f"{theirs}/ffn/linear_0"
        linears[f"{ours}.fc2"] = f"{theirs}/ffn/linear_1"
        merged = f"{theirs}/self_attention/linear_0"
        parts = zip(
            ("q_proj", "k_proj", "v_proj"),
            tensor(f"{merged}/weight").chunk(3),
            tensor(f"{merged}/bias").chunk(3),
            strict=True,
        )
        for name, weight, bias in parts:
            yield f"{ours}.self_attn.{name}.weight", weight
            if name != "k_proj":  # which has none
                yield f"{ours}.self_attn.{name}.bias", bias
    for ours, theirs in norms.items():
        yield f"{ours}.weight", tensor(f"{theirs}/gamma")
        yield f"{ours}.bias", tensor(f"{theirs}/beta")
    for ours, theirs in linears.items():
        yield f"{ours}.weight", tensor(f"{theirs}/weight")
        yield f"{ours}.bias", tensor(f"{theirs}/bias")

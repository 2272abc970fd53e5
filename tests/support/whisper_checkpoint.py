"""Whisper from CTranslate2's ``model.bin`` to a Hugging Face folder.

CTranslate2 keeps the projections of one attention in one matrix, and names of its own.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]

_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16, np.uint16)


def build(source: Path, target: Path) -> None:
    """Write ``source/model.bin`` as config, safetensors and tokenizer into ``target``."""
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    found = read_weights((source / "model.bin").read_bytes())
    width = found["encoder/layer_norm/gamma"].shape[0]
    counts = {
        side: sum(
            name.startswith(f"{side}/layer_") and name.endswith("ffn/linear_0/weight")
            for name in found
        )
        for side in ("encoder", "decoder")
    }
    heads = width // 64
    config = WhisperConfig(
        vocab_size=found["decoder/embeddings/weight"].shape[0],
        d_model=width,
        encoder_layers=counts["encoder"],
        decoder_layers=counts["decoder"],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=found["encoder/conv1/weight"].shape[1],
    )
    model = WhisperForConditionalGeneration(config)
    state = {name: torch.from_numpy(x) for name, x in renamed(found, counts).items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=50257,
        no_timestamps_token_id=50362,
        eos_token_id=50256,
        pad_token_id=50256,
        begin_suppress_tokens=[220, 50256],
    )
    model.save_pretrained(target)
    shutil.copy(source / "tokenizer.json", target / "tokenizer.json")


def read_weights(blob: bytes) -> Weights:
    """All variables of a ``model.bin`` by name."""
    place = 0

    def number(kind: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", blob, place)
        place += struct.calcsize(kind)
        return int(value)

    def text() -> str:
        nonlocal place
        length = number("H")
        value = blob[place : place + length].rstrip(b"\0").decode()
        place += length
        return value

    number("I"), text(), number("I")  # version, kind of model, revision
    found: Weights = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = np.dtype(_TYPES[number("B")])
        size = number("I")
        found[name] = np.frombuffer(blob, dtype, size // dtype.itemsize, place).reshape(shape)
        place += size
    for _ in range(number("I")):
        alias = text()
        found[alias] = found[text()]
    return found


def renamed(found: Weights, layers: dict[str, int]) -> Weights:
    """The parameters of transformers' model."""
    state: Weights = {}

    def put(name: str, source: str) -> None:
        state[name] = np.array(found[source], dtype=np.float32)

    def linear(name: str, source: str) -> None:
        put(f"{name}.weight", f"{source}/weight")
        if f"{source}/bias" in found:
            put(f"{name}.bias", f"{source}/bias")

    def norm(name: str, source: str) -> None:
        put(f"{name}.weight", f"{source}/gamma")
        put(f"{name}.bias", f"{source}/beta")

    def split(name: str, source: str, parts: tuple[str, ...]) -> None:
        for kind in ("weight", "bias"):
            whole = np.array(found[f"{source}/{kind}"], dtype=np.float32)
            for part, array in zip(parts, np.split(whole, len(parts)), strict=True):
                if kind == "weight" or part != "k_proj":
                    state[f"{name}.{part}.{kind}"] = array

    for number in (1, 2):
        linear(f"model.encoder.conv{number}", f"encoder/conv{number}")
    for side in ("encoder", "decoder"):
        put(f"model.{side}.embed_positions.weight", f"{side}/position_encodings/encodings")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for index in range(layers[side]):
            old, new = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            split(
                f"{new}.self_attn", f"{old}/self_attention/linear_0", ("q_proj", "k_proj", "v_proj")
            )
            linear(f"{new}.self_attn.out_proj", f"{old}/self_attention/linear_1")
            norm(f"{new}.self_attn_layer_norm", f"{old}/self_attention/layer_norm")
            if side == "decoder":
                split(f"{new}.encoder_attn", f"{old}/attention/linear_0", ("q_proj",))
                split(f"{new}.encoder_attn", f"{old}/attention/linear_1", ("k_proj", "v_proj"))
                linear(f"{new}.encoder_attn.out_proj", f"{old}/attention/linear_2")
                norm(f"{new}.encoder_attn_layer_norm", f"{old}/attention/layer_norm")
            linear(f"{new}.fc1", f"{old}/ffn/linear_0")
            linear(f"{new}.fc2", f"{old}/ffn/linear_1")
            norm(f"{new}.final_layer_norm", f"{old}/ffn/layer_norm")
    put("model.decoder.embed_tokens.weight", "decoder/embeddings/weight")
    return state

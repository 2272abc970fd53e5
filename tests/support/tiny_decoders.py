"""Small random decoders of transformers, saved, and what torch computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

VOCABULARY = 101
GAIN = 5.0  # the default initialisation is so flat that a wrong attention would not show
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Converted:
    """A model in torch, and its artifact."""

    model: Any
    artifact: Path


Make = Callable[..., Converted]


def llama() -> Any:
    """Grouped heads, rotary phases."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))


def mistral() -> Any:
    """Every layer sees a window of 6 tokens."""
    config = transformers.MistralConfig(**_SIZES, sliding_window=6)
    return transformers.MistralForCausalLM(config)


def gemma3() -> Any:
    """A layer with a window of 6 tokens, then one that sees everything."""
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **_SIZES, sliding_window=6, layer_types=layers, query_pre_attn_scalar=10
    )
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> Any:
    """Absolute positions."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=36,
        n_layer=2,
        n_head=3,
        n_positions=128,
        eos_token_id=None,
        bos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def save(build: Any, folder: Path) -> Any:
    """Save a random model that ``build`` makes; returns it in eval mode."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(GAIN)
    model.save_pretrained(folder)
    return model


def whole_pass(model: Any, ids: NDArray[np.int64], real: NDArray[np.bool_]) -> NDArray[Any]:
    """Logits of torch for all tokens at once; positions count real tokens."""
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    with torch.no_grad():
        result = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(real.astype(np.int64)),
            position_ids=torch.from_numpy(positions),
            use_cache=False,
        )
    logits: NDArray[Any] = result.logits.numpy()
    return logits

"""Tiny models behind publicly reported failures: hidden 32, two layers, four heads, 97 tokens.

Weights are random and scaled up, so that attention matters; the reference is the source model in
eager float32. A model is exported with TorchScript, the exporter that keeps least of what it means,
read back, and run exactly and with replacements.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from onnx_graphs import Runner
from subquad.converter.onnx_source import trace_onnx
from subquad.passes.canonicalise import canonicalise
from subquad.passes.plan import Request, make_plan
from subquad.passes.raise_attention import RaisedSites, raise_attention
from subquad.passes.replace import replace_sites

VOCABULARY, WIDTH, LAYERS, HEADS = 97, 32, 2, 4
GAIN = 4.0
Axes = Mapping[str, Mapping[int, str]]

_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = {
    **_COMMON,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_SEQUENCES = {
    **_COMMON,
    "d_model": WIDTH,
    "decoder_start_token_id": 2,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
}
_IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
}
_N_NAMES = {**_COMMON, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128}
# name -> class, configuration class, options
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _N_NAMES),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_N_NAMES, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_WIDE, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {**_COMMON, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {**_COMMON, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 128},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_WIDE,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_WIDE, "num_key_value_heads": 2, "head_dim": 12},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 10,
            "d_ff": 48,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQUENCES),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", _IMAGE),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {**_IMAGE, "vision_use_head": False}),
}


def build(name: str, spelling: str = "eager", **more: Any) -> Any:
    """The model in eval mode, with more options; always the same weights."""
    model_class, config_class, options = _MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**options, **more})
    config._attn_implementation = spelling
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and name != "t5":  # T5 starts out wide
                parameter.mul_(GAIN)
    return model.eval()


# --- what people write around a model to export it -------------------------------------------


class FirstOutput(nn.Module):
    """Positional inputs under these names, the first output only."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *arguments: Tensor) -> Tensor:
        result = self.model(**dict(zip(self.names, arguments, strict=True)))
        return result if isinstance(result, Tensor) else result[0]


class PositionsOfMask(nn.Module):
    """A decoder that is told the positions of real tokens, counted along the mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits: Tensor = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=False,
        )[0]
        return logits


class WithPast(nn.Module):
    """A decoding step over flat keys and values of earlier tokens; returns those of all."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> Any:
        cache = filled_cache(past)
        logits = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
        )[0]
        return (logits, *flat_cache(cache))


class EncoderOnly(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        return hidden


class DecoderStep(nn.Module):
    """A decoder over encoder states: the first step, or a later one with flat pasts.

    ``past`` holds key and value of every layer's self attention, then those of its cross attention.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, decoder_input_ids: Tensor, states: Tensor, attention_mask: Tensor, *past: Tensor
    ) -> Any:
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        half = len(past) // 2
        caches = (filled_cache(past[:half]), filled_cache(past[half:]))
        cache = EncoderDecoderCache(*caches)
        logits = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            past_key_values=cache,
            use_cache=True,
        )[0]
        return (logits, *(tensor for part in caches for tensor in flat_cache(part)))


def filled_cache(past: Sequence[Tensor]) -> Any:
    """A cache of keys and values in turns, layer by layer."""
    cache = transformers.DynamicCache()
    for layer in range(len(past) // 2):
        cache.update(past[2 * layer], past[2 * layer + 1], layer)
    return cache


def flat_cache(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def past_names(layers: int, *kinds: str) -> list[str]:
    """Names of the flat pasts of these kinds of attention, in order."""
    kinds = kinds or ("past",)
    return [f"{k}.{n}.{part}" for k in kinds for n in range(layers) for part in ("key", "value")]


# --- reading -----------------------------------------------------------------------------------


@dataclass
class Read:
    """An exported model as recognised.

    Attributes:
        result: what was raised and what was declined.
    """

    result: RaisedSites
    _exact: ir.Model = field(repr=False)
    _source: ir.Model = field(repr=False)

    @staticmethod
    def of(path: Path) -> Read:
        traced = trace_onnx(path)
        canonicalise(traced.model)
        return Read(raise_attention(traced.model), traced.model, traced.reference)

    def run(self, *force: str) -> Runner:
        """Attention exact, or replaced as ``convert --force`` would."""
        model = self._exact.clone()
        requests = [Request.parse(text, None) for text in force]
        replace_sites(model, make_plan(self.result.sites, requests))
        return Runner(model)

    def source(self) -> Runner:
        """The exported graph as it is."""
        return Runner(self._source)

    def meanings(self) -> list[str]:
        """``causal, key padding (cross)``, in graph order."""
        return [s.describe() + ("" if s.is_self else " (cross)") for s in self.result.sites]


def export(module: nn.Module, inputs: Mapping[str, Tensor], axes: Axes, *, opset: int = 17) -> Read:
    """Through a file of TorchScript's exporter; only the graph is kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_file(module, inputs, axes, path, opset=opset)
        return Read.of(path)


def export_file(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: Axes, path: Path, *, opset: int = 17
) -> None:
    """Write ``path`` with TorchScript's exporter; outputs are ``output0`` and so on."""
    outputs = [f"output{number}" for number in range(len(_outputs(module, inputs)))]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes={name: dict(dims) for name, dims in axes.items()},
            opset_version=opset,
            dynamo=False,
        )


def _outputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        result = module.eval()(*inputs.values())
    return (result,) if isinstance(result, Tensor) else tuple(result)


def eager(module: nn.Module, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """What the source model says."""
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    return [tensor.numpy() for tensor in _outputs(module, tensors)]


def tensors(feeds: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in feeds.items()}


def relative(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest difference relative to the largest value."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())

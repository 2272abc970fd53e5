"""An encoder-decoder of transformers as two graphs: what runs once, and what runs per token.

| graph | inputs | outputs |
|---|---|---|
| encoder | those of the encoder | ``present.N.encoder.key``, ``.value``: what layer N of the decoder reads of it |
| decoder | ``input_ids``, ``attention_mask``, ``position_ids`` of the decoder, as for a decoder alone; ``past_key_values.N.decoder.*``; ``past_key_values.N.encoder.*`` | ``logits``, ``present.N.decoder.*`` |

Names are Optimum's. The first step is a step with an empty past, so it needs no graph of its own.
The second graph never sees what the encoder returned, only the keys and values made from it.
"""  # noqa: E501

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from subquad.converter.cached_decoder import CachedDecoder, FlatLayer, cache_argument
from subquad.runtime.errors import UnsupportedModelError
from subquad.runtime.pair import DECODER, ENCODER
from subquad.runtime.past import PAST, TOTAL

_BATCH, _LENGTH, _PAST = 2, 11, 7
_PARTS = ("key", "value")

Tensors = dict[str, torch.Tensor]


class FreshLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of the cache that nothing stands in; the first update is kept as it is."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] if self.is_initialized else 0


def encoder_decoder(
    model: Any,
    what: str,
    example: tuple[Tensors, dict[str, dict[int, str]]],
    longest: int | None,
    vocabulary: int,
) -> dict[str, CachedDecoder]:
    """Both graphs of a loaded encoder-decoder.

    Args:
        model: in eval mode.
        what: how error messages call it.
        example: inputs of a whole pass, and their dynamic axes; those of the decoder are not used.
        longest: positions of the decoder, where known.
        vocabulary: how many token numbers are valid.

    Raises:
        UnsupportedModelError: it keeps no cache of keys and values.
    """
    accepted = inspect.signature(model.forward).parameters
    argument = cache_argument(accepted)
    if argument is None or "encoder_outputs" not in accepted:
        raise UnsupportedModelError(
            f"{what}: the model takes no cache or no encoder outputs. Convert it without --cache."
        )
    given = {name: x for name, x in example[0].items() if not name.startswith("decoder_")}
    generator = torch.Generator().manual_seed(0)
    sample = {name: _random(name, x, vocabulary, generator) for name, x in given.items()}
    first = _changed(model, lambda self, inputs: _encode(self, model, argument, inputs))
    with torch.no_grad():
        crossed = first(sample)
    if not crossed or any(tensor.dim() != 4 for tensor in crossed.values()):
        raise UnsupportedModelError(f"{what}: the decoder keeps no keys and values of the encoder.")
    axes = {name: dims for name, dims in example[1].items() if name in given}
    source = any("length" in dims.values() for dims in axes.values())
    encoder = CachedDecoder(first, given, axes, sample)
    layers = len(crossed) // 2
    second = _changed(
        model, lambda self, inputs: _decode(self, model, argument, layers, accepted, inputs)
    )
    length, past = _LENGTH, _PAST
    if longest is not None and longest < length + past:
        length, past = max(2, longest // 2), max(2, longest // 2 - 1)
    inputs, dynamic = _decoder_inputs(crossed, accepted, length, past)
    mask = given.get("attention_mask")
    if mask is not None:
        inputs["encoder_attention_mask"] = torch.ones(_BATCH, mask.shape[1], dtype=torch.int64)
        dynamic["encoder_attention_mask"] = {0: "batch", 1: "source"}
    if source:
        for name in inputs:
            if ".encoder." in name:
                dynamic[name][2] = "source"
    decoder_sample = {
        name: _random(name, tensor, vocabulary, generator) for name, tensor in inputs.items()
    }
    return {ENCODER: encoder, DECODER: CachedDecoder(second, inputs, dynamic, decoder_sample)}


def _encode(self: Any, model: Any, argument: str, inputs: Tensors) -> Tensors:
    rows = next(iter(inputs.values())).shape[0]
    start = torch.zeros(rows, 1, dtype=torch.int64)
    count = _decoder_layers(model)
    cache = EncoderDecoderCache(
        Cache(layers=[FreshLayer() for _ in range(count)]),
        Cache(layers=[FreshLayer() for _ in range(count)]),
    )
    type(model).forward(
        self, **inputs, decoder_input_ids=start, **{argument: cache}, use_cache=True
    )
    outputs = {}
    for number, layer in enumerate(cache.cross_attention_cache.layers):
        if layer.is_initialized:
            outputs[f"present.{number}.encoder.key"] = layer.keys
            outputs[f"present.{number}.encoder.value"] = layer.values
    return outputs


def _decode(
    self: Any,
    model: Any,
    argument: str,
    layers: int,
    accepted: Mapping[str, object],
    inputs: Tensors,
) -> Tensors:
    def pasts(whose: str) -> list[FlatLayer]:
        return [
            FlatLayer(*(inputs[f"past_key_values.{n}.{whose}.{part}"] for part in _PARTS))
            for n in range(layers)
        ]

    own, crossed = Cache(layers=pasts("decoder")), pasts("encoder")
    cache = EncoderDecoderCache(own, Cache(layers=crossed))
    keys = crossed[0].keys
    # Nobody reads it: the keys and values made from it are in the cache.
    nothing = keys.new_zeros(keys.shape[0], keys.shape[2], _width(model))
    given: dict[str, Any] = {"decoder_input_ids": inputs["input_ids"]}
    for name in ("attention_mask", "position_ids"):
        if name in inputs:
            given[f"decoder_{name}"] = inputs[name]
    if "encoder_attention_mask" in inputs:
        given["attention_mask"] = inputs["encoder_attention_mask"]
    result = type(model).forward(
        self,
        **given,
        encoder_outputs=BaseModelOutput(last_hidden_state=nothing),
        **{argument: cache},
        use_cache=True,
    )
    outputs = {"logits": result["logits"]}
    for number, layer in enumerate(own.layers):
        outputs[f"present.{number}.decoder.key"] = layer.keys
        outputs[f"present.{number}.decoder.value"] = layer.values
    return outputs


def _decoder_inputs(
    crossed: Tensors, accepted: Mapping[str, object], length: int, past: int
) -> tuple[Tensors, dict[str, dict[int, str]]]:
    inputs = {"input_ids": torch.ones(_BATCH, length, dtype=torch.int64)}
    axes: dict[str, dict[int, str]] = {"input_ids": {0: "batch", 1: "length"}}
    if "decoder_attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones(_BATCH, past + length, dtype=torch.int64)
        axes["attention_mask"] = {0: "batch", 1: TOTAL}
    if "decoder_position_ids" in accepted:
        inputs["position_ids"] = torch.arange(past, past + length).expand(_BATCH, -1).contiguous()
        axes["position_ids"] = {0: "batch", 1: "length"}
    for name, tensor in crossed.items():
        heads, dim = tensor.shape[1], tensor.shape[3]
        encoded = name.replace("present", "past_key_values")
        own = encoded.replace(f".{ENCODER}.", f".{DECODER}.")
        inputs[own] = torch.zeros(_BATCH, heads, past, dim)
        axes[own] = {0: "batch", 2: PAST}
        inputs[encoded] = torch.zeros(_BATCH, heads, tensor.shape[2], dim)
        axes[encoded] = {0: "batch"}
    return inputs, axes


def _random(
    name: str, tensor: torch.Tensor, vocabulary: int, generator: torch.Generator
) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator)
    if name == "input_ids":
        return torch.randint(vocabulary, tensor.shape, generator=generator)
    return tensor


def _changed(model: Any, forward: Callable[[Any, Tensors], Tensors]) -> torch.nn.Module:
    """``model`` with another ``forward``, see ``cached_decoder``."""

    def with_inputs(self: Any, inputs: Tensors) -> Tensors:
        return forward(self, inputs)

    changed: torch.nn.Module = copy.copy(model)
    original = type(model)
    changed.__class__ = type(original.__name__, (original,), {"forward": with_inputs})
    return changed


def _decoder_layers(model: Any) -> int:
    config = model.config
    for name in ("decoder_layers", "num_decoder_layers", "num_hidden_layers"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    raise UnsupportedModelError(f"{type(model).__name__}: the config names no decoder layers.")


def _width(model: Any) -> int:
    return int(getattr(model.config, "d_model", None) or model.config.hidden_size)
